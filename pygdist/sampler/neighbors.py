"""Batches of sampled neighbourhoods (GraphSAGE, Hamilton et al. 2017; CATGNN, Sec. 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric import typing as pyg_typing
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NeighborSampler
from typing_extensions import override

from pygdist.comm import Communicator
from pygdist.errors import InputError, pyg_wheels
from pygdist.graph import Shard
from pygdist.kernels import CSR
from pygdist.native import load
from pygdist.sampler import _native
from pygdist.sampler.across_ranks import DistributedNeighborSampler
from pygdist.sampler.base import BatchLoader, MiniBatches, check_at_least, check_part, load_all
from pygdist.sampler.csr_neighbors import CSRNeighborSampler, check_fan_out, check_seed
from pygdist.sampler.epoch import SharedEpoch, ShuffledOrder
from pygdist.sampler.steps import Fields, NodeSteps

Library = Literal["auto", "native", "pyg"]


class NeighborBatches(MiniBatches):
    """Batches of training nodes with neighbours sampled hop by hop; each training node is in one batch of an epoch.

    Args:
        fan_out: For each hop (each layer of the model), the largest number of sampled edges into a node; -1 takes all
            edges.
        batch_size: Number of training nodes in a batch; the last batch of an epoch may have fewer. Across ranks,
            batches have about equal sizes, at most ``batch_size``.
        replace: Draw neighbours with replacement.
        shuffle: Group the training nodes into other batches in each epoch.
        library: ``native`` samples with :class:`CSRNeighborSampler`. ``pyg`` samples with PyG's ``NeighborSampler``,
            which needs pyg-lib or torch_sparse and copies the edges (16 bytes each); its random numbers, so also the
            neighbours, depend on the number of workers. ``auto`` takes ``native`` if the native library was built, and
            else ``pyg``. Across ranks ``pyg`` is refused.

    Raises:
        InputError: If a number is out of range or ``library`` is unknown; on loading, if the library is not installed.

    Example:
        >>> batches = NeighborBatches([25, 10], batch_size=512).loader(part, csr, seed=0, num_workers=2)
        >>> for batch in batches:
        ...     out = model(batch.x, batch.edge_index)
        ...     loss = cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
    """

    def __init__(
        self,
        fan_out: Sequence[int] = (25, 10),
        batch_size: int = 512,
        replace: bool = False,
        shuffle: bool = True,
        library: Library = "auto",
    ) -> None:
        self.fan_out = check_fan_out("fan_out", fan_out)
        self.batch_size = check_at_least("batch_size", batch_size)
        self.replace, self.shuffle, self.library = replace, shuffle, library
        if library not in get_args(Library):
            raise InputError(f"library is '{library}', expected one of {', '.join(get_args(Library))}")

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """See :meth:`MiniBatches.loader`."""
        seeds, epoch = check_part(part, csr), SharedEpoch()
        check_at_least("num_workers", num_workers, 0)
        sampler = self._sampler(csr, check_seed(seed), epoch)
        if not seeds.numel():
            return BatchLoader(part, [], epoch)
        # without the part's fields: PyG tells those of nodes from those of edges by their length
        nodes = NodeLoader(Data(edge_index=torch.empty(2, 0).long(), num_nodes=csr.num_rows), sampler, seeds)
        order = ShuffledOrder(seeds.numel(), seed, shuffle=self.shuffle)
        perm = None if isinstance(sampler, CSRNeighborSampler) else csr.perm
        return BatchLoader(
            part, load_all(_Neighborhoods(nodes, order, epoch, self.batch_size, perm), num_workers), epoch
        )

    @override
    def across_ranks(self, shard: Shard, fields: Fields, communicator: Communicator, *, seed: int) -> NodeSteps:
        """See :meth:`MiniBatches.across_ranks`."""
        if self.library == "pyg":
            raise InputError("library 'pyg' samples one part of a graph; across parts use library 'native'")
        sampler = sampler_of(fields, self.fan_out, replace=self.replace, seed=check_seed(seed))
        y, mask = shard.y, shard.train_mask
        if y is None or mask is None or not shard.counts["train_mask"]:
            raise InputError("the graph has no labelled nodes for stage 'train' (train_mask)")
        labelled = mask & (y >= 0 if y.dim() == 1 else ~torch.isnan(y).flatten(1).any(dim=1))
        seeds = labelled.nonzero().view(-1)
        order = ShuffledOrder(seeds.numel(), seed, shuffle=self.shuffle)
        return NodeSteps(shard.owned_id[seeds], y[seeds], self.batch_size, order, fields, sampler, communicator)

    def _sampler(self, csr: CSR, seed: int, epoch: SharedEpoch) -> BaseSampler:
        native = self.library == "native" or (self.library == "auto" and load() is not None)
        installed = pyg_typing.WITH_PYG_LIB or pyg_typing.WITH_TORCH_SPARSE
        if native or (self.library == "auto" and not installed):
            _native.require("NeighborBatches", csr, ", or install pyg-lib or torch_sparse")
            sampler = CSRNeighborSampler(csr, self.fan_out, replace=self.replace, seed=seed)
            sampler.epoch = epoch
            return sampler
        if not installed:
            raise InputError(
                "library 'pyg' needs pyg-lib or torch_sparse, neither is installed; use 'native', or install one: "
                + pyg_wheels("torch_sparse", "torch_scatter")
            )
        edges = torch.stack([csr.index.to(torch.int64), csr.row_index().to(torch.int64)])
        data = Data(edge_index=edges, num_nodes=csr.num_rows)
        return NeighborSampler(data, num_neighbors=self.fan_out, replace=self.replace, is_sorted=True)


class _Neighborhoods(Dataset[Data]):
    """The batches of an epoch by number.

    PyG's loader makes a batch when it is called. It does not iterate itself: it holds a cycle of references, so its
    persistent workers would be told to end only after their queues are gone, which takes 5 seconds for each.
    """

    def __init__(
        self, nodes: NodeLoader, order: ShuffledOrder, epoch: SharedEpoch, batch_size: int, perm: Tensor | None
    ) -> None:
        self._nodes, self._order, self._epoch, self._batch_size, self._perm = nodes, order, epoch, batch_size, perm

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch_size)

    def __getitem__(self, number: int) -> Data:
        chosen = self._order.of(self._epoch.number)[number * self._batch_size : (number + 1) * self._batch_size]
        made = self._nodes(chosen.tolist())
        batch = Data(edge_index=made.edge_index, n_id=made.n_id, e_id=made.e_id, num_nodes=made.n_id.numel())
        if self._perm is not None:
            batch.e_id = self._perm[batch.e_id].to(torch.int64)
        for name in ("batch_size", "num_sampled_nodes", "num_sampled_edges"):
            if name in made:  # torch_sparse does not count
                batch[name] = made[name]
        return batch


def sampler_of(fields: Fields, fan_out: Sequence[int], *, replace: bool, seed: int) -> DistributedNeighborSampler:
    """Return a sampler over the parts of all ranks, which make the call together."""
    held = fields.topology
    return DistributedNeighborSampler(
        held.csr, held.column_id, held.owners, held.communicator, fan_out, replace=replace, seed=seed
    )
