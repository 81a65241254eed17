"""METIS: multilevel k-way partitioning, the standard of quality for streaming algorithms."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric import typing as pyg_typing
from typing_extensions import override

from pygdist.errors import InputError, needs, pyg_wheels
from pygdist.graph import EdgeStream
from pygdist.graph.streams.sorting import distinct
from pygdist.partition.base import Partitioner, check_num_parts

Library = Literal["auto", "pyg_lib", "torch_sparse", "pymetis"]
Indices = NDArray[np.int64]
_PACKAGES = {"pyg_lib": ("pyg-lib",), "torch_sparse": ("torch_sparse", "torch_scatter")}


@dataclass(frozen=True, kw_only=True)
class MetisPartitioner(Partitioner):
    """Makes parts with nearly equal numbers of nodes, and cuts few edges (METIS; Karypis and Kumar, SISC 1998).

    METIS takes the graph as undirected, without weights, duplicate edges and self-loops. The graph must fit in memory.
    With few nodes a part may stay empty.

    Args:
        recursive: Use recursive bisection instead of direct k-way partitioning: slower, a little better for few parts.
        library: Package that provides METIS: ``pyg_lib`` or ``torch_sparse``, as in PyG's ``ClusterData``, or
            ``pymetis`` (extra ``metis``). ``auto`` takes the first installed package in this order. The packages give
            different partitions, so the store records the name of the package.

    Raises:
        InputError: If ``library`` is unknown, not installed, or was built without METIS.
    """

    recursive: bool = False
    library: Library = "auto"

    name: ClassVar[str] = "metis"

    def __post_init__(self) -> None:
        if self.library not in get_args(Library):
            raise InputError(f"metis: library is '{self.library}', expected one of {', '.join(get_args(Library))}")
        installed = metis_libraries()
        if not installed:
            raise needs("partitioner 'metis'", "pymetis", "metis")
        if self.library not in ("auto", *installed):
            command = pyg_wheels(*_PACKAGES[self.library]) if self.library in _PACKAGES else "pip install pymetis"
            raise InputError(
                f"metis: {self.library} is not installed, or was built without METIS; use {', '.join(installed)}, or "
                f"install it: {command}"
            )
        if self.library == "auto":
            object.__setattr__(self, "library", installed[0])

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        check_num_parts(edges.num_nodes, num_parts)
        rowptr, col = _undirected(edges)
        if num_parts == 1 or len(col) == 0:  # METIS refuses a graph without edges
            return (np.arange(edges.num_nodes) % num_parts).astype(np.int32)
        run = {"pyg_lib": _pyg_lib, "torch_sparse": _torch_sparse, "pymetis": _pymetis}[self.library]
        return run(rowptr, col, num_parts, self.recursive)


def metis_libraries() -> tuple[str, ...]:
    """Return the installed packages that provide METIS, in the order of preference."""
    libraries = []
    if pyg_typing.WITH_METIS:
        libraries.append("pyg_lib")
    if importlib.util.find_spec("torch_sparse") is not None and _torch_sparse_has_metis():
        libraries.append("torch_sparse")
    if importlib.util.find_spec("pymetis") is not None:
        libraries.append("pymetis")
    return tuple(libraries)


def _torch_sparse_has_metis() -> bool:
    try:
        _torch_sparse(np.array([0, 1, 2]), np.array([1, 0]), 2, False)  # two nodes and the edge between them
    except RuntimeError as error:
        if "METIS" not in str(error):  # "Not compiled with METIS support"
            raise
        return False
    return True


def _undirected(edges: EdgeStream) -> tuple[Indices, Indices]:
    """Return the neighbours of each node (CSR), symmetric, sorted, without duplicates and self-loops."""
    ends = np.concatenate([np.empty((2, 0), dtype=np.int64), *edges.chunks()], axis=1)
    ends = ends[:, ends[0] != ends[1]]
    row, col = np.concatenate([ends, ends[::-1]], axis=1)
    num_nodes = max(edges.num_nodes, 1)
    row, col = np.divmod(distinct(row * num_nodes + col), num_nodes)
    rowptr = np.zeros(edges.num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=edges.num_nodes), out=rowptr[1:])
    return rowptr, col


def _pyg_lib(rowptr: Indices, col: Indices, num_parts: int, recursive: bool) -> NDArray[np.int32]:
    import pyg_lib  # not on PyPI

    part = pyg_lib.partition.metis(torch.from_numpy(rowptr), torch.from_numpy(col), num_parts, recursive=recursive)
    return part.numpy().astype(np.int32)  # type: ignore[no-any-return]


def _torch_sparse(rowptr: Indices, col: Indices, num_parts: int, recursive: bool) -> NDArray[np.int32]:
    import torch_sparse  # noqa: F401  (registers the operator)

    ends = torch.from_numpy(rowptr), torch.from_numpy(col)
    part = torch.ops.torch_sparse.partition(*ends, None, num_parts, recursive)
    return part.numpy().astype(np.int32)  # type: ignore[no-any-return]


def _pymetis(rowptr: Indices, col: Indices, num_parts: int, recursive: bool) -> NDArray[np.int32]:
    import pymetis

    graph = pymetis.CSRAdjacency(rowptr, col)
    return np.asarray(pymetis.part_graph(num_parts, graph, recursive=recursive).vertex_part, dtype=np.int32)
