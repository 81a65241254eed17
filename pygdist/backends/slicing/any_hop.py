"""A hop of any layer whose columns ranks can share out: on slices of all rows, and its result to the rows' owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_geometric.nn import MessagePassing

from pygdist.backends.fetching.fetcher import HopRows
from pygdist.backends.slicing.chunked_autograd import hop_in_chunks
from pygdist.backends.slicing.chunked_hop import Ranks, Taken, Waiting
from pygdist.backends.slicing.columns import Columns, Kind, read_ends
from pygdist.backends.slicing.edge_tensors import EdgeTensors
from pygdist.backends.slicing.everyone import Everyone, Topology
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, share_rows, split_columns, with_phantom_column
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.hop import Ends, Hop, ends_of, is_pair
from pygdist.hops.layer import arguments_of_messages, asked_arguments, having, hooked, layer_name
from pygdist.hops.reads import read_names
from pygdist.memory.overflow import Overflow

__all__ = ["SlicedHop", "gathered"]


def gathered(
    layer: MessagePassing,
    out: Tensor,
    width: int,
    counts: tuple[int, ...],
    communicator: Communicator,
    *,
    label: str,
    fold: int = 1,
) -> Tensor:
    """This rank's rows of what a layer made of slices, of all columns; ``fold`` blocks of ``width`` columns."""
    rows = _unfolded(out.movedim(layer.node_dim, 0), fold, width, communicator)
    whole = gather_columns(rows, counts, width, communicator, label=label)
    return whole.flatten(-2).movedim(0, layer.node_dim)


