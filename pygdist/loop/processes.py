"""Processes of this machine that run functions for the one that started them, over a pipe each.

Importing torch and PyG costs seconds. Python's fork server imports them once, starts no thread, and forks the
processes, which make their own threads and groups. Where there is a GPU, each process imports them itself. The caller
is never forked, so its threads and its GPUs stay as they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from types import ModuleType, TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from pygdist import signals
from pygdist.errors import InputError, LostRankError
from pygdist.memory.limits import refusal_of, require_for_ranks
from pygdist.memory.scratch import ScratchFolder

try:
    import cloudpickle as pickler  # classes and functions of a notebook travel too
except ImportError:
    pickler = pickle

CAN_SEND_CODE = pickler is not pickle
"""Functions and classes of ``__main__``, such as those of a notebook's cells, can be sent to other processes."""

_HAS_FORK_SERVER = "forkserver" in multiprocessing.get_all_start_methods()
_END_S = 5.0  # for the exit code of a process that has closed its pipe
_SOON_S = 5.0  # the user is told that one rank has failed, if the others have not ended by then
_BEFORE_JOIN = 100  # at its end, Python first calls what has a priority from 0 on, then joins child processes


@dataclass(frozen=True)
class Failure:
    """A call that failed in a process.

    Attributes:
        line: Type and message of the error.
        trace: The traceback, from the called function on.
        kind: A *mistake* is an :class:`~pygdist.InputError`, *refused* what the machine refused, *ended* the end of the
            process, *late* that the process had not answered in time; an *error* is any other.
        follows: Says how likely another rank's failure has caused this one: 0, it has its own cause; 1, the process
            ended with an exit code, as the watchdog ends it; 2, the rank has lost another; 3, it was at work.
    """

    line: str
    trace: str
    kind: Literal["error", "mistake", "refused", "ended", "late"] = "error"
    follows: int = 0


class RankProcesses:
    """Up to ``size`` processes; they end with :meth:`close`, with this object, or with the process that started them.

    Args:
        size: Largest number of processes.
        preload: A module that the processes import first, with the functions that jobs call.
        imports_main: Processes import the script that started them, whose functions they then find by name. Otherwise
            functions of the script must be sent whole (:data:`CAN_SEND_CODE`).
        late_s: Once a rank has failed, seconds without an answer or a printed line after which the others are killed.
    """

    def __init__(self, size: int, *, preload: str, imports_main: bool, late_s: float) -> None:
        require_for_ranks(size)
        self._folder, self._late_s = ScratchFolder(), late_s
        self._preload, self._imports_main = preload, imports_main
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        Finalize(self, _kill, args=(self._processes, self._pipes), exitpriority=_BEFORE_JOIN)
        self._meetings = 0

    def __len__(self) -> int:
        return len(self._processes)

    def new_store(self) -> str:
        """Return the path of a file in which processes can meet."""
        self._meetings += 1
        return str(self._folder.path / f"store-{self._meetings}")

    def start(self, number: int) -> None:
        """Start processes until there are ``number``."""
        # PyG compiles TorchScript when it is imported, for which torch asks the GPU's driver; a process that is forked
        # afterwards cannot use the GPU
        forks = _HAS_FORK_SERVER and not torch.cuda.is_available()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:  # no effect on a server that runs
            context.set_forkserver_preload(["__main__"] * self._imports_main + [self._preload])
        with _starting, contextlib.nullcontext() if self._imports_main else _without_main():
            for _ in range(len(self._processes), number):
                ours, theirs = context.Pipe()
                # not daemonic, as functions may start processes of their own, such as those of a DataLoader
                process = context.Process(target=_serve, args=(theirs, str(self._folder.path)), daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def call(
        self,
        jobs: list[bytes],
        *,
        timeout_s: float | None = None,
        show: Callable[[int, str], None] | None = None,
    ) -> list[Any]:
        """Let each process do its job (:func:`job`), and return the results or :class:`Failure` of all, in order.

        If the call is interrupted, or a process does not answer in time, all processes are killed.

        Args:
            jobs: One for each process.
            timeout_s: Seconds without an answer or a printed line after which a call counts as hung; no limit by
                default.
            show: Takes the lines that processes print (:func:`print_through`).
        """
        answers: dict[int, Any] = {}
        try:
            for rank, one in enumerate(jobs):
                try:
                    self._pipes[rank].send_bytes(one)
                except OSError:
                    answers[rank] = self._end(rank)
            while len(answers) < len(jobs) and self._collect(answers, len(jobs), timeout_s, show):
                pass
        except BaseException:  # a process still works, and would answer the next call
            self.close()
            raise
        return [answers[rank] for rank in range(len(jobs))]

    def _collect(
        self, answers: dict[int, Any], number: int, timeout_s: float | None, show: Callable[[int, str], None] | None
    ) -> bool:
        """Take what has arrived; if nothing arrives in time, kill all processes and return false."""
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in range(number) if rank not in answers}
        late = sorted(waiting.values())
        # a process that has ended may have left others, which hold its pipe open
        waiting |= {self._processes[rank].sentinel: rank for rank in late}
        # once a rank has failed, the others lose their neighbour and say so, fail alike, or wait for it for ever
        failed = [(rank, one) for rank, one in answers.items() if isinstance(one, Failure)]
        limit_s = self._late_s if failed else timeout_s
        ready = wait(list(waiting), timeout=min(_SOON_S, self._late_s) if failed else limit_s)
        if failed and not ready and (more_s := self._late_s - _SOON_S) > 0:
            if show is not None:
                rank, failure = failed[0]
                show(rank, f"{failure.line} (the ranks still at work, {late}, are ended in {more_s:g} s)")
            ready = wait(list(waiting), timeout=more_s)
        if not ready:
            # after a failure the others wait in the call that the failed rank has left: their stacks say nothing new
            stacks = "" if failed else "\n".join(f"rank {rank}:\n{self._stacks(rank)}" for rank in late)
            self.close()
            line = f"no answer within {limit_s:g} s from ranks {late}"
            answers.update(dict.fromkeys(late, Failure(line, stacks, "late", follows=3)))
            return False
        for rank in sorted({waiting[one] for one in ready}):
            pipe = self._pipes[rank]
            try:
                if not pipe.poll():
                    raise EOFError  # the process has ended, and all that it sent is read
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                kind, value = "answer", self._end(rank)
            if kind == "answer":
                answers[rank] = value
            elif show is not None:
                show(rank, value)
        return True

    def close(self) -> None:
        """Kill all processes; those of the next :meth:`start` are new."""
        _kill(self._processes, self._pipes)

    def _end(self, rank: int) -> Failure:
        """Say how a rank's process ended, with its stacks where a signal such as SIGSEGV ended it."""
        process = self._processes[rank]
        process.join(timeout=_END_S)
        path = self._folder.path / str(process.pid)
        stacks = path.read_text() if path.exists() else ""
        hint = "; was there enough memory?" if process.exitcode == -signal.SIGKILL else ""
        line = f"the process ended (exit code {process.exitcode}){hint}"
        return Failure(line, stacks.rstrip(), "ended", follows=int((process.exitcode or 0) >= 0))

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a rank's threads, as Python sees them."""
        pid = self._processes[rank].pid
        path = self._folder.path / str(pid)
        if not path.exists() or pid is None:
            return "unknown"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)  # the process writes them
        return path.read_text()


