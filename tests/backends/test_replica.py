"""``replica``: a part by itself equals plain PyG on what is kept of the graph around it, and exchanges nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, subgraph
from typing_extensions import override

from pygdist.backends import CommBackend, ReplicaBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard, write_store
from pygdist.lightning.parts import sampled_graph
from pygdist.native import load
from pygdist.routing import distribute, undistribute
from pygdist.sampler import SaintNodeBatches
from pygdist.testing import LAYERS, RankError, RankPool, assert_exact, random_graph
from pygdist.testing.layers import build
from tests.backends.test_exactness import OF_A_PART

ONE_HOP = ["GCNConv", "GATConv", "SAGEConv-max", "GINEConv", "GraphConv", "LEConv", "FAConv"]
NUM_NODES, NUM_PARTS = 90, 4


class Mute(Communicator):
    """Ranks that nobody can reach."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, NUM_PARTS

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in {"exchange_rows", "sum_over_ranks", "gather", "agree", "all_to_all", "reduce_in_place", "announce"}:
            raise AssertionError(f"part {self.rank} calls {name}")
        return super().__getattribute__(name)


def _graph(kind: str = "directed") -> tuple[Data, np.ndarray]:
    data, parts = random_graph(kind, num_nodes=NUM_NODES)
    # the ends of few edges are near: more hops see more
    keep = torch.from_numpy(np.random.default_rng(1).random(data.num_edges) < 0.4)
    for name in ("edge_weight", "edge_attr", "edge_type"):
        data[name] = data[name][keep]
    data.edge_index = data.edge_index[:, keep]
    return data, parts[NUM_PARTS]


def _store(data: Data, part: np.ndarray, folder: Path, num_hops: int) -> Path:
    if not folder.exists():
        write_store(
            data, part, folder, num_parts=NUM_PARTS, method="given", arguments={}, notes=[], num_hops=num_hops,
            placement="replicas",
        )  # fmt: skip
    return folder


def _around(data: Data, own: Tensor, hops: int) -> tuple[Tensor, Tensor]:
    """What is kept: the nodes within so many hops, and which edges."""
    source, target = data.edge_index
    within = torch.zeros(NUM_NODES, dtype=torch.bool)
    within[own] = True
    near = within
    for _ in range(hops):
        near = within
        within = within.index_put((source[within[target]],), torch.tensor(True))
    inner = near[target] if hops else torch.zeros_like(target, dtype=torch.bool)
    return within, within[target] & (inner | near[source] | (source == target))


def _edges(data: Data, keep: Tensor) -> dict[str, Tensor]:
    return {name: data[name][keep] for name in ("edge_weight", "edge_attr", "edge_type")}


def _taken(model: nn.Module, given: Any) -> dict[str, Tensor]:
    return {name: getattr(given, name) for name in getattr(model, "takes", ()) if name.startswith("edge_")}


