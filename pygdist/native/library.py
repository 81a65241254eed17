"""Finds ``libpygdist_native.so``, loads it once and declares the types of its functions.

The library is optional. If no compiler was found at install time, :func:`load` warns once and returns ``None``, and
callers use slower code or refuse by :func:`require`. Its threads are those of torch's OpenMP runtime: two runtimes in
one process would each start a thread for every core.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pygdist.errors import InputError

if TYPE_CHECKING:
    _Simple: TypeAlias = ctypes._SimpleCData[Any]

LIBRARY_NAME = "libpygdist_native.so"
ABI_VERSION = 20
"""``PYGDIST_ABI_VERSION`` in ``pygdist_native.h``; another number means an older or newer build."""

_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_SEED = ctypes.c_uint64
_REAL = ctypes.c_double
_ARRAY = ctypes.c_void_p


class Isa(IntEnum):
    """Instruction sets for which the kernels are built, in ascending order."""

    BEST = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


def _fields(kind: type[_Simple], names: str) -> list[tuple[str, type[_Simple]]]:
    return [(name, kind) for name in names.split()]


class NativeCsr(ctypes.Structure):
    """``pygdist_csr``: a sparse matrix, the dense rows that it multiplies, and the number of threads."""

    _fields_ = (
        *_fields(_LONG, "num_rows num_cols num_features num_heads"),
        *_fields(_ARRAY, "indptr index weight perm"),
        *_fields(_INT, "index_bits perm_bits value_bits op num_threads"),
    )


class NativeDependencies(ctypes.Structure):
    """``pygdist_dependencies``: the rows near a rank's own, and the costs of computing and fetching them."""

    _fields_ = (
        *_fields(_LONG, "num_rows num_owned num_halo"),
        *_fields(_ARRAY, "indptr index row_s edge_s fetch_s row_bytes"),
        *_fields(_REAL, "bytes_per_edge max_bytes share"),
        ("num_hops", _INT),
    )


class NativeEdges(ctypes.Structure):
    """``pygdist_edges``: a chunk of a stream of edges."""

    _fields_ = (*_fields(_ARRAY, "source target"), ("count", _LONG), ("num_threads", _INT))


class NativeHop(ctypes.Structure):
    """``pygdist_hop``: a mini-batch, and the hop by which it grows."""

    _fields_ = (
        ("node", _ARRAY),
        *_fields(_LONG, "num_nodes num_seeds first number fan_out"),
        *_fields(_ARRAY, "source target edge"),
        ("num_edges", _LONG),
        *_fields(_SEED, "seed epoch"),
        ("replace", _INT),
    )


class NativePlacement(ctypes.Structure):
    """``pygdist_placement``: a vertex-cut so far."""

    _fields_ = (*_fields(_ARRAY, "replicas load"), ("num_parts", _INT), ("capacity", _LONG))


class NativeText(ctypes.Structure):
    """``pygdist_text``: the position in a text with edges."""

    _fields_ = (*_fields(_LONG, "max_id line count id"), *_fields(_INT, "columns"))


