"""A whole graph as a folder of plain ``.npy`` arrays, for graphs without a dataset class.

Files, all but the first optional; shapes as in PyG:

============================  ====================================================================
``edge_index.npy``            ``(2, E)`` or ``(E, 2)`` integers, sources and targets
``x.npy``                     ``(N, F)`` features
``y.npy``                     ``(N,)`` classes, -1 = unlabelled; ``(N, C)`` for several labels; or numbers to predict
``train_mask.npy``            ``(N,)`` bool, or ``(N, S)`` for S splits; ``val_mask`` (or ``valid_mask``), ``test_mask``
``train_idx.npy``             ids instead of a mask; ``val_idx`` (or ``valid_idx``), ``test_idx``
``edge_weight.npy``           ``(E,)``
``edge_attr.npy``             ``(E, D)``
``edge_type.npy``             ``(E,)`` integers from 0
============================  ====================================================================

Arrays are memory-mapped and read when they are used; nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from pygdist.errors import InputError
from pygdist.graph.check import FIELDS, MASKS
from pygdist.memory.limits import refusal_of

_OTHER_FILES = {
    "train_mask": ("train_idx",),
    "val_mask": ("valid_mask", "val_idx", "valid_idx"),
    "test_mask": ("test_idx",),
}


def load_npy(folder: str | Path) -> Data:
    """Read a folder of arrays: ``edge_index.npy``, ``x.npy``, ``y.npy`` and others (page *File formats*).

    Returns:
        The graph. Its tensors are memory-mapped copy-on-write: changing a tensor never changes a file.

    Raises:
        InputError: If ``edge_index.npy`` is missing, or a file is not a readable array of numbers.
    """
    paths = array_paths(folder)
    data = Data(**{name: read_tensor(path) for name, path in paths.items() if name not in MASKS})
    edge_index = data.edge_index
    assert edge_index is not None
    if edge_index.dim() == 2 and edge_index.size(0) != 2 and edge_index.size(1) == 2:
        data.edge_index = edge_index.t()
    for name in MASKS:
        if name in paths:
            data[name] = read_mask(paths[name], int(data.num_nodes or 0))
    return data


def array_paths(folder: str | Path) -> dict[str, Path]:
    """Return the files of a folder by field; the file of a mask may hold ids.

    A folder without ``edge_index.npy``, such as that of a heterogeneous graph, is refused.
    """
    folder = Path(folder)
    if not (folder / "edge_index.npy").is_file():
        if (folder / "edges").is_dir():
            raise InputError(f"{folder}: holds a heterogeneous graph; use pygdist.graph.load_hetero, or --dataset")
        raise InputError(f"{folder}: has no edge_index.npy, which every graph folder needs")
    paths = {}
    for field in FIELDS:
        names = (field, *_OTHER_FILES.get(field, ()))
        files = [path for name in names if (path := folder / f"{name}.npy").is_file()]
        if len(files) > 1:
            raise InputError(
                f"{folder}: {' and '.join(path.name for path in files)} are of one stage; keep one of them"
            )
        if files:
            paths[field] = files[0]
    return paths


def read_tensor(path: Path) -> Tensor:
    """Read an array of numbers as a tensor, memory-mapped if its type allows it."""
    array = read_array(path)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(f"{path}: an array of {array.dtype}, expected numbers; save it as int64 or float32")
    if array.ndim == 0:
        raise InputError(f"{path}: a single number, expected one for each node or edge")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch computes with signed integers only
        if array.size and int(array.max()) >= 1 << 63:
            raise InputError(f"{path}: holds {array.max()}, which is above 2**63 - 1, the largest of int64")
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def read_mask(path: Path, num_nodes: int, *, first_id: int = 0) -> Tensor:
    """Read a mask from its file, or from a file of ids, which start at ``first_id``; refuse an id that is no node."""
    if path.stem.endswith("_mask"):
        return read_tensor(path)
    index = read_array(path)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise InputError(f"{path}: shape {index.shape} of {index.dtype}, expected a list of integer node ids")
    last = first_id + num_nodes - 1
    wrong = np.flatnonzero((index < first_id) | (index > last))
    if len(wrong):
        raise InputError(
            f"{path}: entry {wrong[0]} is node {index[wrong[0]]}, but the graph has nodes {first_id} to {last}"
        )
    mask: Tensor = index_to_mask(torch.from_numpy(index.astype(np.int64) - first_id), num_nodes)
    return mask


def save_npy(data: Data, folder: str | Path) -> None:
    """Write the arrays of a graph that :func:`load_npy` reads; other attributes are left out.

    The folder is made if missing. Files of the same names are overwritten, and those of fields that the graph lacks are
    removed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIELDS:
        for other in (name, *_OTHER_FILES.get(name, ())):
            (folder / f"{other}.npy").unlink(missing_ok=True)
        if isinstance(value := data.get(name), Tensor):
            np.save(folder / f"{name}.npy", value.detach().cpu().numpy(), allow_pickle=False)


def read_array(path: Path, *, writable: bool = True) -> NDArray[Any]:
    """Map an array copy-on-write, or read-only, so that its pages can be released."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c" if writable else "r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        unreadable = InputError(f"{path}: not a readable .npy array ({error}); write it with numpy.save")
        raise refusal_of(error) or unreadable from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: an .npz archive, expected one .npy array; write it with numpy.save")
    return array
