"""Conditions on rows: what changes results is refused by its line, before training; what guards or asserts is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MeanAggregation, MessagePassing, SAGEConv, global_mean_pool
from typing_extensions import override

from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from tests.routing.bound import bound, needs_planner

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


def _either(x: Tensor) -> Tensor:
    return x * 2 if x.min() > -100 and x.mean() > 37 else x


def _big(value: Tensor) -> bool:
    return bool(value.mean() > 37)


def _in_a_helper(x: Tensor) -> Tensor:
    x = x + 0 * x if _big(x - 1) else x  # the first call of the helper changes nothing
    return x * 2 if _big(x) else x


def _after_many(x: Tensor) -> Tensor:
    for more in range(2):
        assert x.max() < 1e6 + more
    return x * 2 if x[:, 0].mean() > 37 else x


def _by_experts(x: Tensor) -> Tensor:
    return [x, x * 2, x * 3, x * 4][int(x.mean().abs())]


def _checkpointed(x: Tensor) -> Tensor:
    out: Any = checkpoint(lambda x: x * 2 if x.norm() > 1e3 else x, x, use_reentrant=False)
    return out


def _halting(x: Tensor) -> Tensor:
    """Each row is halved until it is small, as in adaptive computation time."""
    for _ in range(40):
        large = x.abs().amax(1) > 0.5
        if not large.any():
            break
        x = torch.where(large[:, None], x / 2, x)
    return x


#: Right for the features of one process, and bounds that its parts pass by chance.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "if": lambda x: x * 2 if x[:, 0].mean() > 37 else x,
    "where": lambda x: torch.where(x[:, 0].mean() > 37, x * 2, x),
    "per feature": lambda x: torch.where(x.mean(0) > 37, x * 2, x),
    "item": lambda x: x * 2 if x[:, 0].mean().item() > 5 else x,
    "float": lambda x: x * 2 if float(x[:, 0].mean()) > 5 else x,
    "any": lambda x: x * 2 if (x > 37).any() else x,
    "any that holds": lambda x: x / 10 if (x.abs() > 0.2).any() else x,
    "all": lambda x: x * 2 if not (x < 37).all() else x,
    "count": lambda x: x / 10 if (x.abs() > 0.2).sum() > 0 else x,
    "number": lambda x: x * 2 if x.sum() else x,
    "not": lambda x: x * 2 if ~(x.std() > 37) else x,
    "max": lambda x: x / 255 if x.amax() > 20 else x,
    "steps": lambda x: x * 2 ** int(x.mean().sigmoid().round()),
    "bound of an integer": lambda x: x * 2 if int((x * 1000).max()) > 60000 else x,
    "until": _until,
    "one row": lambda x: x * 2 if x[0, 0] > 37 else x,
    "second on a line": _either,
    "second meeting": _in_a_helper,
    "after others": _after_many,
    "index": _by_experts,
    "allclose": lambda x: x if torch.allclose(x, x * 0, atol=37.0) else x * 2,
    "checkpointed": _checkpointed,
    "clamp": lambda x: x / x.std().clamp(min=37.0),
    "floor": lambda x: x * 10 ** (x.amax() / 1000).floor(),
    "position": lambda x: torch.cat([x[:30] * 2, x[30:] * 3]),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "guard that holds": lambda x: _guarded(x, 0.5),
    "guard that does not": lambda x: _guarded(x, -1e6),
    "guard by a count": lambda x: torch.where(x < 0.5, x * 0, x) if (x < 0.5).sum() > 0 else x,
    "halting": _halting,
    "nan": lambda x: torch.nan_to_num(x) if torch.isnan(x).any() else x,
    "assertions": _asserted,
    "warning": _told,
    "nothing changes": lambda x: x.clone() if x.mean() > 37 else x,
    "of rows": lambda x: torch.where(x.mean(1, keepdim=True) > 0.5, x * 2, x),
    "softmax": lambda x: x * (x - x.max()).softmax(1),
    "number of columns": lambda x: x * 2 if torch.tensor(x.size(1)) > 3 else x,
    "all nodes": lambda x: torch.cat([x[:10000], x[10000:]]),
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


class Guarding(nn.Module):
    """Guards rows that a mean of all nodes reads, so that nobody can tell what the guard changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.conv = MeanAggregation(), GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = _guarded(x, 0.5)
        out: Tensor = self.conv(x + self.mean(x), edge_index)
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


class Wide(nn.Module):
    """Is as wide as the small graph would have nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 23)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return torch.where(out.mean(0) > 37, out * 2, out)


class Peak(nn.Module):
    """Notes a number that nothing reads."""

    peak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.peak = torch.maximum(self.peak, x.max())
        out: Tensor = self.conv(x, edge_index)
        return out


class Tested(nn.Module):
    """Tests the graph in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if edge_index.max() >= x.size(0):
            raise ValueError("an edge of a node without features")
        out: Tensor = self.conv(x, edge_index)
        return out


