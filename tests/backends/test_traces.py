"""No backend leaves a trace of runs that the user did not ask for: counts of calls are those of one process."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GraphConv, MessagePassing
from typing_extensions import override

from pygdist.backends import Backend, ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

STEPS = 3
MESSAGES = 0


class Counting(MessagePassing):
    """Counts its calls wherever a user might: on itself, on its class, in a container, in a global, in a buffer."""

    forwards = 0

    def __init__(self, width: int) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(width, 4)
        self.updates: list[int] = []
        self.temperature = 1.0
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.passes: Tensor

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """A sum of messages, divided by a temperature that falls."""
        Counting.forwards += 1
        self.passes += 1
        self.temperature *= 0.8
        return self.propagate(edge_index, x=self.lin(x)) / self.temperature

    @override
    def message(self, x_j: Tensor) -> Tensor:
        """A row of a source."""
        global MESSAGES
        MESSAGES += 1
        return x_j.tanh()

    @override
    def update(self, inputs: Tensor) -> Tensor:
        """Count."""
        self.updates.append(len(self.updates))
        return inputs


class Model(nn.Module):
    """Two layers, a hook, and numbers drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.hooked = Counting(5), Counting(4), {"before": 0, "after": 0}
        self.first.register_forward_pre_hook(self._count("before"))
        self.last.register_forward_hook(self._count("after"))

    def _count(self, name: str) -> Any:
        def count(*_: Any) -> None:
            self.hooked[name] += 1

        return count

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scaled by what three generators draw."""
        scale = 1 + random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return self.last(self.first(x, edge_index).relu(), edge_index) * scale


def _steps(model: nn.Module, *inputs: Any) -> tuple[Tensor, list[Any]]:
    """Outputs of some passes, and all counts after them."""
    global MESSAGES
    MESSAGES = Counting.forwards = 0
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    outputs = []
    for _ in range(STEPS):
        out = model(*inputs)
        out.square().sum().backward()
        outputs.append(out.detach())
    layers = [one for one in model.modules() if isinstance(one, Counting)]
    own = [(len(one.updates), int(one.passes), round(one.temperature, 9)) for one in layers]
    drawn = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    return torch.stack(outputs), [MESSAGES, Counting.forwards, own, vars(model)["hooked"], drawn]


def _made() -> Model:
    torch.manual_seed(1)
    return Model().double()


def _on_rank(rank: int, world_size: int, store: str, backend: str | Backend) -> tuple[Tensor, Tensor, list[Any]]:
    shard, bound = Shard.load(store, rank), resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group()))
    outputs, counts = _steps(distribute(_made(), backend=bound, check=False), shard.x, shard.adjacency)
    return shard.owned_id, outputs, counts


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["comm", "cache", "hybrid", "tensor", "replica"])
def test_calls_are_as_many_as_on_one_process(backend: str, pool: RankPool, tmp_path: Path) -> None:
    if backend == "hybrid" and load() is None:
        pytest.skip("hybrid plans in the native library")
    data, parts = random_graph("directed")
    hops = 2 if backend == "replica" else None
    write_store(
        data, parts[2], tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[], num_hops=hops or 1
    )  # fmt: skip
    expected, counts = _steps(_made(), data.x, data.edge_index)
    assert counts[1] == STEPS * 2
    for owned, outputs, counted in pool.run(
        _on_rank, 2, str(tmp_path / "parts"), ReplicaBackend(hops=2) if hops else backend
    ):
        assert counted == counts
        assert float((outputs - expected[:, owned]).abs().max()) < 1e-10


def _with_iterator() -> Model:
    model = _made()
    model.first.draws = iter(range(9))
    return model


def _iterates(rank: int, world_size: int, store: str, backend: str) -> tuple[Tensor, Tensor, list[str]] | str:
    shard, bound = Shard.load(store, rank), resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group()))
    model = distribute(_with_iterator(), backend=bound, check=False)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            outputs, _ = _steps(model, shard.x, shard.adjacency)
    except InputError as error:
        return str(error)
    return shard.owned_id, outputs, [str(one.message) for one in warned]


@pytest.mark.parametrize("backend", ["comm", "cache", "hybrid"])
def test_an_iterator_is_refused_only_where_it_would_go_on(backend: str, pool: RankPool, tmp_path: Path) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[])
    expected, _ = _steps(_with_iterator(), data.x, data.edge_index)
    for rank, found in enumerate(pool.run(_iterates, 2, str(tmp_path / "parts"), backend)):
        if backend == "cache":
            assert "Counting.draws is an iterator (range_iterator); use backend comm" in found
            continue
        rows, outputs, warned = found
        assert float((outputs - expected[:, rows]).abs().max()) < 1e-10
        reasons = [one for one in warned if "Counting.draws is an iterator" in one and "none computed" in one]
        assert len(reasons) == (backend == "hybrid" and rank == 0)


class Doubling(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(5, 3)

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Twice the rows."""
        return self.conv(x.mul_(2), edge_index)


def _doubled(rank: int, world_size: int, store: str, backend: str) -> float:
    shard, bound = Shard.load(store, rank), resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group()))
    before = shard.x.clone()
    distribute(Doubling().double(), backend=bound, check=False)(shard.x, shard.adjacency)
    return float((shard.x / before).max())


@pytest.mark.parametrize("backend", ["comm", "cache", "hybrid", "tensor"])
def test_inputs_are_written_into_no_more_often_than_by_one_pass(backend: str, pool: RankPool, tmp_path: Path) -> None:
    if backend == "hybrid" and load() is None:
        pytest.skip("hybrid plans in the native library")
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[])
    assert max(pool.run(_doubled, 2, str(tmp_path / "parts"), backend)) <= 2
