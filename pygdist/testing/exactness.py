"""The exactness suite compares one step on N ranks with one step of plain PyG on one process, number by number.

A backend whose abilities say ``exact`` must pass the suite: same loss, outputs, gradients and updated parameters, for
every world size, with empty parts, isolated nodes and parts without training nodes. :func:`assert_exact` tests any
backend; ``pygdist verify`` runs the same comparison on a user's model and graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from pygdist.backends import Abilities, Backend, Savings, resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ddp_loss_scale
from pygdist.errors import InputError, did_you_mean
from pygdist.graph import Shard, write_store
from pygdist.memory.scratch import ScratchFolder
from pygdist.nn.inputs import arguments_of
from pygdist.nn.loss import Losses, labelled, node_losses, summed_loss
from pygdist.routing import distribute, undistribute
from pygdist.testing.graphs import GRAPHS, MOST_RANKS, random_edge_part, random_graph
from pygdist.testing.layers import HIDDEN, LAYERS, build
from pygdist.testing.ranks import RankPool


@dataclass(frozen=True, kw_only=True)
class Step:
    """Results of one training step.

    Attributes:
        loss: The mean loss over all labelled training nodes.
        output: Outputs before the step, one row per node (per owned node on a rank).
        gradients: Gradients by parameter name.
        parameters: Parameters by name, after one step of SGD with learning rate 0.1.
        buffers: Buffers by name, after the step, such as running statistics of norms.
        evaluated: Outputs like ``output``, but after the step and in evaluation mode.
        unused: Names of the parameters that the backward pass on this process did not reach.
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

    Differences of gradients are relative to the largest entry of all gradients, and differences of updated parameters
    to the largest entry of all parameters. The reason is that some gradients nearly cancel (a bias in front of a norm,
    one side of an attention score), and even on one process consist only of rounding errors.
    """

    absolute: float
    relative: float


def reference_step(model: nn.Module, data: Data, losses: Losses | None = None) -> Step:
    """Make one step of plain PyG and PyTorch on the whole graph; the step changes ``model``.

    ``losses`` returns the loss of each node, ``(n,)``, given outputs and labels. By default the step uses torch's loss
    for classification.

    Raises:
        InputError: If the graph has no labelled training node.
    """
    y, mask = data.get("y"), data.get("train_mask")
    if y is None or mask is None or not bool(labelled(y, mask).any()):
        raise InputError("the graph has no labelled training nodes, so there is no step to compare; set y, train_mask")
    args, inputs = arguments_of(model, data, data.edge_index)
    run = partial(model, *args, **inputs)
    output, chosen = run(), labelled(y, mask)
    # torch's own means, not the sums over ranks
    if losses is not None:
        loss = losses(output[chosen], y[chosen]).mean()
    elif y.dim() == 1:
        loss = functional.cross_entropy(output[chosen], y[chosen])
    else:
        loss = functional.binary_cross_entropy_with_logits(output[chosen], y[chosen].to(output.dtype))
    reached = _Reached(model)
    loss.backward()
    return _finish(model, run, output, float(loss.detach()), reached.unused())


def distributed_step(
    model: nn.Module,
    shard: Shard,
    communicator: Communicator,
    *,
    static_graph: bool = True,
    losses: Losses = node_losses,
) -> Step:
    """Make one step of a distributed model on this rank, with gradients averaged by DDP.

    ``losses`` returns the loss of each node, given outputs and labels; by default the classifier's. ``static_graph`` is
    DDP's option: with it, some parameters may get no gradient, even on some ranks only. Without it, as in training,
    every rank waits for all ranks' gradients of every parameter, and hangs if a rank has none.
    """
    if shard.y is None or shard.train_mask is None:
        raise InputError("the graph has no labels, so there is no step to compare; set y and train_mask")
    trained = model
    if communicator.world_size > 1:
        # in the default process group, as under Lightning; exchanges have a group of their own
        trained = DistributedDataParallel(model, static_graph=static_graph, **DDP_OPTIONS)
    (args, inputs), reached = arguments_of(model, shard, shard.adjacency), _Reached(model)
    output = trained(*args, **inputs)
    total, count = summed_loss(output, shard.y, shard.train_mask, losses=losses)
    sums = communicator.gather((float(total.detach()), float(count))).sum(dim=0)
    (total * ddp_loss_scale(int(sums[1]), communicator.world_size)).backward()
    run = partial(model, *args, **inputs)
    return _finish(model, run, output, float(sums[0] / sums[1]), reached.unused())


class _Reached:
    """Notes the parameters that a backward pass reaches on this rank, before gradients are averaged."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self._missed = set(parameters)
        # the nodes at which DDP waits; without a reference autograd would make others
        self._nodes = {name: get_gradient_edge(one).node for name, one in parameters.items() if one.requires_grad}
        self._hooks = [node.register_hook(partial(self._note, name)) for name, node in self._nodes.items()]

    def _note(self, name: str, *_: Any) -> None:
        self._missed.discard(name)

    def unused(self) -> frozenset[str]:
        """Return the names of parameters that it did not reach; to be called once, at the end."""
        for hook in self._hooks:
            hook.remove()
        return frozenset(self._missed)


