"""What the machine refuses is told in one line that names the file, whatever the type of the error."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pygdist.errors import InputError, RefusedError
from pygdist.memory import limits
from pygdist.memory.limits import refusal_of, told, writes_to


def _write_to_full_file(folder: Path) -> None:
    with (folder / "given.csv").open() as read, open("/dev/full", "w") as file:
        file.write(read.name)


def _save_to_full_file(folder: Path) -> None:
    with open("/dev/full", "wb") as file:
        torch.save(torch.zeros(100_000), file)


def _allocate(folder: Path) -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def _allocate_array(folder: Path) -> None:
    np.zeros(1 << 56, dtype=np.uint8)


def _open_many(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), before[1]))
    try:
        files = [(folder / "given.csv").open() for _ in range(1000)]
        assert not files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _lose_a_worker(folder: Path) -> None:
    list(DataLoader(range(4), num_workers=1, worker_init_fn=lambda _: os.kill(os.getpid(), signal.SIGKILL)))  # type: ignore[arg-type]


def _let_a_worker_leave(folder: Path) -> None:
    list(DataLoader(range(4), num_workers=1, worker_init_fn=lambda _: os._exit(0)))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "disk": (_write_to_full_file, r"^/dev/full: No space left on device; make room there"),
    "torch's disk": (_save_to_full_file, r"^/dev/full: "),
    "memory of torch": (_allocate, r"^Cannot allocate memory; use more or smaller parts.*tried to allocate"),
    "memory of numpy": (_allocate_array, r"^Cannot allocate memory; .*Unable to allocate"),
    "worker": (
        _lose_a_worker,
        r"^rank 1: worker \d+ of its DataLoader is killed by signal: Killed; most likely there was",
    ),
    "worker that leaves": (
        _let_a_worker_leave,
        r"^rank 1: worker \d+ of its DataLoader exited unexpectedly; most likely",
    ),
    "files": (_open_many, r"given\.csv: Too many open files; raise the limit \(ulimit -n\)"),
    "folder": (lambda folder: (folder / "given.csv" / "x").touch(), r"given\.csv/x: Not a directory; choose another"),
}


@pytest.mark.parametrize(("refuse", "words"), REFUSED.values(), ids=REFUSED)
def test_errors_as_they_come(
    refuse: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "given.csv").touch()
    with pytest.raises((OSError, MemoryError, RuntimeError)) as caught:
        refuse(tmp_path)
    refusal = refusal_of(caught.value)
    assert isinstance(refusal, RefusedError)
    assert refusal.of_one_rank
    with pytest.raises(RefusedError, match=words):
        raise refusal


SHAPES = {
    "shared memory": "unable to allocate shared memory(shm) for file </torch_17_4>: No space left on device (28)",
    "mapping": "unable to mmap 80000 bytes from file </tmp/rows>: Cannot allocate memory (12)",
    "thread": "can't start new thread",
    "device": "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB",
    "allocator": "std::bad_alloc",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_errors_of_libraries(text: str) -> None:
    refusal = str(refusal_of(RuntimeError(text)))
    assert ("/torch_17_4: " in refusal) == ("torch_17" in text)
    assert len(refusal.splitlines()) == 1


def test_what_there_was_no_memory_for_is_told() -> None:
    assert str(refusal_of(MemoryError("not enough memory for a mini-batch"))).endswith(
        "(not enough memory for a mini-batch)"
    )
    assert str(refusal_of(MemoryError())).endswith("a machine with more memory")


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EIO])
def test_errors_that_name_their_file(code: int) -> None:
    assert str(refusal_of(OSError(code, "", "here"))).startswith(f"here: {os.strerror(code)}; ")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO])
def test_an_error_of_a_disk_without_a_file_names_the_folders(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(limits._WRITTEN_TO, raising=False)
    writes_to(tmp_path / "runs" / "deep", "s3://bucket")
    error = OSError(code, os.strerror(code))
    pattern = rf"^{os.strerror(code)}: one of {tmp_path}/runs/deep \(\d+ bytes free\), .*free\); "
    assert re.match(pattern, str(refusal_of(error)))
    monkeypatch.setattr(limits, "_free_in", lambda folder: 4096 if folder.name == "deep" else 1 << 40)
    assert f"one of {tmp_path}/runs/deep (4096 bytes free); " in str(refusal_of(error)), "the full one alone"
    code_of_rank = (
        "import errno; from pygdist.memory.limits import refusal_of; print(refusal_of(OSError(errno.EIO, 'x')))"
    )
    rank = subprocess.run([sys.executable, "-c", code_of_rank], capture_output=True, text=True, check=True)
    assert f"{tmp_path}/runs/deep (" in rank.stdout, "ranks know it too"


def test_ranks_need_files() -> None:
    code = """
import resource
from pygdist.errors import RefusedError
from pygdist.memory.limits import require_for_ranks
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
require_for_ranks(4)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    require_for_ranks(8)
except RefusedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "a process may open 100 files, but ranks need about 128; raise the limit (ulimit -n)"
    assert done.stdout.splitlines() == ["(100, 100)", said]


def test_ranks_need_addresses_for_threads() -> None:
    """Gloo aborts the process, or waits for ever, if it cannot start one."""
    code = """
import psutil, resource
from pygdist.errors import RefusedError
from pygdist.memory.limits import require_for_ranks
for more in (1 << 30, 1 << 28):
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, resource.RLIM_INFINITY))
    try:
        require_for_ranks(2)
        print("enough")
    except RefusedError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    enough, refused = done.stdout.splitlines()
    assert enough == "enough"
    assert re.fullmatch(
        r"a process may have \d+\.\d\d GiB of addresses and has \d+\.\d\d, but the threads of a rank need about 0.75 "
        r"more; raise the limit \(ulimit -v\)", refused
    )  # fmt: skip
    assert "close other programs" in str(refusal_of(RuntimeError(os.strerror(errno.EAGAIN))))


def test_other_errors_are_faults() -> None:
    others = (ValueError("no"), RuntimeError("size mismatch"), OSError("odd"), FileNotFoundError(2, "", "x"))
    for error in (*others, PermissionError(errno.EACCES, "a port"), io.UnsupportedOperation("seek"), KeyError(1)):
        assert refusal_of(error) is None
        assert told(error) is None
    assert told(InputError("mistake")) == "mistake"
    assert refusal_of(InputError("mistake: No space left on device")) is None
