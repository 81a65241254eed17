"""Tells of an exception as it is: its type and text, and the last line of the user's code that raised it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

_NOT_THE_USERS = {
    "lightning", "lightning_fabric", "numpy", "pygdist", "pytorch_lightning", "scipy", "torch", "torch_cluster",
    "torch_geometric", "torch_scatter", "torch_sparse",
}  # fmt: skip


def in_one_line(error: BaseException) -> str:
    """Return the type of an exception, its text on one line, and :func:`place_of`.

    Example:
        >>> in_one_line(error)
        'IndexError: index 9 is out of bounds for dimension 1 with size 4 (model.py:12)'
    """
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text} ({place_of(error)})" if text else f"{type(error).__name__} ({place_of(error)})"
    )


def place_of(error: BaseException) -> str:
    """Return file and line of the last frame of the user's code; of the last frame where none is the user's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return "no line is known"
    frame, line = next(((frame, line) for frame, line in reversed(frames) if is_the_users(frame)), frames[-1])
    return f"{frame.f_code.co_filename}:{line}"


def is_the_users(frame: FrameType) -> bool:
    """Tell if a frame is of the user's code: of no library that runs models, nor of Python's own."""
    name = str(frame.f_globals.get("__name__", ""))
    root = name.partition(".")[0]
    # PyG writes a layer's propagate() into a temporary file, as a module that is named after the layer's
    written = Path(frame.f_code.co_filename).name.startswith(f"{name}_")
    return not (written or root in _NOT_THE_USERS or root in sys.stdlib_module_names)
