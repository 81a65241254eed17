"""Ranks for a notebook: processes that start once, run functions of its cells, and keep what the functions keep.

The notebook's own process is never forked and joins no group, so its threads and GPUs stay as they are.
"""

from __future__ import annotations

import io
import linecache
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from pygdist.comm.launched import join, own_device
from pygdist.errors import InputError, RefusedError
from pygdist.loop.processes import CAN_SEND_CODE, Failure, RankProcesses, first_failure, job, print_through

_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_")  # variables of a job in which the notebook runs, but not its workers


class WorkerError(RuntimeError):
    """A function failed on a rank, or the rank's process ended. The message names the rank and holds its traceback."""

    def _render_traceback_(self) -> list[str]:
        """IPython calls this to show the error of the rank without the calls in the notebook's process."""
        return [f"{type(self).__name__}: {self}"]


class Worker:
    """One rank, the first argument of each function that :meth:`Workers.run` calls.

    Attributes that a function sets on the worker stay for later calls.

    Attributes:
        rank: Number of this rank, from 0.
        num_ranks: Number of ranks.
        device: The GPU of this rank, if the machine has as many GPUs as ranks; otherwise the CPU.
    """

    rank: int
    num_ranks: int
    device: torch.device

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, own_device()

    def __repr__(self) -> str:
        kept = ", ".join(sorted(vars(self).keys() - {"rank", "num_ranks", "device"}))
        return f"Worker({self.rank} of {self.num_ranks} on {self.device}, keeps {kept or 'nothing yet'})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the worker keeps no '{name}': run the cell that sets it. Workers that were closed, were interrupted, or "
            "failed on one rank alone have started anew"
        )


class Workers:
    """Processes of this machine that train on parts of a graph together and last until :meth:`close`.

    The processes start with the first :meth:`run`. Each process keeps its :class:`Worker`, so later cells can use what
    functions set there, such as an open graph and a model. The processes end with a ``with`` block, with this object,
    or with the notebook's kernel.

    Args:
        num_ranks: Number of processes.
        num_threads: Threads of each process; by default the threads of this process, divided by ``num_ranks``.
        timeout_s: Seconds without an answer or a printed line after which the processes count as hung and are killed;
            by default there is no limit.
        grace_s: For a function that has failed on one process: seconds without an answer or a printed line after which
            the other processes are killed. If all processes fail alike within this time, they keep their workers.

    Raises:
        InputError: If ``num_ranks`` or ``num_threads`` is below 1, or ``cloudpickle``, which sends functions and
            classes of a notebook to the processes, is not installed.

    Example:
        >>> workers = Workers(2)
        >>> def load(worker):
        ...     worker.graph = pygdist.open_graph("sbm")
        ...     return worker.graph.num_nodes
        >>> workers.run(load)
        [20000, 20000]
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        num_threads: int | None = None,
        timeout_s: float | None = None,
        grace_s: float = 60.0,
    ) -> None:
        if not CAN_SEND_CODE:
            raise InputError(
                "Workers: functions and classes of a notebook travel by cloudpickle, which is not installed; install "
                "it: pip install cloudpickle"
            )
        if num_ranks < 1:
            raise InputError(f"Workers: num_ranks is {num_ranks}, expected at least 1")
        if num_threads is not None and num_threads < 1:
            raise InputError(f"Workers: num_threads is {num_threads}, expected at least 1")
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.num_threads = max(1, torch.get_num_threads() // num_ranks) if num_threads is None else num_threads
        self._processes = RankProcesses(num_ranks, preload=__name__, imports_main=False, late_s=grace_s)

    def __repr__(self) -> str:
        return f"Workers({self.num_ranks} ranks, {'running' if len(self._processes) else 'not started'})"

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(worker, *args, **kwargs)`` on all ranks at the same time, and wait.

        In the function, :func:`~pygdist.open_graph` finds the ranks as under ``torchrun``. Lines that a rank prints
        appear here, with the rank's number.

        Args:
            function: A function of a cell, a script or a module. Each rank gets a copy of the function and of the
                values that the function uses; changes of these values stay with the rank. ``worker`` is the rank's
                :class:`Worker`.
            *args: Further arguments; each rank gets copies.
            **kwargs: Further arguments by name; each rank gets copies.

        Returns:
            The results, in rank order.

        Raises:
            InputError: If the function raises an ``InputError``, or the function or an argument cannot be sent.
            WorkerError: If the function fails. If all ranks fail in the same line with the same message, the processes
                keep their workers. Otherwise, and after an interrupt, the processes end, as some ranks may wait in a
                call that other ranks have left; the next call starts new processes.
            KeyboardInterrupt: If the call is interrupted.
        """
        if not len(self._processes):
            self._start()
        call = job(_run, _cells(), function, args, kwargs)  # before anything is sent
        try:
            answers = self._processes.call([call] * self.num_ranks, timeout_s=self.timeout_s, show=_show)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the workers were ended; the next call starts new ones") from None
        return self._checked(answers)

    def close(self) -> None:
        """End the processes and their workers. A later :meth:`run` starts new processes."""
        self._processes.close()

    def _start(self) -> None:
        try:
            self._processes.start(self.num_ranks)
            store = self._processes.new_store()
            environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
            options = self.num_ranks, self.num_threads, store, environment
            jobs = [job(_join, rank, *options) for rank in range(self.num_ranks)]
            self._checked(self._processes.call(jobs, timeout_s=self.timeout_s))
        except BaseException:  # no call may find processes that have not joined
            self.close()
            raise

    def _checked(self, answers: list[Any]) -> list[Any]:
        """Return the results of all ranks, or raise the error that most likely caused the others."""
        if (failed := first_failure(answers)) is None:
            return answers
        rank, failure = failed
        # a mistake counts as alike: all ranks raise it, but those that are told of it do so elsewhere in the code
        alike = all(
            isinstance(one, Failure) and (one.trace == failure.trace or one.kind == failure.kind == "mistake")
            for one in answers
        )
        if not alike or failure.kind in ("refused", "ended", "late"):
            self.close()
        if failure.kind == "refused":
            raise RefusedError(f"rank {rank}: {failure.line}")
        if failure.kind == "mistake":
            raise InputError(failure.line)
        who = "all ranks" if alike and self.num_ranks > 1 else f"rank {rank} of {self.num_ranks}"
        late = [other for other, one in enumerate(answers) if isinstance(one, Failure) and one.kind == "late"]
        others = f"\n\nended while still at work: {_ranks(late)}" if late and failure.kind != "late" else ""
        raise WorkerError(f"{who}: {failure.line}{others}\n\n{failure.trace}".rstrip())


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _show(rank: int, text: str) -> None:
    sys.stdout.write(f"rank {rank}: {text}\n")


