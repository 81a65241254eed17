"""A model with a fault of its own ends on ranks as on one process: the same exception, in the same line of its file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.utils import scatter
from typing_extensions import override

from pygdist.backends import ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.user_code import place_of
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

BACKENDS = ["comm", "cache", "tensor", "replica"]
BACKENDS += ["hybrid"] if load() is not None else []  # which plans in the native library


class Faulty(nn.Module):
    """A layer, and a step with a mistake."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.step = GCNConv(5, 4), step
        self.wide, self.few = nn.Linear(7, 3), nn.Embedding(2, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.step(self, self.conv(x, edge_index), edge_index)


class InMessages(MessagePassing):
    """A layer whose messages have a mistake."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.few, self.step = nn.Linear(5, 4), nn.Embedding(2, 4), step

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return self.step(self, x_j)


class LateFault(torch.autograd.Function):
    """Looks up a column that is not there, in the backward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad[:, 9:10] + grad[:, 99]


def _wrong_file(_: Any, h: Tensor, __: Tensor) -> Tensor:
    with open("no/such/weights.pt") as file:
        return h * len(file.read())


def _refusal(_: Any, __: Tensor, ___: Tensor) -> Tensor:
    raise ValueError("hidden_channels must be even, got 3")


#: Models as people write them, each with one mistake.
FAULTS: dict[str, Callable[[], nn.Module]] = {
    "shapes": lambda: Faulty(lambda self, h, _: self.wide(h)),
    "column": lambda: Faulty(lambda _, h, __: h * h[:, 12, None]),
    "row-of-a-table": lambda: Faulty(lambda self, h, _: h + self.few.weight[5]),
    "category": lambda: Faulty(lambda self, h, _: h + self.few(torch.full((h.size(0),), 7))),
    "class": lambda: Faulty(lambda _, h, __: functional.cross_entropy(h, torch.full((h.size(0),), 77)) + h),
    "list": lambda: Faulty(lambda _, h, __: h * [1.0, 2.0][h.size(1)]),
    "key": lambda: Faulty(lambda _, h, __: h * {"relu": 1.0}["gelu"]),
    "dtype": lambda: Faulty(lambda self, h, _: self.conv.lin(h.long())),
    "argument": lambda: Faulty(lambda self, h, _: self.conv(h)),
    "attribute": lambda: Faulty(lambda self, h, _: self.convs[1](h)),
    "none": lambda: Faulty(lambda self, h, _: self.wide(None) + h),
    "scatter": lambda: Faulty(lambda _, h, __: scatter(h, torch.full((h.size(0),), 500), dim_size=h.size(0))),
    "file": lambda: Faulty(_wrong_file),
    "refusal": lambda: Faulty(_refusal),
    "backward": lambda: Faulty(lambda _, h, __: LateFault.apply(h)),  # type: ignore[no-untyped-call]
    "message-column": lambda: InMessages(lambda _, x_j: x_j * x_j[:, 17, None]),
    "message-category": lambda: InMessages(lambda self, x_j: x_j + self.few(torch.full((x_j.size(0),), 7))),
    "message-shapes": lambda: InMessages(lambda _, x_j: x_j @ torch.ones(7, 3)),
}


def _end(make: Callable[[], nn.Module], run: Callable[[nn.Module], Any]) -> tuple[str, str, str]:
    """How a model ends: the type of the exception, its text without numbers of rows, and the line."""
    torch.manual_seed(0)
    try:
        run(make())
    except Exception as error:
        return type(error).__name__, re.sub(r"\d+", "#", str(error)), place_of(error)
    return "", "", ""


def _ends(rank: int, world_size: int, folder: str, backend_name: str) -> dict[str, tuple[tuple[str, str, str], str]]:
    communicator, ends = Communicator(dist.new_group()), {}
    shard = Shard.load(f"{folder}/{'replicas' if backend_name == 'replica' else 'nodes'}", rank).astype(torch.float32)

    def run(model: nn.Module) -> None:
        backend = ReplicaBackend(hops=3) if backend_name == "replica" else resolve_backend(backend_name)
        backend.bind(shard, communicator)
        distribute(model, backend=backend)(shard.x, shard.adjacency).sum().backward()

    for name, make in FAULTS.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            end = _end(make, run)
        ends[name] = end, "".join(str(one.message) for one in warned if "pygdist" in str(one.message))
    return ends


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_of_the_model_is_told_as_on_one_process(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    assert data.x is not None
    x = data.x.float()
    expected = {
        name: _end(make, lambda model: model(x, data.edge_index).sum().backward()) for name, make in FAULTS.items()
    }
    for ends in pool.run(_ends, 2, parts, backend):
        for name, (end, warned) in ends.items():
            if backend == "tensor" and name.startswith("message"):  # tried before there are any rows
                assert end[0] == "InputError"
                assert f"it could not be tried on a few nodes ({expected[name][0]}: " in end[1]
                assert "test_own_faults.py:" in end[1]
            else:
                assert end == expected[name], name
            assert warned == ""


class Rooted(nn.Module):
    """Fails for the values that stand for ``count`` where the model is tried, and for no others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 4)

    def forward(self, x: Tensor, edge_index: Tensor, sizes: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return torch.cat([out, out.new_ones(int(sizes.sum() % 9973) - 9000 + len(out), 1)], dim=-1)


def _rooted(rank: int, world_size: int, folder: str) -> str:
    shard, backend = Shard.load(f"{folder}/replicas", rank).astype(torch.float32), ReplicaBackend(hops=3)
    backend.bind(shard, Communicator(dist.new_group()))
    sizes = torch.zeros(shard.num_owned, dtype=torch.int64)
    sizes[0] = 9000
    with pytest.raises(InputError) as caught:
        distribute(Rooted(), backend=backend)(shard.x, shard.adjacency, sizes)
    return str(caught.value)


def test_a_fault_that_other_arguments_may_cause_is_not_called_the_models(parts: str, pool: RankPool) -> None:
    for said in pool.run(_rooted, 2, parts):
        assert "first runs the model on a few nodes" in said
        assert "if it runs on other inputs" in said
