"""Draws the figures of the explanations: who owns what, and what travels to whom.

    python docs/figures/draw.py            # write the SVGs beside this file
    python docs/figures/draw.py --check    # only tell which differ

One colour is one rank in all figures. A solid bar is a row on the rank that owns it; a dashed one is a copy of a row
that travelled; a hatched one is a copy that the rank computed, or holds from the start. Solid arrows are the forward
pass, dashed arrows gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH = 720  # as wide as the column of text, so that sizes below are pixels
RANKS = ("#2b6cb0", "#c2571a", "#2f855a", "#7b4bb0")  # a colour for each rank
PALE = ("#d6e6f6", "#fbe3d0", "#d5efe0", "#e7dcf5")
INK, QUIET, LINE, CARD = "#1f2933", "#52606d", "#cbd2d9", "#ffffff"
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


class Figure:
    """An SVG that grows by shapes; a card behind it makes it legible on a light and on a dark page.

    Args:
        height: Height in pixels; the width is the same for all figures.
        title: The text for those who do not see the figure.
    """

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self._shapes = list[str]()

    def text(
        self, x: float, y: float, text: str, *, size: int = 14, anchor: str = "middle", colour: str = INK,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text with its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, lines: Sequence[str], *, step: int = 18, **options: object) -> None:
        """Write several lines, one below the other."""
        for number, line in enumerate(lines):
            self.text(x, y + number * step, line, **options)  # type: ignore[arg-type]

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", line: str = LINE,
        dashed: bool = False, radius: float = 4, thick: float = 1.5,
    ) -> None:  # fmt: skip
        """Draw a rectangle."""
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{line}" stroke-width="{thick:g}"{dash}/>'
        )

    def row(self, x: float, y: float, label: str, rank: int, *, kind: str = "owned", width: float = 52) -> None:
        """Draw a row of a node: ``owned``, a ``halo`` row that travelled, or a ``replica`` that was computed here."""
        fill = {"owned": RANKS[rank], "halo": PALE[rank], "replica": f"url(#hatch{rank})"}[kind]
        self.box(x, y, width, 22, fill=fill, line=RANKS[rank], dashed=kind == "halo", radius=3)
        self.text(x + width / 2, y + 16, label, colour=CARD if kind == "owned" else INK, bold=True)

    def dot(self, x: float, y: float, label: str, rank: int, *, solid: bool = True, radius: float = 15) -> None:
        """Draw a node."""
        fill = RANKS[rank] if solid else CARD
        dash = "" if solid else ' stroke-dasharray="4 3"'
        self._shapes.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{RANKS[rank]}" '
            f'stroke-width="2"{dash}/>'
        )
        self.text(x, y + 5, label, colour=CARD if solid else INK, bold=True)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, colour: str = INK, back: bool = False,
        head: bool = True, thick: float = 2,
    ) -> None:  # fmt: skip
        """Draw an arrow, dashed if it carries gradients ``back``; without ``head`` it is an edge."""
        dash = ' stroke-dasharray="6 4"' if back else ""
        tip = f' marker-end="url(#head{_COLOURS.index(colour)})"' if head else ""
        self._shapes.append(
            f'<path d="M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}" stroke="{colour}" stroke-width="{thick:g}" '
            f'fill="none"{dash}{tip}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        heads = "".join(
            f'<marker id="head{number}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 Z" fill="{colour}"/></marker>'
            for number, colour in enumerate(_COLOURS)
        )
        hatches = "".join(
            f'<pattern id="hatch{number}" width="7" height="7" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{CARD}"/>'
            f'<rect width="2.4" height="7" fill="{pale}"/></pattern>'
            for number, pale in enumerate(("#9cc2e8", "#f0b48a", "#93d0b0", "#c4a8e8"))
        )
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="{FONT}">\n<title>{escape(self.title)}</title>\n<defs>{heads}{hatches}</defs>\n'
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self.height - 2}" rx="10" fill="{CARD}" '
            f'stroke="{LINE}"/>\n{shapes}\n</svg>\n'
        )


_COLOURS = (INK, QUIET, *RANKS)


# -- three choices -----------------------------------------------------------------------------------------------------

_SYSTEMS = (
    ("NeutronStar", "chunk: ranges of nodes", "hybrid: fetch or compute", "averages gradients"),
    ("NeutronTP", "chunk: ranges of nodes", "tensor: splits columns", "averages gradients"),
    ("CATGNN", "spring: clusters of nodes", "replica: keeps copies", "averages models"),
    ("DistGNN", "libra: edges", "delayed: partial sums", "averages gradients"),
    ("P3", "hash: nodes, columns", "pushpull: sums, not rows", "averages gradients"),
)


def three_choices() -> Figure:
    """Draw the three choices, and each published system as one of each."""
    figure = Figure(500, "Three choices: Partitioner, Backend, Strategy, and the five published systems as triples")
    heads = (
        (120, 180, "Partitioner", "who owns what"),
        (308, 190, "Backend", "how neighbours arrive"),
        (506, 200, "Strategy", "how ranks keep one model"),
    )
    for x, width, name, what in heads:
        figure.box(x, 18, width, 200, fill="#f7f9fb")
        figure.text(x + width / 2, 44, name, size=17, bold=True)
        figure.text(x + width / 2, 66, what, colour=QUIET)
    _cut_graph(figure, 137, 85)
    figure.row(325, 100, "a", 0)
    figure.row(325, 128, "b", 0)
    figure.row(325, 156, "c", 1, kind="halo")
    figure.row(430, 156, "c", 1)
    figure.arrow((426, 167), (382, 167), colour=RANKS[1])
    figure.text(351, 202, "rank 0", size=13, colour=RANKS[0], bold=True)
    figure.text(456, 202, "rank 1", size=13, colour=RANKS[1], bold=True)
    for rank, x in enumerate((538, 622)):
        figure.box(x, 96, 52, 40, fill=PALE[rank], line=RANKS[rank])
        figure.text(x + 26, 121, "model", size=13)
        side = -1 if rank == 0 else 1  # of the middle
        figure.arrow((606 + side * 50, 140), (606 + side * 28, 164), colour=RANKS[rank])
        figure.arrow((606 + side * 8, 164), (606 + side * 30, 140), colour=QUIET)
    figure.box(564, 168, 84, 26, fill="#eef1f4", line=QUIET)
    figure.text(606, 186, "average", size=13)
    for number, (system, *choices) in enumerate(_SYSTEMS):
        y = 240 + number * 49
        figure.text(14, y + 24, system, anchor="start", bold=True)
        for (x, width, *_), choice in zip(heads, choices, strict=True):
            figure.box(x, y, width, 36, fill="#eef1f4", line="none", radius=6)
            figure.text(x + width / 2, y + 23, choice)
    return figure


def _cut_graph(figure: Figure, x: float, y: float) -> None:
    """Draw four nodes on two ranks, with the cut between them."""
    places = {"a": (x + 20, y + 25), "b": (x + 35, y + 90), "c": (x + 120, y + 20), "d": (x + 125, y + 85)}
    for one, other in ("ab", "ac", "cd", "bd"):
        figure.arrow(places[one], places[other], colour=QUIET, head=False)
    for name, place in places.items():
        figure.dot(*place, name, "abcd".index(name) // 2)
    figure._shapes.append(
        f'<path d="M{x + 78} {y} L{x + 70} {y + 122}" stroke="{INK}" stroke-width="2" stroke-dasharray="2 4"/>'
    )


# -- NeutronStar -------------------------------------------------------------------------------------------------------


def neutronstar() -> Figure:
    """Draw what rank 0 holds and gets for a model of two layers: by comm, by cache, by hybrid."""
    figure = Figure(536, "NeutronStar: with comm rank 0 fetches halo rows in every hop, with cache it computes them")
    panels: tuple[tuple[str, str, dict[str, Sequence[str]]], ...] = (
        ("comm", "fetches in every hop", {"halo": ("0c", "0d", "1c", "1d"), "replica": ()}),
        ("cache", "computes all itself", {"halo": (), "replica": ("0c", "0d", "0e", "1c", "1d")}),
        ("hybrid", "whichever costs less", {"halo": ("1d",), "replica": ("0c", "0d", "0e", "1c")}),
    )
    for number, (name, what, rows) in enumerate(panels):
        _panel(figure, 14 + number * 234, name, what, rows)
    places = {"a": (36, 482), "c": (100, 456), "e": (164, 456), "b": (36, 512), "d": (100, 512)}
    for one, other in ("ac", "ce", "bd"):
        figure.arrow(places[one], places[other], colour=QUIET, head=False)
    for name, place in places.items():
        figure.dot(*place, name, 0 if name in "ab" else 1, radius=13)
    figure.row(214, 444, "", 0, width=30)
    figure.text(252, 460, "own row", anchor="start")
    figure.row(330, 444, "", 1, kind="halo", width=30)
    figure.text(368, 460, "halo row", anchor="start")
    figure.row(214, 474, "", 1, kind="replica", width=30)
    figure.text(252, 490, "copied features (once), or a row that rank 0 computes again", anchor="start")
    figure.arrow((212, 515), (246, 515), colour=RANKS[1])
    figure.text(252, 520, "a row is fetched", anchor="start")
    figure.arrow((396, 515), (430, 515), colour=RANKS[0], back=True)
    figure.text(436, 520, "its gradient", anchor="start")
    return figure


def _panel(figure: Figure, x: float, name: str, what: str, rows: dict[str, Sequence[str]]) -> None:
    figure.text(x + 112, 34, name, size=17, bold=True)
    figure.text(x + 112, 55, what, colour=QUIET)
    figure.box(x, 68, 224, 206, fill="#f4f8fc", line=RANKS[0])
    figure.box(x, 330, 224, 96, fill="#fdf6f0", line=RANKS[1])
    for stage, title in enumerate(("features", "layer 1", "layer 2")):
        left = x + 14 + stage * 72
        figure.text(left + 26, 90, title, size=13, colour=QUIET)
        for place, own in enumerate("ab"):
            figure.row(left, 100 + place * 28, own, 0)
        for place, other in enumerate("cde"):
            for kind, names in rows.items():
                if f"{stage}{other}" in names:
                    figure.row(left, 156 + place * 28, other, 1, kind=kind)
            if stage < 2 and place < 2:
                figure.row(left, 340 + place * 28, other, 1)
        fetched = [one for one in rows["halo"] if one[0] == str(stage)]
        if fetched:
            figure.arrow((left + (18 if stage else 26), 336), (left + (18 if stage else 26), 212), colour=RANKS[1])
        if fetched and not stage:  # their sum is kept
            figure.text(left + 34, 306, "once", size=13, anchor="start", colour=RANKS[1])
        if fetched and stage:  # features need no gradient
            figure.arrow((left + 38, 212), (left + 38, 336), colour=RANKS[0], back=True)
    figure.text(x + 216, 264, "rank 0", size=13, anchor="end", colour=RANKS[0], bold=True)
    figure.text(x + 216, 356, "rank 1", size=13, anchor="end", colour=RANKS[1], bold=True)
    note = {
        "comm": "each epoch: c and d of layer 1",
        "cache": "each epoch: no row",
        "hybrid": "each epoch: d of layer 1",
    }[name]
    figure.text(x + 112, 416, note, size=13, colour=QUIET)


# -- NeutronTP ---------------------------------------------------------------------------------------------------------


def _matrix(figure: Figure, x: float, y: float, *, columns: bool, size: float = 108) -> None:
    """Draw the rows of all nodes as a square, cut by rows or by columns, in the colours of three ranks."""
    step = size / 3
    for rank in range(3):
        place = (x + rank * step, y, step, size) if columns else (x, y + rank * step, size, step)
        figure.box(*place, fill=RANKS[rank], line=CARD, radius=2)
        middle = (x + (rank + 0.5) * step, y + size / 2) if columns else (x + size / 2, y + (rank + 0.5) * step)
        figure.text(middle[0], middle[1] + 5, str(rank), colour=CARD, bold=True)


def neutrontp() -> Figure:
    """Draw the switch from rows to columns and back, for a layer and for a decoupled model."""
    figure = Figure(470, "NeutronTP: rows become columns, every rank sums over all edges, columns become rows again")
    figure.text(18, 32, "One layer", size=17, bold=True, anchor="start")
    for x, columns, above, below in (
        (60, False, "some rows, all columns", "weights, on whole rows"),
        (306, True, "some columns, all rows", "sums over all edges"),
        (552, False, "some rows, all columns", "next layer"),
    ):
        figure.text(x + 54, 60, above, size=13, colour=QUIET)
        _matrix(figure, x, 70, columns=columns)
        figure.text(x + 54, 198, below, bold=True)
    for x, name in ((176, "split"), (422, "gather")):
        figure.arrow((x, 124), (x + 122, 124))
        figure.text(x + 60, 112, name, bold=True, size=15)
        for place, line in enumerate(("each rank sends", "a share to every", "other rank")):
            figure.text(x + 60, 144 + place * 16, line, size=13, colour=QUIET)
    figure.text(
        360, 226, "0, 1, 2: the rank that holds this share of the matrix (nodes × columns)", size=13, colour=QUIET
    )
    figure.box(14, 244, 692, 1, line=LINE)
    _chain(figure, 262, "Coupled model, 2 layers", ("W₁", "⇄", "sum", "⇄", "W₂", "⇄", "sum", "⇄", "loss"))
    _chain(figure, 346, "Decoupled model, 2 layers", ("W₁", "W₂", "⇄", "sum", "sum", "⇄", "loss"))
    figure.box(24, 432, 30, 20, fill="#eef1f4", line=QUIET)
    figure.text(62, 447, "on rows", anchor="start")
    figure.box(150, 432, 30, 20, line=QUIET, dashed=True)
    figure.text(188, 447, "on columns", anchor="start")
    figure.arrow((300, 442), (352, 442), thick=3)
    figure.text(362, 447, "an exchange of all ranks", anchor="start")
    return figure


def _chain(figure: Figure, y: float, title: str, steps: Sequence[str]) -> None:
    """Draw the steps of a model in a line; an exchange lies between rows and columns."""
    figure.text(18, y + 16, title, bold=True, anchor="start", size=15)
    x = 24.0
    for step in steps:
        if step == "⇄":
            figure.arrow((x, y + 50), (x + 52, y + 50), thick=3)
            x += 62
            continue
        rows = step != "sum"
        figure.box(x, y + 32, 66, 36, fill="#eef1f4" if rows else CARD, line=QUIET, dashed=not rows)
        figure.text(x + 33, y + 55, step, bold=True)
        x += 76
    count = 2 * list(steps).count("⇄")
    figure.text(704, y + 16, f"{count} exchanges an epoch, with those of the backward pass", anchor="end", colour=QUIET)


# -- CATGNN ------------------------------------------------------------------------------------------------------------


def catgnn() -> Figure:
    """Draw the stream, the parts with their replicas, and the models that are averaged."""
    figure = Figure(452, "CATGNN: edges are read as a stream, parts train by themselves, models are averaged")
    figure.box(18, 30, 118, 150, fill="#f7f9fb")
    figure.text(77, 52, "edges on disk", bold=True)
    for number in range(5):
        figure.text(77, 78 + number * 22, ("a b", "b c", "c d", "a c", "...")[number], colour=QUIET)
    figure.arrow((140, 104), (196, 104))
    figure.text(168, 92, "stream", size=13, colour=QUIET)
    figure.box(200, 66, 118, 76, fill="#eef1f4", line=QUIET)
    figure.text(259, 100, "partitioner", bold=True)
    figure.text(259, 122, "spring", colour=QUIET)
    for rank, y in enumerate((24, 120)):
        figure.arrow((322, 104), (386, y + 40), colour=RANKS[rank])
        for number in range(2):
            x = 392 + number * 160
            figure.box(x, y, 150, 82, fill=CARD, line=RANKS[rank])
            figure.text(
                x + 8, y + 19, f"part {rank + 2 * number}", size=13, anchor="start", colour=RANKS[rank], bold=True
            )
            figure.text(x + 142, y + 19, "on disk", size=13, anchor="end", colour=QUIET)
            figure.row(x + 8, y + 28, "own nodes", rank, width=134)
            figure.row(x + 8, y + 54, "replicas", 1 - rank, kind="replica", width=134)
    for rank, x in enumerate((18, 442)):
        figure.box(x, 238, 260, 84, fill=PALE[rank], line=RANKS[rank])
        figure.text(x + 10, 260, f"rank {rank}", anchor="start", colour=RANKS[rank], bold=True)
        for number in range(2):
            figure.row(x + 10 + number * 124, 274, f"train part {rank + 2 * number}", rank, width=116)
        figure.text(x + 250, 260, "one part after the other", size=13, anchor="end", colour=QUIET)
        figure.text(x + 130, 314, "a model for each part", size=13, colour=QUIET)
        up = -1 if rank == 0 else 1
        figure.arrow((360 + up * 130, 326), (360 + up * 66, 366), colour=RANKS[rank])
        figure.arrow((360 + up * 90, 390), (360 + up * 220, 330), colour=QUIET)
    figure.box(274, 370, 172, 44, fill="#eef1f4", line=QUIET)
    figure.text(360, 389, "mean of all models", bold=True)
    figure.text(360, 407, "by training nodes", size=13, colour=QUIET)
    figure.text(360, 284, "no rows,", colour=QUIET)
    figure.text(360, 302, "no gradients", colour=QUIET)
    for place, line in enumerate(("once per epoch,", "each part sends its model", "and gets the mean")):
        figure.text(18, 394 + place * 17, line, anchor="start", size=13, colour=QUIET)
    return figure


# -- DistGNN -----------------------------------------------------------------------------------------------------------


def distgnn() -> Figure:
    """Draw a split node: leaves send partial sums to the root, and get the total; then the delays."""
    figure = Figure(500, "DistGNN: a split node has a root and leaves; partial sums go up, totals come down")
    figure.text(18, 32, "One hop: node v is split over three parts", size=17, bold=True, anchor="start")
    for rank, x in enumerate((18, 255, 492)):
        figure.box(x, 48, 210, 152, fill=PALE[rank], line=RANKS[rank])
        figure.text(x + 10, 70, f"part {rank}", anchor="start", colour=RANKS[rank], bold=True)
        figure.text(x + 200, 70, ("root of v", "leaf of v", "leaf of v")[rank], anchor="end", colour=QUIET)
        figure.dot(x + 105, 160, "v", 0, solid=rank == 0, radius=18)
        for number in range(3):
            place = (x + 45 + number * 60, 98)
            figure.arrow((place[0], place[1] + 12), (x + 105 + (number - 1) * 14, 140), colour=QUIET)
            figure.dot(*place, "abcdefghi"[rank * 3 + number], rank, radius=12)
        figure.text(x + 10, 166, "own edges", anchor="start", size=13, colour=QUIET)
    for x, bend, rank in ((255, 246, 1), (492, 268, 2)):
        figure._shapes.append(
            f'<path d="M{x + 105} 182 V{bend} H{105 if rank == 1 else 128} V184" stroke="{RANKS[rank]}" '
            f'stroke-width="2" fill="none" marker-end="url(#head{_COLOURS.index(RANKS[rank])})"/>'
        )
    figure.text(244, 262, "1  up: partial sums", anchor="middle", bold=True)
    figure._shapes.append(
        f'<path d="M146 184 V216 H384 V184" stroke="{RANKS[0]}" stroke-width="2" fill="none" '
        f'marker-end="url(#head{_COLOURS.index(RANKS[0])})"/>'
        f'<path d="M384 216 H620 V184" stroke="{RANKS[0]}" stroke-width="2" fill="none" '
        f'marker-end="url(#head{_COLOURS.index(RANKS[0])})"/>'
    )
    figure.text(500, 234, "2  down: the total", bold=True, colour=RANKS[0])
    figure.text(18, 312, "When a sum that is sent in pass t is used", size=17, bold=True, anchor="start")
    names = (("cd-0", "in the same pass: exact"), ("cd-r", "r passes later"), ("0c", "never: sums stay here"))
    for number, (name, when) in enumerate(names):
        y = 344 + number * 50
        figure.text(18, y + 6, name, bold=True, size=15, anchor="start")
        figure.text(76, y + 6, when, anchor="start", colour=QUIET)
        for place in range(7):
            x = 276 + place * 62
            figure.box(x, y - 14, 54, 28, fill="#eef1f4", line=LINE)
            figure.text(x + 27, y + 5, "t" if place == 0 else f"t+{place}", size=13)
        if name == "cd-0":
            figure.box(276, y - 14, 54, 28, line=RANKS[0], thick=3)
        elif name == "cd-r":
            figure.box(276, y - 14, 54, 28, line=RANKS[1], thick=3)
            figure.box(276 + 5 * 62, y - 14, 54, 28, line=RANKS[1], thick=3)
            figure._shapes.append(
                f'<path d="M303 {y + 14} C 360 {y + 34}, 560 {y + 34}, {276 + 5 * 62 + 27} {y + 18}" fill="none" '
                f'stroke="{RANKS[1]}" stroke-width="2" marker-end="url(#head{_COLOURS.index(RANKS[1])})"/>'
            )
    figure.text(490, 488, "here r = 5; each pass handles one fifth of the split nodes", size=13, colour=QUIET)
    return figure


# -- P3 ----------------------------------------------------------------------------------------------------------------


def p3() -> Figure:
    """Draw a step of push-pull parallelism for the batch of rank 0, and the bytes beside pulled features."""
    figure = Figure(470, "P3: the structure of a batch is pushed to all ranks, sums of the first layer are pulled back")
    figure.text(18, 32, "pushpull, for the batch of rank 0", size=17, bold=True, anchor="start")
    for rank, x in enumerate((18, 252, 486)):
        figure.box(x, 46, 216, 130, fill="#f7f9fb", line=RANKS[rank])
        figure.text(x + 10, 68, f"rank {rank}", anchor="start", colour=RANKS[rank], bold=True)
        for column in range(3):
            fill = RANKS[rank] if column == rank else CARD
            figure.box(
                x + 12 + column * 24, 80, 24, 84, fill=fill, line=RANKS[rank] if column == rank else LINE, radius=2
            )
        figure.lines(x + 96, 98, ("some columns", "of all nodes:", "a term of the", "first layer"), anchor="start")
    figure.arrow((40, 180), (40, 224), colour=RANKS[0])  # the term of its own columns
    for rank, x, start, up, down in ((1, 330, 70, 202, 250), (2, 564, 84, 214, 266)):
        figure._shapes.append(
            f'<path d="M{start} 226 V{up} H{x} V180" stroke="{RANKS[0]}" stroke-width="2" fill="none" '
            f'marker-end="url(#head{_COLOURS.index(RANKS[0])})"/>'
        )
        figure._shapes.append(
            f'<path d="M{x + 60} 178 V{down} H226" stroke="{RANKS[rank]}" stroke-width="2" fill="none" '
            f'marker-end="url(#head{_COLOURS.index(RANKS[rank])})"/>'
        )
    figure.text(206, 194, "1  push: the structure", anchor="middle", bold=True, colour=RANKS[0])
    figure.text(230, 242, "2  pull: the terms", anchor="start", bold=True)
    figure.box(18, 228, 204, 60, fill=PALE[0], line=RANKS[0])
    figure.text(120, 252, "rank 0 adds the terms,", anchor="middle")
    figure.text(120, 272, "computes the other layers", anchor="middle")
    figure.lines(
        470,
        284,
        ("backward: the gradient of the sum", "goes the same ways, with arrows turned round"),
        step=15,
        anchor="middle",
        size=13,
        colour=QUIET,
    )
    figure.box(14, 306, 692, 1, line=LINE)
    figure.text(18, 334, "pull, for the batch of rank 0", size=17, bold=True, anchor="start")
    figure.box(18, 348, 204, 102, fill=PALE[0], line=RANKS[0])
    figure.text(28, 370, "rank 0", anchor="start", colour=RANKS[0], bold=True)
    figure.row(28, 380, "own rows", 0, width=90)
    figure.row(28, 408, "fetched rows", 1, kind="halo", width=110)
    figure.text(28, 445, "computes all layers", anchor="start", size=13, colour=QUIET)
    for rank, x in ((1, 400), (2, 560)):
        figure.box(x, 366, 140, 66, fill=CARD, line=RANKS[rank])
        figure.text(x + 10, 388, f"rank {rank}", anchor="start", colour=RANKS[rank], bold=True)
        figure.row(x + 10, 398, "feature rows", rank, width=118)
    figure.arrow((396, 412), (144, 416), colour=RANKS[1])
    figure.text(310, 402, "whole feature rows", bold=True)
    figure._shapes.append(
        f'<path d="M630 434 V446 H250 L146 427" stroke="{RANKS[2]}" stroke-width="2" fill="none" '
        f'marker-end="url(#head{_COLOURS.index(RANKS[2])})"/>'
    )
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "three-choices": three_choices, "neutronstar": neutronstar, "neutrontp": neutrontp, "catgnn": catgnn,
    "distgnn": distgnn, "p3": p3,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures, or tell which committed ones differ."""
    parser = argparse.ArgumentParser(description="Draw the figures of the explanations.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a figure differs")
    check = parser.parse_args(argv).check
    stale = list[str]()
    for name, draw in FIGURES.items():
        path, text = HERE / f"{name}.svg", draw().svg()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    sys.stderr.write(f"{'differ' if check else 'written'}: {', '.join(stale) or 'none'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
