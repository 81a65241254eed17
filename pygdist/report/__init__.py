"""One page of results: sortable tables, plots with the papers' numbers beside ours, load per rank, timelines."""

from pygdist.report.description import Experiment, Plot, Published, read_description
from pygdist.report.page import Report, make_report, write_report
from pygdist.report.tables import rerun_command

__all__ = [
    "Experiment",
    "Plot",
    "Published",
    "Report",
    "make_report",
    "read_description",
    "rerun_command",
    "write_report",
]
