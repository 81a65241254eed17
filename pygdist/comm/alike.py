"""Comparisons of ranks: all need equal options, which each may read from another command line, and equal parameters."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pygdist.comm.communicator import Communicator
from pygdist.errors import InputError

_PIECE = 1000  # bytes of a text that travel at once
_SHOWN = 80  # characters of a value in a message
_ROUNDINGS = 64  # within which parameters count as equal


def require_alike(values: Mapping[str, object], ranks: Communicator, hint: str = "") -> None:
    """Refuse values that differ between ranks, such as a learning rate. Equal values take one small exchange.

    Args:
        values: The values by name; messages show ``str`` of a value.
        ranks: The ranks, which all make the call.
        hint: End of the message.

    Raises:
        InputError: On all ranks, if values differ. The message names the first such value, and the first rank whose
            value is not that of rank 0.
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
    """Return the text of rank 0 on all ranks. Every rank makes the call; plain bytes travel, no pickle."""
    escaped = text.encode("unicode_escape").decode()  # so that a piece is as many bytes as characters
    length = int(ranks.gather([float(len(escaped))])[0, 0])
    starts = range(0, length, _PIECE)
    pieces = [ranks.gather_text(f"'{escaped[start : start + _PIECE]}'")[0][1:-1] for start in starts]
    return "".join(pieces).encode().decode("unicode_escape")


def rank_apart(parameters: Iterable[Tensor], ranks: Communicator, steps: int) -> int | None:
    """Return the rank whose parameters differ most from those of rank 0; ``None`` if none differ by more than rounding.

    Rounding that differs between processors makes sums over the parameters drift apart by about ``eps`` of the norm,
    times the square root of the number of ``steps``. Numbers that are NaN or infinite on all ranks alike do not differ.

    Args:
        parameters: Parameters, as many on all ranks; those of whole numbers do not count.
        ranks: The ranks, which all make the call.
        steps: Steps since the parameters were equal.
    """
    real = [torch.view_as_real(one) if one.is_complex() else one for one in parameters]
    real = [one for one in real if one.is_floating_point()]
    if not real:
        return None
    sums = torch.stack([_sums(one.reshape(-1)) for one in real]).sum(dim=0)
    of_ranks = ranks.gather([float(sums[0]), float(sums[1]), float(sums[2].sqrt())])
    if not bool(of_ranks.isfinite().any()):
        return None
    alike = (of_ranks == of_ranks[0]) | (of_ranks.isnan() & of_ranks[0].isnan())  # infinities, too
    apart = torch.where(alike, 0.0, (of_ranks - of_ranks[0]).abs()).amax(dim=1)
    apart /= of_ranks[0, 2].clamp(min=torch.finfo(torch.float64).tiny)
    apart[0] = 0.0
    rank = int(apart.nan_to_num(torch.inf).argmax())
    rounding = _ROUNDINGS * max(torch.finfo(one.dtype).eps for one in real) * max(steps, 1) ** 0.5
    return None if float(apart[rank]) <= rounding else rank


def _sums(flat: Tensor) -> Tensor:
    """Return the sum, the sum of every other one, and the sum of squares, in float64."""
    squares = torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
    return torch.stack([flat.sum(dtype=torch.float64), flat[::2].sum(dtype=torch.float64), squares])
