"""PyG layers from outside: which arguments they read, how their methods were written, and their private names.

PyG's private attributes, its generated ``propagate`` and one of its global flags are used in this file alone.
``tests/hops/test_layer.py`` names the versions of PyG for which this holds.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, GINEConv, GraphConv, Linear, MessagePassing, SAGEConv

from pygdist.nn.norms import GLOBAL_NORMS, INSTANCE_NORMS

BASE = "_pygdist_base"
"""Attribute of a class that stands for a layer's: the layer's own class."""

CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""Attributes in which layers with ``cached=True`` keep what they made of a graph."""

Module = TypeVar("Module", bound=nn.Module)

# -- arguments of hops -------------------------------------------------------------------------------------------------


def asked_arguments(layer: MessagePassing, *, edges: bool = False) -> set[str]:
    """Names that ``message``, ``aggregate`` and ``update`` ask for, or ``edge_update`` if ``edges``.

    ``x_j`` and ``x_i`` stand for the rows of ``x`` at the sources and destinations of edges.
    """
    return set(layer._edge_user_args if edges else layer._user_args)


def neighbour_arguments(layer: MessagePassing, *, edges: bool) -> list[str]:
    """Arguments of ``propagate`` (of ``edge_updater`` if ``edges``) whose source rows the layer reads, sorted."""
    return sorted(name[:-2] for name in asked_arguments(layer, edges=edges) if name.endswith("_j"))


def arguments_of_messages(layer: MessagePassing) -> set[str]:
    """Names that ``message`` and ``aggregate`` ask for, without those that PyG derives from the edges (``ptr``)."""
    return set(layer.inspector.get_flat_param_names(["message", "aggregate"], exclude=layer.special_args))


def fused_arguments(layer: MessagePassing) -> list[str] | None:
    """Names that ``message_and_aggregate`` takes beside the edges; ``None`` if PyG's fused path does more than call it.

    PyG's ``propagate`` looks the two ends of all edges up even there, for hooks and ``update`` to use.
    """
    if hooked(layer, "propagate", "message_and_aggregate") or type(layer).update is not MessagePassing.update:
        return None
    return list(inspect.signature(layer.message_and_aggregate).parameters)[1:]


def takes_fused(layer: MessagePassing, names: set[str]) -> bool:
    """True if ``message_and_aggregate`` asks for no arguments but ``names``."""
    return set(layer._fused_user_args) <= names


# -- hops as they were written -----------------------------------------------------------------------------------------


def written_hop(base: type[MessagePassing], name: str) -> Callable[..., Tensor]:
    """Return the method ``name`` (``propagate`` or ``edge_updater``) of a layer class as its authors wrote it.

    PyG replaces ``propagate`` on a class by code from a template, made for the options of the class's first instance,
    and notes what it replaced; a subclass may inherit the template of its parent, for another message. The classes that
    :func:`~pygdist.routing.distribute` makes note theirs in the same way.
    """
    for cls in base.__mro__:
        method: Callable[..., Tensor] | None = vars(cls).get(name)
        if method is not None and method is not vars(cls).get(f"_jinja_{name}"):
            return method
    raise AssertionError(f"{base.__name__} has no {name}")


def writes_hops(base: type[MessagePassing]) -> bool:
    """True if a class has a ``propagate`` or ``edge_updater`` of its own, so that no kernel may stand for it."""
    names = ("propagate", "edge_updater")
    return any(written_hop(base, name) is not written_hop(MessagePassing, name) for name in names)


def routed_names(name: str) -> tuple[str, str, str]:
    """Attributes of a class under which PyG looks the method ``name`` up.

    PyG assigns them on the class when it unpickles, deep-copies or decomposes a layer; a class that defines all three
    itself keeps its routing.
    """
    return name, f"_orig_{name}", f"_jinja_{name}"


@contextlib.contextmanager
def undecomposed(layer: MessagePassing) -> Iterator[None]:
    """Ignore ``decomposed_layers`` for a while: the option saves memory, and the result is the same."""
    decomposed, layer._decomposed_layers = layer._decomposed_layers, 1
    try:
        yield
    finally:
        layer._decomposed_layers = decomposed


def put_local_propagate_back(layer: MessagePassing) -> None:
    """Give a layer that is decomposed or explained the ``propagate`` that PyG hangs on its instances."""
    if layer._decomposed_layers != 1 or layer.explain:
        layer.propagate = type(layer)._orig_propagate.__get__(layer)


def forget_local_state(layer: MessagePassing) -> None:
    """Drop what the layer cached on another graph, and methods that PyG hung on the instance."""
    for name in CACHES:
        if getattr(layer, name, None) is not None:
            setattr(layer, name, None)
    layer.__dict__.pop("propagate", None)
    layer.__dict__.pop("edge_updater", None)


@contextlib.contextmanager
def relations_in_turn() -> Iterator[None]:
    """Let ``RGCNConv`` make one hop per relation, with pyg-lib too.

    With pyg-lib it chooses between one hop per relation and one for all by the edges that it sees, so ranks would
    choose differently. The flag is global in PyG; it is put back.
    """
    before = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = False if before is None else before
    try:
        yield
    finally:
        torch_geometric.backend.use_segment_matmul = before


# -- hooks -------------------------------------------------------------------------------------------------------------

_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


def hooks_of(layer: MessagePassing, *names: str) -> tuple[int, ...]:
    """Numbers of the hooks on the methods ``names`` of a layer, on any by default; no two hooks share a number."""
    kinds = ("forward_pre_hooks", "forward_hooks")
    hooks = (getattr(layer, f"_{name}_{kind}") for name in names or _HOOKED for kind in kinds)
    return tuple(number for numbers in hooks for number in numbers)


