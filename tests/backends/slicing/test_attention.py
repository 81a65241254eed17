"""Dropout of attention's weights on slices: every rank drops the same, and sends scores, not weights of edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv

from pygdist.backends import TensorBackend
from pygdist.backends.slicing import all_nodes
from pygdist.backends.slicing.attention import weights_of_scores
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.nn.decoupled import decouple
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

STEP = 1e-5


class Found(NamedTuple):
    """Measurements of one rank, of a model whose columns are all alike."""

    spread: float
    spread_where_ranks_drop_apart: float
    dropped: float
    again: float
    calls: int
    sent_bytes: int
    slope: float
    grad_along: float


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [GATConv(5, 4, heads=2, dropout=0.5), GATConv(8, 4, dropout=0.5)]
    for layer in layers:
        with torch.no_grad():
            layer.lin.weight.copy_(layer.lin.weight[:1].expand_as(layer.lin.weight))
            layer.att_src.copy_(layer.att_src[..., :1].expand_as(layer.att_src) * 9)
    return (decouple(layers) if kind == "decoupled" else layers[0]).double()


def _apart(*args: Any, dropout: float = 0.0, **kwargs: Any) -> Tensor:
    return functional.dropout(weights_of_scores(*args, **kwargs), dropout)


def _run(
    rank: int, world_size: int, store: str, kind: str, unlike: bool = False, memory_gib: float | None = None
) -> Found:
    shard, backend = Shard.load(store, rank), TensorBackend(memory_gib=memory_gib)
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    model, meter = distribute(_model(kind), backend=backend, check=False), backend.communicator.meter

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed + rank)
        out: Tensor = model(shard.x, shard.adjacency)
        return out

    def spread(out: Tensor) -> float:
        columns = out.unflatten(1, (-1, 4))
        return float((columns - columns[..., :1]).abs().max()) if out.numel() else 0.0

    with mock.patch.object(all_nodes, "_drawn", return_value=rank if unlike else 0):
        out = run(3)
    meter.reset()
    out = run(3)
    out.pow(2).sum().backward()
    out = out.detach()
    calls, sent_bytes = meter.read().calls, meter.read().sent_bytes
    parameters = list(model.parameters())
    along = [torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape) for one in parameters]
    grad_along = sum(float((one.grad * way).sum()) for one, way in zip(parameters, along, strict=True))

    def moved(by: float) -> float:
        with torch.no_grad():
            for one, way in zip(parameters, along, strict=True):
                one += by * way
            loss = float(run(3).pow(2).sum())
            for one, way in zip(parameters, along, strict=True):
                one -= by * way
        return loss

    slope = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    with torch.no_grad():
        others, same = run(4), run(3)
        evaluated = model.eval()(shard.x, shard.adjacency)
        model.train()
        with (
            mock.patch("pygdist.backends.tensor.weights_of_scores", _apart),
            mock.patch("pygdist.backends.slicing.attention.weights_of_scores", _apart),
        ):
            apart = run(3)
    assert (others - out).abs().sum() > 0 or not out.numel()
    return Found(
        spread=spread(out),
        spread_where_ranks_drop_apart=spread(apart),
        dropped=float((out - evaluated).abs().max()) if out.numel() else 0.0,
        again=float((same - out).abs().max()) if out.numel() else 0.0,
        calls=calls,
        sent_bytes=sent_bytes,
        slope=slope,
        grad_along=grad_along,
    )


def _store(folder: Path, world_size: int, graph: str = "power-law") -> str:
    data, parts = random_graph(graph)
    del data.edge_weight
    write_store(data, parts[world_size], folder, num_parts=world_size, method="x", arguments={}, notes=[])
    return str(folder)


@pytest.mark.parametrize("kind", ["coupled", "decoupled"])
@pytest.mark.parametrize("graph", ["power-law", "empty-part"])
def test_ranks_drop_alike(graph: str, kind: str, tmp_path: Path, pool: RankPool) -> None:
    """All columns of a row are equal where the weights of its edges are, which four columns on three ranks tell."""
    ranks = pool.run(_run, 3, _store(tmp_path / "parts", 3, graph), kind)
    assert max(one.spread for one in ranks) < 1e-12
    assert max(one.spread_where_ranks_drop_apart for one in ranks) > 0.01
    assert sorted(one.dropped for one in ranks)[0 if graph == "power-law" else 1] > 0.01
    assert max(one.again for one in ranks) == 0
    slope, along = sum(one.slope for one in ranks), sum(one.grad_along for one in ranks)
    assert abs(slope - along) < 1e-6 * abs(slope)
    assert {one.calls for one in ranks} == {4}


@pytest.mark.parametrize("kind", ["coupled", "decoupled"])
def test_chunks_drop_too(kind: str, tmp_path: Path, pool: RankPool) -> None:
    ranks = pool.run(_run, 3, _store(tmp_path / "parts", 3), kind, False, 24 / 2**20)
    assert max(one.spread for one in ranks) < 1e-12
    assert min(one.dropped for one in ranks) > 0.01
    slope, along = sum(one.slope for one in ranks), sum(one.grad_along for one in ranks)
    assert abs(slope - along) < 1e-6 * abs(slope)


@pytest.mark.parametrize(("kind", "calls"), [("coupled", 8), ("decoupled", 6)])
def test_devices_of_other_kinds_send_weights(kind: str, calls: int, tmp_path: Path, pool: RankPool) -> None:
    """A seed gives other numbers there."""
    store = _store(tmp_path / "parts", 3)
    unlike, alike = (pool.run(_run, 3, store, kind, unlike) for unlike in (True, False))
    assert max(one.spread for one in unlike) < 1e-12
    assert {one.calls for one in unlike} == {calls}
    assert sum(one.sent_bytes for one in unlike) > sum(one.sent_bytes for one in alike)
