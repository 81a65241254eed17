"""Cards for notebooks: a title, a table of figures and bars, as plain HTML and SVG.

There is no script and no style sheet. Text has the colour of the page, and bars have colours that stand out from white
and from black, so that light and dark themes show the same. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_BLUE, _ORANGE = "#3f78b5", "#c8690f"  # on white and on #111 a contrast of 3.5 and more
_MOST_ROWS, _MOST_LABELS = 16, 24
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 150, 64, 22, 34  # of a plot, and around its bars
_CELL = "text-align:{};padding:1px 10px 1px 0;border:0;background:none;white-space:nowrap"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def card(title: str, figures: Mapping[str, object], *below: str, note: str = "") -> str:
    """Return a card: a title, figures by name, what :func:`bars` and :func:`table` return, and a sentence."""
    rows = "".join(_row([escape(name), said(value)], "left") for name, value in figures.items())
    said_below = f'<div style="opacity:.75">{escape(note)}</div>' if note else ""
    return (
        f'<div><div style="font-weight:bold;margin-bottom:4px">{escape(title)}</div>'
        '<div style="display:flex;flex-wrap:wrap;gap:4px 28px;align-items:flex-start">'
        f'<table style="margin:0;border:0">{rows}</table>{"".join(below)}</div>{said_below}</div>'
    )


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows of figures as a table; the first 16 of them."""
    if not rows:
        return ""
    head = "".join(f'<th style="{_CELL.format("right")}">{escape(name)}</th>' for name in rows[0])
    body = "".join(_row(map(said, row.values()), "right") for row in rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    rest = f'<tr><td colspan="{len(rows[0])}" style="border:0">and {more:,} more</td></tr>' if more > 0 else ""
    return f'<table style="margin:0;border:0"><tr>{head}</tr>{body}{rest}</table>'


def bars(series: Mapping[str, Sequence[int]], *, each: str = "part", of: str = "rows") -> str:
    """Return a plot of one or two series: a bar for each part, and their names above.

    Args:
        series: Numbers of all parts, by name.
        each: Word for a part, below the bars.
        of: Word for the numbers, in the description that screen readers read.
    """
    numbers = list(series.values())
    count, most = max(map(len, numbers), default=0), max((max(one, default=0) for one in numbers), default=0)
    if not count or most <= 0:
        return ""
    room, bottom = (_WIDTH - _LEFT) / count, _HEIGHT - _BOTTOM
    width = room * 0.8 / len(series)
    shapes = []
    for place, (name, values) in enumerate(series.items()):
        color, text = (_BLUE, _ORANGE)[place % 2], escape(name)
        for part, value in enumerate(values):
            height = (bottom - _TOP) * value / most
            x = _LEFT + part * room + room * 0.1 + place * width
            shapes.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{color}"><title>{escape(each)} {part}: {value:,} {text}</title></rect>'
            )
        at = _LEFT + place * 130
        shapes.append(f'<rect x="{at}" y="4" width="9" height="9" fill="{color}"/>{_text(at + 13, 12, name, "start")}')
    shapes += [_text(_LEFT - 6, _TOP + 4, f"{most:,}", "end"), _text(_LEFT - 6, bottom + 4, "0", "end")]
    if count <= _MOST_LABELS:
        shapes += [_text(_LEFT + (part + 0.5) * room, bottom + 14, str(part), "middle") for part in range(count)]
    shapes.append(_text(_LEFT + (_WIDTH - _LEFT) / 2, bottom + 28, each, "middle"))
    axis = f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH}" fill="none" stroke="currentColor" stroke-opacity=".5"/>'
    label = escape(f"{of} of each {each}: {', '.join(series)}")
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="font:11px sans-serif">{"".join(shapes)}{axis}</svg>'
    )


def as_text(value: object) -> str:
    """Return a value as people read it: fractions with three digits, collections in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_text(one)}" for name, one in value.items())
    if isinstance(value, list):  # of sizes, or of sentences
        return (", " if all(isinstance(one, int) for one in value) else "; ").join(map(as_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else "unknown" if value is None else str(value)


def said(value: object) -> str:
    """Return a number or a text as it is shown in HTML; texts are escaped."""
    return escape(as_text(value))


def said_bytes(size: float) -> str:
    """Return a number of bytes as it is shown, such as "1.5 MiB"."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def _row(cells: Iterable[str], align: str) -> str:
    opening = f'<td style="{_CELL.format(align)}">'
    return f"<tr>{''.join(f'{opening}{cell}</td>' for cell in cells)}</tr>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'
