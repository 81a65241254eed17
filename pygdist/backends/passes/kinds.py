"""Kinds of a model's arguments: rows of nodes, rows of edges, and others.

An argument's length must say so on all ranks: on one rank alone, class weights may happen to be as long as it has
nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from pygdist.backends.passes.rehearsal import Kind
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.hops.arguments import named_values


class Lengths(NamedTuple):
    """The numbers of nodes and edges among a rank's inputs."""

    rank: int
    nodes: int
    edges: int

    @classmethod
    def of(cls, shard: Shard) -> Lengths:
        """The owned nodes of a shard, and its edges."""
        return cls(shard.rank, shard.num_owned, shard.adjacency.size(1))


def kinds_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lengths: Lengths,
    communicator: Communicator,
    kinds: dict[tuple[object, ...], list[Kind]],
) -> tuple[tuple[object, ...], list[Kind]]:
    """Return a key for calls like this one, and the kinds of the arguments; see :class:`~.rehearsal.Call`.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        lengths: Numbers of rows of this rank.
        communicator: The ranks; each makes this call.
        kinds: The kinds of earlier calls, by key; gets those of this one.

    Raises:
        InputError: If an argument holds another number of rows than before.
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
        fits = [length == expected[kind] for kind in ("node", "edge") for length in sizes]
        everywhere = communicator.gather([float(fit) for fit in fits]).amin(0).bool().tolist() if fits else []
        nodes, edges = everywhere[: len(sizes)], everywhere[len(sizes) :]
        kinds[key] = [_kind(name, *fit) for (name, _), *fit in zip(looks, nodes, edges, strict=True)]
    for (name, _), kind, length in zip(looks, kinds[key], sizes, strict=True):
        if kind is not None and length != expected[kind]:
            raise InputError(
                f"argument '{name or type(model).__name__}' of the model has {length} rows on rank {lengths.rank}; in "
                f"earlier calls it had one for each of the rank's {expected[kind]} {kind}s, and must have now",
                of_one_rank=True,
            )
    return key, kinds[key]


def _kind(name: str, node: bool, edge: bool) -> Kind:
    """The kind of an argument, from its name and whether all ranks find it as long as they have nodes, or edges."""
    if name.startswith("edge_"):
        return "edge" if edge else None
    return "node" if node else "edge" if edge else None
