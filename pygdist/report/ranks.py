"""Load per rank: a bar of each rank's seconds of computing and exchanging in an epoch, and the imbalance in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pygdist.errors import InputError
from pygdist.report.plots import COLOURS, Figure, base_trace
from pygdist.report.values import Row, measured, shown, spoken

COLUMNS = ("compute_s", "exchange_s", "sent_bytes", "sent_messages", "peak_gib")
_FEW = 4
_SECONDS = ("compute_s", "exchange_s")


@dataclass(frozen=True)
class Load:
    """The load of the ranks in one setting: medians over epochs and seeds."""

    setting: str
    ranks: list[Row]
    figure: Figure  # a stacked bar for each rank
    words: str  # the imbalance


def load_per_rank(rows: Sequence[Row], path: Path) -> list[Load]:
    """Return the load of each setting, in the order of a file with a row for each setting, seed, epoch and rank.

    Raises:
        InputError: If a column is missing, or a cell is no number; names the file.
    """
    if not rows:
        return []
    for name in ("setting", "rank", *_SECONDS):
        if name not in rows[0]:
            raise InputError(f"{path}: there is no column '{name}'")
    settings: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        rank = measured(row, "rank", path)
        if rank is None:
            raise InputError(f"{path}: column 'rank' has an empty cell")
        settings.setdefault(row["setting"], {}).setdefault(int(rank), []).append(row)
    return [_load(setting, ranks, path) for setting, ranks in settings.items()]


def _load(setting: str, by_rank: dict[int, list[Row]], path: Path) -> Load:
    ranks = []
    for rank, rows in sorted(by_rank.items()):
        median: Row = {"rank": str(rank)}
        for name in COLUMNS:
            values = [value for row in rows if (value := measured(row, name, path)) is not None]
            if values:
                median[name] = repr(statistics.median(values))
        ranks.append(median)
    return Load(setting, ranks, _figure(ranks), _in_words(ranks))


def _figure(ranks: Sequence[Row]) -> Figure:
    data = [
        {
            **base_trace("bar", name.removesuffix("_s"), [_hover(row) for row in ranks], COLOURS[number]),
            "x": [row["rank"] for row in ranks],
            "y": [float(row[name]) if name in row else None for row in ranks],
        }
        for number, name in enumerate(_SECONDS)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.3 if len(ranks) > _FEW else 0.6,
        "xaxis": {"title": {"text": "rank"}, "type": "category"},
        "yaxis": {"title": {"text": "seconds per epoch"}, "type": "linear", "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def _hover(row: Row) -> str:
    lines = [f"{spoken(name)}: {shown(row[name])}" for name in COLUMNS if name in row]
    return "<br>".join([f"<b>rank {escape(row['rank'])}</b>", *lines])


def _in_words(ranks: Sequence[Row]) -> str:
    """Return the ratio of the largest to the smallest value over ranks, for each kind of load."""
    if len(ranks) < 2:
        return "One rank."
    parts = []
    for name, what in (("compute_s", "computing"), ("sent_bytes", "bytes sent"), ("peak_gib", "peak memory")):
        values = [float(row[name]) for row in ranks if name in row]
        if len(values) == len(ranks) and min(values) > 0:
            parts.append(f"{what} {max(values) / min(values):.2f}")
        elif values and max(values) > 0:
            idle = sum(value <= 0 for value in values)
            parts.append(f"{what}: none on {idle} of {len(ranks)} ranks")
    return f"Largest over smallest of {len(ranks)} ranks: {', '.join(parts)}." if parts else ""
