"""Runs of Lightning's trainer on an emulated GPU, compared with those on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.kernels.oracle import needs_library
from tests.lightning import gpu_runs

pytestmark = needs_library


def _trained(rank: int, num_ranks: int, folder: str, name: str) -> tuple[gpu_runs.Outcome, gpu_runs.Outcome]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    try:
        expected = gpu_runs.train(rank, num_ranks, folder, name, "cpu")
        with emulated_gpu():
            return gpu_runs.train(rank, num_ranks, folder, name, "gpu"), expected
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", gpu_runs.CASES)
def test_a_run_on_two_gpus(name: str, two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path) -> None:
    for rank, process in enumerate(two):
        process.start(_trained, rank, 2, str(tmp_path), name)
    for found, expected in [process.result() for process in two]:
        gpu_runs.compare(name, found, expected)
