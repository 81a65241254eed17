"""A hop's edges in groups by the rank that sends their sources, so that each is aggregated when its rows are here.

The in-edges whose sources arrive from rank *j* are one source group (a chunk of NeutronStar, Sec. 4.3); the in-edges
whose sources this rank holds are another. The columns of a group are numbered in the order in which the sender's rows
arrive, so that rows are aggregated in the receive buffer, and gradients are written into the send buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.fetching.arrival import Arrival
from pygdist.comm import Message
from pygdist.graph.identity import fixable, identity_of
from pygdist.kernels import CSR, transpose
from pygdist.kernels.csr import narrowest, pointers, row_blocks
from pygdist.memory.overflow import Overflow
from pygdist.memory.ring import uploaded

_EDGES_AT_A_TIME = 1 << 20  # to sort


class EdgeMemory:
    """Arrays with one value for each edge of a hop, shared by its groups: each group has a range of every array.

    Args:
        num_edges: Edges of all groups.
        device: The device that computes with them.
        overflow: Holds the arrays until then; on the device by default.
    """

    def __init__(self, num_edges: int, device: torch.device, overflow: Overflow | None = None) -> None:
        self.device = device
        self._num_edges, self._overflow = num_edges, overflow
        self._arrays: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def waits(self) -> bool:
        """True if the arrays are not on the device."""
        return self._overflow is not None

    def part(self, kind: str, dtype: torch.dtype, among: slice) -> Tensor:
        """Return the range ``among`` of an array, as a view; the array is made when it is first asked for."""
        if (kind, dtype) not in self._arrays:
            self._arrays[kind, dtype] = self.empty((self._num_edges,), dtype)
        return self._arrays[kind, dtype][among]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate memory where the arrays are."""
        if self._overflow is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        small = math.prod(shape) * dtype.itemsize < self._overflow.small
        return torch.empty(shape, dtype=dtype) if small else self._overflow.empty(shape, dtype)


class SourceGroup:
    """Edges of a hop whose sources one rank sends, or holds.

    Args:
        memory: Holds the column of each edge (``index``), and its place among all edges of the hop (``perm``).
        among: The range of this group in the arrays.
        row: The destination of each edge.
        num_rows: Destinations of the hop.
        num_cols: Rows that the sender sends.
        tight: Hold the destination of each edge, if that takes less memory than a pointer for each row of the hop.

    Attributes:
        perm: Place of each edge of :attr:`csr` among all edges of the hop.
    """

    def __init__(
        self, memory: EdgeMemory, among: slice, row: Tensor, num_rows: int, num_cols: int, *, tight: bool = False
    ) -> None:
        self._memory, self._among = memory, among
        self._num_rows, self._num_cols = num_rows, num_cols
        self._index, self.perm = (memory.part(kind, row.dtype, among) for kind in ("index", "perm"))
        self._by_entry = tight and row.nbytes < torch.int64.itemsize * num_rows
        if self._by_entry:
            self._rows = row
        else:
            indptr = pointers(row, num_rows)
            self._rows = memory.empty(tuple(indptr.shape), indptr.dtype).copy_(indptr)
        self._transposed: CSR | None = None
        self._values: dict[bool, tuple[Tensor, tuple[object, ...], Tensor]] = {}

    @property
    def csr(self) -> CSR:
        """The edges by destination, as a matrix of destinations by rows of the sender."""
        return self._on(self._memory.device)

    @property
    def filled(self) -> Tensor:
        """True for destinations that have an edge here; ``(n, 1)`` bool."""
        rows = uploaded(self._rows, self._memory.device)
        if not self._by_entry:
            return (rows.diff() > 0).unsqueeze(-1)
        return rows.new_zeros(self._num_rows, dtype=torch.bool).index_fill_(0, rows.long(), True).unsqueeze(-1)

    @property
    def transposed(self) -> CSR:
        """The edges by source; computed once."""
        back, device = self._backwards(), self._memory.device
        assert back.perm is not None
        indptr, index, perm = (uploaded(part, device) for part in (back.indptr, back.index, back.perm))
        return CSR(indptr, index, back.num_cols, perm)

    def values(self, value: Tensor | None, *, transposed: bool = False) -> Tensor | None:
        """Select these edges' values from the hop's, ``(edges, 1)``; kept while ``value`` stays the same."""
        if value is None:
            return None
        entry = self._values.get(transposed)
        if entry is not None and entry[1] == identity_of(value):
            return uploaded(entry[2], value.device)
        order = self.perm
        if transposed:
            perm = self._backwards().perm
            assert perm is not None
            order = order.index_select(0, perm)
        with torch.inference_mode(False):
            selected = value.detach().index_select(0, order.to(value.device)).unsqueeze(1)
            if fixable(value):
                held = selected
                if self._memory.waits:
                    kind = "value by source" if transposed else "value"
                    held = self._memory.part(kind, selected.dtype, self._among).unsqueeze(1).copy_(selected)
                self._values[transposed] = (value.detach(), identity_of(value), held)
        return selected

    def _on(self, device: torch.device) -> CSR:
        rows, index = (uploaded(part, device) for part in (self._rows, self._index))
        return CSR(pointers(rows, self._num_rows) if self._by_entry else rows, index, self._num_cols)

    def _backwards(self) -> CSR:
        if self._transposed is None:
            kinds = iter(("index by source", "perm by source"))
            with torch.inference_mode(False):
                self._transposed = transpose(
                    self._on(self._index.device),
                    lambda shape, dtype: self._memory.part(next(kinds), dtype, self._among),
                )
        return self._transposed


