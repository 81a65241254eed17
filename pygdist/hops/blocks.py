"""Blocks of destinations: a layer's own ``message`` on some of the edges at a time, where all take too much memory.

To the layer a block is a smaller shard: the in-edges of consecutive destinations, all source rows, and those rows of
everything else that belong to the block. The block's intermediate results are dropped, and computed again in the
backward pass (activation checkpointing), so that edges x features never exist for more than one block, in either pass.
Two things remain: what there is for each edge anyway (arguments, attention weights; arguments are copied once if the
edges are not sorted by destination), and in the backward pass a gradient of all source rows for the running block.

The edges of one destination are never split, as softmax, max or standard deviations need them together: a destination
with more in-edges than the budget allows is a block of its own, and exceeds the budget.

Some hops run whole, whatever memory they take: those that ask for all rows at once (norms over nodes or edges,
aggregations that pad), those with hooks on the layer, which would see blocks, those whose arguments, output or tensors
left on the layer are not clearly one row per edge or per destination, and those that give other results in blocks, as
messages do that look up rows by ``index``: some edges of the graph are tried both ways.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.hops.hop import Hop, ends_of, is_pair
from pygdist.hops.host import Host
from pygdist.hops.layer import arguments_of_messages, asked_arguments, having, hooked
from pygdist.hops.reads import read_names
from pygdist.hops.untouched import untouched
from pygdist.nn.aggregation import pads
from pygdist.nn.norms import GLOBAL_NORMS

log = logging.getLogger(__name__)

_COMPARED = 256  # edges that are tried whole and in two blocks
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest number; 5e-2 in half precision
_PROBES = ((61, 7), (127, 11))  # edges and destinations of two small hops; no width equals both
_WITH_GRADIENTS = 2  # the backward pass holds a block's intermediate results and their gradients


class _Rows(NamedTuple):
    """The rows of a tensor: one per edge or one per destination, along dimension ``dim``."""

    by_edge: bool
    dim: int


class _Argument(NamedTuple):
    """An argument of a hop, and what a block gets of it.

    Attributes:
        value: The tensor that is cut: one row per edge, or per destination. ``None`` if blocks get the argument whole.
        rows: Its rows.
        paired: True if a block gets a pair: all source rows, and its part of ``value``.
        source: These source rows.
    """

    value: Tensor | None = None
    rows: _Rows = _Rows(by_edge=False, dim=0)
    paired: bool = False
    source: Tensor | None = None


@dataclass(frozen=True)
class _Cuttable:
    """A hop that can be cut into blocks.

    Attributes:
        hop: The hop.
        size: Its numbers of source and destination rows.
        arguments: What blocks get of each argument.
    """

    hop: Hop
    size: tuple[int, int]
    arguments: Mapping[str, _Argument]


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a hop of a layer, whatever its size.

    Attributes:
        bytes_per_edge: Memory that it asks for, intermediate results included.
        rows: The rows of its output.
        notes: The rows of the tensors that it leaves on the layer (attention weights), by attribute.
    """

    bytes_per_edge: float
    rows: _Rows
    notes: Mapping[str, _Rows]


