"""What a hybrid plan says, what it is expected to cost, and where it is kept for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygdist.backends.planning.expected import Expected
from pygdist.comm import Communicator

__all__ = ["load_plan", "plan_key", "save_plan"]

log = logging.getLogger(__name__)

_VERSION = 7
_SIMILAR, _NEGLIGIBLE_S = 2.0, 1e-10  # seconds for a value, less than which no network tells apart


def plan_key(facts: dict[str, Any]) -> str:
    """A name for what a plan was made for: the model's hops, the device, the ranks and the arguments."""
    text = json.dumps({"version": _VERSION, **facts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def save_plan(
    folder: Path, key: str, rank: int, chosen: Sequence[Tensor], facts: dict[str, Any], expected: Expected
) -> None:
    """Keep a plan beside the partitioned graph; where that cannot be written, say so and go on."""
    try:
        folder.mkdir(exist_ok=True)
        masks = torch.stack(list(chosen)).numpy()
        with _replaced(folder / f"{key}.{rank}.npz", rank) as path, path.open("wb") as file:
            np.savez(file, bits=np.packbits(masks, axis=1), num_rows=masks.shape[1])
        text = json.dumps({**facts, "expected": asdict(expected)}, indent=1) + "\n"
        with _replaced(folder / f"{key}.json", rank) as path:  # by each, as hosts need not share a folder
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("the plan could not be kept for the next run: %s: %s", folder, error.strerror or error)


def load_plan(
    communicator: Communicator, folder: Path | None, key: str, num_hops: int, num_rows: int, value_s: float
) -> tuple[list[Tensor], dict[str, Any]] | None:
    """What :func:`save_plan` kept, if all ranks have it and find the network as fast; every rank makes the call."""
    found: tuple[list[Tensor], dict[str, Any]] | None = None
    if folder is not None:
        try:
            with np.load(folder / f"{key}.{communicator.rank}.npz") as kept:
                masks = np.unpackbits(kept["bits"], axis=1, count=num_rows).astype(bool)
                fits = (len(masks), int(kept["num_rows"])) == (num_hops, num_rows)
            facts = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
            if fits and _similar(facts["value_s"], value_s):
                found = (list(torch.from_numpy(masks)), facts)
        except (
            OSError,
            ValueError,
            EOFError,
            KeyError,
            zipfile.BadZipFile,
        ):  # none yet, or one that broke off: it is made anew
            found = None
    everywhere = bool(communicator.gather([float(found is not None)]).min() > 0)
    return found if everywhere else None


def _similar(before: float, now: float) -> bool:
    """Whether a network is as fast as it was, as far as a short measurement can tell."""
    return max(before, now) <= _SIMILAR * min(before, now) + _NEGLIGIBLE_S


@contextlib.contextmanager
def _replaced(path: Path, rank: int) -> Iterator[Path]:
    """Where a file is written before it takes its place, so that half of one is never taken for whole."""
    before = path.with_name(f"{path.name}.{rank}.{os.getpid()}.tmp")
    try:
        yield before
        before.replace(path)
    finally:
        before.unlink(missing_ok=True)
