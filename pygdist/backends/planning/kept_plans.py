"""Keeps a choice, and the measurements behind it, beside the partitioned graph for the next run."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pygdist.comm import Communicator
from pygdist.memory.scratch import replacing

log = logging.getLogger(__name__)

_VERSION = 7
_SIMILAR, _NEGLIGIBLE_S = 2.0, 1e-10  # seconds for a value; a measurement cannot tell networks apart below that


def plan_key(facts: dict[str, Any]) -> str:
    """Return the name of the plan for these facts: the model's hops, the device, the ranks and the arguments."""
    text = json.dumps({"version": _VERSION, **facts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def structure_of(model: nn.Module) -> str:
    """Return a text that is equal for models that take equal time, on all ranks and in all runs."""
    modules = [f"{name} {type(one).__qualname__} {one}" for name, one in model.named_modules()]
    parameters = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in model.named_parameters()]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(modules + parameters))


@dataclass(frozen=True)
class Plan:
    """A choice, and the facts that are kept with it.

    Attributes:
        chosen: The choice of this rank, as :meth:`~.greedy.Halo.choice` describes it.
        facts: The facts, measurements and expected time of the choice, for JSON; equal on all ranks.
    """

    chosen: Tensor
    facts: dict[str, Any]


def save_plan(path: Path, rank: int, plan: Plan) -> None:
    """Write a rank's plan to ``path`` with suffixes; if that is not possible, log a warning and go on."""
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(Path(f"{path}.{rank}.npz")) as written, written.open("wb") as file:
            np.savez(file, bits=np.packbits(plan.chosen.numpy(), axis=1), num_rows=plan.chosen.size(1))
        with replacing(Path(f"{path}.json")) as written:  # by each rank, as hosts need not share a folder
            written.write_text(json.dumps(plan.facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("%s: cannot keep the plan for the next run: %s", path.parent, error.strerror or error)


def load_plan(
    path: Path | None, communicator: Communicator, num_hops: int, num_rows: int, value_s: float
) -> Plan | None:
    """Read this rank's plan, if all ranks have theirs. Every rank makes the call.

    Args:
        path: As in :func:`save_plan`; ``None`` if no plan is kept.
        communicator: The ranks.
        num_hops: Hops of the choice.
        num_rows: Rows that it is about.
        value_s: Seconds for a value on the network. A plan for a slower or faster network is not taken.
    """
    plan = None
    try:
        if path is not None:
            with np.load(f"{path}.{communicator.rank}.npz") as file:
                chosen = np.unpackbits(file["bits"], axis=1, count=num_rows).astype(bool)
                fits = (len(chosen), int(file["num_rows"])) == (num_hops, num_rows)
            facts = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
            if fits and _similar(facts["value_s"], value_s):
                plan = Plan(torch.from_numpy(chosen), facts)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:  # none yet, or half of one
        log.debug("no plan %s: %s: %s", path, type(error).__name__, error)
    everywhere = bool(communicator.gather([float(plan is not None)]).all())
    return plan if everywhere else None


def _similar(before: float, now: float) -> bool:
    """True if a network is as fast as it was, as far as a short measurement can tell."""
    return max(before, now) <= _SIMILAR * min(before, now) + _NEGLIGIBLE_S
