"""Replication by Libra and number of parts (DistGNN, Table 4), and the share of nodes that are split (Table 6).

    python -m experiments.distgnn.replication --data DATA --out figures
    python -m experiments.distgnn.replication --graphs cornell5 --data DATA --libraries pygdist DGL --dgl SITE

With DGL among the libraries, Libra as DGL has it cuts the same edges.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from experiments.catgnn.graphs import show, write
from pygdist.graph import EdgeStream, load_graph, prepare
from pygdist.partition.libra import LibraPartitioner

#: By name: the data set, its arguments, and the paper's replication by number of parts.
GRAPHS: dict[str, tuple[str, dict[str, Any], dict[int, float]]] = {
    "reddit-like": ("reddit-like", {"scale": 0.1}, {2: 1.75, 4: 2.94, 8: 4.66, 16: 6.93}),
    "products-like": (
        "products-like", {"scale": 0.2}, {2: 1.49, 4: 2.16, 8: 2.98, 16: 3.90, 32: 4.85, 64: 5.74},
    ),
    "cornell5": ("LINKXDataset", {"name": "cornell5"}, {}),
}  # fmt: skip
BOUNDS = {"1.05": 1.05, "none": float("inf")}  # most edges of a part, in mean numbers of edges


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--data", type=Path, help="folder with LINKXDataset/, for cornell5")
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    cli.add_argument("--scale", type=float, help="scale of generated graphs, in place of 0.1 and 0.2")
    cli.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    cli.add_argument("--bounds", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    cli.add_argument("--libraries", nargs="+", choices=["pygdist", "DGL"], default=["pygdist"])
    cli.add_argument("--dgl", type=Path, help="for DGL: folder that a wheel of DGL 2.1 was unpacked into")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def edges_of(name: str, options: argparse.Namespace) -> EdgeStream:
    """Return the edges of a graph, in both directions, each once."""
    dataset, arguments, _ = GRAPHS[name]
    if name == "cornell5":
        if options.data is None:
            raise SystemExit("cornell5: give --data, a folder with LINKXDataset/ in the layout of PyG's dataset class")
        arguments = {**arguments, "root": str(options.data / dataset)}
    elif options.scale is not None:
        arguments = {"scale": options.scale}
    data, _ = prepare(load_graph(dataset, **arguments), symmetrize=True, remove_duplicates=True)
    return EdgeStream.from_data(data)


def figures_of(edges: np.ndarray, part: np.ndarray, num_nodes: int, num_parts: int) -> dict[str, float]:
    """Return the figures of a vertex-cut.

    Args:
        edges: Both ends of each edge; ``(2, E)``.
        part: The part of each edge; ``(E,)``.
        num_nodes: Number of nodes.
        num_parts: Number of parts.
    """
    held = np.zeros((num_parts, num_nodes), dtype=bool)
    for ends in edges:
        held[part, ends] = True
    copies, load = held.sum(0), np.bincount(part, minlength=num_parts)
    placed = (copies > 0).sum()
    return {
        "replication": float(copies.sum() / placed),
        "split_share": float((copies > 1).sum() / placed),
        "edges_balance": float(load.max() / load.mean()),
        "rows_max": int(held.sum(1).max()),
    }


def libra_of_dgl(site: Path, edges: np.ndarray, num_nodes: int, num_parts: int) -> np.ndarray:
    """Return the part of each edge by DGL's own Libra."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "edges.npy", edges)
        sizes = [str(site), str(folder / "edges.npy"), str(num_nodes), str(num_parts), str(folder / "part.npy")]
        script = Path(__file__).with_name("dgl_libra.py")
        done = subprocess.run([sys.executable, str(script), *sizes], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--dgl: {done.stderr.strip().splitlines()[-1]}")
        part: np.ndarray = np.load(folder / "part.npy")
        return part


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if "DGL" in options.libraries and options.dgl is None:
        raise SystemExit("--libraries DGL: give --dgl, a folder that the wheel of dgl 2.1.0 was unpacked into")
    rows: list[dict[str, Any]] = []
    for name in options.graphs:
        stream, published = edges_of(name, options), GRAPHS[name][2]
        edges = np.concatenate(list(stream.chunks()), axis=1)
        bounds = {"pygdist": options.bounds, "DGL": ["none"]}
        libraries = [(library, bound) for library in options.libraries for bound in bounds[library]]
        runs = [(parts, *library) for parts in options.parts for library in libraries]
        for parts, library, bound in track(runs, description=name):
            start, part = time.perf_counter(), np.empty(stream.num_edges, dtype=np.int32)
            if library == "DGL":
                part = libra_of_dgl(options.dgl, edges, stream.num_nodes, parts)
            else:
                LibraPartitioner(balance=min(BOUNDS[bound], float(parts))).cut(stream, parts, part)
            seconds = time.perf_counter() - start
            rows.append(
                {
                    "graph": name, "nodes": stream.num_nodes, "edges": stream.num_edges, "parts": parts,
                    "library": library, "bound": bound, "published": published.get(parts, ""),
                    **figures_of(edges, part, stream.num_nodes, parts), "seconds": seconds,
                }
            )  # fmt: skip
            write(rows, options.out / "replication.csv", threads=1)
    show(rows, "Replication by Libra")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
