"""Rerouting ``propagate``: each layer gets a subclass made on the fly, and the backend decides what it sees.

As with PyTorch's ``fully_shard`` the module object, its parameters, ``state_dict`` keys and ``isinstance`` stay as
they are; only ``__class__`` changes, to a class that puts routing in front of the layer's own. Three things are
routed: hops (``propagate``, ``edge_updater``); degree normalisation and what adds self-loops or picks the edges of a
relation, as the layer's own code names them; and what looks at all nodes: norms (:mod:`pygdist.nn.norms`) and
aggregations that pad (:mod:`pygdist.nn.aggregation`).
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, RGCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from pygdist.backends.base import Backend
from pygdist.errors import InputError, LostRankError
from pygdist.hops.blocks import Blocks
from pygdist.hops.cheaper_side import cheaper_forward
from pygdist.hops.first_hop import FirstHop
from pygdist.hops.fused_attention import UNSEEN, Unweighted, attention_forward, attention_hop
from pygdist.hops.layer import (
    BASE,
    CACHES,
    fused_adjacency,
    fused_arguments,
    fuses,
    layer_name,
    of_destinations,
    plain,
    stood_in_for,
    writes_hops,
    written_hop,
)
from pygdist.hops.savings import Savings
from pygdist.nn.aggregation import padded_aggregation, pads
from pygdist.nn.normalization import GlobalGCNNorm
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.nn.relations import KeptRelations
from pygdist.nn.self_loops import KeptSelfLoops
from pygdist.routing.refusals import refusals

__all__ = ["distribute", "undistribute"]

_BACKEND, _HOOK = "_pygdist_backend", "_pygdist_hook"


def distribute(model: nn.Module, *, backend: Backend, savings: Savings | None = None) -> nn.Module:
    """Reroute every PyG layer of ``model`` through ``backend``, in place.

    Args:
        model: Any module that contains PyG layers. Parameters and ``state_dict`` keys do not change.
        backend: How neighbours arrive; bound to a shard before the first forward pass.
        savings: Which work need not be done; by default all that can be left undone is.

    Returns:
        ``model`` itself. Call it as ``model(shard.x, shard.adjacency)`` with the rank's own rows.

    Raises:
        InputError: If the model is distributed already, or holds layers that cannot be: all of them are named, each
            with the reason.

    Example:
        >>> model = distribute(GCN(16, 32, num_layers=2, out_channels=7), backend=CommBackend())
        >>> out = model(shard.x, shard.adjacency)  # one row per owned node
    """
    if hasattr(model, _HOOK):
        raise InputError(f"{type(model).__name__} is distributed already; call undistribute(model) first")
    refused = refusals(model, backend)
    if refused:
        raise InputError(f"backend '{backend.name or type(backend).__name__}' cannot run " + "; ".join(refused))
    routed = _routing_of(backend)
    savings = Savings() if savings is None else savings
    if savings != backend.savings and any(getattr(type(layer), BASE, None) for layer in routed.layers):
        raise InputError("this backend runs another model with other savings; give each model a backend of its own")
    backend.savings = savings
    routed.first_hop.forget()
    backend.forget_model(model)
    for module in list(model.modules()):
        base = type(module)
        if isinstance(module, MessagePassing):
            _forget_local_state(module)
            module.__class__ = routed.layer_class(base)
            routed.layers.add(module)
        elif _global_forward(base) is not None:
            module.__class__ = routed.global_class(base)
        elif any(_uses(function, routed.replacements) for function in _functions(base)):
            module.__class__ = routed.normalising_class(base)
    model.__dict__[_HOOK] = (
        model.register_forward_pre_hook(_BeginForward(backend), with_kwargs=True),
        model.register_forward_hook(_EndForward(backend), always_call=True),  # also after an exception
    )
    return model


def undistribute(model: nn.Module) -> nn.Module:
    """Give every layer of ``model`` its own class back, in place; the inverse of :func:`distribute`."""
    for hook in model.__dict__.pop(_HOOK, ()):
        hook.remove()
    for module in model.modules():
        base = getattr(type(module), BASE, None)
        if base is None:
            continue
        routing = _routing_of(getattr(type(module), _BACKEND))
        module.__class__ = base
        if isinstance(module, MessagePassing):
            routing.let_go(module)
            _forget_local_state(module)
            if module._decomposed_layers != 1:
                module.propagate = base._orig_propagate.__get__(module)
    return model


class _BeginForward:
    """Forward pre-hook on the model's root; an object, so that it can be pickled with the model."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        _routing_of(self.backend).first_hop.begin_forward()
        self.backend.begin_forward()
        return self.backend.model_inputs(module, args, kwargs)


