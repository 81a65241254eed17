"""A graph of any size, made edge by edge as it is read: nothing is kept."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError

__all__ = ["EdgeGenerator"]

_BLOCK_EDGES = 1 << 18


class EdgeGenerator:
    r"""Edges with communities and a power law, drawn independently, in no order.

    Both ends are drawn with probability :math:`rank^{-a}`; with a given probability the target is drawn among the nodes
    of the source's community alone, which has a power law of its own. Ids say nothing of rank or community. Edges may
    repeat and may be loops. The same arguments give the same edges, whatever piece is asked for.

    Args:
        num_nodes: Number of nodes, N.
        num_edges: Number of directed edges.
        num_communities: Number of communities, as equal in size as can be.
        inside: Probability that an edge stays in a community.
        exponent: The skew :math:`a`, from 0 to below 1.
        seed: Seed.

    Raises:
        InputError: If an argument makes no sense.

    Example:
        >>> edges = EdgeStream(EdgeGenerator(num_nodes=1_000_000, num_edges=20_000_000), num_nodes=1_000_000)
    """

    def __init__(
        self,
        num_nodes: int,
        num_edges: int,
        *,
        num_communities: int | None = None,
        inside: float = 0.8,
        exponent: float = 0.6,
        seed: int = 0,
    ) -> None:
        if num_nodes < 1 or num_edges < 0 or not 0 <= inside <= 1 or not 0 <= exponent < 1:
            raise InputError(
                f"num_nodes is {num_nodes}, num_edges {num_edges}, inside {inside}, exponent {exponent}; expected at "
                "least 1 node, no negative number of edges, a probability, and an exponent from 0 to below 1"
            )
        self.num_nodes, self.num_edges = num_nodes, num_edges
        self.num_communities = num_communities or max(1, num_nodes // 1000)
        if not 1 <= self.num_communities <= num_nodes:
            raise InputError(f"num_communities is {num_communities}, expected 1 to {num_nodes}")
        self._inside, self._exponent, self._seed = inside, exponent, seed
        # ids are ranks times a number that has no factor in common with N: a permutation
        self._step = round(0.6180339887 * num_nodes) or 1
        while math.gcd(self._step, num_nodes) != 1:
            self._step += 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Edges ``start`` to ``stop - 1``; int64 of shape ``(2, stop - start)``, C-contiguous."""
        first, last = start // _BLOCK_EDGES, -(-stop // _BLOCK_EDGES)
        blocks = [np.empty((2, 0), dtype=np.int64), *(self._block(block) for block in range(first, last))]
        begin = start - first * _BLOCK_EDGES
        return np.ascontiguousarray(np.concatenate(blocks, axis=1)[:, begin : begin + stop - start])

    def _block(self, block: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, block))
        nodes, communities = self.num_nodes, self.num_communities
        source = self._rank(rng, np.full(_BLOCK_EDGES, nodes))
        community = source % communities  # hubs are in different communities
        members = (nodes - 1 - community) // communities + 1
        within = self._rank(rng, members) * communities + community
        anywhere = self._rank(rng, np.full(_BLOCK_EDGES, nodes))
        target = np.where(rng.random(_BLOCK_EDGES) < self._inside, within, anywhere)
        return np.stack([source, target]) * self._step % nodes

    def _rank(self, rng: np.random.Generator, count: NDArray[np.int64]) -> NDArray[np.int64]:
        """A rank below each count, smaller ones more often: the inverse of the distribution function."""
        power = rng.random(len(count)) ** (1 / (1 - self._exponent))
        return np.minimum((power * count).astype(np.int64), count - 1)
