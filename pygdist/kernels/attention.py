r"""Attention over the in-edges of each destination, without a tensor of edges times channels.

An attention layer is three steps, each here or in :mod:`pygdist.kernels.spmm`: scores of the edges, their softmax over
the in-edges of each destination, and the weighted sum of the sources' rows (:func:`~pygdist.kernels.spmm` with one
weight per edge and head).

=================  ==============================================================  =======================
layer              score of edge :math:`j \to i`, for each head                    steps
=================  ==============================================================  =======================
GAT                :math:`\mathrm{LeakyReLU}(a_j + b_i)`                           :func:`edge_softmax`, or all
                                                                                   at once :func:`gat`
GATv2              :math:`\langle a, \mathrm{LeakyReLU}(x_j + y_i) \rangle`        :func:`gatv2_scores`
Transformer        :math:`\langle k_j, q_i \rangle`                                :func:`~pygdist.kernels.sddmm`
=================  ==============================================================  =======================

Memory of each step and its gradient: edges times heads, and nodes times features; of :func:`gat` the latter alone. All
three have first derivatives only: a loss on gradients needs ``savings.fused_attention=False``. Rows in half precision
are brought to float32 here; :func:`~pygdist.kernels.spmm` alone reads bfloat16 as it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.kernels._attention_ops import edge_softmax_op, gatv2_scores_op
from pygdist.kernels._gat_ops import gat_op
from pygdist.kernels.csr import CSR
from pygdist.kernels.spmm import Transposed, resolve_transposed

__all__ = ["edge_softmax", "gat", "gatv2_scores"]


def edge_softmax(
    csr: CSR,
    edge: Tensor | None = None,
    *,
    source: Tensor | None = None,
    target: Tensor | None = None,
    negative_slope: float = 1.0,
    transposed: Transposed = None,
) -> Tensor:
    r"""Normalise scores over the in-edges of each destination.

    .. math::
        \alpha_{e,h} = \mathrm{softmax}_{e \in \mathcal{E}_i} \;
        \mathrm{LeakyReLU}(s_{e,h} + a_{j,h} + b_{i,h})

    The denominator has :math:`10^{-16}` added, as in PyG's ``softmax``.

    Args:
        csr: Structure of the matrix; rows are destinations.
        edge: The part :math:`s` of the score that belongs to the edge.
        source: The part :math:`a` that belongs to its source.
        target: The part :math:`b` that belongs to its destination.
        negative_slope: Of the leaky ReLU; 1 stands for none.
        transposed: ``transpose(csr)``, or a function that returns it; used for the gradient of ``source``.

    Shapes:
        ``edge`` is :math:`(E, H)`, ``source`` :math:`(M, H)`, ``target`` :math:`(N, H)`, the result :math:`(E, H)`. At
        least one is given; all have one floating-point dtype.

    Returns:
        The weights, in the order of the entries of ``csr``; those of one row sum to 1.

    Raises:
        ValueError: If there is no score, or a shape, dtype or device does not fit.
    """
    given = {"edge": (edge, csr.num_entries), "source": (source, csr.num_cols), "target": (target, csr.num_rows)}
    parts = {name: part for name, (part, _) in given.items() if part is not None}
    if not parts:
        raise ValueError("edge_softmax needs scores: edge, source or target")
    like = next(iter(parts.values()))
    for name, part in parts.items():
        expected = (given[name][1], *like.shape[1:])
        if part.dim() != 2 or part.shape != expected:
            raise ValueError(f"{name} must have shape {expected} (rows, heads), got {tuple(part.shape)}")
        _check_kind(name, part, like.dtype, csr)
    dtype = torch.promote_types(like.dtype, torch.float32)
    edge, source, target = (part if part is None else part.to(dtype) for part in (edge, source, target))
    backward = resolve_transposed(csr, transposed, source)
    alpha: Tensor = edge_softmax_op(
        csr.indptr,
        csr.index,
        csr.num_cols,
        source,
        target,
        edge,
        negative_slope,
        *((None, None, None) if backward is None else (backward.indptr, backward.index, backward.perm)),
    )
    return alpha.to(like.dtype)


def gat(
    csr: CSR,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    negative_slope: float = 0.2,
    transposed: Transposed = None,
) -> Tensor:
    r"""The aggregation of GAT ("Graph Attention Networks", Eqs. 3 to 6) in one walk over the edges.

    .. math::
        \mathbf{y}_{i,h} = \sum_{e = (i, j)} \alpha_{e,h} \, \mathbf{x}_{j,h}, \quad
        \alpha_{e,h} = \mathrm{softmax}_{e \in \mathcal{E}_i} \; \mathrm{LeakyReLU}(a_{j,h} + b_{i,h})

    The same as :func:`edge_softmax` and :func:`~pygdist.kernels.spmm` after it. The native library computes each weight
    where it is used, in the backward pass too, so that nothing as long as the edges is held.

    Args:
        csr: Structure of the matrix; rows are destinations.
        x: Rows of the sources.
        source: The part :math:`a` of the score that belongs to the source.
        target: The part :math:`b` that belongs to the destination.
        negative_slope: Of the leaky ReLU; 0 or more.
        transposed: ``transpose(csr)``, or a function that returns it; used for the gradients of ``x`` and ``source``.

    Shapes:
        ``x`` is :math:`(M, H, C)`, ``source`` :math:`(M, H)`, ``target`` :math:`(N, H)`, the result
        :math:`(N, H, C)`.

    Raises:
        ValueError: If a shape, dtype or device does not fit, or the slope is negative.
    """
    if negative_slope < 0:
        raise ValueError(f"negative_slope must be 0 or more, got {negative_slope}")
    given = {"x": (x, csr.num_cols, 3), "source": (source, csr.num_cols, 2), "target": (target, csr.num_rows, 2)}
    for name, (part, rows, dim) in given.items():
        if part.dim() != dim or part.shape[:2] != (rows, *x.shape[1:2]):
            axes = "rows, heads" if dim == 2 else "rows, heads, channels"
            raise ValueError(f"{name} must have shape ({axes}) with {rows} rows, got {tuple(part.shape)}")
        _check_kind(name, part, x.dtype, csr)
    backward = resolve_transposed(csr, transposed, x, source, target)
    dtype = torch.promote_types(x.dtype, torch.float32)
    graded = torch.is_grad_enabled() and any(part.requires_grad for part in (x, source, target))
    out: Tensor = gat_op(
        csr.indptr,
        csr.index,
        x.flatten(1).to(dtype),
        source.to(dtype),
        target.to(dtype),
        negative_slope,
        graded,
        *((None, None) if backward is None else (backward.indptr, backward.index)),
    )[0]
    return out.view(csr.num_rows, *x.shape[1:]).to(x.dtype)


def gatv2_scores(
    csr: CSR,
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    *,
    negative_slope: float = 0.2,
    transposed: Transposed = None,
) -> Tensor:
    r"""Scores of GATv2 ("How Attentive are Graph Attention Networks?", Eq. 7), before their softmax.

    .. math::
        s_{e,h} = \langle \mathbf{a}_h, \mathrm{LeakyReLU}(\mathbf{x}_{j,h} + \mathbf{y}_{i,h}) \rangle

    Args:
        csr: Structure of the matrix; rows are destinations.
        source: Rows :math:`\mathbf{x}` of the sources.
        target: Rows :math:`\mathbf{y}` of the destinations.
        attention: The vector :math:`\mathbf{a}` of each head.
        negative_slope: Of the leaky ReLU.
        transposed: ``transpose(csr)``, or a function that returns it; used for the gradient of ``source``.

    Shapes:
        ``source`` is :math:`(M, H, C)`, ``target`` :math:`(N, H, C)`, ``attention`` :math:`(H, C)`, the result
        :math:`(E, H)`.

    Returns:
        One score for each entry and head.

    Raises:
        ValueError: If a shape, dtype or device does not fit.
    """
    given = {"source": (source, (csr.num_cols,)), "target": (target, (csr.num_rows,)), "attention": (attention, ())}
    for name, (part, rows) in given.items():
        expected = (*rows, *attention.shape)
        if attention.dim() != 2 or part.shape != expected:
            raise ValueError(f"{name} must end in (heads, channels), got {tuple(part.shape)}, expected {expected}")
        _check_kind(name, part, source.dtype, csr)
    dtype = torch.promote_types(source.dtype, torch.float32)
    backward = resolve_transposed(csr, transposed, source)
    scores: Tensor = gatv2_scores_op(
        csr.indptr,
        csr.index,
        source.flatten(1).to(dtype),
        target.flatten(1).to(dtype),
        attention.flatten().to(dtype),
        negative_slope,
        attention.shape[0],
        *((None, None, None) if backward is None else (backward.indptr, backward.index, backward.perm)),
    )
    return scores.to(source.dtype)


def _check_kind(name: str, part: Tensor, dtype: torch.dtype, csr: CSR) -> None:
    if not part.is_floating_point() or part.dtype != dtype:
        raise ValueError(f"{name} must be floating-point and of one dtype with the others, got {part.dtype}")
    if part.device != csr.indptr.device:
        raise ValueError(f"{name} is on {part.device}, the matrix on {csr.indptr.device}: move one of them")
