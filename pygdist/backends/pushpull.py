"""``pushpull``: the first layer where the features are, the others where the batch is (P3, OSDI 2021, Sec. 3.2).

Each rank holds some columns of the features of all nodes (placement *columns*). It samples a batch and pushes the
structure to all ranks; each computes the first layer on its columns, for the batches of all ranks; the owner of a batch
pulls and adds the terms, and goes on alone. The backward pass pushes the gradient of the sum the same way. Features
never travel; what does is as wide as the first layer's output, so it pays where that is narrower than the features.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Abilities
from pygdist.backends.passes.base import Forward
from pygdist.backends.passes.rehearsal import Call, Kind, ModelFacts
from pygdist.backends.passes.sampled import SampledHops, SampledPass
from pygdist.backends.sampling.backend import SampledBackend, values_by_id
from pygdist.backends.sampling.blocks import Pusher, block_of
from pygdist.backends.sampling.pipeline import LAG, LaggedSteps, Pipeline, of_layer
from pygdist.backends.sampling.small import small_neighbourhood
from pygdist.backends.sampling.totals import FirstLayer
from pygdist.backends.sampling.whole import whole_first_layer
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.shard import is_unknown, unknown_rows
from pygdist.hops.arguments import tensors_of
from pygdist.hops.first_layer import Cut, InEdges, cut_of
from pygdist.hops.layer import layer_name, own_class
from pygdist.nn.inputs import edge_inputs
from pygdist.sampler._native import Sampled
from pygdist.sampler.base import MiniBatches
from pygdist.sampler.owners import NodeOwners, RemoteRows
from pygdist.sampler.steps import Fields, Steps

_INSTEAD = "use backend pull"


class PushPullBackend(SampledBackend):
    """Push the structure of batches to the features' columns, pull the first layer's sums (P3, Sec. 3.2.2).

    A step trains as one process would on the batches of all ranks. The model's first layer must be linear in its rows
    up to a weight (:mod:`pygdist.hops.first_layer`), and get the graph's features as they are; dropout and norms come
    after it. It is evaluated on the whole graph, exactly, in the same way.

    Args:
        pipeline: Batches on their way at once: 1, or 3 as in the paper (Sec. 3.3). With 3, exchanges overlap computing,
            the first layer's parameters get their gradient two steps late, and an epoch has two steps more; only the
            end of an epoch can be a place to validate, to save and to stop.

    Raises:
        InputError: If ``pipeline`` is neither.

    Example:
        >>> data = GraphDataModule("sbm", batches=NeighborBatches([25, 10], batch_size=1000))
        >>> trainer.fit(NodeClassifier(GraphSAGE(-1, 32, 2, 10), backend="pushpull"), datamodule=data)
    """

    name = "pushpull"
    abilities = Abilities(
        exact=False,
        approximation="a step trains on sampled neighbourhoods of some nodes",
        placement="columns",
        holds_columns=True,
        mini_batches=True,
        evaluates=False,
        reruns_layers=False,
    )
    per_graph: ClassVar[tuple[str, ...]] = ("_first", "_facts", "_trial", "_flights")
    _flights: Pipeline | None = None
    _first: FirstLayer | None = None
    _facts: ModelFacts | None = None
    _trial: _Trial | None = None  # while a model is tried
    _weighted = False  # the first layer gets the weights of edges

    def __init__(self, *, pipeline: Literal[1, 3] = 1) -> None:
        super().__init__()
        if pipeline not in (1, 3):
            raise InputError(f"pipeline is {pipeline}, expected 1 or 3")
        self.pipeline = pipeline
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
        aside = self.communicator.apart(quiet=True)
        owners = NodeOwners.of(shard.owned_id, shard.num_nodes, aside)
        of_edges = {name: values_by_id(getattr(shard, name), shard, aside, name) for name in edge_inputs(model, shard)}
        fields = _Pushed(owners, shard, of_edges, aside)
        steps = batches.across_ranks(shard, fields, self.communicator, seed=seed)
        if self.pipeline == 1:
            return steps
        first = self._found
        alone = FirstLayer(first.layer, first.cut, self._columns, shard.x.size(1), self.communicator.apart())
        self._flights = Pipeline(alone)
        return LaggedSteps(steps)

    @override
    def begin_step(self, sample: Data) -> None:
        if self._flights is not None:
            self._flights.begin_step(sample.get("ahead"), weighted=self._weighted)

    @override
    def sit_out(self, sample: Data) -> Tensor | None:
        total = self._total(sample.get("blocks", ()))
        return None if total is None else total.sum() * 0

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
        return self._found.total(of_layer(blocks, weighted=self._weighted))

    @override
    def whole_first_layer(self, layer: MessagePassing, shard: Shard, *args: Any, **kwargs: Any) -> Tensor:
        weighted = _takes_weights(layer, args, kwargs)
        return whole_first_layer(layer, _cut(layer), shard, self.communicator, weighted=weighted)

    # -- the first layer -----------------------------------------------------------------------------------------------

    @override
    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (args and isinstance(args[0], Tensor) and is_unknown(args[0])):
            return super().run_layer(layer, forward, args, kwargs)
        running, cut, weighted = self._now, _cut(layer), _takes_weights(layer, args[1:], kwargs)
        if self._trial is not None:
            self._weighted = weighted
            out = cut.rest(layer, self._trial.rows_for(layer, cut, args[0]))
            return running.placed(layer, out) if isinstance(running, SampledPass) else out
        assert isinstance(running, SampledPass), "all ranks found that rows can be left out"
        total = self._total(running.blocks)
        assert total is not None, "this rank has a batch"
        return running.placed(layer, cut.rest(layer, total))

    @override
    def look_at(self, model: nn.Module, batches: Any) -> None:
        """Try a model on a small neighbourhood, the same on all ranks: which layer gets the features, and its hops.

        Raises:
            InputError: If the model cannot be cut there; the message says why.
        """
        num_hops = len(getattr(batches, "fan_out", ())) or 2
        adjacency, hops, inputs = small_neighbourhood(self.shard, model, num_hops)
        x = unknown_rows(sum(hops.num_nodes), self.shard.x.size(1), self.shard.x.dtype)
        of_edges: list[Kind] = ["edge"]
        call = Call(model, (x, adjacency), inputs, ["node", None, *of_edges * len(inputs)])
        self._trial = trial = _Trial()
        try:
            with self._by_itself(model, self._over(call.args, inputs), False), torch.no_grad():
                outs = tensors_of(model.forward(x, adjacency, **inputs))
            if trial.layer is None or any(bool(one.isnan().any()) for one in outs):
                raise InputError(
                    f"backend 'pushpull': {own_class(model).__name__} reads the features elsewhere than in its first "
                    f"layer, but no rank has all of a node's; {_INSTEAD}"
                )
            facts = self._tried(call, adjacency, hops)
        finally:
            self._trial = None
        layer = trial.layer
        self._first = FirstLayer(layer, _cut(layer), self._columns, self.shard.x.size(1), self.communicator)
        self._facts = facts
        if batches is not None and facts is None:
            raise InputError(
                f"backend 'pushpull': {own_class(model).__name__} looks at all nodes of a batch at once, as norms over "
                "nodes do, or normalises weights that it computes, but rows that no layer reads are left out; "
                f"{_INSTEAD}"
            )
        if batches is not None and facts is not None and len(facts.widths) != num_hops:
            raise InputError(
                f"fan_out has {num_hops} numbers, but {own_class(model).__name__} makes {len(facts.widths)} hops; "
                "backend 'pushpull' needs one for each hop"
            )

    @property
    def _found(self) -> FirstLayer:
        assert self._first is not None, "look_at() finds it"
        return self._first

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


class _Trial:
    """Rows that stand for the first layer's output while a model is tried.

    Attributes:
        layer: The layer that got the features.
    """

    def __init__(self) -> None:
        self.layer: MessagePassing | None = None

    def rows_for(self, layer: MessagePassing, cut: Cut, x: Tensor) -> Tensor:
        """Return random rows as wide as the sum over ranks, the same each time."""
        if self.layer is not None and self.layer is not layer:
            raise InputError(
                f"backend 'pushpull': {layer_name(self.layer)} and {layer_name(layer)} both get the features, but one "
                f"layer alone is computed where they are; {_INSTEAD}"
            )
        self.layer = layer
        weight = layer.get_parameter(cut.weights[0])
        rows = torch.randn(x.size(0), weight.size(0), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return rows.to(weight)


class _Pushed(Fields):
    """Gives batches their structure for all ranks, instead of features.

    Args:
        owners: The owners of nodes.
        shard: This rank's part.
        of_edges: As for :class:`~pygdist.sampler.steps.Fields`, like ``aside``.
    """

    def __init__(
        self, owners: NodeOwners, shard: Shard, of_edges: Mapping[str, RemoteRows], aside: Communicator
    ) -> None:
        super().__init__(owners, None, of_edges, aside)
        self._shard, self._pusher = shard, Pusher(shard.num_nodes, aside)

    @override
    def add_structure(self, batches: Sequence[Data], sampled: Sequence[Sampled]) -> None:
        super().add_structure(batches, sampled)
        num_nodes = self._shard.num_nodes
        mine = [
            block_of(one.node, one.source, one.target, sum(one.num_nodes[:-1]), num_nodes, batch.get("edge_weight"))
            for batch, one in zip(batches, sampled, strict=True)
        ]
        for batch, blocks in zip(batches, self._pusher.push(mine), strict=True):
            batch.x = unknown_rows(int(batch.num_nodes or 0), self._shard.x.size(1), self._shard.x.dtype)
            batch.blocks = blocks


def _cut(layer: MessagePassing) -> Cut:
    try:
        return cut_of(layer)
    except ValueError as error:
        raise InputError(f"backend 'pushpull' cannot compute the first layer by columns: {error}; {_INSTEAD}") from None


def _takes_weights(layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell if a first layer gets the weights of edges; refuse further inputs."""
    names = [*list(inspect.signature(own_class(layer).forward).parameters)[3 : 2 + len(args)], *kwargs]
    values = [*args[1:], *kwargs.values()]
    further = {name for name, value in zip(names, values, strict=False) if value is not None and name != "edge_index"}
    if further - {"edge_weight"}:
        raise InputError(
            f"backend 'pushpull': {layer_name(layer)} gets {', '.join(sorted(further - {'edge_weight'}))}, which the "
            f"ranks that compute the first layer do not have; {_INSTEAD}"
        )
    return bool(further)
