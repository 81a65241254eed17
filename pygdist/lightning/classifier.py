"""Node classification with any PyG model, on any backend."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import Metric
from torchmetrics.classification import MultilabelF1Score
from typing_extensions import override

from pygdist.backends import Backend, Savings
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.graph.adjacency import Slot
from pygdist.graph.memo import Memo
from pygdist.hops.arguments import each_tensor
from pygdist.lightning.module import GraphModule, Mean
from pygdist.lightning.parts import PartBatch, sampled_graph
from pygdist.nn.inputs import checked_columns, checked_rows, outputs_of
from pygdist.nn.loss import labelled_rows, node_losses, summed_loss

Stage = Literal["train", "val", "test"]

_LABELLED = Slot[Memo[Tensor]]("labelled nodes of each stage")
_SHARES = Slot[Memo[float]]("sums of class weights of each stage")
_TRAINING = Slot[Memo[tuple[int, float]]]("number and weights of training nodes")
_UNLABELLED = "the graph has no labelled nodes for stage '{0}' ({0}_mask)"


class NodeClassifier(GraphModule):
    """Trains a PyG model to classify nodes; the model's layers stay as they are.

    Logs ``{train,val,test}_loss`` and ``_acc`` (or ``_f1`` for several labels per node) over all labelled nodes of
    the whole graph, the same number on all ranks. With mini-batches and GraphSAINT's normalisation, ``train_loss`` and
    ``train_acc`` are estimates of these: means over the nodes that an epoch samples, with larger weights for nodes that
    are sampled rarely. ``train_f1`` counts a node as often as it is sampled.

    A subclass with another loss overrides :meth:`node_losses`, which is called for whole parts and for mini-batches. A
    subclass for a model with several outputs (a tuple, list or dictionary) overrides :meth:`logits` too.
    A subclass with an additional term adds it to ``super().training_step(batch, batch_idx)``.

    Args:
        model: Any module called as ``model(x, edge_index)``, and with ``edge_weight``, ``edge_attr`` or ``edge_type``
            if its forward has these parameters and the graph has them. ``in_channels=-1`` layers take their size from
            the graph.
        class_weights: Factor on the loss of the nodes of each class. The mean is that of
            ``torch.nn.CrossEntropyLoss(weight=...)``: the sum of weighted losses over the sum of weights, over all
            ranks. The score does not count them.

    The other arguments are those of :class:`~pygdist.lightning.GraphModule`.

    Raises:
        InputError: If a weight is negative; in a run, if there is not one weight for each class, or nodes may have
            several classes.

    Example:
        >>> module = NodeClassifier(GCN(-1, 16, num_layers=2, out_channels=7, dropout=0.5), lr=0.01)
    """

    learns_edges: ClassVar[bool | None] = False

    def __init__(
        self,
        model: nn.Module,
        backend: Backend | str = "comm",
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        savings: Savings = Savings(),  # noqa: B008 (frozen)
        exact_evaluation: bool = True,
        check: bool = True,
        class_weights: list[float] | None = None,
        detect_nan: bool = True,
    ) -> None:
        super().__init__(model, backend, lr, weight_decay, savings, exact_evaluation, check, detect_nan)
        if class_weights is not None and not all(0 <= weight < float("inf") for weight in class_weights):
            raise InputError(f"class_weights are {class_weights}, expected numbers from 0")
        if class_weights is not None and not any(class_weights):
            raise InputError(f"class_weights are {class_weights}, expected a number above 0 among them")
        self.class_weights = class_weights
        self._weights: tuple[tuple[Any, ...], Tensor] | None = None  # on a device, and what they were made of
        self._train_share: float | None = None  # of all ranks, in this run

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        batches = self._datamodule().batches
        if batches is not None and batches.of_edges:
            raise InputError(
                f"batches: NodeClassifier trains on nodes, but {type(batches).__name__} have edges; use NeighborBatches"
            )
        self._train_share = None
        shard, weights = self.shard, self.class_weights
        if weights is not None and shard.multi_label:
            raise InputError("class_weights: nodes of this graph may have several classes; leave class_weights out")
        if weights is not None and len(weights) != shard.num_classes:
            raise InputError(
                f"class_weights has {len(weights)} numbers for {shard.num_classes} classes, but one for each is needed"
            )
        for name in ("train", "val", "test"):
            self.metrics.update({f"{name}_loss": Mean(), f"{name}_score": _score(shard)})
        self._score_name = "f1" if shard.multi_label else "acc"

    @override
    def forward(self, shard: Shard) -> Any:
        """Return the model's outputs for the rank's own rows; edge inputs are passed if its forward takes them."""
        return self._checked(outputs_of(self.network, shard, shard.adjacency))

    def logits(self, outputs: Any) -> Tensor:
        """Return the tensor with a column for every class among the outputs of the model, one row per node.

        Scores and predictions are computed from it; by default, losses too.

        Args:
            outputs: The output itself, by default; a subclass picks from several.
        """
        tensor: Tensor = outputs
        return tensor

    def _checked(self, outputs: Any) -> Any:
        """Refuse outputs whose logits are not a matrix with a column for every class."""
        remedy = "override logits(outputs) to return the one with a column for every class"
        rows = checked_rows(self.logits(outputs), remedy)
        checked_columns(rows, num_classes=self.shard.num_classes, multi_label=self.shard.multi_label)
        return outputs

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        r"""Return the loss of each labelled node: cross-entropy, or binary cross-entropy for several labels per node.

        Training minimises the mean over the nodes of a step; the mean over all nodes of a stage is logged. A rank may
        have no node.

        Args:
            out: The model's outputs for these nodes: a tensor, or tensors in a tuple, list or dictionary. Those
                without a row for each node are passed whole.
            y: Their labels.

        Shapes:
            ``out`` is :math:`(k, C)`, ``y`` :math:`(k)` int64 or :math:`(k, C)` float, the result :math:`(k)`.
        """
        return node_losses(self.logits(out), y)

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
        return shard.owned_id, self.logits(out)

    def _share_of_all(self, shard: Shard, share: float) -> float:
        """Return the training nodes of all ranks, or their weights if classes have any."""
        if self.class_weights is None or self.averages_models:
            return shard.counts["train_mask"]
        if self._train_share is None:
            self._train_share = float(self.communicator.gather([share]).sum())
        return self._train_share or 1.0

    def _weights_of(self, y: Tensor) -> Tensor | None:
        """Return the weight of each node's class, 0 without a label; ``None`` if classes have none."""
        if self.class_weights is None:
            return None
        key = y.device, *self.class_weights
        if self._weights is None or self._weights[0] != key:
            self._weights = key, torch.tensor([*self.class_weights, 0.0], dtype=torch.float64, device=y.device)
        return self._weights[1].index_select(0, y.where(y >= 0, len(self.class_weights)))

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
        out = self._checked(outputs_of(self.model, graph, edges))
        norm = graph.get("node_norm")
        if norm is None:
            total, share = self._noted(out, graph.y, graph.labelled, "train")
        else:  # a node's norm is the share of the part's training nodes that it stands for
            count, share = self._training_of(shard)
            sampled = graph.layout.share * count if self.class_weights is None else None
            total, _ = self._noted(out, graph.y, graph.labelled, "train", norm * count, sampled)
        return self.scaled(total, self._in_step(share, num_in_step), share)

    def _training_of(self, shard: Shard) -> tuple[int, float]:
        """Return the number of a part's training nodes, and their weights if classes have any; asked once of a GPU."""
        y, mask, weights = shard.y, shard.train_mask, self.class_weights
        assert y is not None, "the caller checks it"
        assert mask is not None, "the caller checks it"

        def counted() -> tuple[int, float]:
            of_classes = self._weights_of(y)
            return int(mask.sum()), float(mask.sum() if of_classes is None else of_classes[mask].sum())

        key = None if weights is None else tuple(weights)
        return shard.adjacency.slot(_TRAINING, Memo).get(key, (y, mask), counted)

    def _share(self, shard: Shard, stage: Stage) -> float | None:
        """Return the sum of the class weights of a stage's nodes, asked once of a GPU; ``None`` without weights."""
        y, mask, weights = shard.y, getattr(shard, f"{stage}_mask"), self.class_weights
        assert y is not None, "the caller checks it"

        def summed() -> float:
            of_classes = self._weights_of(y)
            assert of_classes is not None
            return float(of_classes[_labelled_rows(shard, stage)].sum())

        if weights is None:
            return None
        return shard.adjacency.slot(_SHARES, Memo).get((stage, *weights), (y, mask), summed)

    def _in_step(self, share: float, num_in_step: int | None) -> float:
        """Return the nodes that all ranks train on in a step, or their weights; 1 if there are none.

        If ``num_in_step`` nodes are known to be in the step, ranks exchange weights alone.
        """
        if self.averages_models:
            return share or 1.0
        if num_in_step is not None and self.class_weights is None:
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
            "train",
            torch.zeros(0, shard.num_classes, device=self.device),
            none,
            torch.zeros((), device=self.device),
            0.0,
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

        Losses are multiplied by ``weight`` and by the weights of classes. If the caller knows the sum of these factors
        over ``rows`` (``share``), no GPU is asked for it.
        """
        of_classes = self._weights_of(y)
        factor = weight if of_classes is None else of_classes if weight is None else weight * of_classes
        total, count = summed_loss(out, y, rows, factor, self.node_losses)
        if share is None:
            share = count if factor is None else float(factor[rows].sum(dtype=torch.float64))
        self._log(stage, self.logits(out)[rows], y[rows], total, share, None if weight is None else weight[rows])
        return total, share

    def _log(
        self, stage: Stage, logits: Tensor, y: Tensor, total: Tensor, share: float, weight: Tensor | None = None
    ) -> None:
        """Update and log the metrics of a stage, with the nodes of a step."""
        loss, score = (cast(Metric, self.metrics[f"{stage}_{kind}"]) for kind in ("loss", "score"))
        loss.update(total.detach() / (share or 1), weight=share)
        if y.dim() == 2:
            score.update((logits > 0).long(), y.long())  # as predict does; torchmetrics guesses a sigmoid
        else:
            hits = (logits.argmax(dim=-1) == y).float()
            score.update(hits, weight=1.0 if weight is None else weight)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        self.log(f"{stage}_loss", loss, **options)
        self.log(f"{stage}_{self._score_name}", score, prog_bar=True, **options)


def _labelled_rows(shard: Shard, stage: Stage) -> Tensor:
    """Return the labelled nodes of a stage; kept with the part, as the host waits for a GPU to find them."""
    y, mask = shard.y, getattr(shard, f"{stage}_mask")
    assert y is not None, "the caller checks it"
    return shard.adjacency.slot(_LABELLED, Memo).get(stage, (y, mask), lambda: labelled_rows(y, mask))


def _score(shard: Shard) -> Metric:
    """Return a metric: micro-averaged accuracy, or F1 for several labels per node."""
    return MultilabelF1Score(num_labels=shard.num_classes, average="micro") if shard.multi_label else Mean()
