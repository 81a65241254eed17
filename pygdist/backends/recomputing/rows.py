"""Puts the rows that a rank computes in order, hop by hop.

A hop reads rows of other ranks' nodes. Some of these nodes are *replicas* here: this rank has their in-edges and
computes their rows, and the rows that these read, down to the features (DepCache of NeutronStar, Sec. 2.2, Algorithm
2). The other rows are fetched. The model gets input rows for all replicas, so that steps between the layers compute
their rows too.

Rows have one order: owned nodes, then replicas by the last hop after which their rows are needed, then halo rows that
are no replicas. So the rows that hop ``l`` computes are leading rows, and the edges into them are leading edges.
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
from pygdist.kernels.csr import narrowest, pointers_of


def replicas_of(around: Neighbourhood, num_owned: int, chosen: list[Tensor]) -> list[Tensor]:
    """Find all replicas that follow from a choice: those chosen, and those that their rows are computed from.

    Args:
        around: The nodes around.
        num_owned: Owned nodes; they come first.
        chosen: At ``l - 1``, for hop ``l``: True for the sources of the rank's own edges that this rank computes in hop
            ``l - 1`` instead of fetching them; ``(N,)`` bool.

    Returns:
        For ``l`` from 0 to L: True for the replicas whose rows after hop ``l`` are needed; those of ``l + 1`` are among
        them.
    """
    owned = torch.arange(around.n_id.numel()) < num_owned
    target = torch.repeat_interleave(torch.arange(around.n_id.numel()), around.indptr.diff())
    needed = [torch.zeros_like(owned)]
    for mask in reversed(chosen):
        later = needed[0]
        now = later | mask
        now[around.index[later[target]]] = True
        needed.insert(0, now & ~owned)
    return needed


def make_rows(shard: Shard, communicator: Communicator, around: Neighbourhood, chosen: list[Tensor]) -> Rows:
    """Put rows and edges in order, and plan the exchanges with the other ranks. Every rank makes the call.

    Args:
        shard: The rank's shard.
        communicator: The ranks.
        around: The nodes within as many hops as ``chosen`` has entries.
        chosen: The rows that are computed; see :func:`replicas_of`.
    """
    num_owned, num_halo = shard.num_owned, shard.num_halo
    needed = replicas_of(around, num_owned, chosen)
    position = torch.arange(around.n_id.numel())
    is_halo = (position >= num_owned) & (position < num_owned + num_halo)
    # rows that are needed longest come first; among these, sources of own nodes: others may have to be fetched later
    last = torch.stack(needed).sum(0)
    has_row = (position < num_owned) | is_halo | (last > 0)
    rank_of = torch.where(position < num_owned, 4 * len(needed), 2 * last + is_halo.long())
    order = torch.argsort(-rank_of, stable=True)
    order = order[has_row[order]]
    base = torch.full_like(position, -1)
    base[order] = torch.arange(order.numel())
    computed = tuple(num_owned + int(mask.sum()) for mask in needed)

    degree = around.indptr.diff()[order]
    rows_with_edges = computed[min(1, len(chosen))]
    degree[rows_with_edges:] = 0
    entries = ranges(around.indptr[order], degree)
    indptr = pointers_of(degree[: computed[0]])
    index = base[around.index[entries]]
    num_own_edges = int(indptr[num_owned])
    csr = CSR(indptr, index.to(narrowest(order.numel())), order.numel())

    n_id, owner = around.n_id[order], around.owner[order]
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
        edges=_edges(communicator, around.start[order[replicas]], degree[replicas], owner[replicas], num_own_edges),
        num_own_edges=num_own_edges,
        exchanges=tuple(exchanges),
    )
    return _on(rows, shard.n_id.device)


def _arrival(shard: Shard, communicator: Communicator, n_id: Tensor, owner: Tensor, wanted: Tensor) -> Arrival:
    plan, order = fetch_plan(shard, communicator, n_id[wanted], owner[wanted])
    return Arrival(plan=plan, position=wanted[order])


def _edges(communicator: Communicator, start: Tensor, degree: Tensor, owner: Tensor, num_own: int) -> Arrival:
    """The exchange of the replicas' edges, from the first edge of each at its owner, and its number of edges."""
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