class _EndForward:
    """Forward hook on the model's root."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        _routing_of(self.backend).first_hop.end_forward()
        self.backend.end_forward()
        return self.backend.model_output(output)


class _Routing:
    """Makes the classes of one backend; each layer class is made once."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.gcn_norm = GlobalGCNNorm(backend)
        self.self_loops, self.relations = KeptSelfLoops(), KeptRelations()
        self.replacements: dict[str, tuple[Any, Any]] = {
            "gcn_norm": (gcn_norm, self.gcn_norm),
            "remove_self_loops": (remove_self_loops, self.self_loops.remove),
            "add_self_loops": (add_self_loops, self.self_loops.add),
            "add_remaining_self_loops": (add_remaining_self_loops, self.self_loops.add_remaining),
            "masked_edge_index": (masked_edge_index, self.relations.pick),
        }
        self.classes: dict[type, type] = {}
        self.layers: weakref.WeakSet[MessagePassing] = weakref.WeakSet()
        self.blocks = Blocks(backend)
        self.first_hop = FirstHop(backend)

    def forget(self) -> None:
        """Drop what was computed for one graph, by us and by layers that cache (``cached=True``)."""
        self.gcn_norm.clear()
        self.self_loops.clear()
        self.blocks.forget()
        self.first_hop.forget()
        for layer in self.layers:
            _forget_local_state(layer)

    def let_go(self, layer: MessagePassing) -> None:
        """Drop what was computed for one layer, which leaves this backend."""
        self.layers.discard(layer)
        self.first_hop.drop(layer)

    def layer_class(self, base: type[MessagePassing]) -> type:
        """``base`` with its hops handed to the backend."""
        if base not in self.classes:
            body = {**self._body(base), "SUPPORTS_FUSED_EDGE_INDEX": True}
            for name in ("propagate", "edge_updater"):
                # PyG assigns these three on the class when it unpickles, deep-copies or decomposes a layer; a class
                # that defines them itself keeps its routing
                body[name] = body[f"_orig_{name}"] = body[f"_jinja_{name}"] = _routed(base, name)
            bases: tuple[Any, ...] = self._rebound_bases(base)
            # a hop of the layer's own may do anything with what it gets
            way = None if writes_hops(base) else cheaper_forward(base) or attention_forward(base)
            # a subclass may leave it to a class that was rebound
            own: Callable[..., Any] = getattr(type(base.__name__, bases, {}), "forward")  # noqa: B009 (made just now)
            forward = own if way is None else _another_way(way, own)
            if base.update is not MessagePassing.update:
                body["update"] = of_destinations(base.update)
            # torch.compile leaves layers as they are and compiles what is between them
            body["forward"] = torch.compiler.disable(_entered(forward))
            self.classes[base] = type(f"Distributed{base.__name__}", bases, body)
        return self.classes[base]

    def global_class(self, base: type[nn.Module]) -> type:
        """A norm over nodes, or an aggregation that pads, made to look at all ranks."""
        if base not in self.classes:
            make = _global_forward(base)
            assert make is not None
            body = {**self._body(base), "forward": make(self.backend)}
            self.classes[base] = type(f"Distributed{base.__name__}", (base,), body)
        return self.classes[base]

    def normalising_class(self, base: type[nn.Module]) -> type:
        """A model that calls ``gcn_norm`` itself, with that name rebound."""
        if base not in self.classes:
            self.classes[base] = type(f"Distributed{base.__name__}", self._rebound_bases(base), self._body(base))
        return self.classes[base]

    def class_of(self, base: type[nn.Module]) -> type:
        """The class that stands for ``base``, whatever its kind."""
        if issubclass(base, MessagePassing):
            return self.layer_class(base)
        return self.global_class(base) if _global_forward(base) is not None else self.normalising_class(base)

    def _body(self, base: type[nn.Module]) -> dict[str, Any]:
        """What every generated class defines."""
        return {
            BASE: base,
            _BACKEND: self.backend,
            "__reduce_ex__": _reduce,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        }

    def _rebound_bases(self, base: type) -> tuple[type, ...]:
        """The bases of the generated class: each class whose code calls ``gcn_norm``, with that name rebound.

        Each rebound class is put in front of its original in the method resolution order, so that a user's subclass
        that calls ``super().forward()`` reaches the rebound code too.
        """
        bases = []
        for cls in base.__mro__:
            methods = {
                name: _rebind(value, self.replacements)
                for name, value in vars(cls).items()
                if isinstance(value, types.FunctionType) and _uses(value, self.replacements)
            }
            if methods:
                bases.append(type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__}))
        if not bases or not issubclass(bases[0], base):
            bases.insert(0, base)
        return tuple(bases)


