"""How much memory a process may take, where a container or a batch job has less than the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygdist.lightning import memory
from pygdist.lightning.memory import memory_bytes

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
