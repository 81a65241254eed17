"""Pairs of nodes that a link predictor scores: edges whose targets a rank owns, and plans that fetch their sources.

Parts of nodes hold all in-edges of their nodes. Where parts of edges split nodes, each edge is sent once to the owner
of its target, which then knows all in-edges of its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pygdist.comm import ExchangePlan, NodeDirectory
from pygdist.graph import Shard, known_pairs, supervised
from pygdist.graph.links import in_order


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Edges as pairs.

    Attributes:
        source: Positions of the sources, ``(k,)`` int64, among this rank's rows and then those that ``plan`` fetches.
        target: Local ids of the targets, ``(k,)`` int64, ascending.
        e_id: Global ids of the edges, ``(k,)`` int64.
        plan: Fetches the rows of sources that other ranks own.
    """

    source: Tensor
    target: Tensor
    e_id: Tensor
    plan: ExchangePlan

    def where(self, mask: Tensor) -> Pairs:
        """Return the pairs that a mask keeps."""
        return replace(self, source=self.source[mask], target=self.target[mask], e_id=self.e_id[mask])


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkPairs:
    """The pairs of a shard: to learn from, to be evaluated on if edges are held out, and those that are edges.

    Attributes:
        shard: A rank's part of the graph.
        came: The pairs to learn from that other ranks sent here; ``None`` if they are the edges of the shard.
        val, test: Pairs; ``None`` if no edges are held out.
        known: See :func:`~pygdist.graph.known_pairs`.
    """

    shard: Shard
    came: Pairs | None
    val: Pairs | None
    test: Pairs | None
    known: Tensor

    @property
    def train(self) -> Pairs:
        """The pairs to learn from; made of the edges in each call, which costs less than memory for all of them."""
        return _here(self.shard, _learned(self.shard)) if self.came is None else self.came

    @classmethod
    def of(cls, shard: Shard, directory: NodeDirectory, *, splits_nodes: bool) -> LinkPairs:
        """Return the pairs whose targets this rank owns; all ranks make the call.

        Args:
            shard: A rank's part of the graph.
            directory: Says who owns which node.
            splits_nodes: The in-edges of a node may lie in several parts.
        """
        held = (shard.val_edges, shard.test_edges)
        if not splits_nodes:
            val, test = (None if edges is None else _here(shard, edges) for edges in held)
            return cls(shard=shard, came=None, val=val, test=test, known=known_pairs(shard))
        sent = [None if edges is None else _sent(shard, edges, directory) for edges in (_learned(shard), *held)]
        came, val, test = (None if edges is None else _placed(edges, directory) for edges in sent)
        owned = torch.arange(shard.num_owned, device=shard.n_id.device)
        ends = [torch.stack([owned, shard.owned_id]), *(edges[:2] for edges in sent if edges is not None)]
        target, source = torch.cat(ends, dim=1)
        return cls(shard=shard, came=came, val=val, test=test, known=in_order(target, source, shard.num_nodes))


def _learned(shard: Shard) -> Tensor:
    """Return the edges to learn from, ``(3, k)``: local source and target, and id."""
    csr, mask = shard.adjacency.csr(), supervised(shard)
    return torch.stack([csr.index[mask].long(), csr.row_index()[mask].long(), shard.e_id[mask]])


def _here(shard: Shard, edges: Tensor) -> Pairs:
    source, target, e_id = edges
    return Pairs(source=source, target=target, e_id=e_id, plan=shard.plan)


def _sent(shard: Shard, edges: Tensor, directory: NodeDirectory) -> Tensor:
    """Send edges to the owners of their targets; return those that came, ``(3, k)``: target, global source, id.

    Targets ascend, and so do the ids of edges with the same target.
    """
    source, target, e_id = edges
    numbers = torch.stack([shard.n_id[source], e_id], dim=1)
    came = directory.send(shard.n_id[target].to(directory.device), numbers.to(directory.device)).to(e_id.device)
    came = came[came[:, 2].argsort(stable=True)]
    return came[came[:, 0].argsort(stable=True)].t()


def _placed(edges: Tensor, directory: NodeDirectory) -> Pairs:
    target, source, e_id = edges
    plan, position = directory.plan(source.to(directory.device))
    return Pairs(source=position.to(source.device), target=target.clone(), e_id=e_id.clone(), plan=plan)
