"""The in-edges of a rank's rows, in a form that unmodified PyG layers accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.edge_index import SortOrder

from pygdist.errors import InputError
from pygdist.graph.identity import fixable
from pygdist.graph.memo import Memo
from pygdist.kernels import CSR, edge_softmax, gat, spmm, transpose
from pygdist.kernels.csr import pointers

T = TypeVar("T")

Reduce = Literal["sum", "add", "mean", "max", "min"]

Score: TypeAlias = Callable[..., Tensor]
"""Computes the attention scores of edges; see :meth:`Adjacency.attend_by`."""


@dataclass(frozen=True, eq=False)
class Slot(Generic[T]):
    """The key of a result of type ``T`` that is kept with edges (:meth:`Adjacency.slot`); the name is for ``repr``."""

    name: str


_DESTINATIONS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor: the edges of which it is the row edge_index[1]
_TRANSPOSED = Slot[CSR]("edges by source")
_TRANSPOSED_WEIGHT = Slot[Memo[Tensor]]("weights by source")
_WORTH_COMPARING = 1 << 20  # edges


class Adjacency(EdgeIndex):
    r"""In-edges sorted by destination, from :math:`n_{src}` source rows to :math:`n_{dst}` destination rows.

    The owned rows come first on both sides, so both ends of a self-loop have the same id, and PyG's bipartite rules
    apply unchanged. To a layer this is an ``edge_index`` of shape ``(2, num_edges)``, dtype int64; layers that PyG can
    fuse call :meth:`matmul`, which runs :func:`pygdist.kernels.spmm` on int32 indices if they fit.

    The adjacency holds a sparse matrix, 4 bytes per edge if int32 is enough. The edge list is four times as large:
    :meth:`from_csr` and :meth:`from_unsorted` make the list when it is first read, the constructor keeps its argument.
    The transpose is made in the first backward pass. The adjacency keeps both.

    Args:
        edge_index: ``(2, num_edges)`` int64, sources in row 0, sorted by row 1.
        num_src: Number of source rows (owned and halo).
        num_dst: Number of destination rows (owned).
        value: Optional weight of each edge, in the order of ``edge_index``.

    Raises:
        ValueError: If the edges are not sorted by destination or the weights have another length.
    """

    _csr: CSR
    _edges: Tensor | None = None
    _edge_value: Tensor | None = None
    _origin: Adjacency | None = None  # keeps what is made on demand, for all copies with other weights
    _slots: dict[Slot[Any], Any] | None = None

    @staticmethod
    def __new__(
        cls: type[Adjacency], edge_index: Tensor, *, num_src: int, num_dst: int, value: Tensor | None = None
    ) -> Adjacency:
        """See the class."""
        source, target = edge_index
        if edge_index.size(1) > 1 and bool((target[1:] < target[:-1]).any()):
            raise ValueError("the edges of an Adjacency must be sorted by destination (edge_index[1])")
        with torch.inference_mode(False):  # training uses what evaluation may have built first
            indptr = pointers(target, num_dst)
            index = source.to(torch.int32) if num_src < 2**31 - 1 else source.clone()
        out = cls.from_csr(CSR(indptr, index.contiguous(), num_src), value)
        out._edges = edge_index.contiguous()
        return out

    @classmethod
    def from_csr(cls, csr: CSR, value: Tensor | None = None) -> Adjacency:
        """Wrap a sparse matrix without copying it: rows are destinations, columns sources; ``csr.perm`` is not used.

        Raises:
            ValueError: If the weights have another length.
        """
        if value is not None and value.size(0) != csr.num_entries:
            raise ValueError(f"expected one weight for each of {csr.num_entries} edges, got {value.size(0)}")
        out: Adjacency = torch.Tensor._make_wrapper_subclass(
            cls,
            size=(2, csr.num_entries),
            strides=(csr.num_entries, 1),
            dtype=torch.int64,
            device=csr.indptr.device,
            requires_grad=False,
        )
        out._csr, out._edge_value = csr, value
        out._sparse_size, out._sort_order, out._is_undirected = (csr.num_cols, csr.num_rows), SortOrder.COL, False
        out._indptr = csr.indptr
        return out

    @staticmethod
    def from_unsorted(
        edge_index: Tensor, value: Tensor | None = None, *, num_src: int, num_dst: int
    ) -> tuple[Adjacency, Tensor]:
        """Sort edges by destination; edges of one destination keep their order.

        Args:
            edge_index: ``(2, E)`` int64, sources in row 0, in any order.
            value: Optional weight of each edge, in the order of ``edge_index``.
            num_src: Number of source rows.
            num_dst: Number of destination rows.

        Returns:
            The adjacency, and the permutation: the position in ``edge_index`` of each of its edges.
        """
        csr = CSR.from_coo(edge_index[1], edge_index[0], num_rows=num_dst, num_cols=num_src)
        perm = csr.perm
        assert perm is not None
        value = None if value is None else value[perm]
        return Adjacency.from_csr(CSR(csr.indptr, csr.index, num_src), value), perm

    @property
    def _data(self) -> Tensor:
        """The edge list, under the name that PyG's code uses."""
        owner = self.origin
        if owner._edges is None:
            with torch.inference_mode(False):
                edges = torch.empty((2, owner._csr.num_entries), dtype=torch.int64, device=owner._csr.indptr.device)
                edges[0].copy_(owner._csr.index)
                edges[1].copy_(owner._csr.row_index())
                owner._edges = edges
        return owner._edges

    @_data.setter
    def _data(self, edges: Tensor) -> None:  # PyG sets the unchanged result of an operation
        self.origin._edges = edges

    @property
    def dtype(self) -> torch.dtype:
        """int64, also if the edge list does not exist yet."""
        return torch.int64

    @property
    def num_src(self) -> int:
        """Number of source rows; owned rows come first."""
        return int(self._sparse_size[0])

    @property
    def num_dst(self) -> int:
        """Number of destination rows; these are the owned rows."""
        return int(self._sparse_size[1])

    @property
    def value(self) -> Tensor | None:
        """The weights of the edges, which :meth:`matmul` applies; ``None`` without weights."""
        return self._edge_value

    def with_value(self, value: Tensor | None) -> Adjacency:
        """Return an adjacency with the same edges and other weights.

        Both share the edge list, the transpose and all :meth:`slot` contents.
        """
        out = Adjacency.from_csr(self._csr, value)
        out._origin = self.origin
        return out

    @property
    def origin(self) -> Adjacency:
        """The adjacency from which this one was made by :meth:`with_value`, however many times; else this one.

        It keeps the edge list, the transpose and all :meth:`slot` contents for all adjacencies made from it.
        """
        return self if self._origin is None else self._origin

    @overload
    def slot(self, slot: Slot[T]) -> T | None: ...
    @overload
    def slot(self, slot: Slot[T], make: Callable[[], T]) -> T: ...
    def slot(self, slot: Slot[T], make: Callable[[], T] | None = None) -> T | None:
        """Return the content of ``slot``; :attr:`origin` keeps the content.

        Args:
            slot: The key, a constant of the module that owns the content.
            make: Makes the content of an empty slot, outside inference mode. Without ``make`` the result for an empty
                slot is ``None``.
        """
        owner = self.origin
        if owner._slots is None:
            owner._slots = {}
        if slot not in owner._slots and make is not None:
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                owner._slots[slot] = make()
        return owner._slots.get(slot)

    def keep(self, slot: Slot[T], value: T) -> None:
        """Set the content of ``slot``; :attr:`origin` keeps the content."""
        owner = self.origin
        owner._slots = {**(owner._slots or {}), slot: value}

    def csr(self) -> CSR:
        """Return the edges by destination as :class:`~pygdist.kernels.CSR`."""
        return self._csr

    def transposed(self) -> CSR:
        """Return the edges by source; :attr:`origin` makes the matrix once and keeps it."""
        return self.slot(_TRANSPOSED, self._transpose)

    def _transpose(self) -> CSR:
        csr, back = self._csr, transpose(self._csr)
        if csr.num_entries < _WORTH_COMPARING and csr.index.is_cuda:
            return back  # the host would wait for the comparison
        if torch.equal(csr.indptr, back.indptr) and torch.equal(csr.index, back.index):
            return CSR(csr.indptr, csr.index, csr.num_rows, back.perm)  # an undirected graph needs no second copy
        return back

    def transposed_weight(self, value: Tensor) -> Tensor:
        """Return ``value`` in the order of :meth:`transposed`; the result is kept while the weights do not change."""
        return self.slot(_TRANSPOSED_WEIGHT, Memo).get((), (value,), lambda: self._by_source(value.detach()))

    def _by_source(self, value: Tensor) -> Tensor:
        perm = self.transposed().perm
        assert perm is not None
        moved = value.index_select(0, perm)
        # symmetric weights need no second copy; a GPU would have to be waited for, as often as weights change
        return value if not value.is_cuda and torch.equal(moved, value) else moved

    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        r"""Aggregate source rows at their destinations; PyG's ``spmm`` calls this method.

        Args:
            other: The source rows.
            input_value: Weight of each edge; by default :attr:`value`.
            other_value: Must be ``None``.
            reduce: Reduction of the messages of one destination: ``sum`` (also ``add``), ``mean``, ``max`` or ``min``.
            transpose: Ignored. PyG passes true or false, depending on the layer; the product is always over in-edges.

        Shapes:
            ``other`` is :math:`(n_{src})`, :math:`(n_{src}, F)`, or :math:`(K, n_{src}, F)` from layers that stack
            features. The result has :math:`n_{dst}` in place of :math:`n_{src}`.

        Raises:
            ValueError: If ``other`` is a sparse matrix, or a shape, dtype, device or ``reduce`` does not fit.
        """
        if other_value is not None or isinstance(other, EdgeIndex):
            raise ValueError("an Adjacency can only be multiplied with dense rows, not with a sparse matrix")
        value = self._edge_value if input_value is None else input_value
        fixed = value is not None and fixable(value)
        stacked = other.dim() == 3
        out = spmm(
            self._csr,
            other.transpose(0, 1) if stacked else other,
            value,
            reduce="sum" if reduce == "add" else reduce,
            transposed=self.transposed,
            transposed_weight=(lambda: self.transposed_weight(value)) if fixed else None,  # type: ignore[arg-type]
        )
        return out.transpose(0, 1) if stacked else out

    def attend(self, x: Tensor, source: Tensor, target: Tensor, negative_slope: float) -> Tensor:
        """Aggregate source rows with the weights of GAT; see :func:`pygdist.kernels.gat`."""
        return gat(self._csr, x, source, target, negative_slope=negative_slope, transposed=self.transposed)

    def attend_by(self, parts: Sequence[Tensor], score: Score, others: Sequence[Tensor]) -> Tensor:
        r"""Aggregate source rows by attention with any score.

        Args:
            parts: Tensors of source rows. ``score`` takes the first tensor; rows of the last tensor are summed.
            score: Called as ``score(csr, parts[0], *others, transposed=...)``, with all edges or some edges in ``csr``.
            others: Further arguments of ``score``: rows of the destinations, or parameters.

        Shapes:
            Each of ``parts`` is :math:`(n_{src}, H, C)`, the result of ``score`` :math:`(E, H)`, the output
            :math:`(n_{dst}, H, C)`.
        """
        scores = score(self._csr, parts[0], *others, transposed=self.transposed)
        return spmm(self._csr, parts[-1], edge_softmax(self._csr, scores), transposed=self.transposed)

    def __matmul__(self, other: Any) -> Tensor:
        """Refuse: edges that a model got as a tensor of shape ``(2, E)`` are no matrix.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "edge_index @ x: the edges are a tensor of shape (2, num_edges), not a sparse matrix; sum over neighbours "
            "in a MessagePassing layer, for example SimpleConv(aggr='sum')"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch on the edge list: to a model, edges are the plain tensor that its user passed."""
        edges = args[0] if args and isinstance(args[0], Adjacency) else None
        if edges is not None and func is torch.ops.aten.detach.default:  # as activation checkpointing does
            return edges.with_value(edges.value)
        args, kwargs = tree_map_only(EdgeIndex, lambda one: one._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if edges is not None and func is torch.ops.aten.select.int and tuple(args[1:]) in ((0, 1), (0, -1)):
            _DESTINATIONS[out] = edges
        elif edges is not None and func is torch.ops.aten.unbind.int and tuple(args[1:]) in ((), (0,)):
            _DESTINATIONS[out[1]] = edges
        return out

    def to_device(self, device: torch.device | str) -> Adjacency:
        """Return a copy on another device. The copy makes its own edge list and transpose when they are needed."""
        value = None if self._edge_value is None else self._edge_value.to(device)
        return _rebuild(self._csr.indptr.to(device), self._csr.index.to(device), self.num_src, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adjacency:
        value = None if self._edge_value is None else self._edge_value.detach().clone()
        return _rebuild(self._csr.indptr.clone(), self._csr.index.clone(), self.num_src, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._csr.indptr, self._csr.index, self.num_src, self._edge_value)


def edges_of(destinations: Tensor) -> Adjacency | None:
    """Return the adjacency whose row ``edge_index[1]`` is this tensor; ``None`` for any other tensor."""
    edges: Adjacency | None = _DESTINATIONS.get(destinations)
    return edges


def _rebuild(indptr: Tensor, index: Tensor, num_src: int, value: Tensor | None) -> Adjacency:
    return Adjacency.from_csr(CSR(indptr, index, num_src), value)
