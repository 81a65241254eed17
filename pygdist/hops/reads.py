"""What a result was computed from, as autograd has noted it: whatever code did it, and wherever that found things."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["leaves_of", "tensors_read"]


def leaves_of(out: Tensor) -> list[Tensor]:
    """The tensors at which the gradients of ``out`` would end."""
    found: list[Tensor] = []
    missing = [out.grad_fn]
    seen = set(missing)
    while missing:
        node = missing.pop()
        if node is None:  # of what needs no gradient
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        new = {one for one, _ in node.next_functions} - seen
        seen |= new
        missing += new
    return found


def tensors_read(layer: nn.Module, run: Callable[[], Tensor]) -> frozenset[str]:
    """Names of a layer's parameters, and of tensors that are its attributes, with which ``run`` computes its result.

    The layer is one that is tried: its parameters need gradients afterwards.
    """
    attributes = vars(layer)
    before, read = dict(attributes), {}
    for name, value in before.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            read[name] = value.detach().requires_grad_()
    for name, parameter in layer.named_parameters():
        if parameter.is_floating_point():
            read[name] = parameter.requires_grad_()
    with torch.enable_grad():
        attributes.update({name: read[name].clone() for name in before if name in read})  # it may write into them
        try:
            reached = {id(one) for one in leaves_of(run())}
        finally:
            attributes.clear()
            attributes.update(before)
    return frozenset(name for name, one in read.items() if id(one) in reached)
