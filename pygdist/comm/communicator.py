"""The communicator of a backend: exchanges of rows and sums over ranks, both differentiable.

Rows travel between pairs of ranks: in step *s* rank *r* sends to *r + s* and receives from *r - s*; all steps are
posted at once. On one link this is about twice as fast as gloo's all-to-all. A backend gets its communicator as an
argument. Without a process group the same code runs on one process and sends nothing.

**Every rank makes every call, in the same order**, with zero rows if it has none; backward passes count as calls.
``check_order=True`` compares the ranks' calls before each call, :meth:`Communicator.compare_calls` afterwards. Only
:meth:`Communicator.send_to` and :meth:`Communicator.receive_from` are calls of two ranks. The process group is the
communicator's own, never DDP's.
"""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.places import apart
from pygdist.comm.plan import ExchangePlan
from pygdist.comm.recorder import recorded
from pygdist.comm.staging import HostCopy, landing
from pygdist.comm.transfer import Transfer, as_bytes
from pygdist.comm.transport import Transport
from pygdist.errors import InputError, LostRankError, UnequalRanksError
from pygdist.memory.gpus import number_of
from pygdist.memory.ring import upload

_TEXT_BYTES = 1024
_ROW = 8  # numbers, of one size on all ranks, so that different calls meet and are compared