def _step(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of a loss that tells all values of it apart."""
    model.zero_grad()
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"output": out.detach(), **gradients}


@cache
def _backend(hops: int, **options: Any) -> ReplicaBackend:
    """The same for all parts: it makes its layers once."""
    return ReplicaBackend(hops=hops, **options)


def _bound(folder: Path, part: int = 0, hops: int = 1, **options: Any) -> tuple[Shard, ReplicaBackend]:
    shard, backend = Shard.load(folder, part), _backend(hops, **options)
    backend.bind(shard, Mute(part))
    return shard, backend


def _of_part(model: nn.Module, folder: Path, part: int, hops: int, **options: Any) -> dict[str, Tensor]:
    shard, backend = _bound(folder, part, hops, **options)
    model = distribute(copy.deepcopy(model), backend=backend, check=False)
    out = model(shard.x, shard.adjacency, **_taken(model, shard))
    assert out.shape[0] == shard.num_owned
    return _step(model, out)


def _of_graph(model: nn.Module, data: Data, keep: Tensor, own: Tensor) -> dict[str, Tensor]:
    """Plain PyG on some edges, nodes elsewhere having none."""
    model, kept = copy.deepcopy(model), Data(**_edges(data, keep))
    return _step(model, model(data.x, data.edge_index[:, keep], **_taken(model, kept))[own])


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=lambda said, of=name: f"{of}: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_as_many_hops_as_layers_are_exact_and_one_fewer_is_not(num_layers: int, pool: RankPool) -> None:
    options: dict[str, Any] = {"world_sizes": [1 + num_layers], "graphs": ["isolated"], "num_nodes": 70, "pool": pool}
    assert_exact(ReplicaBackend(hops=num_layers), layers=ONE_HOP, num_layers=num_layers, num_hops=num_layers, **options)
    with pytest.raises(AssertionError) as error:
        assert_exact(
            ReplicaBackend(hops=num_layers - 1), layers=ONE_HOP, num_layers=num_layers, num_hops=num_layers, **options
        )
    differ = {line.split(" on ")[0] for line in str(error.value).splitlines()[1:]}
    assert differ == set(ONE_HOP)


def test_layers_of_several_hops_need_as_many(pool: RankPool) -> None:
    layers = ["APPNP", "TAGConv", "SGConv", "MixHopConv", "ARMAConv", "GatedGraphConv"]
    options: dict[str, Any] = {"world_sizes": [3], "graphs": ["isolated"], "num_layers": 1, "num_hops": 3, "pool": pool}
    assert_exact(ReplicaBackend(hops=3), layers=layers, **options)
    with pytest.raises(AssertionError) as error:
        assert_exact(ReplicaBackend(hops=1), layers=layers, **options)
    assert {line.split(" on ")[0] for line in str(error.value).splitlines()[1:]} == set(layers)


@pytest.mark.slow
def test_what_looks_at_a_whole_part_is_never_exact(pool: RankPool) -> None:
    layers = [name for name in LAYERS if name in OF_A_PART and name != "PDNConv"]
    options: dict[str, Any] = {"world_sizes": [3], "graphs": ["directed"], "num_hops": 9, "pool": pool}
    with pytest.raises(AssertionError) as error:
        assert_exact(ReplicaBackend(hops=9), layers=layers, **options)
    assert {line.split(" on ")[0] for line in str(error.value).splitlines()[1:]} == set(layers)
    with pytest.raises(RankError, match=r"'replica' knows in-degrees by the graph's own edge weights"):
        assert_exact(ReplicaBackend(hops=9), layers=["PDNConv"], **options)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["GCNConv", "SAGEConv-mean", "GATConv", "GINEConv", "GCNConv-no-loops"])
def test_without_hops_a_part_is_its_own_subgraph(layer: str, tmp_path: Path) -> None:
    data, part = _graph()
    folder, model = _store(data, part, tmp_path / "parts", 1), build(layer, 5, 3)
    for number in range(NUM_PARTS):
        own = torch.from_numpy(part == number).nonzero().squeeze(1)
        edge_index, _, keep = subgraph(own, data.edge_index, relabel_nodes=True, return_edge_mask=True)
        plain = copy.deepcopy(model)
        kept = Data(**_edges(data, keep))
        _assert_same(
            _of_part(model, folder, number, 0), _step(plain, plain(data.x[own], edge_index, **_taken(model, kept)))
        )


@pytest.mark.slow
@pytest.mark.parametrize(("hops", "num_layers"), [(1, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("layer", ["SAGEConv-mean", "GINConv", "GraphConv", "GATConv-edges"])
def test_a_part_is_plain_pyg_on_what_is_kept_around_it(
    layer: str, hops: int, num_layers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, part = _graph()
    folder = _store(data, part, tmp_path_factory.getbasetemp() / f"around-{hops}", hops)
    model = build(layer, 5, 3, num_layers=num_layers)
    whole = torch.ones(data.num_edges, dtype=torch.bool)
    for number in range(NUM_PARTS):
        own = torch.from_numpy(part == number).nonzero().squeeze(1)
        _, keep = _around(data, own, hops)
        found = _of_part(model, folder, number, hops)
        _assert_same(found, _of_graph(model, data, keep, own))
        differs = (found["output"] - _of_graph(model, data, whole, own)["output"]).abs().max() > 1e-6
        assert differs == (hops < num_layers)


class GivenWeights(nn.Module):
    """The layers of a model of ``GCNConv`` on edges that are normalised already."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = copy.deepcopy(layers)
        for layer in self.layers:
            layer.normalize = False

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else x.tanh(), edge_index, edge_weight)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "weighted", "improved", "loops", "scaled"),
    [
        ("GCNConv", True, False, True, True),
        ("GCNConv-cached", False, False, True, True),
        ("GCNConv-improved", True, True, True, False),
        ("GCNConv-no-loops", False, False, False, True),
    ],
)
@pytest.mark.parametrize("stored", [1, 2])
def test_degrees_are_those_of_the_whole_graph_and_neighbours_stand_for_those_elsewhere(
    layer: str, weighted: bool, improved: bool, loops: bool, scaled: bool, stored: int, tmp_path: Path
) -> None:
    data, part = _graph()
    folder, model = _store(data, part, tmp_path / "parts", stored), build(layer, 5, 3)
    everywhere = Data(
        x=data.x,
        edge_index=gcn_norm(data.edge_index, data.edge_weight if weighted else None, NUM_NODES, improved, loops)[0],
        edge_weight=gcn_norm(
            data.edge_index, data.edge_weight if weighted else None, NUM_NODES, improved, loops, dtype=torch.float64
        )[1],
    )
    for number in range(NUM_PARTS):
        own = torch.from_numpy(part == number).nonzero().squeeze(1)
        _, keep = _around(everywhere, own, 1)
        plain, source_target, weight = GivenWeights(model.layers), everywhere.edge_index, everywhere.edge_weight
        target = source_target[1]
        apart = source_target[0] != target
        counted = torch.zeros(len(weight), dtype=torch.float64)  # PyG leaves edges that are no loops in their order
        counted[apart] = data.edge_weight[data.edge_index[0] != data.edge_index[1]] if weighted else 1.0
        every = torch.zeros(NUM_NODES, dtype=torch.float64).index_add(0, target, counted)
        here = torch.zeros(NUM_NODES, dtype=torch.float64).index_add(0, target, counted * keep)
        assert (here < every - 1e-9).any()
        if scaled:
            weight = torch.where(apart & keep, weight * (every / here)[target], weight)
        out = plain(data.x, source_target[:, keep], weight[keep])[own]
        _assert_same(_of_part(model, folder, number, 1, scale_rim=scaled), _step(plain, out))


