"""Whether a tensor is still the one it was: what results may be kept for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["blind_to", "fixable", "identity_of", "version_of"]


def version_of(tensor: Tensor | None) -> int:
    """Counts the changes of a tensor in place; those made in inference mode, as Lightning evaluates, do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def identity_of(tensor: Tensor | None) -> tuple[object, ...]:
    """What two tensors share that are the same numbers in the same memory.

    Only as long as that memory is not given to another: who keeps an identity also keeps ``tensor.detach()``, which
    holds the memory whatever becomes of ``tensor`` (``tensor.data = ...``). Writes through ``tensor.data`` or NumPy are
    not seen.
    """
    if tensor is None:
        return (None,)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)


def blind_to(tensor: Tensor | None) -> bool:
    """Whether others may compute a new tensor where torch gives this one back.

    With no entry dropout does, with a single row ``contiguous()``. So of ranks that run the same code one may see the
    tensor of before where the others see another; what all must decide alike they ask each other then.
    """
    return tensor is not None and (tensor.numel() <= 1 or tensor.size(0) <= 1)


def fixable(tensor: Tensor | None) -> bool:
    """Whether what is computed from ``tensor`` may be kept.

    Not so if it needs a gradient, is a parameter (target networks are moved through ``parameter.data``), or carries
    what versions do not count: inference mode, forward-mode derivatives, ``torch.func`` transformations.
    """
    if tensor is None:
        return True
    if tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    if tensor.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not torch._C._is_fwd_grad_enabled() or torch.autograd.forward_ad.unpack_dual(tensor).tangent is None
