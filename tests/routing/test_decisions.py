"""Conditions on rows: what changes results is refused by its line, before training; what guards or asserts is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, MeanAggregation, MessagePassing, SAGEConv, global_mean_pool
from typing_extensions import override

from pygdist.backends import ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

pytestmark = pytest.mark.slow


def _guarded(x: Tensor, low: float) -> Tensor:
    small = x < low
    if small.any():
        x = x.clone()
        x[small] = low
    return x


def _asserted(x: Tensor) -> Tensor:
    assert x.max() < 1e6
    if not torch.isfinite(x).all():
        raise ValueError("a feature is not finite")
    return x


def _told(x: Tensor) -> Tensor:
    if x.mean() > 0.3:
        warnings.warn("large features", stacklevel=1)
    return x


def _until(x: Tensor) -> Tensor:
    while x.norm() > 4.0:
        x = x * 0.9
    return x


#: The features are positive, and no bound lies between the means of the small graph's parts.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "if": lambda x: x * 2 if x[:, 0].mean() > 37 else x,
    "where": lambda x: torch.where(x[:, 0].mean() > 37, x * 2, x),
    "per feature": lambda x: torch.where(x.mean(0) > 37, x * 2, x),
    "item": lambda x: x * 2 if x[:, 0].mean().item() > 5 else x,
    "float": lambda x: x * 2 if float(x[:, 0].mean()) > 5 else x,
    "any": lambda x: x * 2 if (x < 0).any() else x,
    "all": lambda x: x * 2 if not (x >= 0).all() else x,
    "number": lambda x: x * 2 if x.sum() else x,
    "not": lambda x: x * 2 if ~(x.std() > 37) else x,
    "max": lambda x: x / 255 if max(x.amax(), 2) > 2 else x,
    "steps": lambda x: x * 2 ** int(x.mean().sigmoid().round()),
    "until": _until,
    "one row": lambda x: x * 2 if x[0, 0] > 37 else x,
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "guard that holds": lambda x: _guarded(x, 0.5),
    "guard that does not": lambda x: _guarded(x, -1.0),
    "nan": lambda x: torch.nan_to_num(x) if torch.isnan(x).any() else x,
    "assertions": _asserted,
    "warning": _told,
    "nothing changes": lambda x: x.clone() if x.mean() > 37 else x,
    "of rows": lambda x: torch.where(x.mean(1, keepdim=True) > 0.5, x * 2, x),
    "number of columns": lambda x: x * 2 if torch.tensor(x.size(1)) > 3 else x,
}


class Deciding(nn.Module):
    """Changes its features as they are, and convolves them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.conv = change, GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.change(x), edge_index)
        return out


class ByReadout(nn.Module):
    """Decides by what is computed over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.conv = MeanAggregation(), GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x * 2 if self.mean(x)[0, 0] > 0.5 else x
        out: Tensor = self.conv(x * 2 if global_mean_pool(x, None)[0, 1] > 0.5 else x, edge_index)
        return out


class OfMessages(MessagePassing):
    """Decides by all messages."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * 2 if x_j.amax() > 37 else x_j


class OfNumbers(nn.Module):
    """Reads a number of nodes, which is no decision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = SAGEConv(5, 3), nn.Parameter(torch.ones(9, 5))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        number = int(edge_index.max()) + 1
        out: Tensor = self.conv(x * self.weight[: min(number, 9)].mean(), edge_index)
        return out


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    data, owners = random_graph("directed")
    data.x, folder = data.x.abs() + 0.1, tmp_path_factory.mktemp("decisions")
    for placement, hops in (("nodes", 1), ("replicas", 3)):
        write_store(
            data, owners[2], folder / placement, num_parts=2, method="x", arguments={}, notes=[], placement=placement,
            num_hops=hops,
        )  # fmt: skip
    return str(folder)


def _models(table: str) -> dict[str, nn.Module]:
    if table == "WRONG":
        return {name: Deciding(change) for name, change in WRONG.items()} | {"messages": OfMessages()}
    kept = {name: Deciding(change) for name, change in RIGHT.items()}
    return {**kept, "numbers of nodes": OfNumbers(), "readouts": ByReadout()}


def _say(rank: int, world_size: int, folder: str, backend: str, table: str) -> dict[str, str]:
    """What the first pass of each model says."""
    shard, said = Shard.load(Path(folder) / ("replicas" if backend == "replica" else "nodes"), rank), {}
    for name, model in _models(table).items():
        bound = ReplicaBackend(hops=3) if backend == "replica" else resolve_backend(backend)
        bound.bind(shard, Communicator(dist.new_group()))
        if backend == "replica" and name == "readouts":  # refused by its name
            continue
        try:
            distribute(model.double(), backend=bound)(shard.x, shard.adjacency)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("backend", ["comm", "cache", "tensor", "replica"])
def test_conditions_that_rows_decide_are_refused_by_their_lines(backend: str, parts: str, pool: RankPool) -> None:
    for told in pool.run(_say, 2, parts, backend, "WRONG"):
        for name, text in told.items():
            assert "it decides by rows of nodes or edges (" in text, (name, text)
            assert text.startswith("InputError: ")
            assert "test_decisions.py:" in text
            assert "by what MeanAggregation() or SumAggregation(), as a module of the model, makes of" in text
            assert ("Use backend " in text) == (backend == "replica")


@pytest.mark.parametrize("backend", ["comm", "cache", "tensor", "replica"])
def test_guards_and_assertions_are_no_decisions(backend: str, parts: str, pool: RankPool) -> None:
    for told in pool.run(_say, 2, parts, backend, "RIGHT"):
        assert {name: text for name, text in told.items() if text} == {}
