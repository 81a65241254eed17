"""Attention over edges against the obvious: rows lifted to edges, torch's softmax row by row, autograd for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.utils import softmax

import pygdist.kernels._attention_ops as ops
from pygdist.kernels import CSR, edge_softmax, gatv2_scores, transpose
from pygdist.native import Isa, load, set_isa
from tests.kernels.oracle import random_csr, softmax_oracle
from tests.kernels.test_spmm import path, restored_isa  # noqa: F401 (fixtures)

HEADS = (1, 3, 17)  # one, a few, more than are summed at once
PARTS = [("edge",), ("source",), ("target",), ("source", "target"), ("edge", "source", "target")]


def parts_of(csr: CSR, names: tuple[str, ...], heads: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rows = {"edge": csr.num_entries, "source": csr.num_cols, "target": csr.num_rows}
    generator = torch.Generator().manual_seed(heads)
    return {
        name: (4 * torch.randn(rows[name], heads, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
        for name in names
    }


def lifted(csr: CSR, parts: dict[str, Tensor], slope: float) -> Tensor:
    index = {"source": csr.index.long(), "target": csr.row_index().long()}
    total = sum(part[index[name]] if name in index else part for name, part in parts.items())
    assert isinstance(total, Tensor)
    return functional.leaky_relu(total, slope)


def assert_same_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gradients = torch.autograd.grad(found, leaves, upstream.to(found.dtype))
    for a, b in zip(gradients, torch.autograd.grad(expected, leaves, upstream.to(found.dtype)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("names", PARTS, ids="-".join)
@pytest.mark.parametrize("slope", [1.0, 0.2])
@pytest.mark.usefixtures("path")
def test_softmax_matches_torch(heads: int, names: tuple[str, ...], slope: float) -> None:
    csr = random_csr()
    parts = parts_of(csr, names, heads)
    for transposed in (None, lambda: transpose(csr)):
        found = edge_softmax(csr, **parts, negative_slope=slope, transposed=transposed)
        expected = softmax_oracle(csr, lifted(csr, parts, slope))
        assert_same_gradients(found, expected, list(parts.values()), 1e-12)


@pytest.mark.usefixtures("path")
def test_softmax_is_that_of_pyg_in_float32() -> None:
    csr = random_csr(400, 300, 5000)
    parts = parts_of(csr, ("edge", "source", "target"), 4, torch.float32)
    found = edge_softmax(csr, **parts, negative_slope=0.2)
    expected = softmax(lifted(csr, parts, 0.2), csr.row_index().long(), num_nodes=csr.num_rows)
    assert_same_gradients(found, expected, list(parts.values()), 1e-6)
    sums = torch.zeros(csr.num_rows, 4).index_add_(0, csr.row_index().long(), found.detach())
    torch.testing.assert_close(sums, (csr.indptr.diff() > 0).float().unsqueeze(1).expand(-1, 4), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("path")
def test_large_scores_do_not_overflow_and_hopeless_ones_vanish() -> None:
    csr = CSR(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 0]), 3)
    scores = torch.tensor([[900.0], [900.0], [-900.0], [-5000.0]])
    assert edge_softmax(csr, scores).flatten().tolist() == [0.5, 0.5, 0.0, 1.0]


@pytest.mark.usefixtures("path")
def test_nan_spreads_over_its_row_only() -> None:
    csr = CSR(torch.tensor([0, 9, 10]), torch.zeros(10, dtype=torch.int64), 1)
    scores = torch.zeros(10, 1)
    scores[4] = float("nan")
    alpha = edge_softmax(csr, scores)
    assert alpha[:9].isnan().all()
    assert alpha[9] == 1


@pytest.mark.skipif(load() is None, reason="the native library was not built here")
def test_exponential_is_accurate_in_float32() -> None:
    x = -torch.rand(100_000, dtype=torch.float64) * 88
    csr = CSR(torch.tensor([0, 100_001]), torch.zeros(100_001, dtype=torch.int64), 1)
    scores = torch.cat([torch.zeros(1), x.float()]).unsqueeze(1)
    alpha = edge_softmax(csr, scores).flatten().double()
    expected = scores.flatten().double().exp()
    kept = expected > 1e-36
    torch.testing.assert_close((alpha / alpha[0])[kept], expected[kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("channels", [1, 5, 16, 41])
@pytest.mark.usefixtures("path")
def test_gatv2_scores_match_the_obvious(heads: int, channels: int) -> None:
    csr = random_csr()
    generator = torch.Generator().manual_seed(channels)
    shapes = ((csr.num_cols, heads, channels), (csr.num_rows, heads, channels), (heads, channels))
    leaves = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    source, target, attention = leaves
    total = source[csr.index.long()] + target[csr.row_index().long()]
    expected = (functional.leaky_relu(total, 0.2) * attention).sum(dim=-1)
    found = gatv2_scores(csr, *leaves, negative_slope=0.2, transposed=transpose(csr))
    assert_same_gradients(found, expected, leaves, 1e-12)


@pytest.mark.usefixtures("path")
def test_gradcheck() -> None:
    csr = random_csr(6, 5, 14)
    parts = parts_of(csr, ("edge", "source", "target"), 2)
    assert torch.autograd.gradcheck(
        lambda edge, source, target: edge_softmax(csr, edge, source=source, target=target, negative_slope=0.2),
        list(parts.values()),
    )
    shapes = ((5, 2, 3), (6, 2, 3), (2, 3))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *rows: gatv2_scores(csr, *rows), leaves)


@pytest.mark.parametrize(("num_rows", "num_cols"), [(5, 4), (0, 4), (3, 0), (0, 0)])
@pytest.mark.usefixtures("path")
def test_no_edges(num_rows: int, num_cols: int) -> None:
    csr = CSR(torch.zeros(num_rows + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), num_cols)
    parts = parts_of(csr, ("edge", "source", "target"), 2)
    alpha = edge_softmax(csr, **parts)
    assert alpha.shape == (0, 2)
    alpha.sum().backward()
    assert all(part.grad is not None and not part.grad.any() for part in parts.values())
    source, target = torch.ones(num_cols, 2, 3, requires_grad=True), torch.ones(num_rows, 2, 3, requires_grad=True)
    gatv2_scores(csr, source, target, torch.ones(2, 3)).sum().backward()
    assert source.grad is not None
    assert source.grad.shape == source.shape


def test_non_contiguous_inputs() -> None:
    csr = random_csr()
    wide = torch.randn(3, csr.num_entries, dtype=torch.float64)
    found = edge_softmax(csr, wide.t())
    torch.testing.assert_close(found, edge_softmax(csr, wide.t().contiguous()), rtol=0, atol=0)


@pytest.mark.skipif(load() is None, reason="the native library was not built here")
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.usefixtures("restored_isa")
def test_each_instruction_set(level: Isa) -> None:
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    test_softmax_matches_torch(3, PARTS[-1], 0.2)
    test_softmax_is_that_of_pyg_in_float32()
    test_gatv2_scores_match_the_obvious(3, 41)


@pytest.mark.skipif(load() is None, reason="the native library was not built here")
def test_same_bits_for_any_number_of_threads() -> None:
    csr = random_csr(3000, 2000, 60_000)
    parts = parts_of(csr, ("source", "target"), 4, torch.float32)

    def run() -> list[Tensor]:
        alpha = edge_softmax(csr, **parts, negative_slope=0.2)
        return [alpha.detach(), *torch.autograd.grad(alpha.square().sum(), list(parts.values()))]

    expected = run()
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for a, b in zip(run(), expected, strict=True):
            assert torch.equal(a, b)


def test_operators_are_well_formed() -> None:
    csr = random_csr(6, 5, 14)
    back = transpose(csr)
    matrix, transposed = (csr.indptr, csr.index), (back.indptr, back.index, back.perm)
    parts = parts_of(csr, ("source", "target", "edge"), 2)
    torch.library.opcheck(ops.edge_softmax_op, (*matrix, 5, *parts.values(), 0.2, *transposed))
    source, target, edge = (part.detach() for part in parts.values())
    alpha = edge_softmax(csr, edge)
    torch.library.opcheck(ops.edge_softmax_grad_op, (*matrix, 5, source, target, edge, 0.2, alpha, edge))
    torch.library.opcheck(ops.sum_edges_op, (back.indptr, back.index, 6, back.perm, edge))
    rows = [torch.randn(count, 6, dtype=torch.float64, requires_grad=True) for count in (5, 6)]
    attention = torch.randn(6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(ops.gatv2_scores_op, (*matrix, *rows, attention, 0.2, 2, *transposed))
    rows = [row.detach() for row in rows]
    torch.library.opcheck(ops.gatv2_grad_op, (*matrix, *rows, attention.detach(), 0.2, None, edge))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"edge": None, "source": None, "target": None}, "needs scores", id="none"),
        pytest.param({"edge": torch.ones(14)}, "edge must have shape", id="no-heads"),
        pytest.param({"source": torch.ones(5, 3)}, r"source must have shape \(5, 2\)", id="heads"),
        pytest.param({"target": torch.ones(6, 2, dtype=torch.float64)}, "of one dtype", id="dtype"),
        pytest.param({"target": torch.ones(6, 2, device="meta")}, "target is on meta, the matrix on cpu", id="device"),
    ],
)
def test_wrong_scores_are_refused(change: dict[str, Tensor | None], match: str) -> None:
    parts: dict[str, Tensor | None] = {"edge": torch.ones(14, 2), "source": torch.ones(5, 2), "target": None}
    with pytest.raises(ValueError, match=match):
        edge_softmax(random_csr(6, 5, 14), **(parts | change))


def test_wrong_rows_are_refused() -> None:
    csr = random_csr(6, 5, 14)
    with pytest.raises(ValueError, match=r"target must end in \(heads, channels\), got \(5, 2, 3\)"):
        gatv2_scores(csr, torch.ones(5, 2, 3), torch.ones(5, 2, 3), torch.ones(2, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.cuda
def test_cuda_matches_cpu() -> None:
    csr = random_csr()
    on_gpu = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols)
    parts = parts_of(csr, ("edge", "source", "target"), 3)
    expected = edge_softmax(csr, **parts, negative_slope=0.2)
    moved = {name: part.detach().cuda().requires_grad_() for name, part in parts.items()}
    found = edge_softmax(on_gpu, **moved, negative_slope=0.2)
    upstream = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, list(moved.values()), upstream.cuda()),
        torch.autograd.grad(expected, list(parts.values()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-11)
