"""Several parts on a rank: one of them is held at a time, whole or in mini-batches, trained and evaluated."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data
from typing_extensions import override

from pygdist import GraphDataModule, NodeClassifier
from pygdist.graph import Shard, degree_corrected_sbm, read_meta
from pygdist.kernels import CSR
from pygdist.lightning import ModelAveragingStrategy
from pygdist.lightning.precomputed import Precomputed
from pygdist.native import load
from pygdist.sampler import ClusterBatches, MiniBatches, NeighborBatches, SaintNodeBatches
from pygdist.testing import RankPool
from tests.lightning import runs


class Counting(GraphDataModule):
    """Notes which other parts are still held when one is opened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: dict[int, weakref.ref[Any]] = {}
        self.opened: list[tuple[int, list[int]]] = []

    @override
    def open_part(self, part: int) -> Shard:
        found = super().open_part(part)
        others = [other for other, one in self.held.items() if other != part and one() is not None]
        self.opened.append((part, others))
        self.held[part] = weakref.ref(found.surroundings)
        return found


class Noted(ClusterBatches):
    """Notes for how many rows clusters were looked for."""

    looked: ClassVar[list[int]] = []

    @override
    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        self.looked.append(csr.num_rows)
        return super().precompute(part, csr, seed=seed)


def _opened(
    rank: int, world_size: int, folder: str, batches: MiniBatches | None
) -> tuple[list[tuple[int, list[int]]], list[int], int, int]:
    data = Counting(
        degree_corrected_sbm(200, num_classes=4, num_features=8), num_parts=4, cache_dir=Path(folder) / "cache",
        batches=batches,
    )  # fmt: skip
    Noted.looked.clear()
    module = NodeClassifier(nn.GCN(8, 8, num_layers=2, out_channels=4), backend="replica")
    kept = []

    class Kept(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            kept.append(module.backend.kept_bytes)

    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), max_epochs=2, callbacks=[Kept()]
    )
    gc.disable()  # nothing may wait for it
    try:
        with (
            mock.patch("pygdist.lightning.datamodule.read_meta", side_effect=read_meta) as read,
            mock.patch("pygdist.graph.shard.read_meta", side_effect=AssertionError("read again for a part")),
        ):
            trainer.fit(module, datamodule=data)
            trainer.test(module, datamodule=data, verbose=False)
    finally:
        gc.enable()
    return data.opened, Noted.looked, read.call_count, max(kept)


BATCHES = {
    "whole": None,
    "neighbours": NeighborBatches([4, 4], 16),
    "clusters": Noted(6, 2, partitioner="chunk"),
    "saint": SaintNodeBatches(30, num_steps=3, sample_coverage=5),
}


@pytest.mark.parametrize("name", BATCHES)
def test_one_part_is_held_at_a_time(name: str, pool: RankPool, tmp_path: Path) -> None:
    if name != "whole" and load() is None:
        pytest.skip("the sampler is in the native library")
    for rank, (opened, looked, read, kept) in enumerate(pool.run(_opened, 2, str(tmp_path), BATCHES[name])):
        assert {part for part, _ in opened} == {rank, rank + 2}
        assert [(part, others) for part, others in opened if others] == []
        assert kept == 0, "sums over features that go with the part"
        assert read == 2, "once to train and once to test"
        assert len(looked) == (2 if name == "clusters" else 0), "once for each part, not in each epoch"
    assert not list(tmp_path.glob("cache/*/pygdist-batches-*")), "files go with the run"


def test_what_is_kept_of_a_part_is_in_files(tmp_path: Path) -> None:
    kept = Precomputed(tmp_path)
    facts = {"cluster": torch.arange(5, dtype=torch.int32), "edge_norm": torch.rand(0)}
    for _ in range(2):
        found = kept.of(3, lambda: facts)
        assert {name: value.tolist() for name, value in found.items()} == {"cluster": [0, 1, 2, 3, 4], "edge_norm": []}
        assert found["cluster"].dtype == torch.int32
        found["cluster"].zero_()  # what a user does to it is not kept
    assert kept.of(1, dict) == {}
    assert len(list(tmp_path.rglob("*.npy"))) == 2
    kept.close()
    assert list(tmp_path.iterdir()) == []


def _mixed(rank: int, world_size: int, folder: str, batches: MiniBatches, name: str) -> tuple[dict[str, float], float]:
    """What the last epoch logged, and the loss of the trained model on the whole graph, by itself."""
    graph, history = runs.graph(), runs.History()
    graph.x, graph.edge_weight = graph.x.float(), None
    torch.manual_seed(7)
    net = getattr(nn, name)(12, 16, num_layers=2, out_channels=4)
    data = GraphDataModule(graph, partitioner="hash", num_parts=4, batches=batches, cache_dir=Path(folder) / "cache")
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), precision="bf16-mixed", max_epochs=4,
        callbacks=[history], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(NodeClassifier(net, backend="replica"), datamodule=data)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    with torch.no_grad():
        out = net.eval()(graph.x, graph.edge_index)
    loss = torch.nn.functional.cross_entropy(out[graph.val_mask], graph.y[graph.val_mask])
    return history.epochs[-1], float(loss)


@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize(
    ("name", "batches"),
    [("GraphSAGE", SaintNodeBatches(60, num_steps=3, sample_coverage=5)), ("GAT", NeighborBatches([4, 4], 16))],
    ids=["saint", "neighbours"],
)
def test_half_precision_in_mini_batches_and_evaluation(
    name: str, batches: MiniBatches, pool: RankPool, tmp_path: Path
) -> None:
    for logged, loss in pool.run(_mixed, 2, str(tmp_path), batches, name):
        assert logged["val_loss"] == pytest.approx(loss, rel=0.02)
        assert loss != logged["val_loss"], "that was in half precision"
        assert logged["train_loss"] < 1.5


def _fitted(rank: int, world_size: int, folder: str, gib: float) -> tuple[dict[str, Any], list[int], float]:
    data = GraphDataModule(
        "sbm", {"num_nodes": 400, "num_features": 64}, partitioner="chunk", num_parts="auto", memory_gib=gib,
        reserve=0.5, cache_dir=Path(folder) / "cache",
    )  # fmt: skip
    net = nn.GCN(64, 8, num_layers=2, out_channels=data.load()[0].y.max().item() + 1)
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), precision="32-true", max_epochs=2
    )
    trainer.fit(NodeClassifier(net, backend="replica"), datamodule=data)
    return dict(data.meta), data.parts, float(trainer.callback_metrics["train_loss"])


def test_as_many_parts_as_the_memory_asks_for(pool: RankPool, tmp_path: Path) -> None:
    budget = 150 * 2**10
    answers = pool.run(_fitted, 2, str(tmp_path), 2 * budget / 2**30)
    meta = answers[0][0]
    assert meta["num_parts"] > 2
    assert sorted(part for _, parts, _ in answers for part in parts) == list(range(meta["num_parts"]))
    for part in meta["parts"]:  # what is estimated is about what is written
        assert sum(file["bytes"] for file in part["files"].values()) < 1.2 * budget
    assert answers[0][2] == answers[1][2] < 5
