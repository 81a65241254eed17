"""Real ranks for tests: one process each, joined by gloo through a file. No ports, no launcher.

Importing torch and PyG costs seconds. Python's fork server imports them once, starts no thread, and forks the ranks,
which make their own threads and groups. Where there is a GPU, each rank imports them itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from pygdist.errors import RefusedError
from pygdist.memory.limits import refusal_of, require_for_ranks
from pygdist.memory.scratch import ScratchFolder

_HAS_FORK_SERVER = "forkserver" in multiprocessing.get_all_start_methods()


class RankError(AssertionError):
    """A rank failed or hangs. The message names the rank and holds the traceback of the rank's process."""


class RankPool:
    """Processes that run functions as ranks of a gloo group, for many calls of any world size up to its own.

    Ranks share no memory with the caller. Their environment variables are those that the caller had when it started its
    fork server, which its first pool does; where there is a GPU, when it started the ranks.

    Args:
        size: Largest world size that :meth:`run` accepts.
        timeout_s: Seconds that a call may take. After that the pool kills all its processes and names the ranks that
            have not answered.

    Example:
        >>> with RankPool(4) as pool:
        ...     sums = pool.run(add_up, 3, torch.ones(2))  # add_up(rank, world_size, tensor) on ranks 0, 1, 2
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        require_for_ranks(size)
        self.size, self.timeout_s = size, timeout_s
        self._folder = ScratchFolder()
        self._calls = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call ``function(rank, world_size, *args)`` on each rank.

        Args:
            function: A function that other processes can import by its name. The default process group is set up when
                it runs.
            world_size: Number of ranks, at most the pool's size.
            args: Anything that can be pickled.

        Returns:
            The results of all ranks, in rank order.

        Raises:
            RankError: With the traceback of the rank that failed first, or the names of the ranks that hang.
            RefusedError: If the machine refuses a rank what it needs, such as room on a disk.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be between 1 and the pool's {self.size}, got {world_size}")
        self._start(world_size)
        self._calls += 1
        store = str(self._folder.path / f"store-{self._calls}")
        for rank in range(world_size):
            # pickled here: a pipe would put tensors into shared memory, where ranks change each other's parameters
            self._pipes[rank].send_bytes(pickle.dumps((function, rank, world_size, store, args)))
        answers = self._collect(world_size)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if failed:
            self.close()  # the group is broken; the next call starts new processes
            # ranks that lost their neighbour say less than the rank that failed first
            rank = min(failed, key=lambda r: ("LostRankError" in failed[r] or "Connection" in failed[r], r))
            if refused := next((text for text in failed.values() if isinstance(text, _Refused)), None):
                raise RefusedError(refused)
            raise RankError(f"rank {rank} of {world_size} failed:\n{failed[rank]}")
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Kill the processes. A later :meth:`run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self, world_size: int) -> None:
        # PyG compiles TorchScript when it is imported, for which torch asks the GPU's driver; a process that is forked
        # afterwards cannot use the GPU
        forks = _HAS_FORK_SERVER and not torch.cuda.is_available()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["__main__", __name__])  # no effect on a server that runs
        for _ in range(len(self._processes), world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, str(self._folder.path)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, world_size: int) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < world_size:
            waiting = {self._pipes[rank]: rank for rank in range(world_size) if rank not in answers}
            # once a rank has failed, the others lose their neighbour and say so within seconds
            failed = any(not ok for ok, _ in answers.values())
            ready = wait(list(waiting), timeout=20.0 if failed else self.timeout_s)
            if not ready:
                if failed:
                    return answers
                late = sorted(waiting.values())
                stacks = "\n".join(f"rank {rank}:\n{self._stacks(rank)}" for rank in late)
                self.close()
                raise RankError(f"no answer within {self.timeout_s:.0f} s from ranks {late}\n{stacks}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, self._end(rank))
        return answers

    def _end(self, rank: int) -> str:
        """Say how a rank's process ended, with its stacks where a signal such as SIGSEGV ended it."""
        process = self._processes[rank]
        process.join(timeout=5)
        path = self._folder.path / str(process.pid)
        stacks = path.read_text() if path.exists() else ""
        return f"the process ended (exit code {process.exitcode})\n{stacks}".rstrip()

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a rank's threads, as Python sees them."""
        pid = self._processes[rank].pid
        path = self._folder.path / str(pid)
        if not path.exists() or pid is None:
            return "unknown"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)  # the process writes them
        return path.read_text()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on processes of its own: :meth:`RankPool.run`, once."""
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.run(function, world_size, *args)


def _serve(pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)  # ranks share the cores of one machine
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the disk is full, or the parent has ended and its folder is gone
            stacks = stack.enter_context(open(f"{folder}/{os.getpid()}", "w"))
            faulthandler.enable(file=stacks)
            if hasattr(faulthandler, "register"):
                faulthandler.register(signal.SIGUSR1, file=stacks)
        with contextlib.suppress(EOFError):  # the parent closes its end
            while True:
                pipe.send_bytes(_answer(pipe.recv_bytes()))


class _Refused(str):
    """What the machine has refused a rank, in one line."""

    __slots__ = ()


def _answer(job: bytes) -> bytes:
    """Return the pickled pair (True, result) or (False, traceback); the latter also where pickling fails."""
    try:
        return pickle.dumps((True, _call(*pickle.loads(job))))
    except BaseException as error:  # the caller is told of KeyboardInterrupt and SystemExit too
        refused = refusal_of(error)
        return pickle.dumps((False, traceback.format_exc() if refused is None else _Refused(str(refused))))


def _call(function: Callable[..., Any], rank: int, world_size: int, store: str, args: Any) -> Any:
    # the barrier: a rank that returns while others still connect to it would break their group
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), TORCH_DIST_INIT_BARRIER="1")
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
