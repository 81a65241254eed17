"""The basis of every exchange: the process group of a communicator, and the thread that keeps rows moving.

:class:`~pygdist.comm.Communicator` adds the exchanges that backends call; :class:`~pygdist.comm.Transfer` is one
exchange of rows under way.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm.buffers import Buffers
from pygdist.comm.groups import abort_nccl
from pygdist.comm.meter import TrafficMeter
from pygdist.comm.places import failure
from pygdist.comm.process import watch
from pygdist.comm.progress import GpuEvent
from pygdist.comm.recorder import Recorder
from pygdist.comm.watchdog import Watchdog
from pygdist.errors import InputError, UnequalRanksError

#: Seconds added to nccl's own timeout, so that the watchdog, which can say why, acts first.
NCCL_GRACE_S = 120.0

_LABEL_BYTES = 128
_TAGS = 2**30
_END_S = 5.0  # a courier that takes longer waits for a rank that does not answer


class Transport:
    """The ranks of an exchange; arguments and attributes are those of :class:`~pygdist.comm.Communicator`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 600.0,
        check_order: bool = False,
        watchdog: Watchdog | None = None,
        local_rank: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.local_rank = self.rank if local_rank is None else local_rank
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.meter = TrafficMeter()
        self.buffers = Buffers()
        self.courier = Courier()
        self.recorder: Recorder | None = None
        self._epoch = 0
        self._unit = "epoch"
        self._parent: Transport | None = None  # whose epoch it is
        self._host: Any = None  # of the same ranks, for tensors on the host
        self._on_gpu = 0  # ranks on the GPU of this one, if that is known
        self.check_order = check_order
        self.timeout = datetime.timedelta(seconds=timeout_s)
        if watchdog is None and self.world_size > 1 and self.world_size == dist.get_world_size():
            watchdog = watch()
        self._watchdog = watchdog
        self._is_quiet = False  # a thread's exchanges do not say where this rank is
        self._first_rank = 0  # this group's rank 0, as errors name it
        self._calls, self._digest, self._last = 0, 0, ""  # calls, a checksum of their labels, and the last
        self._at = ""
        self._apart: list[Transport] = []  # of the same ranks, closed with this one
        self._users: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._rows_on = device
        on_gpu = device is None or device.type == "cuda"
        self.is_nccl = group is not None and _backend_of(group, on_gpu=on_gpu) == "nccl"
        # with its number: another thread has another current GPU
        self._gpu: torch.device | None = None
        if self.is_nccl:
            number = None if device is None else device.index
            self._gpu = torch.device("cuda", torch.cuda.current_device() if number is None else number)
        self._numbers: dist.ProcessGroup | None = None
        if group is not None and self.is_nccl:
            # nccl wants every rank in the first call of a group; later pairs may then involve any two
            dist.all_reduce(torch.zeros(1, device=self._gpu), group=group)

    def __deepcopy__(self, memo: dict[int, object]) -> Transport:
        return self  # copies of a module share its process group, which nobody can copy

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # a process group does not travel: where this is loaded, there is one process

    @property
    def epoch(self) -> int:
        """The current epoch, named in errors."""
        return self._epoch if self._parent is None else self._parent.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number

    @property
    def unit(self) -> str:
        """The unit of :attr:`epoch`, named in errors; an epoch, or a backward pass in the user's own loop."""
        return self._unit if self._parent is None else self._parent.unit

    @unit.setter
    def unit(self, name: str) -> None:
        self._unit = name

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` is one process alone.

        Raises:
            InputError: If the communicator is closed.
        """
        if self.is_closed:
            # no RuntimeError, which here means that the transport failed
            raise InputError("the communicator is closed: its training, validation or test has ended")
        return self._group

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The group for numbers and texts: over nccl these would wait for the GPU.

        The first use makes the group, so all ranks make this use together.
        """
        group = self.group  # refused if closed
        if group is None or not self.is_nccl:
            return group
        if self._numbers is None:
            with self.attempt(
                f"meet over gloo, on the interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of this host')}"
                "; GLOO_SOCKET_IFNAME names another"
            ):
                self._numbers = self._new_group(dist.get_process_group_ranks(group), "gloo", self.timeout)
        return self._numbers

    @property
    def device(self) -> torch.device:
        """The device of tensors that the process group takes, which is the GPU with nccl, otherwise the CPU."""
        return self._gpu or torch.device("cpu")

    @property
    def _group_timeout(self) -> datetime.timedelta:
        return self.timeout + datetime.timedelta(seconds=NCCL_GRACE_S if self.is_nccl else 0.0)

    def sharers(self, device: torch.device) -> int:
        """Return the number of ranks that share the memory of a device, including this rank.

        For host memory these are all ranks, as the number on this host is unknown. For a GPU it is the number that
        :meth:`meet` counted; before ``meet``, the number of ranks divided by the number of this host's GPUs, rounded
        up.
        """
        if device.type != "cuda":
            return self.world_size
        return self._on_gpu or -(-self.world_size // max(torch.cuda.device_count(), 1))

    @property
    def is_closed(self) -> bool:
        """True after :meth:`close`."""
        return self._group is None and self.world_size > 1

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process group, which was made for this communicator; every later exchange is refused.

        Args:
            failed: True if other ranks may be in a call that never ends. With nccl, all calls are then aborted first:
                destroying a group would wait for these calls.
        """
        users, self._users = self._users, []
        for user in users:
            if (end := user()) is not None:
                end()
        for one in self._apart:
            one.close(failed=failed)
        self.courier.close()
        # the object too: while somebody holds it, its threads go on (see pygdist.lightning.strategies)
        group, numbers, self._group, self._numbers = self._group, self._numbers, None, None
        if group is not None and dist.is_initialized():
            if failed and self.is_nccl:
                abort_nccl()
            if numbers is not None:
                dist.destroy_process_group(numbers)
            dist.destroy_process_group(group)

    def before_close(self, end: Callable[[], None]) -> None:
        """Register a method to call before the process group is destroyed, to end threads that make exchanges.

        The communicator does not keep the method's object alive.
        """
        self._users = [one for one in self._users if one() is not None]
        self._users.append(weakref.WeakMethod(end))

    # -- what each exchange reports -------------------------------------------------------------------------------

    def move(self, at: str) -> None:
        """Note the place of this rank in a model. Ranks with different places cannot make exchanges together."""
        self._digest, self._at = zlib.crc32(at.encode(), self._digest), at
        if self._watchdog is not None:
            self._watchdog.move(at)

    @property
    def tag(self) -> int:
        """The tag of messages, a checksum of all calls so far; messages of ranks with other calls never match."""
        return self._digest % _TAGS

    def announce(self, label: str) -> None:
        """Report the exchange that begins; every exchange calls this first.

        Raises:
            UnequalRanksError: With ``check_order``, on all ranks, if their labels differ.
        """
        self._calls += 1
        self._digest, self._last = zlib.crc32(label.encode(), self._digest), label
        self._enter(label)
        if self.check_order:
            texts = self._gather_text(f"call {self._calls}: {label}", _LABEL_BYTES)
            if len(set(texts)) > 1:
                calls = "; ".join(f"rank {rank} makes {text}" for rank, text in enumerate(texts))
                raise UnequalRanksError(f"the ranks disagree on the next exchange in {self.unit} {self.epoch}: {calls}")

    def begin_wait(self, label: str) -> None:
        """Report that this rank now waits for an exchange that began before, on this or another thread."""
        self._enter(label, counted=False)

    def done(self, *, on_host: bool = False) -> None:
        """Report that the exchange is over; with nccl, the GPU may still be in it, unless it was ``on_host``."""
        if self._watchdog is not None and not self._is_quiet:
            self._watchdog.leave(None if on_host else self._end_on_gpu())

    def _end_on_gpu(self) -> GpuEvent | None:
        """Return an event behind what the current stream waits for: nccl's exchanges, for which the host does not."""
        if not self.is_nccl:
            return None
        assert self._gpu is not None
        return None if torch.cuda.is_current_stream_capturing() else GpuEvent(self._gpu)

    def waiting(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Count the time inside the block as waiting, unless a thread makes this communicator's exchanges."""
        return contextlib.nullcontext() if self._is_quiet else self.meter.waiting(device)

    @contextlib.contextmanager
    def attempt(self, label: str, peer: int | None = None) -> Iterator[None]:
        """Turn a failure of the transport inside the block into the error that :meth:`lost` makes."""
        try:
            yield
        except RuntimeError as error:
            raise self.lost(label, error, peer) from error

    def lost(self, label: str, error: RuntimeError, peer: int | None = None) -> RuntimeError:
        """Make the error for a failure of the transport, which names this rank, the exchange and the failed rank.

        Returns:
            A ``LostRankError``, or an ``UnequalRanksError`` if the watchdog finds that the ranks make different calls.
        """
        number = self._calls if self._watchdog is None else self._watchdog.place.exchange
        when = f"{self.unit} {self.epoch}"
        here = f"rank {self._first_rank + self.rank}, {when}, exchange {number} ({label})"
        with_whom = "" if peer is None else f" with rank {self._first_rank + peer}"
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        cause = cause.rpartition("] ")[2].partition(". This is typically")[0]  # gloo adds its source file and advice
        blame = "" if self._watchdog is None else self._watchdog.diagnose()
        because = f"; {blame}" if blame else ""
        return failure(blame, f"{here}: the exchange{with_whom} failed{because} [{cause}]")

    def _enter(self, label: str, *, counted: bool = True) -> None:
        if self._watchdog is not None and not self._is_quiet:
            self._watchdog.enter(self.epoch, label, counted=counted, unit=self.unit)

    def _gather_text(self, text: str, size: int) -> list[str]:
        """Return the text of every rank, cut to ``size`` bytes; as plain bytes, nothing is pickled."""
        raw = text.encode()[:size].ljust(size, b"\0")
        row = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        rows = row.repeat(self.world_size, 1)
        with self.attempt("agreement"):  # not a collective: gloo aborts where one meets another of another size
            self.swap([row] * self.world_size, list(rows), tag=size)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.numpy()]

    def _gather_row(self, values: Sequence[float]) -> Tensor:
        """Return the numbers of every rank, a row for each. An all-gather, which is a ring, takes twice as long."""
        row = torch.tensor(values, dtype=torch.float64, device="cpu")  # whatever the default device
        rows = row.new_empty(self.world_size, row.numel())
        dist.all_to_all_single(rows, row.repeat(self.world_size, 1), group=self.host_group)
        return rows

    def _new_group(
        self, members: list[int], backend: str | None, timeout: datetime.timedelta
    ) -> dist.ProcessGroup | None:
        """Make a group of ``members``, numbers among all processes. Every rank of this communicator makes the call."""
        # With local synchronisation torch names a group by its members and the number of groups: after a close the name
        # comes again, with addresses of the closed group. So only where not all processes make the call.
        some = self.world_size < dist.get_world_size()
        made: dist.ProcessGroup | None = dist.new_group(members, timeout, backend, use_local_synchronization=some)
        return made

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> None:
        """Send ``outgoing[p]`` to rank p and fill ``incoming[p]`` from it, for every other rank p, all on the host."""
        works: list[Any] = []
        for op, end, tensors in ((dist.irecv, "group_src", incoming), (dist.isend, "group_dst", outgoing)):
            pairs = [(peer, one) for peer, one in enumerate(tensors) if peer != self.rank and one.numel()]
            works += [op(one, group=self.host_group, tag=tag, **{end: peer}) for peer, one in pairs]
        for work in works:
            work.wait(self.timeout)


class Courier:
    """A thread that sends and receives while the main thread computes. The thread starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job()`` after the jobs submitted before; the job must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="pygdist-courier", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread, without waiting for a failed exchange, in which it may stay until the timeout."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=_END_S)
            self._thread = None

    def __del__(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)


def _backend_of(group: dist.ProcessGroup, *, on_gpu: bool) -> str:
    """Return the name of the backend that takes rows, of those in a group such as cpu:gloo,cuda:nccl."""
    by_device = dict(one.partition(":")[::2] for one in dist.get_backend_config(group).split(","))
    return by_device.get("cpu", by_device.get("cuda", "")) if not on_gpu else by_device.get("cuda", "")


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # a transfer holds its communicator, and that its courier
