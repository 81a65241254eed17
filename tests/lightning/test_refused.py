"""A loss that is NaN or infinite stops a run on all ranks alike; options and models that make no sense are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch_geometric.nn import GCN, GraphSAGE

from experiments.reliability.malformed.stores import forge
from pygdist import GraphDataModule, GraphDDPStrategy, InputError
from pygdist.backends import DelayedBackend, HybridBackend, PushPullBackend, ReplicaBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.lightning import LinkPredictor, ModelAveragingStrategy, NodeClassifier
from pygdist.lightning.checks import check_device, check_precision
from pygdist.lightning.to_rank_zero import from_rank_zero
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.kernels.oracle import needs_library
from tests.lightning import runs


class Spoiled(NodeClassifier):
    """Its loss has one wrong value, in epoch 1, on the last rank, in a stage."""

    wrong, stage = float("nan"), "train"

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        losses = super().node_losses(out, y)
        here = self.global_rank == self.trainer.world_size - 1 and self.current_epoch == 1
        if here and self.training == (self.stage == "train"):
            losses = losses + torch.full_like(losses, self.wrong).detach()
        return losses


class Dot(nn.Module):
    """A decoder whose scores are not finite on one rank, from epoch 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bad = False

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (source * target).sum(dim=-1) + (torch.nan if self.bad and self.calls > 2 else 0.0)


def _fit(rank: int, world_size: int, folder: str, kind: str, detect: bool) -> tuple[str, list[dict[str, float]]]:
    history, options = runs.History(), {}
    links = {"edge_split": (0.1, 0.1)} if kind == "links" else {}
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache", **links)
    module: Any
    if kind == "links":
        module = LinkPredictor(GCN(12, 8, 2, 6), Dot(), detect_nan=detect)
        module.decoder.bad = rank == world_size - 1
        options["num_sanity_val_steps"] = 0
    elif kind == "parts":
        module = Spoiled(runs.model(), ReplicaBackend(hops=2), detect_nan=detect)
        options["strategy"] = ModelAveragingStrategy()
    else:
        module = Spoiled(runs.model(), detect_nan=detect)
        module.wrong = float("-inf" if kind == "infinite" else "nan")
        module.stage = "val" if kind == "val" else "train"
    said = ""
    try:
        runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=3, **options).fit(
            module, datamodule=data
        )
    except InputError as error:
        said = str(error)
    return said, history.epochs


@pytest.mark.parametrize(
    ("kind", "world_size", "words"),
    [
        ("train", 1, "epoch 1: train_loss is nan (rank 0 of 1)"),
        ("train", 2, "epoch 1: train_loss is nan (rank 1 of 2)"),
        ("infinite", 2, "epoch 1: train_loss is -inf (rank 1 of 2)"),
        ("val", 3, "epoch 1: val_loss is nan (rank 2 of 3)"),
        ("parts", 2, "epoch 1: train_loss is nan (rank 1 of 2)"),
        ("links", 2, "epoch 0: val_loss is nan (rank 1 of 2)"),
    ],
)
def test_a_loss_that_is_no_number_stops_the_run(
    kind: str, world_size: int, words: str, pool: RankPool, tmp_path: Path
) -> None:
    for said, epochs in pool.run(_fit, world_size, str(tmp_path), kind, True):
        assert said.startswith(words)
        assert "detect_nan=False" in said
        assert len(epochs) <= 2


def _fit_store(rank: int, world_size: int, folder: str) -> str:
    data = GraphDataModule(store=Path(folder) / "store")
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder, max_epochs=3, num_sanity_val_steps=0).fit(
            NodeClassifier(runs.model(), check=False), datamodule=data
        )
    return str(error.value)


