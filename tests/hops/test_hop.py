"""A hop says what it reads, which way it is computed, and computes it on rows and edges that it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GraphConv, MessagePassing, SAGEConv, TransformerConv
from typing_extensions import override

from pygdist import Shard, distribute
from pygdist.backends import SingleBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.hops.hop import Deferred, Ends, Hop, each_end, ends_of, source_of, target_of
from pygdist.testing import random_graph


class Noting(SingleBackend):
    """Notes the hops that reach it; an ``edge_updater`` runs as ``propagate`` does."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.hops: list[Hop] = []

    @override
    def propagate(self, hop: Hop) -> Tensor:
        self.hops.append(hop)
        return super().propagate(hop)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return Shard.load(tmp_path / "store", 0)


def _hops(layer: MessagePassing, shard: Shard) -> tuple[list[Hop], Tensor]:
    backend = Noting()
    backend.bind(shard, Communicator())
    out = distribute(layer.double(), backend=backend, check=False)(shard.x, shard.adjacency)
    return backend.hops, out


CASES: dict[str, tuple[Callable[[], MessagePassing], list[tuple[str, set[str], bool, bool]]]] = {
    # of each hop: method, what it reads at sources, whether it is one product, whether it has a kernel
    "GCN": (lambda: GCNConv(5, 3), [("propagate", {"x"}, True, False)]),
    "maximum": (lambda: SAGEConv(5, 3, aggr="max"), [("propagate", {"x"}, True, False)]),
    "GAT": (
        lambda: GATConv(5, 3),
        [("edge_updater", {"alpha"}, False, True), ("propagate", {"x"}, False, True)],
    ),
    "GATv2": (
        lambda: GATv2Conv(5, 3),
        [("edge_updater", {"x"}, False, True), ("propagate", {"x"}, False, True)],
    ),
    "Transformer": (lambda: TransformerConv(5, 3), [("propagate", {"key", "value"}, False, True)]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_hop_says_what_it_reads_and_how_it_is_computed(name: str, shard: Shard) -> None:
    make, expected = CASES[name]
    hops, _ = _hops(make(), shard)
    facts = [(hop.name, set(hop.sources), hop.is_product, hop.kernel is not None) for hop in hops]
    assert facts == expected


def test_a_hook_on_messages_makes_a_product_a_hop_of_messages(shard: Shard) -> None:
    layer = GCNConv(5, 3)
    layer.register_message_forward_hook(lambda module, arguments, out: 2 * out)
    (hop,), out = _hops(layer, shard)
    assert not hop.is_product
    assert torch.allclose(out - layer.bias, 2 * (_hops_without_hooks(layer, shard) - layer.bias), rtol=0, atol=1e-12)


def _hops_without_hooks(layer: MessagePassing, shard: Shard) -> Tensor:
    plain = GCNConv(5, 3).double()
    plain.load_state_dict(layer.state_dict())
    return _hops(plain, shard)[1]


@pytest.mark.parametrize("layer", [GraphConv(5, 3), GATConv(5, 3), SAGEConv(5, 3, aggr=["mean", "std"])])
def test_rows_that_are_given_stand_at_the_sources(layer: MessagePassing, shard: Shard) -> None:
    hops, _ = _hops(layer, shard)
    size = (shard.num_owned, shard.num_owned)
    for hop in hops:
        if hop.weights_unseen and hop.updates_edges:
            assert isinstance(hop.run(rows=hop.sources, size=size), Deferred)
            continue
        zeros = {name: torch.zeros_like(x) for name, x in hop.sources.items()}
        same = hop.run(rows=hop.sources, size=size)
        assert torch.allclose(same, hop.run(), rtol=0, atol=1e-12)
        assert not torch.allclose(hop.run(rows=zeros, size=size), same)


@pytest.mark.parametrize("layer", [GraphConv(5, 3), GATv2Conv(5, 3), SAGEConv(5, 3, aggr=["max", "std"])])
def test_without_edges_a_hop_gives_zeros_and_zero_gradients(layer: MessagePassing, shard: Shard) -> None:
    hops, _ = _hops(layer, shard)
    hop = hops[-1]
    rows = {name: x.detach().requires_grad_() for name, x in hop.sources.items()}
    none = torch.zeros(2, 0, dtype=torch.long)
    if "alpha" in hop.arguments:
        pytest.skip("weights of edges have as many rows as there were edges")
    out = hop.run(none, rows=rows, size=(shard.num_owned, shard.num_owned))
    assert out.size(0) == shard.num_owned
    out.sum().backward()
    for x in rows.values():
        assert x.grad is None or not x.grad.any()


def test_a_pair_is_told_from_one_tensor() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    assert ends_of(one) == (one, one)
    assert source_of((one, other)) is one
    assert target_of(Ends((one, other))) is other
    doubled = each_end(Ends((one, other)), lambda end: end + 1)
    assert isinstance(doubled, Ends)
    assert torch.equal(doubled[1], one)
