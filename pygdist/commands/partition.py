"""``pygdist partition``: partition a graph once, look at the result, write the parts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from pygdist.commands.parser import Parser
from pygdist.errors import InputError

if TYPE_CHECKING:  # torch, which --help does without
    from torch_geometric.data import Data

    from pygdist.graph import GraphFiles
    from pygdist.partition import DeviceMemory, PartitionMetrics

__all__ = ["Graph", "PartCount", "Preparation", "partition", "run"]

_MOST_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph: a dataset or an input file.

    Args:
        dataset: As in ``fit``: a PyG dataset by class path or name, an OGB name, a folder of .npy arrays, or a
            generator. It is loaded whole.
        dataset_args: Arguments of the dataset class or generator.
        input: In place of a dataset, a file of edges, which is read as a stream and never held whole: .npy of shape
            (2, E) or (E, 2), text (.txt, .csv, .tsv, also with .gz), .parquet; or a folder of .npy arrays.
        features: With --input, a .npy file with a row for each node.
        labels: With --input, a .npy file with a label for each node.
        num_nodes: With --input, the number of nodes. By default the number of features or labels, else the largest id
            plus one.
        relabel: With --input, number the nodes that have edges from 0 and keep the map (ids.npy). By default this
            happens if fewer than half of the ids have edges and neither features, labels nor --num_nodes are given.
    """

    dataset: str | None = None
    dataset_args: dict[str, Any] | None = None
    input: Path | None = None
    features: Path | None = None
    labels: Path | None = None
    num_nodes: int | None = None
    relabel: bool | None = None

    def source(self, preparation: Preparation) -> tuple[Data | GraphFiles, list[str]]:
        """Return the prepared graph, and a sentence for each change that was made to it.

        Raises:
            InputError: If not exactly one of ``dataset`` and ``input`` is given, an option goes with the other one, or
                the dataset cannot be used.
        """
        from pygdist.graph import GraphFiles, load_graph, prepare

        if (self.dataset is None) == (self.input is None):
            raise InputError("give either --dataset or --input; see pygdist partition --help")
        files = {name: getattr(self, name) for name in ("features", "labels", "num_nodes", "relabel")}
        if self.input is not None:
            if self.dataset_args:
                raise InputError("--dataset_args goes with --dataset, not with --input; leave it out")
            return GraphFiles(edges=self.input, **files, **vars(preparation)), []
        _refuse_given(files, "goes with --input, not with --dataset; leave it out")
        assert self.dataset is not None
        return prepare(load_graph(self.dataset, **(self.dataset_args or {})), **vars(preparation))


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Changes to the graph.

    Args:
        symmetrize: Add the reverse of every edge.
        remove_duplicates: Merge parallel edges.
        remove_self_loops: Drop edges from a node to itself.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks. A
            dataset without masks is split 50/25/25 by default.
        split_seed: Seed of the split.
        num_classes: Number of classes; larger labels are an error. By default the largest label plus one.
    """

    symmetrize: bool = False
    remove_duplicates: bool = False
    remove_self_loops: bool = False
    split: tuple[float, float, float] | None = None
    split_seed: int = 0
    num_classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PartCount:
    """Number of parts.

    Args:
        parts: Number of parts, one for each process of a later run; or auto, for as few as fit the devices.
        devices: With auto, the number of devices. 1 by default.
        device_memory: With auto, the memory of each device, in GiB.
        reserve: With auto, the share of the memory that training needs for itself. Two thirds by default.
    """

    parts: int | Literal["auto"] = 2
    devices: int | None = None
    device_memory: float | None = None
    reserve: float | None = None

    def resolve(self) -> int | DeviceMemory:
        """Return the number of parts, or the memory that determines it.

        Raises:
            InputError: If an option of ``auto`` is missing, or given without it.
        """
        options = {"devices": self.devices, "reserve": self.reserve}
        if self.parts != "auto":
            _refuse_given({**options, "device_memory": self.device_memory}, "goes with --parts=auto")
            return self.parts
        if self.device_memory is None or not 0 < self.device_memory < math.inf:
            raise InputError(
                "--parts=auto needs --device_memory, the GiB of one device, and --devices if there are several"
            )
        from pygdist.partition import DeviceMemory

        sizes: dict[str, Any] = {"devices": 1, **{name: value for name, value in options.items() if value is not None}}
        return DeviceMemory(**sizes, bytes=math.ceil(self.device_memory * 2**30))


def _refuse_given(options: dict[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} {reason}")


def partition(
    graph: Graph,
    preparation: Preparation,
    count: PartCount,
    method: str = "chunk",
    method_args: dict[str, Any] | None = None,
    hops: int = 1,
    placement: Literal["nodes", "replicas"] | None = None,
    out: Path = Path("parts"),
    overwrite: bool = False,
) -> dict[str, Any]:
    """The partition.

    Args:
        graph: The graph.
        preparation: Changes to it before it is partitioned.
        count: Number of parts.
        method: Who owns which node: the name or the class path of a Partitioner.
        method_args: Arguments of the method.
        hops: Number of hops that the halo of a part reaches.
        placement: What a part holds of its halo. nodes: the ids of the rows, for training that fetches them. replicas:
            their features and edges too, for training without communication. By default nodes for one hop, replicas for
            more.
        out: The folder to write; it appears when it is complete.
        overwrite: Replace a finished folder.

    Returns:
        The content of ``meta.json``.
    """
    from pygdist.graph import Progress
    from pygdist.partition import partition_graph

    source, notes = graph.source(preparation)
    return partition_graph(
        source,
        out,
        num_parts=count.resolve(),
        partitioner=method,
        notes=notes,
        num_classes=preparation.num_classes,
        num_hops=hops,
        placement=placement,
        overwrite=overwrite,
        progress=Progress(),
        **(method_args or {}),
    )


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`partition`."""
    groups = (Graph, Preparation, PartCount)
    parser = Parser(
        prog="pygdist partition",
        usage="pygdist partition (--dataset=NAME | --input=FILE) [options]",
        description="Split a graph into parts and write them to a folder, for --data.store of the other commands.",
    )
    for group in groups:
        parser.add_class_arguments(group)
    parser.add_function_arguments(partition, skip={"graph", "preparation", "count"})
    parser.add_argument("--json", action="store_true", help="print meta.json to standard output, and nothing else")
    options = parser.parse_args(arguments).as_dict()
    as_json = options.pop("json")
    values = [group(**{field.name: options.pop(field.name) for field in fields(group)}) for group in groups]
    # dataset classes print while they download
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        meta = partition(*values, **options)
    if as_json:
        sys.stdout.write(json.dumps(meta, indent=2) + "\n")
    else:
        _print(meta, options["out"])
    return 0


