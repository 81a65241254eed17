"""A seeded hash of the node id: no structure, no memory, no surprises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition.base import Partitioner, check_num_parts

__all__ = ["HashPartitioner", "mix"]


@dataclass(frozen=True, kw_only=True)
class HashPartitioner(Partitioner):
    """Gives each node to the part that a hash of its id names.

    Parts are balanced in nodes and edges alike, up to chance, and almost all neighbours are remote: the baseline that
    every other algorithm must beat, and the ownership P3 assumes (Gandhi and Iyer, OSDI 2021, Sec. 3.1). The edges are
    not read. With few nodes a part may stay empty.

    Args:
        seed: Another seed, another assignment.
    """

    seed: int = 0

    name: ClassVar[str] = "hash"

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"hash: seed is {self.seed}, expected 0 to 2**64 - 1")

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        check_num_parts(edges.num_nodes, num_parts)
        values = mix(np.arange(edges.num_nodes, dtype=np.uint64), self.seed)
        return (values % np.uint64(num_parts)).astype(np.int32)


def mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al., OOPSLA 2014): every bit of the input moves every bit of the output.

    Args:
        values: Keys, uint64 of any shape.
        seed: Start of the sequence that the keys index.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = np.uint64(seed) + (values + np.uint64(1)) * step
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
