"""Tensors of all ranks are brought to rank 0, one rank's after another's; texts and plain values of a rank to all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.comm.alike import text_of_rank_zero
from pygdist.errors import InputError


def to_rank_zero(
    tensors: Sequence[Tensor], communicator: Communicator, *, label: str
) -> tuple[list[int], Iterator[list[Tensor]]]:
    """Bring tensors of all ranks to rank 0; every rank makes the call.

    The tensors are contiguous and have the same number of rows. Their dtypes, and shapes but for the first dimension,
    are the same on all ranks.

    Returns:
        The number of rows of each rank. On rank 0 also the tensors of each rank, its own first; the others arrive when
        they are asked for. On other ranks no tensors.
    """
    counts = communicator.gather([float(tensors[0].size(0))])[:, 0].long().tolist()
    if communicator.rank != 0:
        communicator.send_to(0, [value.to(communicator.device) for value in tensors], label=label)
        return counts, iter(())
    return counts, _arriving(tensors, counts, communicator, label)


def from_rank_zero(text: str, strategy: Any) -> str:
    """Return the text of rank 0 on all ranks, which all make the call; plain bytes travel, no pickle."""
    communicator: Communicator | None = getattr(strategy, "communicator", None)
    if communicator is None:  # one process, or a strategy that is refused as soon as the model is set up
        return str(strategy.broadcast(text))
    return text_of_rank_zero(text, communicator)


def broadcast_plain(value: Any, src: int, device: torch.device) -> Any:
    """Return the value of rank ``src`` on all ranks, which all make the call; JSON travels, no pickle.

    Raises:
        InputError: On all ranks, if it is anything but ``None``, truth values, numbers, texts, and lists and
            dictionaries of them.
    """
    text = b""
    if dist.get_rank() == src:
        text = json.dumps([value] if _is_plain(value) else type(value).__name__).encode()
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src)
    content = torch.tensor(list(text) or [0] * int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, src)
    received = json.loads(bytes(content.tolist()))
    if isinstance(received, str):
        raise InputError(
            f"broadcast of a {received}: ranks send each other no pickle, only None, truth values, numbers, texts, and "
            "lists and dictionaries of them; send tensors with torch.distributed.broadcast"
        )
    return received[0]


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _arriving(
    tensors: Sequence[Tensor], counts: Sequence[int], communicator: Communicator, label: str
) -> Iterator[list[Tensor]]:
    yield list(tensors)
    for rank, count in enumerate(counts[1:], start=1):
        arrived = [value.new_empty((count, *value.shape[1:]), device=communicator.device) for value in tensors]
        communicator.receive_from(rank, arrived, label=label)
        yield arrived
