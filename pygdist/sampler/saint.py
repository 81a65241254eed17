r"""Batches of induced subgraphs: GraphSAINT (Zeng et al., ICLR 2020), its three samplers and its normalisation.

A sampler that prefers some nodes biases losses and sums over neighbours. The frequencies of nodes and edges are
estimated beforehand from :math:`N` subgraphs, with counts :math:`C_v` and :math:`C_{u,v}` (Sec. 3.2). That gives

- ``node_norm`` :math:`= N / (C_v \, |V|)` with :math:`|V|` the part's training nodes: over batches, the mean of
  :math:`\sum_v` ``node_norm`` :math:`\cdot L_v` over training nodes :math:`v` is their mean loss
- ``edge_norm`` :math:`= C_v / C_{u,v}` of an edge from :math:`u` to :math:`v`: a layer that sums neighbours times
  ``edge_norm`` times the weight of the edge in the whole part (:math:`1 / d_v` for a mean) gets, on average, the sum in
  the whole part

PyG's ``GraphSAINTSampler`` needs torch_sparse and differs: it divides by all nodes instead of the training nodes, has
:math:`C_u` in place of :math:`C_v`, gives an edge that was never sampled a norm of 10,000, so that it outweighs all
others in its first batch, and its edge sampler prefers edges between large degrees instead of small ones.
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
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.graph.streams.sorting import distinct
from pygdist.kernels import CSR, transpose
from pygdist.sampler import _native
from pygdist.sampler.base import BatchLoader, InducedBatches, MiniBatches, check_at_least, check_part, load_all
from pygdist.sampler.csr_neighbors import check_seed
from pygdist.sampler.epoch import SharedEpoch

Nodes: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator], Nodes]
"""Draws the nodes of a subgraph; a node may come several times."""

_NORMS, _BATCHES = 0, 1  # keys of the random numbers for either


class _SaintBatches(MiniBatches):
    """The base class of the three samplers; see :mod:`pygdist.sampler.saint`.

    Args:
        batch_size: Number of draws for a subgraph.
        num_steps: Subgraphs in an epoch.
        sample_coverage: Draw subgraphs for the normalisation until they have this many times the rows of the part; 0
            for no normalisation. The paper takes 50.
    """

    def __init__(self, batch_size: int = 6000, num_steps: int = 5, sample_coverage: int = 50) -> None:
        self.batch_size = check_at_least("batch_size", batch_size)
        self.num_steps = check_at_least("num_steps", num_steps)
        self.sample_coverage = check_at_least("sample_coverage", sample_coverage, 0)

    @abstractmethod
    def _draw(self, csr: CSR) -> Draw:
        """Return the function that draws nodes of the graph."""

    @override
    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        """Compute ``node_norm`` and ``edge_norm``; see :meth:`MiniBatches.precompute`."""
        _native.require(type(self).__name__, csr)
        num_train = check_part(part, csr).numel()
        if not (self.sample_coverage and num_train):
            return {}
        node_norm, edge_norm = norms(
            csr, self._draw(csr), self.sample_coverage, num_train=num_train, seed=check_seed(seed)
        )
        return {"node_norm": node_norm, "edge_norm": edge_norm}

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """See :meth:`MiniBatches.loader`; a batch may have no training node."""
        _native.require(type(self).__name__, csr)
        seeds, epoch = check_part(part, csr), SharedEpoch()
        check_seed(seed)
        if not seeds.numel():
            return BatchLoader(part, [], epoch)
        if not ("node_norm" in part and "edge_norm" in part):
            part = copy.copy(part).update(self.precompute(part, csr, seed=seed))
        if "edge_norm" in part:
            part = copy.copy(part).update({"in_degree": csr.indptr.diff()})
        batches = InducedBatches(csr, self.num_steps, partial(_nodes_of, self._draw(csr), seed, epoch))
        return BatchLoader(part, load_all(batches, num_workers), epoch)


class SaintNodeBatches(_SaintBatches):
    """GraphSAINT's node sampler: draws a node with a probability proportional to the node's out-degree plus 1.

    The 1 stands for the node's self-loop in the paper's normalised matrix, so nodes without edges are drawn too. A
    batch is the subgraph of the drawn nodes and all edges among them.

    Args:
        batch_size: Number of nodes that are drawn for a subgraph, with replacement.
        num_steps: Number of subgraphs in an epoch.
        sample_coverage: Number of samples of each row, on average, from which the normalisation is estimated; 0 for no
            normalisation.

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
    """GraphSAINT's edge sampler: draws an edge from u to v with a probability proportional to 1/deg(u) + 1/deg(v).

    Both ends of a drawn edge are in the subgraph. The degrees are the out-degree of u and the in-degree of v. Each node
    has a self-loop, so nodes without other edges are drawn too. The sampler holds the transposed matrix besides the
    graph. Arguments are those of :class:`SaintNodeBatches`; ``batch_size`` edges are drawn for a subgraph.
    """

    @override
    def _draw(self, csr: CSR) -> Draw:
        return partial(_draw_edges, csr.unpermuted(), transpose(csr.unpermuted()), self.batch_size)


