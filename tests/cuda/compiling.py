"""Triton's kernels compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Compute capabilities: A100, H100.
CAPABILITIES = (80, 90)
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", int: "i32", float: "fp32",
}  # fmt: skip
#: Kernels that were compiled: their names and the types and constants of their arguments.
compiled: set[tuple[Any, ...]] = set()


def compile_kernel(
    name: str, grid: tuple[int, int, int], *args: Any, REAL: str, num_warps: int, **constants: Any
) -> None:
    """Compile a kernel for the arguments of a call, which is not made; stands for ``_triton.launch``."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pygdist.kernels import _triton_kernels

    types = [None if one is None else _TYPES[one.dtype if isinstance(one, Tensor) else type(one)] for one in args]
    key = name, *types, REAL, num_warps, *sorted(constants.items())
    if key in compiled:
        return
    kernel, constants = getattr(_triton_kernels, name), {**constants, "REAL": getattr(tl, REAL)}
    named = dict(zip(kernel.arg_names, types, strict=False))
    constants |= {one: None for one, type_name in named.items() if type_name is None}
    signature = {one: named.get(one) or "constexpr" for one in kernel.arg_names}
    for capability in CAPABILITIES:
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        triton.compile(source, target=target, options={"num_warps": num_warps})
    compiled.add(key)
