"""The kernels by Triton, for CUDA.

The functions are those of :mod:`pygdist.kernels._torch`, and are described there. Sums with one weight by edge, or
none, stay with torch's CSR product, which spreads long rows over the GPU. ``torch.use_deterministic_algorithms`` brings
these to Triton too: it adds nothing atomically, so its results are the same bit for bit each time. No kernel makes a
tensor of edges times channels.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.kernels import _torch
from pygdist.kernels._torch import gat_ends, merged
from pygdist.kernels.csr import CSR

__all__ = [
    "edge_softmax", "edge_softmax_grad", "extremum", "extremum_grad", "extremum_value_grad", "gat", "gat_ends",
    "gat_grad", "gatv2_grad", "gatv2_scores", "sddmm", "share_ties", "spmm", "spmm_into", "sum_edges",
]  # fmt: skip

_TILE = 2048  # values that one program holds at a time
_ROW = 512  # of these, of one row
_ENTRIES = 64


@functools.cache
def works(number: int) -> bool:
    """Return true if Triton can compile for the GPU of this number; otherwise warn once."""
    device = torch.device("cuda", number)
    try:
        csr = CSR(torch.arange(2, device=device), torch.zeros(1, dtype=torch.int64, device=device), 1)
        sum_edges(csr, torch.ones(1, 1, device=device))
    except Exception as error:  # of an import, a C compiler, a driver: whatever it is, torch's operators remain
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"Triton cannot compile kernels for {device} ({type(error).__name__}: {reason}). Aggregation uses "
            "torch's operators, which is slower and takes more memory. Install triton and a C compiler (gcc).",
            stacklevel=2,
        )
        return False
    return True


def spmm(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str) -> Tensor:
    whole = x.dtype in (torch.float32, torch.float64) and (weight is None or weight.shape[1] == 1)
    if whole and op != "add" and not torch.are_deterministic_algorithms_enabled():
        return _torch.spmm(csr, x, weight, op, reduce)
    out = x.new_empty(csr.num_rows, x.shape[1])
    tile = _Tile.of_values(csr, x, 1 if weight is None else weight.shape[1])
    _launch("spmm", tile, csr, x, weight, out, OP=op, MEAN=reduce == "mean", ONTO=False)
    return out


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None, *, onto: bool) -> None:
    tile = _Tile.of_values(csr, x, 1 if weight is None else weight.shape[1])
    _launch("spmm", tile, csr, x, weight, out, OP="copy" if weight is None else "mul", MEAN=False, ONTO=onto)


def extremum(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str, places: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(csr.num_rows, x.shape[1])
    tile = _Tile.of_values(csr, x, 1 if weight is None else weight.shape[1])
    _launch("extremum", tile, csr, x, weight, out, OP=op, SIGN=1 if reduce == "max" else -1)
    return out, places


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, grad_out: Tensor) -> Tensor:
    share = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    tile = _Tile.of_values(csr, x, 1 if weight is None else weight.shape[1])
    _launch("share_ties", tile, csr, x, weight, out, grad_out, share, OP=op)
    return share


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, share: Tensor) -> Tensor:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    tile = _Tile.of_values(transposed, x, 1 if weight is None else weight.shape[1])
    _launch("extremum_grad", tile, transposed, x, weight, out, share, grad_x, OP=op)
    return grad_x


def extremum_value_grad(csr: CSR, x: Tensor, weight: Tensor, op: str, out: Tensor, share: Tensor) -> Tensor:
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _launch(
        "extremum_value_grad", _Tile.of_heads(csr, x, weight.shape[1]), csr, x, weight, out, share, grad_weight, OP=op
    )
    return grad_weight


def sddmm(csr: CSR, x: Tensor, y: Tensor, heads: int) -> Tensor:
    if heads == 1 and x.dtype in (torch.float32, torch.float64):
        return _torch.sddmm(csr, x, y, heads)
    out = x.new_empty(csr.num_entries, heads, dtype=torch.promote_types(x.dtype, torch.float32))
    _launch("sddmm", _Tile.of_heads(csr, x, heads), csr, x, y, out)
    return out


def edge_softmax(csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float) -> Tensor:
    like = next(part for part in (edge, source, target) if part is not None)
    alpha = like.new_empty(csr.num_entries, like.shape[1])
    _launch("edge_softmax", _Tile.of_scalars(csr, like), csr, source, target, edge, alpha, slope=slope)
    return alpha


def edge_softmax_grad(
    csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float, out: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    gradients = torch.empty_like(out), out.new_empty(csr.num_rows, out.shape[1])
    tile = _Tile.of_scalars(csr, out)
    _launch("edge_softmax_grad", tile, csr, source, target, edge, out, grad, *gradients, slope=slope)
    return gradients


def sum_edges(csr: CSR, values: Tensor) -> Tensor:
    out = values.new_empty(csr.num_rows, values.shape[1])
    _launch("sum_edges", _Tile.of_scalars(csr, values), csr, values, out)
    return out


def gatv2_scores(csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, heads: int) -> Tensor:
    scores = source.new_empty(csr.num_entries, heads)
    _launch("gatv2_scores", _Tile.of_heads(csr, source, heads), csr, source, target, attention, scores, slope=slope)
    return scores


def gatv2_grad(
    csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, grad_scores: Tensor, *, both: bool
) -> tuple[Tensor, Tensor]:
    grad_target = torch.empty_like(target, memory_format=torch.contiguous_format)
    grad_attention = target.new_empty(target.shape if both else (0, 0))
    parts = (source, target, attention, grad_scores, grad_target, grad_attention if both else None)
    _launch("gatv2_grad", _Tile.of_heads(csr, source, grad_scores.shape[1]), csr, *parts, slope=slope)
    return grad_target, grad_attention


def gat(
    csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, onto: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    rows, heads = target.shape
    out, above, facts = (
        x.new_empty(rows, x.shape[1]),
        x.new_empty((rows, x.shape[1]) if graded else (0, 0)),
        x.new_empty((rows, heads, 3) if graded else (0, 0, 0)),
    )
    rest = (above, facts) if graded else (None, None)
    _launch("gat", _Tile.of_heads(csr, x, heads), csr, x, source, target, out, *rest, slope=slope)
    return merged(onto, (out, above, facts)) if onto else (out, above, facts)


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    gradients = x.new_empty(x.shape), source.new_empty(source.shape)
    tile = _Tile.of_heads(transposed, x, source.shape[1])
    _launch("gat_grad", tile, transposed, x, source, ends, grad, *gradients, sizes=(ends.shape[1],), slope=slope)
    return gradients


@dataclass(frozen=True)
class _Tile:
    """The values that one program holds at a time, as constants of Triton, and how many programs there are.

    Attributes:
        grid: Number of programs by rows, heads and channels.
        sizes: Number of heads, and of channels of each.
        constants: Entries, heads and channels of a tile, and the dtype of sums.
    """

    grid: tuple[int, int, int]
    sizes: tuple[int, int]
    constants: dict[str, Any]

    @classmethod
    def of_values(cls, csr: CSR, x: Tensor, heads: int) -> _Tile:
        """For a kernel to which channels do not matter: a program may take some of them."""
        return cls._of(csr, x, heads, x.shape[1] // heads, splits=True)

    @classmethod
    def of_heads(cls, csr: CSR, x: Tensor, heads: int) -> _Tile:
        """For a kernel that sums over the channels of a head: a program takes them all."""
        return cls._of(csr, x, heads, x.shape[1] // heads, splits=False)

    @classmethod
    def of_scalars(cls, csr: CSR, values: Tensor) -> _Tile:
        """For numbers by edge and head."""
        return cls._of(csr, values, values.shape[1], 1, splits=False)

    @classmethod
    def _of(cls, csr: CSR, x: Tensor, heads: int, channels: int, *, splits: bool) -> _Tile:
        wide = _power_of_2(channels)
        wide = min(wide, _ROW) if splits else wide
        high = max(min(_power_of_2(heads), _ROW // wide), 1)
        entries = min(max(_TILE // (wide * high), 1), _ENTRIES)
        along = -(-channels // wide) if splits else 1
        real = "float64" if x.dtype == torch.float64 else "float32"
        constants = {"EDGES": entries, "HEADS": high, "CHANNELS": wide, "REAL": real}
        return cls((csr.num_rows, -(-heads // high), along), (heads, channels), constants)


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _launch(
    name: str, tile: _Tile, csr: CSR, *args: Tensor | None, sizes: tuple[int, ...] = (), **constants: Any
) -> None:
    """Run a kernel. Results among the arguments, which are contiguous, are written in place.

    The slope is a constant: Triton rounds other numbers to float32, also where rows are float64.
    """
    if 0 in tile.grid:
        return
    dense = [None if one is None else one.contiguous() for one in args]
    with torch.cuda.device(csr.indptr.device):
        matrix = csr.indptr, csr.index, csr.perm
        launch(name, tile.grid, *matrix, *dense, *sizes, *tile.sizes, **constants, **tile.constants)


def launch(name: str, grid: tuple[int, int, int], *args: Any, REAL: str, **constants: Any) -> None:
    """Hand a kernel to Triton, which compiles it for these dtypes and constants once."""
    import triton.language as tl  # a second to import, and only where there are GPUs

    from pygdist.kernels import _triton_kernels

    getattr(_triton_kernels, name)[grid](*args, REAL=getattr(tl, REAL), **constants)
