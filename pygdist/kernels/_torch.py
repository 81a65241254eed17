r"""The kernels by torch's own operators, for CUDA, and for the CPU without the native library.

The functions are those of :mod:`pygdist.kernels._native`. Sums and means are CSR products, one for each head. Kernels
that copy rows to edges do so for a block of edges at a time; the native library never does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pygdist.kernels.csr import CSR

T = TypeVar("T")

_INT32_MAX = 2**31 - 1
_BLOCK_VALUES = 2**25  # values copied to edges at a time
_KEPT = WeakTensorKeyDictionary()  # by the columns of a matrix on a GPU: what is computed from its structure alone


def spmm(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str) -> Tensor:
    """Compute the sum or mean of the messages of each row."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return spmm(csr, x.float(), weight, op, reduce).to(x.dtype)
    if weight is None:
        out = _product(csr, x, None)
    elif op == "add":
        out = _product(csr, x, None) + _by_head(sum_edges(csr, weight), x.shape[1])
    elif x.shape[1] == 0:
        out = x.new_zeros(csr.num_rows, 0)
    else:
        groups = zip(x.chunk(weight.shape[1], dim=1), _values(csr, weight).unbind(1), strict=True)
        out = torch.cat([_product(csr, part, value) for part, value in groups], dim=1)
    return out / csr.indptr.diff().clamp(min=1).unsqueeze(-1) if reduce == "mean" else out


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None, *, onto: bool) -> None:
    """Write the sums of the messages of each row into ``out``, or add them to it."""
    sums = spmm(csr, x, weight, "copy" if weight is None else "mul", "sum")
    _ = out.add_(sums) if onto else out.copy_(sums)


def keeps_places(num_rows: int, num_entries: int, x: Tensor) -> bool:
    """Return true if :func:`extremum` fills ``places``. Then ``extremum_scatter`` computes the gradient from them."""
    return False


