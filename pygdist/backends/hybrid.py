"""``hybrid``: each remote row is computed again or fetched, whichever costs less (NeutronStar, Sec. 3).

Exact, whatever is chosen. For every hop and every node of another rank that it reads, the cost of computing the node's
row here, with all that it needs from the features on and is not here yet (Eq. 1), stands against that of fetching it
(Eq. 2); the cheapest to compute are taken first, as long as there is memory (Eq. 3, Algorithm 4).
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pygdist.backends.fetching.fetcher import FetchOptions, WireDtype
from pygdist.backends.planning.expected import Expected, computed_shares, expected_epoch
from pygdist.backends.planning.greedy import Costs, _chosen
from pygdist.backends.planning.hop_costs import HopCosts, Timed, time_hops
from pygdist.backends.planning.kept_plans import load_plan, plan_key, save_plan
from pygdist.backends.planning.network import Network, probe_exchange, probe_reduce
from pygdist.backends.recomputing.backend import Probe, RecomputingBackend
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood

__all__ = ["HybridBackend"]

log = logging.getLogger(__name__)

_COPIES = 3  # of a row: itself, its gradient and what the layer keeps for it
_FACTORS = (0.5, 1.0, 2.0)  # overlap hides a part of what rows cost, congestion adds to it


_EVEN = Costs(vertex=1.0, edge=1.0, value=0.0)  # the cheapest are those with the fewest edges below them


class HybridBackend(RecomputingBackend):
    """Compute some remote rows again and fetch the others (NeutronStar, SIGMOD 2022, Sec. 3, Algorithm 4).

    With neither share nor costs given they are measured at the first forward pass: what the model's hops cost on some
    of the rank's own rows and edges, and what rows cost on the network. Of the greedy choices by these costs, and by
    half and twice what rows cost, of ``comm`` and of ``cache``, the one with the shortest expected epoch is taken. It
    is kept beside the partitioned graph, in ``plans``; a run with the same model, device and ranks takes it from there,
    as long as the network is as fast as it was.

    Args:
        cache_ratio: Compute this share of the remote rows that each hop reads, those that are cheapest to compute; 0 is
            ``comm``, 1 is ``cache``. Rows with very many edges below them count as equally expensive.
        costs: What decides where no share is given, instead of what is measured.
        memory_gib: Most memory that replicas may take on a rank; no limit by default. To choose, a rank looks at the
            in-edges of all hops below its nodes, which are held meanwhile and are not counted; with ``cache_ratio=0``
            it looks at none.
        replan: Measure and choose anew even if a plan is kept.
        ring: As for ``comm``, and so the next two.
        overlap: Aggregate while rows travel.
        wire_dtype: ``"bfloat16"`` to halve the bytes.
        halo_gib: Most memory that other ranks' rows may take at a time.

    Attributes:
        expected: What an epoch is expected to take, once that is known; not where a share is given. By given costs it
            knows of nothing else: no latency, no averaging of gradients.
    """

    name = "hybrid"

    def __init__(
        self,
        cache_ratio: float | None = None,
        costs: Costs | None = None,
        memory_gib: float | None = None,
        replan: bool = False,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
        halo_gib: float | None = None,
    ) -> None:
        super().__init__(FetchOptions(ring=ring, overlap=overlap, wire_dtype=wire_dtype, halo_gib=halo_gib))

        if cache_ratio is not None and not 0 <= cache_ratio <= 1:
            raise InputError(f"cache_ratio is {cache_ratio}, expected a share from 0 to 1")
        if memory_gib is not None and memory_gib < 0:
            raise InputError(f"memory_gib is {memory_gib}, expected no negative number")
        self.cache_ratio, self.costs, self.memory_gib, self.replan = cache_ratio, costs, memory_gib, replan
        self.expected: Expected | None = None

    @override
    def hops_around(self, num_hops: int) -> int:
        return 1 if self.cache_ratio == 0 else num_hops

    @override
    def choose(self, found: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        if self.communicator.world_size == 1 or not widths:
            return [torch.zeros(found.n_id.numel(), dtype=torch.bool) for _ in widths]
        if self.cache_ratio is None and self.costs is None:
            return self._measured(found, widths, probe)
        shard, communicator = self.shard, self.communicator
        if self.cache_ratio is not None:
            chosen = self._greedy(found, widths, _EVEN.by_hop(widths), self.cache_ratio)
            said = _shares(computed_shares(communicator, shard.num_halo, chosen))
        else:
            assert self.costs is not None
            costs = self.costs.by_hop(widths)
            chosen = self._greedy(found, widths, costs, None)
            self.expected = expected_epoch(
                communicator, found, shard.num_owned, shard.num_halo, chosen, costs,
                network=Network(value_s=self.costs.value, latency_s=0.0, busy=0.0), other_s=0.0,
                overlap=self.options.overlap,
            )  # fmt: skip
            said = _described(self.expected)
        if communicator.rank == 0:
            log.info("by the %s given: %s", "costs" if self.cache_ratio is None else "share", said)
        return chosen

    @property
    @override
    def expected_epoch_s(self) -> float | None:
        return None if self.expected is None else self.expected.epoch_s

    def _measured(self, found: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        shard, communicator = self.shard, self.communicator
        start = time.perf_counter()
        like = next((one for one in probe.call.model.parameters() if one.is_floating_point()), shard.x).detach()
        network = probe_exchange(
            communicator, shard.plan, like.new_empty(0, 1), ring=self.options.ring, wire=self.options.wire
        )
        facts = self._facts(widths, probe.call.model)
        key, folder = plan_key(facts), None if shard.folder is None else shard.folder / "plans"
        kept = None
        if not self.replan:
            kept = load_plan(communicator, folder, key, len(widths), found.n_id.numel(), network.value_s)
        timed = self._time(probe) if kept is None else Timed.from_dict(kept[1]["timed"])
        # a value's seconds are those of two passes; a hop that did not run is kept: its rows are fetched once
        fetch = tuple(
            network.value_s * width * passes / 2 if seconds > 0 else 0.0
            for width, passes, seconds in zip(widths, timed.passes, timed.edge, strict=True)
        )
        expect = partial(
            expected_epoch, communicator, found, shard.num_owned, shard.num_halo,
            costs=(costs := HopCosts(row=timed.row, edge=timed.edge, fetch=fetch)),
            # who waits for a processor does not wait for the network
            network=replace(network, busy=min(1.0, network.busy * timed.contention)),
            other_s=timed.fixed
            + probe_reduce(communicator, sum(one.nbytes for one in probe.call.model.parameters() if one.requires_grad)),
            overlap=self.options.overlap, shrinks=probe.facts.shrinks, exchanges=timed.exchanges, passes=timed.passes,
        )  # fmt: skip
        communicator.buffers.clear()  # what was measured needs no memory any more
        if kept is not None:
            self.expected = expect(kept[0])
            if communicator.rank == 0:
                log.info("plan of an earlier run, %s: %s", folder, _described(self.expected))
            return kept[0]

        probed = time.perf_counter()
        candidates = self._candidates(found, widths, costs)
        expected = {name: expect(chosen) for name, chosen in candidates.items()}
        name = min(expected, key=lambda one: expected[one].epoch_s)
        self.expected, chosen, planned = expected[name], candidates[name], time.perf_counter()
        if communicator.rank == 0:
            log.info(
                "measured in %.2g s, planned in %.2g s: %s (%s)",
                probed - start, planned - probed, _described(self.expected), name,
            )  # fmt: skip
            for other, figures in expected.items():
                log.info("  %s: %.3g s an epoch", other, figures.epoch_s)
        if folder is not None:
            measured = {
                **asdict(network), "timed": asdict(timed), "costs": costs.to_dict(), "choice": name,
                "measured_in_s": probed - start, "planned_in_s": planned - probed,
            }  # fmt: skip
            save_plan(folder, key, communicator.rank, chosen, {**facts, **measured}, self.expected)
        return chosen

    def _time(self, probe: Probe) -> Timed:
        """Time the model on some of this rank's rows and edges; every rank makes the call."""
        call, facts = probe.call, probe.facts
        return time_hops(call, probe.rehearse, probe.begin_pass, self.shard.adjacency, self.communicator, facts.widths)

    def _facts(self, widths: tuple[int, ...], model: nn.Module) -> dict[str, Any]:
        """What a plan depends on; the same on all ranks, as the name of what is kept is made of it."""
        threads = int(self.communicator.gather([float(torch.get_num_threads())]).max())
        return {
            "widths": list(widths), "ranks": self.communicator.world_size, "device": _device(self.shard.n_id.device),
            "threads": threads, "memory_gib": self.memory_gib,
            **asdict(self.options),
            "savings": asdict(self.savings),
            "model": _structure(model),
        }  # fmt: skip

    def _candidates(self, found: Neighbourhood, widths: tuple[int, ...], costs: HopCosts) -> dict[str, list[Tensor]]:
        """Choices to compare, by what they are."""
        candidates: dict[str, list[Tensor]] = {}
        for factor in _FACTORS:
            scaled = replace(costs, fetch=tuple(seconds * factor for seconds in costs.fetch))
            candidates[f"greedy, rows at {factor:g} x their cost"] = self._greedy(found, widths, scaled, None)
        candidates["all fetched"] = [torch.zeros(found.n_id.numel(), dtype=torch.bool) for _ in widths]
        if self.memory_gib is None:
            candidates["all computed"] = self._greedy(found, widths, costs, 1.0)
        return candidates

    def _greedy(
        self, found: Neighbourhood, widths: tuple[int, ...], costs: HopCosts, share: float | None
    ) -> list[Tensor]:
        own, halo = self.shard.num_owned, self.shard.num_halo
        if share == 1 and self.memory_gib is None:
            masks = torch.zeros((len(widths), found.n_id.numel()), dtype=torch.bool)
            masks[:, own : own + halo] = True
            return list(masks)
        row_bytes = [_COPIES * self.shard.x.element_size() * width for width in widths]
        chosen = _chosen(found, own, halo, row_bytes, costs, share, self.memory_gib)
        masks = torch.zeros((len(widths), found.n_id.numel()), dtype=torch.bool)
        masks[:, own : own + halo] = torch.from_numpy(chosen.astype(bool))
        return list(masks)


def _described(expected: Expected) -> str:
    return f"{_shares(expected.computed)}; {expected.epoch_s:.3g} s an epoch expected"


def _shares(computed: tuple[float, ...]) -> str:
    return "remote rows computed again, " + ", ".join(f"hop {hop}: {one:.0%}" for hop, one in enumerate(computed, 1))


def _structure(model: nn.Module) -> str:
    """The same for models that take the same time, on all ranks and in all runs: no address of a function is in it."""
    modules = [f"{name} {type(one).__qualname__} {one}" for name, one in model.named_modules()]
    parameters = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in model.named_parameters()]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(modules + parameters))


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
