"""What backends have in common that fetch rows from their owners, hop by hop, and hand a layer all that it reads.

One differentiable exchange per hop, whatever the number of tensors that the layer reads from its neighbours; gradients
flow back the same way and are summed at the owner.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Backend, Inner
from pygdist.backends.fetching.adjacency import ChunkedAdjacency
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.exchange import Hop
from pygdist.comm import ExchangePlan
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import version_of
from pygdist.hops.fused_attention import Unscored, attends_by_piece, attention_hop, defers_scores
from pygdist.hops.layer import (
    Ends,
    fused_arguments,
    fuses,
    layer_name,
    neighbour_arguments,
    norms_over_edges,
    with_phantom_edge,
)
from pygdist.memory.overflow import Overflow, writable

__all__ = ["FetchingBackend", "WireDtype"]

_GIB = 2**30
_DENSE = 32  # edges for each node
_MOST_PARTS, _ROWS_OF_A_PART = 4, 1024
_TOO_SMALL = 4  # pieces of so many times fewer rows than there is memory for would cost too many exchanges

WireDtype: TypeAlias = Literal["bfloat16"]


class FetchingBackend(Backend):
    """Fetches rows in every hop; which, a subclass may say in :meth:`halo_rows` and :meth:`joined`.

    Args:
        ring: Exchange with one peer after the other, so that chunks arrive in turns and no rank is sent to by all at
            once (NeutronStar, Sec. 4.3); without, with all at once.
        overlap: Aggregate each chunk while the next one travels, and in the backward pass send gradients while others
            are computed; without, a hop waits until all rows are here. Either way layers whose neighbours cannot be
            taken piece by piece wait: messages of PyG, attention with edge attributes or dropout, LSTM.
        wire_dtype: ``"bfloat16"`` halves the bytes of rows and gradients; the backend is then no longer exact.
        halo_gib: Most memory that other ranks' rows may take at a time, on each rank, in hops that can be taken piece
            by piece; no limit by default. What is more arrives in pieces, each aggregated before the next comes; in
            the backward pass attention fetches them once more, maxima and minima twice. What the model keeps for the
            backward pass then waits in the host's memory, or, where that is the device, in files beside the
            partitioned graph; so do the edges of a piece, until its rows are here.
    """

    _small: ClassVar[int] = Overflow.small

    def __init__(
        self,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
        halo_gib: float | None = None,
    ) -> None:
        super().__init__()
        if halo_gib is not None and halo_gib <= 0:
            raise InputError(f"halo_gib is {halo_gib}, expected a positive number")
        if wire_dtype not in (None, *get_args(WireDtype)):
            raise InputError(f"wire_dtype is {wire_dtype!r}, expected {' or '.join(get_args(WireDtype))} or nothing")
        self.ring, self.overlap, self.wire_dtype, self.halo_gib = ring, overlap, wire_dtype, halo_gib
        # of what arrives: itself, the most rows of a pair of ranks, and by the most rows of a piece its pieces
        self._pieces: dict[int, tuple[Arrival, int, dict[int, tuple[Arrival, ...]]]] = {}
        if wire_dtype is not None:
            self.exact, self.approximation = False, f"rows and gradients travel as {wire_dtype}"
        # rows fetched for the layer that is running: GATv2 reads the same rows in edge_updater and in propagate
        self._fetched_for: MessagePassing | None = None
        self._fetched: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._hop = 0
        self._elsewhere = contextlib.ExitStack()  # open while a forward pass keeps rows where there is memory
        self._beyond: Overflow | None = None
        self._inside = False  # a forward pass of the model

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        if norms := norms_over_edges(layer):
            return f"takes the statistics of {norms[0]} over edges, not nodes; use MLP(..., norm=None), or a LayerNorm"
        return None

    @override
    def begin_forward(self) -> None:
        self._hop = 0
        self._forget()
        self._elsewhere.close()  # of a pass that was interrupted
        self._elsewhere.enter_context(self._kept_elsewhere())
        self._inside = True

    @override
    def begin_hop(self) -> None:
        self._hop += 1

    @override
    def end_forward(self) -> None:
        self._elsewhere.close()
        self._inside = False
        self._forget()

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with contextlib.nullcontext() if self._inside else self._kept_elsewhere():
            return super().run_layer(layer, forward, args, kwargs)

    def _kept_elsewhere(self) -> contextlib.AbstractContextManager[Any]:
        """What runs inside keeps rows for the backward pass where there is memory, if the device's is short."""
        if self.halo_gib is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._beyond_memory(self.halo_gib).of_the_backward_pass(self._held())

    def _beyond_memory(self, halo_gib: float) -> Overflow:
        if self._beyond is None:
            shard = self.shard
            self._beyond = Overflow(shard.n_id.device, int(halo_gib * _GIB), writable(shard.folder), self._small)
        return self._beyond

    def _held(self) -> list[Tensor]:
        """What stays on the device from pass to pass."""
        return [self.shard.x, *self.routing.first_hop.results]

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        hop = self._hop_in_chunks(layer, edge_index, kwargs)
        if hop is not None and isinstance(edge_index, Adjacency):
            return inner(ChunkedAdjacency.over(edge_index, hop), size=size, **kwargs)
        rows = self._with_sources(layer, kwargs, edges=False, fused=fuses(layer, edge_index, kwargs))
        return self._run(layer, inner, edge_index, rows, edges=False)

    @override
    def edge_updater(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._scores_wait(layer, edge_index, kwargs) and self.arrival() is not None:
            return cast(Tensor, Unscored())
        rows = self._with_sources(layer, kwargs, edges=True, fused=False)
        return self._run(layer, inner, edge_index, rows, edges=True)

    def _scores_wait(self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether scores of edges are computed where the rows of the hop arrive, not before it."""
        return self.weights_unseen and self.savings.fused_attention and defers_scores(layer, edge_index, kwargs)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        plan = self.shard.plan
        return torch.cat([x, self.communicator.exchange_rows(x, plan, label="node values")])

    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        r"""Fetch rows from their owners; what a subclass with another wire format overrides.

        Args:
            x: Rows that this rank owns.
            label: What they are, for messages.

        Shapes:
            ``x`` is :math:`(n, F)` or :math:`(n)`, the result :math:`(h, F)` or :math:`(h)`, in the order of the
            shard's halo; differentiable, its backward gives the gradients of the copies back to the owners.
        """
        return self._exchanged(x, self.shard.plan, label)

    def arrival(self) -> Arrival | None:
        """What arrives for the hop that runs, so that it can be aggregated in chunks; ``None`` to fetch it whole."""
        return None

    def joined(self, x: Tensor, halo: Tensor) -> Tensor:
        """One row for each source of the hop's edges, from this rank's rows and those that were fetched."""
        return torch.cat([x, halo])

    @property
    def num_sources(self) -> int:
        """Rows that the edges of the hop may start from."""
        return self.shard.num_owned + self.shard.num_halo

    @override
    def unbind(self) -> None:
        self._forget()
        self._pieces = {}
        self._elsewhere.close()
        self._beyond = None
        if self._shard is not None:
            self._shard.adjacency.derived.pop("chunks", None)  # by what arrived for this backend
        super().unbind()

    def _exchanged(self, x: Tensor, plan: ExchangePlan, label: str) -> Tensor:
        wide = x.is_floating_point() and x.element_size() > 2  # ids must not be rounded
        wire = self._wire if wide else None
        return self.communicator.exchange_rows(x, plan, label=label, ring=self.ring, wire=wire)

    @property
    def _wire(self) -> torch.dtype | None:
        return None if self.wire_dtype is None else getattr(torch, self.wire_dtype)

    def _hop_in_chunks(self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> Hop | None:
        """How to run a hop in chunks, if its aggregation can be taken piece by piece."""
        read = self._read_by_piece(layer, edge_index, kwargs)
        arrival = self.arrival() if read else None
        if arrival is None:
            return None
        for name, x in read.items():
            self._check_rows(layer, name, x)
        label = f"hop {self._hop} of {layer_name(layer)}"
        row_bytes = sum(math.prod(x.shape[1:]) * (self._wire or x.dtype).itemsize for x in read.values())
        pieces = self._in_pieces(arrival, row_bytes)
        return Hop(
            communicator=self.communicator,
            pieces=pieces,
            label=label,
            ring=self.ring,
            overlap=self.overlap,
            wire=self._wire,
            parts=self._parts,
            overflow=self._beyond_memory(self.halo_gib) if self.halo_gib is not None and len(pieces) > 1 else None,
            whole=lambda rows: self.joined(rows, self.halo_rows(rows, label=label)),
        )

    def _read_by_piece(self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The rows that a hop may read piece by piece; nothing if it may not, or they are here."""
        names: tuple[str, ...] = ()
        if self.savings.fused_attention:
            names = attends_by_piece(layer, edge_index, kwargs, unseen=self.weights_unseen)
        if not names and fuses(layer, edge_index, kwargs) and fused_arguments(layer, kwargs) is not None:
            names = ("x",)
        found: dict[str, Tensor] = {}
        for name in names if isinstance(edge_index, Adjacency) else ():
            x = kwargs.get(name)
            x = x[0] if isinstance(x, (tuple, list)) else x
            if not isinstance(x, Tensor) or self._known(x) is not None:
                return {}
            found[name] = x
        return found

    @property
    def _parts(self) -> int:
        """In how many parts a hop takes what comes from a rank.

        With many edges to each row there is much to aggregate while the next part travels; with few, each part is one
        more pass over the destinations for next to nothing.
        """
        shard = self.shard
        if not self.overlap or shard.num_edges < _DENSE * shard.num_nodes:
            return 1
        return min(_MOST_PARTS, max(1, shard.num_nodes // shard.num_parts // _ROWS_OF_A_PART))

    def _in_pieces(self, arrival: Arrival, row_bytes: int) -> tuple[Arrival, ...]:
        """What arrives for a hop, as much at a time as there is memory for; the same number of pieces on all ranks."""
        plan = arrival.plan
        known = self._pieces.get(id(arrival))
        if known is None:
            most = 0 if self.halo_gib is None else self.max_over_ranks(max(plan.send_counts + plan.recv_counts))
            known = self._pieces[id(arrival)] = (arrival, most, {most: (arrival,)})
        _, most, cuts = known
        if self.halo_gib is None:
            return cuts[most]
        others = len(plan.send_counts) - 1
        fits = int(self.halo_gib * _GIB) // (max(row_bytes, 1) * others)  # of each pair of ranks
        rows = min(max(fits, 1), most)
        # pieces that were cut for somewhat wider rows will do: a hop's edges are held once for each way to cut them
        cut = max((one for one in cuts if rows // _TOO_SMALL <= one <= rows), default=None)
        if cut is None:
            cut = rows
            cuts[rows] = tuple(arrival.piece(first, rows) for first in range(0, most, rows))
        return cuts[cut]

    def _run(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, rows: dict[str, Any], *, edges: bool
    ) -> Tensor:
        size = (self.num_sources, self.num_rows)
        # attention of our own needs no edge, and must go the same way on all ranks
        hop = "edge_updater" if edges else "propagate"
        ours = self.savings.fused_attention and attention_hop(layer, hop, edge_index, rows)
        if edge_index.size(1) == 0 and not ours:
            return with_phantom_edge(layer, inner, size, rows, edges=edges)
        return inner(edge_index, size=size, **rows)

    @override
    def _pickled_state(self) -> dict[str, Any]:
        return {
            **super()._pickled_state(),
            "_fetched_for": None,
            "_fetched": {},
            "_pieces": {},
            "_elsewhere": contextlib.ExitStack(),
            "_beyond": None,
            "_inside": False,
        }

    def _forget(self) -> None:
        self._fetched_for = None
        self._fetched.clear()

    def _with_sources(
        self, layer: MessagePassing, kwargs: dict[str, Any], *, edges: bool, fused: bool
    ) -> dict[str, Any]:
        """The arguments of the hop, with (source rows, destination rows) where the layer reads its neighbours."""
        if layer is not self._fetched_for:
            self._forget()
            self._fetched_for = layer
        sources: dict[str, Tensor] = {}
        for name in neighbour_arguments(layer, edges=edges):
            value = kwargs.get(name)
            value = value[0] if isinstance(value, (tuple, list)) else value
            if isinstance(value, Tensor):
                sources[name] = value
        fetched = self._fetch(layer, sources)
        out = dict(kwargs)
        for name, rows in fetched.items():
            value = kwargs[name]
            if isinstance(value, (tuple, list)):
                out[name] = (rows, value[1])
            else:
                # PyG's fused path multiplies the one tensor it gets; the message path looks both ends up
                own = value.narrow(layer.node_dim, 0, self.num_rows) if self.num_rows < self.num_local else value
                out[name] = rows if fused else Ends((rows, own))
        return out

    def _fetch(self, layer: MessagePassing, sources: dict[str, Tensor]) -> dict[str, Tensor]:
        """Owned and halo rows of each tensor; those not fetched yet travel together, one exchange per dtype."""
        missing: dict[torch.dtype, list[Tensor]] = {}
        for name, value in sources.items():
            self._check_rows(layer, name, value)
            if self._known(value) is None and all(value is not other for other in missing.get(value.dtype, [])):
                missing.setdefault(value.dtype, []).append(value)
        known = any(self._known(value) is not None for value in sources.values())
        for number, tensors in enumerate(missing.values()):
            self._exchange(layer, tensors, keep=known or number > 0)
        return {name: self._known(value) for name, value in sources.items()}  # type: ignore[misc]

    def _exchange(self, layer: MessagePassing, tensors: list[Tensor], *, keep: bool) -> None:
        # layers keep nodes in another dimension than the first (ARMA stacks, static graphs)
        rows = [tensor.movedim(layer.node_dim, 0) for tensor in tensors]
        flat = [row.reshape(row.size(0), math.prod(row.shape[1:])) for row in rows]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        halo = self.halo_rows(packed, label=f"hop {self._hop} of {layer_name(layer)}")
        if not keep:  # what an earlier hop of this layer fetched is not asked for again
            self._fetched.clear()
        for tensor, row, part in zip(tensors, rows, halo.split([f.size(1) for f in flat], dim=1), strict=True):
            full = self.joined(row, part.reshape(part.size(0), *row.shape[1:]))
            self._fetched[id(tensor)] = (tensor, version_of(tensor), full.movedim(0, layer.node_dim))

    def _known(self, value: Tensor) -> Tensor | None:
        entry = self._fetched.get(id(value))
        if entry is None or entry[1] != version_of(value):
            return None
        # rows fetched under no_grad carry no gradient back
        wanted = value.requires_grad and torch.is_grad_enabled()
        return entry[2] if entry[2].requires_grad or not wanted else None

    @property
    def _has(self) -> str:
        """How many rows a layer gets on this rank, for complaints."""
        return f"owns {self.shard.num_owned} nodes"

    @property
    def num_local(self) -> int:
        """Rows of this rank that the running hop may read; more than :attr:`num_rows` where it computes fewer."""
        return self.num_rows

    def _check_rows(self, layer: MessagePassing, name: str, value: Tensor) -> None:
        if value.size(layer.node_dim) != self.num_local:
            raise InputError(
                f"{layer_name(layer)}: argument '{name}' of propagate has {value.size(layer.node_dim)} rows, but "
                f"rank {self.shard.rank} {self._has}; a tensor that holds a row for every node "
                "of the graph (an embedding table, say) cannot be distributed this way",
                of_one_rank=True,
            )
