"""Models of parts, averaged: against the same in plain torch, whatever the number of ranks and wherever one looks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GAT, GCN

from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import ReplicaBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import write_store
from pygdist.lightning import (
    ExchangeMonitor,
    ModelAveragingStrategy,
    PredictionWriter,
)
from pygdist.lightning.part_models import PartModels
from pygdist.native import load
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs
from tests.lightning.averaged import (
    State,
    assert_same,
    exhaustive,
    loss_of,
    model,
    optimizer_of,
    owners,
    store_of,
    train,
    without_noise,
)


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
    data, owner = runs.graph(), torch.from_numpy(owners(num_parts, kind))
    masks = [data.train_mask & (owner == part) for part in range(num_parts)]
    masks = [mask for mask in masks if mask.any()]
    shares = [int(mask.sum()) / int(data.train_mask.sum()) for mask in masks]
    nets = [model("gcn").double() for _ in masks]
    optimizers = [optimizer_of(optimizer, net.parameters()) for net in nets]
    losses, val_losses, averages = [], [], []
    for epoch in range(1, epochs + 1):
        total = 0.0
        for net, stepper, mask, share in zip(nets, optimizers, masks, shares, strict=True):
            loss = loss_of(net, data, mask)
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
                optimizers = [optimizer_of(optimizer, net.parameters()) for net in nets]
            elif policy == "average":
                for parameters in zip(*(net.parameters() for net in nets), strict=True):
                    kept = [stepper.state[one] for stepper, one in zip(optimizers, parameters, strict=True)]
                    for name in kept[0]:
                        mean = _mean([one[name] for one in kept], shares)
                        for one in kept:
                            one[name] = mean.clone()
        averaged = model("gcn").double()
        averaged.load_state_dict(average)
        with torch.no_grad():
            val_losses.append(float(loss_of(averaged, data, data.val_mask)))
        losses.append(total)
        averages.append(average)
    return losses, val_losses, averages


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hash", "uneven"])
def test_averages_after_every_step_are_gradient_averaging(kind: str, pool: RankPool, tmp_path: Path) -> None:
    data, net = runs.graph(), model("gcn").double()
    stepper = optimizer_of("sgd", net.parameters())
    for _ in range(6):
        loss = loss_of(net, data, data.train_mask)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    store, options = store_of(tmp_path, 3, kind), {"max_epochs": 6}
    by_gradients = {"backend": "comm", "averaging": None, "options": options}
    reference = pool.run(train, 3, str(tmp_path), store, by_gradients)[0]
    assert_same(reference["state"], net.state_dict(), 1e-10)
    averaging = {"sync_every": 1, "sync_unit": "step"}
    for ours in pool.run(train, 3, str(tmp_path), store, {"averaging": averaging, "options": options}):
        assert_same(ours["state"], net.state_dict(), 1e-10)
        assert_same(ours["state"], reference["state"], 1e-10)
        for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
            wanted = [epoch[name] for epoch in reference["history"]]
            assert [epoch[name] for epoch in ours["history"]] == pytest.approx(wanted, rel=1e-6), name


RUNS = [
    # ranks, parts, kind, optimiser, epochs, averaged every, policy
    (1, 3, "hash", "sgd", 3, 1, "local"),
    exhaustive(2, 3, "hash", "sgd", 7, 3, "local"),
    (3, 3, "uneven", "sgd", 4, 3, "local"),
    exhaustive(2, 4, "uneven", "momentum", 5, 2, "local"),
    (2, 4, "uneven", "momentum", 5, 2, "average"),
    (2, 4, "uneven", "momentum", 5, 2, "reset"),
    (2, 3, "hash", "adam", 7, 3, "local"),
    (2, 3, "hash", "adam", 7, 3, "average"),
    (2, 3, "hash", "adam", 7, 3, "reset"),
    exhaustive(3, 3, "hash", "adam", 7, 3, "average"),
    exhaustive(1, 3, "uneven", "adam", 7, 3, "average"),
]


@pytest.mark.slow
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
    for ours in pool.run(train, ranks, str(tmp_path / "run"), store_of(tmp_path, parts, kind), job):
        assert [epoch["train_loss"] for epoch in ours["history"]] == pytest.approx(losses, rel=1e-6)
        assert [epoch["val_loss"] for epoch in ours["history"]] == pytest.approx(val_losses, rel=1e-6)
        assert_same(ours["state"], averages[-1], tolerance)
    for epoch, average in enumerate(averages):
        saved = torch.load(tmp_path / "run" / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
        assert_same({name.removeprefix("model."): value for name, value in saved.items()}, average, tolerance)


def test_policies_differ() -> None:
    """So the runs above can fail."""
    finals = [_simulated(3, "hash", "adam", 7, 3, policy)[2][-1] for policy in ("local", "average", "reset")]
    finals.append(_simulated(3, "hash", "adam", 7, 1, "local")[2][-1])
    for number, one in enumerate(finals):
        for other in finals[:number]:
            assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "every", "unit"),
    [
        ("gcn", 3, "step"),
        ("norm", 3, "epoch"),
        exhaustive("gcn", 3, "epoch"),
        exhaustive("norm", 1, "epoch"),
        exhaustive("norm", 1, "step"),
        exhaustive("norm", 3, "step"),
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
    store = store_of(tmp_path, 4)
    wanted = pool.run(train, 4, str(tmp_path), store, job)[0]
    for world_size in (1, 2, 3):
        for ours in pool.run(train, world_size, str(tmp_path), store, job):
            assert_same(without_noise(ours["state"]), without_noise(wanted["state"]), 1e-9)
            for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
                expected = [epoch[name] for epoch in wanted["history"]]
                assert [epoch[name] for epoch in ours["history"]] == pytest.approx(expected, rel=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("batches", [None, NeighborBatches([4, 4], 8)], ids=["whole", "batches"])
def test_dropout_draws_by_part(batches: NeighborBatches | None, pool: RankPool, tmp_path: Path) -> None:
    if batches is not None and load() is None:
        pytest.skip("the sampler is in the native library")
    job = {"num_parts": 4, "net": "dropout", "hops": 1, "batches": batches, "averaging": {"sync_every": 2}}
    store = store_of(tmp_path, 4, num_hops=1)
    wanted, *others = pool.run(train, 4, str(tmp_path), store, job)
    for ours in [
        *others,
        *pool.run(train, 1, str(tmp_path), store, job),
        *pool.run(train, 3, str(tmp_path), store, job),
    ]:
        assert_same(ours["state"], wanted["state"], 1e-10)
    without = pool.run(train, 1, str(tmp_path), store, {**job, "net": "gcn"})[0]
    assert float((without["state"]["convs.0.lin.weight"] - wanted["state"]["convs.0.lin.weight"]).abs().max()) > 1e-4


class _Seeds(Callback):
    """What dropout draws from in each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(torch.initial_seed())


