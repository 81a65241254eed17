"""Routes a model's hops to a backend: each layer gets a subclass made on the fly, and the backend decides what it sees.

As with PyTorch's ``fully_shard``, the module object, its parameters, ``state_dict`` keys and ``isinstance`` stay as
they are; only ``__class__`` changes, to a class that puts routing in front of the layer's own. Three kinds of calls are
routed:

- hops (``propagate``, ``edge_updater``);
- PyG's functions that a layer's code calls by name to normalise edges, add self-loops, or pick the edges of a relation;
- modules that look at all nodes: norms (:mod:`pygdist.nn.norms`), readouts (:mod:`pygdist.nn.readouts`), and
  aggregations that pad (:mod:`pygdist.nn.aggregation`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, RGCNConv, global_add_pool, global_mean_pool
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, remove_self_loops

from pygdist.backends.base import Backend
from pygdist.errors import InputError
from pygdist.hops.cheaper_side import cheaper_forward
from pygdist.hops.fused_attention import UNSEEN, attention_forward
from pygdist.hops.hop import Hop, each_end, with_passed_rows
from pygdist.hops.kept import Kept
from pygdist.hops.layer import (
    BASE,
    calls_by_name,
    forget_local_state,
    layer_name,
    put_local_propagate_back,
    rebound,
    relations_in_turn,
    routed_names,
    stood_in_for,
    undecomposed,
    writes_hops,
    written_hop,
)
from pygdist.hops.savings import Savings
from pygdist.nn.aggregation import padded_aggregation, pads
from pygdist.nn.degrees import WHOLE_GRAPH
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.nn.readouts import READOUTS
from pygdist.routing.causes import reads_missing_rows
from pygdist.routing.check import Ways
from pygdist.routing.check import check as compare_with_one_process
from pygdist.routing.refusals import refusals

_BACKEND, _HOOK = "_pygdist_backend", "_pygdist_hook"


def distribute(model: nn.Module, *, backend: Backend, savings: Savings | None = None, check: bool = True) -> nn.Module:
    """Reroute every PyG layer of ``model`` through ``backend``, in place.

    Args:
        model: Any module that contains PyG layers. Parameters and ``state_dict`` keys do not change.
        backend: Brings the neighbours' rows; bound to a shard before the first forward pass.
        savings: Shortcuts to take. All are on by default.
        check: Before the first pass, compare the model with one process on a small graph
            (:mod:`pygdist.routing.check`); the pass raises an ``InputError`` on all ranks if a number differs.

    Returns:
        ``model`` itself. Call it as ``model(shard.x, shard.adjacency)`` with the rank's own rows.

    Raises:
        InputError: If the model is distributed already, or holds layers that cannot be: the message names all of them,
            each with the reason.

    Example:
        >>> model = distribute(GCN(16, 32, num_layers=2, out_channels=7), backend=CommBackend())
        >>> out = model(shard.x, shard.adjacency)  # one row per owned node
    """
    if hasattr(model, _HOOK):
        raise InputError(f"{type(model).__name__} is distributed already; call undistribute(model) first")
    for path, module in model.named_modules():
        if getattr(type(module), BASE, None) is not None:
            raise InputError(
                f"'{path}' ({layer_name(module)}) belongs to a model that is distributed already; call "
                "undistribute() on that model first"
            )
    refused = refusals(model, backend)
    if refused:
        raise InputError(f"backend '{backend.name or type(backend).__name__}' cannot run " + "; ".join(refused))
    kept, savings = backend.kept, Savings() if savings is None else savings
    if savings != backend.savings and any(getattr(type(layer), BASE, None) for layer in kept.layers):
        raise InputError("this backend runs another model with other savings; give each model a backend of its own")
    backend.savings = savings
    kept.first_hop.forget()
    backend.forget_model(model)
    inside = {one for layer in model.modules() if isinstance(layer, MessagePassing) for one in layer.modules()}
    for module in list(model.modules()):
        base = type(module)
        if isinstance(module, MessagePassing):
            forget_local_state(module)
            kept.layers.add(module)
        elif base in READOUTS:
            if module in inside:
                continue
        elif _global_forward(base) is None and not calls_by_name(base, _replacements(kept)):
            continue
        module.__class__ = _routed_class(backend, base)
    model.__dict__[_HOOK] = (
        model.register_forward_pre_hook(_BeginForward(backend, unchecked=check), with_kwargs=True),
        model.register_forward_hook(_EndForward(backend), always_call=True),  # also after an exception
    )
    return model


def undistribute(model: nn.Module) -> nn.Module:
    """Give every layer of ``model`` its own class back, in place; the inverse of :func:`distribute`."""
    for hook in model.__dict__.pop(_HOOK, ()):
        hook.remove()
    for module in model.modules():
        routed = type(module)
        if getattr(routed, BASE, None) is None:
            continue
        module.__class__ = getattr(routed, BASE)
        if isinstance(module, MessagePassing):
            getattr(routed, _BACKEND).kept.let_go(module)
            forget_local_state(module)
            put_local_propagate_back(module)
    return model


_compare: Any = torch.compiler.disable(compare_with_one_process)
_WAYS = Ways(
    on=lambda model, backend: distribute(model, backend=backend, savings=backend.savings, check=False), off=undistribute
)


class _BeginForward:
    """Forward pre-hook on the model's root; an object, so that it can be pickled with the model."""

    def __init__(self, backend: Backend, *, unchecked: bool) -> None:
        self.backend, self.unchecked = backend, unchecked

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.unchecked:
            self.unchecked = not _compare(module, self.backend, args, kwargs, _WAYS)
        self.backend.kept.first_hop.begin_forward()
        self.backend.begin_forward()
        return self.backend.model_inputs(module, args, kwargs)


