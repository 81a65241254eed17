"""A directory of all nodes: finds the owner and the row of any node, for exchanges that were not planned.

The plan of a hop is made with the partition. For nodes that are drawn in every epoch, such as the ends of negative
pairs, ranks must first ask for the owners. Rank *id mod world_size* knows the owner of node *id*, so each rank holds an
equal share of the directory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.comm.communicator import Communicator
from pygdist.comm.plan import ExchangePlan


class NodeDirectory:
    """Plans the exchange of rows of any nodes, by their global ids. Every rank makes each call.

    Args:
        owned_id: Global ids of this rank's nodes, ``(num_owned,)`` int64.
        num_nodes: Number of nodes of all ranks.
        communicator: The ranks.

    Example:
        >>> directory = NodeDirectory(shard.owned_id, shard.num_nodes, communicator)
        >>> plan, position = directory.plan(torch.tensor([17, 4]))
        >>> rows = torch.cat([x, communicator.exchange_rows(x, plan)])[position]
    """

    def __init__(self, owned_id: Tensor, num_nodes: int, communicator: Communicator) -> None:
        self._communicator, self._num_owned = communicator, owned_id.numel()
        size = communicator.world_size
        rows = torch.arange(owned_id.numel(), device=owned_id.device)
        keeper = owned_id % size
        entries = torch.stack([owned_id, rows], dim=1)[keeper.argsort(stable=True)].split(_counts(keeper, size))
        received = communicator.all_to_all(list(entries), label="where nodes are")
        num_entries = -(-(num_nodes - communicator.rank) // size)
        self._owner = torch.full((num_entries,), -1, dtype=torch.int32, device=owned_id.device)
        self._row = torch.zeros(num_entries, dtype=torch.int64, device=owned_id.device)
        for rank, entries_of_rank in enumerate(received):
            entry = entries_of_rank[:, 0] // size
            self._owner[entry], self._row[entry] = rank, entries_of_rank[:, 1]

    @property
    def device(self) -> torch.device:
        """The device of this rank's tables; methods take ids on this device."""
        return self._owner.device

    def plan(self, ids: Tensor) -> tuple[ExchangePlan, Tensor]:
        """Plan to fetch the rows of nodes, each once.

        Args:
            ids: Global ids of nodes, ``(n,)`` int64, in any order; an id may come several times.

        Returns:
            A plan, and the position of each of ``ids``, ``(n,)`` int64, in a list of this rank's own rows followed by
            the fetched rows.
        """
        wanted, inverse = ids.unique(return_inverse=True)
        owner, row = self._look_up(wanted)
        communicator, grouped = self._communicator, owner.argsort(stable=True)
        counts = _counts(owner, communicator.world_size)
        requests = list(row[grouped].split(counts))
        requests[communicator.rank] = row.new_empty(0)
        counts[communicator.rank] = 0
        sent = communicator.all_to_all(requests, label="which rows")
        is_owned = owner[grouped] == communicator.rank
        position = torch.empty_like(wanted)
        position[grouped] = torch.where(is_owned, row[grouped], self._num_owned + (~is_owned).cumsum(0) - 1)
        send_counts = tuple(rows.numel() for rows in sent)
        plan = ExchangePlan(send_index=torch.cat(sent), send_counts=send_counts, recv_counts=tuple(counts))
        return plan, position[inverse]

    def send(self, ids: Tensor, values: Tensor) -> Tensor:
        """Send numbers to the owners of nodes; every rank makes the call.

        Args:
            ids: Global ids of nodes, ``(n,)`` int64, in any order; an id may come several times.
            values: The numbers, ``(n, k)`` int64.

        Returns:
            The numbers sent for this rank's nodes, ``(m, 1 + k)`` int64. Each line has the node's row on this rank,
            then the numbers.
        """
        owner, row = self._look_up(ids)
        entries = torch.cat([row[:, None], values], dim=1)[owner.argsort(stable=True)]
        counts = _counts(owner, self._communicator.world_size)
        return torch.cat(self._communicator.all_to_all(list(entries.split(counts)), label="numbers of nodes"))

    def _look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner of each node, and its row there."""
        size = self._communicator.world_size
        keeper = ids % size
        order = keeper.argsort(stable=True)
        asked = self._communicator.all_to_all(list(ids[order].split(_counts(keeper, size))), label="which nodes, where")
        answers = [torch.stack([self._owner[node // size].long(), self._row[node // size]], dim=1) for node in asked]
        answered = torch.cat(self._communicator.all_to_all(answers, label="where nodes are, answered"))
        owner, row = torch.empty_like(answered).index_copy_(0, order, answered).unbind(1)
        return owner, row


def _counts(rank: Tensor, size: int) -> list[int]:
    return torch.bincount(rank, minlength=size).tolist()
