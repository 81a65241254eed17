"""Memory of large tensors is used again, not mapped anew."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pygdist.lightning import GraphDDPStrategy, strategies
from pygdist.testing import RankPool
from tests.lightning import runs

_FAULTS = """
import resource, torch
from pygdist.lightning.memory import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(48 * 2**18)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def fewest() -> int:
    # something small may come to lie where a tensor was, so that the next one does not fit there
    return min(faults() for _ in range(8))

default = fewest()
assert keep_freed_memory()
print(default, fewest())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told what to keep")
def test_large_tensors_are_mapped_once() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert kept < default / 4


def _keeps(rank: int, world_size: int, folder: str, keep: bool) -> bool:
    called: list[bool] = []
    before, strategies.keep_freed_memory = strategies.keep_freed_memory, lambda: bool(called.append(True))
    try:
        classifier, data = runs.module(folder)
        trainer = runs.trainer(rank, world_size, folder, strategy=GraphDDPStrategy(keep_memory=keep), max_epochs=1)
        trainer.fit(classifier, datamodule=data)
    finally:
        strategies.keep_freed_memory = before
    return bool(called)


@pytest.mark.parametrize("keep", [True, False])
def test_a_strategy_may_leave_the_c_library_as_it_is(keep: bool, tmp_path: Path, pool: RankPool) -> None:
    assert pool.run(_keeps, 2, str(tmp_path), keep) == [keep] * 2
