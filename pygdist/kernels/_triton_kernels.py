"""Triton's side of :mod:`pygdist.kernels._triton`: what a GPU runs.

One program handles one row of a matrix, or a block of its heads and channels, and walks through the entries of the row,
``EDGES`` at a time. So nothing is added by several programs, results are the same bit for bit each time, and no tensor
holds edges times channels. Of a matrix whose long rows are cut in pieces, ``rows`` holds the row of each piece: then a
program handles a piece, and results by row are those of pieces.

Tiles are ``(edges, heads, channels)``. Sums are taken in ``REAL``: float64 for float64, else float32. Arguments in
capitals are constants of a compilation, and so are tensors that are ``None``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row(indptr, rows):
    """Return the piece of this program, its row, and the range of its entries."""
    piece = tl.program_id(0).to(tl.int64)
    row = piece
    if rows is not None:
        row = tl.load(rows + piece).to(tl.int64)
    return piece, row, tl.load(indptr + piece), tl.load(indptr + piece + 1)


@triton.jit
def _features(H, C, HEADS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the heads of this program, the places of its values in a row, and which of both there are."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    value = head[:, None] * C + channel[None, :]
    return head, head < H, value, (head < H)[:, None] & (channel < C)[None, :]


@triton.jit
def _entries(first, end, index, perm, EDGES: tl.constexpr):
    """Return the columns of some entries, the places of their values, and which of these there are."""
    entry = first + tl.arange(0, EDGES)
    inside = entry < end
    column = tl.load(index + entry, mask=inside, other=0).to(tl.int64)
    place = entry
    if perm is not None:
        place = tl.load(perm + entry, mask=inside, other=0).to(tl.int64)
    return column, place, inside


@triton.jit
def _rows(x, row, F, value, inside, has_value, REAL: tl.constexpr):
    """Read a tile: of each row these values."""
    mask = inside[:, None, None] & has_value[None, :, :]
    return tl.load(x + row[:, None, None] * F + value[None, :, :], mask=mask, other=0).to(REAL)


@triton.jit
def _scalars(x, row, H, head, inside, has_head, REAL: tl.constexpr):
    """Read a number by row and head."""
    return tl.load(x + row[:, None] * H + head[None, :], mask=inside[:, None] & has_head[None, :], other=0).to(REAL)


@triton.jit
def _message(rows, values, OP: tl.constexpr):
    if OP == "mul":
        message = rows * values[:, :, None]
    elif OP == "add":
        message = rows + values[:, :, None]
    else:
        message = rows
    return message


@triton.jit
def _values(weight, place, H, head, inside, has_head, OP: tl.constexpr, REAL: tl.constexpr):
    """Read edge values; zeros if there are none, which the compiler leaves out."""
    if OP == "copy":
        values = tl.zeros([place.shape[0], head.shape[0]], dtype=REAL)
    else:
        values = _scalars(weight, place, H, head, inside, has_head, REAL)
    return values


@triton.jit
def spmm(
    indptr, index, perm, rows, x, weight, out, H, C,
    OP: tl.constexpr, ONTO: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    total = tl.zeros([HEADS, CHANNELS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        values = _values(weight, place, H, head, inside, has_head, OP, REAL)
        total += tl.sum(_message(tile, values, OP), axis=0)
    at = out + piece * H * C + value
    if ONTO:
        total += tl.load(at, mask=has_value, other=0).to(REAL)
    tl.store(at, total.to(out.dtype.element_ty), mask=has_value)


@triton.jit
def extremum(
    indptr, index, perm, rows, x, weight, out, H, C, OP: tl.constexpr, SIGN: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """``SIGN`` is 1 for maxima, -1 for minima. As in torch, one message that is not a number makes the result one."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    largest = tl.full([HEADS, CHANNELS], float("-inf"), dtype=REAL)
    no_numbers = tl.zeros([HEADS, CHANNELS], dtype=tl.int32)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        values = _values(weight, place, H, head, inside, has_head, OP, REAL)
        message = SIGN * _message(tile, values, OP)
        no_numbers += tl.sum(((message != message) & inside[:, None, None]).to(tl.int32), axis=0)
        largest = tl.maximum(largest, tl.max(tl.where(inside[:, None, None], message, float("-inf")), axis=0))
    largest = tl.where(no_numbers > 0, float("nan"), SIGN * largest)
    largest = tl.where(end > start, largest, 0.0)
    tl.store(out + piece * H * C + value, largest.to(out.dtype.element_ty), mask=has_value)


