"""``pygdist partition``: partition a graph once, look at the result, write the parts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from torch_geometric.data import Data

from pygdist.commands.train import Parser
from pygdist.errors import InputError
from pygdist.graph import GraphFiles, Progress, load_graph, prepare
from pygdist.partition import DeviceMemory, PartitionMetrics, partition_graph

__all__ = ["partition", "run"]

_MOST_ROWS = 32


def partition(
    dataset: str | None = None,
    dataset_args: dict[str, Any] | None = None,
    input: Path | None = None,
    features: Path | None = None,
    labels: Path | None = None,
    num_nodes: int | None = None,
    relabel: bool | None = None,
    method: str = "chunk",
    method_args: dict[str, Any] | None = None,
    parts: int | Literal["auto"] = 2,
    devices: int | None = None,
    device_memory: float | None = None,
    reserve: float | None = None,
    hops: int = 1,
    placement: Literal["nodes", "replicas"] | None = None,
    out: Path = Path("parts"),
    symmetrize: bool = False,
    remove_duplicates: bool = False,
    remove_self_loops: bool = False,
    split: tuple[float, float, float] | None = None,
    split_seed: int = 0,
    num_classes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Partition a graph and write the parts to a folder, for ``--data.store`` of the other commands.

    Args:
        dataset: As in ``fit``: a PyG dataset by class path or name, an OGB name, a folder of .npy arrays, a generator.
            It is loaded whole.
        dataset_args: Arguments of the dataset class or generator.
        input: In place of a dataset, a file of edges, read as a stream and never held whole: .npy of shape (2, E) or
            (E, 2), text (.txt, .csv, .tsv, also with .gz), .parquet; or a folder of .npy arrays.
        features: A .npy file with a row for each node, to go with the input.
        labels: A .npy file with a label for each node, to go with the input.
        num_nodes: Number of nodes of the input. By default the rows of features or labels, else what the edges tell.
        relabel: Number the nodes that have edges from 0 and keep the map (ids.npy). By default this happens where fewer
            than half of the ids up to the largest have edges and nothing else says how many nodes there are.
        method: Who owns which node: a name or the class path of a Partitioner.
        method_args: Arguments of the method.
        parts: Number of parts, one for each process of a later run; or auto, for as few as fit the devices.
        devices: Number of devices that the parts are for, with auto; 1 by default.
        device_memory: GiB of memory of each, with auto.
        reserve: Share of the memory that training needs for itself, with auto; two thirds by default.
        hops: How far the halo of a part reaches.
        placement: What a part has of its halo. nodes: which rows it is, for training that fetches these. replicas:
            their features and edges too, for training on its own. By default nodes for one hop, replicas for more.
        out: The folder to write; it appears when it is complete.
        symmetrize: Add the reverse of every edge.
        remove_duplicates: Merge parallel edges.
        remove_self_loops: Drop edges from a node to itself.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks; a
            dataset without masks is split 50/25/25 by default.
        split_seed: The split is drawn from it.
        num_classes: Stated number of classes; labels beyond it are an error.
        overwrite: Replace a finished folder.
        progress: Shows every pass over the edges.

    Returns:
        What ``meta.json`` says.
    """
    options: dict[str, Any] = {
        "symmetrize": symmetrize,
        "remove_duplicates": remove_duplicates,
        "remove_self_loops": remove_self_loops,
        "split": split,
        "split_seed": split_seed,
        "num_classes": num_classes,
    }
    of_files = {"features": features, "labels": labels, "num_nodes": num_nodes, "relabel": relabel}
    if (dataset is None) == (input is None):
        raise InputError("give either --dataset or --input; see pygdist partition --help")
    source: Data | GraphFiles
    notes: list[str] = []
    if input is not None:
        if dataset_args:
            raise InputError("--dataset_args goes with --dataset, not with --input")
        source = GraphFiles(edges=input, **of_files, **options)  # type: ignore[arg-type]
    else:
        assert dataset is not None
        if given := [name for name, value in of_files.items() if value is not None]:
            raise InputError(f"--{given[0]} goes with --input, not with --dataset")
        source, notes = prepare(load_graph(dataset, **(dataset_args or {})), **options)
    return partition_graph(
        source,
        out,
        num_parts=_num_parts(parts, devices, device_memory, reserve),
        partitioner=method,
        notes=notes,
        num_classes=num_classes,
        num_hops=hops,
        placement=placement,
        overwrite=overwrite,
        progress=progress,
        **(method_args or {}),
    )


