"""Attention, maxima and messages by chunks: rows travel once, while other chunks are computed; numbers are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GATConv, GATv2Conv, GraphConv, MessagePassing, SAGEConv, TransformerConv

from pygdist import Shard, distribute
from pygdist.backends import TensorBackend
from pygdist.backends.slicing.chunk_plan import ChunkPlan, length_of
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.kernels import CSR
from pygdist.nn.decoupled import decouple
from pygdist.testing import RankPool, random_graph
from tests.backends.schedule import noted

CHUNKS = 4


class Messages(MessagePassing):
    """A layer with messages of its own, of both ends of an edge and of its weight."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        """As wide as ``x``."""
        out: Tensor = self.propagate(edge_index, x=x, edge_weight=edge_weight)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        """The message of one edge."""
        return (edge_weight[:, None] * x_j).tanh() * x_i.sigmoid()


def _csr() -> CSR:
    generator = torch.Generator().manual_seed(0)
    target, source = (torch.randint(0, bound, (60,), generator=generator) for bound in (28, 25))
    return CSR.from_coo(target, source, num_rows=28, num_cols=28)


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_a_row_is_in_one_queue_before_any_chunk_that_reads_it(source: bool, target: bool) -> None:
    csr, counts = _csr(), (11, 0, 17)
    plan = ChunkPlan(csr, counts, CHUNKS)
    here: set[int] = set()
    for chunk, (piece,) in zip(plan.chunks, plan.queue(source=source, target=target), strict=True):
        rows = [row for part in piece for row in (
            part.tolist() if isinstance(part, Tensor) else range(part.start, part.stop))]  # fmt: skip
        assert len(rows) == len(set(rows)) == sum(map(length_of, piece))
        assert not here & set(rows)
        here |= set(rows)
        for span in chunk.spans:
            if source:
                assert set(csr.index[plan.edges_of(span)].tolist()) <= here
            if target:
                assert set(range(span.start, span.stop)) <= here
    assert here == set(range(28))


def test_an_edge_is_in_the_queue_of_the_chunk_that_reads_it() -> None:
    csr = _csr()
    plan = ChunkPlan(csr, (11, 0, 17), CHUNKS)
    edges: list[int] = []
    for chunk, pieces in zip(plan.chunks, plan.edge_queue(most_rows=5), strict=True):
        read = [edge for piece in pieces for part in piece if isinstance(part, slice)
                 for edge in range(part.start, part.stop)]  # fmt: skip
        assert all(length_of(part) <= 5 for piece in pieces for part in piece)
        assert sorted(read) == [
            edge for span in chunk.spans for edge in range(plan.edges_of(span).start, plan.edges_of(span).stop)
        ]
        edges += read
    assert sorted(edges) == list(range(60))


#: Each with what it is called with beside rows and edges.
HOPS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "attention": (lambda: GATConv(5, 6, heads=2, add_self_loops=False), None),
    "attention by edges too": (lambda: GATConv(5, 6, edge_dim=1, add_self_loops=False), "edge_attr"),
    "attention of both ends": (lambda: GATv2Conv(5, 6, edge_dim=1, add_self_loops=False), "edge_attr"),
    "attention by products": (lambda: TransformerConv(5, 6, heads=2, edge_dim=1), "edge_attr"),
    "attention of three hops": (lambda: decouple(GAT(5, 6, num_layers=3, out_channels=4)), None),
    "maxima": (lambda: SAGEConv(5, 6, aggr="max", project=True), None),
    "messages": (Messages, "edge_weight"),
    "weighted sums": (lambda: GraphConv(5, 6), "edge_weight"),
}


def _inputs(holder: Data | Shard, name: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows, and values of edges; both are to have gradients."""
    assert holder.x is not None
    x = holder.x.clone().requires_grad_()
    if name is None:
        return x, {}
    value = holder.edge_weight if name == "edge_weight" else holder.edge_weight[:, None]  # type: ignore[index]
    return x, {name: value.clone().requires_grad_()}  # type: ignore[union-attr]


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return HOPS[name][0]().double()


class Found(NamedTuple):
    """Events of a rank in the forward and in the backward pass, its traffic, and its results."""

    forward: list[str]
    backward: list[str]
    sent_bytes: int
    calls: int
    out: Tensor
    of_x: Tensor
    of_edges: Tensor
    of_parameters: Tensor
    owned_id: Tensor


