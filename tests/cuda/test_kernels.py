"""The kernels that GPUs run, on an emulated one, against float64 on the host by the native library."""

from __future__ import annotations

import itertools

from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.kernels.gpu_cases import GRAPHS, KERNELS, TOLERANCE, largest_error


def _errors() -> dict[str, float]:
    found = {}
    with emulated_gpu():
        for kernel, graph, dtype, wide in itertools.product(KERNELS, GRAPHS, TOLERANCE, (False, True)):
            error = largest_error(kernel, graph, dtype, wide=wide)
            found[f"{kernel}, {graph}, {dtype}, {'int64' if wide else 'int32'}"] = error / TOLERANCE[dtype]
    return found


def test_kernels_on_an_emulated_gpu(gpu: EmulatedProcess) -> None:
    errors = gpu.run(_errors)
    assert len(errors) == len(KERNELS) * len(GRAPHS) * len(TOLERANCE) * 2
    assert {name: error for name, error in errors.items() if not error <= 1} == {}
