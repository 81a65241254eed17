"""``pull``: mini-batches sampled across ranks train as one process would that samples the same batches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch_geometric import nn
from torch_geometric.data import Data

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import PullBackend, Savings
from pygdist.backends.passes.sampled import SAMPLED_HOPS, SampledHops, SampledPass
from pygdist.comm import Communicator
from pygdist.graph import Adjacency, Shard, write_store
from pygdist.kernels import CSR
from pygdist.lightning import LinkPredictor, ModelAveragingStrategy
from pygdist.lightning.parts import sampled_graph
from pygdist.nn.inputs import outputs_of
from pygdist.routing import distribute
from pygdist.sampler import ClusterBatches, EdgeBatches, NeighborBatches, _native
from pygdist.sampler.epoch import ShuffledOrder
from pygdist.testing import RankPool, random_graph
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


def on_one_process(
    make: Callable[[], torch.nn.Module], data: Data, owned: list[Tensor]
) -> tuple[dict[str, Tensor], list[float]]:
    """Train plain PyG: in each step the batches of all ranks, and one optimiser step on the mean over their nodes."""
    net = make().double()
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
                sample = Data(
                    x=data.x[batch.node], edge_weight=data.edge_weight[batch.edge], edge_attr=data.edge_attr[batch.edge]
                )
                out = outputs_of(net, sample, torch.stack([batch.source, batch.target]))[: chosen.numel()]
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
    expected, losses = on_one_process(lambda: model(name), data, [owned for _, _, owned in results])
    for found, history, _ in results:
        assert_close(found, expected)
        assert [epoch["train_loss"] for epoch in history] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("options", [{"cache_gib": 1e-6}, {"cache_gib": 1e-6, "cache_by": "epoch"}], ids=str)
def test_a_cache_and_ranks_without_training_nodes_change_nothing(
    options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    data = graph(one_sided=True)
    results = pool.run(on_ranks, 3, str(tmp_path), "GCN", data, "chunk", options)
    expected, losses = on_one_process(lambda: model("GCN"), data, [owned for _, _, owned in results])
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


# -- links -------------------------------------------------------------------------------------------------------------


def _links(rank: int, world_size: int, folder: str, resume: str | None) -> tuple[dict[str, Tensor], list[Any], Any]:
    torch.manual_seed(7)
    net, history, seen = nn.GraphSAGE(12, 8, num_layers=2, out_channels=6), runs.History(), list[Any]()
    batches = EdgeBatches([4, 3], batch_size=150, negatives=2)
    data = GraphDataModule(graph(), partitioner="hash", batches=batches, edge_split=(0.1, 0.1), cache_dir=folder)
    module = LinkPredictor(net, backend="pull", lr=0.02)

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch.sample is not None:
                seen.append(batch.sample.to_dict())
            else:
                seen.append(None)

    trainer = runs.trainer(rank, world_size, folder, max_epochs=4, callbacks=[history, Seen()])
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    tested = trainer.test(module, datamodule=data, verbose=False)[0]
    held = data.shard.val_edges, data.shard.test_edges
    ends = [data.shard.n_id[edges[:2]] for edges in held if edges is not None]
    return net.state_dict(), history.epochs, (seen, tested, torch.cat(ends, dim=1))


@pytest.mark.parametrize("world_size", [1, 3])
def test_links_are_learned_from_batches_of_edges(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_links, world_size, str(tmp_path), None)
    data = graph()
    edges = set(map(tuple, data.edge_index.t().tolist()))
    held = {tuple(edge) for *_, (_, _, ends) in results for edge in ends.t().tolist()}
    learned: list[tuple[int, int]] = []
    for state, history, (seen, _, _) in results:
        assert_close(state, results[0][0])
        assert history == results[0][1]
        for sample in filter(None, seen):
            pairs = sample["n_id"][sample["edge_label_index"]].t().tolist()
            positive = [tuple(pair) for pair, label in zip(pairs, sample["edge_label"], strict=True) if label]
            negative = [tuple(pair) for pair, label in zip(pairs, sample["edge_label"], strict=True) if not label]
            assert len(negative) == 2 * len(positive)
            assert not set(negative) & edges, "a negative pair is an edge"
            learned += positive
    assert sorted(learned) == sorted(4 * [edge for edge in edges if edge not in held and edge[0] != edge[1]])
    expected = _learned_by_one(data, [seen for *_, (seen, _, _) in results])
    assert_close(results[0][0], expected)


def _learned_by_one(data: Data, seen: list[list[dict[str, Any] | None]]) -> dict[str, Tensor]:
    """Train plain PyG on the pairs that the ranks saw, those of a step together."""
    torch.manual_seed(7)
    net = nn.GraphSAGE(12, 8, num_layers=2, out_channels=6).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for samples in zip(*seen, strict=True):
        scores, labels = [], []
        for sample in filter(None, samples):
            out = net(data.x[sample["n_id"]], sample["edge_index"])
            scores.append((out[sample["edge_label_index"][0]] * out[sample["edge_label_index"][1]]).sum(dim=1))
            labels.append(sample["edge_label"])
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels).double()).backward()
        optimizer.step()
    state: dict[str, Tensor] = net.state_dict()
    return state


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(rank: int, world_size: int, folder: str, options: dict[str, Any], resume: str | None) -> Any:
    net, history = model("GCN"), runs.History()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    callbacks = [history, *([saving] if options.pop("saves", False) else [])]
    settings: dict[str, Any] = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": len(callbacks) > 1}
    trainer = runs.trainer(rank, world_size, folder, **{**settings, **options})
    trainer.fit(NodeClassifier(net, backend="pull"), datamodule=data_module(folder, graph(), "hash"), ckpt_path=resume)
    assert not [one for one in threading.enumerate() if one.name == "pygdist-batches"]
    return {key: value.clone() for key, value in net.state_dict().items()}, history.epochs, trainer.global_step


def test_a_run_resumes_within_an_epoch_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(_run, 2, str(tmp_path), {"saves": True}, None)
    assert whole[0][2] == 12
    resumed = pool.run(_run, 2, str(tmp_path), {}, str(tmp_path / "step=6.ckpt"))
    for (expected, _, _), (found, _, steps) in zip(whole, resumed, strict=True):
        assert steps == 12
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"limit_train_batches": 2}, 6), ({"max_steps": 5, "max_epochs": None}, 5), ({"fast_dev_run": True}, 1)],
    ids=str,
)
def test_an_epoch_that_is_cut_leaves_no_thread_and_no_exchange(
    options: dict[str, Any], steps: int, pool: RankPool, tmp_path: Path
) -> None:
    for _, history, made in pool.run(_run, 2, str(tmp_path), options, None):
        assert made == steps
        assert "val_acc" in history[-1]


def _refused(rank: int, world_size: int, folder: str, data: dict[str, Any], task: Any, strategy: Any) -> str:
    module_data = data_module(folder, graph(), "hash", **data)
    net = model("GCN")
    module = LinkPredictor(net, backend="pull") if task == "links" else NodeClassifier(net, backend="pull")
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1, **({"strategy": strategy()} if strategy else {}))
    with pytest.raises(InputError) as refused:
        trainer.fit(module, datamodule=module_data)
    return str(refused.value)


@pytest.mark.parametrize(
    ("data", "task", "strategy", "says"),
    [
        ({"batches": None}, "nodes", None, "batches: backend 'pull' trains on mini-batches; set batches"),
        ({"batches": ClusterBatches(4, 2, partitioner="chunk")}, "nodes", None, "ClusterBatches divides one part"),
        ({"batches": NeighborBatches([2], library="pyg")}, "nodes", None, "library 'pyg' samples one part"),
        ({"num_workers": 1}, "nodes", None, "num_workers: batches are sampled by all ranks together"),
        ({"batches": EdgeBatches([2])}, "nodes", None, "NodeClassifier trains on nodes, but EdgeBatches have edges"),
        ({}, "links", None, "LinkPredictor trains on pairs of nodes, but NeighborBatches have nodes"),
        ({}, "nodes", ModelAveragingStrategy, "trains each part by itself, but backend 'pull'"),
    ],
)
def test_what_cannot_be_pulled_is_refused_on_all_ranks(
    data: dict[str, Any], task: str, strategy: Any, says: str, pool: RankPool, tmp_path: Path
) -> None:
    for text in pool.run(_refused, 2, str(tmp_path), data, task, strategy):
        assert says in text


@pytest.mark.parametrize(
    ("options", "says"),
    [({"cache_gib": -1}, "cache_gib is -1"), ({"cache_gib": float("nan")}, "cache_gib is nan"),
     ({"cache_by": "size"}, "cache_by is 'size', expected one of degree, epoch")],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        PullBackend(**options)


def _traffic(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[int]:
    """Bytes of feature rows that all ranks send in each epoch."""
    sent: list[int] = []

    class Meter(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.communicator.meter.reset()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            sent.append(module.communicator.meter.read().bytes_by_label["features, rows"])

    trainer = runs.trainer(rank, world_size, folder, max_epochs=3, callbacks=[Meter()], limit_val_batches=0)
    trainer.fit(NodeClassifier(model("GCN"), PullBackend(**options)), datamodule=data_module(folder, graph(), "hash"))
    return sent


def test_a_cache_saves_bytes(pool: RankPool, tmp_path: Path) -> None:
    sent = {
        by: torch.tensor(pool.run(_traffic, 2, str(tmp_path), options)).sum(dim=0).tolist()
        for by, options in {
            "none": {}, "degree": {"cache_gib": 40 * 104 / 2**30, "cache_by": "degree"},
            "epoch": {"cache_gib": 40 * 104 / 2**30, "cache_by": "epoch"}, "all": {"cache_gib": 1},
        }.items()
    }  # fmt: skip
    assert sent["all"] == [0, 0, 0]
    assert all(kept < whole for kept, whole in zip(sent["degree"], sent["none"], strict=True))
    assert sent["epoch"][0] == sent["none"][0]
    assert all(kept < whole for kept, whole in zip(sent["epoch"][1:], sent["none"][1:], strict=True))


class OwnNorm(torch.nn.Module):
    """A norm of the user's own, which looks at all rows in training alone; the edges come first."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.SAGEConv(5, 8), nn.SAGEConv(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, edge_index: Tensor, x: Tensor) -> Tensor:
        hidden = self.first(x, edge_index)
        mean = hidden.mean(0) if self.training else self.mean
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
        out: Tensor = self.second(hidden - mean, edge_index)
        return out


