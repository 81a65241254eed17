"""``comm``: every hop fetches the halo rows that it needs from their owners (DepComm of NeutronStar, Sec. 2.2).

Exact. No row is computed twice: every remote row is fetched. A rank aggregates the rows that have arrived while other
rows travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.fetching.fetcher import Fetcher, FetchingBackend, FetchOptions
from pygdist.backends.passes.fetched import FetchedPass
from pygdist.comm.wire import WireDtype


class CommBackend(FetchingBackend):
    """Fetch halo rows in every hop (DepComm; NeutronStar, SIGMOD 2022, Sec. 2.2 and 4.3).

    A subclass may fetch rows in its own way (:meth:`halo_rows`); its hops then wait until all rows are here.

    Args:
        ring: Exchange rows with one peer after the other, not with all peers at once.
        overlap: Aggregate rows that have arrived while others travel, in hops that can be computed piece by piece.
            Other hops wait for all rows: those of layers with a ``message`` of their own, attention with edge
            attributes or dropout, and LSTM aggregation.
        wire_dtype: ``"bfloat16"`` halves the bytes of rows and gradients; the backend is then no longer exact.
        halo_gib: Limit, in GiB, of the memory that other ranks' rows take at a time on each rank, in hops that can be
            computed piece by piece (see ``overlap``). Other hops hold all rows at once. No limit by default.

    Raises:
        InputError: If ``halo_gib`` is not positive, or ``wire_dtype`` is unknown.
    """

    name = "comm"
    per_graph: ClassVar[tuple[str, ...]] = ("_pass",)
    _pass: FetchedPass | None = None

    def __init__(
        self,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
        halo_gib: float | None = None,
    ) -> None:
        super().__init__(FetchOptions(ring=ring, overlap=overlap, wire_dtype=wire_dtype, halo_gib=halo_gib))

    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        r"""Fetch the rank's halo rows from their owners; a subclass with another wire format overrides this.

        Args:
            x: Rows that this rank owns.
            label: Name of the exchange in messages.

        Shapes:
            ``x`` is :math:`(n, F)`, the result :math:`(h, F)`, in the order of the shard's halo. Differentiable: the
            backward pass returns the gradients of the copies to the owners.
        """
        return self.fetcher.exchange_rows(x, self.shard.plan, label)

    # -- a pass --------------------------------------------------------------------------------------------------------

    @override
    def begin_forward(self) -> None:
        self._running().begin()
        self.fetcher.begin_pass()

    @override
    def begin_hop(self) -> None:
        self._running().begin_hop()

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._running().run_layer(layer, forward, args, kwargs)

    # -- a graph -------------------------------------------------------------------------------------------------------

    @property
    def fetcher(self) -> Fetcher:
        """The object that fetches this rank's halo rows."""
        if self._fetcher is None:
            self._fetcher = Fetcher(self.shard, self.communicator, self.options, lambda: self.kept.first_hop.results)
        return self._fetcher

    @override
    def _running(self, what: str = "a layer") -> FetchedPass:
        if self._pass is None:
            as_usual = type(self).halo_rows is CommBackend.halo_rows
            fetch = None if as_usual else lambda x, label: self.halo_rows(x, label=label)
            self._pass = FetchedPass(self.fetcher, fetch)
        return self._pass
