"""The power-law graph for timings, at any size.

It has the degrees of a social network, but no communities, and random features and labels, so accuracy means nothing on
it; use :func:`pygdist.graph.degree_corrected_sbm` for that.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.check import MASKS
from pygdist.graph.streams.sorting import distinct

_DRAWS = 400_000  # pairs per round; part of the graph's definition, since it fixes the order of random numbers
_MOST_ROUNDS = 200  # and more in proportion; graphs with room for the pairs need a few dozen


def power_law(
    num_nodes: int = 50_000,
    num_edges: int = 5_000_000,
    *,
    exponent: float = 0.6,
    num_features: int = 128,
    num_classes: int = 40,
    seed: int = 12345,
) -> Data:
    r"""A symmetric random graph with a power law of degrees, without duplicates and self-loops.

    Nodes have ranks r = 1, 2, ... in random order. Both ends of an edge are drawn with a probability proportional to
    :math:`r^{-a}`. With the defaults in-degrees go from 21 to 16,892, with a median of 63. The same arguments give the
    same arrays on every machine.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of directed edges, even; each undirected edge counts twice.
        exponent: The skew :math:`a`; 0 for no skew.
        num_features: Width of the features, which are uniform in [0, 1).
        num_classes: Number of classes; each node has a uniform random class.
        seed: Seed of ``numpy.random.default_rng``.

    Returns:
        ``edge_index`` (int64, sorted by target, then source), ``x`` (float32), ``y`` (int64) and masks of a random
        60/20/20 split.

    Raises:
        InputError: If ``num_edges`` is odd or negative, or the graph would hold more than half of all pairs; another
            argument is out of range; or ``exponent`` is so large that too few different pairs are drawn.
    """
    if num_nodes < 2 or num_edges % 2 or not 0 <= num_edges <= num_nodes * (num_nodes - 1) // 2:
        raise InputError(
            f"power-law: num_edges is {num_edges} for {num_nodes} nodes; expected an even number, at most half of all "
            "pairs of nodes"
        )
    if not 0 <= exponent < math.inf or num_features < 1 or num_classes < 1 or seed < 0:
        raise InputError(
            f"power-law: exponent is {exponent}, num_features {num_features}, num_classes {num_classes}, seed {seed}; "
            "expected a finite exponent from 0, at least 1 feature and class, and a seed from 0"
        )
    rng = np.random.default_rng(seed)
    pairs = _draw_pairs(rng, num_nodes, num_edges // 2, exponent)
    fold = _split(rng, num_nodes)
    x = rng.random((num_nodes, num_features), dtype=np.float32)
    return undirected(pairs, x, rng.integers(0, num_classes, num_nodes), fold)


def undirected(pairs: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[np.int64], fold: NDArray[np.int8]) -> Data:
    """Make a graph of different pairs ``low * num_nodes + high``: edges both ways, sorted by target, then source.

    ``fold`` is 0, 1 or 2 for training, validation and test nodes.
    """
    low, high = np.divmod(pairs, len(y))
    source, target = np.concatenate([low, high]), np.concatenate([high, low])
    order = np.argsort(target * len(y) + source)
    arrays = {"edge_index": np.stack([source[order], target[order]]), "x": x, "y": y}
    arrays |= {name: fold == number for number, name in enumerate(MASKS)}
    return Data(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _draw_pairs(rng: np.random.Generator, num_nodes: int, num_pairs: int, exponent: float) -> NDArray[np.int64]:
    """Draw ``num_pairs`` different pairs ``low * num_nodes + high``, ascending."""
    weight = np.arange(1, num_nodes + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weight / weight.sum())
    node_of_rank = rng.permutation(num_nodes)

    def draw() -> NDArray[np.int64]:
        ranks = np.searchsorted(cumulative, rng.random(_DRAWS))
        return node_of_rank[np.minimum(ranks, num_nodes - 1)]  # the last sum may round to just below 1

    pairs = np.empty(0, dtype=np.int64)
    most_rounds = _MOST_ROUNDS + 8 * num_pairs // _DRAWS
    while len(pairs) < num_pairs:
        most_rounds -= 1
        if most_rounds < 0:
            raise InputError(f"power-law: exponent {exponent} leaves too few pairs to draw {num_pairs} of; lower it")
        one, other = draw(), draw()
        low, high = np.minimum(one, other), np.maximum(one, other)
        pairs = distinct(np.concatenate([pairs, (low * num_nodes + high)[low != high]]))
    return np.sort(rng.permutation(pairs)[:num_pairs])


def _split(rng: np.random.Generator, num_nodes: int) -> NDArray[np.int8]:
    """Draw 0, 1 or 2 for each node: 60% train, 20% validation, 20% test."""
    order = rng.permutation(num_nodes)
    fold = np.zeros(num_nodes, dtype=np.int8)
    fold[order[int(0.6 * num_nodes) : int(0.8 * num_nodes)]] = 1
    fold[order[int(0.8 * num_nodes) :]] = 2
    return fold
