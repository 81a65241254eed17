"""Options that must be equal on all ranks: each rank may get its own from a command line on its machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from pygdist.comm.communicator import Communicator
from pygdist.errors import InputError

_PIECE = 1000  # bytes of a text that travel at once
_SHOWN = 80  # characters of a value in a message


def require_alike(values: Mapping[str, object], ranks: Communicator, hint: str = "") -> None:
    """Refuse values that differ between ranks, such as a learning rate; it takes one small exchange if all are equal.

    Args:
        values: By name, as ``str`` shows them in messages.
        ranks: All of these make the call.
        hint: Ends the message.

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
        here, there = _shown(*(of_rank.get(names[0], "absent") for of_rank in (mine, first)))
        problem = f"{names[0]} is {there} on rank 0, but {here} on rank {ranks.rank}"
    told = next(filter(None, ranks.gather_text(problem)))
    raise InputError(f"{told}; start all processes with the same options and the same script{hint}")


def _shown(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to what fits a message, around the first character that differs."""
    differs = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, differs - _SHOWN // 2) if max(len(one), len(other)) > _SHOWN else 0
    first, second = (f"{'...' * (start > 0)}{text[start : start + _SHOWN]}" for text in (one, other))
    return first, second


def text_of_rank_zero(text: str, ranks: Communicator) -> str:
    """Return the text of rank 0 on all ranks, which all make the call; plain bytes travel, no pickle."""
    escaped = text.encode("unicode_escape").decode()  # so that a piece is as many bytes as characters
    length = int(ranks.gather([float(len(escaped))])[0, 0])
    starts = range(0, length, _PIECE)
    pieces = [ranks.gather_text(f"'{escaped[start : start + _PIECE]}'")[0][1:-1] for start in starts]
    return "".join(pieces).encode().decode("unicode_escape")
