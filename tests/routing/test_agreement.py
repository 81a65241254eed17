"""Ranks that run a model in other ways: all raise one error that says which rank is where, long before any timeout."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GCN, GCNConv, GraphConv

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.process import watch
from pygdist.graph import Shard, write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

pytestmark = pytest.mark.slow
BACKENDS = ["comm", "cache", "hybrid", "tensor"]


@pytest.fixture
def store(tmp_path: Path) -> str:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    return str(tmp_path / "parts")


def _evaluate(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.eval()


def _evaluate_one(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.get_submodule("act").eval()


def _freeze(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.get_parameter("convs.0.lin.weight").requires_grad_(False)


def _no_weight(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["edge_weight"] = None


def _other_dtype(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["x"] = inputs["x"].float()


CHANGES: dict[Callable[[nn.Module, dict[str, Any]], None], str] = {
    _evaluate: "rank 0 is in training, rank 1 is in evaluation: all ranks must run GCN in the same way",
    _evaluate_one: "rank 0 is in training, rank 1 is in training, but not act: all ranks",
    _freeze: "rank 0 has no frozen parameters, rank 1 has frozen convs.0.lin.weight: all ranks",
    _no_weight: "rank 0 gives edge_weight: tensor of torch.float64, 1 dimensions, rank 1 gives edge_weight: None",
    _other_dtype: "rank 1 gives x: tensor of torch.float32, 2 dimensions: all ranks",
}


def _changed(rank: int, world_size: int, store: str, backend: str, change: Any) -> tuple[str, float]:
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(GCN(5, 8, 2, 3, norm="batch_norm", dropout=0.5).double(), backend=bound, check=False)
    inputs = {"x": shard.x, "edge_index": shard.adjacency, "edge_weight": shard.edge_weight}
    model(**inputs).sum().backward()
    if rank == 1:
        change(model, inputs)
    began, said = time.monotonic(), ""
    try:
        model(**inputs).sum().backward()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_runs_the_model_in_another_way(backend: str, change: Any, store: str, pool: RankPool) -> None:
    for said, took_s in pool.run(_changed, 2, store, backend, change):
        assert said.startswith("InputError: ")
        assert CHANGES[change] in said
        assert took_s < 10


class Flagged(nn.Module):
    """Takes a flag, in a dictionary, which asks for something that a rank cannot compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out - out.mean(0) if options["centred"] else out


def _flagged(rank: int, world_size: int, store: str, backend: str, flags: list[bool]) -> str:
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(Flagged().double(), backend=bound)
    model(shard.x, shard.adjacency, {"centred": False})
    try:
        model(shard.x, shard.adjacency, {"centred": flags[rank]})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_are_equal_on_all_ranks_and_compared_anew(backend: str, store: str, pool: RankPool) -> None:
    for said in pool.run(_flagged, 2, store, backend, [False, True]):
        assert said.startswith("InputError: rank 0 gives centred: False, rank 1 gives centred: True: all ranks")
    for said in pool.run(_flagged, 2, store, backend, [True, True]):
        assert said.startswith("InputError: Flagged would train other numbers")
    assert pool.run(_flagged, 2, store, backend, [False, False]) == ["", ""]


class OnOneRank(nn.Module):
    """Does something where the rank's rows are below a limit; the values stay the same, or change on all ranks alike.

    Args:
        kind: Its name.
        norm: The layers normalise the weights of edges.
    """

    def __init__(self, kind: str, norm: bool) -> None:
        super().__init__()
        self.kind = kind
        self.convs = nn.ModuleList([GCNConv(5, 5) if norm else GraphConv(5, 5) for _ in range(2)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        if bool((x < -1.0).any()):
            match self.kind:
                case "copy":
                    x = x.clone()
                case "view":
                    x = x[:]
                case "graded":
                    x = x.detach().clone().requires_grad_()
                case "graded-weight":
                    edge_weight = edge_weight.detach().clone().requires_grad_()
                case "converted":
                    x = x.float().double()
                case "written":
                    x = x.clone()
                    x += 0.0
                case "weight-copy":
                    edge_weight = edge_weight.clone()
                case "fewer-edges":
                    keep = edge_weight > 0.3
                    edge_index, edge_weight = edge_index[:, keep], edge_weight[keep]
                case "no-weight":
                    edge_weight = None  # type: ignore[assignment]
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight)
        return x


def _on_one_rank(rank: int, world_size: int, store: str, backend: str, kind: str, norm: bool, data: Any) -> Any:
    bound, shard, worst = resolve_backend(backend), Shard.load(store, rank), 0.0
    bound.bind(shard, Communicator(dist.new_group()))
    watch().lost_after_s = 8.0
    torch.manual_seed(0)
    plain = OnOneRank(kind, norm).double()
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    for training in (True, True, True, False, True):
        try:
            with torch.set_grad_enabled(training):
                out = model(shard.x, shard.adjacency, shard.edge_weight)
            if training:
                out.sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        expected = plain(data.x, data.edge_index, data.edge_weight)
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()))
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    ["copy", "view", "graded", "graded-weight", "converted", "written", "weight-copy", "fewer-edges", "no-weight"],
)
def test_what_one_rank_alone_does_to_its_tensors(kind: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    data.x = data.x.float().double()
    first = torch.from_numpy(parts[2]) == 0
    data.x[first] = data.x[first].abs()  # rank 0 sees nothing below the limit
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    norm = "weight" in kind
    results = pool.run(_on_one_rank, 2, str(tmp_path / "parts"), backend, kind, norm, data)
    if isinstance(results[0], str):
        assert kind in ("fewer-edges", "no-weight"), results
        assert results[0] == results[1]
        assert results[0].startswith("InputError: ")
        assert backend in ("cache", "hybrid") or ", rank 1 gives edge_" in results[0]
    else:
        assert max(results) < 1e-10
