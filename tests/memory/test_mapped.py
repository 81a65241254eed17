"""Mapped files have their room before they are written: a full disk is an error of Python's, and no signal."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pygdist.memory import mapped

MAKERS = {
    "array": lambda path: mapped.new_array(path, np.float64, (1000, 3)),
    "tensor": lambda path: mapped.new_tensor(path, torch.float64, (1000, 3)),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def _blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


@makers
@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_new_file_has_its_bytes_on_disk(
    make: Callable[[Path], object], refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refusal is not None:

        def refuse(*_: object) -> None:
            raise OSError(refusal, "not here")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    rows = make(tmp_path / "rows.npy")
    assert _blocks(tmp_path / "rows.npy") >= 24_000  # a sparse file has none
    assert tuple(rows.shape) == (1000, 3)
    assert float(rows.sum()) == 0
    rows[999] = 7
    if isinstance(rows, np.ndarray):
        rows.flush()
        np.testing.assert_array_equal(np.load(tmp_path / "rows.npy")[998:], [[0, 0, 0], [7, 7, 7]])


def test_an_array_without_rows(tmp_path: Path) -> None:
    assert mapped.new_array(tmp_path / "none.npy", np.int64, (0, 3)).shape == (0, 3)
    assert np.load(tmp_path / "none.npy").shape == (0, 3)


@makers
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room(make: Callable[[Path], object], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"rows\.npy") as caught:
        make(tmp_path / "rows.npy")
    assert caught.value.errno == code
    assert caught.value.filename == str(tmp_path / "rows.npy")


@makers
def test_files_that_may_not_be_so_large(make: Callable[[Path], object], tmp_path: Path) -> None:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"rows\.npy") as caught:
            make(tmp_path / "rows.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert handler == signal.SIG_IGN  # Python's own; otherwise the process ends


def test_nothing_else_maps_files_to_write() -> None:
    package = Path(mapped.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path != Path(mapped.__file__):
            for word in ("from_file(", "open_memmap(", "posix_fallocate", '"w+"'):
                assert word not in path.read_text(), f"{path}: {word} where pygdist.memory.mapped has its room first"
