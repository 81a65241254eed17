"""What a result was computed from, as autograd has noted it: whatever code did it, and wherever that found things."""

from __future__ import annotations

from torch import Tensor

__all__ = ["leaves_of"]


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
