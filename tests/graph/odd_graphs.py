"""Graphs in memory in odd forms, and with faults, drawn from a seed; each with what pygdist has to make of it.

A case begins as plain NumPy arrays, the truth. Each field is then written down in some form that people use, and some
cases get one fault. The oracle computes with the arrays alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

MASKS = ("train_mask", "val_mask", "test_mask")
Array = NDArray[Any]
Rng = np.random.Generator


@dataclass
class Truth:
    """A graph as arrays: ``y`` is of classes (-1: none), or a matrix (NaN: none); ``masks`` is ``None`` if drawn."""

    x: Array
    edges: Array
    values: dict[str, Array] = field(default_factory=dict)
    y: Array | None = None
    masks: dict[str, Array] | None = None


@dataclass
class Case:
    """What a user passes, and what it is.

    Attributes:
        data: The graph.
        truth: Its content.
        load: Options of ``load_graph``.
        prepare: Options of ``prepare``.
        fault: The message must name one of these, if there is a fault.
        steps: How the case was made, for messages of tests.
    """

    data: Any
    truth: Truth
    load: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    fault: tuple[str, ...] = ()
    steps: list[str] = field(default_factory=list)


# --- forms ------------------------------------------------------------------------------------------------------------


def written(rng: Rng, array: Array, steps: list[str], name: str) -> tuple[Any, Array]:
    """Return an array in a form that people use, and the array in the type that is to come of it."""
    forms: dict[str, Callable[[], Any]] = {
        "tensor": lambda: torch.from_numpy(array.copy()),
        "array": lambda: array.copy(),
        "columns first": lambda: np.asfortranarray(array),
        "big endian": lambda: array.astype(array.dtype.newbyteorder(">")),
        "transposed": lambda: torch.from_numpy(array.copy()).t().contiguous().t() if array.ndim < 3 else array.copy(),
        "every second": lambda: torch.from_numpy(np.repeat(array, 2, axis=0))[::2],
        "read only": lambda: _read_only(array),
    }
    if array.dtype.kind == "f":
        forms["parameter"] = lambda: torch.nn.Parameter(torch.from_numpy(array.copy()))
        forms["leaf"] = lambda: torch.from_numpy(array.copy()).requires_grad_()
        forms["computed"] = lambda: torch.from_numpy(array.copy()).requires_grad_() * 1
    if array.size:
        forms["list"] = array.tolist
    if name == "x" and array.dtype in (np.float32, np.float64):
        for layout in ("sparse_coo", "sparse_csr", "sparse_csc"):
            forms[layout] = lambda layout=layout: torch.from_numpy(array).to_sparse(layout=getattr(torch, layout))
    form = str(rng.choice(list(forms)))
    steps.append(f"{name} {array.dtype}{array.shape} as {form}")
    if form == "list":
        return forms[form](), array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64))
    return forms[form](), array


def _read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def features(rng: Rng, rows: int, *, width: int | None = None) -> Array:
    """Draw features of some type; all numbers are exact in each."""
    kind = rng.choice(["float32", "float64", "float16", "int64", "int32", "int16", "uint8", "int8", "bool"])
    width = int(rng.integers(1, 4)) if width is None else width
    low = 0 if kind in ("uint8", "bool") else -4
    drawn: Array = rng.integers(low, 2 if kind == "bool" else 5, (rows, width)).astype(kind)
    return drawn


def _classes(rng: Rng, rows: int) -> Array:
    y: Array = rng.integers(-1, 3, rows)
    y[:1] = 0  # classes 1 and -1 alone are refused
    return y


def _label_matrix(rng: Rng, rows: int) -> Array:
    y: Array = rng.integers(0, 2, (rows, 3)).astype(np.float32)
    y[0] = 1  # else these may be one-hot
    return y


def labels(rng: Rng, rows: int, steps: list[str]) -> tuple[Any, Array]:
    """Draw labels in some form, and return what they are."""
    form = str(rng.choice(["classes", "column", "floats", "one-hot", "flags", "matrix", "matrix with none"]))
    steps.append(f"labels: {form}")
    if form.startswith("matrix"):
        y = _label_matrix(rng, rows)
        if form == "matrix with none":
            y[1:][rng.random(rows - 1) < 0.3] = np.nan
            return written(rng, y, steps, "y")[0], y
        return written(rng, y.astype(rng.choice(["float64", "int64", "bool"])), steps, "y")[0], y
    y = _classes(rng, rows)
    if form == "flags":
        y = (y > 0).astype(np.int64)
        return written(rng, y.astype(bool), steps, "y")[0], y
    if form == "one-hot":
        matrix = np.eye(3, dtype=np.float32)[y]
        matrix[y < 0] = np.nan
        return written(rng, matrix, steps, "y")[0], y
    if form == "floats":
        floats = y.astype(rng.choice(["float32", "float64", "float16"]))
        floats[(y < 0) & (rng.random(rows) < 0.5)] = np.nan
        return written(rng, floats, steps, "y")[0], y
    narrow = y.astype(rng.choice(["int64", "int32", "int16", "int8"]))
    return written(rng, narrow[:, None] if form == "column" else narrow, steps, "y")[0], y


def split(rng: Rng, rows: int, steps: list[str]) -> tuple[dict[str, Any], dict[str, Array], int]:
    """Draw a split in some form: its fields, its masks, and the column to take."""
    stages = [stage for stage in ("train", "val", "test") if rng.random() < 0.8] or ["train"]
    masks = {f"{stage}_mask": rng.random(rows) < 0.4 for stage in stages}
    form = str(rng.choice(["masks", "ids", "dictionary", "columns", "names"]))
    steps.append(f"split of {', '.join(stages)} as {form}")
    if form == "columns":
        index = int(rng.integers(0, 3))
        columns = {name: rng.random((rows, 3)) < 0.4 for name in masks}
        for name, mask in masks.items():
            columns[name][:, index] = mask
        return {name: written(rng, one, steps, name)[0] for name, one in columns.items()}, masks, index
    ids = {
        name: rng.permutation(np.flatnonzero(mask)).astype(rng.choice(["int64", "int32"]))
        for name, mask in masks.items()
    }
    if form == "ids":
        names = {
            "train_mask": "train_idx",
            "val_mask": str(rng.choice(["val_idx", "valid_idx"])),
            "test_mask": "test_idx",
        }
        return {names[name]: written(rng, one, steps, names[name])[0] for name, one in ids.items()}, masks, 0
    if form == "dictionary":
        names = {"train_mask": "train", "val_mask": str(rng.choice(["val", "valid"])), "test_mask": "test"}
        return {"split_idx": {names[name]: written(rng, one, steps, "ids")[0] for name, one in ids.items()}}, masks, 0
    flags = {name: mask.astype(rng.choice(["bool", "uint8", "int64", "float32"])) for name, mask in masks.items()}
    names = {"val_mask": "valid_mask"} if form == "names" else {}
    return {names.get(name, name): written(rng, one, steps, name)[0] for name, one in flags.items()}, masks, 0


def _edge_index(rng: Rng, edges: Array, rows: int, steps: list[str]) -> Any:
    kind = str(rng.choice(["int64", "int32", "int16", "uint8", "uint16", "uint32", "uint64", "EdgeIndex"]))
    if kind == "EdgeIndex":
        steps.append("edge_index as EdgeIndex")
        return EdgeIndex(torch.from_numpy(edges.copy()), sparse_size=(rows, rows))
    return written(rng, edges.astype(kind), steps, "edge_index")[0]


# --- one type of nodes ------------------------------------------------------------------------------------------------


def homogeneous(seed: int) -> Case:
    """Draw a ``Data``; two of three have no fault."""
    rng, steps = np.random.default_rng(seed), list[str]()
    rows = int(rng.choice([1, 2, 3, 5, 9]))
    edges = rng.integers(0, rows, (2, int(rng.choice([0, 1, 3, 4, 12]))))
    fields: dict[str, Any] = {}
    fields["x"], x = written(rng, features(rng, rows), steps, "x")
    fields["edge_index"] = _edge_index(rng, edges, rows, steps)
    truth = Truth(x, edges)
    for name, values in _values(rng, edges.shape[1]).items():
        fields[name], truth.values[name] = written(rng, values, steps, name)
    case = Case(None, truth, steps=steps)
    if rng.random() < 0.9:
        fields["y"], truth.y = labels(rng, rows, steps)
    if rng.random() < 0.7:
        of_split, truth.masks, index = split(rng, rows, steps)
        fields |= of_split
        case.load["split_index"] = index
    if rng.random() < 0.3:
        fields |= {"year": torch.zeros(rows), "name": "mine", "num_nodes": rows}
    simple = len({*zip(*edges.tolist(), strict=True)}) == edges.shape[1]
    if not truth.values and simple and rng.random() < 0.4:
        fields["adj_t"] = _adjacency(rng, edges, rows, steps)
        del fields["edge_index"]
    for option in ("remove_self_loops", "symmetrize", "remove_duplicates"):
        if rng.random() < 0.25:
            case.prepare[option] = True
    if seed % 3 == 0:
        name = str(rng.choice(list(FAULTS)))
        steps.append(f"fault: {name}")
        case.fault = FAULTS[name](fields, case, rows)
    if "remove_duplicates" in case.prepare and categories_differ(case):
        case.fault = (*case.fault, "edge_attr")
    case.data = Data()
    for name in rng.permutation(list(fields)):
        case.data[str(name)] = fields[name]
    return case


def _values(rng: Rng, num_edges: int) -> dict[str, Array]:
    drawn = {
        "edge_weight": rng.integers(1, 5, num_edges).astype(rng.choice(["float32", "float64", "int64"])),
        "edge_attr": features(rng, num_edges),
        "edge_type": rng.integers(0, 3, num_edges).astype(rng.choice(["int64", "int32", "uint8"])),
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.3}


def _adjacency(rng: Rng, edges: Array, rows: int, steps: list[str]) -> Tensor:
    layout = str(rng.choice(["sparse_coo", "sparse_csr", "sparse_csc"]))
    steps.append(f"adj_t as {layout}")
    matrix = torch.sparse_coo_tensor(torch.from_numpy(edges[::-1].copy()), torch.ones(edges.shape[1]), (rows, rows))
    return matrix.to_sparse(layout=getattr(torch, layout))


def _put(name: str, value: Callable[[int, int], Any], *says: str) -> Callable[..., tuple[str, ...]]:
    """Return a fault that sets a field, given the numbers of nodes and edges."""

    def fault(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
        fields[name] = value(rows, case.truth.edges.shape[1])
        if name == "edge_index":
            fields.pop("adj_t", None)
        return says or (name,)

    return fault


def _option(part: str, name: str, value: Any, *says: str) -> Callable[..., tuple[str, ...]]:
    def fault(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
        getattr(case, part)[name] = value
        if "masks" in says:
            fields["train_mask"] = torch.zeros(rows, 3, dtype=torch.bool)
            for field_ in [one for one in fields if one.endswith("_idx")]:
                del fields[field_]
        if "y" in says:
            fields["y"] = torch.arange(rows).clamp(max=5) + 1
        return (name,) if "y" not in says else ("y",)

    return fault


def _missing(name: str) -> Callable[..., tuple[str, ...]]:
    def fault(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
        fields.pop(name, None)
        if name == "edge_index":
            fields.pop("adj_t", None)
        return (name,)

    return fault


def _adj_t(value: Callable[[int], Any]) -> Callable[..., tuple[str, ...]]:
    def fault(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
        fields.pop("edge_index", None)
        fields["adj_t"] = value(rows)
        return ("adj_t",)

    return fault


def _both_splits(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
    for name in [one for one in fields if "train" in one or one == "split_idx"]:
        del fields[name]
    fields["train_mask"] = torch.ones(rows, dtype=torch.bool)
    fields["train_idx"] = torch.zeros(0, dtype=torch.long)
    case.load["split_index"] = 0
    for name in MASKS:
        if name in fields and torch.as_tensor(np.asarray(fields[name])).dim() == 2:
            del fields[name]
    return ("train_idx",)


def _weights_twice(fields: dict[str, Any], case: Case, rows: int) -> tuple[str, ...]:
    fields.pop("edge_index", None)
    fields["adj_t"] = torch.sparse_coo_tensor(torch.zeros(2, 1).long(), torch.tensor([2.0]), (rows, rows))
    fields["edge_weight"] = torch.ones(1)
    return ("edge_weight",)


def _point(*at: float) -> Callable[[int, int], Tensor]:
    """Features of which the last row is wrong."""

    def value(rows: int, _: int) -> Tensor:
        x = torch.ones(rows, len(at))
        x[-1] = torch.tensor(at)
        return x

    return value


NAN, INF = float("nan"), float("inf")
FAULTS: dict[str, Callable[..., tuple[str, ...]]] = {
    "no x": _missing("x"),
    "x in one dimension": _put("x", lambda n, e: torch.ones(n)),
    "x in three dimensions": _put("x", lambda n, e: torch.ones(n, 2, 2)),
    "x a number": _put("x", lambda n, e: 3.0),
    "x without columns": _put("x", lambda n, e: torch.ones(n, 0)),
    "x of NaN": _put("x", _point(1.0, NAN)),
    "x infinite": _put("x", _point(-INF)),
    "sparse x of NaN": _put("x", lambda n, e: _point(NAN, 1.0)(n, e).to_sparse()),
    "complex x": _put("x", lambda n, e: torch.ones(n, 1, dtype=torch.complex128)),
    "complex array": _put("x", lambda n, e: np.ones((n, 1), dtype=np.complex64)),
    "x of text": _put("x", lambda n, e: np.array([["a"]] * n)),
    "x of objects": _put("x", lambda n, e: np.array([[None]] * n, dtype=object)),
    "ragged x": _put("x", lambda n, e: [[1.0]] * n + [[1.0, 2.0]]),
    "x a set": _put("x", lambda n, e: {1.0}),
    "x on no device": _put("x", lambda n, e: torch.ones(n, 1, device="meta")),
    "x in eight bits": _put("x", lambda n, e: torch.ones(n, 1).to(torch.float8_e4m3fn)),
    "x too large": _put("x", lambda n, e: np.full((n, 1), 2**63, dtype=np.uint64)),
    "dates": _put("x", lambda n, e: np.zeros((n, 1), dtype="datetime64[s]")),
    "masked array": _put("x", lambda n, e: np.ma.masked_array(np.ones((n, 1)), mask=np.ones((n, 1), dtype=bool))),
    "no nodes": _put("x", lambda n, e: torch.ones(0, 2)),
    "other number of nodes": _put("num_nodes", lambda n, e: n + 1, "x"),
    "no edge_index": _missing("edge_index"),
    "edge_index of floats": _put("edge_index", lambda n, e: torch.zeros(2, e)),
    "edge_index of flags": _put("edge_index", lambda n, e: torch.zeros(2, e, dtype=torch.bool)),
    "complex edge_index": _put("edge_index", lambda n, e: torch.zeros(2, e, dtype=torch.complex64)),
    "edge_index the other way": _put("edge_index", lambda n, e: torch.zeros(max(e, 3), 2).long()),
    "edge_index of one row": _put("edge_index", lambda n, e: torch.zeros(1, e).long()),
    "edge_index in one dimension": _put("edge_index", lambda n, e: torch.zeros(2).long()),
    "edge_index in three dimensions": _put("edge_index", lambda n, e: torch.zeros(2, e, 1).long()),
    "edge to no node": _put("edge_index", lambda n, e: torch.tensor([[0], [n]])),
    "edge from a negative node": _put("edge_index", lambda n, e: torch.tensor([[-1], [0]])),
    "huge id": _put("edge_index", lambda n, e: torch.tensor([[0], [2**62]])),
    "id beyond int64": _put("edge_index", lambda n, e: np.array([[0], [2**63 + 1]], dtype=np.uint64)),
    "edge_index of text": _put("edge_index", lambda n, e: [["a"], ["b"]]),
    "sparse edge_index": _put("edge_index", lambda n, e: torch.eye(n).to_sparse()),
    "edge_index a number": _put("edge_index", lambda n, e: 0),
    "adj_t dense": _adj_t(lambda n: torch.eye(n)),
    "adj_t an object": _adj_t(lambda n: object()),
    "weights twice": _weights_twice,
    "too many weights": _put("edge_weight", lambda n, e: torch.ones(e + 1)),
    "weights in columns": _put("edge_weight", lambda n, e: torch.ones(max(e, 1), 2)),
    "weights of NaN": _put("edge_weight", lambda n, e: torch.full((max(e, 1),), NAN)),
    "weights of text": _put("edge_weight", lambda n, e: ["heavy"]),
    "one weight": _put("edge_weight", lambda n, e: torch.tensor(1.0)),
    "complex weights": _put("edge_weight", lambda n, e: torch.ones(e, dtype=torch.complex64)),
    "sparse attributes": _put("edge_attr", lambda n, e: torch.ones(e + 1, 1).to_sparse()),
    "too few attributes": _put("edge_attr", lambda n, e: np.ones((e + 2, 3))),
    "infinite attributes": _put("edge_attr", lambda n, e: torch.full((max(e, 1), 2), INF)),
    "types of floats": _put("edge_type", lambda n, e: torch.ones(max(e, 1))),
    "negative types": _put("edge_type", lambda n, e: torch.full((max(e, 1),), -1)),
    "too many labels": _put("y", lambda n, e: torch.zeros(n + 1).long()),
    "one label": _put("y", lambda n, e: torch.tensor(1)),
    "infinite numbers to predict": _put("y", lambda n, e: [[0.5, INF]] * n),
    "half a row of numbers to predict": _put("y", lambda n, e: [[0.5, NAN]] * n),
    "infinite labels": _put("y", lambda n, e: torch.full((n,), INF)),
    "huge labels": _put("y", lambda n, e: torch.full((n,), 1e18, dtype=torch.float64)),
    "negative labels": _put("y", lambda n, e: torch.full((n,), -2)),
    "labels of two signs": _put("y", lambda n, e: [1, *[-1] * (n - 1)] if n > 1 else [-2]),
    "complex labels": _put("y", lambda n, e: torch.zeros(n, dtype=torch.complex64)),
    "labels of text": _put("y", lambda n, e: ["cat"] * n),
    "labels without numbers": _put("y", lambda n, e: torch.zeros(n, 2, 0)),
    "half a row of labels": _put("y", lambda n, e: torch.tensor([[0.0, NAN, 1.0]] * n)),
    "labels as a dictionary": _put("y", lambda n, e: {"0": 1}),
    "too long a mask": _put("train_mask", lambda n, e: torch.ones(n + 1).bool(), "train_", "split_idx"),
    "mask of twos": _put("val_mask", lambda n, e: torch.full((n,), 2), "val", "split_idx"),
    "mask of NaN": _put("test_mask", lambda n, e: torch.full((n,), NAN), "test", "split_idx"),
    "mask of text": _put("test_mask", lambda n, e: ["yes"] * n, "test"),
    "mask in three dimensions": _put("test_mask", lambda n, e: torch.zeros(n, 1, 1), "test"),
    "ids beyond the nodes": _put("train_idx", lambda n, e: torch.tensor([n]), "train_idx"),
    "negative ids": _put("test_idx", lambda n, e: [-1], "test_idx"),
    "ids of floats": _put("val_idx", lambda n, e: np.array([0.0]), "val_idx"),
    "ids of text": _put("val_idx", lambda n, e: ["first"], "val_idx"),
    "split without stages": _put("split_idx", lambda n, e: {"fold 1": [0]}, "split_idx"),
    "split of another kind": _put("split_idx", lambda n, e: [[0], [0], [0]], "split_idx"),
    "two splits": _both_splits,
    "no such split": _option("load", "split_index", 7, "masks"),
    "shares beyond 1": _option("prepare", "split", (0.9, 0.9, 0.1)),
    "too few classes": _option("prepare", "num_classes", 1, "y"),
    "no classes": _option("prepare", "num_classes", 0),
}  # fmt: skip


# --- the oracle -------------------------------------------------------------------------------------------------------


def categories_differ(case: Case) -> bool:
    """True if integer attributes of edges that are to be merged are not equal."""
    values = case.truth.values
    if "edge_attr" not in values or values["edge_attr"].dtype.kind == "f":
        return False
    seen: dict[Any, Any] = {}
    rows = list(edge_rows(_changed(case.truth, {**case.prepare, "remove_duplicates": False})))
    return any(seen.setdefault((row[0], row[1], row[4]), row[3]) != row[3] for row in rows)


def edge_rows(truth: Truth) -> list[tuple[Any, ...]]:
    """Each edge as source, target, weight, attributes and type; ``None`` for what it has not."""
    count = truth.edges.shape[1]
    names = ("edge_weight", "edge_attr", "edge_type")
    columns = [
        [np.atleast_1d(one).tolist() for one in truth.values[name]] if name in truth.values else [[None]] * count
        for name in names
    ]
    sources, targets = truth.edges.tolist()
    rows = zip(sources, targets, *columns, strict=True)
    return [(source, target, weight[0], tuple(attr), kind[0]) for source, target, weight, attr, kind in rows]


def _changed(truth: Truth, options: dict[str, Any]) -> Truth:
    """Remove loops, add reverse edges, merge parallel ones: by a loop over edges."""
    rows = edge_rows(truth)
    if options.get("remove_self_loops"):
        rows = [row for row in rows if row[0] != row[1]]
    if options.get("symmetrize"):
        there = {(row[0], row[1], row[4]) for row in rows}
        rows += [(row[1], row[0], *row[2:]) for row in rows if (row[1], row[0], row[4]) not in there]
    if options.get("remove_duplicates"):
        groups: dict[Any, list[tuple[Any, ...]]] = {}
        for row in rows:
            groups.setdefault((row[0], row[1], row[4]), []).append(row)
        rows = [_merged(group) for group in groups.values()]
    count = len(rows)
    values = {
        name: np.array([row[at] for row in rows]).reshape(count, *truth.values[name].shape[1:])
        for at, name in ((2, "edge_weight"), (3, "edge_attr"), (4, "edge_type"))
        if name in truth.values
    }
    edges = np.array([row[:2] for row in rows], dtype=np.int64).reshape(count, 2).T
    return Truth(truth.x, edges, values, truth.y, truth.masks)


def _merged(group: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    first = group[0]
    weight = None if first[2] is None else sum(row[2] for row in group)
    attributes = [[row[3][at] for row in group] for at in range(len(first[3]))]
    averages = [None if one[0] is None else one[0] if len({*one}) == 1 else sum(one) / len(one) for one in attributes]
    return first[0], first[1], weight, tuple(averages), first[4]


def differences(found: dict[str, Array | None], num_classes: int, case: Case) -> list[str]:
    """Return what differs between a graph and the truth of its case; edges may be in any order."""
    truth = _changed(case.truth, case.prepare)
    wrong = []
    x = truth.x.astype(np.float32) if truth.x.dtype == np.float16 else truth.x
    if found["x"] is None or found["x"].dtype != x.dtype or not np.array_equal(found["x"], x):
        wrong.append(f"x is {found['x']}, not {x}")
    for name in ("edge_weight", "edge_attr"):
        if name in truth.values:
            given, value = case.truth.values[name].dtype, found[name]
            floats = given == np.float16 or (name == "edge_weight" and given.kind != "f")
            if value is None or value.dtype != (np.float32 if floats else given):
                wrong.append(f"{name} is {None if value is None else value.dtype}, was {given}")
    edges = found["edge_index"]
    assert edges is not None
    values = {name: value for name in ("edge_weight", "edge_attr", "edge_type") if (value := found[name]) is not None}
    ours, theirs = (Counter(map(_rounded, edge_rows(one))) for one in (Truth(x, edges, values), truth))
    if ours != theirs:
        wrong.append(f"edges are {dict(ours)}, not {dict(theirs)}")
    y = found["y"]
    if y is None or truth.y is None:
        wrong += [f"y is {y}, not {truth.y}"] if y is not truth.y else []
    elif not np.array_equal(y, truth.y, equal_nan=True):
        wrong.append(f"y is {y}, not {truth.y}")
    return wrong + _of_masks(found, truth)


def _rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:2], row[2], tuple(None if one is None else round(float(one), 4) for one in row[3]), row[4])


def _of_masks(found: dict[str, Array | None], truth: Truth) -> list[str]:
    masks = [np.asarray(found[name]) for name in MASKS]
    if truth.y is None:
        return ["masks without labels"] if any(mask.any() for mask in masks) else []
    labelled = ~np.isnan(truth.y).any(1) if truth.y.ndim == 2 else truth.y >= 0
    if truth.masks is None:
        count = int(labelled.sum())
        bounds = [round(count * share) for share in (0.0, 0.5, 0.75, 1.0)]
        right = [int(mask.sum()) for mask in masks] == np.diff(bounds).tolist()
        return (
            [] if right and np.array_equal(sum(mask.astype(int) for mask in masks), labelled) else ["the drawn split"]
        )
    nothing = np.zeros(len(labelled), dtype=bool)
    expected = [truth.masks.get(name, nothing) & labelled for name in MASKS]
    return [
        f"{name} is {mask}, not {one}"
        for name, mask, one in zip(MASKS, masks, expected, strict=True)
        if not np.array_equal(mask, one)
    ]


# --- several types of nodes -------------------------------------------------------------------------------------------


def heterogeneous(seed: int) -> Case:
    """Draw a ``HeteroData`` of two or three types; two of three have no fault."""
    rng, steps, data = np.random.default_rng(seed), list[str](), HeteroData()
    kinds = ["a", "b", "c"][: int(rng.integers(2, 4))]
    counts = {kind: int(rng.integers(1, 5)) for kind in kinds}
    first = dict(zip(kinds, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    total, width = sum(counts.values()), int(rng.integers(1, 3))
    given: dict[str, Array] = {}
    for kind in kinds:
        data[kind].num_nodes = counts[kind]
        if rng.random() < 0.7:
            data[kind].x, given[kind] = written(rng, features(rng, counts[kind], width=width), steps, "x")
    x = np.zeros((total, (width if given else 0) + len(kinds)), dtype=_dtype_of([one.dtype for one in given.values()]))
    for number, kind in enumerate(kinds):
        rows = slice(first[kind], first[kind] + counts[kind])
        x[rows, (width if given else 0) + number] = 1
        if kind in given:
            x[rows, :width] = given[kind]
    edges, types = [], []
    relations = [(kinds[0], "to", kinds[1]), (kinds[1], "to", kinds[1]), (kinds[-1], "back", kinds[0])]
    for number, relation in enumerate(relations):
        ends = [rng.integers(0, counts[kind], 4) for kind in (relation[0], relation[-1])]
        data[relation].edge_index = written(rng, np.stack(ends), steps, "edge_index")[0]
        edges.append(np.stack([ends[0] + first[relation[0]], ends[1] + first[relation[-1]]]))
        types.append(np.full(4, number))
    truth = Truth(x, np.concatenate(edges, axis=1), {"edge_type": np.concatenate(types)})
    case, kind = Case(data, truth, steps=steps), str(rng.choice(kinds))
    data[kind].y, y = labels(rng, counts[kind], steps)
    truth.y = np.full((total, *y.shape[1:]), -1 if y.ndim == 1 else np.nan, dtype=y.dtype)
    truth.y[first[kind] : first[kind] + counts[kind]] = y
    if rng.random() < 0.7:
        fields, masks, case.load["split_index"] = split(rng, counts[kind], steps)
        truth.masks = {name: np.zeros(total, dtype=bool) for name in masks}
        for name, mask in masks.items():
            truth.masks[name][first[kind] : first[kind] + counts[kind]] = mask
        everywhere = "split_idx" not in fields and rng.random() < 0.3
        for name, value in fields.items():
            (data if everywhere else data[kind])[name] = {kind: value} if everywhere else value
    if seed % 3 == 0:
        number = int(rng.integers(len(HETERO_FAULTS)))
        steps.append(f"fault {number}")
        case.fault = HETERO_FAULTS[number](data, kind, relations[0], counts)
    return case


def _dtype_of(dtypes: list[Any]) -> Any:
    if dtypes and not any(dtype.kind == "f" for dtype in dtypes):
        return np.result_type(*dtypes)
    return np.float64 if np.float64 in dtypes else np.float32


def _set(where: str, name: str, value: Callable[[int], Any]) -> Callable[..., tuple[str, ...]]:
    def fault(data: HeteroData, kind: str, relation: tuple[str, str, str], counts: dict[str, int]) -> tuple[str, ...]:
        setattr({"node": data[kind], "edge": data[relation], "graph": data}[where], name, value(counts[kind]))
        return (name, "split_idx")

    return fault


def _stray(data: HeteroData) -> tuple[str, ...]:
    data["a", "leads to", "nowhere"].edge_index = torch.zeros(2, 1, dtype=torch.long)
    return ("'nowhere'",)


HETERO_FAULTS = [
    _set("node", "x", lambda n: torch.ones(n)),
    _set("node", "x", lambda n: torch.ones(n + 1, 2)),
    _set("node", "x", lambda n: "text"),
    _set("node", "x", lambda n: torch.ones(n, 1, dtype=torch.complex64)),
    _set("node", "x", lambda n: torch.full((n, 1), float("nan"))),
    _set("node", "y", lambda n: torch.zeros(n + 1).long()),
    _set("node", "y", lambda n: torch.tensor(0)),
    _set("node", "y", lambda n: ["a"] * n),
    _set("node", "val_mask", lambda n: torch.ones(n + 1)),
    _set("node", "test_idx", lambda n: [n]),
    _set("node", "split_idx", lambda n: 3),
    _set("edge", "edge_index", lambda n: torch.tensor([[0], [99]])),
    _set("edge", "edge_index", lambda n: torch.tensor([[-1], [0]])),
    _set("edge", "edge_index", lambda n: torch.rand(2, 3)),
    _set("edge", "edge_index", lambda n: torch.zeros(3, 2).long()),
    _set("edge", "edge_index", lambda n: "text"),
    _set("edge", "edge_index", lambda n: None),
    _set("edge", "edge_attr", lambda n: torch.ones(4, 1)),
    _set("edge", "edge_weight", lambda n: torch.ones(4)),
    _set("graph", "train_idx", lambda n: torch.tensor([0])),
    lambda data, kind, relation, counts: _stray(data),
    _set("graph", "val_idx", lambda n: {"nobody": torch.tensor([0])}),
]
