"""The edges of all ranks on each of them: what a rank needs that aggregates some columns of every node.

Rows of all ranks stand one rank after the other, each rank's in its own order; so do their in-edges. What a rank knows
by local ids is put together once for each set of edges, and kept with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.overflow import Overflow
from pygdist.comm import Communicator
from pygdist.comm.slices import Elsewhere, share_rows
from pygdist.graph import Adjacency, Shard
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.self_loops import is_self_loop
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest
from pygdist.nn.relations import of_relation

__all__ = ["EdgeTensors", "Everyone", "Topology"]


@dataclass(frozen=True)
class Topology:
    """Edges of all ranks.

    Attributes:
        edges: In-edges of all nodes; an :class:`~pygdist.graph.Adjacency` if those of the rank were one.
        counts: How many each rank has.
    """

    edges: Tensor
    counts: tuple[int, ...]


class Everyone:
    """The nodes of all ranks, in the order in which each rank holds them.

    Args:
        shard: What this rank holds.
        communicator: The ranks; each makes this call, and every other one.
        overflow: Where the edges of all ranks are to be; on the rank's device by default.

    Attributes:
        counts: How many nodes each rank owns.
        draws_alike: A seed gives the same random numbers on all ranks.
        overflow: As given.
        place: Where each of the shard's rows (owned, then halo) stands among all; ``(n + h,)`` int64.
    """

    def __init__(self, shard: Shard, communicator: Communicator, overflow: Overflow | None = None) -> None:
        self._communicator, self.overflow = communicator, overflow
        self._made = 0  # topologies; by number: the rank's edges and those of all, and who asked for which
        self._known: dict[int, tuple[Adjacency, Topology]] = {}
        self._asked: dict[tuple[object, ...], int] = {}
        found = communicator.gather([float(shard.num_owned), float(_drawn(shard.n_id.device))])
        self.counts = tuple(int(count) for count in found[:, 0])
        self.draws_alike = bool((found[:, 1] == found[0, 1]).all())
        first = sum(self.counts[: communicator.rank])
        own = torch.arange(first, first + shard.num_owned, device=shard.n_id.device)
        halo = communicator.exchange_rows(own[:, None], shard.plan, label="places of rows").squeeze(1)
        self.place = torch.cat([own, halo])

    def forget(self) -> None:
        """Let go of all edges, and of who asked for them; all ranks at once."""
        self._known.clear()
        self._asked.clear()

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Where rows and edges of all ranks are; on the rank's device by default."""
        return None if self.overflow is None else self.overflow.elsewhere

    @property
    def num_rows(self) -> int:
        """Nodes of all ranks."""
        return sum(self.counts)

    def topology(self, edge_index: Tensor, reader: tuple[object, ...]) -> Topology:
        """The edges of all ranks, from this rank's in local ids; put together once for an adjacency.

        Args:
            edge_index: The edges.
            reader: Who asks, the same on all ranks: a layer, and which of its hops. Who asks for the edges of the time
                before gets them without a word, unless they are a relation's, which may be others on some ranks alone.
                Otherwise ranks agree on whether all have met these before: two relations of which a rank has no edge
                are one to it, and two to others.
        """
        if not isinstance(edge_index, Adjacency):
            with torch.no_grad():
                return self._of_list(edge_index)
        own, number = edge_index.origin, self._asked.get(reader)
        if number is None or self._known[number][0] is not own or of_relation(own):
            met = [1.0, *(float(one is own) for one, _ in self._known.values())]
            everywhere = self._communicator.gather(met).amin(0)[1:].tolist()
            number = next((one for one, met_by_all in zip(self._known, everywhere, strict=True) if met_by_all), None)
            if number is None:
                number, self._made = self._made, self._made + 1
                with torch.inference_mode(False), torch.no_grad():
                    self._known[number] = own, self._of_rows(edge_index.csr())
            self._asked[reader] = number
            asked = set(self._asked.values())
            self._known = {one: kept for one, kept in self._known.items() if one in asked}
        return self._known[number][1]

    def _of_rows(self, csr: CSR) -> Topology:
        communicator = self._communicator
        index = self.place.to(narrowest(self.num_rows)).index_select(0, csr.index)
        counts = tuple(int(count) for count in communicator.gather([float(csr.num_entries)])[:, 0])
        every = share_rows(index, counts, communicator, label="in-edges of all", elsewhere=self.elsewhere)
        degrees = share_rows(csr.indptr.diff(), self.counts, communicator, label="in-edges of all, numbers")
        indptr = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=every.device)
        torch.cumsum(degrees.to(every.device), 0, out=indptr[1:])
        return Topology(Adjacency.from_csr(CSR(indptr, every, self.num_rows)), counts)

    def _of_list(self, edge_index: Tensor) -> Topology:
        size = self._communicator.world_size
        placed = self.place[edge_index].t().contiguous()
        found = self._communicator.swap([placed] * size, label="edges of all")
        return Topology(torch.cat(found).t().contiguous(), tuple(part.size(0) for part in found))


def _drawn(device: torch.device) -> int:
    """What a seed gives on a device, as a number: on GPUs that depends on their kind, with more values than threads."""
    values = torch.ones(1 << 22 if device.type == "cuda" else 1 << 12, device=device)
    values.bernoulli_(0.5, generator=torch.Generator(device).manual_seed(0))
    return zlib.crc32(values.to(torch.uint8).cpu().numpy().tobytes())


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
        elsewhere: Elsewhere | None = None,
    ) -> Tensor:
        """The rows of all ranks' edges.

        Args:
            layer: Who reads them.
            name: As which argument.
            value: Those of this rank's edges.
            topology: The edges.
            label: Named when something goes wrong.
            dtype: Of the result.
            elsewhere: Where it is; on the rank's device by default.
        """
        found = self._of_all(layer, name, value, topology, label, dtype, elsewhere, anew=True)
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
        elsewhere: Elsewhere | None = None,
    ) -> Tensor | None:
        """:meth:`of_all` of what stays the same from pass to pass; nothing of what would travel in each."""
        return self._of_all(layer, name, value, topology, label, dtype, elsewhere, anew=False)

    def _of_all(
        self,
        layer: MessagePassing,
        name: str,
        value: Tensor,
        topology: Topology,
        label: str,
        dtype: torch.dtype | None,
        elsewhere: Elsewhere | None,
        *,
        anew: bool,
    ) -> Tensor | None:
        def share() -> Tensor:
            given = value if dtype is None else value.to(dtype)
            return share_rows(given, topology.counts, self._communicator, label=label, elsewhere=elsewhere)

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
