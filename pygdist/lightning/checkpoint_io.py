"""Checkpoints of a run: files that cannot tear, and parts that are compared with the run before anything is trained."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from pygdist import checkpoints
from pygdist.checkpoints import TRAINING_PARTS, check
from pygdist.comm import Communicator
from pygdist.errors import InputError, LostRankError, SignalError

# Lightning's functions that restore a part of a checkpoint
_RESTORING = {
    "resume_start": "its version",
    "restore_datamodule": "the data module's state",
    "restore_model": "state_dict",
    "restore_callbacks": "callbacks",
    "restore_precision_plugin_state": "the precision's state",
    "restore_loops": "loops",
    "restore_optimizers": "optimizer_states",
    "restore_lr_schedulers": "lr_schedulers",
}

_LOOPS = {
    TrainerFn.FITTING: "fit_loop",
    TrainerFn.VALIDATING: "validate_loop",
    TrainerFn.TESTING: "test_loop",
    TrainerFn.PREDICTING: "predict_loop",
}
_OF_RANKS = ".temp.ckpt"  # the parameters that Lightning brings back from forked ranks, which are no checkpoint


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's files, written such that they are whole or not there, with a checksum that reading verifies.

    Our strategies use it unless they are given another one. With other strategies of Lightning, pass it on:
    ``Trainer(plugins=[WholeCheckpointIO()])``. What is not on this machine's file systems (``s3://...``) is left to
    Lightning.

    Raises:
        InputError: When a checkpoint cannot be written, or is damaged.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            checkpoints.write(checkpoint, path)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        options: dict[str, Any] = (
            {} if weights_only is None else {"weights_only": weights_only}
        )  # not in older Lightning
        if is_remote(path) or Path(path).name == _OF_RANKS:
            return super().load_checkpoint(path, map_location=map_location, **options)
        checkpoint, identity = checkpoints.read_identified(path, map_location=map_location, **options)
        content = _Content(checkpoint)
        content.identity = identity
        return content


class _Content(dict[str, Any]):
    """The content of a checkpoint, and the identity of the file from which it was read."""

    identity: tuple[float, float]


def is_remote(path: str | Path) -> bool:
    """Tell if a path is an address, which is not looked for among files."""
    return "://" in str(path)


def check_alike(path: str | Path, trainer: pl.Trainer, checkpoint: Any, communicator: Communicator) -> None:
    """Refuse on all ranks a checkpoint in which a part is wrong, or that another rank has read from another file.

    All ranks make the call, each with the content that it has read, or with the error that it met instead.

    Raises:
        InputError: It names the part, or says which rank cannot read the file.
    """
    error = str(checkpoint) if isinstance(checkpoint, Exception) else None
    if error is None:
        try:
            _check(checkpoint, path, trainer)
        except InputError as mistake:
            error = str(mistake)
    communicator.agree(error)
    if isinstance(checkpoint, _Content) and not communicator.are_alike(checkpoint.identity):
        raise InputError(
            f"{path}: the ranks read different files under this name: either their machines do not share the folder, "
            "or the file was replaced meanwhile; copy one file to all machines, or start again"
        )


def _check(checkpoint: Any, path: str | Path, trainer: pl.Trainer) -> None:
    fitting = trainer.state.fn == TrainerFn.FITTING
    check(checkpoint, path, needs=TRAINING_PARTS if fitting else ("state_dict",))
    for name, problem in _wrong_weights(checkpoint["state_dict"], trainer.lightning_module):
        raise InputError(f"{path}: is damaged or forged: '{name}' in state_dict {problem}; take another checkpoint")
    if (
        trainer.state.fn is None
        or "loops" not in checkpoint
        or checkpoint.get("pytorch-lightning_version") != pl.__version__
    ):
        return  # those of other versions are migrated
    name = _LOOPS[trainer.state.fn]
    expected, saved = getattr(trainer, name).state_dict(), checkpoint["loops"].get(name)
    counted = {part: value for part, value in expected.items() if part.endswith(("progress", "epoch_loop.state_dict"))}
    for part in _unlike(counted, saved, f"loops.{name}"):
        raise InputError(f"{path}: is damaged or forged: '{part}' must be there, and count from 0 on")
    extra = saved.get("state_dict")
    loaders = extra.get("combined_loader", []) if isinstance(extra, dict) else None
    if fitting and (not isinstance(loaders, list) or not all(isinstance(one, dict) for one in loaders)):
        raise InputError(f"{path}: is damaged or forged: 'loops.fit_loop.state_dict' must hold a list of loaders")


def _wrong_weights(saved: Mapping[str, Any], module: pl.LightningModule) -> Iterator[tuple[str, str]]:
    """Yield tensors that would be turned into those of the model with a loss, and weights that are no numbers."""
    finite = getattr(module, "detect_nan", True)
    parameters = dict(module.named_parameters())
    for name, own in module.state_dict(keep_vars=True).items():
        value = saved.get(name)
        if not isinstance(value, Tensor) or not isinstance(own, Tensor):
            continue  # Lightning says what is lacking
        if (value.is_floating_point(), value.is_complex()) != (own.is_floating_point(), own.is_complex()):
            yield name, f"is {value.dtype}, but in the model {own.dtype}"
        elif finite and name in parameters and value.layout is torch.strided and not bool(value.isfinite().all()):
            yield name, "holds NaN or infinite weights (--model.detect_nan=false takes them)"


def _unlike(expected: Any, saved: Any, name: str) -> Iterator[str]:
    """Yield what is lacking in a loop's progress, or no number."""
    if not isinstance(expected, Mapping):
        if type(saved) is not type(expected) or saved < 0:
            yield name
    elif not isinstance(saved, Mapping):
        yield name
    else:
        for key, value in expected.items():
            yield from _unlike(value, saved.get(key), f"{name}.{key}")


def mistake_in(error: BaseException, path: str | Path | None) -> InputError | None:
    """Return what to say of an error that Lightning met while it restored a checkpoint; ``None`` of any other error."""
    if isinstance(error, (InputError, LostRankError, SignalError)) or not isinstance(error, Exception):
        return None
    if "loading state_dict" in str(error):  # of another model, which Lightning says well
        return None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name in _RESTORING and frame.filename.endswith("checkpoint_connector.py"):
            part = _RESTORING[frame.name]
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return InputError(f"{path}: cannot be restored, as {part} in it is not what this run needs ({said})")
    return None
