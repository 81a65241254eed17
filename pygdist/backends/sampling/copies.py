"""Copies of columns and of in-edges on several ranks, if memory allows (P3, Sec. 3.4).

Groups of *f* ranks together hold all columns of the features; groups of *t* ranks together hold all in-edges. By
default all ranks are one group, and nothing is held twice. In a smaller group each rank holds more, and sends to fewer
ranks: with *t* = 1 a rank samples alone, with *f* = 1 only gradients travel. *f* and *t* divide the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.kernels.csr import narrowest
from pygdist.memory import gpus
from pygdist.sampler.topology import holders

_ROWS = 1 << 18  # at a time


@dataclass(frozen=True)
class GroupSizes:
    """Ranks of a group that holds all columns of the features, and of one that holds all in-edges."""

    features: int
    topology: int


def group_sizes(
    shard: Shard, world_size: int, features: int | None, topology: int | None, cache_gib: float, edge_bytes: int
) -> GroupSizes:
    """Return the sizes of groups, the same on all ranks.

    In-edges get memory first; columns get what is left, as in the paper.

    Args:
        shard: This rank's part.
        world_size: Number of ranks.
        features: Ranks that hold all columns between them, if that is given; as ``topology`` for in-edges.
        topology: See ``features``.
        cache_gib: Memory for copies on each rank, in GiB.
        edge_bytes: Bytes of the values of an edge.

    Raises:
        InputError: If a size does not divide the number of ranks.
    """
    for name, size in (("feature_parts", features), ("topology_parts", topology)):
        if size is not None and (size < 1 or world_size % size):
            raise InputError(f"{name} is {size}, expected a divisor of the number of ranks, which is {world_size}")
    left = int(cache_gib * 2**30)
    if features is not None:
        left -= column_bytes(shard, features, world_size)
    if topology is None:
        topology = _smallest(world_size, left, lambda size: topology_bytes(shard, size, world_size, edge_bytes))
    left -= topology_bytes(shard, topology, world_size, edge_bytes)
    if features is None:
        features = _smallest(world_size, left, lambda size: column_bytes(shard, size, world_size))
    return GroupSizes(features, topology)


def column_bytes(shard: Shard, size: int, world_size: int) -> int:
    """Bytes of each rank's copies of columns in groups of ``size`` ranks."""
    columns = shard.columns
    assert columns is not None, "the placement is columns"
    return 0 if size == world_size else shard.num_nodes * -(-shard.x.size(1) // size) * columns.itemsize


def topology_bytes(shard: Shard, size: int, world_size: int, edge_bytes: int) -> int:
    """Bytes of each rank's copies of in-edges in groups of ``size`` ranks, if parts are of one size."""
    if size == world_size:
        return 0
    ids = narrowest(shard.num_nodes).itemsize
    of_edges = shard.num_edges * (ids + (8 + edge_bytes if edge_bytes else 0))
    return -(-(of_edges + 16 * shard.num_nodes) // size) + 12 * shard.num_nodes  # and each node's owner and id


def _smallest(world_size: int, most: int, bytes_of: Callable[[int], int]) -> int:
    """Return the smallest size of groups whose copies fit."""
    return next(size for size in range(1, world_size + 1) if world_size % size == 0 and bytes_of(size) <= max(most, 0))


def held_columns(shard: Shard, size: int, communicator: Communicator) -> Tensor:
    """Return the columns that this rank holds in groups of ``size``, ``(N, c)``; every rank makes the call.

    Copies all columns into new memory, its own too; returns the mapped file if it holds no others.
    """
    columns, width, ranks = shard.columns, shard.x.size(1), communicator.world_size
    assert columns is not None, "the placement is columns"
    if size == ranks:
        return columns
    holds = holders(communicator.rank, size, ranks)
    mine = columns_of(width, communicator.rank % size, size)
    slices = [columns_of(width, rank, ranks) for rank in range(ranks)]
    comes = [one.start >= mine.start and one.stop <= mine.stop and one.stop > one.start for one in slices]
    out = columns.new_empty((shard.num_nodes, mine.stop - mine.start))
    for start in range(0, shard.num_nodes, _ROWS):
        block = columns[start : start + _ROWS].clone()
        incoming = [
            block.new_empty((len(block), one.stop - one.start) if come else (0, 1))
            for one, come in zip(slices, comes, strict=True)
        ]
        communicator.send_and_receive([block if to else block[:0] for to in holds], incoming, "copies, columns")
        incoming[communicator.rank] = block
        for one, come, rows in zip(slices, comes, incoming, strict=True):
            if come:
                out[start : start + len(block), one.start - mine.start : one.stop - mine.start] = rows
    return out


def nearest(columns: Tensor, device: torch.device, communicator: Communicator) -> Tensor:
    """Return columns on a GPU if they take at most a quarter of its free memory, divided by the ranks on it."""
    if device.type != "cuda" or columns.nbytes > gpus.free_bytes(device) // (4 * communicator.sharers(device)):
        return columns
    return columns.to(device)


def slices_of(width: int, size: int) -> list[slice]:
    """Return the columns of each rank of a group."""
    return [columns_of(width, rank, size) for rank in range(size)]
