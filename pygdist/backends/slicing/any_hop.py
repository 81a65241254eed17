"""One hop of any layer whose columns ranks can divide: the layer's own code runs on slices of all rows.

A trial (:mod:`~pygdist.backends.slicing.columns`) finds the kind of each argument of ``propagate``; the kind determines
the exchange. The layer gets the rows or edges of all ranks. A rank without columns gets a phantom column, which is cut
off afterwards::

    columns       (n, *, C) -> (N, *, c)       backward: the owner of a row gets all columns of its gradient
    nodes         (n, *)    -> (N, *)          backward: the owner of a row gets the sum over ranks
    edges         (e, *)    -> (E, *)          backward: the owner of an edge gets the sum over ranks
    edge columns  (e, *, C) -> (E, *, c)       backward: the owner of an edge gets all columns of its gradient
    same          as it is                     backward: stays on the rank, whose columns it is of
    result        (N, *, f c) -> (n, *, f C)   backward: each rank gets its columns of all gradients
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_geometric.nn import MessagePassing

from pygdist.backends.fetching.fetcher import HopRows
from pygdist.backends.slicing.all_nodes import AllNodes, SliceLayout, Topology
from pygdist.backends.slicing.chunked_autograd import ChunkCost, hop_in_chunks
from pygdist.backends.slicing.chunked_hop import ChunkInput, ChunkRows
from pygdist.backends.slicing.columns import ArgumentKind, Columns, advice, read_ends
from pygdist.backends.slicing.edge_tensors import EdgeReader, EdgeTensors
from pygdist.comm.slices import share_rows, split_columns, with_phantom_column
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.hop import Ends, Hop, ends_of, is_pair
from pygdist.hops.layer import arguments_of_messages, asked_arguments, having, hooked
from pygdist.hops.reads import read_names


def gather_result(
    layer: MessagePassing, out: Tensor, width: int, layout: SliceLayout, *, label: str, fold: int = 1
) -> Tensor:
    """Return all columns of this rank's rows, from this rank's columns of the result of a layer on all rows.

    The result consists of ``fold`` blocks, each with ``width`` columns on all ranks together.
    """
    return layout.gather(_blocks(layer, out, fold), width, label).flatten(-2).movedim(0, layer.node_dim)


def _blocks(layer: MessagePassing, out: Tensor, fold: int) -> Tensor:
    """Turn a layer's result into ``(N, *, fold, c)``."""
    rows = out.movedim(layer.node_dim, 0)
    blocks: Tensor = rows.unflatten(-1, (fold, rows.size(-1) // fold))
    return blocks


@dataclass(frozen=True, kw_only=True)
class SlicedRun:
    """A hop on slices, all at once or, within a memory budget, chunk by chunk.

    Attributes:
        hop: The hop; its arguments hold this rank's rows.
        columns: The kinds of its arguments.
        topology: The edges of all ranks.
        nodes: Their nodes.
        edge_tensors: Tensors of all ranks' edges.
        rows: The numbers of this rank's rows.
        label: Names the hop in errors.
    """

    hop: Hop
    columns: Columns
    topology: Topology
    nodes: AllNodes
    edge_tensors: EdgeTensors
    rows: HopRows
    label: str

    @property
    def layer(self) -> MessagePassing:
        """The layer."""
        return self.hop.layer

    def run(self) -> Tensor:
        """Run the hop; the result holds this rank's rows."""
        cut = next(name for name, kind in self.columns.kinds.items() if kind == "columns")
        wide: Tensor = next(end for end in ends_of(self.hop.arguments[cut]) if end is not None)
        layout, width = self.nodes.layout, wide.size(-1)
        if layout.overflow is not None:
            return self._in_chunks(width, wide.device)
        out = self.compute(self.topology.edges, (layout.num_rows, layout.num_rows), self._arguments(width))
        return gather_result(self.layer, out, width, layout, label=self.label, fold=self.columns.fold)

    def compute(self, edges: Tensor, size: tuple[int, int], arguments: dict[str, Any]) -> Tensor:
        """Run the layer's code on edges and rows that are here."""
        return replace(self.hop, edge_index=edges, arguments=arguments).run(size=size)

    def kind_of(self, name: str, value: Any, width: int) -> ArgumentKind:
        """Return the kind of an argument, or of one end of it, among rows of ``width`` columns."""
        kind = self.columns.kinds.get(name, "same") if isinstance(value, Tensor) else "same"
        if kind in ("columns", "edge columns") and value.size(-1) != width:
            if value.size(-1) != 1:
                raise InputError(
                    f"{self.hop.layer_name}: argument '{name}' of propagate has {value.size(-1)} columns, the rows "
                    f"have {width}, so ranks cannot share out both in the same way; {advice()}"
                )
            kind = "nodes" if kind == "columns" else "edges"  # one column for all of them
        if kind in ("nodes", "columns"):
            self.rows.check(self.hop, name, value)
        return kind

    def as_read(self, rows: Tensor, kind: ArgumentKind) -> Tensor:
        """Return rows, nodes or edges first, in the form in which the layer reads them."""
        rows = with_phantom_column(rows) if kind in ("columns", "edge columns") else rows
        return rows.movedim(0, self.layer.node_dim) if kind in ("nodes", "columns") else rows

    def _edge_reader(self, name: str) -> EdgeReader:
        """Return the layer as a reader of an argument."""
        return EdgeReader(self.layer, name, self.topology, f"{self.label}, {name}")

    # -- all at once --------------------------------------------------------------------------------------------------

    def _arguments(self, width: int) -> dict[str, Any]:
        """Return the arguments of the hop over the edges of all ranks."""
        exchanged: dict[tuple[int, ArgumentKind], Tensor] = {}  # both ends of an argument may be one tensor

        def of_all(name: str, value: Any) -> Any:
            kind = self.kind_of(name, value, width)
            if kind == "same":
                return value
            if (id(value), kind) not in exchanged:
                exchanged[id(value), kind] = self.as_read(self._exchange(name, value, kind), kind)
            return exchanged[id(value), kind]

        arguments: dict[str, Any] = {}
        for name, value in self.hop.arguments.items():
            if is_pair(value) and self.columns.kinds.get(name, "same") != "same":
                # who asks for the pair gets both ends
                read = (True, True) if name in asked_arguments(self.layer) else read_ends(self.layer, name)
                arguments[name] = tuple(
                    of_all(name, end) if used else None for end, used in zip(value, read, strict=True)
                )
            else:
                arguments[name] = of_all(name, value)
        return arguments

    def _exchange(self, name: str, value: Tensor, kind: ArgumentKind) -> Tensor:
        """Return what this rank needs of all ranks' rows, nodes or edges first."""
        label, layout = f"{self.label}, {name}", self.nodes.layout
        if kind == "edges":
            return self.edge_tensors.share(self._edge_reader(name), value)
        if kind == "edge columns":
            return split_columns(value, self.topology.counts, layout.communicator, label=label)
        rows, exchange = value.movedim(self.layer.node_dim, 0), split_columns if kind == "columns" else share_rows
        return exchange(rows, layout.counts, layout.communicator, label=label)

    # -- chunk by chunk -----------------------------------------------------------------------------------------------

    def _in_chunks(self, width: int, device: torch.device) -> Tensor:
        layer, layout, arguments = self.layer, self.nodes.layout, self.hop.arguments
        messages = replace(self.hop, edge_index=self.topology.edges).kernel is None
        if messages and device != layout.memory.device:
            raise InputError(
                f"{self.label}: the layer computes its messages where its parameters are, on {device}, not on "
                f"{layout.memory.device}; leave device out, or move the model there"
            )
        if hooked(layer, "propagate", "message", "aggregate", "message_and_aggregate"):
            raise InputError(
                f"{self.label}: the layer has hooks on its hops, which would see a chunk at a time, and each chunk "
                "again in the backward pass; remove the hooks, or leave memory_gib out"
            )
        # the names in its code, and those that trials have seen, which need not be all that the code may read
        layer_class: Any = type(layer)
        attributes = read_names(layer_class, ("message", "aggregate", "message_and_aggregate", "update"))
        leaves = _Leaves(layer, self.columns.reads | attributes)
        reads = self._reads(width)
        groups: dict[tuple[int, ArgumentKind], list[_Read]] = {}  # several arguments or ends may be one tensor
        for one in itertools.chain.from_iterable(reads.values()):
            if one is not None:
                groups.setdefault(one.key, []).append(one)
        numbers = {key: number for number, key in enumerate(groups)}
        compute = _ChunkCompute(
            run=replace(self, hop=replace(self.hop, arguments={})),
            held=layout.held(width),
            state=leaves.state(),
            places={
                name: [None if one is None else (numbers[one.key], one.end, one.kind) for one in ends]
                for name, ends in reads.items()
            },
            pairs=frozenset(name for name, value in arguments.items() if is_pair(value)),
            same={name: leaves.in_place_of(value) for name, value in arguments.items() if name not in reads},
        )
        (out,) = hop_in_chunks(
            compute, [self._input(group) for group in groups.values()], cast(Adjacency, self.topology.edges), layout,
            label=self.label, width=width, device=device, leaves=leaves.by_tensor,
            cost=ChunkCost(messages, fold=self.columns.fold, needs_all_edges=self.columns.needs_all_edges),
        )  # fmt: skip
        return out.flatten(-2).movedim(0, layer.node_dim)

    def _reads(self, width: int) -> dict[str, list[_Read | None]]:
        """Return for each argument that chunks read rows of: its source and destination rows, or the rows of edges."""
        layer, of_messages = self.layer, arguments_of_messages(self.layer)  # update() alone gets the rows passed
        reads: dict[str, list[_Read | None]] = {}
        for name, value in self.hop.arguments.items():
            kind = self.columns.kinds.get(name, "same")
            if kind in ("nodes", "columns"):
                used = zip(("source", "target"), ends_of(value), read_ends(layer, name), strict=True)
                reads[name] = [self._read(name, rows, end, width) if asked else None for end, rows, asked in used]
            elif kind in ("edges", "edge columns") and value is not None:
                reads[name] = [self._read(name, value, "edge", width)]
            if f"{name}_j" in asked_arguments(layer) and name in of_messages and not is_pair(value):
                raise InputError(
                    f"{self.label}: the layer reads '{name}' at the ends of edges and as it is, and a chunk has the "
                    "rows at the ends of its edges only; leave memory_gib out, or use a backend with halo_gib"
                )
        return reads

    def _read(self, name: str, value: Any, end: str, width: int) -> _Read | None:
        kind = self.kind_of(name, value, width)
        return None if kind == "same" else _Read(name, value, end, kind)

    def _input(self, group: list[_Read]) -> ChunkInput:
        """Return a tensor that chunks read, at one end of edges or at both; every rank makes the call."""
        name, value, _, kind = group[0]
        if kind in ("nodes", "columns"):
            ends = {one.end for one in group}
            way: Literal["split", "share"] = "split" if kind == "columns" else "share"
            rows = value.movedim(self.layer.node_dim, 0)
            return ChunkInput(rows=rows, name=name, source="source" in ends, target="target" in ends, way=way)
        if kind == "edge columns":
            return ChunkInput(rows=value, name=name, way="split")
        of_all = self.edge_tensors.share_constant(self._edge_reader(name), value)
        return ChunkInput(rows=value, name=name, way="share") if of_all is None else ChunkInput(rows=of_all)


class _Read(NamedTuple):
    """A tensor that chunks read, at one end of their edges (``source``, ``target``) or on these (``edge``)."""

    name: str
    value: Tensor
    end: str
    kind: ArgumentKind

    @property
    def key(self) -> tuple[int, ArgumentKind]:
        """Equal for reads of one tensor that travels once."""
        return id(self.value), self.kind


_Place: TypeAlias = tuple[int, str, ArgumentKind]
"""A read without its tensor: the number of the tensor among the chunks' inputs, the end, the kind."""


@dataclass(frozen=True, kw_only=True)
class _ChunkCompute:
    """Computes a chunk by the layer's own code.

    It holds no rows that travel: the backward pass, which calls it again, must not hold them. ``state`` are the layer's
    attributes at the time of the forward pass, ``held`` the number of this rank's columns, ``same`` the arguments of
    which chunks read no rows, ``pairs`` those that the layer passed as pairs.
    """

    run: SlicedRun
    held: int
    state: Mapping[str, Any]
    places: Mapping[str, list[_Place | None]]
    pairs: frozenset[str]
    same: Mapping[str, Any]

    def __call__(self, edges: Adjacency, of_chunk: list[ChunkRows]) -> Tensor:
        """Return the result for the destinations of a chunk, ``(destinations, *, fold, c)``."""
        arguments = {**self.same, **{name: self._argument(name, of_chunk) for name in self.places}}
        with having(self.run.layer, self.state):
            out = self.run.compute(edges, (edges.num_src, edges.num_dst), arguments)
        return _blocks(self.run.layer, out, self.run.columns.fold)[..., : self.held]

    def _argument(self, name: str, of_chunk: list[ChunkRows]) -> Any:
        ends = [
            None if place is None else self.run.as_read(getattr(of_chunk[place[0]], place[1]), place[2])
            for place in self.places[name]
        ]
        if len(ends) == 1:
            return ends[0]
        if not read_ends(self.run.layer, name)[0]:  # a layer that looks at destinations alone gets theirs
            return ends[1]
        return tuple(ends) if name in self.pairs else Ends(ends)


class _Leaves:
    """Leaves in place of the tensors that a hop reads beside rows of nodes and edges and that need a gradient.

    A computed tensor is read as a leaf that stands for it. Its own graph is part of no chunk: autograd walks it once,
    after all chunks.

    Args:
        layer: The layer.
        names: The attributes, parameters and modules that the hop reads.

    Attributes:
        by_tensor: For each tensor that needs a gradient, the leaf that is read.
    """

    def __init__(self, layer: MessagePassing, names: frozenset[str]) -> None:
        self.by_tensor: dict[Tensor, Tensor] = {}
        self._layer, self._names = layer, names
        children = [module for name, module in layer.named_children() if name in names]
        self.in_place_of([one for name, one in layer.named_parameters() if name in names])
        self.in_place_of([one for module in children for one in module.parameters()])

    def in_place_of(self, value: Any) -> Any:
        """Return ``value`` with leaves in place of its tensors that need a gradient; itself if it has none."""
        graded = [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.requires_grad]
        for one in graded:
            if one not in self.by_tensor:
                self.by_tensor[one] = one if one.is_leaf else one.detach().requires_grad_()
        return tree_map_only(Tensor, lambda one: self.by_tensor.get(one, one), value) if graded else value

    def state(self) -> dict[str, Any]:
        """Return the layer's attributes as its chunks see them."""
        return {
            name: self.in_place_of(value) if name in self._names else value
            for name, value in vars(self._layer).items()
            # tensors that earlier passes left on the layer must not be held by this one
            if name in self._names or not (isinstance(value, Tensor) and value.grad_fn is not None)
        }
