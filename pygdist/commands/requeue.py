"""SLURM's requeue: the checkpoint that Lightning saves for it belongs to a run, and is in the folder of that run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from typing_extensions import override


class RequeuedInFolder(_CheckpointConnector):
    """Saves ``hpc_ckpt_N.ckpt`` beside the other checkpoints of the run, and restores none unasked.

    Lightning saves the file in ``default_root_dir``. Every later SLURM job in that folder would go on from the newest
    such file, though it may be of another run, or of one that has ended. Here the folder of the run tells.
    """

    @property
    @override
    def _hpc_resume_path(self) -> str | None:
        return None

    @override
    def hpc_save_path(self, folderpath: Any) -> str:  # type: ignore[override]  # Lightning's is static
        folder = getattr(self.trainer.checkpoint_callback, "dirpath", None) or folderpath
        return _CheckpointConnector.hpc_save_path(folder)
