"""A small awkward graph on which a model runs as its user calls it: whole, on one process, or cut into parts.

The graph has directed edges, self-loops, nodes without edges, an edge from one part to another whose ends have no
other, and a part without training nodes. Every rank makes all of it, from one seed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pygdist.backends.base import Abilities
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.comm import Communicator
from pygdist.errors import InputError, RefusedError
from pygdist.graph import Adjacency, Shard, write_store
from pygdist.graph.check import EDGE_FIELDS
from pygdist.memory.scratch import ScratchFolder

_NODES_OF_A_PART = 11
_FIELDS = ("x", *EDGE_FIELDS)
_LOOKED_AT = 1000  # rows of an input, for the range of its values


class NotComparableError(Exception):
    """A model cannot run on another graph than its own; the message is a clause: "it takes node ids"."""


@dataclass(frozen=True)
class Graph:
    """Edges, and the owner of each node.

    Attributes:
        edge_index: ``(2, E)``, sorted by destination.
        owner: ``(N,)``.
        trains: The loss counts the node; ``(N,)``.
    """

    edge_index: Tensor
    owner: Tensor
    trains: Tensor

    @property
    def isolated(self) -> list[int]:
        """Nodes without edges, of which there are four or more."""
        apart = torch.ones(self.owner.numel(), dtype=torch.bool)
        apart[self.edge_index.flatten()] = False
        return apart.nonzero().flatten().tolist()


@functools.lru_cache(maxsize=8)
def awkward_graph(num_parts: int, widths: frozenset[int] = frozenset()) -> Graph:
    """Return the graph for a number of parts; neither its nodes nor its edges are as many as one of the ``widths``."""
    sizes = (_NODES_OF_A_PART * max(num_parts, 2) + 1 + more for more in itertools.count())
    graphs = (_graph(num_nodes, num_parts) for num_nodes in sizes if num_nodes not in widths)
    return next(graph for graph in graphs if graph.edge_index.size(1) not in widths)


def _graph(num_nodes: int, num_parts: int) -> Graph:
    rng = np.random.default_rng(num_parts)
    nodes = rng.permutation(num_nodes - 1)  # the last node is isolated
    connected, apart = nodes[: num_nodes * 3 // 4], nodes[-2:, None]
    loops = connected[:3]
    some = rng.choice(connected, (2, 3 * num_nodes))
    edges = np.unique(np.concatenate([some, [loops, loops], apart], axis=1), axis=1)
    edges = edges[:, np.argsort(edges[1], kind="stable")]
    owner = rng.permutation(np.arange(num_nodes) % num_parts)
    owner[np.flatnonzero(owner == 0)[:2]] = num_parts - 1  # parts are not of one size
    owner[apart[:, 0]] = 0, num_parts - 1
    trains = (rng.random(num_nodes) < 0.7) & ((owner < num_parts - 1) | (num_parts == 1))
    return Graph(*(torch.from_numpy(one) for one in (edges, owner, trains)))


@dataclass(frozen=True)
class _Input:
    """One argument of a call, for the whole graph.

    Attributes:
        value: A row per node or per edge; any other value is that of the call.
        kind: ``node``, ``edge`` or ``None``.
        field: The field of the shard that the argument is; empty for any other.
        is_edges: The argument is the graph's edges.
    """

    value: Any
    kind: Kind = None
    field: str = ""
    is_edges: bool = False


@dataclass(frozen=True)
class Miniature:
    """A call of a model, on the small graph in place of its own."""

    graph: Graph
    inputs: Sequence[_Input]
    call: Call
    num_parts: int
    device: torch.device

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.graph.trains.numel()

    @classmethod
    def of(cls, call: Call, shard: Shard, communicator: Communicator, num_parts: int) -> Miniature:
        """Make a graph with inputs like those of ``call``; every rank of the communicator makes the call.

        Raises:
            NotComparableError: If an argument has no counterpart in another graph.
        """
        values = call.values
        columns = [value.shape[1:] for value, kind in values if kind is not None and isinstance(value, Tensor)]
        shapes = [*columns, *(one.shape for one in (*call.model.parameters(), *call.model.buffers()))]
        # rows are told by their number
        graph = awkward_graph(num_parts, frozenset(size for shape in shapes for size in shape))
        sizes = communicator.gather([float(graph.trains.numel()), float(graph.edge_index.size(1))])
        if not bool((sizes == sizes[0]).all()):
            raise NotComparableError("its tensors have other sizes on each rank")
        if not any(isinstance(value, Tensor) for value, _ in values):
            raise NotComparableError("it takes no tensor as an argument")
        looks = [_look(value, kind, shard) for value, kind in values]
        # ranks see other rows, and must make the same
        everywhere = communicator.gather([number for look in looks for number in look]).view(-1, len(looks), 4)
        if not bool((everywhere[:, :, [0, 3]] == everywhere[0, :, [0, 3]]).all()):
            raise NotComparableError("its arguments are not of one kind on all ranks")
        low, high = everywhere[:, :, 1].amin(0).tolist(), everywhere[:, :, 2].amax(0).tolist()
        ranges = _ranges([value for value, kind in values if _is_of_integers(value, kind)], communicator)
        inputs = []
        for at, (value, kind) in enumerate(values):
            field = _FIELDS[int(looks[at][0])] if looks[at][0] >= 0 else ""
            low_high = next(ranges) if _is_of_integers(value, kind) else (low[at], high[at])
            seed = _FIELDS.index(field) if field else len(_FIELDS) + at  # a field may be several arguments
            inputs.append(_input(value, kind, field, graph, *low_high, seed=seed))
        device = next((value.device for value, _ in values if isinstance(value, Tensor)), torch.device("cpu"))
        return cls(graph, inputs, call, num_parts, device)

    def whole(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the model on one process."""
        values = iter(self.inputs)
        return self.call.changed(lambda *_: self._as(next(values).value, dtype))

    def part(self, shard: Shard, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the model on the rank that holds ``shard``, a part of this graph."""
        values = iter(self.inputs)

        def replaced(_: Any, kind: Kind) -> Any:
            one = next(values)
            if one.is_edges:
                return shard.adjacency
            if one.field:
                return getattr(shard, one.field)
            if one.kind is None:
                return self._as(one.value, dtype)
            rows = shard.owned_id if one.kind == "node" else shard.e_id
            return self._as(one.value[rows.cpu()], dtype)

        return self.call.changed(replaced)

    def shards(self, parts: Sequence[int], dtype: torch.dtype, abilities: Abilities) -> Iterator[Shard]:
        """Return these parts of the graph, placed as a backend needs them."""
        fields = {one.field: self._as(one.value, dtype).cpu() for one in self.inputs if one.field}
        fields.setdefault("x", torch.zeros(self.num_nodes, 1, dtype=dtype))
        data = Data(edge_index=self.graph.edge_index, num_nodes=self.num_nodes, **fields)
        with contextlib.closing(ScratchFolder()) as scratch:
            store = scratch.path / "parts"
            split = abilities.placement == "edges"
            edge_part = np.arange(data.num_edges) % self.num_parts if split else None
            try:
                meta = write_store(
                    data, self.graph.owner.numpy(), store, num_parts=self.num_parts, method="check", arguments={},
                    num_classes=1, num_hops=abilities.num_hops, placement=abilities.placement,
                    edge_part=edge_part,
                )  # fmt: skip
            except InputError as error:  # of this rank's disk
                raise RefusedError(str(error)) from error
            for part in parts:
                yield Shard.load(store, part, verify=False, meta=meta).replace(folder=None).to(self.device)

    def _as(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, dtype if value.is_floating_point() else value.dtype, copy=True)


def _look(value: Any, kind: Kind, shard: Shard) -> tuple[float, float, float, float]:
    """Return what ranks must know of an argument: the field that it is, its range, and a number for its shape."""
    if not isinstance(value, Tensor) or isinstance(value, Adjacency):
        return -1.0, 0.0, 0.0, 0.0
    field = next((at for at, name in enumerate(_FIELDS) if getattr(shard, name) is value), -1)
    shape = (*(value.shape if kind is None else value.shape[1:]), value.is_floating_point(), value.element_size())
    few = value.detach()[:_LOOKED_AT] if value.dim() else value.detach()
    if not few.numel() or few.is_complex():
        return float(field), float("inf"), float("-inf"), float(hash(shape) % 2**40)
    return float(field), float(few.min()), float(few.max()), float(hash(shape) % 2**40)


def _is_of_integers(value: Any, kind: Kind) -> bool:
    """True for integers of nodes or edges."""
    plain = isinstance(value, Tensor) and not isinstance(value, Adjacency) and kind is not None
    return plain and not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def _ranges(values: Sequence[Tensor], communicator: Communicator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the smallest and the largest integer in each column on all ranks; every rank makes the call."""
    most = torch.iinfo(torch.int64)
    ends = []
    for value in values:
        few = value.detach()[:_LOOKED_AT].flatten(1).cpu().long() if value.dim() > 1 else value[:_LOOKED_AT, None].cpu()
        empty = few.new_tensor([[most.max], [most.min]], dtype=torch.int64).expand(2, few.size(1))
        ends.append(torch.stack(few.long().aminmax(dim=0)) if len(few) else empty)
    if not ends:
        return
    flat = torch.cat([end.flatten() for end in ends])
    halves = [float(half) for half in torch.cat([flat >> 32, flat & 0xFFFFFFFF])]  # float64 rounds whole ones
    everywhere = communicator.gather(halves).long().view(-1, 2, flat.numel())
    start = 0
    for end in ends:
        low, high = ((everywhere[:, 0] << 32) | everywhere[:, 1])[:, start : start + end.numel()].chunk(2, dim=1)
        yield low.amin(0), high.amax(0)
        start += end.numel()


def _draw_integers(low: Tensor, high: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw integers from the range of each column, int64."""
    spans = torch.tensor(
        [min(end - start, 1 << 30) + 1 for start, end in zip(low.tolist(), high.tolist(), strict=True)]
    )
    drawn = torch.randint(0, 1 << 31, (shape[0], len(low)), generator=generator)
    return (low + drawn % spans).view(shape)


def _input(
    value: Any, kind: Kind, field: str, graph: Graph, low: float | Tensor, high: float | Tensor, *, seed: int
) -> _Input:
    if isinstance(value, Adjacency):
        if value.value is not None:
            raise NotComparableError("its edges carry weights")
        return _Input(graph.edge_index, is_edges=True)
    if not isinstance(value, Tensor):
        return _Input(value)
    if kind is None:
        if not value.is_floating_point():
            raise NotComparableError(
                f"it takes {value.dtype} numbers of shape {tuple(value.shape)} that are neither of nodes nor of edges"
            )
        return _Input(value.detach())
    generator = torch.Generator().manual_seed(seed)
    shape = (graph.owner.numel() if kind == "node" else graph.edge_index.size(1), *value.shape[1:])
    if value.dtype == torch.bool:
        rows = torch.rand(shape, generator=generator) < 0.5
    elif value.is_floating_point():
        draw = torch.rand if low >= 0 else torch.randn  # logarithms and roots are of positive numbers
        rows = draw(shape, generator=generator, dtype=torch.float64) + (0.1 if low >= 0 else 0.0)
        if kind == "node":
            rows[-1] *= 5  # the largest are those of one part
            if low < 0:  # a model that looks at the rows of a part decides otherwise on another
                rows += (1 - 2 * (graph.owner % 2)).view(-1, *[1] * (rows.dim() - 1))
            # whatever a condition asks of rows, one that has no edges does not satisfy it
            above, below, small = graph.isolated[:3]
            rows[above], rows[small] = rows[above].abs(), rows[small].abs() / 1000
            if low < 0:
                rows[below] = -rows[below].abs()
    elif isinstance(low, Tensor) and isinstance(high, Tensor) and bool((low <= high).all()):
        least = torch.where(low == -1, high.clamp(max=0), low)  # labels of nodes in no mask
        rows = _draw_integers(least, high, shape, generator).to(value.dtype)
    else:
        raise NotComparableError(f"it takes {value.dtype} numbers of shape {tuple(value.shape)}")
    return _Input(rows, kind, field)


# -- the same graph, otherwise written down --------------------------------------------------------------------------


def beside_another(small: Miniature) -> Miniature:
    """Return the graph with a second component, of the same edges and larger numbers; its nodes come last."""
    num_nodes = small.graph.owner.numel()
    edge_index = torch.cat([small.graph.edge_index, small.graph.edge_index + num_nodes], dim=1)

    def doubled(one: _Input) -> Tensor:
        again = one.value.flip(0)
        return torch.cat([one.value, again * 10 if again.is_floating_point() else again])

    return _changed(small, replace(small.graph, edge_index=edge_index, trains=small.graph.trains.repeat(2)), doubled)


def renumbered(small: Miniature) -> tuple[Miniature, Tensor]:
    """Return the graph with its nodes renumbered and its edges in another order, and the new number of each node."""
    generator = torch.Generator().manual_seed(1)
    number = torch.randperm(small.graph.owner.numel(), generator=generator)
    order = torch.randperm(small.graph.edge_index.size(1), generator=generator)
    graph = replace(small.graph, edge_index=number[small.graph.edge_index][:, order])
    orders = {"edge": order, "node": number.argsort()}
    return _changed(small, graph, lambda one: one.value[orders[one.kind]] if one.kind else one.value), number


def _changed(small: Miniature, graph: Graph, rows_of: Callable[[_Input], Tensor]) -> Miniature:
    """Return ``small`` with another graph, and other rows of nodes and edges."""

    def changed(one: _Input) -> _Input:
        if one.is_edges:
            return replace(one, value=graph.edge_index)
        return one if one.kind is None else replace(one, value=rows_of(one))

    return replace(small, graph=graph, inputs=[changed(one) for one in small.inputs])
