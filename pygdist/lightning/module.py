"""What modules for graphs in parts have in common: the model is distributed for a run and given back after it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from typing_extensions import override

from pygdist.backends import Backend, Savings, resolve_backend
from pygdist.backends.base import names_of
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.datamodule import GraphDataModule
from pygdist.lightning.evaluation import WholeGraphEvaluation
from pygdist.lightning.parts import PartBatch
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.nn.inputs import fill_in_sizes
from pygdist.routing import distribute, undistribute

__all__ = ["GraphModule"]


class GraphModule(pl.LightningModule):
    """Trains a PyG model on a graph in parts; what for, a subclass says.

    Args:
        model: Any module with PyG layers.
        backend: How neighbours arrive: a registered name, a class path, or an instance.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        savings: Which work need not be done, and the memory for it.
        exact_evaluation: Where the backend trains without part of the graph, validate, test and predict on all of it.
    """

    #: Whether edges are held out for its evaluation, or nodes; by default edges if the data is told to hold some out.
    learns_edges: ClassVar[bool | None] = None

    def __init__(
        self,
        model: nn.Module,
        backend: Backend | str,
        lr: float,
        weight_decay: float,
        savings: Savings,
        exact_evaluation: bool = True,
    ) -> None:
        super().__init__()
        if lr < 0 or weight_decay < 0:
            raise InputError(f"lr is {lr}, weight_decay is {weight_decay}: expected no negative numbers")
        self.model = model
        self.backend = resolve_backend(backend)
        self.lr, self.weight_decay = lr, weight_decay
        self.savings = savings
        self.exact_evaluation = exact_evaluation
        self._bound: Shard | None = None  # what the backend works on
        # where the backend does not evaluate itself
        self._evaluation: WholeGraphEvaluation | None = None  # under way
        self._kept_evaluation: WholeGraphEvaluation | None = None  # for the next one
        self.metrics = nn.ModuleDict()

    @override
    def setup(self, stage: str) -> None:
        shard, communicator = self.shard, self._communicator()
        accumulated = [self.trainer.accumulate_grad_batches]
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                accumulated += callback.scheduling.values()
        if set(accumulated) != {1}:
            data, number = self._datamodule(), max(accumulated)
            if data.batches is not None or data.num_parts_in_all > communicator.world_size:
                raise InputError(
                    f"accumulate_grad_batches={number}: steps that follow each other may be on other parts, which are "
                    "models of their own, or on none, where other ranks have more; Lightning would add their gradients "
                    "and divide by their number. Leave it at 1; for fewer and larger steps make the mini-batches larger"
                )
            raise InputError(
                f"accumulate_grad_batches={number}: a full-graph epoch is one step, so "
                "there is nothing to accumulate, and Lightning would only divide the loss; leave it at 1"
            )
        # before a checkpoint is loaded: Lightning converts later, and "64-true" would round what it loads
        self.trainer.precision_plugin.convert_module(self.model)
        self._forget_evaluation()
        undistribute(self.model)  # a run that failed half-way left it distributed
        fill_in_sizes(self.model, shard)
        self.communicator = communicator
        strategy = self.trainer.strategy
        if self.by_itself and communicator.world_size > 1 and not self.backend.abilities.trains_parts:
            raise InputError(
                f"strategy '{type(strategy).__name__}' trains each part by itself, but backend '{self.backend.name}' "
                "lets a part read rows that other ranks' models made; use backend "
                f"{names_of(lambda abilities: abilities.trains_parts)}"
            )
        if self.backend.abilities.trains_parts and communicator.world_size > 1 and not self.by_itself:
            names = {
                type(one).__name__ for one in self.model.modules() if getattr(one, "running_mean", None) is not None
            }
            if names:
                raise InputError(
                    f"{', '.join(sorted(names))}: with backend '{self.backend.name}' a norm takes the statistics of "
                    f"a part, and '{type(strategy).__name__}' averages gradients alone; use strategy model_averaging"
                )
        # all ranks say so: one of them may have a single part
        if (several := self._datamodule().num_parts_in_all) > communicator.world_size and not self.by_itself:
            raise InputError(
                f"{several} parts on {communicator.world_size} ranks are models that must be averaged: use strategy "
                "'model_averaging', or one part for each rank"
            )
        # where the model runs and in its type, as batches are: what the backend makes of the graph is made there
        self.place(self._datamodule().here(shard))
        savings = self.savings
        if len(self._datamodule().parts) > 1:  # what is kept of a part is dropped with it before it is used again
            savings = replace(savings, first_hop=False)
        distribute(self.model, backend=self.backend, savings=savings)

    @override
    def teardown(self, stage: str) -> None:
        self._forget_evaluation()
        undistribute(self.model)
        self.backend.unbind()

    @property
    def by_itself(self) -> bool:
        """Whether each part trains a model of its own, and no step sends gradients."""
        strategy = self.trainer.strategy
        return isinstance(strategy, GraphDDPStrategy) and not strategy.sends_gradients

    def place(self, shard: Shard) -> None:
        """Let the backend work on another part of this rank."""
        if shard is not self._bound:
            self.backend.bind(shard, self.communicator)
            self._bound = shard

    def let_go(self) -> None:
        """Before another part is opened: hold nothing of the one before."""
        self.backend.unbind()
        self._bound = None

    # -- evaluation on the whole graph ------------------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        """The model as it runs now: through the backend, or, in an evaluation on the whole graph, through another."""
        return self.model if self._evaluation is None else self._evaluation.model

    def evaluated(self, batch: Shard | PartBatch) -> tuple[Shard, Tensor]:
        """In an evaluation: the part that a batch is, and the model's output for it, one row per owned node.

        Of parts in turn that is in a file, and on the CPU.
        """
        shard = _whole(batch)
        if self._evaluation is not None and self._evaluation.in_turns:
            return shard, self._evaluation.output_of(shard.rank)
        if self._evaluation is None:
            self.place(shard)
        return shard, self(shard)

    def _begin_evaluation(self) -> None:
        if not self.exact_evaluation or self.backend.abilities.evaluates:
            return
        data = self._datamodule()
        if self._kept_evaluation is None or not self._kept_evaluation.is_of(self.model):
            self._forget_evaluation()
            in_turns = data.num_parts_in_all > self.communicator.world_size
            self._kept_evaluation = WholeGraphEvaluation(self.model, self.communicator, self.savings, in_turns=in_turns)
        self._evaluation = self._kept_evaluation
        with torch.inference_mode(False):
            if self._evaluation.in_turns:
                with self.trainer.precision_plugin.forward_context():
                    self._evaluation.run(data.parts, data.num_parts_in_all, data.open_part, self)
            else:
                self._evaluation.place(data.here(data.shard))

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.finish()

    def _forget_evaluation(self) -> None:
        self._end_evaluation()
        kept, self._kept_evaluation = self._kept_evaluation, None
        if kept is not None:
            kept.close()

    # not where an evaluation starts: then a strategy that averages models has not put the average there
    @override
    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_test_epoch_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_predict_epoch_start(self) -> None:
        self._begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    # ---------------------------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self) -> None:
        # dropout must not repeat its pattern on every rank; the parameters are equal already
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    @override
    def on_train_start(self) -> None:
        self.communicator.epoch = self.current_epoch  # no epoch starts where a run goes on in the middle of one

    @override
    def on_train_epoch_start(self) -> None:
        self.communicator.epoch = self.current_epoch

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def scaled(self, total: Tensor, count: int, count_here: int) -> Tensor:
        """A rank's part of the loss, from its sum and the number of terms on all ranks and on this one."""
        strategy = self.trainer.strategy
        return total * (
            strategy.loss_scale(count, count_here) if isinstance(strategy, GraphDDPStrategy) else 1.0 / count
        )

    @property
    def shard(self) -> Shard:
        """What this rank holds of the graph, inside a run: its part, or of several the one that is open.

        Raises:
            InputError: If the run has no :class:`~pygdist.lightning.GraphDataModule`.
        """
        return self._datamodule().shard

    def _datamodule(self) -> GraphDataModule:
        found = getattr(self.trainer, "datamodule", None)
        if not isinstance(found, GraphDataModule):
            raise InputError(
                f"{type(self).__name__} takes its graph from a GraphDataModule: trainer.fit(..., datamodule=...)"
            )
        return found

    def _communicator(self) -> Communicator:
        strategy = self.trainer.strategy
        if isinstance(strategy, GraphDDPStrategy):
            return strategy.communicator
        if self.trainer.world_size > 1:
            raise InputError(
                f"strategy '{type(strategy).__name__}' averages the losses of ranks as if each had its own data; "
                "on a graph in parts use strategy='graph_ddp'"
            )
        return Communicator()


def _whole(batch: Shard | PartBatch) -> Shard:
    """The part that a batch is."""
    shard = batch.shard if isinstance(batch, PartBatch) else batch
    assert shard is not None, "nobody is idle in an evaluation"
    return shard
