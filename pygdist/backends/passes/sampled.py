"""The pass over a sampled neighbourhood: each layer computes the rows that a later one reads, as few as that takes.

The seeds are needed after the last layer, and the nodes of *k* hops before the last *k* layers. PyG computes all rows
in each layer, unless the model calls ``trim_to_layer``; at usual fan-outs nine of ten rows are never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.passes.edge_norm import in_degree_facts, in_degrees
from pygdist.backends.passes.part import PartPass
from pygdist.backends.passes.rehearsal import ModelFacts
from pygdist.backends.passes.rows import Rows, edges_into
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Slot
from pygdist.hops.arguments import first_rows, with_rows
from pygdist.hops.cuts import InEdges


class AllRowsNeededError(InputError):
    """The model looks at all nodes at once, as a norm over nodes does, so no row may be left out."""

    def __init__(self) -> None:
        super().__init__(
            "the model looks at all nodes of a batch at once, or normalises weights that it computes, which it did not "
            "when it was tried; call undistribute(model) and distribute(model) when the model changes",
            of_one_rank=True,
        )


@dataclass(frozen=True)
class SampledHops:
    """A sampled neighbourhood.

    Attributes:
        num_nodes: Number of seeds, then of the nodes that each hop adds.
        edge_weight: Weights of its edges in the order of the adjacency; ``None`` if they have none.
        blocks: The edges of all ranks' batches, by rank, where all compute the first layer together.
    """

    num_nodes: tuple[int, ...]
    edge_weight: Tensor | None = None
    blocks: tuple[InEdges, ...] = ()

    @property
    def num_seeds(self) -> int:
        """Number of seeds, which come first."""
        return self.num_nodes[0]

    def rows(self, adjacency: Adjacency, num_hops: int) -> Rows:
        """Return the rows that a model of ``num_hops`` hops computes, hop by hop."""
        ends = list(itertools.accumulate(self.num_nodes))
        later = (ends[min(num_hops - hop, len(ends) - 1)] for hop in range(1, num_hops + 1))
        n_id = torch.arange(ends[-1], device=adjacency.device)
        num_seed_edges = edges_into(adjacency, self.num_seeds)
        return Rows.all_here(n_id, self.num_seeds, (ends[-1], *later), adjacency, num_own_edges=num_seed_edges)


SAMPLED_HOPS = Slot[SampledHops]("sampled hops")


class SampledPass(PartPass):
    """A pass over a sampled neighbourhood, in which no other rank takes part, unless norms ask all ranks.

    Args:
        hops: The neighbourhood.
        rows: The rows to compute.
        facts: The model.
        ranks: Norms take their statistics over the rows of these ranks' batches that are computed; ``None`` if norms
            look at all rows of this one, so that none may be left out.

    Raises:
        AllRowsNeededError: In a pass of a model that looks at all nodes at once.
    """

    def __init__(self, hops: SampledHops, rows: Rows, facts: ModelFacts, ranks: Communicator | None = None) -> None:
        super().__init__(rows, facts, Communicator(), None, alone=True)
        self._sampled, self._ranks = hops, ranks
        self._in_rest = False  # of the first layer
        self._counts: dict[int, int] = {}  # by the number of hops before: rows of all ranks
        self._degrees: Tensor | None = None

    @property
    def edge_weight(self) -> Tensor | None:
        """Weights of the neighbourhood's edges."""
        return self._sampled.edge_weight

    @property
    def blocks(self) -> list[InEdges]:
        """The edges of all ranks' batches, by rank."""
        return list(self._sampled.blocks)

    def placed(self, layer: MessagePassing, rest: Callable[[Any, Tensor], Tensor], total: Tensor) -> Tensor:
        """Count the hops of a layer whose sum over ranks has come; run its rest, and return the rows of its output.

        Args:
            layer: The layer.
            rest: Called with the layer and the total.
            total: The sum over ranks; this pass needs its first rows.
        """
        self.begin_module(layer)
        self._hops += self.facts.hops_of.get(id(layer), 1)
        self._in_rest = True
        try:
            out = rest(layer, total[: self._num_computed])
        finally:
            self._in_rest = False
        if self.facts.shrinks:
            return out[: self._computed(self._hops)]
        return with_rows(layer, out, (out.size(0),), self.rows.num_rows)

    @override
    def source_rows(self, x: Tensor) -> NoReturn:
        raise AllRowsNeededError

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        if self._ranks is None:
            raise AllRowsNeededError
        return x[: self._num_computed]

    @property
    @override
    def num_rows(self) -> int:
        return self._num_computed if self._in_rest else super().num_rows

    @property
    def _num_computed(self) -> int:
        """Rows that the last hop computed; where layers are no chain, copies of the first row follow."""
        return self._computed(self._hops)

    @property
    def num_nodes(self) -> int:
        """Rows that the last hop computed, summed over ranks. Every rank makes the call."""
        if self._ranks is None:
            return self.num_rows
        if len(self._sampled.blocks) == self._ranks.world_size:  # their sizes came with them
            return sum(one.rows_after(min(self._hops, len(one.ends))) for one in self._sampled.blocks)
        if self._hops not in self._counts:
            self._counts[self._hops] = int(self._ranks.gather([float(self._num_computed)]).sum())
        return self._counts[self._hops]

    @override
    def owned_of(self, out: Tensor) -> Tensor:
        """The seeds' rows; tensors of edges stay as they are, as of a batch."""
        return first_rows(out, self.rows.computed, self.rows.num_owned) if out.dim() else out

    def source_degrees(self, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor:
        """In-degrees in the whole neighbourhood of the sources of the running hop.

        Raises:
            AllRowsNeededError: If they are normalised by weights that the model computes.
        """
        weight = self._sampled.edge_weight
        is_of_graph = weight is not None and edge_weight is not None and edge_weight.data_ptr() == weight.data_ptr()
        if edge_weight is not None and edge_weight.numel() and not is_of_graph:
            raise AllRowsNeededError
        if self._degrees is None:
            self._degrees = in_degree_facts(self.rows.adjacency.csr(), weight)
        return in_degrees(self._degrees, edge_weight is not None, loop_weight)[: self.num_sources]
