"""Fixtures for all tests: processes that are started once and serve as ranks wherever ranks are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pygdist.testing import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Up to four ranks; starting them costs seconds, a call costs milliseconds."""
    with RankPool(4, timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Raw files of real graphs beside the checkout; tests that want them skip without."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("there are no real graphs in ../shared/data beside the checkout")
    return folder
