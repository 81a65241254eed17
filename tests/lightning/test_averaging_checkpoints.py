"""Checkpoints of averaged models: a run that is resumed goes on, wherever it ended, with all that its parts had."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pygdist import GraphDataModule
from pygdist.backends import ReplicaBackend
from pygdist.lightning import (
    ModelAveragingStrategy,
    averaging,
)
from pygdist.native import load
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs
from tests.lightning.averaged import (
    Classifier,
    assert_same,
    exhaustive,
    loss_of,
    model,
    optimizer_of,
    owners,
    said_by,
    store_of,
    train,
    without_noise,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["local", exhaustive("average")])
def test_resuming_is_going_on(policy: str, pool: RankPool, tmp_path: Path) -> None:
    job = {
        "num_parts": 4,
        "net": "norm",
        "hops": 1,
        "optimizer": "adam",
        "averaging": {"sync_every": 2, "optimizer_state": policy},
        "keep": True,
        "options": {"max_epochs": 8},
    }
    store = store_of(tmp_path, 4)
    whole = pool.run(train, 2, str(tmp_path / "whole"), store, job)[0]
    resumed = {**job, "resume": str(tmp_path / "whole" / "epoch=3.ckpt")}
    for world_size in (2, 1, 4):
        for ours in pool.run(train, world_size, str(tmp_path / str(world_size)), store, resumed):
            assert len(ours["history"]) == 4, "it goes on at the epoch where it stopped"
            if world_size == 2:
                assert_same(ours["state"], whole["state"], 1e-12)
            assert_same(without_noise(ours["state"]), without_noise(whole["state"]), 1e-9)


def test_optimisers_that_keep_lists_of_tensors_go_on_too(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 4, "hops": 1, "optimizer": "lbfgs", "keep": True, "options": {"max_epochs": 3}}
    store = store_of(tmp_path, 4)
    whole = pool.run(train, 2, str(tmp_path / "whole"), store, job)[0]
    resumed = {**job, "resume": str(tmp_path / "whole" / "epoch=1.ckpt")}
    for ours in pool.run(train, 2, str(tmp_path / "again"), store, resumed):
        assert_same(ours["state"], whole["state"], 1e-12)


def _save_after(rank: int, world_size: int, folder: str, store: str, then: str) -> list[str]:
    """Save when a fit has ended, or failed; what is said of it."""
    said: list[str] = []
    classifier = Classifier(model("gcn"), optimizer="adam", backend=ReplicaBackend(hops=2))
    data = GraphDataModule(store=store)
    each = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), callbacks=[each], enable_checkpointing=True
    )

    def fail(*_: Any) -> None:
        if trainer.current_epoch == 2:
            raise ValueError("failed")

    with mock.patch.object(averaging, "rank_zero_warn", said.append):
        if then == "failed":
            with mock.patch.object(each, "on_train_epoch_start", fail), pytest.raises(ValueError, match="failed"):
                trainer.fit(classifier, datamodule=data)
        else:
            trainer.fit(classifier, datamodule=data)
        if then == "tested":
            trainer.test(classifier, datamodule=data, verbose=False)
        trainer.save_checkpoint(Path(folder) / "after.ckpt")
    return said


@pytest.mark.parametrize(("world_size", "then"), [(1, "ended"), (2, "ended"), (2, "tested")])
def test_a_checkpoint_that_is_saved_after_a_fit_has_the_states_of_all_parts(
    world_size: int, then: str, pool: RankPool, tmp_path: Path
) -> None:
    said = pool.run(_save_after, world_size, str(tmp_path), store_of(tmp_path, 4), then)
    assert said == [[]] * world_size
    found, wanted = (torch.load(tmp_path / name, weights_only=True) for name in ("after.ckpt", "epoch=2.ckpt"))
    assert set(found["model_averaging"]["states"]) == {"0", "1", "2", "3"}
    # the same tensors by the same names, part by part
    _assert_equal_states(found["model_averaging"]["states"], wanted["model_averaging"]["states"])


def _assert_equal_states(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for part, states in wanted.items():
        for mine, theirs in zip(found[part], states, strict=True):
            assert mine.keys() == theirs.keys()
            for number, entry in theirs.items():
                for name, value in entry.items():
                    assert torch.equal(mine[number][name], value), (part, number, name)


def test_a_checkpoint_of_a_run_that_failed_says_what_it_lacks(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_save_after, 2, str(tmp_path), store_of(tmp_path, 4), "failed"):
        assert [text.partition(":")[0] for text in said] == ["the run has failed or was interrupted"]
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["model_averaging"]
    assert (saved["num_parts"], set(saved["states"])) == (4, {"0", "2"})
    job = {"optimizer": "adam", "options": {"max_epochs": 3}, "resume": str(tmp_path / "after.ckpt")}
    for said in pool.run(_warned, 2, str(tmp_path / "again"), store_of(tmp_path, 4), job):
        assert any("lacks the optimisers' state of the parts 1, 3" in text for text in said)


def _warned(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> list[str]:
    said: list[str] = []
    with mock.patch.object(averaging, "rank_zero_warn", said.append):
        train(rank, world_size, folder, store, job)
    return said


def test_a_checkpoint_goes_on_with_other_parts_and_strategies(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 4, "optimizer": "adam", "averaging": {"sync_every": 2}, "keep": True}
    first = pool.run(train, 2, str(tmp_path / "a"), store_of(tmp_path, 4), {**job, "options": {"max_epochs": 4}})[0]
    last, longer = str(tmp_path / "a" / "epoch=3.ckpt"), {"max_epochs": 8}
    others = [
        (2, 3, {**job, "num_parts": 3}),
        (3, 3, {**job, "num_parts": 3, "averaging": {"optimizer_state": "average"}}),
        (2, 2, {**job, "num_parts": None, "averaging": None, "backend": "comm"}),
    ]
    for number, (world_size, num_parts, other) in enumerate(others):
        other = {**other, "options": longer, "resume": last}
        for ours in pool.run(train, world_size, str(tmp_path / f"b{number}"), store_of(tmp_path, num_parts), other):
            assert len(ours["history"]) == 4
            assert ours["history"][-1]["train_loss"] < first["history"][-1]["train_loss"]
    # and from gradients averaged to models averaged
    other = {**job, "options": {"max_epochs": 12}, "resume": str(tmp_path / "b2" / "epoch=7.ckpt")}
    for ours in pool.run(train, 2, str(tmp_path / "c"), store_of(tmp_path, 4), other):
        assert len(ours["history"]) == 4


def test_a_run_resumed_between_two_averages_begins_with_that_average(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 3, "averaging": {"sync_every": 3}, "keep": True}
    store = store_of(tmp_path, 3)
    pool.run(train, 2, str(tmp_path / "a"), store, {**job, "options": {"max_epochs": 2}})
    pool.run(train, 2, str(tmp_path / "b"), store, {**job, "options": {"max_epochs": 6}})
    saved = [torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True)["state_dict"] for name in "ab"]
    assert_same(saved[0], saved[1], 1e-12)


MIDDLE = {"keep": {"filename": "{step}", "every_n_train_steps": 4}, "options": {"max_epochs": 2}}


def test_a_run_resumed_in_the_middle_of_an_epoch_trains_the_parts_that_are_left(pool: RankPool, tmp_path: Path) -> None:
    """Of five parts on two ranks an epoch has three steps, so one step of the second has been made."""
    data, owner, store = runs.graph(), torch.from_numpy(owners(5)), store_of(tmp_path, 5)
    job: dict[str, Any] = {"num_parts": 5, **MIDDLE}
    pool.run(train, 2, str(tmp_path / "a"), store, job)
    place = str(tmp_path / "a" / "step=4.ckpt")
    answers = pool.run(train, 2, str(tmp_path / "b"), store, {**job, "resume": place})
    left = data.train_mask & (owner >= 2)
    assert sorted(node for ours in answers for node in ours["trained_on"][0]) == left.nonzero().squeeze(1).tolist()
    net = model("gcn").double()
    saved = torch.load(place, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    loss = loss_of(net, data, left) * int(left.sum()) / int(data.train_mask.sum())  # the others stay where they are
    loss.backward()
    optimizer_of("sgd", net.parameters()).step()
    for ours in answers:
        assert_same(ours["state"], net.state_dict(), 1e-10)
    elsewhere = {"num_parts": 2, "averaging": None, "backend": "comm", "resume": place}
    for world_size, parts, other in ((1, store, {**job, "resume": place}), (2, store_of(tmp_path, 2), elsewhere)):
        for message in pool.run(said_by, world_size, str(tmp_path / "c"), parts, other):
            assert "made after 1 steps of an epoch with 3 steps, 5 parts, 2 ranks, but this run has" in message


@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
def test_a_run_resumed_in_the_middle_of_an_epoch_draws_the_batches_that_are_left(
    pool: RankPool, tmp_path: Path
) -> None:
    counts = np.bincount(owners(4)[runs.graph().train_mask.numpy()])
    job = {"num_parts": 4, "hops": 1, "batches": NeighborBatches([4, 4], 8), **MIDDLE, "options": {"max_epochs": 1}}
    store = store_of(tmp_path, 4)
    whole = pool.run(train, 2, str(tmp_path / "a"), store, job)
    resumed = {**job, "resume": str(tmp_path / "a" / "step=4.ckpt")}
    for rank, ours in enumerate(pool.run(train, 2, str(tmp_path / "b"), store, resumed)):
        sizes = [min(8, count - made) for count in counts[rank::2] for made in range(0, count, 8)]
        assert len(sizes) > 4 > -(-counts[rank] // 8), "the second part is begun"
        assert ours["trained_on"] == [whole[rank]["trained_on"][0][sum(sizes[:4]) :]]


# -- evaluation --------------------------------------------------------------------------------------------------------