class Communicator(Transport):
    """A rank's calls to other ranks: fetch rows, return gradients, sum, gather and agree.

    Args:
        group: The process group of the ranks that take part; ``None`` for one process alone.
        timeout_s: Seconds after which an exchange fails, with an error that names the rank that did not answer.
        check_order: Before every call, compare the calls of all ranks, and raise an error on all ranks if these calls
            differ. Slow, for debugging.
        watchdog: The watchdog, which follows this rank and names late and lost ranks. By default the watchdog of this
            process, if ``group`` has all ranks.
        local_rank: Number of this rank among the ranks of its host, which gives its GPU; by default the rank.
        device: Device of the rows, by default a GPU. A group such as ``cpu:gloo,cuda:nccl`` exchanges these rows over
            the library for this device.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        epoch: The current epoch, named in errors; the trainer sets it.
        meter: The object that counts bytes, messages and seconds of waiting on this rank.
        buffers: Memory that exchanges use again.
        recorder: The object that records when this rank packs, sends and waits; ``None`` records nothing.

    Raises:
        LostRankError: In every call, if another rank is gone or does not answer in time; the message names the rank.
        UnequalRanksError: In every call, on all ranks, if the ranks are found to make different calls.
        InputError: In every call, if the communicator is closed.

    Example:
        >>> communicator = Communicator()  # one process
        >>> communicator.world_size
        1
    """

    def exchange_rows(
        self, x: Tensor, plan: ExchangePlan, *, label: str = "rows", ring: bool = False, wire: torch.dtype | None = None
    ) -> Tensor:
        r"""Fetch the halo rows of one hop from their owners. Every rank makes the call, and runs its backward pass.

        Args:
            x: The rows that this rank owns.
            plan: The rows that each rank sends and receives.
            label: Name of the exchange in errors; equal on all ranks.
            ring: Exchange with one peer after the other (:class:`~pygdist.comm.Transfer`), not with all peers at once.
            wire: Dtype in which rows and gradients travel, such as ``torch.bfloat16``: fewer bytes, but the result is
                no longer exact. By default the dtype of ``x``, with exact copies.

        Shapes:
            ``x`` is :math:`(n, *)`. The result is :math:`(h, *)` in the dtype of ``x``, with :math:`h` =
            ``plan.num_received``: the rows of rank 0, then those of rank 1, and so on. On one process :math:`h = 0`.

        Backward:
            One more exchange, :meth:`return_rows`: the gradient of an owned row is the sum of the gradients of all its
            copies, added in a fixed order, so that runs repeat bit for bit. There is no second derivative.
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
        r"""Send a row for each halo row to its owner, which adds up the rows of all copies. Every rank makes the call.

        This is the transpose of :meth:`exchange_rows`, and its backward pass; it has no gradient itself.

        Args:
            halo: A row for each halo row of the plan, in the plan's order.
            plan: The plan with which the halo rows were fetched.
            num_owned: Number of rows that this rank owns.
            label: Name of the exchange in errors; equal on all ranks.
            ring: Exchange with one peer after the other, in the opposite direction of :meth:`exchange_rows`.
            wire: Dtype in which rows travel; by default the dtype of ``halo``.

        Shapes:
            ``halo`` is :math:`(h, *)` with :math:`h` = ``plan.num_received``, the result :math:`(n, *)` with :math:`n`
            = ``num_owned``; rows without copies are zero. Copies are added in a fixed order.
        """
        out = halo.new_zeros((num_owned, *halo.shape[1:]))
        if self.world_size == 1:
            return out
        if wire is not None and wire != halo.dtype:
            halo = self.buffers.get("gradients sent", halo.size(0), halo, wire).copy_(halo)
        by_rank = halo.contiguous().split(list(plan.recv_counts))
        arrived = self.buffers.get("gradients received", plan.num_sent, halo)
        transfer = Transfer(self, arrived.split(list(plan.send_counts)), label, ring=ring, back=True)
        for message in transfer.targets:
            transfer.give(message, by_rank[message.rank])
        for message in transfer.sources:
            self.add_rows(out, transfer.take(message), plan.send_index_of(message.rank), label)
        transfer.finish()
        return out

    def sum_over_ranks(self, x: Tensor, *, label: str = "sum") -> Tensor:
        """Sum ``x`` over all ranks (an all-reduce). Every rank makes the call, with the same shape and dtype.

        Returns:
            The sum, on every rank, in the shape of ``x``; ``x`` itself on one process.

        Backward:
            One more all-reduce: every rank's ``x`` gets the sum of the gradients of all ranks' results.
        """
        if self.world_size == 1:
            return x
        result: Tensor = _SumOverRanks.apply(x, self, label)  # type: ignore[no-untyped-call]
        return result

    def gather(self, values: Sequence[float]) -> Tensor:
        """Collect a few numbers from every rank, on every rank. Every rank passes the same number of values.

        Returns:
            float64 on the CPU, of shape ``(world_size, len(values))``: a row for each rank. There is no gradient.

        Raises:
            UnequalRanksError: On all ranks, if the ranks made different calls before this one.
        """
        if self.world_size == 1:
            return torch.tensor([values], dtype=torch.float64)
        calls, last = [float(self._calls), float(self._digest), float(len(values))], self._last
        first, more = values[: _ROW - len(calls)], values[_ROW - len(calls) :]
        padding = [0.0] * (_ROW - len(calls) - len(first))
        self.announce("gather numbers")
        with self.attempt("gather numbers"):
            rows = self._gather_row([*calls, *first, *padding])
        made, rows = rows[:, : len(calls)], rows[:, len(calls) : len(calls) + len(first)]
        if not bool((made == made[0]).all()):
            self._refuse_calls(made, last)
        if more:
            with self.attempt("gather numbers"):
                rows = torch.cat([rows, self._gather_row(more)], dim=1)
        self.done(on_host=True)
        return rows

    def meet(self, device: torch.device) -> None:
        """Count the ranks that share this rank's GPU, for :meth:`sharers`. Every rank makes the call."""
        gpus = self.gather([number_of(device) if device.type == "cuda" else -1.0 - self.rank])[:, 0]
        self._on_gpu = int((gpus == gpus[self.rank]).sum())

    def settle(self) -> None:
        """Wait until the GPU has finished all exchanges of this rank.

        Raises:
            LostRankError: If the watchdog has aborted exchanges, so that their results on the GPU are invalid.
        """
        if self.is_nccl:
            torch.cuda.synchronize(self.device)
            if self._watchdog is not None and self._watchdog.verdict is not None:
                raise LostRankError(self._watchdog.verdict)

    def note(self, text: str) -> None:
        """Add a text to the checksum of calls, which the next :meth:`gather` compares."""
        self._digest = zlib.crc32(text.encode(), self._digest)

    def _refuse_calls(self, made: Tensor, last: str) -> NoReturn:
        """Say that the ranks made different calls before this one; every rank has found that."""
        counts = ", ".join(f"rank {rank}: {int(calls)}" for rank, calls in enumerate(made[:, 0].tolist()))
        places, texts = (self._gather_text(text, _TEXT_BYTES) for text in (self._at, last))
        if found := apart(places, [""] * self.world_size):
            raise UnequalRanksError(found)
        lasts = ", ".join(f"rank {rank} in {text or 'none'}" for rank, text in enumerate(texts))
        raise UnequalRanksError(
            f"the ranks made different exchanges, or in another order (calls of {counts}; last was {lasts}): does the "
            "model or the script do on one rank what it does not on others? With check_order=True the first is named"
        )

    def gather_text(self, text: str) -> list[str]:
        """Collect a line of text from every rank, cut to 1,024 bytes, on every rank. Every rank makes the call."""
        if self.world_size == 1:
            return [text]
        self.announce("gather text")
        texts = self._gather_text(text, _TEXT_BYTES)
        self.done(on_host=True)
        return texts

    def barrier(self) -> None:
        """Wait until every rank has made this call."""
        self.gather([0.0])  # nothing but numbers waits for others: an empty tensor does not travel

    def agree(self, error: str | None) -> None:
        """Raise an error on all ranks if one has an error. Every rank passes its message, or ``None``.

        Raises:
            InputError: On every rank, with the message of the lowest rank that passes one.
        """
        if self.world_size == 1:
            if error is not None:
                raise InputError(error)
            return
        for rank, text in enumerate(self.gather_text(error or "")):
            if text:
                host = self.gather_text(socket.gethostname())[rank]
                here = rank == self.rank or text == error  # a long text arrives cut
                raise InputError(text if here else f"{text} (found by rank {rank} on {host})")

    def compare_calls(self) -> None:
        """Compare the ranks' calls so far, in one exchange. Every rank makes the call.

        Raises:
            UnequalRanksError: On all ranks, if a rank has made other calls, or the same calls in another order.
        """
        self.gather([])

    def are_alike(self, values: Sequence[float]) -> bool:
        """Tell if a few numbers are equal on all ranks. Every rank makes the call, with the same number of values."""
        if self.world_size == 1:
            return True
        made = self.gather(values)
        return bool((made == made[0]).all())

    def all_to_all(self, outgoing: Sequence[Tensor], *, label: str) -> list[Tensor]:
        """Send one tensor to each rank and receive one from each. Every rank makes the call. There is no gradient.

        Args:
            outgoing: A tensor for each rank; the tensor for this rank is returned as it is. All tensors of all ranks
                have one dtype and, except for the first dimension, one shape.
            label: Name of the exchange in errors; equal on all ranks.

        Returns:
            The tensors that the ranks sent to this rank, on the device of ``outgoing``. Receivers need not know the
            first dimension.
        """
        if self.world_size == 1:
            return list(outgoing)
        came_from = outgoing[self.rank].device
        outgoing = [tensor.contiguous().to(self.device) for tensor in outgoing]
        lengths = [torch.tensor([tensor.size(0)], device=self.device) for tensor in outgoing]
        incoming_lengths = [torch.zeros_like(length) for length in lengths]
        self.send_and_receive(lengths, incoming_lengths, f"{label}, lengths")
        mine = outgoing[self.rank]
        incoming = [mine.new_empty((int(length), *mine.shape[1:])) for length in incoming_lengths]
        self.send_and_receive(outgoing, incoming, label)
        incoming[self.rank] = mine
        return [tensor.to(came_from) for tensor in incoming]

    def send_to(self, rank: int, tensors: Sequence[Tensor], *, label: str) -> None:
        """Send contiguous tensors to ``rank``, which calls :meth:`receive_from`. Other ranks make no call."""
        self._one_sided(dist.send, "group_dst", rank, tensors, label)

    def receive_from(self, rank: int, tensors: Sequence[Tensor], *, label: str) -> None:
        """Receive into contiguous tensors, with the sender's shapes and dtypes, from ``rank``; see :meth:`send_to`."""
        self._one_sided(dist.recv, "group_src", rank, tensors, label)

    def _one_sided(self, op: Callable[..., Any], end: str, rank: int, tensors: Sequence[Tensor], label: str) -> None:
        self._enter(label, counted=False)
        with self.attempt(label, rank):
            for tensor in filter(Tensor.numel, tensors):
                travels = tensor
                if tensor.is_cuda and not self.is_nccl:
                    travels = HostCopy(tensor).get() if op is dist.send else landing(tensor)
                op(as_bytes(travels), group=self.group, **{end: rank})
                if travels is not tensor and op is dist.recv:
                    upload(travels, tensor)
        self.done()

    @contextlib.contextmanager
    def aside(self) -> Iterator[Communicator]:
        """Enter a communicator of the same ranks with a meter of its own. Every rank makes the call."""
        other = self
        if self.world_size > 1:
            other = Communicator(
                self.group, timeout_s=self.timeout.total_seconds(), check_order=self.check_order,
                watchdog=self._watchdog, local_rank=self.local_rank, device=self._rows_on,
            )  # fmt: skip
            other.epoch, other.unit = self.epoch, self.unit
            other._first_rank, other._on_gpu = self._first_rank, self._on_gpu
            other._numbers = self.host_group if self.is_nccl else None
        try:
            yield other
        finally:
            if other is not self:
                other.courier.close()

    def apart(self, *, quiet: bool = False) -> Communicator:
        """Return a communicator of the same ranks on a process group of its own, for exchanges at the same time.

        The two communicators share one meter. Closing this one closes the new one too. Every rank makes the call.

        Args:
            quiet: True if a thread makes the exchanges, of tensors on the host, over gloo. The watchdog and the
                recorder, which follow the main thread, ignore these exchanges, and their time does not count as
                waiting.
        """
        group, backend = None, "gloo" if quiet else None
        if self.world_size > 1:
            group = self._new_group(dist.get_process_group_ranks(self.group), backend, self._group_timeout)
        return self._beside(group, quiet=quiet)

    def on_host(self) -> Communicator:
        """Return a communicator of the same ranks that takes tensors on the host. Every rank makes the call."""
        if not self.is_nccl:
            return self
        if self._host is None or self._host.is_closed:
            group = self._new_group(dist.get_process_group_ranks(self.group), "gloo", self.timeout)
            self._host = self._beside(group)
        host: Communicator = self._host
        return host

    def split(self, size: int, *, quiet: bool = False) -> Communicator:
        """Return a communicator of ``size`` ranks, this rank and its neighbours, on a process group of its own.

        Ranks 0 to ``size`` - 1 are the first group, and so on; within a group, ranks count from 0. Every rank makes the
        call. The meter and closing are as with :meth:`apart`.

        Args:
            size: Number of ranks in a group; a divisor of ``world_size``.
            quiet: As for :meth:`apart`.

        Raises:
            InputError: If ``size`` does not divide ``world_size``.
        """
        if size < 1 or self.world_size % size:
            raise InputError(f"split: {size} ranks a group, expected a divisor of the {self.world_size} ranks")
        if size == self.world_size:
            return self.apart(quiet=quiet)
        ranks, mine, backend = dist.get_process_group_ranks(self.group), None, "gloo" if quiet else None
        some = len(ranks) < dist.get_world_size()
        for first in range(0, self.world_size, size) if size > 1 else ():
            members, is_mine = ranks[first : first + size], first <= self.rank < first + size
            if is_mine or not some:
                made = self._new_group(members, backend, self._group_timeout)
                mine = made if is_mine else mine
        return self._beside(mine, quiet=quiet, first=self.rank - self.rank % size)

    def _beside(self, group: dist.ProcessGroup | None, *, quiet: bool = False, first: int = 0) -> Communicator:
        """Return a communicator over a group of these ranks, of which ``first`` is its rank 0."""
        other = Communicator(
            group, timeout_s=self.timeout.total_seconds(), watchdog=self._watchdog, local_rank=self.local_rank,
            device=self._rows_on,
        )  # fmt: skip
        other.meter, other._parent, other._is_quiet, other._first_rank = self.meter, self, quiet, first
        other.recorder, other._on_gpu = None if quiet else self.recorder, self._on_gpu
        self._apart = [*(one for one in self._apart if not one.is_closed), other]
        return other

    # -- parts of an exchange, for autograd functions and for rows that travel while a backend computes ---------------

    def pack(self, x: Tensor, index: Tensor, label: str, wire: torch.dtype | None = None) -> Tensor:
        """Copy the rows ``index`` of ``x`` into a buffer, valid until the next ``pack``. Nothing travels."""
        with recorded(self.recorder, "pack", label):
            buffer = self.buffers.get("rows sent", index.numel(), x, wire)
            if buffer.dtype == x.dtype:
                return torch.index_select(x, 0, index, out=buffer)
            return buffer.copy_(x.index_select(0, index))

    def add_rows(self, out: Tensor, rows: Tensor, index: Tensor, label: str) -> None:
        """Add ``rows`` to the rows ``index`` of ``out``, in place; indices must be distinct. Nothing travels."""
        with recorded(self.recorder, "unpack", label):
            if rows.numel():
                # no row repeats, so plain indexed writes add up in a fixed order
                out[index] = out[index] + rows

    def send_and_receive(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        label: str,
        *,
        ring: bool = False,
        continues: bool = False,
    ) -> None:
        """Send ``outgoing[p]`` to rank p and fill ``incoming[p]`` from it, for every other rank p.

        Tensors must be contiguous. The options are those of :class:`~pygdist.comm.Transfer`.
        """
        transfer = Transfer(self, incoming, label, ring=ring, continues=continues)
        for message in transfer.targets:
            transfer.give(message, outgoing[message.rank])
        transfer.finish()

    def reduce_in_place(self, x: Tensor, label: str, *, of_model: bool = False) -> None:
        """Replace the contiguous tensor ``x`` by its sum over all ranks. Every rank makes the call. No gradient.

        Args:
            x: The tensor.
            label: Name of the exchange in errors; equal on all ranks.
            of_model: True for calls of a model, whose code may make different calls on different ranks. On the CPU,
                sums with different labels then never mix.
        """
        if self.world_size == 1:  # without a group of its own, torch would take that of all ranks
            return
        self.announce(label)
        self.meter.called()
        with self.waiting(x.device), recorded(self.recorder, "reduce", label), self.attempt(label):
            if of_model and not (self.is_nccl or x.is_cuda):
                self._reduce_by_pairs(x)
            else:
                dist.all_reduce(x, group=self.group)
        # what a ring all-reduce sends per rank
        num_bytes = 2 * (self.world_size - 1) * x.numel() * x.element_size() // self.world_size
        self.meter.summed(num_bytes, label)
        self.done()

    def _reduce_by_pairs(self, x: Tensor) -> None:
        """Sum ``x`` in two rounds: each rank sums a share, and sends it to all. Two ranks need one round.

        As many bytes as gloo's all-reduce, whose messages have no tags: where ranks make different calls, it adds
        numbers of different sums, or aborts the process if these have other sizes.
        """
        if self.world_size == 2:
            other = torch.empty_like(x)
            self.swap([x, x], [other, other], self.tag)
            x += other  # in either order the same
            return
        shares = x.view(-1).tensor_split(self.world_size)
        mine = shares[self.rank]
        rows = mine.repeat(self.world_size, 1)
        self.swap(shares, list(rows), self.tag)
        torch.sum(rows, dim=0, out=mine)
        self.swap([mine] * self.world_size, shares, self.tag)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, communicator: Communicator, plan: ExchangePlan, label: str, ring: bool, wire: Any
    ) -> Tensor:
        ctx.communicator, ctx.plan, ctx.num_rows, ctx.how = communicator, plan, x.size(0), (label, ring, wire)
        packed = communicator.pack(x.detach(), plan.send_index, label, wire).split(list(plan.send_counts))
        halo = x.new_empty((plan.num_received, *x.shape[1:]), dtype=wire)
        label = f"{label}, forward, {describe_rows(x)}"
        communicator.send_and_receive(packed, halo.split(list(plan.recv_counts)), label, ring=ring)
        return halo.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        label, ring, wire = ctx.how
        label = f"{label}, backward, {describe_rows(grad)}"
        out = ctx.communicator.return_rows(grad, ctx.plan, num_owned=ctx.num_rows, label=label, ring=ring, wire=wire)
        return out, None, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, label: str) -> Tensor:
        ctx.communicator, ctx.label = communicator, label
        out = x.detach().clone(memory_format=torch.contiguous_format)
        communicator.reduce_in_place(out, f"{label}, forward, {describe_rows(x[None])}", of_model=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.communicator.reduce_in_place(grad, f"{ctx.label}, backward, {describe_rows(grad[None])}", of_model=True)
        return grad, None, None


def describe_rows(x: Tensor) -> str:
    """Return the width and dtype of rows, for labels; unlike the number of rows, these are equal on all ranks."""
    return f"{'x'.join(map(str, x.shape[1:])) or '1'} {str(x.dtype).removeprefix('torch.')}"
