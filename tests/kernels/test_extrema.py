"""Maxima and minima, and their gradients, against torch's ``scatter_reduce``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import pygdist.kernels._operator as operator
from pygdist.kernels import CSR, _torch, spmm
from pygdist.kernels.transpose import transpose
from pygdist.native import Isa, load, set_isa
from tests.kernels.oracle import (
    assert_matches_oracle,
    needs_library,
    random_csr,
    scatter_oracle,
    values_and_gradients,
    with_int64,
)

SEVERAL = -2  # PYGDIST_SEVERAL: the place of an extremum that more than two entries attain


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.usefixtures("path")
def test_ties_share_the_gradient_as_scatter_reduce_does(reduce: str, weighted: bool) -> None:
    # Few distinct values: ties everywhere, many at 0, where scatter_reduce counts its initial zero as well.
    torch.manual_seed(2)
    csr = random_csr()
    x = torch.randint(-1, 2, (csr.num_cols, 17)).double()
    weight = torch.randint(-1, 2, (csr.num_entries,)).double() if weighted else None
    assert_matches_oracle(csr, x, weight, reduce)


def test_tie_test_can_fail() -> None:
    # The whole gradient to the first of two equal maxima, as torch_scatter does, is not what the oracle says.
    csr = CSR(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
    _, grad_x = values_and_gradients(scatter_oracle, csr, torch.ones(2, 1, dtype=torch.float64), None, "max")
    assert torch.equal(grad_x[0], grad_x[1])
    assert grad_x[0] != 0


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.usefixtures("path")
def test_nan_is_not_lost(reduce: str) -> None:
    csr = CSR(torch.tensor([0, 3, 6]), torch.tensor([0, 1, 2, 2, 1, 0]), 3)
    out = spmm(csr, torch.tensor([[1.0], [float("nan")], [3.0]]), None, reduce)
    assert out.isnan().all()


def _extrema_of_rows(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """What torch makes of rows of as many entries each, every one with a column of its own."""
    messages = (x if weight is None else x * weight[:, None]).view(csr.num_rows, -1, x.size(1))
    return messages.amax(dim=1) if reduce == "max" else messages.amin(dim=1)


@needs_library
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.usefixtures("restored_isa")
def test_extrema_and_nan_count_at_each_place_of_a_row(reduce: str, dtype: torch.dtype, level: Isa) -> None:
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    torch.manual_seed(6)
    for length, width, weighted in itertools.product((1, 2, 15, 16, 17), (1, 8, 32), (False, True)):
        csr = CSR(torch.arange(length + 1) * length, torch.arange(length**2, dtype=torch.int32), length**2)
        weight = torch.randint(1, 3, (length**2,)).to(dtype) if weighted else None
        sign, place = -1 if reduce == "max" else 1, torch.arange(length)  # all values are beyond 0
        ties = (sign * torch.randint(1, 4, (length, length, width))).to(dtype)
        best, nan = ties.clone(), ties.clone()
        best[place, place] = sign * 0.25
        nan[place, place, place % width] = torch.nan
        for x in (ties.flatten(0, 1), best.flatten(0, 1)):
            pairs = [values_and_gradients(one, csr, x, weight, reduce) for one in (spmm, _extrema_of_rows)]
            assert torch.equal(pairs[0][0], pairs[1][0])
            torch.testing.assert_close(pairs[0][1:], pairs[1][1:])
        found, expected = (one(csr, nan.flatten(0, 1), weight, reduce) for one in (spmm, _extrema_of_rows))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert int(found.isnan().sum()) == length


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("num_features", [64, 131])
@pytest.mark.usefixtures("small_cache")
def test_gradients_of_extrema_done_slab_by_slab(num_features: int, weighted: bool, reduce: str) -> None:
    csr = random_csr(2000, 2500, 30_000)  # two matrices of 2,000 rows x 128 bytes: half of the cache
    x = torch.randint(-8, 9, (csr.num_cols, num_features)).double()  # many ties
    weight = torch.randint(-2, 3, (csr.num_entries,)).double() if weighted else None
    assert_matches_oracle(csr, x, weight, reduce)


@pytest.fixture
def by_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep places of all extrema, and look for all ties one by one."""
    if load() is None:
        pytest.skip("the native library was not built here")
    monkeypatch.setattr(operator._native, "few_ties", lambda *_: True)
    monkeypatch.setattr(operator._native, "keeps_places", lambda *_: True)
    monkeypatch.setattr(operator._native, "share_ties", lambda *_: pytest.fail("compared all messages"))