def _print(meta: dict[str, Any], out: Path) -> None:
    from pygdist.partition import PartitionMetrics

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
    console.print(_summary(meta, metrics))
    console.print(f"train on it with --data.store={out} --trainer.devices={meta['num_parts']}")


def _summary(meta: dict[str, Any], metrics: PartitionMetrics) -> str:
    """Return lines on balance, rows that travel in training, and time and memory of the partitioning."""
    lines = []
    if "num_clusters" in meta:
        lines.append(f"{meta['num_clusters']:,} clusters merged into {meta['num_merged_clusters']:,}")
    balance = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in metrics.balance.items())
    lines.append(f"balance (largest over mean): {balance}")
    volume = f" ({meta['bytes_per_layer'] / 1e6:,.1f} MB of features)" if meta["num_features"] else ""
    lines.append(f"{meta['rows_per_hop']:,} rows cross in a layer{volume}")
    if meta["placement"] == "replicas":
        hops = [sum(one["halo_per_hop"][hop] for one in meta["parts"]) for hop in range(meta["num_hops"])]
        lines.append("halo rows by hop: " + ", ".join(f"{rows:,}" for rows in hops))
    rate = f"{meta['edges_per_second'] / 1e6:,.1f} million edges/s"
    lines.append(f"assigned in {meta['seconds']:.2f} s, {rate}; peak memory {meta['peak_rss_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)
