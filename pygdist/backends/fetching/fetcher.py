"""Fetches the rows that hops read from their owners, and hands the hops all their source rows.

A hop makes one differentiable exchange for all tensors that the layer reads at sources; gradients travel back in the
same way, and the owner sums them. If the hop can be computed piece by piece, it makes an
:class:`~pygdist.backends.fetching.exchange.Exchange` instead, which aggregates rows as they arrive.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Backend
from pygdist.backends.fetching.adjacency import SOURCE_GROUPS
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.exchange import Exchange
from pygdist.backends.passes.base import Pass
from pygdist.comm import Communicator, ExchangePlan
from pygdist.comm.wire import WireDtype, narrowed, wire_of
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.identity import version_of
from pygdist.graph.memo import Memo
from pygdist.hops.fused_attention import summed_as_they_arrive
from pygdist.hops.hop import Deferred, Hop, check_rows, source_of
from pygdist.hops.layer import norms_refused
from pygdist.memory.overflow import Overflow, writable

_GIB = 2**30
_DENSE = 32  # edges for each node
_MOST_MESSAGES, _ROWS_OF_A_MESSAGE = 4, 1024
_TOO_SMALL = 4  # pieces of so many times fewer rows than there is memory for would cost too many exchanges


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Options of backends that fetch rows.

    Attributes:
        ring: Exchange rows with one peer after the other, so that rows arrive in turns, and no rank receives from all
            others at once (NeutronStar, Sec. 4.3); otherwise with all peers at once.
        overlap: Aggregate the rows of one rank while the rows of the next travel; in the backward pass, send gradients
            while others are computed. Otherwise a hop waits until all rows are here. Layers whose hops cannot be
            computed piece by piece always wait: layers with a ``message`` of their own, attention with edge attributes
            or dropout, LSTM aggregation.
        wire_dtype: ``"bfloat16"`` halves the bytes of rows and gradients; the backend is then no longer exact.
        halo_gib: Limit, in GiB, of the memory that other ranks' rows take at a time on each rank, in hops that can be
            computed piece by piece; ``None`` for no limit. Above the limit rows arrive in pieces, and each piece is
            aggregated before the next arrives; in the backward pass attention fetches the pieces once more, maxima and
            minima twice. Tensors that the model keeps for the backward pass then wait in the host's memory or, if the
            device is the host, in files beside the partitioned graph; so do the edges of a piece until its rows arrive.

    Raises:
        InputError: If ``halo_gib`` is not positive, or ``wire_dtype`` is unknown.
    """

    ring: bool = True
    overlap: bool = True
    wire_dtype: WireDtype | None = None
    halo_gib: float | None = None

    def __post_init__(self) -> None:
        if self.halo_gib is not None and not 0 < self.halo_gib < math.inf:
            raise InputError(f"halo_gib is {self.halo_gib}, expected a finite number of GiB above 0")
        wire_of(self.wire_dtype)

    @property
    def approximation(self) -> str:
        """The clause that names the exactness given up for fewer bytes; empty if the exchange is exact."""
        return narrowed(self.wire_dtype)

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype in which rows travel; ``None`` for their own."""
        return wire_of(self.wire_dtype)


@dataclass(frozen=True, kw_only=True)
class HopRows:
    """Numbers of rows around one hop on this rank.

    Attributes:
        num_owned: Number of owned rows, which come first.
        num_local: Number of this rank's rows that the hop may read.
        num_rows: Number of rows that the hop computes.
        num_sources: Number of source rows of the hop's edges.
        arrival: The rows that arrive from other ranks; ``None`` if no rank fetches any.
        number: The hop's place in the forward pass, from 1.
        reason: A text for messages: why the rank has ``num_local`` rows.
        appended: True if the rows that arrive are the shard's halo, in order.
    """

    num_owned: int
    num_local: int
    num_rows: int
    num_sources: int
    arrival: Arrival | None
    number: int
    reason: str
    appended: bool = False

    @classmethod
    def of_shard(cls, shard: Shard, number: int, arrival: Arrival | None = None) -> HopRows:
        """The rows around hop ``number`` where all of the shard's halo is fetched, and no row computed again."""
        return cls(
            num_owned=shard.num_owned, num_local=shard.num_owned, num_rows=shard.num_owned,
            num_sources=shard.num_owned + shard.num_halo, arrival=arrival, number=number,
            reason=f"rank {shard.rank} owns {shard.num_owned} nodes", appended=True,
        )  # fmt: skip

    def label(self, hop: Hop) -> str:
        """Name the hop in messages."""
        return f"hop {self.number} of {hop.layer_name}"

    def check(self, hop: Hop, name: str, x: Tensor) -> None:
        """Refuse an argument that does not hold the rows of this rank.

        Raises:
            InputError: Naming the layer, the argument and the rank.
        """
        check_rows(hop, name, x, self.num_local, self.reason)

    def joined(self, x: Tensor, halo: Tensor | None) -> Tensor:
        """Return one row per source of the hop's edges, from this rank's rows and those that arrived."""
        if self.appended and halo is not None:
            return torch.cat([x, halo])
        missing = self.num_sources - x.size(0)
        if missing:
            x = torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
        if self.arrival is None or halo is None:
            return x
        # also with no rows: every rank takes part in the exchange of the backward pass
        return x.index_copy(0, self.arrival.position, halo)


