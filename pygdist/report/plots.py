"""Plots as data: a description's plots over rows, in the form that plotly.js draws, the paper's beside ours.

Figures are plain dictionaries (plotly's JSON); colours of text and lines are the page's and are put in there.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pygdist.errors import InputError
from pygdist.report.axes import align, tick_logs
from pygdist.report.description import Plot
from pygdist.report.values import Row, is_same, number, shown, spoken, together

__all__ = ["COLOURS", "Drawn", "Figure", "Palette", "draw"]

Figure = dict[str, Any]

#: Of middle lightness: they are seen on white and on black.
COLOURS = (
    "#4c8bc8", "#e08a3c", "#4fa66a", "#cf5f63", "#9678c8", "#a4785f", "#d47fb4", "#8a929a", "#a9a83a", "#3fa9b5",
)  # fmt: skip
_PATTERNS = ("", "/", "x", ".")
_SYMBOLS = ("circle", "square", "diamond", "cross")
_DASHES = ("solid", "dash", "dot", "dashdot")


class Palette:
    """A colour for each name, the same in all plots of an experiment."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """How many names came before it."""
        return self._numbers.setdefault(name, len(self._numbers))

    def colour(self, name: str) -> str:
        """Its colour, which comes again after ten names, with another pattern."""
        return COLOURS[self.number(name) % len(COLOURS)]

    def swatch(self, name: str) -> str:
        """The background of its square in a legend, as CSS."""
        colour = self.colour(name)
        if self.number(name) < len(COLOURS):
            return colour
        return f"repeating-linear-gradient(135deg, {colour} 0 3px, transparent 3px 5px)"

    def style(self, name: str, styles: Sequence[str]) -> str:
        """What tells apart names of the same colour."""
        return styles[self.number(name) // len(COLOURS) % len(styles)]


@dataclass(frozen=True)
class Point:
    """A point: ``x`` as in the table, ``y``, its bounds if there are some, and of how many rows it is the middle."""

    x: str
    y: float
    bounds: tuple[float, float] | None
    count: int


@dataclass(frozen=True)
class Trace:
    """Points of one colour, and the column that they are of."""

    name: str
    label: str
    points: list[Point]


@dataclass(frozen=True)
class Drawn:
    """A plot that is drawn, or the reason why not.

    Attributes:
        plot: What was asked for.
        ours: Our figure, or ``None``.
        paper: The paper's, or ``None``.
        legend: Names and colours of the traces of both; none where there is one alone.
        lines: What must be said below.
    """

    plot: Plot
    ours: Figure | None
    paper: Figure | None
    legend: list[tuple[str, str]]
    lines: list[str] = field(default_factory=list)


def draw(
    plot: Plot,
    table: Path,
    rows: Sequence[Row],
    published: Sequence[Row],
    palette: Palette,
    measured: Collection[str] = (),
) -> Drawn:
    """Draw a plot of our rows and of the published ones.

    Args:
        plot: What to draw.
        table: Where our rows are from, for complaints.
        rows: Our rows; those with a note are left out.
        published: The paper's rows; those that lack a column of the plot are left out.
        palette: Colours of the experiment.
        measured: Columns of which several rows are drawn as their mean, with their standard deviation.

    Raises:
        InputError: If a cell that is to be drawn is no number.
    """
    ours = _traces(plot, table, [row for row in rows if not row.get("note")], measured)
    theirs = _traces(plot, table, [row for row in published if all(name in row for name in _needed(plot, row))])
    lines = [] if ours else [_why_not(plot, rows)]
    if any(point.count > 1 for trace in ours for point in trace.points):
        lines.append(
            "Several runs with the same values are drawn as their "
            + (
                "mean, with bars of a standard deviation."
                if set(plot.y) <= set(measured)
                else "median, with bars from the least to the greatest."
            )
        )
    figures = [_figure(plot, traces, palette) if traces else None for traces in (ours, theirs)]
    if figures[0] and figures[1] and not align(figures[0], figures[1]):
        lines.append("The two plots have different axes.")
    tick_logs([figure for figure in figures if figure])
    names = dict.fromkeys(trace.name for trace in [*ours, *theirs])
    legend = [(name, palette.swatch(name)) for name in names] if len(names) > 1 else []
    return Drawn(plot, figures[0], figures[1], legend, lines)


def _needed(plot: Plot, row: Row) -> Iterable[str]:
    """Columns without which a published row cannot be drawn; error bars are ours."""
    return (*plot.x, *plot.colour, *plot.where, next((name for name in plot.y if name in row), plot.y[0]))


def _why_not(plot: Plot, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if _chosen(plot, row)]
    if not rows:
        return "Not drawn: the table has no rows."
    if not chosen:
        return "Not drawn: no row has the values that this plot is of."
    noted = sum(bool(row.get("note")) for row in chosen)
    without = len(chosen) - noted
    reasons = [f"{noted} did not run"] * bool(noted) + [
        f"{without} lack{'s' * (without == 1)} a value that can be drawn"
    ] * bool(without)
    of = f"of {len(chosen)} rows, " if len(chosen) > 1 else "of the only row: "
    return f"Not drawn: {of}{' and '.join(reasons)}."


def _chosen(plot: Plot, row: Row) -> bool:
    return all(any(is_same(row[name], value) for value in values) for name, values in plot.where.items())


def _traces(plot: Plot, table: Path, rows: Sequence[Row], measured: Collection[str] = ()) -> list[Trace]:
    """The points of each trace, in order of the table, or of ``x`` where these are numbers."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if not _chosen(plot, row) or not _along(plot, row):
            continue
        for column in plot.y:
            if _is_measured(plot, row, column, table):
                name = _name(plot, row, column)
                groups.setdefault((name, column), {}).setdefault(_along(plot, row), []).append(row)
    return [
        Trace(
            name,
            spoken(column),
            [one for x in _ordered(points) for one in _points(plot, column, x, points[x], mean=column in measured)],
        )
        for (name, column), points in groups.items()
    ]


