"""Fixtures for all tests: processes that are started once and serve as ranks wherever ranks are needed.

Torch is imported only where tests run: pytest itself, which hands them to its workers, starts seconds earlier.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import settings

from tests.server import python, start_server

if TYPE_CHECKING:
    from pygdist.testing import RankPool

# how long an example takes tells nothing where tests share cores with ranks; the same examples each time, so that what
# fails in one place fails in all
settings.register_profile("pygdist", deadline=None, derandomize=True)
settings.load_profile("pygdist")

_MEMORY, _ROOM_BYTES = "/dev/shm", 4 * 2**30


def pytest_addoption(parser: pytest.Parser) -> None:
    """Combinations that are left out otherwise (:mod:`tests.turns`), on demand; all of them take long."""
    parser.addoption("--exhaustive", action="store_true", help="every backend, depth and number of ranks")


def pytest_configure(config: pytest.Config) -> None:
    """Start one server for all workers; it imports while they collect."""
    _use_memory()
    if not re.search(r"(?<!not )(cuda|multi_gpu)", config.getoption("markexpr")):  # those of GPUs run by themselves
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        start_server()


def _use_memory() -> None:
    """Keep temporary files in memory, where there is room and the caller names no other place.

    Tests make very many. On ext4 one takes half a millisecond to make where many were just removed.
    """
    with contextlib.suppress(OSError):  # there is none
        if "TMPDIR" not in os.environ and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
            os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="pygdist-tests-", dir=_MEMORY)
            # last of all, after the folder that multiprocessing makes in it
            Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-1000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --exhaustive asks for."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish() -> None:
    """Make the tests of this process fast; whoever only hands them to workers collects none."""
    from tests import startup

    startup.begin()


@pytest.fixture(scope="session")
def fork_server() -> None:
    """For pools of a test's own: their ranks import nothing."""
    start_server()


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """Leave a process group that Lightning left to this process, for the tests of the next file."""
    yield
    if "torch.distributed" in sys.modules:
        from torch import distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Put the environment back: a trainer's place among ranks would be that of programs which later tests start."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts by ``sys.executable``, and those that they start, find everything imported."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture(scope="session")
def pool(fork_server: None) -> Iterator[RankPool]:
    """Up to five ranks; starting them costs seconds, a call costs milliseconds."""
    from pygdist.testing import RankPool

    with RankPool(5, timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Raw files of real graphs beside the checkout; tests that want them skip without."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("there are no real graphs in ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a directed graph cut for two ranks, in ``nodes`` and with three hops in ``replicas``."""
    from pygdist.graph import write_store
    from pygdist.testing import random_graph

    folder = tmp_path_factory.mktemp("parts")
    data, part = random_graph("directed")
    for name, hops in (("nodes", 1), ("replicas", 3)):
        write_store(data, part[2], folder / name, num_parts=2, method="test", arguments={}, num_hops=hops)
    return str(folder)
