"""Several parts on a rank: one of them is held at a time, whole or in mini-batches, trained and evaluated."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
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

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import ReplicaBackend
from pygdist.graph import Shard, degree_corrected_sbm, read_meta
from pygdist.kernels import CSR
from pygdist.lightning import ModelAveragingStrategy
from pygdist.lightning.parts import PartBatch, laid_out, sampled_graph
from pygdist.lightning.precomputed import Precomputed
from pygdist.native import load
from pygdist.nn.ngnn import NGNN
from pygdist.sampler import (
    ClusterBatches,
    MiniBatches,
    NeighborBatches,
    SaintEdgeBatches,
    SaintNodeBatches,
    SaintWalkBatches,
)
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


@pytest.mark.slow
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
    assert not list(tmp_path.glob("cache/*/pygdist-*")), "files go with the run"


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


@pytest.mark.slow
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


# -- what is logged of mini-batches ------------------------------------------------------------------------------------


class Still(NodeClassifier):
    """Learns nothing."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _by_degree() -> Data:
    """Labels by degree: who is sampled often has others than who is not."""
    data = degree_corrected_sbm(400, num_classes=4, avg_degree=8, num_features=12, seed=3)
    degree = data.edge_index[1].bincount(minlength=400)
    data.y = 3 - (degree.argsort().argsort() // 100)
    return data


def _logged(rank: int, world_size: int, folder: str, batches: MiniBatches, favoured: int | None) -> tuple[float, float]:
    """Loss and accuracy of a model that gives all nodes the same."""
    torch.manual_seed(0)
    net = nn.GCN(12, 8, num_layers=2, out_channels=4)
    for name, parameter in net.named_parameters():
        parameter.data.zero_()
        if favoured is not None and name == "convs.1.bias":
            parameter.data[favoured] = 2.0
    data = GraphDataModule(
        _by_degree(), partitioner="hash", num_parts=3, batches=batches, cache_dir=Path(folder) / "cache"
    )
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), precision="32-true", max_epochs=1,
        num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Still(net, backend="replica"), datamodule=data)
    return float(trainer.callback_metrics["train_loss"]), float(trainer.callback_metrics["train_acc"])


SAINT = {
    "node": SaintNodeBatches(60, num_steps=25, sample_coverage=100),
    "edge": SaintEdgeBatches(30, num_steps=25, sample_coverage=100),
    "walk": SaintWalkBatches(2, 20, num_steps=25, sample_coverage=100),
}


@pytest.mark.slow
@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize("name", SAINT)
def test_saint_logs_means_over_the_training_nodes(name: str, pool: RankPool, tmp_path: Path) -> None:
    data, _ = GraphDataModule(_by_degree()).load()
    for favoured in (None, 0):
        out = torch.zeros(400, 4)
        out[:, 0] = 0.0 if favoured is None else 2.0
        mask = data.train_mask
        loss = float(torch.nn.functional.cross_entropy(out[mask], data.y[mask]))
        share = float((data.y[mask] == 0).float().mean())
        (logged, accuracy), *_ = pool.run(_logged, 1, str(tmp_path), SAINT[name], favoured)
        # a mean of the same is the same, whoever is sampled
        assert logged == pytest.approx(loss, rel=1e-5 if favoured is None else 0.03)
        assert accuracy == pytest.approx(share, abs=0.03)


# -- losses of one's own -----------------------------------------------------------------------------------------------


