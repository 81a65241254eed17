"""Distributed training of unmodified PyTorch Geometric models on graphs that outgrow one machine.

A layer asks for its neighbours' rows in ``propagate``; a backend decides how the rows arrive. The words of the code:

============ ===========================================================================================
part         A rank's share of the graph. A *shard* is a part in memory; backends take shards.
owned node   A node whose output and loss this rank computes. Each node has one owner.
halo row     A copy of the row of another rank's node, fetched from the owner.
replica      A copy of another rank's node, whose row this rank computes itself.
split node   A node that a vertex cut puts in several parts.
hop          One call of ``propagate``. A ``Hop`` stands for it, or for the call of ``edge_updater`` before it.
pass         One run of the model: on the part, on a few nodes (a rehearsal), on a mini-batch, or on slices.
exchange     Ranks send each other rows or columns; in the backward pass gradients go the other way.
source group The edges whose sources one rank sends (a chunk of NeutronStar).
chunk        Some destinations with all their in-edges (NeutronTP).
slice        Some columns of all rows.
block        Some destinations of a hop, computed together on one rank.
piece        Rows that arrive together.
============ ===========================================================================================

Importing ``pygdist`` is fast: torch, PyTorch Geometric and Lightning are imported only when a name needs them.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygdist.backends import Backend
    from pygdist.errors import InputError, LostRankError
    from pygdist.graph import Shard
    from pygdist.lightning import GraphDataModule, GraphDDPStrategy, NodeClassifier
    from pygdist.loop import accelerate, open_graph
    from pygdist.partition import Partitioner
    from pygdist.routing import distribute, undistribute

    __version__: str

__all__ = [
    "Backend",
    "GraphDDPStrategy",
    "GraphDataModule",
    "InputError",
    "LostRankError",
    "NodeClassifier",
    "Partitioner",
    "Shard",
    "accelerate",
    "distribute",
    "open_graph",
    "undistribute",
]

_MODULES = {
    "backends": ("Backend",),
    "errors": ("InputError", "LostRankError"),
    "graph": ("Shard",),
    "lightning": ("GraphDDPStrategy", "GraphDataModule", "NodeClassifier"),
    "loop": ("accelerate", "open_graph"),
    "partition": ("Partitioner",),
    "routing": ("distribute", "undistribute"),
}

if not TYPE_CHECKING:  # a type checker must not take any name for granted

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = _version()
        elif module := next((module for module, names in _MODULES.items() if name in names), None):
            value = getattr(importlib.import_module(f"pygdist.{module}"), name)
        elif name in _submodules():
            value = importlib.import_module(f"pygdist.{name}")
        else:
            raise AttributeError(f"module 'pygdist' has no attribute '{name}'")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_submodules(), "__version__"})


@cache  # command lines ask for hundreds of names
def _submodules() -> set[str]:
    from pkgutil import iter_modules  # twice as slow as the rest of this file

    return {module.name for module in iter_modules(__path__)}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pygdist")
    except PackageNotFoundError:
        return "0+unknown"  # a checkout that is not installed


if "PYGDIST_PARENT" in os.environ:
    importlib.import_module("pygdist.signals").follow_parent()  # a rank ends with the process that started it

if "lightning.pytorch" in sys.modules:
    # Lightning has no entry point for strategies: Trainer(strategy="graph_ddp") needs them registered
    importlib.import_module("pygdist.lightning")