class SaintWalkBatches(_SaintBatches):
    """GraphSAINT's random-walk sampler: draws start nodes uniformly, and takes all nodes of a walk from each.

    A walk goes against the direction of the edges, to where a layer's messages come from. It stays at a node without
    in-edges. Other arguments are those of :class:`SaintNodeBatches`; ``batch_size`` walks are drawn for a subgraph.

    Args:
        walk_length: Number of steps of a walk.
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
    """Estimate the weights of losses and of edges; see :mod:`pygdist.sampler.saint`.

    Subgraphs are drawn until they have ``sample_coverage`` times the rows of the part, which has ``num_train`` training
    nodes. Nodes and edges that were never sampled count as sampled once.

    Returns:
        ``node_norm`` of shape ``(n,)`` and ``edge_norm`` of shape ``(E,)`` in the caller's order of edges; float32.
    """
    node_count = torch.zeros(csr.num_rows, dtype=torch.int64)
    edge_count = torch.zeros(csr.num_entries, dtype=torch.int32)
    entries = csr.unpermuted()
    num_samples = num_rows = 0
    while num_rows < csr.num_rows * sample_coverage:
        nodes = _distinct(draw, seed, _NORMS, 0, num_samples)
        node_count[nodes] += 1
        edge_count[_native.induce(entries, nodes).edge] += 1
        num_rows += nodes.numel()
        num_samples += 1
    node_count.clamp_(min=1)
    edge_norm = node_count[entries.row_index().long()] / edge_count.clamp_(min=1)
    if csr.perm is not None:
        in_order = torch.empty_like(edge_norm)
        in_order[csr.perm.long()] = edge_norm
        edge_norm = in_order
    return num_samples / node_count / num_train, edge_norm


def _nodes_of(draw: Draw, seed: int, epoch: SharedEpoch, number: int) -> Tensor:
    """Return the nodes of a batch, ascending."""
    return _distinct(draw, seed, _BATCHES, epoch.number, number)


def _distinct(draw: Draw, *key: int) -> Tensor:
    return torch.from_numpy(distinct(draw(np.random.default_rng(key))))


def _draw_nodes(csr: CSR, count: int, rng: np.random.Generator) -> Nodes:
    nodes: Nodes = rng.integers(csr.num_entries + csr.num_rows, size=count) - csr.num_entries
    of_an_edge = nodes < 0
    nodes[of_an_edge] = csr.index.numpy()[nodes[of_an_edge]]  # from the end
    return nodes


def _draw_edges(csr: CSR, transposed: CSR, count: int, rng: np.random.Generator) -> Nodes:
    # an edge drawn uniformly from those of a node drawn uniformly has a probability ~ 1 / degree
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
    """Draw a neighbour of each node; with ``may_stay`` the node itself counts as one. A node without any stays."""
    indptr = csr.indptr.numpy()
    degree = indptr[nodes + 1] - indptr[nodes]
    place = rng.integers(np.maximum(degree + may_stay, 1))
    moves = place < degree
    out = nodes.copy()
    out[moves] = csr.index.numpy()[indptr[nodes[moves]] + place[moves]]
    return out
