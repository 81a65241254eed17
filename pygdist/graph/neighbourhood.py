"""What lies within some hops of a rank's nodes: asked for from its owners, who answer with in-edges.

A shard knows the in-edges of its own nodes. A backend that computes copies of others' rows needs theirs too, and
so on, one hop after the other. Every rank makes every call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan
from pygdist.graph.shard import Shard

__all__ = ["Neighbourhood", "fetch_plan", "in_neighbourhood", "ranges"]


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Nodes near those of a rank, and in-edges of those that are near enough.

    Attributes:
        n_id: Global ids: the shard's rows in their order (owned, then halo), then the others as they were met.
        owner: The rank that owns each.
        num_hops: How many hops away a node may be.
        indptr: In-edges of row ``i`` are ``indptr[i]`` to ``indptr[i + 1]``; rows that are ``num_hops`` away or more
            have none here.
        index: Source of each edge, a position in ``n_id``; in its owner's order.
        place: Position of each edge among those of the rank that owns its target.

    Shapes:
        ``n_id`` and ``owner`` are :math:`(N)`, ``indptr`` :math:`(N + 1)`, ``index`` and ``place`` :math:`(E)`; int64.
    """

    n_id: Tensor
    owner: Tensor
    num_hops: int
    indptr: Tensor
    index: Tensor
    place: Tensor


def in_neighbourhood(shard: Shard, communicator: Communicator, num_hops: int) -> Neighbourhood:
    """The nodes within ``num_hops`` hops of a rank's own, against the direction of the edges.

    Args:
        shard: What the rank holds.
        communicator: The ranks; each makes this call, with the same ``num_hops``.
        num_hops: At least 1: sources of the rank's own edges, which the shard knows.
    """
    csr = shard.adjacency.csr()
    counts = [shard.num_owned, *shard.plan.recv_counts]  # the halo is grouped by owner
    owner = torch.repeat_interleave(torch.tensor([shard.rank, *range(shard.num_parts)]), torch.tensor(counts))
    n_id = shard.n_id.cpu()
    degrees, sources, places = [csr.indptr.diff().cpu()], [csr.index.long().cpu()], [torch.arange(csr.num_entries)]
    done = shard.num_owned
    for _ in range(num_hops - 1):
        frontier = slice(done, n_id.numel())
        degree, source, place, ids, owners = _ask(shard, communicator, n_id[frontier], owner[frontier], owner)
        done = n_id.numel()
        n_id, owner, position = _met(n_id, owner, ids, owners)
        degrees.append(degree)
        sources.append(position[source])
        places.append(place)
    indptr = torch.zeros(n_id.numel() + 1, dtype=torch.int64)
    known = torch.cat(degrees)
    indptr[1 : known.numel() + 1] = known
    return Neighbourhood(
        n_id=n_id,
        owner=owner,
        num_hops=num_hops,
        indptr=indptr.cumsum(0),
        index=torch.cat(sources),
        place=torch.cat(places),
    )


def fetch_plan(shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor) -> tuple[ExchangePlan, Tensor]:
    """The plan that fetches rows of any nodes from their owners.

    Args:
        shard: What this rank holds.
        communicator: The ranks; each makes this call.
        n_id: Global ids of the rows that this rank wants, none twice and none of its own.
        owner: Who owns each.

    Returns:
        The plan, and where each row that arrives stands in ``n_id``.
    """
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=communicator.world_size).tolist()
    asked = communicator.swap(n_id[order].split(counts), label="plan of an exchange")
    rows = [torch.searchsorted(shard.owned_id.cpu(), ids) for ids in asked]
    plan = ExchangePlan(
        send_index=torch.cat(rows).to(shard.n_id.device),
        send_counts=tuple(part.numel() for part in rows),
        recv_counts=tuple(counts),
    )
    return plan, order


def _ask(
    shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor, owner_of_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In-edges of nodes: number, source and place of each, in the order asked for; ids of the sources, their owners.

    Edges travel as positions among the sources, of which there are far fewer: what is done for each edge is an indexed
    copy, and only sources are looked up.
    """
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=communicator.world_size).tolist()
    asked = communicator.swap(n_id[order].split(counts), label="in-edges, asked for")
    csr, owned = shard.adjacency.csr(), shard.owned_id.cpu()
    indptr, index, ids = csr.indptr.cpu(), csr.index.cpu(), shard.n_id.cpu()
    extents, edges, nodes = [], [], []
    for wanted in asked:
        rows = torch.searchsorted(owned, wanted)
        start, degree = indptr[rows], indptr[rows + 1] - indptr[rows]
        local = index[ranges(start, degree)]
        used = torch.zeros(ids.numel(), dtype=torch.bool)
        used[local] = True
        known = used.nonzero().squeeze(1)
        extents.append(torch.stack([start, degree], dim=1))
        edges.append((used.cumsum(0, dtype=torch.int32) - 1)[local])
        nodes.append(torch.stack([ids[known], owner_of_rows[known]], dim=1))
    start, degree = torch.cat(communicator.swap(extents, label="in-edges, numbers")).unbind(1)
    found = communicator.swap(edges, label="in-edges")
    met = communicator.swap(nodes, label="in-edges, sources")
    before = [0, *itertools.accumulate(part.size(0) for part in met)]
    source = torch.cat([part.long() + first for part, first in zip(found, before, strict=False)])
    # back to the order asked for
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    first = degree.cumsum(0) - degree
    start, degree = start[back], degree[back]
    ids, owners = torch.cat(met).unbind(1)
    return degree, source[ranges(first[back], degree)], ranges(start, degree), ids, owners


def ranges(start: Tensor, length: Tensor) -> Tensor:
    """``start[0], start[0] + 1, ...`` for ``length[0]`` numbers, then the same for the next, and so on."""
    total = int(length.sum())
    offset = start - (length.cumsum(0) - length)
    return torch.repeat_interleave(offset, length, output_size=total) + torch.arange(total)


def _met(n_id: Tensor, owner: Tensor, ids: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append the nodes of ``ids`` that are new; also the position of each of ``ids``."""
    values, first = _unique(torch.cat([n_id, ids]))
    new = first >= n_id.numel()
    grown = torch.cat([n_id, values[new]])
    owner = torch.cat([owner, torch.cat([owner, owners])[first[new]]])
    by_id = torch.argsort(grown)
    return grown, owner, by_id[torch.searchsorted(grown[by_id], ids.contiguous())]


def _unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """Different values, ascending, and where each stands first."""
    ordered, order = torch.sort(values, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first], order[is_first]
