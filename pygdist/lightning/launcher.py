"""Starts the ranks of one machine, as Lightning does, and names a rank that dies.

Lightning's own observer kills all processes, its own included, five seconds after a child dies, and reports a process
number. Here the other ranks get time to find out and report which rank was lost, before anything is killed. An error of
a spawned or forked rank is raised again in the process that started it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from pygdist.errors import InputError, LostRankError

__all__ = ["ForkLauncher", "GraphLauncher", "SpawnLauncher"]

log = logging.getLogger(__name__)

_ERRORS = "|".join(error.__name__ for error in (InputError, LostRankError))
_RAISED = re.compile(rf"^{re.escape(InputError.__module__)}\.({_ERRORS}): (.*)$", re.MULTILINE)


class GraphLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for each further rank of this machine.

    Args:
        args: As in Lightning's launcher: cluster environment, number of processes, number of machines.
        grace_s: Seconds that the other ranks have to exit by themselves after one has died.
    """

    def __init__(self, *args: Any, grace_s: float = 15.0) -> None:
        super().__init__(*args)
        self.grace_s = grace_s

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            first_rank = self.cluster_environment.node_rank() * self.num_processes
            _Observer(self.procs, first_rank + 1, self.grace_s).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class SpawnLauncher(_MultiProcessingLauncher):
    """Spawns the ranks from a Python script; their errors reach the caller with their own types.

    Args:
        strategy: The strategy that the ranks run.
        start_method: The way in which processes are started.
    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Literal["spawn", "fork", "forkserver"] = "spawn"
    ) -> None:
        super().__init__(strategy, start_method=start_method)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            # its message is the traceback of the process, whose last line is the error
            raised = _RAISED.findall(str(error))
            if not raised:
                raise
            kind, message = raised[-1]
            raise (InputError if kind == InputError.__name__ else LostRankError)(message) from error
        except ProcessExitedException as error:
            assert self._strategy.cluster_environment is not None
            rank = self._strategy.cluster_environment.node_rank() * len(self.procs) + error.error_index
            raise LostRankError(f"rank {rank} (process {error.error_pid}) {_fate(error.exit_code)}") from error


class ForkLauncher(SpawnLauncher):
    """Forks the ranks, as a notebook needs, and limits each to one thread.

    OpenMP's threads do not survive a fork, but its record of them does. If the notebook has computed on several threads
    before, a forked rank that asks for several waits for ever. Scripts and the command line start their ranks afresh
    and use all cores.

    Args:
        strategy: The strategy that the ranks run.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        super().__init__(strategy, start_method="fork")

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # unset, Lightning would take cores / ranks
        super()._wrapping_function(process_idx, *args, **kwargs)


class _Observer(threading.Thread):
    """Watches the child processes; ends with the main process."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int, grace_s: float) -> None:
        super().__init__(daemon=True, name="pygdist-observer")
        self._processes, self._first_rank, self._grace_s = processes, first_rank, grace_s
        self._timer = threading.Event()

    @override
    def run(self) -> None:
        while not any(process.poll() for process in self._processes):
            if all(process.poll() == 0 for process in self._processes):
                return
            self._timer.wait(0.5)
        for offset, process in enumerate(self._processes):
            if process.returncode:
                log.error("rank %d (process %d) %s", self._first_rank + offset, process.pid, _fate(process.returncode))
        self._timer.wait(self._grace_s)
        log.error("ending all ranks of this machine, %.0f s after one was lost", self._grace_s)
        for process in self._processes:
            process.kill()
        os._exit(1)  # the main thread hangs in a collective call that no exception reaches


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
