"""Link prediction with any PyG model: it learns to tell edges from pairs of nodes without an edge."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from pygdist.backends import Backend, Savings
from pygdist.backends.base import names_of
from pygdist.comm import NodeDirectory
from pygdist.errors import InputError
from pygdist.graph import Shard, corrupted_sources
from pygdist.graph.links import drawn
from pygdist.kernels import CSR, sddmm
from pygdist.kernels.csr import pointers
from pygdist.lightning.checks import check_model
from pygdist.lightning.link_pairs import LinkPairs, Pairs
from pygdist.lightning.module import GraphModule, Mean
from pygdist.lightning.parts import PartBatch, sampled_graph
from pygdist.nn.inputs import call_encoder
from pygdist.nn.norms import GLOBAL_NORMS

Stage = Literal["train", "val", "test"]
_NO_EDGES = {
    "train": "the graph has no edges to learn from",
    "val": "the share of edges held out for validation (edge_split) has no edge; make it larger",
    "test": "the share of edges held out for test (edge_split) has no edge; make it larger",
}
_STAGE_EPOCHS = {"val": -1, "test": -2}  # in place of an epoch, so that every evaluation draws the same pairs


class HitsAtK(Metric):
    """The share of edges that score higher than the K-th best negative pair, over all ranks (OGB's Hits@K).

    Args:
        k: The number K. With fewer than K negative pairs the share is 1.
    """

    full_state_update = False
    positive: list[Tensor]
    negative: list[Tensor]

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("positive", default=[], dist_reduce_fx="cat")
        self.add_state("negative", default=[], dist_reduce_fx="cat")

    @override
    def update(self, positive: Tensor, negative: Tensor) -> None:
        """Add the scores of edges and of negative pairs."""
        self.positive.append(positive)
        self.negative.append(negative)

    @override
    def compute(self) -> Tensor:
        positive, negative = dim_zero_cat(self.positive), dim_zero_cat(self.negative)
        if negative.numel() < self.k:
            return torch.ones((), device=positive.device)
        return (positive > negative.topk(self.k).values[-1]).float().mean()


class LinkPredictor(GraphModule):
    """Trains a PyG model to predict edges: the model returns a row for each node, and a decoder scores pairs of rows.

    Each epoch compares every edge with one negative pair: the edge's target and a random source that has no edge to
    this target, not even a held-out one. Negative pairs depend on ``seed``, the epoch and the edge's id, so the pairs
    are the same on any number of ranks. The loss is the mean binary cross-entropy over edges and negative pairs.

    With :class:`~pygdist.sampler.EdgeBatches` and a backend that samples (``pull``), a step trains on some of the
    edges. The number of negative pairs for each edge is then ``EdgeBatches(negatives=...)``, and the pairs depend on
    ``GraphDataModule(batch_seed=...)`` instead of ``seed``.

    Held-out edges (``GraphDataModule(edge_split=...)``) are compared with the same negative pairs in every evaluation.
    To recognise edges, a rank holds 8 more bytes for each of its edges, or 32 if the backend splits nodes
    (``delayed``).

    Logs ``{train,val,test}_loss``, ``{val,test}_auc`` and ``{val,test}_hits``, the same number on all ranks.

    Args:
        model: Any module that is called as ``model(x, edge_index)``. If ``forward`` also has a parameter
            ``edge_weight``, ``edge_attr`` or ``edge_type`` and the graph has this field, the field is passed, too. The
            model returns a row for each node.
        decoder: Module that scores pairs: called with the rows of sources and the rows of targets, ``(k, C)`` each, it
            returns ``(k,)`` or ``(k, 1)``. The dot product by default. With several ranks, norms over all pairs are
            refused.
        backend: The way in which neighbours arrive: a registered name, a class path, or an instance. Not ``replica``,
            as the backend must see edges between parts.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        train_share: The share of the edges that an epoch trains on; each epoch draws other edges. With mini-batches,
            which train on all edges, only 1 is allowed.
        hits_at: The number K of the score Hits@K.
        seed: Seed of the edges that an epoch trains on, and of negative pairs.
        savings: Shortcuts to take, and the memory for them.

    The other arguments are those of :class:`~pygdist.lightning.GraphModule`.

    Raises:
        InputError: If a number is out of range, or the backend trains each part alone; in ``fit``, on several ranks, if
            the decoder has a norm over all pairs.

    Example:
        >>> data = GraphDataModule("sbm", edge_split=(0.05, 0.1))
        >>> module = LinkPredictor(GCN(-1, 64, num_layers=2, out_channels=32), backend="tensor")
        >>> trainer.fit(module, datamodule=data)
    """

    learns_edges: ClassVar[bool | None] = True

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module | None = None,
        backend: Backend | str = "comm",
        lr: float = 0.01,
        weight_decay: float = 0.0,
        train_share: float = 1.0,
        hits_at: int = 50,
        seed: int = 0,
        savings: Savings = Savings(),  # noqa: B008 (frozen)
        check: bool = True,
        detect_nan: bool = True,
    ) -> None:
        super().__init__(model, backend, lr, weight_decay, savings, check=check, detect_nan=detect_nan)
        if not 0 < train_share <= 1:
            raise InputError(f"train_share is {train_share}, expected a share above 0, up to 1")
        if hits_at < 1:
            raise InputError(f"hits_at is {hits_at}, expected at least 1")
        if self.backend.abilities.trains_parts:
            raise InputError(
                f"backend '{self.backend.name}' trains parts by themselves, but a pair has nodes in two parts; use "
                f"backend {names_of(lambda abilities: not abilities.trains_parts)}"
            )
        if decoder is not None:
            check_model(decoder, "decoder")
        self.decoder = decoder
        if not 0 <= seed < 1 << 62:
            raise InputError(f"seed is {seed}, expected 0 to 2**62 - 1")
        self.train_share, self.hits_at, self.seed = train_share, hits_at, seed
        self._directory: NodeDirectory | None = None
        self._pairs: tuple[Shard, LinkPairs] | None = None  # a shard and its pairs

    @property
    @override
    def best_by(self) -> tuple[str, Literal["min", "max"]]:
        return "val_auc", "max"

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        batches = self._datamodule().batches
        if batches is not None and not batches.of_edges:
            raise InputError(
                f"batches: LinkPredictor trains on pairs of nodes, but {type(batches).__name__} have nodes; set "
                "batches=EdgeBatches([10, 5]), with a number for each layer"
            )
        if self.train_share < 1 and batches is not None:
            raise InputError(
                "train_share: an epoch of mini-batches has all edges; leave it out (limit_train_batches shortens an "
                "epoch)"
            )
        if self.decoder is not None:
            if stage == "fit" and self.communicator.world_size > 1:
                _refuse_norms(self.decoder)
            self.trainer.precision_plugin.convert_module(self.decoder)
        shard, self._pairs = self.shard, None
        with torch.inference_mode(False):
            owned_id = shard.owned_id.to(self.communicator.device)
            self._directory = NodeDirectory(owned_id, shard.num_nodes, self.communicator)
        self.metrics["train_loss"] = Mean()
        for name in ("val", "test"):
            scores = {f"{name}_auc": BinaryAUROC(), f"{name}_hits": HitsAtK(self.hits_at)}
            self.metrics.update({f"{name}_loss": Mean(), **scores})

    @override
    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._pairs = self._directory = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pairs": None, "_directory": None}

    @override
    def forward(self, shard: Shard) -> Tensor:
        return call_encoder(self.network, shard, shard.adjacency)

    @override
    def training_step(self, batch: Shard | PartBatch, batch_idx: int) -> Tensor:
        if isinstance(batch, PartBatch):
            return self.in_step(batch, lambda: self._learn_sample(batch))
        shard = batch
        pairs = self._pairs_of(shard).train
        if self.train_share < 1:
            bits = drawn(self.seed + 1, torch.full_like(pairs.e_id, self.current_epoch), pairs.e_id)
            pairs = pairs.where(((bits >> 11) & (2**53 - 1)).double() / 2.0**53 < self.train_share)
        total, count = self._evaluate(shard, pairs, "train")
        return self.scaled(total, count, 2 * pairs.target.numel())

    @override
    def validation_step(self, shard: Shard, batch_idx: int) -> None:
        self._evaluate(shard, self._pairs_of(shard).val, "val")

    @override
    def test_step(self, shard: Shard, batch_idx: int) -> None:
        self._evaluate(shard, self._pairs_of(shard).test, "test")

    @override
    def predict_step(self, shard: Shard, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return the global ids of the owned nodes and the model's rows for them."""
        return shard.owned_id, self(shard)

    def _learn_sample(self, batch: PartBatch) -> Tensor:
        """Return the loss over the pairs of a mini-batch (:class:`~pygdist.sampler.EdgeBatches`)."""
        sample, count = batch.sample, float(batch.num_in_step or 1)
        if sample is None or batch.shard is None:  # other ranks have edges left
            self._log_loss("train", torch.zeros((), device=self.device), 0)
            return self.idle_loss(sample)
        self.place(batch.shard)
        graph, edges = sampled_graph(sample)
        rows = call_encoder(self.model, graph, edges)
        source, target = (rows[end] for end in sample.edge_label_index)
        scores = (source * target).sum(dim=1) if self.decoder is None else self.decoder(source, target).reshape(-1)
        label = sample.edge_label.to(scores)
        total = functional.binary_cross_entropy_with_logits(scores, label, reduction="sum")
        self._log_loss("train", total, label.numel())
        return self.scaled(total, count, label.numel())

    def _pairs_of(self, shard: Shard) -> LinkPairs:
        """Return the pairs of a shard, which are made once."""
        if self._pairs is None or self._pairs[0] is not shard:
            assert self._directory is not None, "setup made it"
            splits = self.backend.splits_nodes
            with torch.inference_mode(False):  # training uses what an evaluation may ask for first
                self._pairs = shard, LinkPairs.of(shard, self._directory, splits_nodes=splits)
        return self._pairs[1]

    def _evaluate(self, shard: Shard, pairs: Pairs | None, stage: Stage) -> tuple[Tensor, int]:
        """Return the summed loss over this rank's pairs, and the number of all ranks' pairs; update and log metrics."""
        if pairs is None:
            raise InputError(f"no edges are held out for stage '{stage}': GraphDataModule(edge_split=(0.05, 0.1))")
        positive, negative = self._scores(shard, pairs, _STAGE_EPOCHS.get(stage, self.current_epoch))
        total = functional.softplus(-positive).sum() + functional.softplus(negative).sum()
        count_here = 2 * pairs.target.numel()
        count = int(self.communicator.gather([float(count_here)]).sum())
        if count == 0:
            raise InputError(_NO_EDGES[stage])
        self._log_loss(stage, total, count_here)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        if stage != "train":
            auc, hits = (cast(Metric, self.metrics[f"{stage}_{name}"]) for name in ("auc", "hits"))
            # between 0 and 1 in the same order; a sigmoid would round large scores to 1
            both = functional.softsign(torch.cat([positive, negative]).detach().double()) / 2 + 0.5
            auc.update(both, torch.cat([torch.ones_like(positive), torch.zeros_like(negative)]).long())
            hits.update(positive.detach(), negative.detach())
            self.log(f"{stage}_auc", auc, prog_bar=True, **options)
            self.log(f"{stage}_hits", hits, **options)
        return total, count

    def _log_loss(self, stage: Stage, total: Tensor, count: int) -> None:
        """Update and log the loss of a stage, with the pairs of a step on this rank."""
        loss = cast(Metric, self.metrics[f"{stage}_loss"])
        loss.update(total.detach() / max(count, 1), weight=count)
        self.log(f"{stage}_loss", loss, prog_bar=stage == "train", on_step=False, on_epoch=True, batch_size=1)

    def _scores(self, shard: Shard, pairs: Pairs, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the scores of edges, and of as many negative pairs."""
        communicator, directory = self.communicator, self._directory
        assert directory is not None, "setup made it"
        rows, known = self(shard), self._pairs_of(shard).known
        negatives = corrupted_sources(
            pairs.target, pairs.e_id, shard.num_nodes, known=known, seed=self.seed, epoch=epoch
        )
        plan, position = directory.plan(negatives.to(communicator.device))
        halo = communicator.exchange_rows(rows, pairs.plan.to(rows.device), label="rows of sources")
        drawn_rows = communicator.exchange_rows(rows, plan.to(rows.device), label="rows of other sources")
        return (
            self._decoded(torch.cat([rows, halo]), pairs.source, rows, pairs.target),
            self._decoded(torch.cat([rows, drawn_rows]), position.to(rows.device), rows, pairs.target),
        )

    def _decoded(self, sources: Tensor, source: Tensor, targets: Tensor, target: Tensor) -> Tensor:
        if self.decoder is not None:
            out: Tensor = self.decoder(sources[source], targets[target])
            return out.reshape(-1)
        pairs = CSR(pointers(target, targets.size(0)), source, sources.size(0))  # edges are sorted by target
        return sddmm(pairs, sources.unsqueeze(1), targets.unsqueeze(1)).squeeze(1)


def _refuse_norms(decoder: nn.Module) -> None:
    """Refuse norms over a decoder's rows: these are the pairs of one rank, so statistics would differ between ranks."""
    for name, module in decoder.named_modules():
        if isinstance(module, tuple(GLOBAL_NORMS)) and getattr(module, "mode", "graph") != "node":
            raise InputError(
                f"decoder: '{name}' ({type(module).__name__}) takes its statistics over the pairs of one rank, so the "
                "result depends on the number of ranks; use a norm of single rows, such as torch.nn.LayerNorm"
            )
