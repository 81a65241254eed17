"""Regression of nodes: numbers are predicted with any PyG model, on any backend."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from pygdist.backends import Backend, Savings
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.module import DoubleMetric, Mean
from pygdist.lightning.node_module import NodeModule, form_of
from pygdist.nn.inputs import checked_tensor
from pygdist.nn.loss import Regression, value_losses

_ONE_TENSOR = "override predictions(outputs) to return the one with a column for every target"
_LEAST_SPREAD = 1e-14  # standard deviation relative to the mean; what is below is rounding of float64


class R2Score(DoubleMetric):
    """The coefficient of determination over all nodes of all ranks, averaged over targets.

    torchmetrics' own sums squares in float32, which cancel if targets lie far from 0, and counts a sum of squares below
    1e-4 as 0. Here ranks merge means and squared deviations in float64. As in scikit-learn, a target that is the same
    for all nodes counts 1 if it is predicted exactly, else 0, and there is no score (NaN) of fewer than two nodes.

    Args:
        width: Number of targets.
    """

    full_state_update = False
    moments: Tensor
    errors: Tensor
    num_nodes: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.set_dtype(torch.float64)
        self.add_state("moments", torch.zeros(3, width, dtype=torch.float64), dist_reduce_fx=_merged)
        self.add_state("errors", torch.zeros(width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_nodes", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add nodes: predictions and targets, ``(n, width)``, and a weight for each node, ``(n,)``."""
        y, out = y.to(self.dtype), out.to(self.dtype)
        weights = y.new_ones(len(y), 1) if weight is None else weight.to(self.dtype).unsqueeze(1)
        count = weights.sum(dim=0)
        mean = (weights * y).sum(dim=0) / _above_zero(count)
        deviations = (weights * (y - mean).square()).sum(dim=0)
        self.moments = _merged(torch.stack([self.moments, torch.stack([count.expand_as(mean), mean, deviations])]))
        self.num_nodes = self.num_nodes + len(y)  # weights may sum to less
        self.errors = self.errors + (weights * (y - out).square()).sum(dim=0)

    @override
    def compute(self) -> Tensor:
        count, mean, deviations = self.moments
        varies = deviations > count * (_LEAST_SPREAD * mean).square()
        score = torch.where(varies, 1 - self.errors / _above_zero(deviations), (self.errors == 0).to(self.dtype))
        return torch.where(self.num_nodes < 2, torch.nan, score).mean()


def _merged(moments: Tensor) -> Tensor:
    """Merge weights, means and summed squared deviations of parts, ``(parts, 3, width)``, by Chan's formula."""
    counts, means, deviations = moments.unbind(dim=1)
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / _above_zero(count)
    return torch.stack([count, mean, (deviations + counts * (means - mean).square()).sum(dim=0)])


def _above_zero(value: Tensor) -> Tensor:
    return value.clamp(min=torch.finfo(value.dtype).tiny)


class NodeRegressor(NodeModule):
    """Trains a PyG model to predict numbers for nodes; the model's layers stay as they are.

    Targets are the graph's ``y``: floats of shape ``(N,)`` or ``(N, k)``. The model returns a column for each target;
    for one target, a tensor of shape ``(N,)`` is enough. A node whose targets are all NaN is unlabelled: the node is in
    no mask, no loss and no score. Refused are NaN in some targets of a node, infinite targets, and integers, which are
    classes.

    Logs ``{train,val,test}_loss``, ``_r2`` and ``_mae`` over all labelled nodes of the whole graph, the same number on
    all ranks. With several targets, a score is the mean over targets. With mini-batches, training scores are counted
    during the epoch, while the model changes; with GraphSAINT's normalisation, nodes count with their weights.

    A subclass with another loss overrides :meth:`node_losses`. A subclass for a model with several outputs (a tuple,
    list or dictionary) overrides :meth:`predictions`, and :meth:`node_losses` too if the loss needs other outputs.

    Args:
        model: Any module that is called as ``model(x, edge_index)``. If ``forward`` also has a parameter
            ``edge_weight``, ``edge_attr`` or ``edge_type`` and the graph has this field, the field is passed, too.
            Layers with ``in_channels=-1`` take their size from the graph.
        loss: Loss of a target: squared error (``mse``), absolute error (``l1``), or torch's ``huber_loss`` with
            ``delta=1`` (``huber``). The loss of a node is the mean over its targets.

    The other arguments are those of :class:`~pygdist.lightning.GraphModule`.

    Raises:
        InputError: If ``loss`` has another value; in a run, if the labels are classes, or the model's output does not
            have the shape of the targets.

    Example:
        >>> data.y  # float32 of shape (N, 2)
        >>> module = NodeRegressor(GCN(-1, 16, num_layers=2, out_channels=2), loss="huber")
        >>> trainer.fit(module, datamodule=GraphDataModule(data))
    """

    float_labels: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend | str = "comm",
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        savings: Savings = Savings(),  # noqa: B008 (frozen)
        exact_evaluation: bool = True,
        check: bool = True,
        loss: Regression = "mse",
        detect_nan: bool = True,
    ) -> None:
        super().__init__(model, backend, lr, weight_decay, savings, exact_evaluation, check, detect_nan)
        if loss not in get_args(Regression):
            raise InputError(f"loss is {loss!r}, expected {' or '.join(get_args(Regression))}")
        self.loss = loss

    @property
    @override
    def best_by(self) -> tuple[str, Literal["min", "max"]]:
        return "val_r2", "max"

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        r"""Return the loss of each labelled node, averaged over its targets.

        Training minimises the mean over the nodes of a step. The logged loss is the mean over all nodes of a stage. k
        may be 0 on a rank.

        Args:
            out: The model's outputs for the k labelled nodes: a tensor, or tensors in a tuple, list or dictionary. A
                tensor without a row for each node is passed whole. A single output of shape :math:`(k)` is passed as
                :math:`(k, 1)`, like ``y``.
            y: The targets of the k nodes.

        Shapes:
            ``out`` and ``y`` are :math:`(k, C)`, the result :math:`(k)`.
        """
        return value_losses(self.predictions(out), y, loss=self.loss)

    @override
    def check_labels(self, shard: Shard) -> None:
        if shard.y is not None and not shard.y.is_floating_point():
            raise InputError(
                f"{type(self).__name__} predicts numbers, but the labels (y) of the graph are {form_of(shard.y)}; use "
                "NodeClassifier for classes, or floats with float_labels=True (pygdist partition --float_labels=true)"
            )

    @override
    def checked(self, outputs: Any) -> Any:
        outputs, y = self.with_columns(outputs), self.shard.y
        rows = checked_tensor(self.predictions(outputs), _ONE_TENSOR)
        if y is not None and y.is_floating_point() and rows.shape[1:] != y.shape[1:]:
            raise InputError(
                f"the model returns {form_of(rows)}, but the targets (y) are {form_of(y)}; set the model's "
                f"out_channels to {y.shape[-1]}, or override predictions(outputs)"
            )
        return outputs

    @override
    def make_scores(self, shard: Shard) -> dict[str, Metric]:
        width = 1 if shard.y is None else int(torch.Size(shard.y.shape[1:]).numel())
        return {"r2": R2Score(width), "mae": Mean()}

    @override
    def update_scores(self, scores: dict[str, Metric], out: Tensor, y: Tensor, weight: Tensor | None) -> None:
        out, y = out.flatten(1), y.flatten(1)
        scores["r2"].update(out, y, weight)
        scores["mae"].update((out.double() - y).abs().mean(dim=1), weight=1.0 if weight is None else weight)