def _num_parts(
    parts: int | Literal["auto"], devices: int | None, device_memory: float | None, reserve: float | None
) -> int | DeviceMemory:
    of_auto = {"devices": devices, "device_memory": device_memory, "reserve": reserve}
    if parts != "auto":
        if given := [name for name, value in of_auto.items() if value is not None]:
            raise InputError(f"--{given[0]} goes with --parts=auto")
        return parts
    if device_memory is None or not 0 < device_memory < math.inf:
        raise InputError("--parts=auto needs --device_memory, in GiB, and --devices if there are several")
    known = {name: value for name, value in (("devices", devices), ("reserve", reserve)) if value is not None}
    return DeviceMemory(**{"devices": 1, **known}, bytes=math.ceil(device_memory * 2**30))  # type: ignore[arg-type]


def run(command: str, arguments: list[str]) -> int:
    """The command line of :func:`partition`."""
    parser = Parser(prog="pygdist partition", description=(partition.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(partition, as_group=False, skip={"progress"})
    parser.add_argument("--json", action="store_true", help="print meta.json's figures on standard output, alone")
    options = parser.parse_args(arguments).as_dict()
    as_json = options.pop("json")
    # whatever a dataset class prints while it downloads
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        meta = partition(**options, progress=Progress())
    if as_json:
        sys.stdout.write(json.dumps(meta, indent=2) + "\n")
    else:
        _print(meta, options["out"])
    return 0


def _print(meta: dict[str, Any], out: Path) -> None:
    metrics = PartitionMetrics.from_meta(meta)
    table = Table(title=f"{out}: {meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges in {meta['num_parts']} parts")
    for column in ("part", "nodes", "edges", "training nodes", "halo rows", "rows sent per hop"):
        table.add_column(column, justify="right")
    columns = (metrics.num_nodes, metrics.num_edges, metrics.num_train, metrics.num_halo, metrics.rows.sum(axis=1))
    for part, row in enumerate(zip(*columns, strict=True)):
        if part < _MOST_ROWS or part == metrics.num_parts - 1:
            table.add_row(str(part), *(f"{value:,}" for value in row))
        elif part == _MOST_ROWS:
            table.add_row(*["..."] * 6)
    console = Console()
    console.print(table)
    full, plain = meta["replication_factor_full"], meta["replication_factor"]
    cut = "" if plain == full else f" ({plain:.3f} as the edges were placed)"
    console.print(f"{meta['method']}: replication factor {full:.3f}{cut}, {meta['edge_cut']:,} edges cut")
    console.print(_work(meta, metrics))
    console.print(f"train on it with --data.store={out} --trainer.devices={meta['num_parts']}")


def _work(meta: dict[str, Any], metrics: PartitionMetrics) -> str:
    """What it took, what it leaves to do, and how evenly."""
    said = []
    if "num_clusters" in meta:
        said.append(f"{meta['num_clusters']:,} clusters merged into {meta['num_merged_clusters']:,}")
    balance = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in metrics.balance.items())
    said.append(f"balance (largest over mean): {balance}")
    volume = f" ({meta['bytes_per_layer'] / 1e6:,.1f} MB of features)" if meta["num_features"] else ""
    said.append(f"{meta['rows_per_hop']:,} rows cross in a layer{volume}")
    if meta["placement"] == "replicas":
        hops = [sum(one["halo_per_hop"][hop] for one in meta["parts"]) for hop in range(meta["num_hops"])]
        said.append("halo rows by hop: " + ", ".join(f"{rows:,}" for rows in hops))
    rate = f"{meta['edges_per_second'] / 1e6:,.1f} million edges/s"
    said.append(f"assigned in {meta['seconds']:.2f} s, {rate}; peak memory {meta['peak_rss_bytes'] / 2**30:.2f} GiB")
    return "\n".join(said)
