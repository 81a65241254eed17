"""``pygdist export``: write the model of a checkpoint for use without pygdist."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor

from pygdist import checkpoints
from pygdist.commands.messages import ArgumentParser
from pygdist.errors import InputError, needs
from pygdist.memory.limits import reason_of
from pygdist.memory.scratch import replacing

log = logging.getLogger(__name__)
_PREFIX = "model."
_NAMED = 5  # names in a warning


def export(checkpoint: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Write the ``state_dict`` of the model in a Lightning checkpoint; it loads into the same PyG class.

    A warning names the tensors that are no part of the model, such as those of a ``LinkPredictor``'s decoder: they are
    left out.

    ``out`` ends in ``.pt`` (read it with ``torch.load``) or ``.safetensors`` (needs the package of that name).

    Returns:
        The written tensors by name.

    Raises:
        InputError: If the checkpoint cannot be read or holds no model, the format is unknown, or the file cannot be
            written.
    """
    out = Path(out)
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise InputError(f"{out}: unknown format '{out.suffix}'; end the name in .pt or .safetensors")
    if out.exists() and not out.is_file():
        raise InputError(f"{out}: is no file, and would be replaced by one; name a file")
    state = checkpoints.read(checkpoint)["state_dict"]
    model = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    if not model:
        raise InputError(
            f"{checkpoint}: holds no parameters that start with '{_PREFIX}'; give a checkpoint that pygdist fit wrote"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            _save(model, temporary, out.suffix)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if it cannot write a file
        raise InputError(f"{out}: could not be written ({reason_of(error)})") from error
    if left_out := [name for name in state if not name.startswith(_PREFIX)]:
        more = f", and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        log.warning("left out, as no part of the model: %s%s", ", ".join(left_out[:_NAMED]), more)
    return model


def _save(model: dict[str, Tensor], path: Path, suffix: str) -> None:
    if suffix in (".pt", ".pth"):
        torch.save(model, path)
    else:
        try:
            from safetensors import SafetensorError
            from safetensors.torch import save_file
        except ModuleNotFoundError as error:
            raise needs("writing .safetensors", "safetensors", "safetensors") from error
        try:
            save_file({name: value.contiguous() for name, value in model.items()}, path)
        except SafetensorError as error:  # no kind of error that others raise
            raise OSError(str(error)) from error


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist export", description="Write the model of a checkpoint as plain weights, for use without pygdist."
    )
    result.add_argument("checkpoint", help="a .ckpt file that pygdist fit wrote")
    result.add_argument("out", help="the file to write: model.pt or model.safetensors; the ending decides the format")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line of :func:`export`."""
    options = parser().parse_args(arguments)
    model = export(options.checkpoint, options.out)
    count = sum(value.numel() for value in model.values())
    sys.stdout.write(f"{options.out}: {len(model)} tensors, {count:,} numbers\n")
    return 0