class OtherEdges(nn.Module):
    """Normalises edges that are not those of the graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, pyg.GCNConv(5, 3, add_self_loops=kind == "some").double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = edge_index[:, ::2] if self.kind == "some" else add_self_loops(edge_index, num_nodes=x.size(0))[0]
        out: Tensor = self.conv(x, edges)
        return out


@pytest.mark.parametrize("kind", ["some", "loops"])
def test_degrees_of_other_edges_are_refused(kind: str, tmp_path: Path) -> None:
    data, part = _graph()
    with pytest.raises(InputError, match="knows in-degrees by all edges of the graph, but the model normalises other"):
        _of_part(OtherEdges(kind), _store(data, part, tmp_path / "parts", 1), 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["GCNConv", "GATConv-edges", "BatchNorm"])
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_a_graph_with_more_hops_gives_the_same(layer: str, hops: int, tmp_path: Path) -> None:
    data, part = _graph("power-law")
    tight, wide = (_store(data, part, tmp_path / str(stored), stored) for stored in (max(hops, 1), 3))
    model = build(layer, 5, 3, num_layers=3)
    for number in range(2):
        ours, theirs = (_of_part(model, folder, number, hops) for folder in (wide, tight))
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("layer", ["GraphNorm", "PairNorm", "SAGEConv-lstm", "GENConv", "EGConv"])
def test_norms_and_padding_take_the_part_alone(layer: str, tmp_path: Path) -> None:
    data, part = _graph()
    folder = _store(data, part, tmp_path / "parts", 1)
    assert _of_part(build(layer, 5, 3), folder, 1, 1)["output"].isfinite().all()  # and nobody was asked


def test_batch_norm_takes_its_statistics_from_own_rows(tmp_path: Path) -> None:
    data, part = _graph()
    folder, model = _store(data, part, tmp_path / "parts", 1), build("BatchNorm", 5, 3)
    for number in range(NUM_PARTS):
        shard, backend = _bound(folder, number)
        ours = distribute(copy.deepcopy(model), backend=backend, check=False)
        ours(shard.x, shard.adjacency)
        hidden = model.first(data.x, data.edge_index)[shard.owned_id]  # the first layer is exact on own rows
        norm = next(one for one in ours.modules() if isinstance(one, nn.BatchNorm1d))
        torch.testing.assert_close(norm.running_mean, 0.1 * hidden.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * hidden.var(0), rtol=0, atol=1e-12)


# -- mini-batches ------------------------------------------------------------------------------------------------------


def _batches(shard: Shard) -> list[tuple[Tensor, Tensor]]:
    """Graphs of other sizes, one with as many rows as the part has nodes."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for num_rows, num_edges in ((7, 20), (shard.num_owned, 40), (NUM_NODES + 9, 60), (5, 1)):
        x = torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)
        edge_index = torch.randint(num_rows, (2, num_edges), generator=generator)
        found.append((x, edge_index[:, edge_index[1].argsort(stable=True)]))
    return found


