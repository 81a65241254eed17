"""Heterogeneous graphs: made by name, or read from the folder that ``pygdist generate`` writes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pygdist.errors import InputError
from pygdist.graph.check import MASKS
from pygdist.graph.generated.files import read_description
from pygdist.graph.generated.graph import HETEROGENEOUS, HOMOGENEOUS, generate_hetero
from pygdist.graph.sources.npy import read_tensor

__all__ = ["is_hetero_folder", "load_hetero"]

_BLOCK_EDGES = 1 << 20


def load_hetero(
    source: str | os.PathLike[str], *, scale: float = 1.0, seed: int = 0, features: bool = True
) -> HeteroData:
    """A heterogeneous graph, whole.

    Args:
        source: The name of a double of a published graph, ``mag-like``, or a folder that ``pygdist generate`` wrote.
        scale: Of a double: nodes and edges are so many times those that were published.
        seed: Of a double: its seed.
        features: Of a double: whether to make features.

    Returns:
        ``num_nodes`` of each type of nodes, with ``x`` (float32), ``y`` (int64, -1 = unlabelled), ``train_mask``,
        ``val_mask`` and ``test_mask`` where the type has them; ``edge_index`` (int64) of each type of edges. The
        tensors of a folder are backed by its files (copy on write: changing one never changes a file).

    Raises:
        InputError: If there is no such double or folder, or a file is missing or does not fit the others.

    Example:
        >>> load_hetero("mag-like", scale=0.01)["paper"].num_nodes
        7364
    """
    name = os.fspath(source)
    if name in HETEROGENEOUS:
        return generate_hetero(name, scale=scale, seed=seed, features=features)
    if name in HOMOGENEOUS:
        raise InputError(f"'{name}' has nodes and edges of one type: load_graph('{name}') makes it")
    if not Path(name).is_dir():
        raise InputError(f"'{name}': no such folder, and no heterogeneous graph ({', '.join(HETEROGENEOUS)})")
    if (scale, seed, features) != (1.0, 0, True):
        raise InputError(f"{name}: scale, seed and features are arguments of a name, not of a folder")
    return _read(Path(name))


def is_hetero_folder(folder: str | Path) -> bool:
    """Whether ``pygdist generate`` wrote a heterogeneous graph there."""
    return (Path(folder) / "graph.json").is_file() and bool(read_description(folder)["heterogeneous"])


def _read(folder: Path) -> HeteroData:
    description = read_description(folder)
    if not description["heterogeneous"]:
        raise InputError(f"{folder}: has nodes and edges of one type: load_graph('{folder}') reads it")
    data = HeteroData()
    counts = {}
    for kind, facts in description["nodes"].items():
        counts[kind] = data[kind].num_nodes = facts["num_nodes"]
        wanted = ["x"] * bool(facts["num_features"]) + ["y", *MASKS] * bool(facts["num_classes"])
        for field in wanted:
            path = folder / "nodes" / kind / f"{field}.npy"
            data[kind][field] = value = read_tensor(path)
            if value.dim() != (2 if field == "x" else 1) or len(value) != counts[kind]:
                raise InputError(f"{path}: shape {tuple(value.shape)}, expected a row for each of {counts[kind]} nodes")
    for facts in description["edges"]:
        key = facts["source"], facts["relation"], facts["target"]
        path = folder / "edges" / "__".join(key) / "edge_index.npy"
        data[key].edge_index = edge_index = read_tensor(path)
        if edge_index.dtype != torch.int64 or tuple(edge_index.shape) != (2, facts["num_edges"]):
            raise InputError(
                f"{path}: {edge_index.dtype} of shape {tuple(edge_index.shape)}, expected int64 of shape "
                f"(2, {facts['num_edges']})"
            )
        _check_ids(edge_index, (counts[key[0]], counts[key[2]]), path)
    return data


def _check_ids(edge_index: Tensor, counts: tuple[int, int], path: Path) -> None:
    for start in range(0, edge_index.size(1), _BLOCK_EDGES):
        block = edge_index[:, start : start + _BLOCK_EDGES]
        for end, ids, count in zip(("source", "target"), block, counts, strict=True):
            if int(ids.min()) < 0 or int(ids.max()) >= count:
                edge = int(((ids < 0) | (ids >= count)).nonzero()[0])
                raise InputError(
                    f"{path}: the {end} of edge {start + edge} is node {int(ids[edge])}, but there are nodes 0 to "
                    f"{count - 1}"
                )
