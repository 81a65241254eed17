"""Finds what a hop reads: attributes by the code of its methods, tensors by the autograd graph of its result."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pygdist.hops.layer import having

#: By class and methods; weak, as the class of a routed layer has its backend, which holds a graph.
_NAMES: WeakKeyDictionary[type, dict[tuple[str, ...], frozenset[str]]] = WeakKeyDictionary()


def read_names(layer_class: type, methods: tuple[str, ...]) -> frozenset[str]:
    """Names of the attributes that these methods of a layer read, with those that the methods they call read.

    Args:
        layer_class: The layer's class.
        methods: Names of methods.
    """
    by_methods = _NAMES.setdefault(layer_class, {})
    if methods not in by_methods:
        by_methods[methods] = _read_names(layer_class, methods)
    return by_methods[methods]


def _read_names(layer_class: type, methods: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    missing = list(methods)
    while missing:
        name = missing.pop()
        for cls in layer_class.__mro__:
            function = vars(cls).get(name) if cls is not nn.Module else None
            if isinstance(function, types.FunctionType):
                new = set(_attributes(function.__code__)) - names
                names |= new
                missing += new
    return frozenset(names)


def _attributes(code: types.CodeType) -> Iterator[str]:
    """Names after a dot where the code reads them; functions and comprehensions inside it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _attributes(inner)


def leaves_of(out: Tensor) -> list[Tensor]:
    """The tensors at which the gradients of ``out`` would end."""
    leaves: list[Tensor] = []
    missing = [out.grad_fn]
    seen = set(missing)
    while missing:
        node = missing.pop()
        if node is None:  # of a tensor that needs no gradient
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        new = {one for one, _ in node.next_functions} - seen
        seen |= new
        missing += new
    return leaves


def tensors_read(layer: nn.Module, run: Callable[[], Tensor]) -> frozenset[str]:
    """Names of the layer's parameters, and of its attributes that are tensors, on which the result of ``run`` depends.

    ``layer`` is a copy for trials: its parameters need gradients afterwards.
    """
    attributes = vars(layer)
    before, watched = dict(attributes), {}
    for name, value in before.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            watched[name] = value.detach().requires_grad_()
    for name, parameter in layer.named_parameters():
        if parameter.is_floating_point():
            watched[name] = parameter.requires_grad_()
    # copies, as the layer may write into its attributes
    with torch.enable_grad(), having(layer, {name: watched[name].clone() for name in before if name in watched}):
        reached = {id(leaf) for leaf in leaves_of(run())}
    return frozenset(name for name, tensor in watched.items() if id(tensor) in reached)
