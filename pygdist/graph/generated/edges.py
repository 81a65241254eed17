"""Random edges of a graph of any size, generated while they are read; nothing is stored."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError

_BLOCK_EDGES = 1 << 18
_MOST_NODES = 3_000_000_000  # ids are products below N * N, which int64 must hold


class EdgeGenerator:
    r"""Random edges with communities and a power law of degrees, drawn independently, in no order.

    Nodes have ranks r = 1, 2, ...; ids are unrelated to ranks and communities. Both ends of an edge are drawn with a
    probability proportional to :math:`r^{-a}`. With probability ``inside`` the target is drawn from the source's
    community only, by ranks within the community. Edges may repeat and may be loops. The same arguments give the same
    edges, whatever ranges :meth:`read` is called with.

    Args:
        num_nodes: Number of nodes, N; or two numbers, of source nodes and of target nodes. Nodes of both types belong
            to the same communities.
        num_edges: Number of directed edges.
        num_communities: Number of communities, of almost equal size. By default one per 1000 nodes (of the smaller
            type), at least one.
        inside: Probability that the target is drawn from the source's community.
        exponent: The skew :math:`a`, from 0 to below 1; or two numbers, for sources and for targets.
        undirected: Edges 2k and 2k + 1 are the two directions of one draw; ``num_edges`` must be even.
        seed: Seed.

    Attributes:
        num_nodes: N, or the larger of the two numbers; all ids are below it.
        num_edges: Number of directed edges.
        num_communities: Number of communities.

    Raises:
        InputError: If an argument is out of range.

    Example:
        >>> edges = EdgeStream(EdgeGenerator(num_nodes=1_000_000, num_edges=20_000_000), num_nodes=1_000_000)
        >>> writes = EdgeGenerator((1_134_649, 736_389), 7_145_660, exponent=(0.3, 0.2))
    """

    def __init__(
        self,
        num_nodes: int | tuple[int, int],
        num_edges: int,
        *,
        num_communities: int | None = None,
        inside: float = 0.8,
        exponent: float | tuple[float, float] = 0.6,
        undirected: bool = False,
        seed: int = 0,
    ) -> None:
        nodes = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
        skew = exponent if isinstance(exponent, tuple) else (exponent, exponent)
        if min(nodes) < 1 or num_edges < 0 or not 0 <= inside <= 1 or not all(0 <= one < 1 for one in skew):
            raise InputError(
                f"num_nodes is {num_nodes}, num_edges {num_edges}, inside {inside}, exponent {exponent}; expected at "
                "least 1 node, no negative number of edges, a probability, and an exponent from 0 to below 1"
            )
        if max(nodes) > _MOST_NODES:
            raise InputError(f"num_nodes is {num_nodes}, expected at most {_MOST_NODES}")
        if undirected and (nodes[0] != nodes[1] or num_edges % 2):
            raise InputError(
                f"num_nodes is {num_nodes}, num_edges {num_edges}; expected one type of nodes and an even number of "
                "edges, since undirected edges come in both directions"
            )
        self.num_nodes, self.num_edges = max(nodes), num_edges
        self.num_communities = max(1, min(nodes) // 1000) if num_communities is None else num_communities
        if not 1 <= self.num_communities <= min(nodes):
            raise InputError(f"num_communities is {num_communities}, expected 1 to {min(nodes)}")
        self._nodes, self._exponent = nodes, skew
        self._inside, self._undirected, self._seed = inside, undirected, seed
        self._steps = _step(nodes[0]), _step(nodes[1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return edges ``start`` to ``stop - 1``; int64 of shape ``(2, stop - start)``, C-contiguous."""
        first, last = start // _BLOCK_EDGES, -(-stop // _BLOCK_EDGES)
        blocks = [np.empty((2, 0), dtype=np.int64), *(self._block(block) for block in range(first, last))]
        begin = start - first * _BLOCK_EDGES
        return np.ascontiguousarray(np.concatenate(blocks, axis=1)[:, begin : begin + stop - start])

    def communities(
        self, ids: NDArray[np.integer], *, end: Literal["source", "target"] = "target"
    ) -> NDArray[np.int64]:
        """Return the community of each node: int64 below ``num_communities``, of the shape of ``ids``.

        If sources and targets are of two types, ``end`` is the type of ``ids``.
        """
        return node_ranks(ids, self._nodes[end == "target"]) % self.num_communities

    def largest_in_degree(self) -> float:
        """Return the expected in-degree of the node that is drawn most often as a target."""
        (sources, targets), (skew, popular) = self._nodes, self._exponent
        communities = self.num_communities
        # rank r is drawn where u^(1 / (1 - a)) N falls into [r, r + 1)
        first = np.arange(0, sources, communities, dtype=np.float64)
        into_first = (((first + 1) / sources) ** (1 - skew) - (first / sources) ** (1 - skew)).sum()
        members = (targets - 1) // communities + 1
        as_target = (1 - self._inside) * targets ** (popular - 1)
        as_target += self._inside * into_first * members ** (popular - 1)
        if self._undirected:
            return float(self.num_edges / 2 * (as_target + sources ** (skew - 1)))
        return float(self.num_edges * as_target)

    def _block(self, block: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, block))
        draws = _BLOCK_EDGES // 2 if self._undirected else _BLOCK_EDGES
        (sources, targets), communities = self._nodes, self.num_communities
        source = _rank(rng, np.full(draws, sources), self._exponent[0])
        community = source % communities  # hubs are in different communities
        members = (targets - 1 - community) // communities + 1
        within = _rank(rng, members, self._exponent[1]) * communities + community
        anywhere = _rank(rng, np.full(draws, targets), self._exponent[1])
        target = np.where(rng.random(draws) < self._inside, within, anywhere)
        edges = np.stack([source * self._steps[0] % sources, target * self._steps[1] % targets])
        return np.stack([edges, edges[::-1]], axis=2).reshape(2, -1) if self._undirected else edges


def node_ranks(ids: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    """Return the rank of each node in the power law of an :class:`EdgeGenerator`, int64; rank 0 is drawn most often."""
    return ids.astype(np.int64) * pow(_step(num_nodes), -1, num_nodes) % num_nodes


def _step(num_nodes: int) -> int:
    """Return a number coprime to N: ids are ranks times this number modulo N, which is a permutation."""
    step = round(0.6180339887 * num_nodes) or 1
    while math.gcd(step, num_nodes) != 1:
        step += 1
    return step


def _rank(rng: np.random.Generator, count: NDArray[np.int64], exponent: float) -> NDArray[np.int64]:
    """Draw a rank below each count, small ranks more often, by the inverse of the distribution function."""
    power = rng.random(len(count)) ** (1 / (1 - exponent))
    return np.minimum((power * count).astype(np.int64), count - 1)
