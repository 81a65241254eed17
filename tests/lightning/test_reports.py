"""What a run reports: bytes to the byte, predictions of every node, and each rank its own part of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.lightning import ExchangeMonitor, PredictionWriter
from pygdist.native import load
from pygdist.testing import RankPool
from tests.lightning import runs


def _monitored(
    rank: int, world_size: int, folder: str, backend: str = "comm"
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    history = runs.History()
    classifier, data = runs.module(folder, backend=backend)
    trainer = runs.trainer(
        rank, world_size, folder, callbacks=[ExchangeMonitor(), history], strategy="graph_ddp", num_sanity_val_steps=0
    )
    trainer.fit(classifier, datamodule=data)
    return history.epochs, dict(data.meta)


def test_bytes_and_messages_are_those_of_the_plan(pool: RankPool, tmp_path: Path) -> None:
    history, meta = pool.run(_monitored, 3, str(tmp_path))[0]
    sent_rows = np.array([part["recv_counts"] for part in meta["parts"]]).sum(axis=0)
    received_rows = np.array([part["num_halo"] for part in meta["parts"]])
    # the second layer sends 4 columns forward, and each rank returns the gradients of the halo rows it received; the
    # first aggregates the 12 features, once
    per_rank = (sent_rows + received_rows) * 4 * 8
    last = history[-1]
    assert last["sent_bytes_total"] == per_rank.sum()
    assert (last["sent_bytes_min"], last["sent_bytes_max"]) == (per_rank.min(), per_rank.max())
    assert last["gradient_bytes"] == pytest.approx(2 * 2 / 3 * (12 * 8 + 8 + 8 * 4 + 4) * 8)
    assert last["sent_messages_max"] == 2 * 2  # forward and backward, to two others
    once = sent_rows.sum() * (12 + 1) * 8
    assert history[0]["sent_bytes_total"] == per_rank.sum() + once, "features and degrees travel once, in front"
    assert last["kept_mib_total"] * 2**20 == pytest.approx(meta["num_nodes"] * 12 * 8)
    for epoch in history:
        # the rank that comes last may find everything there, and wait for nothing
        assert 0 <= epoch["exchange_s_min"] <= epoch["exchange_s_max"] < epoch["epoch_s"]
        assert epoch["compute_s_max"] + epoch["exchange_s_min"] <= 2 * epoch["epoch_s"]
        assert 0.05 < epoch["peak_gib_max"] < epoch["peak_gib_total"]


@pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
def test_what_was_expected_of_an_epoch_is_logged(pool: RankPool, tmp_path: Path) -> None:
    first, *later = pool.run(_monitored, 2, str(tmp_path), "hybrid")[0][0]
    assert 0 < first["planning_s"] < first["epoch_s"]
    for epoch in later:
        assert epoch["expected_epoch_s"] == first["expected_epoch_s"] > 0


def _predict(rank: int, world_size: int, folder: str, output: Any) -> torch.Tensor:
    classifier, data = runs.module(folder)
    writer = PredictionWriter(Path(folder) / "out" / f"{output}.npy", output)
    trainer = runs.trainer(rank, world_size, folder, callbacks=[writer])
    trainer.predict(classifier, datamodule=data, return_predictions=False)
    return torch.empty(0)


def test_predictions_of_all_nodes_in_global_order(pool: RankPool, tmp_path: Path) -> None:
    data, net = runs.graph(), runs.model().double().eval()
    with torch.no_grad():
        expected = net(data.x, data.edge_index, data.edge_weight)
    for output in ("label", "logits"):
        pool.run(_predict, 3, str(tmp_path), output)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "label.npy"), expected.argmax(1).numpy())
    np.testing.assert_allclose(np.load(tmp_path / "out" / "logits.npy"), expected.numpy(), rtol=0, atol=1e-12)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["label.npy", "logits.npy"]


def _own_part(rank: int, world_size: int, folder: str) -> list[int]:
    seen: list[int] = []

    class Watch(runs.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
            seen.extend(batch.owned_id.tolist())

    classifier, data = runs.module(folder)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1, callbacks=[Watch()], use_distributed_sampler=True)
    trainer.fit(classifier, datamodule=data)
    assert trainer.num_training_batches == 1
    return seen


def test_every_node_is_trained_on_by_exactly_one_rank(pool: RankPool, tmp_path: Path) -> None:
    seen = [node for part in pool.run(_own_part, 3, str(tmp_path)) for node in part]
    assert sorted(seen) == list(range(160))


def test_strategies_have_names() -> None:
    for name in ("graph_ddp", "graph_ddp_notebook", "graph_ddp_spawn", "graph_ddp_find_unused_parameters_true"):
        assert name in StrategyRegistry
    strategy = Trainer(strategy="graph_ddp_notebook", devices=1, accelerator="cpu", logger=False).strategy
    assert strategy._start_method == "fork"


def test_one_process_without_a_strategy(tmp_path: Path) -> None:
    classifier, data = runs.module(str(tmp_path), backend="single")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(classifier, datamodule=data)
    assert trainer.callback_metrics["train_loss"] < 1.4
    assert type(classifier.model) is runs.GCN
    assert type(classifier.model.convs[0]).__name__ == "GCNConv", "a trained model is a plain model again"


def _alone(folder: Path, **options: Any) -> Trainer:
    settings = {"max_epochs": 2, "precision": "64-true", "default_root_dir": folder, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **{**settings, **options})


def test_any_order_of_stages_on_one_process(tmp_path: Path) -> None:
    """Without a strategy Lightning evaluates in inference mode, whose tensors training cannot use."""
    classifier, data = runs.module(str(tmp_path), backend="comm")
    before = _alone(tmp_path).test(classifier, datamodule=data, verbose=False)[0]["test_loss"]
    trainer = _alone(tmp_path)
    trainer.fit(classifier, datamodule=data)
    assert trainer.test(classifier, datamodule=data, verbose=False)[0]["test_loss"] < before
    ((n_id, out),) = _alone(tmp_path).predict(classifier, datamodule=data)  # type: ignore[misc]
    assert (n_id.tolist(), tuple(out.shape)) == (list(range(160)), (160, 4))
    other = NodeClassifier(runs.model())
    _alone(tmp_path, precision="32-true").fit(other, datamodule=data)  # the same data, another precision
    assert other.model.convs[0].lin.weight.dtype == torch.float32


def test_a_mended_mistake_is_forgotten(tmp_path: Path) -> None:
    graph = runs.graph()
    graph.x[3, 0] = float("nan")
    data = GraphDataModule(graph, cache_dir=tmp_path)
    with pytest.raises(InputError, match="x: 1 of 160 nodes hold NaN"):
        _alone(tmp_path).fit(NodeClassifier(runs.model()), datamodule=data)
    graph.x[3, 0] = 0
    _alone(tmp_path).fit(NodeClassifier(runs.model()), datamodule=data)


def test_a_graph_without_validation_nodes_trains(tmp_path: Path) -> None:
    graph = runs.graph()
    graph.val_mask = torch.zeros_like(graph.val_mask)
    trainer = _alone(tmp_path)
    trainer.fit(NodeClassifier(runs.model()), datamodule=GraphDataModule(graph, cache_dir=tmp_path))
    assert "train_loss" in trainer.callback_metrics
    assert "val_loss" not in trainer.callback_metrics


def test_unknown_sizes_are_filled_in_without_touching_statistics(tmp_path: Path) -> None:
    _, data = runs.module(str(tmp_path))
    net = runs.GCN(-1, 8, num_layers=2, out_channels=4, norm="batch")
    _alone(tmp_path, max_epochs=1, num_sanity_val_steps=0).fit(NodeClassifier(net), datamodule=data)
    assert int(net.norms[0].module.num_batches_tracked) == 1


def _own_after_a_look(rank: int, world_size: int, folder: str) -> tuple[list[int], list[int]]:
    classifier, data = runs.module(folder)
    data.num_parts = 2
    data.prepare_data()
    data.setup()
    first = data.shard.owned_id.tolist()
    runs.trainer(rank, world_size, folder, max_epochs=1).fit(classifier, datamodule=data)
    return first, data.shard.owned_id.tolist()


def test_a_look_at_one_part_does_not_stick(pool: RankPool, tmp_path: Path) -> None:
    (looked, first), (also, second) = pool.run(_own_after_a_look, 2, str(tmp_path))
    assert looked == also == first
    assert sorted(first + second) == list(range(160))


def test_a_classifier_without_its_data_module_says_so(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=1)
    classifier = NodeClassifier(runs.model())
    with pytest.raises(InputError, match="takes its graph from a GraphDataModule"):
        trainer.fit(classifier, train_dataloaders=[1])
    with pytest.raises(InputError, match="takes its graph from a GraphDataModule"):
        _ = classifier.shard


def test_a_stage_without_labelled_nodes_says_so(tmp_path: Path) -> None:
    graph = runs.graph()
    graph.test_mask = torch.zeros_like(graph.test_mask)
    data = GraphDataModule(graph, cache_dir=tmp_path)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, precision="64-true")
    with pytest.raises(InputError, match=r"no labelled nodes for stage 'test' \(test_mask\)"):
        trainer.test(NodeClassifier(runs.model()), datamodule=data)


@pytest.mark.parametrize("backend", ["comm", "replica"])
def test_a_fit_without_training_nodes_says_so(backend: str, tmp_path: Path) -> None:
    graph = runs.graph()
    graph.train_mask = torch.zeros_like(graph.train_mask)
    data = GraphDataModule(graph, cache_dir=tmp_path)
    with pytest.raises(InputError, match=r"no labelled nodes for stage 'train' \(train_mask\)"):
        _alone(tmp_path, num_sanity_val_steps=0).fit(NodeClassifier(runs.model(), backend=backend), datamodule=data)


def test_the_data_module_alone(tmp_path: Path) -> None:
    data = GraphDataModule(runs.graph(), num_parts=3, partitioner="chunk", cache_dir=tmp_path)
    data.prepare_data()
    first = data.folder
    data.setup()
    assert data.shard.rank == 0
    assert data.shard.num_parts == 3
    assert data.meta["num_nodes"] == 160
    before = (first / "meta.json").stat().st_mtime_ns
    data.prepare_data()
    assert data.folder == first
    assert (first / "meta.json").stat().st_mtime_ns == before, "partitioned once"
    other = GraphDataModule(runs.graph(), num_parts=3, partitioner="hash", cache_dir=tmp_path)
    other.prepare_data()
    assert other.folder != first, "the key holds the partitioner"
    with pytest.raises(InputError, match="has 3 parts, but the run has 1 rank;"):
        GraphDataModule(store=first).setup()
