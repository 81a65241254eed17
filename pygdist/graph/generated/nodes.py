"""Random features, labels and splits of any number of nodes, generated block by block; nothing is stored."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.check import MASKS
from pygdist.graph.generated.edges import node_ranks
from pygdist.graph.generated.published import NodeFacts

_BLOCK_NODES = 1 << 13  # part of a graph's definition, since each block has its own random numbers
# numpy pads seeds with zeros: these tags keep the seeds of different uses apart
_FEATURES, _CENTRES, _SPLIT, _WRONG = 0x66656174, 0x63656E74, 0x73706C74, 0x77726F6E


class NodeGenerator:
    """Nodes that have a class and features around the centre of their class.

    The class of a node is its community in every :class:`~pygdist.graph.EdgeGenerator` over as many nodes with one
    community per class. Features are a random unit vector for each class plus Gaussian noise. Training, validation and
    test nodes are drawn at random, in the exact numbers of ``facts``. All other nodes have features of their class, but
    no label (-1). Each type of nodes needs its own seed.

    Args:
        facts: The figures.
        features: Generate features.
        seed: Seed.
        wrong_labels: Share of the nodes that have the label of another class, drawn at random; no model can know it.

    Attributes:
        arrays: Type and shape of each array: ``x`` (float32), ``y`` (int64), and masks (bool), as far as they exist.
    """

    def __init__(self, facts: NodeFacts, *, features: bool = True, seed: int = 0, wrong_labels: float = 0.0) -> None:
        self.num_nodes = facts.num_nodes
        self.num_features = facts.num_features if features else 0
        self.arrays: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {}
        if self.num_features:
            self.arrays["x"] = (np.dtype(np.float32), (self.num_nodes, self.num_features))
        if facts.num_classes:
            self.arrays["y"] = (np.dtype(np.int64), (self.num_nodes,))
            self.arrays |= {name: (np.dtype(np.bool_), (self.num_nodes,)) for name in MASKS}
        self._facts, self._seed, self._wrong_labels = facts, seed, wrong_labels

    @property
    def starts(self) -> range:
        """The first node of each block."""
        return range(0, self.num_nodes if self.arrays else 0, _BLOCK_NODES)

    def read(self, start: int) -> dict[str, NDArray[np.generic]]:
        """Return one block of rows of all arrays; ``start`` is one of :attr:`starts`."""
        stop = min(start + _BLOCK_NODES, self.num_nodes)
        ranks = node_ranks(np.arange(start, stop), self.num_nodes)
        classes = ranks % max(1, self._facts.num_classes)
        rows: dict[str, NDArray[np.generic]] = {}
        if "x" in self.arrays:
            rng = np.random.default_rng((self._seed, _FEATURES, start // _BLOCK_NODES))
            x = rng.standard_normal((stop - start, self.num_features), dtype=np.float32)
            x *= np.float32(self._facts.noise)
            x += self._centres[classes]
            rows["x"] = x
        if "y" in self.arrays:
            fold = self._folds(ranks, start)
            rows["y"] = np.where(fold < len(MASKS), self._labels(classes, start), -1)
            rows |= {name: fold == number for number, name in enumerate(MASKS)}
        return rows

    def _labels(self, classes: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        if not self._wrong_labels:
            return classes
        rng = np.random.default_rng((self._seed, _WRONG, start // _BLOCK_NODES))
        wrong = rng.random(len(classes)) < self._wrong_labels
        others = rng.integers(1, max(2, self._facts.num_classes), len(classes))
        return np.where(wrong, (classes + others) % self._facts.num_classes, classes)

    @cached_property
    def _centres(self) -> NDArray[np.float32]:
        rng = np.random.default_rng((self._seed, _CENTRES))
        centres = rng.standard_normal((max(1, self._facts.num_classes), self.num_features))
        unit: NDArray[np.float32] = (centres / np.linalg.norm(centres, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def _folds(self, ranks: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """Return 0 for training, 1 for validation, 2 for test and 3 for all other nodes."""
        # Every rank occurs once, so intervals of ranks have exact sizes; ids scatter the ranks, so each block has about
        # its share of each fold; the shuffle makes folds independent of ranks, which determine degrees.
        fold = np.searchsorted(np.cumsum(self._facts.split), ranks, side="right")
        return np.random.default_rng((self._seed, _SPLIT, start // _BLOCK_NODES)).permutation(fold)
