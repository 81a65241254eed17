"""``model_averaging``: ranks train local models and average them at intervals (CATGNN, Sec. 3.3).

No gradient is exchanged. Between two averages each part has a model and optimiser states of its own
(:mod:`~pygdist.lightning.part_models`). Scripts, callbacks and checkpoints see one model, the average: in validation,
in checkpoints and after the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias, get_args

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.lightning import optimizer_states
from pygdist.lightning.checks import check_averaging, check_limits, say_what_is_sent
from pygdist.lightning.optimizer_states import State, by_parameter, copied, gathered
from pygdist.lightning.part_models import OptimizerState, PartModels
from pygdist.lightning.strategies import GraphDDPStrategy

SyncUnit: TypeAlias = Literal["epoch", "step"]

_SAVED = "model_averaging"  # in a checkpoint

FOR_VALIDATION, FOR_CHECKPOINT = "models for validation", "models for a checkpoint"
"""Labels of the traffic of averages that training does not continue from."""


class ModelAveragingStrategy(GraphDDPStrategy):
    """Averages models over parts, weighted by their training nodes (CATGNN, Sec. 3.3); no gradient is exchanged.

    ``--trainer.strategy=model_averaging`` averages after every epoch. Parameters and buffers (statistics of norms) are
    averaged. With plain SGD, no class weights, one step between averages, and parts that hold all rows that the
    model reads, the result equals that of averaged gradients.

    A rank may have several parts (``GraphDataModule(num_parts=...)``). The result is the same as with one rank for each
    part: the models of all parts start from the same average, and all are averaged. A rank trains all its parts in
    every epoch, whatever ``sync_every`` is, so validation, checkpoints and schedules by epochs mean the same on any
    number of ranks. Dropout is seeded by part and epoch, whichever rank has the part.

    A validation or checkpoint between two averages makes an extra average; a validation and a checkpoint at the same
    time share one. Training then continues from the parts' own models. ``check_val_every_n_epoch=sync_every`` avoids
    the extra average. A run that resumes between two averages starts from the extra average. A run that resumes within
    an epoch goes on with the remaining parts or mini-batches.

    Args:
        sync_every: Number of epochs or steps between two averages.
        sync_unit: The unit of ``sync_every``, ``epoch`` or ``step``.
        optimizer_state: Treatment of the optimisers' state (Adam's moments) when models are averaged. ``local``: each
            part keeps its own state; ``average``: the state is averaged like the model; ``reset``: the state starts
            afresh.
        kwargs: As for :class:`~pygdist.lightning.GraphDDPStrategy`.

    Raises:
        InputError: If ``sync_every`` is below 1, or ``sync_unit`` or ``optimizer_state`` has another value.

    Attributes:
        checkpoint_bytes: Bytes that all ranks together have sent to rank 0 for checkpoints since the fit began: the
            optimisers' state of each part.

    Example:
        >>> trainer = pl.Trainer(devices=4, strategy=ModelAveragingStrategy(sync_every=10), max_epochs=200)
        >>> trainer.fit(NodeClassifier(model, backend="replica"), datamodule=data)
    """

    strategy_name = "model_averaging"

    def __init__(
        self,
        *,
        sync_every: int = 1,
        sync_unit: SyncUnit = "epoch",
        optimizer_state: OptimizerState = "local",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 1 <= sync_every < 2**63:
            raise InputError(f"sync_every is {sync_every}, expected at least 1, and less than 2**63")
        if sync_unit not in get_args(SyncUnit):
            raise InputError(f"sync_unit is {sync_unit!r}, expected {' or '.join(get_args(SyncUnit))}")
        if optimizer_state not in get_args(OptimizerState):
            raise InputError(
                f"optimizer_state is {optimizer_state!r}, expected {' or '.join(get_args(OptimizerState))}"
            )
        self.sync_every, self.sync_unit, self.optimizer_state_policy = sync_every, sync_unit, optimizer_state
        self._trainer: Any = None  # setup() has it; Lightning's types lack some of its attributes
        self._average_first, self._random = _AverageFirst(self), ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._num_parts = 1
        self._in_turns = False  # a rank trains whole parts one after another: an epoch is one step of each
        self._models: PartModels | None = None
        self._idle = False
        self._steps = 0
        self._equal = True  # no step was made since the last average
        self._shown_average: list[Tensor] | None = None  # made for a validation or a checkpoint; until the next step
        self._hidden: list[Tensor] | None = None  # the module's own model while the shown average is in the module
        self._restored: Mapping[str, Any] | None = None
        self._ended = False  # training ended without error: all ranks are there, and their models are equal
        self._afterwards: Communicator | None = None  # of all ranks, once the run's own is closed
        self._seed, self._drawn_for = 0, (-1, -1)  # the run's seed; the part and epoch that dropout is seeded for
        self.checkpoint_bytes = 0

    @override
    def loss_scale(self, num_labelled: float, num_here: float) -> float:
        """Return the factor on the summed loss of a step with which the loss is the mean over the step's nodes."""
        return 1.0 / (num_here or 1.0)

    @property
    @override
    def sends_gradients(self) -> bool:
        return False

    # -- a run ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting or not self._ended:  # after a fit and a test of its model a checkpoint may still be saved
            self._forget()
        self._trainer = trainer
        super().setup(trainer)
        if fitting:
            check_averaging(trainer, self.world_size, self.lr_scheduler_configs)
            say_what_is_sent(trainer, self.sync_every, self.sync_unit)
            if self._average_first not in self._trainer.callbacks:
                self._trainer.callbacks.insert(0, self._average_first)

    @override
    def configure_ddp(self) -> None:
        """Copy the model of rank 0 to all ranks. DDP does not wrap the model, as gradients stay on their rank."""
        assert self.model is not None
        if self.world_size > 1:
            for value in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(value.detach(), src=0)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        module = getattr(self._trainer, "datamodule", None)
        weights = getattr(module, "part_weights", None) or [1] * self.world_size
        if not any(weights):  # of pairs of nodes, on a graph without labels
            weights = [1] * len(weights)
        self._num_parts, total = len(weights), sum(weights)
        own_parts = range(self.global_rank, self._num_parts, self.world_size)
        shares = {part: weights[part] / total for part in own_parts if weights[part]}
        in_batches = getattr(module, "batches", None) is not None
        self._in_turns = self._num_parts > self.world_size and not in_batches
        if self._num_parts > self.world_size and self.sync_unit == "step" and in_batches:  # on all ranks
            raise InputError(
                f"sync_unit=step: {self._num_parts} parts on {self.world_size} ranks are trained in turn, each for a "
                "whole epoch of mini-batches; set sync_unit=epoch, or use a rank for each part"
            )
        check_limits(self._trainer, self._num_parts, self.world_size)
        assert self.lightning_module is not None
        states = {part: self._first_states(part) for part in shares}
        self._restored = None  # free the states of all parts
        self._models = PartModels(self.lightning_module, self.optimizers, shares, states)
        high, low = divmod(torch.initial_seed(), 1 << 32)  # a float64 rounds larger numbers
        # the seed of rank 0, as two numbers
        high, low = map(int, self.communicator.gather([float(high), float(low)])[0].tolist())
        self._seed = (high << 32) + low
        devices = [self.root_device] if self.root_device.type == "cuda" else []
        self._random.enter_context(torch.random.fork_rng(devices))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        part = getattr(batch, "part", self.global_rank)
        self._idle = part is None
        if part is not None:
            self._part_models.enter(part)
            self._draw_for(part, self._trainer.current_epoch)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        # a rank that has no batch left takes part in averages, but changes nothing
        out = closure() if self._idle else super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        self._equal, self._shown_average = False, None
        if self._due():
            self._average()
        return out

    def finish(self) -> None:
        """Replace the models of all parts by their average, the result of the run; all ranks make the call."""
        if not self._equal:
            self._average()
        self._random.close()
        self._ended = True

    @override
    def teardown(self) -> None:
        super().teardown()
        self._random.close()  # also after a run that failed
        if self._trainer is not None and self._average_first in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._average_first)
        # Lightning has moved the module and the states in the optimisers to the CPU
        if self.root_device.type != "cpu" and self._models is not None:
            self._models.follow_parameters()

    def _due(self) -> bool:
        if self.sync_unit == "step" and not self._in_turns:
            return self._steps % self.sync_every == 0
        epochs = self._trainer.current_epoch + 1
        on_time = epochs % self.sync_every == 0 or epochs == self._trainer.max_epochs
        return bool(self._trainer.is_last_batch and on_time)

    def _draw_for(self, part: int, epoch: int) -> None:
        """Seed dropout by part and epoch, so that it does not depend on which rank has the part."""
        if (part, epoch) != self._drawn_for:
            self._drawn_for = part, epoch
            seed = np.random.SeedSequence([self._seed % 2**64, part, epoch])
            torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))

    def _first_states(self, part: int) -> list[State]:
        """Return the optimiser states with which a part begins: those of a checkpoint, or else the optimisers' own."""
        saved = self._restored or {}
        if saved.get("num_parts") == self._num_parts and str(part) in saved["states"]:
            return list(map(by_parameter, self.optimizers, saved["states"][str(part)]))
        return [copied(optimizer) for optimizer in self.optimizers]

    # -- averages ---------------------------------------------------------------------------------------------------

    @property
    def _part_models(self) -> PartModels:
        assert self._models is not None, "on_train_start() makes it"
        return self._models

    def _average(self) -> None:
        """Replace the models of all parts by their average; all ranks make the call."""
        averaged = self._part_models.mean(self.communicator, "models")
        self._part_models.replace_all(averaged, self.optimizer_state_policy, self.communicator)
        self._equal, self._shown_average = True, None

    def _show(self, label: str) -> None:
        """Put the average of all models into the module until :meth:`_hide`; all ranks make the call."""
        if not self._equal and self._hidden is None:
            if self._shown_average is None:
                self._shown_average = self._part_models.mean(self.communicator, label)
            self._hidden = self._part_models.copies()
            self._part_models.assign(self._shown_average)

    def _hide(self) -> None:
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            self._part_models.assign(hidden)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._show(FOR_VALIDATION)

    @override
    def on_validation_end(self) -> None:
        self._hide()
        super().on_validation_end()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the averaged model; Lightning makes the call on all ranks."""
        if self._equal or self._hidden is not None:
            return super().lightning_module_state_dict()
        self._show(FOR_CHECKPOINT)
        try:
            return copy.deepcopy(super().lightning_module_state_dict())
        finally:
            self._hide()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Add the optimisers' state of every part; all ranks make the call, also after a fit."""
        if checkpoint.get("optimizer_states") and self._num_parts > 1:
            states, num_bytes = gathered(self.optimizers, self._part_models.states, self._reachable())
            self.checkpoint_bytes += num_bytes
            if self.is_global_zero:
                checkpoint[_SAVED] = {"num_parts": self._num_parts, "states": states}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _reachable(self) -> Communicator:
        """Return the ranks from which a checkpoint can be gathered: all, or this one alone after a run that failed."""
        if self._communicator is not None:
            return self._communicator
        if self.world_size == 1 or not dist.is_initialized():
            return Communicator()
        if self._ended and not self._trainer.interrupted:
            # all ranks are there: Lightning waits for them after the file
            if self._afterwards is None or self._afterwards.group is not dist.group.WORLD:  # which a script may renew
                self._afterwards = Communicator(dist.group.WORLD)
            return self._afterwards
        rank_zero_warn(
            "the run has failed or was interrupted: the checkpoint has the optimisers' state of the parts of rank 0 "
            "alone; resume from an earlier checkpoint to have that of all parts"
        )
        return Communicator()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        saved = self._restored = checkpoint.get(_SAVED)
        weights = getattr(getattr(self._trainer, "datamodule", None), "part_weights", None)
        if saved is None or weights is None:
            return
        for part, states in saved["states"].items():
            optimizer_states.check(self.optimizers, states, f"states of part {part}")
        if saved["num_parts"] != len(weights):
            rank_zero_info(
                f"the checkpoint has optimiser states of {saved['num_parts']} parts, but there are {len(weights)} now: "
                "all begin with the same one of these states"
            )
            return
        lacking = [str(part) for part, weight in enumerate(weights) if weight and str(part) not in saved["states"]]
        if lacking:
            rank_zero_warn(
                f"the checkpoint lacks the optimisers' state of the parts {', '.join(lacking)}, as the run had failed "
                "or was interrupted: these begin with that of a part of rank 0; an earlier checkpoint may have all"
            )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for suffix, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
            description = f"Models averaged over the parts of one graph, processes by {method}"
            name = f"{cls.strategy_name}{suffix}"
            strategy_registry.register(name, cls, description=description, start_method=method)


class _AverageFirst(pl.Callback):
    """Averages before other callbacks act on the end of training; Lightning calls its strategy after them."""

    def __init__(self, strategy: ModelAveragingStrategy) -> None:
        self._strategy = strategy

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy.finish()


if ModelAveragingStrategy.strategy_name not in StrategyRegistry:
    ModelAveragingStrategy.register_strategies(StrategyRegistry)
