r"""All columns of some rows, or some columns of all rows: the exchanges of tensor parallelism (NeutronTP, Sec. 3).

:func:`split_columns` turns a rank's rows into its slice of everyone's columns, :func:`gather_columns` turns that back;
each is the other's backward pass. :func:`share_rows` gives every rank the rows of all, and :func:`split_and_share` does
both at once. The rows of all ranks stand one rank after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pygdist.comm.communicator import Communicator, describe_rows

__all__ = ["columns_of", "gather_columns", "share_rows", "split_and_share", "split_columns", "with_phantom_column"]

_PIECE = 1 << 20  # rows


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
    x: Tensor, counts: Sequence[int], communicator: Communicator, *, label: str, out: Tensor | None = None
) -> Tensor:
    r"""The rows of all ranks, on every rank; the backward adds up what all ranks say of a row.

    Args:
        x: The rank's rows.
        counts: How many each rank has.
        communicator: The ranks; each makes the call.
        label: Named when something goes wrong.
        out: Memory for the result, where it needs no gradient.

    Shapes:
        ``x`` is :math:`(n, *)`, the result :math:`(N, *)`.
    """
    if out is not None:
        return _share(x, out, counts, communicator, label)
    if communicator.world_size == 1:
        return x
    found: Tensor = _Share.apply(x, tuple(counts), communicator, label)  # type: ignore[no-untyped-call]
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
        ``x`` is :math:`(n, *, C)` and ``shared`` :math:`(m, *)`, the results :math:`(N, *, c)` and :math:`(M, *)`, in
        the wider dtype of both.
    """
    dtype = torch.promote_types(x.dtype, shared.dtype)
    x, shared = x.to(dtype), shared.to(dtype)
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
        ctx.counts, ctx.width, ctx.communicator, ctx.label = counts, x.size(-1), communicator, label
        return _split(x.detach(), counts, communicator, f"{label}, split, {describe_rows(x)}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        label = f"{ctx.label}, backward of split"
        return _gather(grad, ctx.counts, ctx.width, ctx.communicator, label), None, None, None


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
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], communicator: Communicator, label: str) -> Tensor:
        ctx.counts, ctx.communicator, ctx.label = counts, communicator, label
        return _share(x, x.new_empty((sum(counts), *x.shape[1:])), counts, communicator, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, communicator = ctx.counts, ctx.communicator
        outgoing = grad.contiguous().split(list(counts))
        own = outgoing[communicator.rank]
        num_own = own.size(0)
        memory = communicator.buffers.get("gradients received", num_own * len(counts), own)
        arrived = [memory[rank * num_own : (rank + 1) * num_own] for rank in range(len(counts))]
        label = f"{ctx.label}, backward of share, {describe_rows(grad)}"
        communicator.send_and_receive(outgoing, arrived, label)
        out = torch.zeros_like(own)
        for rank, part in enumerate(arrived):  # in one order, so that runs repeat bit for bit
            out += own if rank == communicator.rank else part
        return out, None, None, None


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
    """Send two tensors to each rank as one message, and fill two from each; all have one dtype."""
    nothing, rank = outgoing[0][0].new_empty(0), communicator.rank
    messages, arrived = [], []
    for peer, (given, wanted) in enumerate(zip(outgoing, incoming, strict=True)):
        if peer == rank:
            messages.append(nothing)
            arrived.append(nothing)
            continue
        memory = communicator.buffers.get(f"pair for rank {peer}", sum(one.numel() for one in given), nothing)
        messages.append(torch.cat([one.reshape(-1) for one in given], out=memory))
        arrived.append(communicator.buffers.get(f"pair of rank {peer}", sum(one.numel() for one in wanted), nothing))
    communicator.send_and_receive(messages, arrived, label)
    for peer, wanted in enumerate(incoming):
        found = outgoing[rank] if peer == rank else arrived[peer].split([one.numel() for one in wanted])
        for place, values in zip(wanted, found, strict=True):
            place.copy_(values.view(place.shape))


def _share(x: Tensor, out: Tensor, counts: Sequence[int], communicator: Communicator, label: str) -> Tensor:
    x = x.detach().contiguous()
    incoming = out.split(list(counts))
    incoming[communicator.rank].copy_(x)
    label = f"{label}, share, {describe_rows(x)}"
    if out.device == x.device:
        communicator.send_and_receive([x] * len(counts), incoming, label)
        return out
    for first in range(0, max(counts), _PIECE):  # there is no room for all of them where they arrive
        parts = [rows[first : first + _PIECE] for rows in incoming]
        arrived = [torch.empty_like(part, device=x.device) for part in parts]
        communicator.send_and_receive([x[first : first + _PIECE]] * len(counts), arrived, label)
        for rank, part in enumerate(parts):
            if rank != communicator.rank:
                part.copy_(arrived[rank])
    return out


def _split(x: Tensor, counts: tuple[int, ...], communicator: Communicator, label: str) -> Tensor:
    rank, size = communicator.rank, communicator.world_size
    parts = [x[..., columns_of(x.size(-1), peer, size)] for peer in range(size)]
    out = x.new_empty((sum(counts), *parts[rank].shape[1:]))
    incoming = out.split(list(counts))
    incoming[rank].copy_(parts[rank])
    communicator.send_and_receive([part.contiguous() for part in parts], incoming, label)
    return out


def _gather(x: Tensor, counts: tuple[int, ...], width: int, communicator: Communicator, label: str) -> Tensor:
    rank, size = communicator.rank, communicator.world_size
    outgoing = x.contiguous().split(list(counts))
    out = x.new_empty((counts[rank], *x.shape[1:-1], width))
    parts = [out[..., columns_of(width, peer, size)] for peer in range(size)]
    incoming = [part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
                for part in parts]  # fmt: skip
    communicator.send_and_receive(outgoing, incoming, label)
    incoming[rank] = outgoing[rank]
    for part, arrived in zip(parts, incoming, strict=True):
        if part is not arrived:
            part.copy_(arrived)
    return out
