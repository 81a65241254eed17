"""The identity of tensors: tells if a result that was computed from a tensor before is still valid."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def version_of(tensor: Tensor | None) -> int:
    """Return the number of in-place changes of a tensor; those of inference tensors are not counted."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def identity_of(tensor: Tensor | None) -> tuple[object, ...]:
    """Return a tuple that is equal for two tensors with the same values in the same memory.

    It is valid while that memory is not reused: keep ``tensor.detach()`` with it, which holds the memory even after
    ``tensor.data = ...``. Writes through ``tensor.data`` or NumPy are not detected.
    """
    if tensor is None:
        return (None,)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)


def fixable(tensor: Tensor | None) -> bool:
    """True if results computed from ``tensor`` may be kept.

    False if it needs a gradient, is a parameter (target networks are changed through ``parameter.data``), or its
    version does not count all changes: inference mode, forward-mode derivatives, ``torch.func`` transformations.
    """
    if tensor is None:
        return True
    if tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    if tensor.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not torch._C._is_fwd_grad_enabled() or torch.autograd.forward_ad.unpack_dual(tensor).tangent is None
