"""The kernels by Triton, for CUDA.

The functions are those of :mod:`pygdist.kernels._torch`, and are described there. Nothing is added atomically, so
results are the same bit for bit each time. No kernel makes a tensor of edges times channels. On an H200 sums take as
long as cuSPARSE's, or less, but for graphs whose edges all enter one node (experiments/gpu).

One program walks through the entries of a row. Rows of more than :data:`LONG` entries are cut in pieces, a program for
each, whose results are folded afterwards: sums are added up, extrema compared, softmaxes scaled to the largest score.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.kernels import _torch
from pygdist.kernels._torch import gat_ends, kept, merged
from pygdist.kernels.csr import CSR, narrowest, pointers_of

__all__ = [
    "edge_softmax", "edge_softmax_grad", "extremum", "extremum_grad", "extremum_value_grad", "gat", "gat_ends",
    "gat_grad", "gatv2_grad", "gatv2_scores", "sddmm", "share_ties", "spmm", "spmm_into", "sum_edges",
]  # fmt: skip

# Sizes that were fastest on an H200, tried by hand: 512 to 2048 values, 1 to 4 warps, rows cut at 256 to 4096 entries.
# One warp reads a few rows at a time: several would wait for each other after each tile to add up what they read.
_TILE = 1024  # values that one program holds at a time
_BY_HEAD = 512  # with several heads, or where the channels of a head are summed
_WARP = 1024  # values of a warp
_ROW = 512  # values of a tile that are of one row
_ENTRIES = 64
#: Entries of a row from which it is cut, if the matrix has :data:`MANY` entries: the host waits to see its longest row.
LONG, MANY = 512, 1 << 18


@functools.cache
def works(number: int) -> bool:
    """Return true if Triton can compile for the GPU of this number; otherwise warn once."""
    device = torch.device("cuda", number)
    try:
        csr = CSR(torch.arange(2, device=device), torch.zeros(1, dtype=torch.int64, device=device), 1)
        sum_edges(csr, torch.ones(1, 1, device=device))
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
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
    out = x.new_empty(csr.num_rows, x.shape[1])
    _sum(out, csr, x, weight, op)
    return out / csr.indptr.diff().clamp(min=1).unsqueeze(-1) if reduce == "mean" else out


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None, *, onto: bool) -> None:
    if not out.is_contiguous():  # a kernel would write into a copy
        _torch.spmm_into(out, csr, x, weight, onto=onto)
        return
    _sum(out, csr, x, weight, "copy" if weight is None else "mul", onto=onto)


def extremum(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str, places: Tensor) -> tuple[Tensor, Tensor]:
    matrix = _matrix_of(csr)
    sign = 1 if reduce == "max" else -1
    (out,), fold = matrix.by_row(x.new_empty(csr.num_rows, x.shape[1]))
    _launch("extremum", _Tile.of_values(x, _heads(weight)), matrix, x, weight, out, OP=op, SIGN=sign)
    return (out if fold is None else _largest(fold, out, sign)), places


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, grad_out: Tensor) -> Tensor:
    matrix = _matrix_of(csr)
    (count,), fold = matrix.by_row(torch.empty_like(out, memory_format=torch.contiguous_format))
    _launch("count_ties", _Tile.of_values(x, _heads(weight)), matrix, x, weight, out, count, OP=op)
    # scatter_reduce starts from zeros and counts them as attaining an extremum of 0; PyG's gradients have that share
    return grad_out / (_added(fold, count) + (out == 0))


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, share: Tensor) -> Tensor:
    matrix = _matrix_of(transposed)
    (grad_x,), fold = matrix.by_row(torch.empty_like(x, memory_format=torch.contiguous_format))
    tile = _Tile.of_values(x, _heads(weight))
    _launch("extremum_grad", tile, matrix, x, weight, out, share, grad_x, OP=op)
    return _added(fold, grad_x)


def extremum_value_grad(csr: CSR, x: Tensor, weight: Tensor, op: str, out: Tensor, share: Tensor) -> Tensor:
    matrix = _matrix_of(csr)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    tile = _Tile.of_heads(x, weight.shape[1])
    _launch("extremum_value_grad", tile, matrix, x, weight, out, share, grad_weight, OP=op)
    return grad_weight


def sddmm(csr: CSR, x: Tensor, y: Tensor, heads: int) -> Tensor:
    if heads == 1 and x.dtype in (torch.float32, torch.float64):
        return _torch.sddmm(csr, x, y, heads)
    matrix = _matrix_of(csr)
    out = x.new_empty(csr.num_entries, heads, dtype=torch.promote_types(x.dtype, torch.float32))
    _launch("sddmm", _Tile.of_heads(x, heads), matrix, x, y, out)
    return out


def edge_softmax(csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float) -> Tensor:
    matrix = _matrix_of(csr)
    like = next(part for part in (edge, source, target) if part is not None)
    alpha, of_rows = like.new_empty(csr.num_entries, like.shape[1]), like.new_empty(csr.num_rows, like.shape[1])
    (largest, total), fold = matrix.by_row(of_rows, torch.empty_like(of_rows))
    tile = _Tile.of_scalars(like)
    _launch("score_sums", tile, matrix, source, target, edge, largest, total, slope=slope)
    if fold is not None:
        shift, of_pieces = _largest(fold, largest), largest
        largest, total = shift, _added(fold, total * _shrunk(of_pieces, shift, fold))
    _launch("edge_softmax", tile, matrix, source, target, edge, largest, total, alpha, slope=slope)
    return alpha


def edge_softmax_grad(
    csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float, out: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    matrix = _matrix_of(csr)
    tile, by_entry, of_rows = _Tile.of_scalars(out), torch.empty_like(out), out.new_empty(csr.num_rows, out.shape[1])
    (dot, by_row), fold = matrix.by_row(of_rows, torch.empty_like(of_rows))
    _launch("sum_products", tile, matrix, out, grad, dot)
    dot = _added(fold, dot)
    _launch("edge_softmax_grad", tile, matrix, source, target, edge, out, grad, dot, by_entry, by_row, slope=slope)
    return by_entry, _added(fold, by_row)


def sum_edges(csr: CSR, values: Tensor) -> Tensor:
    matrix = _matrix_of(csr)
    (out,), fold = matrix.by_row(values.new_empty(csr.num_rows, values.shape[1]))
    _launch("sum_edges", _Tile.of_scalars(values), matrix, values, out)
    return _added(fold, out)


def gatv2_scores(csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, heads: int) -> Tensor:
    matrix = _matrix_of(csr)
    scores = source.new_empty(csr.num_entries, heads)
    _launch("gatv2_scores", _Tile.of_heads(source, heads), matrix, source, target, attention, scores, slope=slope)
    return scores


def gatv2_grad(
    csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, grad_scores: Tensor, *, both: bool
) -> tuple[Tensor, Tensor]:
    matrix = _matrix_of(csr)
    of_rows = torch.empty_like(target, memory_format=torch.contiguous_format)
    (grad_target, grad_attention), fold = matrix.by_row(of_rows, torch.empty_like(of_rows) if both else of_rows[:0])
    tile = _Tile.of_heads(source, grad_scores.shape[1])
    parts = (source, target, attention, grad_scores, grad_target, grad_attention if both else None)
    _launch("gatv2_grad", tile, matrix, *parts, slope=slope)
    return _added(fold, grad_target), _added(fold, grad_attention) if both else target.new_empty(0, 0)


def gat(
    csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, onto: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    matrix = _matrix_of(csr)
    rows, heads = target.shape
    weighs = graded or matrix.pieces is not None  # pieces are weighed by their facts
    of_rows = x.new_empty(rows, x.shape[1])
    (out, above, facts), fold = matrix.by_row(
        of_rows, torch.empty_like(of_rows) if weighs else of_rows[:0], x.new_empty(rows if weighs else 0, heads, 3)
    )
    rest = (above, facts) if weighs else (None, None)
    _launch("gat", _Tile.of_heads(x, heads), matrix, x, source, target, out, *rest, slope=slope)
    if fold is not None:
        out, above, facts = _softmaxes_of(fold, out, above, facts)
    if not graded:
        return out, x.new_empty(0, 0), x.new_empty(0, 0, 0)
    return merged(onto, (out, above, facts)) if onto else (out, above, facts)


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    matrix = _matrix_of(transposed)
    (grad_x, grad_source), fold = matrix.by_row(x.new_empty(x.shape), source.new_empty(source.shape))
    tile = _Tile.of_heads(x, source.shape[1], fewest=4)  # fewer take longer: it reads six numbers by entry and head
    parts, sizes = (x, source, ends, grad, grad_x, grad_source), (ends.shape[1],)
    _launch("gat_grad", tile, matrix, *parts, sizes=sizes, slope=slope)
    return _added(fold, grad_x), _added(fold, grad_source)


# -- long rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pieces:
    """Rows cut in pieces, which follow each other.

    Attributes:
        indptr: The entries of each piece, as in a matrix.
        row: The row of each piece.
        fold: The matrix of rows by pieces.
    """

    indptr: Tensor
    row: Tensor
    fold: CSR


@dataclass(frozen=True)
class _Matrix:
    """A matrix, and the pieces of its rows; ``None`` if no row is long."""

    csr: CSR
    pieces: _Pieces | None

    def by_row(self, *likes: Tensor) -> tuple[list[Tensor], CSR | None]:
        """Return memory for results by row, or by piece if rows are cut; then also the matrix that folds these."""
        if self.pieces is None:
            return list(likes), None
        return [one.new_empty(self.pieces.row.numel(), *one.shape[1:]) for one in likes], self.pieces.fold


def _matrix_of(csr: CSR) -> _Matrix:
    long = csr.num_entries >= MANY
    return _Matrix(csr, kept(csr, ("pieces", LONG), lambda: _pieces(csr)) if long else None)


def _pieces(csr: CSR) -> _Pieces | None:
    lengths = csr.indptr.diff()
    if int(lengths.max()) <= LONG:
        return None
    ends = pointers_of((lengths + LONG - 1).div(LONG, rounding_mode="floor").clamp(min=1))
    number = int(ends[-1])
    row = torch.repeat_interleave(torch.arange(csr.num_rows, device=ends.device), ends.diff(), output_size=number)
    piece = torch.arange(number, device=ends.device)
    starts = csr.indptr.index_select(0, row) + LONG * (piece - ends.index_select(0, row))
    index = piece.to(narrowest(number))
    return _Pieces(torch.cat([starts, csr.indptr[-1:]]), row.to(index), CSR(ends, index, number))


def _sum(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None, op: str, *, onto: bool = False) -> None:
    matrix = _matrix_of(csr)
    (sums,), fold = matrix.by_row(out)
    if fold is not None:
        sums = torch.empty_like(sums, dtype=torch.promote_types(sums.dtype, torch.float32))
    alone = onto and fold is None
    _launch("spmm", _Tile.of_values(x, _heads(weight)), matrix, x, weight, sums, OP=op, ONTO=alone)
    if fold is not None:
        _sum(out, fold, sums, None, "copy", onto=onto)


def _added(fold: CSR | None, of_pieces: Tensor) -> Tensor:
    """Add up the results of the pieces of each row."""
    if fold is None:
        return of_pieces
    out = of_pieces.new_empty(fold.num_rows, *of_pieces.shape[1:])
    _sum(out, fold, of_pieces, None, "copy")
    return out


def _largest(fold: CSR, of_pieces: Tensor, sign: int = 1) -> Tensor:
    """Return the largest result of the pieces of each row; the smallest with ``sign`` -1."""
    matrix = _matrix_of(fold)
    (out,), again = matrix.by_row(of_pieces.new_empty(fold.num_rows, of_pieces.shape[1]))
    _launch("extremum", _Tile.of_values(of_pieces, 1), matrix, of_pieces, None, out, OP="copy", SIGN=sign)
    return out if again is None else _largest(again, out, sign)


def _shrunk(of_pieces: Tensor, shift: Tensor, fold: CSR) -> Tensor:
    """Return the factors from the exponentials of pieces to those of rows, whose largest scores are ``shift``."""
    apart = of_pieces - shift.repeat_interleave(fold.indptr.diff(), dim=0, output_size=fold.num_cols)
    return torch.where(of_pieces > float("-inf"), apart.exp(), 0)


def _softmaxes_of(fold: CSR, out: Tensor, above: Tensor, facts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fold the results of :func:`gat` over pieces into those over rows; arguments are as it returns them."""
    heads, filled = facts.shape[1], facts[..., 1] > 0
    largest = torch.where(filled, facts[..., 0], float("-inf"))
    shift = _largest(fold, largest)
    total = torch.where(filled, 1 / facts[..., 1], 0) * _shrunk(largest, shift, fold)
    of_row = _added(fold, total.contiguous())
    scale = torch.where(of_row > 0, 1 / of_row, 0)
    weight = total * scale.repeat_interleave(fold.indptr.diff(), dim=0, output_size=fold.num_cols)

    def mixed(of_pieces: Tensor) -> Tensor:
        result = of_pieces.new_empty(fold.num_rows, of_pieces.shape[1])
        _sum(result, fold, of_pieces, weight, "mul")
        return result

    positive = _added(fold, (facts[..., 2] * weight).contiguous())
    shift = torch.where(of_row > 0, shift, 0)
    return mixed(out), mixed(above), torch.stack([shift, scale, positive], dim=-1).view(-1, heads, 3)


