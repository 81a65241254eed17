r"""All columns of some rows, or some columns of all rows: the exchanges of tensor parallelism (NeutronTP, Sec. 3).

:func:`split_columns` turns a rank's rows into its slice of everyone's columns, :func:`gather_columns` turns that back;
each is the other's backward pass. :func:`share_rows` gives every rank the rows of all, and :func:`split_and_share` does
both at once. The rows of all ranks stand one rank after the other. Those that are shared may be :class:`Elsewhere` than
a rank's own; then a few travel at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pygdist.comm.communicator import Communicator, describe_rows
from pygdist.comm.transfer import as_bytes

__all__ = [
    "Elsewhere",
    "columns_of",
    "gather_columns",
    "share_rows",
    "split_and_share",
    "split_columns",
    "with_phantom_column",
]


@dataclass(frozen=True)
class Elsewhere:
    """Memory for what there is of all ranks' rows, where that is not to be on the device of a rank's own.

    Attributes:
        empty: Gives memory of a shape and dtype, on whatever device.
        most_bytes: What a rank sends at a time, and what it gets, on the device.
    """

    empty: Callable[[tuple[int, ...], torch.dtype], Tensor]
    most_bytes: int


def columns_of(width: int, rank: int, world_size: int) -> slice:
    """The columns that a rank holds, as even as can be; none if there are fewer columns than ranks and it is late.

    Example:
        >>> [columns_of(7, rank, 3) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    return slice(-(-width * rank // world_size), -(-width * (rank + 1) // world_size))


def split_columns(x: Tensor, counts: Sequence[int], communicator: Communicator, *, label: str) -> Tensor:
    r"""This rank's columns of all rows, from all columns of its own; one exchange, its backward is one.

    Args:
        x: The rank's rows; columns are its last dimension.
        counts: How many rows each rank has.
        communicator: The ranks; each makes the call.
        label: Named when something goes wrong.

    Shapes:
        ``x`` is :math:`(n, *, C)`, the result :math:`(N, *, c)` where :math:`c` is the rank's share of the columns
        (:func:`columns_of`). A rank sends :math:`n (C - c)` values for each of the dimensions between.
    """
    if communicator.world_size == 1:
        return x
    out: Tensor = _Split.apply(x, tuple(counts), communicator, label)  # type: ignore[no-untyped-call]
    return out


def gather_columns(x: Tensor, counts: Sequence[int], width: int, communicator: Communicator, *, label: str) -> Tensor:
    r"""All columns of this rank's rows, from its columns of all rows: the inverse of :func:`split_columns`.

    Args:
        x: The rank's columns of all rows.
        counts: How many rows each rank has.
        width: How many columns all ranks have together.
        communicator: The ranks; each makes the call.
        label: Named when something goes wrong.

    Shapes:
        ``x`` is :math:`(N, *, c)`, the result :math:`(n, *, C)`. A rank sends :math:`(N - n) c` values for each of the
        dimensions between.
    """
    if communicator.world_size == 1:
        return x
    out: Tensor = _Gather.apply(x, tuple(counts), width, communicator, label)  # type: ignore[no-untyped-call]
    return out


def share_rows(
    x: Tensor, counts: Sequence[int], communicator: Communicator, *, label: str, elsewhere: Elsewhere | None = None
) -> Tensor:
    r"""The rows of all ranks, on every rank; the backward adds up what all ranks say of a row.

    Args:
        x: The rank's rows.
        counts: How many each rank has.
        communicator: The ranks; each makes the call.
        label: Named when something goes wrong.
        elsewhere: Where the result is, and its gradient; on the device of ``x`` by default.

    Shapes:
        ``x`` is :math:`(n, *)`, the result :math:`(N, *)`.
    """
    if communicator.world_size == 1 and elsewhere is None:
        return x
    found: Tensor = _Share.apply(x, tuple(counts), communicator, label, elsewhere)  # type: ignore[no-untyped-call]
    return found


def split_and_share(
    x: Tensor,
    shared: Tensor,
    counts: Sequence[int],
    shared_counts: Sequence[int],
    communicator: Communicator,
    *,
    label: str,
) -> tuple[Tensor, Tensor]:
    r""":func:`split_columns` of one tensor and :func:`share_rows` of another; one exchange, its backward is one.

    Args:
        x: The rank's rows; columns are its last dimension.
        shared: Its rows of what every rank needs whole.
        counts: How many rows of the first each rank has.
        shared_counts: How many of the second.
        communicator: The ranks; each makes the call.
        label: Named when something goes wrong.

    Shapes:
        ``x`` is :math:`(n, *, C)` and ``shared`` :math:`(m, *)`, the results :math:`(N, *, c)` and :math:`(M, *)`.
    """
    if communicator.world_size == 1:
        return x, shared
    found: tuple[Tensor, Tensor] = _SplitAndShare.apply(  # type: ignore[no-untyped-call]
        x, shared, tuple(counts), tuple(shared_counts), communicator, label
    )
    return found


def with_phantom_column(x: Tensor) -> Tensor:
    """A rank's columns; a column of ones if it has none, whose results are to be cut off.

    So the rank runs what the others run: it takes part in all that they exchange and agree on, and its parameters have
    gradients too, of zeros.
    """
    return x if x.size(-1) else torch.cat([x, x.new_ones((*x.shape[:-1], 1))], dim=-1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], communicator: Communicator, label: str) -> Tensor:
        ctx.back = counts, x.size(-1), communicator, f"{label}, backward of split"
        return _split(x.detach(), counts, communicator, f"{label}, split, {describe_rows(x)}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.back), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: tuple[int, ...], width: int, communicator: Communicator, label: str
    ) -> Tensor:
        ctx.counts, ctx.communicator, ctx.label = counts, communicator, label
        return _gather(x.detach(), counts, width, communicator, f"{label}, gather")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        label = f"{ctx.label}, backward of gather, {describe_rows(grad)}"
        return _split(grad, ctx.counts, ctx.communicator, label), None, None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: tuple[int, ...],
        communicator: Communicator,
        label: str,
        elsewhere: Elsewhere | None,
    ) -> Tensor:
        ctx.back = counts, communicator, f"{label}, backward of share", x.device, elsewhere
        x = x.detach().contiguous()
        shape = (sum(counts), *x.shape[1:])
        out = x.new_empty(shape) if elsewhere is None else elsewhere.empty(shape, x.dtype)
        incoming = out.split(list(counts))
        label = f"{label}, share, {describe_rows(x)}"
        _swap([x] * len(counts), incoming, communicator, label, x.device, _at_a_time(incoming, elsewhere))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, communicator, label, device, elsewhere = ctx.back
        rank, label = communicator.rank, f"{label}, {describe_rows(grad)}"
        outgoing = grad.contiguous().split(list(counts))
        out = torch.zeros(outgoing[rank].shape, dtype=grad.dtype, device=device)
        for piece in _pieces(max(counts), _at_a_time(outgoing, elsewhere)):
            parts = [rows[piece].to(device) for rows in outgoing]
            own = parts[rank]
            memory = communicator.buffers.get("gradients received", own.size(0) * len(counts), own)
            arrived = [memory[peer * own.size(0) : (peer + 1) * own.size(0)] for peer in range(len(counts))]
            communicator.send_and_receive(parts, arrived, label, further=piece.start > 0)
            for peer, part in enumerate(arrived):  # in one order, so that runs repeat bit for bit
                out[piece] += own if peer == rank else part
        return out, None, None, None, None


class _SplitAndShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shared: Tensor,
        counts: tuple[int, ...],
        shared_counts: tuple[int, ...],
        communicator: Communicator,
        label: str,
    ) -> tuple[Tensor, Tensor]:
        rank, size = communicator.rank, len(counts)
        ctx.counts, ctx.width, ctx.communicator, ctx.label = (counts, shared_counts), x.size(-1), communicator, label
        parts = [x.detach()[..., columns_of(x.size(-1), peer, size)] for peer in range(size)]
        sliced = x.new_empty((sum(counts), *parts[rank].shape[1:]))
        every = shared.new_empty((sum(shared_counts), *shared.shape[1:]))
        outgoing = [(part, shared.detach()) for part in parts]
        incoming = list(zip(sliced.split(list(counts)), every.split(list(shared_counts)), strict=True))
        _exchange_pairs(outgoing, incoming, communicator, f"{label}, split and share, {describe_rows(x)}")
        return sliced, every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_shared: Tensor) -> tuple[Tensor | None, ...]:
        (counts, shared_counts), communicator = ctx.counts, ctx.communicator
        rank, size = communicator.rank, len(counts)
        outgoing = list(zip(grad.split(list(counts)), grad_shared.split(list(shared_counts)), strict=True))
        out = grad.new_empty((counts[rank], *grad.shape[1:-1], ctx.width))
        said = grad_shared.new_empty((size, *outgoing[rank][1].shape))
        incoming = [(out[..., columns_of(ctx.width, peer, size)], said[peer]) for peer in range(size)]
        label = f"{ctx.label}, backward of split and share, {describe_rows(out)}"
        _exchange_pairs(outgoing, incoming, communicator, label)
        total = torch.zeros_like(said[rank])
        for part in said:  # in one order, so that runs repeat bit for bit
            total += part
        return out, total, None, None, None, None


