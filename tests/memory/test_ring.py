"""Copies to and from a GPU through page-locked buffers; :mod:`tests.cuda.test_memory` makes them on an emulated one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pygdist.memory.ring import download, settle, uploaded

GPU = torch.device("cuda", 0)
LARGE = 100 << 20  # more bytes than all buffers


def tensors() -> list[Tensor]:
    """Small, empty, large and strided tensors of several types, on the host."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 256, (LARGE,), dtype=torch.uint8, generator=generator)
    rows = torch.randn(3_000_001, 3, generator=generator)
    return [
        large, rows, rows[:, 1], rows.half(), rows.double()[::7], rows > 0, rows[:0], torch.tensor(3),
        torch.arange(5, dtype=torch.int32),
    ]  # fmt: skip


def check_there_and_back() -> None:
    """Copy tensors to a GPU and back, some while others are on their way."""
    expected = tensors()
    there = [uploaded(one, GPU) for one in expected]
    assert all(one.is_cuda for one in there)
    back = [torch.zeros(one.shape, dtype=one.dtype) for one in expected]
    for one, out in zip(there, back, strict=True):
        download(one, out)
    again = [uploaded(one, GPU) for one in back]  # waits for what is on its way
    download(again[1] * 2, twice := torch.empty(expected[1].shape))
    settle(GPU)
    assert torch.equal(twice, expected[1] * 2)
    for one, *others in zip(expected, back, (one.cpu() for one in again), strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_on_the_host_nothing_is_copied() -> None:
    x, out = torch.rand(3), torch.zeros(3)
    assert uploaded(x, torch.device("cpu")) is x
    download(x, out)
    settle(torch.device("cpu"))
    assert torch.equal(out, x)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_there_and_back_on_a_gpu() -> None:
    check_there_and_back()
