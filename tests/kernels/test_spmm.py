"""The sparse product against the obvious: lift rows to edges, scale, scatter, and let autograd do the rest."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.weak import TensorWeakRef

import pygdist.kernels._extremum_ops as extrema
import pygdist.kernels._operator as operator
import pygdist.kernels._spmm_ops as ops
from pygdist.kernels import CSR, _torch, sddmm, spmm, transpose
from pygdist.native import Isa, library, load, set_isa
from tests.kernels.oracle import (
    assert_matches_oracle,
    needs_library,
    random_csr,
    scatter_oracle,
    values_and_gradients,
    with_int64,
)

REDUCES = ("sum", "mean", "max", "min")
WIDTHS = (1, 3, 8, 17, 64, 130)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("int64", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_values_and_gradients_match_scatter(reduce: str, dtype: torch.dtype, int64: bool, weighted: bool) -> None:
    torch.manual_seed(1)
    csr = with_int64(random_csr()) if int64 else random_csr()
    weight = torch.randn(csr.num_entries, dtype=dtype) if weighted else None
    for width in WIDTHS:
        assert_matches_oracle(csr, torch.randn(csr.num_cols, width, dtype=dtype), weight, reduce)


@pytest.mark.parametrize("op", ["mul", "add", "sub", "div"])
@pytest.mark.parametrize("heads", [None, 1, 3], ids=["scalar", "one-head", "three-heads"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_operators_and_heads(reduce: str, heads: int | None, op: str) -> None:
    torch.manual_seed(4)
    csr = random_csr()
    weight = torch.randn(csr.num_entries, *([] if heads is None else [heads]), dtype=torch.float64)
    weight += 2 * weight.sign()  # away from 0, for the sake of division
    for channels in (1, 2, 7, 16, 40):
        x = torch.randn(csr.num_cols, heads or 1, channels, dtype=torch.float64)
        assert_matches_oracle(csr, x, weight, reduce, op)


@pytest.mark.parametrize("transposed_weight", [False, True], ids=["looked-up", "given"])
@pytest.mark.usefixtures("path")
def test_weights_of_the_transposed_matrix(transposed_weight: bool) -> None:
    csr = random_csr()
    back = transpose(csr)
    x = torch.randn(csr.num_cols, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(csr.num_entries, dtype=torch.float64)
    assert back.perm is not None
    given = weight[back.perm] if transposed_weight else None
    out = spmm(csr, x, weight, transposed=back, transposed_weight=given)
    (found,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(scatter_oracle(csr, x, weight, "sum").sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["32", "64", "16"])
@pytest.mark.parametrize("num_features", [64, 128, 131, 602])
@pytest.mark.usefixtures("small_cache")
def test_products_done_slab_by_slab(num_features: int, dtype: torch.dtype, weighted: bool, reduce: str) -> None:
    # wide rows of many nodes with many edges each: copied a few columns at a time (dispatch.cpp: worth_slabs)
    csr = random_csr(300, 2600, 30_000)
    x = torch.randint(-8, 9, (csr.num_cols, num_features)).to(dtype)
    weight = torch.randint(-2, 3, (csr.num_entries,)).to(dtype) if weighted else None
    expected = scatter_oracle(csr, x.double(), None if weight is None else weight.double(), reduce)
    assert torch.equal(spmm(csr, x, weight, reduce), expected.to(dtype)) or reduce == "mean"
    torch.testing.assert_close(spmm(csr, x, weight, reduce).double(), expected, rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("channels", [1, 5, 32, 41])
@pytest.mark.usefixtures("path")
def test_sddmm_matches_the_obvious(heads: int, channels: int) -> None:
    csr = random_csr()
    x = torch.randn(csr.num_cols, heads, channels, dtype=torch.float64, requires_grad=True)
    y = torch.randn(csr.num_rows, heads, channels, dtype=torch.float64, requires_grad=True)
    expected = (x[csr.index.long()] * y[csr.row_index().long()]).sum(dim=-1)
    upstream = torch.randn_like(expected)
    for back in (None, transpose(csr)):
        found = sddmm(csr, x, y, transposed=back)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        pairs = zip(
            torch.autograd.grad(found, (x, y), upstream),
            torch.autograd.grad(expected, (x, y), upstream, retain_graph=True),
            strict=True,
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_sddmm_gradcheck() -> None:
    csr = random_csr(6, 5, 14)
    x = torch.randn(csr.num_cols, 2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(csr.num_rows, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: sddmm(csr, x, y), (x, y))


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        pytest.param((5, 2), (6, 2), r"\(rows, heads, channels\), got \(5, 2\)", id="dimensions"),
        pytest.param((5, 2, 3), (6, 3, 3), "heads, channels", id="heads"),
        pytest.param((6, 2, 3), (5, 2, 3), r"one row per column \(5\) and per row \(6\)", id="rows"),
    ],
)
def test_sddmm_refuses_wrong_shapes(x: tuple[int, ...], y: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sddmm(random_csr(6, 5, 14), torch.ones(x), torch.ones(y))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_every_width_around_a_tile(reduce: str) -> None:
    csr = random_csr(12, 9, 50)
    for width in [*range(1, 36), 63, 65, 127, 129]:
        x = torch.randn(csr.num_cols, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
        assert_matches_oracle(csr, x, None, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("num_rows", "num_cols", "num_entries"),
    [
        pytest.param(5, 4, 0, id="no-edges"),
        pytest.param(0, 4, 0, id="no-rows"),
        pytest.param(3, 0, 0, id="no-columns"),
        pytest.param(0, 0, 0, id="nothing"),
        pytest.param(1, 1, 9, id="one-node-nine-loops"),
    ],
)
@pytest.mark.usefixtures("path")
def test_degenerate_shapes(reduce: str, num_rows: int, num_cols: int, num_entries: int) -> None:
    zeros = torch.zeros(num_entries, dtype=torch.int64)
    csr = CSR.from_coo(zeros, zeros, num_rows=num_rows, num_cols=num_cols).validate()
    for width in (0, 1, 5):
        weight = torch.randn(num_entries, dtype=torch.float64)
        assert_matches_oracle(csr, torch.randn(num_cols, width, dtype=torch.float64), weight, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_empty_rows_are_zero(reduce: str) -> None:
    csr = CSR(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1]), 2)
    out = spmm(csr, torch.full((2, 3), -5.0), None, reduce)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 3))
    assert (out[1] < 0).all()


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_non_contiguous_inputs(reduce: str) -> None:
    csr = random_csr()
    strided = CSR(csr.indptr.repeat_interleave(2)[::2], csr.index.repeat_interleave(2)[::2], csr.num_cols)
    x = torch.randn(17, csr.num_cols, dtype=torch.float64).t()
    weight = torch.randn(csr.num_entries, 2, dtype=torch.float64)[:, 0]
    assert not any(tensor.is_contiguous() for tensor in (strided.indptr, strided.index, x, weight))
    expected = spmm(csr, x.contiguous(), weight.contiguous(), reduce)
    torch.testing.assert_close(spmm(strided, x, weight, reduce), expected, rtol=0, atol=1e-12)
    x.requires_grad_()
    out = spmm(strided, x, weight, reduce)
    out.sum().backward()  # the gradient that arrives is expanded: its strides are 0
    (expected,) = torch.autograd.grad(scatter_oracle(csr, x, weight, reduce), x, torch.ones_like(out))
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=["vector", "matrix", "heads"])
@pytest.mark.usefixtures("path")
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    csr = random_csr()
    assert_matches_oracle(csr, torch.randn(csr.num_cols, *shape, dtype=torch.float64), None, "sum")


@settings(max_examples=40)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    num_rows, num_cols = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    edges = data.draw(st.lists(st.tuples(st.integers(0, num_rows - 1), st.integers(0, num_cols - 1)), max_size=40))
    row, col = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    csr = CSR.from_coo(row, col, num_rows=num_rows, num_cols=num_cols).validate()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(num_cols, data.draw(st.integers(0, 70)), dtype=torch.float64, generator=generator)
    weighted = data.draw(st.booleans())
    weight = torch.randn(len(edges), dtype=torch.float64, generator=generator) if weighted else None
    assert_matches_oracle(csr, x, weight, data.draw(st.sampled_from(REDUCES)))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.usefixtures("path")
def test_gradcheck(reduce: str, weighted: bool) -> None:
    torch.manual_seed(3)
    csr = random_csr(6, 5, 14)
    inputs = [torch.randn(csr.num_cols, 3, dtype=torch.float64, requires_grad=True)]
    if weighted:
        inputs.append(torch.randn(csr.num_entries, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda x, weight=None: spmm(csr, x, weight, reduce), inputs)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_second_derivative_of_a_linear_product(reduce: str) -> None:
    csr = random_csr(6, 5, 14)
    x = torch.randn(csr.num_cols, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: spmm(csr, x, None, reduce), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    # 2000 + 1 + ... + 1: in half precision the ones would vanish one by one.
    csr = CSR(torch.tensor([0, 4097]), torch.tensor([0] + [1] * 4096, dtype=torch.int32), 2)
    x = torch.tensor([[4096.0], [1.0]], dtype=dtype, requires_grad=True)
    out = spmm(csr, x)
    assert out.dtype == dtype
    assert out.item() == 8192
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.flatten().tolist() == [1, 4096]


def test_dtypes_promote_as_in_multiplication() -> None:
    csr = random_csr()
    x = torch.randn(csr.num_cols, 3)
    assert spmm(csr, x.bfloat16(), torch.ones(csr.num_entries)).dtype == torch.float32
    assert spmm(csr, x, torch.ones(csr.num_entries, dtype=torch.float64)).dtype == torch.float64


@needs_library
@pytest.mark.parametrize("reduce", REDUCES)
def test_same_bits_for_any_number_of_threads(reduce: str) -> None:
    csr = random_csr(3000, 2000, 60_000)
    x, weight = torch.randn(csr.num_cols, 33), torch.randn(csr.num_entries)
    expected = values_and_gradients(spmm, csr, x, weight, reduce)
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for a, b in zip(values_and_gradients(spmm, csr, x, weight, reduce), expected, strict=True):
            assert torch.equal(a, b)


@needs_library
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.usefixtures("restored_isa")
def test_each_instruction_set(level: Isa) -> None:
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    csr = random_csr()
    for dtype in (torch.float32, torch.float64):
        for reduce in REDUCES:
            for width in WIDTHS:
                weight = torch.randn(csr.num_entries, dtype=dtype)
                assert_matches_oracle(csr, torch.randn(csr.num_cols, width, dtype=dtype), weight, reduce)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", REDUCES)
def test_operators_are_well_formed(reduce: str) -> None:
    csr, weight = random_csr(6, 5, 14), torch.randn(14, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    back = transpose(csr)
    matrix, transposed = (csr.indptr, csr.index), (back.indptr, back.index, back.perm)
    for op in ("copy", "mul", "add"):
        arguments = (*matrix, x, None if op == "copy" else weight.unsqueeze(1), None, op, reduce)
        if reduce in ("sum", "mean"):
            torch.library.opcheck(ops.spmm_op, (*arguments, *transposed))
        else:
            torch.library.opcheck(extrema.extremum_op, (*arguments, True, *transposed))
    if reduce in ("max", "min"):
        x, values = x.detach(), weight.detach().unsqueeze(1)
        out, grad = spmm(csr, x, values[:, 0], reduce), torch.randn(6, 3, dtype=torch.float64)
        arguments = (*matrix, x, values, None, "mul", out)
        no_places = torch.empty(0, 0, dtype=torch.int32)
        torch.library.opcheck(extrema.extremum_x_grad_op, (*arguments, no_places, grad, None, *transposed))
        torch.library.opcheck(extrema.share_ties_op, (*arguments, grad))
        share = extrema.share_ties_op(*arguments, grad)
        torch.library.opcheck(extrema.extremum_x_grad_op, (*arguments, no_places, grad, share, *transposed))
        torch.library.opcheck(extrema.extremum_value_grad_op, (*arguments, share))
        dense, wide = random_csr(6, 5, 2000), torch.randn(5, 256, dtype=torch.float64, requires_grad=True)
        arguments = (dense.indptr, dense.index, wide, None, None, "copy", reduce, True)
        assert extrema.extremum_op(*arguments)[1].shape == ((6, 256) if load() is not None else (0, 0))
        torch.library.opcheck(extrema.extremum_op, arguments)
    y = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(ops.sddmm_op, (*matrix, x, y, None, 3, *transposed))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_compiles_without_a_graph_break(reduce: Any) -> None:
    csr = random_csr(12, 30, 4000)
    back = transpose(csr)

    def layer(x: Tensor) -> Tensor:
        return spmm(csr, x * 2, None, reduce, transposed=back).relu()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(csr.num_cols, 256, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(found, expected)


def test_transpose_is_made_only_when_needed() -> None:
    csr = random_csr()
    made: list[CSR] = []

    def make() -> CSR:
        made.append(transpose(csr))
        return made[-1]

    x, weight = torch.randn(csr.num_cols, 3), torch.ones(csr.num_entries)
    spmm(csr, x, transposed=make)
    spmm(csr, x, weight.requires_grad_(), transposed=make).sum().backward()
    with torch.no_grad():
        spmm(csr, x.requires_grad_(), transposed=make)
    assert not made
    spmm(csr, x, transposed=make).sum().backward()
    assert len(made) == 1


def test_plain_sum_does_not_keep_the_features() -> None:
    csr = random_csr()
    x = torch.randn(csr.num_cols, 3, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        spmm(csr, x, transposed=transpose(csr))
    assert saved
    assert all(tensor.dim() == 1 for tensor in saved)


def test_without_library_nothing_but_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(operator._native, "spmm", lambda *_: pytest.fail("called the native library"))
    csr = random_csr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's notes on its sparse tensors are not for our users
        spmm(csr, torch.randn(csr.num_cols, 3))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"x": torch.ones(4, 2)}, r"one row per column of the matrix \(5\), got shape \(4, 2\)", id="rows"),
        pytest.param({"x": torch.tensor(1.0)}, "one row per column", id="scalar"),
        pytest.param({"x": torch.ones(5, 2, dtype=torch.int64)}, "x must be a floating-point", id="integer"),
        pytest.param({"weight": torch.ones(3)}, r"weight must have shape \(14,\), got \(3,\)", id="weight-length"),
        pytest.param({"weight": torch.ones(14, dtype=torch.bool)}, "weight must be a floating", id="weight-dtype"),
        pytest.param({"weight": torch.ones(14, 3)}, r"edges by heads needs x of shape \(rows, heads", id="heads"),
        pytest.param({"op": "pow"}, "op must be one of mul, add, sub, div, got 'pow'", id="op"),
        pytest.param({"reduce": "prod"}, "reduce must be one of sum, mean, max, min, got 'prod'", id="reduce"),
        pytest.param({"x": torch.ones(5, 2, device="meta")}, "x is on meta, the matrix on cpu", id="device"),
        pytest.param({"transposed": random_csr(6, 5, 14)}, "transposed must have", id="transposed"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], match: str) -> None:
    arguments: dict[str, object] = {"x": torch.ones(5, 2, requires_grad=True), "weight": None, "reduce": "sum"} | change
    with pytest.raises(ValueError, match=match):
        spmm(random_csr(6, 5, 14), **arguments)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_cuda_matches_cpu(reduce: str, weighted: bool) -> None:
    csr = random_csr()
    on_gpu = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols)
    x = torch.randn(csr.num_cols, 17, dtype=torch.float64)
    weight = torch.randn(csr.num_entries, dtype=torch.float64) if weighted else None
    expected = values_and_gradients(scatter_oracle, csr, x, weight, reduce)
    leaves = [tensor.cuda().requires_grad_() for tensor in (x, weight) if tensor is not None]
    out = spmm(on_gpu, leaves[0], leaves[1] if weighted else None, reduce)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).cuda()
    for a, b in zip([out, *torch.autograd.grad(out, leaves, upstream)], expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-11)


def test_a_product_for_a_gpu_keeps_no_matrix_alive() -> None:
    """Products for GPUs are kept by the columns of a matrix, weakly: they must not hold these."""
    csr = random_csr().unpermuted()
    columns = TensorWeakRef(csr.index)
    matrix = _torch._matrix(csr, torch.ones(csr.num_entries))
    del csr
    gc.collect()
    assert columns() is None
    assert matrix.values().numel() == 400