def _cells() -> dict[str, Any]:
    """Return the sources that are in no file, such as a notebook's cells, for the ranks' tracebacks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


# -- in a rank's process -----------------------------------------------------------------------------------------------

_worker: Worker | None = None


def _join(rank: int, num_ranks: int, num_threads: int, store: str, environment: Mapping[str, str]) -> None:
    """Make this process a rank."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook reaches its whole process group
    os.environ.clear()
    os.environ.update(environment)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine listen to nobody else
    torch.set_num_threads(num_threads)
    if num_ranks > 1:
        join(dist.FileStore(store, num_ranks))
    _worker = Worker(rank, num_ranks)
    sys.stdout = sys.stderr = _lines  # to the end, as threads may print after a call
    os.register_at_fork(after_in_child=_print_plainly)


def _print_plainly() -> None:
    """Leave the pipe to the process that forked this one."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _run(
    cells: Mapping[str, Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of the notebook."""
    linecache.cache.update(cells)
    try:
        return function(_worker, *args, **kwargs)
    finally:
        _lines.end()


class _Lines(io.TextIOBase):
    """Sends whole lines to the notebook, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rests: dict[int, str] = {}  # what has no line end yet, by thread

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, text: str) -> int:
        thread = threading.get_ident()
        with self._lock:
            *lines, rest = (self._rests.pop(thread, "") + text).split("\n")
            if rest:
                self._rests[thread] = rest
            for line in lines:
                print_through(line)
        return len(text)

    def end(self) -> None:
        """Send what has no line end yet, of this thread and of those that have ended."""
        with self._lock:
            working = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
            for thread in self._rests.keys() - working:
                print_through(self._rests.pop(thread))


_lines = _Lines()
