"""One OpenMP runtime in a process: the one that torch has loaded, whatever its file is called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pygdist
from pygdist.native import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")

_ROOT = Path(pygdist.__file__).parents[1]
_RUNTIMES = """
def runtimes():
    with open("/proc/self/maps") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if line.count("/") > 1}
    return sorted(path for path in paths if re.search(r"/lib(gomp|iomp5|omp)[-.][^/]*$", path))
"""
_AGGREGATES = f"""
import re, sys
import torch
from pygdist.graph import Adjacency
{_RUNTIMES}
before = runtimes()
torch.set_num_threads(2)
edges, _ = Adjacency.from_unsorted(torch.randint(300, (2, 3000)), num_src=300, num_dst=300)
assert edges.matmul(torch.ones(300, 64)).sum() == 3000 * 64
assert before and runtimes() == before, (before, runtimes())
"""
# torch is a stand-in: all that is read of it is the folder of its libraries
_RENAMED = f"""
import ctypes, re, sys, types
from pathlib import Path
{_RUNTIMES}
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__file__ = sys.argv[1] + "/torch/__init__.py"
runtime = next(Path(sys.argv[1]).rglob("libgomp-*"))
ctypes.CDLL(str(runtime))  # as torch's libraries load it
from pygdist.native import NativeEdges, load
sources, degrees = (ctypes.c_int64 * 8)(*range(8)), (ctypes.c_int64 * 8)()
edges = NativeEdges(ctypes.addressof(sources), ctypes.addressof(sources), 8, 2)
assert load() is not None
assert load().pygdist_place_random(ctypes.byref(edges), 2, 0, (ctypes.c_int32 * 8)()) == 0
assert runtimes() == [str(runtime)], runtimes()
"""


def _run(*command: str) -> None:
    outcome = subprocess.run([sys.executable, "-c", *command], cwd=_ROOT, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.slow
def test_an_aggregation_loads_no_second_runtime() -> None:
    _run(_AGGREGATES)


@pytest.mark.parametrize("folder", ["torch/lib", "torch.libs"])
def test_a_runtime_under_a_name_of_its_own_is_shared(folder: str, tmp_path: Path) -> None:
    """As in wheels of torch up to 2.9, which put a hash into the name."""
    loaded = re.findall(r"/\S*/libgomp[-.]\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        pytest.skip("torch brings another OpenMP runtime here")
    content = Path(loaded[0]).read_bytes()
    soname = b"libgomp.so.1\0"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "libgomp-1a2b.so.1").write_bytes(content.replace(soname, b"libgomp-1a2b\0"))
    _run(_RENAMED, str(tmp_path))
