"""How much memory a process may take, and when it begins to keep what is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygdist.lightning import GraphDDPStrategy, strategies
from pygdist.memory import machine as memory
from pygdist.memory.machine import memory_bytes
from pygdist.testing import RankPool
from tests.lightning import runs

GIB = 2**30


@pytest.mark.parametrize("where", ["memory.max", "job/memory.max", "memory/job/step/memory.limit_in_bytes"])
def test_a_control_group_limits_it(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_control_groups", lambda: ["", "job/step"])
    whole = memory_bytes(tmp_path)
    assert whole > GIB // 4
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).write_text(f"{GIB // 4}\n")
    assert memory_bytes(tmp_path) == GIB // 4
    (tmp_path / where).write_text("max\n")
    assert memory_bytes(tmp_path) == whole


def _kept_from(rank: int, world_size: int, folder: str, keep: bool) -> list[int]:
    """The steps that were made when memory began to be kept, in two fits of one strategy."""
    classifier, data = runs.module(folder)
    strategy = GraphDDPStrategy(keep_memory=keep)
    trainer = runs.trainer(rank, world_size, folder, strategy=strategy, max_epochs=4)
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "keep_freed_memory", lambda: steps.append(trainer.global_step))
        trainer.fit(classifier, datamodule=data)
        trainer.fit_loop.max_epochs = 8
        trainer.fit(classifier, datamodule=data)
    return steps


@pytest.mark.parametrize("keep", [True, False])
def test_memory_is_kept_once_plans_are_made(keep: bool, pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_kept_from, 2, str(tmp_path), keep) == [[1, 5] if keep else []] * 2
