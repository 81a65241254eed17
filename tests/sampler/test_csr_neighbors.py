"""Sampled neighbourhoods: the twin's, node by node and edge by edge; and what PyG's loaders make of them."""

from __future__ import annotations

import pickle

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.nn import GAT, GCN, GraphSAGE
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.native import library
from pygdist.sampler import CSRNeighborSampler
from tests.sampler.oracle import SampleTwin, edges_of, lonely_graph, random_graph

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")

FIELDS = ("node", "row", "col", "edge")


def drawn(sampler: CSRNeighborSampler, seeds: list[int] | Tensor) -> SamplerOutput:
    return sampler.sample_from_nodes(NodeSamplerInput(None, torch.as_tensor(seeds, dtype=torch.int64)))


@pytest.mark.parametrize("permuted", [True, False], ids=["perm", "no-perm"])
@pytest.mark.parametrize("wide", [True, False], ids=["int64", "int32"])
@pytest.mark.parametrize("replace", [True, False], ids=["replace", "no-replace"])
@pytest.mark.parametrize("fan_out", [[1], [3, 2], [-1, 4], [2, 2, 2, 2], [70], [-1]], ids=str)
def test_equals_the_twin(fan_out: list[int], replace: bool, wide: bool, permuted: bool) -> None:
    csr = random_graph(200, 6000, permuted=permuted)
    if wide:
        csr = CSR(csr.indptr, csr.index.long(), csr.num_cols, None if csr.perm is None else csr.perm.long())
    assert int(csr.indptr.diff().max()) > 140  # more than 70 of them are looked up in another way
    sampler = CSRNeighborSampler(csr, fan_out, replace=replace, seed=2**63 + 5)
    for epoch, seeds in ((0, [7]), (3, [5, 0, 199, 1]), (2**40, list(range(0, 200, 9))), (1, [])):
        sampler.set_epoch(epoch)
        found = drawn(sampler, seeds)
        twin = SampleTwin(csr, seeds, fan_out, replace=replace, seed=2**63 + 5, epoch=epoch)
        for name in FIELDS:
            assert getattr(found, name).tolist() == getattr(twin, name), name
            assert getattr(found, name).dtype == torch.int64
        assert found.num_sampled_nodes == twin.num_sampled_nodes
        assert found.num_sampled_edges == twin.num_sampled_edges


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_all_neighbours_are_those_that_k_hops_reach(hops: int) -> None:
    csr = random_graph()
    edges = edges_of(csr)
    found = drawn(CSRNeighborSampler(csr, [-1] * hops), [3, 40])
    nodes, _, _, _ = k_hop_subgraph([3, 40], hops, edges, num_nodes=60)
    expanded, _, _, _ = k_hop_subgraph([3, 40], hops - 1, edges, num_nodes=60)
    into_expanded = torch.isin(edges[1], expanded).nonzero().view(-1)
    assert found.node[:2].tolist() == [3, 40]
    assert sorted(found.node.tolist()) == nodes.tolist()
    assert sorted(found.edge.tolist()) == into_expanded.tolist()
    assert torch.equal(torch.stack([found.node[found.row], found.node[found.col]]), edges[:, found.edge])
    assert bool((found.col.diff() >= 0).all())


@pytest.mark.parametrize("replace", [True, False], ids=["replace", "no-replace"])
def test_every_node_gets_its_number_of_edges(replace: bool) -> None:
    csr = random_graph(permuted=False)
    found = drawn(CSRNeighborSampler(csr, [4, 3], replace=replace), [0, 1, 2, 30, 59])
    degree = csr.indptr.diff()[found.node]
    most = torch.full_like(degree, 3)
    most[:5] = 4
    most[found.num_sampled_nodes[0] + found.num_sampled_nodes[1] :] = 0  # the last hop's nodes are not expanded
    wanted = most * (degree > 0) if replace else torch.minimum(most, degree)
    assert torch.equal(torch.bincount(found.col, minlength=found.node.numel()), wanted)
    if not replace:
        assert found.edge.unique().numel() == found.edge.numel()


@pytest.mark.slow
@pytest.mark.parametrize("replace", [True, False], ids=["replace", "no-replace"])
@pytest.mark.parametrize(("degree", "most"), [(10, 3), (10, 9), (200, 80)])
def test_neighbours_are_drawn_uniformly(degree: int, most: int, replace: bool) -> None:
    rounds = 3000
    csr = CSR(torch.tensor([0, *[degree] * (degree + 1)]), torch.arange(1, degree + 1, dtype=torch.int32), degree + 1)
    sampler = CSRNeighborSampler(csr, [most], replace=replace, seed=1)
    counts = torch.zeros(degree, dtype=torch.int64)
    pairs = torch.zeros(2, 2)  # whether the first two neighbours are there together
    for epoch in range(rounds):
        sampler.set_epoch(epoch)
        edge = drawn(sampler, [0]).edge
        counts += torch.bincount(edge, minlength=degree)
        pairs[int((edge == 0).any()), int((edge == 1).any())] += 1
    # without replacement counts vary less than chi-square wants, so its upper tail still bounds them
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    if not replace:
        both = most * (most - 1) / (degree * (degree - 1)) * rounds
        assert abs(float(pairs[1, 1]) - both) < 5 * both**0.5 + 1


