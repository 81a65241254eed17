"""Runs that would train something else than they seem to are refused; all functions decide alike on all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pygdist.backends import Backend
from pygdist.backends.base import names_of
from pygdist.errors import InputError
from pygdist.graph.sources.whole import OF_NODES
from pygdist.nn.inputs import names_of_node_inputs

# defaults of options that say how a store is made
_OF_GRAPHS: dict[str, Any] = {"dataset": "sbm", "dataset_args": {}, "partitioner": None, "partitioner_args": {}}
LARGEST_RATE = 1e30  # of an optimiser, which divides its options by small numbers; float32 ends at 3.4e38
_LONGEST_NAME = 200  # Linux takes 255 bytes, and half-written files have longer names
RESERVE = 2 / 3  # of a rank's memory, by default left to training


def check_accumulation(trainer: pl.Trainer, *, several_steps: bool) -> None:
    """Refuse to accumulate gradients; an epoch has ``several_steps`` with mini-batches or several parts on a rank."""
    numbers = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            numbers += callback.scheduling.values()
    if set(numbers) == {1}:
        return
    if several_steps:
        raise InputError(
            f"accumulate_grad_batches={max(numbers)}: consecutive steps may train different parts, each with a model "
            "of its own, or none while other ranks have more; Lightning would add up their gradients all the same. "
            "Leave it at 1; for fewer and larger steps make the mini-batches larger"
        )
    raise InputError(
        f"accumulate_grad_batches={max(numbers)}: a full-graph epoch is one step, so there is nothing to accumulate, "
        "and Lightning would only divide the loss; leave it at 1"
    )


def check_device(device: torch.device) -> None:
    """Refuse devices other than CPUs and GPUs of CUDA (or ROCm, which torch calls so too)."""
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"trainer.accelerator: Lightning chose {device.type}, for which pygdist has no kernels; set "
            "accelerator=cpu (--trainer.accelerator=cpu)"
        )


def check_precision(precision: Precision, backend: Backend) -> None:
    """Refuse a loss whose scale changes from step to step where gradients of earlier steps are added."""
    if backend.abilities.late_gradients and getattr(precision, "scaler", None) is not None:
        raise InputError(
            f"trainer.precision={precision.precision}: the loss is scaled by a number that changes, but backend "
            f"'{backend.name}' adds gradients of earlier steps; use bf16-mixed, or an option without such gradients "
            "(gradients='local' of delayed, pipeline=1 of pushpull)"
        )


def check_lag(trainer: pl.Trainer, backend: Backend) -> None:
    """Refuse to stop, save or validate within an epoch where something is on its way between two steps."""
    if not backend.abilities.lag or trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    within = [f"max_steps={trainer.max_steps}"] if trainer.max_steps != -1 else []
    if trainer.val_check_interval not in (None, 1.0):
        within.append(f"val_check_interval={trainer.val_check_interval}")
    for callback in trainer.checkpoint_callbacks:
        if steps := getattr(callback, "_every_n_train_steps", 0):
            within.append(f"every_n_train_steps={steps}")
        if getattr(callback, "_train_time_interval", None) is not None:
            within.append("train_time_interval")
    if within:
        raise InputError(
            f"{', '.join(within)}: with pipeline=3 batches are on their way between two steps of an epoch; use "
            "max_epochs, check_val_every_n_epoch and every_n_epochs, or pipeline=1"
        )


def check_lagged_steps(trainer: pl.Trainer, lag: int) -> None:
    """Refuse a limit with which an epoch ends before the first batch is trained, ``lag`` steps later."""
    made = trainer.num_training_batches
    if 0 < made <= lag and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
        raise InputError(
            f"{name}={trainer.limit_train_batches}: with pipeline=3 a batch is trained {lag} steps after it is drawn, "
            f"so an epoch of {made} steps trains nothing; allow at least {lag + 1} steps, or use pipeline=1"
        )


def check_closures(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimisers that decide by the loss of trial steps, of which each rank has its share alone."""
    for one in optimizers:
        if isinstance(one, torch.optim.LBFGS):
            raise InputError(
                f"optimizer {type(one).__name__} decides by the loss of trial steps, but a rank knows its own share of "
                "the loss alone, so ranks would take different steps; use another optimiser, such as Adam, or one "
                "process"
            )


