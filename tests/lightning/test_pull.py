"""``pull``: mini-batches sampled across ranks train as one process would that samples the same batches."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric import nn
from torch_geometric.data import Data

from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import PullBackend, Savings
from pygdist.backends.passes.sampled import SampledPass
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.kernels import CSR
from pygdist.lightning.parts import sampled_graph
from pygdist.nn.inputs import outputs_of
from pygdist.routing import distribute
from pygdist.sampler import NeighborBatches, _native
from pygdist.sampler.epoch import ShuffledOrder
from pygdist.testing import RankPool
from tests.kernels.oracle import needs_library
from tests.lightning import runs

pytestmark = needs_library
EPOCHS, FAN_OUT, SEED = 2, [4, 3], 11


def graph(*, one_sided: bool = False) -> Data:
    """A graph with values of edges and few training nodes; with ``one_sided`` they are all of the first part."""
    data = runs.graph()
    generator = torch.Generator().manual_seed(1)
    data.edge_attr = torch.rand(data.num_edges, 3, generator=generator, dtype=torch.float64)
    data.train_mask = torch.arange(160) < 50 if one_sided else torch.rand(160, generator=generator) < 0.5
    data.val_mask, data.test_mask = ~data.train_mask, ~data.train_mask
    return data


class Weighted(torch.nn.Module):
    """Takes weights and attributes of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(12, 8), nn.GATv2Conv(8, 4, edge_dim=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_attr)
        return out


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    if name == "weighted":
        return Weighted()
    if name == "norm":
        net: torch.nn.Module = nn.GraphSAGE(12, 8, num_layers=2, out_channels=4, norm="batch_norm")
    else:
        net = getattr(nn, name)(12, 8, num_layers=2, out_channels=4)
    return net


def batches(**options: Any) -> NeighborBatches:
    return NeighborBatches(FAN_OUT, batch_size=13, **options)


def data_module(folder: str, data: Data, partitioner: str, **options: Any) -> GraphDataModule:
    settings: dict[str, Any] = {"batches": batches(), "batch_seed": SEED, "cache_dir": Path(folder) / "cache"}
    return GraphDataModule(data, partitioner=partitioner, **{**settings, **options})


def on_ranks(
    rank: int, world_size: int, folder: str, name: str, data: Data, partitioner: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[dict[str, float]], Tensor]:
    """Train on the ranks of a pool; the parameters, what was logged, and the ids of this rank's nodes."""
    net, history = model(name), runs.History()
    module = NodeClassifier(net, backend=PullBackend(**options))
    module_data = data_module(folder, data, partitioner)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=EPOCHS, callbacks=[history])
    trainer.fit(module, datamodule=module_data)
    assert not [one for one in threading.enumerate() if one.name == "pygdist-batches"]
    return {key: value.clone() for key, value in net.state_dict().items()}, history.epochs, module_data.shard.owned_id


