"""How one part of a graph is cut into mini-batches: the extension point, and what all ways of doing so share.

A part is a graph of its own to a sampler: rows that the rank owns, rows that it holds copies of, and the edges into
them. Nothing here knows of ranks, and nothing is communicated; ranks take other batches if they give other seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS
from pygdist.kernels import CSR
from pygdist.sampler import _native
from pygdist.sampler.epoch import SharedEpoch

__all__ = ["BatchLoader", "MiniBatches", "check_at_least", "check_part", "induced", "load_all"]

_ROW_FIELDS = ("x", "y", "train_mask", "node_norm", "in_degree")
_EDGE_FIELDS = (*EDGE_FIELDS, "edge_norm")


class BatchLoader:
    """An epoch's mini-batches; iterate once an epoch, after :meth:`set_epoch`.

    Batches depend on the seed and the epoch alone: not on the number of workers, nor on torch's random state, which
    stays as it is. Workers find nodes and edges; rows are looked up where they are used, as they are much more to send:
    with a worker that sent 128 features of each, an epoch took five times as long as without any.

    Args:
        part: See :meth:`MiniBatches.loader`.
        batches: What finds nodes and edges; its length is known.
        epoch: What it reads the number of the epoch from.
    """

    def __init__(self, part: Data, batches: Batches, epoch: SharedEpoch) -> None:
        self._part, self._batches, self._epoch = part, batches, epoch

    def set_epoch(self, epoch: int) -> None:
        """Draw the batches of that epoch from the next iteration on; before the first call it is epoch 0."""
        self._epoch.number = epoch

    def __len__(self) -> int:
        """The number of batches in every epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Data]:
        for batch in self._batches:
            yield _filled(batch, self._part)


class Batches(Sized, Iterable[Data], Protocol):
    """What a loader iterates over: ``edge_index``, ``n_id`` and ``e_id``, and ``batch_size`` where seeds come first."""


class MiniBatches(ABC):
    """How one part of a graph is cut into mini-batches.

    Subclass it and write :meth:`loader`, and :meth:`precompute` if much must be found out about a part first. A batch
    is a PyG ``Data`` with

    - ``n_id``: its nodes, as rows of the part; ``x`` and ``y`` of these
    - ``edge_index``: its edges, in places of ``n_id``; ``e_id``: the same in the caller's order of edges; and their
      ``edge_weight``, ``edge_attr`` and ``edge_type``
    - ``train_mask``: the rows whose loss counts
    - perhaps ``node_norm``, a weight of each row's loss, and ``edge_norm``, a weight of each edge in the aggregation,
      with ``in_degree``, the edges into each row in the whole part
    - of sampled neighbourhoods ``batch_size``, the seeds, which are the first rows, and PyG's ``num_sampled_nodes`` and
      ``num_sampled_edges``, by hop
    """

    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        """What takes long to find out about a part and is the same in every epoch; nothing by default.

        Who cuts a part again, because others were in memory meanwhile, keeps it and puts it back into ``part``: where
        the fields are there, :meth:`loader` takes them as they are.

        Args:
            part: As for :meth:`loader`.
            csr: The same.
            seed: The same.

        Returns:
            Fields of ``part`` on the CPU, with a value for each row or edge.

        Raises:
            InputError: As :meth:`loader`.
        """
        return {}

    @abstractmethod
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """The mini-batches of a part.

        Args:
            part: Owned rows, then copies of others' rows: ``x``, perhaps ``y``, ``train_mask`` (true on owned training
                nodes only), and perhaps edge inputs in the caller's order of edges, and what :meth:`precompute` gave.
            csr: In-edges of these rows, as many rows as columns, on the CPU.
            seed: Of all that is drawn.
            num_workers: Processes that make batches ahead; 0 makes them when they are asked for.

        Shapes:
            ``x`` is :math:`(n, F)`, ``y`` :math:`(n)` or :math:`(n, C)`, ``train_mask`` :math:`(n)` bool, edge inputs
            :math:`(E, ...)`.

        Returns:
            The batches; none where no node trains.

        Raises:
            InputError: If part and matrix do not fit, or something that is needed is not installed.
        """


def check_at_least(name: str, value: int, least: int = 1) -> int:
    """The value itself.

    Raises:
        InputError: If it is less than ``least``.
    """
    if value < least:
        raise InputError(f"{name} is {value}, expected at least {least}")
    return value


def check_part(part: Data, csr: CSR) -> Tensor:
    """Refuse a part and a matrix that do not fit each other.

    Returns:
        The training nodes, as rows of the part, ascending.

    Raises:
        InputError: If rows, edges or the mask are not as many as they should be.
    """
    if not csr.num_rows == csr.num_cols == part.num_nodes:
        raise InputError(
            f"mini-batches: the part has {part.num_nodes} rows, the matrix of its in-edges is {csr.num_rows} by "
            f"{csr.num_cols}; all three must be the same"
        )
    mask = part.get("train_mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (csr.num_rows,):
        raise InputError(f"mini-batches: train_mask must be bool with a value for each of {csr.num_rows} rows")
    for names, count, of in (
        (_EDGE_FIELDS, csr.num_entries, "edges"),
        (("node_norm", "cluster"), csr.num_rows, "rows"),
    ):
        for name in names:
            values = part.get(name)
            if values is not None and values.size(0) != count:
                raise InputError(f"mini-batches: {name} has {values.size(0)} values for {count} {of}")
    return mask.nonzero().view(-1)


def _filled(batch: Data, part: Data) -> Data:
    """A batch with all that the part knows of its nodes and edges."""
    for name in (*_ROW_FIELDS, *_EDGE_FIELDS):
        values = part.get(name)
        if values is not None:
            batch[name] = values[batch.n_id if name in _ROW_FIELDS else batch.e_id]
    seeds = batch.get("batch_size")
    if seeds is not None:
        batch.train_mask = torch.arange(batch.n_id.numel()) < seeds
    return batch


def induced(csr: CSR, nodes: Tensor) -> Data:
    """The batch of ``nodes`` and all edges among them."""
    found = _native.induce(csr, nodes)
    edge_index = torch.stack([found.source, found.target])
    return Data(edge_index=edge_index, n_id=nodes, e_id=found.edge, num_nodes=nodes.numel())


def load_all(batches: Dataset[Data], num_workers: int) -> DataLoader[Data]:
    """A loader of ready-made batches, in their order.

    Raises:
        InputError: If there are fewer than no workers.
    """
    check_at_least("num_workers", num_workers, 0)
    # a generator of its own: else the loader would draw its workers' seeds from torch's random state
    arguments = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "generator": torch.Generator()}
    return DataLoader(batches, batch_size=None, **arguments)  # type: ignore[arg-type]