class Status(IntEnum):
    """``pygdist_status``: the result of a call."""

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
_SIGNATURES: dict[str, tuple[type[ctypes._CData], ...]] = {
    "pygdist_set_isa": (_INT,),
    "pygdist_set_cache": (_LONG,),
    "pygdist_spmm": (_CSR, _INT, _ARRAY, _ARRAY),
    "pygdist_extremum": (_CSR, _INT, _ARRAY, _ARRAY, _ARRAY),
    "pygdist_few_ties": (_CSR, _ARRAY, _ARRAY),
    "pygdist_extremum_scatter": (_CSR, *[_ARRAY] * 5),
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
    "pygdist_place_libra": (_EDGES, _PLACEMENT, _ARRAY, _ARRAY),
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
    "pygdist_keep_values": (_ARRAY, _LONG, _LONG, _SEED, _SEED, _SEED, _INT, _ARRAY),
    "pygdist_count_hop": (_CSR, _HOP),
    "pygdist_sample_hop": (_CSR, _HOP),
    "pygdist_hop_key": (_HOP, ctypes.POINTER(_SEED)),
    "pygdist_draw": (_CSR, _HOP, _SEED, _ARRAY),
    "pygdist_place_hop": (_HOP,),
    "pygdist_copy_rows": (_ARRAY, _LONG, _ARRAY, _ARRAY, _LONG, _ARRAY, _LONG, _LONG),
    "pygdist_induce": (_CSR, _HOP),
    "pygdist_gat_grad": (_CSR, _ARRAY, _ARRAY, _REAL, *[_ARRAY] * 4),
}
"""Argument types of each function; all return an ``int32_t``."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load the native library.

    Returns:
        The library with typed functions, the same object each time; ``None`` if there is none that works. The first
        call then warns and says what to do.
    """
    path = _find()
    if path is None:
        _warn(f"is not in {' or '.join(map(str, _folders()))}: it was not built")
        return None
    _share_openmp()
    try:
        library = ctypes.CDLL(str(path))
        library.pygdist_abi_version.restype = _INT
        version = library.pygdist_abi_version()
        if version != ABI_VERSION:
            _warn(f"at {path} is another build: it has ABI version {version}, this pygdist needs {ABI_VERSION}")
            return None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT
    except (OSError, AttributeError) as error:  # not loadable here, or a function is missing
        _warn(f"at {path} cannot be loaded ({error})")
        return None
    return library


def require(what: str, otherwise: str = "") -> ctypes.CDLL:
    """Return the native library, or refuse what needs it.

    Args:
        what: Names what needs the library; begins the message.
        otherwise: What works without the library; ends the message.

    Raises:
        InputError: If there is no native library.
    """
    library = load()
    if library is None:
        raise InputError(
            f"{what} needs pygdist's native library, which {'was not built' if _find() is None else 'cannot be used'} "
            f"here: {_remedy()}{otherwise}"
        )
    return library


def set_isa(level: Isa) -> Isa:
    """Choose the instruction set of later calls, for tests and measurements.

    Args:
        level: The set to use; if the machine lacks it, the best that the machine has.

    Returns:
        The set in use from now on.

    Raises:
        RuntimeError: If there is no native library.
    """
    library = load()
    if library is None:
        raise RuntimeError(f"cannot choose the instruction set {level.name}: there is no native library")
    return Isa(library.pygdist_set_isa(level))


def _folders() -> list[Path]:
    # An editable install has two folders here: the sources, and one in site-packages with the build.
    return [Path(folder) for folder in sys.modules[__package__].__path__]


def _find() -> Path | None:
    return next((path for folder in _folders() if (path := folder / LIBRARY_NAME).is_file()), None)


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the C library: the file that holds an address, and the symbol before the address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _share_openmp() -> None:
    """Let the native library find the functions of the OpenMP runtime that torch's libraries depend on.

    Some wheels of torch bring one under a name of their own, such as ``libgomp-1dd373e6.so.1.0.0``; some builds of
    torch use LLVM's or Intel's, which offer GCC's functions too. Other packages may have loaded further runtimes.
    """
    symbol = _Symbol()
    with contextlib.suppress(OSError, AttributeError):  # torch has no OpenMP, or none with GCC's functions
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # looked for in torch's library and all that it depends on
        ctypes.CDLL(None).dladdr(start, ctypes.byref(symbol))
    runtime = os.fsdecode(symbol.file) if symbol.file else "libgomp.so.1"
    with contextlib.suppress(OSError):  # there is none; loading the native library tells if it needs one
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)


def _remedy() -> str:
    build = "install a C++17 compiler (Debian, Ubuntu: apt install g++) and"
    roots = (folder.parents[1] for folder in _folders())
    sources = next((root for root in roots if (root / "CMakeLists.txt").is_file()), None)
    if sources is None:
        return f"{build} reinstall pygdist"
    elsewhere = f"start Python in a folder other than {sources}, if pygdist is installed"
    return f"{elsewhere}; else {build} run pip install -e . there"


def _warn(problem: str) -> None:
    remedy = _remedy()
    warnings.warn(
        f"pygdist's native library {problem}. Aggregation uses torch's sparse product instead, which is several times "
        f"slower. {remedy[0].upper()}{remedy[1:]}.",
        RuntimeWarning,
        stacklevel=3,
    )