def _adjacency(edge_index: Tensor, num_nodes: int) -> Adjacency:
    return Adjacency.from_unsorted(edge_index, num_src=num_nodes, num_dst=num_nodes)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer", ["GCNConv", "GCNConv-derived", "SAGEConv-mean", "SAGEConv-lstm", "GATConv", "BatchNorm"]
)
@pytest.mark.parametrize("kind", ["edge_index", "adjacency"])
def test_a_mini_batch_runs_as_on_the_plain_model(layer: str, kind: str, tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    plain = build(layer, 5, 3)
    ours = distribute(copy.deepcopy(plain), backend=backend, check=False)
    for training in (True, False):
        plain.train(training)
        ours.train(training)
        for x, edge_index in _batches(shard):
            edges = edge_index if kind == "edge_index" else _adjacency(edge_index, x.size(0))
            _assert_same(_step(ours, ours(x, edges)), _step(plain, plain(x, edge_index)))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=0, atol=1e-12)


def test_a_mini_batch_brings_its_own_weights(tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    plain = build("GCNConv", 5, 3)
    ours = distribute(copy.deepcopy(plain), backend=backend, check=False)
    for x, edge_index in _batches(shard):
        weight = torch.rand(edge_index.size(1), dtype=torch.float64, requires_grad=True)
        _assert_same(_step(ours, ours(x, edge_index, weight)), _step(plain, plain(x, edge_index, weight)))


def test_mini_batches_and_the_whole_part_take_turns(tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    plain = build("GCNConv", 5, 3)
    ours = distribute(copy.deepcopy(plain), backend=backend, check=False)
    whole = ours(shard.x, shard.adjacency).detach()
    for x, edge_index in _batches(shard):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ours(x[:, :2], edge_index)  # a batch that fails leaves nothing behind
        torch.testing.assert_close(ours(x, edge_index), plain(x, edge_index), rtol=0, atol=1e-12)
        assert torch.equal(ours(shard.x, shard.adjacency), whole)


def _layer(conv: nn.Module, h: Tensor, messages: Tensor, target: Tensor, degree: Tensor) -> Tensor:
    """By hand, with messages that are weighted already."""
    summed = torch.zeros_like(h).index_add(0, target, messages)
    if isinstance(conv, pyg.GINConv):
        return conv.nn((1 + conv.eps) * h + summed)  # type: ignore[no-any-return]
    if isinstance(conv, pyg.GraphConv):
        return conv.lin_rel(summed) + conv.lin_root(h)  # type: ignore[no-any-return]
    mean = summed / degree.clamp(min=1)[:, None] if conv.aggr == "mean" else summed
    return conv.lin_l(mean) + conv.lin_r(h)  # type: ignore[no-any-return,operator]


@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize("name", ["GraphSAGE-mean", "GraphSAGE-sum", "GIN", "GraphConv", "GAT", "GraphSAGE-max"])
def test_how_edges_were_sampled_is_made_up_for(name: str, tmp_path: Path) -> None:
    """Also in layers that take no edge weights, if they are sums or means; PyG's models of these take none."""
    data, part = _graph()
    data.train_mask = torch.ones(NUM_NODES, dtype=torch.bool)
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    graph, csr = backend.part_graph(shard)
    batch = next(iter(SaintNodeBatches(12, num_steps=1, sample_coverage=5).loader(graph, csr, seed=0)))
    batch.edge_norm = batch.edge_norm.double()
    assert torch.equal(batch.in_degree, csr.indptr.diff()[batch.n_id])
    assert batch.edge_norm.unique().numel() > 2
    torch.manual_seed(0)
    kind, _, aggr = name.partition("-")
    if kind == "GraphConv":
        plain: nn.Module = pyg.Sequential(
            "x, edge_index",
            [(pyg.GraphConv(5, 8), "x, edge_index -> x"), nn.ReLU(), (pyg.GraphConv(8, 3), "x, edge_index -> x")],
        )
        convs = [plain[0], plain[2]]  # type: ignore[index]
    else:
        plain = getattr(pyg, kind)(5, 8, num_layers=2, out_channels=3, **({"aggr": aggr} if aggr else {}))
        convs = list(plain.convs)  # type: ignore[arg-type]
    plain = plain.double()
    ours = distribute(copy.deepcopy(plain), backend=backend, check=False)
    sample, edges = sampled_graph(batch)
    if name in ("GAT", "GraphSAGE-max"):
        backend._warned.clear()
        with pytest.warns(UserWarning, match=f"{type(convs[0]).__name__} runs without GraphSAINT"):
            out = ours(sample.x, edges)
        torch.testing.assert_close(out, plain(batch.x, batch.edge_index), rtol=0, atol=1e-12)
        with warnings.catch_warnings(action="error"):  # once
            ours(sample.x, edges)
        return
    source, target = batch.edge_index
    h = batch.x
    for conv in convs:
        h = h if conv is convs[0] else h.relu()
        h = _layer(conv, h, batch.edge_norm[:, None] * h[source], target, batch.in_degree)
    _assert_same(_step(ours, ours(sample.x, edges)), _step(plain, h))
    assert float((plain(batch.x, batch.edge_index) - h).detach().abs().max()) > 1e-3, "not the same without"


def test_weights_that_a_model_gives_its_layers_are_not_applied_twice(tmp_path: Path) -> None:
    data, part = _graph()
    _, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    plain = pyg.GraphConv(5, 3).double()
    ours = distribute(copy.deepcopy(plain), backend=backend, check=False)
    x, edge_index = torch.randn(6, 5).double(), torch.tensor([[1, 2, 3, 3], [0, 0, 2, 4]])
    batch = Data(x=x, edge_index=edge_index, num_nodes=6, edge_norm=torch.tensor([2.0, 3.0, 0.5, 4.0]).double())
    sample, edges = sampled_graph(batch)
    with warnings.catch_warnings(action="error"):
        out = ours(sample.x, edges, edge_weight=sample.edge_weight)
    torch.testing.assert_close(out, plain(x, edge_index, batch.edge_norm), rtol=0, atol=1e-12)
    mean = distribute(pyg.SAGEConv(5, 3).double(), backend=backend, check=False)
    backend._warned.clear()  # others ran on it
    with pytest.warns(
        UserWarning, match="SAGEConv runs without GraphSAINT"
    ):  # nobody knows how many neighbours there are
        mean(sample.x, edges)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_the_graph_of_a_part(hops: int, multi_label: bool, tmp_path: Path) -> None:
    data, part = _graph()
    if multi_label:
        data.y = torch.eye(3, dtype=torch.float64)[data.y.clamp(min=0)]
    folder, backend = _store(data, part, tmp_path / "parts", 2), ReplicaBackend(hops=hops)
    for number in range(NUM_PARTS):
        shard = Shard.load(folder, number)
        graph, csr = backend.part_graph(shard)
        within, keep = _around(data, shard.owned_id, hops)
        n_id = shard.surroundings.n_id[: graph.num_nodes]
        assert sorted(n_id.tolist()) == within.nonzero().squeeze(1).tolist()
        assert torch.equal(n_id[: shard.num_owned], shard.owned_id)
        assert torch.equal(graph.x, data.x[n_id])
        source, target = n_id[csr.index.long()], n_id[csr.row_index().long()]
        found = torch.stack([source, target, graph.edge_weight], dim=1).tolist()
        wanted = torch.cat([data.edge_index[:, keep], data.edge_weight[None, keep]]).t().tolist()
        assert sorted(found) == sorted(wanted)
        own, around = slice(shard.num_owned), slice(shard.num_owned, None)
        assert torch.equal(graph.y[own], data.y[shard.owned_id])
        assert bool(graph.y[around].isnan().all() if multi_label else (graph.y[around] == -1).all())
        for mask in ("train_mask", "val_mask", "test_mask"):
            assert torch.equal(graph[mask][own], data[mask][shard.owned_id])
            assert not graph[mask][around].any()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_negative_hops_are_refused() -> None:
    with pytest.raises(InputError, match="hops is -1, expected 0 or more"):
        ReplicaBackend(hops=-1)


def test_a_graph_without_surroundings_is_refused(tmp_path: Path) -> None:
    data, part = _graph()
    write_store(data, part, tmp_path / "nodes", num_parts=NUM_PARTS, method="given", arguments={}, notes=[])
    shard = Shard.load(tmp_path / "nodes", 0)
    for hops in (0, 1):
        with pytest.raises(InputError, match=r"needs placement replicas with 1 hops.*partitioned with placement nodes"):
            ReplicaBackend(hops=hops).bind(shard, Communicator())


def test_a_graph_with_too_few_hops_is_refused(tmp_path: Path) -> None:
    data, part = _graph()
    shard = Shard.load(_store(data, part, tmp_path / "parts", 1), 0)
    said = r"with 2 hops, but the graph was partitioned with halos of 1 hops.*--placement replicas --hops 2"
    for use in (
        lambda: ReplicaBackend(hops=2).bind(shard, Communicator()),
        lambda: ReplicaBackend(hops=2).part_graph(shard),
    ):
        with pytest.raises(InputError, match=said):
            use()


def test_rows_that_the_graph_does_not_have_are_refused(tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1))
    model = distribute(build("GraphConv", 5, 3), backend=backend, check=False)
    with pytest.raises(InputError, match=r"the model gets a tensor of shape \(\d+, 5\) that is neither"):
        model(shard.x * 2, shard.adjacency)
    with pytest.raises(InputError, match=r"the model gets a tensor of shape \(\d+,\) that is neither"):
        model(shard.x, shard.adjacency, edge_weight=shard.edge_weight * 2)


CHANGES: dict[str, Callable[[Shard, str], Any]] = {
    "in place": lambda shard, name: getattr(shard, name).mul_(2),
    "unseen": lambda shard, name: getattr(shard, name).data.mul_(2),
    "assigned": lambda shard, name: setattr(shard, name, getattr(shard, name) * 2),
}


@pytest.mark.parametrize(("how", "late"), [("in place", False), ("assigned", False), *((how, True) for how in CHANGES)])
@pytest.mark.parametrize("name", ["x", "edge_weight"])
def test_values_that_change_after_loading_are_refused(name: str, how: str, late: bool, tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = Shard.load(_store(data, part, tmp_path / "parts", 1), 1), ReplicaBackend(hops=1)
    model = distribute(build("GraphConv", 5, 3), backend=backend, check=False)
    if late:
        backend.bind(shard, Mute(1))
        model(shard.x, shard.adjacency, edge_weight=shard.edge_weight)
    CHANGES[how](shard, name)
    if not late:
        backend.bind(shard, Mute(1))
    said = rf"shard\.{name} of part 1 has changed since it was loaded.*partition the graph with the changed values"
    with pytest.raises(InputError, match=said):
        model(shard.x, shard.adjacency, edge_weight=shard.edge_weight)
    if how != "unseen":
        with pytest.raises(InputError, match=said):
            backend.part_graph(shard)


@pytest.mark.parametrize("how", CHANGES)
def test_values_that_change_are_used_without_hops(how: str, tmp_path: Path) -> None:
    data, part = _graph()
    folder, model = _store(data, part, tmp_path / "parts", 1), build("GraphConv", 5, 3)
    own = torch.from_numpy(part == 0).nonzero().squeeze(1)
    edge_index, _, keep = subgraph(own, data.edge_index, relabel_nodes=True, return_edge_mask=True)
    shard, backend = Shard.load(folder, 0), ReplicaBackend(hops=0)
    backend.bind(shard, Mute(0))
    ours = distribute(copy.deepcopy(model), backend=backend, check=False)
    ours(shard.x, shard.adjacency, edge_weight=shard.edge_weight)
    for name in ("x", "edge_weight"):
        CHANGES[how](shard, name)
    found = ours(shard.x, shard.adjacency, edge_weight=shard.edge_weight)
    wanted = model(2 * data.x[own], edge_index, edge_weight=2 * data.edge_weight[keep])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_edges_may_carry_other_weights_in_turn(tmp_path: Path) -> None:
    data, part = _graph()
    data.edge_attr = data.edge_weight.square()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 1), hops=1)
    model = distribute(pyg.SimpleConv(aggr="sum"), backend=backend, check=False)
    for name in ("edge_weight", "edge_attr", "edge_weight"):
        out = model(shard.x, shard.adjacency.with_value(getattr(shard, name)))
        source, target = data.edge_index
        wanted = torch.zeros_like(data.x).index_add(0, target, data[name][:, None] * data.x[source])
        torch.testing.assert_close(out, wanted[shard.owned_id], rtol=0, atol=1e-12)


