"""The nodes whose rows batches ask for most, which are worth a copy on each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.kernels import CSR
from pygdist.sampler.owners import NodeOwners, RemoteRows


def out_degrees(csr: CSR, column_id: Tensor, owners: NodeOwners, communicator: Communicator) -> Tensor:
    """Return the number of edges out of each of this rank's nodes, in all parts; every rank makes the call.

    Args:
        csr: In-edges of this rank's nodes.
        column_id: Ids of the matrix's columns in the whole graph, ``(m,)`` int64.
        owners: The owners of nodes.
        communicator: The ranks.

    Returns:
        ``(n,)`` int64, in the order of ``owners.owned_id``.
    """
    count = torch.bincount(csr.index, minlength=csr.num_cols)
    owner = owners.owner_of(column_id)
    by_rank = [torch.stack([column_id, count], dim=1)[owner == rank] for rank in range(communicator.world_size)]
    degree = torch.zeros(owners.owned_id.numel(), dtype=torch.int64)
    for pairs in communicator.all_to_all(by_rank, label="out-degrees"):
        degree.index_add_(0, owners.row_of(pairs[:, 0].contiguous()), pairs[:, 1])
    return degree


def hottest(degree: Tensor, count: int, owners: NodeOwners, communicator: Communicator) -> Tensor:
    """Return the ids of the ``count`` nodes of other ranks with the largest degrees; every rank makes the call.

    Args:
        degree: Degrees of this rank's nodes, ``(n,)`` int64.
        count: Number of nodes; the same on all ranks.
        owners: The owners of nodes.
        communicator: The ranks.
    """
    top = degree.topk(min(count, degree.numel()))
    offered = torch.stack([owners.owned_id[top.indices], top.values], dim=1)
    of_others = communicator.all_to_all([offered] * communicator.world_size, label="hot nodes")
    of_others[communicator.rank] = offered[:0]
    ids, degrees = torch.cat(of_others).unbind(dim=1)
    return ids[degrees.argsort(descending=True, stable=True)[:count]]


class KeptAfterEpoch:
    """Counts the rows that the first epoch asks for; keeps those asked for most from the second epoch on.

    All ranks call it before each epoch.

    Args:
        rows: The rows of nodes.
        owners: The owners of nodes.
        count: Rows to keep; the same on all ranks.
    """

    def __init__(self, rows: RemoteRows, owners: NodeOwners, count: int) -> None:
        self._rows, self._owners, self._count = rows, owners, count
        self._epochs = 0

    def __call__(self) -> None:
        """Begin to count, or end it; later, do nothing."""
        self._epochs += 1
        if self._epochs == 1:
            self._rows.asked = torch.zeros(self._owners.num_nodes, dtype=torch.int32)
        elif self._epochs == 2:
            asked, self._rows.asked = self._rows.asked, None
            assert asked is not None, "it was set before the first epoch"
            top = asked.topk(min(self._count, asked.numel()))
            ids = top.indices[top.values > 0]
            self._rows.keep(ids, self._owners.owner_of(ids))
