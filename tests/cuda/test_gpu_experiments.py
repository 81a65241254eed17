"""``make gpu-check`` refuses a machine without a GPU, and measures all of its table on an emulated one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from experiments.gpu import kernels, scaling, steps
from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.gpu.check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("gpu-check needs 1 GPU(s) of CUDA")
    assert len(done.stderr.splitlines()) == 1


def test_steps_by_number_of_ranks_are_measured_without_gpus() -> None:
    rows = scaling.measure(nodes=200, edges=2000, features=8, rounds=2, kind="cpu", most=2)
    assert [(row["backend"], row["ranks"]) for row in rows] == [(one, n) for one in ("comm", "tensor") for n in (1, 2)]
    assert all(row["step_s"] > 0 for row in rows)


def test_steps_beside_pyg_are_measured_without_a_gpu() -> None:
    rows = steps.measure(nodes=200, edges=2000, width=16, rounds=1, kind="cpu")
    assert len(rows) == len(steps.MODELS) * 2 * 3
    assert all(row["times_faster"] == 1.0 for row in rows if row["by"] == "PyG")
    assert all(row["step_s"] > 0 for row in rows)


def _measured() -> list[tuple[str, str, str]]:
    with emulated_gpu():
        rows = kernels.measure(nodes=200, edges=2000, widths=[16], rounds=1)
    return [(row["kernel"], row["by"], row["dtype"]) for row in rows]


def test_the_table_is_measured(gpu: EmulatedProcess) -> None:
    rows = gpu.run(_measured)
    assert ("sum", "torch", "float32") in rows
    assert len(rows) == 2 * (10 + 9)  # graphs, and contenders of each type
