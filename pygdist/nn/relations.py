"""The edges of one relation, for layers that go through relations: an :class:`~pygdist.graph.Adjacency` stays one.

PyG's function picks them from a list of edges in every epoch. Here they are picked once, and stay sorted by
destination, so that a relation's mean is one sparse product.

What is kept is told by object, and backends exchange for edges that are others than before. So all ranks must make
others at once, though a change of types may leave a relation of one rank as it is: what a layer picks by is compared,
which ranks see alike, not what it picks.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph import Adjacency
from pygdist.graph.identity import blind_to, identity_of
from pygdist.graph.self_loops import keep_entries
from pygdist.nn.norms import Ranks

__all__ = ["KeptRelations"]

_MOST_KEPT = 1024  # relations; what is kept longest goes first


@dataclass(frozen=True)
class _Types:
    """What a layer picks by, of which there is a number that all ranks know it by.

    Attributes:
        tensors: The types of edges, and the like; held, so that their memory stays theirs.
        identities: What they were.
        blind: A rank may not see that they are others.
    """

    tensors: tuple[Tensor, ...]
    identities: tuple[tuple[object, ...], ...]
    blind: bool

    def are(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether these are the same."""
        return self.identities == _identities(tensors)


class KeptRelations:
    """PyG's ``masked_edge_index`` on a shard's edges.

    Relations of which a rank has no edge look the same to it, but are as many to other ranks: each has edges of its
    own, told apart by the order in which a layer asks, so that ranks agree on what they have met before.

    Args:
        ranks: Who must agree.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._types: dict[int, _Types] = {}
        self._made = 0
        self._read_by: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # of the layer that runs
        self._layer: nn.Module = nn.Identity()
        self._given: tuple[Tensor, ...] = ()
        self._number: int | None = None
        self._asked: dict[tuple[int, int], int] = {}  # how often for the same edges

    def clear(self) -> None:
        """Forget what was kept; called when the backend gets another graph."""
        self._types.clear()
        self._read_by.clear()

    def begin_layer(self, layer: nn.Module, given: Iterable[Any]) -> None:
        """Called before each ``forward`` of a layer, with its arguments."""
        tensors = (one for one in given if isinstance(one, Tensor) and not isinstance(one, Adjacency))
        self._layer, self._number = layer, None
        self._given = tuple(one.detach() for one in tensors if not one.is_floating_point())
        self._asked.clear()

    def pick(self, edge_index: Any, edge_mask: Tensor) -> Any:
        """The edges where ``edge_mask``, ``(E,)`` bool, is true.

        Those of an adjacency are an adjacency in the same order, and are kept with it.
        """
        if not isinstance(edge_index, Adjacency) or edge_index.value is not None:
            return masked_edge_index(edge_index, edge_mask)
        if self._number is None:
            self._number = self._agreed_number()
        every: dict[int, dict[tuple[int, int], tuple[Tensor, Adjacency]]]
        every = edge_index.derived.setdefault("relations", {})
        for number in every.keys() - self._types.keys():
            del every[number]
        known = every.setdefault(self._number, {})
        mask = zlib.crc32(edge_mask.cpu().numpy().tobytes())
        turn = self._asked[id(edge_index.origin), mask] = self._asked.get((id(edge_index.origin), mask), -1) + 1
        slot = mask, turn
        if slot not in known or not torch.equal(known[slot][0], edge_mask):
            if slot not in known and len(known) >= _MOST_KEPT:
                known.pop(next(iter(known)))
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                known[slot] = edge_mask.clone(), Adjacency.from_csr(keep_entries(edge_index.csr(), edge_mask))
        return known[slot][1]

    def _agreed_number(self) -> int:
        """By which all ranks know what the running layer picks by; a new one if it is new to any of them."""
        number, given = self._read_by.get(self._layer), self._given
        if number is not None:
            same = self._types[number].are(given)
            if self._types[number].blind:
                same = self._ranks.max_over_ranks(int(not same)) == 0
            if same:
                return number
        found = next((one for one, types in self._types.items() if types.are(given)), -1)
        least, most = -self._ranks.max_over_ranks(-found), self._ranks.max_over_ranks(found)
        if not least == most >= 0:
            blind = self._ranks.max_over_ranks(int(any(map(blind_to, given)))) > 0
            most = self._ranks.max_over_ranks(self._made)
            self._made, self._types[most] = most + 1, _Types(given, _identities(given), blind)
        self._read_by[self._layer] = most
        read = set(self._read_by.values())
        self._types = {one: types for one, types in self._types.items() if one in read}
        return most


def _identities(tensors: tuple[Tensor, ...]) -> tuple[tuple[object, ...], ...]:
    return tuple(map(identity_of, tensors))
