"""The base of modules that learn something of each node: its class, or numbers; on any backend."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics import Metric
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.graph.adjacency import Slot
from pygdist.graph.memo import Memo
from pygdist.hops.arguments import each_tensor
from pygdist.lightning.module import GraphModule, Mean
from pygdist.lightning.parts import PartBatch, sampled_graph
from pygdist.nn.inputs import outputs_of
from pygdist.nn.loss import labelled_rows, summed_loss

Stage = Literal["train", "val", "test"]
STAGES: tuple[Stage, ...] = ("train", "val", "test")

_LABELLED = Slot[Memo[Tensor]]("labelled nodes of each stage")
_SHARES = Slot[Memo[float]]("sums of node weights of each stage")
_TRAINING = Slot[Memo[tuple[int, float]]]("number and weights of training nodes")
_UNLABELLED = "the graph has no labelled nodes for stage '{0}' ({0}_mask)"


class NodeModule(GraphModule):
    """Minimises the mean loss of labelled nodes over all ranks, and logs it with scores.

    A subclass defines the loss of each node (:meth:`node_losses`) and the scores (:meth:`make_scores` and
    :meth:`update_scores`); for a model with several outputs, also the one that is scored (:meth:`predictions`).
    """

    learns_edges: ClassVar[bool | None] = False
    #: Labels are numbers to predict, even if all of them are whole.
    float_labels: ClassVar[bool] = False

    @abstractmethod
    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        """Return the loss of each node, ``(k,)``, from the model's outputs for these nodes and their labels."""

    def predictions(self, outputs: Any) -> Tensor:
        """Return the tensor with a column for every class or target among the outputs of the model, one row per node.

        Scores and predictions are computed from it; by default, losses too.

        Args:
            outputs: The output itself, by default; a subclass picks from several.
        """
        tensor: Tensor = outputs
        return tensor

    @abstractmethod
    def make_scores(self, shard: Shard) -> dict[str, Metric]:
        """Return new metrics for a stage, by the ends of their names in the log."""

    @abstractmethod
    def update_scores(self, scores: dict[str, Metric], out: Tensor, y: Tensor, weight: Tensor | None) -> None:
        """Count labelled nodes, each with its weight (1 if ``None``), from their predictions and labels."""

    @abstractmethod
    def check_labels(self, shard: Shard) -> None:
        """Refuse labels that the module cannot learn; the labels of all parts have one form."""

    @abstractmethod
    def checked(self, outputs: Any) -> Any:
        """Return the model's outputs for rows of nodes; refuse those that do not fit the labels."""

    @property
    def learns_numbers(self) -> bool:
        """True if the labels of the graph are numbers to predict, not classes."""
        shard = self.shard
        return shard.y is not None and shard.y.dim() > 1 and not shard.multi_label

    def with_columns(self, outputs: Any) -> Any:
        """Return outputs of shape ``(n,)`` as ``(n, 1)``, the shape of a single number to predict."""
        y, single = self.shard.y, isinstance(outputs, Tensor) and outputs.dim() == 1
        return outputs.unsqueeze(1) if single and y is not None and y.shape[1:] == (1,) else outputs

    @property
    def width(self) -> tuple[int, ...]:
        """Shape of a row of :meth:`predictions`, as a rank without nodes counts it."""
        y = self.shard.y
        return (self.shard.num_classes,) if y is None or y.dim() == 1 else tuple(y.shape[1:])

    @property
    def weight_key(self) -> tuple[float, ...] | None:
        """Numbers that, with the labels, determine the weights of nodes; ``None`` if all weights are 1."""
        return None

    def weights_of(self, y: Tensor) -> Tensor | None:
        """Return the factor on the loss of each node, 0 without a label; ``None`` if all are 1."""
        return None

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        batches = self._datamodule().batches
        if batches is not None and batches.of_edges:
            raise InputError(
                f"batches: {type(self).__name__} trains on nodes, but {type(batches).__name__} have edges; use "
                "NeighborBatches"
            )
        if stage != "predict":
            self.check_labels(self.shard)
        self.metrics.clear()
        for name in STAGES:
            scores = self.make_scores(self.shard)
            self.metrics.update({f"{name}_loss": Mean(), **{f"{name}_{one}": score for one, score in scores.items()}})

    @override
    def forward(self, shard: Shard) -> Any:
        """Return the model's outputs for the rank's own rows; edge inputs are passed if its forward takes them."""
        return self.checked(outputs_of(self.network, shard, shard.adjacency))

    @override
    def training_step(self, batch: Shard | PartBatch, batch_idx: int) -> Tensor:
        return self.in_step(batch, lambda: self._loss_of(batch))

    def _loss_of(self, batch: Shard | PartBatch) -> Tensor:
        """Return the loss of this rank's step, scaled for the mean over ranks."""
        shard = batch.shard if isinstance(batch, PartBatch) else batch
        count = batch.num_in_step if isinstance(batch, PartBatch) else None
        if shard is None:
            return self._idle(count, batch.sample if isinstance(batch, PartBatch) else None)
        self.place(shard)
        if isinstance(batch, PartBatch) and batch.sample is not None:
            return self._learn_sample(shard, batch.sample, count)
        total, share = self._learn(shard, self(shard))
        return self.scaled(total, self._share_of_all(shard, share), share)

    @override
    def validation_step(self, batch: Shard | PartBatch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Shard | PartBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Shard | PartBatch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return the global ids of the owned nodes and the model's output for them."""
        shard, out = self.evaluated(batch)
        return shard.owned_id, self.predictions(out)

    def _share_of_all(self, shard: Shard, share: float) -> float:
        """Return the training nodes of all ranks, or their weights if nodes have any."""
        if self.weight_key is None or self.averages_models:
            return shard.counts["train_mask"]
        # in every step, as a callback may have changed the weights, on any rank
        return float(self.communicator.gather([share]).sum()) or 1.0

    def _learn(self, shard: Shard, out: Any) -> tuple[Tensor, float]:
        """Return the summed loss over labelled training nodes, and their share; update and log the metrics."""
        if shard.y is None or shard.train_mask is None or not shard.counts["train_mask"]:
            raise InputError(_UNLABELLED.format("train"))
        return self._noted(out, shard.y, _labelled_rows(shard, "train"), "train", share=self._share(shard, "train"))

    def _learn_sample(self, shard: Shard, sample: Data, num_in_step: int | None) -> Tensor:
        """Return the mean loss of a mini-batch's training nodes; with GraphSAINT's norms it estimates the part's."""
        if shard.y is None or shard.train_mask is None:
            raise InputError(_UNLABELLED.format("train"))
        graph, edges = sampled_graph(sample)
        out = self.checked(outputs_of(self.model, graph, edges))
        norm = graph.get("node_norm")
        if norm is None:
            total, share = self._noted(out, graph.y, graph.labelled, "train")
        else:  # a node's norm is the share of the part's training nodes that it stands for
            count, share = self._training_of(shard)
            sampled = graph.layout.share * count if self.weight_key is None else None
            total, _ = self._noted(out, graph.y, graph.labelled, "train", norm * count, sampled)
        return self.scaled(total, self._in_step(share, num_in_step), share)

    def _training_of(self, shard: Shard) -> tuple[int, float]:
        """Return the number of a part's training nodes, and their weights if they have any; asked once of a GPU."""
        y, mask = shard.y, shard.train_mask
        assert y is not None, "the caller checks it"
        assert mask is not None, "the caller checks it"

        def counted() -> tuple[int, float]:
            weights = self.weights_of(y)
            return int(mask.sum()), float(mask.sum() if weights is None else weights[mask].sum())

        return shard.adjacency.slot(_TRAINING, Memo).get(self.weight_key, (y, mask), counted)

    def _share(self, shard: Shard, stage: Stage) -> float | None:
        """Return the sum of the weights of a stage's nodes, asked once of a GPU; ``None`` if nodes have none."""
        y, mask, key = shard.y, getattr(shard, f"{stage}_mask"), self.weight_key
        assert y is not None, "the caller checks it"

        def summed() -> float:
            weights = self.weights_of(y)
            assert weights is not None
            return float(weights[_labelled_rows(shard, stage)].sum())

        if key is None:
            return None
        return shard.adjacency.slot(_SHARES, Memo).get((stage, *key), (y, mask), summed)

    def _in_step(self, share: float, num_in_step: int | None) -> float:
        """Return the nodes that all ranks train on in a step, or their weights; 1 if there are none.

        If ``num_in_step`` nodes are known to be in the step, ranks exchange weights alone.
        """
        if self.averages_models:
            return share or 1.0
        if num_in_step is not None and self.weight_key is None:
            return float(num_in_step) or 1.0
        return float(self.communicator.gather([share]).sum()) or 1.0

    def _evaluate(self, batch: Shard | PartBatch, stage: Stage) -> None:
        """Update and log the metrics of a stage."""
        shard, out = self.evaluated(batch)
        if shard.y is None or getattr(shard, f"{stage}_mask") is None or not shard.counts[f"{stage}_mask"]:
            raise InputError(_UNLABELLED.format(stage))
        rows = _labelled_rows(shard, stage)
        out = each_tensor(out, lambda one: one.to(shard.x.device))
        self._noted(out, shard.y, rows, stage, share=self._share(shard, stage))

    def _idle(self, num_in_step: int | None, sample: Data | None) -> Tensor:
        """Return the loss of a rank that has nothing to train in a step; it takes part in all collective calls."""
        shard = self.shard
        assert shard.y is not None, "other ranks have labels"
        none = shard.y[:0].to(self.device)
        self._log(
            "train", torch.zeros(0, *self.width, device=self.device), none, torch.zeros((), device=self.device), 0.0
        )
        loss = self.idle_loss(sample)  # first, as the others run the model first
        self._in_step(0.0, num_in_step)
        return loss

    def _noted(
        self,
        out: Any,
        y: Tensor,
        rows: Tensor,
        stage: Stage,
        weight: Tensor | None = None,
        share: float | None = None,
    ) -> tuple[Tensor, float]:
        """Return the summed loss over labelled ``rows`` and their share; log the metrics.

        Losses are multiplied by ``weight`` and by :meth:`weights_of`. If the caller knows the sum of these factors over
        ``rows`` (``share``), no GPU is asked for it.
        """
        of_nodes = self.weights_of(y)
        factor = weight if of_nodes is None else of_nodes if weight is None else weight * of_nodes
        total, count = summed_loss(out, y, rows, factor, self.node_losses)
        if share is None:
            share = count if factor is None else float(factor[rows].sum(dtype=torch.float64))
        self._log(stage, self.predictions(out)[rows], y[rows], total, share, None if weight is None else weight[rows])
        return total, share

    def _log(
        self, stage: Stage, out: Tensor, y: Tensor, total: Tensor, share: float, weight: Tensor | None = None
    ) -> None:
        """Update and log the metrics of a stage, with the nodes of a step."""
        named = {
            name.removeprefix(f"{stage}_"): cast(Metric, metric)
            for name, metric in self.metrics.items()
            if name.startswith(f"{stage}_")
        }
        loss = named.pop("loss")
        loss.update(total.detach() / (share or 1), weight=share)
        if named:
            self.update_scores(named, out.detach(), y, weight)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        self.log(f"{stage}_loss", loss, prog_bar=not named, **options)
        for name, score in named.items():
            self.log(f"{stage}_{name}", score, prog_bar=name == next(iter(named)), **options)


def _labelled_rows(shard: Shard, stage: Stage) -> Tensor:
    """Return the labelled nodes of a stage; kept with the part, as the host waits for a GPU to find them."""
    y, mask = shard.y, getattr(shard, f"{stage}_mask")
    assert y is not None, "the caller checks it"
    return shard.adjacency.slot(_LABELLED, Memo).get(stage, (y, mask), lambda: labelled_rows(y, mask))


def form_of(y: Tensor) -> str:
    """Name the type and shape of labels, such as ``float32 of shape (N, 1)``."""
    return f"{str(y.dtype).removeprefix('torch.')} of shape (N{''.join(f', {size}' for size in y.shape[1:])})"
