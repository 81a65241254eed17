"""Programs that train by the command line, and a callback that ends one of their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLBACK = """
import os, signal
from lightning.pytorch.callbacks import Callback

class Kill(Callback):
    def __init__(self, rank: int, epoch: int, signal: str = "SIGKILL", batch: int = 0, forward: bool = False):
        self.rank, self.epoch, self.signal, self.batch, self.forward = rank, epoch, signal, batch, forward

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.forward:
            self.kill(trainer)

    def on_before_backward(self, trainer, pl_module, loss):
        if not self.forward:
            self.kill(trainer)

    def kill(self, trainer):
        os.write(1, f"rank {trainer.global_rank} is process {os.getpid()}\\n".encode())  # at once: ranks share the pipe
        here = trainer.global_rank, trainer.current_epoch, trainer.fit_loop.batch_idx
        if here == (self.rank, self.epoch, self.batch):
            os.kill(os.getpid(), getattr(signal, self.signal))
"""

COMMAND = ["-m", "pygdist.cli", "fit", "--config", "run.yaml"]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which a program finds the callbacks in ``folder``."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    variables.pop("PL_GLOBAL_SEED", None)
    return variables


def fit(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``pygdist fit --config run.yaml`` in ``folder``, and wait for its end."""
    return subprocess.run(
        [sys.executable, *COMMAND, *options],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=240,
    )
