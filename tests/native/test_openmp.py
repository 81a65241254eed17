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
# torch is a stand-in: all that is read of it is its library, here the runtime itself
_RENAMED = f"""
import ctypes, re, sys, types
{_RUNTIMES}
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.__file__ = sys.argv[1]
torch._C = types.SimpleNamespace(__file__=sys.argv[1])
for other in sys.argv[2:]:
    ctypes.CDLL(other)
ctypes.CDLL(torch._C.__file__)
before = runtimes()
from pygdist.native import NativeEdges, load, library
sources, degrees = (ctypes.c_int64 * 8)(*range(8)), (ctypes.c_int64 * 8)()
edges = NativeEdges(ctypes.addressof(sources), ctypes.addressof(sources), 8, 2)
assert load() is not None
assert load().pygdist_place_random(ctypes.byref(edges), 2, 0, (ctypes.c_int32 * 8)()) == 0
assert runtimes() == before, runtimes()
used = library._Symbol()
ctypes.CDLL(None).dladdr(ctypes.CDLL(None).GOMP_parallel, ctypes.byref(used))
assert used.file.decode() == torch._C.__file__, used.file
"""


def _run(*command: str) -> None:
    outcome = subprocess.run([sys.executable, "-c", *command], cwd=_ROOT, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.slow
def test_an_aggregation_loads_no_second_runtime() -> None:
    _run(_AGGREGATES)


@pytest.fixture
def gomp() -> Path:
    """GCC's runtime, if it is the one that torch loads."""
    loaded = re.findall(r"/\S*/libgomp[-.]\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        pytest.skip("torch brings another OpenMP runtime here")
    return Path(loaded[0])


@pytest.mark.parametrize(
    ("name", "soname"), [("libgomp-1a2b.so.1", b"libgomp-1a2b\0"), ("libiomp5.so", b"libiomp5.so\0\0")]
)
@pytest.mark.parametrize("others", [False, True])
def test_the_runtime_of_torch_is_shared(name: str, soname: bytes, others: bool, gomp: Path, tmp_path: Path) -> None:
    """Wheels of torch up to 2.9 put a hash into its name; other packages may have loaded another runtime before."""
    runtime = tmp_path / name
    runtime.write_bytes(gomp.read_bytes().replace(b"libgomp.so.1\0", soname))
    _run(_RENAMED, str(runtime), *([str(gomp)] if others else []))