def check_strategy(
    strategy: str, backend: Backend, model: nn.Module, *, averages_models: bool, num_parts: int, world_size: int
) -> None:
    """Refuse a strategy that does not fit the backend, the norms of the model or the number of all ranks' parts.

    If the strategy ``averages_models``, each part trains one; otherwise it averages gradients.
    """
    trains_parts = backend.abilities.trains_parts
    if averages_models and not trains_parts and world_size > 1:
        raise InputError(
            f"strategy '{strategy}' trains each part by itself, but backend '{backend.name}' lets a part read rows "
            f"that other ranks' models made; use backend {names_of(lambda abilities: abilities.trains_parts)}"
        )
    norms = {type(one).__name__ for one in model.modules() if getattr(one, "running_mean", None) is not None}
    if norms and trains_parts and not averages_models and world_size > 1:
        raise InputError(
            f"{', '.join(sorted(norms))}: with backend '{backend.name}' a norm takes the statistics of a part, and "
            f"'{strategy}' averages gradients alone; use strategy model_averaging"
        )
    if num_parts > world_size and not averages_models:
        raise InputError(
            f"{num_parts} parts on {world_size} ranks are models that must be averaged: use strategy "
            "'model_averaging', or one part for each rank"
        )


def check_graph_options(
    preprocessing: Mapping[str, Any],
    *,
    store: str | Path | None,
    num_parts: int | str | None,
    memory_gib: float | None,
    reserve: float,
    batches: Any,
    num_workers: int,
    batch_seed: int,
    edge_split: Any = None,
) -> None:
    """Refuse options of :class:`~pygdist.lightning.GraphDataModule` that are out of range, or would have no effect."""
    if isinstance(num_parts, str) and num_parts != "auto":
        raise InputError(f"num_parts is {num_parts!r}, expected a number or auto")
    if isinstance(num_parts, int) and num_parts < 1:
        raise InputError(f"num_parts is {num_parts}, expected at least 1")
    if memory_gib is not None and not 0 < memory_gib < 1 << 40:
        raise InputError(f"memory_gib is {memory_gib}, expected a finite number of GiB above 0, below 2**40")
    if not 0 <= reserve < 1:
        raise InputError(f"reserve is {reserve}, expected a share from 0 to below 1")
    if not 0 <= preprocessing["split_seed"] < 1 << 64:
        raise InputError(f"split_seed is {preprocessing['split_seed']}, expected 0 to 2**64 - 1")
    if not 0 <= batch_seed < 1 << 63:
        raise InputError(f"batch_seed is {batch_seed}, expected 0 to 2**63 - 1")
    if num_workers < 0:
        raise InputError(f"num_workers is {num_workers}, expected at least 0")
    if memory_gib is not None and num_parts != "auto":
        raise InputError(f"memory_gib={memory_gib} is for num_parts=auto; num_parts is {num_parts}")
    if reserve != RESERVE and num_parts != "auto":
        raise InputError(f"reserve={reserve} is for num_parts=auto; num_parts is {num_parts}")
    if store is not None and num_parts == "auto":
        raise InputError(f"num_parts=auto: {store} is partitioned already; leave num_parts out")
    for name, value in preprocessing.items():
        if store is not None and value not in (None, False) and name != "split_seed":  # which also draws edges
            raise InputError(f"{name}: {store} is partitioned already; give it to pygdist partition instead")
    if store is not None and preprocessing["split_seed"] and edge_split is None:
        raise InputError(
            f"split_seed: {store} is split already; give it to pygdist partition, or edge_split to this run"
        )
    if num_workers and batches is None:  # a seed that is not used does no harm: scripts pass theirs to all
        raise InputError(f"num_workers={num_workers}: workers draw mini-batches; give batches, or leave it out")


def left_unused(options: Mapping[str, Any]) -> list[str]:
    """Return a note on options of the data module that its ``store`` leaves unused, if there are any."""
    names = [name for name, default in _OF_GRAPHS.items() if options[name] != default]
    return [f"{options['store']} is partitioned already; not used: {', '.join(names)}"] if names else []


def expanded(cache_dir: str | Path) -> Path:
    """Return the folder of the cache, in which ``~`` stands for the user's own; some users of containers have none."""
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"cache_dir: {cache_dir} is in the home folder, but there is none; set HOME, or cache_dir"
        ) from error


