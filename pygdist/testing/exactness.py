"""The exactness suite: one step on N ranks against one step of plain PyG on one process, number by number.

A backend whose abilities say ``exact`` passes it: same loss, outputs, gradients and updated parameters, for every
world size, with empty parts, isolated nodes and parts without training nodes. :func:`assert_exact` holds any backend
to it; ``pygdist verify`` runs the same comparison on a user's model and graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from pygdist.backends import Backend, Savings, resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ddp_loss_scale
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import labelled, summed_loss
from pygdist.routing import distribute, undistribute
from pygdist.testing.graphs import GRAPHS, random_graph
from pygdist.testing.layers import HIDDEN, LAYERS, build
from pygdist.testing.ranks import RankPool

__all__ = [
    "Difference",
    "Step",
    "assert_exact",
    "distributed_step",
    "largest_differences",
    "reference_step",
    "supported_layers",
]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step computed.

    Attributes:
        loss: The mean loss over all labelled training nodes.
        output: One row per node (per owned node on a rank), before the step.
        gradients: By parameter name.
        parameters: By name, after one step of SGD with learning rate 0.1.
        buffers: By name, after the step; running statistics of norms.
        evaluated: Like ``output``, in evaluation mode and after the step.
        unused: Names of parameters that the backward pass did not come to (on a rank: there, whatever others have).
    """

    loss: float
    output: Tensor
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    evaluated: Tensor
    unused: frozenset[str]


@dataclass(frozen=True)
class Difference:
    """Largest difference of one quantity: absolute, and relative to the largest magnitude of the reference.

    Gradients are one vector over all parameters, and so are the parameters after the step: their parts are relative to
    the largest entry. The gradients of some parameters all but cancel by themselves (a bias in front of a norm, one
    side of an attention score) and hold nothing but rounding on one process already.
    """

    absolute: float
    relative: float


def reference_step(model: nn.Module, data: Data) -> Step:
    """One step of plain PyG and PyTorch on the whole graph; ``model`` is changed by it.

    Raises:
        InputError: If the graph has no labelled training node.
    """
    y, mask = data.get("y"), data.get("train_mask")
    if y is None or mask is None or not bool(labelled(y, mask).any()):
        raise InputError("the graph has no labelled training nodes (y, train_mask), so there is no step to compare")
    run = partial(model, data.x, data.edge_index, **edge_inputs(model, data))
    output, chosen = run(), labelled(y, mask)
    # torch's own means, not the sums that the ranks put together
    if y.dim() == 1:
        loss = functional.cross_entropy(output[chosen], y[chosen])
    else:
        loss = functional.binary_cross_entropy_with_logits(output[chosen], y[chosen].to(output.dtype))
    reached = _Reached(model)
    loss.backward()
    return _finish(model, run, output, float(loss.detach()), reached.unused())


def distributed_step(model: nn.Module, shard: Shard, communicator: Communicator, *, static_graph: bool = True) -> Step:
    """One step of a distributed model on this rank: the classifier's loss, its gradients averaged by torch's DDP.

    Args:
        model: As :func:`~pygdist.distribute` returns it.
        shard: What this rank holds.
        communicator: The ranks.
        static_graph: As in DDP: some parameters may get no gradient. Without, as in training, ranks wait for each
            other's gradient of every parameter, and hang if one of them has none.
    """
    if shard.y is None or shard.train_mask is None:
        raise InputError("the graph has no labels (y, train_mask), so there is no step to compare")
    trained = model
    if communicator.world_size > 1:
        # in the default process group, as under Lightning: exchanges have their own
        # a static graph may leave parameters without gradient, on some ranks too: _Reached tells which
        trained = DistributedDataParallel(model, static_graph=static_graph, **DDP_OPTIONS)
    inputs, reached = edge_inputs(model, shard), _Reached(model)
    output = trained(shard.x, shard.adjacency, **inputs)
    total, count = summed_loss(output, shard.y, shard.train_mask)
    sums = communicator.gather((float(total.detach()), float(count))).sum(dim=0)
    (total * ddp_loss_scale(int(sums[1]), communicator.world_size)).backward()
    run = partial(model, shard.x, shard.adjacency, **inputs)
    return _finish(model, run, output, float(sums[0] / sums[1]), reached.unused())


