"""``model_averaging``: ranks train on their own and average their models now and then (CATGNN, Sec. 3.3).

No gradient is exchanged. Between two averages each part has a model and an optimiser state of its own; a rank with
several parts holds them all, and puts those of the part that it trains into the module. So a script, a callback or a
checkpoint sees one model, which is the averaged one wherever it is validated, saved or left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from pygdist.lightning.averaging_checks import check_limits, check_run, say_what_is_sent
from pygdist.lightning.optimizer_states import average, by_number, by_parameter, copied, gathered
from pygdist.lightning.strategies import GraphDDPStrategy

__all__ = ["FOR_CHECKPOINT", "FOR_VALIDATION", "ModelAveragingStrategy"]

OptimizerState: TypeAlias = Literal["local", "average", "reset"]
SyncUnit: TypeAlias = Literal["epoch", "step"]

_SAVED = "model_averaging"  # in a checkpoint

FOR_VALIDATION, FOR_CHECKPOINT = "models for validation", "models for a checkpoint"
"""How averages that nobody trains on are called where traffic is counted and recorded."""


class ModelAveragingStrategy(GraphDDPStrategy):
    """Models averaged over parts, weighted by their training nodes (CATGNN, Sec. 3.3); no gradient is exchanged.

    ``--trainer.strategy=model_averaging`` averages after every epoch. Parameters and buffers (statistics of norms) take
    part. With plain SGD, one step between averages and parts that hold all that the model sees, it is gradient
    averaging. A rank may have several parts (``GraphDataModule(num_parts=...)``), which start from the same average
    and are averaged with all others: the same as one rank for each. It goes over all of them in every epoch, whatever
    ``sync_every`` is: validation, checkpoints and schedules by epochs mean the same with any number of ranks. Dropout
    draws by part and epoch, whichever rank has the part.

    Validation, checkpoints and the model that is left behind are of the averaged model. Between two averages it is made
    for them, once for both, which trains nothing and changes nothing: set ``check_val_every_n_epoch`` to ``sync_every``
    to save that.
    A run that is resumed from a checkpoint made between two averages starts from that average; in the middle of an
    epoch it goes on with the parts, or mini-batches, that are left of it.

    Args:
        sync_every: Average after so many epochs, or steps.
        sync_unit: ``epoch`` or ``step``.
        optimizer_state: What becomes of the optimisers' state (Adam's moments) when models are averaged: each part
            keeps its own (``local``), it is averaged like the model (``average``), or begins anew (``reset``).
        kwargs: As for :class:`~pygdist.lightning.GraphDDPStrategy`.

    Attributes:
        checkpoint_bytes: What all ranks together have sent to rank 0 for checkpoints since the fit began, which is the
            optimisers' state of each part.

    Raises:
        InputError: If an argument makes no sense.

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
        if sync_every < 1:
            raise InputError(f"sync_every is {sync_every}, expected at least 1")
        for name, value, known in (
            ("sync_unit", sync_unit, get_args(SyncUnit)),
            ("optimizer_state", optimizer_state, get_args(OptimizerState)),
        ):
            if value not in known:
                raise InputError(f"{name} is {value!r}, expected {' or '.join(known)}")
        self.sync_every, self.sync_unit, self.optimizer_state_policy = sync_every, sync_unit, optimizer_state
        self._trainer: pl.Trainer | None = None
        self._average_first, self._random = _AverageFirst(self), ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._shares: dict[int, float] = {}  # of this rank's parts, of all training nodes
        self._num_parts = 1
        self._in_turns = False  # whole parts are trained one after another: a step of each is an epoch
        self._locals: dict[int, _Local] = {}
        self._averaged: list[Tensor] | None = None  # the last average, where a rank has several parts
        self._current: int | None = None  # the part whose model the module holds
        self._idle = False
        self._steps = 0
        self._equal = True  # no step since the last average
        self._own: list[Tensor] | None = None  # what the module held before an average was put there to be looked at
        self._looked_at: list[Tensor] | None = None  # that average, until the next step
        self._restored: Mapping[str, Any] | None = None
        self._ended = False  # training, in order: all ranks are there, and their models equal
        self._seed, self._drawn_for = 0, (-1, -1)  # what dropout draws from, and for which part and epoch it does
        self.checkpoint_bytes = 0

    @override
    def loss_scale(self, num_labelled: int, num_here: int) -> float:
        """Factor on the summed loss of a step that makes it the mean over this step's own nodes."""
        return 1.0 / max(num_here, 1)

    @property
    @override
    def sends_gradients(self) -> bool:
        return False

    # -- a run ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting or not self._ended:  # a checkpoint may be saved after a fit and a test of its model
            self._forget()
        self._trainer = trainer
        super().setup(trainer)
        if fitting:
            check_run(trainer, self.world_size, self.lr_scheduler_configs)
            say_what_is_sent(trainer, self.sync_every, self.sync_unit)
            if self._average_first not in trainer.callbacks:  # type: ignore[attr-defined]
                trainer.callbacks.insert(0, self._average_first)  # type: ignore[attr-defined]

    @override
    def configure_ddp(self) -> None:
        """Nothing wraps the model, whose gradients stay here; all ranks begin with that of rank 0."""
        assert self.model is not None
        if self.world_size > 1:
            for value in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(value.detach(), src=0)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        module = getattr(self._trainer, "datamodule", None)
        weights = getattr(module, "part_weights", None) or [1] * self.world_size
        self._num_parts, total = len(weights), sum(weights)
        here = range(self.global_rank, self._num_parts, self.world_size)
        self._shares = {part: weights[part] / total for part in here if weights[part]}
        in_batches = getattr(module, "batches", None) is not None
        self._in_turns = self._num_parts > self.world_size and not in_batches
        if self._num_parts > self.world_size and self.sync_unit == "step" and in_batches:  # on all ranks
            raise InputError(
                f"sync_unit=step: {self._num_parts} parts on {self.world_size} ranks are trained one after another, "
                "each for a whole epoch of mini-batches; average by epochs, or use a rank for each part"
            )
        check_limits(self._bound_trainer, self._num_parts, self.world_size)
        for part in self._shares:
            self._locals[part] = _Local(self._first_states(part))
        self._restored = None  # of all parts: each has taken its own
        if len(self._shares) > 1:
            self._averaged = _copies(self._tensors())
        self._seed = int(self.broadcast(torch.initial_seed()))
        devices = [self.root_device] if self.root_device.type == "cuda" else []
        self._random.enter_context(torch.random.fork_rng(devices))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        part = getattr(batch, "part", self.global_rank)
        self._idle = part is None
        if part is not None:
            self._enter(part)
            self._draw_for(part, self._bound_trainer.current_epoch)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        # a rank that has no batch left takes part in averages, and changes nothing
        out = closure() if self._idle else super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1
        self._equal, self._looked_at = False, None
        if self._due():
            self._average()
        return out

    def finish(self) -> None:
        """Leave the average of all models behind; every rank makes the call."""
        if not self._equal:
            self._average()
        self._random.close()
        self._ended = True

    @override
    def teardown(self) -> None:
        super().teardown()
        self._random.close()  # of a run that failed, too
        callbacks = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        if self._average_first in callbacks:
            callbacks.remove(self._average_first)
        # Lightning has put the module on the CPU, and the states that the optimisers hold
        if self.root_device.type != "cpu":
            for local in self._locals.values():
                local.states = [
                    by_parameter(optimizer, by_number(optimizer, state))
                    for optimizer, state in zip(self.optimizers, local.states, strict=True)
                ]

    def _due(self) -> bool:
        if self.sync_unit == "step" and not self._in_turns:
            return self._steps % self.sync_every == 0
        trainer = self._bound_trainer
        epochs = trainer.current_epoch + 1
        return trainer.is_last_batch and (epochs % self.sync_every == 0 or epochs == trainer.max_epochs)

    @property
    def _bound_trainer(self) -> pl.Trainer:
        assert self._trainer is not None, "setup() has it"
        return self._trainer

    # -- parts ------------------------------------------------------------------------------------------------------

    def _enter(self, part: int) -> None:
        """Put the model and the optimisers' state of a part into the module."""
        if part == self._current or part not in self._locals:
            return
        if self._current is not None:
            self._locals[self._current].values = _copies(self._tensors())
            self._assign(self._values_of(part))
        for optimizer, state in zip(self.optimizers, self._locals[part].states, strict=True):
            optimizer.state = state
        self._current = part

    def _draw_for(self, part: int, epoch: int) -> None:
        """Let dropout draw the same for a part in an epoch on any rank."""
        if (part, epoch) != self._drawn_for:
            self._drawn_for = part, epoch
            seed = np.random.SeedSequence([self._seed % 2**64, part, epoch])
            torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))

    def _values_of(self, part: int) -> list[Tensor]:
        """The model of a part that is not in the module."""
        values = self._locals[part].values
        if values is None:
            values = self._averaged
        assert values is not None, "a rank with several parts keeps the last average"
        return values

    def _first_states(self, part: int) -> list[Any]:
        """The optimisers' state that a part begins with: what a checkpoint has of it, or what they were loaded with."""
        saved = self._restored or {}
        if saved.get("num_parts") == self._num_parts and str(part) in saved["states"]:
            return [
                by_parameter(optimizer, state)
                for optimizer, state in zip(self.optimizers, saved["states"][str(part)], strict=True)
            ]
        return [copied(optimizer) for optimizer in self.optimizers]

    def _tensors(self) -> list[Tensor]:
        """What is averaged: parameters, also those that are frozen for a while, and buffers."""
        assert self.lightning_module is not None
        return [value.detach() for value in (*self.lightning_module.parameters(), *self.lightning_module.buffers())]

    def _assign(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(value)

    # -- averages ---------------------------------------------------------------------------------------------------

    def _average(self) -> None:
        """Average the models of all parts into all of them; every rank makes the call."""
        averaged = self._mean("models")
        if self.optimizer_state_policy != "local":
            self._average_states()
        self._assign(averaged)
        for local in self._locals.values():
            local.values = None
        if self._averaged is not None:
            self._averaged = averaged
        self._equal, self._looked_at = True, None

    def _mean(self, label: str) -> list[Tensor]:
        """The mean of the parts' models, weighted by their training nodes; every rank makes the call."""
        held = self._tensors()
        mean = [torch.zeros_like(value, dtype=None if _is_real(value) else torch.float64) for value in held]
        for part, share in self._shares.items():
            in_module = part == self._current or self._current is None
            for total, value in zip(mean, held if in_module else self._values_of(part), strict=True):
                total.add_(value.to(total.dtype), alpha=share)
        self._sum_over_ranks(mean, label)
        return [
            total if _is_real(value) else total.round().to(value.dtype) for total, value in zip(mean, held, strict=True)
        ]

    def _sum_over_ranks(self, values: list[Tensor], label: str) -> None:
        """Into themselves; one call for each dtype."""
        if self.world_size == 1:
            return
        for dtype in sorted({value.dtype for value in values}, key=str):
            of_type = [value for value in values if value.dtype == dtype]
            flat = torch.cat([value.reshape(-1) for value in of_type])
            self.communicator.reduce_in_place(flat, label)
            for value, part in zip(of_type, flat.split([value.numel() for value in of_type]), strict=True):
                value.copy_(part.view_as(value))

    def _average_states(self) -> None:
        for number, optimizer in enumerate(self.optimizers):
            states = {part: self._locals[part].states[number] for part in self._shares}
            if self.optimizer_state_policy == "reset":
                for state in states.values():
                    state.clear()
            else:
                average(optimizer, states, self._shares, self.communicator)

    @contextmanager
    def _looking(self, label: str) -> Iterator[None]:
        """The averaged model is in the module meanwhile; every rank makes the call."""
        self._show(label)
        try:
            yield
        finally:
            self._hide()

    def _show(self, label: str) -> None:
        if not self._equal and self._own is None:
            if self._looked_at is None:
                self._looked_at = self._mean(label)
            self._own = _copies(self._tensors())
            self._assign(self._looked_at)

    def _hide(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._assign(own)

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
        """The averaged model; every rank makes the call, as Lightning does."""
        if self._equal or self._own is not None:
            return super().lightning_module_state_dict()
        with self._looking(FOR_CHECKPOINT):
            return {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """With the optimisers' state of every part; every rank makes the call, after a fit too."""
        if checkpoint.get("optimizer_states") and self._num_parts > 1:
            states, num_bytes = gathered(
                self.optimizers, {part: one.states for part, one in self._locals.items()}, self._who_answers()
            )
            self.checkpoint_bytes += num_bytes
            if self.is_global_zero:
                checkpoint[_SAVED] = {"num_parts": self._num_parts, "states": states}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _who_answers(self) -> Communicator:
        """The ranks that a checkpoint is gathered from: all, but this one alone after a run that failed."""
        if self._communicator is not None:
            return self._communicator
        if self.world_size == 1 or not dist.is_initialized():
            return Communicator()
        if self._ended and not self._bound_trainer.interrupted:
            return Communicator(dist.group.WORLD)  # which Lightning's barrier after the file waits for as well
        rank_zero_warn(
            "the run has failed: the checkpoint has the optimisers' state of the parts of rank 0 and of no others"
        )
        return Communicator()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._restored = checkpoint.get(_SAVED)
        found = None if self._restored is None else self._restored["num_parts"]
        weights = getattr(getattr(self._trainer, "datamodule", None), "part_weights", None)
        if found is not None and weights is not None and found != len(weights):
            rank_zero_info(
                f"the checkpoint has optimiser states of {found} parts, there are {len(weights)} now: each begins with "
                "that of one of them"
            )
        elif found is not None and weights is not None:
            lacking = [
                part for part, weight in enumerate(weights) if weight and str(part) not in checkpoint[_SAVED]["states"]
            ]
            if lacking:
                rank_zero_warn(
                    f"the checkpoint lacks the optimisers' state of the parts {', '.join(map(str, lacking))}, as the "
                    "run had failed: each begins with that of another"
                )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for suffix, method in methods.items():
            strategy_registry.register(
                f"{cls.strategy_name}{suffix}",
                cls,
                description=f"Models averaged over the parts of one graph, processes by {method}",
                start_method=method,
            )


class _AverageFirst(pl.Callback):
    """Averages before what other callbacks do at the end of training: Lightning asks its strategy after these."""

    def __init__(self, strategy: ModelAveragingStrategy) -> None:
        self._strategy = strategy

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy.finish()


@dataclass
class _Local:
    """What a part has of its own.

    Attributes:
        states: The state of each optimiser, by parameter.
        values: Its model while another part's is in the module; ``None`` for the last average.
    """

    states: list[Any]
    values: list[Tensor] | None = field(default=None)


def _copies(values: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _register() -> None:
    if ModelAveragingStrategy.strategy_name not in StrategyRegistry:
        ModelAveragingStrategy.register_strategies(StrategyRegistry)


_register()
