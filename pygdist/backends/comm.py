"""``comm``: every hop fetches the halo rows that it needs from their owners (DepComm of NeutronStar, Sec. 2.2).

Exact. Nothing is computed twice, everything is communicated; rows that have arrived are aggregated while the others
travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Backend
from pygdist.backends.fetching.fetcher import Fetcher, FetchOptions, WireDtype, norms_refused
from pygdist.backends.passes.fetched import FetchedPass
from pygdist.hops.hop import Deferred, Hop


class CommBackend(Backend):
    """Fetch halo rows in every hop (DepComm; NeutronStar, SIGMOD 2022, Sec. 2.2 and 4.3).

    A subclass may fetch rows in its own way (:meth:`halo_rows`); its hops then wait until all rows are here.

    Args:
        ring: Exchange with one peer after the other, not with all at once.
        overlap: Aggregate rows that are here while others travel.
        wire_dtype: ``"bfloat16"`` halves the bytes of rows and gradients; the backend is then no longer exact.
        halo_gib: Limit, in GiB, of the memory that other ranks' rows take at a time on each rank; no limit by default.
            :class:`~pygdist.backends.fetching.fetcher.FetchOptions` says more of all four.
    """

    name = "comm"
    per_graph: ClassVar[tuple[str, ...]] = ("_fetcher", "_pass")
    _fetcher: Fetcher | None = None
    _pass: FetchedPass | None = None

    def __init__(
        self,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
        halo_gib: float | None = None,
    ) -> None:
        super().__init__()
        self.options = FetchOptions(ring=ring, overlap=overlap, wire_dtype=wire_dtype, halo_gib=halo_gib)
        if self.options.approximation:
            self.abilities = replace(self.abilities, exact=False, approximation=self.options.approximation)

    @override
    def exact_case(self, num_hops: int) -> CommBackend | None:
        if not self.abilities.exact and not self.options.approximation:  # a subclass that gives up something else
            return None
        copy = self._unbound()
        copy.options = replace(self.options, wire_dtype=None)
        return copy

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        return norms_refused(layer)

    # -- a hop ---------------------------------------------------------------------------------------------------------

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return self._running.propagate(hop)

    @override
    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        return self._running.edge_updater(hop)

    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        r"""Fetch the rank's halo rows from their owners; a subclass with another wire format overrides this.

        Args:
            x: Rows that this rank owns.
            label: Names the exchange in messages.

        Shapes:
            ``x`` is :math:`(n, F)`, the result :math:`(h, F)`, in the order of the shard's halo. Differentiable: the
            backward pass returns the gradients of the copies to the owners.
        """
        return self.fetcher.exchange_rows(x, self.shard.plan, label)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return self._running.source_rows(x)

    # -- a pass --------------------------------------------------------------------------------------------------------

    @override
    def begin_forward(self) -> None:
        self._running.begin()
        self.fetcher.begin_pass()

    @override
    def begin_hop(self) -> None:
        self._running.begin_hop()

    @override
    def end_forward(self) -> None:
        if self._fetcher is not None:  # a model that is not bound fails before
            self._fetcher.end_pass()

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._running.run_layer(layer, forward, args, kwargs)

    # -- a graph -------------------------------------------------------------------------------------------------------

    @override
    def unbind(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        super().unbind()

    @property
    def fetcher(self) -> Fetcher:
        """Fetches this rank's halo rows."""
        if self._fetcher is None:
            self._fetcher = Fetcher(self.shard, self.communicator, self.options, lambda: self.kept.first_hop.results)
        return self._fetcher

    @property
    def _running(self) -> FetchedPass:
        if self._pass is None:
            as_usual = type(self).halo_rows is CommBackend.halo_rows
            fetch = None if as_usual else lambda x, label: self.halo_rows(x, label=label)
            self._pass = FetchedPass(self.fetcher, fetch)
        return self._pass
