"""Kernels on a GPU beside float64 on the host: values and gradients, for all types of rows and of indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pygdist.kernels import CSR, edge_softmax, gat, gatv2_scores, sddmm, spmm
from tests.kernels.oracle import random_csr, with_int64

HEADS, WIDTH = 2, 6
#: Largest error by type, as a share of the largest value: inputs are rounded to it, sums are made in float32 or better.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GRAPHS: dict[str, Callable[[], CSR]] = {
    "skewed": random_csr,  # with empty rows and columns
    "empty": lambda: random_csr(num_entries=0),
    "hub": lambda: CSR(torch.tensor([0, 3000, 3000]), torch.arange(3000, dtype=torch.int32) % 30, 30),
}


def _spmm(reduce: str, csr: CSR, x: Tensor, weight: Tensor | None = None) -> Tensor:
    return spmm(csr, x, weight, reduce)  # type: ignore[arg-type]


def _spmm_by_head(csr: CSR, x: Tensor, weight: Tensor) -> Tensor:
    return spmm(csr, _by_head(x), weight)


def _largest_sum(csr: CSR, x: Tensor, weight: Tensor) -> Tensor:
    return spmm(csr, _by_head(x), weight, "max", op="add")


def _softmax_of_ends(csr: CSR, source: Tensor, target: Tensor) -> Tensor:
    return edge_softmax(csr, source=source, target=target, negative_slope=0.2)


def _by_head(x: Tensor) -> Tensor:
    return x.view(-1, HEADS, WIDTH // HEADS)


def _attention(csr: CSR, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return gat(csr, _by_head(x), source, target)


def _scores(csr: CSR, x: Tensor, target: Tensor, attention: Tensor) -> Tensor:
    return gatv2_scores(csr, _by_head(x), _by_head(target), attention.view(HEADS, -1))


#: By name: the kernel, and the sizes of its inputs: (c)olumns, (r)ows or (e)ntries, then their width.
KERNELS: dict[str, tuple[Callable[..., Tensor], list[tuple[str, int]]]] = {
    **{one: (partial(_spmm, one), [("c", WIDTH)]) for one in ("sum", "mean", "max", "min")},
    **{f"{one}, weights": (partial(_spmm, one), [("c", WIDTH), ("e", 0)]) for one in ("sum", "mean", "max", "min")},
    "sum, weights by head": (_spmm_by_head, [("c", WIDTH), ("e", HEADS)]),
    "max, added by head": (_largest_sum, [("c", WIDTH), ("e", HEADS)]),
    "sddmm, one head": (lambda csr, x, y: sddmm(csr, x.unsqueeze(1), y.unsqueeze(1)), [("c", WIDTH), ("r", WIDTH)]),
    "sddmm": (lambda csr, x, y: sddmm(csr, _by_head(x), _by_head(y)), [("c", WIDTH), ("r", WIDTH)]),
    "softmax": (lambda csr, edge: edge_softmax(csr, edge=edge), [("e", HEADS)]),
    "softmax of ends": (_softmax_of_ends, [("c", HEADS), ("r", HEADS)]),
    "gat": (_attention, [("c", WIDTH), ("c", HEADS), ("r", HEADS)]),
    "gatv2": (_scores, [("c", WIDTH), ("r", WIDTH), ("1", WIDTH)]),
}


def largest_error(kernel: str, graph: str, dtype: torch.dtype, *, wide: bool) -> float:
    """Return the largest error of a kernel's values and gradients on the GPU, as a share of the largest value.

    Args:
        kernel: One of :data:`KERNELS`.
        graph: One of :data:`GRAPHS`.
        dtype: Type of the rows and values.
        wide: Indices are int64, not int32.
    """
    run, sizes = KERNELS[kernel]
    csr = with_int64(GRAPHS[graph]()) if wide else GRAPHS[graph]()
    numbers = {"c": csr.num_cols, "r": csr.num_rows, "e": csr.num_entries, "1": 1}
    generator = torch.Generator().manual_seed(1)
    shapes = [(numbers[size], width) if width else (numbers[size],) for size, width in sizes]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    perm = None if csr.perm is None else csr.perm.cuda()
    there = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols, perm)
    pairs = zip(
        _results(partial(run, there), [one.cuda() for one in inputs]),
        _results(partial(run, csr), [one.double() for one in inputs]),
        strict=True,
    )
    largest_sum = max(1.0, csr.num_entries**0.5)  # of random terms, which may cancel
    errors = [
        float((mine.cpu().double() - other).abs().max() / other.abs().max().clamp(min=largest_sum))
        for mine, other in pairs
        if other.numel()
    ]
    return max(errors, default=0.0)


def _results(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the values, and the gradients of all inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = run(*leaves)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
