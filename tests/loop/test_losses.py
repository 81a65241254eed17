"""``mean_loss`` is torch's mean over the whole graph, of rows of any kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pygdist import InputError, open_graph
from pygdist.testing import RankPool
from tests.loop.graphs import masked_graph


def _losses(rank: int, num_ranks: int, folder: str) -> list[float]:
    graph, weight = open_graph(masked_graph, cache_dir=folder), torch.tensor([0.5, 2.0, 1.0, 0.0]).double()
    out = F.one_hot(graph.n_id % 4, 4).double() * graph.n_id.unsqueeze(1) / 100
    weighted, smooth = nn.CrossEntropyLoss(weight=weight), nn.CrossEntropyLoss(label_smoothing=0.1)
    return [
        float(graph.mean_loss(one, out, target, mask))
        for one, target, mask in (
            (weighted, graph.y, graph.train_mask),
            (smooth, graph.y, None),
            (partial(F.cross_entropy, weight=weight), graph.y, graph.train_mask),
            (nn.CrossEntropyLoss(ignore_index=2), graph.y, graph.train_mask),
            (lambda output, y: F.mse_loss(output[:, 0], y, reduction="none"), 1 - out[:, 0], None),
            (F.mse_loss, out.detach() * 2 + 1, graph.val_mask),
            (lambda output, y: (output.argmax(dim=1) - y).abs().double(), graph.y, graph.val_mask),
        )
    ]


def test_losses_are_torchs_means(pool: RankPool, tmp_path: Path) -> None:
    data, weight = masked_graph(), torch.tensor([0.5, 2.0, 1.0, 0.0]).double()
    every = torch.arange(160)
    out, train, val = F.one_hot(every % 4, 4).double() * every.unsqueeze(1) / 100, data.train_mask, data.val_mask
    expected = [
        F.cross_entropy(out[train], data.y[train], weight=weight),
        F.cross_entropy(out, data.y, label_smoothing=0.1),
        F.cross_entropy(out[train], data.y[train], weight=weight),
        F.cross_entropy(out[train], data.y[train], ignore_index=2),
        F.mse_loss(out[:, 0], 1 - out[:, 0]),
        F.mse_loss(out[val], out[val] * 2 + 1),
        (out[val].argmax(dim=1) - data.y[val]).abs().double().mean(),
    ]
    for found in pool.run(_losses, 3, str(tmp_path)):
        assert found == pytest.approx([float(one) for one in expected], rel=1e-12)


def _rounded(rank: int, num_ranks: int, folder: str) -> list[float]:
    graph = open_graph(masked_graph, cache_dir=folder)
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(160, 4, generator=generator)[graph.n_id] for _ in range(300))
    return [float(graph.mean_loss(F.cross_entropy, rows, graph.y, graph.n_id < 60)) for rows in drawn]


def test_all_processes_see_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    """Otherwise a loop that stops early would stop on one alone."""
    first, *others = pool.run(_rounded, 3, str(tmp_path))
    assert others == [first] * 2


_MARGINS = torch.tensor([0.5, 2.0, 1.0, 0.25]).double()
MEANS: dict[str, Callable[..., Tensor]] = {
    "target of -100": nn.MSELoss(),
    "margins by weight": nn.MultiMarginLoss(weight=_MARGINS),
    "margins by weight, partial": partial(F.multi_margin_loss, weight=_MARGINS),
    "soft labels by weight": nn.CrossEntropyLoss(weight=_MARGINS),
    "truths by weight": nn.BCEWithLogitsLoss(weight=_MARGINS),
    "several truths by weight": nn.MultiLabelSoftMarginLoss(weight=_MARGINS),
}


def _targets(name: str, n_id: Tensor) -> Tensor:
    classes = n_id % 4
    if "margins" in name:
        return classes
    if "100" in name:
        return torch.where(classes == 1, -100.0, classes).double().unsqueeze(1).expand(-1, 4)
    return F.one_hot(classes, 4).double()


def _mean_of(rank: int, num_ranks: int, folder: str, name: str) -> float:
    graph = open_graph(masked_graph, cache_dir=folder)
    return float(graph.mean_loss(MEANS[name], graph.x[:, :4].double(), _targets(name, graph.n_id), graph.train_mask))


@pytest.mark.parametrize("name", MEANS)
def test_means_that_torch_divides_by_the_number_of_values(name: str, pool: RankPool, tmp_path: Path) -> None:
    data = masked_graph()
    target = _targets(name, torch.arange(160))
    expected = MEANS[name](data.x[data.train_mask, :4].double(), target[data.train_mask])
    assert pool.run(_mean_of, 3, str(tmp_path), name) == pytest.approx([float(expected)] * 3, rel=1e-12)


@pytest.mark.parametrize("loss", [nn.KLDivLoss(reduction="batchmean"), partial(F.cross_entropy, reduction="sum")])
def test_losses_that_are_no_means_are_refused(loss: Callable[..., Tensor], tmp_path: Path) -> None:
    graph = open_graph(masked_graph, cache_dir=tmp_path)
    with pytest.raises(InputError, match="mean_loss returns a mean over nodes, but the loss has reduction='"):
        graph.mean_loss(loss, graph.x[:, :4], graph.y)


def _prices(whole: bool = False) -> Data:
    data = masked_graph()
    data.y = data.x[:, 0] * 3 + 1
    return data.update({"y": torch.arange(160) % 5 - 1.0}) if whole else data


def _numbers(rank: int, num_ranks: int, folder: str) -> list[float]:
    graph = open_graph(_prices, cache_dir=folder)
    steps = open_graph(partial(_prices, whole=True), float_labels=True, cache_dir=folder)
    return [
        float(graph.mean_loss(F.mse_loss, graph.x[:, 1], graph.y, graph.train_mask)),
        float(graph.mean_loss(F.l1_loss, graph.x[:, 1:2], graph.y, graph.train_mask)),
        float(steps.mean_loss(F.mse_loss, steps.x[:, 1], steps.y, steps.train_mask)),
    ]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_numbers_are_predicted(pool: RankPool, tmp_path: Path, num_ranks: int) -> None:
    data, steps = _prices(), _prices(whole=True)
    out, train = data.x[data.train_mask, 1], data.train_mask
    expected = [F.mse_loss(out, data.y[train]), F.l1_loss(out, data.y[train]), F.mse_loss(out, steps.y[train].double())]
    for found in pool.run(_numbers, num_ranks, str(tmp_path)):
        assert found == pytest.approx([float(one) for one in expected], rel=1e-12)


def _pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(160, (2, 90), generator=generator), torch.rand(90, generator=generator).round().double()


def _links(rank: int, num_ranks: int, folder: str, whole: bool) -> list[Any]:
    graph = open_graph(masked_graph, cache_dir=folder)
    torch.manual_seed(7)
    model = graph.distribute(GCN(12, 8, num_layers=2).double())
    pairs, labels = _pairs()
    share = slice(None) if whole else slice(0 if rank else 30, 30 if rank == 1 else 0 if rank else None)
    z, mine = model(graph.x, graph.edge_index), pairs[:, share]
    source, target = graph.rows(z, mine)
    loss = graph.mean_loss(F.binary_cross_entropy_with_logits, (source * target).sum(dim=1), labels[share])
    loss.backward()
    wrong = []
    for rows, ids in ((z, mine + 160 * (rank == 1)), (z[1:], mine), (z, mine.int())):
        try:
            graph.rows(rows, ids)
        except InputError as error:
            wrong.append(str(error))
    return [loss.detach(), [one.grad for one in model.parameters()], wrong]


@pytest.mark.parametrize("whole", [True, False])
def test_pairs_of_nodes_are_scored_as_on_one_process(whole: bool, pool: RankPool, tmp_path: Path) -> None:
    data, (pairs, labels) = masked_graph(), _pairs()
    torch.manual_seed(7)
    model = GCN(12, 8, num_layers=2).double()
    z = model(data.x, data.edge_index)
    loss = F.binary_cross_entropy_with_logits((z[pairs[0]] * z[pairs[1]]).sum(dim=1), labels)
    loss.backward()
    for mean, gradients, wrong in pool.run(_links, 3, str(tmp_path), whole):
        torch.testing.assert_close(mean, loss.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients, [one.grad for one in model.parameters()], rtol=0, atol=1e-12)
        ids, rows, kind = wrong
        assert "but the graph has 160 nodes" in ids
        assert "rows: rows of shape (53, 8), but this process has 54 nodes" in rows
        assert "ids of torch.int32, expected int64" in kind