def hooked(layer: MessagePassing, *names: str) -> bool:
    """True if a hook is registered on one of the methods ``names`` of a layer; on any by default."""
    return bool(hooks_of(layer, *names))


def hooked_module(module: nn.Module) -> bool:
    """True if a hook is registered on the module itself."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_changed(module: nn.Module) -> bool:
    """True if a module does more than its class says: it has a hook, or a ``forward`` that was set on the object."""
    return hooked_module(module) or "forward" in vars(module)


def aggregation_of(layer: MessagePassing) -> type[Any] | None:
    """Return the class of a layer's aggregation; ``None`` if the layer has none, or one that :func:`is_changed`."""
    module = layer.aggr_module
    return None if module is None or is_changed(module) else own_class(module)


# -- layers with something changed -------------------------------------------------------------------------------------


def layer_name(layer: nn.Module) -> str:
    """The class name that users know, without the mark of a routed layer."""
    return type(layer).__name__.removeprefix("Distributed")


def own_class(module: nn.Module) -> type[Any]:
    """The class of a module before it was distributed."""
    cls: type[Any] = getattr(type(module), BASE, type(module))
    return cls


@contextlib.contextmanager
def having(layer: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a layer for a while. Afterwards all its attributes are as before, also those set meanwhile."""
    current = vars(layer)
    before = dict(current)
    current.update(attributes)
    try:
        yield
    finally:
        current.clear()
        current.update(before)


@contextlib.contextmanager
def having_one(layer: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set one attribute of a layer for a while, where Python looks before torch's modules; others may change."""
    attributes = vars(layer)
    before = attributes.get(name, attributes)  # itself, if there is none
    attributes[name] = value
    try:
        yield
    finally:
        if before is attributes:
            del attributes[name]
        else:
            attributes[name] = before


@contextlib.contextmanager
def options_of(layer: MessagePassing, **options: bool) -> Iterator[None]:
    """Change options of a layer for a while; options that it does not have are ignored.

    With ``cached`` the layer's cached results are put aside too.
    """
    changed: dict[str, Any] = {
        name: value for name, value in options.items() if getattr(layer, name, value) is (not value)
    }
    if "cached" in changed:
        changed |= {name: None for name in CACHES if getattr(layer, name, None) is not None}
    before = {name: getattr(layer, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(layer, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(layer, name, value)


def stand_in(layer: Module, **replaced: Any) -> Module:
    """Return a shallow copy of ``layer`` with some attributes replaced, for one call of ``forward``.

    ``layer`` itself does not change. Hops of the copy count as hops of ``layer`` (:func:`stood_in_for`).
    """
    twin: Module = object.__new__(type(layer))
    # an attribute of the instance is found before what torch registers; setattr() would register it with the layer
    twin.__dict__.update(layer.__dict__, **replaced, _stands_in_for=layer)
    return twin


def stood_in_for(layer: MessagePassing) -> MessagePassing:
    """The layer that ``layer`` is a :func:`stand_in` of, or ``layer`` itself."""
    original: MessagePassing = layer.__dict__.get("_stands_in_for", layer)
    return original


# -- facts about layers ------------------------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    """True if the module is ``x @ weight.T + bias`` and nothing else: no adapter, no hook."""
    return type(module) in (nn.Linear, Linear) and not is_changed(module)


def computes_fewer(layer: MessagePassing) -> Literal["rows", "pairs"] | None:
    """Tell how a layer of one hop can compute only the first of the rows that it reads.

    ``"rows"``: it uses its rows for nothing but messages, so edges with fewer destinations are enough. ``"pairs"``: it
    takes a pair of source rows and destination rows. ``None``: it computes as many rows as it reads.
    """
    cls = own_class(layer)
    for classes, way in _FEWER.items():
        pyg_class = next((one for one in classes if issubclass(cls, one)), None)
        if pyg_class is not None:
            names = ("forward", "message", "aggregate", "update")
            unchanged = all(getattr(cls, name) is getattr(pyg_class, name) for name in names)
            return way if unchanged and not writes_hops(cls) else None
    return None


_FEWER: dict[tuple[type[MessagePassing], ...], Literal["rows", "pairs"]] = {
    (GCNConv,): "rows",
    (SAGEConv, GraphConv, GINConv, GINEConv): "pairs",
}


def modules_of_messages(layer: MessagePassing) -> list[nn.Module]:
    """Modules that the layer's ``message`` calls, and all in them."""
    names = type(layer).message.__code__.co_names
    modules = [module for name in names if isinstance(module := getattr(layer, name, None), nn.Module)]
    return [part for module in modules for part in module.modules()]


def norms_over_edges(layer: MessagePassing) -> list[str]:
    """Class names of norms in the modules that the layer's ``message`` calls; those of each row by itself aside."""
    norms = GLOBAL_NORMS.keys() - set(INSTANCE_NORMS)
    return [type(one).__name__ for one in modules_of_messages(layer) if norms & set(type(one).__mro__)]


def norms_refused(layer: MessagePassing) -> str | None:
    """Return why a layer with a norm over edges cannot run on fetched rows; ``None`` if it has none."""
    norms = norms_over_edges(layer)
    if not norms:
        return None
    return f"takes the statistics of {norms[0]} over edges, not nodes; use MLP(..., norm=None), or a LayerNorm"
