"""The page: all results in one HTML file that needs neither a network nor a server.

plotly.js, the page's script and its style are written into the file. Tables are plain HTML and can be read without
scripts; plots are data that the script draws.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pygdist.errors import InputError, needs
from pygdist.memory.limits import reason_of
from pygdist.memory.scratch import replacing
from pygdist.report.description import Experiment, Mean
from pygdist.report.find import Outcome, Results, find_results
from pygdist.report.means import RUNS, averaged
from pygdist.report.plots import Drawn, Figure, Palette, draw
from pygdist.report.ranks import COLUMNS, load_per_rank
from pygdist.report.tables import KEPT_APART, MACHINE, Table, main_columns, make_table
from pygdist.report.timelines import read_timeline
from pygdist.report.values import Row, number, together

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_TITLE = "pygdist: results"
_OTHER = "Other tables"
_MOST_NAMES = 4  # so many leading columns name the setting of a timeline


@dataclass(frozen=True)
class Report:
    """A page of results, with the numbers of its experiments, tables and plots."""

    html: str
    experiments: int
    tables: int
    plots: int


@dataclass(frozen=True)
class _Choice:
    """A figure that a box can show: its name, its number on the page, and text below it."""

    name: str
    figure: int
    words: str = ""


@dataclass(frozen=True)
class _Side:
    """One half of a box, with a heading; several choices get a selector."""

    heading: str
    choices: list[_Choice]


@dataclass(frozen=True)
class _Box:
    """A plot, or two side by side, under one title and one legend."""

    title: str
    sides: list[_Side] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    kind: str = "plot"


@dataclass(frozen=True)
class _Shown:
    """A table with a caption and its source; if ``folded``, only the caption is shown at first."""

    table: Table
    caption: str = ""
    source: str = ""
    folded: bool = False


@dataclass(frozen=True)
class _Entry:
    """An experiment, or a table without a description."""

    name: str
    title: str
    path: str
    experiment: Experiment | None = None
    runs: bool = True
    parts: list[_Box | _Shown] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)


def write_report(results: Path, out: Path, *, title: str = _TITLE) -> Path:
    """Make one page of a folder of results; the file appears when it is complete.

    Args:
        results: Folder with descriptions (``NAME.yaml``, :class:`Experiment`) and tables (``NAME.csv``); beside them,
            ``NAME.ranks.csv`` holds the load per rank, and ``NAME.traces/`` timelines.
        out: The file to write.
        title: Title of the page.

    Returns:
        ``out``.

    Raises:
        InputError: If the folder has no results, a file cannot be read, ``out`` cannot be written, or plotly or jinja2
            are not installed.
    """
    if not out.name:
        raise InputError(f"{out}: is a folder; name the file to write, such as report.html")
    report = make_report(results, title=title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            temporary.write_text(report.html, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {reason_of(error)}") from error
    numbers = report.experiments, report.tables, report.plots, out.stat().st_size / 1e6
    log.info("%s: %d experiments, %d tables, %d plots, %.1f MB", out, *numbers)
    return out


def make_report(results: Path, *, title: str = _TITLE) -> Report:
    """Make the page of :func:`write_report` in memory."""
    content = find_results(results)
    figures: list[Figure] = []
    sections: dict[str, list[_Entry]] = {}
    for outcome in sorted(
        content.experiments, key=lambda one: (not one.experiment.first, one.experiment.paper.lower())
    ):
        sections.setdefault(outcome.experiment.paper, []).append(_entry(outcome, content, figures))
    for path, columns, rows in content.others:
        name = str(path.relative_to(content.folder))
        table = make_table(columns, rows)
        other = _Entry(_slug(name), name, name, parts=[_Shown(table)], settings=table.settings)
        sections.setdefault(_OTHER, []).append(other)
    entries = [entry for section in sections.values() for entry in section]
    counts = {
        "experiments": len(content.experiments),
        "tables": sum(isinstance(part, _Shown) for entry in entries for part in entry.parts),
        "plots": sum(isinstance(part, _Box) and bool(part.sides) for entry in entries for part in entry.parts),
    }
    html = _rendered(title=title, sections=sections, figures=figures, counts=counts)
    return Report(html, **counts)


def _entry(outcome: Outcome, results: Results, figures: list[Figure]) -> _Entry:
    experiment, rows = outcome.experiment, outcome.rows
    published = list(experiment.published.rows) if experiment.published else []
    palette, settings = Palette(), []
    parts: list[_Box | _Shown] = []
    if rows is not None:
        measured = experiment.mean.of if experiment.mean else ()
        drawn = (draw(plot, outcome.table, rows, published, palette, measured) for plot in experiment.plots)
        parts += [_plot_box(one, experiment, figures) for one in drawn]
        table = make_table(outcome.columns, rows, experiment)
        if experiment.mean:
            parts += [_means(outcome, rows, experiment.mean), _Shown(table, "Every run", folded=True)]
        else:
            parts.append(_Shown(table, "Measured"))
        settings = table.settings
    if experiment.published:
        names = list(dict.fromkeys(name for row in published for name in row))
        filled = [{name: row.get(name, "") for name in names} for row in published]
        parts.append(_Shown(make_table(names, filled, whole=True), "Published", experiment.published.source))
    if outcome.ranks:
        parts += _load(outcome, figures)
    parts += _timelines(outcome, results, figures)
    name = str(outcome.table.relative_to(results.folder))
    return _Entry(_slug(name), experiment.title, name, experiment, rows is not None, parts, settings)


def _means(outcome: Outcome, rows: Sequence[Row], mean: Mean) -> _Shown:
    """Return the table of means. It has no commands, since a command makes a single run."""
    apart = (KEPT_APART | MACHINE) - set(outcome.experiment.table if outcome.experiment else ())
    means, spreads = averaged(mean, outcome.table, rows, apart)
    main = [name for name in main_columns(outcome.columns, rows, outcome.experiment) if name not in mean.over]
    shown = replace(outcome.experiment, table=(*main, RUNS), again="")
    columns = [*(name for name in outcome.columns if name not in mean.over), RUNS]
    return _Shown(make_table(columns, means, shown, spreads=spreads), "Measured: means and standard deviations of runs")


def _plot_box(drawn: Drawn, experiment: Experiment, figures: list[Figure]) -> _Box:
    sides = []
    paper = f"Published: {experiment.published.source}" if experiment.published else ""
    for heading, figure in ((paper, drawn.paper), ("Measured" if drawn.paper else "", drawn.ours)):
        if figure:
            figures.append(figure)
            sides.append(_Side(heading, [_Choice("", len(figures) - 1)]))
    return _Box(drawn.plot.title, sides, drawn.legend, drawn.lines)


def _load(outcome: Outcome, figures: list[Figure]) -> list[_Box | _Shown]:
    choices, rows = [], []
    legend: list[tuple[str, str]] = []
    loads = load_per_rank(outcome.ranks, outcome.table.with_suffix(".ranks.csv"))
    for load in sorted(loads, key=lambda load: -len(load.ranks)):  # the page opens with the first
        figures.append(load.figure)
        choices.append(_Choice(load.setting, len(figures) - 1, load.words))
        rows += [{"setting": load.setting, **rank} for rank in load.ranks]
        legend = [(trace["name"], trace["marker"]["color"]) for trace in load.figure["data"]]
    columns = [name for name in ("setting", "rank", *COLUMNS) if any(name in row for row in rows)]
    table = make_table(columns, [{name: row.get(name, "") for name in columns} for row in rows], whole=True)
    box = _Box("Load per rank", [_Side("", choices)], legend, kind="load")
    return [box, _Shown(table, "Load of all ranks: medians over epochs", folded=True)]


def _timelines(outcome: Outcome, results: Results, figures: list[Figure]) -> list[_Box]:
    read = {path.name: read_timeline(path, _setting(path, outcome, results)) for path in outcome.traces}
    lines = [f"{name} has no spans." for name, timeline in read.items() if timeline is None]
    timelines = [timeline for timeline in read.values() if timeline is not None]
    choices = []
    legend: dict[str, str] = {}
    for timeline in sorted(timelines, key=lambda timeline: -timeline.figure["lines"]):  # as with loads
        figures.append(timeline.figure)
        choices.append(_Choice(timeline.setting, len(figures) - 1, timeline.line))
        legend |= dict(timeline.legend)
    sides = [_Side("", choices)] if choices else []
    return [_Box("Timeline", sides, list(legend.items()), lines, kind="timeline")] if read else []


def _setting(path: Path, outcome: Outcome, results: Results) -> str:
    """Return the setting of a timeline: the leading cells, before any measured one, of the row that names the file."""
    places = {str(path.relative_to(folder)) for folder in (outcome.table.parent, results.folder)}
    row: Row | None = next((row for row in outcome.rows or [] if row.get("timeline") in places), None)
    if row is None:
        return path.stem
    if row.get("setting"):
        return row["setting"]
    names: list[str] = []
    for name in main_columns(outcome.columns, outcome.rows or [], outcome.experiment)[:_MOST_NAMES]:
        if names and not (number(row[name]) or 0.0).is_integer():
            break
        names.append(name)
    return together(row, names, named=[name for name in names if number(row[name]) is not None]) or path.stem


def _slug(name: str) -> str:
    """Return the id of an entry on the page; no other id has this prefix."""
    return "at-" + re.sub(r"[^\w./-]", "-", name)


def _rendered(*, figures: list[Figure], **content: Any) -> str:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise needs("a report", package, "report") from error
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # "</script" in a word would end the element
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("page.html.jinja").render(
        data=Markup(data),
        plotly=Markup(get_plotlyjs() if figures else ""),
        script=Markup((_HERE / "page.js").read_text(encoding="utf-8")),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        **content,
    )
