"""A backend on a part of a graph, and the backends with which the check before the first pass is tested."""

from __future__ import annotations

import pytest

from pygdist.backends import Backend, ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.native import load

BACKENDS = ["comm", "cache", "hybrid", "tensor", "replica"]

needs_planner = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
backends_ = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_planner if name == "hybrid" else ()) for name in BACKENDS]
)


def bound(name: str, folder: str, rank: int, communicator: Communicator) -> tuple[Shard, Backend]:
    shard = Shard.load(f"{folder}/{'replicas' if name == 'replica' else 'nodes'}", rank)
    backend = ReplicaBackend(hops=3) if name == "replica" else resolve_backend(name)
    backend.bind(shard, communicator)
    return shard, backend
