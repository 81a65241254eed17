"""Training on N ranks is training on one: losses, metrics and parameters, whatever Lightning is asked to do besides."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.nn import functional
from torchmetrics.classification import MultilabelF1Score

from pygdist import InputError
from pygdist.testing import RankPool
from tests.lightning import runs


@cache
def _plain(epochs: int, clip: float | None = None) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Plain PyG and PyTorch, one process, no pygdist: losses, validation accuracies, parameters."""
    data, net = runs.graph(), runs.model().double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    losses, accuracies = [], []
    for _ in range(epochs):
        net.train()
        out = net(data.x, data.edge_index, data.edge_weight)
        loss = functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        net.eval()
        with torch.no_grad():
            guess = net(data.x, data.edge_index, data.edge_weight).argmax(1)
        losses.append(float(loss.detach()))
        accuracies.append(float((guess == data.y)[data.val_mask].double().mean()))
    return losses, accuracies, net.state_dict()


def _assert_plain(
    history: list[dict[str, float]], parameters: dict[str, torch.Tensor], expected: Any, tolerance: float = 1e-9
) -> None:
    losses, accuracies, state = expected
    # metrics are kept in float32 by torchmetrics
    assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-6)
    assert [epoch["val_acc"] for epoch in history] == pytest.approx(accuracies, rel=1e-6)
    for name, value in state.items():
        assert torch.allclose(parameters[name], value, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_is_that_of_plain_pyg(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    answers = pool.run(runs.fit, world_size, str(tmp_path), {"max_epochs": 5})
    for history, parameters in answers:
        _assert_plain(history, parameters, _plain(5))
    assert len({str(history[-1]["val_acc"]) for history, _ in answers}) == 1, "every rank logs the same number"


def test_gradients_are_clipped_by_their_global_norm(pool: RankPool, tmp_path: Path) -> None:
    clipped = _plain(4, clip=0.05)
    assert clipped[0] != pytest.approx(_plain(4)[0], rel=1e-6), "the clip must bite for this test to mean something"
    for history, parameters in pool.run(runs.fit, 2, str(tmp_path), {"max_epochs": 4, "gradient_clip_val": 0.05}):
        _assert_plain(history, parameters, clipped)


# each option works; that the numbers are those of one process follows where the last column says so
OPTIONS = [
    pytest.param({"deterministic": True}, True, id="deterministic"),
    pytest.param({"sync_batchnorm": True}, True, id="sync_batchnorm"),
    pytest.param({"profiler": "simple"}, True, id="profiler"),
    pytest.param({"limit_train_batches": 1, "limit_val_batches": 1}, True, id="limit_batches"),
    pytest.param({"num_sanity_val_steps": 2}, True, id="sanity-check-validation"),
    pytest.param({"use_distributed_sampler": True}, True, id="distributed-sampler"),
    pytest.param({"overfit_batches": 1}, False, id="overfit_batches"),
    pytest.param({"precision": "bf16-mixed"}, False, id="bf16-mixed"),
    pytest.param({"limit_val_batches": 0}, False, id="no-validation"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "exact"), OPTIONS)
def test_lightning_options_work(options: dict[str, Any], exact: bool, pool: RankPool, tmp_path: Path) -> None:
    net = {"norm": "batch"} if "sync_batchnorm" in options else {}
    answers = pool.run(runs.fit, 2, str(tmp_path), {"max_epochs": 3, **options}, net)
    for history, parameters in answers:
        assert len(history) == 3
        assert history[-1]["train_loss"] < history[0]["train_loss"]
        if exact and not net:
            _assert_plain(history, parameters, _plain(3))
    if net:
        (one, alone), *_ = pool.run(runs.fit, 1, str(tmp_path / "one"), {"max_epochs": 3}, net)
        assert [e["train_loss"] for e in answers[0][0]] == pytest.approx([e["train_loss"] for e in one], rel=1e-6)
        # the norm cancels the bias in front of it: its gradient is rounding noise, which Adam scales up to steps
        del alone["convs.0.bias"], alone["norms.0.module.running_mean"]
        for name, value in alone.items():
            assert torch.allclose(answers[1][1][name].double(), value.double(), rtol=0, atol=1e-9), name


def test_bf16_mixed_stays_near_full_precision(pool: RankPool, tmp_path: Path) -> None:
    history, _ = pool.run(runs.fit, 2, str(tmp_path), {"max_epochs": 3, "precision": "bf16-mixed"})[0]
    assert [epoch["train_loss"] for epoch in history] == pytest.approx(_plain(3)[0], rel=0.03)


def test_fast_dev_run(pool: RankPool, tmp_path: Path) -> None:
    for history, _ in pool.run(runs.fit, 2, str(tmp_path), {"fast_dev_run": True}):
        assert len(history) == 1


def _fit_with_dropout(rank: int, world_size: int, folder: str) -> torch.Tensor:
    """Masks that the ranks draw, through a layer whose rows are all ones."""
    torch.manual_seed(11)
    classifier, data = runs.module(folder, options={"dropout": 0.5})
    drawn = []

    class Watch(runs.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            drawn.append(functional.dropout(torch.ones(64)))

    runs.trainer(rank, world_size, folder, callbacks=[Watch()], max_epochs=1).fit(classifier, datamodule=data)
    return drawn[0]


def test_ranks_drop_out_different_rows(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_fit_with_dropout, 2, str(tmp_path))
    assert not torch.equal(first, second)


def test_several_labels_of_no_node_are_no_score() -> None:
    module = runs.NodeClassifier(runs.model())
    score = MultilabelF1Score(num_labels=3, average="micro")
    module.update_scores({"f1": score}, torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]]), None)
    module.update_scores({"f1": score}, torch.ones(0, 3), torch.ones(0, 3), None)
    assert float(score.compute()) == pytest.approx(0.8)