def _smoothed(out: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
    return torch.nn.functional.cross_entropy(out, y, label_smoothing=0.3, reduction=reduction)


class Smooth(NodeClassifier):
    """Trains on another loss."""

    @override
    def node_losses(self, out: Tensor, y: Tensor) -> Tensor:
        return _smoothed(out, y)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Reduced(Smooth):
    """Gives one loss for all."""

    @override
    def node_losses(self, out: Tensor, y: Tensor) -> Tensor:
        return _smoothed(out, y, "mean")


class OwnStep(NodeClassifier):
    """Its step is written for a shard."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch.train_mask
        return _smoothed(self.model(batch.x, batch.adjacency)[mask], batch.y[mask], "mean")


class WithTerm(NodeClassifier):
    """Adds a term to the loss."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * self.model.convs[0].lin_l.weight.square().sum()


def _sage() -> torch.nn.Module:
    torch.manual_seed(7)
    net: torch.nn.Module = nn.GraphSAGE(12, 8, num_layers=2, out_channels=4)
    return net


def _own_loss(
    rank: int, world_size: int, folder: str, kind: type[NodeClassifier], backend: str, batches: MiniBatches | None
) -> tuple[dict[str, float], Tensor] | str:
    history, graph = runs.History(), runs.graph()
    data = GraphDataModule(graph, partitioner="hash", batches=batches, cache_dir=Path(folder) / "cache")
    options = {"strategy": ModelAveragingStrategy(sync_unit="step")} if backend == "replica" else {}
    trainer = runs.trainer(rank, world_size, folder, callbacks=[history], num_sanity_val_steps=0, **options)
    module = kind(_sage(), backend=ReplicaBackend(hops=2) if backend == "replica" else backend)
    try:
        trainer.fit(module, datamodule=data)
    except (AttributeError, InputError) as error:
        return str(error)
    return history.epochs[-1], torch.nn.utils.parameters_to_vector(module.model.parameters()).detach()


WAYS = {
    "comm": ("comm", None),
    "parts": ("replica", None),
    "mini-batches": ("replica", NeighborBatches([-1, -1], 1000)),  # of all that a part has
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_of_ones_own_is_trained_on_and_logged(way: str, pool: RankPool, tmp_path: Path) -> None:
    if way == "mini-batches" and load() is None:
        pytest.skip("the sampler is in the native library")
    plain, data = _sage().double(), GraphDataModule(runs.graph()).load()[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    def loss(mask: Tensor) -> Tensor:
        return _smoothed(plain(data.x, data.edge_index)[mask], data.y[mask], "mean")

    for _ in range(3):
        optimizer.zero_grad()
        trained = loss(data.train_mask)
        trained.backward()
        optimizer.step()
    wanted = torch.nn.utils.parameters_to_vector(plain.parameters()).detach()
    for logged, found in pool.run(_own_loss, 2, str(tmp_path), Smooth, *WAYS[way]):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
        assert logged["train_loss"] == pytest.approx(float(trained), rel=1e-5)
        assert logged["val_loss"] == pytest.approx(float(loss(data.val_mask)), rel=1e-5)


def test_a_loss_must_be_that_of_each_node(pool: RankPool, tmp_path: Path) -> None:
    for way in ("comm", "parts"):
        for said in pool.run(_own_loss, 2, str(tmp_path), Reduced, *WAYS[way]):
            assert "Reduced.node_losses returns values of shape () for" in said
            assert "reduction='none'" in said


def test_a_step_of_ones_own_is_told_what_a_part_is(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_own_loss, 2, str(tmp_path), OwnStep, *WAYS["parts"]):
        assert "a PartBatch has no 'train_mask': a backend that trains parts by themselves gets a part" in said
        assert "override NodeClassifier.node_losses, not training_step" in said
    assert not isinstance(pool.run(_own_loss, 1, str(tmp_path), OwnStep, *WAYS["comm"])[0], str)
    for said in pool.run(_own_loss, 2, str(tmp_path), OwnStep, *WAYS["comm"]):
        assert "OwnStep.training_step returns a loss of this process's nodes alone" in said
    for one in pool.run(_own_loss, 2, str(tmp_path), WithTerm, *WAYS["comm"]):
        assert not isinstance(one, str)


def test_a_part_batch_hides_no_error_and_can_be_copied() -> None:
    def fails(part: int) -> Shard:
        raise AttributeError(f"of part {part}")

    batch = PartBatch(3, fails)
    with pytest.raises(AttributeError, match=r"^of part 3$"):
        _ = batch.shard
    for other in (copy.copy(PartBatch(3)), copy.deepcopy(PartBatch(3)), pickle.loads(pickle.dumps(PartBatch(3)))):
        assert other.part == 3
    assert not hasattr(batch, "to")


# -- refusals ----------------------------------------------------------------------------------------------------------


def _accumulated(rank: int, world_size: int, folder: str, num_parts: int, batches: MiniBatches | None) -> str:
    data = GraphDataModule(runs.graph(), num_parts=num_parts, batches=batches, cache_dir=Path(folder) / "cache")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy(), accumulate_grad_batches=2)
    with pytest.raises(InputError) as error:
        trainer.fit(NodeClassifier(runs.model(), backend="replica"), datamodule=data)
    return str(error.value)


def test_gradients_are_not_accumulated_over_parts_and_mini_batches(pool: RankPool, tmp_path: Path) -> None:
    for num_parts, batches in ((4, None), (2, NeighborBatches([4, 4], 16)), (4, NeighborBatches([4, 4], 16))):
        for said in pool.run(_accumulated, 2, str(tmp_path), num_parts, batches):
            assert "accumulate_grad_batches=2: consecutive steps may train different parts" in said
            assert "make the mini-batches larger" in said
    for said in pool.run(_accumulated, 2, str(tmp_path), 2, None):
        assert "a full-graph epoch is one step" in said


# -- the models of CATGNN ----------------------------------------------------------------------------------------------


def _gcn() -> torch.nn.Module:
    return nn.GCN(12, 16, num_layers=2, out_channels=4)


def _sgc() -> torch.nn.Module:
    return nn.SGConv(12, 4, K=2, cached=True)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], MiniBatches | None]] = {
    "saint-edge": (_gcn, SaintEdgeBatches(40, 3, 10)),
    "saint-walk": (_gcn, SaintWalkBatches(2, 20, 3, 10)),
    "sgc": (_sgc, None),
    "sgc-neighbours": (_sgc, NeighborBatches([5, 5], 16)),
    "sgc-clusters": (_sgc, ClusterBatches(4, partitioner="chunk")),
    "ngnn": (lambda: NGNN(12, 16, num_layers=2, out_channels=4), None),
    "ngnn-saint": (lambda: NGNN(12, 16, num_layers=2, out_channels=4, conv="gcn"), SaintNodeBatches(60, 3, 10)),
}


