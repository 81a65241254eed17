"""Folders and files of graphs with a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reliability.malformed.case import FILES, FIT, Case, at, writes

GRAPHS: list[tuple[str, str, Callable[[Any], Any]]] = [
    *(("x", f"holds {value}", at((3, 1), value)) for value in (np.nan, np.inf, -np.inf)),
    ("x", "overflows float32", lambda array: at((3, 1), 1e300)(array.astype(np.float64))),
    ("x", "overflows float32 below", lambda array: at((3, 1), -1e39)(array.astype(np.float64))),
    ("x", "is a vector", lambda array: array[:, 0].copy()),
    ("x", "is short", lambda array: array[:5]),
    ("x", "is empty", lambda array: array[:0]),
    ("x", "has no columns", lambda array: array[:, :0]),
    ("x", "is of texts", lambda array: array.astype("U8")),
    ("x", "is complex", lambda array: array.astype(np.complex64)),
    ("x", "is one number", lambda array: np.array(3.0)),
    ("edge_index", "names no node", at((0, 3), 10**9)),
    ("edge_index", "is negative", at((1, 3), -1)),
    ("edge_index", "has three rows", lambda array: np.concatenate([array, array[:1]])),
    ("edge_index", "is of floats", lambda array: array.astype(np.float64)),
    ("edge_index", "is a vector", lambda array: array[0].copy()),
    ("edge_index", "is bool", lambda array: array.astype(bool)),
    ("y", "is short", lambda array: array[:5]),
    ("y", "is below -1", at(3, -7)),
    ("y", "is half", lambda array: at(3, 0.5)(array.astype(np.float64))),
    ("y", "is infinite", lambda array: at(3, np.inf)(array.astype(np.float64))),
    ("y", "has a huge class", at(3, 2**40)),
    ("y", "is a cube", lambda array: array.reshape(-1, 1, 1)),
    ("train_mask", "is short", lambda array: array[:5]),
    ("train_mask", "is two", lambda array: array.astype(np.int64) * 2),
    ("edge_weight", "is short", lambda array: array[:5]),
    *(("edge_weight", f"holds {value}", at(3, value)) for value in (np.nan, np.inf)),
    ("edge_weight", "overflows float32", lambda array: at(3, 1e300)(array.astype(np.float64))),
    ("edge_attr", "is short", lambda array: array[:5].reshape(-1, 1)),
    ("edge_attr", "overflows float32", lambda array: at(3, 1e300)(array.astype(np.float64))),
    *(("edge_attr", f"holds {value}", at(3, value)) for value in (np.nan, -np.inf)),
    ("edge_type", "is negative", lambda array: at(3, -1)(array.astype(np.int64))),
    ("edge_type", "is of floats", lambda array: array + 0.5),
]
EDGE_TEXTS = {
    "words among numbers": "0 1\n1 2\nthree 4\n5 6\n" * 3, "one column": "1\n2\n3\n", "negative": "0 1\n-1 2\n2 3\n",
    "fractions": "0 1\n1.5 2\n2 3\n", "nan": "0 1\nnan 2\n2 3\n", "empty": "", "only comments": "# a\n# b\n",
    "ragged": "0 1\n1 2 3 4\n2 3\n", "huge ids": f"0 {10**25}\n1 2\n",
    "infinite weight": "source,target,weight\n0,1,inf\n1,2,1\n", "nan weight": "source,target,weight\n0,1,nan\n1,2,1\n",
    "overflowing weight": "source,target,weight\n0,1,1e300\n1,2,1e308\n2,3,1e999\n",
    "zeros": "\0\0\0\0\n" * 5, "no end": "0 1\n1 2\n2 ",
}  # fmt: skip


def graph_cases() -> Iterator[Case]:
    """Yield folders of arrays with a fault, as a dataset and as input, and files of edges."""

    def faulty(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            path = folder / "graph" / f"{name}.npy"
            if not path.is_file():
                num_edges = np.load(folder / "graph" / "edge_index.npy").shape[1]
                np.save(path, np.ones(num_edges, dtype=np.float32))
            np.save(path, change(np.load(path)))

        return prepare

    whole = ("partition", "--input=graph", "--out=out", "--num_classes=4")
    for name, what, change in GRAPHS:
        arguments = (*FIT, "--data.num_classes=4")
        yield Case("graph folder", f"{name} {what}", arguments, (name,), faulty(name, change))
        yield Case("graph as a stream", f"{name} {what}", whole, (name,), faulty(name, change))
    for what, text in EDGE_TEXTS.items():
        yield Case(
            "edges in text", what, FILES, ("edges.txt",),
            writes("edges.txt", text.encode()),
        )  # fmt: skip