def _one_model_after_another(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """The first weight of each model of a script that was seeded once, before and after its training."""
    _, data = runs.module(folder)
    torch.manual_seed(11)
    before, after = [], []
    for _ in range(3):
        net = runs.GCN(12, 8, num_layers=2, out_channels=4, dropout=0.5)
        before.append(float(net.convs[0].lin.weight.detach()[0, 0]))
        runs.trainer(rank, world_size, folder, max_epochs=1).fit(runs.NodeClassifier(net, check=False), datamodule=data)
        after.append(float(net.convs[0].lin.weight.detach()[0, 0]))
    return before, after


@pytest.mark.parametrize("world_size", [1, 2])
def test_repeated_runs_of_a_script_begin_with_other_weights(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    (before, after), *others = pool.run(_one_model_after_another, world_size, str(tmp_path))
    assert len(set(before)) == 3
    assert all(one == after for _, one in others)


def _fit_lazily(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    classifier, data = runs.module(folder)
    torch.manual_seed(rank)  # the ranks would draw different parameters
    classifier.model = runs.GCN(-1, 8, num_layers=2, out_channels=4)
    runs.trainer(rank, world_size, folder, max_epochs=2).fit(classifier, datamodule=data)
    state: dict[str, torch.Tensor] = classifier.model.state_dict()
    return state


def test_layers_of_unknown_input_size_start_equal_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_fit_lazily, 2, str(tmp_path))
    assert first["convs.0.lin.weight"].shape == (8, 12)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _fit_multi_label(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, float]], torch.Tensor]:
    graph = runs.graph()
    graph.y = torch.stack([graph.y == 0, graph.y <= 1, graph.y == 3, graph.y >= 2], dim=1).float()
    data = runs.GraphDataModule(graph, cache_dir=Path(folder) / "cache")
    history, classifier = runs.History(), runs.NodeClassifier(runs.model())
    run = runs.trainer(rank, world_size, folder, callbacks=[history])
    run.fit(classifier, datamodule=data)
    return history.epochs, classifier.model.state_dict()["convs.0.lin.weight"]


def test_several_labels_per_node(pool: RankPool, tmp_path: Path) -> None:
    graph, net = runs.graph(), runs.model().double()
    y = torch.stack([graph.y == 0, graph.y <= 1, graph.y == 3, graph.y >= 2], dim=1).double()
    out = net(graph.x, graph.edge_index, graph.edge_weight)[graph.train_mask]
    wanted = y[graph.train_mask]
    loss = float(functional.binary_cross_entropy_with_logits(out, wanted))
    hit = float(((out > 0) & (wanted > 0)).sum())
    f1 = 2 * hit / float((out > 0).sum() + wanted.sum())
    (one, weight), *_ = pool.run(_fit_multi_label, 1, str(tmp_path / "one"))
    assert one[0]["train_loss"] == pytest.approx(loss, rel=1e-6)
    assert one[0]["train_f1"] == pytest.approx(f1, rel=1e-6)
    for history, other in pool.run(_fit_multi_label, 3, str(tmp_path / "three")):
        for name in ("train_loss", "train_f1", "val_loss", "val_f1"):
            assert [e[name] for e in history] == pytest.approx([e[name] for e in one], rel=1e-6), name
        assert torch.allclose(other, weight, rtol=0, atol=1e-10)


def _refused(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        runs.fit(rank, world_size, folder, options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: a full-graph epoch is one step", id="acc"
        ),
        pytest.param({"strategy": "ddp"}, "needs strategy='graph_ddp'", id="ddp"),
    ],
)
def test_what_would_give_other_numbers_is_refused_on_all_ranks(
    options: dict[str, Any], said: str, pool: RankPool, tmp_path: Path
) -> None:
    for message in pool.run(_refused, 2, str(tmp_path), options):
        assert said in message


def _one_after_another(rank: int, world_size: int, folder: str) -> tuple[float, float, list[str]]:
    classifier, data = runs.module(folder)
    first = runs.trainer(rank, world_size, folder)
    first.fit(classifier, datamodule=data)
    tested = float(first.test(classifier, datamodule=data, verbose=False)[0]["test_acc"])
    second = runs.trainer(rank, world_size, folder)
    second.fit(classifier, datamodule=data)
    again = float(second.test(classifier, datamodule=data, verbose=False)[0]["test_acc"])
    return tested, again, [type(layer).__name__ for layer in classifier.model.convs]


def test_fit_and_test_and_fit_again_in_one_process(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_one_after_another, 2, str(tmp_path))
    assert first == second
    assert first[1] > 0.25
    assert first[2] == ["GCNConv", "GCNConv"], "after a run the model is plain again"


def _copied(rank: int, world_size: int, folder: str) -> bool:
    """A module that was trained can be copied, and the copy trained."""
    module, data = runs.module(folder)
    runs.trainer(rank, world_size, folder, max_epochs=1).fit(module, datamodule=data)
    twin = copy.deepcopy(module)
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    assert all(torch.equal(value, before[name]) for name, value in twin.model.state_dict().items())
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)  # it copies the module
    runs.trainer(rank, world_size, folder, max_epochs=3, callbacks=[averaging]).fit(twin, datamodule=data)
    same = all(torch.equal(value, before[name]) for name, value in module.model.state_dict().items())
    return same and not all(torch.equal(value, before[name]) for name, value in twin.model.state_dict().items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trained_module_can_be_copied(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    assert all(pool.run(_copied, world_size, str(tmp_path)))