def check_model(model: nn.Module, name: str = "model") -> None:
    """Refuse a module without a ``forward``, with fewer than one layer, or with a dropout that is no probability."""
    if getattr(type(model), "forward", None) is nn.Module.forward and "forward" not in vars(model):
        raise InputError(f"{name}: {type(model).__name__} has no forward(); name the class of a whole model")
    for path, module in model.named_modules():
        num_layers = getattr(module, "num_layers", None)
        if isinstance(num_layers, int) and num_layers < 1:
            where = f"{path} ({type(module).__name__})" if path else type(module).__name__
            raise InputError(f"{name}: num_layers of {where} is {num_layers}, expected at least 1")
        dropout = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", None)
        if isinstance(dropout, float) and not 0 <= dropout <= 1:
            raise InputError(f"{name}: dropout of {path or type(module).__name__} is {dropout}, expected 0 to 1")


def check_node_inputs(names: list[str], backend: Backend) -> None:
    """Refuse inputs of nodes besides ``x`` on a backend that holds or samples the features of other parts' nodes."""
    if names and (backend.abilities.trains_parts or backend.abilities.mini_batches):
        able = names_of(lambda abilities: not (abilities.trains_parts or abilities.mini_batches))
        raise InputError(
            f"model: its forward takes {', '.join(names)}, but backend '{backend.name}' brings x alone for the nodes "
            f"of other parts; make them columns of x, or use backend {able}"
        )


def check_left_out(model: nn.Module, meta: Mapping[str, Any], store: Path) -> list[str]:
    """Refuse a store without a tensor of nodes that the graph had and the model takes: the model would run without.

    Returns:
        A note if the model may find such a tensor missing in its data (``model(data)``).
    """
    left_out, taken = meta.get("left_out", []), names_of_node_inputs(model)
    if taken is None and left_out:
        return [
            f"{store}: the parts lack {', '.join(left_out)}, tensors of nodes that the graph has; if the model reads "
            f"them of its data, write the parts again with pygdist partition --node_inputs=[{','.join(left_out)}]"
        ]
    if missing := [name for name in taken or () if name in left_out]:
        needed = [name for name in taken or () if name in left_out or f"{OF_NODES}{name}" in meta["dtypes"]]
        raise InputError(
            f"{store}: the parts lack {', '.join(missing)}, which the graph has and the model's forward takes; write "
            f"them again with pygdist partition --node_inputs=[{','.join(needed)}]"
        )
    return []


def check_sizes(model: nn.Module) -> None:
    """Refuse weights without numbers, from a width of 0; the model would train and learn nothing."""
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.dim() > 1 and parameter.numel() == 0:
            raise InputError(
                f"model: '{name}' has shape {tuple(parameter.shape)}: a width is 0; set the model's widths (such as "
                "hidden_channels, out_channels) to at least 1"
            )


def overflow_in(optimizers: Iterable[Optimizer]) -> str:
    """Name the largest option of optimisers, after torch has refused one as too large for the parameters' type."""
    options = [
        (abs(value), f"{name} of {type(optimizer).__name__} is {value:g}")
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, int | float)
    ]
    largest = max(options, default=(0.0, "an option of the optimiser"))[1]
    return f"{largest}, too large for a step with the parameters' type; lower it (or what a scheduler makes of it)"


def read_only_folder(trainer: pl.Trainer) -> str | None:
    """Say which folder a run would write into and cannot; ``None`` if it can. Lightning finds out on one rank alone."""
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    checkpoints = trainer.checkpoint_callbacks if trainer.state.fn == TrainerFn.FITTING else []
    folders = [getattr(one, "dirpath", None) or trainer.default_root_dir for one in checkpoints]
    folders += [one.save_dir for one in trainer.loggers if one.save_dir is not None]
    for folder in folders:
        if "://" in str(folder):
            continue
        there = next(one for one in (Path(folder).absolute(), *Path(folder).absolute().parents) if one.exists())
        if not os.access(there, os.W_OK):
            return (
                f"{there}: cannot be written to, but logs and checkpoints go there; set default_root_dir of the "
                "trainer to another folder, or logger=False and enable_checkpointing=False"
            )
    return None


