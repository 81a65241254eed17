"""Sampled neighbourhoods and induced subgraphs by the native library, in one thread per call.

Node ids are int64. Seeds are in range; the callers check that.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.native import NativeCsr, NativeHop, Status, library


class Sampled(NamedTuple):
    """A sampled or induced subgraph; all tensors are int64.

    Attributes:
        node: Its nodes, seeds first.
        source: Source of each edge, as a position in ``node``. Edges are grouped by hop, then by destination.
        target: Destination of each edge, likewise.
        edge: Position of each edge in the caller's order.
        num_nodes: Number of seeds, then of the nodes that each hop adds.
        num_edges: Number of edges of each hop.
    """

    node: Tensor
    source: Tensor
    target: Tensor
    edge: Tensor
    num_nodes: list[int]
    num_edges: list[int]


def require(what: str, csr: CSR, otherwise: str = "") -> None:
    """Refuse to sample without the native library, or from a matrix that is not square, too large or on a GPU."""
    library.require(what, otherwise)
    if csr.num_rows != csr.num_cols or csr.num_rows >= 1 << 31:
        raise InputError(
            f"{what} needs a row and a column for each node, fewer than 2^31; got {csr.num_rows} by {csr.num_cols}"
        )
    if csr.indptr.device.type != "cpu":
        raise InputError(f"{what} samples on the CPU, but the graph is on {csr.indptr.device}: move it to the CPU")


def sample(csr: CSR, seeds: Tensor, fan_out: Sequence[int], *, replace: bool, seed: int, epoch: int) -> Sampled:
    """Sample the neighbourhood of ``seeds``; refuse repeated ones."""
    call = _Call(csr, seeds, replace=replace, seed=seed, epoch=epoch)
    num_nodes, num_edges = [seeds.numel()], []
    for number, most in enumerate(fan_out):
        before = call.hop.num_nodes
        call.prepare(number, most)
        call.run("pygdist_sample_hop")
        call.hop.first = before
        num_nodes.append(call.hop.num_nodes - before)
        num_edges.append(call.hop.num_edges)
        call.num_edges += call.hop.num_edges
    return call.result(num_nodes, num_edges)


def induce(csr: CSR, nodes: Tensor) -> Sampled:
    """Find the edges among ``nodes``; refuse repeated ones."""
    call = _Call(csr, nodes, replace=False, seed=0, epoch=0)
    call.prepare(0, -1, grows=False)
    call.run("pygdist_induce")
    call.num_edges = call.hop.num_edges
    return call.result([nodes.numel()], [call.num_edges])


def hop_key(seeds: Tensor, number: int, *, seed: int, epoch: int) -> int:
    """Return the key that chooses the edges of a batch's hop, as :func:`sample` does."""
    seeds = seeds.to(torch.int64).contiguous()
    hop = NativeHop(node=seeds.data_ptr(), num_seeds=seeds.numel(), number=number, seed=seed, epoch=epoch)
    key = ctypes.c_uint64()
    _run("pygdist_hop_key", hop, ctypes.byref(key))
    return key.value


