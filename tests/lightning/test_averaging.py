"""Models of parts, averaged: against the same in plain torch, whatever the number of ranks and wherever one looks."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import Backend, ReplicaBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.lightning import (
    ExchangeMonitor,
    LinkPredictor,
    ModelAveragingStrategy,
    PredictionWriter,
    averaging,
    averaging_checks,
)
from pygdist.lightning.parts import PartBatch
from pygdist.native import load
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs

State = dict[str, Tensor]


def _model(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "gat":
        return GAT(12, 8, num_layers=2, out_channels=4, heads=2)
    return GCN(12, 8, num_layers=2, out_channels=4, norm="batch_norm" if name == "norm" else None)


def _optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9 if name == "momentum" else 0.0)


class Classifier(NodeClassifier):
    """With another optimiser, and a note of which nodes were trained on."""

    def __init__(self, model: nn.Module, *, optimizer: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.kind = optimizer
        self.trained_on: list[list[int]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.kind, self.parameters())

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.trained_on.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trained_on:  # no epoch starts where a run goes on in the middle of one
            self.trained_on.append([])
        shard = batch.shard if isinstance(batch, PartBatch) else batch
        sample = getattr(batch, "sample", None)
        if sample is not None:
            self.trained_on[-1] += shard.surroundings.n_id[sample.n_id[sample.train_mask]].tolist()
        elif shard is not None:
            self.trained_on[-1] += shard.owned_id[shard.train_mask & (shard.y >= 0)].tolist()
        return super().training_step(batch, batch_idx)


def _owners(num_parts: int, kind: str = "hash") -> np.ndarray:
    """The part of each node; ``uneven``: one has ten times another's training nodes, the last has none."""
    data, number = runs.graph(), np.arange(160)
    owner = np.random.default_rng(2).permutation(number) % num_parts
    if kind == "uneven":
        train = data.train_mask.numpy()
        of_train = np.cumsum(train) - 1
        owner = np.where(train, np.where(of_train % 14 < num_parts - 2, of_train % 14 + 1, 0), owner)
    return owner


def _store(folder: Path, num_parts: int, kind: str = "hash", *, num_hops: int = 2) -> str:
    place = folder / f"{kind}-{num_parts}"
    if not place.exists():
        write_store(
            runs.graph(), _owners(num_parts, kind), place, num_parts=num_parts, method=kind, arguments={}, notes=[],
            num_hops=num_hops, placement="replicas",
        )  # fmt: skip
    return str(place)


