"""Features, labels and splits of any number of nodes, made a block at a time: nothing is kept."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.check import MASKS
from pygdist.graph.generated.edges import node_ranks
from pygdist.graph.generated.published import NodeFacts

__all__ = ["NodeGenerator"]

_BLOCK_NODES = 1 << 13  # part of the definition of a graph, as each block has random numbers of its own
# numpy pads a seed with zeros: these keep it apart from any number of a block
_FEATURES, _CENTRES, _SPLIT = 0x66656174, 0x63656E74, 0x73706C74


class NodeGenerator:
    """Nodes with a class each and features around the centre of their class.

    The class of a node is its community in every :class:`~pygdist.graph.EdgeGenerator` over as many nodes with a
    community for each class. Features are a random unit vector for each class plus Gaussian noise. Which nodes train,
    validate and test is random, with the exact numbers of the facts. Nodes in none of the three have features of their
    class, but no label (-1).

    Args:
        facts: How many nodes, features and classes, and what split.
        features: Whether to make features.
        seed: Seed; another one for each type of nodes.

    Attributes:
        num_nodes: Number of nodes.
        num_features: Width of their features; 0 without.
        arrays: Type and shape of the arrays that there are: ``x`` (float32), ``y`` (int64), and masks (bool).
    """

    def __init__(self, facts: NodeFacts, *, features: bool = True, seed: int = 0) -> None:
        self.num_nodes = facts.num_nodes
        self.num_features = facts.num_features if features else 0
        self.arrays: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {}
        if self.num_features:
            self.arrays["x"] = (np.dtype(np.float32), (self.num_nodes, self.num_features))
        if facts.num_classes:
            self.arrays["y"] = (np.dtype(np.int64), (self.num_nodes,))
            self.arrays |= {name: (np.dtype(np.bool_), (self.num_nodes,)) for name in MASKS}
        self._facts, self._seed = facts, seed

    @property
    def starts(self) -> range:
        """The first node of each block."""
        return range(0, self.num_nodes if self.arrays else 0, _BLOCK_NODES)

    def read(self, start: int) -> dict[str, NDArray[np.generic]]:
        """The block of rows that begins at a node of :attr:`starts`, of all arrays."""
        stop = min(start + _BLOCK_NODES, self.num_nodes)
        ranks = node_ranks(np.arange(start, stop), self.num_nodes)
        classes = ranks % max(1, self._facts.num_classes)
        found: dict[str, NDArray[np.generic]] = {}
        if "x" in self.arrays:
            rng = np.random.default_rng((self._seed, _FEATURES, start // _BLOCK_NODES))
            x = rng.standard_normal((stop - start, self.num_features), dtype=np.float32)
            x *= np.float32(self._facts.noise)
            x += self._centres[classes]
            found["x"] = x
        if "y" in self.arrays:
            fold = self._folds(ranks, start)
            found["y"] = np.where(fold < len(MASKS), classes, -1)
            found |= {name: fold == number for number, name in enumerate(MASKS)}
        return found

    @cached_property
    def _centres(self) -> NDArray[np.float32]:
        rng = np.random.default_rng((self._seed, _CENTRES))
        centres = rng.standard_normal((max(1, self._facts.num_classes), self.num_features))
        unit: NDArray[np.float32] = (centres / np.linalg.norm(centres, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def _folds(self, ranks: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """0, 1, 2 for nodes that train, validate, test; 3 for others."""
        # Every rank occurs once, so counting them off gives exact numbers; ids scatter the ranks, so each block has
        # about its share of each fold; and the shuffle breaks the tie of a rank, which is a degree, to a fold.
        fold = np.searchsorted(np.cumsum(self._facts.split), ranks, side="right")
        return np.random.default_rng((self._seed, _SPLIT, start // _BLOCK_NODES)).permutation(fold)