def on_one_process(name: str, data: Data, owned: list[Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    """Train plain PyG: in each step the batches of all ranks, and one optimiser step on the mean over their nodes."""
    net = model(name).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], num_rows=160, num_cols=160)
    seeds = [nodes[data.train_mask[nodes]] for nodes in owned]
    losses = []
    for epoch in range(EPOCHS):
        summed = 0.0
        steps = max(-(-one.numel() // 13) for one in seeds)
        for step in range(steps):
            total, count = torch.zeros(()), 0
            for nodes in seeds:
                order = ShuffledOrder(nodes.numel(), SEED, shuffle=True).of(epoch)
                chosen = nodes[order[step * nodes.numel() // steps : (step + 1) * nodes.numel() // steps]]
                if not chosen.numel():
                    continue
                batch = _native.sample(csr, chosen, FAN_OUT, replace=False, seed=SEED, epoch=epoch)
                values = {"edge_weight": data.edge_weight[batch.edge], "edge_attr": data.edge_attr[batch.edge]}
                edges = torch.stack([batch.source, batch.target])
                if name in ("GraphSAGE", "norm", "GIN"):
                    values = {}
                elif name != "weighted":
                    del values["edge_attr" if name == "GCN" else "edge_weight"]
                    values = {} if name == "GAT" else values
                out = net(data.x[batch.node], edges, **values)[: chosen.numel()]
                total = total + cross_entropy(out, data.y[chosen], reduction="sum")
                count += chosen.numel()
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            summed += float(total.detach())
        losses.append(summed / int(data.train_mask.sum()))
    return net.state_dict(), losses


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT", "weighted"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_train_as_one_process_on_the_same_batches(
    name: str, world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    data = graph()
    results = pool.run(on_ranks, world_size, str(tmp_path), name, data, "hash", {})
    expected, losses = on_one_process(name, data, [owned for _, _, owned in results])
    for found, history, _ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("options", [{"cache_gib": 1e-6}, {"cache_gib": 1e-6, "cache_by": "epoch"}], ids=str)
def test_a_cache_and_ranks_without_training_nodes_change_nothing(
    options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    data = graph(one_sided=True)
    results = pool.run(on_ranks, 3, str(tmp_path), "GCN", data, "chunk", options)
    expected, losses = on_one_process("GCN", data, [owned for _, _, owned in results])
    assert sorted(int(data.train_mask[owned].sum()) for _, _, owned in results)[0] == 0
    for found, history, _ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


class _Jumps(torch.nn.Module):
    """Rows of two depths meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.SAGEConv(12, 12), nn.SAGEConv(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(x + self.first(x, edge_index), edge_index)
        return out


class _WeighsItself(torch.nn.Module):
    """Normalises weights that it computes from attributes: degrees need those of all edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.weigh = nn.GCNConv(12, 8), nn.GCNConv(8, 4), torch.nn.Linear(3, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        weight = self.weigh(edge_attr).sigmoid().view(-1)
        out: Tensor = self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)
        return out


MODELS = {
    "GCN": lambda: model("GCN"),
    "GAT": lambda: model("GAT"),
    "weighted": Weighted,
    "deeper": lambda: nn.GCN(12, 8, num_layers=3, out_channels=4),
    "shallower": lambda: nn.GCN(12, 8, num_layers=1, out_channels=4),
    "knowledge": lambda: nn.GraphSAGE(12, 8, num_layers=2, out_channels=4, jk="cat"),
    "jumps": _Jumps,
    "two-hops": lambda: nn.Sequential("x, edge_index", [(nn.SGConv(12, 4, K=2, cached=True), "x, edge_index -> x")]),
    "norm": lambda: model("norm"),
    "graph-norm": lambda: nn.GCN(12, 8, num_layers=2, out_channels=4, norm="graph_norm"),
    "laplacian": lambda: nn.Sequential("x, edge_index", [(nn.ChebConv(12, 4, K=3), "x, edge_index -> x")]),
    "weighs-itself": _WeighsItself,
}
ALL_ROWS = ("norm", "graph-norm", "laplacian", "weighs-itself")


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_nobody_reads_are_left_out(name: str, tmp_path: Path) -> None:
    """The seeds' outputs and all gradients are those of PyG, on each of several batches."""
    torch.manual_seed(3)
    net, backend = MODELS[name]().double(), PullBackend()
    plain = copy.deepcopy(net)
    for layer in plain.modules():
        layer.cached = False  # PyG's cache would be of the first batch
    part = torch.zeros(160, dtype=torch.int32).numpy()
    write_store(graph(), part, tmp_path / "store", num_parts=1, method="test", arguments={})
    shard = Shard.load(tmp_path / "store", 0)
    backend.bind(shard, Communicator())
    distribute(net, backend=backend, savings=Savings(first_hop=False))
    batches = NeighborBatches(FAN_OUT, batch_size=13)
    for sample in backend.steps(shard, batches, plain, seed=0).epoch(0):
        graph_of, edges = sampled_graph(sample)
        found = outputs_of(net, graph_of, edges)
        expected = outputs_of(plain, sample, sample.edge_index)[: sample.batch_size]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for one in (found, expected):
            (one * one.detach().cos()).sum().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)
        assert isinstance(backend._done, SampledPass) == (name not in ALL_ROWS)
    assert any(one.grad is not None and bool(one.grad.any()) for one in plain.parameters())
