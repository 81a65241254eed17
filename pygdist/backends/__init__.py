"""Backends bring neighbours to the rank that aggregates them. Each file is a system; folders hold shared machinery."""

import importlib
from typing import Any

from pygdist.backends.base import Abilities, Backend, backends, resolve_backend
from pygdist.backends.cache import CacheBackend
from pygdist.backends.comm import CommBackend
from pygdist.backends.delayed import DelayedBackend
from pygdist.backends.hybrid import HybridBackend
from pygdist.backends.planning.greedy import Costs
from pygdist.backends.pull import PullBackend
from pygdist.backends.pushpull import PushPullBackend
from pygdist.backends.replica import ReplicaBackend
from pygdist.backends.single import SingleBackend
from pygdist.backends.tensor import TensorBackend
from pygdist.hops.savings import Savings

__all__ = [
    "Abilities",
    "Backend",
    "CacheBackend",
    "CommBackend",
    "Costs",
    "DelayedBackend",
    "HybridBackend",
    "PullBackend",
    "PushPullBackend",
    "ReplicaBackend",
    "Savings",
    "SingleBackend",
    "TensorBackend",
    "backends",
    "resolve_backend",
]


def __getattr__(name: str) -> Any:
    """Return the functions that have moved to :mod:`pygdist.routing`, as older scripts import them from here."""
    if name in ("distribute", "undistribute"):
        return getattr(importlib.import_module("pygdist.routing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
