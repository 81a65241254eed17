"""Options that must be equal on all ranks: each rank may get its own from a command line on its machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from pygdist.comm.communicator import Communicator
from pygdist.errors import InputError

_PIECE = 1000  # bytes of a text that travel at once
_SHOWN = 80  # characters of a value in a message


def require_alike(values: Mapping[str, object], ranks: Communicator) -> None:
    """Refuse values that differ between ranks, such as a learning rate; it takes one small exchange if all are equal.

    Args:
        values: By name, as ``str`` shows them in messages.
        ranks: All of these make the call.

    Raises:
        InputError: On all ranks; names the first value that differs, and the first rank that has another than rank 0.
    """
    mine = {name: str(value) for name, value in values.items()}
    if ranks.are_alike([float(zlib.crc32(json.dumps(mine, sort_keys=True).encode()))]):
        return
    first = json.loads(text_of_rank_zero(json.dumps(mine), ranks))
    names = [name for name in {**mine, **first} if first.get(name) != mine.get(name)]
    problem = ""
    if names:
        here, there = (of_rank.get(names[0], "not set")[:_SHOWN] for of_rank in (mine, first))
        problem = f"{names[0]} is {there} on rank 0, but {here} on rank {ranks.rank}"
    told = next(filter(None, ranks.gather_text(problem)))
    raise InputError(f"{told}; start all processes with the same options and the same script")


def text_of_rank_zero(text: str, ranks: Communicator) -> str:
    """Return the text of rank 0 on all ranks, which all make the call; plain bytes travel, no pickle."""
    escaped = text.encode("unicode_escape").decode()  # so that a piece is as many bytes as characters
    length = int(ranks.gather([float(len(escaped))])[0, 0])
    starts = range(0, length, _PIECE)
    pieces = [ranks.gather_text(f"'{escaped[start : start + _PIECE]}'")[0][1:-1] for start in starts]
    return "".join(pieces).encode().decode("unicode_escape")
