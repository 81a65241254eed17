"""The emulated GPU finds what a real one would refuse or wait for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pygdist.kernels import CSR
from tests.cuda.emulation import EmulatedTensor, emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.kernels.oracle import random_csr


def _mixed() -> str:
    with emulated_gpu():
        there, here = torch.ones(3, 2, device="cuda"), torch.ones(3, 2)
        for run in (lambda: there + here, lambda: there.index_select(0, torch.tensor([1])), lambda: there @ here.t()):
            with pytest.raises(RuntimeError, match="same device"):
                run()
        return str((there + torch.tensor(1.0)).device)  # numbers go anywhere


def test_tensors_of_two_devices_are_refused(gpu: EmulatedProcess) -> None:
    assert gpu.run(_mixed) == "cuda:0"


def _native() -> None:
    with emulated_gpu():
        csr = random_csr()
        there = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols)
        with pytest.raises(RuntimeError, match="native library was given memory of the GPU"):
            there.native()


def test_the_native_library_gets_no_memory_of_the_gpu(gpu: EmulatedProcess) -> None:
    gpu.run(_native)


def _trained() -> tuple[bool, float]:
    """A step through autograd's thread for the device, beside the same on the host."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    layer(x).square().sum().backward()
    expected = layer.weight.grad
    assert expected is not None
    layer.weight.grad = None
    with emulated_gpu():
        there = layer.cuda()
        there(x.cuda()).square().sum().backward()
        gradient = there.weight.grad
        assert gradient is not None
        return isinstance(gradient, EmulatedTensor), float((gradient.cpu() - expected).abs().max())


def test_a_backward_pass_is_that_of_the_host(gpu: EmulatedProcess) -> None:
    assert gpu.run(_trained) == (True, 0.0)


def _waits() -> list[list[str]]:
    with emulated_gpu() as waits:
        x, lines = torch.arange(6.0, device="cuda").view(3, 2), list[list[str]]()
        index, mask = torch.tensor([0, 2], device="cuda"), x[:, 0] > 0
        runs = [
            lambda: x.sum().item(), lambda: x.cpu(), lambda: x[mask], lambda: mask.nonzero(), lambda: x.tolist(),
            lambda: torch.ones(2).cuda(), lambda: torch.cuda.synchronize(), lambda: bool(mask.any()),
            lambda: torch.repeat_interleave(index, index),
            # without a wait
            lambda: x[index], lambda: x.index_select(0, index), lambda: torch.where(mask, 1.0, 0.0), lambda: x @ x.t(),
            lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True), lambda: torch.zeros(3, device="cuda"),
            lambda: torch.repeat_interleave(index, index, output_size=2),
        ]  # fmt: skip
        for run in runs:
            waits.lines.clear()
            run()
            lines.append(list(waits.lines))
        return lines


def test_waits_of_the_host_are_noted(gpu: EmulatedProcess) -> None:
    lines = gpu.run(_waits)
    assert [len(one) for one in lines] == [1] * 9 + [0] * 7, lines


def _views() -> list[list[float]]:
    with emulated_gpu():
        x = torch.zeros(3, 2, device="cuda")
        rows: Tensor = x[1:]
        rows += 1
        x.view(-1)[0] = 5
        out: list[list[float]] = x.tolist()
        return out


def test_views_share_memory(gpu: EmulatedProcess) -> None:
    assert gpu.run(_views) == [[5, 0], [1, 1], [1, 1]]
