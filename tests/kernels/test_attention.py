"""Attention over edges against the obvious: rows lifted to edges, torch's softmax row by row, autograd for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.utils import softmax

import pygdist.kernels._attention_ops as ops
from pygdist.kernels import CSR, edge_softmax, gat, gatv2_scores, sddmm, spmm, transpose
from pygdist.kernels.chunked import gat_part
from pygdist.native import Isa, load, set_isa
from tests.kernels.oracle import random_csr, softmax_oracle

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


def gat_inputs(csr: CSR, heads: int, channels: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(channels)
    shapes = ((csr.num_cols, heads, channels), (csr.num_cols, heads), (csr.num_rows, heads))
    rows = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [(row * scale).to(dtype).requires_grad_() for row, scale in zip(rows, (1, 3, 3), strict=True)]


def gat_oracle(csr: CSR, leaves: list[Tensor], slope: float) -> Tensor:
    x, source, target = leaves
    alpha = softmax_oracle(csr, lifted(csr, {"source": source, "target": target}, slope))
    messages = alpha.unsqueeze(-1) * x[csr.index.long()]
    return messages.new_zeros(csr.num_rows, *x.shape[1:]).index_add(0, csr.row_index().long(), messages)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("channels", [1, 5, 16, 41, 80])  # parts of a vector, whole ones, several tiles
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.usefixtures("path")
def test_gat_matches_the_obvious(heads: int, channels: int, slope: float) -> None:
    for csr in (random_csr(), random_csr(5, 30, 900)):  # rows longer than the weights that are at work at once
        leaves = gat_inputs(csr, heads, channels)
        expected = gat_oracle(csr, leaves, slope)
        for transposed in (None, lambda csr=csr: transpose(csr)):
            found = gat(csr, *leaves, negative_slope=slope, transposed=transposed)
            assert_same_gradients(found, gat_oracle(csr, leaves, slope), leaves, 1e-12)
        together = torch.autograd.grad(expected.square().sum(), leaves)
        for leaf, gradient in zip(leaves, together, strict=True):  # asked for alone
            others = [part if part is leaf else part.detach() for part in leaves]
            (alone,) = torch.autograd.grad(gat(csr, *others, negative_slope=slope).square().sum(), [leaf])
            torch.testing.assert_close(alone, gradient, rtol=1e-12, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(gat(csr, *leaves, negative_slope=slope), expected, rtol=0, atol=1e-12)


# one head a slab, several, heads that leave a shorter slab at the end, heads of two slabs' bytes
@pytest.mark.parametrize(("heads", "channels"), [(4, 32), (16, 16), (7, 12), (2, 64)])
@pytest.mark.skipif(load() is None, reason="the native library was not built here")
def test_gat_slab_by_slab(heads: int, channels: int) -> None:
    csr = random_csr(4000, 4000, 130_000)  # large and dense enough for slabs
    leaves = gat_inputs(csr, heads, channels, torch.float32)
    x, source, target = leaves
    back = transpose(csr)
    alpha = edge_softmax(csr, source=source, target=target, negative_slope=0.2, transposed=back)
    assert_same_gradients(gat(csr, *leaves, transposed=back), spmm(csr, x, alpha, transposed=back), leaves, 2e-5)


@pytest.mark.usefixtures("path")
def test_gat_with_large_hopeless_and_undefined_scores() -> None:
    csr = CSR(torch.tensor([0, 3, 4, 4, 6]), torch.tensor([0, 1, 2, 0, 2, 3]), 4)
    x = torch.arange(1.0, 5.0).view(4, 1, 1).requires_grad_()
    source = torch.tensor([[900.0], [900.0], [-5000.0], [float("nan")]], requires_grad=True)
    target = torch.tensor([[0.0], [-5000.0], [0.0], [0.0]], requires_grad=True)
    out = gat(csr, x, source, target)
    assert out.flatten()[:3].tolist() == [1.5, 1.0, 0.0]
    assert out[3].isnan()
    out[:3].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten()[:2].tolist() == [1.5, 0.5]


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
    assert torch.autograd.gradcheck(lambda *rows: gat(csr, *rows), gat_inputs(csr, 2, 3))


@pytest.mark.parametrize(("heads", "channels"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.usefixtures("path")
def test_gat_of_nothing(heads: int, channels: int) -> None:
    csr = random_csr()
    leaves = gat_inputs(csr, heads, channels)
    out = gat(csr, *leaves)
    assert out.shape == (csr.num_rows, heads, channels)
    out.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


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
    leaves = gat_inputs(csr, 2, 3)
    out = gat(csr, *leaves)
    assert out.shape == (num_rows, 2, 3)
    assert not out.any()
    out.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_non_contiguous_inputs() -> None:
    csr = random_csr()
    wide = torch.randn(3, csr.num_entries, dtype=torch.float64)
    found = edge_softmax(csr, wide.t())
    torch.testing.assert_close(found, edge_softmax(csr, wide.t().contiguous()), rtol=0, atol=0)
    leaves = gat_inputs(csr, 3, 5)
    turned = [leaf.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for leaf in leaves]
    assert not any(leaf.is_contiguous() for leaf in turned)
    assert_same_gradients(gat(csr, *turned), gat(csr, *turned), turned, 0.0)
    torch.testing.assert_close(gat(csr, *turned), gat(csr, *leaves), rtol=0, atol=0)


@pytest.mark.skipif(load() is None, reason="the native library was not built here")
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.usefixtures("restored_isa")
def test_each_instruction_set(level: Isa) -> None:
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    test_softmax_matches_torch(3, PARTS[-1], 0.2)
    test_softmax_is_that_of_pyg_in_float32()
    test_gatv2_scores_match_the_obvious(3, 41)
    test_gat_matches_the_obvious(3, 41, 0.2)
    test_gat_slab_by_slab(4, 32)


@pytest.mark.skipif(load() is None, reason="the native library was not built here")
def test_same_bits_for_any_number_of_threads() -> None:
    csr = random_csr(3000, 2000, 60_000)
    parts = parts_of(csr, ("source", "target"), 4, torch.float32)

    def run() -> list[Tensor]:
        alpha = edge_softmax(csr, **parts, negative_slope=0.2)
        leaves = gat_inputs(csr, 4, 32, torch.float32)
        out = gat(csr, *leaves)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        return [alpha.detach(), *torch.autograd.grad(alpha.square().sum(), list(parts.values())), out, *gradients]

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
    for both in (True, False):
        torch.library.opcheck(ops.gatv2_grad_op, (*matrix, *rows, attention.detach(), 0.2, None, edge, both))


def test_attention_compiles_without_a_graph_break() -> None:
    csr = random_csr()
    back = transpose(csr)

    def layer(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        alpha = edge_softmax(csr, source=source, target=target, transposed=back).relu()
        return gat(csr, x * 2, source, target, transposed=back).relu() + spmm(csr, x, alpha, transposed=back)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    leaves = gat_inputs(csr, 2, 3)
    expected = torch.autograd.grad(layer(*leaves).sum(), leaves)
    for a, b in zip(torch.autograd.grad(compiled(*leaves).sum(), leaves), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.usefixtures("path")
def test_operators_of_gat_are_well_formed(graded: bool) -> None:
    csr = random_csr(6, 5, 14)
    back = transpose(csr)
    x, source, target = gat_inputs(csr, 2, 3)
    x = x.detach().flatten(1).requires_grad_()
    inputs = (x, source, target) if graded else (x.detach(), source.detach(), target.detach())
    torch.library.opcheck(ops.gat_op, (csr.indptr, csr.index, *inputs, 0.2, graded, back.indptr, back.index))
    plain = (x.detach(), source.detach(), target.detach())
    kept = ops.gat_op(csr.indptr, csr.index, *plain, 0.2, True)
    torch.library.opcheck(ops.gat_grad_op, (back.indptr, back.index, *plain, 0.2, *kept, torch.ones_like(kept[0])))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"x": torch.ones(5, 6)}, r"x must have shape \(rows, heads, channels\) with 5 rows", id="flat"),
        pytest.param({"source": torch.ones(6, 2)}, "source must have shape", id="rows"),
        pytest.param({"target": torch.ones(6, 3)}, "target must have shape", id="heads"),
        pytest.param({"target": torch.ones(6, 2, dtype=torch.float64)}, "of one dtype", id="dtype"),
        pytest.param({"x": torch.ones(5, 2, 3, device="meta")}, "x is on meta, the matrix on cpu", id="device"),
    ],
)
def test_wrong_inputs_of_gat_are_refused(change: dict[str, Tensor], match: str) -> None:
    given = {"x": torch.ones(5, 2, 3), "source": torch.ones(5, 2), "target": torch.ones(6, 2)}
    with pytest.raises(ValueError, match=match):
        gat(random_csr(6, 5, 14), **(given | change))
    with pytest.raises(ValueError, match="negative_slope must be 0 or more"):
        gat(random_csr(6, 5, 14), **given, negative_slope=-0.1)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.cuda
@pytest.mark.parametrize("operation", ["edge_softmax", "gat", "gatv2_scores", "sddmm"])
def test_cuda_matches_cpu(operation: str) -> None:
    csr = random_csr()
    on_gpu = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols)
    rows = [torch.randn(count, 3, 5, dtype=torch.float64) for count in (csr.num_cols, csr.num_rows)]
    scores = [torch.randn(count, 3, dtype=torch.float64) for count in (csr.num_cols, csr.num_rows)]
    run, leaves = {
        "edge_softmax": (lambda m, a, b: edge_softmax(m, source=a, target=b, negative_slope=0.2), scores),
        "gat": (gat, [rows[0], *scores]),
        "gatv2_scores": (gatv2_scores, [*rows, torch.randn(3, 5, dtype=torch.float64)]),
        "sddmm": (sddmm, rows),
    }[operation]
    here, there = ([leaf.to(device).requires_grad_() for leaf in leaves] for device in ("cpu", "cuda"))
    expected, found = run(csr, *here), run(on_gpu, *there)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, there, upstream.cuda())
    for a, b in zip([found, *gradients], [expected, *torch.autograd.grad(expected, here, upstream)], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-11)


def gat_in_pieces(csr: CSR, x: Tensor, source: Tensor, target: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """GAT over every third edge, then the next ones; and over all at once."""
    plain = csr.unpermuted()
    row, found = plain.row_index().long(), None
    for part in range(3):
        some = torch.arange(csr.num_entries) % 3 == part
        piece = CSR.from_coo(row[some], plain.index[some].long(), num_rows=csr.num_rows, num_cols=csr.num_cols)
        found = gat_part(piece.unpermuted(), x, source, target, 0.2, found)
    assert found is not None
    return found, gat_part(plain, x, source, target, 0.2)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_gat_goes_on_from_other_edges_of_the_same_rows(scale: float, dtype: torch.dtype, tolerance: float) -> None:
    """Also where the exponentials of some are nothing beside those of others."""
    csr = random_csr()
    x, source, target = (part.detach().to(dtype) for part in gat_inputs(csr, 3, 5))
    for one, expected in zip(*gat_in_pieces(csr, x.flatten(1), (scale * source).contiguous(), target), strict=True):
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "channels"), [(4, 32), (7, 12), (16, 16)])
@pytest.mark.skipif(load() is None, reason="the native library was not built here")
def test_gat_goes_on_slab_by_slab(heads: int, channels: int) -> None:
    csr = random_csr(4000, 4000, 400_000)  # a third of it is large and dense enough for slabs
    x, source, target = (part.detach() for part in gat_inputs(csr, heads, channels, torch.float32))
    for one, expected in zip(*gat_in_pieces(csr, x.flatten(1), source.contiguous(), target), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("path")
def test_gat_goes_on_from_nan() -> None:
    """What is no number in one piece is none in the end: training that went wrong is seen."""
    csr = random_csr()
    x, source, target = (part.detach() for part in gat_inputs(csr, 3, 5))
    x, source = x.flatten(1).contiguous(), source.contiguous()
    x[3], source[3] = float("nan"), float("nan")
    found, expected = gat_in_pieces(csr, x, source, target)
    assert expected[0].isnan().any()
    assert torch.equal(found[0].isnan(), expected[0].isnan())
