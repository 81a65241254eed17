"""The pass of a layer for which everything is here: this rank's columns of all nodes, and the edges of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pygdist.hops.hop import Hop


@dataclass(frozen=True)
class SlicesPass:
    """A layer runs on columns of all nodes: its slice of them, or all of them if there is one rank.

    Attributes:
        num_rows: Nodes of all ranks; the layer puts out a row for each.
    """

    num_rows: int

    def run(self, hop: Hop) -> Tensor:
        """Run a hop of the layer: everything that it reads is here."""
        return hop.run(size=(self.num_rows, self.num_rows))