def test_the_file_that_makes_a_loss_nan_is_named(pool: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_parts": 2, "method": "given", "arguments": {}}
    write_store(runs.graph(), np.arange(160) % 2, tmp_path / "store", **options)
    x = np.load(tmp_path / "store" / "part_1" / "x.npy")
    x[3, 0] = np.inf
    forge(tmp_path / "store", "x", x, part=1)
    for text in pool.run(_fit_store, 2, str(tmp_path)):
        assert "_loss is nan" in text
        assert f"; {tmp_path}/store/part_1/x.npy: 1 of 80 nodes hold NaN or" in text


class TooFast(NodeClassifier):
    """Its learning rate is beyond float32 from the second epoch on."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1e50)]


def _fit_too_fast(rank: int, world_size: int, folder: str) -> str:
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module = TooFast(runs.model().float(), detect_nan=False)
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder, max_epochs=3, precision="32-true").fit(module, datamodule=data)
    return str(error.value)


def test_a_rate_that_overflows_in_mid_run_is_named(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_fit_too_fast, 2, str(tmp_path)):
        assert said.startswith("lr of SGD is 1e+47, too large for a step")


class Scheduled(NodeClassifier):
    kind = ""

    def configure_optimizers(self) -> Any:
        optimizer, number = torch.optim.SGD(self.parameters(), lr=1e-3), 1 + self.global_rank
        if self.kind == "milestones":
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [number])]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, number)]


def _fit_otherwise(rank: int, world_size: int, folder: str, kind: str) -> str:
    options: dict[str, Any] = {"lr": 0.1 * (1 + rank)} if kind == "lr" else {}
    backend = HybridBackend(cache_ratio=rank / 2) if kind == "backend" else "comm"
    model = GCN(
        8, 4 + rank if kind == "width" else 4, num_layers=2, out_channels=3, dropout=rank / 2 * (kind == "dropout")
    ).double()
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    trainer = runs.trainer(rank, world_size, folder, max_epochs=3 + rank * (kind == "epochs"))
    module = (Scheduled if kind in ("scheduler", "milestones") else NodeClassifier)(model, backend, **options)
    module.kind = kind
    with pytest.raises(InputError) as error:
        trainer.fit(module, datamodule=data)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lr", "lr of optimizer 0, group 0 is 0.1 on rank 0, but 0.2 on rank 1"),
        ("backend", "cache_ratio of the backend is 0.0 on rank 0, but 0.5 on rank 1"),
        ("width", "hidden_channels of module 'model' is 4 on rank 0, but 5 on rank 1"),
        ("scheduler", "step_size of scheduler 0 is 1 on rank 0, but 2 on rank 1"),
        ("milestones", 'milestones of scheduler 0 is {"1": 1} on rank 0, but {"2": 1} on rank 1'),
        ("epochs", "max_epochs is 3 on rank 0, but 4 on rank 1; start all processes with the same options"),
        ("dropout", "p of module 'model.dropout' is 0.0 on rank 0, but 0.5 on rank 1"),
    ],
)
def test_scripts_that_train_otherwise_are_refused(kind: str, words: str, pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_fit_otherwise, 2, str(tmp_path), kind):
        assert words in said


class WithOwnBuffer(NodeClassifier):
    """Each rank has a buffer for its own nodes, of another shape than those of others."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.register_buffer("mine", torch.ones(3 + self.global_rank))


def _fit_with_own_buffers(rank: int, world_size: int, folder: str) -> float:
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1)
    trainer.fit(WithOwnBuffer(runs.model()), datamodule=data)
    return float(trainer.callback_metrics["train_loss"])


def test_ranks_may_have_buffers_of_their_own(pool: RankPool, tmp_path: Path) -> None:
    one, other = pool.run(_fit_with_own_buffers, 2, str(tmp_path))
    assert one == other


def test_a_run_may_go_on_with_it(pool: RankPool, tmp_path: Path) -> None:
    for said, epochs in pool.run(_fit, 2, str(tmp_path), "train", False):
        assert not said
        assert len(epochs) == 3
        assert [epoch["train_loss"] != epoch["train_loss"] for epoch in epochs] == [False, True, False]


def _said(rank: int, world_size: int, folder: str, text: str) -> str:
    strategy = GraphDDPStrategy()
    strategy._communicator = Communicator(dist.new_group())
    return from_rank_zero(text if rank == 0 else "other" * rank, strategy)


@pytest.mark.parametrize("text", ["", "/store", "/a/\u00e9\udcff\n\\x" * 700])
def test_a_text_of_rank_0_travels_whole(text: str, pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_said, 3, str(tmp_path), text) == [text] * 3