def unusable_name(trainer: pl.Trainer) -> str | None:
    """Say which pattern makes no names for checkpoints; ``None`` if all do. Lightning tries them in mid-run."""
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    for callback in trainer.checkpoint_callbacks:
        pattern = getattr(callback, "filename", None)
        if not isinstance(callback, ModelCheckpoint) or pattern is None:
            continue
        numbers = {name: torch.tensor(0.5) for name in re.findall(r"\{(.*?)[:}]", pattern)}
        numbers |= dict.fromkeys(("epoch", "step"), torch.tensor(0))
        try:
            name = os.path.basename(callback.format_checkpoint_name(numbers))
            problem = "too long, or with a character 0" if "\0" in name or len(name) > _LONGEST_NAME else ""
        except Exception as error:  # of any kind, as a pattern reaches into objects
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return (
                f"{type(callback).__name__}: filename (--checkpoint.filename) is {pattern[:80]!r}, which makes no "
                f"name of a file ({problem}); an example is '{{epoch}}-{{val_loss:.2f}}'"
            )
    return None


def check_averaging(trainer: pl.Trainer, world_size: int, schedules: Iterable[Any]) -> None:
    """Refuse options of a fit that mean something else where each part has a model; warn of those that may."""
    if not trainer.lightning_module.automatic_optimization:
        raise InputError(
            f"{type(trainer.lightning_module).__name__} steps its optimisers itself, but strategy 'model_averaging' "
            "counts the steps that Lightning makes; set automatic_optimization=True"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise InputError(
                f"{type(callback).__name__} averages the steps of one model, but strategy 'model_averaging' has one "
                "for each part; leave one of them out"
            )
    num_parts = len(getattr(getattr(trainer, "datamodule", None), "part_weights", ()))
    if num_parts > world_size and any(config.interval == "step" for config in schedules):
        raise InputError(
            "a learning rate that changes with each step would differ between the parts that a rank trains in turn; "
            "change it by epochs, or use a rank for each part"
        )
    counted = [f"max_steps={trainer.max_steps}"] if trainer.max_steps != -1 else []
    intervals = [getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks]
    counted += [f"every_n_train_steps={steps}" for steps in intervals if steps]
    if num_parts > world_size and counted and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"{', '.join(counted)}: {num_parts} parts on {world_size} ranks are trained in turn, so an epoch has more "
            "steps than with a rank for each part; max_epochs and every_n_epochs mean the same with any number of ranks"
        )


def check_limits(trainer: pl.Trainer, num_parts: int, world_size: int) -> None:
    """Refuse a limit that leaves out the same parts in every epoch. A smoke run may have one."""
    steps, made = len(trainer.train_dataloader), trainer.num_training_batches  # type: ignore[arg-type]
    if num_parts > world_size and made < steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]
        raise InputError(
            f"{name}={trainer.limit_train_batches}: {num_parts} parts on {world_size} ranks are trained in turn, in "
            f"{steps} steps of an epoch, and the first {made} would leave out the same parts in every epoch; leave it "
            "out, or use a rank for each part (fast_dev_run for a smoke run)"
        )


def say_what_is_sent(trainer: pl.Trainer, sync_every: int, sync_unit: str) -> None:
    """Log what travels besides the averages that ``sync_every`` asks for, and which option saves it."""
    epochs = trainer.check_val_every_n_epoch or 1
    saving = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    if sync_unit == "epoch" and epochs % sync_every and trainer.enable_validation:
        rank_zero_info(
            f"models are also averaged for each validation, every {epochs} epochs (sync_every={sync_every}); "
            f"check_val_every_n_epoch={sync_every} saves that"
        )
    elif sync_unit == "epoch" and epochs == 1 and any((one.every_n_epochs or 1) % sync_every for one in saving):
        rank_zero_info(
            f"models are also averaged for each checkpoint (sync_every={sync_every}); "
            f"ModelCheckpoint(every_n_epochs={sync_every}) saves that"
        )
    if trainer.world_size > 1 and not all(one.save_weights_only for one in saving):
        rank_zero_info(
            "each checkpoint brings the optimisers' state of every part to rank 0 (checkpoint_bytes of "
            "ExchangeMonitor); ModelCheckpoint(every_n_epochs=...) saves some of that"
        )


def check_splits(module: object, split: object, edge_split: object) -> None:
    """Refuse edges that are held out for a module that learns nodes, and a split of nodes for edges."""
    learns_edges = getattr(module, "learns_edges", None)
    if learns_edges and split is not None:
        raise InputError(
            f"split: {type(module).__name__} learns edges and uses no split of nodes; leave split out, or hold out "
            "edges with edge_split"
        )
    if edge_split is not None and learns_edges is False:
        raise InputError(
            f"edge_split: edges are held out for a LinkPredictor (--task=links), but {type(module).__name__} learns "
            f"{'numbers' if getattr(module, 'float_labels', False) else 'the classes'} of nodes; leave edge_split out"
        )
