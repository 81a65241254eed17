"""Checks of the options of Lightning's trainer, which takes some numbers that make no sense and fails on others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pygdist.errors import InputError, is_first_rank
from pygdist.lightning.checks import LARGEST_RATE

log = logging.getLogger(__name__)

_LARGEST = 2**53  # counts are also computed with as floats
_COUNT, _FROM_ZERO, _OR_MINUS_ONE = (1, _LARGEST), (0, _LARGEST), (-1, _LARGEST)
_RANGES: dict[str, tuple[float, float]] = {
    "devices": _OR_MINUS_ONE,
    "num_nodes": _COUNT,
    "fast_dev_run": _FROM_ZERO,
    "max_epochs": _OR_MINUS_ONE,
    "min_epochs": _FROM_ZERO,
    "max_steps": _OR_MINUS_ONE,
    "min_steps": _FROM_ZERO,
    **{f"limit_{stage}_batches": _FROM_ZERO for stage in ("train", "val", "test", "predict")},
    "overfit_batches": _FROM_ZERO,
    "val_check_interval": _FROM_ZERO,
    "check_val_every_n_epoch": _COUNT,
    "num_sanity_val_steps": _OR_MINUS_ONE,
    "log_every_n_steps": _FROM_ZERO,
    "accumulate_grad_batches": _COUNT,
    "gradient_clip_val": _FROM_ZERO,
    "reload_dataloaders_every_n_epochs": _FROM_ZERO,
}


_LOOPS = re.compile(
    r"(\w*_)?(layers|blocks|depth|hops|convs|stages|steps|iterations)|K"
)  # a model goes through so many
_MOST_LOOPS = 10_000


def check_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options outside of the trainer that are out of range, or that another one leaves without effect.

    Args:
        config: The configuration.
        defaults: Defaults of ``model.lr`` and ``model.weight_decay``.

    Raises:
        InputError: Names the option.
    """
    for section in ("trainer", "data", "checkpoint", "exchange", "predictions"):
        if not hasattr(value := config.get(section, {}), "items"):
            raise InputError(f"--{section}: expected options and their values, got {str(value)[:60]!r}")
    seed = config.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 1 << 32:
        raise InputError(f"--seed_everything is {str(seed)[:40]}, expected 0 to 2**32 - 1")
    for name in ("optimizer", "lr_scheduler"):
        value = config.get(name)
        if value is not None and "init_args" in value and not value.get("class_path"):
            raise InputError(f"--{name}: init_args are given without a class_path")
    for name in ("optimizer", "lr_scheduler"):
        for option, number in _numbers(config.get(name), name):
            if not abs(number) <= LARGEST_RATE:
                raise InputError(f"--{option} is {str(number)[:40]}, expected at most {LARGEST_RATE:g}")
    optimizer = config.get("optimizer")
    if config.get("lr_scheduler") is not None and optimizer is None:
        raise InputError("--lr_scheduler has no effect without --optimizer; give one, such as --optimizer=Adam")
    for name, default in defaults.items():
        if optimizer is not None and config.get(name) not in (None, default):
            own = name.rpartition(".")[2]
            raise InputError(f"--{name} has no effect with --optimizer; set --optimizer.{own} in its place")
    for name, value in config.get("model", {}).items():
        if isinstance(value, int) and value > _MOST_LOOPS and _LOOPS.fullmatch(name.rpartition(".")[2]):
            raise InputError(f"--model.{name} is {str(value)[:40]}, expected at most {_MOST_LOOPS:,}")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers among the arguments of a class, with the names of their options."""
    if hasattr(value, "items"):  # a mapping, or a namespace of jsonargparse, which is none
        for key, one in value.items():
            yield from _numbers(one, f"{name}.{key}".replace(".init_args", ""))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one, name)
    elif isinstance(value, int | float):
        yield name, value


def check_trainer(config: Mapping[str, Any]) -> None:
    """Refuse options of the trainer that are out of range, of a wrong type, or that do not go together.

    Raises:
        InputError: Names the option.
    """
    for name, (least, most) in _RANGES.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not least <= value <= most or (name == "devices" and value == 0):
            raise InputError(f"--trainer.{name} is {str(value)[:40]}, expected a finite number from {least}")
    _check_devices(config.get("devices"))
    if config.get("overfit_batches") and config.get("limit_train_batches") not in (None, 1.0):
        raise InputError("--trainer.limit_train_batches has no effect with --trainer.overfit_batches; leave one out")
    if config.get("gradient_clip_algorithm") is not None and config.get("gradient_clip_val") is None:
        raise InputError("--trainer.gradient_clip_algorithm has no effect without --trainer.gradient_clip_val")
    for unit in ("epochs", "steps"):
        fewest, limit = config.get(f"min_{unit}"), config.get(f"max_{unit}")
        if isinstance(fewest, int) and isinstance(limit, int) and 0 <= limit < fewest:
            raise InputError(f"--trainer.min_{unit} is {fewest}, but --trainer.max_{unit} is {limit}; lower the first")


def accelerator_of(config: Mapping[str, Any], num_nodes: int, num_gpus: int) -> Any:
    """Return the accelerator that Lightning is told: CPUs, where ``auto`` finds fewer GPUs than there are processes.

    Hosts may have different numbers of GPUs, so with several of them Lightning decides, and refuses the host.

    Args:
        config: Options of the trainer.
        num_nodes: Hosts.
        num_gpus: GPUs of this host.

    Raises:
        InputError: If all GPUs are asked for, and there are none.
    """
    devices = str(config.get("devices"))
    if devices == "-1" and (config.get("accelerator") == "cpu" or not num_gpus):
        raise InputError("--trainer.devices is -1, which means all GPUs; on CPUs give the number of processes")
    if config.get("accelerator") != "auto" or num_nodes != 1 or not devices.isdecimal():
        return config.get("accelerator")
    if not 0 < num_gpus < int(devices):
        return "auto"
    if is_first_rank():
        log.warning(
            "--trainer.devices=%s, but this host has %d GPU%s: training on CPUs; for GPUs set --trainer.devices=%d",
            devices, num_gpus, "s" * (num_gpus > 1), num_gpus,
        )  # fmt: skip
    return "cpu"


def _check_devices(devices: Any) -> None:
    """Refuse devices that are neither a number, ``auto``, nor numbers in a list or, separated by commas, a text."""
    numbers = devices if isinstance(devices, list) else str(devices).split(",")
    texts = [str(number).strip() for number in numbers if str(number).strip()]
    fit = [text.removeprefix("-").isdecimal() and len(text) < 10 for text in texts]
    if texts in (["0"], ["-0"]) and not isinstance(devices, list):
        raise InputError("--trainer.devices is 0, expected at least 1")
    if devices not in (None, "auto") and not (fit and all(fit)):
        raise InputError(f"--trainer.devices: {str(devices)[:40]!r}, expected a number of devices, such as 2, or auto")