@triton.jit
def count_ties(
    indptr, index, perm, rows, x, weight, out, count, H, C, OP: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Count the messages that attain the extremum of their row."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    extreme = tl.load(out + row * H * C + value, mask=has_value, other=0).to(REAL)
    total = tl.zeros([HEADS, CHANNELS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        values = _values(weight, place, H, head, inside, has_head, OP, REAL)
        attains = (_message(tile, values, OP) == extreme[None, :, :]) & inside[:, None, None]
        total += tl.sum(attains.to(REAL), axis=0)
    tl.store(count + piece * H * C + value, total.to(count.dtype.element_ty), mask=has_value)


@triton.jit
def extremum_grad(
    indptr, index, perm, rows, x, weight, out, share, grad_x, H, C, OP: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The matrix is the transpose: a row is a source, columns are destinations."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    source = tl.load(x + row * H * C + value, mask=has_value, other=0).to(REAL)
    total = tl.zeros([HEADS, CHANNELS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        values = _values(weight, place, H, head, inside, has_head, OP, REAL)
        gradient = _rows(share, column, H * C, value, inside, has_value, REAL)
        extreme = _rows(out, column, H * C, value, inside, has_value, REAL)
        message = _message(source[None, :, :], values, OP)
        if OP == "mul":
            gradient = gradient * values[:, :, None]
        total += tl.sum(tl.where((message == extreme) & inside[:, None, None], gradient, 0.0), axis=0)
    tl.store(grad_x + piece * H * C + value, total.to(grad_x.dtype.element_ty), mask=has_value)


@triton.jit
def extremum_value_grad(
    indptr, index, perm, rows, x, weight, out, share, grad_weight, H, C, OP: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    at = row * H * C + value
    extreme = tl.load(out + at, mask=has_value, other=0).to(REAL)
    gradient = tl.load(share + at, mask=has_value, other=0).to(REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        values = _values(weight, place, H, head, inside, has_head, OP, REAL)
        attains = (_message(tile, values, OP) == extreme[None, :, :]) & has_value[None, :, :]
        term = gradient[None, :, :]
        if OP == "mul":
            term = term * tile
        result = tl.sum(tl.where(attains, term, 0.0), axis=2)
        to = grad_weight + place[:, None] * H + head[None, :]
        tl.store(to, result.to(grad_weight.dtype.element_ty), mask=inside[:, None] & has_head[None, :])


@triton.jit
def sddmm(
    indptr, index, perm, rows, x, y, out, H, C,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    target = tl.load(y + row * H * C + value, mask=has_value, other=0).to(REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        result = tl.sum(tile * target[None, :, :], axis=2)
        to = out + place[:, None] * H + head[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside[:, None] & has_head[None, :])


@triton.jit
def sum_edges(
    indptr, index, perm, rows, values, out, H, C,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    total = tl.zeros([HEADS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        total += tl.sum(_scalars(values, place, H, head, inside, has_head, REAL), axis=0)
    tl.store(out + piece * H + head, total.to(out.dtype.element_ty), mask=has_head)


@triton.jit
def _score(source, target, edge, row, column, place, H, head, inside, has_head, REAL: tl.constexpr):
    """Return the sum of the terms of a score, before the leaky ReLU."""
    score = tl.zeros([place.shape[0], head.shape[0]], dtype=REAL)
    if edge is not None:
        score += _scalars(edge, place, H, head, inside, has_head, REAL)
    if source is not None:
        score += _scalars(source, column, H, head, inside, has_head, REAL)
    if target is not None:
        score += tl.load(target + row * H + head, mask=has_head, other=0).to(REAL)[None, :]
    return score


@triton.jit
def _leaky(score, slope):
    return tl.where(score > 0, score, score * slope)


@triton.jit
def _raise_to(largest, score, inside):
    """Return the largest scores including those of a tile, the factor by which sums so far shrink, and exponentials."""
    new = tl.maximum(largest, tl.max(tl.where(inside[:, None], score, float("-inf")), axis=0))
    finite = new > float("-inf")  # else all scores so far are -inf, and nothing has been summed
    factor = tl.where(finite, tl.exp(largest - new), 0.0)
    part = tl.where(inside[:, None] & finite[None, :], tl.exp(score - new[None, :]), 0.0)
    return new, factor, part


@triton.jit
def score_sums(
    indptr, index, perm, rows, source, target, edge, largest_out, total_out, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Find the largest score of each row, and the sum of exponentials of scores less that one."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    largest, total = tl.full([HEADS], float("-inf"), dtype=REAL), tl.zeros([HEADS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        score = _leaky(_score(source, target, edge, row, column, place, H, head, inside, has_head, REAL), slope)
        largest, factor, part = _raise_to(largest, score, inside)
        total = total * factor + tl.sum(part, axis=0)
    tl.store(largest_out + piece * H + head, largest.to(largest_out.dtype.element_ty), mask=has_head)
    tl.store(total_out + piece * H + head, total.to(total_out.dtype.element_ty), mask=has_head)


@triton.jit
def edge_softmax(
    indptr, index, perm, rows, source, target, edge, largest, total, alpha, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    shift = tl.load(largest + row * H + head, mask=has_head, other=0).to(REAL)
    scale = 1 / (tl.load(total + row * H + head, mask=has_head, other=0).to(REAL) + 1e-16)  # as in PyG's softmax
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        score = _leaky(_score(source, target, edge, row, column, place, H, head, inside, has_head, REAL), slope)
        result = tl.exp(score - shift[None, :]) * scale[None, :]
        to = alpha + place[:, None] * H + head[None, :]
        tl.store(to, result.to(alpha.dtype.element_ty), mask=inside[:, None] & has_head[None, :])


@triton.jit
def sum_products(
    indptr, index, perm, rows, one, other, out, H, C,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Sum the products of two edge values of each row."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    total = tl.zeros([HEADS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        factor = _scalars(one, place, H, head, inside, has_head, REAL)
        total += tl.sum(factor * _scalars(other, place, H, head, inside, has_head, REAL), axis=0)
    tl.store(out + piece * H + head, total.to(out.dtype.element_ty), mask=has_head)


@triton.jit
def edge_softmax_grad(
    indptr, index, perm, rows, source, target, edge, alpha, grad, dot, by_entry, by_row, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """``dot`` is, by row, the sum of weights times their gradients."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    mean, total = tl.load(dot + row * H + head, mask=has_head, other=0).to(REAL), tl.zeros([HEADS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        weights = _scalars(alpha, place, H, head, inside, has_head, REAL)
        upstream = _scalars(grad, place, H, head, inside, has_head, REAL)
        score = _score(source, target, edge, row, column, place, H, head, inside, has_head, REAL)
        gradient = weights * (upstream - mean[None, :])
        gradient = tl.where(score > 0, gradient, gradient * slope)
        total += tl.sum(gradient, axis=0)  # entries that there are not have weight 0
        to = by_entry + place[:, None] * H + head[None, :]
        tl.store(to, gradient.to(by_entry.dtype.element_ty), mask=inside[:, None] & has_head[None, :])
    tl.store(by_row + piece * H + head, total.to(by_row.dtype.element_ty), mask=has_head)


@triton.jit
def gatv2_scores(
    indptr, index, perm, rows, source, target, attention, scores, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    by_target = tl.load(target + row * H * C + value, mask=has_value, other=0).to(REAL)
    vector = tl.load(attention + value, mask=has_value, other=0).to(REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        total = _rows(source, column, H * C, value, inside, has_value, REAL) + by_target[None, :, :]
        result = tl.sum(_leaky(total, slope) * vector[None, :, :], axis=2)
        to = scores + place[:, None] * H + head[None, :]
        tl.store(to, result.to(scores.dtype.element_ty), mask=inside[:, None] & has_head[None, :])


@triton.jit
def gatv2_grad(
    indptr, index, perm, rows, source, target, attention, grad, grad_target, grad_attention, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    by_target = tl.load(target + row * H * C + value, mask=has_value, other=0).to(REAL)
    vector = tl.load(attention + value, mask=has_value, other=0).to(REAL)
    of_target = tl.zeros([HEADS, CHANNELS], dtype=REAL)
    of_attention = tl.zeros([HEADS, CHANNELS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        total = _rows(source, column, H * C, value, inside, has_value, REAL) + by_target[None, :, :]
        factor = _scalars(grad, place, H, head, inside, has_head, REAL)[:, :, None]
        factor = tl.where(total > 0, factor, factor * slope)
        of_target += tl.sum(factor, axis=0)
        of_attention += tl.sum(factor * total, axis=0)
    at = piece * H * C + value
    tl.store(grad_target + at, (of_target * vector).to(grad_target.dtype.element_ty), mask=has_value)
    if grad_attention is not None:
        tl.store(grad_attention + at, of_attention.to(grad_attention.dtype.element_ty), mask=has_value)


@triton.jit
def gat(
    indptr, index, perm, rows, x, source, target, out, above, facts, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Exponentials are taken of scores less the largest so far; sums shrink where a larger one comes."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    largest, total = tl.full([HEADS], float("-inf"), dtype=REAL), tl.zeros([HEADS], dtype=REAL)
    positive = tl.zeros([HEADS], dtype=REAL)
    result, result_above = tl.zeros([HEADS, CHANNELS], dtype=REAL), tl.zeros([HEADS, CHANNELS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        score = _leaky(_score(source, target, None, row, column, place, H, head, inside, has_head, REAL), slope)
        largest, factor, part = _raise_to(largest, score, inside)
        part_above = tl.where(score > 0, part, 0.0)
        tile = _rows(x, column, H * C, value, inside, has_value, REAL)
        total = total * factor + tl.sum(part, axis=0)
        result = result * factor[:, None] + tl.sum(tile * part[:, :, None], axis=0)
        if above is not None:
            positive = positive * factor + tl.sum(part_above, axis=0)
            result_above = result_above * factor[:, None] + tl.sum(tile * part_above[:, :, None], axis=0)
    scale = 1 / (total + 1e-16)  # as in PyG's softmax
    at = piece * H * C + value
    tl.store(out + at, (result * scale[:, None]).to(out.dtype.element_ty), mask=has_value)
    if above is not None:
        tl.store(above + at, (result_above * scale[:, None]).to(above.dtype.element_ty), mask=has_value)
        fact = facts + (piece * H + head) * 3
        tl.store(fact, tl.where(end > start, largest, 0.0).to(facts.dtype.element_ty), mask=has_head)
        tl.store(fact + 1, tl.where(end > start, scale, 0.0).to(facts.dtype.element_ty), mask=has_head)
        tl.store(fact + 2, (positive * scale).to(facts.dtype.element_ty), mask=has_head)


@triton.jit
def gat_grad(
    indptr, index, perm, rows, x, source, ends, grad, grad_x, grad_source, num_targets, H, C, slope: tl.constexpr,
    EDGES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The matrix is the transpose. ``ends`` is ``(heads, destinations, 4)``, as ``gat_ends`` makes it."""
    piece, row, start, end = _row(indptr, rows)
    head, has_head, value, has_value = _features(H, C, HEADS, CHANNELS)
    at = row * H * C + value
    source_row = tl.load(x + at, mask=has_value, other=0).to(REAL)
    source_score = tl.load(source + row * H + head, mask=has_head, other=0).to(REAL)
    of_x, of_source = tl.zeros([HEADS, CHANNELS], dtype=REAL), tl.zeros([HEADS], dtype=REAL)
    for first in range(start, end, EDGES):
        column, place, inside = _entries(first, end, index, perm, EDGES)
        upstream = _rows(grad, column, H * C, value, inside, has_value, REAL)
        mask = inside[:, None] & has_head[None, :]
        fact = ends + (head.to(tl.int64)[None, :] * num_targets + column[:, None]) * 4
        score = source_score[None, :] + tl.load(fact, mask=mask, other=0).to(REAL)
        shift, scale = tl.load(fact + 1, mask=mask, other=0), tl.load(fact + 2, mask=mask, other=0)
        alpha = tl.where(mask, tl.exp(_leaky(score, slope) - shift.to(REAL)) * scale.to(REAL), 0.0)
        dot = tl.load(fact + 3, mask=mask, other=0).to(REAL)
        gradient = alpha * (tl.sum(upstream * source_row[None, :, :], axis=2) - dot)
        of_x += tl.sum(upstream * alpha[:, :, None], axis=0)
        of_source += tl.sum(tl.where(score > 0, gradient, gradient * slope), axis=0)
    tl.store(grad_x + piece * H * C + value, of_x.to(grad_x.dtype.element_ty), mask=has_value)
    tl.store(grad_source + piece * H + head, of_source.to(grad_source.dtype.element_ty), mask=has_head)
