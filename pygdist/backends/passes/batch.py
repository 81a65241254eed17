"""The pass over a mini-batch of a part: a graph of its own, on which layers run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.passes.edge_norm import EdgeNorm
from pygdist.hops.arguments import edges_among, named_values
from pygdist.hops.hop import Deferred, Hop
from pygdist.hops.layer import options_of


def num_nodes_of_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of nodes of the mini-batch that a model is called with.

    The edges say it. Without edges, the rows of the first argument that has rows must: it may be anything.
    """
    if edges := edges_among(model.forward, args, kwargs):
        return edges[0].num_dst
    values = (value for _, value in named_values(model.forward, args, kwargs))
    return next((one.size(0) for one in values if isinstance(one, Tensor) and one.dim()), 0)


class BatchPass:
    """A forward pass over a mini-batch.

    Args:
        num_rows: Nodes of the batch.
        norm: Weights that correct for the sampling of the edges; ``None`` for no correction.
        in_weights: True if the edge weights that the model passes to its layers hold the norm.
        without_norm: Called with a layer whose hop the norm cannot correct.
    """

    alone = False  # sums and maxima over ranks are left to the backend

    def __init__(
        self,
        num_rows: int,
        norm: EdgeNorm | None,
        *,
        in_weights: bool,
        without_norm: Callable[[MessagePassing], None],
    ) -> None:
        self.num_rows = self.num_sources = num_rows
        self.norm = norm
        self._in_weights, self._without_norm = in_weights, without_norm

    def begin_hop(self) -> None:
        """Do nothing: hops of a batch are not counted."""

    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer. A sum or mean that takes edge weights and gets none gets the norm as weights."""
        options, before = {"cached": False}, self._in_weights  # the next batch is another graph
        if self.norm is not None:
            args, kwargs, norm_alone = self.norm.to_layer(layer, forward, args, kwargs)
            self._in_weights |= norm_alone
            if norm_alone:
                # without edge weights PyG ignores ``improved``: the norm, passed as weights, must not switch it on
                options["improved"] = False
        try:
            with options_of(layer, **options):
                return forward(layer, *args, **kwargs)
        finally:
            self._in_weights = before

    def propagate(self, hop: Hop) -> Tensor:
        """Run a hop, weighted by the norm where that corrects for the sampling."""
        if self.norm is not None:
            hop, made_up = self.norm.on(hop, in_weights=self._in_weights)
            if not made_up:
                self._without_norm(hop.layer)
        return hop.run()

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater``."""
        return hop.run()

    def source_rows(self, x: Tensor) -> Tensor:
        """The rows themselves: all nodes of the batch are here."""
        return x

    def owned_rows(self, x: Tensor) -> Tensor:
        """All rows."""
        return x
