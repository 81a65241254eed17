"""One rank's part of the graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygdist.comm import ExchangePlan
from pygdist.display import bars, card, said_bytes
from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.clones import Clones
from pygdist.graph.sources.whole import OF_NODES
from pygdist.graph.store.meta import open_part, read_meta
from pygdist.graph.store.part_files import PLACEMENTS
from pygdist.graph.surroundings import (
    Surroundings,
    as_tensor,
    first_hop,
    floats_unlike,
    is_plain,
    rows_and_edges,
    with_all_edges,
)
from pygdist.memory.ring import uploaded


class Shard:
    r"""One rank's rows, their in-edges, and the plan to fetch halo rows.

    Attributes:
        rank: Number of the part.
        num_parts: Number of parts.
        n_id: Global ids of the rows, owned first, then halo grouped by owner; ``(n + h,)`` int64.
        num_owned: Number of owned rows, :math:`n`.
        adjacency: In-edges of the owned rows in local ids, from :math:`n + h` sources to :math:`n` destinations.
        e_id: Global position of each edge, in the order of ``adjacency``.
        plan: The rows that this rank sends to each other rank, and receives from each.
        x: Features of the owned rows, ``(n, num_features)``.
        y: Labels of the owned rows: classes, ``(n,)`` int64 with -1 for unlabelled; several labels per node,
            ``(n, num_classes)`` float (``multi_label``); or numbers to predict, ``(n, k)`` or with more dimensions.
        train_mask, val_mask, test_mask: Owned rows of each stage, ``(n,)`` bool.
        edge_weight, edge_attr, edge_type: Per edge, in the order of ``adjacency``; ``None`` if the graph has none.
        num_nodes, num_edges, num_classes, multi_label: Of the whole graph.
        counts: Labelled nodes of the whole graph by mask name.
        val_edges, test_edges: Held-out edges (:func:`~pygdist.graph.links.hold_out`): source and target in local ids,
            and global position, ``(3, k)`` int64; ``None`` if no edges were held out.
        folder: The store; ``None`` if the graph is only in memory.
        surroundings: Under placements *replicas* and *edges*: all rows of the part. The shard's ``x``, ids and values
            of edges are views of the first rows of ``surroundings``. Otherwise ``None``.
        node_inputs: Further tensors of nodes by name, such as ``pos``: a row for each owned node.
        columns: Under placement *columns*: this rank's columns of the features of all nodes, ``(num_nodes, c)``, by
            global id; ``x`` is then NaN in every entry and takes no memory. Otherwise ``None``.
        clones: Under placement *edges*: the exchanges between the rows of a node that is in several parts;
            ``adjacency`` then holds the edges of this part, with :math:`n + h` rows on both sides. Otherwise ``None``.
    """

    # not a dataclass, since Lightning's precision plugins copy these field by field in every step, memory maps included
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
        surroundings: Surroundings | None = None,
        clones: Clones | None = None,
        columns: Tensor | None = None,
        node_inputs: Mapping[str, Tensor] | None = None,
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
        self.folder, self.surroundings, self.clones, self.columns = folder, surroundings, clones, columns
        self.node_inputs = node_inputs or {}

    def __repr__(self) -> str:
        return (
            f"Shard({self.rank} of {self.num_parts}: {self.num_owned} nodes, {self.num_halo} halo rows, "
            f"{self.adjacency.size(1)} edges)"
        )

    def _repr_html_(self) -> str:
        return self.shown(f"Part {self.rank} of {self.num_parts}")

    def shown(self, title: str, **more: object) -> str:
        """Return a card for notebooks; no value of a node or edge is read.

        Args:
            title: Title of the card.
            **more: Further figures, by name.
        """
        counts = (f"{count:,} {name.removesuffix('_mask')}" for name, count in self.counts.items())
        figures = {
            "nodes": f"{self.num_owned:,} of {self.num_nodes:,}",
            "halo rows": self.num_halo,
            "edges": f"{self.adjacency.csr().num_entries:,} of {self.num_edges:,}",
            "features": self.x.size(1),
            "classes": self.num_classes,
            "labelled in the graph": ", ".join(counts),
            "device": str(self.x.device),
            "size": said_bytes(self._num_bytes()),
        }
        plot = bars({"rows sent": self.plan.send_counts, "rows received": self.plan.recv_counts}, each="other part")
        return card(title, figures | more, plot)

    def _num_bytes(self) -> int:
        """Return the bytes of all fields, in memory or mapped; memory that fields share counts once."""
        csr = self.adjacency.csr()
        around = () if self.surroundings is None else vars(self.surroundings).values()
        tensors = [value for value in (*vars(self).values(), *around) if is_plain(value)]
        storages = (tensor.untyped_storage() for tensor in (*tensors, csr.indptr, csr.index))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def edge_index(self) -> Tensor:
        """Raise an ``AttributeError`` that names :attr:`adjacency`, whose ids are local."""
        raise AttributeError(
            "a part has no edge_index: call a distributed model with shard.adjacency in its place; inside a module of "
            "pygdist, call self(shard)"
        )

    @property
    def num_halo(self) -> int:
        """Number of other ranks' rows that one hop reads."""
        return self.n_id.numel() - self.num_owned

    @property
    def value_bytes(self) -> int:
        """Bytes of one number of a row in a hop, in the type of ``x`` or, for integers, in torch's default type."""
        return (self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()).itemsize

    @property
    def owned_id(self) -> Tensor:
        """Global ids of the owned rows, ascending."""
        return self.n_id[: self.num_owned]

    @staticmethod
    def load(
        folder: str | Path,
        rank: int,
        *,
        num_parts: int | None = None,
        verify: bool = True,
        meta: Mapping[str, Any] | None = None,
    ) -> Shard:
        """Map one part of a store of any placement (:mod:`pygdist.graph.store.meta`); features stay memory-mapped.

        Arguments and errors are those of :func:`~pygdist.graph.open_part`; ``rank`` is its ``part``.
        """
        meta = read_meta(folder) if meta is None else meta
        arrays = open_part(folder, rank, num_parts=num_parts, verify=verify, meta=meta)
        return Shard.from_arrays(arrays, meta, rank, folder=Path(folder))

    @staticmethod
    def from_arrays(
        arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], rank: int, *, folder: Path | None = None
    ) -> Shard:
        """Wrap the arrays of one part, from :func:`pygdist.graph.open_part`."""
        surroundings, clones, placement = None, None, PLACEMENTS[meta["placement"]]
        num_owned = int(meta["parts"][rank]["num_owned"])
        if placement.has_surroundings:
            surroundings = Surroundings.from_arrays(arrays, num_owned)
        if placement.splits_nodes:
            clones = Clones.from_arrays(arrays, num_owned)
            arrays = with_all_edges(arrays, num_owned)
        elif placement.has_surroundings:
            arrays = first_hop(arrays, num_owned)
        columns = as_tensor(arrays["columns"]) if "columns" in arrays else None
        rows = rows_and_edges(arrays)
        if columns is not None:
            rows["x"] = unknown_rows(num_owned, int(meta["num_features"]), columns.dtype)
        plan = ExchangePlan(
            send_index=as_tensor(arrays["send_index"]).long(),
            send_counts=tuple(arrays["send_counts"].tolist()),
            recv_counts=tuple(arrays["recv_counts"].tolist()),
        )
        return Shard(
            rank=rank,
            num_parts=int(meta["num_parts"]),
            num_owned=num_owned,
            plan=plan,
            num_nodes=int(meta["num_nodes"]),
            num_edges=int(meta["num_edges"]),
            num_classes=int(meta["num_classes"]),
            multi_label=bool(meta["multi_label"]),
            counts={mask: int(meta["counts"].get(mask, 0)) for mask in MASKS},
            folder=folder,
            surroundings=surroundings,
            clones=clones,
            columns=columns,
            node_inputs={
                name.removeprefix(OF_NODES): as_tensor(one) for name, one in arrays.items() if name.startswith(OF_NODES)
            },
            **rows,
            **{name: as_tensor(arrays[name]) if name in arrays else None for name in ("y", *MASKS)},  # type: ignore[arg-type]
        )

    def to(self, device: torch.device | str, **_: Any) -> Shard:
        """Return the shard on ``device``, or itself if it is there. Lightning calls this for each batch.

        ``columns`` stay in their file, as they may be larger than the device.
        """
        device = torch.device(device)
        if self.x.device == device or (self.x.device.type == device.type and device.index is None):
            return self
        around = None if self.surroundings is None else self.surroundings.to(device)
        plain = [name for name, value in vars(self).items() if is_plain(value) and name != "columns"]
        moved = {name: self._converted(name, around, device) for name in plain}
        clones = None if self.clones is None else self.clones.to(device)
        adjacency, plan = self.adjacency.to_device(device), self.plan.to(device)
        inputs = {name: value.to(device) for name, value in self.node_inputs.items()}
        return self.replace(
            surroundings=around, clones=clones, adjacency=adjacency, plan=plan, node_inputs=inputs, **moved
        )

    def astype(self, dtype: torch.dtype) -> Shard:
        """Return the shard with features, float edge values and float labels converted to ``dtype``.

        Returns the shard itself if nothing needs converting. ``columns`` keep the type of their file. Half precision
        leaves labels as they are (:func:`~pygdist.graph.surroundings.floats_unlike`).
        """
        around = None if self.surroundings is None else self.surroundings.astype(dtype)
        names = floats_unlike(self, ("x", "y", *EDGE_FIELDS), dtype)
        floats: dict[str, Any] = {name: self._converted(name, around, dtype) for name in names}
        inputs = {name: one.to(dtype) if one.is_floating_point() else one for name, one in self.node_inputs.items()}
        if any(one is not self.node_inputs[name] for name, one in inputs.items()):
            floats["node_inputs"] = inputs
        return self.replace(surroundings=around, **floats) if floats or around is not self.surroundings else self

    def replace(self, **changes: Any) -> Shard:
        """Return a shallow copy with some attributes changed."""
        return Shard(**{**vars(self), **changes})

    def _converted(self, name: str, around: Surroundings | None, to: torch.device | torch.dtype) -> Tensor:
        """Convert a field; one that is a view of the surroundings becomes a view of the converted ones, ``around``."""
        value, whole = getattr(self, name), getattr(self.surroundings, name, None)
        if whole is not None:
            mine, theirs = ((one.data_ptr(), one.dtype, one.shape[1:], one.stride()) for one in (value, whole))
            if mine == theirs:  # the field was not replaced
                value = getattr(around, name)[: len(value)]
        return converted(value, to)


