"""A whole graph before it is cut into parts: a stream of edges, and arrays that need not be in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from pygdist.graph.check import EDGE_FIELDS, FEATURES, LEFT_OUT, MASKS, NODE_INPUTS
from pygdist.graph.sources.prepare import count_classes
from pygdist.graph.streams.arrays import forget_pages
from pygdist.graph.streams.progress import Progress
from pygdist.graph.streams.stream import EdgeStream

OF_NODES = "node_"  # begins the names of further tensors of nodes in a store
_BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class WholeGraph:
    """The edges and fields of a graph that is not partitioned yet.

    Attributes:
        edges: Its edges.
        fields: ``x``, ``y``, masks, ``edge_weight``, ``edge_attr`` and ``edge_type``, in memory or memory-mapped, in
            the forms that :func:`pygdist.graph.prepare` describes. Arrays of a file may have another numeric type; the
            types are converted when parts are written. Each field may be absent. Names of further tensors of nodes
            begin with ``node_``.
        num_classes: Number of classes.
        notes: Notes on preprocessing, one sentence each.
        left_out: Names of further tensors of nodes that the source has and ``fields`` lacks.
        ids: Original id of each node, ascending, int64 of shape ``(N,)``; ``None`` if nodes were not renumbered.
        names: Text file with one line per node, the name of the node; only if ids are names.
        merge: Keep one edge of each source and target, with the sum of the weights and the mean of the attributes. If
            the arrays are files open for writing (mode ``r+``), sums and means are written to the files.
        mirrored: Each edge at an odd position is the reverse of the edge before it. A reverse is kept only if no other
            edge has the same source and target.
        float_features: Convert integer features of nodes and edges to float32.
    """

    edges: EdgeStream
    fields: Mapping[str, NDArray[Any]]
    num_classes: int
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    ids: NDArray[np.int64] | None = None
    names: Path | None = None
    merge: bool = False
    mirrored: bool = False
    float_features: bool = False

    @classmethod
    def from_data(
        cls, data: Data, *, num_classes: int | None = None, notes: Sequence[str] = (), progress: Progress | None = None
    ) -> WholeGraph:
        """Wrap a graph in memory, as :func:`pygdist.graph.prepare` returns it; labels and masks may be absent."""
        names = ("x", "y", *MASKS, *EDGE_FIELDS)
        fields = {name: value.numpy() for name in names if isinstance(value := data.get(name), Tensor)}
        fields |= {f"{OF_NODES}{name}": data[name].numpy() for name in data.get(NODE_INPUTS, ())}
        if num_classes is None:
            num_classes = data.get("num_classes")
        if num_classes is None:
            num_classes = count_classes(data.get("y"))
        edges = EdgeStream.from_data(data, progress=progress)
        left_out = data.get(LEFT_OUT, ())
        return cls(edges=edges, fields=fields, num_classes=int(num_classes), notes=notes, left_out=left_out)

    def fingerprint(self) -> str:
        """Hash the edges and fields in one pass; 32 hexadecimal digits."""
        options = f"{self.edges.num_nodes} {self.merge} {self.mirrored} {self.float_features}"
        digest = hashlib.blake2b(options.encode(), digest_size=16)
        for chunk in self.edges.chunks():
            digest.update(np.ascontiguousarray(chunk.T).data)  # the same however the stream is cut
        for name, value in sorted(self.fields.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            for start in range(0, len(value), _BLOCK_ROWS):
                digest.update(np.ascontiguousarray(value[start : start + _BLOCK_ROWS]).data)
                forget_pages(value)
        if self.ids is not None:
            digest.update(b"ids" + np.ascontiguousarray(self.ids).tobytes())
        if self.names is not None:
            digest.update(b"names" + self.names.read_bytes())
        return digest.hexdigest()

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """The type of each field in a store."""
        return {name: _stored_type(name, value, self.float_features) for name, value in self.fields.items()}

    @property
    def multi_label(self) -> bool:
        """True if labels are a matrix with one column per class."""
        y = self.fields.get("y")
        return y is not None and y.ndim == 2 and y.shape[1] == self.num_classes > 1

    @property
    def targets(self) -> tuple[int, ...] | None:
        """The shape of the numbers to predict for one node; ``None`` if labels are classes, or absent."""
        y = self.fields.get("y")
        return None if y is None or y.ndim == 1 or self.multi_label else y.shape[1:]

    @property
    def num_features(self) -> int:
        """Width of the features; 0 without features."""
        return int(self.fields["x"].shape[1]) if "x" in self.fields else 0


def _stored_type(name: str, value: NDArray[Any], float_features: bool = False) -> np.dtype[Any]:
    """Return the type in which :func:`pygdist.graph.prepare` would put a field, which a file may hold in another."""
    kind, size = value.dtype.kind, value.dtype.itemsize
    if name == "edge_type":
        return np.dtype(np.int64)
    if name in FEATURES and kind in "biu" and not float_features:
        return np.dtype(np.int64) if kind == "u" and size > 1 else value.dtype
    floats = name in (*FEATURES, "edge_weight")
    return np.dtype(np.float32) if floats and value.dtype not in (np.float32, np.float64) else value.dtype