@pytest.fixture(scope="module")
def graph() -> tuple[Data, np.ndarray]:
    """A graph of which one part has much larger features, of both signs, and the owner of each node."""
    data, owners = random_graph("directed")
    data.x = data.x * torch.where(torch.from_numpy(owners[2]) == 0, 1.0, 40.0)[:, None]
    return data, owners[2]


@pytest.fixture(scope="module")
def parts(graph: tuple[Data, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> str:
    (data, owner), folder = graph, tmp_path_factory.mktemp("decisions")
    for placement, hops in (("nodes", 1), ("replicas", 3)):
        write_store(
            data, owner, folder / placement, num_parts=2, method="x", arguments={}, notes=[], placement=placement,
            num_hops=hops,
        )  # fmt: skip
    return str(folder)


def _models(table: str) -> dict[str, nn.Module]:
    if table == "WRONG":
        models: dict[str, nn.Module] = {name: Deciding(change) for name, change in WRONG.items()}
        return {**models, "messages": OfMessages(), "wide": Wide()}
    kept: dict[str, nn.Module] = {name: Deciding(change) for name, change in RIGHT.items()}
    return {**kept, "numbers of nodes": OfNumbers(), "readouts": ByReadout(), "peak": Peak()}


def _say(rank: int, world_size: int, folder: str, backend: str, names: list[str], table: str) -> dict[str, Any]:
    """What the first pass of each model says, or its owned rows and what it puts out."""
    said = {}
    for name in names:
        shard, running = bound(backend, folder, rank, Communicator(dist.new_group()))
        torch.manual_seed(0)
        model = (_models(table)[name] if table else Tested() if name == "tested" else Guarding()).double()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                out = distribute(model, backend=running)(shard.x, shard.adjacency)
                said[name] = shard.owned_id, out.detach(), [str(one.message) for one in warned]
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


BACKENDS = [
    "comm", "tensor", "replica",
    pytest.param("cache", marks=pytest.mark.exhaustive),
    pytest.param("hybrid", marks=[pytest.mark.exhaustive, needs_planner]),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_conditions_that_rows_decide_are_refused_by_their_lines(backend: str, parts: str, pool: RankPool) -> None:
    for told in pool.run(_say, 2, parts, backend, list(_models("WRONG")), "WRONG"):
        accepted = {name for name, text in told.items() if not isinstance(text, str)}
        assert accepted == set()
        for name, text in told.items():
            assert text.startswith("InputError: "), (name, text)
            if name == "position":
                assert "cuts rows by their numbers (" in text
            elif "would train other numbers with backend" not in text:  # by what parts of the small graph make of it
                assert "it decides by rows of nodes or edges (" in text, (name, text)
                assert "by what MeanAggregation() or SumAggregation(), as a module of the model, makes of" in text
                assert "test_decisions.py:" in text
                assert ("Use backend " in text) == (backend == "replica")


@pytest.mark.parametrize("backend", BACKENDS)
def test_guards_and_assertions_are_no_decisions(
    backend: str, graph: tuple[Data, np.ndarray], parts: str, pool: RankPool
) -> None:
    """And the numbers are those of one process, though the parts' features differ."""
    names = [name for name in _models("RIGHT") if (name, backend) != ("readouts", "replica")]  # refused by its name
    ranks = pool.run(_say, 2, parts, backend, names, "RIGHT")
    for rank, told in enumerate(ranks):
        assert {name: text for name, text in told.items() if isinstance(text, str)} == {}
        for name, (rows, out, warned) in told.items():
            torch.manual_seed(0)
            expected = _models("RIGHT")[name].double()(graph[0].x, graph[0].edge_index)
            torch.testing.assert_close(out, expected[rows], rtol=0, atol=1e-9 * float(expected.abs().max()))
            assert any("computes 'peak' over the rows of each" in text for text in warned) == (name == "peak") or rank


def test_a_guard_that_cannot_be_tried_is_told(parts: str, pool: RankPool) -> None:
    said = pool.run(_say, 2, parts, "comm", ["guarding"], "")
    *_, warned = said[0]["guarding"]
    assert any("but the condition at " in text and "test_decisions.py:" in text for text in warned)


def test_a_test_of_the_graph_by_the_model_is_told(parts: str, pool: RankPool) -> None:
    for told in pool.run(_say, 2, parts, "comm", ["tested"], ""):
        assert "ValueError: an edge of a node without features (" in told["tested"]
        assert "leave such a test of the graph out of forward" in told["tested"]
