"""Node classification with any PyG model, on any backend."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MultilabelF1Score
from typing_extensions import override

from pygdist.backends import Backend, Savings
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.module import Mean
from pygdist.lightning.node_module import NodeModule, form_of
from pygdist.nn.inputs import checked_columns, checked_rows
from pygdist.nn.loss import node_losses

_ONE_TENSOR = "override logits(outputs) to return the one with a column for every class"


class NodeClassifier(NodeModule):
    """Trains a PyG model to classify nodes; the model's layers stay as they are.

    Logs ``{train,val,test}_loss`` and ``_acc`` (or ``_f1`` for several labels per node) over all labelled nodes of
    the whole graph, the same number on all ranks. With mini-batches and GraphSAINT's normalisation, ``train_loss`` and
    ``train_acc`` are estimates: means over the nodes that an epoch samples, with larger weights for nodes that are
    sampled rarely. ``train_f1`` counts a node as often as the node is sampled.

    A subclass with another loss overrides :meth:`node_losses`, which is called for whole parts and for mini-batches.
    Such a subclass may learn any labels. For numbers to predict, ``(N, k)`` or with more dimensions, only the loss is
    logged, since accuracy and F1 are for classes. A subclass for a model with several outputs (a tuple, list or
    dictionary) overrides :meth:`logits` too. A subclass with an additional term of the loss adds the term to
    ``super().training_step(batch, batch_idx)``.

    Args:
        model: Any module that is called as ``model(x, edge_index)``. If ``forward`` also has a parameter
            ``edge_weight``, ``edge_attr`` or ``edge_type`` and the graph has this field, the field is passed, too.
            Layers with ``in_channels=-1`` take their size from the graph.
        class_weights: Factor on the loss of the nodes of each class. The mean loss is, as in
            ``torch.nn.CrossEntropyLoss(weight=...)``, the sum of weighted losses over the sum of weights, over all
            ranks. The score does not count the weights.

    The other arguments and their errors are those of :class:`~pygdist.lightning.GraphModule`.

    Raises:
        InputError: If a weight is negative. In a run, if ``class_weights`` does not have one number for each class, or
            is given for nodes with several labels; if labels are numbers to predict and no subclass has a loss for
            numbers (use :class:`~pygdist.lightning.NodeRegressor`); or if the model's output does not have a row for
            each node and a column for each class.

    Example:
        >>> module = NodeClassifier(GCN(-1, 16, num_layers=2, out_channels=7, dropout=0.5), lr=0.01)
    """

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

    @property
    @override
    def best_by(self) -> tuple[str, Literal["min", "max"]]:
        if self.learns_numbers:
            return super().best_by
        return "val_f1" if self.shard.multi_label else "val_acc", "max"

    @override
    def check_labels(self, shard: Shard) -> None:
        weights = self.class_weights
        if self.learns_numbers and getattr(self.node_losses, "__func__", None) is NodeClassifier.node_losses:
            assert shard.y is not None
            raise InputError(
                f"{type(self).__name__} learns classes, but the labels (y) of the graph are numbers to predict "
                f"({form_of(shard.y)}); use NodeRegressor (--task=regression), number the classes from 0, set "
                "num_classes for labels between 0 and 1, or override node_losses"
            )
        if weights is not None and (shard.multi_label or self.learns_numbers):
            problem = "have no class" if self.learns_numbers else "may have several classes"
            raise InputError(f"class_weights: nodes of this graph {problem}; leave class_weights out")
        if weights is not None and len(weights) != shard.num_classes:
            raise InputError(
                f"class_weights has {len(weights)} numbers for {shard.num_classes} classes, but one for each is needed"
            )

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits; a subclass for a model with several outputs picks from ``outputs`` here."""
        return super().predictions(outputs)

    @override
    def predictions(self, outputs: Any) -> Tensor:
        return self.logits(outputs)

    @override
    def labels_of(self, out: Tensor) -> Tensor:
        if self.learns_numbers:
            return out
        return (out > 0).to(torch.int8) if self.shard.multi_label else out.argmax(dim=-1)

    @override
    def checked(self, outputs: Any) -> Any:
        """Return the outputs; refuse outputs whose logits are not a matrix with a column for every class.

        If labels are numbers to predict, the logits may be any tensor with a row for each node.
        """
        if self.learns_numbers:
            outputs = self.with_columns(outputs)
            rows = self.logits(outputs)
            return outputs if isinstance(rows, Tensor) and rows.dim() > 1 else checked_rows(rows, _ONE_TENSOR)
        rows = checked_rows(self.logits(outputs), _ONE_TENSOR)
        checked_columns(rows, num_classes=self.shard.num_classes, multi_label=self.shard.multi_label)
        return outputs

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        r"""Return the loss of each labelled node: cross-entropy, or binary cross-entropy for several labels per node.

        Training minimises the mean over the nodes of a step. The logged loss is the mean over all nodes of a stage. k
        may be 0 on a rank.

        Args:
            out: The model's outputs for the k labelled nodes: a tensor, or tensors in a tuple, list or dictionary. A
                tensor without a row for each node is passed whole.
            y: The labels of the k nodes.

        Shapes:
            ``out`` is :math:`(k, C)`, ``y`` :math:`(k)` int64 or :math:`(k, C)` float, the result :math:`(k)`. If
            labels are numbers to predict, an override gets ``y`` as :math:`(k, 1)`, :math:`(k, C)` or with more
            dimensions, and an output of shape :math:`(k)` as :math:`(k, 1)`.
        """
        return node_losses(self.logits(out), y)

    @property
    @override
    def weight_key(self) -> tuple[float, ...] | None:
        return None if self.class_weights is None else tuple(self.class_weights)

    @override
    def weights_of(self, y: Tensor) -> Tensor | None:
        """Return the weight of each node's class, 0 for unlabelled nodes; ``None`` without ``class_weights``."""
        if self.class_weights is None:
            return None
        key = y.device, *self.class_weights
        if self._weights is None or self._weights[0] != key:
            self._weights = key, torch.tensor([*self.class_weights, 0.0], dtype=torch.float64, device=y.device)
        return self._weights[1].index_select(0, y.where(y >= 0, len(self.class_weights)))

    @override
    def make_scores(self, shard: Shard) -> dict[str, Metric]:
        """Return accuracy, or micro-averaged F1 for several labels per node, or nothing for numbers to predict."""
        if self.learns_numbers:
            return {}
        if shard.multi_label:
            return {"f1": MultilabelF1Score(num_labels=shard.num_classes, average="micro")}
        return {"acc": Mean()}

    @override
    def update_scores(self, scores: dict[str, Metric], out: Tensor, y: Tensor, weight: Tensor | None) -> None:
        for name, score in scores.items():
            if name == "f1" and len(y) == 0:  # which torchmetrics cannot take
                continue
            if name == "f1":
                score.update((out > 0).long(), y.long())  # as predict does; torchmetrics guesses a sigmoid
            else:
                score.update((out.argmax(dim=-1) == y).float(), weight=1.0 if weight is None else weight)
