r"""Exchanges of tensor parallelism (NeutronTP, Sec. 3): all columns of some rows become some columns of all rows.

==========================  =====================================  ===================================  ===============
function                    a rank gives                           a rank gets                          backward
==========================  =====================================  ===================================  ===============
:func:`split_columns`       :math:`(n, *, C)`: its rows            :math:`(N, *, c)`: its columns       gather
:func:`gather_columns`      :math:`(N, *, c)`: its columns         :math:`(n, *, C)`: its rows          split
:func:`share_rows`          :math:`(n, *)`: its rows               :math:`(N, *)`: the rows of all      sum over ranks
==========================  =====================================  ===================================  ===============

Columns are the last dimension. The :math:`N` rows of all ranks are in rank order; ``counts`` is the number of rows of
each rank, and :math:`c` is this rank's share of :math:`C` columns (:func:`columns_of`). :func:`split_and_share` splits
one tensor and shares another in one exchange. Every rank makes every call. Each call is one exchange, named by
``label`` in errors, and so is its backward pass. On one process tensors are returned as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.comm.communicator import Communicator, describe_rows
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.transfer import as_bytes
from pygdist.memory.overflow import Overflow


def columns_of(width: int, rank: int, world_size: int) -> slice:
    """Return the columns that a rank holds. Shares differ by one column at most, and may be empty.

    Example:
        >>> [columns_of(7, rank, 3) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    return slice(-(-width * rank // world_size), -(-width * (rank + 1) // world_size))


def split_columns(x: Tensor, counts: Sequence[int], communicator: Communicator, *, label: str) -> Tensor:
    r"""Turn all columns of this rank's rows into this rank's columns of all rows.

    Shapes:
        ``x`` is :math:`(n, *, C)`, the result :math:`(N, *, c)`. A rank sends :math:`n (C - c)` values for each of the
        dimensions between.
    """
    if communicator.world_size == 1:
        return x
    out: Tensor = _Split.apply(x, _Exchange(tuple(counts), communicator, label))  # type: ignore[no-untyped-call]
    return out


def gather_columns(x: Tensor, counts: Sequence[int], width: int, communicator: Communicator, *, label: str) -> Tensor:
    r"""Turn this rank's columns of all rows into all columns of this rank's rows: the inverse of :func:`split_columns`.

    Shapes:
        ``x`` is :math:`(N, *, c)`, the result :math:`(n, *, C)` with :math:`C` = ``width``. A rank sends
        :math:`(N - n) c` values for each of the dimensions between.
    """
    if communicator.world_size == 1:
        return x
    exchange = _Exchange(tuple(counts), communicator, label)
    out: Tensor = _Gather.apply(x, exchange, width)  # type: ignore[no-untyped-call]
    return out


def share_rows(
    x: Tensor, counts: Sequence[int], communicator: Communicator, *, label: str, overflow: Overflow | None = None
) -> Tensor:
    r"""Give every rank the rows of all ranks (an all-gather).

    The backward pass sums the gradients of each row over ranks, in rank order (a reduce-scatter). With ``overflow`` the
    result is stored in it and travels in pieces that fit the device; the gradient of the result may be there too. By
    default the result is on the device of ``x``.

    Shapes:
        ``x`` is :math:`(n, *)`, the result :math:`(N, *)`.
    """
    if communicator.world_size == 1 and overflow is None:
        return x
    exchange = _Exchange(tuple(counts), communicator, label)
    out: Tensor = _Share.apply(x, exchange, overflow)  # type: ignore[no-untyped-call]
    return out


def split_and_share(
    x: Tensor,
    shared: Tensor,
    counts: Sequence[int],
    shared_counts: Sequence[int],
    communicator: Communicator,
    *,
    label: str,
) -> tuple[Tensor, Tensor]:
    r"""Do :func:`split_columns` of ``x`` and :func:`share_rows` of ``shared`` in one exchange.

    Shapes:
        ``x`` is :math:`(n, *, C)` and ``shared`` :math:`(m, *)`, the results :math:`(N, *, c)` and :math:`(M, *)`.
    """
    if communicator.world_size == 1:
        return x, shared
    exchange = _Exchange(tuple(counts), communicator, label)
    out: tuple[Tensor, Tensor] = _SplitAndShare.apply(  # type: ignore[no-untyped-call]
        x, shared, exchange, tuple(shared_counts)
    )
    return out


def with_phantom_column(x: Tensor) -> Tensor:
    """Return a rank's columns, or one column of ones if the rank has none; the caller drops this column's results.

    So a rank without columns takes part in all exchanges and agreements, and its parameters have gradients, all zero.
    """
    return x if x.size(-1) else torch.cat([x, x.new_ones((*x.shape[:-1], 1))], dim=-1)


@dataclass(frozen=True)
class _Exchange:
    """The ranks, the number of rows of each, and the name of the exchange in errors."""

    counts: tuple[int, ...]
    communicator: Communicator
    label: str

    def split(self, x: Tensor, step: str) -> Tensor:
        """Turn this rank's rows into its columns of all rows."""
        size = self.communicator.world_size
        by_rank = [x[..., columns_of(x.size(-1), peer, size)] for peer in range(size)]
        out = x.new_empty((sum(self.counts), *by_rank[self.communicator.rank].shape[1:]))
        self.send_and_receive(by_rank, out.split(list(self.counts)), f"{step}, {describe_rows(x)}", x.device)
        return out

    def gather(self, x: Tensor, width: int, step: str) -> Tensor:
        """Turn this rank's columns of all rows into its rows."""
        rank, size = self.communicator.rank, self.communicator.world_size
        out = x.new_empty((self.counts[rank], *x.shape[1:-1], width))
        by_rank = [out[..., columns_of(width, peer, size)] for peer in range(size)]
        self.send_and_receive(x.contiguous().split(list(self.counts)), by_rank, step, x.device)
        return out

    def send_and_receive(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        step: str,
        device: torch.device,
        most_rows: int | None = None,
    ) -> None:
        """Send rows to each rank and copy those of each into place, on whatever devices; they travel on ``device``.

        By default all rows travel at once, otherwise at most ``most_rows`` of each rank.
        """
        communicator = self.communicator
        longest = max(rows.size(0) for rows in (*outgoing, *incoming))
        for piece in _pieces(longest, most_rows):
            sent = [rows[piece].to(device).contiguous() for rows in outgoing]
            places = [rows[piece] for rows in incoming]
            arrived = [
                place
                if place.device == device and place.is_contiguous()
                else torch.empty(place.shape, dtype=place.dtype, device=device)
                for place in places
            ]
            communicator.send_and_receive(sent, arrived, f"{self.label}, {step}", continues=piece.start > 0)
            arrived[communicator.rank] = sent[communicator.rank]
            for place, rows in zip(places, arrived, strict=True):
                if place is not rows:
                    place.copy_(rows)

    def send_and_receive_pairs(
        self, outgoing: Sequence[tuple[Tensor, Tensor]], incoming: Sequence[tuple[Tensor, Tensor]], step: str
    ) -> None:
        """Send two tensors to each rank as one message, and fill two from each; each of the two has one dtype."""
        rank, size, buffers = self.communicator.rank, self.communicator.world_size, self.communicator.buffers
        byte = torch.empty(0, dtype=torch.uint8, device=outgoing[0][0].device)
        order = sorted((0, 1), key=lambda number: -outgoing[0][number].element_size())  # so that both are aligned
        sent, arrived = [byte] * size, [byte] * size
        for peer, (pair, places) in enumerate(zip(outgoing, incoming, strict=True)):
            if peer != rank:
                memory = buffers.get(f"pair for rank {peer}", sum(rows.nbytes for rows in pair), byte)
                sent[peer] = torch.cat([as_bytes(pair[number].contiguous()) for number in order], out=memory)
                arrived[peer] = buffers.get(f"pair of rank {peer}", sum(place.nbytes for place in places), byte)
        self.communicator.send_and_receive(sent, arrived, f"{self.label}, {step}")
        for peer, places in enumerate(incoming):
            pair = outgoing[rank]
            if peer != rank:
                values = arrived[peer].split([places[number].nbytes for number in order])
                first, second = (values[order.index(number)].view(places[number].dtype) for number in (0, 1))
                pair = first, second
            for place, rows in zip(places, pair, strict=True):
                place.copy_(rows.view(place.shape))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.width = exchange, x.size(-1)
        return exchange.split(x.detach(), "split")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.gather(grad, ctx.width, "backward of split"), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange, width: int) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(x.detach(), width, "gather")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.split(grad, "backward of gather"), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange, overflow: Overflow | None) -> Tensor:
        ctx.exchange, ctx.device, ctx.overflow = exchange, x.device, overflow
        x = x.detach().contiguous()
        shape = (sum(exchange.counts), *x.shape[1:])
        out = x.new_empty(shape) if overflow is None else overflow.empty(shape, x.dtype)
        incoming = out.split(list(exchange.counts))
        most_rows = _most_rows(incoming, overflow)
        step = f"share, {describe_rows(x)}"
        exchange.send_and_receive([x] * len(incoming), incoming, step, x.device, most_rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange, device = ctx.exchange, ctx.device
        communicator, counts = exchange.communicator, exchange.counts
        rank, label = communicator.rank, f"{exchange.label}, backward of share, {describe_rows(grad)}"
        outgoing = grad.contiguous().split(list(counts))
        out = torch.zeros(outgoing[rank].shape, dtype=grad.dtype, device=device)
        for piece in _pieces(max(counts), _most_rows(outgoing, ctx.overflow)):
            sent = [rows[piece].to(device) for rows in outgoing]
            mine = sent[rank]
            memory = communicator.buffers.get("gradients received", mine.size(0) * len(counts), mine)
            arrived = [memory[peer * mine.size(0) : (peer + 1) * mine.size(0)] for peer in range(len(counts))]
            communicator.send_and_receive(sent, arrived, label, continues=piece.start > 0)
            for peer, rows in enumerate(arrived):  # in one order, so that runs repeat bit for bit
                out[piece] += mine if peer == rank else rows
        return out, None, None


class _SplitAndShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shared: Tensor, exchange: _Exchange, shared_counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.shared_counts, ctx.width = exchange, shared_counts, x.size(-1)
        rank, size = exchange.communicator.rank, exchange.communicator.world_size
        by_rank = [x.detach()[..., columns_of(x.size(-1), peer, size)] for peer in range(size)]
        columns = x.new_empty((sum(exchange.counts), *by_rank[rank].shape[1:]))
        shared_rows = shared.new_empty((sum(shared_counts), *shared.shape[1:]))
        outgoing = [(rows, shared.detach()) for rows in by_rank]
        incoming = zip(columns.split(list(exchange.counts)), shared_rows.split(list(shared_counts)), strict=True)
        exchange.send_and_receive_pairs(outgoing, list(incoming), f"split and share, {describe_rows(x)}")
        return columns, shared_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_shared: Tensor) -> tuple[Tensor | None, ...]:
        exchange, counts = ctx.exchange, ctx.exchange.counts
        rank, size = exchange.communicator.rank, exchange.communicator.world_size
        outgoing = list(zip(grad.split(list(counts)), grad_shared.split(list(ctx.shared_counts)), strict=True))
        out = grad.new_empty((counts[rank], *grad.shape[1:-1], ctx.width))
        by_rank = grad_shared.new_empty((size, *outgoing[rank][1].shape))
        incoming = [(out[..., columns_of(ctx.width, peer, size)], by_rank[peer]) for peer in range(size)]
        exchange.send_and_receive_pairs(outgoing, incoming, f"backward of split and share, {describe_rows(out)}")
        total = torch.zeros_like(by_rank[rank])
        for rows in by_rank:  # in one order, so that runs repeat bit for bit
            total += rows
        return out, total, None, None


def _most_rows(by_rank: Sequence[Tensor], overflow: Overflow | None) -> int | None:
    """Return the rows of each rank that may travel at once; the same on all ranks, as all hold all columns of them."""
    row_bytes = sum(math.prod(rows.shape[1:]) * rows.element_size() for rows in by_rank)
    return None if overflow is None else overflow.rows_at_a_time(row_bytes)


def _pieces(longest: int, size: int | None) -> list[slice]:
    """Cut rows into pieces that travel one after the other; there is at least one, empty or not."""
    size = max(longest, 1) if size is None else size
    return [slice(first, first + size) for first in range(0, max(longest, 1), size)]
