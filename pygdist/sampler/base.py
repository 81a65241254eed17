"""The base class of mini-batch samplers, and the functions that all samplers share.

A sampler sees one part as a graph: rows that the rank owns, rows of which it holds copies, and the edges into them.
Ranks get different batches by passing different seeds. Neighbourhoods that cross parts are sampled by all ranks
together (:meth:`MiniBatches.across_ranks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.graph.check import EDGE_FIELDS
from pygdist.kernels import CSR
from pygdist.sampler import _native
from pygdist.sampler.epoch import SharedEpoch
from pygdist.sampler.steps import Fields, Steps

_ROW_FIELDS = ("x", "y", "train_mask", "node_norm", "in_degree")
_EDGE_FIELDS = (*EDGE_FIELDS, "edge_norm")


class BatchLoader:
    """The mini-batches of an epoch, from :meth:`MiniBatches.loader`; call :meth:`set_epoch`, then iterate once.

    Batches depend on the seed and the epoch alone (with ``library="pyg"`` also on the number of workers). Sampling
    neither uses nor changes torch's random state. Workers send nodes and edges to the main process, which adds the rows
    of nodes. Rows are much larger: with a worker that sent 128 features per node, an epoch took five times as long as
    without workers.
    """

    def __init__(self, part: Data, batches: Batches, epoch: SharedEpoch) -> None:
        self._part, self._batches, self._epoch = part, batches, epoch

    def set_epoch(self, epoch: int) -> None:
        """Make later iterations draw the batches of this epoch; before the first call the epoch is 0."""
        self._epoch.number = epoch

    def __len__(self) -> int:
        """Return the number of batches in every epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Data]:
        for batch in self._batches:
            yield _filled(batch, self._part)


class Batches(Sized, Iterable[Data], Protocol):
    """Batches with ``edge_index``, ``n_id`` and ``e_id``, and with ``batch_size`` if seeds come first."""


class MiniBatches(ABC):
    """Divides one part of a graph into mini-batches.

    To write a sampler, subclass this class and write :meth:`loader`. Write :meth:`precompute` too, if a part needs a
    long preparation. A batch is a PyG ``Data`` with

    - ``n_id``: the batch's nodes, as rows of the part; ``x`` and ``y`` of these nodes
    - ``edge_index``: the batch's edges, as positions in ``n_id``; ``e_id``: positions of these edges in the caller's
      order of edges; and ``edge_weight``, ``edge_attr`` and ``edge_type`` of these edges
    - ``train_mask``: the rows whose loss counts
    - optionally ``node_norm``, a weight for each row's loss, and ``edge_norm``, a weight for each edge in the
      aggregation, with ``in_degree``, the number of edges into each row in the whole part
    - for sampled neighbourhoods ``batch_size``, the number of seeds, which are the first rows, and PyG's
      ``num_sampled_nodes`` and ``num_sampled_edges``, by hop

    Batches :meth:`across_ranks` differ: ``n_id`` and ``e_id`` are ids in the whole graph, there is no
    ``train_mask``, and ``y`` is there for seeds that are training nodes only.

    Attributes:
        of_edges: True if a batch has pairs of nodes to learn, False if it has nodes.
    """

    of_edges: ClassVar[bool] = False

    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        """Compute fields of a part that take long and are the same in every epoch; by default there are none.

        If several parts take turns in memory, the caller stores these fields and adds the fields to ``part`` when the
        part is open again. :meth:`loader` then does not compute the fields. Arguments and errors are those of
        :meth:`loader`.

        Returns:
            Fields of ``part`` on the CPU, with a value for each row or edge.
        """
        return {}

    def across_ranks(self, shard: Shard, fields: Fields, communicator: Communicator, *, seed: int) -> Steps:
        """Return mini-batches whose neighbourhoods cross the parts of the graph; every rank makes the call.

        Args:
            shard: This rank's part of the graph, on the CPU.
            fields: Fetches the fields of nodes and edges.
            communicator: The ranks; for exchanges of the thread that iterates over the batches.
            seed: Seed of all random numbers.

        Raises:
            InputError: If batches of this kind never cross parts.
        """
        raise InputError(
            f"{type(self).__name__} divides one part of a graph, but the model's backend samples across parts; use "
            "NeighborBatches, or EdgeBatches for links"
        )

    @abstractmethod
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """Return the mini-batches of a part; none if it has no training node.

        Args:
            part: Owned rows, then copies of other ranks' rows: ``x`` :math:`(n, F)`, ``train_mask`` :math:`(n)` bool
                (true on owned training nodes only), and optionally ``y`` :math:`(n)` or :math:`(n, C)`, values of edges
                :math:`(E, ...)` in the caller's order of edges, and the fields of :meth:`precompute`.
            csr: In-edges of the rows of ``part``, a square matrix on the CPU.
            seed: Seed of all random numbers.
            num_workers: Processes that make batches ahead; 0 makes each batch when it is needed.

        Raises:
            InputError: If ``part`` and ``csr`` do not fit each other, or a library is not installed.
        """


