"""Training with weights of which each rank trains some columns, without DDP (``first_weights='sharded'``)."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from pygdist.comm.sharded import ShardedWeights
from pygdist.errors import InputError

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DDP reads this name, on the module that it wraps
_INSTEAD = "use first_weights='gathered'"


class ShardedTraining:
    """Lets DDP ignore a module's sharded weights, and brings their columns before anybody else reads them.

    A module calls these methods in the hooks of its run. ``weights`` are those of its backend; with ``None`` there are
    no such weights, and nothing is done.

    Attributes:
        is_behind: Columns that other ranks train are out of date on this rank.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self._ignored = list[str]()

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Refuse a module whose last run ended with columns out of date, unless a checkpoint replaces them."""
        if self.is_behind and trainer.ckpt_path is None:
            raise InputError(
                "the last run of this module failed within an epoch, so it holds outdated values in other ranks' "
                "columns of the first layer's weights (first_weights='sharded'); make a new module, or give a "
                "checkpoint (ckpt_path)"
            )
        self.is_behind = False

    def ignore(self, module: pl.LightningModule, weights: ShardedWeights | None) -> None:
        """Let DDP ignore the weights of a run that trains, which are those of rank 0 first. Every rank makes the call.

        Raises:
            InputError: On all ranks, if the run does not go with sharded weights.
        """
        others = [one for one in getattr(module, _IGNORED, []) if one not in self._ignored]
        self._ignored = []
        if weights is not None and module.trainer.state.fn == TrainerFn.FITTING:
            _check_run(module, weights)
            weights.share()
            ids = set(map(id, weights.parameters))
            self._ignored = [name for name, one in module.named_parameters() if id(one) in ids]
        setattr(module, _IGNORED, [*others, *self._ignored])

    def gather(self, trainer: pl.Trainer, weights: ShardedWeights | None) -> None:
        """Bring all columns that are out of date, in place; every rank makes the call."""
        if weights is None or not self.is_behind:
            return
        failed = trainer.state.status == TrainerStatus.INTERRUPTED
        if failed or not getattr(trainer.strategy, "is_open", True):
            raise InputError(
                "the run has ended or failed, so the ranks cannot gather the first layer's weights "
                "(first_weights='sharded'); resume from a checkpoint that was saved before"
            )
        weights.gather(trainer.optimizers)
        self.is_behind = False


def clip_over_ranks(optimizer: Optimizer, largest_norm: float, weights: ShardedWeights) -> None:
    """Clip the gradients of an optimiser's parameters by their norm over all ranks; every rank makes the call."""
    sharded = set(map(id, weights.parameters))
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    norm = weights.norm_with(one for one in parameters if id(one) not in sharded)
    torch.nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm)


def check_elementwise(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimisers that look at more than one element of a weight, of which this rank trains some columns."""
    for one in optimizers:
        if type(one).__module__.partition(".")[0] != "torch" or type(one).__name__ not in _ELEMENTWISE:
            raise InputError(
                f"first_weights='sharded': optimizer {type(one).__name__} is not known to update each element "
                f"independently; use one of {', '.join(_ELEMENTWISE)}, or first_weights='gathered'"
            )


def _check_run(module: pl.LightningModule, weights: ShardedWeights) -> None:
    """Refuse runs that skip or clip steps by one rank's columns, train nothing else, or average weights."""
    sharded = set(map(id, weights.parameters))
    precision = module.trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None:
        raise InputError(
            f"trainer.precision={precision.precision}: a rank that finds an overflow in its columns of the first "
            f"layer's weights (first_weights='sharded') would skip a step alone; use bf16-mixed, or {_INSTEAD[4:]}"
        )
    if not getattr(module, "automatic_optimization", True):
        raise InputError(
            "first_weights='sharded' needs Lightning's automatic optimisation, which clips by a norm over all ranks; "
            f"{_INSTEAD}"
        )
    if not any(one.requires_grad and id(one) not in sharded for one in module.parameters()):
        raise InputError(
            "first_weights='sharded': the model trains nothing but the weights of its first layer, and DDP needs a "
            f"parameter; {_INSTEAD}"
        )
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise InputError(
                f"first_weights='sharded': {type(callback).__name__} would average columns of the first weights that "
                f"are out of date on this rank; {_INSTEAD}"
            )
