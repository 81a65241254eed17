"""``pygdist partition``: partition a graph once, look at the result, write the parts."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pygdist.commands.train import Parser
from pygdist.graph import load_graph, prepare
from pygdist.partition import PartitionMetrics, partition_graph

__all__ = ["partition", "run"]


def partition(
    dataset: str,
    dataset_args: dict[str, Any] | None = None,
    method: str = "chunk",
    method_args: dict[str, Any] | None = None,
    parts: int = 2,
    out: Path = Path("parts"),
    symmetrize: bool = False,
    remove_duplicates: bool = False,
    remove_self_loops: bool = False,
    split: tuple[float, float, float] | None = None,
    split_seed: int = 0,
    num_classes: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Partition a graph and write the parts to a folder, for ``--data.store`` of the other commands.

    Args:
        dataset: As in ``fit``: a PyG dataset by class path or name, an OGB name, a folder of .npy arrays, a generator.
        dataset_args: Arguments of the dataset class or generator.
        method: Who owns which node: a name or the class path of a Partitioner.
        method_args: Arguments of the method.
        parts: Number of parts; one for each process of a later run.
        out: The folder to write; it appears when it is complete.
        symmetrize: Add the reverse of every edge.
        remove_duplicates: Merge parallel edges.
        remove_self_loops: Drop edges from a node to itself.
        split: Shares of the labelled nodes for training, validation and test, in place of the dataset's own masks; a
            dataset without masks is split 50/25/25 by default.
        split_seed: The split is drawn from it.
        num_classes: Stated number of classes; labels beyond it are an error.
        overwrite: Replace a finished folder.

    Returns:
        What ``meta.json`` says.
    """
    options = {"symmetrize": symmetrize, "remove_duplicates": remove_duplicates, "remove_self_loops": remove_self_loops}
    data, notes = prepare(
        load_graph(dataset, **(dataset_args or {})),
        split=split,
        split_seed=split_seed,
        num_classes=num_classes,
        **options,
    )
    return partition_graph(
        data,
        out,
        num_parts=parts,
        partitioner=method,
        notes=notes,
        num_classes=num_classes,
        overwrite=overwrite,
        **(method_args or {}),
    )


def run(command: str, arguments: list[str]) -> int:
    """The command line of :func:`partition`."""
    parser = Parser(prog="pygdist partition", description=(partition.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(partition, as_group=False)
    parser.add_argument("--json", action="store_true", help="print meta.json's figures on standard output, alone")
    options = parser.parse_args(arguments).as_dict()
    as_json = options.pop("json")
    # whatever a dataset class prints while it downloads
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        meta = partition(**options)
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
        table.add_row(str(part), *(f"{value:,}" for value in row))
    console = Console()
    console.print(table)
    full, plain = meta["replication_factor_full"], meta["replication_factor"]
    cut = "" if plain == full else f" ({plain:.3f} as the edges were placed)"
    console.print(
        f"{meta['method']}: replication factor {full:.3f}{cut}, {meta['edge_cut']:,} edges cut, "
        f"{meta['seconds']:.2f} s; train on it with --data.store={out} --trainer.devices={meta['num_parts']}"
    )