def _bound_batch(tmp_path: Path, net: torch.nn.Module) -> tuple[PullBackend, torch.nn.Module, Tensor, Adjacency]:
    data, parts = random_graph("directed")
    write_store(data, parts[1], tmp_path / "parts", num_parts=1, method="x", arguments={}, notes=[])
    backend, sizes = PullBackend(), (4, 6, 8)
    backend.bind(Shard.load(tmp_path / "parts", 0), Communicator())
    target = torch.arange(10).repeat_interleave(2)
    source = (torch.arange(20) * 5 + 3) % torch.where(target < 4, 10, 18)
    edges = Adjacency(torch.stack([source, target]), num_src=18, num_dst=18)
    edges.slot(SAMPLED_HOPS, lambda: SampledHops(sizes))
    return backend, distribute(net, backend=backend, check=False), torch.randn(18, 5, dtype=torch.float64), edges


def test_a_norm_that_looks_at_all_rows_in_training_alone_gets_them(tmp_path: Path) -> None:
    plain = OwnNorm().double()
    _, model, x, edges = _bound_batch(tmp_path, copy.deepcopy(plain))
    out = model(edges, x)
    torch.testing.assert_close(out, plain(edges.as_tensor(), x)[:4], rtol=0, atol=1e-12)
    torch.testing.assert_close(model.mean, plain.mean)


def test_a_batch_has_as_many_nodes_as_its_edges_say(tmp_path: Path) -> None:
    backend, model, x, edges = _bound_batch(tmp_path, OwnNorm().double())
    assert backend._over(model, (edges, x), {}).num_rows == 18
    assert backend._over(model, (), {"edge_index": edges, "x": torch.ones(())}).num_rows == 18
