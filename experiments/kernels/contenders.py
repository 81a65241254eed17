"""Contenders of ``measure.py``: ways to sum the rows of neighbours, or to take their mean or maximum."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from experiments.kernels import dgl_wheels
from pygdist.graph import Adjacency
from pygdist.kernels import CSR

OURS = "pygdist"
#: A function of rows and reduction; it returns ``None`` for a reduction that it does not have.
Product = Callable[[Tensor, str], Tensor | None]


class KeptTranspose(torch.autograd.Function):
    """torch's product with a transpose made once; torch's backward transposes the matrix each time."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        """Multiply."""
        ctx.transposed = transposed
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        """Multiply by the transpose."""
        return None, None, torch.sparse.mm(ctx.transposed, grad)


def weighted(edge_index: Tensor, nodes: int, dtype: torch.dtype) -> dict[str, Product]:
    """Return the contenders of the product with a weight per edge: pygdist, torch, PyG, and torch_sparse if it is."""
    adjacency = Adjacency(edge_index, num_src=nodes, num_dst=nodes)
    csr, back = adjacency.csr(), adjacency.transposed()
    weight = torch.rand(csr.num_entries, dtype=dtype)
    assert back.perm is not None
    wide, narrow = (_torch_csr(csr, weight, index) for index in (torch.int64, torch.int32))
    narrow_back = _torch_csr(back, weight[back.perm], torch.int32)
    source, target = edge_index.contiguous()
    torch_name = {"sum": "sum", "mean": "mean", "max": "amax"}

    def edge_list(x: Tensor, reduce: str) -> Tensor:
        message = weight.unsqueeze(-1) * x.index_select(0, source)
        return scatter(message, target, dim=0, dim_size=nodes, reduce=reduce)

    contenders: dict[str, Product] = {
        OURS: lambda x, reduce: adjacency.matmul(x, weight, reduce=reduce),  # as a layer's propagate does
        "torch mm": lambda x, reduce: torch.sparse.mm(wide, x) if reduce == "sum" else None,
        "torch mm, int32": lambda x, reduce: torch.sparse.mm(narrow, x) if reduce == "sum" else None,
        "torch mm, int32, kept transpose": lambda x, reduce: (
            KeptTranspose.apply(narrow, narrow_back, x) if reduce == "sum" and x.requires_grad else None
        ),
        "torch mm reduce": lambda x, reduce: torch.sparse.mm(wide, x, torch_name[reduce]),
        "PyG edge list": edge_list,
    }
    if importlib.util.find_spec("torch_sparse"):
        from torch_sparse import SparseTensor, matmul

        matrix = SparseTensor(
            rowptr=csr.indptr, col=csr.index.long(), value=weight, sparse_sizes=(nodes, nodes), is_sorted=True
        ).fill_cache_()
        contenders["torch_sparse"] = lambda x, reduce: matmul(matrix, x, reduce)
    return contenders


def _torch_csr(csr: CSR, weight: Tensor, index: torch.dtype) -> Tensor:
    return torch.sparse_csr_tensor(csr.indptr.to(index), csr.index.to(index), weight, (csr.num_rows, csr.num_cols))


def unweighted(edge_index: Tensor, nodes: int, site: Path) -> dict[str, Product]:
    """Return the contenders of the product without weights: pygdist, and DGL with each type of ids.

    Every edge counts once, as in DGL's ``copy_u``. With one weight per edge, DGL does not use LIBXSMM.
    """
    dgl = dgl_wheels.load(site)
    adjacency = Adjacency(edge_index, num_src=nodes, num_dst=nodes)

    def product_of(ids: torch.dtype) -> Product:
        graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes, idtype=ids)
        graph.create_formats_()  # otherwise the first product of each direction makes its own
        return lambda x, reduce: getattr(dgl.ops, f"copy_u_{reduce}")(graph, x)

    return {
        OURS: lambda x, reduce: adjacency.matmul(x, reduce=reduce),
        "DGL int32": product_of(torch.int32),
        "DGL int64": product_of(torch.int64),
    }
