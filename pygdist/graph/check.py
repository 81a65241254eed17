"""Checks that a graph can be trained on; an error names the field and the first wrong entry in one line.

The checks read the data once, in blocks, and change nothing. All forms that a dataset may use (labels as floats,
one-column matrices) pass; :func:`pygdist.graph.prepare` puts them into one form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data

from pygdist.errors import InputError

MASKS = ("train_mask", "val_mask", "test_mask")
FEATURES = ("x", "edge_attr")  # integers stay integers: categories, ids, counts
EDGE_FIELDS = ("edge_weight", "edge_attr", "edge_type")
NODE_INPUTS = "node_inputs"  # of a prepared graph: names of further tensors of nodes that models take
LEFT_OUT = "left_out"  # of a prepared graph: names of further tensors of nodes that it had and no model takes
NOTES = "pygdist_notes"  # of a loaded graph: the list of notes on what was done to it
FIELDS = ("edge_index", *EDGE_FIELDS, "x", "y", *MASKS)
_NUMBERS = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})  # torch computes with signed integers only
_LARGEST = torch.finfo(torch.float32).max  # models compute in float32, unless asked for more
_MOST_CLASSES = (1 << 31) - 1
_BLOCK_VALUES = 1 << 22  # 16 MiB of float32: temporaries stay small whatever the width of the features


def check(data: Data, *, num_classes: int | None = None, float_labels: bool = False) -> None:
    """Raise an error at the first field of a graph that cannot be used.

    Args:
        data: A graph with ``edge_index`` and ``x``; labels, masks and edge values are optional. The rows of ``x``
            define the number of nodes.
        num_classes: Number of classes, if it is known; labels must be below it.
        float_labels: Labels are numbers to predict, even if all labels are whole.

    Raises:
        InputError: If a field cannot be used:

            - ``x`` is missing, has no rows or no columns, or ``num_nodes`` is another number;
            - edges are not ``(2, E)`` integers, or an id is not a node;
            - edge weights, edge attributes or edge types do not have one row for each edge;
            - features, edge weights or edge attributes hold NaN, infinity, or a number beyond float32;
            - edge types are not integers from 0;
            - labels are not classes (integers from 0, -1 = unlabelled; floats of these values are allowed), not a label
              matrix (0 and 1; with ``num_classes`` also fractions; a row of NaN = unlabelled), and not numbers to
              predict (finite; a row of NaN = unlabelled);
            - a mask does not have one bool, or 0 or 1, for each node;
            - ``num_classes`` is out of range, or given together with ``float_labels``.
    """
    x = data.get("x")
    if not isinstance(x, Tensor):
        raise InputError("x: the graph has no node features; add some, for example torch_geometric.transforms.Constant")
    if x.dim() != 2 or x.size(1) == 0:
        raise InputError(f"x: shape {tuple(x.shape)}, expected (number of nodes, number of features)")
    num_nodes = x.size(0)
    if num_nodes == 0:
        raise InputError("x: the graph has no nodes")
    if "num_nodes" in data and data["num_nodes"] not in (None, num_nodes):
        raise InputError(f"x: {num_nodes} rows, but num_nodes is {data['num_nodes']}; correct one of them")
    _check_edges(data, num_nodes)
    fields = {name: value for name in ("x", "y", *MASKS, *EDGE_FIELDS) if isinstance(value := data.get(name), Tensor)}
    node_type = data.get("node_type")
    check_fields(
        fields,
        num_nodes,
        data["edge_index"].size(1),
        num_classes=num_classes,
        float_labels=float_labels,
        node_type=node_type if isinstance(node_type, Tensor) and node_type.shape == (num_nodes,) else None,
    )


def check_fields(
    fields: Mapping[str, Tensor],
    num_nodes: int,
    num_edges: int,
    *,
    num_classes: int | None = None,
    float_labels: bool = False,
    node_type: Tensor | None = None,
    after_block: Callable[[str], None] = lambda name: None,
) -> None:
    """Run the checks of :func:`check` on all fields but the edges: ``x``, ``y``, masks and values of edges.

    ``node_type`` tells which nodes may be unlabelled as all of their type are. ``after_block`` is called with the name
    of a field after each block of its rows.

    Raises:
        InputError: As in :func:`check`; the message begins with the name of the field and a colon.
    """
    if num_classes is not None and not 1 <= num_classes <= _MOST_CLASSES:
        raise InputError(f"num_classes is {str(num_classes)[:40]}, expected 1 to {_MOST_CLASSES:,}")
    if num_classes is not None and float_labels:
        raise InputError(
            "num_classes: labels are numbers to predict (float_labels), not classes; leave one of them out"
        )
    if "x" in fields:
        _check_finite("x", fields["x"], "node", after_block)
    for name in EDGE_FIELDS:
        if name in fields:
            _check_edge_values(name, fields[name], num_edges, after_block)
    if "y" in fields:
        _check_labels(fields["y"], num_nodes, num_classes, node_type, float_labels)
    for name in MASKS:
        if name in fields:
            _check_mask(name, fields[name], num_nodes)


def with_tensors(data: Data) -> Data:
    """Return a graph whose fields are tensors where they were arrays or lists; other objects are shared.

    Raises:
        InputError: If a field holds no numbers; the message names it.
    """
    fields = {name: value for name in FIELDS if (value := data.get(name)) is not None}
    changed = {name: tensor for name, value in fields.items() if (tensor := as_field(name, value)) is not value}
    if not changed:
        return data
    data = copy.copy(data)
    for name, value in changed.items():
        data[name] = value
    return data


def as_field(name: str, value: Any, where: str = "") -> Tensor:
    """Return the values of a field as a tensor of a type that torch computes with.

    Args:
        name: Name of the field; ``x`` may be sparse.
        value: A tensor, a NumPy array, or what becomes one; a list or a sparse matrix.
        where: Begins messages.

    Raises:
        InputError: If these are not numbers, or too large for int64.
    """
    if not isinstance(value, Tensor) and name == "x":  # matrices of SciPy and of torch_sparse
        dense = getattr(value, "toarray", getattr(value, "to_dense", None))
        value = value if dense is None else dense()
    tensor = value if isinstance(value, Tensor) else _from_array(where + name, value)
    if isinstance(tensor, Index):
        tensor = tensor.as_tensor()
    if tensor.layout is not torch.strided and (name != "x" or tensor.is_nested):
        advice = "; pass a sparse adjacency matrix as adj_t" if name == "edge_index" else ""
        raise InputError(f"{where}{name}: a tensor of layout {tensor.layout}, expected a dense one{advice}")
    if tensor.dim() == 0:
        raise InputError(f"{where}{name}: a single number, expected one for each node or edge")
    if tensor.device.type == "meta":
        raise InputError(f"{where}{name}: a tensor without numbers (device 'meta')")
    if tensor.dtype is torch.uint64:
        _check_uint64(where + name, tensor, lambda name: None)
    if tensor.dtype in _UNSIGNED:
        return tensor.to(torch.int64)
    if tensor.dtype not in _NUMBERS and not tensor.is_complex():  # complex ones have lines of their own
        raise InputError(f"{where}{name}: {tensor.dtype}, expected numbers, such as float32 or int64")
    return tensor


def _from_array(name: str, value: Any) -> Tensor:
    """Return a NumPy array, or what becomes one, as a tensor."""
    expected = "expected a tensor or an array of numbers"
    try:
        array = np.asarray(value)
    except Exception as error:  # of any object
        raise InputError(f"{name}: a {type(value).__name__}, {expected} ({error})") from error
    if isinstance(value, np.ma.MaskedArray) or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        kind = type(value).__name__ if array.dtype.kind == "O" else f"{type(value).__name__} of {array.dtype}"
        raise InputError(f"{name}: a {kind}, {expected}")
    if isinstance(value, list | tuple) and array.dtype.kind == "f":
        array = array.astype(np.float32)  # as torch.tensor() does
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def is_multi_label(y: Tensor) -> bool:
    """Tell if labels are a matrix with one column per class, rather than one class per node."""
    return y.dim() == 2 and y.size(1) > 1


def are_numbers(y: Tensor, float_labels: bool = False) -> bool:
    """Tell if labels are numbers to predict, rather than classes (:func:`check`).

    Numbers to predict are: floats, if some are not whole; all floats, with ``float_labels``; a matrix with an entry
    other than 0 and 1; and a tensor of more than two dimensions. If the number of classes is known, labels are classes.
    """
    if y.dim() > 2 or (float_labels and y.is_floating_point()):
        return True
    if is_multi_label(y):
        return any(bool(((block != 0) & (block != 1) & ~torch.isnan(block)).any()) for _, block in rows_of(y))
    parts = (block for _, block in rows_of(y)) if y.is_floating_point() else ()
    return any(bool(((block != block.floor()) & ~torch.isnan(block)).any()) for block in parts)


def plain(edge_index: Tensor) -> Tensor:
    """Return edges as an ordinary tensor; PyG's ``EdgeIndex`` changes the meaning of slices and other operations."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def rows_of(value: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of rows and the number of the first row of each, small enough for temporaries of their size."""
    step = max(1, _BLOCK_VALUES // max(1, value[:1].numel()))
    for start in range(0, value.size(0), step):
        yield start, value[start : start + step]


def _check_edges(data: Data, num_nodes: int) -> None:
    edge_index = data.get("edge_index")
    if not isinstance(edge_index, Tensor):
        raise InputError(
            "edge_index: is missing; add a tensor of shape (2, number of edges), also if there are no edges"
        )
    edge_index = plain(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise InputError(f"edge_index: shape {tuple(edge_index.shape)}, expected (2, number of edges)")
    if edge_index.dtype.is_floating_point or edge_index.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise InputError(f"edge_index: {edge_index.dtype}, expected integers (torch.int64)")
    for start, block in rows_of(edge_index.t()):
        if (edge := _first(((block < 0) | (block >= num_nodes)).any(dim=1))) is not None:
            source, target = block[edge].tolist()
            raise InputError(
                f"edge_index: edge {start + edge} goes from {source} to {target}, but the graph has nodes 0 to "
                f"{num_nodes - 1} (the rows of x); number the nodes from 0 or add the missing rows"
            )


def _first(wrong: Tensor) -> int | None:
    """Return the position of the first true entry; ``None`` if there is none."""
    positions = wrong.nonzero()
    return int(positions[0]) if len(positions) else None


def _check_finite(name: str, value: Tensor, what: str, after_block: Callable[[str], None]) -> None:
    if value.layout is not torch.strided:
        value = value.coalesce().values() if value.layout is torch.sparse_coo else value.values()
        what = "stored value"
        value = value.view(-1, 1)
    if value.dtype.is_complex:
        raise InputError(f"{name}: {value.dtype}, expected real numbers")
    if value.dtype is torch.uint64:
        _check_uint64(name, value, after_block)
    if not value.dtype.is_floating_point:
        return
    count, first, largest = 0, -1, _LARGEST if value.dtype is torch.float64 else torch.finfo(value.dtype).max
    for start, block in rows_of(value):
        wrong = (~(block.abs() <= largest)).reshape(block.size(0), -1).any(dim=1).nonzero()  # NaN is not below either
        if first < 0 and len(wrong):
            first = start + int(wrong[0])
        count += len(wrong)
        after_block(name)
    if not count:
        return
    finite = bool(torch.isfinite(value[first]).all())
    held = "values above 3.4e38 (the largest of float32)" if finite else "NaN or infinite values"
    advice = "scale them (for float64 too: parts serve runs of every precision)" if finite else "replace them"
    raise InputError(f"{name}: {count} of {value.size(0)} {what}s hold {held}, the first is {what} {first}; {advice}")


def _check_uint64(name: str, value: Tensor, after_block: Callable[[str], None]) -> None:
    for start, block in rows_of(value):
        wrong = (block.view(torch.int64) < 0).reshape(block.size(0), -1).any(dim=1)
        if (row := _first(wrong)) is not None:
            raise InputError(f"{name}: row {start + row} holds a number above 2**63 - 1, the largest of int64")
        after_block(name)


def _check_edge_values(name: str, value: Tensor, num_edges: int, after_block: Callable[[str], None]) -> None:
    if value.dim() == 0 or value.size(0) != num_edges:
        raise InputError(f"{name}: shape {tuple(value.shape)}, expected one entry for each of {num_edges} edges")
    if name == "edge_weight" and (value.dim() > 2 or value.numel() != num_edges):
        raise InputError(f"edge_weight: shape {tuple(value.shape)}, expected ({num_edges},); use edge_attr for vectors")
    if name == "edge_type":
        _check_edge_types(value, num_edges)
    _check_finite(name, value, "edge", after_block)


def _check_edge_types(value: Tensor, num_edges: int) -> None:
    if value.dim() > 2 or value.numel() != num_edges or value.dtype.is_floating_point or value.dtype.is_complex:
        raise InputError(f"edge_type: {value.dtype} of shape {tuple(value.shape)}, expected ({num_edges},) integers")
    if (edge := _first(value.reshape(-1) < 0)) is not None:
        raise InputError(f"edge_type: edge {edge} has type {int(value.reshape(-1)[edge])}, types start at 0")


def _check_labels(
    y: Tensor, num_nodes: int, num_classes: int | None, node_type: Tensor | None, float_labels: bool
) -> None:
    if y.dim() == 0 or y.size(0) != num_nodes or 0 in y.shape[1:]:
        raise InputError(f"y: shape {tuple(y.shape)}, expected one label for each of {num_nodes} nodes (the rows of x)")
    if y.dtype.is_complex:
        raise InputError(f"y: {y.dtype}, expected classes, a label matrix or real numbers")
    if float_labels and not y.is_floating_point():
        raise InputError(
            f"y: {y.dtype}, but numbers to predict are floats; convert them (data.y = data.y.float()), or use "
            "NodeClassifier for classes"
        )
    if num_classes is None and are_numbers(y, float_labels):
        _check_numbers(y)
        return
    if y.dim() > 2:
        raise InputError(f"y: shape {tuple(y.shape)}, but num_classes is {num_classes}; leave one of them out")
    if is_multi_label(y):
        _check_label_matrix(y, num_classes)
        return
    y = y.reshape(-1)
    floats = y.dtype.is_floating_point
    if floats and (node := _first(torch.isinf(y) | (~torch.isnan(y) & (y != torch.floor(y))))) is not None:
        raise InputError(f"y: node {node} has label {float(y[node])}, expected whole numbers (classes from 0)")
    low = torch.nan_to_num(y, nan=-1.0) if floats else y.to(torch.int64)
    if floats and (node := _first(low >= 2.0**53)) is not None:
        raise InputError(f"y: node {node} has label {float(y[node])}, expected classes from 0, as integers")
    hint = "; if labels are numbers to predict, set float_labels" if floats else ""
    if (node := _first(low < -1)) is not None:
        raise InputError(
            f"y: node {node} has label {int(low[node])}; classes start at 0, and -1 means unlabelled{hint}"
        )
    of_types = [low] if node_type is None else [low[(node_type == kind).to(low.device)] for kind in node_type.unique()]
    if not bool((low == 0).any()) and any(len(one) and (int(one.min()), int(one.max())) == (-1, 1) for one in of_types):
        raise InputError(f"y: all labels are 1 or -1, but -1 means unlabelled; number the two classes 0 and 1{hint}")
    if num_classes is not None and (node := _first(low >= num_classes)) is not None:
        raise InputError(
            f"y: {int((low >= num_classes).sum())} labels out of range, the first is {int(low[node])} at node {node}, "
            f"but num_classes is {num_classes} (labels 0 to {num_classes - 1}); correct the labels or num_classes"
        )


def _check_label_matrix(y: Tensor, num_classes: int | None) -> None:
    if num_classes is not None and y.size(1) != num_classes:
        raise InputError(f"y: {y.size(1)} label columns, but num_classes is {num_classes}")
    for start, block in rows_of(y):
        missing = torch.isnan(block)
        if (node := _first(missing.any(dim=1) & ~missing.all(dim=1))) is not None:
            raise InputError(
                f"y: node {start + node} has NaN in some label columns only; a node is labelled in all "
                "columns or in none"
            )
        if (node := _first(((block < 0) | (block > 1)).any(dim=1))) is not None:
            raise InputError(f"y: the label matrix of node {start + node} holds values outside 0 to 1")


def _check_numbers(y: Tensor) -> None:
    """Refuse numbers to predict that are infinite or overflow float32, and nodes that have NaN for some of them."""
    if not y.is_floating_point():
        return
    for start, block in rows_of(y):
        block = block.reshape(len(block), -1)
        missing = torch.isnan(block)
        if (node := _first(missing.any(dim=1) & ~missing.all(dim=1))) is not None:
            raise InputError(
                f"y: node {start + node} has NaN for some of its numbers only; a node without any is unlabelled, so "
                "replace its other numbers by NaN, or the NaN"
            )
        if (node := _first((block.abs() > _LARGEST).any(dim=1))) is not None:
            raise InputError(
                f"y: node {start + node} has {float(block[node].abs().max()):g} to predict, but the largest number is "
                "3.4e38 (of float32); NaN marks a node without a label"
            )


def _check_mask(name: str, mask: Tensor, num_nodes: int) -> None:
    if mask.dim() != 1 or mask.size(0) != num_nodes:
        raise InputError(f"{name}: shape {tuple(mask.shape)}, expected ({num_nodes},), one entry per node")
    if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"{name}: {mask.dtype} with values other than 0 and 1, expected a bool mask")
