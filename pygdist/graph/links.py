"""Link prediction: edges that are held out of the graph, and pairs of nodes that are not edges.

All random choices depend only on a seed and the global ids of nodes and edges. So they are the same on any number of
ranks, and both directions of an edge are held out together.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency
from pygdist.graph.self_loops import is_self_loop, keep_entries
from pygdist.graph.shard import Shard

_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of splitmix64
_STEP = 0x9E3779B97F4A7C15 - 2**64
_TRIES = 20
_EDGES_REMAIN = (
    f"after {_TRIES} draws some negative pairs are still edges or self-loops, since some nodes have nearly all others "
    "as neighbours; training and metrics are not meaningful for these nodes"
)


def hold_out(shard: Shard, shares: Sequence[float], seed: int = 0) -> Shard:
    """Return a shard in which some edges are moved to ``val_edges`` and ``test_edges``; ``shard`` does not change.

    An edge and its reverse are held out together; self-loops are never held out. The result has no ``surroundings``,
    since the in-degrees there count every edge of the graph.

    Args:
        shard: A rank's part of the graph.
        shares: Shares of all connected pairs of nodes, for validation and for test.
        seed: Seed; the same edges are held out on any number of ranks.

    Raises:
        InputError: If ``shares`` does not have two numbers from 0 with a sum below 1.
    """
    if len(shares) != 2 or not (min(shares) >= 0 and sum(shares) < 1):  # NaN is neither
        raise InputError(
            f"edge_split: {tuple(shares)}, expected two shares of the edges (validation, test) with a sum below 1"
        )
    csr = shard.adjacency.csr()
    target = csr.row_index().long()
    ends = shard.n_id[csr.index], shard.n_id[target]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    place = _share_of(drawn(seed, low, high))
    chosen = {}
    start = torch.zeros((), dtype=torch.float64)
    for name, share in zip(("val_edges", "test_edges"), shares, strict=True):
        within = (place >= start) & (place < start + share) & (low != high)
        chosen[name] = torch.stack([csr.index[within].long(), target[within], shard.e_id[within]])
        start = start + share
    keep = (place >= start) | (low == high)
    rest = {
        name: value[keep]
        for name in ("e_id", "edge_weight", "edge_attr", "edge_type")
        if (value := getattr(shard, name)) is not None
    }
    adjacency = Adjacency.from_csr(keep_entries(csr, keep))
    return shard.replace(adjacency=adjacency, surroundings=None, **rest, **chosen)


def known_pairs(shard: Shard) -> Tensor:
    """Return the pairs that :func:`corrupted_sources` must not draw: edges into owned nodes, and owned nodes' loops.

    Held-out edges are included.

    Returns:
        One number for each pair, ascending: ``target * num_nodes + source``, where ``target`` is a local id and
        ``source`` a global id. int64, so 8 bytes for each edge.
    """
    csr = shard.adjacency.csr()
    owned = torch.arange(shard.num_owned, device=shard.n_id.device)
    pairs = [torch.stack([csr.index.long(), csr.row_index().long()]), owned.expand(2, -1)]
    pairs += [held[:2] for held in (shard.val_edges, shard.test_edges) if held is not None]
    source, target = torch.cat(pairs, dim=1)
    return in_order(target, shard.n_id[source], shard.num_nodes)


def in_order(target: Tensor, source: Tensor, num_nodes: int) -> Tensor:
    """Return pairs of local targets and global sources as :func:`known_pairs` does."""
    pairs: Tensor = (target * num_nodes + source).sort().values
    return pairs


def corrupted_sources(target: Tensor, e_id: Tensor, num_nodes: int, *, known: Tensor, seed: int, epoch: int) -> Tensor:
    """Draw a negative source for each edge: a random node that has no edge to the edge's target.

    Sources are the same on any number of ranks, and differ between epochs. A source that has an edge to the target is
    drawn again, at most 19 times. If a target has an edge from nearly every node, the last source drawn may still have
    one; a warning says so.

    Args:
        target: Targets of the edges, in local ids.
        e_id: Global ids of the edges.
        num_nodes: Number of nodes of the graph.
        known: Pairs that must not be drawn, from :func:`known_pairs`.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        Global ids of the drawn sources, in the shape of ``e_id``.
    """
    keys = torch.full_like(e_id, epoch), e_id
    sources = _node_of(drawn(seed, *keys), num_nodes)
    again = torch.arange(e_id.numel(), device=e_id.device)
    for number in range(1, _TRIES + 1):
        pairs = target[again] * num_nodes + sources[again]
        place = torch.searchsorted(known, pairs).clamp(max=known.numel() - 1)
        again = again[known[place] == pairs] if again.numel() else again
        if again.numel() == 0:
            break
        if number == _TRIES:
            warnings.warn(_EDGES_REMAIN, stacklevel=2)
            break
        some = [key[again] for key in keys]
        sources[again] = _node_of(drawn(seed, *some, torch.full_like(again, number)), num_nodes)
    return sources


def _node_of(bits: Tensor, num_nodes: int) -> Tensor:
    return (bits & (2**63 - 1)) % num_nodes


def drawn(seed: int, *keys: Tensor) -> Tensor:
    """Return 64 random bits for each row of keys, whose shapes are broadcast (splitmix64), as int64."""
    state = torch.full_like(keys[0], seed)
    for key in keys:
        state = _mixed((state ^ key) + _STEP)
    return state


def supervised(shard: Shard) -> Tensor:
    """Return a mask of the edges to learn from, ``(E,)`` bool: false for self-loops, true for all other edges."""
    return ~is_self_loop(shard.adjacency.csr())


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _share_of(bits: Tensor) -> Tensor:
    """Turn random bits into a number from 0 to 1."""
    return _shifted(bits, 11).double() / 2.0**53
