"""GraphSAINT's normalisation in layers: what a batch gives is by the published formula, and on average that of all."""

from __future__ import annotations

import copy
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from pygdist.backends import ReplicaBackend, Savings
from pygdist.comm import Communicator
from pygdist.graph import Shard, degree_corrected_sbm, write_store
from pygdist.hops.layer import CACHES
from pygdist.lightning.parts import sampled_graph
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.sampler import ClusterBatches, NeighborBatches, SaintNodeBatches
from pygdist.testing import random_graph

needs_sampler = pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
NUM_NODES = 90


class Weighted(nn.Module):
    """A layer in a model that is given the edges' weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(x, edge_index, edge_weight)
        return out


class Unweighted(Weighted):
    """A layer in a model that knows of no weights."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.layer(x, edge_index)
        return out


def _graph() -> tuple[Data, np.ndarray]:
    """With self-loops, some of them parallel, and nodes that have none."""
    data, parts = random_graph("directed", num_nodes=NUM_NODES)
    loops = torch.tensor([[0, 0, 1, 7, 30], [0, 0, 1, 7, 30]])
    data.edge_index = torch.cat([data.edge_index, loops], dim=1)
    data.edge_weight = torch.cat([data.edge_weight, torch.tensor([0.5, 2.0, 1.5, 0.7, 3.0]).double()])
    del data.edge_attr, data.edge_type
    data.train_mask = torch.ones(NUM_NODES, dtype=torch.bool)
    return data, parts[3]


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pygdist-test-")


def _write(data: Data, part: np.ndarray, num_hops: int = 1) -> Path:
    """Where the parts of a graph are; the same graph is written once."""
    weighted = "weighted" if data.get("edge_weight") is not None else "unweighted"
    folder = Path(_scratch().name) / f"{data.num_nodes}-{weighted}-{num_hops}"
    if not folder.exists():
        write_store(
            data, part, folder, num_parts=int(part.max()) + 1, method="given", arguments={}, notes=[],
            num_hops=num_hops, placement="replicas",
        )  # fmt: skip
    return folder


def _bound(folder: Path, part: int = 0, hops: int = 1) -> tuple[Shard, ReplicaBackend]:
    shard, backend = Shard.load(folder, part), ReplicaBackend(hops=hops)
    backend.bind(shard, Communicator())
    return shard, backend


def _batch(shard: Shard, backend: ReplicaBackend) -> Data:
    graph, csr = backend.part_graph(shard)
    batch = next(iter(SaintNodeBatches(20, num_steps=1, sample_coverage=5).loader(graph, csr, seed=0)))
    batch.edge_norm = batch.edge_norm.double()
    return batch


def _run(model: nn.Module, batch: Data) -> Tensor:
    graph, edges = sampled_graph(batch)
    weights = {"edge_weight": graph.edge_weight} if type(model).__name__ == "Weighted" else {}
    out: Tensor = model(graph.x, edges, **weights)
    return out


# -- GCN and its relatives ---------------------------------------------------------------------------------------------


