"""One emulated process for all tests of a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.cuda.process import EmulatedProcess


def _skip_unless_emulated() -> None:
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch has CUDA, which the emulation stands for")
    if shutil.which("c++") is None:
        pytest.skip("the emulation needs a C++ compiler (c++)")


@pytest.fixture(scope="module")
def gpu() -> Iterator[EmulatedProcess]:
    """A process with an emulated GPU."""
    _skip_unless_emulated()
    with EmulatedProcess() as process:
        yield process


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[EmulatedProcess, EmulatedProcess]]:
    """Two such processes, for two ranks."""
    _skip_unless_emulated()
    with EmulatedProcess() as one, EmulatedProcess() as other:
        yield one, other
