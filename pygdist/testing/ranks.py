"""Real ranks for tests: one process for each rank, joined by gloo through a file, without ports or a launcher.

:mod:`pygdist.loop.processes` describes the start of the processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pygdist.errors import RefusedError
from pygdist.loop.processes import RankProcesses, first_failure, job

_LATE_S = 20.0  # a rank that lost its neighbour says so within seconds


class RankError(AssertionError):
    """A rank failed, or does not answer. The message names the rank, and has its traceback if the rank failed."""


class RankPool:
    """Processes that run functions as ranks of a gloo group, for many calls of any world size up to ``size``.

    Ranks share no memory with the caller. The ranks get the caller's environment variables as of the start of the fork
    server by the caller's first pool or, with a GPU, as of the start of the ranks.

    Args:
        size: Largest world size that :meth:`run` accepts.
        timeout_s: Seconds without an answer from any rank, after which the pool kills all its processes and names the
            ranks that have not answered.

    Example:
        >>> with RankPool(4) as pool:
        ...     sums = pool.run(add_up, 3, torch.ones(2))  # add_up(rank, world_size, tensor) on ranks 0, 1, 2
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._processes = RankProcesses(size, preload=__name__, imports_main=True, late_s=_LATE_S)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call ``function(rank, world_size, *args)`` on each rank.

        Args:
            function: A function that other processes can import by its name or, if ``cloudpickle`` is installed, a
                function of a notebook. The default process group exists when the function runs.
            world_size: Number of ranks, at most the pool's size.
            args: Arguments of the function; any objects that can be pickled.

        Returns:
            The results of all ranks, in rank order.

        Raises:
            ValueError: If ``world_size`` is not 1 to the pool's size.
            RankError: With the traceback of the rank that failed first, or the names of the ranks that do not answer.
            RefusedError: If the machine refuses a resource, such as room on a disk, that a rank needs.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be between 1 and the pool's {self.size}, got {world_size}")
        self._processes.start(world_size)
        store = self._processes.new_store()
        jobs = [job(_call, function, rank, world_size, store, args) for rank in range(world_size)]
        answers = self._processes.call(jobs, timeout_s=self.timeout_s)
        if (failed := first_failure(answers)) is None:
            return answers
        self.close()  # the group is broken; the next call starts new processes
        rank, failure = failed
        if failure.kind == "refused":
            raise RefusedError(failure.line)
        if failure.kind == "late":
            raise RankError(f"{failure.line}\n{failure.trace}")
        said = "\n".join([failure.line, failure.trace] if failure.kind == "ended" else [failure.trace])
        raise RankError(f"rank {rank} of {world_size} failed:\n{said}")

    def close(self) -> None:
        """Kill the processes. A later :meth:`run` starts new ones."""
        self._processes.close()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` once on each rank of a new pool; see :meth:`RankPool.run`."""
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.run(function, world_size, *args)


def _call(function: Callable[..., Any], rank: int, world_size: int, store: str, args: Any) -> Any:
    # the barrier: a rank that returns while others still connect to it would break their group
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), TORCH_DIST_INIT_BARRIER="1")
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
