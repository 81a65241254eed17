"""The graphs of these experiments, as streams of edges; printing and writing of tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch_geometric.data import Data

from experiments.machine import cores, provenance
from pygdist.graph import EdgeGenerator, EdgeStream, degree_corrected_sbm, load_graph

REAL = {"Cora": "Planetoid", "CiteSeer": "Planetoid", "cornell5": "LINKXDataset"}
SBM: dict[str, dict[str, Any]] = {
    "sbm-sparse": {"num_nodes": 20_000, "num_classes": 1000, "avg_degree": 6, "homophily": 0.95},
    "sbm-20k": {"num_nodes": 20_000, "num_classes": 40, "avg_degree": 12, "homophily": 0.8},
    "sbm-100k": {"num_nodes": 100_000, "num_classes": 200, "avg_degree": 20, "homophily": 0.8},
}
GENERATED: dict[str, dict[str, Any]] = {
    "communities-200k": {"num_nodes": 200_000, "num_edges": 4_000_000, "num_communities": 200},
}
GRAPHS = (*REAL, *SBM, *GENERATED)


def edges_of(name: str, data: Path | None) -> EdgeStream:
    """Return the edges of a graph as a stream; ``data`` has the folders of PyG's dataset classes for real graphs."""
    if name in GENERATED:
        generator = EdgeGenerator(**GENERATED[name])
        return EdgeStream(generator.read(0, generator.num_edges), num_nodes=generator.num_nodes)
    if name in SBM:
        return EdgeStream.from_data(degree_corrected_sbm(num_features=1, **SBM[name]))
    if data is None or not (data / REAL[name]).is_dir():
        raise SystemExit(f"{name}: give --data, a folder with {REAL[name]}/ in the layout of PyG's dataset class")
    return EdgeStream.from_data(load_graph(REAL[name], root=str(data / REAL[name]), name=name))


def communities(num_nodes: int, num_edges: int, num_communities: int, num_features: int, inside: float = 0.995) -> Data:
    """Return a graph with communities, random features and random labels, to measure memory."""
    edges = EdgeGenerator(num_nodes, num_edges, num_communities=num_communities, inside=inside, undirected=True)
    generator = torch.Generator().manual_seed(0)
    return Data(
        edge_index=torch.from_numpy(edges.read(0, edges.num_edges)),
        x=torch.randn(num_nodes, num_features, generator=generator),
        y=torch.randint(10, (num_nodes,), generator=generator),
    )


def rows_before(path: Path, case: Sequence[str]) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of an earlier run's table, by the columns that identify a training."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in case): row for row in csv.DictReader(file)}


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 180).print(table)


def write(rows: Iterable[Mapping[str, Any]], path: Path, *, threads: int | None = None) -> None:
    """Write a CSV; add the columns of :func:`~experiments.machine.provenance` that rows lack.

    Args:
        rows: Rows with the same columns.
        path: The file.
        threads: Number of threads that measured. Default: all cores.
    """
    facts = provenance(threads or cores())
    rows = [{**row, **{name: fact for name, fact in facts.items() if name not in row}} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