class Normalising(nn.Module):
    """Normalises weights that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.conv = nn.Parameter(torch.tensor(0.5, dtype=torch.float64)), pyg.GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, edge_weight * self.scale)
        return out


def test_weights_that_a_model_learns_and_normalises_are_refused(tmp_path: Path) -> None:
    data, part = _graph()
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 2), hops=2)
    model = distribute(Normalising().double(), backend=backend, check=False)
    with pytest.raises(InputError, match="the model normalises weights that it computes"):
        model(shard.x, shard.adjacency, shard.edge_weight)
    # without anything around, the part's own edges are all there are
    shard, backend = _bound(_store(data, part, tmp_path / "parts", 2), hops=0)
    distribute(undistribute(model), backend=backend, check=False)(
        shard.x, shard.adjacency, shard.edge_weight
    ).sum().backward()


def test_a_backend_that_exchanges_cannot_do_without_ranks(tmp_path: Path) -> None:
    """The communicator that fails is one that a backend notices."""
    data, part = _graph()
    shard, backend = Shard.load(_store(data, part, tmp_path / "parts", 1), 0), CommBackend()
    backend.bind(shard, Mute(0))
    with pytest.raises(AssertionError, match="part 0 calls"):
        distribute(build("SAGEConv-mean", 5, 3), backend=backend, check=False)(shard.x, shard.adjacency)
