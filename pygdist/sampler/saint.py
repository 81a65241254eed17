r"""Batches of induced subgraphs: GraphSAINT (Zeng et al., ICLR 2020), its three samplers and its normalisation.

A sampler that prefers some nodes biases losses and sums over neighbours. How often nodes and edges are sampled is
estimated beforehand, from :math:`N` subgraphs with counts :math:`C_v` and :math:`C_{u,v}` (Sec. 3.2), which gives

- ``node_norm`` :math:`= N / (C_v \, |V|)` with :math:`|V|` the part's training nodes: over batches, the mean of
  :math:`\sum_v` ``node_norm`` :math:`\cdot L_v` over training nodes :math:`v` is their mean loss
- ``edge_norm`` :math:`= C_v / C_{u,v}` of an edge from :math:`u` to :math:`v`: a layer that sums neighbours times
  ``edge_norm`` times the weight that the edge has in the whole part (:math:`1 / d_v` for a mean) gets the whole part's
  sum on average

PyG's ``GraphSAINTSampler`` needs torch_sparse. It divides by all nodes where this divides by those that train, has
:math:`C_u` in place of :math:`C_v`, gives an edge that was never sampled a norm of 10,000, with which it outweighs all
others in the first batch that has it, and its edge sampler prefers edges between large degrees, not small ones.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.kernels import CSR, transpose
from pygdist.sampler import _native
from pygdist.sampler.base import BatchLoader, MiniBatches, check_at_least, check_part, induced, load_all
from pygdist.sampler.csr_neighbors import check_seed
from pygdist.sampler.epoch import SharedEpoch

__all__ = ["SaintEdgeBatches", "SaintNodeBatches", "SaintWalkBatches", "norms"]

Nodes: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator], Nodes]
"""Draws the nodes of a subgraph, some of them several times."""

_NORMS, _BATCHES = 0, 1  # what random numbers are for


class _SaintBatches(MiniBatches):
    """What the three have in common; see :mod:`pygdist.sampler.saint`.

    Args:
        batch_size: How often a subgraph draws.
        num_steps: Subgraphs in an epoch.
        sample_coverage: Subgraphs are drawn for the normalisation until they hold so many times the rows of the part;
            0 leaves it out. The paper takes 50.
    """

    def __init__(self, batch_size: int = 6000, num_steps: int = 5, sample_coverage: int = 50) -> None:
        self.batch_size = check_at_least("batch_size", batch_size)
        self.num_steps = check_at_least("num_steps", num_steps)
        self.sample_coverage = check_at_least("sample_coverage", sample_coverage, 0)

    @abstractmethod
    def _draw(self, csr: CSR) -> Draw:
        """What draws nodes of the graph."""

    @override
    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        """See :meth:`MiniBatches.precompute`: ``node_norm`` and ``edge_norm``."""
        _native.require(type(self).__name__, csr)
        num_train = check_part(part, csr).numel()
        if not (self.sample_coverage and num_train):
            return {}
        found = norms(csr, self._draw(csr), self.sample_coverage, num_train=num_train, seed=check_seed(seed))
        return dict(zip(("node_norm", "edge_norm"), found, strict=True))

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """See :meth:`MiniBatches.loader`; in a batch there may be no training node."""
        _native.require(type(self).__name__, csr)
        seeds, epoch = check_part(part, csr), SharedEpoch()
        check_seed(seed)
        if not seeds.numel():
            return BatchLoader(part, [], epoch)
        if not ("node_norm" in part and "edge_norm" in part):
            part = copy.copy(part).update(self.precompute(part, csr, seed=seed))
        if "edge_norm" in part:
            part = copy.copy(part).update({"in_degree": csr.indptr.diff()})
        batches = _Subgraphs(csr, self._draw(csr), self.num_steps, seed, epoch)
        return BatchLoader(part, load_all(batches, num_workers), epoch)


class SaintNodeBatches(_SaintBatches):
    """GraphSAINT's node sampler: a node as often as edges leave it, and once more.

    The one more is the node's edge to itself in the paper's normalised matrix: nodes without edges are drawn, too.

    Args:
        batch_size: Nodes that a subgraph draws, with replacement.
        num_steps: Subgraphs in an epoch.
        sample_coverage: How many times each row is sampled, on average, to estimate the normalisation; 0: none.

    Raises:
        InputError: If a number is below 1, or the coverage below 0.

    Example:
        >>> batches = SaintNodeBatches(batch_size=6000, num_steps=5).loader(part, csr, seed=0)
        >>> loss = (batch.node_norm * losses)[batch.train_mask].sum()  # an estimate of the mean loss
    """

    @override
    def _draw(self, csr: CSR) -> Draw:
        return partial(_draw_nodes, csr.unpermuted(), self.batch_size)


class SaintEdgeBatches(_SaintBatches):
    """GraphSAINT's edge sampler: both ends of edges, of an edge from u to v with probability ~ 1/deg(u) + 1/deg(v).

    Degrees are those by which edges leave u and enter v. A node's edge to itself counts as one, so that nodes without
    others are drawn, too. Takes the transposed matrix besides the graph.

    Args:
        batch_size: Edges that a subgraph draws, with replacement.
        num_steps: Subgraphs in an epoch.
        sample_coverage: How many times each row is sampled, on average, to estimate the normalisation; 0: none.

    Raises:
        InputError: If a number is below 1, or the coverage below 0.
    """

    @override
    def _draw(self, csr: CSR) -> Draw:
        return partial(_draw_edges, csr.unpermuted(), transpose(csr.unpermuted()), self.batch_size)


class SaintWalkBatches(_SaintBatches):
    """GraphSAINT's random-walk sampler: nodes at random, and those on a walk from each against the edges' direction.

    That is where a layer's messages come from. A walk stays at a node that no edge leads to.

    Args:
        walk_length: Steps of a walk.
        batch_size: Walks of a subgraph.
        num_steps: Subgraphs in an epoch.
        sample_coverage: How many times each row is sampled, on average, to estimate the normalisation; 0: none.

    Raises:
        InputError: If a number is below 1, or the coverage below 0.
    """

    def __init__(
        self, walk_length: int = 2, batch_size: int = 6000, num_steps: int = 5, sample_coverage: int = 50
    ) -> None:
        super().__init__(batch_size, num_steps, sample_coverage)
        self.walk_length = check_at_least("walk_length", walk_length)

    @override
    def _draw(self, csr: CSR) -> Draw:
        return partial(_draw_walks, csr.unpermuted(), self.batch_size, self.walk_length)


def norms(csr: CSR, draw: Draw, sample_coverage: int, *, num_train: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights of losses and of edges; see :mod:`pygdist.sampler.saint`.

    Args:
        csr: In-edges of the part.
        draw: Draws the nodes of a subgraph.
        sample_coverage: Subgraphs are drawn until they hold so many times the rows of the part.
        num_train: Training nodes of the part.
        seed: Of the subgraphs.

    Returns:
        ``node_norm`` of shape ``(n,)`` and ``edge_norm`` of shape ``(E,)`` in the caller's order of edges; float32.
        What was never sampled counts as once: so often it is when it is used.
    """
    node_count = torch.zeros(csr.num_rows, dtype=torch.int64)
    edge_count = torch.zeros(csr.num_entries, dtype=torch.int32)
    entries = csr.unpermuted()
    num_samples = held = 0
    while held < csr.num_rows * sample_coverage:
        nodes = _distinct(draw, seed, _NORMS, 0, num_samples)
        node_count[nodes] += 1
        edge_count[_native.induce(entries, nodes).edge] += 1
        held += nodes.numel()
        num_samples += 1
    node_count.clamp_(min=1)
    edge_norm = node_count[entries.row_index().long()] / edge_count.clamp_(min=1)
    if csr.perm is not None:
        in_order = torch.empty_like(edge_norm)
        in_order[csr.perm.long()] = edge_norm
        edge_norm = in_order
    return num_samples / node_count / num_train, edge_norm


