"""What a run with ``model_averaging`` may not have, or should know of: options that mean something else with parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pygdist.errors import InputError

__all__ = ["check_limits", "check_run", "say_what_is_sent"]


def check_run(trainer: pl.Trainer, world_size: int, schedules: Iterable[Any]) -> None:
    """Refuse what would train other models than it seems; the same on all ranks."""
    if not trainer.lightning_module.automatic_optimization:
        raise InputError(
            f"{type(trainer.lightning_module).__name__} steps its optimisers itself; strategy 'model_averaging' "
            "counts the steps that Lightning makes (automatic_optimization=True)"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise InputError(
                f"{type(callback).__name__} averages the steps of one model, and strategy 'model_averaging' has "
                "one for each part; leave one of them out"
            )
    num_parts = len(getattr(getattr(trainer, "datamodule", None), "part_weights", ()))
    if num_parts > world_size and any(config.interval == "step" for config in schedules):
        raise InputError(
            "a learning rate that changes with each step would be another for each part that a rank trains in "
            "turn; change it by epochs, or use a rank for each part"
        )
    counted = [f"max_steps={trainer.max_steps}"] if trainer.max_steps != -1 else []
    counted += [
        f"every_n_train_steps={every}"
        for callback in trainer.checkpoint_callbacks
        if (every := getattr(callback, "_every_n_train_steps", 0))
    ]
    if num_parts > world_size and counted and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"{', '.join(counted)}: {num_parts} parts on {world_size} ranks are trained in turn, so that an "
            "epoch has more steps than with a rank for each part; max_epochs and every_n_epochs mean the same with "
            "any number of ranks"
        )


def check_limits(trainer: pl.Trainer, num_parts: int, world_size: int) -> None:
    """Refuse to leave out the same parts in every epoch; the same on all ranks. A smoke run may."""
    steps, made = len(trainer.train_dataloader), trainer.num_training_batches  # type: ignore[arg-type]
    if num_parts > world_size and made < steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
        raise InputError(
            f"{name}={trainer.limit_train_batches}: {num_parts} parts on {world_size} ranks are trained "
            f"in turn, in {steps} steps of an epoch, and the first {made} would leave the same parts out of each; "
            "leave it out, or use a rank for each part (fast_dev_run for a smoke run)"
        )


def say_what_is_sent(trainer: pl.Trainer, sync_every: int, sync_unit: str) -> None:
    """Beside the averages that the run is asked for."""
    every = trainer.check_val_every_n_epoch or 1
    saving = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    if sync_unit == "epoch" and every % sync_every and trainer.enable_validation:
        rank_zero_info(
            f"models are averaged for each validation, every {every} epochs, too (sync_every={sync_every}); "
            f"check_val_every_n_epoch={sync_every} saves that"
        )
    elif sync_unit == "epoch" and every == 1 and any((one.every_n_epochs or 1) % sync_every for one in saving):
        rank_zero_info(
            f"models are averaged for each checkpoint, too (sync_every={sync_every}); "
            f"ModelCheckpoint(every_n_epochs={sync_every}) saves that"
        )
    if trainer.world_size > 1 and not all(one.save_weights_only for one in saving):
        rank_zero_info(
            "each checkpoint brings the optimisers' state of every part to rank 0 (checkpoint_bytes of "
            "ExchangeMonitor); ModelCheckpoint(every_n_epochs=...) saves some of that"
        )
