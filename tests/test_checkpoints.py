"""Files of checkpoints: whole or not there, whatever fails while they are written, and refused if a byte is wrong."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pygdist import InputError, checkpoints
from pygdist.errors import SignalError

CHECKPOINT: dict[str, Any] = {
    "state_dict": {"model.weight": torch.arange(3000.0).view(100, 30), "model.bias": torch.ones(3)},
    "epoch": 1,
    "global_step": 2,
    "pytorch-lightning_version": "2.5.0",
    "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    "lr_schedulers": [],
    "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}, "current": {"ready": 1}}}},
}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_torch_and_zip_tools_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    checkpoints.write(CHECKPOINT, path)
    assert _names(path.parent) == ["last.ckpt"]
    for content in (
        checkpoints.read(path),
        torch.load(path, weights_only=True),
        torch.load(path, weights_only=True, mmap=True),
        torch.load(path, weights_only=False),
    ):
        assert torch.equal(content["state_dict"]["model.weight"], CHECKPOINT["state_dict"]["model.weight"])
        assert content["optimizer_states"] == CHECKPOINT["optimizer_states"]
    with zipfile.ZipFile(path) as members:
        assert members.testzip() is None


@pytest.mark.parametrize("checksum", [True, False], ids=["ours", "of another tool"])
def test_a_flipped_byte_is_refused_wherever_it_is(tmp_path: Path, checksum: bool) -> None:
    path = tmp_path / "last.ckpt"
    checkpoints.write(CHECKPOINT, path) if checksum else torch.save(CHECKPOINT, path)
    whole = path.read_bytes()
    size = len(whole)
    if checksum:
        offsets = {*range(64), *range(size - 300, size), *np.random.default_rng(0).integers(0, size, 300).tolist()}
    else:  # of the zip file's own checksums: contents alone
        start = whole.index(CHECKPOINT["state_dict"]["model.weight"].numpy().tobytes())
        offsets = {*np.random.default_rng(0).integers(start, start + 12_000, 30).tolist()}
    for offset in sorted(offsets):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"last\.ckpt: .*damaged"):
            checkpoints.read(path)
    path.write_bytes(whole)
    assert checkpoints.read(path)["epoch"] == 1


@pytest.mark.parametrize("checksum", [True, False], ids=["ours", "of another tool"])
def test_a_file_that_is_cut_off_or_longer_is_refused(tmp_path: Path, checksum: bool) -> None:
    path = tmp_path / "last.ckpt"
    checkpoints.write(CHECKPOINT, path) if checksum else torch.save(CHECKPOINT, path)
    whole = path.read_bytes()
    for content in (b"", whole[:1], whole[:100], whole[: len(whole) // 2], whole[:-22], whole[:-1], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"last\.ckpt: .*damaged"):
            checkpoints.read(path)
    with pytest.raises(InputError, match="there is no such checkpoint"):
        checkpoints.read(tmp_path / "none.ckpt")


def test_files_of_other_tools_and_of_old_ones_are_read(tmp_path: Path) -> None:
    for zipped in (True, False):
        torch.save(CHECKPOINT, tmp_path / "a.ckpt", _use_new_zipfile_serialization=zipped)
        assert torch.equal(
            checkpoints.read(tmp_path / "a.ckpt")["state_dict"]["model.bias"], CHECKPOINT["state_dict"]["model.bias"]
        )


@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_what_is_checked_is_what_is_read(tmp_path: Path, options: dict[str, Any]) -> None:
    """Another checkpoint gets the name between the check and the reading."""
    path, load = tmp_path / "last.ckpt", torch.load
    checkpoints.write(CHECKPOINT, path)
    _, identity = checkpoints.read_identified(path)
    checkpoints.write({**CHECKPOINT, "epoch": 7}, tmp_path / "other.ckpt")

    def replaced(*args: Any, **options: Any) -> Any:
        (tmp_path / "other.ckpt").replace(path)
        return load(*args, **options)

    with mock.patch.object(torch, "load", replaced):
        content, found = checkpoints.read_identified(path, **options)
    assert (content["epoch"], found) == (1, identity)
    content, found = checkpoints.read_identified(path)
    assert content["epoch"] == 7
    assert found != identity


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    for name, said in (("a" * 100_000, "File name too long"), ("a\0b", "there is no such checkpoint"), ("", "no such")):
        with pytest.raises(InputError, match=said):
            checkpoints.read(tmp_path / name)


def _full(room: int) -> Any:
    """A disk that is full after so many bytes of a file that is being written."""
    original = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        file = original(path, *args, **options)
        if not path.name.endswith(".partial"):
            return file
        write, left = file.write, [room]

        def limited(data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(write(data))

        wrapper = mock.MagicMock(wraps=file)
        wrapper.write, wrapper.__enter__.return_value = limited, wrapper
        wrapper.__exit__.side_effect = lambda *_: file.close()
        return wrapper

    return mock.patch.object(Path, "open", opened)


def _at(function: str, number: int = errno.EIO) -> Any:
    return mock.patch.object(os, function, side_effect=OSError(number, os.strerror(number)))


def test_the_checkpoint_before_is_kept_whatever_fails(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    checkpoints.write(CHECKPOINT, path)
    before, size = path.read_bytes(), path.stat().st_size
    faults = [_full(room) for room in (0, 1, 30, 100, size // 2, size - 60, size - 23, size - 1)]
    for fault in (*faults, _at("fsync"), _at("fsync", errno.EDQUOT), _at("replace"), _at("replace", errno.EROFS)):
        with fault, pytest.raises(InputError, match=r"last\.ckpt: the checkpoint could not be written \(.*\)") as said:
            checkpoints.write({**CHECKPOINT, "epoch": 7}, path)
        assert "\n" not in str(said.value)
        assert path.read_bytes() == before
        assert _names(tmp_path) == ["last.ckpt"]
    with pytest.raises(TypeError):  # no fault of the disk: a generator cannot be saved
        checkpoints.write({**CHECKPOINT, "generator": (i for i in ())}, path)
    assert path.read_bytes() == before
    assert _names(tmp_path) == ["last.ckpt"]


_LIMITED = """
import resource, sys, torch
from pygdist import checkpoints
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoints.write({"state_dict": {"w": torch.ones(100_000)}}, sys.argv[1])
except checkpoints.InputError as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files_ends_in_a_line(tmp_path: Path, warm_python: None) -> None:
    path = tmp_path / "last.ckpt"
    command = [sys.executable, "-c", _LIMITED, str(path), "200000"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": "/dev/shm"})
    assert "last.ckpt: the checkpoint could not be written (File too large)" in run.stdout, run.stderr
    assert _names(tmp_path) == []


def test_a_signal_while_a_file_is_written_is_told_as_one(tmp_path: Path) -> None:
    class Signalled(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 100:
                raise SignalError("SIGTERM reached process 1", signal.SIGTERM)
            return super().write(data)

    with Signalled(tmp_path / "file", "w+") as file, pytest.raises(SignalError, match="SIGTERM reached"):
        checkpoints._write({"state_dict": {"weight": torch.zeros(1000)}}, file)  # type: ignore[arg-type]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, written, other = (
        f".{name}.ckpt.{12 * digit}.partial" for name, digit in (("last", "a"), ("last", "b"), ("best", "a"))
    )
    for name in (left, written, other):
        (tmp_path / name).touch()
    with (tmp_path / written).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its process does while it lives, on whichever machine
        checkpoints.write(CHECKPOINT, tmp_path / "last.ckpt")
    assert _names(tmp_path) == sorted([other, written, "last.ckpt"])


MALFORMED: dict[str, Any] = {
    "state_dict": [[], {"w": 3}, {3: torch.ones(2)}, None, {"w": torch.ones(2, device="meta")}],
    "optimizer_states": [{}, [3], "text", [{"state": {}}], [{"state": [], "param_groups": []}],
                         [{"state": {}, "param_groups": [3]}], [{"state": {}, "param_groups": [{"params": 3}]}],
                         [{"state": {1: {}}, "param_groups": [{"params": [0]}]}],
                         [{"state": {}, "param_groups": [{"params": [0]}, {"params": [0]}]}]],
    "lr_schedulers": [{}, [3], None],
    "loops": [[], {}, {"fit_loop": 3}, 7],
    "callbacks": [[], {3: {}}],
    "epoch": ["one", -1, 10**30, 1.5, None, True],
    "global_step": ["one", -1, torch.ones(1)],
    "pytorch-lightning_version": [None, "x", [2]],
    "hyper_parameters": [3, []],
    "backend_state": [[], {}, {"backend": 3, "rows": {}}, {"backend": "b", "rows": {"a": 1}}, {"backend": "b"},
                      {"backend": "b", "rows": {}, "parts": []}, {"backend": "b", "rows": {}, "parts": {"0": {}}},
                      {"backend": "b", "rows": {}, "parts": {"0": {"part": 3}}}],
    "model_averaging": [[], {"num_parts": "2", "states": {}}, {"num_parts": 2, "states": {0: []}},
                        {"num_parts": 2, "states": {"0": 3}}, {"num_parts": 2, "states": {"0": [3]}}],
}  # fmt: skip


@pytest.mark.parametrize("part", MALFORMED)
def test_a_part_that_is_not_what_it_should_be_is_named(tmp_path: Path, part: str) -> None:
    for value in MALFORMED[part]:
        checkpoints.write({**CHECKPOINT, part: value}, tmp_path / "a.ckpt")
        with pytest.raises(InputError, match=rf"a\.ckpt: is damaged or forged: '{part}' must be"):
            checkpoints.read(tmp_path / "a.ckpt")


def test_what_lacks_a_part_is_refused_by_its_name(tmp_path: Path) -> None:
    for part in checkpoints.TRAINING_PARTS:
        checkpoints.write({name: value for name, value in CHECKPOINT.items() if name != part}, tmp_path / "a.ckpt")
        with pytest.raises(InputError, match=rf"a\.ckpt: .*'{part}'"):
            checkpoints.read(tmp_path / "a.ckpt", needs=checkpoints.TRAINING_PARTS)
    for other in ([1, 2], torch.ones(3), {"epoch": 1}):
        torch.save(other, tmp_path / "a.ckpt")
        with pytest.raises(InputError, match="not a Lightning checkpoint"):
            checkpoints.read(tmp_path / "a.ckpt")
