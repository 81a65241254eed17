"""Node classification with any PyG model, on any backend."""

from __future__ import annotations

from typing import Any, Literal, cast

from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MultilabelF1Score
from typing_extensions import override

from pygdist.backends import Backend, Savings
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.module import GraphModule
from pygdist.nn.inputs import call_model
from pygdist.nn.loss import labelled, summed_loss

__all__ = ["NodeClassifier", "run_model"]

Stage = Literal["train", "val", "test"]


def run_model(model: nn.Module, shard: Shard) -> Tensor:
    """Call ``model`` as anyone would, with the rank's own rows, and edge inputs if its forward takes them.

    Returns:
        One row per owned node, wide enough for every class.

    Raises:
        InputError: If the model takes another number of features than the graph has, or gives too few values.
    """
    return call_model(model, shard, shard.adjacency, num_classes=shard.num_classes, multi_label=shard.multi_label)


class NodeClassifier(GraphModule):
    """Trains a PyG model to classify nodes; the model's layers stay as they are.

    Logs ``{train,val,test}_loss`` and ``_acc`` (or ``_f1`` for several labels per node) over all labelled nodes of
    the whole graph, the same number on every rank.

    Args:
        model: Any module called as ``model(x, edge_index)``, and with ``edge_weight``, ``edge_attr`` or ``edge_type``
            if its forward has these parameters and the graph has them. ``in_channels=-1`` layers take their size from
            the graph.
        backend: How neighbours arrive: a registered name, a class path, or an instance.
        lr: Learning rate of Adam; another optimiser goes through ``--optimizer`` on the command line, or a subclass.
        weight_decay: Weight decay of Adam.
        savings: Which work need not be done, and the memory for it; ``--model.savings.first_hop=false`` for example.

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
    ) -> None:
        super().__init__(model, backend, lr, weight_decay, savings)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        shard = self._shard()
        self.metrics = nn.ModuleDict({
            f"{name}_{kind}": self._score(shard) if kind == "score" else MeanMetric()
            for name in ("train", "val", "test")
            for kind in ("loss", "score")
        })  # fmt: skip
        self._score_name = "f1" if shard.multi_label else "acc"

    @override
    def forward(self, shard: Shard) -> Tensor:
        return run_model(self.model, shard)

    @override
    def training_step(self, shard: Shard, batch_idx: int) -> Tensor:
        total = self._evaluate(shard, "train")
        return self.scaled(total, shard.counts["train_mask"])

    @override
    def validation_step(self, shard: Shard, batch_idx: int) -> None:
        self._evaluate(shard, "val")

    @override
    def test_step(self, shard: Shard, batch_idx: int) -> None:
        self._evaluate(shard, "test")

    @override
    def predict_step(self, shard: Shard, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Global ids of the owned nodes and the model's output for them."""
        return shard.owned_id, self(shard)

    def _evaluate(self, shard: Shard, stage: Stage) -> Tensor:
        """Summed loss over the rank's labelled nodes of the stage; updates and logs the stage's metrics."""
        mask = getattr(shard, f"{stage}_mask")
        if shard.y is None or mask is None or not shard.counts[f"{stage}_mask"]:
            raise InputError(f"the graph has no labelled nodes for stage '{stage}' ({stage}_mask)")
        out = self(shard)
        total, count = summed_loss(out, shard.y, mask)
        chosen = labelled(shard.y, mask)
        loss, score = (cast(Metric, self.metrics[f"{stage}_{kind}"]) for kind in ("loss", "score"))
        loss.update(total.detach() / max(count, 1), weight=count)
        if shard.multi_label:
            score.update((out[chosen] > 0).long(), shard.y[chosen].long())  # as predict does; no guess of a sigmoid
        else:
            score.update((out[chosen].argmax(dim=-1) == shard.y[chosen]).float())
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        self.log(f"{stage}_loss", loss, **options)
        self.log(f"{stage}_{self._score_name}", score, prog_bar=True, **options)
        return total

    def _score(self, shard: Shard) -> Metric:
        """Micro-averaged accuracy, or F1 for several labels per node."""
        return MultilabelF1Score(num_labels=shard.num_classes, average="micro") if shard.multi_label else MeanMetric()
