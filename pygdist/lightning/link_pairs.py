"""Pairs of nodes that a link predictor scores: edges whose targets a rank owns, and plans that fetch their sources.

Parts of nodes hold all in-edges of their nodes. Where parts of edges split nodes, each edge is sent once to the owner
of its target, which then knows all in-edges of its nodes, and so which pairs are none.
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
    """The pairs of a shard: to learn from, to be evaluated on if edges are held out, and those that are not negative.

    Attributes:
        train, val, test: Pairs; ``val`` and ``test`` are ``None`` if no edges are held out.
        known: See :func:`~pygdist.graph.known_pairs`.
    """

    train: Pairs
    val: Pairs | None
    test: Pairs | None
    known: Tensor

    @classmethod
    def of(cls, shard: Shard, directory: NodeDirectory, *, splits_nodes: bool) -> LinkPairs:
        """Return the pairs whose targets this rank owns; all ranks make the call.

        Args:
            shard: A rank's part of the graph.
            directory: Says who owns which node.
            splits_nodes: The in-edges of a node may lie in several parts.
        """
        csr, mask = shard.adjacency.csr(), supervised(shard)
        train = torch.stack([csr.index[mask].long(), csr.row_index()[mask].long(), shard.e_id[mask]])
        edges = {"train": train, "val": shard.val_edges, "test": shard.test_edges}
        if splits_nodes:
            sent = {name: None if held is None else _sent(shard, held, directory) for name, held in edges.items()}
            pairs = {name: None if held is None else _placed(held, directory) for name, held in sent.items()}
            owned = torch.arange(shard.num_owned, device=shard.n_id.device)
            ends = [torch.stack([owned, shard.owned_id]), *(held[:2] for held in sent.values() if held is not None)]
            target, source = torch.cat(ends, dim=1)
            known = in_order(target, source, shard.num_nodes)
        else:
            pairs = {name: None if held is None else _here(shard, held) for name, held in edges.items()}
            known = known_pairs(shard)
        learned = pairs["train"]
        assert learned is not None
        return cls(train=learned, val=pairs["val"], test=pairs["test"], known=known)


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
    return Pairs(source=position.to(source.device), target=target, e_id=e_id, plan=plan)
