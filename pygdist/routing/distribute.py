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
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    ChebConv,
    CorrectAndSmooth,
    LabelPropagation,
    MessagePassing,
    RGCNConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import PatchTransformerAggregation, QuantileAggregation
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    degree,
    get_laplacian,
    one_hot,
    remove_self_loops,
)

from pygdist.backends.base import Backend
from pygdist.errors import InputError, LostRankError
from pygdist.graph import Adjacency
from pygdist.hops.cheaper_side import cheaper_forward
from pygdist.hops.fused_attention import UNSEEN, attention_forward
from pygdist.hops.hop import Hop, each_end, is_pair, target_of, with_passed_rows
from pygdist.hops.layer import (
    BASE,
    forget_local_state,
    layer_name,
    modules_of_messages,
    put_local_propagate_back,
    relations_in_turn,
    routed_names,
    stood_in_for,
    undecomposed,
    writes_hops,
    written_hop,
)
from pygdist.hops.rebinding import calls_by_name, rebound
from pygdist.hops.savings import Savings
from pygdist.nn.aggregation import padded_aggregation, pads, quantile_aggregation
from pygdist.nn.degrees import WHOLE_GRAPH
from pygdist.nn.label_propagation import corrected, without_ids
from pygdist.nn.laplacian import chebyshev_norm
from pygdist.nn.norms import GLOBAL_NORMS, INSTANCE_NORMS
from pygdist.nn.readouts import READOUTS
from pygdist.routing.agreement import agree_on_layer, agree_on_pass, move
from pygdist.routing.check import Ways, fails_alone, tell_note
from pygdist.routing.check import check as compare_with_one_process
from pygdist.routing.refusals import refuse_layers

_BACKEND, _HOOK = "_pygdist_backend", "_pygdist_hook"


def distribute(model: nn.Module, *, backend: Backend, savings: Savings | None = None, check: bool = True) -> nn.Module:
    """Reroute every PyG layer of ``model`` through ``backend``, in place.

    Args:
        model: Any module that contains PyG layers. Parameters and ``state_dict`` keys do not change.
        backend: Brings the neighbours' rows. Bind the backend to a shard before the first forward pass.
        savings: Shortcuts to take. All are on by default.
        check: On several ranks, or with ``replica``, compare the model with one process on a small graph
            (:mod:`pygdist.routing.check`) before the first pass, and before the first pass with each new form of
            arguments. If a number differs, the pass raises an ``InputError`` on all ranks.

    Returns:
        ``model`` itself. Call it as ``model(shard.x, shard.adjacency)`` with the rank's own rows.

    Raises:
        InputError: If ``model`` is not a module or is distributed already; if layers cannot be distributed (the message
            names all these layers, each with the reason); or if the backend runs another model with other ``savings``.

    Example:
        >>> backend = CommBackend()
        >>> backend.bind(shard, communicator)
        >>> model = distribute(GCN(16, 32, num_layers=2, out_channels=7), backend=backend)
        >>> out = model(shard.x, shard.adjacency)  # one row per owned node
    """
    _refuse_twice(model, backend)
    refuse_layers(model, backend)
    kept, savings = backend.kept, Savings() if savings is None else savings
    if savings != backend.savings and any(getattr(type(layer), BASE, None) for layer in kept.layers):
        raise InputError("this backend runs another model with other savings; give each model a backend of its own")
    backend.savings = savings
    kept.uncompared = check
    kept.first_hop.forget()
    backend.forget_model(model)
    _route(model, backend, list(model.modules()))
    model.__dict__[_HOOK] = (
        model.register_forward_pre_hook(_BeginForward(backend, check=check), with_kwargs=True),
        model.register_forward_hook(_EndForward(backend), always_call=True),  # also after an exception
    )
    return model


def distribute_layers(model: nn.Module, *, backend: Backend, but: Collection[MessagePassing]) -> None:
    """Reroute the PyG layers of ``model``, and what is inside of them, in place; nothing else of the model.

    Used on one process, where only layers change and the rest of the model runs unmodified.

    Args:
        model: Any module that contains PyG layers.
        backend: Runs the layers; bound to a graph.
        but: Layers that stay as they are; layers inside of them are rerouted.

    Raises:
        InputError: As :func:`distribute`, if the model is distributed already.
    """
    _refuse_twice(model, backend)
    left = set(but)
    layers = [one for one in model.modules() if isinstance(one, MessagePassing) and one not in left]
    _route(model, backend, list(dict.fromkeys(one for layer in layers for one in layer.modules() if one not in left)))
    model.__dict__[_HOOK] = ()


