"""Kernel tests use matrices of a few hundred entries: waking torch's threads for them takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread; a test may set another number, which is undone too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