def job(function: Callable[..., Any], *args: Any) -> bytes:
    """Return a call as bytes; a pipe would put tensors into shared memory, where ranks change each other's parameters.

    Raises:
        InputError: If something cannot be sent.
    """
    try:
        whole: bytes = pickler.dumps((function, args))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise InputError(f"what the ranks get cannot be sent to other processes: {error}") from error
    return whole


def first_failure(answers: list[Any]) -> tuple[int, Failure] | None:
    """Return the rank whose failure most likely caused the others, and this failure; ``None`` without one."""
    failed = [(rank, one) for rank, one in enumerate(answers) if isinstance(one, Failure)]
    if refused := next((pair for pair in failed if pair[1].kind == "refused"), None):
        return refused
    return min(failed, key=lambda pair: (pair[1].follows, pair[0]), default=None)


def _kill(processes: list[Any], pipes: list[Connection]) -> None:
    for process in processes:
        process.kill()
        process.join()
    for pipe in pipes:
        pipe.close()
    processes.clear()
    pipes.clear()


_starting = threading.Lock()  # the module __main__ is one for all threads


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Let Python start processes that do not run the caller's script again, which then needs no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# -- in the process ----------------------------------------------------------------------------------------------------


def print_through(text: str) -> None:
    """Send a line to the process that waits for this one's answer."""
    assert _to_caller is not None
    with _sending:
        _to_caller.send_bytes(pickle.dumps(("print", text)))


_to_caller: Connection | None = None
_sending = threading.Lock()


def _serve(pipe: Connection, folder: str) -> None:
    global _to_caller
    _to_caller = pipe
    threading.Thread(target=_end_with_parent, daemon=True, name="pygdist-parent").start()
    torch.set_num_threads(1)  # ranks share the cores of one machine
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the disk is full, or the parent has ended and its folder is gone
            stacks = stack.enter_context(open(f"{folder}/{os.getpid()}", "w"))
            faulthandler.enable(file=stacks)
            if hasattr(faulthandler, "register"):
                faulthandler.register(signal.SIGUSR1, file=stacks)
        with contextlib.suppress(EOFError):  # the parent closes its end
            while True:
                answer = _answer(pipe.recv_bytes())
                with _sending:  # threads may print
                    pipe.send_bytes(answer)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, whatever this one does then."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    signals.exit_now(1)


def _answer(call: bytes) -> bytes:
    """Return the pickled result of a call, or its :class:`Failure`; the latter also where pickling fails."""
    try:
        function, args = pickle.loads(call)
        result = function(*args)
    except BaseException as error:  # the caller is told of KeyboardInterrupt and SystemExit too
        return pickle.dumps(("answer", _failure(error)))
    try:
        whole: bytes = pickler.dumps(("answer", result))
    except Exception as error:
        line = _line(error)
        whole = pickle.dumps(("answer", Failure(f"the result cannot be sent from this process ({line})", line)))
    return whole


def _failure(error: BaseException) -> Failure:
    refused = refusal_of(error)
    trace = "".join(traceback.format_exception(type(error), error, _of_caller(error.__traceback__))).rstrip()
    if refused is not None:
        return Failure(str(refused), trace, "refused")
    if isinstance(error, InputError):
        return Failure(str(error), trace, "mistake")
    return Failure(_line(error), trace, follows=2 if _has_lost_a_rank(error) else 0)


def _line(error: BaseException) -> str:
    """Return the type and the message of an error, without its notes."""
    whole: Any = traceback.TracebackException.from_exception(error)
    whole.__notes__ = None
    return str(list(whole.format_exception_only())[-1]).strip()


def _has_lost_a_rank(error: BaseException) -> bool:
    """Tell if an error is that of a rank whose neighbour has ended; gloo's are RuntimeErrors that name its files."""
    lost = isinstance(error, (LostRankError, dist.DistBackendError, dist.DistNetworkError))
    return lost or (type(error) is RuntimeError and "gloo/transport" in str(error))


def _of_caller(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of :func:`_answer` and of the function that it calls, which the caller did not write."""
    for _ in range(2):
        trace = None if trace is None else trace.tb_next
    return trace
