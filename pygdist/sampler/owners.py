"""The owners of nodes, known to all ranks, and rows that are fetched from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.kernels.csr import narrowest
from pygdist.sampler._native import copy_rows

_IDS_AT_A_TIME = 1 << 22  # that each rank sends to each
_NOBODY = torch.iinfo(torch.int32).min


@dataclass(frozen=True, eq=False)
class NodeOwners:
    """Maps each node to the rank that owns it.

    Attributes:
        owned_id: Ids of this rank's nodes, ascending, ``(n,)`` int64.
        owner_of: Returns the ranks that own some nodes, ``(k,)`` int64, by their ids, ``(k,)`` int64.
        num_nodes: Nodes of the whole graph.
        row: For each node of the graph, its row if this rank owns it; ``None`` to search for ids instead.
    """

    owned_id: Tensor
    owner_of: Callable[[Tensor], Tensor]
    num_nodes: int
    row: Tensor | None = None

    @classmethod
    def of(cls, owned_id: Tensor, num_nodes: int, communicator: Communicator) -> Self:
        """Tell all ranks who owns which nodes; every rank makes the call.

        Each rank keeps 4 bytes for each node of the graph: its row, or, if another rank owns it, that rank. For hashed
        nodes a function of the id does without. :class:`~pygdist.comm.directory.NodeDirectory` keeps a share of the
        nodes on each rank, but takes an exchange for each look-up.

        Raises:
            InputError: On all ranks, if a node has no owner or two, or an id is out of range.
        """
        outside = int(((owned_id < 0) | (owned_id >= num_nodes)).sum())
        communicator.agree(f"{outside} ids of owned nodes are not in 0..{num_nodes - 1}" if outside else None)
        place = torch.full((num_nodes,), _NOBODY, dtype=torch.int32)
        most = int(communicator.gather([owned_id.numel()])[:, 0].max())
        twice = 0
        for start in range(0, most, _IDS_AT_A_TIME):
            ids = owned_id[start : start + _IDS_AT_A_TIME].contiguous()
            for rank, arrived in enumerate(communicator.all_to_all([ids] * communicator.world_size, label="owners")):
                twice += int((place[arrived] != _NOBODY).sum())
                here = torch.arange(start, start + arrived.numel(), dtype=torch.int32)
                place[arrived] = here if rank == communicator.rank else -1 - rank
        missing = int((place == _NOBODY).sum())
        wrong = f"{missing} of {num_nodes} nodes have no owner, {twice} have two" if missing or twice else None
        communicator.agree(wrong)

        def owner_of(ids: Tensor) -> Tensor:
            at = place[ids].to(torch.int64)
            return torch.where(at >= 0, communicator.rank, -1 - at)

        return cls(owned_id, owner_of, num_nodes, place)

    def check(self, communicator: Communicator) -> None:
        """Check that owners and ids fit; every rank makes the call.

        Raises:
            InputError: On all ranks, if one has ids that are wrong or owners that do not fit them.
        """
        communicator.agree(self._wrong(communicator.rank))
        num_owned = int(communicator.gather([self.owned_id.numel()]).sum())
        if num_owned != self.num_nodes:  # as no node has two owners, each has one now
            raise InputError(f"the ranks own {num_owned} nodes, but the graph has {self.num_nodes}")
        if not communicator.are_alike([self.num_nodes]):
            raise InputError("the ranks have other numbers of nodes for the whole graph")

    def row_of(self, ids: Tensor) -> Tensor:
        """Return the rows of this rank's nodes by their ids; all are owned here."""
        return torch.searchsorted(self.owned_id, ids) if self.row is None else self.row[ids].to(torch.int64)

    def _wrong(self, rank: int) -> str | None:
        ids = self.owned_id
        if ids.dtype != torch.int64 or ids.dim() != 1 or not bool((ids.diff() > 0).all()):
            return f"owned_id must be ascending int64 in one dimension, got {ids.dtype} {tuple(ids.shape)}"
        if ids.numel() and not 0 <= int(ids[0]) <= int(ids[-1]) < self.num_nodes:
            return f"owned_id must be in 0..{self.num_nodes - 1}, got {int(ids[0])} to {int(ids[-1])}"
        if not bool((self.owner_of(ids) == rank).all()):
            return f"owner_of names another rank for nodes in the owned_id of rank {rank}"
        return None


