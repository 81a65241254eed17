"""``pygdist report``: make one page of a folder of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from pygdist.commands.messages import ArgumentParser
from pygdist.report import write_report


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist report",
        description="Make one HTML page of a folder of results: sortable tables, the papers' numbers beside ours, load "
        "per rank, timelines, the settings of each run and the command that repeats it. The page needs no network.",
    )
    result.add_argument("results", type=Path, help="folder of tables (NAME.csv) and their descriptions (NAME.yaml)")
    result.add_argument("-o", "--out", type=Path, required=True, help="the file to write, e.g. report.html")
    result.add_argument("--title", default=argparse.SUPPRESS, help="title of the page")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`pygdist.report.write_report`."""
    write_report(**vars(parser().parse_args(arguments)))
    return 0
