"""Nodes and edges within some hops of a rank's own nodes, fetched from their owners.

A shard has the in-edges of its own nodes. A backend that computes replicas of other rows needs the in-edges of these
too, hop by hop. Every rank makes every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan
from pygdist.graph.shard import Shard
from pygdist.kernels.csr import narrowest


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Nodes within some hops of a rank's nodes, and the in-edges of all but the outermost.

    Attributes:
        n_id: Global ids: the shard's rows in their order (owned, then halo), then further nodes by hop.
        owner: The rank that owns each node.
        num_hops: Largest number of hops to a node.
        indptr: In-edges of row ``i`` are ``indptr[i]`` to ``indptr[i + 1]``; rows that are ``num_hops`` away have none.
        index: Source of each edge, a position in ``n_id``; edges of a row are in its owner's order.
        start: Position of each row's first in-edge among the edges of its owner, for rows within ``num_hops - 1`` hops.

    Shapes:
        ``n_id`` and ``owner`` are :math:`(N)`, ``indptr`` :math:`(N + 1)`, ``index`` :math:`(E)`, ``start`` at most
        :math:`(N)`; int64.
    """

    n_id: Tensor
    owner: Tensor
    num_hops: int
    indptr: Tensor
    index: Tensor
    start: Tensor


def in_neighbourhood(shard: Shard, communicator: Communicator, num_hops: int) -> Neighbourhood:
    """Fetch the nodes within ``num_hops >= 1`` hops of a rank's own nodes, against the direction of the edges.

    Every rank makes this call, with the same ``num_hops``. With 1 nothing is fetched, since the shard has the sources
    of its own edges.
    """
    csr = shard.adjacency.csr()
    counts = [shard.num_owned, *shard.plan.recv_counts]  # the halo is grouped by owner
    owner = torch.repeat_interleave(torch.tensor([shard.rank, *range(shard.num_parts)]), torch.tensor(counts))
    n_id = shard.n_id.cpu()
    starts, degrees, sources = [csr.indptr[:-1].cpu()], [csr.indptr.diff().cpu()], [csr.index.long().cpu()]
    done = shard.num_owned
    for _ in range(num_hops - 1):
        frontier = slice(done, n_id.numel())
        start, degree, edges, met = _ask(shard, communicator, n_id[frontier], owner[frontier], owner)
        done = n_id.numel()
        n_id, owner, position = _met(n_id, owner, *torch.cat(met).unbind(1))
        starts.append(start)
        degrees.append(degree)
        of_rank = position.split([part.size(0) for part in met])
        sources += [among.index_select(0, part) for among, part in zip(of_rank, edges, strict=True)]
    degree = torch.cat(degrees)
    indptr = torch.zeros(n_id.numel() + 1, dtype=torch.int64)
    indptr[1 : degree.numel() + 1] = degree
    return Neighbourhood(
        n_id=n_id,
        owner=owner,
        num_hops=num_hops,
        indptr=indptr.cumsum_(0),
        index=torch.cat(sources),
        start=torch.cat(starts),
    )


def fetch_plan(shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor) -> tuple[ExchangePlan, Tensor]:
    """Make the plan that fetches rows of any nodes from their owners; every rank makes this call.

    ``n_id`` are global ids, all different, none of the rank's own; ``owner`` is the rank that owns each.

    Returns:
        The plan, and the position in ``n_id`` of each row in the order of arrival.
    """
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=communicator.world_size).tolist()
    asked = communicator.all_to_all(n_id[order].split(counts), label="plan of an exchange")
    rows = [torch.searchsorted(shard.owned_id.cpu(), ids) for ids in asked]
    plan = ExchangePlan(
        send_index=torch.cat(rows).to(shard.n_id.device),
        send_counts=tuple(part.numel() for part in rows),
        recv_counts=tuple(counts),
    )
    return plan, order


def _ask(
    shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor, owner_of_rows: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Fetch the in-edges of nodes that are grouped by owner.

    Returns for each node the position of its first in-edge at its owner, and its in-degree; for each owner, the source
    of each edge as a position in the owner's list of sources, and this list: pairs of id and owner. There are far fewer
    sources than edges, so only the sources are looked up, and each edge takes an indexed copy.
    """
    counts = torch.bincount(owner, minlength=communicator.world_size).tolist()
    asked = communicator.all_to_all(n_id.split(counts), label="in-edges, asked for")
    csr, owned = shard.adjacency.csr(), shard.owned_id.cpu()
    indptr, index, ids = csr.indptr.cpu(), csr.index.cpu(), shard.n_id.cpu()
    extents, edges, nodes = [], [], []
    narrow = narrowest(index.numel())
    for wanted in asked:
        rows = torch.searchsorted(owned, wanted)
        start, degree = indptr[rows], indptr[rows + 1] - indptr[rows]
        local = index.index_select(0, ranges(start.to(narrow), degree))
        used = torch.zeros(ids.numel(), dtype=torch.bool)
        used[local] = True
        sources = used.nonzero().squeeze(1)
        extents.append(torch.stack([start, degree], dim=1))
        edges.append((used.cumsum(0, dtype=torch.int32) - 1).index_select(0, local))
        nodes.append(torch.stack([ids[sources], owner_of_rows[sources]], dim=1))
    start, degree = torch.cat(communicator.all_to_all(extents, label="in-edges, numbers")).unbind(1)
    positions = communicator.all_to_all(edges, label="in-edges")
    return start, degree, positions, communicator.all_to_all(nodes, label="in-edges, sources")


def ranges(start: Tensor, length: Tensor) -> Tensor:
    """Concatenate the ranges ``start[i], ..., start[i] + length[i] - 1``, in the dtype of ``start``."""
    total = int(length.sum())
    offset = start - (length.cumsum(0) - length).to(start.dtype)
    return torch.repeat_interleave(offset, length, output_size=total).add_(torch.arange(total, dtype=start.dtype))


def _met(n_id: Tensor, owner: Tensor, ids: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append the new nodes among ``ids``, grouped by owner; also return the position of each of ``ids``."""
    values, first = _unique(torch.cat([n_id, ids]))
    new = first >= n_id.numel()
    ids_of_new, owner_of_new = values[new], owners[first[new] - n_id.numel()]
    order = torch.argsort(owner_of_new, stable=True)
    grown = torch.cat([n_id, ids_of_new[order]])
    owner = torch.cat([owner, owner_of_new[order]])
    by_id = torch.argsort(grown)
    return grown, owner, by_id[torch.searchsorted(grown[by_id], ids.contiguous())]


def _unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different values, ascending, and the first position of each."""
    ordered, order = torch.sort(values, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first], order[is_first]
