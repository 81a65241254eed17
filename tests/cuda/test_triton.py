"""Triton's kernels, in its interpreter and in its compiler; :mod:`tests.kernels.test_cuda` runs them on a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pygdist.kernels import CSR, _triton, edge_softmax, spmm
from tests.cuda import compiling, steps
from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.kernels.gpu_cases import GRAPHS, KERNELS, TOLERANCE, largest_error
from tests.kernels.oracle import random_csr

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


_SHORTER = [dtype for dtype in TOLERANCE if dtype != torch.float64]


def _of_turn(kernel: str) -> torch.dtype:
    """A dtype for a kernel, by turns: the interpreter and the compiler take minutes. A GPU runs all dtypes."""
    return _SHORTER[list(KERNELS).index(kernel) % len(_SHORTER)]


def _errors() -> dict[str, float]:
    found = {}
    with emulated_gpu(triton="runs"):
        for kernel in KERNELS:
            for graph, dtype in (*((graph, torch.float64) for graph in GRAPHS), ("skewed", _of_turn(kernel))):
                error = largest_error(kernel, graph, dtype, wide=dtype == torch.float64)
                found[f"{kernel}, {graph}, {dtype}"] = error / TOLERANCE[dtype]
    return found


def test_kernels_in_the_interpreter(gpu: EmulatedProcess) -> None:
    errors = gpu.run(_errors)
    assert len(errors) == len(KERNELS) * (len(GRAPHS) + 1)
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


@contextlib.contextmanager
def _short_pieces() -> Iterator[None]:
    """Cut rows of a few entries; the hub has more pieces than a piece has entries, so these are folded twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "LONG", 40)
        patch.setattr(_triton, "MANY", 1)
        yield


def _errors_in_pieces() -> dict[str, float]:
    found = {}
    with emulated_gpu(triton="runs"), _short_pieces():
        for kernel in KERNELS:
            found[kernel] = largest_error(kernel, "hub", torch.float64, wide=False) / TOLERANCE[torch.float64]
        found["sum, skewed"] = largest_error("sum", "skewed", torch.float64, wide=False) / TOLERANCE[torch.float64]
        halves = largest_error("sum", "hub", torch.bfloat16, wide=False) / TOLERANCE[torch.bfloat16]
    return {**found, "sum of halves": halves}


def test_long_rows_are_cut_and_folded(gpu: EmulatedProcess) -> None:
    errors = gpu.run(_errors_in_pieces)
    assert len(errors) == len(KERNELS) + 2
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


def _compiled(cache: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(triton="compiles"):
        patch.setenv("TRITON_CACHE_DIR", cache)
        for kernel in KERNELS:
            for dtype in (torch.float64, _of_turn(kernel)):
                largest_error(kernel, "skewed", dtype, wide=False)
            with _short_pieces():
                largest_error(kernel, "skewed", torch.float32, wide=True)
    return sorted({name for name, *_ in compiling.compiled})


def test_kernels_compile_for_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pygdist.kernels import _triton_kernels

    with EmulatedProcess(interprets=False) as process:
        names = process.run(_compiled, str(tmp_path_factory.mktemp("triton")))
    assert names == sorted(name for name, one in vars(_triton_kernels).items() if name[0] != "_" and _is_kernel(one))


def _is_kernel(one: object) -> bool:
    return hasattr(one, "arg_names") and hasattr(one, "run")


def _special() -> list[list[float]]:
    """A row with a NaN, a row of -inf alone, an extremum of 0, and an empty row."""
    values = [[1.0], [math.nan], [-math.inf], [0.0]]
    index = torch.tensor([0, 1, 2, 2, 3, 3], dtype=torch.int32)
    found = []
    with emulated_gpu(triton="runs"):
        csr = CSR(torch.tensor([0, 2, 4, 6, 6]).cuda(), index.cuda(), 4)
        for reduce in ("max", "min"):
            x = torch.tensor(values, requires_grad=True).cuda().detach().requires_grad_()
            out = spmm(csr, x, None, reduce)
            (grad,) = torch.autograd.grad(out[1:].sum(), x)
            found += [out.detach().flatten().tolist(), grad.flatten().tolist()]
    return found


def test_extrema_of_special_values(gpu: EmulatedProcess) -> None:
    inf = math.inf
    maxima, of_maxima, minima, of_minima = gpu.run(_special)
    assert math.isnan(maxima[0])
    assert math.isnan(minima[0])
    assert maxima[1:] == minima[1:] == [-inf, 0, 0]
    assert of_maxima == of_minima == [0, 0, 1, pytest.approx(2 / 3)]  # scatter_reduce counts its initial zero


def _softmax() -> list[Tensor]:
    """The first tile of the row has scores of -inf alone; nothing is NaN."""
    edge = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    edge[:70] = -math.inf
    with emulated_gpu(triton="runs"):
        csr = CSR(torch.tensor([0, 200]).cuda(), torch.zeros(200, dtype=torch.int32).cuda(), 1)
        return [edge_softmax(csr, edge.cuda()).cpu(), edge.softmax(dim=0)]


def test_a_softmax_that_begins_with_impossible_scores(gpu: EmulatedProcess) -> None:
    torch.testing.assert_close(*gpu.run(_softmax))


def _products() -> list[str]:
    """Which kernels compute a sum by one weight an edge."""
    names: list[str] = []
    with emulated_gpu(triton="runs"), pytest.MonkeyPatch.context() as patch:
        launch = _triton.launch
        patch.setattr(
            _triton, "launch", lambda name, *args, **given: (names.append(name), launch(name, *args, **given))
        )
        csr = CSR(torch.tensor([0, 2]).cuda(), torch.tensor([0, 1]).cuda(), 2)
        spmm(csr, torch.ones(2, 3).cuda(), torch.ones(2).cuda())
    return names


def test_sums_are_the_same_bit_for_bit_by_triton(gpu: EmulatedProcess) -> None:
    assert gpu.run(_products) == ["spmm"]


@pytest.mark.parametrize("backend", ["comm", "tensor"])
def test_layers_by_triton(backend: str, gpu: EmulatedProcess) -> None:
    run = functools.partial(steps.worst_by_layer, triton="runs")
    worst = gpu.run(run, backend, {}, {}, ("GATConv", "GATv2Conv", "TransformerConv", "SAGEConv-max", "SAGEConv-many"))
    assert {name: value for name, value in worst.items() if value >= 1e-10} == {}


def _added_to_columns() -> list[bool]:
    csr, x = random_csr(), torch.rand(random_csr().num_cols, 4)
    with emulated_gpu(triton="runs"):
        there = CSR(csr.indptr.to("cuda"), csr.index.to("cuda"), csr.num_cols)
        whole = torch.ones(csr.num_rows, 8, device="cuda")
        _triton.spmm_into(whole[:, ::2], there, x.to("cuda"), None, onto=True)
        found = whole.cpu()
    expected = spmm(csr, x) + 1
    return [torch.allclose(found[:, ::2], expected), bool((found[:, 1::2] == 1).all())]


def test_sums_go_to_memory_that_is_not_contiguous(gpu: EmulatedProcess) -> None:
    assert gpu.run(_added_to_columns) == [True, True]
