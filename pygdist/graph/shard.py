"""What one rank holds of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygdist.comm import ExchangePlan
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.store import open_part, read_meta
from pygdist.kernels.csr import CSR, narrowest

__all__ = ["Shard"]


class Shard:
    r"""One rank's rows, their in-edges, and the plan that fetches what they need (placement *nodes*).

    Attributes:
        rank: The part held.
        num_parts: Parts in all.
        n_id: Global ids of the rows, owned first, then halo grouped by owner; ``(n + h,)`` int64.
        num_owned: Number of owned rows, :math:`n`.
        adjacency: In-edges of the owned rows in local ids, from :math:`n + h` sources to :math:`n` destinations.
        e_id: Global position of each edge, in the order of ``adjacency``.
        plan: Who sends which rows to whom.
        x: Features of the owned rows, ``(n, num_features)``.
        y: Labels of the owned rows, ``(n,)`` int64 with -1 for unlabelled, or ``(n, num_classes)`` float.
        train_mask, val_mask, test_mask: Owned rows that count in each stage, ``(n,)`` bool.
        edge_weight, edge_attr, edge_type: Per edge, in the order of ``adjacency``; ``None`` if the graph has none.
        num_nodes, num_edges, num_classes, multi_label: Of the whole graph.
        counts: Labelled nodes of the whole graph by mask name.
        val_edges, test_edges: Edges that were held out (:func:`~pygdist.graph.links.hold_out`): source and target in
            local ids, and global position, ``(3, k)`` int64; ``None`` where none were.
        folder: Where the partitioned graph is kept; ``None`` if it is in memory alone.
    """

    # no dataclass: Lightning's precision plugins copy those field by field in every step, memory maps included
    def __init__(
        self,
        *,
        rank: int,
        num_parts: int,
        n_id: Tensor,
        num_owned: int,
        adjacency: Adjacency,
        e_id: Tensor,
        plan: ExchangePlan,
        x: Tensor,
        y: Tensor | None,
        train_mask: Tensor | None,
        val_mask: Tensor | None,
        test_mask: Tensor | None,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
        edge_type: Tensor | None,
        num_nodes: int,
        num_edges: int,
        num_classes: int,
        multi_label: bool,
        counts: Mapping[str, int],
        val_edges: Tensor | None = None,
        test_edges: Tensor | None = None,
        folder: Path | None = None,
    ) -> None:
        self.rank, self.num_parts = rank, num_parts
        self.n_id, self.num_owned = n_id, num_owned
        self.adjacency, self.e_id, self.plan = adjacency, e_id, plan
        self.x, self.y = x, y
        self.train_mask, self.val_mask, self.test_mask = train_mask, val_mask, test_mask
        self.edge_weight, self.edge_attr, self.edge_type = edge_weight, edge_attr, edge_type
        self.num_nodes, self.num_edges = num_nodes, num_edges
        self.num_classes, self.multi_label, self.counts = num_classes, multi_label, counts
        self.val_edges, self.test_edges = val_edges, test_edges
        self.folder = folder

    def __repr__(self) -> str:
        return (
            f"Shard({self.rank} of {self.num_parts}: {self.num_owned} nodes, {self.num_halo} halo rows, "
            f"{self.adjacency.size(1)} edges)"
        )

    @property
    def num_halo(self) -> int:
        """Copies of other ranks' rows that one hop needs."""
        return self.n_id.numel() - self.num_owned

    @property
    def owned_id(self) -> Tensor:
        """Global ids of the owned rows, ascending."""
        return self.n_id[: self.num_owned]

    @staticmethod
    def load(folder: str | Path, rank: int, *, num_parts: int | None = None) -> Shard:
        """Map one part of an on-disk store (:mod:`pygdist.graph.store`); features stay memory-mapped.

        Raises:
            InputError: If the store is missing, corrupted, or was made for another number of parts.
        """
        meta = read_meta(folder)
        if meta["placement"] != "nodes":
            raise InputError(
                f"{folder}: holds halos of {meta['num_hops']} hops (placement {meta['placement']}), but this needs "
                "those of one hop (placement nodes): partition with --hops 1"
            )
        arrays = open_part(folder, rank, num_parts=num_parts)
        return Shard.from_arrays(arrays, meta, rank, folder=Path(folder))

    @staticmethod
    def from_arrays(
        arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], rank: int, *, folder: Path | None = None
    ) -> Shard:
        """A shard over the arrays of one part, as :func:`pygdist.graph.store.open_part` gives them."""
        indptr, n_id = _tensor(arrays["indptr"]), _tensor(arrays["n_id"])
        num_owned = indptr.numel() - 1
        csr = CSR(indptr, _tensor(arrays["src"]).to(narrowest(n_id.numel())), n_id.numel())
        optional = {
            name: _tensor(arrays[name]) if name in arrays else None for name in ("x", "y", *MASKS, *EDGE_FIELDS)
        }
        if optional["x"] is None:
            optional["x"] = torch.empty(num_owned, 0)
        plan = ExchangePlan(
            send_index=_tensor(arrays["send_index"]).long(),
            send_counts=tuple(arrays["send_counts"].tolist()),
            recv_counts=tuple(arrays["recv_counts"].tolist()),
        )
        return Shard(
            rank=rank,
            num_parts=int(meta["num_parts"]),
            n_id=n_id,
            num_owned=num_owned,
            adjacency=Adjacency.from_csr(csr),
            e_id=_tensor(arrays["e_id"]),
            plan=plan,
            num_nodes=int(meta["num_nodes"]),
            num_edges=int(meta["num_edges"]),
            num_classes=int(meta["num_classes"]),
            multi_label=bool(meta["multi_label"]),
            counts={mask: int(meta["counts"].get(mask, 0)) for mask in MASKS},
            folder=folder,
            **optional,  # type: ignore[arg-type]
        )

    def to(self, device: torch.device | str, **_: Any) -> Shard:
        """The shard on ``device``; itself if it is there. Lightning calls this for each batch."""
        device = torch.device(device)
        if self.x.device == device or (self.x.device.type == device.type and device.index is None):
            return self
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not isinstance(value, Adjacency)
        }
        return self.replace(adjacency=self.adjacency.to_device(device), plan=self.plan.to(device), **moved)

    def astype(self, dtype: torch.dtype) -> Shard:
        """The shard with features, edge inputs and several labels per node in ``dtype``; itself if they are."""
        floats = {
            name: value.to(dtype)
            for name in ("x", "y", *EDGE_FIELDS)
            if (value := getattr(self, name)) is not None and value.is_floating_point() and value.dtype != dtype
        }
        return self.replace(**floats) if floats else self

    def replace(self, **changes: Any) -> Shard:
        """A shallow copy with some attributes changed."""
        return Shard(**{**vars(self), **changes})


def _tensor(array: np.ndarray) -> Tensor:
    # the store maps copy-on-write: an in-place operation of a user stays in this process and never reaches the file
    return torch.from_numpy(np.asarray(array))
