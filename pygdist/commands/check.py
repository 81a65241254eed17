"""``pygdist check``: read a partitioned graph whole, and say if all of it can be used."""

from __future__ import annotations

import sys
from pathlib import Path

from pygdist.commands.messages import ArgumentParser


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist check",
        description="Read all files of a partitioned graph. The exit status is 2 if one is missing or damaged, or "
        "holds what cannot be right; a line names the file.",
    )
    result.add_argument("store", help="a folder that pygdist partition wrote")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line: check sizes, checksums, structure and values of all files of a store."""
    options = parser().parse_args(arguments)
    from pygdist.graph import open_part, read_meta  # imports torch: not before the options are read
    from pygdist.graph.store.structure import check_values

    meta = read_meta(options.store)
    for part in range(meta["num_parts"]):
        open_part(options.store, part, meta=meta)
        check_values(meta, part, Path(options.store) / f"part_{part}")
    counts = f"{meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges in {meta['num_parts']} parts"
    sys.stdout.write(f"{options.store}: {counts}, all files are as they were written\n")
    return 0