def _unfolded(rows: Tensor, fold: int, width: int, communicator: Communicator) -> Tensor:
    own = columns_of(width, communicator.rank, communicator.world_size)
    blocks: Tensor = rows.unflatten(-1, (fold, rows.size(-1) // fold))
    return blocks[..., : own.stop - own.start]  # no phantom column


@dataclass(frozen=True, kw_only=True)
class SlicedHop:
    """How ranks run one hop of a layer, all at once or, within a budget, chunk by chunk.

    Attributes:
        hop: The hop; its arguments hold this rank's rows.
        columns: How its arguments are shared out.
        topology: The edges of all ranks.
        everyone: Their rows.
        communicator: The ranks.
        edge_tensors: What all ranks have of their edges' tensors.
        rows: The numbers of this rank's rows.
        overlap: By chunks, rows travel while others are computed with.
        label: Named when something goes wrong.
    """

    hop: Hop
    columns: Columns
    topology: Topology
    everyone: Everyone
    communicator: Communicator
    edge_tensors: EdgeTensors
    rows: HopRows
    overlap: bool
    label: str

    @property
    def layer(self) -> MessagePassing:
        """The layer."""
        return self.hop.layer

    def run(self) -> Tensor:
        """Run the hop; the result holds this rank's rows."""
        kwargs = self.hop.arguments
        wide = self._wide(kwargs)
        width = wide.size(-1)
        if self.everyone.overflow is not None:
            return self._in_chunks(kwargs, width, wide.device, self.everyone.overflow)
        num_rows, counts = self.everyone.num_rows, self.everyone.counts
        out = self._compute(self.topology.edges, (num_rows, num_rows), self._given(kwargs, width))
        return gathered(self.layer, out, width, counts, self.communicator, label=self.label, fold=self.columns.fold)

    def _compute(self, edges: Tensor, size: tuple[int, int], given: dict[str, Any]) -> Tensor:
        return replace(self.hop, edge_index=edges, arguments=given).run(size=size)

    def _wide(self, kwargs: Mapping[str, Any]) -> Tensor:
        """An argument of which ranks have some columns each."""
        value = next(kwargs[name] for name, kind in self.columns.kinds.items() if kind == "columns")
        source, target = ends_of(value)
        return cast(Tensor, target if source is None else source)

    def _kind(self, name: str, value: Tensor, width: int) -> Kind:
        """What a hop gets of an argument, or of one end of it."""
        kind = self.columns.kinds.get(name, "same")
        if kind in ("columns", "edge columns") and value.size(-1) != width:
            if value.size(-1) != 1:
                raise InputError(
                    f"{layer_name(self.layer)}: argument '{name}' of propagate has {value.size(-1)} columns, the rows "
                    f"{width}, so ranks cannot share both out alike; 'comm', 'cache' and 'hybrid' run it"
                )
            kind = "nodes" if kind == "columns" else "edges"  # one column for all of them
        if kind in ("nodes", "columns"):
            self.rows.check(self.hop, name, value)
        return kind

    def _of_all(self, name: str, value: Tensor, kind: Kind) -> Tensor:
        """What this rank needs of all ranks' rows, these first."""
        label = f"{self.label}, {name}"
        if kind == "edges":
            return self.edge_tensors.of_all(self.layer, name, value, self.topology, label=label)
        if kind == "edge columns":
            return split_columns(value, self.topology.counts, self.communicator, label=label)
        rows, travel = value.movedim(self.layer.node_dim, 0), split_columns if kind == "columns" else share_rows
        return travel(rows, self.everyone.counts, self.communicator, label=label)

    def _as_read(self, rows: Tensor, kind: Kind) -> Tensor:
        """Such rows as the layer has them."""
        rows = with_phantom_column(rows) if kind in ("columns", "edge columns") else rows
        return rows.movedim(0, self.layer.node_dim) if kind in ("nodes", "columns") else rows

    # -- all at once --------------------------------------------------------------------------------------------------

    def _given(self, kwargs: Mapping[str, Any], width: int) -> dict[str, Any]:
        """The arguments of a hop over the edges of all ranks."""
        known: dict[tuple[int, Kind], Tensor] = {}  # one tensor may be there for both ends

        def one(name: str, value: Any) -> Any:
            kind = self._kind(name, value, width) if isinstance(value, Tensor) else "same"
            if kind == "same":
                return value
            if (id(value), kind) not in known:
                known[id(value), kind] = self._as_read(self._of_all(name, value, kind), kind)
            return known[id(value), kind]

        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            if is_pair(value) and self.columns.kinds.get(name, "same") != "same":
                read = read_ends(self.layer, name)
                # who asks for both ends at once gets both
                whole = name in asked_arguments(self.layer)
                given[name] = tuple(
                    one(name, part) if used or whole else None for part, used in zip(value, read, strict=True)
                )
            else:
                given[name] = one(name, value)
        return given

    # -- chunk by chunk -----------------------------------------------------------------------------------------------

    def _in_chunks(self, kwargs: Mapping[str, Any], width: int, device: torch.device, overflow: Overflow) -> Tensor:
        layer, communicator, counts = self.layer, self.communicator, self.everyone.counts
        messages = replace(self.hop, edge_index=self.topology.edges).kernel is None
        if messages and device != overflow.device:
            raise InputError(
                f"{self.label}: its messages are computed where its parameters are, on {device}, not on "
                f"{overflow.device}; leave device out, or the model there"
            )
        if hooked(layer, "propagate", "message", "aggregate", "message_and_aggregate"):
            raise InputError(
                f"{self.label}: has hooks on its hops, which would get chunks, and these once more in the backward "
                "pass; remove them, or leave memory_gib out"
            )
        known: dict[tuple[int, Kind], _Known] = {}
        # by argument, for each end: which of what is known, where a chunk reads it, and its kind
        read: dict[str, list[tuple[int, str, Kind] | None]] = {}
        layer_class: Any = type(layer)
        # what its code says, and what trials have seen, which need not be all that code may do
        attributes = read_names(layer_class, ("message", "aggregate", "message_and_aggregate", "update"))
        others = _Others(layer, self.columns.reads | attributes)
        as_it_is = arguments_of_messages(layer)  # what update() alone asks for are rows of its own

        def place(name: str, value: Any, end: str) -> tuple[int, str, Kind] | None:
            kind = self._kind(name, value, width) if isinstance(value, Tensor) else "same"
            if kind == "same":
                return None
            if (id(value), kind) not in known:
                known[id(value), kind] = _Known(len(known), name, value, set())
            found = known[id(value), kind]
            found.ends.add(end)
            return found.number, end, kind

        for name, value in kwargs.items():
            kind = self.columns.kinds.get(name, "same")
            if kind in ("nodes", "columns"):
                ends = ends_of(value)
                used = zip(("source", "target"), ends, read_ends(self.layer, name), strict=True)
                read[name] = [place(name, part, end) if asked else None for end, part, asked in used]
            elif kind in ("edges", "edge columns") and value is not None:
                read[name] = [place(name, value, "edge")]
            if f"{name}_j" in asked_arguments(layer) and name in as_it_is and not is_pair(value):
                raise InputError(
                    f"{self.label}: reads '{name}' at the ends of edges and as it is, which a chunk of edges does not "
                    "have; leave memory_gib out, or use 'comm' with halo_gib"
                )
        state = others.state()
        # the rows themselves must not be held for the backward pass
        in_pairs = {name for name, value in kwargs.items() if is_pair(value)}
        same = {name: others.leaves(value) for name, value in kwargs.items() if name not in read}

        def run(edges: Adjacency, taken: list[Taken]) -> Tensor:
            given = dict(same)
            for name, places in read.items():
                parts = [
                    None if one is None else self._as_read(getattr(taken[one[0]], one[1]), one[2]) for one in places
                ]
                if len(parts) == 1:
                    given[name] = parts[0]
                elif not read_ends(self.layer, name)[0]:  # a layer that looks at destinations alone gets theirs
                    given[name] = parts[1]
                else:
                    given[name] = tuple(parts) if name in in_pairs else Ends(parts)
            with having(layer, state):  # as at the time of the forward pass
                out = self._compute(edges, (edges.num_src, edges.num_dst), given)
            return _unfolded(out.movedim(layer.node_dim, 0), self.columns.fold, width, communicator)

        ranks = Ranks(communicator=communicator, counts=counts, overflow=overflow, overlap=self.overlap)
        (whole,) = hop_in_chunks(
            run, [self._waiting(one, kind) for (_, kind), one in known.items()],
            cast(Adjacency, self.topology.edges), ranks, label=self.label, width=width, device=device,
            others=others.known, messages=messages, all_edges=self.columns.needs_all_edges,
            fold=self.columns.fold,
        )  # fmt: skip
        return whole.flatten(-2).movedim(0, layer.node_dim)

    def _waiting(self, known: _Known, kind: Kind) -> Waiting:
        """How all ranks come by what a hop reads of an argument."""
        value, name = known.value, known.name
        if kind in ("nodes", "columns"):
            rows, source, target = value.movedim(self.layer.node_dim, 0), "source" in known.ends, "target" in known.ends
            way: Literal["split", "share"] = "split" if kind == "columns" else "share"
            return Waiting(rows=rows, name=name, source=source, target=target, way=way)
        if kind == "edge columns":
            return Waiting(rows=value, name=name, way="split")
        label, elsewhere, tensors = f"{self.label}, {name}", self.everyone.elsewhere, self.edge_tensors
        every = tensors.kept_of_all(self.layer, name, value, self.topology, label=label, elsewhere=elsewhere)
        return Waiting(rows=value, name=name, way="share") if every is None else Waiting(rows=every)


class _Known(NamedTuple):
    """An argument, or one end of it, and where a chunk reads it."""

    number: int
    name: str
    value: Tensor
    ends: set[str]


class _Others:
    """What a hop reads beside rows of nodes and edges, of which some needs a gradient.

    What was computed is read by chunks as a leaf that stands for it: the way back from there is taken once, after all
    chunks, and is not part of any.

    Args:
        layer: The layer.
        names: Of its attributes, parameters and modules that the hop reads.

    Attributes:
        known: What needs a gradient, with the leaf that is read.
    """

    def __init__(self, layer: MessagePassing, names: frozenset[str]) -> None:
        self.known: dict[Tensor, Tensor] = {}
        self._layer, self._names = layer, names
        children = [module for name, module in layer.named_children() if name in names]
        self.leaves([one for name, one in layer.named_parameters() if name in names])
        self.leaves([one for module in children for one in module.parameters()])

    def leaves(self, value: Any) -> Any:
        """The same with leaves in the place of what was computed."""
        graded = [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.requires_grad]
        for one in graded:
            if one not in self.known:
                self.known[one] = one if one.is_leaf else one.detach().requires_grad_()
        # containers that hold nothing of the kind stay themselves
        return tree_map_only(Tensor, lambda one: self.known.get(one, one), value) if graded else value

    def state(self) -> dict[str, Any]:
        """The layer's attributes as its chunks see them."""
        return {
            name: self.leaves(value) if name in self._names else value
            for name, value in vars(self._layer).items()
            # what earlier passes left on the layer must not be held by this one
            if name in self._names or not (isinstance(value, Tensor) and value.grad_fn is not None)
        }
