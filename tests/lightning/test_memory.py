"""Memory of large tensors is used again, not mapped anew."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from pygdist.lightning import GraphDDPStrategy, strategies
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


@pytest.mark.parametrize("keep", [True, False])
def test_a_strategy_may_leave_the_c_library_as_it_is(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(strategies, "keep_freed_memory", lambda: called.append(True))
    classifier, data = runs.module(str(tmp_path))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = GraphDDPStrategy(keep_memory=keep)
    Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **options).fit(classifier, datamodule=data)
    assert bool(called) == keep
