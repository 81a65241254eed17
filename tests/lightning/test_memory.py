"""Memory of large tensors is used again, not mapped anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, torch
from pygdist.lightning.memory import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(48 * 2**18)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
default = faults()
assert keep_freed_memory()
faults()
print(default, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told what to keep")
def test_large_tensors_are_mapped_once() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert kept < default / 4