class _Subgraphs(Dataset[Data]):
    """The batches of an epoch by their numbers."""

    def __init__(self, csr: CSR, draw: Draw, num_steps: int, seed: int, epoch: SharedEpoch) -> None:
        self._csr, self._draw, self._num_steps, self._seed, self._epoch = csr, draw, num_steps, seed, epoch

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, number: int) -> Data:
        return induced(self._csr, _distinct(self._draw, self._seed, _BATCHES, self._epoch.number, number))


def _distinct(draw: Draw, *key: int) -> Tensor:
    """The nodes of a subgraph, ascending: owned rows first, as in the part."""
    return torch.from_numpy(np.unique(draw(np.random.default_rng(key))))


def _draw_nodes(csr: CSR, count: int, rng: np.random.Generator) -> Nodes:
    nodes: Nodes = rng.integers(csr.num_entries + csr.num_rows, size=count) - csr.num_entries
    of_an_edge = nodes < 0
    nodes[of_an_edge] = csr.index.numpy()[nodes[of_an_edge]]  # from the end
    return nodes


def _draw_edges(csr: CSR, transposed: CSR, count: int, rng: np.random.Generator) -> Nodes:
    # an edge that is drawn evenly from those at a node drawn evenly has a probability ~ 1 / degree
    by_target = int(rng.binomial(count, 0.5))
    ends = []
    for matrix, number in ((csr, by_target), (transposed, count - by_target)):
        nodes = rng.integers(csr.num_rows, size=number)
        ends += [nodes, _step(matrix, nodes, rng, may_stay=True)]
    return np.concatenate(ends)


def _draw_walks(csr: CSR, count: int, length: int, rng: np.random.Generator) -> Nodes:
    visited = [rng.integers(csr.num_rows, size=count)]
    for _ in range(length):
        visited.append(_step(csr, visited[-1], rng, may_stay=False))
    return np.concatenate(visited)


def _step(csr: CSR, nodes: Nodes, rng: np.random.Generator, *, may_stay: bool) -> Nodes:
    """A random neighbour of each node, or itself: where it has none, and if it may stay as often as any neighbour."""
    indptr = csr.indptr.numpy()
    degree = indptr[nodes + 1] - indptr[nodes]
    place = rng.integers(np.maximum(degree + may_stay, 1))
    moves = place < degree
    out = nodes.copy()
    out[moves] = csr.index.numpy()[indptr[nodes[moves]] + place[moves]]
    return out
