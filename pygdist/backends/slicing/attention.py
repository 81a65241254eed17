r"""Sums on slices with attention weights, which depend on whole rows; every rank needs the weights of all edges.

Either the owner of an edge computes the edge's weight and sends it to all ranks, or every rank computes all weights
from the scores of all nodes. The choice with fewer bytes is taken (NeutronTP, Sec. 4.1.1)::

    split_with_scores   values (n, H, C), scores (n, H)   -> (N, H, c), (N, H)
    split_with_weights  values (n, H, C), weights (e, H)  -> (N, H, c), (E, H)
    sum_of_values       (N, H, c)                         -> sums (n, H, C)

Backward passes send each rank its channels of all sums' gradients, then to the owner of a row or edge all channels of
its value's gradient and the sum over ranks of the gradients of its scores or weights.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.backends.slicing.all_nodes import AllNodes, SliceLayout, Topology
from pygdist.backends.slicing.chunked_autograd import ChunkCost, hop_in_chunks, repeated
from pygdist.backends.slicing.chunked_hop import ChunkFunction, ChunkInput, ChunkRows
from pygdist.comm import Communicator
from pygdist.comm.slices import share_rows, split_and_share, with_phantom_column
from pygdist.graph import Adjacency
from pygdist.kernels import edge_softmax, spmm
from pygdist.nn.decoupled import AttentionPropagation

_MOST_PAIRED = 16 << 20  # bytes of all edges' weights, of which a message for each rank holds a copy


def scores_are_fewer(nodes: AllNodes, topology: Topology) -> bool:
    """True if all nodes have fewer scores, one for each end of an edge, than all edges have weights."""
    return sum(topology.counts) >= 2 * nodes.layout.num_rows


def split_with_scores(
    value: Tensor, source: Tensor, target: Tensor, layout: SliceLayout, *, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's channels of all ranks' rows, and their scores as sources and as destinations; one exchange."""
    scores, counts, label = torch.cat([source, target], dim=1), layout.counts, f"{label}, value and scores"
    rows, scores = _of_one_dtype(*split_and_share(value, scores, counts, counts, layout.communicator, label=label))
    source, target = scores.chunk(2, dim=1)
    return with_phantom_column(rows), source, target


def split_with_weights(
    value: Tensor, weights: Tensor, topology: Topology, layout: SliceLayout, *, label: str
) -> tuple[Tensor, Tensor]:
    """Return this rank's channels of all ranks' rows, and the weights of all ranks' edges; one exchange if few."""
    counts, of_edges, communicator = layout.counts, topology.counts, layout.communicator
    if sum(of_edges) * weights.size(1) * weights.element_size() > _MOST_PAIRED:
        rows = layout.split(value, f"{label}, value")
        weights = share_rows(weights, of_edges, communicator, label=f"{label}, weights")
    else:
        label = f"{label}, value and weights"
        rows, weights = split_and_share(value, weights, counts, of_edges, communicator, label=label)
    rows, weights = _of_one_dtype(rows, weights)
    return with_phantom_column(rows), weights


