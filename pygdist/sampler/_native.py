"""Sampled neighbourhoods and induced subgraphs by the native library: tensors become pointers here.

One thread a call. Node ids in and out are int64; seeds are in range, which the callers have checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.native import NativeCsr, NativeHop, Status, load

__all__ = ["Sampled", "induce", "require", "sample"]


class Sampled(NamedTuple):
    """Nodes of a batch, seeds first, and its edges by destination, hop after hop; all int64."""

    node: Tensor
    source: Tensor
    """Of each edge, as a place in ``node``."""
    target: Tensor
    edge: Tensor
    """Id of each edge in the caller's order."""
    num_nodes: list[int]
    """Seeds, then the nodes that each hop found."""
    num_edges: list[int]


def require(what: str, csr: CSR, otherwise: str = "") -> None:
    """Refuse where there is no native library, or a matrix that it cannot sample from.

    Raises:
        InputError: If it was not built, or the matrix is not one of nodes by nodes on the CPU, fewer than 2^31.
    """
    if load() is None:
        raise InputError(
            f"{what} needs pygdist's native library, which was not built here: install a C++17 compiler (Debian, "
            f"Ubuntu: apt install g++) and reinstall pygdist{otherwise}"
        )
    if csr.num_rows != csr.num_cols or csr.num_rows >= 1 << 31:
        raise InputError(
            f"{what} needs a row and a column for each node, fewer than 2^31; got {csr.num_rows} by {csr.num_cols}"
        )
    if csr.indptr.device.type != "cpu":
        raise InputError(f"{what} reads the graph on the CPU, it is on {csr.indptr.device}")


def sample(csr: CSR, seeds: Tensor, fan_out: Sequence[int], *, replace: bool, seed: int, epoch: int) -> Sampled:
    """The sampled neighbourhood of ``seeds``.

    Raises:
        InputError: If a node is given twice.
    """
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
    """The edges among ``nodes``.

    Raises:
        InputError: If a node is given twice.
    """
    call = _Call(csr, nodes, replace=False, seed=0, epoch=0)
    call.prepare(0, -1, grows=False)
    call.run("pygdist_induce")
    call.num_edges = call.hop.num_edges
    return call.result([nodes.numel()], [call.num_edges])


class _Call:
    """Arrays that grow with the batch, and the structures that lead to them."""

    def __init__(self, csr: CSR, seeds: Tensor, *, replace: bool, seed: int, epoch: int) -> None:
        self._held = [None if part is None else part.contiguous() for part in (csr.indptr, csr.index, csr.perm)]
        indptr, index, perm = self._held
        assert indptr is not None
        assert index is not None
        self._matrix = NativeCsr(
            num_rows=csr.num_rows,
            num_cols=csr.num_cols,
            indptr=indptr.data_ptr(),
            index=index.data_ptr(),
            perm=None if perm is None else perm.data_ptr(),
            index_bits=8 * index.element_size(),
            perm_bits=0 if perm is None else 8 * perm.element_size(),
        )
        self._node = seeds.to(torch.int64).contiguous()
        self._ends = [torch.empty(0, dtype=torch.int64) for _ in range(3)]
        self.num_edges = 0
        count = seeds.numel()
        self.hop = NativeHop(num_nodes=count, num_seeds=count, replace=int(replace), seed=seed, epoch=epoch)

    def prepare(self, number: int, fan_out: int, *, grows: bool = True) -> None:
        """Make room for all that the hop may find."""
        hop = self.hop
        hop.number, hop.fan_out, hop.node = number, fan_out, self._node.data_ptr()
        self.run("pygdist_count_hop")
        if grows:
            self._node = _longer(self._node, hop.num_nodes, hop.num_edges)
            hop.node = self._node.data_ptr()
        self._ends = [_longer(array, self.num_edges, hop.num_edges) for array in self._ends]
        hop.source, hop.target, hop.edge = (array.data_ptr() + 8 * self.num_edges for array in self._ends)

    def run(self, name: str) -> None:
        native = load()
        assert native is not None, "the caller has asked require()"
        status = getattr(native, name)(ctypes.byref(self._matrix), ctypes.byref(self.hop))
        if status == Status.BAD_ID:
            raise InputError("the nodes that a batch starts from must differ, one of them is given twice")
        if status != Status.OK:
            raise MemoryError("not enough memory for a mini-batch")

    def result(self, num_nodes: list[int], num_edges: list[int]) -> Sampled:
        # copies: what a worker sends is the whole of the memory behind a tensor
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