class Fetcher:
    """Fetches rows for the hops of one rank on one graph.

    Args:
        shard: The rank's shard.
        communicator: The ranks.
        options: Options of the exchange.
        held: Returns the tensors that stay on the device from pass to pass, beside the shard's features.
    """

    small: int = Overflow.small

    def __init__(
        self, shard: Shard, communicator: Communicator, options: FetchOptions, held: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.shard, self.communicator, self.options = shard, communicator, options
        self._held = held
        # by arrival: itself, the most rows of a pair of ranks, and its pieces by the most rows of a piece
        self._pieces: dict[int, tuple[Arrival, int, dict[int, tuple[Arrival, ...]]]] = {}
        # rows fetched for the layer that is running: GATv2 reads the same rows in edge_updater and in propagate
        self._fetched_for: MessagePassing | None = None
        self._fetched: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._spilling = contextlib.ExitStack()  # open while a forward pass of the model spills what it keeps
        self._in_pass = False
        self._overflow: Overflow | None = None

    # -- passes --------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a forward pass of the model."""
        self.forget_rows()
        self._spilling.close()  # of a pass that was interrupted
        self._spilling.enter_context(self._spills())
        self._in_pass = True

    def end_pass(self) -> None:
        """End a forward pass."""
        self._spilling.close()
        self._in_pass = False
        self.forget_rows()

    def around_layer(self) -> contextlib.AbstractContextManager[Any]:
        """Spill what a layer keeps for the backward pass, if it runs outside a forward pass of the model."""
        return contextlib.nullcontext() if self._in_pass else self._spills()

    def close(self) -> None:
        """Release everything, also the groups of edges that the graph keeps for this fetcher."""
        self._spilling.close()
        self.shard.adjacency.slot(SOURCE_GROUPS, Memo).clear()

    def forget_rows(self) -> None:
        """Release the fetched rows."""
        self._fetched_for = None
        self._fetched.clear()

    def _spills(self) -> contextlib.AbstractContextManager[Any]:
        """Keep tensors for the backward pass where there is memory, if the device's is limited."""
        if self.options.halo_gib is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._spill(self.options.halo_gib).of_the_backward_pass([self.shard.x, *self._held()])

    def _spill(self, halo_gib: float) -> Overflow:
        if self._overflow is None:
            shard = self.shard
            self._overflow = Overflow(shard.n_id.device, int(halo_gib * _GIB), writable(shard.folder), self.small)
        return self._overflow

    # -- rows as they arrive -------------------------------------------------------------------------------------------

    def by_group(self, hop: Hop, rows: HopRows) -> Exchange | None:
        """Return the exchange with which ``hop`` aggregates rows as they arrive; ``None`` if it needs all at once."""
        read = {} if rows.arrival is None else self._read_as_they_arrive(hop)
        if rows.arrival is None or not read:
            return None
        for name, x in read.items():
            rows.check(hop, name, x)
        options, label = self.options, rows.label(hop)
        row_bytes = sum(math.prod(x.shape[1:]) * (options.wire or x.dtype).itemsize for x in read.values())
        pieces = self._in_pieces(rows.arrival, row_bytes)
        spill = self._spill(options.halo_gib) if options.halo_gib is not None and len(pieces) > 1 else None
        return Exchange(
            communicator=self.communicator,
            pieces=pieces,
            label=label,
            ring=options.ring,
            overlap=options.overlap,
            wire=options.wire,
            messages=self._messages,
            overflow=spill,
            whole=lambda x: rows.joined(x, self.exchanged(x, rows, label)),
        )

    def _read_as_they_arrive(self, hop: Hop) -> dict[str, Tensor]:
        """Rows that the hop may read piece by piece; none if it may not, or if they are here."""
        if not isinstance(hop.edge_index, Adjacency):
            return {}
        names = summed_as_they_arrive(hop) or (("x",) if hop.is_plain_product else ())
        read = {name: source_of(hop.arguments.get(name)) for name in names}
        here = any(not isinstance(x, Tensor) or self._fetched_rows(x) is not None for x in read.values())
        return {} if here else read

    @property
    def _messages(self) -> int:
        """In how many messages the rows of a rank travel.

        With many edges to each row there is much to aggregate while the next message travels; with few, each message is
        one more pass over the destinations for next to nothing.
        """
        shard = self.shard
        if not self.options.overlap or shard.num_edges < _DENSE * shard.num_nodes:
            return 1
        return min(_MOST_MESSAGES, max(1, shard.num_nodes // shard.num_parts // _ROWS_OF_A_MESSAGE))

    def _in_pieces(self, arrival: Arrival, row_bytes: int) -> tuple[Arrival, ...]:
        """Cut an arrival into pieces that fit in ``halo_gib``; as many on all ranks."""
        plan, halo_gib = arrival.plan, self.options.halo_gib
        if id(arrival) not in self._pieces:
            most = max(plan.send_counts + plan.recv_counts) if halo_gib is not None else 0
            most = most if halo_gib is None else int(self.communicator.gather([float(most)]).max())
            self._pieces[id(arrival)] = (arrival, most, {most: (arrival,)})
        _, most, cuts = self._pieces[id(arrival)]
        if halo_gib is None:
            return cuts[most]
        peers = len(plan.send_counts) - 1
        fits = int(halo_gib * _GIB) // (max(row_bytes, 1) * peers)  # of each pair of ranks
        rows = min(max(fits, 1), most)
        # pieces that were cut for somewhat wider rows will do: a hop's edges are held once for each way to cut them
        cut = max((one for one in cuts if rows // _TOO_SMALL <= one <= rows), default=None)
        if cut is None:
            cut = rows
            cuts[rows] = tuple(arrival.piece(first, rows) for first in range(0, most, rows))
        return cuts[cut]

    # -- all rows at once ----------------------------------------------------------------------------------------------

    def rows_of(
        self, hop: Hop, rows: HopRows, halo_rows: Callable[[Tensor, str], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return one row per source of the edges, for each tensor in ``hop.sources``; one exchange per dtype.

        Args:
            hop: The hop.
            rows: The rows around it.
            halo_rows: Fetches rows in another way than :meth:`exchanged`; called with this rank's rows and a label.
        """
        if hop.layer is not self._fetched_for:
            self.forget_rows()
            self._fetched_for = hop.layer
        missing: dict[torch.dtype, list[Tensor]] = {}
        for name, x in hop.sources.items():
            rows.check(hop, name, x)
            if self._fetched_rows(x) is None and all(x is not other for other in missing.get(x.dtype, [])):
                missing.setdefault(x.dtype, []).append(x)
        keep = any(self._fetched_rows(x) is not None for x in hop.sources.values())
        for tensors in missing.values():
            if not keep:  # what an earlier hop of this layer fetched is not asked for again
                self._fetched.clear()
            self._fetch(hop, tensors, rows, halo_rows or (lambda x, label: self.exchanged(x, rows, label)))
            keep = True
        return {name: self._fetched[id(x)][2] for name, x in hop.sources.items()}

    def _fetch(
        self, hop: Hop, tensors: list[Tensor], rows: HopRows, halo_rows: Callable[[Tensor, str], Tensor]
    ) -> None:
        """Fetch the rows of tensors of one dtype together."""
        dim = hop.layer.node_dim  # not the first in some layers (ARMA stacks, static graphs)
        moved = [tensor.movedim(dim, 0) for tensor in tensors]
        flat = [one.reshape(one.size(0), math.prod(one.shape[1:])) for one in moved]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        halo = halo_rows(packed, rows.label(hop)).split([one.size(1) for one in flat], dim=1)
        for tensor, local, part in zip(tensors, moved, halo, strict=True):
            whole = rows.joined(local, part.reshape(part.size(0), *local.shape[1:]))
            self._fetched[id(tensor)] = (tensor, version_of(tensor), whole.movedim(0, dim))

    def _fetched_rows(self, x: Tensor) -> Tensor | None:
        entry = self._fetched.get(id(x))
        if entry is None or entry[1] != version_of(x):
            return None
        # rows fetched under no_grad carry no gradient back
        graded = x.requires_grad and torch.is_grad_enabled()
        return entry[2] if entry[2].requires_grad or not graded else None

    def exchanged(self, x: Tensor, rows: HopRows, label: str) -> Tensor:
        """Fetch the rows that arrive for a hop from their owners.

        Args:
            x: Rows of this rank.
            rows: The rows around the hop.
            label: Name of the exchange in messages.

        Shapes:
            ``x`` is :math:`(n, F)`, the result :math:`(h, F)`, in the order of the arrival. Differentiable: the
            backward pass returns the gradients of the copies to the owners.
        """
        if rows.appended:
            return self.exchange_rows(x, self.shard.plan, label)
        if rows.arrival is None:
            return x.new_empty((0, *x.shape[1:]))
        return self.exchange_rows(x[: rows.num_owned], rows.arrival.plan, label)

    def exchange_rows(self, x: Tensor, plan: ExchangePlan, label: str) -> Tensor:
        """Exchange owned rows by ``plan``, in the wire's dtype."""
        wide = x.is_floating_point() and x.element_size() > 2  # ids must not be rounded
        wire = self.options.wire if wide else None
        return self.communicator.exchange_rows(x, plan, label=label, ring=self.options.ring, wire=wire)


class FetchingBackend(Backend):
    """A backend that fetches all or some remote rows.

    Args:
        options: Options of the exchange.
    """

    per_graph: ClassVar[tuple[str, ...]] = ("_fetcher",)
    _fetcher: Fetcher | None = None

    def __init__(self, options: FetchOptions) -> None:
        super().__init__()
        self.options = options
        if options.approximation:
            self.abilities = replace(self.abilities, exact=False, approximation=options.approximation)

    @override
    def exact_case(self, num_hops: int) -> FetchingBackend | None:
        if not self.abilities.exact and not self.options.approximation:  # a subclass that gives up something else
            return None
        copy = self._unbound()
        copy.options = replace(self.options, wire_dtype=None)
        return copy

    @abstractmethod
    def _running(self, what: str) -> Pass:
        """Return the pass that runs; ``what`` runs on it, such as the name of a layer."""

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return self._running(hop.layer_name).propagate(hop)

    @override
    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        return self._running(hop.layer_name).edge_updater(hop)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return self._running("a layer").source_rows(x)

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        return norms_refused(layer)

    @override
    def end_forward(self) -> None:
        if self._fetcher is not None:  # a model that is not bound fails before
            self._fetcher.end_pass()

    @override
    def unbind(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        super().unbind()