def check_at_least(name: str, value: int, least: int = 1) -> int:
    """Return the value; refuse one below ``least``."""
    if value < least:
        raise InputError(f"{name} is {value}, expected at least {least}")
    return value


def check_part(part: Data, csr: CSR) -> Tensor:
    """Refuse a part and a matrix that do not fit each other; return the rows of training nodes, ascending."""
    if not csr.num_rows == csr.num_cols == part.num_nodes:
        raise InputError(
            f"mini-batches: the part has {part.num_nodes} rows, the matrix of its in-edges is {csr.num_rows} by "
            f"{csr.num_cols}; all three must be the same"
        )
    mask = part.get("train_mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (csr.num_rows,):
        raise InputError(f"mini-batches: train_mask must be bool with a value for each of {csr.num_rows} rows")
    for names, count, unit in (
        (_EDGE_FIELDS, csr.num_entries, "edges"),
        (("node_norm", "cluster"), csr.num_rows, "rows"),
    ):
        for name in names:
            values = part.get(name)
            if values is not None and values.size(0) != count:
                raise InputError(f"mini-batches: {name} has {values.size(0)} values for {count} {unit}")
    return mask.nonzero().view(-1)


def _filled(batch: Data, part: Data) -> Data:
    """Add the part's fields of the nodes and edges to a batch."""
    for name in (*_ROW_FIELDS, *_EDGE_FIELDS):
        values = part.get(name)
        if values is not None:
            batch[name] = values[batch.n_id if name in _ROW_FIELDS else batch.e_id]
    seeds = batch.get("batch_size")
    if seeds is not None:
        batch.train_mask = torch.arange(batch.n_id.numel()) < seeds
    return batch


class InducedBatches(Dataset[Data]):
    """The batches of an epoch by number, each with some nodes and all edges among them.

    ``nodes_of`` returns the nodes of a batch, ascending: owned rows first, as in the part.
    """

    def __init__(self, csr: CSR, count: int, nodes_of: Callable[[int], Tensor]) -> None:
        self._csr, self._count, self._nodes_of = csr, count, nodes_of

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Data:
        nodes = self._nodes_of(number)
        graph = _native.induce(self._csr, nodes)
        edge_index = torch.stack([graph.source, graph.target])
        return Data(edge_index=edge_index, n_id=nodes, e_id=graph.edge, num_nodes=nodes.numel())


def load_all(batches: Dataset[Data], num_workers: int) -> DataLoader[Data]:
    """Return a loader of ready-made batches, in their order."""
    check_at_least("num_workers", num_workers, 0)
    # a generator of its own: else the loader would draw its workers' seeds from torch's random state
    arguments = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "generator": torch.Generator()}
    return DataLoader(batches, batch_size=None, **arguments)  # type: ignore[arg-type]
