"""Where the rows of nodes are, whoever owns them: for rows that no plan foresaw.

A plan that is made with the partition says who fetches what in every hop. What is drawn anew in every epoch (the other
ends of pairs that are no edges) has to be found first. Which rank owns a node is known to the rank whose number is the
node's, modulo the ranks, so no rank holds more than its share of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.comm.communicator import Communicator
from pygdist.comm.plan import ExchangePlan

__all__ = ["NodeDirectory"]


class NodeDirectory:
    """Tells owners and rows of nodes by their global ids; every rank makes each call.

    Args:
        owned_id: Global ids of this rank's nodes.
        num_nodes: Nodes of all ranks.
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
        order = (owned_id % size).argsort(stable=True)
        said = torch.stack([owned_id, rows], dim=1)[order].split(_counts(owned_id % size, size))
        known = communicator.swap(list(said), label="where nodes are")
        mine = -(-(num_nodes - communicator.rank) // size)
        self._owner = torch.full((mine,), -1, dtype=torch.int32, device=owned_id.device)
        self._row = torch.zeros(mine, dtype=torch.int64, device=owned_id.device)
        for rank, part in enumerate(known):
            place = part[:, 0] // size
            self._owner[place], self._row[place] = rank, part[:, 1]

    def plan(self, ids: Tensor) -> tuple[ExchangePlan, Tensor]:
        """How to fetch the rows of nodes, each once, and where they are then.

        Args:
            ids: Global ids of nodes, in any order and as often as one likes.

        Returns:
            A plan, and for each of ``ids`` its row among this rank's own and, after these, those that are fetched.
        """
        communicator, size = self._communicator, self._communicator.world_size
        wanted, place = ids.unique(return_inverse=True)
        asked = wanted % size
        order = asked.argsort(stable=True)
        questions = communicator.swap(list(wanted[order].split(_counts(asked, size))), label="which nodes, where")
        answers = communicator.swap(
            [torch.stack([self._owner[one // size].long(), self._row[one // size]], dim=1) for one in questions],
            label="where nodes are, answered",
        )
        owner, row = torch.empty_like(wanted), torch.empty_like(wanted)
        owner[order], row[order] = torch.cat(answers).unbind(1)
        grouped = owner.argsort(stable=True)
        counts = _counts(owner, size)
        requests = list(row[grouped].split(counts))
        requests[communicator.rank] = row.new_empty(0)
        sent = communicator.swap(requests, label="which rows")
        counts[communicator.rank] = 0
        own = owner[grouped] == communicator.rank
        position = torch.empty_like(wanted)
        position[grouped] = torch.where(own, row[grouped], self._num_owned + (~own).cumsum(0) - 1)
        plan = ExchangePlan(
            send_index=torch.cat(sent), send_counts=tuple(one.numel() for one in sent), recv_counts=tuple(counts)
        )
        return plan, position[place]


def _counts(rank: Tensor, size: int) -> list[int]:
    return torch.bincount(rank, minlength=size).tolist()
