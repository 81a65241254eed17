"""Runs that are made on the host and on a GPU, and compared: all that a user's run does, from fit to export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from pygdist import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.backends import resolve_backend
from pygdist.commands.export import export
from pygdist.lightning import ModelAveragingStrategy
from pygdist.sampler import NeighborBatches, SaintNodeBatches
from tests.lightning import runs

EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """A run: a backend and its arguments, the precision of the trainer, the error that this allows, and options."""

    backend: str = "comm"
    arguments: dict[str, Any] = field(default_factory=dict)
    precision: str = "64-true"
    error: float = 1e-9
    averages: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


_SMALL = NeighborBatches([4, 4], 16)
#: Runs by name.
CASES = {
    "comm": Case(),
    "comm, float32": Case(precision="32-true", error=1e-5),
    "comm, bfloat16": Case(precision="bf16-mixed", error=0.02),
    "comm, float16": Case(precision="16-mixed", error=0.005),
    # a norm cancels the bias, whose gradient is rounding: Adam scales it up to full steps
    "comm, norm": Case(model={"norm": "batch_norm", "bias": False}),
    "cache": Case("cache"),
    "hybrid": Case("hybrid"),
    "tensor": Case("tensor"),
    "delayed": Case("delayed", data={"partitioner": "libra"}),
    "replica, averaging": Case("replica", averages=True, data={"num_parts": 4}),
    "replica, saint": Case("replica", averages=True, data={"batches": SaintNodeBatches(60, 3, sample_coverage=5)}),
    "pull": Case("pull", data={"batches": _SMALL}),
    "pushpull": Case("pushpull", data={"batches": _SMALL}),
    "pushpull, pipeline": Case(
        "pushpull", arguments={"pipeline": 3, "first_weights": "sharded"}, data={"batches": _SMALL}
    ),
}


@dataclass
class Outcome:
    """The metrics of each epoch and of a test, and the model: as it is, and as ``export`` wrote it."""

    epochs: list[dict[str, float]]
    tested: dict[str, float]
    model: dict[str, Tensor]
    exported: dict[str, Tensor]


def train(rank: int, num_ranks: int, folder: str, name: str, accelerator: str) -> Outcome:
    """Fit, break off, resume, test, predict and export; ranks are hosts with one device each."""
    case, history, within = CASES[name], runs.History(), Path(folder) / accelerator
    precision = "32-true" if (case.precision, accelerator) == ("16-mixed", "cpu") else case.precision

    def trainer(**options: Any) -> Any:
        options["strategy"] = (ModelAveragingStrategy if case.averages else GraphDDPStrategy)(
            process_group_backend="gloo"
        )
        return runs.trainer(
            rank, num_ranks, str(within), accelerator=accelerator, precision=precision, devices=1, num_nodes=num_ranks,
            plugins=[runs.PoolEnvironment(rank, one_device=True)], **options,
        )  # fmt: skip

    def parts() -> tuple[NodeClassifier, GraphDataModule]:
        options = {"partitioner": "hash", "cache_dir": within / "cache", **case.data}
        backend = resolve_backend(case.backend, **case.arguments)
        return NodeClassifier(runs.model(**case.model), backend=backend), GraphDataModule(runs.graph(), **options)

    saves = ModelCheckpoint(dirpath=within, filename="{epoch}", save_top_k=-1)
    module, data = parts()
    trainer(max_epochs=1, callbacks=[saves], enable_checkpointing=True).fit(module, datamodule=data)
    module, data = parts()
    resumed = trainer(max_epochs=EPOCHS, callbacks=[history, saves], enable_checkpointing=True)
    resumed.fit(module, datamodule=data, ckpt_path=str(within / "epoch=0.ckpt"))
    (tested,) = resumed.test(module, datamodule=data, verbose=False)
    for part in resumed.predict(module, datamodule=data):
        assert all(one.device.type == "cpu" for one in part)
    model = {name: value.detach().cpu() for name, value in module.model.state_dict().items()}
    exported = export(within / f"epoch={EPOCHS - 1}.ckpt", within / f"model-{rank}.pt")
    return Outcome(history.epochs, dict(tested), model, exported)


def compare(name: str, found: Outcome, expected: Outcome) -> None:
    """Compare a run on a GPU with one on the host."""
    error = CASES[name].error
    for epoch, like in zip([*found.epochs, found.tested], [*expected.epochs, expected.tested], strict=True):
        losses = {key: value for key, value in like.items() if key.endswith("loss")}
        assert {key: epoch[key] for key in losses} == pytest.approx(losses, rel=error)
    for key, value in expected.model.items():
        torch.testing.assert_close(
            found.model[key], value, rtol=0, atol=error * 10, msg=lambda said, of=key: f"{of}: {said}"
        )
        assert found.exported[key].device.type == "cpu"
        assert torch.equal(found.exported[key], found.model[key])
