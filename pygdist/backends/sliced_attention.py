"""Sums over slices by the weights of attention, which come from whole rows and are known to all ranks for all edges.

They are computed by who has the rows of an edge, or by every rank from the scores of all nodes, whichever is less to
send (NeutronTP, Sec. 4.1.1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pygdist.backends.topology import Everyone, Topology
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, split_and_share, with_phantom_column
from pygdist.graph import Adjacency
from pygdist.kernels import edge_softmax, spmm
from pygdist.nn.decoupled import AttentionPropagation

__all__ = ["propagate_attention", "scores_are_fewer", "split_with_scores", "split_with_weights", "sum_of_values"]


def scores_are_fewer(everyone: Everyone, counts: tuple[int, ...]) -> bool:
    """Whether nodes have fewer scores, for both ends, than edges, so many on each rank, have weights."""
    return sum(counts) >= 2 * everyone.num_rows


def split_with_scores(
    value: Tensor, source: Tensor, target: Tensor, everyone: Everyone, communicator: Communicator, *, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    r"""This rank's channels of all ranks' rows, and the scores of these as sources and as destinations; one exchange.

    Shapes:
        ``value`` is :math:`(n, H, C)`, scores are :math:`(n, H)`; the results :math:`(N, H, c)` and :math:`(N, H)`.
    """
    both, counts = torch.cat([source, target], dim=1), everyone.counts
    rows, scores = split_and_share(value, both, counts, counts, communicator, label=f"{label}, value and scores")
    source, target = scores.chunk(2, dim=1)
    return with_phantom_column(rows), source, target


def split_with_weights(
    value: Tensor, weights: Tensor, topology: Topology, everyone: Everyone, communicator: Communicator, *, label: str
) -> tuple[Tensor, Tensor]:
    r"""This rank's channels of all ranks' rows, and the weights of all ranks' edges; one exchange.

    Shapes:
        ``value`` is :math:`(n, H, C)`, ``weights`` is :math:`(e, H)`; the results :math:`(N, H, c)` and :math:`(E, H)`.
    """
    label = f"{label}, value and weights"
    rows, every = split_and_share(value, weights, everyone.counts, topology.counts, communicator, label=label)
    return with_phantom_column(rows), every


def sum_of_values(
    rows: Tensor,
    weights: Tensor,
    edges: Adjacency,
    everyone: Everyone,
    communicator: Communicator,
    *,
    width: int,
    label: str,
    rounds: int = 1,
) -> Tensor:
    r"""Sum values over in-edges so many times, each rank some of the channels.

    Args:
        rows: This rank's channels of all ranks' rows.
        weights: Of all ranks' edges.
        edges: These edges.
        everyone: The rows of all ranks.
        communicator: The ranks.
        width: How many channels all ranks have together.
        label: Named when something goes wrong.
        rounds: How many hops.

    Shapes:
        ``rows`` is :math:`(N, H, c)`, ``weights`` is :math:`(E, H)`, the result :math:`(n, H, C)`.
    """
    for _ in range(rounds):
        rows = spmm(edges.csr(), rows, weights, transposed=edges.transposed)
    own = columns_of(width, communicator.rank, communicator.world_size)
    return gather_columns(rows[..., : own.stop - own.start], everyone.counts, width, communicator, label=label)


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
    """The ``forward`` of a layer on slices: rows travel once there and once back, whatever its number of hops.

    Scores, or weights where each rank draws for its own edges which are dropped, travel along.
    """
    topology = everyone.topology(edge_index, (layer, 0))
    edges = cast(Adjacency, topology.edges)
    if (layer.training and layer.dropout > 0) or not scores_are_fewer(everyone, topology.counts):
        own = layer.edge_updater(edge_index, alpha=(source, target))
        rows, weights = split_with_weights(x, own, topology, everyone, communicator, label=label)
    else:
        rows, source, target = split_with_scores(x, source, target, everyone, communicator, label=label)
        weights = edge_softmax(
            edges.csr(), None, source=source, target=target, negative_slope=layer.negative_slope,
            transposed=edges.transposed,
        )  # fmt: skip
    rounds = layer.propagation.rounds
    return sum_of_values(rows, weights, edges, everyone, communicator, width=x.size(-1), label=label, rounds=rounds)
