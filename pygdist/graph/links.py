"""Edges that are held out of a graph to be predicted, and pairs of nodes that stand for what is no edge.

All is drawn from the global ids of nodes and edges alone: whoever holds an edge draws the same, on any number of ranks,
and both directions of an edge are held out together.
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

__all__ = ["corrupted_sources", "drawn", "hold_out", "known_pairs", "supervised"]

_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of splitmix64
_STEP = 0x9E3779B97F4A7C15 - 2**64
_TRIES = 20
_EDGES_REMAIN = (
    f"pairs that stand for no edge are edges still, or a node with itself, after {_TRIES} draws: some nodes have "
    "nearly all others as neighbours; what is learned and measured of these means little"
)


def hold_out(shard: Shard, shares: Sequence[float], seed: int = 0) -> Shard:
    """The shard without some of its edges, which are there apart, as ``val_edges`` and ``test_edges``.

    An edge and its reverse are held out together, and self-loops never. Surroundings are not kept: what they know of
    the whole graph counts every edge.

    Args:
        shard: A rank's part of the graph.
        shares: Of all pairs of nodes with an edge, for validation and for test.
        seed: Everything is drawn from it; the same for any number of ranks.

    Raises:
        InputError: If these are no two shares.
    """
    if len(shares) != 2 or min(shares) < 0 or sum(shares) >= 1:
        raise InputError(
            f"edge_split: {tuple(shares)}, expected two shares of the edges (validation, test) with a sum below 1"
        )
    csr = shard.adjacency.csr()
    target = csr.row_index().long()
    ends = shard.n_id[csr.index], shard.n_id[target]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    where = _share_of(drawn(seed, low, high))
    chosen = {}
    start = torch.zeros((), dtype=torch.float64)
    for name, share in zip(("val_edges", "test_edges"), shares, strict=True):
        within = (where >= start) & (where < start + share) & (low != high)
        chosen[name] = torch.stack([csr.index[within].long(), target[within], shard.e_id[within]])
        start = start + share
    keep = (where >= start) | (low == high)
    rest = {
        name: value[keep]
        for name in ("e_id", "edge_weight", "edge_attr", "edge_type")
        if (value := getattr(shard, name)) is not None
    }
    adjacency = Adjacency.from_csr(keep_entries(csr, keep))
    return shard.replace(adjacency=adjacency, surroundings=None, **rest, **chosen)


def known_pairs(shard: Shard) -> Tensor:
    """What :func:`corrupted_sources` must not draw: every edge into an owned node, held-out ones too, and the node.

    Returns:
        One number for each pair, ``target * num_nodes + source`` with the target's local and the source's global id, in
        order; int64, so 8 bytes for each edge.
    """
    csr = shard.adjacency.csr()
    own = torch.arange(shard.num_owned, device=shard.n_id.device)
    pairs = [torch.stack([csr.index.long(), csr.row_index().long()]), own.expand(2, -1)]
    pairs += [held[:2] for held in (shard.val_edges, shard.test_edges) if held is not None]
    source, target = torch.cat(pairs, dim=1)
    pairs_in_order: Tensor = (target * shard.num_nodes + shard.n_id[source]).sort().values
    return pairs_in_order


def corrupted_sources(target: Tensor, e_id: Tensor, num_nodes: int, *, known: Tensor, seed: int, epoch: int) -> Tensor:
    """For each edge another node in place of its source, so that the pair is no edge; the same for any number of ranks.

    What turns out to be an edge is drawn again, 19 times at most: of a node that has nearly all others as neighbours,
    an edge may remain, of which a warning tells.

    Args:
        target: Where the edges end, in local ids.
        e_id: Their global ids.
        num_nodes: Nodes of the graph.
        known: Pairs that are edges (:func:`known_pairs`).
        seed: Of the run.
        epoch: Every epoch draws others.

    Returns:
        Global ids of nodes, in the shape of ``e_id``.
    """
    keys = torch.full_like(e_id, epoch), e_id
    found = _node_of(drawn(seed, *keys), num_nodes)
    again = torch.arange(e_id.numel(), device=e_id.device)
    for number in range(1, _TRIES + 1):
        pairs = target[again] * num_nodes + found[again]
        place = torch.searchsorted(known, pairs).clamp(max=known.numel() - 1)
        again = again[known[place] == pairs] if again.numel() else again
        if again.numel() == 0:
            break
        if number == _TRIES:
            warnings.warn(_EDGES_REMAIN, stacklevel=2)
            break
        some = [key[again] for key in keys]
        found[again] = _node_of(drawn(seed, *some, torch.full_like(again, number)), num_nodes)
    return found


def _node_of(bits: Tensor, num_nodes: int) -> Tensor:
    return (bits & (2**63 - 1)) % num_nodes


def drawn(seed: int, *keys: Tensor) -> Tensor:
    """64 random bits for each row of keys (splitmix64), as int64."""
    state = torch.full_like(keys[0], seed)
    for key in keys:
        state = _mixed((state ^ key) + _STEP)
    return state


def supervised(shard: Shard) -> Tensor:
    """Which edges of a shard are to be told from pairs that are none, ``(E,)`` bool: not those to the node itself."""
    return ~is_self_loop(shard.adjacency.csr())


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _share_of(bits: Tensor) -> Tensor:
    """From 0 to 1."""
    return _shifted(bits, 11).double() / 2.0**53