def _finish(model: nn.Module, run: Callable[[], Tensor], output: Tensor, loss: float, unused: frozenset[str]) -> Step:
    """Make the optimiser's step, run the model once more in evaluation mode, and return all results."""
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
    """Return the largest difference of the loss, the outputs, and each gradient, updated parameter and buffer.

    ``ours`` is the step on a rank, whose output is ``rows`` of the reference's output. The difference of a gradient is
    infinite if the rank has no gradient and the reference has one.
    """
    pairs = {"loss": (torch.tensor(ours.loss), torch.tensor(reference.loss))}
    pairs["output"] = (ours.output, reference.output[rows])
    pairs["output afterwards, in evaluation"] = (ours.evaluated, reference.evaluated[rows])
    for kind in ("gradients", "parameters", "buffers"):
        mine, theirs = getattr(ours, kind), getattr(reference, kind)
        if mine.keys() != theirs.keys():
            raise AssertionError(f"the names of {kind} differ: {sorted(mine.keys() ^ theirs.keys())}")
        pairs |= {f"{kind} of {name}": (mine[name], theirs[name]) for name in mine}
    scales = {"gradients": _largest(reference.gradients), "parameters": _largest(reference.parameters)}
    differences = {name: _difference(*pair, scale=scales.get(name.split()[0], 0.0)) for name, pair in pairs.items()}
    # even if the mean over ranks is right: in training the other ranks would wait for this gradient for ever
    missing = [f"gradients of {name}" for name in ours.unused - reference.unused]
    return differences | dict.fromkeys(missing, Difference(float("inf"), float("inf")))


def _largest(values: Mapping[str, Tensor]) -> float:
    return max((float(value.abs().max()) for value in values.values() if value.numel()), default=0.0)


def _difference(ours: Tensor, reference: Tensor, *, scale: float) -> Difference:
    if ours.shape != reference.shape:
        raise AssertionError(f"shapes differ: {tuple(ours.shape)} and {tuple(reference.shape)}")
    if ours.numel() == 0:
        return Difference(0.0, 0.0)
    ours, reference = ours.cpu().double(), reference.cpu().double()
    absolute = float((ours - reference).abs().max())
    largest = max(float(reference.abs().max()), scale)
    if not (math.isfinite(absolute) and math.isfinite(largest)):  # also NaN on both sides
        return Difference(float("inf"), float("inf"))
    return Difference(absolute, absolute / max(largest, 1e-30))


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
    """Compare a backend with plain PyG on one process, in float64, over layers, world sizes and graphs.

    Args:
        backend: Registered name, class path, or an instance.
        layers: Names of :data:`~pygdist.testing.layers.LAYERS`; all by default.
        world_sizes: Numbers of ranks, 1 to 5.
        graphs: Kinds of :func:`~pygdist.testing.graphs.random_graph`.
        num_nodes: Nodes of each graph.
        num_features: Number of features of a node, and of input channels of each model.
        hidden_channels: Number of channels between layers; entries of the suite that are whole models ignore it.
        num_layers: Number of layers of each model; entries of the suite that are whole models ignore it.
        seed: Seed of all random numbers.
        tolerance: Largest absolute difference allowed.
        savings: Shortcuts to take; see :func:`~pygdist.distribute`.
        num_hops: Hops around its nodes that a part on disk holds; by default as many as the backend needs.
        pool: Processes to use; by default the call starts its own.

    Returns:
        The largest difference of each layer, by the layer's name.

    Raises:
        InputError: If a layer or a graph is unknown, or a world size is not 1 to 5.
        RankError: If a rank fails, for example because the backend refuses a layer.
        AssertionError: If a difference is too large. The message has a line for each layer, world size, graph and rank
            with such a difference: the largest difference, and its quantity.

    Example:
        >>> assert_exact("my_package.MyBackend", layers=["GCNConv", "GATConv"], world_sizes=[2, 3])
    """
    names, abilities = list(LAYERS if layers is None else layers), resolve_backend(backend).abilities
    for kind, asked, known in (("layer", names, LAYERS), ("graph", graphs := list(graphs), GRAPHS)):
        for name in asked:
            if name not in known:
                raise InputError(f"unknown {kind} '{name}'{did_you_mean(name, known)}; known are {', '.join(known)}")
    if wrong_sizes := [size for size in world_sizes if not 1 <= size <= MOST_RANKS]:
        raise InputError(f"world_sizes: {wrong_sizes[0]} ranks, expected 1 to {MOST_RANKS}")
    sizes = _Sizes(num_nodes, num_features, hidden_channels, num_layers, seed)
    differences: list[tuple[str, str, float]] = []  # layer, text, value
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(contextlib.closing(ScratchFolder())).path
        pool = stack.enter_context(RankPool(max(world_sizes))) if pool is None else pool
        for world_size, kind in itertools.product(world_sizes, graphs):
            store = sizes.write(folder / f"{kind}-{world_size}", kind, world_size, abilities, num_hops)
            # one call for each graph, as the time after which ranks count as hung holds for one call
            for worst in pool.run(_check_exact, world_size, backend, names, kind, store, sizes, savings):
                for name, (quantity, value) in worst.items():
                    differences.append((name, f"{name} on {world_size} ranks, graph {kind}: {quantity}", value))
    wrong = [f"{text} differs by {value:.1e}" for _, text, value in differences if not value <= tolerance]
    if wrong:
        raise AssertionError(f"{len(wrong)} differences beyond {tolerance:.0e}:\n" + "\n".join(wrong))
    return {name: max(value for other, _, value in differences if other == name) for name in names}