class Blocks:
    """Runs the hops of a backend's layers, in blocks where one hop would exceed the budget.

    Args:
        host: The backend, whose ``savings`` hold the budget.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._budgets: dict[Any, int | None] = {}
        self._results: WeakKeyDictionary[MessagePassing, dict[Any, _Result | None]] = WeakKeyDictionary()

    def forget(self) -> None:
        """Look at the free memory again; called when the backend gets another graph."""
        self._budgets.clear()

    def run(self, hop: Hop) -> Tensor:
        """Compute a hop by the layer's own method; the result does not depend on the number of blocks.

        Args:
            hop: The hop, with source rows. If its edges are no ordinary tensor, they take PyG's fused path, which makes
                no messages.
        """
        edges = hop.edge_index
        plain = type(edges) is Tensor and edges.layout == torch.strided and not torch.compiler.is_compiling()
        budget = self._budget(edges.device) if plain else None
        if budget is not None:
            cuttable = _cuttable(hop)
            result = None if cuttable is None else self._result(cuttable)
            if cuttable is None or result is None:
                _warn_if_large(hop, budget)
            else:
                bytes_per_edge = result.bytes_per_edge * (_WITH_GRADIENTS if torch.is_grad_enabled() else 1)
                max_edges = int(budget / max(bytes_per_edge, 1.0))
                if edges.size(1) > max_edges:
                    return _in_blocks(cuttable, result, max_edges)
        return _whole(hop)

    def _budget(self, device: torch.device) -> int | None:
        """Bytes for the messages of a hop; looked up once per graph, as earlier hops hold memory later."""
        key = (self._host.savings, device)
        if key not in self._budgets:
            self._budgets[key] = self._host.block_bytes(device)
        return self._budgets[key]

    def _result(self, cuttable: _Cuttable) -> _Result | None:
        """The result of trying the hop, which is done once for each kind of arguments that a layer gets."""
        hop = cuttable.hop
        kinds = tuple(
            (name, *(_widths(value, argument.rows.dim) for value in (argument.value, argument.source)))
            for name, argument in cuttable.arguments.items()
        )
        key = (hop.updates_edges, hop.layer.training, kinds)
        results = self._results.setdefault(hop.layer, {})
        if key not in results:
            results[key] = _tried(cuttable)
        return results[key]


def destination_blocks(targets: Tensor, num_dst: int, max_edges: int) -> list[int]:
    """Cut destinations into ranges of at most ``max_edges`` in-edges each; one that has more is a range of its own.

    Each range has an edge (layers cannot reduce nothing); destinations without one share a range with others.

    Args:
        targets: ``(num_edges,)``, the destination of each edge, ascending.
        num_dst: Destinations.
        max_edges: Edges of a range.

    Returns:
        The first destination of each range, and ``num_dst`` at the end.
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