def _pass(rank: int, world_size: int, store: str, name: str, num_chunks: int, overlap: bool) -> Found:
    shard, backend = Shard.load(store, rank), TensorBackend(memory_gib=1.0, overlap=overlap)  # all of a chunk at once
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    model, meter = distribute(_model(name), backend=backend, check=False), backend.communicator.meter
    with mock.patch("pygdist.backends.slicing.chunk_plan.chunks_within", return_value=num_chunks):
        for _ in range(2):  # what stays the same travels in the first pass
            x, values = _inputs(shard, HOPS[name][1])
            model.zero_grad()
            meter.reset()
            with noted(backend.communicator) as forward:
                out = model(x, shard.adjacency, **values)
            with noted(backend.communicator) as backward:
                out.square().sum().backward()
    assert x.grad is not None
    return Found(
        forward, backward, meter.read().sent_bytes, meter.read().calls, out.detach(), x.grad,
        _flat(value.grad for value in values.values()), _flat(one.grad for one in model.parameters()), shard.owned_id,
    )  # fmt: skip


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(0), *(one.flatten() for one in tensors if one is not None)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The folder of a graph in so many parts."""

    def make(world_size: int) -> str:
        folder, (data, parts) = tmp_path_factory.mktemp("parts"), random_graph()
        write_store(data, parts[world_size], folder, num_parts=world_size, method="", arguments={}, notes=[])
        return str(folder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["attention", "attention of both ends", "maxima", "messages"])
def test_a_chunk_is_computed_while_the_next_and_the_last_travel(
    name: str, overlap: bool, store: Callable[[int], str], pool: RankPool
) -> None:
    """Chunks run the other way round in the backward pass: what each has done there is told by its turn."""
    ways = {"forward": ("split", "gather", 1), "backward": ("backward of gather", "backward of split", -1)}
    for rank in pool.run(_pass, 2, store(2), name, CHUNKS, overlap):
        for way, (comes, goes, step) in ways.items():
            events = getattr(rank, way)
            computed = [place for place, said in enumerate(events) if said.startswith("computes")]
            assert [events[place] for place in computed] == [f"computes chunk {n}" for n in range(CHUNKS)][::step]
            for turn, place in enumerate(computed):
                arrives = [said for said in events if said.endswith(f"{comes} {turn}") and said.startswith("has")]
                assert arrives
                assert all(events.index(one) < place for one in arrives)
                neighbours = [
                    said for said in events if said.startswith("has")
                    and said.endswith((f"{comes} {turn + 1}", f"{goes} {turn - 1}"))
                ]  # fmt: skip
                assert len(neighbours) >= (turn > 0) + (turn < CHUNKS - 1)
                for one in neighbours:
                    begins = events.index(one.replace("has", "begins"))
                    assert (begins < place < events.index(one)) == overlap, one


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HOPS))
def test_hops_by_chunks_equal_one_process_and_send_as_much_as_at_once(
    name: str, store: Callable[[int], str], pool: RankPool
) -> None:
    data, _ = random_graph()
    plain, (x, values) = _model(name), _inputs(data, HOPS[name][1])
    expected = plain(x, data.edge_index, **values)
    expected.square().sum().backward()
    folder, traffic = store(3), []
    for num_chunks in (1, CHUNKS):
        ranks = pool.run(_pass, 3, folder, name, num_chunks, True)
        traffic.append([(rank.sent_bytes, rank.calls) for rank in ranks])
        assert x.grad is not None
        for rank in ranks:
            assert torch.allclose(rank.out, expected[rank.owned_id], rtol=0, atol=1e-10)
            assert torch.allclose(rank.of_x, x.grad[rank.owned_id], rtol=0, atol=1e-10)
        of_edges = torch.cat([rank.of_edges for rank in ranks]).sort().values  # each rank has its own in its own order
        pairs = [
            (of_edges, _flat(value.grad for value in values.values()).sort().values),
            (sum(rank.of_parameters for rank in ranks), _flat(one.grad for one in plain.parameters())),
        ]
        for ours, theirs in pairs:
            assert torch.allclose(torch.as_tensor(ours), theirs, rtol=0, atol=1e-10)
    assert traffic[0] == traffic[1]  # no row travels twice
