"""What a hop reads of its layer by chunks has its gradient, however its code comes by it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.hops.reads import leaves_of, read_names
from tests.backends.training import epoch, one_rank_in_little_memory, same


def test_leaves_are_those_where_gradients_end() -> None:
    first, second, third = (torch.ones(2, requires_grad=True) for _ in range(3))
    leaves = leaves_of(first.exp() * second + second.sum() + third.detach())
    assert {id(one) for one in leaves} == {id(first), id(second)}
    assert len(leaves) == 2
    assert leaves_of(third.detach()) == []


class Raw(MessagePassing):
    """Multiplies messages by a parameter; subclasses say how they come by it."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.unread = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([0.3]))

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out


class ByProperty(Raw):
    @property
    def scale(self) -> Tensor:
        """Computed anew."""
        return self.raw.sigmoid()

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return self.scale * x_j.tanh()


class ByParametrization(Raw):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self, "raw", nn.Sigmoid())

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return self.raw * x_j.tanh()


def _decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def inner(*args: Any) -> Tensor:
        return function(*args)

    return inner


class ByDecorator(Raw):
    @override
    def message(self, x_j: Tensor) -> Tensor:
        return self.made(x_j)

    @_decorated
    def made(self, x_j: Tensor) -> Tensor:
        """A message."""
        return self.raw * x_j.tanh()


def _helper(layer: Raw, x_j: Tensor) -> Tensor:
    return layer.raw * x_j.tanh()


class ByFunction(Raw):
    @override
    def message(self, x_j: Tensor) -> Tensor:
        return _helper(self, x_j)


class ByAttribute(Raw):
    """What was computed from the parameter is found where no code of the layer looks for it."""

    kept: Tensor

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.kept = self.raw.sigmoid()
        return super().forward(x, edge_index)

    @override
    def message(self, x_j: Tensor) -> Tensor:
        scale: Tensor = vars(self)["kept"]
        return scale * x_j.tanh()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [ByProperty, ByParametrization, ByDecorator, ByFunction, ByAttribute])
def test_a_parameter_has_its_gradient_however_a_hop_reads_it(layer: Callable[[], Raw], tmp_path: Path) -> None:
    plain = layer().double()
    model, shard, data = one_rank_in_little_memory(plain, tmp_path)
    for _ in range(2):
        same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))
        gradients = [one.grad for name, one in model.named_parameters() if name != "unread"]
        assert all(one is not None and one.abs() > 0 for one in gradients)
        assert model.get_parameter("unread").grad is None
    for one in model.parameters():
        one.requires_grad_(one is model.unread)
    assert not model(shard.x, shard.adjacency).requires_grad  # nothing is computed once more for what no hop reads


OUTSIDE = {"factor": torch.ones(())}


class ReadsOthers(Raw):
    """Computes with something that is not its own."""

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return OUTSIDE["factor"] * x_j


@pytest.mark.parametrize("computed", [False, True])
def test_what_would_get_no_gradient_is_refused(computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shard, _ = one_rank_in_little_memory(ReadsOthers().double(), tmp_path)
    leaf = torch.ones(1, dtype=torch.float64, requires_grad=True)
    monkeypatch.setitem(OUTSIDE, "factor", leaf.exp() if computed else leaf)
    with pytest.raises(InputError, match=r"hop 1 of ReadsOthers: the hop computes with a tensor of shape \(1,\) that"):
        model(shard.x, shard.adjacency)
    with torch.no_grad():
        model(shard.x, shard.adjacency)


def test_names_hold_no_class() -> None:
    """The class of a routed layer has its backend, which holds a graph."""

    class Layer(nn.Module):
        def message(self) -> Any:
            return self.scale

    assert read_names(Layer, ("message",)) == {"scale"}
    gone = weakref.ref(Layer)
    del Layer
    gc.collect()
    assert gone() is None