def gradients_of_x(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str, op: str = "mul") -> tuple[Tensor, Tensor]:
    """Return the gradient of ``x`` and what the oracle says."""
    leaf = x.clone().requires_grad_()
    outs = [product(csr, leaf, weight, reduce, op=op) for product in (spmm, scatter_oracle)]
    grad = torch.randn(outs[0].shape, dtype=x.dtype, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
    found, expected = (torch.autograd.grad(out, leaf, grad)[0] for out in outs)
    return found, expected


def _with_some_ties(csr: CSR, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of distinct values but for ties at a maximum, at a minimum and at 0, and a NaN."""
    values = torch.randperm(csr.num_cols * width, generator=torch.Generator().manual_seed(3)).view(csr.num_cols, width)
    x = values.to(dtype) - values.numel() / 2
    x[0, 0] = x[1, 0] = x.max() + 1
    x[0, 1] = x[1, 1] = x.min() - 1
    x[:, 2] = -x[:, 2].abs()
    x[3, 2] = 0
    x[4, 3] = torch.nan
    return x


@needs_library
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.parametrize("op", [None, "mul", "add"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.usefixtures("restored_isa")
def test_gradients_go_to_the_places_of_extrema(reduce: str, op: str | None, level: Isa) -> None:
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    csr = CSR(torch.tensor([0, 0, 40, 41, 200]), torch.arange(200, dtype=torch.int32), 201)
    calls: list[Tensor] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(real(*arguments))
        return calls[-1]

    real = operator._native.extremum_scatter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator._native, "extremum_scatter", counted)
        patch.setattr(operator._native, "few_ties", lambda *_: True)
        patch.setattr(operator._native, "keeps_places", lambda *_: True)
        for dtype, width, heads in itertools.product((torch.float32, torch.float64), (11, 128, 200), (1, 2)):
            x = _with_some_ties(csr, width * heads, dtype).view(201, heads, width)
            weight = None if op is None else torch.randint(1, 3, (200, heads)).to(dtype)
            product = {} if op is None else {"op": op}
            graph, leaf = torch.randn(4, heads, width, dtype=dtype), x.clone().requires_grad_()
            found = torch.autograd.grad(spmm(csr, leaf, weight, reduce, **product), leaf, graph)[0]
            expected = torch.autograd.grad(scatter_oracle(csr, leaf, weight, reduce, **product), leaf, graph)[0]
            assert found.isfinite().all()  # torch's gradients of a column with a NaN are NaN
            found[:, 0, 3] = expected[:, 0, 3] = 0
            torch.testing.assert_close(found, expected)
    assert len(calls) == 12


@needs_library
@pytest.mark.parametrize("level", [Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("kept", [True, False], ids=["by-places", "by-comparison"])
@pytest.mark.usefixtures("restored_isa")
def test_sources_that_many_rows_read(kept: bool, reduce: str, dtype: torch.dtype, level: Isa) -> None:
    # so many entries that the kernel looks for a NaN among the sources first (dispatch.cpp: clean)
    if set_isa(level) != level:
        pytest.skip(f"this machine lacks {level.name}")
    generator, inf, sign = torch.Generator().manual_seed(8), float("inf"), 1 if reduce == "max" else -1
    index = torch.cat([torch.randperm(40, generator=generator) for _ in range(30)]).int()
    index[41] = index[40]  # one source twice in a row
    csr = CSR(torch.arange(31) * 40, index, 40)
    x = torch.randn(40, 136, generator=generator).to(dtype)
    x[:, 1], x[:, 2], x[:, 3] = sign * -inf, 0, sign * -x[:, 3].abs()
    x[5, 3] = x[index[40], 7] = 0
    x[6:9, 4] = sign * 9
    x[11, 6], x[12, 6] = inf, -inf
    x[9:11, 5] = x[index[40], 8] = sign * 9
    x[:, 7] = x[:, 7].abs() * -sign  # the source that is there twice attains 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator._native, "few_ties", lambda *_: True)
        patch.setattr(operator._native, "keeps_places", lambda *_: kept)
        torch.testing.assert_close(*gradients_of_x(csr, x, None, reduce))
        x[13, 9] = torch.nan
        found, expected = gradients_of_x(csr, x, None, reduce)
    whole = torch.arange(136) != 9  # torch's gradients of a column with a NaN are NaN
    torch.testing.assert_close(found[:, whole], expected[:, whole])
    out = spmm(csr, x, None, reduce)
    assert out[:, 9].isnan().all()
    assert not out[:, whole].isnan().any()


@needs_library
def test_many_ties_are_not_looked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator._native, "extremum_scatter", lambda *_: pytest.fail("each tie by itself"))
    csr = random_csr(20, 30, 4000)
    assert_matches_oracle(csr, torch.randint(-1, 2, (csr.num_cols, 170)).double(), None, "max")
    hub = CSR(torch.tensor([0, 63, *range(64, 2000)]), torch.zeros(1999, dtype=torch.int32), 1)
    places = torch.zeros(hub.num_rows, 2, dtype=torch.int32)
    places[1, 0] = SEVERAL
    assert operator._native.few_ties(hub, places)
    places[0, 0] = SEVERAL  # one extremum, but the entries of its row are one in 63 of all
    assert not operator._native.few_ties(hub, places)


@pytest.mark.parametrize("int64", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.usefixtures("by_places")
def test_all_ties_by_their_places(weighted: bool, int64: bool) -> None:
    csr = with_int64(random_csr(20, 30, 800)) if int64 else random_csr(20, 30, 800)
    x, weight = (torch.randint(-1, 2, shape).double() for shape in ((csr.num_cols, 17), (csr.num_entries,)))
    torch.testing.assert_close(*gradients_of_x(csr, x, weight if weighted else None, "min"))


@pytest.mark.parametrize("length", [2**15, 2**15 + 1])
@pytest.mark.usefixtures("by_places")
def test_two_entries_at_the_ends_of_a_long_row_share(length: int) -> None:
    csr = CSR(torch.tensor([0, length]), torch.arange(length, dtype=torch.int32), length)
    x = torch.randn(length, 3)
    x[0, 0] = x[-1, 0] = x[-2, 1] = x[-1, 1] = 10
    torch.testing.assert_close(*gradients_of_x(csr, x, None, "max"))


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.usefixtures("by_places")
def test_extrema_of_infinities_and_of_huge_numbers(reduce: str, dtype: torch.dtype) -> None:
    inf, huge = float("inf"), torch.finfo(dtype).max
    columns = [[inf, -inf, 0, 1], [-inf] * 4, [inf] * 4, [huge, huge, -inf, -huge], [-huge, -huge, huge, 1]]
    csr = CSR(torch.tensor([0, 4]), torch.arange(4, dtype=torch.int32), 4)
    torch.testing.assert_close(*gradients_of_x(csr, torch.tensor(columns, dtype=dtype).t(), None, reduce))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.usefixtures("by_places", "small_cache")
def test_places_found_slab_by_slab(heads: int, weighted: bool) -> None:
    csr = random_csr(1500, 2500, 40_000)
    x = torch.randn(csr.num_cols, heads, 262 // heads)
    weight = torch.randn(csr.num_entries, heads) if weighted else None
    found, expected = gradients_of_x(csr, x, weight, "max")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("by_places")
def test_places_give_the_same_bits_for_any_number_of_threads() -> None:
    csr = random_csr(1000, 700, 30_000)
    for width in (1, 16, 33, 130):
        x = torch.randint(-9, 9, (csr.num_cols, width)).float()
        found = []
        for num_threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(num_threads)
            found.append(gradients_of_x(csr, x, None, "max")[0])
        assert all(torch.equal(one, found[0]) for one in found)


class _Largest(TorchDispatchMode):
    """Notes the most values of a tensor that an operator puts out."""

    most = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(one.numel() for one in tree_leaves(out) if isinstance(one, Tensor))])
        return out


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("op", ["mul", "add"])
def test_torchs_operators_hold_no_values_of_all_edges(op: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "_BLOCK_VALUES", 640)
    torch.manual_seed(3)
    csr, width = CSR.from_coo(torch.arange(20).repeat(50), torch.randint(0, 30, (1000,)), num_rows=21, num_cols=30), 32
    x, weight = torch.randn(30, width).double(), torch.randn(1000, 1).double()
    grad, back = torch.randn(21, width).double(), transpose(csr)
    results = []
    for values in (640, 1 << 30):
        monkeypatch.setattr(_torch, "_BLOCK_VALUES", values)
        with _Largest() as largest:
            out, _ = _torch.extremum(csr, x, weight, op, reduce, x.new_empty(0))
            share = _torch.share_ties(csr, x, weight, op, out, grad)
            by_weight = _torch.extremum_value_grad(csr, x, weight, op, out, share)
            by_source = _torch.extremum_grad(back, x, weight, op, out, share)
        results.append((out, share, by_weight, by_source))
        assert (largest.most <= max(1000, 30 * width)) == (values == 640)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
