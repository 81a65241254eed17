"""Sums over slices by the weights of attention, which come from whole rows and are known to all ranks for all edges.

They are computed by who has the rows of an edge, or by every rank from the scores of all nodes, whichever is less to
send (NeutronTP, Sec. 4.1.1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.backends.slicing.chunked_autograd import hop_in_chunks, repeated
from pygdist.backends.slicing.chunked_hop import Ranks, Taken, Waiting
from pygdist.backends.slicing.everyone import Everyone, Topology
from pygdist.comm import Communicator
from pygdist.comm.slices import (
    columns_of,
    gather_columns,
    share_rows,
    split_and_share,
    split_columns,
    with_phantom_column,
)
from pygdist.graph import Adjacency
from pygdist.kernels import edge_softmax, spmm
from pygdist.nn.decoupled import AttentionPropagation

__all__ = [
    "attention_in_chunks",
    "propagate_attention",
    "scores_are_fewer",
    "split_with_scores",
    "split_with_weights",
    "sum_of_values",
    "weights_of_scores",
]

_MOST_PAIRED = 16 << 20  # bytes of all edges' weights, of which a message for each rank holds a copy


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
    rows, scores = _of_one_dtype(rows, scores)
    source, target = scores.chunk(2, dim=1)
    return with_phantom_column(rows), source, target


def split_with_weights(
    value: Tensor, weights: Tensor, topology: Topology, everyone: Everyone, communicator: Communicator, *, label: str
) -> tuple[Tensor, Tensor]:
    r"""This rank's channels of all ranks' rows, and the weights of all ranks' edges; one exchange if these are few.

    Shapes:
        ``value`` is :math:`(n, H, C)`, ``weights`` is :math:`(e, H)`; the results :math:`(N, H, c)` and :math:`(E, H)`.
    """
    if sum(topology.counts) * weights.size(1) * weights.element_size() > _MOST_PAIRED:
        rows = split_columns(value, everyone.counts, communicator, label=f"{label}, value")
        every = share_rows(weights, topology.counts, communicator, label=f"{label}, weights")
    else:
        label = f"{label}, value and weights"
        rows, every = split_and_share(value, weights, everyone.counts, topology.counts, communicator, label=label)
    rows, every = _of_one_dtype(rows, every)
    return with_phantom_column(rows), every


def _of_one_dtype(rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """They differ under autocast, which leaves scores and weights wide."""
    dtype = torch.promote_types(rows.dtype, other.dtype)
    return rows.to(dtype), other.to(dtype)


def weights_of_scores(
    source: Tensor,
    target: Tensor,
    topology: Topology,
    communicator: Communicator,
    *,
    negative_slope: float,
    dropout: float = 0.0,
) -> Tensor:
    r"""The weights of all ranks' edges, from the scores of all rows; some of them dropped, the same on every rank.

    Shapes:
        Scores are :math:`(N, H)`, the result :math:`(E, H)`.
    """
    edges = cast(Adjacency, topology.edges)
    weights = edge_softmax(
        edges.csr(), None, source=source, target=target, negative_slope=negative_slope, transposed=edges.transposed
    )
    if dropout == 0:
        return weights
    # a rank decides for its own edges, by its own state of random numbers, which checkpointing puts back
    seeds = communicator.gather([float(torch.randint(2**31, ()))])[:, 0].tolist()
    devices = [weights.device] if weights.is_cuda else []
    generator = torch.cuda.default_generators[weights.get_device()] if weights.is_cuda else torch.default_generator
    parts = []
    with torch.random.fork_rng(devices):
        for rank, (part, seed) in enumerate(zip(weights.split(list(topology.counts)), seeds, strict=True)):
            generator.manual_seed(int(seed) + rank)  # ranks may be in the same state
            parts.append(functional.dropout(part, dropout))
    return torch.cat(parts)


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


def attention_in_chunks(
    value: Tensor,
    edges: Adjacency,
    ranks: Ranks,
    *,
    weights: Tensor | None = None,
    scores: tuple[Tensor, Tensor] | None = None,
    negative_slope: float = 0.0,
    label: str,
    rounds: int = 1,
) -> Tensor:
    r"""Sum values over in-edges so many times within a budget, by weights of this rank's edges or scores of its rows.

    From scores each chunk computes the weights that it needs, in every round, so that there are never those of all.
    Values, and scores or weights, travel with the chunks of the first round, and results with those of the last one
    (NeutronTP, Sec. 4.2.2).

    Args:
        value: This rank's rows.
        edges: The edges of all ranks.
        ranks: The ranks.
        weights: Of this rank's edges.
        scores: Of its rows as sources and as destinations.
        negative_slope: Of the leaky ReLU of scores.
        label: Named when something goes wrong.
        rounds: How many hops.

    Shapes:
        ``value`` and the result are :math:`(n, H, C)`, ``weights`` is :math:`(e, H)`, scores are :math:`(n, H)`.
    """
    width, size = value.size(-1), ranks.communicator.world_size
    own = columns_of(width, ranks.communicator.rank, size)
    held, most = own.stop - own.start, -(-width // size)  # no phantom column

    def weighted(part: Adjacency, taken: list[Taken]) -> Tensor:
        rows, of_edges = taken[0].source, taken[1].edge
        assert rows is not None
        return spmm(part.csr(), with_phantom_column(rows), of_edges, transposed=part.transposed)[..., :held]

    def attended(part: Adjacency, taken: list[Taken]) -> Tensor:
        rows, (source, target, _) = taken[0].source, taken[1]
        assert rows is not None
        assert source is not None
        assert target is not None
        rows, source, target = with_phantom_column(rows), source.chunk(2, dim=1)[0], target.chunk(2, dim=1)[1]
        dtype = torch.promote_types(rows.dtype, source.dtype)  # they differ under autocast
        return part.attend(rows.to(dtype), source.to(dtype), target.to(dtype), negative_slope)[..., :held]

    ends = scores is not None
    by = weights if scores is None else torch.cat(scores, dim=1)
    assert by is not None
    made = value.size(1) * by.element_size() if ends else 0
    first = [
        Waiting(rows=value, name="value", source=True, way="split"),
        Waiting(rows=by, name="scores" if ends else "weights", source=ends, target=ends, way="share", kept=rounds > 1),
    ]

    def hop(waiting: list[Waiting], *, last: bool) -> tuple[Tensor, ...]:
        run = attended if ends else weighted
        return hop_in_chunks(
            run, waiting, edges, ranks, label=label, width=width if last else None, device=value.device,
            weight_bytes=made,
        )  # fmt: skip

    rows, *kept = hop(first, last=rounds == 1)
    for number, one in enumerate(repeated(kept[0], rounds - 1) if rounds > 1 else (), start=2):
        later = [Waiting(rows=rows, source=True, most_columns=most), Waiting(rows=one, source=ends, target=ends)]
        (rows,) = hop(later, last=number == rounds)
    return rows


def propagate_attention(
    layer: AttentionPropagation,
    everyone: Everyone,
    communicator: Communicator,
    *,
    overlap: bool = True,
    label: str,
    x: Tensor,
    edge_index: Adjacency,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """The ``forward`` of a layer on slices: rows travel once there and once back, whatever its number of hops.

    Scores travel along, or weights where these are fewer.
    """
    topology = everyone.topology(edge_index, (layer, 0))
    edges, rounds = cast(Adjacency, topology.edges), layer.propagation.rounds
    dropout = layer.dropout if layer.training else 0.0
    by_edge = not scores_are_fewer(everyone, topology.counts) or (dropout > 0 and not everyone.draws_alike)
    if everyone.overflow is not None:
        # the kernel that computes weights where it sums drops none, and takes no such slope
        by_edge = by_edge or dropout > 0 or layer.negative_slope < 0
        ranks = Ranks(
            communicator=communicator, counts=everyone.counts, overflow=everyone.overflow, overlap=overlap
        )  # fmt: skip
        return attention_in_chunks(
            x, edges, ranks, negative_slope=layer.negative_slope,
            weights=layer.edge_updater(edge_index, alpha=(source, target)) if by_edge else None,
            scores=None if by_edge else (source, target), label=label, rounds=rounds,
        )  # fmt: skip
    if by_edge:
        own = layer.edge_updater(edge_index, alpha=(source, target))
        rows, weights = split_with_weights(x, own, topology, everyone, communicator, label=label)
    else:
        rows, source, target = split_with_scores(x, source, target, everyone, communicator, label=label)
        weights = weights_of_scores(
            source, target, topology, communicator, negative_slope=layer.negative_slope, dropout=dropout
        )
    return sum_of_values(rows, weights, edges, everyone, communicator, width=x.size(-1), label=label, rounds=rounds)
