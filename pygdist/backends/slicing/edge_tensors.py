"""What all ranks have of tensors of edges, such as weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.slicing.everyone import Everyone, Topology
from pygdist.comm import Communicator
from pygdist.comm.slices import share_rows
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.self_loops import is_self_loop
from pygdist.memory.overflow import Overflow

__all__ = ["EdgeTensors"]


class EdgeTensors:
    """What all ranks have of tensors of edges, such as weights; those that stay the same travel once.

    Args:
        communicator: The ranks; each makes every call.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # by the identity of this rank's; and who reads which of these
        self._known: dict[tuple[object, ...], tuple[Tensor, Topology, Tensor | None]] = {}
        # not weakly: layers are collected at other times on other ranks, which would then disagree on what is known
        self._readers: dict[tuple[MessagePassing, str], tuple[object, ...]] = {}

    def of_all(
        self,
        layer: MessagePassing,
        name: str,
        value: Tensor,
        topology: Topology,
        *,
        label: str,
        dtype: torch.dtype | None = None,
        overflow: Overflow | None = None,
    ) -> Tensor:
        """The rows of all ranks' edges.

        Args:
            layer: Who reads them.
            name: As which argument.
            value: Those of this rank's edges.
            topology: The edges.
            label: Named when something goes wrong.
            dtype: Of the result.
            overflow: Where it is; on the rank's device by default.
        """
        found = self._of_all(layer, name, value, topology, label, dtype, overflow, anew=True)
        assert found is not None
        return found

    def kept_of_all(
        self,
        layer: MessagePassing,
        name: str,
        value: Tensor,
        topology: Topology,
        *,
        label: str,
        dtype: torch.dtype | None = None,
        overflow: Overflow | None = None,
    ) -> Tensor | None:
        """:meth:`of_all` of what stays the same from pass to pass; nothing of what would travel in each."""
        return self._of_all(layer, name, value, topology, label, dtype, overflow, anew=False)

    def _of_all(
        self,
        layer: MessagePassing,
        name: str,
        value: Tensor,
        topology: Topology,
        label: str,
        dtype: torch.dtype | None,
        overflow: Overflow | None,
        *,
        anew: bool,
    ) -> Tensor | None:
        def share() -> Tensor:
            given = value if dtype is None else value.to(dtype)
            return share_rows(given, topology.counts, self._communicator, label=label, overflow=overflow)

        return self._kept(layer, name, value, topology, dtype, share, anew=anew)

    def factors_of_all(
        self,
        layer: MessagePassing,
        value: Tensor,
        own: Adjacency,
        topology: Topology,
        everyone: Everyone,
        *,
        label: str,
    ) -> Tensor | None:
        """A factor for each row, if all weights are the product of those of both ends, as GCN's are; else ``None``.

        The product is within a rounding or two of the weights. Factors are found from the weights of self-loops.

        Args:
            layer: Who reads them.
            value: The weights of this rank's edges.
            own: These edges.
            topology: Those of all ranks.
            everyone: The rows of all ranks.
            label: Named when something goes wrong.
        """
        if value.dim() != 1 or not fixable(value):
            return None

        def find() -> Tensor | None:
            csr = own.csr()
            is_loop, row = is_self_loop(csr), csr.row_index()
            ours = value.new_full((csr.num_rows,), float("nan"))
            ours[row[is_loop]] = value[is_loop].sqrt()
            factors = share_rows(ours, everyone.counts, self._communicator, label=label)
            product = factors[everyone.place[csr.index.long()]] * ours[row]
            same = (product - value).abs() <= 4 * torch.finfo(value.dtype).eps * value.abs()
            agreed = self._communicator.gather([float(bool(same.all()) and not bool(ours.isnan().any()))])
            return factors.unsqueeze(1) if bool(agreed.all()) else None

        return self._kept(layer, "factors", value, topology, "factors", find)

    def _kept(
        self,
        layer: MessagePassing,
        name: str,
        value: Tensor,
        topology: Topology,
        what: object,
        find: Callable[[], Tensor | None],
        *,
        anew: bool = True,
    ) -> Tensor | None:
        """What ``find`` gives, or has given; of what is not kept, nothing unless it is to be found ``anew``."""
        key = *identity_of(value), id(topology), what
        known = fixable(value) and key in self._known
        if min(topology.counts) <= 1:  # see blind_to()
            known = not self._communicator.gather([float(not known)]).any()
        if not known:
            # most of what evaluation computes, it computes anew; that must not replace what training has kept
            passing = not torch.is_grad_enabled() and (layer, name) in self._readers
            if not fixable(value) or passing:
                return find() if anew else None
            with torch.inference_mode(False), torch.no_grad():
                self._known[key] = value.detach(), topology, find()
        self._readers[layer, name] = key
        read = set(self._readers.values())
        self._known = {one: kept for one, kept in self._known.items() if one in read}
        return self._known[key][2]
