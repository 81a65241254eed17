"""Blocks of destinations: a layer's own ``message`` on some of the edges at a time, where all of them take too much.

To the layer a block is a smaller shard: the in-edges of consecutive destinations, all source rows, and those rows of
everything else that belong to the block. What it computes is dropped and computed again in the backward pass
(activation checkpointing), so that edges x features never exist for more than one block, in either pass. Two things
remain: what there is for each edge anyway (arguments, attention weights; arguments are copied once if the edges are
not sorted by destination), and in the backward pass a gradient of all source rows for the block that is running.

The edges of one destination are never split, as softmax, max or standard deviations need them together: a destination
with more in-edges than the budget allows is a block of its own, and exceeds it.

Some hops run whole, whatever they take: those that ask for all rows at once (norms over nodes or edges, aggregations
that pad), those with hooks on the layer, which would see blocks, and those whose arguments, output or notes on the
layer are not clearly one row per edge or per destination.
"""

from __future__ import annotations

import dis
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.hops.host import Host
from pygdist.hops.layer import arguments_of_messages, layer_name
from pygdist.nn.aggregation import pads
from pygdist.nn.norms import GLOBAL_NORMS

__all__ = ["Blocks", "destination_blocks"]

_ROUTED = ("propagate", "message", "aggregate", "edge_update")
_HOOKS = [f"_{name}_{kind}" for name in _ROUTED for kind in ("forward_pre_hooks", "forward_hooks")]
_PROBES = ((61, 7), (127, 11))  # edges and destinations of two small hops; a width that equals both is none
_WITH_GRADIENTS = 2  # the backward pass has a block's intermediate results and their gradients


class _Rows(NamedTuple):
    """Where a tensor has its rows, and whether they are those of edges or of destinations."""

    by_edge: bool
    dim: int