def _of_one_dtype(rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Give both the wider dtype: autocast leaves scores and weights wide."""
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
    r"""Compute the weights of all ranks' edges from the scores of all rows; every rank drops the same weights.

    Shapes:
        Scores are :math:`(N, H)`, the result :math:`(E, H)`.
    """
    edges = cast(Adjacency, topology.edges)
    weights = edge_softmax(
        edges.csr(), None, source=source, target=target, negative_slope=negative_slope, transposed=edges.transposed
    )
    if dropout == 0:
        return weights
    # each rank decides for its own edges, by its own state of random numbers, which checkpointing puts back
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
    rows: Tensor, weights: Tensor, edges: Adjacency, layout: SliceLayout, *, width: int, label: str, rounds: int = 1
) -> Tensor:
    """Sum this rank's channels of all rows ``rounds`` times over in-edges; return all channels of its own rows."""
    for _ in range(rounds):
        rows = spmm(edges.csr(), rows, weights, transposed=edges.transposed)
    return layout.gather(rows, width, label)


def attention_in_chunks(
    value: Tensor,
    edges: Adjacency,
    layout: SliceLayout,
    *,
    weights: Tensor | None = None,
    scores: tuple[Tensor, Tensor] | None = None,
    negative_slope: float = 0.0,
    label: str,
    rounds: int = 1,
) -> Tensor:
    r"""Sum values over in-edges ``rounds`` times within a memory budget, by weights or by scores of nodes.

    From scores each chunk computes the weights that it needs, in every round, so that those of all edges are never
    held. Values, and scores or weights, travel with the chunks of the first round, results with those of the last one
    (NeutronTP, Sec. 4.2.2).

    Args:
        value: This rank's rows, :math:`(n, H, C)`.
        edges: The edges of all ranks.
        layout: The rows of each rank.
        weights: Weights of this rank's edges, :math:`(e, H)`.
        scores: In place of weights: scores of this rank's rows as sources and as destinations, :math:`(n, H)` each.
        negative_slope: Of the leaky ReLU of scores.
        label: Names the hop in errors.
        rounds: Number of hops.

    Returns:
        All channels of this rank's rows, :math:`(n, H, C)`.
    """
    width, world_size = value.size(-1), layout.communicator.world_size
    held, by_nodes = layout.held(width), scores is not None
    factors = weights if scores is None else torch.cat(scores, dim=1)
    assert factors is not None
    # weights are computed from scores in each chunk
    cost = ChunkCost(weight_bytes=value.size(1) * factors.element_size() if by_nodes else 0)
    compute: ChunkFunction = partial(_attend, held, negative_slope) if by_nodes else partial(_weigh, held)
    hop = partial(hop_in_chunks, compute, edges=edges, layout=layout, label=label, device=value.device, cost=cost)
    inputs = [
        ChunkInput(rows=value, name="value", source=True, way="split"),
        ChunkInput(
            rows=factors, name="scores" if by_nodes else "weights", source=by_nodes, target=by_nodes, way="share",
            returned=rounds > 1,
        ),
    ]  # fmt: skip
    rows, *returned = hop(inputs, width=width if rounds == 1 else None)
    for number, factors in enumerate(repeated(returned[0], rounds - 1) if returned else (), start=2):
        inputs = [
            ChunkInput(rows=rows, source=True, most_columns=-(-width // world_size)),
            ChunkInput(rows=factors, source=by_nodes, target=by_nodes),
        ]
        (rows,) = hop(inputs, width=width if number == rounds else None)
    return rows


def _weigh(held: int, edges: Adjacency, of_chunk: list[ChunkRows]) -> Tensor:
    """Sum the sources of a chunk by the weights of its edges; return the ``held`` channels, no phantom."""
    rows, weights = of_chunk[0].source, of_chunk[1].edge
    assert rows is not None
    return spmm(edges.csr(), with_phantom_column(rows), weights, transposed=edges.transposed)[..., :held]


def _attend(held: int, negative_slope: float, edges: Adjacency, of_chunk: list[ChunkRows]) -> Tensor:
    """Sum the sources of a chunk by the weights of scores; return the ``held`` channels, no phantom."""
    rows, (source, target, _) = of_chunk[0].source, of_chunk[1]
    assert rows is not None
    assert source is not None
    assert target is not None
    rows, source, target = with_phantom_column(rows), source.chunk(2, dim=1)[0], target.chunk(2, dim=1)[1]
    dtype = torch.promote_types(rows.dtype, source.dtype)  # they differ under autocast
    return edges.attend(rows.to(dtype), source.to(dtype), target.to(dtype), negative_slope)[..., :held]


def propagate_attention(
    layer: AttentionPropagation,
    nodes: AllNodes,
    *,
    label: str,
    x: Tensor,
    edge_index: Adjacency,
    source: Tensor,
    target: Tensor,
) -> Tensor:
    """Run the ``forward`` of a layer on slices; rows travel once each way, whatever the number of its hops.

    Scores travel along, or weights where these are fewer.
    """
    layout, topology = nodes.layout, nodes.topology(edge_index, (layer, 0))
    edges, rounds, slope = cast(Adjacency, topology.edges), layer.propagation.rounds, layer.negative_slope
    dropout = layer.dropout if layer.training else 0.0
    by_edge = not scores_are_fewer(nodes, topology) or (dropout > 0 and not nodes.draws_alike)
    if layout.overflow is not None:
        # the kernel that computes weights where it sums drops none, and takes no such slope
        by_edge = by_edge or dropout > 0 or slope < 0
        weights = layer.edge_updater(edge_index, alpha=(source, target)) if by_edge else None
        scores = None if by_edge else (source, target)
        return attention_in_chunks(
            x, edges, layout, weights=weights, scores=scores, negative_slope=slope, label=label, rounds=rounds
        )
    if by_edge:
        weights = layer.edge_updater(edge_index, alpha=(source, target))
        rows, weights = split_with_weights(x, weights, topology, layout, label=label)
    else:
        rows, source, target = split_with_scores(x, source, target, layout, label=label)
        weights = weights_of_scores(
            source, target, topology, layout.communicator, negative_slope=slope, dropout=dropout
        )
    return sum_of_values(rows, weights, edges, layout, width=x.size(-1), label=label, rounds=rounds)