@dataclass(frozen=True)
class SourceGroups:
    """The edges of a hop, in groups.

    Attributes:
        num_rows: Destinations.
        degree: In-edges of each destination, 1 if it has none; ``(n, 1)``.
        local: Edges whose sources this rank holds; columns are its rows.
        remote: For each piece, by message: edges whose sources arrive in the message, if there are any.
    """

    num_rows: int
    degree: Tensor
    local: SourceGroup
    remote: tuple[dict[Message, SourceGroup], ...]


def group_by_source(
    csr: CSR, num_local: int, pieces: Sequence[Arrival], parts: int = 1, overflow: Overflow | None = None
) -> SourceGroups:
    """Sort the edges of a hop into source groups; their order within a destination stays.

    Args:
        csr: Destinations by sources; ``csr.perm`` is not used.
        num_local: Rows that this rank holds; all other sources arrive.
        pieces: Rows that arrive, one piece after the other.
        parts: Number of messages in which the rows of one rank travel.
        overflow: Holds the edges until their rows are here; the device by default. Sorting happens there, too.
    """
    memory = EdgeMemory(csr.num_entries, csr.index.device, overflow)
    degree = csr.indptr.diff().clamp(min=1).unsqueeze(-1)
    if overflow is not None:
        csr = CSR(csr.indptr.cpu(), csr.index.cpu(), csr.num_cols)
        pieces = [piece.to(csr.index.device) for piece in pieces]
    device, dtype = csr.index.device, csr.index.dtype
    group_of = torch.zeros(csr.num_cols, dtype=torch.int32, device=device)
    column = torch.arange(csr.num_cols, dtype=dtype, device=device)
    widths: list[tuple[int, Message, int]] = []
    for number, arrival in enumerate(pieces):
        for rank, count in enumerate(arrival.plan.recv_counts):
            for part in range(parts if count else 0):
                places = arrival.positions_of(rank, part, parts)
                if places.numel():
                    widths.append((number, Message(rank, part), places.numel()))
                    group_of[places] = len(widths)
                    column[places] = torch.arange(places.numel(), dtype=dtype, device=device)
    tight = len(pieces) > 1
    edges = _Sorted(csr, group_of, column, len(widths) + 1, memory, keep_rows=tight or memory.waits)

    def group(number: int, width: int) -> SourceGroup:
        among = edges.parts[number]
        return SourceGroup(memory, among, edges.row[among], csr.num_rows, width, tight=tight)

    remote: list[dict[Message, SourceGroup]] = [{} for _ in pieces]
    for entry, (number, message, width) in enumerate(widths, 1):
        remote[number][message] = group(entry, width)
    return SourceGroups(num_rows=csr.num_rows, degree=degree, local=group(0, num_local), remote=tuple(remote))


class _Sorted:
    """Edges sorted by group, written into memory some rows at a time: no more is held than that.

    Attributes:
        parts: The range of each group.
        row: The destination of each edge.
    """

    def __init__(
        self, csr: CSR, group_of: Tensor, column: Tensor, num_groups: int, memory: EdgeMemory, *, keep_rows: bool
    ) -> None:
        blocks = list(row_blocks(csr.indptr, _EDGES_AT_A_TIME))
        counts = torch.zeros(num_groups, dtype=torch.int64, device=csr.index.device)
        for _, edges in blocks:
            counts += torch.bincount(group_of[csr.index[edges].long()], minlength=num_groups)
        ends = counts.cumsum(0)
        self.parts = [slice(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        whole, place = slice(None), ends - counts
        # rows, columns and edges are counted in one type
        dtype = torch.promote_types(csr.index.dtype, narrowest(max(csr.num_entries, csr.num_rows)))
        index, perm = (memory.part(kind, dtype, whole) for kind in ("index", "perm"))
        self.row = memory.part("row", dtype, whole) if keep_rows else torch.empty_like(index)
        for rows, edges in blocks:
            source = csr.index[edges].long()
            order = torch.argsort(group_of[source], stable=True)
            kind = group_of[source[order]].long()
            in_block = torch.bincount(kind, minlength=num_groups)
            # each goes behind those of its group that were there before
            at = torch.arange(kind.numel(), device=kind.device) + (place - (in_block.cumsum(0) - in_block))[kind]
            row = torch.repeat_interleave(
                torch.arange(rows.start, rows.stop, dtype=dtype, device=kind.device),
                csr.indptr[rows.start : rows.stop + 1].diff(),
                output_size=kind.numel(),
            )
            index[at] = column[source[order]].to(dtype)
            perm[at] = (order + edges.start).to(dtype)
            self.row[at] = row[order]
            place += in_block
