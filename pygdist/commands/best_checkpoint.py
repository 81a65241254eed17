"""The best checkpoint of a run, and its last one."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from pygdist.checkpoints import read
from pygdist.commands.run_folder import OwnCheckpoints
from pygdist.errors import InputError
from pygdist.lightning import GraphModule
from pygdist.lightning.checkpoint_io import is_remote

# the score of the task, whatever its name (GraphModule.best_by)
_SCORE = "val_acc"
# words in the names of figures of which the lowest, or the highest, is the best
_BEST = {
    **dict.fromkeys(("loss", "mae", "mse", "rmse", "error", "err"), "min"),
    **dict.fromkeys(("acc", "accuracy", "auc", "auroc", "f1", "hits", "r2"), "max"),
}


class BestCheckpoint(ModelCheckpoint):
    """Keep the best checkpoint and the last one.

    The best is that of the highest accuracy, F1 (several labels per node), R2 (numbers to predict) or AUC (edges).

    Lightning writes ``last.ckpt`` only beside a new best checkpoint. Here it is always that of the last epoch, from
    which a run that lost a rank resumes. With ``every_n_epochs`` it is that of the last epoch that the option counts,
    or that ends the run.

    Args:
        dirpath: Folder of the checkpoints.
        monitor: The figure that decides which checkpoint is the best.
        mode: The best is the lowest (``min``) or the highest (``max``). By default the name of ``monitor`` tells.
        options: As for ``ModelCheckpoint``.

    Raises:
        InputError: If ``mode`` is needed, as the name of ``monitor`` does not tell.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        monitor: str | None = _SCORE,
        mode: Literal["min", "max"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dirpath, monitor=monitor, mode=mode or _mode_of(monitor), **options)
        self.own: OwnCheckpoints | None = None  # if other runs save in the folder

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.monitor == _SCORE and isinstance(pl_module, GraphModule):
            self.monitor, self.mode = pl_module.best_by
            self.kth_value = torch.tensor(float("inf" if self.mode == "min" else "-inf"))
        super().setup(trainer, pl_module, stage)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was best and last, also if the folder has moved, or ``last.ckpt`` was passed over."""
        super().load_state_dict({**state_dict, **self._here(state_dict)})

    def _here(self, state: dict[str, Any]) -> dict[str, Any]:
        folder = Path(self.dirpath or ".")
        names = {one: folder / Path(one).name for one in (*state["best_k_models"], state["best_model_path"]) if one}
        if is_remote(folder) or not all(path.exists() for path in names.values()):
            return {}  # files of another run
        last = self._last_in(folder, state.get("last_model_path", ""))
        return {
            "dirpath": self.dirpath,
            "best_k_models": {str(names[one]): score for one, score in state["best_k_models"].items()},
            "last_model_path": "" if last is None else str(last),
            **{one: str(names.get(state[one], "")) for one in ("best_model_path", "kth_best_model_path")},
        }

    def _last_in(self, folder: Path, noted: str) -> Path | None:
        """Return this run's last checkpoint, which the next one replaces; that of another run stays."""
        last = folder / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"
        if noted and os.path.lexists(folder / Path(noted).name):
            return folder / Path(noted).name
        with contextlib.suppress(InputError):  # nobody goes on from a damaged one
            if self.own is not None and last.is_file() and not self.own(read(last)):
                return None
        return last if os.path.lexists(last) else None

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        dry = trainer.fast_dev_run  # type: ignore[attr-defined]
        missing = self._last_global_step_saved != trainer.global_step
        if self.save_last and not dry and missing and self._counts_epoch(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _counts_epoch(self, trainer: Trainer) -> bool:
        """Tell if ``last.ckpt`` is due: in each epoch, or as ``every_n_epochs`` says, and in the last one of a run."""
        epochs = trainer.current_epoch + 1
        ends = trainer.should_stop or epochs == trainer.max_epochs or 0 <= trainer.max_steps <= trainer.global_step
        return ends or epochs % max(self._every_n_epochs, 1) == 0

    @staticmethod
    @override
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Replace the link (``save_last=link``) in one step; Lightning removes the one before first."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            temporary = f"{linkpath}.{os.getpid()}.partial"
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), temporary)
            os.replace(temporary, linkpath)
        trainer.strategy.barrier()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: the last epoch is saved already. Lightning's method would save even under ``fast_dev_run``."""


def _mode_of(monitor: str | None) -> str:
    """Return ``min`` or ``max``: whether the best value of a figure is its lowest or its highest, by its name."""
    modes = {_BEST[word] for word in re.split(r"[^a-z0-9]+", (monitor or "loss").lower()) if word in _BEST}
    if len(modes) != 1:
        raise InputError(
            f"--checkpoint.monitor={monitor}: the name does not tell if the lowest or the highest value is the best; "
            "say it with --checkpoint.mode=min or max"
        )
    return modes.pop()
