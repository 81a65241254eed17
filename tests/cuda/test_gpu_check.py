"""``make gpu-check`` refuses a machine without a GPU, and measures all of its table on an emulated one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from experiments import gpu_check
from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.gpu_check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("gpu-check needs 1 GPU(s) of CUDA")
    assert len(done.stderr.splitlines()) == 1


def _measured() -> list[tuple[str, str, str]]:
    with emulated_gpu():
        rows = gpu_check.measure(nodes=200, edges=2000, widths=[16], rounds=1)
    return [(row["kernel"], row["by"], row["dtype"]) for row in rows]


def test_the_table_is_measured(gpu: EmulatedProcess) -> None:
    rows = gpu.run(_measured)
    assert ("sum", "torch", "float32") in rows
    assert len(rows) == 13
