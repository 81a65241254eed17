"""The columns of a table of edges that hold the sources and the targets, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENDS = (
    ({"source", "src", "from", "s"}, {"target", "tgt", "dst", "dest", "destination", "to", "t"}),
    ({"head", "h"}, {"tail", "t"}),
    ({"start"}, {"end"}),
    ({"citing"}, {"cited"}),
    ({"follower"}, {"followee", "followed"}),
    ({"u"}, {"v"}),
    ({"i"}, {"j"}),
    ({"row"}, {"col", "column"}),
    ({"1", "a"}, {"2", "b"}),
    ({"0"}, {"1"}),
)
_REST = {
    "",
    "id",
    "ids",
    "idx",
    "index",
    "node",
    "nodes",
    "nodeid",
    "vertex",
    "vertexid",
    "user",
    "userid",
    "paper",
    "paperid",
}


def ends_of(names: Sequence[str]) -> tuple[int, int] | None:
    """Return the places of the columns of sources and of targets; ``None`` if the names tell none, or several.

    Names are those that people give: ``Source, Target``; ``src_id, dst_id``; ``FromNodeId, ToNodeId``; ``id_1, id_2``;
    ``u, v``; in any order.
    """
    words = [_words(name) for name in names]
    places = [
        (source, target)
        for sources, targets in _ENDS
        for source, first in enumerate(words)
        for target, second in enumerate(words)
        if source != target
        and _is_end(first, sources)
        and _is_end(second, targets)
        and first - sources == second - targets
    ]
    return places[0] if places and len({*places[0]}) == 2 and len(set(places)) == 1 else None


def _words(name: str) -> frozenset[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z0-9])", " ", name.strip().strip("\"'"))
    return frozenset(re.findall(r"[a-z]+|[0-9]+", spaced.lower()))


def _is_end(words: frozenset[str], ends: set[str]) -> bool:
    """True if one word is an end's, and the others are those of any id."""
    return len(words & ends) == 1 and words - ends <= _REST
