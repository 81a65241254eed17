"""Sums over slices by the weights of attention, which come from whole rows and are known to all ranks for all edges.

They are computed by who has the rows of an edge, or by every rank from the scores of all nodes, whichever is less to
send (NeutronTP, Sec. 4.1.1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pygdist.backends.topology import Everyone
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, share_rows, split_columns, with_phantom_column
from pygdist.graph import Adjacency
from pygdist.kernels import edge_softmax, spmm
from pygdist.nn.decoupled import AttentionPropagation

__all__ = ["propagate_attention", "scores_are_fewer", "scores_of_all", "sum_of_values"]


def scores_are_fewer(everyone: Everyone, counts: tuple[int, ...]) -> bool:
    """Whether nodes have fewer scores, for both ends, than edges, so many on each rank, have weights."""
    return sum(counts) >= 2 * everyone.num_rows


def scores_of_all(
    source: Tensor, target: Tensor, everyone: Everyone, communicator: Communicator, *, label: str
) -> tuple[Tensor, ...]:
    """The scores of all ranks' rows as sources and as destinations, ``(N, H)`` each; one exchange."""
    both = share_rows(torch.cat([source, target], dim=1), everyone.counts, communicator, label=label)
    return both.chunk(2, dim=1)


def sum_of_values(
    value: Tensor,
    weights: Tensor,
    edges: Adjacency,
    everyone: Everyone,
    communicator: Communicator,
    *,
    label: str,
    rounds: int = 1,
) -> Tensor:
    r"""Sum values over in-edges so many times, each rank some of the channels.

    Args:
        value: This rank's rows.
        weights: Of all ranks' edges.
        edges: These edges.
        everyone: The rows of all ranks.
        communicator: The ranks.
        label: Named when something goes wrong.
        rounds: How many hops.

    Shapes:
        ``value`` and the result are :math:`(n, H, C)`, ``weights`` is :math:`(E, H)`.
    """
    rows = with_phantom_column(split_columns(value, everyone.counts, communicator, label=f"{label}, value"))
    for _ in range(rounds):
        rows = spmm(edges.csr(), rows, weights, transposed=edges.transposed)
    own = columns_of(value.size(-1), communicator.rank, communicator.world_size)
    return gather_columns(rows[..., : own.stop - own.start], everyone.counts, value.size(-1), communicator, label=label)


def propagate_attention(
    layer: AttentionPropagation,
    everyone: Everyone,
    communicator: Communicator,
    *,
    label: str,
    x: Tensor,
    edge_index: Adjacency,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """The ``forward`` of a layer on slices: rows travel once there and once back, whatever its number of hops."""
    topology = everyone.topology(edge_index, (layer, 0))
    edges = cast(Adjacency, topology.edges)
    dropped = layer.training and layer.dropout > 0  # by each rank for its own edges
    if dropped or not scores_are_fewer(everyone, topology.counts):
        own = layer.edge_updater(edge_index, alpha=(source, target))
        weights = share_rows(own, topology.counts, communicator, label=f"{label}, weights")
    else:
        source, target = scores_of_all(source, target, everyone, communicator, label=f"{label}, scores")
        weights = edge_softmax(
            edges.csr(), None, source=source, target=target, negative_slope=layer.negative_slope,
            transposed=edges.transposed,
        )  # fmt: skip
    return sum_of_values(x, weights, edges, everyone, communicator, label=label, rounds=layer.propagation.rounds)
