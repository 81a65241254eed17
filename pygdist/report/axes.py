"""Equal axes for two figures side by side, if both can be read on them, and labels of logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

#: Largest ratio of the maxima of two figures with equal axes; beyond it, the smaller figure could hardly be read.
_ALIKE, _ALIKE_LOG = 4.0, 100.0
_PAD = 0.06
#: Up to this number of values, each gets its own tick: numbers of processes and parts are powers of 2, not of 10.
_MOST_TICKS = 8


def align(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Give two figures of plotly the same ranges; their axes must be of the same kinds.

    Returns:
        True if both axes are equal now.
    """
    figures = (first, second)
    aligned = _align_numbers(figures, "y")
    if any("categoryarray" in figure["layout"]["xaxis"] for figure in figures):
        return _align_words(figures) and aligned
    return _align_numbers(figures, "x") and aligned


def _align_words(figures: Sequence[dict[str, Any]]) -> bool:
    """Show the words of both figures along ``x``, if they have half of the words in common."""
    axes = [figure["layout"]["xaxis"] for figure in figures]
    lists = [axis.get("categoryarray", []) for axis in axes]
    words = list(dict.fromkeys(lists[0] + lists[1]))
    if 2 * len(set(lists[0]) & set(lists[1])) < len(words):
        return False
    for axis in axes:
        axis |= {"categoryarray": words, "range": [-0.5, len(words) - 0.5]}
    return True


def _align_numbers(figures: Sequence[dict[str, Any]], axis: Literal["x", "y"]) -> bool:
    layouts = [figure["layout"][f"{axis}axis"] for figure in figures]
    log = layouts[0]["type"] == "log"
    sides = [[value for trace in figure["data"] for value in _extent(trace, axis)] for figure in figures]
    if log:
        sides = [[value for value in side if value > 0] for side in sides]
    tops = [max((abs(value) for value in side), default=0.0) for side in sides]
    if max(tops) > (_ALIKE_LOG if log else _ALIKE) * min(tops):
        return False
    low, high = min(map(min, sides)), max(map(max, sides))
    for layout in layouts:
        layout["range"] = _padded(low, high, log=log, from_zero=layout.get("rangemode") == "tozero")
    return True


def tick_logs(figures: Sequence[dict[str, Any]]) -> None:
    """Label the logarithmic axes of figures side by side in steps of 1, 2, 5, 10, which plotly does not offer."""
    for axis in ("x", "y"):
        values = {value for figure in figures for trace in figure["data"] for value in _extent(trace, axis)}
        for figure in figures:
            layout = figure["layout"][f"{axis}axis"]
            if layout["type"] == "log":
                each = axis == "x" and _are_apart(values)
                ticks = sorted(value for value in values if value > 0) if each else _ticks(values)
                layout |= {"tickvals": ticks, "ticktext": [_tick_label(tick) for tick in ticks]}


def _are_apart(values: Collection[float]) -> bool:
    """Tell if each value can have a tick of its own."""
    positive = sorted(value for value in values if value > 0)
    return len(positive) <= _MOST_TICKS and all(b >= 1.5 * a for a, b in pairwise(positive))


def _ticks(values: Iterable[float]) -> list[float]:
    logs = [math.log10(value) for value in values if value > 0]
    low, high = math.floor(min(logs)), math.ceil(max(logs)) + 1
    decades = max(logs) - min(logs)
    step = math.ceil(decades / _MOST_TICKS) or 1
    digits: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9) if decades < 0.7 else (1, 2, 5) if decades < 3 else (1,)
    return [digit * 10.0**power for power in range(low, high, step) for digit in digits]


def _tick_label(tick: float) -> str:
    if 1e-3 <= tick < 1e6:
        return f"{tick:,.10g}"
    digits, _, power = f"{tick:.4e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    return f"{'' if digits == '1' else f'{digits}×'}10<sup>{int(power)}</sup>"


def _extent(trace: dict[str, Any], axis: str) -> list[float]:
    """Return the values of a trace along an axis, or the ends of their error bars."""
    values: list[float] = list(trace[axis])
    error = trace.get(f"error_{axis}")
    if not error:
        return values
    above = [value + bar for value, bar in zip(values, error["array"], strict=True)]
    return above + [value - bar for value, bar in zip(values, error["arrayminus"], strict=True)]


def _padded(low: float, high: float, *, log: bool, from_zero: bool) -> list[float]:
    if log:
        low, high = math.log10(low), math.log10(high)
    pad = _PAD * ((high - low) or 1.0)
    if from_zero and not log:
        return [min(low * (1 + _PAD), 0.0), max(high * (1 + _PAD), 0.0)]
    return [low - pad, high + pad]
