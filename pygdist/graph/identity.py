"""The identity of tensors: tells if a result that was computed from a tensor before is still valid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SAMPLED = 1024  # values of a tensor, at most


def version_of(tensor: Tensor | None) -> int:
    """Return the number of in-place changes of a tensor; those of inference tensors are not counted."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a tuple that is equal for two tensors in the same memory, whatever its values."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def identity_of(tensor: Tensor | None) -> tuple[object, ...]:
    """Return a tuple that is equal for two tensors with the same values in the same memory.

    It is valid while that memory is not reused: keep ``tensor.detach()`` with it, which holds the memory even after
    ``tensor.data = ...``. Writes that torch does not count, through ``tensor.data``, NumPy or a fused optimizer, are
    detected on the CPU if they change most values, by a sample; on a GPU, which a sample would wait for, they are not.
    """
    if tensor is None:
        return (None,)
    return *place_of(tensor), version_of(tensor), _sample(tensor) if tensor.device.type == "cpu" else None


def _sample(tensor: Tensor) -> int:
    """Return a hash of some of the values, spread over all dimensions."""
    wanted = int(_SAMPLED ** (1 / max(1, tensor.dim())))
    steps = tuple(slice(None, None, -(-size // wanted) or 1) for size in tensor.shape)
    chosen = tensor.detach()[steps].resolve_conj().resolve_neg().reshape(-1)
    packed = torch.empty(chosen.shape, dtype=chosen.dtype).copy_(chosen)  # one value may have any stride
    return hash(packed.view(torch.uint8).numpy().tobytes())


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
