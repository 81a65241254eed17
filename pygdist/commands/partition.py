"""``pygdist partition``: partition a graph once, look at the result, write the parts."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from pygdist.commands.messages import Parser
from pygdist.errors import InputError
from pygdist.registry import PlugIns

_OF_INPUT = ("columns", "string_ids", "names", "first_id", "features", "labels", "num_nodes", "relabel")
_SOURCES = ("dataset", "dataset_args", "input", "node_inputs")
_MOST_ROWS = 32


_MOST_GIB = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph, from a dataset or an input file.

    Args:
        dataset: As in ``fit``: a PyG dataset by class path or name, an OGB name, a folder of .npy arrays, or a
            generator. The dataset is loaded whole.
        dataset_args: Arguments of the dataset class or generator.
        input: In place of a dataset, a file of edges, which is read as a stream and never held whole: .npy of shape
            (2, E) or (E, 2), text (.txt, .csv, .tsv, KONECT's out.*, MatrixMarket's .mtx; also with .gz, .zst, .bz2,
            .xz), .parquet; a folder of text or Parquet files, or a pattern in quotes, such as 'data/*.csv'; or a folder
            of .npy arrays.
        columns: With --input, the columns of text or Parquet, such as source=from,target=to,weight=w,attributes=a+b.
            Columns without names are numbered from 1. By default columns are found by usual names, such as src, dst and
            weight. An empty value (weight=) leaves weights out.
        string_ids: With --input, true if ids are names; names are kept in ids.txt. By default ids are names if most ids
            in the first lines are not numbers.
        names: With --input, a text file with one line per node, the name of the node, in the order of the rows of
            features.
        first_id: With --input, the id of the first node, 0 or 1. By default 1 in MatrixMarket and KONECT files, 0 in
            others.
        features: With --input, a .npy file with a row of features for each node.
        labels: With --input, a .npy file with a label, or a row of labels, for each node.
        num_nodes: With --input, the number of nodes. By default the number of rows of features, labels or masks, of
            lines in --names, or in the header of an .mtx file; if there is none of these, the largest id plus one, less
            --first_id.
        relabel: With --input, renumber the nodes that have edges, from 0, and keep the original ids in ids.npy. By
            default nodes are renumbered if only the edges tell the number of nodes, and fewer than half of the ids up
            to the largest occur.
        symmetrize: Add the reverse of every edge that has none. With --input this also merges parallel edges, as
            --remove_duplicates does.
        remove_duplicates: Merge parallel edges; weights are added, attributes averaged.
        remove_self_loops: Drop edges from a node to itself.
        float_features: Convert integer features of nodes and edges to float32; by default they stay integers.
        float_labels: Labels are numbers to predict, even if all labels are whole. By default whole labels are classes.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks. A
            dataset without masks is split 50/25/25 by default.
        split_seed: Seed of the random split.
        num_classes: Number of classes; larger labels are an error. By default the largest label plus one.
        node_inputs: With --dataset, names of further tensors of nodes to keep for a model that takes them, such as
            [pos].
    """

    dataset: str | None = None
    dataset_args: dict[str, Any] | None = None
    input: Path | None = None
    columns: str | dict[str, Any] | None = None
    string_ids: bool | None = None
    names: Path | None = None
    first_id: int | None = None
    features: Path | None = None
    labels: Path | None = None
    num_nodes: int | None = None
    relabel: bool | None = None
    symmetrize: bool = False
    remove_duplicates: bool = False
    remove_self_loops: bool = False
    float_features: bool = False
    float_labels: bool = False
    split: tuple[float, float, float] | None = None
    split_seed: int = 0
    num_classes: int | None = None
    node_inputs: list[str] | None = None

    def __post_init__(self) -> None:
        if (self.dataset is None) == (self.input is None):
            raise InputError("give either --dataset or --input; see pygdist partition --help")
        if self.dataset is None:
            of_datasets = {"dataset_args": self.dataset_args, "node_inputs": self.node_inputs}
            _refuse(of_datasets, "goes with --dataset, not with --input")
        else:
            _refuse(self.files, "goes with --input, not with --dataset")

    @property
    def files(self) -> dict[str, Any]:
        """Options of the input file by name."""
        return {name: getattr(self, name) for name in _OF_INPUT}

    @property
    def preparation(self) -> dict[str, Any]:
        """Options of how the graph is prepared, by name."""
        return {name: value for name, value in vars(self).items() if name not in (*self.files, *_SOURCES)}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts.

    Args:
        parts: Number of parts, one for each process of a later run; or auto, for the fewest parts that each fit a
            device.
        devices: With --parts=auto, the number of devices. 1 by default.
        device_memory: With --parts=auto, the memory of one device, in GiB.
        reserve: With --parts=auto, the share of a device's memory that is left to training. Two thirds by default.
        method: Who owns which node or edge: the name or the class path of the partitioner that decides. By default
            chunk; libra with --placement=edges, hash with --placement=columns.
        method_args: Arguments of the method; --method.NAME=VALUE sets one argument.
        hops: Number of hops that the halo of a part reaches. The halo is the set of nodes around the part's own nodes.
        placement: Content of a part: nodes, replicas, edges or columns. nodes: own nodes, and of the halo only ids; for
            training that fetches rows. replicas: also features and edges of the halo; for training without
            communication. edges: the edges that the method assigns to the part; a node may be in several parts.
            columns: own nodes, and some columns of the features of all nodes. By default nodes for one hop, replicas
            for more.
        out: The folder to write; it appears when it is complete.
        overwrite: Replace a finished partitioned graph in the folder. By default one with other content is refused.
    """

    parts: int | Literal["auto"] = 2
    devices: int | None = None
    device_memory: float | None = None
    reserve: float | None = None
    method: str | None = None
    method_args: dict[str, Any] | None = None
    hops: int = 1
    placement: Literal["nodes", "replicas", "edges", "columns"] | None = None
    out: Path = Path("parts")
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.parts != "auto":
            options = {name: getattr(self, name) for name in ("devices", "device_memory", "reserve")}
            _refuse(options, "goes with --parts=auto")
        elif self.device_memory is None or not 0 < self.device_memory < _MOST_GIB:
            raise InputError(
                "--parts=auto needs --device_memory (GiB, above 0 and below 2**40), and --devices if there are several"
            )

    @property
    def memory(self) -> dict[str, Any]:
        """Arguments of :class:`pygdist.partition.DeviceMemory`."""
        reserve = {} if self.reserve is None else {"reserve": self.reserve}
        devices = 1 if self.devices is None else self.devices
        return {"devices": devices, "bytes": math.ceil((self.device_memory or 0.0) * 2**30), **reserve}


def _refuse(options: Mapping[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} {reason}; leave it out")


def partition(graph: Graph, parts: Parts) -> dict[str, Any]:
    """Partition a graph, write the parts to a folder, and return the content of its ``meta.json``."""
    # these import torch: not before the options are read
    from pygdist.graph import GraphFiles, Progress, load_graph, prepare
    from pygdist.graph.sources.prepare import tell
    from pygdist.partition import DeviceMemory, partition_graph

    num_parts = DeviceMemory(**parts.memory) if parts.parts == "auto" else parts.parts
    source: Any
    if graph.input is not None:
        source, notes = GraphFiles(edges=graph.input, **graph.files, **graph.preparation), list[str]()
    else:
        assert graph.dataset is not None
        data = load_graph(graph.dataset, **(graph.dataset_args or {}))
        if missing := [name for name in graph.node_inputs or () if name not in data]:
            raise InputError(f"--node_inputs: the graph has no {', '.join(missing)}")
        source, notes = prepare(data, **graph.preparation, node_inputs=graph.node_inputs or ())
        tell(notes)
    return partition_graph(
        source, parts.out, num_parts=num_parts, partitioner=parts.method, notes=notes, num_classes=graph.num_classes,
        num_hops=parts.hops, placement=parts.placement, overwrite=parts.overwrite, progress=Progress(),
        **(parts.method_args or {}),
    )  # fmt: skip


def parser() -> Parser:
    """Return the parser of the command line."""
    result = Parser(
        prog="pygdist partition",
        usage="pygdist partition (--dataset=NAME | --input=FILE) [options]",
        description="Split a graph into parts and write them to a folder, for --data.store of the other commands.",
    )
    result.add_class_arguments(Graph)
    result.add_class_arguments(Parts)
    result.add_argument("--json", action="store_true", help="print meta.json to standard output, and nothing else")
    return result


def _with_plug_ins(result: Parser) -> Parser:
    """Add the names that installed packages offer to the help texts."""
    groups = {"dataset": "pygdist.data", "method": "pygdist.partitioners"}
    for action in result._actions:
        if names := ", ".join(PlugIns(action.dest, groups[action.dest])) if action.dest in groups else "":
            action.help = f"{action.help} Installed packages offer {names}."
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`partition`."""
    # as runs give them to a class: --data.partitioner.NAME
    arguments = [re.sub(r"^--method\.", "--method_args.", argument) for argument in arguments]
    options = _with_plug_ins(parser()).parse_args(arguments).as_dict()
    as_json = options.pop("json")
    graph = Graph(**{field.name: options.pop(field.name) for field in fields(Graph)})
    # dataset classes print while they download
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        meta = partition(graph, Parts(**options))
    if as_json:
        sys.stdout.write(json.dumps(meta, indent=2) + "\n")
    else:
        _print(meta, options["out"], options["devices"])
    return 0


