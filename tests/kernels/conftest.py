"""Kernel tests use matrices of a few hundred entries: waking torch's threads for them takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pygdist.native import Isa, library, load, set_isa


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread; a test may set another number, which is undone too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the native library and with torch's operators in its place."""
    if request.param == "torch":
        monkeypatch.setattr(library, "load", lambda: None)
    elif load() is None:
        pytest.skip("the native library was not built here")
    return str(request.param)


@pytest.fixture
def restored_isa() -> Iterator[None]:
    yield
    set_isa(Isa.BEST)


@pytest.fixture
def small_cache() -> Iterator[None]:
    """Take the last-level cache to have 1 MiB, so that products of small matrices are done slab by slab."""
    found = load()
    if found is None:
        pytest.skip("the native library was not built here")
    found.pygdist_set_cache(1 << 20)
    yield
    found.pygdist_set_cache(0)
