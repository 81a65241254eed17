"""Timelines of ranks: plots of the Chrome traces that :class:`pygdist.lightning.Timeline` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pygdist.errors import InputError
from pygdist.memory.limits import refusal_of
from pygdist.report.plots import COLOURS, Figure, base_trace
from pygdist.report.values import shown

#: Kinds of spans in the order and colours of the pictures that training writes; later ones cover earlier ones.
KINDS = {
    "travel": "#999999", "compute": COLOURS[0], "aggregate": COLOURS[9], "pack": COLOURS[1], "send": COLOURS[2],
    "wait": COLOURS[3], "unpack": COLOURS[5], "reduce": COLOURS[4],
}  # fmt: skip
_OTHER = COLOURS[7]
_MOST_SPANS = 6000  # so many bars browsers draw without delay


@dataclass(frozen=True)
class Timeline:
    """A timeline: its setting, its figure, names and colours of its kinds of spans, and a line of text below."""

    setting: str
    figure: Figure
    legend: list[tuple[str, str]]
    line: str


@dataclass(frozen=True)
class _Span:
    rank: str
    kind: str
    label: str
    start_ms: float
    ms: float
    aside: bool


def read_timeline(path: Path, setting: str) -> Timeline | None:
    """Draw the Chrome trace of a setting, with a line for each rank; ``None`` if the trace has no spans.

    Raises:
        InputError: If the file is no Chrome trace.
    """
    try:
        spans, names = _spans(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        unreadable = InputError(f"{path}: not a Chrome trace ({type(error).__name__}: {error})")
        raise refusal_of(error) or unreadable from error
    if not spans:
        return None
    drawn = sorted(sorted(spans, key=lambda span: -span.ms)[:_MOST_SPANS], key=lambda span: span.start_ms)
    groups: dict[str, dict[bool, list[_Span]]] = {kind: {} for kind in KINDS}
    for span in sorted(drawn, key=lambda span: span.aside):  # those of the rank's main thread first
        groups.setdefault(span.kind, {}).setdefault(span.aside, []).append(span)
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "ms"}, "type": "linear"},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names, "autorange": "reversed"},
    }
    data = [_trace(kind, some) for kind, threads in groups.items() for some in threads.values()]
    short = len(spans) - len(drawn)
    line = f"The {short:,} shortest of {len(spans):,} spans are left out." if short else ""
    legend = [(kind, KINDS.get(kind, _OTHER)) for kind, threads in groups.items() if threads]
    return Timeline(setting, {"data": data, "layout": layout, "lines": len(names)}, legend, line)


def _spans(trace: Any) -> tuple[list[_Span], list[str]]:
    """Return the spans, in ms since the first one, and the names of the ranks in their order."""
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    spans = [event for event in events if event.get("ph") == "X"]
    first = min((event["ts"] for event in spans), default=0)
    parsed = [
        _Span(
            rank=str(names.get(event["pid"], event["pid"])),
            kind=str(event["name"]),
            label=str(event.get("args", {}).get("of", "")),
            start_ms=round((event["ts"] - first) / 1e3, 4),
            ms=round(event["dur"] / 1e3, 4),
            aside=bool(event.get("tid", 0)),
        )
        for event in spans
    ]
    ranks = sorted({event["pid"] for event in spans})
    return parsed, [escape(str(names.get(rank, rank))) for rank in ranks]


def _trace(kind: str, spans: Sequence[_Span]) -> Figure:
    hovertext = [
        f"<b>{escape(kind)}</b> {escape(span.label)}<br>{escape(span.rank)}: {shown(repr(span.ms))} ms"
        f"<br>from {shown(repr(span.start_ms))} ms"
        for span in spans
    ]
    return {
        **base_trace("bar", kind, hovertext, KINDS.get(kind, _OTHER)),
        "orientation": "h",
        "y": [escape(span.rank) for span in spans],
        "base": [span.start_ms for span in spans],
        "x": [span.ms for span in spans],
        **({"width": 0.14, "offset": 0.32} if spans[0].aside else {"width": 0.62, "offset": -0.38}),
        "marker": {"color": KINDS.get(kind, _OTHER), "line": {"width": 0}},
    }
