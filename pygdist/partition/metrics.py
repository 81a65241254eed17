"""Measures of a partition: rows that cross between parts, and balance of the work.

:func:`measure` computes the measures from a stream of edges; :meth:`PartitionMetrics.from_meta` reads the same values
from the ``meta.json`` of a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.display import bars, card, table
from pygdist.graph import EdgeStream

_TABLE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, repr=False)
class PartitionMetrics:
    """Measures of a partition of nodes into P parts.

    Attributes:
        num_nodes: Nodes of each part; int64 of shape ``(P,)``.
        num_edges: In-edges of each part's nodes; shape ``(P,)``.
        num_train: Training nodes of each part; shape ``(P,)``.
        edge_cut: Edges whose ends have different owners.
        rows: ``rows[i, j]`` is the number of rows that part i sends to part j in one hop: the number of nodes of i with
            an edge into j. Shape ``(P, P)``; the diagonal is zero.
    """

    num_nodes: NDArray[np.int64]
    num_edges: NDArray[np.int64]
    num_train: NDArray[np.int64]
    edge_cut: int
    rows: NDArray[np.int64]

    def __repr__(self) -> str:
        return (
            f"PartitionMetrics({self.num_parts} parts: {int(self.num_nodes.sum()):,} nodes, "
            f"{int(self.rows.sum()):,} rows per hop, replication factor {self.replication_factor:.3g})"
        )

    def _repr_html_(self) -> str:
        totals, balance = self.totals(), self.balance
        figures = {
            "nodes": totals["num_nodes"],
            "edges": totals["num_edges"],
            "edges cut": f"{totals['edge_cut_share']:.1%}",
            "rows per hop": totals["rows_per_hop"],
            "replication factor": totals["replication_factor_full"],
            "largest part": f"{balance['nodes']:.2f} x mean nodes, {balance['edges']:.2f} x mean edges",
        }
        plot = bars({"nodes": self.num_nodes.tolist(), "halo rows": self.num_halo.tolist()})
        return card(f"Partition into {self.num_parts} parts", figures, plot, table(self.summary()))

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> PartitionMetrics:
        """Read the measures of a store from its ``meta.json``."""
        parts = meta["parts"]
        return cls(
            num_nodes=np.array([part["num_owned"] for part in parts], dtype=np.int64),
            num_edges=np.array([part["num_edges"] for part in parts], dtype=np.int64),
            num_train=np.array([part["counts"]["train_mask"] for part in parts], dtype=np.int64),
            edge_cut=int(meta["edge_cut"]),
            rows=np.array([part["recv_counts"] for part in parts], dtype=np.int64).T,
        )

    @property
    def num_parts(self) -> int:
        """Number of parts, P."""
        return len(self.num_nodes)

    @property
    def num_halo(self) -> NDArray[np.int64]:
        """Number of halo rows of each part for one hop; shape ``(P,)``."""
        return np.asarray(self.rows.sum(axis=0))

    @property
    def replication_factor(self) -> float:
        """Mean number of parts that hold a node's row, as owner or as halo."""
        num_nodes = int(self.num_nodes.sum())
        return 1 + int(self.rows.sum()) / max(num_nodes, 1)

    def volume(self, width: int, *, itemsize: int = 4) -> int:
        """Return the bytes that cross between parts in a layer's forward pass; the backward pass sends as many.

        Each row has ``width`` values of ``itemsize`` bytes.
        """
        return int(self.rows.sum()) * width * itemsize

    @property
    def balance(self) -> dict[str, float]:
        """Size of the largest part over the mean, in ``nodes``, ``edges`` and ``train_nodes``; 1 is best, P worst."""
        loads = {"nodes": self.num_nodes, "edges": self.num_edges, "train_nodes": self.num_train}
        return {name: float(load.max() / load.mean()) if load.any() else 1.0 for name, load in loads.items()}

    def totals(self) -> dict[str, int | float]:
        """Return the measures of all parts together, by their names in ``meta.json``."""
        num_edges = int(self.num_edges.sum())
        return {
            "num_parts": self.num_parts,
            "num_nodes": int(self.num_nodes.sum()),
            "num_edges": num_edges,
            "replication_factor_full": self.replication_factor,
            "edge_cut": self.edge_cut,
            "rows_per_hop": int(self.rows.sum()),
            "edge_cut_share": self.edge_cut / max(num_edges, 1),
            **{f"{name}_balance": value for name, value in self.balance.items()},
        }

    def summary(self) -> list[dict[str, int]]:
        """Return a table with one row per part: nodes, edges, training nodes, halo rows, rows sent in one hop."""
        columns = {
            "part": np.arange(self.num_parts),
            "nodes": self.num_nodes,
            "edges": self.num_edges,
            "train nodes": self.num_train,
            "halo rows": self.num_halo,
            "sent rows": self.rows.sum(axis=1),
        }
        return [{name: int(column[part]) for name, column in columns.items()} for part in range(self.num_parts)]


def measure(
    edges: EdgeStream,
    part: NDArray[Any],
    num_parts: int,
    *,
    train_mask: NDArray[np.bool_] | None = None,
    table_bytes: int = _TABLE_BYTES,
) -> PartitionMetrics:
    """Measure a partition from the edges of the graph.

    Args:
        edges: The graph.
        part: Owner of each node, integers of shape ``(N,)``.
        num_parts: Number of parts, P.
        train_mask: Training nodes, bool of shape ``(N,)``; none by default.
        table_bytes: Largest memory for a table of ``N * P`` bytes. If the table is larger, each pass over the stream
            measures only some of the parts.
    """
    num_nodes = edges.num_nodes
    rows = np.zeros((num_parts, num_parts), dtype=np.int64)
    num_edges = np.zeros(num_parts, dtype=np.int64)
    edge_cut = 0
    width = max(1, min(num_parts, table_bytes // max(num_nodes, 1)))
    for first in range(0, num_parts, width):
        last = min(first + width, num_parts)
        needed = np.zeros((num_nodes, last - first), dtype=bool)
        for source, target in edges.chunks():
            receiver = part[target]
            cut = part[source] != receiver
            if first == 0:
                num_edges += np.bincount(receiver, minlength=num_parts)
                edge_cut += int(np.count_nonzero(cut))
            mine = cut & (receiver >= first) & (receiver < last)
            needed[source[mine], receiver[mine] - first] = True
        for receiver_part in range(first, last):
            senders = part[needed[:, receiver_part - first]]
            rows[:, receiver_part] = np.bincount(senders, minlength=num_parts)
    train = np.zeros(num_nodes, dtype=bool) if train_mask is None else train_mask
    return PartitionMetrics(
        num_nodes=np.bincount(part, minlength=num_parts),
        num_edges=num_edges,
        num_train=np.bincount(part[train], minlength=num_parts),
        edge_cut=edge_cut,
        rows=rows,
    )
