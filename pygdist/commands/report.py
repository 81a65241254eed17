"""``pygdist report``: one page of what was measured."""

from __future__ import annotations

from pathlib import Path

from pygdist.commands.messages import ArgumentParser
from pygdist.report import write_report

__all__ = ["run"]


def run(command: str, arguments: list[str]) -> int:
    """The command line of :func:`pygdist.report.write_report`."""
    parser = ArgumentParser(
        prog="pygdist report",
        description="Make one page of a folder of results, to be opened in a browser: tables that sort, the papers' "
        "figures beside ours, load per rank, timelines, the settings of each run and the command that repeats it.",
    )
    parser.add_argument("results", type=Path, help="folder of tables (NAME.csv) and what they mean (NAME.yaml)")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write, e.g. report.html")
    parser.add_argument("--title", help="title of the page")
    options = parser.parse_args(arguments)
    titled = {} if options.title is None else {"title": options.title}
    write_report(options.results, options.out, **titled)
    return 0