def _published(
    batch: Data, edges: Tensor, weight: Tensor, n_id: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets and weights: of the part's normalised matrix, times the norm; a node's own entry as it is.

    Args:
        batch: What was sampled.
        edges: Of the part, in global ids.
        weight: Of these.
        n_id: Global ids of the batch's nodes.
        options: Of the layer.
    """
    source, target = edges
    degree = torch.zeros(NUM_NODES, dtype=torch.float64)
    loops = torch.full((NUM_NODES,), 2.0 if options.get("improved") else 1.0, dtype=torch.float64)
    add = options.get("add_self_loops", True)
    if add:
        same = source == target
        loops[target[same]] = weight[same]
        degree += loops
        source, target, weight = source[~same], target[~same], weight[~same]
    degree.index_add_(0, target, weight)
    scale = degree.pow(-0.5).masked_fill(degree == 0, 0)[n_id]
    (u, v), norm = batch.edge_index, batch.edge_norm * batch.get("edge_weight", 1.0)
    if add:
        u, v, norm = u[u != v], v[u != v], norm[u != v]
        here = torch.arange(n_id.numel())
        u, v, norm = torch.cat([u, here]), torch.cat([v, here]), torch.cat([norm, loops[n_id]])
    return u, v, norm * scale[u] * scale[v]


def _hops(u: Tensor, v: Tensor, weight: Tensor, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = torch.zeros_like(x).index_add(0, v, weight[:, None] * x[u])
    return x


NORMALISING: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "GCNConv": (pyg.GCNConv, {}),
    "GCNConv-narrow": (pyg.GCNConv, {"out_channels": 2}),
    "GCNConv-improved": (pyg.GCNConv, {"improved": True}),
    "GCNConv-no-loops": (pyg.GCNConv, {"add_self_loops": False}),
    "SGConv": (pyg.SGConv, {"K": 2}),
}


@pytest.mark.slow
@needs_sampler
@pytest.mark.parametrize("hops", [0, 1, 2])
@pytest.mark.parametrize("kind", ["model-weighted", "model-unweighted", "graph-unweighted"])
@pytest.mark.parametrize("name", NORMALISING)
def test_gcn_is_normalised_by_the_degrees_of_the_part(name: str, kind: str, hops: int) -> None:
    data, part = _graph()
    whole = data.edge_index, data.edge_weight
    if kind == "graph-unweighted":
        del data.edge_weight
    if kind != "model-weighted":
        whole = data.edge_index, torch.ones(data.num_edges, dtype=torch.float64)
    make, options = NORMALISING[name]
    options = {"in_channels": data.x.size(1), "out_channels": 7, **options}
    torch.manual_seed(0)
    layer = make(**options).double()
    shard, backend = _bound(_write(data, part, max(hops, 1)), 1, hops)
    batch = _batch(shard, backend)
    n_id = shard.surroundings.n_id[batch.n_id]
    if hops == 0:  # what is dropped counts nowhere
        own = torch.from_numpy(part == 1)
        keep = own[whole[0]].all(dim=0)
        whole = whole[0][:, keep], whole[1][keep]
    by_hand = copy.copy(batch)
    counted = options
    if kind != "model-weighted":
        counted = {**options, "improved": False}  # in PyG that is for weights alone
    if kind == "model-unweighted":
        by_hand = Data(**{key: value for key, value in batch.items() if key != "edge_weight"})
    found = _published(by_hand, *whole, n_id, counted)
    bias = layer.bias if isinstance(layer, pyg.GCNConv) else layer.lin.bias
    rows = _hops(*found, batch.x, options.get("K", 1))
    wanted = rows @ layer.lin.weight.t() + bias
    differs = layer(batch.x, batch.edge_index, batch.edge_norm)
    model = distribute((Weighted if kind == "model-weighted" else Unweighted)(layer), backend=backend, check=False)
    for _ in range(2):
        torch.testing.assert_close(_run(model, batch), wanted, rtol=0, atol=1e-12)
    assert float((differs - wanted).detach().abs().max()) > 1e-2, "the batch's own degrees give another"


@needs_sampler
def test_weights_that_a_model_computes_have_the_degrees_of_the_batch() -> None:
    data, part = _graph()
    shard, backend = _bound(_write(data, part))
    batch, plain = _batch(shard, backend), pyg.GCNConv(5, 3).double()
    graph, edges = sampled_graph(batch)
    model = distribute(Weighted(copy.deepcopy(plain)), backend=backend, check=False)
    squared = graph.edge_weight**2
    torch.testing.assert_close(
        model(graph.x, edges, edge_weight=squared), plain(graph.x, edges.as_tensor(), squared), rtol=0, atol=1e-12
    )


# -- means -------------------------------------------------------------------------------------------------------------


@needs_sampler
@pytest.mark.parametrize("model", [Weighted, Unweighted])
@pytest.mark.parametrize("fused", [True, False])
def test_a_mean_of_weighted_rows_is_over_all_that_a_node_has(model: Any, fused: bool) -> None:
    data, part = _graph()
    shard, backend = _bound(_write(data, part))
    batch, layer = _batch(shard, backend), pyg.GraphConv(5, 3, aggr="mean").double()
    layer.fuse = fused
    weight = batch.edge_norm * (batch.edge_weight if model is Weighted else 1)
    summed = torch.zeros_like(batch.x).index_add(0, batch.edge_index[1], weight[:, None] * batch.x[batch.edge_index[0]])
    wanted = layer.lin_rel(summed / batch.in_degree.clamp(min=1)[:, None]) + layer.lin_root(batch.x)
    assert bool((batch.in_degree > 1.5 * batch.edge_index[1].bincount(minlength=batch.num_nodes)).any())
    torch.testing.assert_close(
        _run(distribute(model(layer), backend=backend, check=False), batch), wanted, rtol=0, atol=1e-12
    )


@needs_sampler
def test_a_mean_with_the_layers_own_loops_counts_them() -> None:
    data, part = _graph()
    del data.edge_weight
    shard, backend = _bound(_write(data, part))
    batch, layer = _batch(shard, backend), pyg.GCNConv(5, 3, aggr="mean", bias=False).double()
    n_id = shard.surroundings.n_id[batch.n_id]
    ones = torch.ones(data.num_edges, dtype=torch.float64)
    sums = _hops(*_published(batch, data.edge_index, ones, n_id, {}), batch.x @ layer.lin.weight.t(), 1)
    batch_loops = torch.zeros(batch.num_nodes).index_add(
        0, batch.edge_index[1], (batch.edge_index[0] == batch.edge_index[1]).float()
    )
    wanted = sums / (batch.in_degree - batch_loops + 1)[:, None]
    torch.testing.assert_close(
        _run(distribute(Unweighted(layer), backend=backend, check=False), batch), wanted, rtol=0, atol=1e-12
    )


@needs_sampler
def test_a_maximum_is_better_off_without() -> None:
    data, part = _graph()
    shard, backend = _bound(_write(data, part))
    batch, plain = _batch(shard, backend), pyg.GraphConv(5, 3, aggr="max").double()
    with pytest.warns(UserWarning, match="GraphConv runs without GraphSAINT"):
        found = _run(distribute(Weighted(copy.deepcopy(plain)), backend=backend, check=False), batch)
    torch.testing.assert_close(found, plain(batch.x, batch.edge_index, batch.edge_weight), rtol=0, atol=1e-12)


# -- on average --------------------------------------------------------------------------------------------------------

AVERAGED = {
    "GCNConv": (partial(pyg.GCNConv, 6, 3), Weighted),
    "GCNConv-unweighted": (partial(pyg.GCNConv, 6, 3), Unweighted),
    "GCNConv-improved": (partial(pyg.GCNConv, 6, 3, improved=True), Weighted),
    "SGConv": (partial(pyg.SGConv, 6, 3, K=1), Weighted),
    "TAGConv": (partial(pyg.TAGConv, 6, 3, K=1), Unweighted),
    "GraphConv": (partial(pyg.GraphConv, 6, 3), Weighted),
    "GraphConv-mean": (partial(pyg.GraphConv, 6, 3, aggr="mean"), Weighted),
    "SAGEConv": (partial(pyg.SAGEConv, 6, 3), Unweighted),
}


@cache
def _sampled() -> tuple[Data, Path, list[Data]]:
    """A graph, the same as one part, and batches of it with the norms that make their mean exact."""
    data = degree_corrected_sbm(60, num_classes=4, avg_degree=6, num_features=6, seed=3)
    data.x, data.train_mask = data.x.double(), torch.ones(60, dtype=torch.bool)
    folder = _write(data, np.zeros(60, dtype=int))
    graph, csr = ReplicaBackend().part_graph(Shard.load(folder, 0))
    batches = list(SaintNodeBatches(60, num_steps=80, sample_coverage=1).loader(graph, csr, seed=0))
    nodes, edges = torch.zeros(60).double(), torch.zeros(csr.num_entries).double()
    for batch in batches:
        nodes[batch.n_id] += 1
        edges[batch.e_id] += 1
    assert nodes.min() > 0
    assert edges.min() > 0
    for batch in batches:
        batch.edge_norm = nodes[batch.n_id[batch.edge_index[1]]] / edges[batch.e_id]
    return data, folder, batches


@pytest.mark.slow
@needs_sampler
@pytest.mark.parametrize("name", AVERAGED)
def test_the_mean_over_batches_is_that_of_the_whole_graph(name: str) -> None:
    data, folder, batches = _sampled()
    make, wrapper = AVERAGED[name]
    torch.manual_seed(1)
    plain = make().double()
    _, backend = _bound(folder)
    model = distribute(wrapper(copy.deepcopy(plain)), backend=backend, check=False)
    whole = plain(data.x, data.edge_index).detach()
    mean, without = torch.zeros(2, *whole.shape, dtype=torch.float64)
    times = torch.zeros(60, 1)
    for batch in batches:
        times[batch.n_id] += 1
    with torch.no_grad():
        for batch in batches:
            mean[batch.n_id] += _run(model, batch) / times[batch.n_id]
            norm = () if name == "SAGEConv" else (batch.edge_norm,)
            without[batch.n_id] += plain(batch.x, batch.edge_index, *norm) / times[batch.n_id]
    torch.testing.assert_close(mean, whole, rtol=0, atol=1e-10)
    # PyG takes the norm as a weight as any, which is right for sums alone
    assert (float((without - whole).norm() / whole.norm()) < 1e-10) == (name == "GraphConv")


# -- layers that keep what they made of a graph ------------------------------------------------------------------------

CACHED = {
    "GCNConv": partial(pyg.GCNConv, 5, 3, cached=True),
    "SGConv": partial(pyg.SGConv, 5, 3, K=2, cached=True),
    "SSGConv": partial(pyg.SSGConv, 5, 3, alpha=0.1, K=2, cached=True),
    "APPNP": partial(pyg.APPNP, K=2, alpha=0.1, cached=True),
}


@pytest.mark.slow
@needs_sampler
@pytest.mark.parametrize("batches", ["clusters", "neighbours", "saint"])
@pytest.mark.parametrize("name", CACHED)
def test_what_a_layer_caches_is_not_of_another_batch(name: str, batches: str) -> None:
    data, part = _graph()
    shard, backend = _bound(_write(data, part))
    graph, csr = backend.part_graph(shard)
    cut = {
        "clusters": ClusterBatches(4, 1, partitioner="chunk"),  # of about as many nodes
        "neighbours": NeighborBatches([3, 3], 8),
        "saint": SaintNodeBatches(20, num_steps=3, sample_coverage=0),
    }[batches]
    torch.manual_seed(0)
    plain = CACHED[name]().double()
    layer = copy.deepcopy(plain)
    plain.cached = False
    # what stands in for a layer on its cheaper side keeps nothing
    model = distribute(Weighted(layer), backend=backend, savings=Savings(cheaper_side=False), check=False)
    whole = model(shard.x, shard.adjacency, shard.edge_weight).detach()
    kept = {name: getattr(layer, name) for name in CACHES if getattr(layer, name, None) is not None}
    assert len(kept) == 1
    for batch in cut.loader(graph, csr, seed=0):
        wanted = plain(batch.x, batch.edge_index, batch.edge_weight)
        torch.testing.assert_close(_run(model, batch), wanted, rtol=0, atol=1e-12)
        edges = sampled_graph(batch)[1]
        with pytest.raises((RuntimeError, IndexError, ValueError)):  # which leaves things as they were
            model(batch.x, edges, edge_weight=batch.edge_weight[1:])
        assert layer.cached
    assert {name: getattr(layer, name, None) for name in kept} == kept, "of the whole part"
    assert torch.equal(model(shard.x, shard.adjacency, shard.edge_weight), whole)
    backend.unbind()
    assert not any(getattr(layer, name, None) is not None for name in CACHES)
