"""A hop's edges in chunks by where their sources come from, so that each is aggregated when its rows are here.

The in-edges whose sources arrive from rank *j* are one chunk (NeutronStar, Sec. 4.3), those whose sources this rank
holds are another, which needs nothing to arrive. Columns of a chunk count the rows of its rank as they arrive, so that
rows are aggregated where they lie, and gradients are written where they leave from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.overflow import Overflow
from pygdist.comm import ExchangePlan, Leg, part_of
from pygdist.graph.identity import fixable, identity_of
from pygdist.kernels import CSR, transpose
from pygdist.kernels.csr import narrowest, pointers

__all__ = ["Arrival", "Chunk", "Chunks", "split_by_source"]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows that are fetched at once, and where they belong.

    Attributes:
        plan: Who sends what.
        position: Of each row that arrives, among the rows of this rank; ``(h,)`` int64.
    """

    plan: ExchangePlan
    position: Tensor

    @classmethod
    def nothing(cls, device: torch.device) -> Arrival:
        """No row, from nobody."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(plan=ExchangePlan(send_index=none, send_counts=(), recv_counts=()), position=none)

    def to(self, device: torch.device) -> Arrival:
        """The same on ``device``."""
        return Arrival(plan=self.plan.to(device), position=self.position.to(device))

    def piece(self, first: int, rows: int) -> Arrival:
        """Of what each rank sends to each other the rows from number ``first`` on, at most so many."""
        plan = self.plan
        send, arrive = (
            tuple(min(max(count - first, 0), rows) for count in counts)
            for counts in (plan.send_counts, plan.recv_counts)
        )
        peers = range(len(send))
        index = [plan.send_index_of(peer)[first : first + rows] for peer in peers]
        position = [self.positions_of(peer)[first : first + rows] for peer in peers]
        cut = ExchangePlan(send_index=torch.cat(index), send_counts=send, recv_counts=arrive)
        return Arrival(plan=cut, position=torch.cat(position))

    def positions_of(self, peer: int, part: int = 0, parts: int = 1) -> Tensor:
        """Where the rows of ``peer`` belong, or those of a part of them."""
        start, count = sum(self.plan.recv_counts[:peer]), self.plan.recv_counts[peer]
        return self.position[start : start + count][part_of(count, part, parts)]


class _Structure:
    """A CSR that waits to be read: in as little memory as it takes, and beyond the device's if that is short."""

    def __init__(self, csr: CSR, overflow: Overflow | None, *, tight: bool) -> None:
        self._whole = csr if overflow is None and not tight else None
        if self._whole is not None:
            return
        self._num_rows, self._num_cols = csr.num_rows, csr.num_cols
        # the row of each entry, where that takes less memory than a pointer for each row of the hop
        self._by_entry = tight and torch.int32.itemsize * csr.num_entries < csr.indptr.nbytes
        rows = csr.row_index().to(torch.int32) if self._by_entry else csr.indptr
        kept = (lambda tensor: tensor) if overflow is None else overflow.keep
        self._rows, self._index = kept(rows), kept(csr.index)
        self._perm = None if csr.perm is None else kept(csr.perm)

    def on(self, device: torch.device) -> CSR:
        if self._whole is not None:
            return self._whole
        rows, index = (tensor.to(device, non_blocking=True) for tensor in (self._rows, self._index))
        perm = None if self._perm is None else self._perm.to(device, non_blocking=True)
        return CSR(pointers(rows, self._num_rows) if self._by_entry else rows, index, self._num_cols, perm)