# -- programs ----------------------------------------------------------------------------------------------------------


def _heads(weight: Tensor | None) -> int:
    return 1 if weight is None else weight.shape[1]


@dataclass(frozen=True)
class _Tile:
    """The values that one program holds at a time, as constants of Triton, and how many programs there are.

    Attributes:
        across: Number of programs by heads and channels.
        sizes: Number of heads, and of channels of each.
        constants: Entries, heads and channels of a tile, the dtype of sums, and the warps of a program.
    """

    across: tuple[int, int]
    sizes: tuple[int, int]
    constants: dict[str, Any]

    @classmethod
    def of_values(cls, x: Tensor, heads: int) -> _Tile:
        """Return the tile of a kernel that treats channels alike, so that a program may take some of them."""
        values = _TILE if heads == 1 else _BY_HEAD
        return cls._of(x, heads, x.shape[1:].numel() // heads, values, splits=True)

    @classmethod
    def of_heads(cls, x: Tensor, heads: int, *, fewest: int = 1) -> _Tile:
        """Return the tile of a kernel that sums over the channels of a head, so that a program takes them all.

        It has a tile of at least ``fewest`` entries.
        """
        return cls._of(x, heads, x.shape[1] // heads, _BY_HEAD, fewest, splits=False)

    @classmethod
    def of_scalars(cls, values: Tensor) -> _Tile:
        """Return the tile of a kernel that reads numbers by edge and head."""
        return cls._of(values, values.shape[1], 1, _BY_HEAD, splits=False)

    @classmethod
    def _of(cls, x: Tensor, heads: int, channels: int, values: int, fewest: int = 1, *, splits: bool) -> _Tile:
        wide = _power_of_2(channels)
        wide = min(wide, _ROW) if splits else wide
        high = max(min(_power_of_2(heads), _ROW // wide), 1)
        entries = min(max(values // (wide * high), fewest), _ENTRIES)
        warps = min(max(entries * wide * high // _WARP, 1), 8)
        along = -(-channels // wide) if splits else 1
        real = "float64" if x.dtype == torch.float64 else "float32"
        constants = {"EDGES": entries, "HEADS": high, "CHANNELS": wide, "REAL": real, "num_warps": warps}
        return cls((-(-heads // high), along), (heads, channels), constants)


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _launch(
    name: str, tile: _Tile, matrix: _Matrix, *args: Tensor | None, sizes: tuple[int, ...] = (), **constants: Any
) -> None:
    """Run a kernel. Results among the arguments, which are contiguous, are written in place.

    The slope is a constant: Triton rounds other numbers to float32, also where rows are float64.
    """
    csr, pieces = matrix.csr, matrix.pieces
    indptr, rows = (csr.indptr, None) if pieces is None else (pieces.indptr, pieces.row)
    grid = (indptr.numel() - 1, *tile.across)
    if 0 in grid:
        return
    dense = [None if one is None else one.contiguous() for one in args]
    with torch.cuda.device(indptr.device):
        launch(
            name, grid, indptr, csr.index, csr.perm, rows, *dense, *sizes, *tile.sizes, **constants, **tile.constants
        )


def launch(name: str, grid: tuple[int, int, int], *args: Any, REAL: str, **constants: Any) -> None:
    """Hand a kernel to Triton, which compiles it for these dtypes and constants once."""
    import triton.language as tl  # a second to import, and only where there are GPUs

    from pygdist.kernels import _triton_kernels

    getattr(_triton_kernels, name)[grid](*args, REAL=getattr(tl, REAL), **constants)