def draw(
    csr: CSR, rows: Tensor, ids: Tensor, fan_out: int, *, replace: bool, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the edges into some rows of a matrix, whose nodes have these ids in the whole graph.

    Returns:
        The number of edges into each row; their sources, as columns, and their positions in the caller's order.
    """
    matrix, _held = csr.native()
    rows, ids = rows.to(torch.int64).contiguous(), ids.to(torch.int64).contiguous()
    hop = NativeHop(node=rows.data_ptr(), num_nodes=rows.numel(), fan_out=fan_out, replace=int(replace))
    _run("pygdist_count_hop", hop, matrix=matrix)
    source, target, edge = (torch.empty(hop.num_edges, dtype=torch.int64) for _ in range(3))
    hop.source, hop.target, hop.edge = source.data_ptr(), target.data_ptr(), edge.data_ptr()
    _run("pygdist_draw", hop, key, ids.data_ptr(), matrix=matrix)
    return torch.bincount(target, minlength=rows.numel()), source, edge


def place(nodes: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Append the ids of sources to those of nodes, each once; refuse nodes that repeat.

    Returns:
        All nodes, and the position of each source among them.
    """
    longer, position = _longer(nodes, nodes.numel(), sources.numel()), sources.clone()
    hop = NativeHop(node=longer.data_ptr(), num_nodes=nodes.numel(), source=position.data_ptr())
    hop.num_edges = sources.numel()
    _run("pygdist_place_hop", hop)
    return longer[: hop.num_nodes].clone(), position


def copy_rows(rows: Tensor, source: Tensor | None, out: Tensor, target: Tensor | None) -> None:
    """Copy rows: ``out[target] = rows[source]``, where ``None`` stands for all, in order; contiguous, on the CPU.

    Raises:
        IndexError: If a row is out of range.
    """
    index = source if source is not None else target
    count = rows.size(0) if index is None else index.numel()
    if rows.shape[1:] != out.shape[1:] or rows.dtype != out.dtype or not (rows.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype} do not fit {tuple(out.shape)} {out.dtype}")
    row_bytes = math.prod(out.shape[1:]) * out.itemsize
    places = [None if one is None else one.to(torch.int64).contiguous() for one in (source, target)]
    pointers = [None if one is None else one.data_ptr() for one in places]
    status = library.require("copying rows").pygdist_copy_rows(
        rows.data_ptr(), rows.size(0), pointers[0], out.data_ptr(), out.size(0), pointers[1], count, row_bytes
    )
    if status != Status.OK:
        raise IndexError(
            f"a row is not among the {rows.size(0)} rows that are copied, or the {out.size(0)} of the copy"
        )


def _run(name: str, hop: NativeHop, *arguments: Any, matrix: NativeCsr | None = None) -> None:
    """Call a function of the library with the hop, after the matrix if there is one."""
    structures = [ctypes.byref(one) for one in (matrix, hop) if one is not None]
    status = getattr(library.require("sampling"), name)(*structures, *arguments)
    if status == Status.BAD_ID:
        raise InputError("the seed nodes of a batch must differ, but one of them is given twice")
    if status != Status.OK:
        raise MemoryError("not enough memory for a mini-batch")


class _Call:
    """The arrays of a batch, which grow hop by hop, and the structures that pass them to the library."""

    def __init__(self, csr: CSR, seeds: Tensor, *, replace: bool, seed: int, epoch: int) -> None:
        self._matrix, self._held = csr.native()
        self._node = seeds.to(torch.int64).contiguous()
        self._ends = [torch.empty(0, dtype=torch.int64) for _ in range(3)]
        self.num_edges = 0
        count = seeds.numel()
        self.hop = NativeHop(num_nodes=count, num_seeds=count, replace=int(replace), seed=seed, epoch=epoch)

    def prepare(self, number: int, fan_out: int, *, grows: bool = True) -> None:
        """Allocate memory for the most nodes and edges that the hop may add."""
        hop = self.hop
        hop.number, hop.fan_out, hop.node = number, fan_out, self._node.data_ptr()
        self.run("pygdist_count_hop")
        if grows:
            self._node = _longer(self._node, hop.num_nodes, hop.num_edges)
            hop.node = self._node.data_ptr()
        self._ends = [_longer(array, self.num_edges, hop.num_edges) for array in self._ends]
        hop.source, hop.target, hop.edge = (array.data_ptr() + 8 * self.num_edges for array in self._ends)

    def run(self, name: str) -> None:
        """Call a function of the library with the matrix and the hop."""
        _run(name, self.hop, matrix=self._matrix)

    def result(self, num_nodes: list[int], num_edges: list[int]) -> Sampled:
        """Return the batch, without the memory that was not needed."""
        # copies, as a worker sends all memory behind a tensor
        node = self._node[: self.hop.num_nodes].clone()
        ends = self._ends
        if ends[0].numel() > self.num_edges:
            ends = [array[: self.num_edges].clone() for array in ends]
        source, target, edge = ends
        return Sampled(node, source, target, edge, num_nodes, num_edges)


def _longer(array: Tensor, used: int, more: int) -> Tensor:
    out = array.new_empty(used + more)
    out[:used] = array[:used]
    return out
