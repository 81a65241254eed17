"""Helpers: a few epochs of any model, plain or distributed, and what the kernels were given meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from typing_extensions import override

from pygdist import Shard, distribute
from pygdist.backends import Backend, Savings, SingleBackend, TensorBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.testing import random_graph

TINY = 24 / 2**20  # GiB: 24 KiB
#: Nothing is left undone.
NOTHING = Savings(first_hop=False, cheaper_side=False, no_input_gradient=False, fused_attention=False, block_mib=0)


class Columns(TorchDispatchMode):
    """The number of columns of each sparse product, forward and backward, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "pygdist" and "spmm" in func.name():
            into = "into" in func.name()
            # a hop in chunks writes into memory that it has: for each rank whose rows it reads, and for its own
            self.found.append(args[0].size(1) if into else out.size(1))
        return out

    def take(self) -> list[int]:
        """What was found since the last call."""
        found, self.found = self.found, []
        return found


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.Size] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {leaf.shape for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def one_rank(folder: Path, kind: str = "directed", **options: Any) -> tuple[Data, Shard]:
    """A graph, and the shard of a rank that holds all of it."""
    data, part = random_graph(kind, **options)
    write_store(data, part[1], folder / "store", num_parts=1, method="test", arguments={})
    return data, Shard.load(folder / "store", 0)


def one_rank_in_little_memory(
    layer: nn.Module, folder: Path, memory_gib: float = TINY
) -> tuple[nn.Module, Shard, Data]:
    """A layer on slices within a budget, and the graph with and without the backend."""
    data, shard = one_rank(folder)
    backend = TensorBackend(memory_gib=memory_gib)
    backend.bind(shard, Communicator())
    return distribute(copy.deepcopy(layer), backend=backend, check=False), shard, data


def stored(folder: Path, kind: str, world_size: int) -> tuple[Data, str]:
    """A graph, and the path of its parts."""
    data, part = random_graph(kind)
    write_store(data, part[world_size], folder / kind, num_parts=world_size, method="test", arguments={})
    return data, str(folder / kind)


def single(model: nn.Module, shard: Shard, savings: Savings | None = None) -> nn.Module:
    """The model, distributed over one rank."""
    backend = SingleBackend()
    backend.bind(shard, Communicator())
    return distribute(model, backend=backend, savings=savings, check=False)


def backend_of(model: nn.Module) -> Backend:
    """The backend of a distributed model."""
    backend: Backend = next(
        type(module)._pygdist_backend for module in model.modules() if hasattr(type(module), "_pygdist_backend")
    )
    return backend


def epoch(model: nn.Module, *args: Any, summed: bool = False, **kwargs: Any) -> list[Tensor]:
    """One step of gradient descent: the output before it, and the gradients (summed over ranks if asked)."""
    parameters = list(model.parameters())
    out: Tensor = model(*args, **kwargs)
    loss = (out * out.detach().cos()).sum()
    model.zero_grad()
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if summed:
                dist.all_reduce(gradient)
            parameter -= 0.01 * gradient
    return [out.detach().clone(), *gradients]


def gradients(model: nn.Module, out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of all parameters and of ``inputs``."""
    wanted = [*inputs, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad((out * out.detach().cos()).sum(), wanted, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, rtol: float = 0.0) -> None:
    """Equal up to rounding in float64; ``rtol`` where sums are over so many nodes that they are large."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-10)


def evaluated(model: nn.Module, *args: Any, mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    """The output in evaluation mode; the model trains on afterwards."""
    model.eval()
    with mode():
        out: Tensor = model(*args)
    model.train()
    return out