def test_a_batch_depends_on_seed_epoch_and_its_seed_nodes_alone() -> None:
    csr = random_graph(200, 6000)
    sampler = CSRNeighborSampler(csr, [5, 5], seed=1)
    first = drawn(sampler, [1, 2, 3])
    torch.manual_seed(9)
    torch.rand(3)
    again = drawn(pickle.loads(pickle.dumps(sampler)), [1, 2, 3])
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(again, name))
    others = [drawn(CSRNeighborSampler(csr, [5, 5], seed=2), [1, 2, 3]), drawn(sampler, [1, 2, 4])]
    sampler.set_epoch(1)
    others.append(drawn(sampler, [1, 2, 3]))
    mine = first.edge[first.col == 1].tolist()  # those into node 2, which is a seed in each
    assert all(other.edge[other.col == 1].tolist() != mine for other in others)


def _data(csr: CSR) -> Data:
    edges = edges_of(csr)
    torch.manual_seed(0)
    return Data(
        x=torch.randn(csr.num_rows, 5),
        edge_index=edges,
        edge_attr=torch.arange(edges.size(1)).float().view(-1, 1),
        train_mask=torch.arange(csr.num_rows) % 3 != 0,
    )


def test_node_loader_gives_the_same_batches_with_any_workers() -> None:
    csr = random_graph(200, 6000)
    data = _data(csr)
    seen = []
    for workers in (0, 1, 2):
        sampler = CSRNeighborSampler(csr, [4, 3], seed=5)
        loader = NodeLoader(
            data, sampler, data.train_mask, batch_size=32, num_workers=workers, persistent_workers=workers > 0
        )
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            seen.append([batch.to_dict() for batch in loader])
        if workers:
            loader._iterator._shutdown_workers()  # left to the garbage collector, it waits for each for 5 seconds
    for epoch in (0, 1):
        for other in (epoch + 2, epoch + 4):
            for mine, theirs in zip(seen[epoch], seen[other], strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in ("x", "edge_index", "n_id", "e_id"))
    assert any(not torch.equal(one["e_id"], two["e_id"]) for one, two in zip(seen[0], seen[1], strict=True))
    batch = seen[0][0]
    assert batch["batch_size"] == 32
    assert torch.equal(batch["x"], data.x[batch["n_id"]])
    assert torch.equal(batch["edge_attr"].view(-1).long(), batch["e_id"])
    assert torch.equal(batch["n_id"][batch["edge_index"]], data.edge_index[:, batch["e_id"]])


@pytest.mark.parametrize("model", [GCN, GAT, GraphSAGE], ids=lambda model: model.__name__)
def test_all_neighbours_give_the_output_of_the_whole_graph(model: type[torch.nn.Module]) -> None:
    csr = random_graph(200, 2000)
    data = _data(csr)
    layers = model(5, 8, num_layers=2, out_channels=3).double().eval()
    data.x = data.x.double()
    hops = [-1, -1, -1] if model is GCN else [-1, -1]  # degrees of the second hop's nodes are those of a third
    with torch.no_grad():
        whole = layers(data.x, data.edge_index)
        for batch in NodeLoader(data, CSRNeighborSampler(csr, hops), batch_size=64):
            out = layers(batch.x, batch.edge_index)[: batch.batch_size]
            torch.testing.assert_close(out, whole[batch.n_id[: batch.batch_size]], rtol=1e-12, atol=1e-12)


def test_links_too() -> None:
    csr = random_graph(200, 6000)
    data = _data(csr)
    loader = LinkLoader(
        data,
        CSRNeighborSampler(csr, [4]),
        edge_label_index=data.edge_index[:, :50],
        neg_sampling_ratio=1.0,
        batch_size=25,
    )
    for number, batch in enumerate(loader):
        positive = batch.n_id[batch.edge_label_index[:, :25]]
        assert torch.equal(positive, data.edge_index[:, number * 25 : number * 25 + 25])
        assert batch.edge_label.sum() == 25


@pytest.mark.parametrize("num_nodes", [1, 5])
def test_nodes_without_edges(num_nodes: int) -> None:
    found = drawn(CSRNeighborSampler(lonely_graph(num_nodes), [25, 10], replace=True), [0])
    assert found.node.tolist() == [0]
    assert found.edge.numel() == 0
    assert found.num_sampled_nodes == [1, 0, 0]


@pytest.mark.parametrize("fan_out", [[], [0], [3, 0], [-2], [5, -3]], ids=str)
def test_fan_outs_that_mean_nothing_are_refused(fan_out: list[int]) -> None:
    with pytest.raises(InputError, match=r"num_neighbors is \[.*expected a number from 1 for each hop, or -1"):
        CSRNeighborSampler(random_graph(), fan_out)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    csr = random_graph()
    sampler = CSRNeighborSampler(csr, [2])
    with pytest.raises(InputError, match="must differ, but one of them is given twice"):
        drawn(sampler, [4, 5, 4])
    with pytest.raises(InputError, match=r"must be in 0\.\.59, got 60"):
        drawn(sampler, [60])
    with pytest.raises(InputError, match=r"must be in 0\.\.59, got -1"):
        drawn(sampler, [0, -1])
    with pytest.raises(InputError, match="does not sample by time: leave input_time out"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), time=torch.tensor([1])))
    times = EdgeSamplerInput(None, torch.tensor([1]), torch.tensor([2]), time=torch.tensor([1]))
    with pytest.raises(InputError, match="does not sample by time: leave edge_label_time out"):
        sampler.sample_from_edges(times)
    with pytest.raises(InputError, match="seed is -1, expected 0 to"):
        CSRNeighborSampler(csr, [2], seed=-1)
    with pytest.raises(InputError, match=r"a row and a column for each node.*got 60 by 70"):
        CSRNeighborSampler(CSR(csr.indptr, csr.index, 70), [2])
    monkeypatch.setattr("pygdist.native.library.load", lambda: None)
    with pytest.raises(InputError, match=r"CSRNeighborSampler needs pygdist's native library.*apt install g\+\+"):
        CSRNeighborSampler(csr, [2])