class _Sizes(NamedTuple):
    """Sizes of all graphs and models of a call of :func:`assert_exact`."""

    num_nodes: int
    num_features: int
    hidden_channels: int
    num_layers: int
    seed: int

    def graph(self, kind: str) -> tuple[Data, dict[int, np.ndarray]]:
        return random_graph(kind, num_nodes=self.num_nodes, num_features=self.num_features, seed=self.seed)

    def write(self, folder: Path, kind: str, num_parts: int, abilities: Abilities, num_hops: int | None) -> str:
        """Write a graph in parts, placed as a backend needs it; return the folder."""
        data, parts = self.graph(kind)
        split = abilities.placement == "edges"
        edge_part = random_edge_part(kind, data.num_edges, num_parts, seed=self.seed) if split else None
        write_store(
            data, parts[num_parts], folder, num_parts=num_parts, method=kind, arguments={}, notes=[],
            num_hops=num_hops or abilities.num_hops, placement=abilities.placement, edge_part=edge_part,
        )  # fmt: skip
        return str(folder)


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
    """Return, by layer, the quantity that differs most on this rank, and its difference."""
    communicator = Communicator(dist.new_group())
    shard = Shard.load(store, rank)
    worst = {}
    for name in names:
        plain, reference = _reference(name, kind, sizes)
        bound = resolve_backend(backend)
        bound.bind(shard, communicator)
        model = distribute(copy.deepcopy(plain), backend=bound, savings=savings, check=False)
        step = distributed_step(model, shard, communicator)
        communicator.compare_calls()
        differences = largest_differences(step, reference, shard.owned_id)
        quantity = max(differences, key=lambda key: differences[key].absolute)
        worst[name] = (f"{quantity} of rank {rank}", differences[quantity].absolute)
        bound.unbind()
    return worst


@functools.lru_cache(maxsize=1024)
def _reference(name: str, kind: str, sizes: _Sizes) -> tuple[nn.Module, Step]:
    """Return a model and its step on one process; they are the same for all backends and numbers of ranks."""
    data = _graph(kind, sizes)
    model = _model(name, int(data.y.max()) + 1, sizes)
    return model, reference_step(copy.deepcopy(model), data)


@functools.lru_cache(maxsize=64)
def _graph(kind: str, sizes: _Sizes) -> Data:
    return sizes.graph(kind)[0]


@functools.lru_cache(maxsize=1024)
def _model(name: str, num_classes: int, sizes: _Sizes) -> nn.Module:
    return build(
        name, sizes.num_features, num_classes, num_layers=sizes.num_layers, hidden_channels=sizes.hidden_channels
    )


def supported_layers(backend: str | Backend) -> list[str]:
    """Return the names of :data:`~pygdist.testing.layers.LAYERS` that a backend does not refuse."""
    names = []
    for name in LAYERS:
        with contextlib.suppress(InputError):
            undistribute(distribute(build(name, 5, 3), backend=resolve_backend(backend)._unbound()))
            names.append(name)
    return names