class _Reached:
    """Which parameters a backward pass comes to on this rank, before gradients are averaged."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self._missed = set(parameters)
        # where DDP waits; the nodes must be kept, or autograd makes others
        self._nodes = {name: get_gradient_edge(one).node for name, one in parameters.items() if one.requires_grad}
        self._hooks = [node.register_hook(partial(self._note, name)) for name, node in self._nodes.items()]

    def _note(self, name: str, *_: Any) -> None:
        self._missed.discard(name)

    def unused(self) -> frozenset[str]:
        """The names of those that it did not come to; asked once, at the end."""
        for hook in self._hooks:
            hook.remove()
        return frozenset(self._missed)


def _finish(model: nn.Module, run: Callable[[], Tensor], output: Tensor, loss: float, unused: frozenset[str]) -> Step:
    """Take the step and note what it did; run the model once more, in evaluation mode."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        evaluated = run()
    return Step(
        loss=loss,
        output=output.detach(),
        gradients=gradients,
        parameters={name: value.detach().clone() for name, value in model.named_parameters()},
        buffers=buffers,
        evaluated=evaluated,
        unused=unused,
    )


def largest_differences(ours: Step, reference: Step, rows: Tensor | slice = slice(None)) -> dict[str, Difference]:
    """Largest difference of loss, output, each gradient, updated parameter and buffer, and the output afterwards.

    A gradient that a rank lacks and one process has is infinitely far off.

    Args:
        ours: The step on a rank.
        reference: The step of one process.
        rows: Which rows of the reference's output ``ours`` holds.
    """
    pairs = {"loss": (torch.tensor(ours.loss), torch.tensor(reference.loss))}
    pairs["output"] = (ours.output, reference.output[rows])
    pairs["output afterwards, in evaluation"] = (ours.evaluated, reference.evaluated[rows])
    for kind in ("gradients", "parameters", "buffers"):
        mine, theirs = getattr(ours, kind), getattr(reference, kind)
        if mine.keys() != theirs.keys():
            raise AssertionError(f"{kind} differ in name: {sorted(mine.keys() ^ theirs.keys())}")
        pairs |= {f"{kind} of {name}": (mine[name], theirs[name]) for name in mine}
    scales = {"gradients": _largest(reference.gradients), "parameters": _largest(reference.parameters)}
    found = {name: _difference(*pair, scale=scales.get(name.split()[0], 0.0)) for name, pair in pairs.items()}
    # the mean over ranks may be right all the same, but in training the other ranks wait for it for ever
    missing = [f"gradients of {name}" for name in ours.unused - reference.unused]
    return found | dict.fromkeys(missing, Difference(float("inf"), float("inf")))


def _largest(values: Mapping[str, Tensor]) -> float:
    return max((float(value.abs().max()) for value in values.values() if value.numel()), default=0.0)


def _difference(ours: Tensor, reference: Tensor, *, scale: float) -> Difference:
    if ours.shape != reference.shape:
        raise AssertionError(f"shapes differ: {tuple(ours.shape)} and {tuple(reference.shape)}")
    if ours.numel() == 0:
        return Difference(0.0, 0.0)
    ours, reference = ours.cpu().double(), reference.cpu().double()
    absolute = float((ours - reference).abs().max())
    if absolute != absolute:  # NaN on one side only, or on both
        return Difference(float("inf"), float("inf"))
    return Difference(absolute, absolute / max(float(reference.abs().max()), scale, 1e-30))


