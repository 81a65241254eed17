"""The words of a cut: the edges that a rank computes a first layer on, and the functions that a cut layer becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pygdist.kernels import CSR
from pygdist.memory.ring import uploaded
from pygdist.sampler._native import place


@dataclass(frozen=True, eq=False)
class InEdges:
    """Edges into some rows, whose sources and rows are known by their global ids.

    Attributes:
        csr: The edges; columns are global ids.
        row_id: Global ids of the rows, ``(R,)`` int64.
        weight: Weights of the edges, ``(E,)``; ``None`` if the graph has none.
        source_degree: In-degrees of the edges' sources as the layer counts them, ``(E,)``; by default sources have the
            in-edges that are here.
        ends: Number of leading rows that can be computed after 1, 2, ... hops; by default all, after any.
        key: Seed of this batch's dropout; equal on all ranks. It follows from ``batch_seed``, the epoch and the seeds.
        scores: Scores of nodes, summed over ranks, as :attr:`Cut.scores` returns them.
        is_compact: Columns number the nodes of this block: first its rows, then the other sources.
    """

    csr: CSR
    row_id: Tensor
    weight: Tensor | None = None
    source_degree: Tensor | None = None
    ends: tuple[int, ...] = ()
    key: int = 0
    scores: Tensor | None = None
    is_compact: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return self.csr.num_rows

    def rows_after(self, num_hops: int) -> int:
        """Return the number of leading rows that can be computed in some hops, R after one."""
        return self.ends[num_hops - 1] if self.ends else self.num_rows

    def compact(self) -> tuple[InEdges, Tensor]:
        """Number the nodes of edges and rows: rows first, then sources in the order of the edges, as batches do.

        Returns:
            The edges with these numbers in place of global ids, and the ids, ``(U,)`` int64.
        """
        ids, local = place(self.row_id, self.csr.index.long())
        csr = CSR(self.csr.indptr, local.to(torch.int32), ids.numel())
        return replace(self, csr=csr, row_id=torch.arange(self.num_rows), is_compact=True), ids

    def to(self, device: torch.device) -> InEdges:
        """Return the edges on a device."""
        csr = CSR(uploaded(self.csr.indptr, device), uploaded(self.csr.index, device), self.csr.num_cols)
        weight, degree = (None if one is None else uploaded(one, device) for one in (self.weight, self.source_degree))
        return replace(self, csr=csr, row_id=uploaded(self.row_id, device), weight=weight, source_degree=degree)


Parameters = Mapping[str, Tensor]
Term = Callable[[Any, Parameters, InEdges, Tensor, slice], Tensor]


@dataclass(frozen=True)
class Cut:
    """The way in which a layer is cut by columns.

    Functions of ranks get the layer, its parameters by name, edges, this rank's columns of the nodes ``(N, c)``, and
    the slice of all columns that these are.

    Attributes:
        weights: Names of the weights whose second dimension is that of the features.
        others: Names of further parameters and buffers that the functions of ranks use.
        term: A rank's term of the sum over ranks, ``(D, H)``.
        rest: Called with the layer and the sum; returns the layer's output.
        width: Called with the layer; returns H.
        scores: A rank's term of the scores that a layer needs before its messages, ``(U + R, heads)``: of all nodes,
            then of the rows. Their sum over ranks comes back as ``edges.scores``. ``None`` if the layer needs none.
        arranged: Called with the layer and edges; returns the edges that :attr:`term` and :attr:`scores` get, and the
            ids of the nodes whose columns they get. ``None`` if these are the columns of all nodes.
        degrees: Called with the layer, edges and a type; returns the in-degrees of the rows as the layer counts them,
            ``(R,)``. ``None`` if the layer does not use the degrees of its sources.
        late_hops: For a layer of several hops, which come before its weights: called with what the backend keeps, the
            layer, its ``forward``, the products of its rows with the weights ``(n, sum of H)``, and its other
            arguments; returns its output. ``None`` for a layer of one hop.
    """

    weights: tuple[str, ...]
    others: tuple[str, ...]
    term: Term
    rest: Callable[[Any, Tensor], Tensor]
    width: Callable[[Any], int]
    scores: Term | None = None
    arranged: Callable[[Any, InEdges], tuple[InEdges, Tensor]] | None = None
    degrees: Callable[[Any, InEdges, torch.dtype], Tensor] | None = None
    late_hops: Callable[..., Tensor] | None = None

    def parameters(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the parameters that the part before the rest uses, by name."""
        return {name: layer.get_parameter(name) for name in self.weights} | {
            name: cast(Tensor, getattr(layer, name)) for name in self.others
        }

    def prepared(
        self, layer: nn.Module, edges: InEdges, columns: Tensor, like: Tensor, *, drops: float = 0, first: int = 0
    ) -> tuple[InEdges, Tensor]:
        """Return the edges and columns, in the type and on the device of a tensor, that the functions of ranks get.

        Of columns in another type, as float16 on disk, only those that the edges read are converted.

        Args:
            layer: The layer.
            edges: The edges, on the host.
            columns: This rank's columns of all nodes, on the host or the device.
            like: The tensor.
            drops: Rate of dropout over the features.
            first: Number of the rank's first column, which chooses the random numbers with the edges' key.
        """
        if edges.weight is not None:
            edges = replace(edges, weight=edges.weight.to(like.dtype))
        if self.arranged is not None:
            edges, ids = self.arranged(layer, edges)
        elif columns.dtype == like.dtype and like.device.type == "cpu" and not drops:
            return edges, columns
        else:
            edges, ids = edges.compact()
        held = uploaded(columns.index_select(0, uploaded(ids, columns.device)), like.device).to(like.dtype)
        if drops:
            held = held * kept_share(held, 1 - drops, edges.key + 1 + first)
        return edges.to(like.device), held


def products_of(cut: Cut) -> Cut:
    """Return a cut that multiplies rows by the weights, ``(R, sum of H)``, and makes no hop."""

    def term(layer: Any, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
        weight = torch.cat([parameters[name][:, mine] for name in cut.weights])
        return functional.linear(columns[edges.row_id], weight)

    def width(layer: Any) -> int:
        return sum(layer.get_parameter(name).size(0) for name in cut.weights)

    return Cut(cut.weights, (), term, lambda _, total: total, width)


def summed(
    cut: Cut,
    layer: nn.Module,
    edges: InEdges,
    x: Tensor,
    slices: Sequence[slice],
    parameters: Parameters | None = None,
) -> Tensor:
    """Return what ranks that hold slices of the columns of ``x`` find together, ``(D, H)``, on one process.

    ``parameters`` are by default those of the layer.
    """
    parameters = cut.parameters(layer) if parameters is None else parameters
    by_rank = [(*cut.prepared(layer, edges, x[:, mine].contiguous(), x), mine) for mine in slices]
    if cut.scores is not None:
        scores = torch.stack([cut.scores(layer, parameters, *one) for one in by_rank]).sum(0)
        by_rank = [(replace(held, scores=scores), columns, mine) for held, columns, mine in by_rank]
    return torch.stack([cut.term(layer, parameters, *one) for one in by_rank]).sum(0)


def kept_share(like: Tensor, keeps: float, key: int) -> Tensor:
    """Return the factors of dropout, 0 or 1 / ``keeps``, drawn by a key alone."""
    drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(key % (1 << 64)), dtype=torch.float64)
    return (drawn < keeps).to(like) / max(keeps, torch.finfo(like.dtype).tiny)


def plus(out: Tensor, *biases: Tensor | None) -> Tensor:
    """Add the biases that there are."""
    for bias in biases:
        out = out if bias is None else out + bias
    return out
