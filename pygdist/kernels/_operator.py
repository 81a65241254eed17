"""Torch operators of the kernels: autograd, ``torch.compile`` and the profiler see each as one opaque step.

The native library computes for tensors on the CPU if it was built, Triton for those on a GPU if it works there, torch's
own operators otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pygdist.comm.derivatives import refuse_second_derivative
from pygdist.kernels import _native, _torch, _triton
from pygdist.native import library

MATRIX = "Tensor indptr, Tensor index"
TRANSPOSED = "Tensor? transposed_indptr=None, Tensor? transposed_index=None, Tensor? transposed_perm=None"


def kernels_for(x: Tensor) -> ModuleType:
    """Return :mod:`_native`, :mod:`_triton` or :mod:`_torch`: the same functions, but for places of extrema."""
    if x.is_cuda and _triton.works(x.get_device()):
        return _triton
    return _native if x.device.type == "cpu" and library.load() is not None else _torch


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Register an operator in the namespace ``pygdist``.

    Args:
        schema: Name, arguments and results. An argument marked as ``Tensor(a!) out`` is written in place.
        run: The implementation. Torch leaves out the last arguments if they are the schema's defaults.
        fake: Makes results of the right shape and dtype, for ``torch.compile``; not needed without results.
    """
    name, parenthesis, rest = schema.partition("(")
    mutates = ("out",) if "(a!) out" in schema else ()
    op = torch.library.custom_op(f"pygdist::{name}", run, mutates_args=mutates, schema=parenthesis + rest)
    if fake is not None:
        op.register_fake(fake)
    if not mutates:
        op.register_autograd(refuse_second_derivative)  # of an operator without a derivative of its own
    return op
