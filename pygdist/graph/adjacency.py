"""What a rank knows of the topology: the in-edges of its rows, in a form that unmodified PyG layers accept."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pygdist.kernels import CSR, spmm, transpose

__all__ = ["Adjacency"]

Reduce = Literal["sum", "add", "mean", "max", "min"]


class Adjacency(EdgeIndex):
    r"""In-edges sorted by destination, from :math:`n_{src}` source rows to :math:`n_{dst}` destination rows.

    The rows that a rank owns come first on both sides, so a self-loop has the same id on both, and PyG's bipartite
    rules hold as they stand. To a layer this is an ``edge_index`` of shape ``(2, num_edges)``, dtype int64; layers
    that PyG can fuse reach :meth:`matmul`, which runs :func:`pygdist.kernels.spmm` on int32 indices where they fit.
    The transpose is built on the first backward pass and kept.

    Args:
        edge_index: ``(2, num_edges)`` int64, sources in row 0, sorted by row 1.
        num_src: Number of source rows (owned and halo).
        num_dst: Number of destination rows (owned).
        value: Optional weight of each edge, in the order of ``edge_index``.

    Raises:
        ValueError: If the edges are not sorted by destination or the weights have another length.
    """

    _csr: CSR | None = None
    _transposed: CSR | None = None
    _edge_value: Tensor | None = None
    _origin: Adjacency | None = None  # keeps the transpose for every copy with other weights

    @staticmethod
    def __new__(
        cls: type[Adjacency], edge_index: Tensor, *, num_src: int, num_dst: int, value: Tensor | None = None
    ) -> Adjacency:
        """See the class."""
        out: Adjacency = EdgeIndex.__new__(
            cls, edge_index.contiguous(), sparse_size=(num_src, num_dst), sort_order="col"
        )
        if edge_index.size(1) > 1 and bool((edge_index[1].diff() < 0).any()):
            raise ValueError("the edges of an Adjacency must be sorted by destination (edge_index[1])")
        if value is not None and value.size(0) != edge_index.size(1):
            raise ValueError(f"expected one weight for each of {edge_index.size(1)} edges, got {value.size(0)}")
        out._edge_value = value
        return out

    @staticmethod
    def from_unsorted(
        edge_index: Tensor, value: Tensor | None = None, *, num_src: int, num_dst: int
    ) -> tuple[Adjacency, Tensor]:
        """Sort edges by destination, keeping their order within one; also returns the permutation used."""
        perm = torch.argsort(edge_index[1], stable=True)
        value = None if value is None else value[perm]
        return Adjacency(edge_index[:, perm], num_src=num_src, num_dst=num_dst, value=value), perm

    @property
    def num_src(self) -> int:
        """Source rows: owned, then halo."""
        return int(self._sparse_size[0])

    @property
    def num_dst(self) -> int:
        """Destination rows: owned."""
        return int(self._sparse_size[1])

    @property
    def value(self) -> Tensor | None:
        """The weight of each edge that :meth:`matmul` applies."""
        return self._edge_value

    def with_value(self, value: Tensor | None) -> Adjacency:
        """The same edges with other weights; shares every cache."""
        out: Adjacency = EdgeIndex.__new__(
            Adjacency, self._data, sparse_size=(self.num_src, self.num_dst), sort_order="col"
        )
        out._indptr, out._edge_value = self._indptr, value
        out._csr, out._transposed = self.csr(), self._transposed
        out._origin = self if self._origin is None else self._origin
        return out

    def csr(self) -> CSR:
        """The edges by destination as :class:`~pygdist.kernels.CSR`."""
        if self._csr is None:
            self._csr = self._make_csr()
        return self._csr

    @torch.inference_mode(False)  # training uses what evaluation may have built first
    def _make_csr(self) -> CSR:
        dst, src = self._data[1], self._data[0]
        counts = torch.bincount(dst, minlength=self.num_dst)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        index = src.to(torch.int32) if self.num_src < 2**31 - 1 else src.clone()
        self._indptr = indptr
        return CSR(indptr=indptr, index=index.contiguous(), num_cols=self.num_src, perm=None)

    def transposed(self) -> CSR:
        """The edges by source, built once and kept with the adjacency that :meth:`with_value` started from."""
        owner = self if self._origin is None else self._origin
        if owner._transposed is None:
            with torch.inference_mode(False):
                owner._transposed = transpose(owner.csr())
        return owner._transposed

    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        r"""Aggregate source rows at their destinations; the way in of PyG's ``spmm``.

        Whatever ``transpose`` says the product is over in-edges: PyG passes either, depending on the layer, for the
        one thing that an adjacency sorted by destination can mean here.

        Shapes:
            ``other`` is :math:`(n_{src}, *)`, the result :math:`(n_{dst}, *)`.
        """
        if other_value is not None or isinstance(other, EdgeIndex):
            raise ValueError("Adjacency multiplies dense rows only, not another sparse matrix")
        value = self._edge_value if input_value is None else input_value
        return spmm(self.csr(), other, value, reduce="sum" if reduce == "add" else reduce, transposed=self.transposed)

    def to_device(self, device: torch.device | str) -> Adjacency:
        """The same adjacency on another device, caches rebuilt there on demand."""
        value = None if self._edge_value is None else self._edge_value.to(device)
        return Adjacency(self._data.to(device), num_src=self.num_src, num_dst=self.num_dst, value=value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adjacency:
        value = None if self._edge_value is None else self._edge_value.detach().clone()
        return _rebuild(self._data.clone(), self.num_src, self.num_dst, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._data, self.num_src, self.num_dst, self._edge_value)


def _rebuild(data: Tensor, num_src: int, num_dst: int, value: Tensor | None) -> Adjacency:
    return Adjacency(data, num_src=num_src, num_dst=num_dst, value=value)
