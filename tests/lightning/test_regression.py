"""Numbers of nodes are learned over all ranks as torch learns them on the whole graph; R2 and MAE are of all nodes."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN, SAGEConv

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import Backend, DelayedBackend, ReplicaBackend
from pygdist.kernels import CSR
from pygdist.lightning import ModelAveragingStrategy, NodeRegressor
from pygdist.lightning.module import Mean
from pygdist.lightning.regressor import R2Score
from pygdist.sampler import NeighborBatches, SaintNodeBatches
from pygdist.sampler.saint import Draw
from pygdist.testing import RankPool
from tests.lightning import runs

LOSSES: dict[str, Any] = {"mse": functional.mse_loss, "l1": functional.l1_loss, "huber": functional.huber_loss}


def graph(width: int | None = None) -> Data:
    """A graph with targets far from 0: ``(160,)``, or ``(160, width)``; some have none."""
    data = runs.graph()
    generator = torch.Generator().manual_seed(5)
    y = 1e4 + torch.randn(160, width or 1, generator=generator, dtype=torch.float64) + data.x[:, :1] * 3
    y[torch.rand(160, generator=generator) < 0.1] = float("nan")
    data.y = y if width else y[:, 0]
    return data


def model(width: int) -> nn.Module:
    torch.manual_seed(7)
    net = GCN(12, 8, num_layers=2, out_channels=width)
    with torch.no_grad():
        net.convs[1].bias.fill_(1e4)
    return net


class Plain(NodeRegressor):
    """With plain steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fit(
    rank: int, world_size: int, folder: str, backend: Backend | str, width: int | None, options: dict[str, Any]
) -> tuple[Any, ...]:
    """Two epochs of SGD: what was logged, the parameters afterwards, what a test says, and predictions."""
    history, parts = runs.History(), options.get("num_parts")
    settings = {
        "partitioner": "libra" if isinstance(backend, DelayedBackend) else "hash",
        "cache_dir": f"{folder}/cache",
    }
    data = GraphDataModule(graph(width), **{**settings, **options})
    module = Plain(model(width or 1), backend, loss="mse" if width is None else "huber" if width == 2 else "l1")
    strategy = {} if parts is None else {"strategy": ModelAveragingStrategy()}
    trainer = runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=2, **strategy)
    trainer.fit(module, datamodule=data)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    predicted = trainer.predict(module, datamodule=data)
    return history.epochs, {name: value.clone() for name, value in module.model.state_dict().items()}, tested, predicted


def _numbers(out: Tensor, y: Tensor, loss: str) -> dict[str, float]:
    """The loss, R2 and MAE by torch and by their definitions."""
    errors, deviations = (out - y).square().sum(0), (y - y.mean(0)).square().sum(0)
    r2 = float((1 - errors / deviations).mean())
    return {"loss": float(LOSSES[loss](out, y)), "r2": r2, "mae": float((out - y).abs().mean())}