class _EndForward:
    """Forward hook on the model's root."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.backend.kept.first_hop.end_forward()
        self.backend.end_forward()
        return self.backend.model_output(output)


# -- classes -----------------------------------------------------------------------------------------------------------


def _routed_class(backend: Backend, base: type[nn.Module]) -> type:
    """Return the subclass of ``base`` that routes to ``backend``; it is made once for each backend."""
    classes = backend.kept.classes
    if base not in classes:
        body: dict[str, Any] = {
            BASE: base,
            _BACKEND: backend,
            "__reduce_ex__": _reduce,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        }
        bases: tuple[type, ...] = (base,)
        make = _global_forward(base)
        if issubclass(base, MessagePassing):
            bases = rebound(base, _replacements(backend.kept))
            body |= _body_of_layer(backend, base, bases)
        elif make is not None:
            body["forward"] = make(backend)
        else:
            bases = rebound(base, _replacements(backend.kept))
        classes[base] = type(f"Distributed{base.__name__}", bases, body)
    return classes[base]


def _body_of_layer(backend: Backend, base: type[MessagePassing], bases: tuple[type, ...]) -> dict[str, Any]:
    """Attributes of a layer's routed class: its hops go to the backend, and its ``forward`` may take shortcuts."""
    body: dict[str, Any] = {"SUPPORTS_FUSED_EDGE_INDEX": True}
    for name in ("propagate", "edge_updater"):
        body |= dict.fromkeys(routed_names(name), _routed(base, name))
    # a subclass may leave ``forward`` to a class that was rebound
    forward: Callable[..., Any] = getattr(type(base.__name__, bases, {}), "forward")  # noqa: B009 (made just now)
    if not writes_hops(base):  # a hop of the layer's own may do anything with its rows
        cheaper, attention = cheaper_forward(base), attention_forward(base)
        if cheaper is not None:
            forward = _shortcut(partial(cheaper, backend.kept), forward)
        elif attention is not None:
            forward = _shortcut(partial(attention, backend), forward)
    if base.update is not MessagePassing.update:
        body["update"] = with_passed_rows(base.update)
    # torch.compile leaves layers as they are and compiles the code between them
    body["forward"] = torch.compiler.disable(_entered(forward))
    return body


def _replacements(kept: Kept) -> dict[Any, Any]:
    """PyG's functions that look at all edges or nodes, and those that know of other ranks."""
    return {
        gcn_norm: kept.gcn_norm,
        remove_self_loops: kept.self_loops.remove,
        add_self_loops: kept.self_loops.add,
        add_remaining_self_loops: kept.self_loops.add_remaining,
        masked_edge_index: kept.relations.pick,
        global_add_pool: kept.readouts.add,
        global_mean_pool: kept.readouts.mean,
        degree: kept.degrees.count,
        **WHOLE_GRAPH,
    }


