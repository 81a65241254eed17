"""Kinds of a model's arguments: rows of nodes, rows of edges, and others.

An argument's length must say so on all ranks: on one rank alone, class weights may happen to be as long as it has
nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pygdist.backends.passes.rehearsal import Kind
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.hops.arguments import named_values

#: Names of arguments that hold rows of nodes in any graph.
_OF_NODES = ("x", "y", "n_id", "pos", *MASKS)


class Lengths(NamedTuple):
    """The numbers of nodes and edges among a rank's inputs, and the shard's own inputs."""

    rank: int
    nodes: int
    edges: int
    shard: Shard | None = None

    @classmethod
    def of(cls, shard: Shard) -> Lengths:
        """The owned nodes of a shard, and its edges."""
        return cls(shard.rank, shard.num_owned, shard.adjacency.size(1), shard)


def kinds_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lengths: Lengths,
    communicator: Communicator,
    kinds: dict[tuple[object, ...], list[Kind]],
    *,
    refuses: bool = False,
) -> tuple[tuple[object, ...], list[Kind]]:
    """Return a key for calls like this one, and the kinds of the arguments; see :class:`~.rehearsal.Call`.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        lengths: Numbers of rows of this rank.
        communicator: The ranks; each makes this call.
        kinds: The kinds of earlier calls, by key; gets those of this one.
        refuses: Refuse an argument that may hold rows of nodes as well as rows of edges; otherwise they are of nodes.

    Raises:
        InputError: If an argument holds another number of rows than before. On all ranks, if it may hold rows of nodes
            as well as rows of edges, with ``refuses``.
    """
    expected: dict[Kind, int] = {"node": lengths.nodes, "edge": lengths.edges}
    looks: list[tuple[str, object]] = []
    sizes: list[int] = []
    for name, value in named_values(model.forward, args, kwargs):
        rows = isinstance(value, Tensor) and not isinstance(value, Adjacency) and value.dim() > 0
        plain = value if isinstance(value, (bool, str)) else type(value)
        looks.append((name, value.dim() if rows else plain))
        sizes.append(value.size(0) if rows else -1)
    key = tuple(looks)
    if key not in kinds:
        values = [value for _, value in named_values(model.forward, args, kwargs)]
        names = [name for name, _ in looks]
        decided, unclear = _first_kinds(names, values, sizes, lengths, communicator)
        if unclear and refuses and communicator.world_size > 1:
            raise InputError(
                f"argument '{unclear[0] or type(model).__name__}' of the model may hold rows of nodes or of edges, as "
                "each rank has as many edges as nodes; begin its name with edge_ or node_, or pass a field of the shard"
            )
        kinds[key] = decided
    for (name, _), kind, length in zip(looks, kinds[key], sizes, strict=True):
        if kind is not None and length != expected[kind]:
            raise InputError(
                f"argument '{name or type(model).__name__}' of the model has {length} rows on rank {lengths.rank}; in "
                f"earlier calls it had one for each of the rank's {expected[kind]} {kind}s, and must have now",
                of_one_rank=True,
            )
    return key, kinds[key]


def _first_kinds(
    names: list[str], values: list[Any], sizes: list[int], lengths: Lengths, communicator: Communicator
) -> tuple[list[Kind], list[str]]:
    """Decide the kinds of arguments, alike on all ranks, and return the names of those that may be of either kind."""
    if not names:
        return [], []
    fits = [[length == expected for length in sizes] for expected in (lengths.nodes, lengths.edges)]
    held = [[_is_among(value, fields) for value in values] for fields in _fields_of(lengths.shard)]
    ranks = communicator.gather([float(one) for column in (*fits, *held) for one in column]).bool()
    nodes, edges, of_nodes, of_edges = ranks.view(communicator.world_size, 4, len(names)).unbind(1)
    facts = [nodes.all(0), edges.all(0), of_nodes.any(0), of_edges.any(0)]  # an empty tensor is nobody's
    decided, unclear = list[Kind](), list[str]()
    for name, (node, edge, holds_nodes, holds_edges) in zip(names, torch.stack(facts, 1).tolist(), strict=True):
        if node and edge and holds_nodes != holds_edges:
            decided.append("node" if holds_nodes else "edge")
            continue
        if node and edge and not name.startswith(("edge_", "node_")) and name not in _OF_NODES:
            unclear.append(name)
        decided.append(_kind(name, node, edge))
    return decided, unclear


def _fields_of(shard: Shard | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return a shard's inputs of nodes, and those of edges."""
    if shard is None:
        return [], []
    of_nodes = [
        shard.x,
        shard.y,
        shard.owned_id,
        *(getattr(shard, name) for name in MASKS),
        *shard.node_inputs.values(),
    ]
    of_edges = [shard.e_id, *(getattr(shard, name) for name in EDGE_FIELDS)]
    return [one for one in of_nodes if one is not None], [one for one in of_edges if one is not None]


def _is_among(value: Any, fields: list[Tensor]) -> bool:
    """True if an argument is one of these tensors, or starts in the memory of one."""
    if not isinstance(value, Tensor) or isinstance(value, Adjacency) or not value.numel():
        return False
    return any(value is one or value.data_ptr() == one.data_ptr() for one in fields)


def _kind(name: str, node: bool, edge: bool) -> Kind:
    """The kind of an argument, from its name and whether all ranks find it as long as they have nodes, or edges."""
    if name.startswith("edge_"):
        return "edge" if edge else None
    return "node" if node else "edge" if edge else None
