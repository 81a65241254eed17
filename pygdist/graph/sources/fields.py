"""The fields of a graph, or of one type of its nodes or edges, in one form: ``edge_index``, and a mask for each stage.

Functions change what they are given: a ``Data``, or one storage of a ``HeteroData``. ``where`` begins their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask, to_edge_index

from pygdist.errors import InputError
from pygdist.graph.check import MASKS, as_field, plain

STAGES = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))  # names of each mask's nodes
_STAGE_NAMES = tuple(name for names in STAGES for name in names)
SPLIT_FIELDS = ("split_idx", *(f"{name}_{kind}" for name in _STAGE_NAMES for kind in ("idx", "mask")))


def edges_from_adjacency(store: Any, where: str, notes: list[str]) -> None:
    """Turn ``adj_t`` (rows are targets) into ``edge_index``, and its values into weights or attributes.

    Raises:
        InputError: If there are no edges, or these have another form.
    """
    adjacency, edge_index = store.get("adj_t"), store.get("edge_index")
    if adjacency is not None:
        if edge_index is None:
            edge_index, value = _coo(adjacency, where)
            store["edge_index"] = edge_index
            always_has_values = isinstance(adjacency, Tensor) or hasattr(adjacency, "tocoo")  # so ones may mean none
            if value is not None and always_has_values and bool((value == 1).all()):
                if len(value):
                    notes.append("left out the values of adj_t, which are all 1")
            elif value is not None:
                name = "edge_weight" if value.dim() == 1 else "edge_attr"
                if store.get(name) is not None:
                    raise InputError(f"{where}: {name} and values of adj_t; remove one of them")
                store[name] = value
        else:
            notes.append("left out adj_t, as there is edge_index")
        del store["adj_t"]
    if edge_index is None:
        raise InputError(f"{where}: edge_index is missing; add edge_index or adj_t")
    if hasattr(edge_index, "coo"):
        raise InputError(f"{where}: edge_index is a {type(edge_index).__name__}; pass it as adj_t")
    store["edge_index"] = plain(as_field("edge_index", edge_index, f"{where}: "))


def _coo(adjacency: Any, where: str) -> tuple[Tensor, Tensor | None]:
    """Return the edges of an adjacency matrix, and their values if there are any."""
    if isinstance(adjacency, Tensor):
        try:
            (target, source), value = to_edge_index(adjacency)
        except (ValueError, RuntimeError, TypeError) as error:
            raise InputError(
                f"{where}: adj_t is a tensor of layout {adjacency.layout} and shape {tuple(adjacency.shape)}, expected "
                "a sparse matrix (COO, CSR or CSC); or pass edge_index"
            ) from error
        return torch.stack([source, target]), value
    if hasattr(adjacency, "coo"):
        target, source, value = adjacency.coo()
        return torch.stack([source, target]), value
    if hasattr(adjacency, "tocoo") and len(adjacency.shape) == 2:
        matrix = adjacency.tocoo()  # of SciPy
        target, source = (as_field("adj_t", end, f"{where}: ").long() for end in (matrix.row, matrix.col))
        return torch.stack([source, target]), as_field("adj_t", matrix.data, f"{where}: ")
    raise InputError(
        f"{where}: adj_t is a {type(adjacency).__name__}, expected a sparse matrix of torch, SciPy or torch_sparse; or "
        "pass edge_index"
    )


def masks_from_ids(store: Any, num_nodes: int, where: str) -> None:
    """Turn ids of nodes, and masks of other names, into ``train_mask``, ``val_mask`` and ``test_mask``.

    Raises:
        InputError: If ids are no nodes, or a stage is given twice and the nodes differ.
    """
    for mask, stages in zip(MASKS, STAGES, strict=True):
        masks = {
            name: as_field(name, value, f"{where}: ") if name.endswith("mask") else _mask(value, num_nodes, where, name)
            for name, value in _fields_of_stage(store, stages, where)
        }
        if not masks:
            continue
        first = next(iter(masks))
        for name, other in masks.items():
            if other.shape != masks[first].shape or not torch.equal(other.bool(), masks[first].bool()):
                raise InputError(f"{where}: {first} and {name} name other nodes; keep one of them")
        store[mask] = masks[first]
    for field in (field for field in SPLIT_FIELDS if field not in MASKS):
        if field in store:
            del store[field]


def _fields_of_stage(store: Any, stages: tuple[str, ...], where: str) -> list[tuple[str, Any]]:
    """Return the fields that name the nodes of a stage; masks come first."""
    names = [f"{stage}_{kind}" for kind in ("mask", "idx") for stage in stages]
    fields = [(name, value) for name in names if (value := store.get(name)) is not None]
    splits = store.get("split_idx")
    if splits is None:
        return fields
    if not isinstance(splits, Mapping) or not set(splits) & set(_STAGE_NAMES):
        kind = f"has keys {', '.join(map(str, splits))}" if isinstance(splits, Mapping) else type(splits).__name__
        raise InputError(f"{where}: split_idx: {kind}; expected a dictionary of train, valid and test")
    if unknown := [str(key) for key in splits if key not in _STAGE_NAMES]:
        raise InputError(
            f"{where}: split_idx: unknown keys {', '.join(unknown)}; expected train, valid and test; remove the others"
        )
    return fields + [(f"split_idx['{stage}']", splits[stage]) for stage in stages if splits.get(stage) is not None]


def _mask(value: Any, num_nodes: int, where: str, name: str) -> Tensor:
    """Return the mask of nodes that are named by ids."""
    ids: Tensor = as_field(name, value, f"{where}: ")
    if ids.dtype == torch.bool and ids.shape == (num_nodes,):
        return ids
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool) or not ids.numel()
    if ids.dim() != 1 or not whole or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes):
        expected = (
            f"ids of nodes from 0 to {num_nodes - 1}" if num_nodes else "no ids, as there are no nodes (rows of x)"
        )
        raise InputError(f"{where}: {name} of shape {tuple(ids.shape)}, {ids.dtype}, expected {expected}")
    mask: Tensor = index_to_mask(ids.long().cpu(), num_nodes)
    return mask


def pick_split(name: str, mask: Tensor, split_index: int, notes: list[str]) -> Tensor:
    """Return one column of masks that hold several splits, with a note, or a single mask as it is."""
    if mask.dim() != 2:
        return mask
    if not 0 <= split_index < mask.size(1):
        raise InputError(f"split_index is {split_index}, but {name} holds splits 0 to {mask.size(1) - 1}")
    if mask.size(1) > 1:
        notes.append(f"took split {split_index} of the {mask.size(1)} in {name} (split_index)")
    return mask[:, split_index]
