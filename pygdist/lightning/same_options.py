"""Options of a trainer, its backend and its optimizers, by name: ranks compare them before they train.

A machine with another learning rate would train on, and its model would drift away from those of the others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from pygdist.backends import Backend
from pygdist.routing.agreement import options_of_backend

_OF_TRAINER = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "check_val_every_n_epoch", "val_check_interval",
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches",
    "fast_dev_run", "num_sanity_val_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "precision",
)  # fmt: skip
_MOST_NUMBERS = 100  # of a tensor that is an option, such as a learning rate


def options_of_run(trainer: pl.Trainer | None, module: pl.LightningModule | None) -> dict[str, object]:
    """Return the options of the trainer that decide what is trained and evaluated, and those of the backend."""
    options = {name: getattr(trainer, name, None) for name in _OF_TRAINER} if trainer is not None else {}
    backend = getattr(module, "backend", None)
    return options | (options_of_backend(backend) if isinstance(backend, Backend) else {})


def options_of_optimizers(optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> dict[str, object]:
    """Return the options of optimizers, by group of parameters, and of the schedulers of learning rates."""
    options: dict[str, object] = {}
    for number, optimizer in enumerate(optimizers):
        options[f"optimizer {number}"] = type(optimizer).__name__
        for at, group in enumerate(optimizer.param_groups):
            options |= _plain(f"of optimizer {number}, group {at}", {**group, "params": None})
            options[f"number of parameters of optimizer {number}, group {at}"] = len(group["params"])
    for number, scheduler in enumerate(schedulers):
        options[f"scheduler {number}"] = type(scheduler).__name__
        options |= _plain(f"of scheduler {number}", scheduler.state_dict())
    return options


def _plain(where: str, values: Mapping[str, Any]) -> dict[str, object]:
    """Return the values that JSON can express; tensors count as their numbers."""
    plain: dict[str, object] = {}
    for name, one in values.items():
        with contextlib.suppress(TypeError, ValueError):
            plain[f"{name} {where}"] = json.dumps(one, sort_keys=True, default=_numbers)
    return plain


def _numbers(value: object) -> object:
    if isinstance(value, Tensor) and value.numel() <= _MOST_NUMBERS:
        return value.tolist()
    raise TypeError
