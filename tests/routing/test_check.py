"""The check before the first pass refuses what a rank cannot compute, and accepts what it can."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.nn.inputs import edge_inputs
from pygdist.routing import causes, distribute
from pygdist.testing import RankPool
from tests.routing.bound import backends_, bound, needs_planner
from tests.routing.models import EXACT, FEW, OTHER_EDGES, OVER_NODES, READOUTS, RIGHT, WRONG


def _said(rank: int, world_size: int, folder: str, backend_name: str, models: list[str]) -> dict[str, str]:
    """What the first pass of each model says."""
    communicator, said = Communicator(dist.new_group()), {}
    for name in models:
        shard, backend = bound(backend_name, folder, rank, communicator)
        torch.manual_seed(0)
        make = RIGHT[name] if name in RIGHT else WRONG[name][0]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model = distribute(make().double(), backend=backend)
            except InputError:  # a layer that this backend does not run
                continue
            try:
                out = model(shard.x, shard.adjacency, **edge_inputs(model, shard))
                said[name] = "" if out.isfinite().all() else "not finite"
            except InputError as error:
                said[name] = str(error)
        said[name] += "".join(str(one.message) for one in warned if "small graph" in str(one.message))
    return said


@pytest.fixture(scope="module")
def said_of_wrong(parts: str, pool: RankPool) -> Callable[[str], list[dict[str, str]]]:
    """By backend: what each rank says of all wrong models."""
    return cache(lambda backend: pool.run(_said, 2, parts, backend, list(WRONG)))


@backends_
@pytest.mark.parametrize("name", WRONG)
def test_what_a_rank_cannot_compute_is_refused(
    name: str, backend: str, said_of_wrong: Callable[[str], list[dict[str, str]]]
) -> None:
    """On all ranks, before anything is trained; one rank alone may see that a row is missing."""
    for said in said_of_wrong(backend):
        if (name, backend) == ("columns", "tensor"):  # which refuses such layers by themselves
            assert name not in said
        elif (name, backend) in EXACT:
            assert said[name] == ""
        else:
            assert "on one process" in said[name] or name in OTHER_EDGES
            over_nodes = causes.OVER_NODES_OF_PARTS.format("cache, comm, delayed, hybrid or tensor")
            kind = WRONG[name][1]
            assert (over_nodes if kind == OVER_NODES and backend == "replica" else kind) in said[name]


@pytest.mark.parametrize(
    "backend",
    [
        *("comm", "tensor", "replica"),
        pytest.param("cache", marks=pytest.mark.exhaustive),
        pytest.param("hybrid", marks=[pytest.mark.exhaustive, needs_planner]),
    ],
)
def test_what_a_rank_can_compute_is_accepted(backend: str, parts: str, pool: RankPool) -> None:
    models = FEW if backend == "replica" else FEW + READOUTS
    if backend == "tensor":  # it refuses layers that mix columns
        models = [name for name in models if name not in ("SAGEConv-lstm", "PNAConv")]
    for said in pool.run(_said, 2, parts, backend, models):
        assert said == dict.fromkeys(models, "")


@pytest.mark.exhaustive
@backends_
def test_all_layers_and_models_are_accepted(backend: str, parts: str, pool: RankPool) -> None:
    for said in pool.run(_said, 2, parts, backend, list(RIGHT)):
        refused = {name: text for name, text in said.items() if text}
        # PDNConv normalises weights that it computes, and those of edges in other parts are not here
        assert set(refused) == ({"PDNConv", *READOUTS} if backend == "replica" else set()), refused
