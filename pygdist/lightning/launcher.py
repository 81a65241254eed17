"""Starts the ranks of one machine, as Lightning does, and names a rank that dies.

Lightning's own observer kills all processes, its own included, five seconds after a child dies, and reports a process
number. Here the other ranks get time to find out and report which rank was lost, before anything is killed. An error of
a spawned or forked rank is raised again in the process that started it, and of several errors the first one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import active_children, connection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _disable_module_memory_sharing,
    _GlobalStateSnapshot,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    get_context,
    start_processes,
)
from typing_extensions import override

from pygdist.comm.places import is_stopped, machine
from pygdist.errors import InputError, LostRankError, SignalError
from pygdist.lightning.meeting import described, forget_own_port, host
from pygdist.memory.gpus import driver_runs
from pygdist.memory.limits import refusal_of
from pygdist.signals import PARENT, exit_now, held, name_of, postpone_end, signal_of

log = logging.getLogger(__name__)

_GRACE_S = 15.0  # the other ranks exit by themselves within this time after one has died
_JOIN_S = 5.0  # to kill those that do not
_POLL_S = 0.5
_KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)  # exit codes of ranks that no other rank ends
_LOST = re.compile(r"^pygdist\.errors\.LostRankError: (.*)$", re.MULTILINE)


class GraphLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for each further rank of this machine."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        self._check_numbers()
        if not self.cluster_environment.creates_processes_externally:
            if self.num_nodes > 1 and "NODE_RANK" not in os.environ:
                log.info(
                    "num_nodes=%d, but neither torchrun nor SLURM has started this process: run the same command on "
                    "each machine with its NODE_RANK, and the MASTER_ADDR and MASTER_PORT of the first",
                    self.num_nodes,
                )
            if self.num_processes > 1:
                _check_script()
            host(self.cluster_environment)
            os.environ[PARENT] = str(os.getpid())
            with held():
                self._call_children_scripts()
            _Observer(self.procs, self.cluster_environment.node_rank() * self.num_processes + 1).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _check_numbers(self) -> None:
        """Refuse other numbers of processes than torchrun or SLURM has started."""
        environment, devices, nodes = self.cluster_environment, self.num_processes, self.num_nodes
        try:
            environment.validate_settings(num_devices=devices, num_nodes=nodes)
        except ValueError as error:  # in words about Lightning
            asked = f"the trainer has devices={devices} and num_nodes={nodes}, but"
            if isinstance(environment, SLURMEnvironment):
                tasks, machines = (os.environ.get(name, "?") for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES"))
                raise InputError(
                    f"{asked} SLURM has --ntasks-per-node={tasks} and --nodes={machines}; make them equal"
                ) from error
            size, here = (os.environ.get(name, "?") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
            raise InputError(
                f"{asked} torchrun has started {size} processes, {here} of them on this machine; make them equal, with "
                "as many processes on each machine (pygdist fit finds both numbers by itself)"
            ) from error


def _check_script() -> None:
    """Refuse a script that cannot be run once more for each rank."""
    where = {"-": "standard input", "": "standard input", "-c": "the command line"}.get(sys.argv[0])
    if where is not None and getattr(sys.modules["__main__"], "__spec__", None) is None:
        raise InputError(
            f"ranks are started by running the script once more for each, but it came from {where}, which cannot be "
            "read again: save it in a file, or use strategy 'graph_ddp_fork'"
        )


class ProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks the ranks from this process; their errors reach the caller with their own types.

    Attributes:
        in_rank: This process is one of the ranks.
    """

    in_rank = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        forget_own_port(self._strategy.cluster_environment)
        self._mistakes = get_context(self._start_method).SimpleQueue()
        self._given_up: dict[int, str] = {}
        try:
            return self._run(function, args, kwargs, trainer)
        except ProcessRaisedException as error:
            # its message is the traceback of the process, whose last line is the error
            raised = _LOST.findall(str(error))
            if not raised:
                raise
            raise LostRankError(next(iter(self._given_up.values()), raised[-1])) from error
        except ProcessExitedException as error:
            raise self._reason(error) from error
        except SignalError as error:
            self._end_ranks(error.signum)
            raise
        finally:
            del self._mistakes  # no copy can be made of it

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: pl.Trainer | None) -> Any:
        """Start the ranks, and return the result of rank 0.

        It is Lightning's ``launch``, but for the wait: there torch sends SIGTERM to all ranks as soon as one has ended,
        and they would tell of that.
        """
        _check_missing_main_guard() if self._start_method == "spawn" else self._check_gpus()
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and fits:
            raise NotImplementedError(
                "a Trainer whose ranks are forked or spawned can call fit() only once: make another one, and go on by "
                "fit(ckpt_path=...)"
            )
        assert self._strategy.cluster_environment is not None
        os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)  # the same for all ranks
        results = get_context(self._start_method).SimpleQueue()
        given = [trainer, function, args, kwargs, results]
        if self._start_method != "fork":  # ranks draw from the caller's random generators
            given.append(_GlobalStateSnapshot.capture())
        number: int = self._strategy.num_processes  # type: ignore[attr-defined]
        context = start_processes(self._wrapping_function, given, number, join=False, start_method=self._start_method)
        self.procs = context.processes
        self._await_end(context)
        while not context.join():
            pass
        result = results.get()
        if trainer is None:
            return result
        self._already_fit |= fits
        self._recover_results_in_main_process(result, trainer)
        return result.trainer_results

    def _check_gpus(self) -> None:
        """Refuse to fork ranks that cannot use their GPUs."""
        _check_bad_cuda_fork()
        devices: list[torch.device] = self._strategy.parallel_devices or []
        if any(one.type == "cuda" for one in devices) and (self._start_method == "forkserver" or driver_runs()):
            raise InputError(
                f"ranks that are forked ('{self._start_method}') cannot use GPUs, as CUDA's driver runs in the process "
                "that forks them (importing torch_geometric may start it). Use strategy 'graph_ddp' in a script, "
                "'graph_ddp_spawn' with a model from a module, or accelerator='cpu'"
            )

    def _await_end(self, context: ProcessContext) -> None:
        """Wait until all ranks have ended; once one has failed, the others have some time to end by themselves.

        A rank that is stopped is killed when the others give it up, which may wait for it where they cannot see it.
        torch tells of the first that failed, or of one that was killed: the errors of the others may be seen before.
        """
        ended_here: set[int] = set()
        first, end_at, looked = -1, float("inf"), time.monotonic()
        stopped_s, patience_s = [0.0] * len(self.procs), self._strategy.lost_after_s  # type: ignore[attr-defined]
        while alive := [process.sentinel for process in self.procs if process.is_alive()]:
            connection.wait(alive, timeout=_POLL_S)
            step_s, looked = min(time.monotonic() - looked, 2 * _POLL_S), time.monotonic()  # less if all were stopped
            for index, process in enumerate(self.procs):
                ends = first < 0 and bool(process.exitcode)
                if ends:
                    first, end_at = index, looked + _GRACE_S
                elif is_stopped((machine(), process.pid or 0)):
                    stopped_s[index] += step_s
                    ends = len(self.procs) > 1 and (first >= 0 or stopped_s[index] > patience_s)
                    if ends:
                        process.kill()
                elif process.is_alive():
                    stopped_s[index] = 0.0
                if ends and stopped_s[index]:
                    self._given_up[index] = (
                        f"rank {self._first_rank + index} (process {process.pid}) was stopped for "
                        f"{stopped_s[index]:.0f} s, and was killed"
                    )
            if looked > end_at:
                log.error("ending all ranks of this machine, %.0f s after one was lost", _GRACE_S)
                ended_here = {index for index, process in enumerate(self.procs) if process.is_alive()}
                for process in self.procs:
                    process.kill()
                end_at = float("inf")
        codes = enumerate(process.exitcode for process in self.procs)
        killed = [index for index, code in codes if code in _KILLED and index not in ended_here]
        if killed and first not in {*killed, *self._given_up}:
            first = killed[0]
        if first >= 0:
            context.sentinels = {self.procs[first].sentinel: first}  # the one that torch tells of

    @property
    def _first_rank(self) -> int:
        assert self._strategy.cluster_environment is not None
        return self._strategy.cluster_environment.node_rank() * len(self.procs)

    def _reason(self, error: ProcessExitedException) -> BaseException:
        """Return the error that ended the first rank, or tells of its end."""
        rank = self._first_rank + error.error_index
        killed = error.exit_code < 0 and not signal_of(error.exit_code)  # so it had nothing to say
        if not killed and not self._mistakes.empty():
            text, signum = self._mistakes.get()
            return SignalError(text, signum) if signum else InputError(text)
        if told := self._given_up.get(error.error_index):
            return LostRankError(told)
        if signum := signal_of(error.exit_code):
            return SignalError(f"{name_of(signum)} reached rank {rank} (process {error.error_pid})", signum)
        hint = ""
        if self._start_method != "fork" and error.exit_code == 1:  # errors of a rank's work come in the other way
            hint = (
                f" while it imported the script: with '{self._start_method}' all that the script does must stand "
                "under if __name__ == '__main__':"
            )
        return LostRankError(f"rank {rank} (process {error.error_pid}) {described(error.exit_code)}{hint}")

    def _end_ranks(self, signum: int) -> None:
        """Pass a signal on, and kill the ranks that it does not end in time."""
        patience_s = self._strategy.leave_s  # type: ignore[attr-defined]
        postpone_end(patience_s + _JOIN_S)
        ranks, until = active_children(), time.monotonic() + patience_s
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid or 0, signum)
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
            rank.kill()

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *others: Any,
    ) -> None:
        if self._start_method == "fork":
            # OpenMP's threads do not survive a fork, but its record of them does: if a notebook has computed on several
            # threads before, a forked rank that asks for several waits for ever
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"  # unset, Lightning would take cores / ranks
        if self._start_method == "forkserver":
            # ranks get parameters in shared memory, and would overwrite each other's; Lightning copies spawned ones
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        self.in_rank = True
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *others)
        except SignalError as error:
            self._mistakes.put((error.message, error.signum))
            raise
        except Exception as error:
            # torch writes errors to a file, for which there may be no room
            mistake = error if isinstance(error, InputError) else refusal_of(error)
            if mistake is not None:
                self._mistakes.put((str(mistake), 0))
            elif self._mistakes.empty():
                raise
            raise SystemExit(2) from error


class _Observer(threading.Thread):
    """Watches the child processes; ends with the main process."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int) -> None:
        super().__init__(daemon=True, name="pygdist-observer")
        self._processes, self._first_rank = processes, first_rank
        self._timer = threading.Event()

    @override
    def run(self) -> None:
        while not any(process.poll() for process in self._processes):
            if all(process.poll() == 0 for process in self._processes):
                return
            self._timer.wait(0.5)
        signum = 0
        for offset, process in enumerate(self._processes):
            if process.returncode and (number := signal_of(process.returncode)):
                signum = number  # told by the rank, or by rank 0
            elif process.returncode:
                log.error(
                    "rank %d (process %d) %s", self._first_rank + offset, process.pid, described(process.returncode)
                )
        self._timer.wait(_GRACE_S)
        log.error("ending all ranks of this machine, %.0f s after one was lost", _GRACE_S)
        for process in self._processes:
            process.kill()
        exit_now(128 + signum if signum else 1)  # the main thread hangs in a collective call that no exception reaches
