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

Each step and its gradient take memory for edges times heads and for nodes times features; :func:`gat` for the latter
alone. All three can be differentiated once: a loss on gradients needs ``savings.fused_attention=False``. Rows in half
precision are converted to float32 here; only :func:`~pygdist.kernels.spmm` reads bfloat16 as it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.kernels._attention_ops import edge_softmax_op, gat_op, gatv2_scores_op
from pygdist.kernels.csr import CSR
from pygdist.kernels.spmm import Transposed, transposed_tensors


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
        edge: Term :math:`s` of the score, by edge, in the order of ``csr.index``.
        source: Term :math:`a`, by source.
        target: Term :math:`b`, by destination.
        negative_slope: Slope of the leaky ReLU for negative numbers; 1 for no ReLU.
        transposed: ``transpose(csr)``, or a function that returns it; for the gradient of ``source``.

    Shapes:
        ``edge`` is :math:`(E, H)`, ``source`` :math:`(M, H)`, ``target`` :math:`(N, H)`; at least one is given, and all
        have the same floating-point dtype. The result is :math:`(E, H)`, in the order of ``csr.index`` (``csr.perm`` is
        not applied). The weights of one row sum to 1.

    Raises:
        ValueError: If there is no term, or a shape, dtype or device does not fit.
    """
    num_rows = {"edge": csr.num_entries, "source": csr.num_cols, "target": csr.num_rows}
    terms = {"edge": edge, "source": source, "target": target}
    like = next((term for term in terms.values() if term is not None), None)
    if like is None:
        raise ValueError("edge_softmax needs scores: give edge, source or target")
    for name, term in terms.items():
        if term is not None:
            expected = (num_rows[name], *like.shape[1:])
            if term.dim() != 2 or term.shape != expected:
                raise ValueError(f"{name} must have shape {expected} (rows, heads), got {tuple(term.shape)}")
            _check_kind(name, term, like.dtype, csr)
    dtype = torch.promote_types(like.dtype, torch.float32)
    edge, source, target = (term if term is None else term.to(dtype) for term in terms.values())
    backward = transposed_tensors(csr, transposed, source)
    alpha: Tensor = edge_softmax_op(
        csr.indptr, csr.index, csr.num_cols, source, target, edge, negative_slope, *backward
    )
    return alpha.to(like.dtype)


def gat(
    csr: CSR, x: Tensor, source: Tensor, target: Tensor, *, negative_slope: float = 0.2, transposed: Transposed = None
) -> Tensor:
    r"""Aggregate as GAT ("Graph Attention Networks", Eqs. 3 to 6) in one pass over the edges.

    .. math::
        \mathbf{y}_{i,h} = \sum_{e = (i, j)} \alpha_{e,h} \, \mathbf{x}_{j,h}, \quad
        \alpha_{e,h} = \mathrm{softmax}_{e \in \mathcal{E}_i} \; \mathrm{LeakyReLU}(a_{j,h} + b_{i,h})

    The result equals :func:`edge_softmax` followed by :func:`~pygdist.kernels.spmm`. The native library computes each
    weight where the weight is used, in the backward pass too, so no tensor with a row per edge is stored.

    Args:
        csr: Structure of the matrix; rows are destinations.
        x: Rows of the sources.
        source: Term :math:`a` of the score, by source.
        target: Term :math:`b`, by destination.
        negative_slope: Slope of the leaky ReLU for negative numbers; not negative.
        transposed: ``transpose(csr)``, or a function that returns it; for the gradients of ``x`` and ``source``.

    Shapes:
        ``x`` is :math:`(M, H, C)`, ``source`` :math:`(M, H)`, ``target`` :math:`(N, H)`, the result
        :math:`(N, H, C)`.

    Raises:
        ValueError: If a shape, dtype or device does not fit, or the slope is negative.
    """
    if negative_slope < 0:
        raise ValueError(f"negative_slope must be 0 or more, got {negative_slope}")
    inputs = {"x": (x, csr.num_cols, 3), "source": (source, csr.num_cols, 2), "target": (target, csr.num_rows, 2)}
    for name, (tensor, rows, dim) in inputs.items():
        if tensor.dim() != dim or tensor.shape[:2] != (rows, *x.shape[1:2]):
            axes = "rows, heads" if dim == 2 else "rows, heads, channels"
            raise ValueError(f"{name} must have shape ({axes}) with {rows} rows, got {tuple(tensor.shape)}")
        _check_kind(name, tensor, x.dtype, csr)
    if x.shape[1] * x.shape[2] == 0:  # nothing to sum, and the gradients are 0
        return (x.sum() + source.sum() + target.sum()) * x.new_zeros((csr.num_rows, *x.shape[1:]))
    backward = transposed_tensors(csr, transposed, x, source, target)
    dtype = torch.promote_types(x.dtype, torch.float32)
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, source, target))
    converted = x.flatten(1).to(dtype), source.to(dtype), target.to(dtype)
    out: Tensor = gat_op(csr.indptr, csr.index, *converted, negative_slope, graded, *backward[:2])[0]
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
    r"""Compute the scores of GATv2 ("How Attentive are Graph Attention Networks?", Eq. 7), before their softmax.

    .. math::
        s_{e,h} = \langle \mathbf{a}_h, \mathrm{LeakyReLU}(\mathbf{x}_{j,h} + \mathbf{y}_{i,h}) \rangle

    Args:
        csr: Structure of the matrix; rows are destinations.
        source: Rows :math:`\mathbf{x}` of the sources.
        target: Rows :math:`\mathbf{y}` of the destinations.
        attention: The vector :math:`\mathbf{a}` of each head.
        negative_slope: Slope of the leaky ReLU for negative numbers.
        transposed: ``transpose(csr)``, or a function that returns it; for the gradient of ``source``.

    Shapes:
        ``source`` is :math:`(M, H, C)`, ``target`` :math:`(N, H, C)`, ``attention`` :math:`(H, C)`, the result
        :math:`(E, H)`, in the order of ``csr.index`` (``csr.perm`` is not applied).

    Raises:
        ValueError: If a shape, dtype or device does not fit.
    """
    inputs = {"source": (source, (csr.num_cols,)), "target": (target, (csr.num_rows,)), "attention": (attention, ())}
    for name, (tensor, rows) in inputs.items():
        expected = (*rows, *attention.shape)
        if attention.dim() != 2 or tensor.shape != expected:
            raise ValueError(f"{name} must end in (heads, channels), got {tuple(tensor.shape)}, expected {expected}")
        _check_kind(name, tensor, source.dtype, csr)
    dtype = torch.promote_types(source.dtype, torch.float32)
    flat = source.flatten(1).to(dtype), target.flatten(1).to(dtype), attention.flatten().to(dtype)
    backward = transposed_tensors(csr, transposed, source)
    heads = attention.shape[0]
    scores: Tensor = gatv2_scores_op(csr.indptr, csr.index, *flat, negative_slope, heads, *backward)
    return scores.to(source.dtype)


def _check_kind(name: str, tensor: Tensor, dtype: torch.dtype, csr: CSR) -> None:
    if not tensor.is_floating_point() or tensor.dtype != dtype:
        raise ValueError(f"{name} must be floating-point and of one dtype with the others, got {tensor.dtype}")
    if tensor.device != csr.indptr.device:
        raise ValueError(f"{name} is on {tensor.device}, the matrix on {csr.indptr.device}: move one of them")