def _exchange_pairs(
    outgoing: Sequence[tuple[Tensor, Tensor]],
    incoming: Sequence[tuple[Tensor, Tensor]],
    communicator: Communicator,
    label: str,
) -> None:
    """Send two tensors to each rank as one message, and fill two from each; each of the two has one dtype."""
    rank, size = communicator.rank, communicator.world_size
    byte = torch.empty(0, dtype=torch.uint8, device=outgoing[0][0].device)
    first, second = sorted((0, 1), key=lambda one: -outgoing[0][one].element_size())  # so that both are aligned
    sent, arrived = [byte] * size, [byte] * size
    for peer, (given, wanted) in enumerate(zip(outgoing, incoming, strict=True)):
        if peer != rank:
            memory = communicator.buffers.get(f"pair for rank {peer}", sum(one.nbytes for one in given), byte)
            parts = [as_bytes(given[one].contiguous()) for one in (first, second)]
            sent[peer] = torch.cat(parts, out=memory)
            arrived[peer] = communicator.buffers.get(f"pair of rank {peer}", sum(one.nbytes for one in wanted), byte)
    communicator.send_and_receive(sent, arrived, label)
    for peer, wanted in enumerate(incoming):
        if peer == rank:
            found = outgoing[rank]
        else:
            parts = arrived[peer].split([wanted[first].nbytes, wanted[second].nbytes])
            values = {one: part.view(wanted[one].dtype) for one, part in zip((first, second), parts, strict=True)}
            found = values[0], values[1]
        for place, rows in zip(wanted, found, strict=True):
            place.copy_(rows.view(place.shape))


