"""Tensors with one row for each edge of all ranks, such as weights, made from each rank's own rows.

A tensor that stays the same from pass to pass travels once. A rank recognises a tensor by its memory and version. If
the tensor may be new on some ranks and the same on others, all ranks agree first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.slicing.all_nodes import AllNodes, Topology
from pygdist.comm.slices import share_rows
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.memo import Memo
from pygdist.graph.self_loops import is_self_loop


@dataclass(frozen=True)
class EdgeReader:
    """A layer that reads a tensor of edges.

    Attributes:
        layer: The layer.
        argument: The argument that holds the tensor.
        topology: The edges of all ranks.
        label: Names the tensor in errors.
    """

    layer: MessagePassing
    argument: str
    topology: Topology
    label: str


class EdgeTensors:
    """The tensors of edges that layers read; every rank makes every call.

    Args:
        nodes: The nodes of all ranks.
    """

    def __init__(self, nodes: AllNodes) -> None:
        self._nodes = nodes
        self._memo = Memo[Tensor | None]()  # by the identity of this rank's tensor
        # strong references: layers are collected at other times on other ranks, which would then disagree
        self._read_by: dict[tuple[MessagePassing, str], tuple[object, ...]] = {}

    def share(self, reader: EdgeReader, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        r"""Return the rows of all ranks' edges, :math:`(e, *) \to (E, *)`, in ``dtype``; the value's own by default."""
        rows = self._kept(reader, reader.argument, value, dtype, partial(self._share, reader, value, dtype))
        assert rows is not None
        return rows

    def share_constant(self, reader: EdgeReader, value: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """:meth:`share` a tensor that stays the same from pass to pass; ``None`` if it would travel in each pass."""
        find = partial(self._share, reader, value, dtype)
        return self._kept(reader, reader.argument, value, dtype, find, constant_only=True)

    def factors(self, reader: EdgeReader, edges: Adjacency, value: Tensor) -> Tensor | None:
        """Return a factor for each node such that each weight is the product of its two ends' factors, as GCN's are.

        Factors are read off the weights of self-loops. Products equal the weights to a rounding or two.

        Args:
            reader: The layer that reads the weights.
            edges: This rank's edges.
            value: Their weights.

        Returns:
            ``(N, 1)``, or ``None`` if there are no such factors.
        """
        if value.dim() != 1 or not fixable(value):
            return None
        return self._kept(reader, "factors", value, "factors", partial(self._find_factors, reader, edges, value))

    def _share(self, reader: EdgeReader, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        layout, value = self._nodes.layout, value if dtype is None else value.to(dtype)
        counts, label = reader.topology.counts, reader.label
        return share_rows(value, counts, layout.communicator, label=label, overflow=layout.overflow)

    def _find_factors(self, reader: EdgeReader, edges: Adjacency, value: Tensor) -> Tensor | None:
        layout, csr = self._nodes.layout, edges.csr()
        is_loop, row = is_self_loop(csr), csr.row_index()
        own_factors = value.new_full((csr.num_rows,), float("nan"))
        own_factors[row[is_loop]] = value[is_loop].sqrt()
        factors = share_rows(own_factors, layout.counts, layout.communicator, label=f"{reader.label}, factors")
        products = factors[self._nodes.positions[csr.index.long()]] * own_factors[row]
        equal = (products - value).abs() <= 4 * torch.finfo(value.dtype).eps * value.abs()
        agreed = layout.communicator.gather([float(bool(equal.all()) and not bool(own_factors.isnan().any()))])
        return factors.unsqueeze(1) if bool(agreed.all()) else None

    def _kept(
        self,
        reader: EdgeReader,
        name: str,
        value: Tensor,
        form: object,
        find: Callable[[], Tensor | None],
        *,
        constant_only: bool = False,
    ) -> Tensor | None:
        """Return the result of ``find`` for ``value`` in a ``form``, from the time before if ``value`` is the same.

        With ``constant_only`` nothing is found that could not be kept.
        """
        slot, inputs = (*identity_of(value), id(reader.topology), form), (value, reader.topology)
        # of all ranks: a model may change the tensor of one rank alone
        is_kept = bool(self._nodes.layout.communicator.gather([float(self._memo.knows(slot, inputs))]).all())
        if not is_kept:
            # evaluation computes most tensors anew; these must not replace those that training has kept
            passing = not torch.is_grad_enabled() and (reader.layer, name) in self._read_by
            if not fixable(value) or passing:
                return None if constant_only else find()
            with torch.inference_mode(False), torch.no_grad():
                self._memo.put(slot, inputs, find())
        self._read_by[reader.layer, name] = slot
        self._memo.clear(but=set(self._read_by.values()))
        return self._memo.last(slot)
