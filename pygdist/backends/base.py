"""The contract of backends, which bring a layer's neighbours to the rank that aggregates them.

A new system is a subclass of :class:`Backend` in one file, named by its registered name or by its class path. The
exactness suite (:func:`pygdist.testing.assert_exact`), the trainer and the command line work with any backend.
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
    """Facts about a backend. The trainer and the tools ask for these facts, not for the backend's name.

    Attributes:
        exact: True if the backend gives the loss, outputs, gradients and updated parameters of one process on the whole
            graph.
        approximation: What an inexact backend gives up, in one clause.
        placement: The placement that a partitioned graph must have.
        num_hops: Hops around its owned nodes that a part on disk must hold.
        distributed: True if the backend runs on several ranks.
        trains_parts: True if the backend trains each part by itself: no row comes from another rank's model. The
            trainer must then average gradients or models. A rank may train several parts, one after another.
        mini_batches: True if the backend trains on mini-batches. A backend that trains parts draws its batches from
            ``part_graph(shard)``; other backends sample across ranks, in ``steps(...)``.
        holds_columns: True if ranks hold columns of the features. :meth:`Backend.whole_first_layer` then computes the
            first layer in an evaluation.
        evaluates: True if the backend also validates, tests and predicts. Otherwise the trainer evaluates the model on
            the whole graph, with rows fetched from their owners. If the backend also ``trains_parts``,
            ``GraphModule(exact_evaluation=False)`` evaluates on the parts instead.
        mixes_columns: True if the backend runs layers whose message or aggregation mixes the columns of a row.
        reruns_layers: True if layers may run outside a forward pass of the model, and again in the backward pass
            (activation checkpointing), even a layer that the forward pass calls several times.
        stateful: True if a checkpoint must hold :meth:`Backend.state_dict` and :meth:`Backend.part_state`.
        lag: Number of steps that an epoch has beyond its batches. Above 0, exchanges are under way between two steps.
        late_gradients: True if the backend adds gradients of earlier passes, so that the loss must keep its scale.
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

    A subclass states its abilities, and implements :meth:`propagate` and :meth:`source_rows`. :meth:`bind` gives the
    backend its shard and communicator before the first forward pass. A subclass that keeps state for each forward pass
    resets this state in :meth:`begin_forward`.

    Attributes:
        name: Registered name, as in ``--model.backend=comm``. A subclass that sets no name is used by its class path.
        abilities: Facts about the backend. An instance may have its own (:func:`dataclasses.replace`).
        per_graph: Names of the attributes that belong to one graph. :meth:`unbind` sets them to ``None``, and pickles
            do not hold them. A subclass lists only its own: ``per_graph = ("_mine",)``.
        savings: Shortcuts that the model takes; :func:`~pygdist.routing.distribute` may replace them.
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
            shard: The rank's part of the graph.
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
        """Release the shard, the communicator and all results that belong to them."""
        for name in self._of_one_graph():
            setattr(self, name, None)
        self.kept.forget()

    @property
    def shard(self) -> Shard:
        """The rank's shard. Before :meth:`bind` this raises an :class:`~pygdist.errors.InputError`."""
        return self._bound(self._shard)

    @property
    def communicator(self) -> Communicator:
        """The rank's communicator. Before :meth:`bind` this raises an :class:`~pygdist.errors.InputError`."""
        return self._bound(self._communicator)

    def _bound(self, value: T | None) -> T:
        if value is None:
            raise InputError(
                f"backend '{self._title}' is not bound to a graph; call "
                "backend.bind(shard, communicator), or undistribute(model) to run the model on one process"
            )
        return value

    def refuse(self, layer: MessagePassing) -> str | None:
        """Return the reason why this backend cannot run ``layer``, naming backends that can; ``None`` if it can."""
        return None

    def begin_forward(self) -> None:  # noqa: B027 (a hook: most backends have nothing to do)
        """Called before each forward pass of the distributed model."""

    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the model, given the caller's; a backend may add rows for other ranks' nodes."""
        return args, kwargs

    def model_output(self, output: Any) -> Any:
        """Return the output for the model's caller: one row per owned node. ``output`` is ``None`` after a failure."""
        return output

    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer; ``forward(layer, *args, **kwargs)`` is the call that the model makes."""
        return forward(layer, *args, **kwargs)

    def begin_hop(self) -> None:  # noqa: B027 (a hook, as above)
        """Called before each hop's :meth:`propagate`, also if the backend uses a kept result instead."""

    def forget_model(self, model: nn.Module) -> None:  # noqa: B027
        """Called when a model is distributed: forget facts about the model, whose layers may have changed."""

    def end_forward(self) -> None:  # noqa: B027 (a hook, as above)
        """Called after each forward pass, also one that failed: free the memory that only this pass needs."""

    @abstractmethod
    def propagate(self, hop: Hop) -> Tensor:
        """Run one hop: bring its source rows here, and call :meth:`Hop.run <pygdist.hops.hop.Hop.run>` with them.

        Args:
            hop: The call. ``hop.sources`` are the tensors whose rows the layer reads at the sources of edges, with one
                row per row of this rank (:attr:`num_rows`). ``hop.edge_index`` is in local ids of the shard.

        Returns:
            One row per row of this rank.

        Example:
            >>> rows = {name: self.source_rows(x) for name, x in hop.sources.items()}
            >>> return hop.run(rows=rows, size=(self.shard.n_id.numel(), self.shard.num_owned))
        """

    def look_at(self, model: nn.Module, batches: Any) -> None:  # noqa: B027 (a hook, as above)
        """Called on all ranks before a model is trained or evaluated, when model and backend are ready.

        Args:
            model: The model.
            batches: The mini-batches that the model will train on; ``None`` if there are none.

        Raises:
            InputError: On all ranks, if this backend cannot run the model.
        """

    def begin_step(self, sample: Any) -> None:  # noqa: B027
        """Called at the start of a training step on the batch ``sample``; on all ranks if batches cross ranks."""

    def end_step(self) -> Tensor | None:
        """Called on all ranks at the end of a training step, before its backward pass.

        Returns:
            A zero to add to the loss, whose backward pass adds gradients; ``None`` if there are no such gradients.
        """
        return None

    def end_backward(self) -> None:  # noqa: B027
        """Called on all ranks after the backward pass of each training step."""

    def not_trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters for which no rank has a gradient in this step; the same on all ranks."""
        return []

    def drain(self) -> None:  # noqa: B027
        """Called on all ranks at the end of an epoch and before a validation: drop exchanges still under way."""

    @property
    def sharded_weights(self) -> ShardedWeights | None:
        """Weights of which each rank trains some columns, without DDP; ``None`` if there are none."""
        return None

    @property
    def runs_idle(self) -> bool:
        """True if a rank must run the model on an empty batch too, as norms take statistics over all ranks."""
        return False

    def sit_out(self, sample: Any) -> Tensor | None:
        """Called in place of the forward pass on a rank whose batch is empty.

        Returns:
            A zero whose backward pass makes the same exchanges as the other ranks'; ``None`` if they make none.
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
            forward: The layer's ``forward``.
            args: The layer's arguments.
            kwargs: The layer's keyword arguments.
            others: The backend that runs the later layers, bound to this rank's part.
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
        """Return one row per source of the adjacency, given one row per row of this rank (:attr:`num_rows`).

        Differentiable. Normalisation uses it.
        """

    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        """Return the sums of edge values by source, over the edges of all ranks. Laplacians use it.

        Args:
            source: Source of each edge, in local ids; ``(E,)``.
            value: A number for each edge, 0 for edges into nodes of other ranks; ``(E,)``.
            num_rows: Rows of this rank.

        Returns:
            ``(num_rows,)``; only the sums of owned rows are correct.
        """
        return sums_at_owners(self.source_rows, source, value, num_rows)

    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        """Return the in-degrees of sources in the whole graph, if this backend knows them without asking owners.

        Args:
            degree: In-degrees of destinations, counted over the edges on this rank that the layer normalises.
            edge_weight: Weights of these edges, as the layer got them; ``None`` if all weights are 1.
            loop_weight: Weight of the self-loops that the layer adds to nodes without one; ``None`` if it adds none.

        Returns:
            One number per source of the adjacency. ``None`` if only owners know: :meth:`source_rows` then asks them.
        """
        return None

    def rim_scale(self, *, weighted: bool) -> Tensor | None:
        """Return for each source row its in-degree in the whole graph divided by its in-degree on this rank.

        Self-loops are not counted. Degree normalisation multiplies the weights of a row's in-edges by this factor.

        Args:
            weighted: Divide sums of edge weights instead of numbers of edges.

        Returns:
            ``(num_sources,)``, or ``None`` if no weight is to be scaled.
        """
        return None

    def begin_module(self, module: nn.Module) -> None:  # noqa: B027
        """Called when a module that looks at all nodes, such as a norm, begins to run."""

    def owned_rows(self, x: Tensor) -> Tensor:
        """Return the rows of a layer's output that this rank owns; statistics over nodes use only these rows."""
        return x

    def whole_degrees(self, degree: Tensor) -> Tensor:
        """Return the in-degrees of rows in the whole graph, given those on this rank. Every rank makes the call."""
        return degree  # a rank has all in-edges of its own nodes

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks; differentiable. Norms over nodes use it."""
        return self.communicator.sum_over_ranks(x, label="norm statistics")

    @property
    def splits_nodes(self) -> bool:
        """True if several parts hold in-edges of one node, so that sums over in-edges need terms of several parts."""
        return self.abilities.placement == "edges"

    @property
    def alone(self) -> bool:
        """True in a pass that leaves out the contributions of other parts, as if no node were split."""
        return False

    def sums_of_parts(self, x: Tensor) -> Tensor:
        """Replace each row of a split node by the sum of the node's rows in all parts. Every rank makes the call.

        Differentiable. Backends that split no nodes return ``x``.
        """
        return x

    @property
    def fuses_attention(self) -> bool:
        """True if pygdist's kernels may compute the hops of attention layers."""
        return True

    def functions(self) -> Mapping[Any, Callable[..., Any]]:
        """Return a mapping from each function of PyG that this backend replaces to the backend's own."""
        return {}

    @property
    def aggregates_first(self) -> bool:
        """True if layers aggregate rows before they multiply them by the weight, where either order is correct."""
        return False

    @property
    def drops_alike(self) -> bool:
        """True if all ranks drop the same attention weights of ``GATConv`` layers whose weights only the sum reads."""
        return False

    def max_over_ranks(self, value: Number) -> Number:
        """Return the largest value of any rank. Aggregations that pad use it."""
        return type(value)(self.over_ranks([float(value)]).max())

    def move(self, at: str) -> None:
        """Note the place of this rank in a model, in words that must be equal on all ranks."""
        self.communicator.move(at)

    def over_ranks(self, values: Sequence[float]) -> Tensor:
        """Return a few numbers of every rank, ``(num_ranks, len(values))``; one row if this rank runs by itself."""
        return self.communicator.gather(values)

    def first_hop_bytes(self, device: torch.device) -> int:
        """Return the bytes that this rank's kept results of hops over fixed rows may take."""
        return self.savings.first_hop_bytes(device, self._sharers(device))

    def block_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that the messages of one hop may take on ``device``; ``None`` for no limit."""
        return self.savings.block_bytes(device, self._sharers(device))

    def _sharers(self, device: torch.device) -> int:
        return 1 if self._communicator is None else self._communicator.sharers(device)

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's kept results of hops over fixed rows (:class:`~pygdist.backends.Savings`)."""
        return self.kept.first_hop.kept_bytes

    @property
    def expected_epoch_s(self) -> float | None:
        """Seconds that the plan predicts for an epoch, the same on all ranks; ``None`` without a plan."""
        return None

    @property
    def planning_s(self) -> float | None:
        """Seconds that this rank's last choice of rows took; ``None`` before, and for backends that never recompute."""
        return None

    def exact_case(self, num_hops: int) -> Backend | None:
        """Return an unbound copy that is exact for models of ``num_hops`` hops, or ``None``.

        The check before training (:mod:`pygdist.routing.check`) compares the copy with one process. An approximate
        backend returns a copy whose arguments make it exact, if there are such arguments.
        """
        return self._unbound() if self.abilities.exact else None

    def arguments(self) -> dict[str, Any]:
        """Return this backend's attributes that belong to no graph: arguments, savings, facts noted since."""
        return {name: value for name, value in self._pickled_state().items() if name != "_token"}

    def _unbound(self) -> Self:
        """Return a backend with the same arguments that no model runs on."""
        return _made(type(self), {**self.arguments(), "_token": uuid.uuid4().hex})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a resumed training needs, by name; one row per owned node, on any device.

        Called on all ranks between two steps, if :attr:`Abilities.stateful`. Names, dtypes and widths of rows are the
        same on all ranks. A checkpoint holds the rows of all ranks, so that any number of ranks can resume.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 (a hook, as above)
        """Load a result of :meth:`state_dict`: rows of this rank's owned nodes, on the shard's device.

        Called after :meth:`bind`, on all ranks or on none.
        """

    def part_state(self) -> dict[str, Tensor]:
        """Return the state of this part that a resumed training needs, by name: any tensors, on any device.

        Called on all ranks between two steps, if :attr:`Abilities.stateful`. Only a run with the same parts can resume.
        """
        return {}

    def load_part_state(self, state: Mapping[str, Tensor]) -> bool:
        """Load this rank's result of :meth:`part_state`; called after :meth:`bind`, on all ranks or on none.

        Returns:
            ``False``, on all ranks, if training cannot resume because the backend has other arguments now.
        """
        return True

    @property
    def _title(self) -> str:
        """The name in messages."""
        return self.name or type(self).__name__

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part; 1 before :meth:`bind`."""
        return 1 if self._communicator is None else self._communicator.world_size

    @property
    def num_rows(self) -> int:
        """Number of rows that a layer returns on this rank, one per owned node and per other node computed here."""
        return self.shard.num_owned

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole graph."""
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
    """Return the names of the backends for several ranks whose abilities pass ``can``, such as "cache or comm"."""
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
    """Return a backend, given its registered name, its class path in any package, or the backend itself.

    Args:
        backend: A registered name, the path of a :class:`Backend` class, or an instance.
        **arguments: Arguments of the class; none for an instance.

    Raises:
        InputError: If the name is unknown (the message lists all names), the path leads to no subclass of
            :class:`Backend` or cannot be imported, or two packages offer the name. If an argument does not fit the
            class, or goes with an instance. If the class does not call ``super().__init__()``.
    """
    resolved: Backend = backends.resolve(backend, Backend, **arguments)  # type: ignore[type-abstract]
    if "_token" not in vars(resolved):
        cls = type(resolved)
        raise InputError(f"backend {cls.__module__}.{cls.__qualname__}: __init__ does not call super().__init__()")
    return resolved
