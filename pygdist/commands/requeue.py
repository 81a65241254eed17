"""Notes of a run in its checkpoints, and SLURM's requeue: only the job that saved its checkpoint goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from typing_extensions import override

from pygdist import checkpoints
from pygdist.checkpoints import RUN_FACTS
from pygdist.launch_variables import count, job_of_slurm
from pygdist.lightning.stopping import folder_of_checkpoints


class OfThisJob(_CheckpointConnector):
    """Saves ``hpc_ckpt_N.ckpt`` in the folder of the run, and restores only those of the same job.

    Lightning saves the file in ``default_root_dir``, and every later SLURM job in that folder goes on from the newest
    one, though it may be of another run, or of one that has ended.

    Args:
        trainer: The trainer whose connector this one replaces.
        in_folder: The run has a folder with checkpoints, in which ``folder_to_go_on`` finds the file. Otherwise the
            file is saved where Lightning does, and found there.
        resumes: A job that was started again goes on.

    Attributes:
        note: Facts that each checkpoint gets besides those of the module; on rank 0, which writes.
    """

    def __init__(self, trainer: Trainer, *, in_folder: bool, resumes: bool) -> None:
        super().__init__(trainer)
        self._in_folder, self._resumes = in_folder, resumes
        self.note: dict[str, str] = {}

    @override
    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        checkpoint.setdefault(RUN_FACTS, {}).update(self.note)
        return checkpoint

    @property
    @override
    def _hpc_resume_path(self) -> str | None:
        path, job = super()._hpc_resume_path, job_of_slurm()
        if path is None or job is None or not self._resumes or not count("SLURM_RESTART_COUNT"):
            return None
        facts = checkpoints.read(Path(path)).get(RUN_FACTS)
        return path if isinstance(facts, dict) and facts.get("job") == job else None

    @override
    def hpc_save_path(self, folderpath: Any) -> str:  # type: ignore[override]  # Lightning's is static
        folder = folder_of_checkpoints(self.trainer) if self._in_folder else folderpath
        return _CheckpointConnector.hpc_save_path(folder)
