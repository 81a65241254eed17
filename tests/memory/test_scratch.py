"""Temporary folders and half-written files go with their process; the next one removes what a killed one left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pygdist.memory.scratch import ScratchFolder, replacing


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


_OTHER = """
import os, sys
from pathlib import Path
from pygdist.memory.scratch import ScratchFolder, replacing
scratch = ScratchFolder(Path())
(scratch.path / "file").write_text("some")
with replacing(Path("result")) as written:
    written.write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "alive"])
def test_remnants_of_other_processes(kill: bool, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        if kill:
            other.kill()
            other.wait()
        before = _names(tmp_path)
        assert len(before) == 2
        (tmp_path / "pygdist-0123456789ab-of-others").mkdir()
        (tmp_path / "pygdist-notes").mkdir()
        scratch = ScratchFolder(tmp_path)
        with replacing(tmp_path / "result") as written:
            written.write_text("whole")
        scratch.close()
        kept = {"pygdist-0123456789ab-of-others", "pygdist-notes", "result"}
        assert set(_names(tmp_path)) == (kept if kill else kept | set(before))
    assert set(_names(tmp_path)) == kept
    assert (tmp_path / "result").read_text() == ("whole" if kill else "half")  # it was the last to finish


def test_a_folder_goes_with_its_object_and_not_with_a_fork(tmp_path: Path) -> None:
    scratch = ScratchFolder(tmp_path)
    (scratch.path / "inner").mkdir()
    forked = f"""
import os
from pathlib import Path
from pygdist.memory.scratch import ScratchFolder
scratch = ScratchFolder(Path({str(tmp_path)!r}))
if not (child := os.fork()):
    scratch.close()
    os._exit(0)
os.waitpid(child, 0)
print(scratch.path.is_dir())
"""
    assert subprocess.run([sys.executable, "-c", forked], capture_output=True, text=True).stdout == "True\n"
    assert _names(tmp_path) == [scratch.path.name]  # that of the other process is gone
    del scratch
    assert _names(tmp_path) == []


def test_a_file_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere" / "result"):
        pass


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "result").write_text("old")
    with pytest.raises(FileExistsError), replacing(tmp_path / "result") as written:
        written.touch(exist_ok=False)
    assert _names(tmp_path) == ["result"]
    assert (tmp_path / "result").read_text() == "old"