def _trained(rank: int, world_size: int, folder: str) -> dict[str, tuple[dict[str, float], float, float]]:
    """Of each model: what was logged, the loss of what is left on the whole graph, and that before."""
    answers = {}
    graph = runs.graph()
    graph.edge_weight = None
    for name, (make, batches) in MODELS.items():
        data = GraphDataModule(
            graph, partitioner="hash", num_parts=4, batches=batches, cache_dir=Path(folder) / "cache"
        )
        torch.manual_seed(7)
        net = make()
        whole = data.load()[0]

        def loss(net: torch.nn.Module = net, whole: Data = whole) -> float:
            with torch.no_grad():
                out = copy.deepcopy(net).double().eval()(whole.x, whole.edge_index)
            return float(torch.nn.functional.cross_entropy(out[whole.val_mask], whole.y[whole.val_mask]))

        before = loss()
        trainer = runs.trainer(
            rank, world_size, folder, strategy=ModelAveragingStrategy(), max_epochs=3, num_sanity_val_steps=0
        )
        module = NodeClassifier(net, lr=0.03, backend=ReplicaBackend(hops=1))
        trainer.fit(module, datamodule=data)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        answers[name] = logged, loss(), before
    return answers


@pytest.mark.slow
@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
def test_the_models_of_the_paper_are_trained_and_evaluated(pool: RankPool, tmp_path: Path) -> None:
    one, other = pool.run(_trained, 2, str(tmp_path))
    assert {name: found[0] for name, found in one.items()} == {name: found[0] for name, found in other.items()}
    for name, (logged, loss, before) in one.items():
        assert logged["val_loss"] == pytest.approx(loss, rel=1e-5), name
        assert loss < before, name


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


def _batch() -> Data:
    edges = torch.tensor([[2, 3, 4, 0], [1, 0, 2, 0]])
    return Data(
        x=torch.arange(10.0).view(5, 2), edge_index=edges, edge_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        y=torch.arange(5), train_mask=torch.arange(5) < 2, num_sampled_nodes=[2, 2, 1],
    )  # fmt: skip


def test_a_batch_is_laid_out_once() -> None:
    sample = laid_out(_batch())
    assert sample.edge_index.tolist() == [[3, 0, 2, 4], [0, 0, 1, 2]]
    assert sample.edge_weight.tolist() == [2.0, 4.0, 1.0, 3.0]
    assert sample.labelled.tolist() == [0, 1]
    assert dict(sample.layout.edges_into) == {2: 3, 4: 4, 5: 4}
    assert sample.layout.has_loops
    with mock.patch("pygdist.lightning.parts.laid_out") as again:
        graph, edges = sampled_graph(sample)
    again.assert_not_called()
    assert torch.equal(edges.as_tensor(), sample.edge_index)
    assert torch.equal(graph.edge_weight, sample.edge_weight)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_hook_changes_counts(in_place: bool) -> None:
    """Lightning's ``on_after_batch_transfer`` may drop edges, or train on other nodes."""
    sample = laid_out(_batch())
    if in_place:
        sample.train_mask[0] = False
    else:
        keep = torch.tensor([True, False, True, False])
        sample.edge_index, sample.edge_weight = sample.edge_index[:, keep], sample.edge_weight[keep]
    graph, edges = sampled_graph(sample)
    assert graph.labelled.tolist() == ([1] if in_place else [0, 1])
    assert edges.csr().num_entries == (4 if in_place else 2)
    assert graph.layout.has_loops == in_place
