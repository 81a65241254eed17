"""``delayed``: edges are cut, not nodes; partial sums of split nodes are exchanged at once or with a delay (DistGNN).

A split node has a row in several parts: the row on the owner's rank is the root, the other rows are leaves. Each rank
runs the model on all rows of its part. A hop sums over the edges of the part; leaves send their sums to the roots, and
get the totals back. With ``delay=0`` (cd-0) the backend is exact. With a delay, training uses sums that other parts
sent in earlier passes (:mod:`pygdist.backends.clones.flights`, Algorithm 4). With ``"never"`` (0c), training uses no
sums of other parts. Evaluation is exact.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax
from typing_extensions import override

from pygdist.backends.base import Abilities, Backend
from pygdist.backends.clones.adjacency import SplitAdjacency
from pygdist.backends.clones.delays import DelayOptions, Delays
from pygdist.backends.clones.dropout import AgreeingDropout
from pygdist.backends.clones.exchange import CloneExchange, Leaves, summed
from pygdist.backends.clones.fold import HopFold, folded, reduced
from pygdist.backends.clones.inputs import NodeInputs
from pygdist.backends.clones.refusals import refused, refused_late
from pygdist.backends.passes.kinds import Lengths, kinds_of
from pygdist.backends.passes.of_all_edges import OfAllEdges
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.comm import Communicator
from pygdist.comm.wire import WireDtype, narrowed, wire_of
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.hops.arguments import each_tensor, first_rows
from pygdist.hops.hop import Deferred, Hop, check_rows
from pygdist.hops.layer import asked_arguments, forget_local_state, having_one, norms_refused


class DelayedBackend(Backend):
    """Aggregate over the parts of a vertex-cut (DistGNN, SC 2021, Sec. 5): at once, with a delay, or not at all.

    Layers run unmodified on all rows of a part. The backend combines the results of a node's parts: sums, means,
    maxima, minima and aggregations made of these, softmax over the in-edges of a node, and degrees. If a hop is no
    sparse product, all its messages are in memory at once. Dropout drops the same values in all rows of a node.

    With a delay the backend is not exact in training. Attention and extrema are refused: terms of different passes have
    no common maximum. Linear layers aggregate before they multiply (``savings.cheaper_side``), as this order loses less
    accuracy. A hop over fixed rows whose result is kept (``savings.first_hop``) has no delay, as it is exchanged only
    once. Normalisation uses degrees in the whole graph; with ``"never"``, degrees in the part.

    Args:
        delay: Number of training passes between sending a sum and using it (*r* of cd-r). 0 exchanges sums at once
            (cd-0); ``"never"`` leaves out the sums of other parts in training (0c).
        keep: With a delay, use the last sum that arrived for a row, in every pass until a newer sum arrives. This loses
            accuracy if most of a sum comes from other parts. By default a row uses a sum only in the pass in which the
            sum arrives. In all other passes the row's local sum is multiplied by its in-degree in the whole graph over
            its in-degree in the part.
        gradients: ``"local"`` keeps gradients in their part. ``"stale"`` also sends gradients to other parts, with the
            delay of sums: twice the bytes. The loss must then keep its scale: the trainer's gradient scaler is refused,
            and you must not use a ``GradScaler`` of your own, which pygdist cannot detect.
        warm_up: With a delay, in the first pass a part uses only its own sums (``"local"``), or all sums are exchanged
            at once (``"exact"``).
        wire_dtype: ``"bfloat16"`` halves the bytes of sums and gradients (Sec. 7); the backend is then no longer exact.

    Raises:
        InputError: If an argument has an unknown value, or no effect.

    Example:
        >>> store = partition_graph("cora", num_parts=2, placement="edges")
        >>> backend = DelayedBackend()
        >>> backend.bind(Shard.load(store, rank), communicator)
        >>> model = distribute(model, backend=backend)
    """

    name = "delayed"
    abilities = Abilities(placement="edges", reruns_layers=False)
    per_graph: ClassVar[tuple[str, ...]] = (
        "_exchange",
        "_inputs",
        "_kinds",
        "_to",
        "_fold",
        "_dropout",
        "_pass",
        "_hops",
        "_in_degrees",
        "_own",
        "_delays",
    )
    _exchange: CloneExchange | None = None
    _inputs: NodeInputs | None = None
    _to: Leaves | None = None  # the leaves that get the results of hops, in the pass that runs
    _fold: HopFold | None = None  # of the hop that runs
    _kinds: weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], list[Kind]]] | None = None
    _dropout: AgreeingDropout | None = None
    _pass: contextlib.ExitStack | None = None  # open while the model runs
    _hops: int | None = None  # so far in this pass
    _in_degrees: OfAllEdges[Tensor] | None = None
    _own: CloneExchange | None = None  # in which no node is split, in a pass that exchanges nothing
    _delays: Delays | None = None
    _late = False  # the pass that runs uses sums of earlier passes

    def __init__(
        self,
        *,
        delay: int | Literal["never"] = 0,
        keep: bool = False,
        gradients: Literal["local", "stale"] = "local",
        warm_up: Literal["local", "exact"] = "local",
        wire_dtype: WireDtype | None = None,
    ) -> None:
        super().__init__()
        self.wire = wire_of(wire_dtype)
        self.delays = DelayOptions(delay=delay, keep=keep, gradients=gradients, warm_up=warm_up)
        given_up = [self.delays.approximation, narrowed(wire_dtype)]
        if text := " and ".join(filter(None, given_up)):
            late, stale = self.delays.is_late, gradients == "stale"
            ours = replace(self.abilities, exact=False, approximation=text, stateful=late, late_gradients=stale)
            self.abilities = ours

    @override
    def exact_case(self, num_hops: int) -> DelayedBackend | None:
        copy = self._unbound()
        copy.wire, copy.delays = None, DelayOptions()
        copy.abilities = type(self).abilities
        return copy

    # -- layers --------------------------------------------------------------------------------------------------------

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        if reason := norms_refused(layer):
            return reason
        late = self.delays.is_late and refused_late(layer, self.delays.delay)
        return refused(layer) or late or None

    @property
    @override
    def aggregates_first(self) -> bool:
        return self.delays.is_late

    @property
    @override
    def fuses_attention(self) -> bool:
        return False  # its kernels divide by the sums over the edges of this part

    @override
    def functions(self) -> Mapping[Any, Callable[..., Any]]:
        return {softmax: self._softmax, scatter: self._scatter}

    # -- a graph -------------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> CloneExchange:
        """The split nodes of this rank's part."""
        if self._exchange is None:
            with torch.inference_mode(False):  # training uses what evaluation may ask for first
                self._exchange = CloneExchange.of(self.shard, self.communicator, self.wire)
        return self._exchange

    @property
    @override
    def num_rows(self) -> int:
        return self.shard.n_id.numel()

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x  # both ends of the part's edges are here

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        return x[: self.shard.num_owned]

    @property
    @override
    def alone(self) -> bool:
        return self._own is not None

    @property
    def _exchanged(self) -> CloneExchange:
        """The split nodes of the pass that runs."""
        return self.exchange if self._own is None else self._own

    @override
    def sums_of_parts(self, x: Tensor) -> Tensor:
        exchange = replace(self._exchanged, wire=None)  # such as degrees
        return summed(x, exchange, of=exchange.all, to=exchange.all, label="sums over parts")

    @override
    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        return self.sums_of_parts(value.new_zeros(num_rows).index_add(0, source, value))

    @override
    def whole_degrees(self, degree: Tensor) -> Tensor:
        return self.sums_of_parts(degree)

    @override
    def block_bytes(self, device: torch.device) -> int | None:
        return None  # a block would have to be put together by itself

    # -- a pass --------------------------------------------------------------------------------------------------------

    @override
    def begin_forward(self) -> None:
        self._hops = 0
        if self._dropout is not None:
            self._dropout.in_doubt = True
            self.end_forward()
            raise InputError(
                "a model on backend 'delayed' is called inside of another one on it, or a call was interrupted; give "
                "each model a backend of its own, or call it again"
            )

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        super().bind(shard, communicator)
        self._inputs, self._in_degrees = NodeInputs(shard, communicator), OfAllEdges(communicator)

    @override
    def unbind(self) -> None:
        delays = self._delays
        super().unbind()
        if delays is not None:
            delays.close()

    @override
    def forget_model(self, model: nn.Module) -> None:
        delays, self._delays = self._delays, None
        if delays is not None:  # of the model that was distributed before, or of this one's parameters before
            delays.close()
        if self._kinds is not None:
            self._kinds.pop(model, None)
        if self._in_degrees is not None:
            self._in_degrees.forget()

    @override
    def part_state(self) -> dict[str, Tensor]:
        return {} if self._delays is None else self._delays.state()

    @override
    def load_part_state(self, state: Mapping[str, Tensor]) -> bool:
        return not state or self._delays_of_rank.load(state)

    @override
    def end_forward(self) -> None:
        self._own, self._late = None, False
        if self._pass is not None:
            ended, self._pass, self._dropout = self._pass, None, None
            ended.close()

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._begin_pass(model)
        if self._kinds is None:
            self._kinds = weakref.WeakKeyDictionary()
        of_model = self._kinds.setdefault(model, {})  # arguments that look alike may mean something else to another
        _, kinds = kinds_of(model, args, kwargs, Lengths.of(self.shard), self.communicator, of_model)
        inputs = self._bound(self._inputs).extended(Call(model, args, kwargs, kinds))
        self._dropout = AgreeingDropout(self.shard.n_id, self.communicator)
        self._pass = contextlib.ExitStack()
        self._pass.enter_context(self._dropout)
        return inputs

    def _begin_pass(self, model: nn.Module) -> None:
        """Choose what hops exchange: delays are for training alone."""
        training = model.training and torch.is_grad_enabled()
        self._own = self.exchange.of_this_part if training and self.delays.delay == "never" else None
        if self.delays.delay == "never":
            for layer in self.kept.layers:  # which may keep degrees in the part
                forget_local_state(layer)
        exchange = self._exchanged
        self._to = exchange.all if any(map(_reads_targets, model.modules())) else exchange.down
        self._late = training and self.delays.is_late and self.num_ranks > 1
        if self._late:
            self._delays_of_rank.begin_pass(model)
        elif self._delays is not None:
            self._delays.running = False

    @property
    def _delays_of_rank(self) -> Delays:
        if self._delays is None:
            self._delays = Delays(self.exchange, self.shard.n_id, self.delays)
        return self._delays

    @override
    def model_output(self, output: Any) -> Any:
        m, n = self.num_rows, self.shard.num_owned
        if self._delays is not None and self._delays.running and output is not None:
            self._delays.end_pass(self._hops or 0, output)
        return each_tensor(output, lambda out: first_rows(out, (m,), n) if out.dim() else out)

    @override
    def begin_hop(self) -> None:
        self._hops = (self._hops or 0) + 1
        if self._delays is not None:
            self._delays.begin_hop(self._hops)

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return self._run(hop)

    @override
    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        return self._run(hop)

    def _run(self, hop: Hop) -> Tensor:
        if self._pass is None and torch._C._current_graph_task_id() != -1:
            raise InputError(
                f"{hop.layer_name} runs again in the backward pass (activation checkpointing), where dropout would not "
                "drop the same of all rows of a node; use backend comm or tensor"
            )
        with contextlib.nullcontext() if self._dropout is None else self._dropout.in_hop():
            return self._folded(hop)

    def _folded(self, hop: Hop) -> Tensor:
        rows = self.num_rows
        for name, x in hop.sources.items():
            check_rows(hop, name, x, rows, f"rank {self.shard.rank} has {rows} rows of nodes")
        fold = self._fold_of(f"hop {self._hops} of {hop.layer_name}", hop.edge_index)
        if hop.is_product:
            return hop.run(SplitAdjacency.over(hop.edge_index, fold))
        before, self._fold = self._fold, fold
        own = hop.layer.aggr_module
        try:
            with having_one(hop.layer, "aggr_module", None if own is None else folded(own, fold)):
                return hop.run(size=(rows, rows))
        finally:
            self._fold = before

    def _fold_of(self, label: str, edges: Any = None) -> HopFold:
        exchange = self._exchanged
        return HopFold(
            exchange=exchange,
            of=exchange.up,
            to=exchange.all if self._to is None else self._to,
            num_rows=self.num_rows,
            edges=edges if isinstance(edges, Adjacency) else None,
            in_degrees=self._bound(self._in_degrees),
            label=label,
            delays=self._delays if self._late and self._travels else None,
        )

    @property
    def _travels(self) -> bool:
        """True if sums of the hop that runs are delayed, and not exchanged once as its result is kept."""
        assert self._delays is not None
        return self._delays.at_once or not self.kept.first_hop.keeping

    # -- PyG's functions -----------------------------------------------------------------------------------------------

    def _softmax(
        self, src: Tensor, index: Tensor | None = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0
    ) -> Tensor:
        """Take the softmax over all in-edges of a node; see PyG's ``softmax``."""
        if index is None:
            raise InputError("softmax without 'index': backend 'delayed' takes it over all in-edges of a node")
        fold = self._fold or self._fold_of("softmax outside of a hop")
        return fold.softmax(src.movedim(dim, 0), index).movedim(0, dim)

    def _scatter(
        self, src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum"
    ) -> Tensor:
        """Reduce values of edges at one of their ends, over all parts; see PyG's ``scatter``."""
        # a rank without edges has a row more; another size may happen to be that of one rank's rows
        of_nodes = dim_size in (self.num_rows, self.num_rows + 1)
        if not bool(self.over_ranks([float(of_nodes)]).all()):
            here: Tensor = scatter(src, index, dim, dim_size, reduce)
            return here
        fold = self._fold or self._fold_of("scatter outside of a hop")
        leaves = self._exchanged.all  # the ends may be sources
        fold = replace(fold, of=leaves, to=leaves, edges=None, delays=None)
        return reduced(fold, src, index, None, dim_size, dim, reduce)


def _reads_targets(module: nn.Module) -> bool:
    """True if messages of a layer read the rows that they go to, which must be right on leaves too."""
    if not isinstance(module, MessagePassing):
        return False
    asked = asked_arguments(module) | asked_arguments(module, edges=True)
    return any(name.endswith("_i") for name in asked - {"size_i"})
