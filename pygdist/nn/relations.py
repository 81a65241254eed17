"""The edges of one relation, for layers that loop over relations, as an :class:`~pygdist.graph.Adjacency`.

PyG's function selects a relation's edges from the list of edges in every epoch. This module selects them once, and
keeps them sorted by destination, so that a relation's mean is one sparse product.

If edge types change, a relation's edges may stay the same on some ranks and be new on others. So all ranks must agree
before they use the identity of these edges to decide which rows to exchange (:func:`of_relation`).
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index
from typing_extensions import override

from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.identity import version_of
from pygdist.graph.memo import Memo
from pygdist.graph.self_loops import keep_entries
from pygdist.kernels import CSR

_OF_RELATION = Slot[bool]("picked for a relation")
_RELATIONS = Slot[Memo[Adjacency]]("edges of each relation")
_MOST_KEPT = 2048  # relations, by values and by number
_EQUALS = (Tensor.eq, Tensor.__eq__, torch.eq)


class KeptRelations:
    """PyG's ``masked_edge_index`` on a shard's edges.

    A relation's mask gets the same adjacency in every pass. If a layer compares the same types with the same number
    again, as in ``edge_type == 2``, the host does not read the mask again. All relations without edges on a rank have
    the same mask, but other ranks may have edges of these relations. So equal masks in one ``forward`` of a layer get
    different adjacencies, in order, and all ranks keep the same number of adjacencies.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[int, bytes], int] = {}  # uses of the same edges and mask by the running layer, less one
        self._compared: dict[int, _Comparison] = {}  # by id of a mask

    def begin_layer(self) -> None:
        """Forget the masks of the previous layer; called before each ``forward`` of a layer."""
        self._turns.clear()
        self._compared.clear()

    def noting(self) -> AbstractContextManager[Any]:
        """Note the types and number of each mask that is made inside the block."""
        return _Comparisons(self._compared)

    def pick(self, edge_index: Any, edge_mask: Tensor) -> Any:
        """Return the edges where ``edge_mask``, ``(E,)`` bool, is true.

        For an adjacency the result is an adjacency in the same order, which is kept with it.
        """
        if not isinstance(edge_index, Adjacency) or edge_index.value is not None:
            return masked_edge_index(edge_index, edge_mask)
        relations = edge_index.slot(_RELATIONS, lambda: Memo(_MOST_KEPT))
        comparison = self._compared.get(id(edge_mask))
        if comparison is None or comparison.mask() is not edge_mask or version_of(edge_mask):
            return self._by_values(relations, edge_index, edge_mask)
        slot, types = ("equal to", comparison.number), (comparison.types,)
        if relations.knows(slot, types):
            return relations.last(slot)
        return relations.put(slot, types, self._by_values(relations, edge_index, edge_mask))

    def _by_values(self, relations: Memo[Adjacency], edge_index: Adjacency, edge_mask: Tensor) -> Adjacency:
        values = hashlib.blake2b(edge_mask.cpu().numpy().tobytes()).digest()
        key = id(edge_index.origin), values
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        return relations.get((values, turn), (), lambda: _picked(edge_index.csr(), edge_mask))


class _Comparison(NamedTuple):
    """A mask, held weakly, that is true where types equal a number."""

    mask: TensorWeakRef
    types: Tensor
    number: int


class _Comparisons(TorchFunctionMode):
    """Notes the results of comparisons of tensors with a number."""

    def __init__(self, noted: dict[int, _Comparison]) -> None:
        super().__init__()
        self._noted = noted

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EQUALS and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], int):
            self._noted[id(out)] = _Comparison(TensorWeakRef(out), args[0], args[1])
        return out


def _picked(csr: CSR, edge_mask: Tensor) -> Adjacency:
    edges = Adjacency.from_csr(keep_entries(csr, edge_mask))
    edges.slot(_OF_RELATION, lambda: True)
    return edges


def of_relation(edge_index: Any) -> bool:
    """Tell if edges are a relation's, which may be the same as before on some ranks and new on others."""
    return isinstance(edge_index, Adjacency) and edge_index.slot(_OF_RELATION) is not None
