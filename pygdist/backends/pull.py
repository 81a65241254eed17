"""``pull``: mini-batches sampled across ranks, whose feature rows are pulled from their owners (the baseline of P3).

The distributed training that DistDGL and PyG made common: each rank trains on sampled neighbourhoods of its own nodes.
The owner of a node samples its in-edges; the features of all sampled nodes come from their owners in one exchange,
while the batch before trains; gradients are averaged. Any partition does, and any PyG layer, as a batch is a graph of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Abilities, Backend, names_of
from pygdist.backends.passes.base import Forward
from pygdist.backends.passes.batch import BatchPass
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.arguments import edges_among
from pygdist.hops.hop import Hop
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import labelled
from pygdist.sampler.base import MiniBatches
from pygdist.sampler.hot_nodes import KeptAfterEpoch, hottest, out_degrees
from pygdist.sampler.owners import NodeOwners, RemoteRows
from pygdist.sampler.steps import Fields, Steps

CacheBy = Literal["degree", "epoch"]
_GIB = 2**30


class PullBackend(Backend):
    """Train on mini-batches sampled across ranks; pull the features of their nodes from the owners.

    Layers run on a batch as in plain PyG: norms over nodes take the statistics of the rank's own batch, as under PyG's
    ``NeighborLoader`` and DDP. The model is evaluated on the whole graph, exactly.

    Args:
        cache_gib: Memory of each rank, in GiB, for copies of other ranks' feature rows.
        cache_by: Which rows: ``degree`` keeps those of the nodes with most out-edges, from the start; ``epoch`` those
            that the batches of the first epoch asked for most, from the second epoch on, at 4 bytes more for each node
            of the graph.

    Raises:
        InputError: If ``cache_gib`` is negative or not finite, or ``cache_by`` is unknown.

    Example:
        >>> data = GraphDataModule("sbm", batches=NeighborBatches([25, 10], batch_size=1000))
        >>> trainer.fit(NodeClassifier(GraphSAGE(-1, 64, 2, 10), backend="pull"), datamodule=data)
    """

    name = "pull"
    abilities = Abilities(
        exact=False,
        approximation="a step trains on sampled neighbourhoods of some nodes",
        mini_batches=True,
        evaluates=False,
    )
    per_graph: ClassVar[tuple[str, ...]] = ("_pass",)
    _pass: BatchPass | None = None

    def __init__(self, *, cache_gib: float = 0.0, cache_by: CacheBy = "degree") -> None:
        super().__init__()
        if not 0 <= cache_gib < math.inf:
            raise InputError(f"cache_gib is {cache_gib}, expected a finite number of GiB, 0 or more")
        if cache_by not in get_args(CacheBy):
            raise InputError(f"cache_by is '{cache_by}', expected one of {', '.join(get_args(CacheBy))}")
        self.cache_gib, self.cache_by = cache_gib, cache_by

    # -- batches -------------------------------------------------------------------------------------------------------

    def steps(self, shard: Shard, batches: MiniBatches | None, model: nn.Module, *, seed: int) -> Steps:
        """Return the steps of an epoch; every rank makes the call. They travel on a process group of their own.

        Args:
            shard: This rank's part, on the CPU.
            batches: The kind of batches.
            model: The model, whose ``forward`` names the values of edges that it takes.
            seed: Seed of all random numbers.

        Raises:
            InputError: On all ranks, if there are no batches, they do not cross parts, or no training node is labelled.
        """
        if batches is None:
            raise InputError(
                "batches: backend 'pull' trains on mini-batches; set batches, for example NeighborBatches([25, 10], "
                "batch_size=1000) with a number for each layer"
            )
        if shard.y is None or shard.train_mask is None or not shard.counts["train_mask"]:
            raise InputError("the graph has no labelled nodes for stage 'train' (train_mask)")
        aside = self.communicator.apart(quiet=True)
        owners = NodeOwners.of(shard.owned_id, shard.num_nodes, aside)
        features = RemoteRows(shard.x, shard.owned_id, aside, label="features")
        of_edges = {name: _by_id(getattr(shard, name), shard.e_id, aside, name) for name in edge_inputs(model, shard)}
        fields = Fields(owners, features, of_edges, aside, self._cached(features, shard, owners, aside))
        seeds = labelled(shard.y, shard.train_mask).nonzero().view(-1)
        return batches.across_ranks(shard, fields, self.communicator, seeds=seeds, seed=seed)

    def _cached(
        self, features: RemoteRows, shard: Shard, owners: NodeOwners, communicator: Communicator
    ) -> Callable[[], None]:
        """Keep the rows asked for most, if there is memory for any; return what is to be called before an epoch."""
        row_bytes = shard.x[:1].numel() * shard.x.itemsize + shard.n_id.itemsize
        count = min(int(self.cache_gib * _GIB) // max(row_bytes, 1), shard.num_nodes)
        if not count:
            return lambda: None
        if self.cache_by == "epoch":
            return KeptAfterEpoch(features, owners, count)
        degree = out_degrees(shard.adjacency.csr(), shard.n_id, owners, communicator)
        ids = hottest(degree, count, owners, communicator)
        features.keep(ids, owners.owner_of(ids))
        return lambda: None

    # -- a pass over a batch -------------------------------------------------------------------------------------------

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edges = edges_among(model.forward, args, kwargs)
        if any(one.csr() is self.shard.adjacency.csr() for one in edges):
            raise InputError(
                "backend 'pull' trains on mini-batches, but the model was called on the edges of a part: call it on "
                f"batches of PullBackend.steps(), or use backend {names_of(lambda abilities: abilities.exact)}"
            )
        self.kept.forget()  # of the batch before
        rows = [value.size(0) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        self._pass = BatchPass(rows[0] if rows else 0, None, in_weights=False, without_norm=lambda layer: None)
        return args, kwargs

    @property
    def _batch(self) -> BatchPass:
        if self._pass is None:
            raise InputError("backend 'pull' runs layers within a call of the model, on a mini-batch")
        return self._pass

    @override
    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._batch.run_layer(layer, forward, args, kwargs)

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return hop.run()

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x

    # -- no other rank takes part in a pass ----------------------------------------------------------------------------

    @property
    @override
    def alone(self) -> bool:
        return True

    @override
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x

    @override
    def over_ranks(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float64)

    @override
    def note(self, text: str) -> None:
        """Do nothing: no exchange follows in which ranks could compare it."""

    @override
    def move(self, at: str) -> None:
        """Do nothing, likewise."""

    @property
    @override
    def num_rows(self) -> int:
        return self._batch.num_rows

    @property
    @override
    def num_nodes(self) -> int:
        return self._batch.num_rows


def _by_id(values: Tensor, e_id: Tensor, communicator: Communicator, name: str) -> RemoteRows:
    """Return values of edges, to be fetched by the edges' global ids."""
    order = e_id.argsort()
    return RemoteRows(values[order], e_id[order], communicator, label=name)
