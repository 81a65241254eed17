"""What modules for graphs in parts have in common: the model is distributed for a run and given back after it."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from typing_extensions import override

from pygdist.backends import Backend, Savings, distribute, resolve_backend, undistribute
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.nn.inputs import fill_in_sizes

__all__ = ["GraphModule"]


class GraphModule(pl.LightningModule):
    """Trains a PyG model on a graph in parts; what for, a subclass says.

    Args:
        model: Any module with PyG layers.
        backend: How neighbours arrive: a registered name, a class path, or an instance.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        savings: Which work need not be done, and the memory for it.
    """

    def __init__(
        self, model: nn.Module, backend: Backend | str, lr: float, weight_decay: float, savings: Savings
    ) -> None:
        super().__init__()
        if lr < 0 or weight_decay < 0:
            raise InputError(f"lr is {lr}, weight_decay is {weight_decay}: expected no negative numbers")
        self.model = model
        self.backend = resolve_backend(backend)
        self.lr, self.weight_decay = lr, weight_decay
        self.savings = savings
        self.metrics = nn.ModuleDict()

    @override
    def setup(self, stage: str) -> None:
        shard, communicator = self._shard(), self._communicator()
        accumulated = [self.trainer.accumulate_grad_batches]
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                accumulated += callback.scheduling.values()
        if set(accumulated) != {1}:
            raise InputError(
                f"accumulate_grad_batches={max(accumulated)}: a full-graph epoch is one step, so "
                "there is nothing to accumulate, and Lightning would only divide the loss; leave it at 1"
            )
        # before a checkpoint is loaded: Lightning converts later, and "64-true" would round what it loads
        self.trainer.precision_plugin.convert_module(self.model)
        undistribute(self.model)  # a run that failed half-way left it distributed
        fill_in_sizes(self.model, shard)
        # where the model runs and in its type, as batches are: what the backend makes of the graph is made there
        here = self.trainer.datamodule.transfer_batch_to_device(shard, self.trainer.strategy.root_device, 0)  # type: ignore[attr-defined]
        self.backend.bind(here, communicator)
        distribute(self.model, backend=self.backend, savings=self.savings)

    @override
    def teardown(self, stage: str) -> None:
        undistribute(self.model)
        self.backend.unbind()

    @override
    def on_fit_start(self) -> None:
        # dropout must not repeat its pattern on every rank; the parameters are equal already
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    @override
    def on_train_epoch_start(self) -> None:
        self.backend.communicator.epoch = self.current_epoch

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def scaled(self, total: Tensor, count: int) -> Tensor:
        """A rank's part of the mean loss, from its sum and the number of terms on all ranks."""
        strategy = self.trainer.strategy
        return total * (strategy.loss_scale(count) if isinstance(strategy, GraphDDPStrategy) else 1.0 / count)

    def _shard(self) -> Shard:
        shard = getattr(getattr(self.trainer, "datamodule", None), "shard", None)
        if not isinstance(shard, Shard):
            raise InputError(
                f"{type(self).__name__} takes its graph from a GraphDataModule: trainer.fit(..., datamodule=...)"
            )
        return shard

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
