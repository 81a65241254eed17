"""``pygdist check``: read all files of a partitioned graph, and refuse the first that is damaged or impossible."""

from __future__ import annotations

import sys
from pathlib import Path

from pygdist.commands.messages import ArgumentParser


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist check",
        description="Read all files of a partitioned graph. If a file is missing or damaged, or holds impossible "
        "values, a line names the file, and the exit status is 2.",
    )
    result.add_argument("store", help="a folder that pygdist partition wrote")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line: check sizes, checksums, structure and values of all files of a store."""
    options = parser().parse_args(arguments)
    from pygdist.graph import open_part, read_meta  # imports torch: not before the options are read
    from pygdist.graph.store.part_files import check_ids
    from pygdist.graph.store.structure import check_values

    meta = read_meta(options.store)
    check_ids(Path(options.store), meta)
    for part in range(meta["num_parts"]):
        open_part(options.store, part, meta=meta)
        check_values(meta, part, Path(options.store) / f"part_{part}")
    counts = f"{meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges in {meta['num_parts']} parts"
    sys.stdout.write(f"{options.store}: {counts}, all files are as they were written\n")
    return 0
