"""The part of the graph around a rank's own nodes, with which it can compute without other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import EDGE_FIELDS
from pygdist.kernels.csr import CSR, narrowest


class Surroundings:
    r"""All rows of a part under the placements *replicas* (CATGNN, Sec. 4.2) and *edges*, and the edges among them.

    Rows are ordered by hop, nearest first; edges have the order of the rows that they enter. Under *replicas*, rows
    within fewer than K hops have all their in-edges. Rows of the last hop, the rim, have only self-loops and the
    in-edges from rows within fewer than K hops; ``in_degree`` counts the missing in-edges too. Under *edges*, a row has
    the in-edges that are in this part.

    Attributes:
        num_hops: Number of hops around the owned rows, :math:`K \ge 1`.
        ends: ``ends[k]`` is the number of rows within ``k`` hops, for ``k`` from 0 (owned) to :math:`K` (all,
            :math:`R`).
        n_id: Global ids of the rows: owned, then by hop, grouped by owner inside a hop; ``(R,)`` int64.
        adjacency: In-edges of all rows in local ids, from :math:`R` sources to :math:`R` destinations.
        e_id: Global position of each edge, in the order of ``adjacency``; ``(E,)`` int64.
        x: Features of all rows, ``(R, num_features)``.
        edge_weight, edge_attr, edge_type: Per edge, in the order of ``adjacency``; ``None`` if the graph has none.
        in_degree: For each row, over all its in-edges in the whole graph: the number of in-edges, the number of
            self-loops, the sum of the weights, the sum of the self-loops' weights, and the weight of the last self-loop
            (0 without a self-loop); ``(R, 5)`` float64. Without edge weights the first two columns only.
    """

    # not a dataclass, for the same reason as Shard
    def __init__(
        self,
        *,
        num_hops: int,
        ends: tuple[int, ...],
        n_id: Tensor,
        adjacency: Adjacency,
        e_id: Tensor,
        x: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
        edge_type: Tensor | None,
        in_degree: Tensor,
    ) -> None:
        self.num_hops, self.ends = num_hops, ends
        self.n_id, self.adjacency, self.e_id, self.x = n_id, adjacency, e_id, x
        self.edge_weight, self.edge_attr, self.edge_type = edge_weight, edge_attr, edge_type
        self.in_degree = in_degree

    def __repr__(self) -> str:
        return f"Surroundings(rows within 0 to {self.num_hops} hops: {self.ends}, {self.adjacency.size(1)} edges)"

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], num_owned: int) -> Surroundings:
        """Wrap the arrays of one part of a *replicas* or *edges* store, from :func:`~pygdist.graph.open_part`."""
        per_hop = arrays["recv_counts"].sum(axis=1).tolist()
        return Surroundings(
            num_hops=len(per_hop),
            ends=tuple(np.cumsum([num_owned, *per_hop]).tolist()),
            in_degree=as_tensor(arrays["in_degree"]),
            **rows_and_edges(arrays),
        )

    def to(self, device: torch.device | str) -> Surroundings:
        """Return a copy on ``device``."""
        moved = {name: value.to(device) for name, value in vars(self).items() if is_plain(value)}
        return self.replace(adjacency=self.adjacency.to_device(device), **moved)

    def astype(self, dtype: torch.dtype) -> Surroundings:
        """Return a copy with features and float edge values in ``dtype``; ``in_degree`` stays float64."""
        floats = floats_unlike(self, ("x", *EDGE_FIELDS), dtype)
        return self.replace(**{name: value.to(dtype) for name, value in floats.items()}) if floats else self

    def replace(self, **changes: Any) -> Surroundings:
        """Return a shallow copy with some attributes changed."""
        return Surroundings(**{**vars(self), **changes})


def floats_unlike(graph: Any, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return those fields of a graph that are floating point numbers of another type than ``dtype``.

    Labels (``y``) are left out for a half precision: a loss of rounded labels would be the loss of other labels.
    """
    names = [name for name in names if name != "y" or dtype.itemsize >= 4]
    values = {name: getattr(graph, name, None) for name in names}
    return {
        name: value
        for name, value in values.items()
        if value is not None and value.is_floating_point() and value.dtype != dtype
    }


def rows_and_edges(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Turn the arrays of a part into ``n_id``, ``adjacency``, ``e_id``, ``x`` and values of edges.

    Destinations are the rows of ``indptr``, sources are all rows. Missing values of edges are ``None``; without
    features ``x`` has no columns.
    """
    indptr, n_id = as_tensor(arrays["indptr"]), as_tensor(arrays["n_id"])
    csr = CSR(indptr, as_tensor(arrays["src"]).to(narrowest(n_id.numel())), n_id.numel())
    return {
        "n_id": n_id,
        "adjacency": Adjacency.from_csr(csr),
        "e_id": as_tensor(arrays["e_id"]),
        "x": as_tensor(arrays["x"]) if "x" in arrays else torch.empty(indptr.numel() - 1, 0),
        **{name: as_tensor(arrays[name]) if name in arrays else None for name in EDGE_FIELDS},
    }


def first_hop(arrays: Mapping[str, np.ndarray], num_owned: int) -> dict[str, np.ndarray]:
    """Return the arrays of placement *nodes* as views of the arrays of *replicas*, which begin with them."""
    recv_counts, send_counts = arrays["recv_counts"][0], arrays["send_counts"][0]
    num_rows, num_edges = num_owned + int(recv_counts.sum()), int(arrays["indptr"][num_owned])
    lengths = {"n_id": num_rows, "indptr": num_owned + 1, "x": num_owned, "send_index": int(send_counts.sum())}
    lengths |= dict.fromkeys(("src", "e_id", *EDGE_FIELDS), num_edges)
    views = {name: value[: lengths.get(name)] for name, value in arrays.items() if name != "in_degree"}
    return {**views, "recv_counts": recv_counts, "send_counts": send_counts}


def with_all_edges(arrays: Mapping[str, np.ndarray], num_owned: int) -> dict[str, np.ndarray]:
    """Return the arrays of placement *edges* as a shard holds them: features of owned rows, and all edges here."""
    views = {name: value for name, value in arrays.items() if name != "in_degree"}
    views |= {"x": arrays["x"][:num_owned]} if "x" in arrays else {}
    return {**views, "recv_counts": arrays["recv_counts"][0], "send_counts": arrays["send_counts"][0]}


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array of a store as a tensor over the same memory."""
    # the store maps copy-on-write, so an in-place operation of a user never reaches the file
    return torch.from_numpy(np.asarray(array))


def is_plain(value: object) -> bool:
    """Tell if the value of a field is a tensor other than the edges."""
    return isinstance(value, Tensor) and not isinstance(value, Adjacency)
