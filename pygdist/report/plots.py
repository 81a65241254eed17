"""Plots as data for plotly.js: the plots of a description, of our rows and of the paper's.

Figures are plain dictionaries (plotly's JSON). The page adds the colours of text and lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pygdist.report.axes import align, tick_logs
from pygdist.report.description import Plot
from pygdist.report.values import Row, is_same, measured, number, shown, spoken, together

Figure = dict[str, Any]

#: Colours of middle lightness, visible on white and on black.
COLOURS = (
    "#4c8bc8", "#e08a3c", "#4fa66a", "#cf5f63", "#9678c8", "#a4785f", "#d47fb4", "#8a929a", "#a9a83a", "#3fa9b5",
)  # fmt: skip
_PATTERNS = ("", "/", "x", ".")
_SYMBOLS = ("circle", "square", "diamond", "cross")
_DASHES = ("solid", "dash", "dot", "dashdot")


class Palette:
    """A colour for each name of a trace, the same in all plots of an experiment."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name; names are numbered as they are first used."""
        return self._numbers.setdefault(name, len(self._numbers))

    def colour(self, name: str) -> str:
        """Return the colour of a name. Colours repeat after ten names, in another style."""
        return COLOURS[self.number(name) % len(COLOURS)]

    def swatch(self, name: str) -> str:
        """Return the background of the name's square in a legend, as CSS."""
        colour = self.colour(name)
        if self.number(name) < len(COLOURS):
            return colour
        return f"repeating-linear-gradient(135deg, {colour} 0 3px, transparent 3px 5px)"

    def style(self, name: str, styles: Sequence[str]) -> str:
        """Return one of ``styles``, which differs between names of the same colour."""
        return styles[self.number(name) // len(COLOURS) % len(styles)]


@dataclass(frozen=True)
class Point:
    """A point: ``x`` as in the table, ``y`` with its bounds, if any, and the number of rows it stands for."""

    x: str
    y: float
    bounds: tuple[float, float] | None
    count: int


@dataclass(frozen=True)
class Trace:
    """Points of one colour, and the label of their column."""

    name: str
    label: str
    points: list[Point]


@dataclass(frozen=True)
class Drawn:
    """A drawn plot: our figure and the paper's, each ``None`` if it has no rows that can be drawn."""

    plot: Plot
    ours: Figure | None
    paper: Figure | None
    legend: list[tuple[str, str]]  # names and colours of the traces of both figures; empty if there is only one
    lines: list[str]  # text below, such as the reason why there is no figure


def draw(
    plot: Plot,
    table: Path,
    rows: Sequence[Row],
    published: Sequence[Row],
    palette: Palette,
    means: Collection[str] = (),
) -> Drawn:
    """Draw a plot of our rows, but those with a note, and of the published ones that have all columns of the plot.

    Repeated values of the columns ``means`` are drawn as mean and standard deviation; others as median and range.

    Raises:
        InputError: If a cell along ``y`` is no number; names the table.
    """
    ours = _traces(plot, table, [row for row in rows if not row.get("note")], means)
    theirs = _traces(plot, table, [row for row in published if _is_whole(plot, row)])
    lines = [] if ours else [_why_not(plot, rows)]
    if any(point.count > 1 for trace in ours for point in trace.points):
        lines.append(
            "Repeated runs are drawn as their mean, with bars of one standard deviation."
            if set(plot.y) <= set(means)
            else "Repeated runs are drawn as their median, with bars from the smallest to the largest."
        )
    our_figure, paper = (_figure(plot, traces, palette) if traces else None for traces in (ours, theirs))
    if our_figure and paper and not align(our_figure, paper):
        lines.append("The two plots have different axes.")
    tick_logs([figure for figure in (our_figure, paper) if figure])
    names = dict.fromkeys(trace.name for trace in [*ours, *theirs])
    legend = [(name, palette.swatch(name)) for name in names] if len(names) > 1 else []
    return Drawn(plot, our_figure, paper, legend, lines)


def _is_whole(plot: Plot, row: Row) -> bool:
    """Tell if a published row has the columns that it needs to be drawn."""
    return any(name in row for name in plot.y) and all(name in row for name in (*plot.x, *plot.colour, *plot.where))


def _why_not(plot: Plot, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if _chosen(plot, row)]
    if not rows:
        return "Not drawn: the table has no rows."
    if not chosen:
        return "Not drawn: no row has the values that this plot selects."
    noted = sum(bool(row.get("note")) for row in chosen)
    missing = len(chosen) - noted
    reasons = [f"{noted} did not run"] * bool(noted)
    reasons += [f"{missing} lack{'s' * (missing == 1)} a value that can be drawn"] * bool(missing)
    of = f"of {len(chosen)} rows, " if len(chosen) > 1 else "of the only row: "
    return f"Not drawn: {of}{' and '.join(reasons)}."


def _chosen(plot: Plot, row: Row) -> bool:
    return all(any(is_same(row[name], value) for value in values) for name, values in plot.where.items())


def _traces(plot: Plot, table: Path, rows: Sequence[Row], means: Collection[str] = ()) -> list[Trace]:
    """Return the traces; points are in the order of the table, or sorted by ``x`` if all ``x`` are numbers."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if not _chosen(plot, row) or not _along(plot, row):
            continue
        for column in plot.y:
            value = measured(row, column, table)
            if value is not None and (value > 0 or "y" not in plot.log):
                name = _name(plot, row, column)
                groups.setdefault((name, column), {}).setdefault(_along(plot, row), []).append(row)
    traces = []
    for (name, column), by_x in groups.items():
        points = [one for x in _ordered(by_x) for one in _points(plot, column, x, by_x[x], mean=column in means)]
        traces.append(Trace(name, spoken(column), points))
    return traces


def _along(plot: Plot, row: Row) -> str:
    """Return the position of a row along ``x``; empty if its cells are empty."""
    if len(plot.x) == 1:
        return row[plot.x[0]]
    return together(row, plot.x, named={name for name in plot.x if number(row[name]) is not None})


def _name(plot: Plot, row: Row, column: str) -> str:
    numeric = {name for name in plot.colour if number(row[name]) is not None}
    name = together(row, plot.colour, named=numeric)
    return ", ".join(one for one in (name, spoken(column) if len(plot.y) > 1 else "") if one) or spoken(column)


def _points(plot: Plot, column: str, x: str, rows: Sequence[Row], *, mean: bool) -> list[Point]:
    values = [float(row[column]) for row in rows]
    if plot.kind == "scatter" or len(rows) == 1:
        return [Point(x, value, _bounds(plot, row), 1) for value, row in zip(values, rows, strict=True)]
    if mean:
        middle, spread = statistics.fmean(values), statistics.stdev(values)
        return [Point(x, middle, (middle - spread, middle + spread), len(values))]
    return [Point(x, statistics.median(values), (min(values), max(values)), len(values))]


def _bounds(plot: Plot, row: Row) -> tuple[float, float] | None:
    low, high = (number(row.get(name, "")) for name in plot.error or ("", ""))
    return None if low is None or high is None else (low, high)


def _ordered(names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    if any(number(name) is None for name in names):
        return names
    return sorted(names, key=float)


def _figure(plot: Plot, traces: Sequence[Trace], palette: Palette) -> Figure:
    words = _in_words(plot, traces)
    titles = plot.x_title or ", ".join(map(spoken, plot.x)), plot.y_title or ", ".join(map(spoken, plot.y))
    layout: Figure = {}
    for axis, title in zip(("x", "y"), titles, strict=True):
        layout[f"{axis}axis"] = {"title": {"text": escape(title)}, "type": "log" if axis in plot.log else "linear"}
    if words:
        layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": words}
    if plot.kind == "bar":
        layout["barmode"] = "group"
    if plot.kind == "bar" and "y" not in plot.log:
        layout["yaxis"]["rangemode"] = "tozero"
    data = [_trace(plot, trace, palette, titles, in_words=bool(words)) for trace in traces]
    return {"data": data, "layout": layout}


def _in_words(plot: Plot, traces: Sequence[Trace]) -> list[str]:
    """Return the words along ``x``; none if it is an axis of numbers."""
    values = _ordered(point.x for trace in traces for point in trace.points)
    if plot.kind != "bar" and all(number(x) is not None for x in values):
        return []
    return [escape(shown(x)) for x in values]


def base_trace(kind: str, name: str, hovertext: list[str], colour: str) -> Figure:
    """Return a trace of plotly without coordinates; pointing at a point or bar shows its text."""
    return {
        "type": kind,
        "name": escape(name),
        "hovertext": hovertext,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"color": colour},
        "showlegend": False,
        **({"textposition": "none"} if kind == "bar" else {}),
    }


def _trace(plot: Plot, trace: Trace, palette: Palette, titles: tuple[str, str], *, in_words: bool) -> Figure:
    hovertext = [_hover(trace, point, titles, several=len(plot.y) > 1) for point in trace.points]
    drawn = base_trace("bar" if plot.kind == "bar" else "scatter", trace.name, hovertext, palette.colour(trace.name))
    drawn["x"] = [escape(shown(point.x)) if in_words else float(point.x) for point in trace.points]
    drawn["y"] = [point.y for point in trace.points]
    if plot.kind == "bar":
        drawn["marker"]["pattern"] = {"shape": palette.style(trace.name, _PATTERNS), "solidity": 0.4}
    else:
        drawn["mode"] = "lines+markers" if plot.kind == "line" else "markers"
        drawn["marker"] |= {"size": 7, "symbol": palette.style(trace.name, _SYMBOLS)}
        drawn["line"] = {"color": palette.colour(trace.name), "dash": palette.style(trace.name, _DASHES), "width": 2}
    if any(point.bounds for point in trace.points):
        filled = [(point.y, point.bounds or (point.y, point.y)) for point in trace.points]
        drawn["error_y"] = {
            "type": "data", "array": [high - y for y, (_, high) in filled],
            "arrayminus": [y - low for y, (low, _) in filled], "thickness": 1, "width": 3,
        }  # fmt: skip
    return drawn


def _hover(trace: Trace, point: Point, titles: tuple[str, str], *, several: bool) -> str:
    lines = [f"<b>{escape(trace.name)}</b>", f"{escape(titles[0])}: {escape(shown(point.x))}"]
    lines.append(f"{escape(trace.label if several else titles[1])}: {shown(repr(point.y))}")
    if point.bounds:
        low, high = (shown(repr(bound)) for bound in point.bounds)
        lines.append(f"{low} to {high}" + f", {point.count} runs" * (point.count > 1))
    return "<br>".join(lines)