def _print(meta: dict[str, Any], out: Path, devices: int | None) -> None:
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
    console.print(_summary(meta, metrics.balance))
    console.print(next_step(meta, out, devices))


def next_step(meta: dict[str, Any], out: Path, devices: int | None) -> str:
    """Say how to train on the parts."""
    num_parts = meta["num_parts"]
    if devices is None or num_parts <= devices:
        return f"train on it with --data.store={out} --trainer.devices={num_parts}"
    if meta["placement"] == "replicas":
        return (
            f"train the {num_parts} parts on {devices} devices with --data.store={out} --trainer.devices={devices} "
            "--model.backend=replica --trainer.strategy=model_averaging"
        )
    return (
        f"the graph needs {num_parts} devices of this size with --data.store={out} --trainer.devices={num_parts}; to "
        f"train it part by part on {devices}, partition it again with --placement=replicas, for backend replica"
    )


def _summary(meta: dict[str, Any], balance: Mapping[str, float]) -> str:
    """Return lines on balance, rows that travel in training, and time and memory of the partitioning."""
    from pygdist.graph.store.part_files import PLACEMENTS

    lines = []
    if "num_clusters" in meta:
        lines.append(f"{meta['num_clusters']:,} clusters merged into {meta['num_merged_clusters']:,}")
    shares = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in balance.items())
    lines.append(f"balance (largest over mean): {shares}")
    volume = f" ({meta['bytes_per_layer'] / 1e6:,.1f} MB of features)" if meta["num_features"] else ""
    lines.append(f"{meta['rows_per_hop']:,} rows cross in a layer{volume}")
    if PLACEMENTS[meta["placement"]].splits_nodes:
        split = sum(one["num_split"] for one in meta["parts"])
        up, down = (sum(sum(one[name]) for one in meta["parts"]) for name in ("up_counts", "down_counts"))
        share = split / max(meta["num_nodes"], 1)
        lines.append(
            f"{split:,} nodes are split ({share:.1%}); rows in a hop: {up:,} up to roots, {down:,} down to leaves"
        )
    elif PLACEMENTS[meta["placement"]].has_surroundings:
        hops = [sum(one["halo_per_hop"][hop] for one in meta["parts"]) for hop in range(meta["num_hops"])]
        lines.append("halo rows by hop: " + ", ".join(f"{rows:,}" for rows in hops))
    rate = f"{meta['edges_per_second'] / 1e6:,.1f} million edges/s"
    lines.append(f"assigned in {meta['seconds']:.2f} s, {rate}; peak memory {meta['peak_rss_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)
