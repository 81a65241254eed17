"""Runs of Lightning's trainer on an emulated GPU, compared with those on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch_geometric.nn import GAT

from pygdist import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.backends import resolve_backend
from pygdist.lightning import ModelAveragingStrategy
from tests.cuda.emulation import Waits, emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.kernels.oracle import needs_library
from tests.lightning import gpu_runs, runs

pytestmark = needs_library


def _trained(rank: int, num_ranks: int, folder: str, name: str) -> tuple[gpu_runs.Outcome, gpu_runs.Outcome]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    try:
        expected = gpu_runs.train(rank, num_ranks, folder, name, "cpu")
        with emulated_gpu():
            return gpu_runs.train(rank, num_ranks, folder, name, "gpu"), expected
    finally:
        dist.destroy_process_group()


class _Waits(Callback):
    """Keeps the lines that wait for the GPU in a step."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.steps = waits, list[list[str]]()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.waits.lines.clear()  # of the end of the epoch before

    def on_train_batch_end(self, *_: Any) -> None:
        # DDP's buckets are on the host here: torch's C++ allocates them without the emulation
        self.steps.append([line for line in self.waits.lines if line != "copy from the host in the caller"])
        self.waits.lines.clear()  # the next step begins with the batch's way to the GPU


def _waited(name: str, folder: str, gat: bool = False, class_weights: list[float] | None = None) -> list[str]:
    case = gpu_runs.CASES[name]
    with emulated_gpu() as waits:
        noted = _Waits(waits)
        data = GraphDataModule(runs.graph(), cache_dir=folder, **{"partitioner": "hash", **case.data})
        kind = ModelAveragingStrategy if case.averages else GraphDDPStrategy
        trainer = runs.trainer(
            0, 1, folder, accelerator="gpu", precision=case.precision, max_epochs=4, callbacks=[noted],
            limit_val_batches=0, strategy=kind(process_group_backend="gloo"),
            plugins=[LightningEnvironment()],
        )  # fmt: skip
        model = GAT(12, 8, num_layers=2, out_channels=4) if gat else runs.model(**case.model)
        backend = resolve_backend(case.backend, **case.arguments)
        trainer.fit(NodeClassifier(model, backend=backend, class_weights=class_weights), datamodule=data)
        return noted.steps[2]


# each step of averaged models opens a part, and moves it to the GPU
@pytest.mark.parametrize("name", sorted(gpu_runs.CASES.keys() - {"comm, float32", "replica, averaging"}))
def test_the_third_step_of_a_run_waits_for_nothing(name: str, gpu: EmulatedProcess, tmp_path: Path) -> None:
    waits = gpu.run(_waited, name, str(tmp_path))
    scaler = [line for line in waits if line.startswith("aten._local_scalar_dense in pygdist/lightning/module.py")]
    assert waits == (scaler[:1] if name == "comm, float16" else [])  # torch's GradScaler asks for infinities


@pytest.mark.parametrize(("name", "gat"), [("comm", False), ("comm", True), ("pull", True), ("replica, saint", True)])
def test_a_step_with_attention_or_class_weights(name: str, gat: bool, gpu: EmulatedProcess, tmp_path: Path) -> None:
    assert gpu.run(_waited, name, str(tmp_path), gat, None if gat else [1.0, 2.0, 0.5, 1.0]) == []


@pytest.mark.parametrize("name", gpu_runs.CASES)
def test_a_run_on_two_gpus(name: str, two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path) -> None:
    for rank, process in enumerate(two):
        process.start(_trained, rank, 2, str(tmp_path), name)
    for found, expected in [process.result() for process in two]:
        gpu_runs.compare(name, found, expected)
