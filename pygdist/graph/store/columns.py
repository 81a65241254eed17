"""The placement *columns*: a part has some columns of the features of all nodes (P3, Sec. 3.1).

Its own nodes, their in-edges and labels are those of *nodes*, by any partition of the nodes; P3 hashes them. Features
stay on disk in the type that they come in if that is float16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pygdist.comm.slices import columns_of
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.nodes import NODES, NodeParts, Placement
from pygdist.graph.streams.arrays import ArrayWriter, forget_pages

_BLOCK_BYTES = 1 << 24


def _write(graph: WholeGraph, parts: NodeParts, folders: Sequence[Path], num_hops: int) -> list[dict[str, Any]]:
    entries = NODES.write(graph, parts, folders, num_hops)
    if "x" not in graph.fields:
        return entries
    x, width = graph.fields["x"], graph.num_features
    dtype = x.dtype if x.dtype == np.float16 else graph.dtypes["x"]
    slices = [columns_of(width, part, len(folders)) for part in range(len(folders))]
    step = max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(ArrayWriter(folder / "columns.npy", dtype, row=(one.stop - one.start,)))
            for folder, one in zip(folders, slices, strict=True)
        ]
        for start in range(0, len(x), step):
            block = np.asarray(x[start : start + step])
            for writer, one in zip(writers, slices, strict=True):
                writer.append(block[:, one])
            del block
            forget_pages(x)
    for entry, writer in zip(entries, writers, strict=True):
        entry["files"]["columns"] = writer.described()
    return entries


COLUMNS = Placement(name="columns", write=_write, most_hops=1, splits_features=True)
