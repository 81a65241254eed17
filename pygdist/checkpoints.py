"""Checkpoint files that cannot tear: whole under their name or not there, with a checksum that reading verifies.

A checkpoint is the zip file that ``torch.save`` writes, so ``torch.load`` reads it anywhere. Its checksum, of all bytes
before, stands at the end, in the zip file's comment. A file without a comment, by another tool, is read as well.
"""

from __future__ import annotations

import errno
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.memory.scratch import replacing

_COMMENT = "pygdist crc32={:08x}"
_OURS = re.compile(rb"pygdist crc32=([0-9a-f]{8})")
_LENGTH = len(_COMMENT.format(0))
_END, _END_BYTES = b"PK\x05\x06", 22  # the zip file's last record; its last two bytes are the comment's length

#: Parts of a checkpoint from which training goes on.
TRAINING_PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "loops")

#: Part with facts about the run that saved a checkpoint: names and numbers.
RUN_FACTS = "pygdist"


def write(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint beside its place, flush it to disk, and put it there; until then the previous one stays.

    Raises:
        InputError: If the file cannot be written. The previous checkpoint is as it was, and nothing else is left.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w+b") as file:
            _write(checkpoint, file)
        _flush_folder(path.parent)
    except OSError as error:
        raise InputError(
            f"{path}: the checkpoint could not be written ({error.strerror or error}); free space or name another "
            "folder. The checkpoints before it are as they were"
        ) from error


def _write(checkpoint: Mapping[str, Any], file: BinaryIO) -> None:
    sink = _Sink(file)
    try:
        torch.save(checkpoint, cast(IO[bytes], sink))
    except Exception:
        if sink.error is None:
            raise
    if sink.error is not None:
        raise sink.error
    file.seek(-_END_BYTES, os.SEEK_END)
    if file.read(4) != _END:
        raise RuntimeError("torch.save wrote no zip file without a comment, which the checksum needs")
    file.seek(-2, os.SEEK_END)
    file.write(_LENGTH.to_bytes(2, "little"))
    comment = _COMMENT.format(_checksum(file, file.tell()))
    file.write(comment.encode())
    file.flush()


class _Sink:
    """A file for ``torch.save``, which reports the error of a write as another one, or not at all: keeps the first.

    A signal may be one: torch makes its ``SystemExit`` an error, too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.error = file, None  # type: BinaryIO, BaseException | None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._file.flush()
            except BaseException as error:
                self.error = error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems flush no folders
            raise
    finally:
        os.close(descriptor)


def read(path: str | Path, *, needs: tuple[str, ...] = ("state_dict",), **options: Any) -> dict[str, Any]:
    """Return the content of a Lightning checkpoint. Unless ``weights_only=False`` is given, no code in it is run.

    Args:
        path: The file.
        needs: The parts that it must have.
        options: As for ``torch.load``.

    Raises:
        InputError: If there is no such file, it is no Lightning checkpoint or a damaged one, or it lacks a part.
    """
    return read_identified(path, needs=needs, **options)[0]


def read_identified(
    path: str | Path, *, needs: tuple[str, ...] = ("state_dict",), **options: Any
) -> tuple[dict[str, Any], tuple[float, float]]:
    """Return what :func:`read` does, and the size and checksum of the file, by which ranks compare what each has read.

    Raises:
        InputError: As :func:`read`.
    """
    path = Path(path)
    with _opened(path) as file:  # once: another file may get this name meanwhile
        try:
            identity = _verify(file, path)
            file.seek(0)
            source = f"/dev/fd/{file.fileno()}" if options.get("mmap") else file
            checkpoint = torch.load(source, **{"map_location": "cpu", **options})
        except InputError:
            raise
        except Exception as error:  # torch.load raises nearly any for a file of another kind
            raise InputError(
                f"{path}: not a Lightning checkpoint, or a damaged one ({type(error).__name__})"
            ) from error
    check(checkpoint, path, needs=needs)
    return checkpoint, identity


def _opened(path: Path) -> BinaryIO:
    try:
        if path.is_file():
            return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: the checkpoint cannot be read ({error.strerror}); name another file") from error
    raise InputError(f"{path}: there is no such checkpoint")


def _verify(file: BinaryIO, path: Path) -> tuple[float, float]:
    """Compare a file with its checksum, or with those of the zip file's members; return its size and checksum.

    Raises:
        InputError: If they differ, or a zip file does not end as it should.
    """
    size = file.seek(0, os.SEEK_END)
    if (stated := _stated_checksum(file, size)) is not None:
        if _checksum(file, size - _LENGTH) != stated:
            raise InputError(f"{path}: is damaged, its checksum differs; take an earlier checkpoint")
        return float(size), float(stated)
    file.seek(0)
    if file.read(2) == b"PK":  # otherwise torch's format before zip files, or another kind of file
        file.seek(max(0, size - _END_BYTES))
        end = file.read()
        if end[:4] != _END or end[-2:] != b"\0\0":
            raise InputError(f"{path}: is damaged or cut off, as its end is not that of a checkpoint")
        with zipfile.ZipFile(file) as members:
            if bad := members.testzip():
                raise InputError(f"{path}: is damaged, the checksum of {bad} in it differs; take an earlier checkpoint")
    return float(size), float(_checksum(file, size))


def _stated_checksum(file: BinaryIO, size: int) -> int | None:
    file.seek(max(0, size - _LENGTH))
    ours = _OURS.fullmatch(file.read())
    return None if ours is None else int(ours[1], 16)


def _checksum(file: BinaryIO, size: int) -> int:
    """Return the CRC-32 of the first ``size`` bytes."""
    file.seek(0)
    value = 0
    while size and (block := file.read(min(size, 1 << 20))):
        value, size = zlib.crc32(block, value), size - len(block)
    return value


def check(checkpoint: Any, path: str | Path, *, needs: tuple[str, ...]) -> None:
    """Refuse a checkpoint that lacks a part which is needed, or in which a part is not what it should be.

    Raises:
        InputError: It names the part.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise InputError(f"{path}: not a Lightning checkpoint, which is a dictionary with a 'state_dict'")
    lacking = [part for part in needs if part not in checkpoint]
    if lacking:
        raise InputError(
            f"{path}: lacks '{lacking[0]}', from which training would go on; take one that holds more than weights "
            "(save_weights_only=False)"
        )
    for part, expected in _wrong_parts(checkpoint):
        raise InputError(f"{path}: is damaged or forged: '{part}' must be {expected}")


def _wrong_parts(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names of parts that have the wrong type, and what they should be."""
    for part, (is_right, expected) in _PARTS.items():
        if part in checkpoint and not is_right(checkpoint[part]):
            yield part, expected


def _is_by_name(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(one, kind) for n, one in value.items())


def _is_optimizer_state(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and _is_list(group.get("params"), lambda one: isinstance(one, int | str))
        for group in groups
    ):
        return False
    params = [one for group in groups for one in group["params"]]
    return len(set(params)) == len(params) and set(value["state"]) <= set(params)  # torch would drop other states


def _is_list(value: Any, is_right: Any) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_backend_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("backend"), str)
        and _is_by_name(value.get("rows"), Tensor)
        and _is_by_name(value.get("parts", {}), dict)
        and all(_is_by_name(part, Tensor) and "part" in part for part in value.get("parts", {}).values())
    )


def _is_of_parts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("num_parts")) is int
        and _is_by_name(value.get("states"), list)
        and all(_is_list(states, lambda one: isinstance(one, dict)) for states in value["states"].values())
    )


_PARTS: dict[str, tuple[Any, str]] = {
    "state_dict": (
        lambda value: (
            _is_by_name(value, object)
            and all(
                (isinstance(one, Tensor) and not one.is_meta) or name.endswith("_extra_state")
                for name, one in value.items()
            )
        ),
        "a dictionary of tensors by name",
    ),
    "optimizer_states": (
        lambda value: _is_list(value, _is_optimizer_state),
        "a list of dictionaries with 'param_groups', which name each parameter once, and 'state' of these",
    ),
    "lr_schedulers": (lambda value: _is_list(value, lambda one: isinstance(one, dict)), "a list of dictionaries"),
    "loops": (lambda value: _is_by_name(value, dict) and "fit_loop" in value, "a dictionary with 'fit_loop'"),
    "callbacks": (lambda value: _is_by_name(value, object), "a dictionary with names as keys"),
    "epoch": (lambda value: type(value) is int and 0 <= value < 1 << 53, "a whole number from 0 to 2**53"),
    "global_step": (lambda value: type(value) is int and 0 <= value < 1 << 53, "a whole number from 0 to 2**53"),
    "pytorch-lightning_version": (lambda value: bool(re.match(r"\d+\.\d+", str(value))), "a version"),
    "hyper_parameters": (lambda value: isinstance(value, Mapping), "a dictionary"),
    "backend_state": (
        _is_backend_state,
        "a dictionary with the name of a 'backend', its 'rows', tensors by name, and those of its 'parts'",
    ),
    "model_averaging": (_is_of_parts, "a dictionary with 'num_parts' and the 'states' of optimisers by part"),
}