def extremum(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str, places: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the maximum or minimum of the messages of each row, and the places if there is room for them."""
    row = _row_index(csr).long()
    out = x.new_full((csr.num_rows, x.shape[1]), -math.inf if reduce == "max" else math.inf)
    for block, messages in _messages(csr, csr.index, x, weight, op):
        out.scatter_reduce_(0, row[block].unsqueeze(-1).expand_as(messages), messages, f"a{reduce}")
    return out.where((csr.indptr.diff() > 0).unsqueeze(-1), 0), places


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, grad_out: Tensor) -> Tensor:
    """Divide the gradient of each extremum among the entries that attain it."""
    row = _row_index(csr)
    # scatter_reduce starts from zeros and counts them as attaining an extremum of 0; PyG's gradients have that share.
    count = (out == 0).to(x.dtype)
    for block, messages in _messages(csr, csr.index, x, weight, op):
        count.index_add_(0, row[block], (messages == out.index_select(0, row[block])).to(x.dtype))
    return grad_out / count


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, share: Tensor) -> Tensor:
    """Sum, for each source, the shares of the extrema that it attains."""
    source, values = _row_index(transposed), None if weight is None else _values(transposed, weight)
    total = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for block, messages in _messages(transposed, source, x, weight, op):
        target = transposed.index[block]
        gradient = share.index_select(0, target)
        if op == "mul" and values is not None:
            gradient = gradient * _by_head(values[block], x.shape[1])
        attained = torch.where(messages == out.index_select(0, target), gradient, 0)
        total.index_add_(0, source[block], attained)
    return total


def extremum_value_grad(csr: CSR, x: Tensor, weight: Tensor, op: str, out: Tensor, share: Tensor) -> Tensor:
    """Sum, for each edge value, the shares of the extrema that its entry attains."""
    row, by_entry = _row_index(csr), weight.new_empty(csr.num_entries, weight.shape[1])
    for block, messages in _messages(csr, csr.index, x, weight, op):
        gradient = share.index_select(0, row[block])
        if op == "mul":
            gradient = gradient * x.index_select(0, csr.index[block])
        attained = messages == out.index_select(0, row[block])
        by_entry[block] = _head_sums(torch.where(attained, gradient, 0), weight.shape[1])
    return _at_positions(csr, by_entry)


def sddmm(csr: CSR, x: Tensor, y: Tensor, heads: int) -> Tensor:
    """Compute the dot product of source and destination row for each entry and head."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if heads == 1 and x.is_cuda and x.dtype == dtype and x.shape[1] and csr.num_entries and fits(csr):
        sampled = torch.sparse.sampled_addmm(_ones(csr, dtype), y.contiguous(), x.contiguous().t(), beta=0)
        return _at_positions(csr, sampled.values().unsqueeze(1))
    row = _row_index(csr)
    out = x.new_zeros(csr.num_entries, heads, dtype=dtype)
    for block in _blocks(csr, x.shape[1]):
        products = x.index_select(0, csr.index[block]).to(dtype) * y.index_select(0, row[block])
        out[block] = _head_sums(products, heads)
    return _at_positions(csr, out)


def edge_softmax(csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float) -> Tensor:
    """Compute the softmax of additive scores over the entries of each row."""
    row = _row_index(csr).long()
    alpha, _, total = _softmax(csr, row, _additive(csr, row, source, target, edge), slope)
    return alpha / total.index_select(0, row)


def edge_softmax_grad(
    csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float, out: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the scores, by entry and summed by row."""
    row = _row_index(csr)
    dot = out.new_zeros(csr.num_rows, out.shape[1]).index_add_(0, row, out * grad)
    gradient = out * (grad - dot.index_select(0, row))
    gradient = torch.where(_additive(csr, row, source, target, edge) > 0, gradient, gradient * slope)
    return gradient, torch.zeros_like(dot).index_add_(0, row, gradient)


def sum_edges(csr: CSR, values: Tensor) -> Tensor:
    """Sum the edge values of each row."""
    return values.new_zeros(csr.num_rows, values.shape[1]).index_add_(0, _row_index(csr), _values(csr, values))


def gat(
    csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, onto: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Sum rows weighted by the softmax of additive scores; the inputs of the gradient are empty unless ``graded``.

    With ``onto``, the results over other entries of the same rows, the results are those over all, and ``graded``.
    """
    row = _row_index(csr).long()
    scores = _additive(csr, row, source, target, None)
    weights, largest, total = _softmax(csr, row, scores, slope)
    alpha = weights / total.index_select(0, row)
    out = spmm(csr, x, alpha, "mul", "sum")
    if not graded:
        return out, x.new_empty(0, 0), x.new_empty(0, 0, 0)
    alpha_above = alpha * (scores > 0)
    filled = (csr.indptr.diff() > 0).unsqueeze(-1)  # a row without edges has no largest score
    facts = [largest.where(filled, 0), filled / total, torch.zeros_like(total).index_add_(0, row, alpha_above)]
    part = out, spmm(csr, x, alpha_above, "mul", "sum"), torch.stack(facts, dim=-1)
    return merged(onto, part) if onto else part


def merged(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Merge the results over two sets of edges into that over both, by the running maximum and sum of exponentials."""
    (out, above, facts), (out2, above2, facts2) = first, second
    # facts are the largest score, one over the sum of exponentials (0 without edges), and the share of positive scores
    shift, shift2 = (part[..., 0].where(part[..., 1] > 0, float("-inf")) for part in (facts, facts2))
    largest = torch.maximum(shift, shift2)
    weights = []
    for part, part_largest in ((facts, shift), (facts2, shift2)):
        total = torch.where(part[..., 1] > 0, 1 / part[..., 1], 0)
        weights.append(torch.where(total > 0, total * (part_largest - largest).exp(), 0))
    scale = 1 / (weights[0] + weights[1])
    empty = scale.isinf()  # rows without edges in both
    share, share2 = (torch.where(empty, 0, weight * scale) for weight in weights)
    heads = share.shape[1]

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        shape = (one.shape[0], heads, -1)
        return (one.view(shape) * share.unsqueeze(-1) + other.view(shape) * share2.unsqueeze(-1)).view(one.shape)

    positive = facts[..., 2] * share + facts2[..., 2] * share2
    merged = [largest.where(~empty, 0), scale.where(~empty, 0), positive]
    return mixed(out, out2), mixed(above, above2), torch.stack(merged, dim=-1)


def gat_ends(
    target: Tensor, slope: float, out: Tensor, above: Tensor, facts: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the values of each row that :func:`gat_grad` needs, and the gradient of ``target``; no edge is read."""
    heads = target.shape[1]
    dot = _head_sums(grad * out, heads)
    ends = torch.stack([target, facts[..., 0], facts[..., 1], dot], dim=-1).transpose(0, 1)
    return ends, (1 - slope) * (_head_sums(grad * above, heads) - dot * facts[..., 2])  # see gat.cpp


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and ``source``."""
    row, column = _row_index(transposed), transposed.index
    target, shift, scale, dot = ends.transpose(0, 1).index_select(0, column).unbind(-1)
    scores = source.index_select(0, row) + target
    alpha = (torch.nn.functional.leaky_relu(scores, slope) - shift).exp() * scale
    gradient = sddmm(transposed, grad, x, source.shape[1]) - dot
    gradient = alpha * torch.where(scores > 0, gradient, gradient * slope)
    return spmm(transposed, grad, alpha, "mul", "sum"), torch.zeros_like(source).index_add_(0, row, gradient)


def gatv2_scores(csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, heads: int) -> Tensor:
    """Compute the scores of GATv2 for each entry and head."""
    row = _row_index(csr)
    scores = source.new_zeros(csr.num_entries, heads)
    for block in _blocks(csr, source.shape[1]):
        total = source.index_select(0, csr.index[block]) + target.index_select(0, row[block])
        products = torch.nn.functional.leaky_relu(total, slope) * attention
        scores[block] = _head_sums(products, heads)
    return scores


def gatv2_grad(
    csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, grad_scores: Tensor, *, both: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of ``target`` and, with ``both``, each target's term of the gradient of ``attention``."""
    row, values = _row_index(csr), _values(csr, grad_scores)
    grad_target = torch.zeros_like(target)
    grad_attention = torch.zeros_like(target) if both else target.new_empty(0, 0)
    for block in _blocks(csr, source.shape[1]):
        total = source.index_select(0, csr.index[block]) + target.index_select(0, row[block])
        factor = _by_head(values[block], source.shape[1])
        factor = torch.where(total > 0, factor, factor * slope)
        grad_target.index_add_(0, row[block], factor * attention)
        if both:
            grad_attention.index_add_(0, row[block], factor * total)
    return grad_target, grad_attention


def _softmax(csr: CSR, row: Tensor, scores: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the exponentials of scores less the largest of their row, that largest score, and their sum by row."""
    scores = torch.nn.functional.leaky_relu(scores, slope)
    index = row.unsqueeze(-1).expand_as(scores)
    largest = scores.new_zeros(csr.num_rows, scores.shape[1])
    largest.scatter_reduce_(0, index, scores, "amax", include_self=False)
    exponentials = (scores - largest.index_select(0, row)).exp()
    total = torch.zeros_like(largest).index_add_(0, row, exponentials) + 1e-16  # as in PyG's softmax
    return exponentials, largest, total


def _blocks(csr: CSR, width: int) -> Iterator[slice]:
    """Yield ranges of entries whose rows together hold a bounded number of values."""
    step = max(_BLOCK_VALUES // max(width, 1), 1)
    for start in range(0, csr.num_entries, step):
        yield slice(start, start + step)


def _values(csr: CSR, values: Tensor) -> Tensor:
    """Bring edge values into the order of the entries."""
    return values if csr.perm is None else values.index_select(0, csr.perm)


def _at_positions(csr: CSR, by_entry: Tensor) -> Tensor:
    """Bring values from the order of the entries into that of the edges."""
    return by_entry if csr.perm is None else torch.empty_like(by_entry).index_copy_(0, csr.perm.long(), by_entry)


def _by_head(values: Tensor, width: int) -> Tensor:
    """Repeat the value of each head for its channels: ``(E, heads)`` to ``(E, width)``."""
    return values if values.shape[1] == 1 else values.repeat_interleave(width // values.shape[1], dim=1)


def _head_sums(rows: Tensor, heads: int) -> Tensor:
    """Sum the channels of each head: ``(E, width)`` to ``(E, heads)``."""
    return rows.reshape(rows.shape[0], heads, rows.shape[1] // heads).sum(dim=2)


def _messages(csr: CSR, source: Tensor, x: Tensor, weight: Tensor | None, op: str) -> Iterator[tuple[slice, Tensor]]:
    """Yield the messages of some entries at a time, and which they are; ``source`` is the source of each entry."""
    values = None if weight is None else _values(csr, weight)
    for block in _blocks(csr, x.shape[1]):
        rows = x.index_select(0, source[block])
        if values is not None:
            by_head = _by_head(values[block], x.shape[1])
            rows = rows + by_head if op == "add" else rows * by_head
        yield block, rows


def _additive(csr: CSR, row: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None) -> Tensor:
    parts = [] if edge is None else [edge]
    if source is not None:
        parts.append(source.index_select(0, csr.index))
    if target is not None:
        parts.append(target.index_select(0, row))
    return torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0]


def fits(csr: CSR) -> bool:
    """Return true unless there are more entries than a dense matrix has, which cuSPARSE refuses."""
    return csr.num_entries <= csr.num_rows * csr.num_cols


def _product(csr: CSR, x: Tensor, values: Tensor | None) -> Tensor:
    if x.is_cuda and not fits(csr):
        row, out = _row_index(csr), x.new_zeros(csr.num_rows, x.shape[1])
        for block in _blocks(csr, x.shape[1]):
            messages = x.index_select(0, csr.index[block])
            out.index_add_(0, row[block], messages if values is None else messages * values[block].unsqueeze(-1))
        return out
    matrix = _ones(csr, x.dtype) if values is None else _matrix(csr, values)
    return matrix @ x.contiguous()  # on the CPU, torch reads strided tensors as if they were contiguous


def _ones(csr: CSR, dtype: torch.dtype) -> Tensor:
    return kept(
        csr, ("ones", csr.num_cols, dtype), lambda: _matrix(csr, csr.index.new_ones(csr.num_entries, dtype=dtype))
    )


def _matrix(csr: CSR, values: Tensor) -> Tensor:
    # torch wants one index dtype; the narrow one is faster and offsets are far fewer than columns
    dtype = csr.index.dtype if csr.num_entries <= _INT32_MAX else torch.int64
    offsets = kept(csr, ("offsets", dtype), lambda: csr.indptr.to(dtype).contiguous())
    shape = csr.num_rows, csr.num_cols
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        index = csr.index.to(dtype).contiguous().detach()  # not the tensor itself, by which the result is kept
        return torch.sparse_csr_tensor(offsets, index, values.contiguous(), shape, check_invariants=False)


def _row_index(csr: CSR) -> Tensor:
    return kept(csr, "rows", csr.row_index)


def kept(csr: CSR, name: Hashable, make: Callable[[], T]) -> T:
    """Return what is computed from the structure of a matrix alone; on a GPU it is kept as long as the matrix lives."""
    if not csr.indptr.is_cuda or csr.indptr.is_inference() or csr.index.is_inference():
        return make()
    of_matrix = _KEPT.setdefault(csr.index, {})
    versions = csr.indptr._version, csr.index._version
    if name in of_matrix:
        indptr, found, result = of_matrix[name]
        if indptr() is csr.indptr and found == versions:
            return cast(T, result)
    with torch.inference_mode(False), torch.no_grad():
        result = make()
    of_matrix[name] = TensorWeakRef(csr.indptr), versions, result
    return result
