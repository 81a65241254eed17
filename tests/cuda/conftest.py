"""One emulated process for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.process import EmulatedProcess


@pytest.fixture(scope="module")
def gpu() -> Iterator[EmulatedProcess]:
    """A process with an emulated GPU."""
    with EmulatedProcess() as process:
        yield process


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[EmulatedProcess, EmulatedProcess]]:
    """Two such processes, for two ranks."""
    with EmulatedProcess() as one, EmulatedProcess() as other:
        yield one, other
