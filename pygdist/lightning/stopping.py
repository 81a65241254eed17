"""Signals that reach a training: all ranks end, at once or after a checkpoint that they agree on.

Lightning's handlers communicate, or save a checkpoint, wherever the signal finds a rank; other ranks may wait for that
rank in an exchange, and all would wait for ever. Here a handler only notes the signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from pygdist import signals
from pygdist.comm import Communicator, Watchdog
from pygdist.errors import SignalError

ON_SIGNAL = "on_signal.ckpt"
_STEP_S = 12.0  # within which a step must begin, or end, for a checkpoint; who sent the signal may kill soon
_SAVE_S = 60.0
_LEAVE_S = 8.0


def folder_of_checkpoints(trainer: pl.Trainer) -> str:
    """Return the folder in which a run saves checkpoints.

    It is that of the last callback which saves some: ``pygdist fit`` puts its own behind those of the user.
    """
    folders = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
    return str(next((folder for folder in reversed(folders) if folder), trainer.default_root_dir))


class Stopping:
    """The answer of a strategy to signals.

    Args:
        save: Save a checkpoint at the next step of a training before ranks end.
    """

    def __init__(self, save: bool) -> None:
        self._save, self._defers = save, False
        self._listener: Callable[[int], None] | None = None
        self._requeue: Callable[..., None] | None = None  # Lightning's handler, under SLURM
        self._requeue_asked = False

    @property
    def leave_s(self) -> float:
        """Seconds that other ranks have to end by themselves after a signal."""
        return _LEAVE_S + (_STEP_S if self._save else 0.0)

    def begin(self, trainer: pl.Trainer | None, watchdog: Watchdog | None) -> None:
        """Handle the signals of a run, in place of Lightning."""
        signals.install()
        signals.release()
        trains = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self._defers = self._save and trains
        self._listener = None if watchdog is None else watchdog.signalled
        signals.listen(self._listener, defer_s=_STEP_S if self._defers else 0.0)
        if trainer is None:
            return
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = _leave_it_to_the_handler_before
        slurm = trainer._accelerator_connector.cluster_environment
        if trains and isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue and self._requeue is None:
            self._requeue, connector._slurm_sigusr_handler_fn = connector._slurm_sigusr_handler_fn, self._ask_to_requeue

    def at_step(self, trainer: pl.Trainer, communicator: Communicator) -> None:
        """Act on a signal that has reached any rank; all ranks make the call before each step of a training.

        Raises:
            SignalError: On all ranks, after the checkpoint.
        """
        if not self._defers and self._requeue is None:  # the same on all ranks
            return
        noted = communicator.gather([float(signals.received()), float(self._requeue_asked)]).int()
        if self._requeue is not None and noted[:, 1].any():
            self._requeue_asked = False
            self._requeue(signal.SIGUSR1, None)  # saves, and asks SLURM for another job; training goes on until it ends
        reached = noted[:, 0].nonzero().flatten().tolist()
        if self._defers and reached:
            path, signum = os.path.join(folder_of_checkpoints(trainer), ON_SIGNAL), int(noted[reached[0], 0])
            signals.postpone_end(_SAVE_S)
            trainer.save_checkpoint(path, weights_only=False)  # by default Lightning says that it was not set
            ranks = "rank " + ", ".join(map(str, reached))
            raise SignalError(f"{signals.name_of(signum)} reached {ranks}; the run was saved in {path}", signum)

    def end(self, trainer: pl.Trainer, communicator: Communicator) -> None:
        """Act on signals as before a step; from now on they end the run at once, as there are no more steps.

        Raises:
            SignalError: On all ranks, after the checkpoint.
        """
        self.at_step(trainer, communicator)
        self._defers = False
        signals.listen(self._listener)

    def _ask_to_requeue(self, signum: int, frame: object) -> None:
        self._requeue_asked = True


def _leave_it_to_the_handler_before(signum: int, frame: object) -> None:
    """Do nothing: Lightning calls the handler of before, ours, too."""
