"""Hooks of a subclass that leave ``super()`` out change nothing of what pygdist does in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import Backend, PushPullBackend, ReplicaBackend
from pygdist.lightning.hooks import HOOKS
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.kernels.oracle import needs_library
from tests.lightning import runs


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


Careless = type("Careless", (NodeClassifier,), dict.fromkeys(HOOKS, _nothing))


class Noted(NodeClassifier):
    """Notes the part of pygdist's, and its own before and after it."""

    def __init__(self) -> None:
        super().__init__(runs.model())
        self.notes: list[str] = []

    def _gather_weights(self) -> None:
        self.notes.append("ours")

    def on_train_epoch_end(self) -> None:
        self.notes.append("before")
        super().on_train_epoch_end()
        self.notes.append("after")


class Below(Noted):
    def on_train_epoch_end(self) -> None:
        self.notes.append("below")


class Calls(Noted):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.notes.append("below")


class Returns(Noted):
    def on_train_epoch_end(self) -> None:
        if self.notes:
            super().on_train_epoch_end()


class Mixin:
    notes: list[str]

    def on_train_epoch_end(self) -> None:
        self.notes.append("mixin")


class Mixed(Mixin, Noted):
    pass


@pytest.mark.parametrize(
    ("module", "notes"),
    [
        (Noted, ["before", "ours", "after"]),
        (Below, ["ours", "below"]),
        (Calls, ["before", "ours", "after", "below"]),
        (Returns, ["ours"]),
        (Mixed, ["ours", "mixin"]),
    ],
)
def test_our_part_of_a_hook_runs_once(module: type[Noted], notes: list[str]) -> None:
    one = module()
    for _ in range(2):
        one.notes.clear()
        one.on_train_epoch_end()
        assert one.notes == notes
    copied = copy.deepcopy(one)
    copied.notes.clear()
    copied.on_train_epoch_end()
    assert copied.notes == notes


def test_a_hook_returns_what_it_returned() -> None:
    class Skips(NodeClassifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:  # type: ignore[override]
            return -1

    assert Skips(runs.model()).on_train_batch_start(None, 0) == -1


def _fit(
    rank: int, world_size: int, folder: str, kind: type[NodeClassifier], backend: Backend, batches: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    data = GraphDataModule(runs.graph(), partitioner="hash", batches=batches, cache_dir=Path(folder) / "cache")
    runs.model()  # seeds
    history, module = runs.History(), kind(GraphSAGE(12, 8, 2, 4), backend=backend, check=False)
    runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=2).fit(module, datamodule=data)
    return history.epochs, {name: value.clone() for name, value in module.model.state_dict().items()}


@needs_library
@pytest.mark.parametrize(
    ("backend", "batches"),
    [
        pytest.param(ReplicaBackend(hops=1), None, id="evaluates-the-whole-graph"),
        pytest.param(
            PushPullBackend(first_weights="sharded"), NeighborBatches([4, 3], batch_size=40), id="gathers-weights"
        ),
    ],
)
def test_a_run_without_super_is_the_same(backend: Backend, batches: Any, pool: RankPool, tmp_path: Path) -> None:
    runs_of = [pool.run(_fit, 2, str(tmp_path), kind, backend, batches) for kind in (NodeClassifier, Careless)]
    for (history, state), (careless, other) in zip(*runs_of, strict=True):
        assert careless == history
        assert all(other[name].equal(value) for name, value in state.items())
    (_, first), (_, second) = runs_of[1]
    assert all(second[name].equal(value) for name, value in first.items())
