"""Parts in turn on a GPU, whole and in mini-batches, with a step in which there is nothing to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from pygdist import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.backends import resolve_backend
from pygdist.lightning import ModelAveragingStrategy
from pygdist.lightning.parts import PartLoader
from pygdist.native import load
from pygdist.sampler import MiniBatches, NeighborBatches, SaintNodeBatches
from pygdist.testing import RankPool
from tests.lightning import gpu_runs, runs

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


class Longer(GraphDataModule):
    """As if another rank had one step more."""

    @override
    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        assert isinstance(loader, PartLoader)
        loader.num_steps = len(loader) + 1
        return loader


def _fit(
    rank: int, world_size: int, folder: str, accelerator: str, batches: MiniBatches | None
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    history, net = runs.History(), runs.model(norm="batch_norm", bias=False)  # a norm cancels a bias
    data = Longer(runs.graph(), partitioner="hash", num_parts=3, batches=batches, cache_dir=folder)
    trainer = runs.trainer(
        rank, world_size, folder, accelerator=accelerator, strategy=ModelAveragingStrategy(sync_every=2),
        callbacks=[history],
    )  # fmt: skip
    trainer.fit(NodeClassifier(net, backend="replica"), datamodule=data)
    return history.epochs, {name: value.cpu() for name, value in net.state_dict().items()}


BATCHES = {
    "whole": None,
    "neighbours": NeighborBatches([4, 4], 16),
    "saint": SaintNodeBatches(60, num_steps=3, sample_coverage=5),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_gpu_trains_as_the_host_does(name: str, tmp_path: Path, pool: RankPool) -> None:
    if name != "whole" and load() is None:
        pytest.skip("the sampler is in the native library")
    (expected, wanted), (logged, found) = (
        pool.run(_fit, 1, str(tmp_path), accelerator, BATCHES[name])[0] for accelerator in ("cpu", "gpu")
    )
    for epoch, like in zip(logged, expected, strict=True):
        assert epoch == pytest.approx(like, rel=1e-5)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7, msg=lambda said, of=name: f"{of}: {said}")


def _trained(rank: int, world_size: int, folder: str, name: str, accelerator: str) -> gpu_runs.Outcome:
    return gpu_runs.train(rank, world_size, folder, name, accelerator)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", gpu_runs.CASES)
def test_a_run_from_fit_to_export(name: str, world_size: int, tmp_path: Path, pool: RankPool) -> None:
    """Ranks share the first GPU; gloo carries what travels."""
    if load() is None:
        pytest.skip("the native library was not built here")
    expected, found = (
        pool.run(_trained, world_size, str(tmp_path), name, accelerator) for accelerator in ("cpu", "gpu")
    )
    for one, other in zip(found, expected, strict=True):
        gpu_runs.compare(name, one, other)


def _fitted(name: str, folder: Path, accelerator: str) -> dict[str, float]:
    """Return what is logged of a run of one process, as a user starts it: over nccl on a GPU."""
    case = gpu_runs.CASES[name]
    precision = "32-true" if case.precision == "16-mixed" and accelerator == "cpu" else case.precision
    strategy = (ModelAveragingStrategy if case.averages else GraphDDPStrategy)()
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, strategy=strategy, precision=precision, max_epochs=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    data = GraphDataModule(runs.graph(), **{"partitioner": "hash", "cache_dir": folder, **case.data})
    backend = resolve_backend(case.backend, **case.arguments)
    try:
        trainer.fit(NodeClassifier(runs.model(**case.model), backend=backend), datamodule=data)
        assert dist.get_backend() == ("nccl" if accelerator == "gpu" else "gloo")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", gpu_runs.CASES)
def test_one_process_over_nccl(name: str, tmp_path: Path) -> None:
    expected, found = (_fitted(name, tmp_path / accelerator, accelerator) for accelerator in ("cpu", "gpu"))
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=gpu_runs.CASES[name].error)


class Stepped(NodeClassifier):
    """With Adam whose number of steps is on the GPU."""

    option = ""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        options: dict[str, Any] = {self.option: True}
        return torch.optim.Adam(self.parameters(), lr=0.01, **options)


def _resume(
    rank: int, world_size: int, folder: str, option: str, epochs: int, checkpoint: str | None
) -> dict[str, Tensor]:
    net = runs.model()
    module = Stepped(net, backend="replica")
    module.option = option
    data = GraphDataModule(runs.graph(), partitioner="hash", num_parts=3, cache_dir=folder)
    trainer = runs.trainer(
        rank, world_size, folder, accelerator="gpu", strategy=ModelAveragingStrategy(), max_epochs=epochs,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)], enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return {name: value.cpu() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_steps_that_are_counted_on_the_gpu_go_on_there(option: str, tmp_path: Path, pool: RankPool) -> None:
    wanted = pool.run(_resume, 1, str(tmp_path), option, 4, None)[0]
    found = pool.run(_resume, 1, str(tmp_path), option, 4, str(tmp_path / "epoch=1.ckpt"))[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=lambda said, of=name: f"{of}: {said}")
