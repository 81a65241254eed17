"""The base of modules for partitioned graphs: distributes the model for a run and gives it back afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from pygdist.backends import Backend, Savings, resolve_backend
from pygdist.checkpoints import RUN_FACTS
from pygdist.comm import Communicator
from pygdist.comm.alike import require_alike
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.graph.store.structure import check_values
from pygdist.hops.arguments import tensors_of
from pygdist.hops.layer import own_class
from pygdist.launch_variables import job_of_slurm
from pygdist.lightning import backend_states
from pygdist.lightning.checks import (
    LARGEST_RATE,
    check_accumulation,
    check_device,
    check_lag,
    check_lagged_steps,
    check_model,
    check_node_inputs,
    check_precision,
    check_sizes,
    check_strategy,
)
from pygdist.lightning.datamodule import GraphDataModule
from pygdist.lightning.evaluation import WholeGraphEvaluation
from pygdist.lightning.hooks import WithHooks
from pygdist.lightning.one_lightning import OfLightning, check_callbacks
from pygdist.lightning.parts import PartBatch, sampled_graph
from pygdist.lightning.sharded import ShardedTraining, check_elementwise, clip_over_ranks
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.nn.inputs import fill_in_sizes, node_inputs, outputs_of, takes_data
from pygdist.routing import distribute, undistribute
from pygdist.routing.agreement import agree_on_model, agree_on_parts, options_of_model

_LARGEST_VALUE = 1e18  # of a feature: its square is far from the largest of float32
_OF_NAN = "lower the learning rate, or look for features, edge weights or labels that overflow"
_BACKEND_STATE = "backend_state"  # in a checkpoint


class GraphModule(WithHooks, OfLightning, pl.LightningModule):
    """Trains a PyG model on a partitioned graph. The subclass defines the task.

    Args:
        model: Any module with PyG layers.
        backend: The way in which neighbours arrive: a registered name, a class path, or an instance.
        lr: Learning rate of Adam; for another optimiser use ``--optimizer`` on the command line, or a subclass.
        weight_decay: Weight decay of Adam.
        savings: Shortcuts to take, and the memory for them; for example ``--model.savings.first_hop=false``.
        exact_evaluation: Evaluate on the whole graph, also if the backend trains on parts alone (``replica``) or on
            mini-batches.
        check: Compare the model with one process on a small graph first, and refuse the model if a number differs
            (:func:`~pygdist.distribute`).
        detect_nan: Stop at the end of an epoch whose training or validation loss is NaN or infinite.

    Raises:
        InputError: If ``model`` is not a module, the backend is unknown, or ``lr`` or ``weight_decay`` is out of range.
    """

    #: Evaluated on held-out edges (``True``) or on nodes; with ``None``, on edges if the data module holds some out.
    learns_edges: ClassVar[bool | None] = None

    def __init__(
        self,
        model: nn.Module,
        backend: Backend | str = "comm",
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        savings: Savings = Savings(),  # noqa: B008 (frozen)
        exact_evaluation: bool = True,
        check: bool = True,
        detect_nan: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value <= LARGEST_RATE:
                raise InputError(f"{name} is {value}, expected a number from 0 to {LARGEST_RATE:g}")
        check_model(model)
        self.model, self.backend = model, resolve_backend(backend)
        self.lr, self.weight_decay = lr, weight_decay
        self.savings, self.exact_evaluation, self.check = savings, exact_evaluation, check
        self.detect_nan = detect_nan
        self._is_share = False  # the loss of this step is this rank's share of a mean
        self._bound: Shard | None = None  # what the backend is bound to
        self._evaluation: WholeGraphEvaluation | None = None  # in progress, if the backend does not evaluate
        self._kept_evaluation: WholeGraphEvaluation | None = None  # used again by the next
        self._sharded = ShardedTraining()
        self.metrics = nn.ModuleDict()

    @property
    def best_by(self) -> tuple[str, Literal["min", "max"]]:
        """The logged number that decides which checkpoint is the best, and if ``min`` or ``max`` is the best."""
        return "val_loss", "min"

    def labels_of(self, out: Tensor) -> Tensor:
        """Return the predictions, one per node, from ``out``, the model's output with one row per node."""
        return out

    @override
    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:
        check_callbacks(self.trainer)  # the first of all hooks, on all ranks; a subclass may skip it
        return super().configure_callbacks()

    @override
    def setup(self, stage: str) -> None:
        data = self._datamodule()
        self.communicator = self._communicator()
        self._take_off()  # a run that failed left the model distributed
        self._sharded.begin_run(self.trainer)
        agree_on_parts(data.meta["parts"], self.communicator)
        require_alike(options_of_model(self), self.communicator)  # before it is tried on all ranks together
        self._check(data)
        # Lightning converts after it has loaded a checkpoint, so "64-true" would round what it loads
        self.trainer.precision_plugin.convert_module(self.model)
        if not takes_data(self.model):  # a model that takes Data need not read all tensors
            check_node_inputs([*node_inputs(self.model, data.shard)], self.backend)
        fill_in_sizes(self.model, data.shard)
        check_sizes(self.model)
        self.place(data.here(data.shard))
        # some results do not last while a rank goes from part to part, or from batch to batch
        lasts = len(data.parts) == 1 and data.batches is None
        savings = self.savings if lasts else replace(self.savings, first_hop=False, first_hop_mib=None)
        distribute(self.model, backend=self.backend, savings=savings, check=self.check)
        if self.trainer.state.fn == TrainerFn.FITTING and not self.backend.abilities.exact:
            given_up = self.backend.abilities.approximation or "the backend does not say what it gives up"
            rank_zero_info(f"backend '{self.backend.name}' is not exact: {given_up}")
        self.backend.look_at(self.model, data.batches)
        self._sharded.ignore(self, self.backend.sharded_weights)

    def _gather_weights(self) -> None:
        """Bring the weights that each rank trains in part; all ranks make the call."""
        self._sharded.gather(self.trainer, self.backend.sharded_weights if self._bound is not None else None)

    def _take_off(self) -> None:
        """Put the model back as it was before :meth:`setup`."""
        self._forget_evaluation()
        undistribute(self.model)

    def _check(self, data: GraphDataModule) -> None:
        """Refuse options with which training would not do what they say."""
        check_callbacks(self.trainer)
        check_device(self.trainer.strategy.root_device)
        num_parts, world_size = data.num_parts_in_all, self.communicator.world_size
        check_accumulation(self.trainer, several_steps=data.batches is not None or num_parts > world_size)
        check_precision(self.trainer.precision_plugin, self.backend)
        check_lag(self.trainer, self.backend)
        if not (self.exact_evaluation or self.backend.abilities.evaluates or self.backend.abilities.trains_parts):
            raise InputError(
                f"exact_evaluation: backend '{self.backend.name}' runs on mini-batches, so the model is evaluated on "
                "the whole graph; leave exact_evaluation=True"
            )
        check_strategy(
            type(self.trainer.strategy).__name__, self.backend, self.model,
            averages_models=self.averages_models, num_parts=num_parts, world_size=world_size,
        )  # fmt: skip

    @override
    def __getstate__(self) -> dict[str, Any]:
        # copies and pickles hold the model, not what a run has made of the graph
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_bound": None, "_evaluation": None, "_kept_evaluation": None, "_hooks_done": {}}

    @override
    def teardown(self, stage: str) -> None:
        self._take_off()
        self.let_go()

    @property
    def averages_models(self) -> bool:
        """True if each part trains its own model, and models are averaged, not gradients."""
        strategy = self.trainer.strategy
        return isinstance(strategy, GraphDDPStrategy) and not strategy.sends_gradients

    def place(self, shard: Shard) -> None:
        """Bind the backend to a part of this rank, unless the backend is bound to this part already."""
        if shard is not self._bound:
            self.backend.bind(shard, self.communicator)
            self._bound = shard

    def let_go(self) -> None:
        """Free the part that the backend is bound to; called before another part is opened."""
        self.backend.unbind()
        self._bound = None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._gather_weights()  # in place: the checkpoint holds the same tensors
        checkpoint[RUN_FACTS] = {
            "model": own_class(self.model).__name__,
            "task": type(self).__name__,
            "backend": self.backend.name or type(self.backend).__name__,
            "processes": self.trainer.world_size,
            "job": job_of_slurm(),
        }
        if not self.backend.abilities.stateful or "optimizer_states" not in checkpoint:  # weights alone
            return
        if self._bound is None or not getattr(self.trainer.strategy, "is_open", True):
            rank_zero_warn(
                "the run has ended or failed, so the checkpoint lacks the state of backend "
                f"'{self.backend.name}'; a run that is resumed from it begins without"
            )
        elif (state := backend_states.gathered(self.backend, self._bound, self.communicator)) is not None:
            checkpoint[_BACKEND_STATE] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # load_from_checkpoint() binds nothing, and an evaluation goes on with nothing
        if self._bound is None or self.trainer.state.fn != TrainerFn.FITTING or not self.backend.abilities.stateful:
            return
        saved = checkpoint.get(_BACKEND_STATE)
        if not backend_states.scatter(saved, self.backend, self._bound, self.communicator):
            here = " for these parts of the graph and these arguments" if saved else ""
            rank_zero_info(
                f"the checkpoint has no state of backend '{self.backend.name}'{here}; the backend begins without"
            )

    # -- evaluation on the whole graph ------------------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        """The model that runs now; in an evaluation on the whole graph this may be a copy on another backend."""
        return self.model if self._evaluation is None else self._evaluation.model

    def evaluated(self, batch: Shard | PartBatch) -> tuple[Shard, Any]:
        """Return the part of the graph that this batch evaluates, and the model's outputs for its owned nodes.

        In an evaluation on the whole graph, if a rank has several parts, outputs are on the CPU, mapped from a file.
        """
        shard = batch.shard if isinstance(batch, PartBatch) else batch
        assert shard is not None, "no rank is idle in an evaluation"
        if self._evaluation is not None and self._evaluation.in_turns:
            return shard, self._evaluation.output_of(shard.rank)
        if self._evaluation is None:
            self.place(shard)
        return shard, self(shard)

    def _begin_evaluation(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.backend.drain()
            self._gather_weights()
        if not self.exact_evaluation or self.backend.abilities.evaluates:
            return
        data = self._datamodule()
        changed = self._kept_evaluation is None or not self._kept_evaluation.is_of(self.model)
        if self.communicator.gather([float(changed)]).any():  # an attribute may change on one rank alone
            self._forget_evaluation()
            in_turns = data.num_parts_in_all > self.communicator.world_size
            # training on parts was checked; mini-batches are graphs of their own
            check = self.check and (data.batches is not None or not self.backend.abilities.trains_parts)
            self._kept_evaluation = WholeGraphEvaluation(
                self.model, self.communicator, self.savings, self.backend, in_turns=in_turns, check=check
            )
        evaluation = self._evaluation = self._kept_evaluation
        assert evaluation is not None
        with torch.inference_mode(False):
            if evaluation.in_turns:
                with self.trainer.precision_plugin.forward_context():
                    evaluation.run(data.parts, data.num_parts_in_all, data.open_part, self)
            else:
                evaluation.place(data.here(data.shard))

    def _end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.finish()

    def _forget_evaluation(self) -> None:
        self._end_evaluation()
        evaluation, self._kept_evaluation = self._kept_evaluation, None
        if evaluation is not None:
            evaluation.close()

    # not on_validation_start: there a strategy that averages models has not yet put the average into the module
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _begin_evaluation
    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    @override
    def on_fit_start(self) -> None:
        # Dropout must differ between ranks; the parameters are equal already. Rank 0 draws on, so that a script's next
        # model does not begin with the weights of this one.
        if self.global_rank:
            torch.manual_seed(torch.initial_seed() + self.global_rank)

    @override
    def on_train_start(self) -> None:
        self.communicator.epoch = self.current_epoch  # a run that resumes within an epoch does not start one
        check_lagged_steps(self.trainer, self.backend.abilities.lag)
        if self.backend.sharded_weights is not None:
            check_elementwise(self.trainer.optimizers)

    @override
    def on_train_epoch_start(self) -> None:
        self.communicator.epoch = self.current_epoch
        if self.backend.abilities.trains_parts or self.backend.abilities.mini_batches:
            agree_on_model(self.model, self.communicator)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sharded.is_behind = self.backend.sharded_weights is not None

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.is_last_batch:  # before callbacks see the end of the epoch
            self._gather_weights()

    @override
    def on_train_epoch_end(self) -> None:
        self.backend.drain()
        self._gather_weights()
        self._refuse_nan("train")

    @override
    def on_validation_epoch_end(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._refuse_nan("val")

    def _refuse_nan(self, stage: str) -> None:
        """Raise on all ranks if the loss of a stage, the mean over all ranks that is logged anyway, is not finite.

        Raises:
            InputError: Names the epoch and the ranks that found it.
        """
        loss = dict(self.metrics.items()).get(f"{stage}_loss")
        if not self.detect_nan or not isinstance(loss, MeanMetric):  # the same on all ranks, with or without nodes
            return
        value = float(loss.compute())  # kept until Lightning asks for it
        if math.isfinite(value):
            return
        found = self.communicator.gather([float(torch.isfinite(loss.mean_value).all())])[:, 0].tolist()
        if ranks := [str(rank) for rank, finite in enumerate(found) if not finite]:  # none: a mean over no node
            causes = self.communicator.gather_text(_wrong_values(self._datamodule()))
            advice = next(filter(None, causes), _OF_NAN)
            raise InputError(
                f"epoch {self.current_epoch}: {stage}_loss is {value} (rank {', '.join(ranks)} of {len(found)}); "
                f"{advice}. detect_nan=False (--model.detect_nan=false) goes on with it"
            )

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        weights, most = self.backend.sharded_weights, gradient_clip_val or 0
        if weights is None or most <= 0 or gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        clip_over_ranks(optimizer, most, weights)

    def in_step(self, batch: Shard | PartBatch, loss: Callable[[], Tensor]) -> Tensor:
        """Compute and return the loss of a training step; the backend prepares and ends the step."""
        if isinstance(batch, PartBatch) and batch.sample is not None:
            self.backend.begin_step(batch.sample)
        total, late = loss(), self.backend.end_step()
        return total if late is None else total + late

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        if not self._is_share and self.trainer.world_size > 1:
            raise InputError(
                f"{type(self).__name__}.training_step returns a loss of this process's nodes alone, and the mean over "
                "processes is not the mean over nodes: for another loss override node_losses, or add a term to "
                "super().training_step(batch, batch_idx)"
            )
        self._is_share = False

    @override
    def on_after_backward(self) -> None:
        self.backend.end_backward()
        for parameter in self.backend.not_trained(self.parameters()):
            parameter.grad = None  # momentum and weight decay would move it nevertheless

    def idle_loss(self, sample: Data | None) -> Tensor:
        """Return a zero loss for a rank that has nothing to train in a step; the rank takes part in all exchanges.

        ``sample`` is the empty mini-batch of this rank, if batches are sampled across ranks.
        """
        self._is_share = True
        # it depends on every parameter, as DDP sends all gradients in each step
        terms = [parameter.sum() * 0 for parameter in self.parameters() if parameter.requires_grad]
        if sample is not None and self.backend.runs_idle and "edge_index" in sample:
            outs = tensors_of(outputs_of(self.network, *sampled_graph(sample)))
            terms += [one.sum() * 0 for one in outs if one.requires_grad]
        elif sample is not None and (term := self.backend.sit_out(sample)) is not None:
            terms.append(term)
        return torch.stack(terms).sum()

    def scaled(self, total: Tensor, count: float, count_here: float) -> Tensor:
        """Return this rank's loss, scaled for the strategy: DDP's mean over ranks is then the mean over all terms.

        A strategy that averages models gets the mean over this rank's terms.

        Args:
            total: Sum of the terms of this rank.
            count: Number of terms of all ranks; with weights, the sum of all weights.
            count_here: Number of terms of this rank; with weights, the sum of their weights.
        """
        self._is_share = True
        strategy = self.trainer.strategy
        if isinstance(strategy, GraphDDPStrategy):
            return total * strategy.loss_scale(count, count_here)
        return total * (1.0 / count)

    @property
    def shard(self) -> Shard:
        """The part that this rank holds during a run; if the rank has several parts, the open part.

        Raises:
            InputError: If the run has no :class:`~pygdist.lightning.GraphDataModule`.
        """
        return self._datamodule().shard

    def _datamodule(self) -> GraphDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, GraphDataModule):
            raise InputError(
                f"{type(self).__name__} takes its graph from a GraphDataModule: trainer.fit(..., datamodule=...)"
            )
        return data

    def _communicator(self) -> Communicator:
        strategy = self.trainer.strategy
        if isinstance(strategy, GraphDDPStrategy):
            return strategy.communicator
        if self.trainer.world_size > 1:
            raise InputError(
                f"strategy '{type(strategy).__name__}' averages the ranks' losses as if each rank had a data set of "
                "its own; a partitioned graph needs strategy='graph_ddp'"
            )
        return Communicator()


def _wrong_values(data: GraphDataModule) -> str:
    """Name a file of this rank's parts with values that make a loss NaN, and these values; empty if there is none."""
    for part in data.parts:
        try:
            check_values(data.meta, part, data.folder / f"part_{part}", largest=_LARGEST_VALUE)
        except InputError as error:
            return str(error)
    return ""


class DoubleMetric(Metric):
    """A metric whose states stay in double precision.

    When a metric is moved, torchmetrics forgets the type that was set. Then an epoch after a resume logs other digits,
    counts in ``bf16-true`` stop at 256, and ranks without nodes gather other types than those with some.
    """

    @override
    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> nn.Module:
        """Move the states, and keep their type."""
        super()._apply(fn, exclude_state)
        for name, start in self._defaults.items():
            if isinstance(start, Tensor) and start.is_floating_point():
                self._defaults[name] = start.to(torch.float64)
                setattr(self, name, getattr(self, name).to(torch.float64))
        self._dtype = torch.float64
        return self


class Mean(DoubleMetric, MeanMetric):
    """A mean in which NaN stays NaN; torchmetrics leaves NaN out, and waits for the GPU to find it."""

    def __init__(self) -> None:
        super().__init__(nan_strategy=math.nan)
        self.set_dtype(torch.float64)

    @override
    def update(self, value: Tensor, weight: Tensor | float = 1.0) -> None:  # type: ignore[override]
        """Add values, each with its weight."""
        value = value.to(self.dtype)
        weights = weight.to(self.dtype).broadcast_to(value.shape) if isinstance(weight, Tensor) else None
        self.mean_value += (value * (weight if weights is None else weights)).sum()
        self.weight += value.numel() * weight if weights is None else weights.sum()

    @property
    @override
    def dtype(self) -> torch.dtype:
        """Type of the sums."""
        return torch.float64