def _train(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> dict[str, Any]:
    """One run; ``job`` says what is not as usual."""
    history = runs.History()
    backend: Backend | str = job.get("backend") or ReplicaBackend(hops=job.get("hops", 2))
    classifier = Classifier(_model(job.get("net", "gcn")), optimizer=job.get("optimizer", "sgd"), backend=backend)
    data = GraphDataModule(store=store, num_parts=job.get("num_parts"), batches=job.get("batches"))
    callbacks = [*job.get("callbacks", []), history]
    if job.get("keep"):
        when = job["keep"] if isinstance(job["keep"], dict) else {"filename": "{epoch}"}
        callbacks.append(ModelCheckpoint(dirpath=folder, save_top_k=-1, **when))
    averaging = job.get("averaging", {})
    settings = {"callbacks": callbacks, "enable_checkpointing": bool(job.get("keep")), "num_sanity_val_steps": 0}
    if averaging is not None:
        settings["strategy"] = ModelAveragingStrategy(check_order=True, **averaging)
    trainer = runs.trainer(rank, world_size, folder, **settings, **job.get("options", {}))
    trainer.fit(classifier, datamodule=data, ckpt_path=job.get("resume"))
    return {
        "history": history.epochs,
        "state": {name: value.clone() for name, value in classifier.model.state_dict().items()},
        "trained_on": classifier.trained_on,
        "epochs": trainer.current_epoch,
    }


# -- in plain torch ----------------------------------------------------------------------------------------------------


def _loss(net: nn.Module, data: Data, mask: Tensor) -> Tensor:
    out = net(data.x, data.edge_index, data.edge_weight)
    return functional.cross_entropy(out[mask], data.y[mask])


def _mean(values: list[Tensor], shares: list[float]) -> Tensor:
    return sum(share * value for share, value in zip(shares, values, strict=True))  # type: ignore[return-value]


@cache
def _simulated(
    num_parts: int, kind: str, optimizer: str, epochs: int, sync_every: int, policy: str = "local"
) -> tuple[list[float], list[float], list[State]]:
    """One model for each part, all on the whole graph, which a part sees as far as a model does.

    Returns:
        By epoch: the loss in training, the validation loss of the average, and the average.
    """
    data, owner = runs.graph(), torch.from_numpy(_owners(num_parts, kind))
    masks = [data.train_mask & (owner == part) for part in range(num_parts)]
    masks = [mask for mask in masks if mask.any()]
    shares = [int(mask.sum()) / int(data.train_mask.sum()) for mask in masks]
    nets = [_model("gcn").double() for _ in masks]
    optimizers = [_optimizer(optimizer, net.parameters()) for net in nets]
    losses, val_losses, averages = [], [], []
    for epoch in range(1, epochs + 1):
        total = 0.0
        for net, stepper, mask, share in zip(nets, optimizers, masks, shares, strict=True):
            loss = _loss(net, data, mask)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            total += share * float(loss.detach())
        states = [net.state_dict() for net in nets]
        average = {name: _mean([state[name] for state in states], shares) for name in states[0]}
        if epoch % sync_every == 0:
            for net in nets:
                net.load_state_dict(average)
            if policy == "reset":
                optimizers = [_optimizer(optimizer, net.parameters()) for net in nets]
            elif policy == "average":
                for parameters in zip(*(net.parameters() for net in nets), strict=True):
                    kept = [stepper.state[one] for stepper, one in zip(optimizers, parameters, strict=True)]
                    for name in kept[0]:
                        mean = _mean([one[name] for one in kept], shares)
                        for one in kept:
                            one[name] = mean.clone()
        averaged = _model("gcn").double()
        averaged.load_state_dict(average)
        with torch.no_grad():
            val_losses.append(float(_loss(averaged, data, data.val_mask)))
        losses.append(total)
        averages.append(average)
    return losses, val_losses, averages


def _assert_same(ours: State, theirs: State, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name].double(), value.double(), rtol=0, atol=tolerance, msg=lambda said, of=name: f"{of}: {said}"
        )


def _without_noise(state: State) -> State:
    """A norm cancels the bias in front of it, whose gradient is rounding, which Adam scales up to steps."""
    return {name: value for name, value in state.items() if name not in ("convs.0.bias", "norms.0.module.running_mean")}


def _exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("kind", ["hash", "uneven"])
def test_averages_after_every_step_are_gradient_averaging(kind: str, pool: RankPool, tmp_path: Path) -> None:
    data, net = runs.graph(), _model("gcn").double()
    stepper = _optimizer("sgd", net.parameters())
    for _ in range(6):
        loss = _loss(net, data, data.train_mask)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    store, options = _store(tmp_path, 3, kind), {"max_epochs": 6}
    by_gradients = {"backend": "comm", "averaging": None, "options": options}
    reference = pool.run(_train, 3, str(tmp_path), store, by_gradients)[0]
    _assert_same(reference["state"], net.state_dict(), 1e-10)
    averaging = {"sync_every": 1, "sync_unit": "step"}
    for ours in pool.run(_train, 3, str(tmp_path), store, {"averaging": averaging, "options": options}):
        _assert_same(ours["state"], net.state_dict(), 1e-10)
        _assert_same(ours["state"], reference["state"], 1e-10)
        for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
            wanted = [epoch[name] for epoch in reference["history"]]
            assert [epoch[name] for epoch in ours["history"]] == pytest.approx(wanted, rel=1e-6), name


RUNS = [
    # ranks, parts, kind, optimiser, epochs, averaged every, policy
    (1, 3, "hash", "sgd", 3, 1, "local"),
    _exhaustive(2, 3, "hash", "sgd", 7, 3, "local"),
    (3, 3, "uneven", "sgd", 4, 3, "local"),
    _exhaustive(2, 4, "uneven", "momentum", 5, 2, "local"),
    (2, 4, "uneven", "momentum", 5, 2, "average"),
    (2, 4, "uneven", "momentum", 5, 2, "reset"),
    (2, 3, "hash", "adam", 7, 3, "local"),
    (2, 3, "hash", "adam", 7, 3, "average"),
    (2, 3, "hash", "adam", 7, 3, "reset"),
    _exhaustive(3, 3, "hash", "adam", 7, 3, "average"),
    _exhaustive(1, 3, "uneven", "adam", 7, 3, "average"),
]


