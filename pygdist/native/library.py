"""Finds ``libpygdist_native.so``, loads it once and states the types of its functions.

The library is optional: where no compiler was found at install time there is none, :func:`load` says so once and
returns ``None``, and callers take their slower path. It needs an OpenMP runtime; torch must be imported first, so that
the two share one (the loader knows it by its name, ``libgomp.so.1``) and their threads do not compete.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from enum import IntEnum
from pathlib import Path

import torch  # noqa: F401  # brings its OpenMP runtime along, see above

__all__ = [
    "ABI_VERSION", "LIBRARY_NAME", "Isa", "NativeCsr", "NativeDependencies", "NativeEdges", "NativeHop",
    "NativePlacement", "NativeText", "Status", "load", "set_isa",
]  # fmt: skip

LIBRARY_NAME = "libpygdist_native.so"
ABI_VERSION = 14
"""``PYGDIST_ABI_VERSION`` in ``pygdist_native.h``; another number means that the build is older or newer than this."""


class Isa(IntEnum):
    """Instruction sets that the kernels are built for, in ascending order."""

    BEST = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class NativeCsr(ctypes.Structure):
    """``pygdist_csr``: a sparse matrix, the dense rows it meets, and the threads to use."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_cols", ctypes.c_int64),
        ("num_features", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("indptr", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("perm", ctypes.c_void_p),
        ("index_bits", ctypes.c_int32),
        ("perm_bits", ctypes.c_int32),
        ("value_bits", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NativeDependencies(ctypes.Structure):
    """``pygdist_dependencies``: rows near a rank's own, and what computing and fetching them costs."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_owned", ctypes.c_int64),
        ("num_halo", ctypes.c_int64),
        ("indptr", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("row_s", ctypes.c_void_p),
        ("edge_s", ctypes.c_void_p),
        ("fetch_s", ctypes.c_void_p),
        ("row_bytes", ctypes.c_void_p),
        ("bytes_per_edge", ctypes.c_double),
        ("max_bytes", ctypes.c_double),
        ("share", ctypes.c_double),
        ("num_hops", ctypes.c_int32),
    )


class NativeEdges(ctypes.Structure):
    """``pygdist_edges``: a chunk of a stream of edges."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


class NativeHop(ctypes.Structure):
    """``pygdist_hop``: a mini-batch and the hop that it grows by."""

    _fields_ = (
        ("node", ctypes.c_void_p),
        ("num_nodes", ctypes.c_int64),
        ("num_seeds", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("fan_out", ctypes.c_int64),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("edge", ctypes.c_void_p),
        ("num_edges", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("replace", ctypes.c_int32),
    )


class NativePlacement(ctypes.Structure):
    """``pygdist_placement``: a vertex-cut so far."""

    _fields_ = (
        ("replicas", ctypes.c_void_p),
        ("load", ctypes.c_void_p),
        ("num_parts", ctypes.c_int32),
        ("capacity", ctypes.c_int64),
    )


class NativeText(ctypes.Structure):
    """``pygdist_text``: how far a text with edges has been read."""

    _fields_ = (
        ("max_id", ctypes.c_int64),
        ("line", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("id", ctypes.c_int64),
        ("header_line", ctypes.c_int64),
        ("columns", ctypes.c_int32),
        ("may_have_header", ctypes.c_int32),
    )


class Status(IntEnum):
    """``pygdist_status``: how a call ended."""

    OK = 0
    BAD_TYPE = 1
    BAD_REDUCE = 2
    NO_MEMORY = 3
    BAD_LINE = 4
    BAD_ID = 5


_CSR = ctypes.POINTER(NativeCsr)
_EDGES = ctypes.POINTER(NativeEdges)
_PLACEMENT = ctypes.POINTER(NativePlacement)
_HOP = ctypes.POINTER(NativeHop)
_COUNT = ctypes.POINTER(ctypes.c_int32)
_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_SEED = ctypes.c_uint64
_REAL = ctypes.c_double
_ARRAY = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type[ctypes._CData], ...]] = {
    "pygdist_set_isa": (_INT,),
    "pygdist_spmm": (_CSR, _INT, _ARRAY, _ARRAY),
    "pygdist_share_ties": (_CSR, _ARRAY, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_extremum_grad": (_CSR, _ARRAY, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_sddmm": (_CSR, _ARRAY, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_transpose": (_CSR, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_edge_softmax": (_CSR, _ARRAY, _ARRAY, _ARRAY, _REAL, _ARRAY),
    "pygdist_edge_softmax_grad": (_CSR, _ARRAY, _ARRAY, _ARRAY, _REAL, _ARRAY, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_sum_edges": (_CSR, _ARRAY),
    "pygdist_gatv2_scores": (_CSR, _ARRAY, _ARRAY, _ARRAY, _REAL, _ARRAY),
    "pygdist_gatv2_grad": (_CSR, _ARRAY, _ARRAY, _ARRAY, _REAL, _ARRAY, _ARRAY),
    "pygdist_gat": (_CSR, _ARRAY, _ARRAY, _ARRAY, _REAL, _ARRAY, _ARRAY, _ARRAY, _INT),
    "pygdist_gat_ends": (_CSR, _ARRAY, _REAL, *[_ARRAY] * 6),
    "pygdist_count_degrees": (_EDGES, _ARRAY),
    "pygdist_place_random": (_EDGES, _INT, _SEED, _ARRAY),
    "pygdist_place_grid": (_EDGES, _INT, _INT, _SEED, _ARRAY),
    "pygdist_place_dbh": (_EDGES, _ARRAY, _INT, _SEED, _ARRAY),
    "pygdist_mark_replicas": (_EDGES, _PLACEMENT, _ARRAY),
    "pygdist_place_libra": (_EDGES, _PLACEMENT, _ARRAY),
    "pygdist_place_powergraph": (_EDGES, _PLACEMENT, _ARRAY, _ARRAY),
    "pygdist_place_hdrf": (_EDGES, _PLACEMENT, _REAL, _ARRAY, _ARRAY),
    "pygdist_place_2psl": (_EDGES, _PLACEMENT, *[_ARRAY] * 4, _SEED, _INT, _ARRAY),
    "pygdist_cluster": (_EDGES, _ARRAY, _LONG, _INT, _ARRAY, _ARRAY, _COUNT, _ARRAY),
    "pygdist_merge_clusters": (_LONG, _ARRAY, _ARRAY, _LONG, _ARRAY, _COUNT, _COUNT),
    "pygdist_deal": (_ARRAY, _LONG, _INT, _ARRAY),
    "pygdist_fill_neighbours": (_EDGES, _LONG, _LONG, _ARRAY, _ARRAY),
    "pygdist_place_nodes": (_LONG, _LONG, _ARRAY, _ARRAY, _INT, _LONG, _INT, _REAL, _REAL, _ARRAY, _ARRAY),
    "pygdist_parse_edges": (ctypes.c_char_p, _LONG, ctypes.POINTER(NativeText), _ARRAY),
    "pygdist_choose_dependencies": (ctypes.POINTER(NativeDependencies), _ARRAY),
    "pygdist_follow_dependencies": (ctypes.POINTER(NativeDependencies), _ARRAY, _ARRAY, _ARRAY),
    "pygdist_counting_sort": (_ARRAY, _LONG, _LONG, _ARRAY, _ARRAY),
    "pygdist_count_hop": (_CSR, _HOP),
    "pygdist_sample_hop": (_CSR, _HOP),
    "pygdist_induce": (_CSR, _HOP),
    "pygdist_gat_grad": (_CSR, _ARRAY, _ARRAY, _REAL, *[_ARRAY] * 4),
}
"""Argument types of each function; all return an ``int32_t``."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load the native library.

    Returns:
        The library with typed functions, the same object each time, or ``None`` if there is none that works; the
        first call then warns and says what to do.
    """
    path = _find()
    if path is None:
        _warn("was not built: no C++ compiler was found when pygdist was installed")
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.pygdist_abi_version.restype = _INT
        found = library.pygdist_abi_version()
        if found != ABI_VERSION:
            _warn(f"at {path} is another build: it has ABI version {found}, this pygdist needs {ABI_VERSION}")
            return None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT
    except (OSError, AttributeError) as error:  # not loadable here, or a function is missing
        _warn(f"at {path} cannot be loaded ({error})")
        return None
    return library


def set_isa(level: Isa) -> Isa:
    """Choose the instruction set of later calls, for tests and measurements.

    Args:
        level: The set to use. One that this machine lacks is replaced by the best that it has.

    Returns:
        The set now in use.

    Raises:
        RuntimeError: If there is no native library.
    """
    library = load()
    if library is None:
        raise RuntimeError(f"cannot choose the instruction set {level.name}: there is no native library")
    return Isa(library.pygdist_set_isa(level))


def _find() -> Path | None:
    # An editable install has two folders here: the sources, and the one in site-packages that holds the build.
    folders = sys.modules[__package__].__path__
    return next((path for folder in folders if (path := Path(folder) / LIBRARY_NAME).is_file()), None)


def _warn(problem: str) -> None:
    warnings.warn(
        f"pygdist's native library {problem}. Aggregation falls back to torch's sparse product, which is several times "
        "slower. Install a C++17 compiler (Debian, Ubuntu: `apt install g++`) and reinstall pygdist.",
        RuntimeWarning,
        stacklevel=3,
    )