def _global_forward(base: type[nn.Module]) -> Callable[[Backend], Callable[..., Tensor]] | None:
    """Return what makes the ``forward`` of a module that looks at all nodes; ``None`` for any other module."""
    norm = next((GLOBAL_NORMS[cls] for cls in base.__mro__ if cls in GLOBAL_NORMS), READOUTS.get(base))
    if norm is not None:

        def routed(backend: Backend, self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            backend.begin_module(self)
            return norm(self, backend, *args, **kwargs)

        return lambda backend: lambda self, *args, **kwargs: routed(backend, self, *args, **kwargs)
    if pads(base):
        forward = base.forward
        return lambda backend: (
            lambda self, *args, **kwargs: padded_aggregation(partial(forward, self), backend, *args, **kwargs)
        )
    return None


def _reduce(self: nn.Module, protocol: Any) -> Any:
    # generated classes have no importable name: rebuild from the layer's own class and the backend
    cls = type(self)
    state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
    return _rebuild, (getattr(cls, BASE), getattr(cls, _BACKEND)), state


def _rebuild(base: type[nn.Module], backend: Backend) -> nn.Module:
    module: nn.Module = object.__new__(_routed_class(backend, base))
    if isinstance(module, MessagePassing):
        backend.kept.layers.add(module)
    return module


# -- methods -----------------------------------------------------------------------------------------------------------


def _routed(base: type[MessagePassing], name: Any) -> Callable[..., Any]:
    """Return the method ``name`` of a routed class: it hands the hop to the backend."""
    written = written_hop(base, name)

    def method(self: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        backend: Backend = getattr(type(self), _BACKEND)
        layer = stood_in_for(self)
        if layer.explain:
            raise InputError(f"{base.__name__}: explanations of a distributed layer are not supported; undistribute()")
        if not backend.savings.no_input_gradient:
            kwargs = {key: each_end(value, _with_gradient) for key, value in kwargs.items()}
        hop = Hop(
            layer=layer,
            name=name,
            edge_index=edge_index,
            arguments=kwargs,
            size=size,
            written=written,
            runs=backend.kept,
            weights_unseen=UNSEEN in vars(self),
        )
        with undecomposed(layer):
            if name == "edge_updater":
                return backend.edge_updater(hop)
            backend.begin_hop()
            if hop.is_product:
                return backend.kept.first_hop.run(hop, lambda: backend.propagate(hop))
            return backend.propagate(hop)

    method.__name__ = name
    return method


def _with_gradient(value: Any) -> Any:
    """Let rows ask for a gradient, as PyG computes it where the shortcut ``no_input_gradient`` is off."""
    graded = isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled()
    return value.detach().requires_grad_() if graded and not value.requires_grad else value


def _entered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's ``forward``, run by its backend."""

    @functools.wraps(forward)  # PyG and trials read its parameters: which inputs of edges it takes
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        backend: Backend = getattr(type(self), _BACKEND)
        backend.kept.relations.begin_layer()
        try:
            with relations_in_turn() if isinstance(self, RGCNConv) else contextlib.nullcontext():
                return backend.run_layer(self, forward, args, kwargs)
        except (IndexError, RuntimeError, ValueError) as error:
            if backend.communicator.world_size == 1 or not reads_missing_rows(error):
                raise
            raise InputError(
                f"{layer_name(self)} on rank {backend.shard.rank}: {error}. If this layer indexes node rows by "
                "edge_index outside propagate, where only the rank's own rows are available, pass the tensor to "
                "propagate, for example propagate(edge_index, x=x, deg=deg), and use deg_j in message. A model cannot "
                "turn edges round",
                of_one_rank=True,
            ) from error

    return run


def _shortcut(substitute: Callable[..., Tensor | None], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``substitute`` in the place of a layer's ``forward``, which runs where the substitute returns ``None``."""

    @functools.wraps(forward)
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        result = substitute(self, forward, *args, **kwargs)
        return forward(self, *args, **kwargs) if result is None else result

    return run