def _global_forward(base: type[nn.Module]) -> Callable[[Backend], Callable[..., Tensor]] | None:
    """What makes the ``forward`` of a module that looks at all nodes; ``None`` for any other module."""
    norm = next((GLOBAL_NORMS[cls] for cls in base.__mro__ if cls in GLOBAL_NORMS), None)
    if norm is not None:
        return lambda backend: lambda self, *args, **kwargs: norm(self, backend, *args, **kwargs)
    if pads(base):
        own = base.forward
        return lambda backend: (
            lambda self, *args, **kwargs: padded_aggregation(partial(own, self), backend, *args, **kwargs)
        )
    return None


def _routed(base: type[MessagePassing], name: str) -> Callable[..., Tensor]:
    own = written_hop(base, name)

    def hop(self: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        backend: Backend = getattr(type(self), _BACKEND)
        unseen = UNSEEN in vars(self)
        self = stood_in_for(self)
        if self.explain:
            raise InputError(f"{base.__name__}: explanations of a distributed layer are not supported; undistribute()")
        if not backend.savings.no_input_gradient:
            kwargs = {key: _with_gradient(value) for key, value in kwargs.items()}
        decomposed, self._decomposed_layers = self._decomposed_layers, 1  # a memory option; the result is the same
        if name == "propagate":
            backend.begin_hop()
        inner = partial(_aggregate, self, own, name)
        run = partial(getattr(backend, name), self, inner, edge_index, size, kwargs)
        backend.weights_unseen = unseen
        try:
            if name == "propagate" and fuses(self, edge_index, kwargs):
                result: Tensor = _routing_of(backend).first_hop.run(self, edge_index, kwargs, run)
            else:
                result = run()
        finally:
            self._decomposed_layers, backend.weights_unseen = decomposed, False
        return result

    hop.__name__ = name
    return hop


def _with_gradient(value: Any) -> Any:
    """Rows as PyG would treat those of a model's first layer if they asked for a gradient."""
    if isinstance(value, (tuple, list)):
        return tuple(_with_gradient(part) for part in value)
    wanted = isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled()
    return value.detach().requires_grad_() if wanted and not value.requires_grad else value


def _entered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's ``forward``, run by its backend."""

    @functools.wraps(forward)  # its parameters are looked at: which edge inputs it takes
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        backend: Backend = getattr(type(self), _BACKEND)
        _routing_of(backend).relations.begin_layer()
        try:
            with _relations_in_turn() if isinstance(self, RGCNConv) else contextlib.nullcontext():
                return backend.run_layer(self, forward, args, kwargs)
        except (IndexError, RuntimeError, ValueError) as error:
            if backend.communicator.world_size == 1 or not _looks_beyond(error):
                raise
            raise InputError(
                f"{layer_name(self)}: {error}; on rank {backend.shard.rank} edge_index has the ids of its own rows "
                "and, after them, of their neighbours, whose rows come with propagate() alone: give it what is looked "
                "up by sources (propagate(deg=deg) for deg_j in the message), and do not turn edges round",
                of_one_rank=True,
            ) from error

    return run


@contextlib.contextmanager
def _relations_in_turn() -> Iterator[None]:
    """A hop for each relation; with pyg-lib a rank would choose by its own edges, or one hop for all."""
    said = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = False if said is None else said
    try:
        yield
    finally:
        torch_geometric.backend.use_segment_matmul = said


def _looks_beyond(error: Exception) -> bool:
    """Whether a layer looked up rows that are not there."""
    said = str(error)
    return not isinstance(error, (InputError, LostRankError)) and any(one in said for one in _BEYOND)


_BEYOND = ("out of bounds", "Found indices in 'edge_index'", "Encountered invalid 'dim_size'")


def _another_way(way: Callable[..., Tensor | None], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``way`` in the place of a layer's ``forward``, which runs where ``way`` returns ``None``."""

    @functools.wraps(own)
    def forward(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        backend: Backend = getattr(type(self), _BACKEND)
        result = way(backend, self, own, *args, **kwargs)
        return own(self, *args, **kwargs) if result is None else result

    return forward


def _aggregate(
    layer: MessagePassing,
    own: Callable[..., Tensor],
    name: str,
    edge_index: Tensor,
    /,
    size: Any = None,
    **kwargs: Any,
) -> Tensor:
    """The hop ``name`` once the rows are there: by one sparse product, a kernel for attention, or PyG's messages."""
    backend: Backend = getattr(type(layer), _BACKEND)
    fused = fused_adjacency(layer, edge_index, kwargs) if name == "propagate" else None
    if fused is not None:
        arguments = fused_arguments(layer, kwargs)
        return (
            own(layer, fused, size=size, **kwargs)
            if arguments is None
            else layer.message_and_aggregate(fused, **arguments)
        )
    if backend.savings.fused_attention:
        attention = attention_hop(layer, name, edge_index, kwargs, unseen=backend.weights_unseen)
        if attention is not None:
            return attention(layer, edge_index, **kwargs)
    # a backend may give one hop the adjacency, and the next one plain edges
    kwargs = {key: value.weights() if isinstance(value, Unweighted) else value for key, value in kwargs.items()}
    run = _routing_of(backend).blocks.run
    return run(layer, partial(own, layer), name == "edge_updater", plain(edge_index), size=size, **kwargs)


def _functions(base: type) -> list[types.FunctionType]:
    """Every function that the class and its bases define."""
    return [value for cls in base.__mro__ for value in vars(cls).values() if isinstance(value, types.FunctionType)]


def _uses(function: types.FunctionType, replacements: dict[str, tuple[Any, Any]]) -> bool:
    return any(
        name in function.__code__.co_names and function.__globals__.get(name) is original
        for name, (original, _) in replacements.items()
    )


def _rebind(function: types.FunctionType, replacements: dict[str, tuple[Any, Any]]) -> types.FunctionType:
    """The same code with other globals; PyG's module stays untouched."""
    names = {name: new for name, (original, new) in replacements.items() if function.__globals__.get(name) is original}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    return copy


def _forget_local_state(layer: MessagePassing) -> None:
    """Drop what the layer cached on another topology, and methods that PyG hung on the instance."""
    for name in CACHES:
        if getattr(layer, name, None) is not None:
            setattr(layer, name, None)
    layer.__dict__.pop("propagate", None)
    layer.__dict__.pop("edge_updater", None)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    # generated classes have no importable name: rebuild from the layer's own class and the backend
    cls = type(self)
    state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
    return _rebuild, (getattr(cls, BASE), getattr(cls, _BACKEND)), state


def _rebuild(base: type[nn.Module], backend: Backend) -> nn.Module:
    routing = _routing_of(backend)
    module: nn.Module = object.__new__(routing.class_of(base))
    if isinstance(module, MessagePassing):
        routing.layers.add(module)
    return module


def _routing_of(backend: Backend) -> _Routing:
    """The classes made for ``backend``; kept with it, so that copies of a layer share their class."""
    if backend.routing is None:
        backend.routing = _Routing(backend)
    routing: _Routing = backend.routing
    return routing