def _seeds(rank: int, world_size: int, folder: str, store: str) -> list[int]:
    seeds = _Seeds()
    job = {"num_parts": 4, "averaging": {}, "callbacks": [seeds], "options": {"max_epochs": 3}}
    train(rank, world_size, folder, store, job)
    return seeds.found


def test_each_part_draws_its_own_dropout_in_each_epoch(pool: RankPool, tmp_path: Path) -> None:
    seeds = [seed for found in pool.run(_seeds, 2, str(tmp_path), store_of(tmp_path, 4)) for seed in found]
    assert len(seeds) == len(set(seeds)) == 4 * 3


class _AtTheEnd(Callback):
    """What other callbacks find in the module when training ends."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found = {name: value.clone() for name, value in pl_module.model.state_dict().items()}


def _at_the_end(rank: int, world_size: int, folder: str, store: str, options: dict[str, Any]) -> bool:
    seen = _AtTheEnd()
    job = {"num_parts": 3, "averaging": {"sync_every": 5}, "callbacks": [seen], "options": options}
    ours = train(rank, world_size, folder, store, job)
    assert_same(seen.found, ours["state"], 0)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_callbacks_find_the_average_when_training_ends(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    options = {"max_epochs": 20, "max_steps": 3 * 7 if world_size == 1 else 7}
    assert all(pool.run(_at_the_end, world_size, str(tmp_path), store_of(tmp_path, 3), options))


def test_buffers_weigh_as_much_as_parameters(pool: RankPool, tmp_path: Path) -> None:
    store, train_mask = store_of(tmp_path, 4, "uneven"), runs.graph().train_mask
    rows = np.bincount(owners(4, "uneven"))
    labelled = np.bincount(owners(4, "uneven")[train_mask.numpy()], minlength=4)
    expected = float((rows * labelled).sum() / labelled.sum())
    assert abs(expected - rows.mean()) > 1
    job = {"num_parts": 4, "net": "marked", "hops": 0, "options": {"max_epochs": 1}}
    for world_size in (2, 4):
        for ours in pool.run(train, world_size, str(tmp_path), store, job):
            assert float(ours["state"]["rows"]) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [exhaustive(1), 2, 4])
def test_uneven_parts_train_on_every_node_in_every_epoch(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    data, owner = runs.graph(), owners(4, "uneven")
    counts = np.bincount(owner[data.train_mask.numpy()], minlength=4)
    assert counts[0] >= 10 * counts[1] > 0 == counts[3]
    job = {"num_parts": 4, "averaging": {"sync_every": 2}, "options": {"max_epochs": 5}}
    answers = pool.run(train, world_size, str(tmp_path), store_of(tmp_path, 4, "uneven"), job)
    for epoch in range(5):
        seen = sorted(node for ours in answers for node in ours["trained_on"][epoch])
        assert seen == data.train_mask.nonzero().squeeze(1).tolist()
    assert {ours["epochs"] for ours in answers} == {5}


@pytest.mark.slow
@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize("world_size", [2, exhaustive(4)])
@pytest.mark.parametrize(
    "averaging",
    [{"sync_every": 2}, {"sync_every": 3, "sync_unit": "step"}, None],
    ids=["epoch", "step", "ddp"],
)
def test_ranks_may_have_different_numbers_of_mini_batches(
    averaging: dict[str, Any] | None, world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    num_parts = world_size if averaging is None or "sync_unit" in averaging else 4
    owner = owners(4, "uneven") if num_parts == 4 else owners(3, "uneven") % 2
    store = tmp_path / "parts"
    write_store(
        runs.graph(), owner, store, num_parts=num_parts, method="given", arguments={}, notes=[], placement="replicas"
    )
    job = {
        "num_parts": num_parts, "averaging": averaging, "options": {"max_epochs": 3}, "hops": 1,
        "batches": NeighborBatches([4, 4], 8),
    }  # fmt: skip
    answers = pool.run(train, world_size, str(tmp_path), str(store), job)
    wanted = runs.graph().train_mask.nonzero().squeeze(1).tolist()
    for epoch in range(3):
        assert sorted(node for ours in answers for node in ours["trained_on"][epoch]) == wanted
    steps = [sum(len(epoch) for epoch in ours["trained_on"]) for ours in answers]
    assert max(steps) > 2 * min(steps), "ranks have different numbers of nodes"
    for ours in answers:
        assert_same(ours["state"], answers[0]["state"], 1e-12)
        assert ours["history"][-1]["train_loss"] == answers[0]["history"][-1]["train_loss"]


# -- bytes -------------------------------------------------------------------------------------------------------------


def _sent(rank: int, world_size: int, folder: str, num_nodes: int, num_parts: int, every: int, options: Any) -> Any:
    history, net = runs.History(), model("norm")
    data = GraphDataModule(
        "sbm", {"num_nodes": num_nodes, "num_features": 12, "num_classes": 4}, num_parts=num_parts, cache_dir=folder
    )
    callbacks = [ExchangeMonitor(), history, *options.pop("callbacks", ())]
    trainer = runs.trainer(
        rank, world_size, folder, callbacks=callbacks, precision="32-true", max_epochs=6,
        strategy=ModelAveragingStrategy(sync_every=every), num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(NodeClassifier(net, backend="replica", check=False), datamodule=data)
    held = [*net.parameters(), *net.buffers()]
    return sum(value.numel() * value.element_size() for value in held), history.epochs


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_bytes_are_those_of_the_model_whatever_the_graph(every: int, pool: RankPool, tmp_path: Path) -> None:
    found = []
    for num_nodes, num_parts in ((60, 3), (400, 5)):
        # of validation, which is of the whole graph, the rows travel after the epoch's training
        for options in ({"limit_val_batches": 0}, *({"check_val_every_n_epoch": epochs} for epochs in {1, every})):
            (held, history), *_ = pool.run(_sent, 3, str(tmp_path), num_nodes, num_parts, every, options)
            model = 2 * 2 / 3 * held
            averaged = [epoch % every == 0 for epoch in range(1, 7)]
            for name in ("sent_bytes_min", "sent_bytes_max"):
                assert [epoch[name] for epoch in history] == pytest.approx([model * on for on in averaged], abs=4)
            # validated between two averages
            unused = [model * (not on and options.get("check_val_every_n_epoch") == 1) for on in averaged]
            assert [epoch["unused_model_bytes"] for epoch in history] == pytest.approx(unused, abs=4)
            assert all("gradient_bytes" not in epoch for epoch in history)
            found.append([epoch["sent_bytes_total"] for epoch in history])
    assert all(one == found[0] for one in found)


@pytest.mark.slow
def test_models_that_are_only_saved_are_counted_and_not_averaged_twice(pool: RankPool, tmp_path: Path) -> None:
    saved = [ModelCheckpoint(dirpath=str(tmp_path), save_top_k=-1, save_on_train_epoch_end=True)]
    for validated in (False, True):
        options = {"callbacks": saved, "limit_val_batches": float(validated), "enable_checkpointing": True}
        (held, history), *_ = pool.run(_sent, 2, str(tmp_path), 60, 2, 3, options)
        model = 2 * 1 / 2 * held
        # a checkpoint comes when the epoch is over, and takes what was made for the validation
        unused = [model * (epoch % 3 != 0 if validated else epoch % 3 != 1) for epoch in range(1, 7)]
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
        ours = train(rank, world_size, folder, store, {**job, "keep": saves})
    return sent, ours["history"]


@pytest.mark.slow
def test_bytes_of_checkpoints_are_counted_by_themselves(pool: RankPool, tmp_path: Path) -> None:
    (_, without), *_ = pool.run(_counted, 3, str(tmp_path / "a"), store_of(tmp_path, 4), False)
    assert [epoch["checkpoint_bytes"] for epoch in without] == [0, 0, 0]
    (none, history), *others = pool.run(_counted, 3, str(tmp_path / "b"), store_of(tmp_path, 4), True)
    assert none == []
    saved = [sum(at) for at in zip(*(sent for sent, _ in others), strict=True)]
    assert len(saved) == 3
    assert min(saved) > 2 * 2 * (12 * 8 + 8 + 8 * 4 + 4) * 8, "the moments of two parts"
    # a checkpoint comes when the epoch is over
    assert [epoch["checkpoint_bytes"] for epoch in history] == [0, *saved[:-1]]
    for name in ("sent_bytes_min", "sent_bytes_max", "sent_bytes_total"):
        assert [epoch[name] for epoch in history] == [epoch[name] for epoch in without]


# -- the end of a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, exhaustive(3)])
def test_early_stopping_leaves_the_average(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    stop = EarlyStopping("val_loss", mode="min", patience=3, min_delta=10.0)  # no epoch improves by so much
    job = {
        "num_parts": 3,
        "averaging": {"sync_every": 3},
        "callbacks": [stop],
        "options": {"max_epochs": 50},
    }
    answers = pool.run(train, world_size, str(tmp_path), store_of(tmp_path, 3), job)
    assert {ours["epochs"] for ours in answers} == {4}
    for ours in answers:
        assert_same(ours["state"], _simulated(3, "hash", "sgd", 4, 3)[2][-1], 1e-10)


# -- resuming ----------------------------------------------------------------------------------------------------------


def _with_statistics(name: str) -> nn.Module:
    """A model whose norms, if any, have seen something."""
    net = model(name)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("gcn", 2),
        ("gat", 1),
        ("norm", 2),
        ("norm", 3),  # 4 parts: rank 0 has two, the others one
        ("norm", 4),
        *(exhaustive(*case) for case in (("gcn", 1), ("gcn", 4), ("gat", 2), ("gat", 4), ("norm", 1))),
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
    store = store_of(tmp_path, 4, num_hops=1)
    answers = pool.run(_evaluate, world_size, str(tmp_path / "exact"), store, name, True)
    for found, _ in answers:
        assert found == pytest.approx(wanted, rel=1e-6)
    pairs = [pair for _, predicted in answers for pair in predicted]
    n_id, rows = (torch.cat(values) for values in zip(*pairs, strict=True))
    assert sorted(n_id.tolist()) == list(range(160))
    torch.testing.assert_close(rows, out[n_id], rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.load(tmp_path / "exact" / "logits.npy"), out.numpy(), rtol=0, atol=1e-10)
    assert not list((tmp_path / "hash-4").glob("pygdist-*")), "what lies between is removed"
    if world_size == 2:
        pool.run(_evaluate, world_size, str(tmp_path / "parts"), store, name, False)
        assert np.abs(np.load(tmp_path / "parts" / "logits.npy") - out.numpy()).max() > 1e-3


def _some(rank: int, world_size: int, folder: str, store: str) -> bool:
    module = NodeClassifier(model("gcn"), backend=ReplicaBackend(hops=1))
    writer = PredictionWriter(Path(folder) / "some.npy")
    strategy = ModelAveragingStrategy()
    trainer = runs.trainer(rank, world_size, folder, strategy=strategy, callbacks=[writer], limit_predict_batches=1)
    with pytest.raises(InputError, match="of 160 nodes were predicted"):
        trainer.predict(module, datamodule=GraphDataModule(store=store))
    return True


def test_predictions_of_some_nodes_are_not_written(pool: RankPool, tmp_path: Path) -> None:
    store = store_of(tmp_path, 4, num_hops=1)
    assert pool.run(_some, 2, str(tmp_path / "out"), store) == [True, True]
    assert not list((tmp_path / "out").glob("*.npy*"))
    assert not list((tmp_path / "out").glob(".some*"))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_equal_models_in_half_precision_is_this_model(dtype: torch.dtype) -> None:
    module = nn.Linear(50, 50).to(dtype)
    models = PartModels(module, [], dict.fromkeys(range(7), 1 / 7), {part: [] for part in range(7)})
    mean = models.mean(Communicator(), "models")
    assert all(torch.equal(one, value) for one, value in zip(mean, module.parameters(), strict=True))
