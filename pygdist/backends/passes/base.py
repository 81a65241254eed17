"""The contract of passes: the answers that depend on what the model runs on now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.hops.hop import Deferred, Hop

Forward = Callable[..., Any]
"""A layer's ``forward``, called as ``forward(layer, *args, **kwargs)``."""


class Pass(Protocol):
    """The model runs on something: a rank's part, a few nodes that it is tried on, or a mini-batch.

    Attributes:
        alone: True if no other rank takes part: nothing is exchanged.
    """

    alone: bool

    @property
    def num_rows(self) -> int:
        """Rows that a layer puts out now."""

    @property
    def num_sources(self) -> int:
        """Rows that the edges of the running hop may start from."""

    def begin_hop(self) -> None:
        """Count a hop, also one whose kept result is used."""

    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer's ``forward``."""

    def propagate(self, hop: Hop) -> Tensor:
        """Run a hop."""

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater``."""

    def source_rows(self, x: Tensor) -> Tensor:
        """One row per row of the pass in, one per source of its edges out."""

    def owned_rows(self, x: Tensor) -> Tensor:
        """The rows over which norms take statistics."""
