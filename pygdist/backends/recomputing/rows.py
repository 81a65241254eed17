"""Rows that a rank computes again instead of fetching them, hop by hop: what ``cache`` and ``hybrid`` share.

Of the nodes of other ranks that a hop reads, some are *replicas* here: this rank has their in-edges and computes them
itself, and so those that they read, down to the features (DepCache of NeutronStar, Sec. 2.2, Algorithm 2). The others
are fetched, as in ``comm``. The model is given rows for all replicas, so that what stands between the layers sees them
too; each layer then works on the leading rows that it or a later layer needs. In a chain of layers it puts out those
that are needed after it; where rows of several depths meet, copies of its first row stand for the rest.

Rows are in one order: owned, then replicas by the last hop whose result is needed of them, then halo rows that are no
replicas. So the rows that hop ``l`` computes are leading rows, and the edges into them leading edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.passes.rows import Rows
from pygdist.comm import Communicator, ExchangePlan
from pygdist.graph import Adjacency, Shard
from pygdist.graph.neighbourhood import Neighbourhood, fetch_plan, ranges
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest

__all__ = ["make_rows", "replicas_of"]


def replicas_of(found: Neighbourhood, num_owned: int, chosen: list[Tensor]) -> list[Tensor]:
    """Every row that must be computed here, if the chosen ones are.

    Args:
        found: The nodes around.
        num_owned: The first so many are the rank's own.
        chosen: For hop ``l``, at ``l - 1``: which of the sources of the rank's own edges are not fetched, but
            computed by this rank in hop ``l - 1``; ``(N,)`` bool.

    Returns:
        For ``l`` from 0 to L: the replicas whose row after hop ``l`` is needed; each holds those of the next.
    """
    own = torch.arange(found.n_id.numel()) < num_owned
    target = torch.repeat_interleave(torch.arange(found.n_id.numel()), found.indptr.diff())
    needed = [torch.zeros_like(own)]
    for mask in reversed(chosen):
        later = needed[0]
        now = later | mask
        now[found.index[later[target]]] = True
        needed.insert(0, now & ~own)
    return needed


def make_rows(shard: Shard, communicator: Communicator, found: Neighbourhood, chosen: list[Tensor]) -> Rows:
    """Put rows and edges in order, and agree with the other ranks on what travels. Every rank makes the call.

    Args:
        shard: What the rank holds.
        communicator: The ranks.
        found: The nodes within as many hops as ``chosen`` has entries.
        chosen: See :func:`replicas_of`.
    """
    num_owned, num_halo = shard.num_owned, shard.num_halo
    needed = replicas_of(found, num_owned, chosen)
    position = torch.arange(found.n_id.numel())
    is_halo = (position >= num_owned) & (position < num_owned + num_halo)
    # what is needed longest comes first; of these, what own nodes read: others may have to be fetched later
    last = torch.stack(needed).sum(0)
    kept = (position < num_owned) | is_halo | (last > 0)
    rank_of = torch.where(position < num_owned, 4 * len(needed), 2 * last + is_halo.long())
    order = torch.argsort(-rank_of, stable=True)
    order = order[kept[order]]
    base = torch.full_like(position, -1)
    base[order] = torch.arange(order.numel())
    computed = tuple(num_owned + int(mask.sum()) for mask in needed)

    degree = found.indptr.diff()[order]
    rows_with_edges = computed[min(1, len(chosen))]
    degree[rows_with_edges:] = 0
    entries = ranges(found.indptr[order], degree)
    indptr = torch.zeros(computed[0] + 1, dtype=torch.int64)
    torch.cumsum(degree[: computed[0]], 0, out=indptr[1:])
    index = base[found.index[entries]]
    num_own_edges = int(indptr[num_owned])
    csr = CSR(indptr, index.to(narrowest(order.numel())), order.numel())

    n_id, owner = found.n_id[order], found.owner[order]
    replicas = slice(num_owned, rows_with_edges)
    fetched, exchanges = [], []
    for hop in range(1, len(needed)):
        wanted = base[is_halo & ~needed[hop - 1]].sort().values
        fetched.append(_arrival(shard, communicator, n_id, owner, wanted))
        exchanges.append(bool(communicator.gather([float(wanted.numel())]).sum() > 0))
    ends = indptr[list(computed[1:])] if len(needed) > 1 else indptr[:0]
    rows = Rows(
        n_id=n_id,
        num_owned=num_owned,
        computed=computed,
        num_sources=tuple(
            max(before, int(index[:end].max()) + 1 if end else 0)
            for before, end in zip(computed[:-1], ends.tolist(), strict=True)
        ),
        adjacency=Adjacency.from_csr(csr),
        fetched=tuple(fetched),
        inputs=_arrival(shard, communicator, n_id, owner, torch.arange(num_owned, computed[0])),
        everything=_arrival(shard, communicator, n_id, owner, torch.arange(num_owned, order.numel())),
        edges=_edges(communicator, found.start[order[replicas]], degree[replicas], owner[replicas], num_own_edges),
        num_own_edges=num_own_edges,
        exchanges=tuple(exchanges),
    )
    return _on(rows, shard.n_id.device)


def _arrival(shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor, wanted: Tensor) -> Arrival:
    plan, order = fetch_plan(shard, communicator, n_id[wanted], owner[wanted])
    return Arrival(plan=plan, position=wanted[order])


def _edges(communicator: Communicator, start: Tensor, degree: Tensor, owner: Tensor, num_own: int) -> Arrival:
    """Edges of replicas: where those of each begin at its owner, and how many they are."""
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=communicator.world_size).tolist()
    extents = torch.stack([start, degree], dim=1)[order]
    asked = communicator.all_to_all(extents.split(counts), label="plan of an exchange of edges")
    sent = [ranges(*part.unbind(1)) for part in asked]
    plan = ExchangePlan(
        send_index=torch.cat(sent),
        send_counts=tuple(part.numel() for part in sent),
        recv_counts=tuple(int(part[:, 1].sum()) for part in extents.split(counts)),
    )
    first = num_own + degree.cumsum(0) - degree
    return Arrival(plan=plan, position=ranges(first[order], degree[order]))


def _on(rows: Rows, device: torch.device) -> Rows:
    if device.type == "cpu":
        return rows
    return Rows(
        **{
            **vars(rows),
            "n_id": rows.n_id.to(device),
            "adjacency": rows.adjacency.to_device(device),
            "fetched": tuple(one.to(device) for one in rows.fetched),
            **{name: getattr(rows, name).to(device) for name in ("inputs", "everything", "edges")},
        }
    )