def _warn_if_large(hop: Hop, budget: int) -> None:
    """Warn of a hop that runs whole, if its arguments' rows, one for each edge, alone exceed the budget."""
    tensors = [value for value in tree_leaves(dict(hop.arguments)) if isinstance(value, Tensor) and value.dim() > 1]
    per_edge = max((value.nbytes // max(value.size(hop.layer.node_dim), 1) for value in tensors), default=0)
    num_bytes = hop.edge_index.size(1) * per_edge
    if num_bytes > budget:
        warnings.warn(
            f"{hop.layer_name} computes all messages at once, {num_bytes / 2**20:.0f} MiB or more: it cannot run in "
            "blocks of destinations; the docstring of pygdist.hops.blocks lists the reasons",
            stacklevel=2,
        )


def _whole(hop: Hop) -> Tensor:
    return hop.written(hop.layer, hop.edge_index, size=hop.size, **hop.arguments)


def _widths(value: Tensor | None, dim: int) -> tuple[Any, ...]:
    """Dtype and shape of a tensor, apart from its number of rows."""
    if value is None:
        return ()
    dim %= value.dim()
    return (value.dtype, *value.shape[:dim], *value.shape[dim + 1 :])


def _cuttable(hop: Hop) -> _Cuttable | None:
    """The hop with the rows of each argument, or ``None`` if it must run whole."""
    layer, num_edges = hop.layer, hop.edge_index.size(1)
    if num_edges < 2 or _sees_all_rows(hop):
        return None
    asked = asked_arguments(layer, edges=hop.updates_edges)
    by_source, by_target = ({name[:-2] for name in asked if name.endswith(end)} for end in ("_j", "_i"))
    size = _size(hop, by_source, by_target)
    if size is None:
        return None
    # update() alone may read rows of nodes: those of its output
    in_messages = asked if hop.updates_edges else arguments_of_messages(layer)
    arguments = {}
    for name, value in hop.arguments.items():
        argument: _Argument | None = _Argument()
        if name in by_source | by_target:
            if name in asked and value is not None:  # the layer reads it as it is, too
                return None
            cut = name in by_target or size[0] == size[1]
            argument = _at_ends(value, _Rows(False, layer.node_dim), in_source=name in by_source, cut=cut)
        elif name in asked:
            argument = _in_rows(value, layer.node_dim, num_edges, size[1], in_messages=name in in_messages)
        if argument is None:
            return None
        arguments[name] = argument
    return _Cuttable(hop, size, arguments)


def _at_ends(value: Any, rows: _Rows, *, in_source: bool, cut: bool) -> _Argument:
    """An argument whose rows PyG looks up at the ends of edges; one tensor holds destinations if ``cut``."""
    source, target = ends_of(value)
    if is_pair(value):
        return _Argument(target if isinstance(target, Tensor) else None, rows, paired=True, source=source)
    if not isinstance(value, Tensor):
        return _Argument()
    return _Argument(target if cut else None, rows, paired=in_source and cut, source=source if in_source else None)


def _in_rows(value: Any, node_dim: int, num_edges: int, num_dst: int, *, in_messages: bool) -> _Argument | None:
    """An argument that the layer reads as it is; ``None`` if it is not clear what a block would need of it."""
    if not isinstance(value, Tensor):
        return None if any(isinstance(part, Tensor) for part in tree_leaves(value)) else _Argument()
    if value.dim() == 0:
        return _Argument()
    dims = {0, node_dim % value.dim()} if value.dim() >= abs(node_dim) else {0}
    places = [_Rows(True, dim) for dim in dims if value.size(dim) == num_edges]
    places += [_Rows(False, dim) for dim in dims if value.size(dim) == num_dst]
    if not places:  # integers may say something about all edges
        return _Argument() if value.is_floating_point() else None
    # a message may look up rows of nodes by either end of an edge
    if len(places) > 1 or (in_messages and not places[0].by_edge):
        return None
    return _Argument(value, places[0])


def _size(hop: Hop, by_source: set[str], by_target: set[str]) -> tuple[int, int] | None:
    """Numbers of source and destination rows, as PyG tells them; ``None`` if nothing does."""
    counts = [None, None] if hop.size is None else list(hop.size)
    for name in by_source | by_target:
        value = hop.arguments.get(name)
        pair = ends_of(value) if is_pair(value) else (value, None) if name in by_source else (None, value)
        for end, part in enumerate(pair):
            if counts[end] is None and isinstance(part, Tensor):
                counts[end] = part.size(hop.layer.node_dim)
    sizes = [count for count in counts if count is not None]
    return (sizes[0], sizes[-1]) if sizes else None


def _sees_all_rows(hop: Hop) -> bool:
    """True if a block is not enough for what the hop computes, or for a hook on it."""
    if hooked(hop.layer, "propagate", "message", "aggregate", "edge_update"):
        return True
    layer_class: Any = type(hop.layer)
    methods = ("edge_update",) if hop.updates_edges else ("message", "aggregate", "update")
    for name in read_names(layer_class, methods):
        leaves = tree_leaves(vars(hop.layer).get(name))
        if any(isinstance(one, Tensor) for one in leaves):  # rows of edges or any nodes; the backward pass finds others
            return True
        value = getattr(hop.layer, name, None)
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if any(cls in GLOBAL_NORMS or pads(cls) for cls in type(module).__mro__):
                return True
    return False


def _run(
    cuttable: _Cuttable,
    state: Mapping[str, Any],
    first: int,
    num_dst: int,
    parts: Mapping[str, Tensor],
    edge_index: Tensor,
) -> tuple[Tensor, dict[str, Any]]:
    """Run one block; return its output, and the attributes that it set on the layer, which is then as before.

    Args:
        cuttable: The hop that it belongs to.
        state: The attributes of the layer at the time of the forward pass; the backward pass runs blocks again.
        first: The first destination.
        num_dst: Destinations.
        parts: Its part of each argument that is cut.
        edge_index: Its edges, with the ids of the hop.
    """
    hop = cuttable.hop
    arguments = dict(hop.arguments)
    for name, part in parts.items():
        argument = cuttable.arguments[name]
        arguments[name] = (argument.source, part) if argument.paired else part
    with having(hop.layer, state):  # a backward pass stops in the middle, when it has what it needs
        edges = torch.stack([edge_index[0], edge_index[1] - first])
        out = _whole(replace(hop, edge_index=edges, size=(cuttable.size[0], num_dst), arguments=arguments))
        return out, {name: value for name, value in vars(hop.layer).items() if value is not state.get(name)}


class _Allocated(TorchDispatchMode):
    """Collects the memory of all tensors that are made, whether they stay or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, UntypedStorage] = {}  # by address; alive, so that no other gets the same

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                storage = value.untyped_storage()
                self.storages.setdefault(storage.data_ptr(), storage)
        return out


def _tried(cuttable: _Cuttable) -> _Result | None:
    """Run two small hops, which tell the result of any; ``None`` if the results of blocks cannot be joined.

    The widths of the arguments do not bound the messages: layers that make a matrix for each edge (NNConv, RGATConv)
    keep hundreds of times as much.
    """
    try:
        with untouched(cuttable.hop.layer) as snapshot:
            (out, notes, few_bytes), (other, others, many_bytes) = (_probe(cuttable, *probe) for probe in _PROBES)
    except Exception as error:  # whatever a layer says that does not run on some of its edges
        log.debug("%s runs whole, not in blocks: %s: %s", cuttable.hop.layer_name, type(error).__name__, error)
        return None
    if snapshot.changed:  # each block would change it once more
        return None
    rows = _rows_of(out, other)
    if rows is not None and not _equals_blocks(cuttable, rows):
        log.debug("%s runs whole: in blocks it gives other numbers", cuttable.hop.layer_name)
        return None
    places = {name: place for name, value in notes.items() if (place := _rows_of(value, others.get(name)))}
    if rows is None or not places.keys() == notes.keys() == others.keys():
        return None
    return _Result(bytes_per_edge=(many_bytes - few_bytes) / (_PROBES[1][0] - _PROBES[0][0]), rows=rows, notes=places)


def _equals_blocks(cuttable: _Cuttable, rows: _Rows) -> bool:
    """Compare a hop over some of the edges, whole, with the same hop in two blocks; without dropout."""
    hop, layer = cuttable.hop, cuttable.hop.layer
    order = torch.argsort(hop.edge_index[1], stable=True)[:_COMPARED]
    edge_index = hop.edge_index.index_select(1, order)
    targets = edge_index[1].unique()
    if len(targets) < 2 or not 0 <= int(targets[0]) <= int(targets[-1]) < cuttable.size[1]:
        return True
    border, end = int(targets[len(targets) // 2]), int(targets[-1]) + 1
    at = int(torch.searchsorted(edge_index[1], border))

    def run(first: int, last: int, some: slice) -> Tensor:
        parts = {
            name: value.index_select(dim, order[some]) if by_edge else value.narrow(dim, first, last - first)
            for name, (value, (by_edge, dim), _, _) in cuttable.arguments.items()
            if value is not None
        }
        return _run(cuttable, dict(vars(layer)), first, last - first, parts, edge_index[:, some])[0]

    modes = {module: module.training for module in layer.modules()}
    layer.eval()
    try:
        with torch.no_grad():
            whole = run(0, end, slice(None))
            blocks = torch.cat([run(0, border, slice(at)), run(border, end, slice(at, None))], rows.dim)
    finally:
        for module, training in modes.items():
            module.training = training
    if whole.shape != blocks.shape:
        return False
    apart = (whole - blocks).nan_to_num().abs().max() if whole.numel() else whole.new_zeros(())
    largest = whole.nan_to_num(posinf=0.0, neginf=0.0).abs().max() if whole.numel() else apart
    return bool(apart <= _TOLERANCE.get(whole.dtype, 5e-2) * largest)


def _probe(cuttable: _Cuttable, num_edges: int, num_dst: int) -> tuple[Tensor, dict[str, Any], int]:
    """Run a hop on copies of the first edge and first rows; also what it sets on the layer, and its bytes."""
    edge_index, device = cuttable.hop.edge_index, cuttable.hop.edge_index.device
    source = edge_index[0, :1].expand(num_edges)
    target = torch.arange(num_edges, device=device) * num_dst // num_edges
    edge_index = torch.stack([source, target.to(source.dtype)])
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        parts = {}
        for name, (value, (by_edge, dim), _, _) in cuttable.arguments.items():
            if value is not None:
                firsts = torch.zeros(num_edges if by_edge else num_dst, dtype=torch.long, device=device)
                parts[name] = value.index_select(dim, firsts)
        with _Allocated() as allocated:
            out, notes = _run(cuttable, dict(vars(cuttable.hop.layer)), 0, num_dst, parts, edge_index)
    return out, notes, sum(storage.nbytes() for storage in allocated.storages.values())


def _rows_of(small: Any, large: Any) -> _Rows | None:
    """The rows of a tensor, told by its sizes in the two small hops; ``None`` if they do not tell."""
    if not (isinstance(small, Tensor) and isinstance(large, Tensor) and small.dim() == large.dim()):
        return None
    for dim, sizes in enumerate(zip(small.shape, large.shape, strict=True)):
        for by_edge in (True, False):
            if sizes == tuple(probe[0 if by_edge else 1] for probe in _PROBES):
                return _Rows(by_edge, dim)
    return None


def _in_blocks(cuttable: _Cuttable, result: _Result, max_edges: int) -> Tensor:
    """Run the hop block by block."""
    hop, size = cuttable.hop, cuttable.size
    edge_index, order = hop.edge_index, None
    if bool((edge_index[1].diff() < 0).any()):
        order = torch.argsort(edge_index[1], stable=True)
        edge_index = edge_index.index_select(1, order)
    edge_index = edge_index.contiguous()
    if not 0 <= int(edge_index[1, 0]) <= int(edge_index[1, -1]) < size[1]:
        return _whole(hop)  # PyG says what is wrong
    bounds = destination_blocks(edge_index[1], size[1], max_edges)
    num_dst = [last - first for first, last in pairwise(bounds)]
    ends = torch.searchsorted(edge_index[1], torch.tensor(bounds, device=edge_index.device)).tolist()
    num_edges = [last - first for first, last in pairwise(ends)]
    # split, not slices: the backward of a slice makes a gradient of the whole argument for each block
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, (value, (by_edge, dim), _, _) in cuttable.arguments.items():
        if value is not None:
            ordered = value if order is None or not by_edge else value.index_select(dim, order)
            parts[name] = ordered.split(num_edges if by_edge else num_dst, dim)
    state = dict(vars(hop.layer))
    blocks: list[tuple[Tensor, dict[str, Any]]] = []
    for number, edges in enumerate(edge_index.split(num_edges, dim=1)):
        block_parts = {name: values[number] for name, values in parts.items()}
        block = functools.partial(_run, cuttable, state, bounds[number], num_dst[number], block_parts)
        # the one tensor among the arguments tells checkpoint on which device to keep the random state
        blocks.append(checkpoint(block, edges, use_reentrant=False) if torch.is_grad_enabled() else block(edges))
    for name, rows in result.notes.items():
        setattr(hop.layer, name, _joined([notes[name] for _, notes in blocks], rows, order))
    return _joined([out for out, _ in blocks], result.rows, order)


def _joined(parts: list[Tensor], rows: _Rows, order: Tensor | None) -> Tensor:
    """The rows of all blocks; those of edges in the order that the layer passed them in."""
    whole = torch.cat(parts, dim=rows.dim)
    if order is None or not rows.by_edge:
        return whole
    return torch.empty_like(whole).index_copy(rows.dim, order, whole)
