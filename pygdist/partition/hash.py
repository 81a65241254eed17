"""Assignment by a seeded hash of the node id, without looking at the edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition.base import Partitioner, check_num_parts, check_seed


@dataclass(frozen=True, kw_only=True)
class HashPartitioner(Partitioner):
    """Assigns each node to a part by a hash of its id.

    Parts have about equal numbers of nodes and edges, but with many parts almost all neighbours are on other ranks.
    This is the baseline for other methods, and the assignment of nodes that P3 assumes (Gandhi and Iyer, OSDI 2021,
    Sec. 3.1). The edges are not read. With few nodes a part may stay empty.

    Args:
        seed: Seed of the hash.
    """

    seed: int = 0

    name: ClassVar[str] = "hash"

    def __post_init__(self) -> None:
        check_seed(self, self.seed)

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        check_num_parts(edges.num_nodes, num_parts)
        values = mix(np.arange(edges.num_nodes, dtype=np.uint64), self.seed)
        return (values % np.uint64(num_parts)).astype(np.int32)


def mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Hash uint64 keys by splitmix64 (Steele et al., OOPSLA 2014): every input bit affects every output bit.

    Each key is an index into the splitmix64 sequence that starts at ``seed``.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        state = np.uint64(seed) + (values + np.uint64(1)) * step
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
