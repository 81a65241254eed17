"""Dropout over the features, and norms over nodes, under ``pushpull``: as one process on the batches of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch_geometric import nn
from torch_geometric.data import Data

from pygdist.backends import PushPullBackend
from pygdist.backends.sampling.copies import slices_of
from pygdist.hops.cuts.cut import kept_share
from pygdist.sampler import _native
from pygdist.sampler._native import Sampled
from pygdist.testing import RankPool
from tests.backends.pushpull_runs import drawn, narrow, trained
from tests.kernels.oracle import needs_library
from tests.lightning.test_pull import EPOCHS, SEED, assert_close
from tests.turns import by_turns

pytestmark = needs_library


# -- dropout over the features ----------------------------------------------------------------------------------------


class Dropped(torch.nn.Module):
    """Drops features, as PyG's examples do; ``drawn`` drops them beforehand in its stead."""

    def __init__(self, conv: str, *, drawn: bool = False) -> None:
        super().__init__()
        self.first = nn.GATConv(7, 4, heads=2) if conv == "GAT" else nn.SAGEConv(7, 8)
        self.second, self.drop = nn.SAGEConv(8, 4), torch.nn.Dropout(0.4)
        self.drawn = drawn

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x if self.drawn else self.drop(x).detach()[:]
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def _trained_with_dropout(rank: int, world_size: int, folder: str, conv: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    return trained(rank, world_size, folder, Dropped(conv), PushPullBackend(**options))


@pytest.mark.parametrize("options", [{}, {"feature_parts": 1}, {"topology_parts": 1}], ids=["plain", "f", "t"])
@pytest.mark.parametrize("conv", ["SAGE", "GAT"])
def test_each_rank_draws_dropout_for_its_columns(
    conv: str, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """A node's features are dropped alike wherever a batch reads them; no evaluation drops any."""
    data, size = narrow(7), 3
    results = pool.run(_trained_with_dropout, size, str(tmp_path), conv, options)
    owned = [nodes for _, nodes in results]
    slices = slices_of(7, options.get("feature_parts", size))
    torch.manual_seed(7)
    net = Dropped(conv, drawn=True).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(EPOCHS):
        for batches in drawn(data, owned, epoch):
            total, count = torch.zeros(()), 0
            for seeds, batch in batches:
                key = _native.hop_key(seeds, 2, seed=SEED, epoch=epoch)
                rows = [data.x[batch.node][:, one] for one in slices]
                kept = [kept_share(one, 0.6, key + 1 + at.start) for one, at in zip(rows, slices, strict=True)]
                x = torch.cat([one * other for one, other in zip(rows, kept, strict=True)], dim=1)
                out = net(x, torch.stack([batch.source, batch.target]))[: seeds.numel()]
                total = total + cross_entropy(out, data.y[seeds], reduction="sum")
                count += seeds.numel()
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
    for found, _ in results:
        assert_close(found, net.state_dict())


# -- norms over nodes --------------------------------------------------------------------------------------------------


NORMS: dict[str, Any] = {
    "batch": lambda: torch.nn.BatchNorm1d(8),
    "graph": lambda: nn.GraphNorm(8),
    "size": nn.GraphSizeNorm,
    "inside": torch.nn.Identity,
    "no-bias": lambda: torch.nn.BatchNorm1d(8),
}


SAGE = ("lin_l.weight", "lin_r.weight")
#: The first layer's parameters that meet columns.
FIRST = {"batch": SAGE, "no-bias": SAGE, "graph": SAGE, "size": SAGE, "inside": ("nn.lins.0.weight",)}


class Normed(torch.nn.Module):
    """Two layers and a norm; with ``inside`` the norm is in the first layer's network, with ``jk`` it is no chain."""

    def __init__(self, norm: str, *, jk: bool) -> None:
        super().__init__()
        inside = nn.MLP([7, 8, 8], norm="batch_norm")
        self.first = nn.GINConv(inside) if norm == "inside" else nn.SAGEConv(7, 8, bias=norm != "no-bias")
        self.second, self.norm, self.jk = nn.SAGEConv(8, 4), NORMS[norm](), jk
        self.lin = torch.nn.Linear(12 if jk else 4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.norm(self.first(x, edge_index)).relu()
        return self.end(hidden, edge_index, hidden.size(0))

    def end(self, hidden: Tensor, edge_index: Tensor, count: int) -> Tensor:
        out = self.second(hidden, edge_index)[:count]
        out = self.lin(torch.cat([hidden[:count], out], dim=1) if self.jk else out)
        return out


def _trained_with_norms(
    rank: int, world_size: int, folder: str, norm: str, jk: bool, one_sided: bool, options: Any
) -> Any:
    torch.manual_seed(7)
    return trained(rank, world_size, folder, Normed(norm, jk=jk), PushPullBackend(**options), one_sided=one_sided)


def _with_norms_on_one_process(
    norm: str, jk: bool, data: Data, owned: list[Tensor], *, lag: int = 0
) -> dict[str, Tensor]:
    """The batches of all ranks at once; the norm sees the rows of hops 0 and 1, which the second layer reads.

    With a ``lag`` of 2, as in a pipeline, the first weights' gradients are applied two steps after these were read, and
    the others' in the step between.
    """
    torch.manual_seed(7)
    net = Normed(norm, jk=jk).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    late = dict(net.first.named_parameters())
    late = {name: late[name] for name in FIRST[norm]}
    for epoch in range(EPOCHS):
        batches, read = drawn(data, owned, epoch), list[dict[str, Tensor]]()
        for step in range(len(batches) + lag):
            optimizer.zero_grad()
            if step < len(batches):
                read.append({name: one.detach().clone().requires_grad_() for name, one in late.items()})
            if 0 <= step - lag // 2 < len(batches):
                _loss(net, norm, data, batches[step - lag // 2], read[step - lag // 2]).backward()
            if step >= lag:
                for name, one in late.items():
                    one.grad = read[step - lag][name].grad
            optimizer.step()
    return net.state_dict()


def _loss(
    net: Normed, norm: str, data: Data, batches: list[tuple[Tensor, Sampled]], weights: dict[str, Tensor]
) -> Tensor:
    """The mean loss over the seeds of all ranks, with given values of some of the first layer's parameters."""
    firsts, edges, sizes = list[Tensor](), list[Tensor](), list[tuple[int, int]]()
    for seeds, batch in batches:
        edge_index = torch.stack([batch.source, batch.target])
        num_rows = sum(batch.num_nodes[:2])
        if norm == "inside":
            rows = nn.GINConv(torch.nn.Identity())(data.x[batch.node], edge_index)
        else:
            rows = functional_call(net.first, weights, (data.x[batch.node], edge_index))
        firsts.append(rows[:num_rows])
        edges.append(edge_index[:, batch.target < seeds.numel()])
        sizes.append((num_rows, seeds.numel()))
    joined = torch.cat(firsts)
    if norm == "inside":
        of_network = {name.removeprefix("nn."): one for name, one in weights.items()}
        joined = functional_call(net.first.nn, of_network, (joined,))
    hidden = net.norm(joined).relu().split([rows for rows, _ in sizes])
    outs = [net.end(rows, edge_index, count) for rows, edge_index, (_, count) in zip(hidden, edges, sizes, strict=True)]
    return cross_entropy(torch.cat(outs), torch.cat([data.y[seeds] for seeds, _ in batches]))


@pytest.mark.parametrize(
    ("norm", "jk", "one_sided", "options"),
    by_turns(
        3,
        [("batch", False), ("batch", True), ("graph", False), ("size", False), ("inside", False), ("inside", True)],
        [False, True],
        [{}, {"feature_parts": 1}, {"first_weights": "sharded"}],
    ),
)
def test_norms_take_statistics_over_the_batches_of_all_ranks(
    norm: str, jk: bool, one_sided: bool, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """Running statistics too, where one rank has no training node, and where layers are no chain."""
    results = pool.run(_trained_with_norms, 3, str(tmp_path), norm, jk, one_sided, options)
    expected = _with_norms_on_one_process(norm, jk, narrow(7, one_sided=one_sided), [owned for _, owned in results])
    for found, _ in results:
        assert_close(found, expected)


@pytest.mark.parametrize("norm", ["batch", "no-bias", "inside"])
@pytest.mark.parametrize("one_sided", [False, True], ids=["even", "one-sided"])
def test_norms_in_a_pipeline_are_those_of_one_process_with_the_delay(
    norm: str, one_sided: bool, pool: RankPool, tmp_path: Path
) -> None:
    results = pool.run(_trained_with_norms, 3, str(tmp_path), norm, False, one_sided, {"pipeline": 3})
    owned = [nodes for _, nodes in results]
    expected = _with_norms_on_one_process(norm, False, narrow(7, one_sided=one_sided), owned, lag=2)
    for found, _ in results:
        assert_close(found, expected)