@pytest.mark.parametrize("options", [{"lr": float("inf")}, {"lr": float("nan")}, {"weight_decay": float("inf")}])
def test_rates_are_finite(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected a number from 0 to"):
        NodeClassifier(runs.model(), **options)


def test_a_model_has_a_forward_and_layers() -> None:
    with pytest.raises(InputError, match=r"model: Module has no forward\(\)"):
        NodeClassifier(nn.Module())
    with pytest.raises(InputError, match=r"decoder: Module has no forward\(\)"):
        LinkPredictor(runs.model(), nn.Module())
    with pytest.raises(InputError, match=r"model: num_layers of GCN is 0, expected at least 1"):
        NodeClassifier(GCN(12, 8, num_layers=0, out_channels=4))


@pytest.mark.parametrize("sizes", [(12, 0, 2, 4), (-1, 0, 2, 4), (12, 8, 2, 0)])
def test_a_width_of_0_is_refused(sizes: tuple[int, ...], tmp_path: Path) -> None:
    data = GraphDataModule(runs.graph(), cache_dir=tmp_path)
    with pytest.raises(InputError, match=r"model: .* shape \(.*a width is 0"):
        runs.trainer(0, 1, str(tmp_path)).fit(NodeClassifier(GCN(*sizes)), datamodule=data)


def test_a_loss_whose_scale_changes_is_refused_where_gradients_come_late(tmp_path: Path) -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    check_precision(scaled, DelayedBackend(delay=2))
    check_precision(Precision(), DelayedBackend(delay=2, gradients="stale"))
    data = GraphDataModule(runs.graph(), partitioner="libra", cache_dir=tmp_path)
    module = NodeClassifier(runs.model().float(), DelayedBackend(delay=2, gradients="stale"))
    run = runs.trainer(0, 1, str(tmp_path), plugins=[runs.PoolEnvironment(0), scaled], precision=None)
    with pytest.raises(InputError, match="precision=16-mixed: the loss is scaled by a number that changes"):
        run.fit(module, datamodule=data)


@needs_library
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_train_batches": 2}, r"limit_train_batches=2: with pipeline=3 .* an epoch of 2 steps trains nothing"),
        ({"overfit_batches": 1}, r"overfit_batches=1: with pipeline=3 .* allow at least 3 steps"),
    ],
    ids=["limit", "overfit"],
)
def test_an_epoch_too_short_for_a_pipeline_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    batches = NeighborBatches([4, 3], batch_size=13)
    data = GraphDataModule(runs.graph(), batches=batches, cache_dir=tmp_path)
    module = NodeClassifier(GraphSAGE(12, 8, 2, 4), PushPullBackend(pipeline=3), check=False)
    with pytest.raises(InputError, match=words):
        runs.trainer(0, 1, str(tmp_path), **options).fit(module, datamodule=data)


def _fit_scaled(rank: int, world_size: int, folder: str) -> str:
    graph = runs.graph()
    graph.x = graph.x.float()
    batches, scaler = NeighborBatches([4, 3], batch_size=13), torch.amp.GradScaler("cpu")
    data = GraphDataModule(graph, partitioner="hash", batches=batches, cache_dir=Path(folder) / "cache")
    module = NodeClassifier(GraphSAGE(12, 8, 2, 4), PushPullBackend(first_weights="sharded"), check=False)
    plugins = [runs.PoolEnvironment(rank), MixedPrecision("16-mixed", "cpu", scaler)]
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder, plugins=plugins, precision=None).fit(module, datamodule=data)
    return str(error.value)


@needs_library
def test_a_loss_whose_scale_changes_is_refused_with_sharded_weights(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_fit_scaled, 2, str(tmp_path)):
        assert said.startswith("trainer.precision=16-mixed: a rank that finds an overflow in its columns")
        assert said.endswith("use bf16-mixed, or first_weights='gathered'")


def test_a_device_without_kernels_is_refused() -> None:
    for name in ("cpu", "cuda:1"):
        check_device(torch.device(name))
    with pytest.raises(InputError, match=r"Lightning chose mps, .* set accelerator=cpu"):
        check_device(torch.device("mps"))


def test_edges_are_not_held_out_for_nodes(tmp_path: Path) -> None:
    data = GraphDataModule(runs.graph(), cache_dir=tmp_path, edge_split=(0.1, 0.1))
    with pytest.raises(InputError, match=r"edge_split: .* NodeClassifier learns the classes of nodes"):
        runs.trainer(0, 1, str(tmp_path)).fit(NodeClassifier(runs.model()), datamodule=data)


@pytest.mark.parametrize(
    "options",
    [
        *({"store": "parts", name: True} for name in ("symmetrize", "remove_duplicates", "remove_self_loops")),
        {"store": "parts", "split": (0.5, 0.2, 0.2)},
        {"store": "parts", "num_classes": 4},
        {"reserve": 0.5},
        {"num_parts": "auto", "reserve": float("nan")},
        {"num_parts": "auto", "memory_gib": float("inf")},
        {"num_parts": 0},
        {"num_workers": -1},
        {"split_seed": -1},
        {"split_seed": 1 << 64},
    ],
    ids=lambda options: list(options)[-1],
)
def test_options_of_a_graph_that_have_no_effect_or_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=list(options)[-1]):
        GraphDataModule(**options)