class RemoteRows:
    """Rows that other ranks hold, fetched by their ids in one exchange; those asked most can be kept here.

    Args:
        rows: This rank's rows, ``(n, *)``, on the CPU.
        row_of: Returns the rows of some ids that this rank holds, ``(k,)`` int64.
        num_ids: Number of ids of all ranks.
        communicator: The ranks.
        label: Names the rows in messages and in the meter's labels.

    Attributes:
        asked: If set, counts how often each id of another rank was asked for, ``(num_ids,)`` int32.
    """

    def __init__(
        self, rows: Tensor, row_of: Callable[[Tensor], Tensor], num_ids: int, communicator: Communicator, *, label: str
    ) -> None:
        self._rows, self._row_of, self._communicator, self._label = rows.contiguous(), row_of, communicator, label
        self._kept_id, self._kept = torch.empty(0, dtype=torch.int64), rows[:0]
        self._ids = narrowest(num_ids)
        self.asked: Tensor | None = None

    def fetch(self, ids: Tensor, owner: Tensor) -> Tensor:
        """Return rows by their ids. Every rank makes the call, without ids if it needs none.

        Args:
            ids: Ids, ``(k,)`` int64.
            owner: The rank that holds each, ``(k,)`` int64.

        Returns:
            ``(k, *)`` in the type of the rows, memory of its own. Every id and row of another rank that is not kept
            here travels once for each time it is asked.
        """
        communicator, out = self._communicator, self._rows.new_empty((ids.numel(), *self._rows.shape[1:]))
        here = (owner == communicator.rank).nonzero().view(-1)
        copy_rows(self._rows, self._row_of(ids[here]), out, here)
        kept = self._place_of_kept(ids)
        if kept is not None:
            owner = owner.masked_fill(kept >= 0, communicator.rank)
            there = (kept >= 0).nonzero().view(-1)
            copy_rows(self._kept, kept[there], out, there)
        grouped = owner.argsort(stable=True)
        grouped = grouped[owner[grouped] != communicator.rank]
        if self.asked is not None:
            self.asked.index_add_(0, ids[grouped], torch.ones(grouped.numel(), dtype=torch.int32))
        counts = torch.bincount(owner[grouped], minlength=communicator.world_size).tolist()
        asked = list(ids[grouped].to(self._ids).split(counts))
        arrived = communicator.all_to_all(asked, label=f"{self._label}, ids")
        copy_rows(self._swapped([self._answer(one) for one in arrived], counts), None, out, grouped)
        return out

    def _answer(self, asked: Tensor) -> Tensor:
        rows = self._rows.new_empty((asked.numel(), *self._rows.shape[1:]))
        copy_rows(self._rows, self._row_of(asked.to(torch.int64)), rows, None)
        return rows

    def keep(self, ids: Tensor, owner: Tensor) -> None:
        """Keep the rows of some nodes of other ranks here from now on, in place of those before; every rank calls it.

        Arguments are those of :meth:`fetch`; no id is given twice.
        """
        self._kept_id, self._kept = self._kept_id[:0], self._kept[:0]
        order = ids.argsort()
        ids, owner = ids[order], owner[order]
        self._kept_id, self._kept = ids, self.fetch(ids, owner)

    def _place_of_kept(self, ids: Tensor) -> Tensor | None:
        """Return the place of each id among those kept, -1 for others; ``None`` if none is kept."""
        if not self._kept_id.numel():
            return None
        place = torch.searchsorted(self._kept_id, ids).clamp(max=self._kept_id.numel() - 1)
        return torch.where(self._kept_id[place] == ids, place, -1)

    def _swapped(self, answers: list[Tensor], counts: list[int]) -> Tensor:
        """Send rows to those who asked; return those that this rank asked for, by rank."""
        communicator, device = self._communicator, self._communicator.device
        arrived = self._rows.new_empty((sum(counts), *self._rows.shape[1:]), device=device)
        if communicator.world_size > 1:
            outgoing = [one.contiguous().to(device) for one in answers]
            communicator.send_and_receive(outgoing, list(arrived.split(counts)), f"{self._label}, rows")
        return arrived.to(self._rows.device)