def _split(x: Tensor, counts: tuple[int, ...], communicator: Communicator, label: str) -> Tensor:
    size = communicator.world_size
    parts = [x[..., columns_of(x.size(-1), peer, size)] for peer in range(size)]
    out = x.new_empty((sum(counts), *parts[communicator.rank].shape[1:]))
    _swap(parts, out.split(list(counts)), communicator, label, x.device)
    return out


def _gather(x: Tensor, counts: tuple[int, ...], width: int, communicator: Communicator, label: str) -> Tensor:
    rank, size = communicator.rank, communicator.world_size
    out = x.new_empty((counts[rank], *x.shape[1:-1], width))
    parts = [out[..., columns_of(width, peer, size)] for peer in range(size)]
    _swap(x.contiguous().split(list(counts)), parts, communicator, label, x.device)
    return out


def _at_a_time(parts: Sequence[Tensor], elsewhere: Elsewhere | None) -> int | None:
    """How many rows of each part travel at once; the same on all ranks, as all have all columns of these."""
    row_bytes = sum(math.prod(part.shape[1:]) * part.element_size() for part in parts)
    return None if elsewhere is None else max(1, elsewhere.most_bytes // max(row_bytes, 1))


def _pieces(longest: int, size: int | None) -> list[slice]:
    """Rows that travel at once, one piece after the other; there is one, empty or not."""
    size = max(longest, 1) if size is None else size
    return [slice(first, first + size) for first in range(0, max(longest, 1), size)]


def _swap(
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    communicator: Communicator,
    label: str,
    device: torch.device,
    at_a_time: int | None = None,
) -> None:
    """Give each rank its rows and put those of each into their place, wherever they are; they travel on ``device``."""
    longest = max(part.size(0) for part in (*outgoing, *incoming))
    for piece in _pieces(longest, at_a_time):
        sent = [part[piece].to(device).contiguous() for part in outgoing]
        places = [part[piece] for part in incoming]
        arrived = [
            place
            if place.device == device and place.is_contiguous()
            else torch.empty(place.shape, dtype=place.dtype, device=device)
            for place in places
        ]
        communicator.send_and_receive(sent, arrived, label, further=piece.start > 0)
        arrived[communicator.rank] = sent[communicator.rank]
        for place, rows in zip(places, arrived, strict=True):
            if place is not rows:
                place.copy_(rows)