def _along(plot: Plot, row: Row) -> str:
    """Where a row stands along ``x``; nothing if it does not say."""
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


def _is_measured(plot: Plot, row: Row, column: str, table: Path) -> bool:
    """Whether a cell holds a number that can be drawn; what is not finite counts as missing."""
    text = row.get(column, "")
    if not text or text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return False
    value = number(text)
    if value is None:
        raise InputError(f"{table}: column '{column}' is to be drawn, and has {text!r}, which is no number")
    return value > 0 or "y" not in plot.log


def _ordered(names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    if any(number(name) is None for name in names):
        return names
    return sorted(names, key=float)


def _figure(plot: Plot, traces: Sequence[Trace], palette: Palette) -> Figure:
    words = _in_words(plot, traces)
    titles = (
        plot.x_title or ", ".join(spoken(name) for name in plot.x),
        plot.y_title or ", ".join(spoken(name) for name in plot.y),
    )
    layout: Figure = {}
    for axis, title in zip(("x", "y"), titles, strict=True):
        layout[f"{axis}axis"] = {"title": {"text": escape(title)}, "type": "log" if axis in plot.log else "linear"}
    if words:
        layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": words}
    if plot.kind == "bar":
        layout["barmode"] = "group"
    if plot.kind == "bar" and "y" not in plot.log:
        layout["yaxis"]["rangemode"] = "tozero"
    data = [_drawn(plot, trace, palette, titles, in_words=bool(words)) for trace in traces]
    return {"data": data, "layout": layout}


def _in_words(plot: Plot, traces: Sequence[Trace]) -> list[str]:
    """The words along ``x``; none where it is an axis of numbers."""
    values = _ordered(point.x for trace in traces for point in trace.points)
    if plot.kind != "bar" and all(number(x) is not None for x in values):
        return []
    return [escape(shown(x)) for x in values]


def _drawn(plot: Plot, trace: Trace, palette: Palette, titles: tuple[str, str], *, in_words: bool) -> Figure:
    found: Figure = {
        "name": escape(trace.name),
        "x": [escape(shown(point.x)) if in_words else float(point.x) for point in trace.points],
        "y": [point.y for point in trace.points],
        "hovertext": [_hover(trace, point, titles, several=len(plot.y) > 1) for point in trace.points],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"color": palette.colour(trace.name)},
        "showlegend": False,
    }
    if plot.kind == "bar":
        found |= {"type": "bar", "textposition": "none"}
        found["marker"]["pattern"] = {"shape": palette.style(trace.name, _PATTERNS), "solidity": 0.4}
    else:
        found |= {"type": "scatter", "mode": "lines+markers" if plot.kind == "line" else "markers"}
        found["marker"] |= {"size": 7, "symbol": palette.style(trace.name, _SYMBOLS)}
        found["line"] = {"color": palette.colour(trace.name), "dash": palette.style(trace.name, _DASHES), "width": 2}
    if any(point.bounds for point in trace.points):
        filled = [(point.y, point.bounds or (point.y, point.y)) for point in trace.points]
        found["error_y"] = {
            "type": "data", "array": [high - y for y, (_, high) in filled],
            "arrayminus": [y - low for y, (low, _) in filled], "thickness": 1, "width": 3,
        }  # fmt: skip
    return found


def _hover(trace: Trace, point: Point, titles: tuple[str, str], *, several: bool) -> str:
    lines = [f"<b>{escape(trace.name)}</b>", f"{escape(titles[0])}: {escape(shown(point.x))}"]
    lines.append(f"{escape(trace.label if several else titles[1])}: {shown(repr(point.y))}")
    if point.bounds:
        low, high = (shown(repr(bound)) for bound in point.bounds)
        lines.append(f"{low} to {high}" + f", {point.count} runs" * (point.count > 1))
    return "<br>".join(lines)