@pytest.mark.parametrize(("ranks", "parts", "kind", "optimizer", "epochs", "every", "policy"), RUNS)
def test_a_run_is_that_of_plain_torch(
    ranks: int,
    parts: int,
    kind: str,
    optimizer: str,
    epochs: int,
    every: int,
    policy: str,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    """Also between two averages, where validation and checkpoints look at one that nobody trains on."""
    losses, val_losses, averages = _simulated(parts, kind, optimizer, epochs, every, policy)
    job = {
        "num_parts": parts,
        "optimizer": optimizer,
        "averaging": {"sync_every": every, "optimizer_state": policy},
        "keep": True,
        "options": {"max_epochs": epochs},
    }
    tolerance = 1e-9 if optimizer == "adam" else 1e-10
    for ours in pool.run(_train, ranks, str(tmp_path / "run"), _store(tmp_path, parts, kind), job):
        assert [epoch["train_loss"] for epoch in ours["history"]] == pytest.approx(losses, rel=1e-6)
        assert [epoch["val_loss"] for epoch in ours["history"]] == pytest.approx(val_losses, rel=1e-6)
        _assert_same(ours["state"], averages[-1], tolerance)
    for epoch, average in enumerate(averages):
        saved = torch.load(tmp_path / "run" / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
        _assert_same({name.removeprefix("model."): value for name, value in saved.items()}, average, tolerance)


def test_policies_differ() -> None:
    """So the runs above can fail."""
    finals = [_simulated(3, "hash", "adam", 7, 3, policy)[2][-1] for policy in ("local", "average", "reset")]
    finals.append(_simulated(3, "hash", "adam", 7, 1, "local")[2][-1])
    for number, one in enumerate(finals):
        for other in finals[:number]:
            assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-6


@pytest.mark.parametrize(
    ("net", "every", "unit"),
    [
        ("gcn", 3, "step"),
        ("norm", 3, "epoch"),
        _exhaustive("gcn", 3, "epoch"),
        _exhaustive("norm", 1, "epoch"),
        _exhaustive("norm", 1, "step"),
        _exhaustive("norm", 3, "step"),
    ],
)
def test_parts_on_fewer_ranks_are_parts_on_ranks(
    net: str, every: int, unit: str, pool: RankPool, tmp_path: Path
) -> None:
    job = {
        "num_parts": 4,
        "net": net,
        "hops": 1,
        "optimizer": "adam",
        "averaging": {"sync_every": every, "sync_unit": unit},
        "options": {"max_epochs": 5},
    }
    store = _store(tmp_path, 4)
    wanted = pool.run(_train, 4, str(tmp_path), store, job)[0]
    for world_size in (1, 2, 3):
        for ours in pool.run(_train, world_size, str(tmp_path), store, job):
            _assert_same(_without_noise(ours["state"]), _without_noise(wanted["state"]), 1e-9)
            for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
                expected = [epoch[name] for epoch in wanted["history"]]
                assert [epoch[name] for epoch in ours["history"]] == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("world_size", [_exhaustive(1), 2, 4])
def test_uneven_parts_train_on_every_node_in_every_epoch(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    data, owner = runs.graph(), _owners(4, "uneven")
    counts = np.bincount(owner[data.train_mask.numpy()], minlength=4)
    assert counts[0] >= 10 * counts[1] > 0 == counts[3]
    job = {"num_parts": 4, "averaging": {"sync_every": 2}, "options": {"max_epochs": 5}}
    answers = pool.run(_train, world_size, str(tmp_path), _store(tmp_path, 4, "uneven"), job)
    for epoch in range(5):
        seen = sorted(node for ours in answers for node in ours["trained_on"][epoch])
        assert seen == data.train_mask.nonzero().squeeze(1).tolist()
    assert {ours["epochs"] for ours in answers} == {5}


@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize("world_size", [2, _exhaustive(4)])
@pytest.mark.parametrize(
    "averaging",
    [{"sync_every": 2}, _exhaustive({"sync_every": 3, "sync_unit": "step"}), None],
    ids=["epoch", "step", "ddp"],
)
def test_ranks_may_have_different_numbers_of_mini_batches(
    averaging: dict[str, Any] | None, world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    num_parts = world_size if averaging is None or "sync_unit" in averaging else 4
    owner = _owners(4, "uneven") if num_parts == 4 else _owners(3, "uneven") % 2
    store = tmp_path / "parts"
    write_store(
        runs.graph(), owner, store, num_parts=num_parts, method="given", arguments={}, notes=[], placement="replicas"
    )
    job = {
        "num_parts": num_parts, "averaging": averaging, "options": {"max_epochs": 3}, "hops": 1,
        "batches": NeighborBatches([4, 4], 8),
    }  # fmt: skip
    answers = pool.run(_train, world_size, str(tmp_path), str(store), job)
    wanted = runs.graph().train_mask.nonzero().squeeze(1).tolist()
    for epoch in range(3):
        assert sorted(node for ours in answers for node in ours["trained_on"][epoch]) == wanted
    steps = [sum(len(epoch) for epoch in ours["trained_on"]) for ours in answers]
    assert max(steps) > 2 * min(steps), "ranks have different numbers of nodes"
    for ours in answers:
        _assert_same(ours["state"], answers[0]["state"], 1e-12)
        assert ours["history"][-1]["train_loss"] == answers[0]["history"][-1]["train_loss"]


# -- bytes -------------------------------------------------------------------------------------------------------------


def _sent(rank: int, world_size: int, folder: str, num_nodes: int, num_parts: int, every: int, options: Any) -> Any:
    history, net = runs.History(), _model("norm")
    data = GraphDataModule(
        "sbm", {"num_nodes": num_nodes, "num_features": 12, "num_classes": 4}, num_parts=num_parts, cache_dir=folder
    )
    callbacks = [ExchangeMonitor(), history, *options.pop("callbacks", ())]
    trainer = runs.trainer(
        rank, world_size, folder, callbacks=callbacks, precision="32-true", max_epochs=10,
        strategy=ModelAveragingStrategy(sync_every=every), num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(NodeClassifier(net, backend="replica"), datamodule=data)
    held = [*net.parameters(), *net.buffers()]
    return sum(value.numel() * value.element_size() for value in held), history.epochs


@pytest.mark.parametrize("every", [1, 5])
def test_bytes_are_those_of_the_model_whatever_the_graph(every: int, pool: RankPool, tmp_path: Path) -> None:
    found = []
    for num_nodes, num_parts in ((60, 3), (400, 5)):
        # of validation, which is of the whole graph, the rows travel after the epoch's training
        for options in ({"limit_val_batches": 0}, *({"check_val_every_n_epoch": epochs} for epochs in {1, every})):
            (held, history), *_ = pool.run(_sent, 3, str(tmp_path), num_nodes, num_parts, every, options)
            model = 2 * 2 / 3 * held
            averaged = [epoch % every == 0 for epoch in range(1, 11)]
            for name in ("sent_bytes_min", "sent_bytes_max"):
                assert [epoch[name] for epoch in history] == pytest.approx([model * on for on in averaged], abs=4)
            # validated between two averages
            unused = [model * (not on and options.get("check_val_every_n_epoch") == 1) for on in averaged]
            assert [epoch["unused_model_bytes"] for epoch in history] == pytest.approx(unused, abs=4)
            assert all("gradient_bytes" not in epoch for epoch in history)
            found.append([epoch["sent_bytes_total"] for epoch in history])
    assert all(one == found[0] for one in found)


def test_models_that_are_only_saved_are_counted_and_not_averaged_twice(pool: RankPool, tmp_path: Path) -> None:
    saved = [ModelCheckpoint(dirpath=str(tmp_path), save_top_k=-1, save_on_train_epoch_end=True)]
    for validated in (False, True):
        options = {"callbacks": saved, "limit_val_batches": float(validated), "enable_checkpointing": True}
        (held, history), *_ = pool.run(_sent, 2, str(tmp_path), 60, 2, 5, options)
        model = 2 * 1 / 2 * held
        # a checkpoint comes when the epoch is over, and takes what was made for the validation
        unused = [model * (epoch % 5 != 0 if validated else epoch % 5 != 1) for epoch in range(1, 11)]
        unused[0] *= validated
        assert [epoch["unused_model_bytes"] for epoch in history] == pytest.approx(unused, abs=4)


def _counted(rank: int, world_size: int, folder: str, store: str, saves: bool) -> tuple[list[int], Any]:
    """What this rank sends for checkpoints, and what is logged."""
    sent: list[int] = []
    send_to = Communicator.send_to

    def counting(communicator: Communicator, to: int, tensors: Any, *, label: str) -> None:
        sent.append(sum(tensor.nbytes for tensor in tensors))
        send_to(communicator, to, tensors, label=label)

    job = {"num_parts": 4, "optimizer": "adam", "averaging": {"sync_every": 2}, "callbacks": [ExchangeMonitor()]}
    with mock.patch.object(Communicator, "send_to", counting):
        ours = _train(rank, world_size, folder, store, {**job, "keep": saves})
    return sent, ours["history"]


def test_bytes_of_checkpoints_are_counted_by_themselves(pool: RankPool, tmp_path: Path) -> None:
    (_, without), *_ = pool.run(_counted, 3, str(tmp_path / "a"), _store(tmp_path, 4), False)
    assert [epoch["checkpoint_bytes"] for epoch in without] == [0, 0, 0]
    (none, history), *others = pool.run(_counted, 3, str(tmp_path / "b"), _store(tmp_path, 4), True)
    assert none == []
    saved = [sum(at) for at in zip(*(sent for sent, _ in others), strict=True)]
    assert len(saved) == 3
    assert min(saved) > 2 * 2 * (12 * 8 + 8 + 8 * 4 + 4) * 8, "the moments of two parts"
    # a checkpoint comes when the epoch is over
    assert [epoch["checkpoint_bytes"] for epoch in history] == [0, *saved[:-1]]
    for name in ("sent_bytes_min", "sent_bytes_max", "sent_bytes_total"):
        assert [epoch[name] for epoch in history] == [epoch[name] for epoch in without]


# -- the end of a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, _exhaustive(3)])
def test_early_stopping_leaves_the_average(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    stop = EarlyStopping("val_loss", mode="min", patience=3, min_delta=10.0)  # no epoch improves by so much
    job = {
        "num_parts": 3,
        "averaging": {"sync_every": 3},
        "callbacks": [stop],
        "options": {"max_epochs": 50},
    }
    answers = pool.run(_train, world_size, str(tmp_path), _store(tmp_path, 3), job)
    assert {ours["epochs"] for ours in answers} == {4}
    for ours in answers:
        _assert_same(ours["state"], _simulated(3, "hash", "sgd", 4, 3)[2][-1], 1e-10)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["local", _exhaustive("average")])
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
    store = _store(tmp_path, 4)
    whole = pool.run(_train, 2, str(tmp_path / "whole"), store, job)[0]
    resumed = {**job, "resume": str(tmp_path / "whole" / "epoch=3.ckpt")}
    for world_size in (2, 1, 4):
        for ours in pool.run(_train, world_size, str(tmp_path / str(world_size)), store, resumed):
            assert len(ours["history"]) == 4, "it goes on at the epoch where it stopped"
            if world_size == 2:
                _assert_same(ours["state"], whole["state"], 1e-12)
            _assert_same(_without_noise(ours["state"]), _without_noise(whole["state"]), 1e-9)


def test_optimisers_that_keep_lists_of_tensors_go_on_too(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 4, "hops": 1, "optimizer": "lbfgs", "keep": True, "options": {"max_epochs": 3}}
    store = _store(tmp_path, 4)
    whole = pool.run(_train, 2, str(tmp_path / "whole"), store, job)[0]
    resumed = {**job, "resume": str(tmp_path / "whole" / "epoch=1.ckpt")}
    for ours in pool.run(_train, 2, str(tmp_path / "again"), store, resumed):
        _assert_same(ours["state"], whole["state"], 1e-12)


def _save_after(rank: int, world_size: int, folder: str, store: str, then: str) -> list[str]:
    """Save when a fit has ended, or failed; what is said of it."""
    said: list[str] = []
    classifier = Classifier(_model("gcn"), optimizer="adam", backend=ReplicaBackend(hops=2))
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
    said = pool.run(_save_after, world_size, str(tmp_path), _store(tmp_path, 4), then)
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
    for said in pool.run(_save_after, 2, str(tmp_path), _store(tmp_path, 4), "failed"):
        assert [text.partition(":")[0] for text in said] == ["the run has failed"]
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["model_averaging"]
    assert (saved["num_parts"], set(saved["states"])) == (4, {"0", "2"})
    job = {"optimizer": "adam", "options": {"max_epochs": 3}, "resume": str(tmp_path / "after.ckpt")}
    for said in pool.run(_warned, 2, str(tmp_path / "again"), _store(tmp_path, 4), job):
        assert any("lacks the optimisers' state of the parts 1, 3" in text for text in said)


def _warned(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> list[str]:
    said: list[str] = []
    with mock.patch.object(averaging, "rank_zero_warn", said.append):
        _train(rank, world_size, folder, store, job)
    return said


def test_a_checkpoint_goes_on_with_other_parts_and_strategies(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 4, "optimizer": "adam", "averaging": {"sync_every": 2}, "keep": True}
    first = pool.run(_train, 2, str(tmp_path / "a"), _store(tmp_path, 4), {**job, "options": {"max_epochs": 4}})[0]
    last, longer = str(tmp_path / "a" / "epoch=3.ckpt"), {"max_epochs": 8}
    others = [
        (2, 3, {**job, "num_parts": 3}),
        (3, 3, {**job, "num_parts": 3, "averaging": {"optimizer_state": "average"}}),
        (2, 2, {**job, "num_parts": None, "averaging": None, "backend": "comm"}),
    ]
    for number, (world_size, num_parts, other) in enumerate(others):
        other = {**other, "options": longer, "resume": last}
        for ours in pool.run(_train, world_size, str(tmp_path / f"b{number}"), _store(tmp_path, num_parts), other):
            assert len(ours["history"]) == 4
            assert ours["history"][-1]["train_loss"] < first["history"][-1]["train_loss"]
    # and from gradients averaged to models averaged
    other = {**job, "options": {"max_epochs": 12}, "resume": str(tmp_path / "b2" / "epoch=7.ckpt")}
    for ours in pool.run(_train, 2, str(tmp_path / "c"), _store(tmp_path, 4), other):
        assert len(ours["history"]) == 4


def test_a_run_resumed_between_two_averages_begins_with_that_average(pool: RankPool, tmp_path: Path) -> None:
    job = {"num_parts": 3, "averaging": {"sync_every": 3}, "keep": True}
    store = _store(tmp_path, 3)
    pool.run(_train, 2, str(tmp_path / "a"), store, {**job, "options": {"max_epochs": 2}})
    pool.run(_train, 2, str(tmp_path / "b"), store, {**job, "options": {"max_epochs": 6}})
    saved = [torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True)["state_dict"] for name in "ab"]
    _assert_same(saved[0], saved[1], 1e-12)


MIDDLE = {"keep": {"filename": "{step}", "every_n_train_steps": 4}, "options": {"max_epochs": 2}}


def test_a_run_resumed_in_the_middle_of_an_epoch_trains_the_parts_that_are_left(pool: RankPool, tmp_path: Path) -> None:
    """Of five parts on two ranks an epoch has three steps, so one step of the second has been made."""
    data, owner, store = runs.graph(), torch.from_numpy(_owners(5)), _store(tmp_path, 5)
    job: dict[str, Any] = {"num_parts": 5, **MIDDLE}
    pool.run(_train, 2, str(tmp_path / "a"), store, job)
    place = str(tmp_path / "a" / "step=4.ckpt")
    answers = pool.run(_train, 2, str(tmp_path / "b"), store, {**job, "resume": place})
    left = data.train_mask & (owner >= 2)
    assert sorted(node for ours in answers for node in ours["trained_on"][0]) == left.nonzero().squeeze(1).tolist()
    net = _model("gcn").double()
    saved = torch.load(place, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    loss = _loss(net, data, left) * int(left.sum()) / int(data.train_mask.sum())  # the others stay where they are
    loss.backward()
    _optimizer("sgd", net.parameters()).step()
    for ours in answers:
        _assert_same(ours["state"], net.state_dict(), 1e-10)
    elsewhere = {"num_parts": 2, "averaging": None, "backend": "comm", "resume": place}
    for world_size, parts, other in ((1, store, {**job, "resume": place}), (2, _store(tmp_path, 2), elsewhere)):
        for message in pool.run(_said, world_size, str(tmp_path / "c"), parts, other):
            assert "made after 1 steps of an epoch with 3 steps, 5 parts, 2 ranks, and here are" in message


@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
def test_a_run_resumed_in_the_middle_of_an_epoch_draws_the_batches_that_are_left(
    pool: RankPool, tmp_path: Path
) -> None:
    counts = np.bincount(_owners(4)[runs.graph().train_mask.numpy()])
    job = {"num_parts": 4, "hops": 1, "batches": NeighborBatches([4, 4], 8), **MIDDLE, "options": {"max_epochs": 1}}
    store = _store(tmp_path, 4)
    whole = pool.run(_train, 2, str(tmp_path / "a"), store, job)
    resumed = {**job, "resume": str(tmp_path / "a" / "step=4.ckpt")}
    for rank, ours in enumerate(pool.run(_train, 2, str(tmp_path / "b"), store, resumed)):
        sizes = [min(8, count - made) for count in counts[rank::2] for made in range(0, count, 8)]
        assert len(sizes) > 4 > -(-counts[rank] // 8), "the second part is begun"
        assert ours["trained_on"] == [whole[rank]["trained_on"][0][sum(sizes[:4]) :]]


# -- evaluation --------------------------------------------------------------------------------------------------------


def _with_statistics(name: str) -> nn.Module:
    """A model whose norms, if any, have seen something."""
    net = _model(name)
    generator = torch.Generator().manual_seed(1)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return net


def _evaluate(
    rank: int, world_size: int, folder: str, store: str, name: str, exact: bool
) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
    net = _with_statistics(name)
    module = NodeClassifier(net, backend=ReplicaBackend(hops=1), exact_evaluation=exact)
    data = GraphDataModule(store=store)
    callbacks = [PredictionWriter(Path(folder) / "logits.npy", "logits")]
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(check_order=True), callbacks=callbacks
    )
    found = dict(trainer.validate(module, datamodule=data, verbose=False)[0])
    found |= trainer.test(module, datamodule=data, verbose=False)[0]
    predicted = trainer.predict(module, datamodule=data)
    assert type(module.model) in (GCN, GAT)
    return found, predicted


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("gcn", 2),
        ("gat", 1),
        ("norm", 2),
        ("norm", 4),
        *(_exhaustive(*case) for case in (("gcn", 1), ("gcn", 4), ("gat", 2), ("gat", 4), ("norm", 1))),
    ],
)
def test_evaluation_is_of_the_whole_graph(name: str, world_size: int, pool: RankPool, tmp_path: Path) -> None:
    data, net = runs.graph(), _with_statistics(name).double().eval()
    weight = {} if name == "gat" else {"edge_weight": data.edge_weight}
    with torch.no_grad():
        out = net(data.x, data.edge_index, **weight)
    wanted = {}
    for stage in ("val", "test"):
        mask = data[f"{stage}_mask"]
        wanted[f"{stage}_loss"] = float(functional.cross_entropy(out[mask], data.y[mask]))
        wanted[f"{stage}_acc"] = float((out[mask].argmax(1) == data.y[mask]).double().mean())
    store = _store(tmp_path, 4, num_hops=1)
    answers = pool.run(_evaluate, world_size, str(tmp_path / "exact"), store, name, True)
    for found, _ in answers:
        assert found == pytest.approx(wanted, rel=1e-6)
    pairs = [pair for _, predicted in answers for pair in predicted]
    n_id, rows = (torch.cat(values) for values in zip(*pairs, strict=True))
    assert sorted(n_id.tolist()) == list(range(160))
    torch.testing.assert_close(rows, out[n_id], rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.load(tmp_path / "exact" / "logits.npy"), out.numpy(), rtol=0, atol=1e-10)
    assert not list((tmp_path / "hash-4").glob("pygdist-evaluation-*")), "what lies between is removed"
    if world_size == 2:
        pool.run(_evaluate, world_size, str(tmp_path / "parts"), store, name, False)
        assert np.abs(np.load(tmp_path / "parts" / "logits.npy") - out.numpy()).max() > 1e-3


# -- refusals ----------------------------------------------------------------------------------------------------------


def _said(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        _train(rank, world_size, folder, store, job)
    return str(error.value)


REFUSED: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "rows-of-other-models": (2, {"backend": "comm"}, ["backend 'comm' lets a part read rows", "use backend replica"]),
    "fewer-parts-than-ranks": (1, {}, ["has 1 parts", "2 ranks"]),
    # one rank has two parts, the other one
    "gradients-of-parts-in-turn": (3, {"averaging": None}, ["3 parts on 2 ranks", "use strategy 'model_averaging'"]),
    "statistics-of-parts-with-gradients": (
        2,
        {"averaging": None, "net": "norm"},
        ["BatchNorm1d: with backend replica a norm takes the statistics of a part", "use strategy model_averaging"],
    ),
    "batches-in-turn-by-steps": (
        3,
        {"averaging": {"sync_unit": "step"}, "batches": NeighborBatches([4, 4], 8)},
        ["sync_unit=step: 3 parts on 2 ranks", "average by epochs"],
    ),
    "parts-left-out": (
        4,
        {"options": {"limit_train_batches": 0.5}},
        ["limit_train_batches=0.5: 4 parts on 2 ranks", "in 2 steps of an epoch, and the first 1", "leave it out"],
    ),
    "parts-left-out-to-overfit": (4, {"options": {"overfit_batches": 1}}, ["overfit_batches=1: 4 parts on 2 ranks"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks(name: str, pool: RankPool, tmp_path: Path) -> None:
    num_parts, job, said = REFUSED[name]
    if "batches" in job and load() is None:
        pytest.skip("the sampler is in the native library")
    for message in pool.run(_said, 2, str(tmp_path), _store(tmp_path, num_parts), job):
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
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(_model("gcn").parameters(), lr=0.1))
    settings = {"check_val_every_n_epoch": 1, "enable_validation": True, "max_steps": -1, "fast_dev_run": False}
    trainer: Any = SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=True), callbacks=callbacks, world_size=world_size,
        checkpoint_callbacks=[one for one in callbacks if isinstance(one, ModelCheckpoint)],
        datamodule=SimpleNamespace(part_weights=[1] * num_parts), **{**settings, **options},
    )  # fmt: skip
    averaging_checks.check_run(trainer, world_size, [LRSchedulerConfig(scheduler, interval=interval)])
    averaging_checks.say_what_is_sent(trainer, sync_every, "epoch")


def test_what_is_sent_beside_the_averages_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(averaging_checks, "rank_zero_info", said.append)
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


@pytest.mark.parametrize("name", LIMITED)
def test_limits_that_leave_no_part_out_work(name: str, pool: RankPool, tmp_path: Path) -> None:
    num_parts, options, trained = LIMITED[name]
    mask, owner = runs.graph().train_mask.numpy(), _owners(num_parts)
    answers = pool.run(_train, 2, str(tmp_path), _store(tmp_path, num_parts), {"options": options})
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
    module = Manual(_model("gcn"), optimizer="sgd", backend="replica")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy())
    with pytest.raises(InputError) as error:
        trainer.fit(module, datamodule=GraphDataModule(store=store))
    return str(error.value)


def test_manual_optimisation_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_manual, 2, str(tmp_path), _store(tmp_path, 2)):
        assert "Manual steps its optimisers itself" in message


def _links(rank: int, world_size: int, folder: str, store: str) -> str:
    module = LinkPredictor(GCN(12, 8, num_layers=2), backend="replica")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy())
    with pytest.raises(InputError) as error:
        trainer.fit(module, datamodule=GraphDataModule(store=store, edge_split=(0.1, 0.1)))
    return str(error.value)


def test_links_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_links, 2, str(tmp_path), _store(tmp_path, 2)):
        assert "edge_split: backend 'replica' classifies nodes" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sync_every": 0}, "sync_every is 0, expected at least 1"),
        ({"sync_unit": "batch"}, "sync_unit is 'batch', expected epoch or step"),
        ({"optimizer_state": "keep"}, "optimizer_state is 'keep', expected local or average or reset"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ModelAveragingStrategy(**arguments)
