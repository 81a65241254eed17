"""``pygdist export``: the plain model of a checkpoint, for people who do not have pygdist."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

import torch
from torch import Tensor

from pygdist.errors import InputError

__all__ = ["export", "run"]

_PREFIX = "model."


def export(checkpoint: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Write the ``state_dict`` of the model in a Lightning checkpoint; it loads into the same PyG class.

    Args:
        checkpoint: A checkpoint of :class:`pygdist.NodeClassifier`.
        out: ``.pt`` (read it with ``torch.load``) or ``.safetensors`` (needs the package of that name).

    Returns:
        What was written.

    Raises:
        InputError: If the checkpoint cannot be read, holds no model, or the format is unknown.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if not checkpoint.is_file():
        raise InputError(f"{checkpoint}: there is no such checkpoint")
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    except (KeyError, RuntimeError, EOFError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{checkpoint}: not a Lightning checkpoint ({type(error).__name__})") from error
    model = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    if not model:
        raise InputError(f"{checkpoint}: holds no entry that starts with '{_PREFIX}', so no model of a NodeClassifier")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        _save(model, temporary, out.suffix)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return model


def _save(model: dict[str, Tensor], path: Path, suffix: str) -> None:
    if suffix in (".pt", ".pth"):
        torch.save(model, path)
    elif suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ModuleNotFoundError as error:
            raise InputError("writing .safetensors needs the package: pip install safetensors") from error
        save_file({name: value.contiguous() for name, value in model.items()}, path)
    else:
        raise InputError(f"unknown format '{suffix}' of the output file; use .pt or .safetensors")


def run(command: str, arguments: list[str]) -> int:
    """The command line of :func:`export`."""
    parser = argparse.ArgumentParser(
        prog="pygdist export", description="Write the plain model of a checkpoint, loadable without pygdist."
    )
    parser.add_argument("checkpoint", help="a .ckpt file that pygdist fit wrote")
    parser.add_argument("out", help="the file to write: model.pt or model.safetensors")
    options = parser.parse_args(arguments)
    model = export(options.checkpoint, options.out)
    print(f"{options.out}: {len(model)} tensors, {sum(value.numel() for value in model.values()):,} numbers")
    return 0
