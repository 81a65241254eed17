"""What averages of models cannot be, and what a run is told of."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.lightning import (
    ModelAveragingStrategy,
    checks,
)
from pygdist.native import load
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs
from tests.lightning.averaged import (
    Classifier,
    model,
    owners,
    said_by,
    store_of,
    train,
)

REFUSED: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "rows-of-other-models": (2, {"backend": "comm"}, ["backend 'comm' lets a part read rows", "use backend replica"]),
    "fewer-parts-than-ranks": (1, {}, ["has 1 parts", "2 ranks"]),
    # one rank has two parts, the other one
    "gradients-of-parts-in-turn": (3, {"averaging": None}, ["3 parts on 2 ranks", "use strategy 'model_averaging'"]),
    "statistics-of-parts-with-gradients": (
        2,
        {"averaging": None, "net": "norm"},
        ["BatchNorm1d: with backend 'replica' a norm takes the statistics of a part", "use strategy model_averaging"],
    ),
    "batches-in-turn-by-steps": (
        3,
        {"averaging": {"sync_unit": "step"}, "batches": NeighborBatches([4, 4], 8)},
        ["sync_unit=step: 3 parts on 2 ranks", "set sync_unit=epoch"],
    ),
    "parts-left-out": (
        4,
        {"options": {"limit_train_batches": 0.5}},
        ["limit_train_batches=0.5: 4 parts on 2 ranks", "in 2 steps of an epoch, and the first 1", "leave it out"],
    ),
    "parts-left-out-to-overfit": (4, {"options": {"overfit_batches": 1}}, ["overfit_batches=1: 4 parts on 2 ranks"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks(name: str, pool: RankPool, tmp_path: Path) -> None:
    num_parts, job, said = REFUSED[name]
    if "batches" in job and load() is None:
        pytest.skip("the sampler is in the native library")
    for message in pool.run(said_by, 2, str(tmp_path), store_of(tmp_path, num_parts), job):
        assert [words for words in said if words not in message] == []


def _checked(
    callbacks: list[Any],
    num_parts: int = 1,
    interval: str = "epoch",
    sync_every: int = 1,
    world_size: int = 1,
    **options: Any,
) -> None:
    """What a fit checks first."""
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model("gcn").parameters(), lr=0.1))
    settings = {"check_val_every_n_epoch": 1, "enable_validation": True, "max_steps": -1, "fast_dev_run": False}
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=True), callbacks=callbacks, world_size=world_size,
        checkpoint_callbacks=[one for one in callbacks if isinstance(one, ModelCheckpoint)],
        datamodule=SimpleNamespace(part_weights=[1] * num_parts), **{**settings, **options},
    )  # fmt: skip
    checks.check_averaging(trainer, world_size, [LRSchedulerConfig(scheduler, interval=interval)])
    checks.say_what_is_sent(trainer, sync_every, "epoch")


def test_what_is_sent_beside_the_averages_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(checks, "rank_zero_info", said.append)
    _checked([ModelCheckpoint()])
    assert said == []
    _checked([ModelCheckpoint()], sync_every=2)
    assert said.pop().endswith("check_val_every_n_epoch=2 saves that")
    _checked([ModelCheckpoint()], sync_every=2, enable_validation=False)
    assert said.pop().endswith("ModelCheckpoint(every_n_epochs=2) saves that")
    _checked([ModelCheckpoint(every_n_epochs=4)], sync_every=2, enable_validation=False)
    _checked([], world_size=2)
    _checked([ModelCheckpoint(save_weights_only=True)], world_size=2)
    assert said == []
    _checked([ModelCheckpoint()], world_size=2)
    assert said.pop().startswith("each checkpoint brings the optimisers' state of every part to rank 0")


def test_callbacks_that_average_one_model_are_refused() -> None:
    _checked([ModelCheckpoint()])
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)):
        with pytest.raises(InputError, match=f"{type(callback).__name__} averages the steps of one model"):
            _checked([ModelCheckpoint(), callback])


def test_schedules_by_steps_are_refused_where_parts_are_trained_in_turn() -> None:
    _checked([], num_parts=2)
    _checked([], interval="step")
    with pytest.raises(InputError, match=r"a learning rate that changes with each step.*change it by epochs"):
        _checked([], num_parts=2, interval="step")


LIMITED = {
    "smoke-run": (4, {"fast_dev_run": True}, 2),
    "all-parts": (4, {"limit_train_batches": 2, "max_epochs": 1}, 4),
    "a-rank-for-each": (2, {"limit_train_batches": 1, "max_epochs": 1}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_limits_that_leave_no_part_out_work(name: str, pool: RankPool, tmp_path: Path) -> None:
    num_parts, options, trained = LIMITED[name]
    mask, owner = runs.graph().train_mask.numpy(), owners(num_parts)
    answers = pool.run(train, 2, str(tmp_path), store_of(tmp_path, num_parts), {"options": options})
    seen = sorted(node for ours in answers for node in ours["trained_on"][0])
    assert seen == (mask & (owner < trained)).nonzero()[0].tolist()


def test_what_counts_steps_is_named_where_parts_are_trained_in_turn() -> None:
    by_steps = [ModelCheckpoint(every_n_train_steps=4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _checked(by_steps, max_steps=6)
        _checked(by_steps, num_parts=2, max_steps=1, fast_dev_run=True)
        _checked([ModelCheckpoint()], num_parts=2)
    with pytest.warns(UserWarning, match=r"max_steps=6, every_n_train_steps=4: 2 parts on 1 ranks.*max_epochs"):
        _checked(by_steps, num_parts=2, max_steps=6)


class Manual(Classifier):
    """Steps by itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False


def _manual(rank: int, world_size: int, folder: str, store: str) -> str:
    module = Manual(model("gcn"), optimizer="sgd", backend="replica")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy())
    with pytest.raises(InputError) as error:
        trainer.fit(module, datamodule=GraphDataModule(store=store))
    return str(error.value)


def test_manual_optimisation_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_manual, 2, str(tmp_path), store_of(tmp_path, 2)):
        assert "Manual steps its optimisers itself" in message


def _links(rank: int, world_size: int, folder: str, store: str) -> str:
    module = NodeClassifier(GCN(12, 8, num_layers=2, out_channels=3), backend="replica")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy())
    with pytest.raises(InputError) as error:
        trainer.fit(module, datamodule=GraphDataModule(store=store, edge_split=(0.1, 0.1)))
    return str(error.value)


def test_held_out_edges_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_links, 2, str(tmp_path), store_of(tmp_path, 2)):
        assert "edge_split: edges are held out for a LinkPredictor (--task=links), but NodeClassifier" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sync_every": 0}, "sync_every is 0, expected at least 1"),
        ({"sync_every": 10**30}, "sync_every is 10+, expected at least 1, and less than"),
        ({"sync_unit": "batch"}, "sync_unit is 'batch', expected epoch or step"),
        ({"optimizer_state": "keep"}, "optimizer_state is 'keep', expected local or average or reset"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ModelAveragingStrategy(**arguments)
