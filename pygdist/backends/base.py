"""The contract of backends, which bring a layer's neighbours to the rank that aggregates them.

A new system subclasses :class:`Backend` in one file. It is found by its registered name or by class path, and the
exactness suite (:func:`pygdist.testing.assert_exact`), the trainer and the command line work with it as they stand.
"""

from __future__ import annotations

import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.comm import Communicator
from pygdist.comm.sharded import ShardedWeights
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.hop import Deferred, Hop
from pygdist.hops.kept import Kept
from pygdist.hops.savings import Savings
from pygdist.nn.laplacian import sums_at_owners
from pygdist.nn.norms import Number
from pygdist.registry import Registry

Placement = Literal["nodes", "replicas", "edges", "columns"]
B = TypeVar("B", bound="Backend")
T = TypeVar("T")

_LIVE: weakref.WeakValueDictionary[str, Backend] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Facts about a backend. Whoever runs it asks these, and compares neither names nor placements.

    Attributes:
        exact: Same loss, outputs, gradients and updated parameters as one process on the whole graph.
        approximation: What an inexact backend gives up, in one clause.
        placement: How the graph must be placed on the ranks.
        num_hops: Hops around its owned nodes that a part on disk must hold.
        distributed: Runs on several ranks.
        trains_parts: Trains each part by itself. No row comes from another rank's model. Gradients or models must be
            averaged. A rank may have several parts, one after another.
        mini_batches: Trains on mini-batches: a backend that trains parts draws them from ``part_graph(shard)``, others
            sample across ranks, in ``steps(...)``.
        holds_columns: Ranks hold columns of the features, so :meth:`Backend.whole_first_layer` computes the first layer
            in an evaluation.
        evaluates: Also validates, tests and predicts. If not, the model is evaluated on the whole graph instead, with
            rows fetched from their owners, unless ``GraphModule(exact_evaluation=False)``.
        mixes_columns: Runs layers whose message or aggregation mixes the columns of a row.
        reruns_layers: Runs layers that are called outside a forward pass of the model. Also runs any layer again in the
            backward pass (activation checkpointing), even one that the forward pass calls several times.
        stateful: A checkpoint must hold :meth:`Backend.state_dict`.
        lag: Number of steps that an epoch has beyond its batches. If above 0, something is on its way between two
            steps.
        late_gradients: Adds gradients of earlier passes, so the loss must keep its scale.
    """

    exact: bool = True
    approximation: str = ""
    placement: Placement = "nodes"
    num_hops: int = 1
    distributed: bool = True
    trains_parts: bool = False
    mini_batches: bool = False
    holds_columns: bool = False
    evaluates: bool = True
    mixes_columns: bool = True
    reruns_layers: bool = True
    stateful: bool = False
    lag: int = 0
    late_gradients: bool = False


class Backend(ABC):
    """Brings the neighbours that a layer asks for in ``propagate``.

    A subclass states its abilities, and implements :meth:`propagate` and :meth:`source_rows`.
    :meth:`bind` gives it the rank's shard and communicator before the first forward pass. A subclass that keeps
    state per forward pass resets it in :meth:`begin_forward`.

    Attributes:
        name: Registered name, as in ``--model.backend=comm``. A subclass without a name of its own is found by class
            path only.
        abilities: What the backend can do. An instance may have its own (:func:`dataclasses.replace`).
        per_graph: Names of the attributes that belong to one graph. :meth:`unbind` sets them to ``None``, and pickles
            do not hold them. A subclass lists its own: ``per_graph = ("_mine",)``.
        savings: Shortcuts that the model takes; :func:`~pygdist.routing.distribute` may set others.
        kept: Results of hops, kept until :meth:`unbind`.
    """

    name: ClassVar[str] = ""
    abilities: Abilities = Abilities()
    per_graph: ClassVar[tuple[str, ...]] = ("_shard", "_communicator")
    _shard: Shard | None = None
    _communicator: Communicator | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("name"):
            backends.register(cls.name, cls)

    def __init__(self) -> None:
        self.savings = Savings()
        self.kept = Kept(self)
        self._token = uuid.uuid4().hex  # a pickle of this backend finds it again in this process
        _LIVE[self._token] = self

    def bind(self, shard: Shard, communicator: Communicator) -> None:
        """Place the backend on a rank. Called before the first forward pass, and again for another graph.

        Args:
            shard: What the rank holds.
            communicator: The ranks that take part, on a process group of the backend's own.

        Raises:
            InputError: If the shard was made for another number of ranks, or has another placement.
        """
        self._check_placement(shard)
        if shard.num_parts != communicator.world_size:
            raise InputError(
                f"the graph is partitioned into {shard.num_parts} parts but {communicator.world_size} ranks take part; "
                f"partition it again with num_parts={communicator.world_size}"
            )
        self.unbind()
        if shard.n_id.is_cuda:  # a library such as nccl takes the device that is set
            torch.cuda.set_device(shard.n_id.device)
        self._shard, self._communicator = shard, communicator

    def _check_placement(self, shard: Shard) -> None:
        """Refuse a part of edges, or of columns, unless the backend takes these; if it does, refuse all other parts."""
        wanted = self.abilities.placement
        has = "edges" if shard.clones is not None else "columns" if shard.columns is not None else "nodes or replicas"
        if has != wanted and {has, wanted} & {"edges", "columns"}:
            raise InputError(
                f"backend '{self.name or type(self).__name__}' needs placement {wanted}, but the graph was partitioned "
                f"with placement {has}; partition it with --placement {wanted}"
            )

    def unbind(self) -> None:
        """Let go of the shard, the communicator and what was computed for them."""
        for name in self._of_one_graph():
            setattr(self, name, None)
        self.kept.forget()

    @property
    def shard(self) -> Shard:
        """The rank's shard. Before :meth:`bind` it raises an error that says what to do."""
        return self._bound(self._shard)

    @property
    def communicator(self) -> Communicator:
        """The rank's communicator. Before :meth:`bind` it raises an error that says what to do."""
        return self._bound(self._communicator)

    def _bound(self, value: T | None) -> T:
        if value is None:
            raise InputError(
                f"backend '{self._title}' is not bound to a graph; call "
                "backend.bind(shard, communicator), or undistribute(model) to run the model on one process"
            )
        return value

    def refuse(self, layer: MessagePassing) -> str | None:
        """Return why this backend cannot run ``layer``, naming the backends that can; ``None`` if it can."""
        return None

    def begin_forward(self) -> None:  # noqa: B027 (a hook: most backends have nothing to do)
        """Called before each forward pass of the distributed model."""

    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the model, from those of its caller; a backend may add rows that it computes."""
        return args, kwargs

    def model_output(self, output: Any) -> Any:
        """Return the output for the model's caller: one row per owned node, without the rows that were added."""
        return output

    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer's ``forward``, called as ``forward(layer, *args, **kwargs)``."""
        return forward(layer, *args, **kwargs)

    def begin_hop(self) -> None:  # noqa: B027 (a hook, as above)
        """Called before each :meth:`propagate`, also if a kept result takes its place."""

    def forget_model(self, model: nn.Module) -> None:  # noqa: B027
        """Called when a model is distributed: forget facts about it, as its layers may have changed."""

    def end_forward(self) -> None:  # noqa: B027 (a hook, as above)
        """Called after each forward pass: free what only that pass needed."""

    @abstractmethod
    def propagate(self, hop: Hop) -> Tensor:
        """Run one hop: bring the rows that it reads, and call :meth:`Hop.run <pygdist.hops.hop.Hop.run>` with them.

        Args:
            hop: The call. ``hop.sources`` are the tensors whose rows the layer reads at the sources of edges; they hold
                one row per owned node. ``hop.edge_index`` is in local ids of the shard.

        Returns:
            One row per owned node.

        Example:
            >>> rows = {name: self.source_rows(x) for name, x in hop.sources.items()}
            >>> return hop.run(rows=rows, size=(self.shard.n_id.numel(), self.shard.num_owned))
        """

    def look_at(self, model: nn.Module, batches: Any) -> None:  # noqa: B027 (a hook, as above)
        """Called on all ranks before a model is trained or evaluated, with model and backend ready.

        Args:
            model: The model.
            batches: The mini-batches that it will train on; ``None`` if there are none.

        Raises:
            InputError: On all ranks, if this backend cannot run the model.
        """

    def begin_step(self, sample: Any) -> None:  # noqa: B027
        """Called at the start of a training step on a mini-batch; on all ranks if batches are sampled across ranks."""

    def end_step(self) -> Tensor | None:
        """Called on all ranks at the end of a training step, before its backward pass.

        Returns:
            A zero, to be added to the loss, whose backward pass adds gradients; ``None`` if there are none.
        """
        return None

    def end_backward(self) -> None:  # noqa: B027
        """Called on all ranks after the backward pass of each training step."""

    def not_trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of a model's parameters that no rank has a gradient for in this step; the same on all ranks."""
        return []

    def drain(self) -> None:  # noqa: B027
        """Called on all ranks at the end of an epoch, and before a validation: drop what is still on its way."""

    @property
    def sharded_weights(self) -> ShardedWeights | None:
        """Weights that each rank trains in part, without DDP; ``None`` if there are none."""
        return None

    @property
    def runs_idle(self) -> bool:
        """True if a rank whose batch is empty runs the model on it, as norms take their statistics over all ranks."""
        return False

    def sit_out(self, sample: Any) -> Tensor | None:
        """Called in place of the forward pass on a rank whose batch is empty.

        Returns:
            A zero whose backward pass makes the same exchanges as the other ranks; ``None`` if there are none.
        """
        return None

    def whole_first_layer(
        self,
        layer: MessagePassing,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: Backend,
    ) -> Tensor:
        """Return the output of a model's first layer for owned nodes, if :attr:`Abilities.holds_columns`.

        Args:
            layer: The layer.
            forward: Its ``forward``.
            args: The layer's arguments.
            kwargs: Its keyword arguments.
            others: The backend that runs the layers after it, bound to this rank's part.
        """
        raise NotImplementedError

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater`` like :meth:`propagate`.

        Returns:
            One row per edge, or a :class:`~pygdist.hops.hop.Deferred` if ``hop.weights_unseen``.
        """
        return self.propagate(hop)

    @abstractmethod
    def source_rows(self, x: Tensor) -> Tensor:
        """One row per owned node in, one row per source of the adjacency out; differentiable. Used by normalisation."""

    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        """Return the sums of values of edges by source, over the edges of all ranks. Used by Laplacians.

        Args:
            source: Source of each edge, in local ids; ``(E,)``.
            value: A number for each edge, 0 for edges into nodes of other ranks; ``(E,)``.
            num_rows: Rows of this rank.

        Returns:
            ``(num_rows,)``; right for rows that the rank owns.
        """
        return sums_at_owners(self.source_rows, source, value, num_rows)

    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        """Return the in-degrees of sources in the whole graph, if this backend knows them without asking owners.

        Args:
            degree: In-degrees of destinations, by the edges here that the layer normalises.
            edge_weight: Weights of these edges, as the layer got them; ``None`` for ones.
            loop_weight: Weight of the self-loops that are added to nodes without one; ``None`` if none are added.

        Returns:
            One number per source of the adjacency, or ``None``: then owners are asked by :meth:`source_rows`.
        """
        return None

    def rim_scale(self, *, weighted: bool) -> Tensor | None:
        """Return for each source row its in-degree in the whole graph divided by its in-degree on this rank.

        Self-loops are not counted. Degree normalisation multiplies a row's in-edges by it.

        Args:
            weighted: Divide sums of edge weights instead of numbers of edges.

        Returns:
            ``(num_sources,)``, or ``None`` if this rank has all in-edges of all rows.
        """
        return None

    def begin_module(self, module: nn.Module) -> None:  # noqa: B027
        """Called when a module that looks at all nodes, such as a norm, begins to run."""

    def owned_rows(self, x: Tensor) -> Tensor:
        """The rows of a layer's output that this rank owns; statistics over nodes are taken over these."""
        return x

    def whole_degrees(self, degree: Tensor) -> Tensor:
        """Return the in-degrees of rows in the whole graph, given those counted here; every rank calls it."""
        return degree  # a rank has all in-edges of its own nodes

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks; differentiable. Used by norms over nodes."""
        return self.communicator.sum_over_ranks(x, label="norm statistics")

    @property
    def splits_nodes(self) -> bool:
        """True if several parts hold in-edges of one node, so sums over its in-edges are added up over parts."""
        return self.abilities.placement == "edges"

    @property
    def alone(self) -> bool:
        """True in a pass that leaves out what other parts contribute, as if no node were split."""
        return False

    def sums_of_parts(self, x: Tensor) -> Tensor:
        """Add up the rows that a node has in several parts, and give each of these rows the sum. Every rank calls it.

        Differentiable.

        Needed where nodes are split; other backends return ``x``.
        """
        return x

    @property
    def fuses_attention(self) -> bool:
        """True if kernels may stand for the hops of attention layers."""
        return True

    def functions(self) -> Mapping[Any, Callable[..., Any]]:
        """Functions of PyG that this backend replaces: a mapping from PyG's function to the backend's own."""
        return {}

    @property
    def aggregates_first(self) -> bool:
        """True if linear layers aggregate rows before they multiply by the weight, where either will do."""
        return False

    @property
    def drops_alike(self) -> bool:
        """True if all ranks drop the same attention weights of ``GATConv``, where nothing but the sum uses these."""
        return False

    def max_over_ranks(self, value: Number) -> Number:
        """The largest value of any rank. Used by aggregations that pad."""
        return type(value)(self.over_ranks([float(value)]).max())

    def note(self, text: str) -> None:
        """Note something that must be equal on all ranks. Nothing is sent: the next exchange of numbers compares it."""
        self.communicator.note(text)

    def move(self, at: str) -> None:
        """Note where this rank is in a model, in words that must be equal on all ranks."""
        self.communicator.move(at)

    def over_ranks(self, values: Sequence[float]) -> Tensor:
        """A few numbers of every rank, ``(num_ranks, len(values))``; of this rank alone where it runs by itself."""
        return self.communicator.gather(values)

    def first_hop_bytes(self, device: torch.device) -> int:
        """Bytes that this rank may keep of hops over fixed rows."""
        return self.savings.first_hop_bytes(device, self._sharers(device))

    def block_bytes(self, device: torch.device) -> int | None:
        """Bytes that the messages of one hop may take on this rank's ``device``; ``None`` for no limit."""
        return self.savings.block_bytes(device, self._sharers(device))

    def _sharers(self, device: torch.device) -> int:
        return 1 if self._communicator is None else self._communicator.sharers(device)

    @property
    def kept_bytes(self) -> int:
        """Memory that this rank holds of hops over fixed rows (:class:`~pygdist.backends.Savings`)."""
        return self.kept.first_hop.kept_bytes

    @property
    def expected_epoch_s(self) -> float | None:
        """Seconds that an epoch should take by the plan, the same on all ranks; ``None`` without a plan."""
        return None

    @property
    def planning_s(self) -> float | None:
        """Seconds of the first epoch that this rank spent on choosing rows; ``None`` if there was no choice."""
        return None

    def exact_case(self, num_hops: int) -> Backend | None:
        """Return an unbound copy that is exact for models of ``num_hops`` hops, or ``None``.

        The check before training (:mod:`pygdist.routing.check`) compares the copy with one process. An approximate
        backend returns one with arguments that make it exact, if there are any.
        """
        return self._unbound() if self.abilities.exact else None

    def arguments(self) -> dict[str, Any]:
        """Return what this backend was made with, and its savings."""
        return {name: value for name, value in self._pickled_state().items() if name != "_token"}

    def _unbound(self) -> Self:
        """Return a backend with the same arguments that no model runs on."""
        return _made(type(self), {**self.arguments(), "_token": uuid.uuid4().hex})

    def state_dict(self) -> dict[str, Tensor]:
        """The state that training needs to go on, by name; one row per owned node, on any device.

        Called on all ranks between two steps, if :attr:`Abilities.stateful`. Names, dtypes and widths of rows are the
        same on all ranks. A checkpoint holds the rows of all ranks, so that any number of ranks can go on from it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 (a hook, as above)
        """Take up what :meth:`state_dict` gave: rows of this rank's owned nodes, on the shard's device.

        Called after :meth:`bind`, on all ranks or on none.
        """

    def part_state(self) -> dict[str, Tensor]:
        """The state of this rank's part that training needs to go on, by name; tensors of any shape, on any device.

        Called on all ranks between two steps, if :attr:`Abilities.stateful`. Only the same parts can take it up.
        """
        return {}

    def load_part_state(self, state: Mapping[str, Tensor]) -> bool:
        """Take up what :meth:`part_state` gave on this rank; called after :meth:`bind`, on all ranks or on none.

        Returns:
            ``False``, on all ranks alike, if training cannot go on from it, as the backend has other arguments now.
        """
        return True

    @property
    def _title(self) -> str:
        """The name in messages."""
        return self.name or type(self).__name__

    @property
    def num_ranks(self) -> int:
        """Ranks that take part; 1 before :meth:`bind`."""
        return 1 if self._communicator is None else self._communicator.world_size

    @property
    def num_rows(self) -> int:
        """Rows that a layer puts out on this rank; the owned nodes, unless a backend computes others too."""
        return self.shard.num_owned

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.shard.num_nodes

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        # copies of a model share its backend: weight averaging copies modules, not shards and process groups
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (type(self), self._pickled_state())

    def _pickled_state(self) -> dict[str, Any]:
        """Attributes that a pickle holds: arguments and identity, nothing of a rank."""
        return {key: value for key, value in vars(self).items() if key not in {*self._of_one_graph(), "kept"}}

    @classmethod
    def _of_one_graph(cls) -> set[str]:
        """``per_graph`` of this class and of those above it."""
        return {name for one in cls.__mro__ for name in vars(one).get("per_graph", ())}


backends: Registry[Backend] = Registry("backend", "pygdist.backends")


def names_of(can: Callable[[Abilities], bool]) -> str:
    """Return the names of the backends for several ranks whose abilities satisfy ``can``, such as "cache or comm"."""
    names = [name for name in backends if backends[name].abilities.distributed and can(backends[name].abilities)]
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _revive(cls: type[Backend], state: dict[str, Any]) -> Backend:
    """The same backend if it still lives in this process, else an unbound one with the same arguments."""
    live = _LIVE.get(state["_token"])
    return _made(cls, state) if live is None else live


def _made(cls: type[B], state: dict[str, Any]) -> B:
    backend = cls.__new__(cls)
    vars(backend).update(state)
    backend.kept = Kept(backend)
    _LIVE[backend._token] = backend
    return backend


def resolve_backend(backend: str | Backend, **arguments: Any) -> Backend:
    """A backend from its registered name, its class path in any package, or itself.

    Raises:
        InputError: If the name is unknown; the message lists the known ones. If a class does not call
            ``super().__init__()``.
    """
    resolved: Backend = backends.resolve(backend, Backend, **arguments)  # type: ignore[type-abstract]
    if "_token" not in vars(resolved):
        cls = type(resolved)
        raise InputError(f"backend {cls.__module__}.{cls.__qualname__}: __init__ does not call super().__init__()")
    return resolved