def assert_exact(
    backend: str | Backend,
    *,
    layers: Iterable[str] | None = None,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    graphs: Iterable[str] = GRAPHS,
    num_nodes: int = 37,
    num_features: int = 5,
    hidden_channels: int = HIDDEN,
    num_layers: int = 2,
    seed: int = 0,
    tolerance: float = 1e-10,
    savings: Savings | None = None,
    num_hops: int | None = None,
    pool: RankPool | None = None,
) -> dict[str, float]:
    """Hold a backend to the contract: layers x world sizes x graphs, in float64, against plain PyG on one process.

    Args:
        backend: Registered name, class path, or an instance.
        layers: Names of :data:`~pygdist.testing.layers.LAYERS`; all by default.
        world_sizes: Numbers of ranks; each is launched once.
        graphs: Kinds of :func:`~pygdist.testing.graphs.random_graph`.
        num_nodes: Nodes of each graph.
        num_features: Width of their rows, and of what the first layer of each model takes.
        hidden_channels: Width of rows between layers; those of the suite that are whole models have their own.
        num_layers: Layers of each model; those of the suite that are whole models have as many as they have.
        seed: Everything is drawn from it.
        tolerance: Largest absolute difference allowed.
        savings: What :func:`~pygdist.distribute` gets.
        num_hops: Hops around a part that the placed graph holds; by default as many as the backend asks for.
        pool: Processes to use; by default they are started for the call.

    Returns:
        The largest difference by layer.

    Raises:
        AssertionError: Naming the layer, world size, graph, rank and quantity of each difference that is too large.

    Example:
        >>> assert_exact("my_package.MyBackend", layers=["GCNConv", "GATConv"], world_sizes=[2, 3])
    """
    names = list(LAYERS if layers is None else layers)
    sizes = _Sizes(num_nodes, num_features, hidden_channels, num_layers, seed)
    abilities = resolve_backend(backend).abilities
    num_hops = abilities.num_hops if num_hops is None else num_hops
    worst: dict[str, float] = {}
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pygdist-exact-")))
        pool = stack.enter_context(RankPool(max(world_sizes))) if pool is None else pool
        for world_size, kind in itertools.product(world_sizes, graphs):
            data, parts = sizes.graph(kind)
            store = folder / f"{kind}-{world_size}"
            write_store(
                data, parts[world_size], store, num_parts=world_size, method=kind, arguments={}, notes=[],
                num_hops=num_hops, placement=abilities.placement,
            )  # fmt: skip
            # a call for each graph: what counts as hung must not depend on how many there are
            ranks = pool.run(_check_exact, world_size, backend, names, kind, str(store), sizes, savings)
            for rank, found in enumerate(ranks):
                for name, (quantity, difference) in found.items():
                    worst[name] = max(worst.get(name, 0.0), difference)
                    if not difference <= tolerance:
                        wrong.append(
                            f"{name} on {world_size} ranks, graph {kind}: {quantity} of rank {rank} differs by "
                            f"{difference:.1e}"
                        )
    if wrong:
        raise AssertionError(f"{len(wrong)} differences beyond {tolerance:.0e}:\n" + "\n".join(wrong))
    return worst


class _Sizes(NamedTuple):
    """What all graphs and models of a call have in common."""

    num_nodes: int
    num_features: int
    hidden_channels: int
    num_layers: int
    seed: int

    def graph(self, kind: str) -> tuple[Data, dict[int, np.ndarray]]:
        return random_graph(kind, num_nodes=self.num_nodes, num_features=self.num_features, seed=self.seed)


def _check_exact(
    rank: int,
    world_size: int,
    backend: str | Backend,
    names: list[str],
    kind: str,
    store: str,
    sizes: _Sizes,
    savings: Savings | None,
) -> dict[str, tuple[str, float]]:
    """On one rank: the worst quantity and its difference, by layer."""
    communicator = Communicator(dist.new_group(), check_order=True)
    shard = Shard.load(store, rank)
    found = {}
    for name in names:
        plain, reference = _reference(name, kind, sizes)
        bound = resolve_backend(backend)
        bound.bind(shard, communicator)
        model = distribute(copy.deepcopy(plain), backend=bound, savings=savings)
        differences = largest_differences(distributed_step(model, shard, communicator), reference, shard.owned_id)
        quantity = max(differences, key=lambda key: differences[key].absolute)
        found[name] = (quantity, differences[quantity].absolute)
        bound.unbind()
    return found


@functools.lru_cache(maxsize=1024)
def _reference(name: str, kind: str, sizes: _Sizes) -> tuple[nn.Module, Step]:
    """A model and its step on one process; the same for every backend and number of ranks."""
    data, _ = sizes.graph(kind)
    model = build(
        name, data.x.size(1), int(data.y.max()) + 1, num_layers=sizes.num_layers, hidden_channels=sizes.hidden_channels
    )
    return model, reference_step(copy.deepcopy(model), data)


def supported_layers(backend: str | Backend) -> list[str]:
    """The names of :data:`~pygdist.testing.layers.LAYERS` that a backend does not refuse."""
    found = []
    for name in LAYERS:
        with contextlib.suppress(InputError):
            undistribute(distribute(build(name, 5, 3), backend=resolve_backend(backend)))
            found.append(name)
    return found


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout by torch of any kind does nothing: its numbers depend on the number of ranks, its absence does not."""

    def identity(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    kinds = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch(f"torch.nn.functional.{kind}", identity))
        stack.enter_context(mock.patch("torch.dropout", identity))
        yield
