"""``pygdist info``: say what a partitioned graph or a checkpoint holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pygdist.commands.messages import ArgumentParser
from pygdist.display import as_text
from pygdist.errors import InputError

_MIB = 2**20
_CHECKPOINTS = ("*.ckpt", "checkpoints/*.ckpt", "version_*/checkpoints/*.ckpt")  # in the folder of a run, or of runs
_FACTS = ("model", "task", "backend", "processes")  # of the run that saved a checkpoint


def store_facts(folder: str | Path) -> dict[str, Any]:
    """Return what a partitioned graph holds, and a row for each part.

    Raises:
        InputError: If the folder is no partitioned graph, or its ``meta.json`` is damaged.
    """
    from pygdist.graph import read_meta  # imports torch: not before the options are read

    meta = read_meta(folder)
    parts = [
        {
            "part": number,
            "nodes": part["num_owned"],
            "halo_rows": part["num_halo"],
            "edges": part["num_edges"],
            "training_nodes": part["counts"].get("train_mask", 0),
            "size_mib": sum(one["bytes"] for one in part["files"].values()) / _MIB,
        }
        for number, part in enumerate(meta["parts"])
    ]
    names = {
        "nodes": "num_nodes", "edges": "num_edges", "features": "num_features", "classes": "num_classes",
        "targets": "targets",
        "partitioner": "method", "placement": "placement", "hops": "num_hops", "edge_cut": "edge_cut",
        "replication_factor": "replication_factor", "labelled": "counts", "types": "dtypes", "changes": "preprocessing",
    }  # fmt: skip
    return {
        "kind": "partitioned graph",
        **{name: meta[key] for name, key in names.items() if key in meta},
        "size_mib": sum(one["size_mib"] for one in parts),
        "parts": parts,
    }


def checkpoint_facts(path: str | Path) -> dict[str, Any]:
    """Return what a checkpoint holds: facts of its run, the epoch and step reached, and the tensors of its model.

    Raises:
        InputError: If the file cannot be read, or holds no model.
    """
    from pygdist import checkpoints
    from pygdist.checkpoints import RUN_FACTS

    content = checkpoints.read(path)
    facts = content.get(RUN_FACTS)
    tensors = {name.removeprefix("model."): value for name, value in content["state_dict"].items()}
    return {
        "kind": "checkpoint",
        **{name: facts[name] for name in _FACTS if isinstance(facts, dict) and isinstance(facts.get(name), (str, int))},
        "epoch": content.get("epoch"),
        "step": content.get("global_step"),
        "lightning": content.get("pytorch-lightning_version"),
        "resumes": "optimizer_states" in content,
        "parameters": sum(value.numel() for value in tensors.values()),
        "size_mib": sum(value.nbytes for value in tensors.values()) / _MIB,
        "tensors": [
            {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in tensors.items()
        ],
    }


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist info",
        description="Say what a partitioned graph or a checkpoint holds. Of a partitioned graph only meta.json is "
        "read. A checkpoint is read whole.",
    )
    result.add_argument("path", help="a folder that pygdist partition wrote, or a .ckpt file")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`store_facts` and :func:`checkpoint_facts`."""
    options = parser().parse_args(arguments)
    path = Path(options.path)
    path = path.parent if path.name == "meta.json" else path
    if not path.exists():
        raise InputError(f"{path}: there is no such folder or file; give a partitioned graph or a checkpoint")
    _check_folder(path)
    facts = store_facts(path) if path.is_dir() else checkpoint_facts(path)
    if options.json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        _show(path, facts)
    return 0


def _check_folder(path: Path) -> None:
    """Refuse the folder of a run, with the name of a checkpoint in it."""
    saved = [one for pattern in _CHECKPOINTS for one in path.glob(pattern)]
    if saved and not (path / "meta.json").exists():
        newest = max(saved, key=lambda one: one.stat().st_mtime)
        raise InputError(f"{path}: holds checkpoints, but is no partitioned graph; give one of them, such as {newest}")


def _show(path: Path, facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    (rows_name,) = (name for name in ("parts", "tensors") if name in facts)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"{path}: {facts['kind']}", soft_wrap=True, markup=False)
    for name, value in facts.items():
        if name not in ("kind", rows_name) and value not in (None, [], {}):
            console.print(f"  {name.replace('_', ' ')}: {as_text(value)}", soft_wrap=True, markup=False)
    rows = facts[rows_name]
    table = Table(box=None, pad_edge=False)
    for name, value in rows[0].items() if rows else ():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(as_text, row.values()))
    console.print(table)