class Chunk:
    """Some of the edges of a hop.

    Args:
        csr: Destinations by the rows that arrive; ``csr.perm`` is the place of each entry among all edges of the hop.
        device: Where the edges are computed with.
        overflow: Where they wait for that, if there is no memory for them on the device.
        tight: Hold the row of each entry where that takes less memory than a pointer for each row of the hop.
    """

    def __init__(
        self, csr: CSR, device: torch.device, overflow: Overflow | None = None, *, tight: bool = False
    ) -> None:
        self._device, self._overflow = device, overflow
        self._csr = _Structure(csr, overflow, tight=tight)
        self._transposed: _Structure | None = None
        self._values: dict[bool, tuple[Tensor, tuple[object, ...], Tensor]] = {}

    @property
    def csr(self) -> CSR:
        """The edges by destination."""
        return self._csr.on(self._device)

    @property
    def filled(self) -> Tensor:
        """Which destinations have an edge here; ``(n, 1)`` bool."""
        return (self.csr.indptr.diff() > 0).unsqueeze(-1)

    @property
    def transposed(self) -> CSR:
        """The edges by source; computed once."""
        if self._transposed is None:
            with torch.inference_mode(False):
                self._transposed = _Structure(transpose(self.csr.unpermuted()), self._overflow, tight=False)
        return self._transposed.on(self._device)

    def values(self, value: Tensor | None, *, transposed: bool = False) -> Tensor | None:
        """Those of the edges' values that belong here, ``(edges, 1)``; kept while ``value`` stays the same."""
        if value is None:
            return None
        known = self._values.get(transposed)
        if known is not None and known[1] == identity_of(value):
            return known[2].to(self._device, non_blocking=True)
        order = self.csr.perm
        assert order is not None
        if transposed:
            perm = self.transposed.perm
            assert perm is not None
            order = order.index_select(0, perm)
        with torch.inference_mode(False):
            found = value.detach().index_select(0, order).unsqueeze(1)
            if fixable(value):
                kept = found if self._overflow is None else self._overflow.keep(found)
                self._values[transposed] = (value.detach(), identity_of(value), kept)
        return found


@dataclass(frozen=True)
class Chunks:
    """The edges of a hop.

    Attributes:
        num_rows: Destinations.
        degree: In-edges of each destination, 1 if it has none; ``(n, 1)``.
        local: Edges whose sources this rank holds; columns are its rows.
        remote: For each piece in which rows arrive, by leg: edges whose sources arrive with it, where any do.
    """

    num_rows: int
    degree: Tensor
    local: Chunk
    remote: tuple[dict[Leg, Chunk], ...]


def split_by_source(
    csr: CSR, num_local: int, pieces: Sequence[Arrival], parts: int = 1, overflow: Overflow | None = None
) -> Chunks:
    """Sort the edges of a hop into chunks; their order within a destination stays.

    Args:
        csr: Destinations by sources; ``csr.perm`` is not used.
        num_local: Rows that this rank holds; all other columns that occur arrive.
        pieces: What arrives, one after the other.
        parts: Of what comes from each rank.
        overflow: Where the chunks wait until they are computed with; on the device by default.
    """
    device = csr.index.device
    degree = csr.indptr.diff().clamp(min=1).unsqueeze(-1)
    if overflow is not None:  # then there is no memory to sort all edges there either
        csr = CSR(csr.indptr.cpu(), csr.index.cpu(), csr.num_cols)
        pieces = [piece.to(csr.index.device) for piece in pieces]
    here = csr.index.device
    chunk_of = torch.zeros(csr.num_cols, dtype=torch.int32, device=here)
    column = torch.arange(csr.num_cols, dtype=csr.index.dtype, device=here)
    widths: list[tuple[int, Leg, int]] = []
    for number, arrival in enumerate(pieces):
        for rank, count in enumerate(arrival.plan.recv_counts):
            for part in range(parts if count else 0):
                places = arrival.positions_of(rank, part, parts)
                if places.numel():
                    widths.append((number, Leg(rank, part), places.numel()))
                    chunk_of[places] = len(widths)
                    column[places] = torch.arange(places.numel(), dtype=csr.index.dtype, device=here)
    row, kind = csr.row_index(), chunk_of[csr.index.long()]
    order = torch.argsort(kind, stable=True).split(torch.bincount(kind, minlength=len(widths) + 1).tolist())

    def chunk(number: int, width: int) -> Chunk:
        entries = order[number]
        index = column[csr.index[entries].long()]
        found = CSR(pointers(row[entries], csr.num_rows), index, width, entries.to(narrowest(csr.num_entries)))
        return Chunk(found, device, overflow, tight=len(pieces) > 1)

    remote: list[dict[Leg, Chunk]] = [{} for _ in pieces]
    for entry, (number, leg, width) in enumerate(widths, 1):
        remote[number][leg] = chunk(entry, width)
    return Chunks(
        num_rows=csr.num_rows,
        degree=degree,
        local=chunk(0, num_local),
        remote=tuple(remote),
    )
