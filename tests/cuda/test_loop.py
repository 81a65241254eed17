"""A loop of the caller's own on ranks that share an emulated GPU: nccl would refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.loop.test_several import MODELS, compare, trained


def _trained(rank: int, num_ranks: int, folder: str, name: str, backend: str) -> Any:
    meeting = f"file://{folder}/{name}-{backend}"
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        with emulated_gpu():
            return trained(rank, num_ranks, folder, name, backend, 4, "cuda:0")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["comm", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_a_gpu(
    name: str, backend: str, two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path
) -> None:
    for rank, process in enumerate(two):
        process.start(_trained, rank, 2, str(tmp_path), name, backend)
    compare(name, [process.result() for process in two])


def _groups(rank: int, uuids: list[str], folder: str) -> str:
    """Return the carrier that is asked for last; nccl cannot be had here."""
    from pygdist.comm.launched import new_group

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(uuids))
    asked, make = list[str](), dist.new_group

    def noted(*, backend: str) -> Any:
        asked.append(backend)
        return make(backend="gloo")

    try:
        with emulated_gpu(uuid=uuids[rank]), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", noted)
            new_group(torch.device("cuda" if uuids[rank] else "cpu"))
        return asked[-1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("uuids", "carrier"), [(["one", "two"], "nccl"), (["one", "one"], "gloo"), (["one", ""], "gloo")]
)
def test_the_carrier_is_one_that_all_can_use(
    uuids: list[str], carrier: str, two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path
) -> None:
    for rank, process in enumerate(two):
        process.start(_groups, rank, uuids, str(tmp_path))
    assert [process.result() for process in two] == [carrier] * 2
