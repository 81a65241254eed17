"""``pushpull``: the first layer where the features are, the others where the batch is (P3, OSDI 2021, Sec. 3.2).

Each rank holds some columns of the features of all nodes (placement *columns*). A rank samples a batch, and pushes the
batch's edges to all ranks. Each rank computes the first layer on its columns, for the batches of all ranks. The rank
that sampled a batch pulls and adds the terms, and computes the other layers alone. The backward pass pushes the
gradient of the sum in the same way. Features never travel: only rows as wide as the first layer's output do. So this
backend pays if the output is narrower than the features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Backend
from pygdist.backends.passes.base import Forward
from pygdist.backends.passes.rehearsal import Call, Kind, ModelFacts
from pygdist.backends.passes.sampled import SampledHops, SampledPass
from pygdist.backends.sampling.backend import SampledBackend
from pygdist.backends.sampling.copies import group_sizes, held_columns, nearest, slices_of
from pygdist.backends.sampling.pipeline import LAG, LaggedSteps, Pipeline, of_layer
from pygdist.backends.sampling.pushed import PushedFields
from pygdist.backends.sampling.small import small_neighbourhood
from pygdist.backends.sampling.stand_in import StandIn, bound_arguments, cut_for, refuse_shared, refused, takes_weights
from pygdist.backends.sampling.totals import FirstLayer
from pygdist.backends.sampling.unheld import UnheldRows
from pygdist.backends.sampling.whole import whole_first_layer, whole_products
from pygdist.comm.sharded import ShardedWeights
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.shard import is_unknown
from pygdist.hops.arguments import tensors_of
from pygdist.hops.cuts import Cut, InEdges
from pygdist.hops.layer import own_class
from pygdist.hops.untouched import IrreversibleError
from pygdist.hops.user_code import in_one_line
from pygdist.nn.inputs import arguments_of, edge_inputs
from pygdist.nn.norms import INSTANCE_NORMS
from pygdist.sampler.base import MiniBatches
from pygdist.sampler.steps import Steps

log = logging.getLogger(__name__)

FirstWeights = Literal["gathered", "sharded"]

_ELSEWHERE = "uses the features outside its first layer, but each rank holds only some columns"


class PushPullBackend(SampledBackend):
    """Push the edges of batches to the ranks that hold feature columns, pull the first layer's sums (P3, Sec. 3.2.2).

    A step trains as one process would on the batches of all ranks. Up to and including its first weight, the model's
    first layer must be a sum with one term for each feature column. The input of this layer must be the graph's
    features, as they are or after dropout. Norms over nodes take the statistics of the rows that all ranks' batches
    compute. Evaluation is exact, and runs on the whole graph; there the first layer runs by columns, too.

    The ranks form groups in two ways: in a group of ``topology_parts`` ranks, the ranks together hold all in-edges; in
    a group of ``feature_parts`` ranks, they together hold all columns (P3, Sec. 3.4). By default all ranks are one
    group. In smaller groups each rank holds more copies, and sends less in each step; copies travel once. Both numbers
    must divide the number of ranks. The numbers do not change results, except which features dropout drops.

    Args:
        pipeline: Number of batches under way at once: 1, or 3 as in the paper (Sec. 3.3). With 3, exchanges overlap
            computing, the first layer's parameters get their gradient two steps late, and an epoch has two steps more.
            Validation, checkpoints and stopping are then allowed only at the end of an epoch.
        cache_gib: Memory of each rank, in GiB, for copies of in-edges and feature columns. The backend chooses the
            group sizes that are not given so that the copies fit: first ``topology_parts``, then ``feature_parts``.
        feature_parts: Number of ranks that together hold all columns of the features; with 1 no batch leaves its rank.
        topology_parts: Number of ranks that together hold all in-edges; with 1 each rank samples alone, and pushes no
            edges.
        first_weights: With ``gathered``, each rank computes gradients for its columns of the first layer's weights, and
            DDP puts these gradients together: optimisers, clipping and callbacks see the plain model. With ``sharded``,
            as in the paper, each rank trains its columns alone, and ranks put the model together at the end of an epoch
            and before each evaluation and checkpoint. ``sharded`` needs an optimiser that updates each element
            independently, and ``feature_parts`` equal to the number of ranks.

    Raises:
        InputError: If a number is out of range, or ``first_weights`` is unknown.

    Example:
        >>> data = GraphDataModule("sbm", batches=NeighborBatches([25, 10], batch_size=1000))
        >>> trainer.fit(NodeClassifier(GraphSAGE(-1, 32, 2, 10), backend="pushpull"), datamodule=data)
    """

    name = "pushpull"
    abilities = replace(SampledBackend.abilities, placement="columns", holds_columns=True)
    per_graph: ClassVar[tuple[str, ...]] = ("_cut_layer", "_first", "_facts", "_trial", "_flights")
    _flights: Pipeline | None = None
    _cut_layer: tuple[MessagePassing, Cut] | None = None
    _first: FirstLayer | None = None
    _facts: ModelFacts | None = None
    _trial: StandIn | None = None  # while a model is tried
    _weighted = False  # the first layer gets the weights of edges
    _drops = 0.0  # rate of dropout over the features
    _has_norms = False  # the model has norms over nodes

    def __init__(
        self,
        *,
        pipeline: Literal[1, 3] = 1,
        cache_gib: float = 0.0,
        feature_parts: int | None = None,
        topology_parts: int | None = None,
        first_weights: FirstWeights = "gathered",
    ) -> None:
        super().__init__()
        if pipeline not in (1, 3):
            raise InputError(f"pipeline is {pipeline}, expected 1 or 3")
        if not 0 <= cache_gib < math.inf:
            raise InputError(f"cache_gib is {cache_gib}, expected a finite number of GiB, 0 or more")
        for name, parts in (("feature_parts", feature_parts), ("topology_parts", topology_parts)):
            if parts is not None and parts < 1:
                raise InputError(f"{name} is {parts}, expected 1 or more")
        if first_weights not in get_args(FirstWeights):
            raise InputError(f"first_weights is '{first_weights}', expected one of {', '.join(get_args(FirstWeights))}")
        self.pipeline, self.cache_gib, self.first_weights = pipeline, cache_gib, first_weights
        self.feature_parts, self.topology_parts = feature_parts, topology_parts
        if pipeline == 3:
            self.abilities = replace(
                self.abilities, lag=LAG, late_gradients=True,
                approximation=f"{self.abilities.approximation}; the first layer's gradients are two steps late",
            )  # fmt: skip

    @override
    def steps(self, shard: Shard, batches: MiniBatches | None, model: nn.Module, *, seed: int) -> Steps | LaggedSteps:
        batches = self.batches_of(batches)
        if self._facts is None:
            self.look_at(model, batches)
        edge_bytes = sum(one.itemsize * math.prod(one.shape[1:]) for one in edge_inputs(model, shard).values())
        num_ranks, feature_parts = self.communicator.world_size, self.feature_parts
        if self.first_weights == "sharded" and feature_parts not in (None, num_ranks):
            raise InputError(
                f"feature_parts is {feature_parts}, but with first_weights='sharded' no two of {num_ranks} ranks may "
                "hold the same columns; leave it out, or use first_weights='gathered'"
            )
        feature_parts = num_ranks if self.first_weights == "sharded" else feature_parts
        sizes = group_sizes(shard, num_ranks, feature_parts, self.topology_parts, self.cache_gib, edge_bytes)
        if self.communicator.is_nccl and (self.pipeline > 1 or sizes.features < num_ranks):
            raise InputError(
                "backend 'pushpull': with pipeline=3, or feature_parts below the number of ranks, rows and gradients "
                "travel at once in two groups of nccl, which may wait for each other for ever; set the strategy's "
                "process_group_backend=gloo (--trainer.strategy.process_group_backend=gloo)"
            )
        log.info("groups of %d ranks hold all columns, groups of %d all in-edges", sizes.features, sizes.topology)
        aside, topology = self.beside(shard, model, sizes.topology)
        group, layer_group = aside, self.communicator
        if sizes.features < num_ranks:
            group = self.communicator.split(sizes.features, quiet=True)
        if sizes.features < num_ranks or self.pipeline > 1:
            layer_group = self.communicator.split(sizes.features)
        groups = [group] if layer_group is self.communicator else [group, layer_group]
        fields = PushedFields(topology, shard, aside, groups, batches, seed)
        steps = batches.across_ranks(shard, fields, self.communicator, seed=seed)
        assert self._cut_layer is not None, "look_at() finds it"
        columns = nearest(held_columns(shard, sizes.features, aside), self.shard.x.device, self.communicator)
        slices = slices_of(shard.x.size(1), sizes.features)
        sharded = self.first_weights == "sharded"
        self._first = FirstLayer(*self._cut_layer, columns, slices, layer_group, drops=self._drops, sharded=sharded)
        if self.pipeline == 1:
            return steps
        self._flights = Pipeline(self._first)
        return LaggedSteps(steps)

    @override
    def begin_step(self, sample: Data) -> None:
        if self._flights is not None:
            self._flights.begin_step(sample.get("ahead"), weighted=self._weighted)

    @property
    @override
    def sharded_weights(self) -> ShardedWeights | None:
        if self.first_weights == "gathered" or self._cut_layer is None or self.communicator.world_size == 1:
            return None
        layer, cut = self._cut_layer
        slices = slices_of(self.shard.x.size(1), self.communicator.world_size)
        weights = {id(one): one for one in map(layer.get_parameter, cut.weights) if one.requires_grad}
        return ShardedWeights(list(weights.values()), slices, self.communicator)

    @override
    def sit_out(self, sample: Data) -> Tensor | None:
        total = self._total(sample.get("blocks", ()))
        return None if total is None else total.sum() * 0

    @property
    @override
    def runs_idle(self) -> bool:
        return self._has_norms

    @override
    def end_step(self) -> Tensor | None:
        return None if self._flights is None else self._flights.late_term()

    @override
    def end_backward(self) -> None:
        if self._flights is not None:
            self._flights.end_backward()

    @override
    def not_trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [] if self._flights is None else self._flights.not_trained(parameters)

    @override
    def drain(self) -> None:
        if self._flights is not None:
            self._flights.drain()

    def _total(self, blocks: Sequence[InEdges]) -> Tensor | None:
        """Return the first layer's sum for this rank's batch; every rank makes the call. ``None`` if none has any."""
        if self._flights is not None:
            return self._flights.total()
        assert self._first is not None, "steps() makes it"
        return self._first.total(of_layer(blocks, weighted=self._weighted))

    @override
    def whole_first_layer(
        self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], others: Backend
    ) -> Tensor:
        shard = others.shard
        bound, cut = bound_arguments(layer, args, kwargs), cut_for(layer, shard)
        weighted = takes_weights(layer, bound, shard.edge_weight)
        if cut.late_hops is None:
            return whole_first_layer(layer, cut, shard, self.communicator, weighted=weighted)
        products = whole_products(layer, cut, shard, self.communicator)
        further = {name: value for name, value in bound.items() if name not in ("self", "x")}
        late_hops = cut.late_hops

        def after_weights(layer: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
            return late_hops(others.kept, layer, forward, *args, **kwargs)

        out: Tensor = others.run_layer(layer, after_weights, (products,), further)
        return out

    # -- the first layer -----------------------------------------------------------------------------------------------

    @override
    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trial, running = self._trial, self._now
        is_stub = is_unknown if trial is None else trial.is_stub
        if not any(isinstance(one, Tensor) and is_stub(one) for one in (*args, *kwargs.values())):
            return super().run_layer(layer, forward, args, kwargs)
        cut, bound = cut_for(layer, self.shard), bound_arguments(layer, args, kwargs)
        dropped = getattr(bound.get("x"), "dropped", 0.0)
        if trial is not None:
            if dropped and not layer.training:
                raise InputError(
                    "backend 'pushpull': the model drops features in evaluation too; pass training=self.training to "
                    "dropout"
                )
            self._drops = max(self._drops, dropped)
            self._weighted = takes_weights(layer, bound, trial.edge_weight)
            rows = trial.rows_for(layer, cut)
            if isinstance(running, SampledPass):
                return running.placed(layer, cut.rest, rows)
            return cut.rest(layer, rows)
        if dropped != self._drops:
            raise InputError(
                f"backend 'pushpull': the features go through dropout of rate {dropped}, but when the model was tried "
                f"the rate was {self._drops}; it cannot change in a run",
                of_one_rank=True,
            )
        assert isinstance(running, SampledPass), "all ranks found that rows can be left out"
        takes_weights(layer, bound, running.edge_weight)
        total = self._total(running.blocks)
        assert total is not None, "this rank has a batch"
        return running.placed(layer, cut.rest, total)

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().model_inputs(model, args, kwargs)

        def marked(value: Any) -> Any:
            return UnheldRows.of(value) if isinstance(value, Tensor) and is_unknown(value) else value

        return tuple(map(marked, args)), {name: marked(value) for name, value in kwargs.items()}

    @override
    def look_at(self, model: nn.Module, batches: Any) -> None:
        """Try a model on a small neighbourhood, the same on all ranks; find its hops and its first layer.

        Raises:
            InputError: If the first layer cannot run on some columns of the features; the message says why. If the
                features are no floating point numbers, the model has an ``InstanceNorm`` of torch's, or ``fan_out`` has
                another length than the model has hops.
        """
        if not self._columns.is_floating_point():
            raise InputError(
                f"backend 'pushpull': the features are {self._columns.dtype}, but a first layer multiplies them; "
                "convert them with float_features=True (--data.float_features=true)"
            )
        if any(isinstance(one, INSTANCE_NORMS) for one in model.modules()):
            raise refused(model, "has an InstanceNorm of torch's, whose rows may be nodes or channels; use PyG's")
        self.kept.uncompared, self._has_norms, self._drops = False, False, 0.0  # it runs outside of a call here
        num_hops = len(getattr(batches, "fan_out", ())) or 2
        try:
            layer, self._facts = self._layer_and_hops(model, num_hops)
        except (RuntimeError, TypeError, ValueError, IrreversibleError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"backend 'pushpull': {own_class(model).__name__} ends with {in_one_line(error)} on a small graph"
            ) from error
        finally:
            self._trial = None
        self._cut_layer = layer, cut_for(layer, self.shard)
        refuse_shared(model, layer, self._cut_layer[1])
        if self._facts is None:
            raise refused(model, self._all_rows)
        if batches is not None and len(self._facts.widths) != num_hops:
            raise InputError(
                f"fan_out has {num_hops} numbers, but {own_class(model).__name__} makes {len(self._facts.widths)} "
                "hops; backend 'pushpull' needs one for each hop"
            )

    # -- norms over nodes ----------------------------------------------------------------------------------------------

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        if self._trial is None:
            return super().owned_rows(x)
        self._has_norms = True
        return x[: self._trial.num_seeds]  # which no pass leaves out

    @property
    @override
    def num_nodes(self) -> int:
        if self._trial is not None:
            self._has_norms = True
            return self._trial.num_seeds
        running = self._now
        return running.num_nodes if isinstance(running, SampledPass) else self.num_rows

    @override
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._trial is not None else self.communicator.sum_over_ranks(x, label="norm statistics")

    @override
    def _trimmed(self, adjacency: Adjacency, hops: SampledHops, facts: ModelFacts) -> SampledPass:
        rows = hops.rows(adjacency, len(facts.widths))
        return SampledPass(hops, rows, facts, self.communicator)

    # -- the trial -----------------------------------------------------------------------------------------------------

    def _layer_and_hops(self, model: nn.Module, num_hops: int) -> tuple[MessagePassing, ModelFacts | None]:
        """Return the layer that gets the features, and the hops of the model; ``None`` if all rows are needed.

        The model must put out the same whatever the features are, if the first layer's output is given.
        """
        adjacency, hops, inputs = small_neighbourhood(self.shard, model, num_hops)
        num_rows, outs = sum(hops.num_nodes), list[list[Tensor]]()
        for number in (float("nan"), 1.0, -1.0):
            x = torch.full((1, 1), number, dtype=self.shard.x.dtype, device=adjacency.device)
            x = UnheldRows.of(x.as_strided((num_rows, self.shard.x.size(1)), (0, 0)))
            trial = self._trial = StandIn(x, inputs.get("edge_weight"), hops.num_seeds)
            of_edges: list[Kind] = ["edge"]
            args, others = arguments_of(model, SimpleNamespace(x=x, **inputs), adjacency)
            call = Call(model, args, others, ["node", None, *of_edges * len(inputs)])
            for training in (True, False) if not outs else (False,):
                with self._by_itself(model, self._over(model, args, others), training):
                    out = tensors_of(model.forward(*args, **others))
                    trial.check(model, out)
                if trial.layer is None or (not outs and any(bool(one.isnan().any()) for one in out)):
                    raise refused(model, _ELSEWHERE)
            outs.append([one.detach() for one in out])
        alike = all(
            torch.allclose(one, other, rtol=1e-5, atol=1e-6)  # NaN is not
            for others in outs[1:]
            for one, other in zip(outs[0], others, strict=True)
        )
        if not alike:
            raise refused(model, _ELSEWHERE)
        layer = trial.layer
        assert layer is not None, "else the model was refused"
        self._trial = StandIn(x, inputs.get("edge_weight"), hops.num_seeds)
        return layer, self._tried(call, adjacency, hops)

    @property
    def _columns(self) -> Tensor:
        columns = self.shard.columns
        assert columns is not None, "bind() checks the placement"
        return columns

    @override
    def _facts_of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], adjacency: Adjacency, hops: SampledHops
    ) -> ModelFacts | None:
        return self._facts
