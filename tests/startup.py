"""What makes a process that runs tests fast: once in each worker of pytest, and in the fork server."""

from __future__ import annotations

import gc
from functools import cache

from torch_geometric import template

__all__ = ["forget_garbage", "share_templates"]


def share_templates() -> None:
    """Compile each of PyG's templates once in a process. PyG does it for each layer class, which takes 30 ms."""
    environment, files = template.Environment, template.FileSystemLoader
    template.FileSystemLoader = str
    template.Environment = cache(lambda loader: environment(loader=files(loader)))


def forget_garbage() -> None:
    """Exempt all modules and what else there is now from searches for garbage, which take half a second with them."""
    gc.collect()
    gc.freeze()
