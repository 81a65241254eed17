"""The engine of ``cache``, ``hybrid`` and ``replica``: a rank computes rows of other ranks' nodes itself.

A subclass chooses the rows (:meth:`RecomputingBackend.choose`, or :meth:`~RecomputingBackend.rows_of`). Every choice is
exact, as long as all rows that the model reads are computed or fetched: a replica's row is computed from the same
numbers as the owner's row. The gradients of a rank's own loss go through its replicas into the parameters, or back to
the owners of fetched rows.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Abilities, names_of
from pygdist.backends.fetching.fetcher import Fetcher, FetchingBackend, FetchOptions
from pygdist.backends.passes.base import Pass
from pygdist.backends.passes.fetched import FetchedPass
from pygdist.backends.passes.kinds import Lengths, kinds_of
from pygdist.backends.passes.part import PartPass
from pygdist.backends.passes.rehearsal import Call, Kind, ModelFacts, Rehearsal, Rehearse, look_at
from pygdist.backends.passes.rows import Rows
from pygdist.backends.recomputing.inputs import ModelInputs
from pygdist.backends.recomputing.rows import make_rows
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood, in_neighbourhood
from pygdist.hops.arguments import each_tensor, edges_among
from pygdist.hops.layer import forget_local_state, layer_name, own_class
from pygdist.hops.untouched import IrreversibleError, untouched
from pygdist.hops.user_code import in_one_line
from pygdist.nn.laplacian import sums_at_owners


@dataclass(frozen=True)
class Probe:
    """The model for which rows are chosen.

    Attributes:
        call: The model, and its arguments.
        facts: Its hops.
        rehearse: Runs it on a few nodes.
        begin_pass: Called before each pass of a rehearsal.
    """

    call: Call
    facts: ModelFacts
    rehearse: Rehearse
    begin_pass: Callable[[], None]


@dataclass(frozen=True)
class KnownModel:
    """Facts about a model, by the kinds of its arguments."""

    model: weakref.ref[nn.Module]
    kinds: dict[tuple[object, ...], list[Kind]] = field(default_factory=dict)
    facts: dict[tuple[object, ...], ModelFacts | None] = field(default_factory=dict)  # ``None``: unknown


@dataclass
class _OnGraph:
    """State of the backend on one graph.

    Attributes:
        inputs: Inputs of the model, extended by the rows of replicas.
        rows: The rows of this rank, by the widths of the model's hops.
        planning_s: Seconds that the last choice of rows took.
        fetched: The pass of models whose hops are unknown; one, as edges in groups are kept for its arrival of rows.
    """

    inputs: ModelInputs = field(default_factory=ModelInputs)
    rows: dict[tuple[int, ...], Rows] = field(default_factory=dict)
    planning_s: float | None = None
    fetched: FetchedPass | None = None


class RecomputingBackend(FetchingBackend):
    """Compute replicas of other ranks' rows, and fetch the rest; by default, compute all of them.

    Args:
        options: How rows that are not computed here are fetched; ``None`` if this backend computes all of them.
    """

    abilities = Abilities(reruns_layers=False)
    per_graph: ClassVar[tuple[str, ...]] = ("_graph", "_pass", "_done", "_outside")
    _graph: _OnGraph | None = None
    _pass: Pass | None = None  # what the model runs on now
    _done: PartPass | FetchedPass | None = None  # the last pass, of which layers may run again in the backward pass
    _outside: FetchedPass | None = None  # what layers run on that are called by themselves

    def __init__(self, options: FetchOptions | None = FetchOptions()) -> None:  # noqa: B008 (frozen)
        super().__init__(options or FetchOptions())
        self.fetches = options is not None
        self._models: dict[int, KnownModel] = {}  # by the id of the model

    # -- which rows ----------------------------------------------------------------------------------------------------

    def choose(self, around: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        """Choose the halo rows that this rank computes, hop by hop; by default all (:func:`~.rows.replicas_of`).

        Args:
            around: The nodes around the rank, up to as many hops away as the model has hops.
            widths: Number of values that each hop reads of a source row.
            probe: The model.
        """
        place = torch.arange(around.n_id.numel())
        owned, halo = self.shard.num_owned, self.shard.num_halo
        return [(place >= owned) & (place < owned + halo)] * len(widths)

    def hops_around(self, num_hops: int) -> int:
        """Return the number of hops whose in-edges a rank must hold while it chooses, for a model of ``num_hops``."""
        return num_hops

    def rows_of(self, widths: tuple[int, ...], probe: Probe) -> Rows:
        """Return the rows of this rank for a model; every rank makes the call.

        Args:
            widths: Values of a source that each of its hops reads.
            probe: The model.
        """
        start = time.perf_counter()
        around = in_neighbourhood(self.shard, self.communicator, self.hops_around(max(len(widths), 1)))
        chosen = self.choose(around, widths, probe)
        self._on_graph.planning_s = time.perf_counter() - start
        return make_rows(self.shard, self.communicator, around, chosen)

    def extended(self, call: Call, rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's arguments for such rows; every rank makes the call."""
        return self._on_graph.inputs.extended(call, rows, self.shard, self.communicator)

    @property
    @override
    def planning_s(self) -> float | None:
        return None if self._graph is None else self._graph.planning_s

    # -- a graph -------------------------------------------------------------------------------------------------------

    @override
    def unbind(self) -> None:
        super().unbind()
        self._models = {}

    @override
    def _pickled_state(self) -> dict[str, Any]:
        return {**super()._pickled_state(), "_models": {}}

    @property
    def _on_graph(self) -> _OnGraph:
        if self._graph is None:
            self._graph = _OnGraph()
        return self._graph

    @property
    def fetcher(self) -> Fetcher | None:
        """The object that fetches rows which this rank does not compute; ``None`` if it computes all."""
        if self._fetcher is None and self.fetches:
            self._fetcher = Fetcher(self.shard, self.communicator, self.options, self._held)
        return self._fetcher

    def _held(self) -> list[Tensor]:
        return [*self.kept.first_hop.results, *self._on_graph.inputs.kept]

    # -- a model -------------------------------------------------------------------------------------------------------

    @override
    def forget_model(self, model: nn.Module) -> None:
        self._models.pop(id(model), None)

    @override
    def begin_forward(self) -> None:
        self._pass = None  # of a forward pass that was interrupted
        if self.fetcher is not None:
            self.fetcher.begin_pass()

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entry = self._known(model)
        lengths, refuses = Lengths.of(self.shard), not self.abilities.trains_parts
        key, kinds = kinds_of(model, args, kwargs, lengths, self.communicator, entry.kinds, refuses=refuses)
        call, rehearse = Call(model, args, kwargs, kinds), partial(self._rehearse, model)
        begin_pass = self.kept.first_hop.begin_forward
        by_widths = self._on_graph.rows
        with torch.inference_mode(False):  # training uses what evaluation may begin
            if key not in entry.facts:
                entry.facts[key] = self._looked_at(call, rehearse, begin_pass)
            facts = entry.facts[key]
            if facts is None:
                self._pass = self._begun_fetched_pass()
                return args, kwargs
            if facts.widths not in by_widths:
                by_widths[facts.widths] = self.rows_of(facts.widths, Probe(call, facts, rehearse, begin_pass))
        rows = by_widths[facts.widths]
        extended = self.extended(call, rows)
        self._pass = self._part_pass(rows, facts)
        return extended

    def _known(self, model: nn.Module) -> KnownModel:
        """Return what is known of a model, which calls add to."""
        entry = self._models.get(id(model))
        if entry is None or entry.model() is not model:
            self._models = {key: one for key, one in self._models.items() if one.model() is not None}
            entry = self._models[id(model)] = KnownModel(weakref.ref(model))
        return entry

    def _looked_at(self, call: Call, rehearse: Rehearse, begin_pass: Callable[[], None]) -> ModelFacts | None:
        """Run a model on a few nodes to learn its hops; ``None`` if they stay unknown, and every hop fetches its rows.

        Raises:
            InputError: If the hops stay unknown, and this backend fetches no rows.
        """
        name, has_edges = own_class(call.model).__name__, bool(edges_among(call.model.forward, call.args, call.kwargs))
        reason = (
            f"backend '{self._title}' gives the model more rows and edges than the rank's own, in place of those among "
            f"its arguments, but shard.adjacency is not among those of {name}; pass it as it is"
        )
        mistake: Exception | None = None
        facts: ModelFacts | None = None
        try:
            facts = look_at(call, rehearse, partial(self._attempt, call.model), begin_pass)
            if facts.widths and not has_edges:
                facts = None
        except IrreversibleError as error:
            reason = (
                f"backend '{self._title}' first runs the model on a few nodes, and could not put it back afterwards: "
                f"{error}; use backend {names_of(lambda abilities: abilities.exact and abilities.reruns_layers)}"
            )
        except Exception as error:  # whatever a model says of these nodes
            mistake = error
            if has_edges:
                reason = (
                    f"backend '{self._title}' first runs the model on a few nodes, with ones and zeros in place of its "
                    f"inputs, where {name} ends with {in_one_line(error)}; if it runs on other inputs, use backend "
                    f"{names_of(lambda abilities: abilities.exact and abilities.reruns_layers)}"
                )
        refused = mistake if has_edges and isinstance(mistake, InputError) else None
        if self._agreed(facts, refused):
            return facts
        if facts is not None:
            reason = f"backend '{self._title}' cannot try {name} on a few nodes with the same result on all ranks"
        if not self.fetches:
            raise InputError(reason) from (
                mistake if has_edges else None
            )  # without edges it is no matter of the model's
        if self.communicator.rank == 0:
            warnings.warn(f"all rows of other ranks are fetched, and none computed: {reason}", stacklevel=2)
        return None

    def _agreed(self, facts: ModelFacts | None, refused: InputError | None) -> bool:
        """Tell if all ranks learned the same of a model: what one does not know, none uses. Every rank calls it.

        Raises:
            InputError: On all ranks, if one refuses the model.
        """
        learned = 0 if facts is None else zlib.crc32(repr((facts.widths, facts.shrinks)).encode())
        ranks = self.communicator.gather([float(refused is not None), float(facts is not None), float(learned)])
        if bool(ranks[:, 0].any()):
            raise refused or InputError("another rank refuses the model, which it tried on a few nodes")
        return bool(ranks[:, 1].all()) and bool((ranks[:, 2] == ranks[0, 2]).all())

    def _begun_fetched_pass(self) -> FetchedPass:
        on_graph = self._on_graph
        if on_graph.fetched is None:
            on_graph.fetched = self._fetched_pass()
        on_graph.fetched.begin()
        return on_graph.fetched

    def _fetched_pass(self) -> FetchedPass:
        assert self.fetcher is not None
        return FetchedPass(self.fetcher)

    def _part_pass(self, rows: Rows, facts: ModelFacts, *, alone: bool = False) -> PartPass:
        late = None if alone or self.abilities.trains_parts else self._late_fetcher
        return PartPass(rows, facts, self.communicator, self.fetcher, alone=alone, name=self._title, late=late)

    def _late_fetcher(self) -> Fetcher:
        """Return a fetcher, also if all rows of the hops that are known are computed here."""
        if self._fetcher is None:
            self._fetcher = Fetcher(self.shard, self.communicator, self.options, self._held)
        return self._fetcher

    @override
    def model_output(self, output: Any) -> Any:
        done, self._pass = self._pass, None
        self._done = done if isinstance(done, (PartPass, FetchedPass)) else None
        if not isinstance(done, PartPass):
            return output
        done.ended = True
        return each_tensor(output, done.owned_of)

    @contextlib.contextmanager
    def _rehearse(self, model: nn.Module, rehearsal: Rehearsal, training: bool) -> Iterator[None]:
        """Let a model run on a rehearsal's nodes; see :data:`~.rehearsal.Rehearse`."""
        shard = self.shard
        stand_for = max(1.0, (shard.num_owned + shard.num_halo) / max(rehearsal.num_rows, 1))
        with self._by_itself(model, rehearsal, training), self.kept.first_hop.rehearsing(stand_for):
            yield

    @contextlib.contextmanager
    def _attempt(self, model: nn.Module, facts: ModelFacts, rows: Rows, training: bool) -> Iterator[None]:
        """Let a model run on other rows; see :data:`~.rehearsal.Attempt`."""
        with self._by_itself(model, self._part_pass(rows, facts, alone=True), training):
            yield

    @contextlib.contextmanager
    def _by_itself(self, model: nn.Module, run: Pass, training: bool) -> Iterator[None]:
        """Let a model run on ``run`` without other ranks, and put back what that changes."""
        self._pass = run
        try:
            with untouched(model):
                model.train(training)
                yield
        finally:
            self._pass = None
            if self.fetcher is not None:
                self.fetcher.forget_rows()
            self.kept.forget()  # layers and norms may have kept something of that graph

    # -- the pass answers ----------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Pass | None:
        """The pass that runs, or runs again in the backward pass (activation checkpointing)."""
        running = self._pass
        if running is None and torch._C._current_graph_task_id() != -1:
            running = self._done
        if running is None and self.fetches:
            if self._outside is None:
                self._outside = self._fetched_pass()
            running = self._outside
        return running

    @override
    def _running(self, what: str = "a layer") -> Pass:
        running = self._now
        if running is None:
            raise InputError(
                f"{what} runs outside a forward pass of the model, as in model.encode(...): backend '{self._title}' "
                "does not support layers called by themselves; call the model, distribute the module that is called "
                f"(model.encoder), or use backend {names_of(lambda abilities: abilities.reruns_layers)}"
            )
        return running

    @override
    def begin_hop(self) -> None:
        running = self._now
        if running is not None:
            running.begin_hop()

    @override
    def begin_module(self, module: nn.Module) -> None:
        running = self._now
        if isinstance(running, PartPass):
            running.begin_module(module)

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        running = self._running(layer_name(layer))
        if running is not self._outside:
            return running.run_layer(layer, forward, args, kwargs)
        forget_local_state(layer)  # of the model's rows, which are more
        try:
            return running.run_layer(layer, forward, args, kwargs)
        finally:
            forget_local_state(layer)

    @override
    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        # the backward pass, after this one has ended, runs source_rows() again
        return sums_at_owners(self._running().source_rows, source, value, num_rows)

    @override
    def whole_degrees(self, degree: Tensor) -> Tensor:
        return self._running().source_rows(degree)[: degree.size(0)]

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        running = self._now
        return x[: self.shard.num_owned] if running is None else running.owned_rows(x)

    @property
    def _alone(self) -> bool:
        return self._pass is not None and self._pass.alone

    @override
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._alone else super().sum_over_ranks(x)

    @override
    def move(self, at: str) -> None:
        if not self._alone:
            super().move(at)

    @override
    def over_ranks(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float64) if self._alone else super().over_ranks(values)

    @property
    @override
    def num_rows(self) -> int:
        running = self._now
        return self.shard.num_owned if running is None else running.num_rows
