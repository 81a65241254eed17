"""Link prediction on N ranks is link prediction on one: the same pairs, losses, AUC and Hits@K."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, InputError
from pygdist.backends import DelayedBackend
from pygdist.graph import corrupted_sources, known_pairs
from pygdist.lightning import HitsAtK, LinkPredictor
from pygdist.testing import RankPool
from tests.lightning import runs
from tests.turns import by_turns

K, EPOCHS = 10, 4


class Pairs(nn.Module):
    """A decoder with a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(6, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.lin(source * target)
        return out


def _encoder() -> nn.Module:
    torch.manual_seed(7)
    net: nn.Module = GCN(12, 8, num_layers=2, out_channels=6)
    return net


def _fit(
    rank: int, world_size: int, folder: str, decoder: bool, settings: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    history = runs.History()
    backend = settings.get("backend")
    partitioner = "libra" if backend == "delayed" or isinstance(backend, DelayedBackend) else "hash"
    data = GraphDataModule(
        runs.graph(), partitioner=partitioner, cache_dir=Path(folder) / "cache", edge_split=(0.1, 0.1), split_seed=2
    )
    module = LinkPredictor(_encoder(), Pairs() if decoder else None, hits_at=K, **settings)
    run = runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=EPOCHS)
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    logged = [*history.epochs, {name: float(value) for name, value in run.callback_metrics.items()}]
    return logged, {name: value.clone() for name, value in module.state_dict().items()}


SETTINGS = [(2, "comm"), (2, "hybrid"), (3, "cache"), (2, "delayed"), (3, "delayed"), (3, "tensor")]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "backend", "decoder"), by_turns(2, SETTINGS, [False, True]))
def test_any_number_of_ranks_learns_the_same(
    world_size: int, backend: str, decoder: bool, pool: RankPool, tmp_path: Path
) -> None:
    expected, state = pool.run(_fit, 1, str(tmp_path), decoder, {})[0]
    assert expected[-2]["train_loss"] < expected[0]["train_loss"]
    for history, parameters in pool.run(_fit, world_size, str(tmp_path), decoder, {"backend": backend}):
        for mine, theirs in zip(history, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        for name, value in state.items():
            assert torch.allclose(parameters[name], value, rtol=0, atol=1e-9), name


def test_sums_that_come_late_learn_links_too(pool: RankPool, tmp_path: Path) -> None:
    settings = {"backend": DelayedBackend(delay=1)}
    (first, state), (second, other) = pool.run(_fit, 2, str(tmp_path), False, settings)
    assert first == second
    assert all(torch.equal(state[name], other[name]) for name in state)
    assert all(isfinite(value) for epoch in first for value in epoch.values())
    assert first[-2]["train_loss"] < first[0]["train_loss"]
    assert {"val_auc", "val_hits"} <= first[0].keys()
    at_once, _ = pool.run(_fit, 2, str(tmp_path), False, {"backend": "delayed"})[0]
    assert first[1]["train_loss"] != pytest.approx(at_once[1]["train_loss"], rel=1e-6)


def _scores(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """What a step says of loss, AUC and Hits@K, beside what it is by its definition."""
    data = GraphDataModule(runs.graph(), cache_dir=Path(folder) / "cache", edge_split=(0.1, 0.1))
    module = LinkPredictor(_encoder(), hits_at=K)
    run = runs.trainer(rank, world_size, folder, max_epochs=1)
    run.validate(module, datamodule=data, verbose=False)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}

    shard = data.shard
    csr = shard.adjacency.csr()
    edges = torch.stack([csr.index.long(), csr.row_index().long()])
    with torch.no_grad():
        rows = _encoder().double().eval()(shard.x.double(), edges, shard.edge_weight)
    assert shard.val_edges is not None
    source, target, e_id = shard.val_edges
    others = corrupted_sources(target, e_id, shard.num_nodes, known=known_pairs(shard), seed=0, epoch=-1)
    positive = (rows[source] * rows[target]).sum(1)
    negative = (rows[others] * rows[target]).sum(1)
    scores = torch.cat([positive, negative])
    labels = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
    above = (positive[:, None] > negative[None]).double() + 0.5 * (positive[:, None] == negative[None]).double()
    return {
        "val_loss": logged["val_loss"] - float(functional.binary_cross_entropy_with_logits(scores, labels)),
        "val_auc": logged["val_auc"] - float(above.mean()),
        "val_hits": logged["val_hits"] - float((positive > negative.sort().values[-K]).double().mean()),
    }


def test_figures_are_what_they_are_called(pool: RankPool, tmp_path: Path) -> None:
    for name, difference in pool.run(_scores, 1, str(tmp_path))[0].items():
        assert abs(difference) < 1e-6, name


def test_hits_with_fewer_pairs_than_k() -> None:
    metric = HitsAtK(5)
    metric.update(torch.tensor([0.5, 0.1]), torch.tensor([0.2, 0.3]))
    assert float(metric.compute()) == 1.0
    metric.update(torch.empty(0), torch.tensor([0.4, 0.6, 0.45]))
    assert float(metric.compute()) == 0.5  # above the fifth, 0.2


@pytest.mark.slow
def test_a_share_of_the_edges_changes_from_epoch_to_epoch(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(_fit, 1, str(tmp_path), False, {"train_share": 0.3})[0][0]
    for world_size in (2, 3):
        for history, _ in pool.run(_fit, world_size, str(tmp_path), False, {"train_share": 0.3}):
            losses = [epoch["train_loss"] for epoch in history[:EPOCHS]]
            assert losses == pytest.approx([epoch["train_loss"] for epoch in whole[:EPOCHS]], rel=1e-6)
    everything = pool.run(_fit, 1, str(tmp_path), False, {})[0][0]
    assert whole[0]["train_loss"] != pytest.approx(everything[0]["train_loss"], rel=1e-6)


def _fit_all(rank: int, world_size: int, folder: str, norm: bool) -> list[dict[str, float]] | str:
    """Nothing is held out; what all epochs logged, or why there are none."""
    torch.manual_seed(3)
    history, decoder = runs.History(), nn.Bilinear(6, 6, 1)
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module = LinkPredictor(_encoder(), Normed(decoder) if norm else None)
    try:
        runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=2).fit(module, datamodule=data)
    except InputError as error:
        return str(error)
    return history.epochs


class Normed(nn.Module):
    """A decoder with a norm over pairs, and one of each by itself."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder, self.each, self.over = decoder, nn.LayerNorm(6), nn.BatchNorm1d(1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.over(self.decoder(self.each(source), target))
        return out


def test_all_edges_are_learned_from_where_none_is_held_out(pool: RankPool, tmp_path: Path) -> None:
    """Though the graph has nodes to validate on, as for other tasks."""
    (whole,), both = (pool.run(_fit_all, size, str(tmp_path), False) for size in (1, 2))
    assert len(whole) == 2
    assert {name for epoch in whole for name in epoch if name.startswith("val")} == set()
    for history in both:
        losses = [epoch["train_loss"] for epoch in history]
        assert losses == pytest.approx([epoch["train_loss"] for epoch in whole], rel=1e-6)


def test_a_decoder_may_not_look_at_all_pairs_of_a_rank(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_fit_all, 2, str(tmp_path), True):
        assert said.startswith("decoder: 'over' (BatchNorm1d) takes its statistics over the pairs of one rank")
    (alone,) = pool.run(_fit_all, 1, str(tmp_path), True)
    assert isinstance(alone, list), "one rank has all pairs"


def _without_edges(rank: int, world_size: int, folder: str) -> str:
    data = GraphDataModule(runs.graph(), cache_dir=Path(folder) / "cache")
    with pytest.raises(InputError) as caught:
        runs.trainer(rank, world_size, folder).test(LinkPredictor(_encoder()), datamodule=data, verbose=False)
    return str(caught.value)


def test_without_held_out_edges_there_is_nothing_to_evaluate(pool: RankPool, tmp_path: Path) -> None:
    (said,) = pool.run(_without_edges, 1, str(tmp_path))
    assert said == "no edges are held out for stage 'test': GraphDataModule(edge_split=(0.05, 0.1))"


def _with_split(rank: int, world_size: int, folder: str, split: tuple[float, float]) -> tuple[list[str], str]:
    """Which figures of validation were logged, and why there was no test."""
    history = runs.History()
    data = GraphDataModule(runs.graph(), cache_dir=Path(folder) / "cache", edge_split=split)
    module = LinkPredictor(_encoder(), hits_at=K)
    run = runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=1)
    run.fit(module, datamodule=data)
    logged = [name for epoch in history.epochs for name in epoch if name.startswith("val")]
    try:
        run.test(module, datamodule=data, verbose=False)
    except InputError as error:
        return logged, str(error)
    return logged, ""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_share_that_holds_no_edge(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    """Training goes on without validation; a test says which share was too small."""
    for logged, said in pool.run(_with_split, world_size, str(tmp_path), (0.0, 0.2)):
        assert (logged, said) == ([], "")
    for logged, said in pool.run(_with_split, world_size, str(tmp_path), (0.2, 1e-9)):
        assert "val_auc" in logged
        assert said.startswith("the share of edges held out for test (edge_split) has no edge")


def test_parts_by_themselves_learn_no_links() -> None:
    with pytest.raises(InputError, match="backend 'replica' trains parts by themselves, but a pair has nodes in two"):
        LinkPredictor(_encoder(), backend="replica")


@pytest.mark.parametrize(
    ("settings", "said"), [({"train_share": 0.0}, "train_share is 0.0"), ({"hits_at": 0}, "hits_at is 0")]
)
def test_arguments_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        LinkPredictor(_encoder(), **settings)


def _averaged(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Sizes of the parameters before and after a training on a graph without labels, by models that are averaged."""
    data = GraphDataModule(
        Data(x=runs.graph().x, edge_index=runs.graph().edge_index),
        edge_split=(0.1, 0.1),
        cache_dir=Path(folder) / "cache",
    )
    module = LinkPredictor(runs.model())
    before = [float(one.detach().abs().sum()) for one in module.parameters()]
    strategy = "model_averaging"
    runs.trainer(rank, world_size, folder, strategy=strategy, max_epochs=1).fit(module, datamodule=data)
    return before, [float(one.detach().abs().sum()) for one in module.parameters()]


def test_models_are_averaged_on_a_graph_without_labels(pool: RankPool, tmp_path: Path) -> None:
    ((before, after),) = pool.run(_averaged, 1, str(tmp_path))
    assert all(one > 0 for one, was in zip(after, before, strict=True) if was)