def _refuse_twice(model: nn.Module, backend: Backend) -> None:
    """Refuse a model that is distributed already, and what is no model; note the names of all others' modules."""
    if not isinstance(model, nn.Module):
        raise InputError(f"distribute() takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, _HOOK):
        raise InputError(f"{type(model).__name__} is distributed already; call undistribute(model) first")
    for path, module in model.named_modules():
        backend.kept.names[module] = f"'{path}', {layer_name(module)}" if path else layer_name(module)
        if getattr(type(module), BASE, None) is not None:
            raise InputError(
                f"'{path}' ({layer_name(module)}) belongs to a model that is distributed already; call "
                "undistribute() on that model first"
            )


def _route(model: nn.Module, backend: Backend, modules: list[nn.Module]) -> None:
    """Give those of some modules that are layers, or look at all nodes or edges, a class that routes to ``backend``."""
    layers = [one for one in model.modules() if isinstance(one, MessagePassing)]
    inside = {one for layer in layers for one in layer.modules()}
    of_edges = {one for layer in layers for one in modules_of_messages(layer) if isinstance(one, INSTANCE_NORMS)}
    for module in modules:
        base = type(module)
        if isinstance(module, MessagePassing):
            forget_local_state(module)
            backend.kept.layers.add(module)
        elif module in of_edges or (base in READOUTS and module in inside) or not _is_routed(base, backend):
            continue
        module.__class__ = _routed_class(backend, base)


@contextlib.contextmanager
def with_own_classes(layer: nn.Module) -> Iterator[None]:
    """Let a layer, and all that is inside of it, run PyG's code for a while."""
    routed = [(one, type(one)) for one in layer.modules() if getattr(type(one), BASE, None) is not None]
    local = {one: vars(one).pop("propagate") for one, _ in routed if "propagate" in vars(one)}  # as explainers set it
    for module, cls in routed:
        module.__class__ = getattr(cls, BASE)
        if module in local:
            put_local_propagate_back(module)
    try:
        yield
    finally:
        for module, cls in routed:
            module.__class__ = cls
            if module in local:
                vars(module)["propagate"] = local[module]


class Removable(Protocol):
    """A handle of torch's, or something that removes several hooks."""

    def remove(self) -> None:
        """Remove what was registered."""


def with_hooks(model: nn.Module, *hooks: Removable) -> nn.Module:
    """Let :func:`undistribute` remove hooks of a distributed model too; returns the model."""
    model.__dict__[_HOOK] += hooks
    return model


def undistribute(model: nn.Module) -> nn.Module:
    """Give every layer of ``model`` its own class back, in place. This undoes :func:`distribute` and ``accelerate``."""
    for hook in model.__dict__.pop(_HOOK, ()):
        if hook is not None:  # in a copy of the model
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


_agree: Any = torch.compiler.disable(agree_on_pass)
_compare: Any = torch.compiler.disable(compare_with_one_process)
_tell: Any = torch.compiler.disable(tell_note)
_move: Any = torch.compiler.disable(move)
_WAYS = Ways(
    on=lambda model, backend: distribute(model, backend=backend, savings=backend.savings, check=False), off=undistribute
)


class _BeginForward:
    """Forward pre-hook on the model's root; an object, so that it can be pickled with the model.

    A model is compared with one process once for each form of its calls: it may do other things with other arguments.
    """

    def __init__(self, backend: Backend, *, check: bool) -> None:
        self.backend, self.check = backend, check
        self.compared: set[tuple[str, ...]] = set()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        form = _agree(module, self.backend, args, kwargs)
        self.backend.kept.uncompared = False
        if self.check and form not in self.compared:
            with _unsaved():  # a checkpoint around the model counts the tensors of each pass
                if _compare(module, self.backend, args, kwargs, _WAYS):
                    self.compared.add(form)
        self.backend.kept.first_hop.begin_forward()
        self.backend.begin_forward()
        try:
            inputs = self.backend.model_inputs(module, args, kwargs)
            self.backend.kept.hops = 0  # trials made others, which may be more on one rank
            return inputs
        except InputError as error:
            if error.__cause__ is not None and fails_alone(module, error.__cause__):
                raise error.__cause__ from None  # the model's own fault, told as on one process
            raise


def _unsaved() -> contextlib.AbstractContextManager[Any]:
    """Save tensors for backward passes as they are, whatever hooks are around."""
    if torch._C._functorch.maybe_current_level() is not None:  # which takes no hooks
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _EndForward:
    """Forward hook on the model's root."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        _move(self.backend, "past the {hops} calls of propagate", module)
        self.backend.kept.first_hop.end_forward()
        self.backend.end_forward()
        if output is not None:  # the pass did not fail
            _tell(module)
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
            bases = rebound(base, _replacements(backend))
            body |= _body_of_layer(backend, base, bases)
        elif make is not None and _norm_class(base) in (None, base):
            body["forward"] = make(backend)
        elif make is not None:  # a norm of the user's, whose forward() may call that of its parent
            norm: Any = _norm_class(base)
            bases = (base, type(norm.__name__, (norm,), {"forward": make(backend)}))
        else:
            bases = rebound(base, _replacements(backend))
            if issubclass(base, CorrectAndSmooth):
                body["correct"] = corrected(_made(base, bases).correct, backend)
        classes[base] = type(f"Distributed{base.__name__}", bases, body)
    return classes[base]


def _body_of_layer(backend: Backend, base: type[MessagePassing], bases: tuple[type, ...]) -> dict[str, Any]:
    """Attributes of a layer's routed class: its hops go to the backend, and its ``forward`` may take shortcuts."""
    body: dict[str, Any] = {"SUPPORTS_FUSED_EDGE_INDEX": True}
    for name in ("propagate", "edge_updater"):
        body |= dict.fromkeys(routed_names(name), _routed(base, name))
    forward: Callable[..., Any] = _made(base, bases).forward
    if not writes_hops(base):  # a hop of the layer's own may do anything with its rows
        cheaper, attention = cheaper_forward(base), attention_forward(base)
        if cheaper is not None:
            forward = _shortcut(partial(cheaper, backend.kept), forward)
        elif attention is not None:
            forward = _shortcut(partial(attention, backend), forward)
    if issubclass(base, LabelPropagation) and not backend.abilities.reruns_layers:
        forward = without_ids(forward)
    if issubclass(base, ChebConv):
        body["__norm__"] = chebyshev_norm(_made(base, bases).__norm__, backend.kept.laplacian)
    if base.update is not MessagePassing.update:
        body["update"] = with_passed_rows(base.update)
    # torch.compile leaves layers as they are and compiles the code between them
    body["forward"] = torch.compiler.disable(_entered(forward))
    return body


def _made(base: type[nn.Module], bases: tuple[type, ...]) -> Any:
    """Return a class to look methods up in: a subclass may leave them to a class that was rebound."""
    return type(base.__name__, bases, {})


def _replacements(backend: Backend) -> dict[Any, Any]:
    """PyG's functions that look at all edges or nodes, and those that know of other ranks."""
    kept = backend.kept
    return {
        gcn_norm: kept.gcn_norm,
        get_laplacian: kept.laplacian,
        remove_self_loops: kept.self_loops.remove,
        add_self_loops: kept.self_loops.add,
        add_remaining_self_loops: kept.self_loops.add_remaining,
        masked_edge_index: kept.relations.pick,
        global_add_pool: kept.readouts.add,
        global_mean_pool: kept.readouts.mean,
        degree: kept.degrees.count,
        one_hot: kept.one_hot,
        **WHOLE_GRAPH,
        **backend.functions(),
    }


def _is_routed(base: type[nn.Module], backend: Backend) -> bool:
    """True for a module that looks at all nodes or edges, beside the hops of layers."""
    return _global_forward(base) is not None or calls_by_name(base, _replacements(backend))


def _global_forward(base: type[nn.Module]) -> Callable[[Backend], Callable[..., Tensor]] | None:
    """Return what makes the ``forward`` of a module that looks at all nodes; ``None`` for any other module."""
    known = _norm_class(base)
    norm = READOUTS.get(base) if known is None else GLOBAL_NORMS[known]
    if norm is not None:

        def routed(backend: Backend, self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            _move(backend, "after propagate {hops}", self)
            backend.begin_module(self)
            return norm(self, backend, *args, **kwargs)

        return lambda backend: lambda self, *args, **kwargs: routed(backend, self, *args, **kwargs)
    if pads(base):
        forward = base.forward
        more = int(issubclass(base, PatchTransformerAggregation))  # which adds one itself
        return lambda backend: (
            lambda self, *args, **kwargs: padded_aggregation(partial(forward, self), backend, more, *args, **kwargs)
        )
    if issubclass(base, QuantileAggregation):
        forward = base.forward
        return lambda _: lambda self, *args, **kwargs: quantile_aggregation(partial(forward, self), *args, **kwargs)
    return None


def _norm_class(base: type[nn.Module]) -> type[nn.Module] | None:
    """Return the norm over nodes that a class is, or is derived from."""
    return next((cls for cls in base.__mro__ if cls in GLOBAL_NORMS), None)


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
            _move(backend, "in propagate {next}", self)
            backend.kept.hops += 1
            backend.begin_hop()
            try:
                if hop.is_product:
                    return backend.kept.first_hop.run(hop, lambda: backend.propagate(hop))
                return backend.propagate(hop)
            except (IndexError, RuntimeError, ValueError) as error:
                if isinstance(error, (InputError, LostRankError)) or not _leads_elsewhere(hop, backend):
                    raise
                raise InputError(
                    f"{hop.layer_name}: {error} The hop leads to other rows than the nodes of this rank, such as one "
                    "row for all of them, a node that the model adds, or the ends of edges that it turns round; only "
                    "hops over edges of the graph are distributed",
                    of_one_rank=True,
                ) from error

    method.__name__ = name
    return method


def _leads_elsewhere(hop: Hop, backend: Backend) -> bool:
    """True if a hop's edges end at other nodes than this rank's own, or its layer passes other rows for their ends."""
    num_rows, edges, dim = backend.num_rows, hop.edge_index, hop.layer.node_dim
    is_list = isinstance(edges, Tensor) and edges.layout == torch.strided and not isinstance(edges, Adjacency)
    if is_list and edges.numel() and int(edges[1].max()) >= num_rows:
        return True
    ends = [target_of(value) for value in hop.arguments.values() if is_pair(value)]
    return any(isinstance(one, Tensor) and one.dim() >= abs(dim) and one.size(dim) != num_rows for one in ends)


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
        if backend.kept.uncompared and backend.num_ranks > 1:
            _tell_uncompared(backend, self)
        try:
            args, kwargs = agree_on_layer(self, backend, forward, args, kwargs)
            with contextlib.ExitStack() as stack:
                if isinstance(self, RGCNConv):
                    stack.enter_context(relations_in_turn())
                    stack.enter_context(backend.kept.relations.noting())
                return backend.run_layer(self, forward, args, kwargs)
        except TypeError:
            _check_arguments(self, *args, **kwargs)
            raise

    return run


def _check_arguments(layer: MessagePassing, *args: Any, **kwargs: Any) -> None:
    """Raise Python's own ``TypeError`` if a layer's ``forward`` lacks an argument, or does not take one."""
    forward = getattr(type(layer), BASE).forward
    try:
        inspect.signature(forward).bind(layer, *args, **kwargs)
    except TypeError:
        forward(layer, *args, **kwargs)  # which does not begin, as these are not its arguments


def _tell_uncompared(backend: Backend, layer: MessagePassing) -> None:
    """Warn, once, that a model is called in a way that :func:`distribute` does not see."""
    backend.kept.uncompared = False
    if backend.communicator.rank == 0:
        warnings.warn(
            f"{layer_name(layer)} runs outside of a call of the model, as in model.encode(...), without having been "
            "compared with one process on a small graph. Call the model itself, or distribute the module that is "
            "called (model.encoder)",
            stacklevel=3,
        )


def _shortcut(substitute: Callable[..., Tensor | None], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``substitute`` in the place of a layer's ``forward``, which runs where the substitute returns ``None``."""

    @functools.wraps(forward)
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        result = substitute(self, forward, *args, **kwargs)
        return forward(self, *args, **kwargs) if result is None else result

    return run