def is_unknown(x: Tensor) -> bool:
    """Tell if rows are those of :func:`unknown_rows`, or a part of them.

    On a GPU they are one number that is kept there, and known by its address: the host does not wait to look at it.
    """
    if not (x.dim() == 2 and x.stride() == (0, 0) and x.is_floating_point()):
        return False
    if x.is_cuda and x.numel():
        return x.data_ptr() == _number(x.device, x.dtype).data_ptr()
    return x.numel() == 0 or bool(x[0, 0].isnan())


def _number(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the number that stands for all unknown rows on a GPU."""
    return _made_number(torch.cuda.current_device() if device.index is None else device.index, dtype)


@functools.cache
def _made_number(gpu: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, 1), float("nan"), dtype=dtype, device=torch.device("cuda", gpu))


def converted(value: Tensor, to: torch.device | torch.dtype) -> Tensor:
    """Return a tensor on a device or in a type; unknown rows stay one number in memory."""
    device, dtype = (value.device, to) if isinstance(to, torch.dtype) else (to, value.dtype)
    if (value.numel() or device.type == "cuda") and is_unknown(value):
        number = _number(device, dtype) if device.type == "cuda" else value[:1, :1].to(to)
        return number.as_strided(value.shape, (0, 0))
    result: Tensor = value.to(to)
    return result


def moved(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, as :func:`uploaded` does; unknown rows stay one number in memory."""
    return converted(value, device) if is_unknown(value) else uploaded(value, device)


def unknown_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return rows whose features this rank does not hold: NaN, all in one number of memory."""
    dtype = dtype if dtype.is_floating_point and dtype != torch.float16 else torch.get_default_dtype()
    # not expand(), which gives a dimension of one another stride
    return torch.full((1, 1), float("nan"), dtype=dtype).as_strided((num_rows, width), (0, 0))