@dataclass(frozen=True, kw_only=True)
class _Hop:
    """One hop that can be cut into blocks.

    Attributes:
        layer: The layer that propagates.
        whole: Its own ``propagate`` or ``edge_updater``.
        edge_index: ``(2, num_edges)``.
        size: Source and destination rows.
        kwargs: What the layer passed, with source rows.
        sliced: The tensors that a block takes a part of, by argument: one row per edge, or per destination.
        rows: Where these have their rows.
        sources: The other half of arguments that a block gets as (source rows, its destination rows).
    """

    layer: MessagePassing
    whole: Callable[..., Tensor]
    edge_index: Tensor
    size: tuple[int, int]
    kwargs: Mapping[str, Any]
    sliced: Mapping[str, Tensor]
    rows: Mapping[str, _Rows]
    sources: Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What a hop of a layer leaves behind, whatever its size.

    Attributes:
        bytes_per_edge: Memory that it asks for, intermediate results included.
        rows: Where its output has its rows.
        notes: Tensors that it leaves on the layer (attention weights), and where they have theirs.
    """

    bytes_per_edge: float
    rows: _Rows
    notes: Mapping[str, _Rows]


class Blocks:
    """Runs the hops of a backend's layers, in blocks where one hop would exceed the budget.

    Args:
        backend: Its ``savings`` state the budget.
    """

    def __init__(self, backend: Host) -> None:
        self._backend = backend
        self._budgets: dict[Any, int | None] = {}
        self._results: weakref.WeakKeyDictionary[MessagePassing, dict[Any, _Result | None]]
        self._results = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Look at the free memory again; called when the backend gets another graph."""
        self._budgets.clear()

    def run(
        self,
        layer: MessagePassing,
        whole: Callable[..., Tensor],
        edges: bool,
        edge_index: Tensor,
        /,
        size: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """One hop, with the result of ``whole(edge_index, size=size, **kwargs)``.

        Args:
            layer: The layer that propagates.
            whole: Its own ``propagate``, or ``edge_updater`` if ``edges``.
            edges: Whether the result has one row per edge, in the order of ``edge_index``, or one per destination.
            edge_index: ``(2, num_edges)``; what is not a plain tensor takes PyG's fused path, which makes no messages.
            size: Source and destination rows; where ``None``, the arguments tell.
            kwargs: The arguments of the hop, with source rows.
        """
        budget = self._budget(edge_index.device) if _plain(edge_index) else None
        hop = None if budget is None else _cuttable(layer, whole, edges, edge_index, size, kwargs)
        result = None if hop is None else self._result(hop, edges)
        if budget is not None and hop is not None and result is not None:
            taken = result.bytes_per_edge * (_WITH_GRADIENTS if torch.is_grad_enabled() else 1)
            max_edges = int(budget / max(taken, 1.0))
            if edge_index.size(1) > max_edges:
                return _in_blocks(hop, result, max_edges)
        elif budget is not None:
            _say_if_large(layer, edge_index.size(1), kwargs, budget)
        return whole(edge_index, size=size, **kwargs)

    def _budget(self, device: torch.device) -> int | None:
        """Bytes for the messages of a hop: asked once per graph, as memory that is in use by then is used again."""
        key = (self._backend.savings, device)
        if key not in self._budgets:
            self._budgets[key] = self._backend.block_bytes(device)
        return self._budgets[key]

    def _result(self, hop: _Hop, edges: bool) -> _Result | None:
        """What the hop leaves behind; tried out once for each kind of arguments that a layer gets."""
        kinds = tuple((name, value.dtype, _widths(value, hop.rows[name].dim)) for name, value in hop.sliced.items())
        sources = tuple((name, _widths(value, hop.layer.node_dim)) for name, value in hop.sources.items())
        key = (edges, hop.layer.training, kinds, sources)
        known = self._results.setdefault(hop.layer, {})
        if key not in known:
            known[key] = _tried(hop)
        return known[key]


def destination_blocks(targets: Tensor, num_dst: int, max_edges: int) -> list[int]:
    """Cut destinations into ranges of at most ``max_edges`` in-edges each, or of a single one that has more.

    Every range has an edge (layers cannot reduce nothing); destinations without one share a range with others.

    Args:
        targets: ``(num_edges,)``, the destination of each edge, ascending.
        num_dst: Destinations.
        max_edges: Edges of a range.

    Returns:
        Where the ranges start, and ``num_dst`` at the end.
    """
    ends = torch.searchsorted(targets, torch.arange(num_dst, device=targets.device), right=True).cpu().numpy()
    bounds, edge = [0], 0
    while edge < targets.numel():
        most = int(ends.searchsorted(edge + max_edges, side="right"))
        # the next destination with an edge, and those without one behind it: a block must not begin with them
        one = int(ends.searchsorted(ends[ends.searchsorted(edge, side="right")], side="right"))
        bounds.append(max(most, one))
        edge = int(ends[bounds[-1] - 1])
    bounds[-1] = num_dst
    return bounds


def _say_if_large(layer: MessagePassing, num_edges: int, kwargs: Mapping[str, Any], budget: int) -> None:
    """Warn of a hop that runs whole although the rows that it lifts to edges alone exceed the budget."""
    tensors = [value for value in tree_leaves(dict(kwargs)) if isinstance(value, Tensor) and value.dim() > 1]
    per_edge = max((value.nbytes // max(value.size(layer.node_dim), 1) for value in tensors), default=0)
    if num_edges * per_edge > budget:
        warnings.warn(
            f"{layer_name(layer)} computes all messages at once, {num_edges * per_edge / 2**20:.0f} MiB or more: "
            "it cannot be cut into blocks of destinations (pygdist.hops.blocks says which layers cannot)",
            stacklevel=2,
        )


def _plain(edge_index: Any) -> bool:
    """Whether these are two rows of ids, which PyG turns into messages."""
    return (
        isinstance(edge_index, Tensor)
        and not isinstance(edge_index, EdgeIndex)
        and edge_index.layout == torch.strided
        and not torch.compiler.is_compiling()
    )


def _widths(value: Tensor | None, dim: int) -> tuple[int, ...]:
    if value is None:
        return ()
    shape = list(value.shape)
    del shape[dim]
    return tuple(shape)


def _cuttable(
    layer: MessagePassing,
    whole: Callable[..., Tensor],
    edges: bool,
    edge_index: Tensor,
    size: Any,
    kwargs: dict[str, Any],
) -> _Hop | None:
    """The hop with the place of each row, or ``None`` if it must run whole."""
    num_edges = edge_index.size(1)
    if num_edges < 2 or _sees_all_rows(layer, edges):
        return None
    asked = set(layer._edge_user_args if edges else layer._user_args)
    by_source = {name[:-2] for name in asked if name.endswith("_j")}
    by_target = {name[:-2] for name in asked if name.endswith("_i")}
    # the rows of what update() alone asks for are those of its output
    in_messages = asked if edges else arguments_of_messages(layer)
    found = _size(layer, size, kwargs, by_source, by_target)
    if found is None:
        return None
    sliced: dict[str, Tensor] = {}
    rows: dict[str, _Rows] = {}
    sources: dict[str, Tensor | None] = {}
    for name, value in kwargs.items():
        if name in by_source | by_target:
            if name in asked and value is not None:  # as it is, and its rows
                return None
            if isinstance(value, (tuple, list)):
                sources[name] = value[0]
                if isinstance(value[1], Tensor):
                    sliced[name] = value[1]
            elif isinstance(value, Tensor) and (name in by_target or found[0] == found[1]):
                if name in by_source:
                    sources[name] = value
                sliced[name] = value
            rows[name] = _Rows(False, layer.node_dim)
        elif name in asked and isinstance(value, Tensor) and value.dim() > 0:
            dims = {0, layer.node_dim % value.dim()} if value.dim() >= abs(layer.node_dim) else {0}
            places = [_Rows(True, dim) for dim in dims if value.size(dim) == num_edges]
            places += [_Rows(False, dim) for dim in dims if value.size(dim) == found[1]]
            # a message may look up rows of nodes by either end; and integers may say something of all edges
            if len(places) > 1 or (places and not places[0].by_edge and name in in_messages):
                return None
            if places:
                sliced[name], rows[name] = value, places[0]
            elif not value.is_floating_point():
                return None
        elif name in asked and any(isinstance(part, Tensor) for part in tree_leaves(value)):
            return None
    return _Hop(
        layer=layer,
        whole=whole,
        edge_index=edge_index,
        size=found,
        kwargs=kwargs,
        sliced=sliced,
        rows=rows,
        sources=sources,
    )


def _size(
    layer: MessagePassing, size: Any, kwargs: Mapping[str, Any], by_source: set[str], by_target: set[str]
) -> tuple[int, int] | None:
    """Source and destination rows, as PyG finds them; ``None`` if nothing tells."""
    found = [None, None] if size is None else list(size)
    for name in by_source | by_target:
        value = kwargs.get(name)
        pair = value if isinstance(value, (tuple, list)) else (value, None) if name in by_source else (None, value)
        for end, part in enumerate(pair):
            if found[end] is None and isinstance(part, Tensor):
                found[end] = part.size(layer.node_dim)
    sizes = [count for count in found if count is not None]
    return (sizes[0], sizes[-1]) if sizes else None


def _sees_all_rows(layer: MessagePassing, edges: bool) -> bool:
    """Whether a block is not enough for what the hop does, or for who watches it."""
    if any(getattr(layer, name) for name in _HOOKS):
        return True
    layer_class: Any = type(layer)
    for name in read_names(layer_class, ("edge_update",) if edges else ("message", "aggregate", "update")):
        if isinstance(vars(layer).get(name), Tensor):  # nobody tells whose rows these are
            return True
        value = getattr(layer, name, None)
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if any(cls in GLOBAL_NORMS or pads(cls) for cls in type(module).__mro__):
                return True
    return False


@functools.lru_cache(maxsize=256)
def read_names(layer_class: Any, methods: tuple[str, ...]) -> frozenset[str]:
    """Names of attributes that these methods of a layer read, and so on through the methods that they call.

    Args:
        layer_class: The layer's.
        methods: Names of methods.
    """
    names: set[str] = set()
    missing = list(methods)
    while missing:
        name = missing.pop()
        for cls in layer_class.__mro__:
            function = vars(cls).get(name) if cls is not nn.Module else None
            if isinstance(function, types.FunctionType):
                new = set(_attributes(function.__code__)) - names
                names |= new
                missing += new
    return frozenset(names)


def _attributes(code: types.CodeType) -> Iterator[str]:
    """Names after a dot in the code, where they are read; also in functions and comprehensions inside."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _attributes(inner)


def _run(
    hop: _Hop, state: Mapping[str, Any], first: int, num_dst: int, parts: Mapping[str, Tensor], edge_index: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """One block: its output, and what it left on the layer, which is then as before.

    Args:
        hop: The hop that it belongs to.
        state: The attributes of the layer at the time of the forward pass; the backward pass runs blocks again.
        first: The first destination.
        num_dst: Destinations.
        parts: Its part of each sliced argument.
        edge_index: Its edges, with the ids of the hop.
    """
    arguments = dict(hop.kwargs)
    for name, part in parts.items():
        arguments[name] = (hop.sources[name], part) if name in hop.sources else part
    attributes = vars(hop.layer)
    before = dict(attributes)
    attributes.update(state)
    try:
        edges = torch.stack([edge_index[0], edge_index[1] - first])
        out = hop.whole(edges, size=(hop.size[0], num_dst), **arguments)
        notes = {name: value for name, value in attributes.items() if value is not state.get(name)}
    finally:  # a backward pass stops in the middle, when it has what it needs
        attributes.clear()
        attributes.update(before)
    return out, notes


class _Allocated(TorchDispatchMode):
    """Sums the memory of all tensors that are made, whether kept or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._seen: dict[int, Tensor] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen[storage.data_ptr()] = value  # alive, so that no other tensor gets its address
                    self.num_bytes += storage.nbytes()
        return out


def _tried(hop: _Hop) -> _Result | None:
    """What the hop leaves behind, from two small ones; ``None`` if it cannot be put together from blocks.

    The widths of what goes in do not bound the messages: layers that make a matrix for each edge (NNConv, RGATConv)
    keep hundreds of times as much.
    """
    found = []
    device = hop.edge_index.device
    for num_edges, num_dst in _PROBES:
        source = hop.edge_index[0, :1].expand(num_edges)
        target = torch.arange(num_edges, device=device) * num_dst // num_edges
        edge_index = torch.stack([source, target.to(source.dtype)])
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            parts = {}
            for name, (by_edge, dim) in hop.rows.items():
                if name in hop.sliced:
                    none = torch.zeros(num_edges if by_edge else num_dst, dtype=torch.long, device=device)
                    parts[name] = hop.sliced[name].index_select(dim, none)
            allocated = _Allocated()
            try:
                with allocated:
                    out, notes = _run(hop, dict(vars(hop.layer)), 0, num_dst, parts, edge_index)
            except Exception:
                return None  # a layer that does not run on some of its edges runs on all
        found.append((out, notes, allocated.num_bytes))
    (out, notes, small), (other, others, large) = found
    rows = _rows_of(out, other)
    places = {name: _rows_of(value, others.get(name)) for name, value in notes.items()}
    known = {name: place for name, place in places.items() if place is not None}
    if rows is None or len(known) < len(places) or notes.keys() != others.keys():
        return None
    return _Result(bytes_per_edge=(large - small) / (_PROBES[1][0] - _PROBES[0][0]), rows=rows, notes=known)


def _rows_of(small: Any, large: Any) -> _Rows | None:
    """Where the two results of the small hops have their rows, if they have."""
    if not (isinstance(small, Tensor) and isinstance(large, Tensor) and small.dim() == large.dim()):
        return None
    for dim, sizes in enumerate(zip(small.shape, large.shape, strict=True)):
        for by_edge in (True, False):
            if sizes == tuple(probe[0 if by_edge else 1] for probe in _PROBES):
                return _Rows(by_edge, dim)
    return None


def _in_blocks(hop: _Hop, result: _Result, max_edges: int) -> Tensor:
    """The hop, block by block."""
    edge_index, order = hop.edge_index, None
    if bool((edge_index[1].diff() < 0).any()):
        order = torch.argsort(edge_index[1], stable=True)
        edge_index = edge_index.index_select(1, order)
    edge_index = edge_index.contiguous()
    if not 0 <= int(edge_index[1, 0]) <= int(edge_index[1, -1]) < hop.size[1]:
        return hop.whole(hop.edge_index, size=hop.size, **hop.kwargs)  # PyG says what is wrong
    bounds = destination_blocks(edge_index[1], hop.size[1], max_edges)
    num_dst = [last - first for first, last in pairwise(bounds)]
    ends = torch.searchsorted(edge_index[1], torch.tensor(bounds, device=edge_index.device)).tolist()
    num_edges = [last - first for first, last in pairwise(ends)]
    # split, not slices: the backward of a slice makes a gradient of the whole argument for each block
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, value in hop.sliced.items():
        by_edge, dim = hop.rows[name]
        ordered = value if order is None or not by_edge else value.index_select(dim, order)
        parts[name] = ordered.split(num_edges if by_edge else num_dst, dim)
    state = dict(vars(hop.layer))
    outs: list[Tensor] = []
    notes: dict[str, list[Tensor]] = {name: [] for name in result.notes}
    for number, edges in enumerate(edge_index.split(num_edges, dim=1)):
        own = {name: values[number] for name, values in parts.items()}
        block = functools.partial(_run, hop, state, bounds[number], num_dst[number], own)
        # the one tensor among the arguments tells checkpoint whose random state is to be kept
        out, left = checkpoint(block, edges, use_reentrant=False) if torch.is_grad_enabled() else block(edges)
        outs.append(out)
        for name, values in notes.items():
            values.append(left[name])
    for name, values in notes.items():
        setattr(hop.layer, name, _joined(values, result.notes[name], order))
    return _joined(outs, result.rows, order)


def _joined(parts: list[Tensor], rows: _Rows, order: Tensor | None) -> Tensor:
    """The rows of all blocks; those of edges in the order that the layer gave them in."""
    whole = torch.cat(parts, dim=rows.dim)
    if order is None or not rows.by_edge:
        return whole
    return torch.empty_like(whole).index_copy(rows.dim, order, whole)
