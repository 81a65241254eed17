"""Budgets of GPU memory, the meter's events and the current device, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch_geometric.nn import LGConv

from pygdist import distribute
from pygdist.backends import CommBackend, Savings, resolve_backend
from pygdist.comm import Communicator, TrafficMeter
from pygdist.graph.shard import converted, is_unknown, unknown_rows
from pygdist.hops.savings import _BLOCK_BYTES
from pygdist.memory import gpus
from tests.cuda import steps
from tests.cuda.emulation import FREE_BYTES, emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.memory.test_ring import LARGE, check_there_and_back

GPU = torch.device("cuda", 0)


def _budgets() -> list[int]:
    with emulated_gpu(reserved=3 << 20, allocated=1 << 20):
        one = Communicator()
        one.meet(GPU)
        return [
            gpus.free_bytes(GPU),
            Savings().first_hop_bytes(GPU, 1),
            Savings().first_hop_bytes(GPU, 4),
            Savings().block_bytes(GPU, 1000) or 0,
            one.sharers(GPU),
        ]


def test_free_memory_counts_what_torch_keeps_and_is_divided_by_the_ranks_on_a_gpu(gpu: EmulatedProcess) -> None:
    free = FREE_BYTES + (2 << 20)
    assert gpu.run(_budgets) == [free, free // 4, free // 16, min(_BLOCK_BYTES, free // 4000), 1]


def _met(rank: int, folder: str, shared: bool) -> list[int]:
    uuid = "one" if shared else f"of rank {rank}"
    with steps.group(folder, rank, uuid if shared else "two") as communicator, emulated_gpu(uuid=uuid):
        before = communicator.sharers(GPU), communicator.sharers(torch.device("cpu"))
        communicator.meet(GPU)
        return [*before, communicator.sharers(GPU), communicator.apart().sharers(GPU)]


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_find_out_whether_they_share_a_gpu(
    shared: bool, two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path
) -> None:
    """Two ranks that see one GPU each may share it, as far as they know before they meet."""
    for rank, process in enumerate(two):
        process.start(_met, rank, str(tmp_path), shared)
    found = 2 if shared else 1
    assert [process.result() for process in two] == [[2, 2, found, found]] * 2


def _waited() -> list[int]:
    with emulated_gpu():
        meter = TrafficMeter()
        for _ in range(5):
            with meter.waiting(GPU):
                pass
        return [len(meter._events), int(meter.read().exchange_s)]


def test_nobody_reads_the_meter_and_it_keeps_no_events(gpu: EmulatedProcess) -> None:
    assert gpu.run(_waited) == [0, 5]


def _pinned() -> tuple[int, list[str]]:
    with emulated_gpu() as waits:
        check_there_and_back()
        return waits.pinned_bytes, [line for line in waits.lines if "memory/ring.py" in line]


def test_tensors_pass_through_few_page_locked_buffers(gpu: EmulatedProcess) -> None:
    pinned, waits = gpu.run(_pinned)
    assert 0 < pinned <= 64 << 20 < LARGE
    assert waits == []


def _of_a_backend() -> list[int | None]:
    with emulated_gpu():
        backend, found = CommBackend(), list[int | None]()
        steps.bind(backend)
        for sharers in (1, 4):
            with mock.patch.object(Communicator, "sharers", lambda *_, sharers=sharers: sharers):
                found += [backend.first_hop_bytes(GPU), backend.block_bytes(GPU)]
        return found


def test_a_backend_divides_its_memory_by_the_ranks_on_its_gpu(gpu: EmulatedProcess) -> None:
    first_hop, blocks, shared_first_hop, shared_blocks = gpu.run(_of_a_backend)
    assert shared_first_hop == first_hop // 4
    assert shared_blocks <= blocks


def _timed_without_parameters() -> bool:
    with emulated_gpu():
        backend = resolve_backend("hybrid")
        steps.bind(backend)
        model = distribute(torch.nn.Sequential(LGConv()), backend=backend, check=False)
        out = model[0](backend.shard.x, backend.shard.adjacency)
        return bool(out.is_cuda)


def test_hybrid_plans_for_a_model_without_parameters(gpu: EmulatedProcess) -> None:
    assert gpu.run(_timed_without_parameters)


def _bound() -> list[str]:
    with emulated_gpu() as waits:
        steps.bind(CommBackend())
        return waits.devices


def test_a_backend_sets_the_device_of_its_part(gpu: EmulatedProcess) -> None:
    assert gpu.run(_bound) == ["cuda:0"]


def _unknown_on_a_gpu() -> list[bool]:
    with emulated_gpu() as waits:
        host = unknown_rows(5, 3, torch.float32)
        there = converted(host, torch.device("cuda"))
        doubled, empty = (
            converted(there, torch.float64),
            converted(unknown_rows(0, 3, torch.float32), torch.device("cuda")),
        )
        constant = torch.full((), float("nan"), device="cuda").as_strided((5, 3), (0, 0))
        rows = [there, there[1:3], doubled, empty, constant, torch.ones(5, 3, device="cuda")]
        waits.lines.clear()
        found = [is_unknown(one) for one in rows]
        return [*found, not waits.lines, is_unknown(converted(there, torch.device("cpu")))]


def test_unknown_rows_are_known_on_a_gpu_without_a_wait(gpu: EmulatedProcess) -> None:
    assert gpu.run(_unknown_on_a_gpu) == [True, True, True, True, False, False, True, True]