def _expected(folder: Path, width: int | None) -> tuple[list[dict[str, float]], nn.Module, Data]:
    """The same by torch on the whole graph."""
    loss = "mse" if width is None else "huber" if width == 2 else "l1"
    whole, _ = GraphDataModule(graph(width), cache_dir=folder / "whole", float_labels=True).load()
    assert whole.y.shape == (160, width or 1)
    assert int((whole.train_mask | whole.val_mask | whole.test_mask).sum()) < 155, "some have no targets"
    net, epochs = model(width or 1).double(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(2):
        out = net(whole.x, whole.edge_index, whole.edge_weight)
        train = _numbers(out.detach()[whole.train_mask], whole.y[whole.train_mask], loss)
        optimizer.zero_grad()
        LOSSES[loss](out[whole.train_mask], whole.y[whole.train_mask]).backward()
        optimizer.step()
        out = net(whole.x, whole.edge_index, whole.edge_weight).detach()
        val = _numbers(out[whole.val_mask], whole.y[whole.val_mask], loss)
        epochs.append(
            {f"train_{name}": one for name, one in train.items()} | {f"val_{name}": one for name, one in val.items()}
        )
    return epochs, net, whole


def _check(found: list[tuple[Any, ...]], folder: Path, width: int | None, *, trained: bool = True) -> None:
    epochs, net, whole = _expected(folder, width)
    if not trained:  # in another way: the same numbers of the parameters that came out
        net.load_state_dict(found[0][1])
    out = net(whole.x, whole.edge_index, whole.edge_weight).detach()
    loss = "mse" if width is None else "huber" if width == 2 else "l1"
    test = _numbers(out[whole.test_mask], whole.y[whole.test_mask], loss)
    for logged, parameters, tested, predicted in found:
        for one, other in zip(logged, epochs, strict=True):
            if trained:
                assert one == pytest.approx(other, rel=1e-10)
        assert [one == other for one, other in zip(logged, found[0][0], strict=True)] == [True, True], "on all ranks"
        for name, value in net.state_dict().items():
            assert torch.allclose(parameters[name], value, rtol=0, atol=1e-10), name
        assert tested == pytest.approx({f"test_{name}": one for name, one in test.items()}, rel=1e-10)
        for rows, values in predicted:
            assert values.shape == (len(rows), width or 1)
            assert torch.allclose(values, out[rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("width", [None, 2])
def test_numbers_are_those_of_torch(width: int | None, world_size: int, pool: RankPool, tmp_path: Path) -> None:
    _check(pool.run(_fit, world_size, str(tmp_path), "comm", width, {}), tmp_path, width)


@pytest.mark.parametrize(
    "backend", ["cache", "hybrid", "tensor", "single", pytest.param(DelayedBackend(delay=0), id="delayed")]
)
def test_on_every_exact_backend(backend: Any, pool: RankPool, tmp_path: Path) -> None:
    _check(pool.run(_fit, 1 if backend == "single" else 2, str(tmp_path), backend, 3, {}), tmp_path, 3)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("pull", {"batches": NeighborBatches([4, 4], 16)}),
        ("pushpull", {"batches": NeighborBatches([4, 4], 16)}),
        (ReplicaBackend(hops=2), {"num_parts": 3}),
        (ReplicaBackend(hops=2), {"num_parts": 3, "batches": SaintNodeBatches(20)}),
        (ReplicaBackend(hops=2), {"num_parts": 3, "batches": NeighborBatches([4, 4], 16)}),
    ],
    ids=["pull", "pushpull", "parts", "saint", "neighbours"],
)
def test_batches_and_parts_are_evaluated_on_the_whole_graph(
    backend: Any, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    found = pool.run(_fit, 2, str(tmp_path), backend, 2, options)
    _check(found, tmp_path, 2, trained=False)
    for epoch in found[0][0]:
        assert 0 < epoch["train_loss"] < 20
        assert 0 < epoch["train_mae"] < 20
        assert -200 < epoch["train_r2"] < 1


class Seen(NodeRegressor):
    """Keeps the targets that its loss gets."""

    def __init__(self, backend: Backend | str) -> None:
        super().__init__(model(1), backend)
        self.seen: list[Tensor] = []

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        self.seen.append(y.clone())
        return super().node_losses(out, y)


def _seen(rank: int, world_size: int, folder: str, backend: Backend | str, batches: Any) -> list[Tensor]:
    """The targets that reach the loss in half precision."""
    module, data = Seen(backend), GraphDataModule(graph(), partitioner="hash", batches=batches, cache_dir=folder)
    runs.trainer(rank, world_size, folder, precision="bf16-true", max_epochs=1).fit(module, datamodule=data)
    return module.seen


@pytest.mark.parametrize(
    ("backend", "batches"),
    [
        ("comm", None),
        ("pull", NeighborBatches([4, 4], 16)),
        ("pushpull", NeighborBatches([4, 4], 16)),
        (ReplicaBackend(hops=2), NeighborBatches([4, 4], 16)),
        (ReplicaBackend(hops=2), SaintNodeBatches(20)),
    ],
    ids=["whole", "pull", "pushpull", "neighbours", "saint"],
)
def test_half_precision_does_not_round_targets(backend: Any, batches: Any, pool: RankPool, tmp_path: Path) -> None:
    targets = graph().y
    assert not torch.isin(targets.bfloat16().double(), targets).any(), "rounding changes all"
    for seen in pool.run(_seen, 2, str(tmp_path), backend, batches):
        assert sum(len(y) for y in seen) > 20
        for y in seen:
            assert torch.isin(y.double(), targets).all()


def _near_zero(
    rank: int, world_size: int, folder: str, precision: str, epochs: int, resume: str | None = None
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train up to ``epochs``, from ``resume`` on if given; writes ``folder/last.ckpt``."""
    data, history = graph(2), runs.History()
    data.y = data.y - 1e4
    torch.manual_seed(7)
    module = NodeRegressor(GCN(12, 8, num_layers=2, out_channels=2), loss="huber")
    trainer = runs.trainer(
        rank, world_size, folder, max_epochs=epochs, precision=precision, enable_checkpointing=True,
        callbacks=[history, ModelCheckpoint(dirpath=folder, save_last=True)],
    )  # fmt: skip
    trainer.fit(module, datamodule=GraphDataModule(data, partitioner="hash", cache_dir=folder), ckpt_path=resume)
    return history.epochs, {name: one.clone() for name, one in module.model.state_dict().items()}


def test_bf16_mixed_stays_near_full_precision(pool: RankPool, tmp_path: Path) -> None:
    mixed, full = (pool.run(_near_zero, 2, str(tmp_path), one, 4)[0][0] for one in ("bf16-mixed", "32-true"))
    for one, other in zip(mixed, full, strict=True):
        assert one == pytest.approx(other, rel=0.02)
        assert one["val_loss"] != other["val_loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_resumed_equals_the_unbroken_one(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    whole, parameters = pool.run(_near_zero, world_size, str(tmp_path / "whole"), "32-true", 4)[0]
    first, _ = pool.run(_near_zero, world_size, str(tmp_path / "half"), "32-true", 2)[0]
    last = str(tmp_path / "half" / "last.ckpt")
    for epochs, state in pool.run(_near_zero, world_size, str(tmp_path / "again"), "32-true", 4, last):
        assert [*first, *epochs] == whole, "bit for bit"
        for name, value in parameters.items():
            assert torch.equal(state[name], value), name


class WithoutNeighbours(nn.Module):
    """Its outputs do not depend on the edges, so a node has the same ones in every batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.lin = SAGEConv(12, 2), nn.Linear(12, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x) + 1e4 + 0 * self.conv(x, edge_index)
        return out


class TwoSets(SaintNodeBatches):
    """Draws the first and the last three quarters of a part in turn, for the norms as for the batches of an epoch."""

    def _draw(self, csr: CSR) -> Draw:
        rows, number = np.arange(csr.num_rows), itertools.count()
        sets = rows[: -(len(rows) // 4)], rows[len(rows) // 4 :]
        return lambda rng: sets[next(number) % 2]


def _sampled(rank: int, world_size: int, folder: str, batches: Any) -> list[dict[str, float]]:
    history, module = runs.History(), NodeRegressor(WithoutNeighbours(), ReplicaBackend(hops=1), lr=0, weight_decay=0)
    data = GraphDataModule(graph(2), partitioner="hash", batches=batches, cache_dir=folder)
    runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=1).fit(module, datamodule=data)
    return history.epochs


@pytest.mark.parametrize("world_size", [1, 2])
def test_estimates_by_graph_saint_are_exact_where_each_node_weighs_the_same_in_an_epoch(
    world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    batches = TwoSets(1, num_steps=2, sample_coverage=3)
    (estimated, *_), (exact, *_) = (pool.run(_sampled, world_size, str(tmp_path), one) for one in (batches, None))
    for name in ("train_loss", "train_r2", "train_mae"):
        assert estimated[0][name] == pytest.approx(exact[0][name], rel=1e-6), name
    plain = pool.run(_sampled, world_size, str(tmp_path), TwoSets(1, num_steps=2, sample_coverage=0))[0]
    for name in ("train_loss", "train_r2", "train_mae"):
        assert plain[0][name] != pytest.approx(exact[0][name], rel=1e-4), f"{name} needs the weights"


@pytest.mark.parametrize("largest", [0.05, 1.0, 1e3])
def test_weighted_scores_are_those_of_their_definitions(largest: float) -> None:
    y, out = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    weight = torch.rand(12, generator=torch.Generator().manual_seed(2)) * largest
    scores: dict[str, Any] = {"r2": R2Score(3), "mae": Mean()}
    for rows in (slice(0, 5), slice(5, 5), slice(5, 12)):
        NodeRegressor(model(3)).update_scores(scores, out[rows], y[rows], weight[rows])
    w = weight.double()[:, None]
    mean, total = (w * y).sum(0) / w.sum(), w.sum()
    r2 = 1 - (w * (y - out).square()).sum(0) / (w * (y - mean).square()).sum(0)
    expected = {"r2": float(r2.mean()), "mae": float((w * (y - out).abs()).sum(0).div(total).mean())}
    plain = _numbers(out, y, "l1")
    for name, score in scores.items():
        assert float(score.compute()) == pytest.approx(expected[name], rel=1e-12), name
        assert float(score.compute()) != pytest.approx(plain[name], rel=1e-3), f"{name} without weights is another"


class OneNumber(nn.Module):
    """Returns one number for each node, without a column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = SAGEConv(12, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index).squeeze(-1)
        return out


class Column(OneNumber):
    """The same with a column."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).unsqueeze(1)


class Double(NodeRegressor):
    """With a loss of its own, which broadcasting would change."""

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        return (out - y).square().mean(dim=1) * 2


def _one(rank: int, world_size: int, folder: str, net: type[nn.Module], cls: type[NodeRegressor]) -> Any:
    history, data = runs.History(), GraphDataModule(graph(), partitioner="hash", cache_dir=folder)
    runs.trainer(rank, world_size, folder, callbacks=[history]).fit(cls(net(), weight_decay=0), datamodule=data)
    return history.epochs


@pytest.mark.parametrize("cls", [NodeRegressor, Double])
def test_one_number_without_a_column_is_learned_alike(cls: type[NodeRegressor], pool: RankPool, tmp_path: Path) -> None:
    found, expected = (pool.run(_one, 2, str(tmp_path), net, cls) for net in (OneNumber, Column))
    assert found == expected
    assert math.isfinite(found[0][-1]["train_loss"])


def _refused(rank: int, world_size: int, folder: str, module: Any, y: Tensor, options: dict[str, Any]) -> str:
    data = runs.graph()
    data.y = y
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder).fit(
            module, datamodule=GraphDataModule(data, cache_dir=folder, partitioner="hash", **options)
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("module", "y", "said"),
    [
        (
            NodeRegressor(model(1)),
            torch.rand(160, 2),
            r"returns float64 of shape \(N, 1\), but the targets .* \(N, 2\); .*channels to 2",
        ),
        (
            NodeRegressor(OneNumber()),
            torch.rand(160, 2),
            r"returns float64 of shape \(N\), but the targets",
        ),
        (NodeRegressor(model(1)), torch.arange(160) % 3, r"y: torch.int64, .*NodeClassifier"),
        (
            NodeClassifier(model(1)),
            torch.rand(160),
            r"are numbers to predict \(float32 of shape \(N, 1\)\); use NodeRegressor",
        ),
        (NodeClassifier(model(2)), torch.rand(160, 2), r"are numbers to predict .*use NodeRegressor"),
        (NodeRegressor(model(1)), torch.full((160,), float("inf")), "y: node 0 has inf to predict"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    module: Any, y: Tensor, said: str, pool: RankPool, tmp_path: Path
) -> None:
    for line in pool.run(_refused, 2, str(tmp_path), module, y, {}):
        assert re.search(said, line), line
        assert "\n" not in line


def test_a_store_of_classes_is_refused(tmp_path: Path) -> None:
    data = GraphDataModule(runs.graph(), cache_dir=tmp_path)
    data.prepare_data()
    for module, said in (
        (NodeRegressor(model(1)), r"NodeRegressor predicts numbers, but the labels \(y\) .* int64 of shape \(N\)"),
        (NodeRegressor(model(1), loss="mse"), "use NodeClassifier for classes"),
    ):
        with pytest.raises(InputError, match=said):
            runs.trainer(0, 1, str(tmp_path)).fit(module, datamodule=GraphDataModule(store=data.folder))
    with pytest.raises(InputError, match="loss is 'rmse', expected mse or l1 or huber"):
        NodeRegressor(model(1), loss="rmse")  # type: ignore[arg-type]


def test_labels_between_0_and_1_are_learned_if_their_number_is_given(tmp_path: Path) -> None:
    data, history = runs.graph(), runs.History()
    data.y = torch.rand(160, 3)
    found = GraphDataModule(data, cache_dir=tmp_path, num_classes=3)
    runs.trainer(0, 1, str(tmp_path), callbacks=[history]).fit(NodeClassifier(model(3)), datamodule=found)
    assert found.shard.multi_label
    assert history.epochs[-1]["val_loss"] > 0


@pytest.mark.parametrize("classes_first", [True, False])
def test_one_matrix_is_classes_and_numbers_in_one_cache(classes_first: bool, tmp_path: Path) -> None:
    data, kinds = runs.graph(), [NodeClassifier, NodeRegressor]
    data.y = torch.randint(0, 2, (160, 3), generator=torch.Generator().manual_seed(1)).float()
    for kind in kinds if classes_first else reversed(kinds):
        module = kind(model(3))
        history, found = runs.History(), GraphDataModule(data, cache_dir=tmp_path)
        runs.trainer(0, 1, str(tmp_path), callbacks=[history], max_epochs=1).fit(module, datamodule=found)
        assert found.shard.multi_label == (kind is NodeClassifier)
        assert ("val_r2" in history.epochs[0]) == (kind is NodeRegressor)


def test_whole_numbers_to_predict_are_no_classes(tmp_path: Path) -> None:
    data = runs.graph()
    data.y = data.y.double() - 1  # -1 to 2
    history, module = runs.History(), NodeRegressor(model(1))
    found = GraphDataModule(data, cache_dir=tmp_path)
    runs.trainer(0, 1, str(tmp_path), callbacks=[history]).fit(module, datamodule=found)
    assert torch.equal(found.shard.y[:, 0], data.y)
    assert sum(found.shard.counts.values()) == 160, "-1 is a number"
    assert found.summary().startswith("160 nodes, 1,280 edges, 12 features (float64), 1 numbers to predict per node")


@pytest.mark.parametrize(
    ("y", "out", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], 0.5),
        ([1e-6, 2e-6, 3e-6], [1e-6, 2e-6, 4e-6], 0.5),  # torchmetrics says 0
        ([2e8, 2e8 + 1, 2e8 + 2], [2e8, 2e8 + 1, 2e8 + 3], 0.5),
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], 1.0),
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.2], 0.0),
        ([0.1], [0.1], math.nan),
        ([], [], math.nan),
    ],
)
def test_r2_of_small_and_large_numbers(y: list[float], out: list[float], expected: float) -> None:
    score = R2Score(1)
    for start in (0, 1):  # in two pieces
        rows = slice(start, None if start else 1)
        score.update(
            torch.tensor(out, dtype=torch.float64)[rows, None], torch.tensor(y, dtype=torch.float64)[rows, None]
        )
    assert float(score.compute()) == pytest.approx(expected, abs=1e-7, nan_ok=True)
