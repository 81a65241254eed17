"""The communicator of a backend: paired exchanges of rows and sums over ranks, both differentiable.

Rows travel by pairs: in step *s* rank *r* sends to *r + s* and receives from *r - s*, all posted at once. On one link
pairs carry about twice what gloo's all-to-all does. A backend gets its communicator passed in and never looks one up;
without a process group the same code runs on one process and sends nothing.

Every rank makes every call in the same order, with zero rows if it has none. ``check_order=True`` verifies that
before each call (slow, for debugging). The communicator's process group is its own, never that of DDP.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pygdist.comm.buffers import Buffers
from pygdist.comm.meter import TrafficMeter
from pygdist.comm.plan import ExchangePlan
from pygdist.comm.recorder import Recorder, recorded
from pygdist.comm.transfer import Courier, Transfer, as_bytes
from pygdist.comm.watchdog import Watchdog
from pygdist.errors import InputError, LostRankError

__all__ = ["Communicator", "describe_rows"]

_LABEL_BYTES = 128


class Communicator:
    """What a backend needs of the other ranks.

    Args:
        group: The ranks that take part; ``None`` is one process alone.
        timeout_s: Seconds after which an exchange gives up and names the rank that did not answer.
        check_order: Compare, before every call, what each rank is about to do, and raise on all of them if they
            differ.
        watchdog: Told where this rank is; names late and lost ranks.

    Attributes:
        recorder: Notes when this rank packs, sends and waits, while there is one.

    Example:
        >>> communicator = Communicator()  # one process
        >>> communicator.world_size
        1
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 600.0,
        check_order: bool = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.meter = TrafficMeter()
        self.buffers = Buffers()
        self.courier = Courier()
        self.recorder: Recorder | None = None
        self.epoch = 0
        self.check_order = check_order
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._watchdog = watchdog
        self._calls = 0
        self.is_nccl = group is not None and dist.get_backend(group) == "nccl"
        if group is not None and self.is_nccl:
            # nccl wants every rank in the first call of a group; later pairs may then involve any two
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that take part; ``None`` is one process alone."""
        if self._group is None and self.world_size > 1:
            # no RuntimeError, which here means that the transport failed
            raise InputError("the communicator is closed: its training, validation or test has ended")
        return self._group

    def close(self) -> None:
        """Destroy the process group, which was made for this communicator; it exchanges nothing from now on."""
        self.courier.close()
        # the object too: while somebody holds it, its threads go on (see pygdist.lightning.strategies)
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    @property
    def device(self) -> torch.device:
        """Where tensors that are no rows of a model must be to travel."""
        return torch.device("cuda" if self.is_nccl else "cpu")

    def exchange_rows(
        self, x: Tensor, plan: ExchangePlan, *, label: str = "rows", ring: bool = False, wire: torch.dtype | None = None
    ) -> Tensor:
        r"""Fetch the halo rows of one hop from their owners. Exact; one call, its backward is one call.

        Args:
            x: Rows that this rank owns.
            plan: Which of them go where.
            label: Named when something goes wrong.
            ring: One peer after the other (:class:`~pygdist.comm.Transfer`) instead of all at once.
            wire: Rows and gradients travel in this dtype; half the bytes, and no longer exact.

        Shapes:
            ``x`` is :math:`(n, *)`, the result :math:`(h, *)` with :math:`h` = ``plan.num_received``, in rank order.
            The backward returns, for each owned row, the sum of the gradients of all its copies, added in rank order
            so that runs repeat bit for bit.
        """
        if self.world_size == 1:
            return x.new_empty((0, *x.shape[1:]))
        result: Tensor = _ExchangeRows.apply(x, self, plan, label, ring, wire)  # type: ignore[no-untyped-call]
        return result

    def return_rows(
        self,
        halo: Tensor,
        plan: ExchangePlan,
        *,
        num_owned: int,
        label: str = "rows",
        ring: bool = False,
        wire: torch.dtype | None = None,
    ) -> Tensor:
        r"""Give halo rows back to their owners, who add them up: the adjoint and backward of :meth:`exchange_rows`.

        Shapes:
            ``halo`` is :math:`(h, *)`, the result :math:`(n, *)` with :math:`n` = ``num_owned``. The copies of a row
            are added in one order, so that runs repeat bit for bit.
        """
        out = halo.new_zeros((num_owned, *halo.shape[1:]))
        if self.world_size == 1:
            return out
        if wire is not None and wire != halo.dtype:
            halo = self.buffers.get("gradients sent", halo.size(0), halo, wire).copy_(halo)
        parts = halo.contiguous().split(list(plan.recv_counts))
        arrived = self.buffers.get("gradients received", plan.num_sent, halo)
        transfer = Transfer(self, arrived.split(list(plan.send_counts)), label, ring=ring, back=True)
        for leg in transfer.targets:
            transfer.give(leg, parts[leg.rank])
        for leg in transfer.sources:
            self.add_rows(out, transfer.take(leg), plan.send_index_of(leg.rank), label)
        transfer.finish()
        return out

    def pack(self, x: Tensor, index: Tensor, label: str, wire: torch.dtype | None = None) -> Tensor:
        """The rows ``index`` of ``x``, side by side in memory that the next call of this shape uses again."""
        with recorded(self.recorder, "pack", label):
            buffer = self.buffers.get("rows sent", index.numel(), x, wire)
            if buffer.dtype == x.dtype:
                return torch.index_select(x, 0, index, out=buffer)
            return buffer.copy_(x.index_select(0, index))

    def add_rows(self, out: Tensor, rows: Tensor, index: Tensor, label: str) -> None:
        """Add ``rows`` to the rows ``index`` of ``out``, none of which comes twice."""
        with recorded(self.recorder, "unpack", label):
            if rows.numel():
                # no row repeats, so plain indexed writes add up in a fixed order
                out[index] = out[index] + rows

    def sum_over_ranks(self, x: Tensor, *, label: str = "sum") -> Tensor:
        """The sum of ``x`` over all ranks, on every rank; the backward sums the gradients in the same way."""
        if self.world_size == 1:
            return x
        result: Tensor = _SumOverRanks.apply(x, self, label)  # type: ignore[no-untyped-call]
        return result

    def gather(self, values: Sequence[float]) -> Tensor:
        """``values`` of every rank as a float64 tensor ``(world_size, len(values))``; for logs, not for gradients."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size == 1:
            return own[None].cpu()
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        self.announce("gather numbers")
        try:
            dist.all_gather(rows, own, group=self.group)
        except RuntimeError as error:
            raise self.lost("gather numbers", error) from error
        self.done()
        return torch.stack(rows).cpu()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather([0.0])  # nothing but numbers waits for others: an empty tensor does not travel

    def agree(self, error: str | None) -> None:
        """Raise on all ranks or on none: every rank says what is wrong on its side, or ``None``.

        Raises:
            InputError: On every rank, with the message of the lowest rank that has one.
        """
        if self.world_size == 1:
            if error is not None:
                raise InputError(error)
            return
        for rank, text in enumerate(self._gather_text(error or "", 1024)):
            if text:
                raise InputError(text if rank == self.rank or text == error else f"{text} (found by rank {rank})")

    def swap(self, outgoing: Sequence[Tensor], *, label: str) -> list[Tensor]:
        """Give a tensor to every rank and get one from every rank, of any length; for plans, not for gradients.

        Args:
            outgoing: One for each rank, the own one included, which is given back; equal in dtype and, but for the
                first dimension, in shape, on all ranks.
            label: Named when something goes wrong.
        """
        if self.world_size == 1:
            return list(outgoing)
        came_from = outgoing[self.rank].device
        outgoing = [tensor.contiguous().to(self.device) for tensor in outgoing]
        lengths = [torch.tensor([tensor.size(0)], device=self.device) for tensor in outgoing]
        incoming = [torch.zeros_like(length) for length in lengths]
        self.send_and_receive(lengths, incoming, f"{label}, lengths")
        own = outgoing[self.rank]
        found = [own.new_empty((int(length), *own.shape[1:])) for length in incoming]
        self.send_and_receive(list(outgoing), found, label)
        found[self.rank] = own
        return [tensor.to(came_from) for tensor in found]

    def send_to(self, rank: int, tensors: Sequence[Tensor], *, label: str) -> None:
        """Send contiguous tensors to one rank, which calls :meth:`receive_from`; for results, not for gradients."""
        self._one_sided(dist.send, "group_dst", rank, tensors, label)

    def receive_from(self, rank: int, tensors: Sequence[Tensor], *, label: str) -> None:
        """Fill contiguous tensors of the sender's shapes and dtypes from one rank, which calls :meth:`send_to`."""
        self._one_sided(dist.recv, "group_src", rank, tensors, label)

    def _one_sided(self, op: Callable[..., Any], end: str, rank: int, tensors: Sequence[Tensor], label: str) -> None:
        if self._watchdog is not None:
            self._watchdog.enter(self.epoch, label)
        try:
            for tensor in tensors:
                if tensor.numel():
                    op(as_bytes(tensor), group=self.group, **{end: rank})
        except RuntimeError as error:
            raise self.lost(label, error, rank) from error
        self.done()

    # -- what the autograd functions call -------------------------------------------------------------------------

    def send_and_receive(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], label: str, *, further: bool = False
    ) -> None:
        """Send ``outgoing[p]`` to rank p and fill ``incoming[p]`` from it, for every p, all pairs posted at once.

        With ``further`` it is another piece of the exchange before, and is not counted as a call.
        """
        transfer = Transfer(self, incoming, label, ring=False, further=further)
        for leg in transfer.targets:
            transfer.give(leg, outgoing[leg.rank])
        transfer.finish()

    def reduce_in_place(self, x: Tensor, label: str) -> None:
        """Sum the contiguous tensor ``x`` over all ranks into itself."""
        self.announce(label)
        self.meter.total.calls += 1
        with self.meter.waiting(x.device), recorded(self.recorder, "reduce", label):
            try:
                dist.all_reduce(x, group=self.group)
            except RuntimeError as error:
                raise self.lost(label, error) from error
        # what a ring all-reduce sends per rank
        num_bytes = 2 * (self.world_size - 1) * x.numel() * x.element_size() // self.world_size
        self.meter.sent(num_bytes)
        self.meter.received(num_bytes)
        self.meter.total.summed_bytes[label] += num_bytes
        self.done()

    # -- order, place, loss ---------------------------------------------------------------------------------------

    def announce(self, label: str) -> None:
        """Say that this rank is about to exchange ``label``; the first thing in every exchange."""
        self._calls += 1
        if self._watchdog is not None:
            self._watchdog.enter(self.epoch, label)
        if self.check_order:
            texts = self._gather_text(f"call {self._calls}: {label}", _LABEL_BYTES)
            if len(set(texts)) > 1:
                said = "; ".join(f"rank {rank} makes {text}" for rank, text in enumerate(texts))
                raise RuntimeError(f"the ranks disagree on the next exchange in epoch {self.epoch}: {said}")

    def done(self) -> None:
        """Say that the exchange is over."""
        if self._watchdog is not None:
            self._watchdog.leave()

    def lost(self, label: str, error: RuntimeError, peer: int | None = None) -> LostRankError:
        """What to raise where the transport failed: which exchange, and which rank is to blame."""
        where = f"rank {self.rank}, epoch {self.epoch}, exchange {self._calls} ({label})"
        who = "" if peer is None else f" with rank {peer}"
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        cause = cause.rpartition("] ")[2].partition(". This is typically")[0]  # gloo adds its source file and advice
        found = f"; {self._watchdog.diagnose()}" if self._watchdog is not None else ""
        return LostRankError(f"{where}: the exchange{who} failed{found} [{cause}]")

    def _gather_text(self, text: str, size: int) -> list[str]:
        """The text of every rank, cut to ``size`` bytes; as plain bytes, nothing is pickled."""
        raw = text.encode()[:size].ljust(size, b"\0")
        own = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, own, group=self.group)
        except RuntimeError as error:
            raise self.lost("agreement", error) from error
        return [bytes(row.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        communicator: Communicator,
        plan: ExchangePlan,
        label: str,
        ring: bool,
        wire: torch.dtype | None,
    ) -> Tensor:
        ctx.communicator, ctx.plan, ctx.label, ctx.num_rows, ctx.travel = (
            communicator,
            plan,
            label,
            x.size(0),
            (ring, wire),
        )
        packed = communicator.pack(x.detach(), plan.send_index, label, wire).split(list(plan.send_counts))
        halo = x.new_empty((plan.num_received, *x.shape[1:]), dtype=wire)
        label = f"{label}, forward, {describe_rows(x)}"
        transfer = Transfer(communicator, halo.split(list(plan.recv_counts)), label, ring=ring)
        for leg in transfer.targets:
            transfer.give(leg, packed[leg.rank])
        transfer.finish()
        return halo.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring, wire = ctx.travel
        label = f"{ctx.label}, backward, {describe_rows(grad)}"
        out = ctx.communicator.return_rows(grad, ctx.plan, num_owned=ctx.num_rows, label=label, ring=ring, wire=wire)
        return out, None, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, label: str) -> Tensor:
        ctx.communicator, ctx.label = communicator, label
        out = x.detach().clone(memory_format=torch.contiguous_format)
        communicator.reduce_in_place(out, f"{label}, forward, {describe_rows(x[None])}")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.communicator.reduce_in_place(grad, f"{ctx.label}, backward, {describe_rows(grad[None])}")
        return grad, None, None


def describe_rows(x: Tensor) -> str:
    """Width and dtype, which must be equal on all ranks (the number of rows need not be)."""
    return f"{'x'.join(map(str, x.shape[1:])) or '1'} {str(x.dtype).removeprefix('torch.')}"
