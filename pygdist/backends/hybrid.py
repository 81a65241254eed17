"""``hybrid``: compute a remote row here, or fetch it, whichever costs less (NeutronStar, Sec. 3).

Exact with every choice. A hop reads halo rows, which are rows of other ranks' nodes. A rank fetches a halo row (Eq. 2
gives the cost), or computes the row and all rows on which it depends, down to the features (Eq. 1). Algorithm 4 visits
the halo rows, the cheapest to compute first. It computes a row that costs less to compute than to fetch, as long as
memory is left (Eq. 3).
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pygdist.backends.fetching.fetcher import FetchingBackend, FetchOptions
from pygdist.backends.passes.rehearsal import can_be_timed
from pygdist.backends.planning.expected import EpochCosts, Expected, computed_shares, expected_epoch
from pygdist.backends.planning.greedy import Costs, Halo, greedy_choice
from pygdist.backends.planning.hop_costs import HopCosts, Timed, time_hops
from pygdist.backends.planning.kept_plans import Plan, load_plan, plan_key, save_plan, structure_of
from pygdist.backends.planning.network import Network, probe_exchange, probe_reduce
from pygdist.backends.recomputing.backend import Probe, RecomputingBackend
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood

log = logging.getLogger(__name__)

_FACTORS = (0.5, 1.0, 2.0)  # overlap hides a part of what rows cost to fetch, congestion adds to it
_EVEN = Costs(vertex=1.0, edge=1.0, value=0.0)  # by these the cheapest rows are those with the fewest edges below them


class HybridBackend(RecomputingBackend):
    """Compute some remote rows and fetch the others (NeutronStar, SIGMOD 2022, Sec. 3, Algorithm 4).

    With neither ``cache_ratio`` nor ``costs``, the first forward pass measures the cost of the model's hops, on some of
    the rank's rows and edges, and the cost of rows on the network. It compares five choices: three greedy ones (with
    the measured cost of fetching, half of this cost, and twice this cost), all rows fetched (``comm``), and all rows
    computed (``cache``; not with ``memory_gib``). The backend takes the choice with the shortest expected epoch, and
    keeps this plan beside the partitioned graph, in ``plans``. A later run with the same model, device and ranks takes
    the kept plan, if the network is about as fast as before. A model with reentrant activation checkpointing cannot be
    measured: all its remote rows are fetched.

    Args:
        cache_ratio: Compute this share of the remote rows that each hop reads, the cheapest ones, and fetch the others;
            0 is ``comm``, 1 is ``cache``. The cheapest rows are those with the fewest rows and edges below them.
            Edges count up to a limit (at least 10,000 for each row), beyond which rows cost the same.
        costs: Choose by these costs instead of measured ones.
        memory_gib: Most memory, in GiB, that replicas and their in-edges may take on a rank; no limit by default. While
            a rank chooses, it also holds the in-edges of all rows that it could compute. The limit does not count these
            edges; with ``cache_ratio=0`` there are none.
        replan: Measure and choose again even if there is a kept plan.
        fetching: ``ring``, ``overlap``, ``wire_dtype`` and ``halo_gib``, as of
            :class:`~pygdist.backends.CommBackend`.

    Attributes:
        expected: The predicted time of an epoch, once the backend has planned; ``None`` with ``cache_ratio``. With
            ``costs``, the prediction counts only these costs: no latency, no averaging of gradients.

    Raises:
        InputError: If ``cache_ratio``, ``memory_gib`` or an option of ``fetching`` is out of range, or ``cache_ratio``
            is given together with ``costs`` or ``replan``. In the first forward pass, if the choice needs pygdist's
            native library and this library is missing.
    """

    name = "hybrid"

    def __init__(
        self,
        cache_ratio: float | None = None,
        costs: Costs | None = None,
        memory_gib: float | None = None,
        replan: bool = False,
        **fetching: Any,
    ) -> None:
        super().__init__(FetchOptions(**fetching))
        if cache_ratio is not None and not 0 <= cache_ratio <= 1:
            raise InputError(f"cache_ratio is {cache_ratio}, expected a number from 0 (fetch all) to 1 (compute all)")
        if memory_gib is not None and not 0 <= memory_gib < math.inf:
            raise InputError(f"memory_gib is {memory_gib}, expected a number of GiB, 0 or more")
        if cache_ratio is not None and (costs is not None or replan):
            unused = "replan" if replan else "costs"
            raise InputError(
                f"{unused}: nothing is measured or chosen with cache_ratio={cache_ratio}; leave one of them out"
            )
        self.cache_ratio, self.costs, self.memory_gib, self.replan = cache_ratio, costs, memory_gib, replan
        self.expected: Expected | None = None

    @override
    def exact_case(self, num_hops: int) -> FetchingBackend | None:
        copy = super().exact_case(num_hops)
        if isinstance(copy, HybridBackend):  # rows of both kinds if this one may have both, and nothing measured
            copy.cache_ratio = self.cache_ratio if self.cache_ratio in (0, 1) else 0.5
            copy.costs, copy.memory_gib = None, None
        return copy

    @property
    @override
    def expected_epoch_s(self) -> float | None:
        return None if self.expected is None else self.expected.epoch_s

    @override
    def hops_around(self, num_hops: int) -> int:
        return 1 if self.cache_ratio == 0 else num_hops

    @override
    def choose(self, around: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        halo = Halo(around, self.shard.num_owned, self.shard.num_halo, widths)
        if self.communicator.world_size == 1 or not widths:
            return list(halo.choice(False))
        if self.cache_ratio is not None:
            return list(self._by_share(halo, self.cache_ratio))
        if self.costs is not None:
            return list(self._by_costs(halo, self.costs))
        if not can_be_timed(probe.call, probe.rehearse):
            self._log("all rows are fetched: a model with reentrant activation checkpointing cannot be timed")
            return list(halo.choice(False))
        return list(self._by_measurement(halo, probe))

    def _by_share(self, halo: Halo, share: float) -> Tensor:
        chosen = self._greedy(halo, _EVEN.by_hop(halo.widths), share)
        self._log("by the given share: %s", _percentages(computed_shares(self.communicator, halo, chosen)))
        return chosen

    def _by_costs(self, halo: Halo, costs: Costs) -> Tensor:
        hops = costs.by_hop(halo.widths)
        chosen = self._greedy(halo, hops)
        network = Network(value_s=costs.value, latency_s=0.0, busy=0.0)
        epoch = EpochCosts(hops=hops, network=network, overlap=self.options.overlap)
        self.expected = expected_epoch(self.communicator, halo, chosen, epoch)
        self._log("by the given costs: %s", _described(self.expected))
        return chosen

    def _by_measurement(self, halo: Halo, probe: Probe) -> Tensor:
        """Measure the costs and take the choice with the shortest expected epoch; or take a kept plan."""
        start = time.perf_counter()
        model, folder = probe.call.model, self.shard.folder
        facts = self._facts(halo.widths, model)
        path = None if folder is None else folder / "plans" / plan_key(facts)
        like = next((one for one in model.parameters() if one.is_floating_point()), self.shard.x).detach()
        ring, wire = self.options.ring, self.options.wire
        network = probe_exchange(self.communicator, self.shard.plan, like, ring=ring, wire=wire)
        plan = None
        if not self.replan:
            plan = load_plan(path, self.communicator, len(halo.widths), halo.around.n_id.numel(), network.value_s)
        if plan is None:
            edges, ranks = self.shard.adjacency, self.communicator
            timed = time_hops(probe.call, probe.rehearse, probe.begin_pass, edges, ranks, halo.widths)
        else:
            timed = Timed.from_dict(plan.facts["timed"])
        epoch = self._epoch_costs(halo, probe, network, timed)
        self.communicator.buffers.clear()  # only the measurements needed these
        if plan is not None:
            self.expected = expected_epoch(self.communicator, halo, plan.chosen, epoch)
            self._log("plan of an earlier run, %s: %s", path, _described(self.expected))
            return plan.chosen

        measured_s, start = time.perf_counter() - start, time.perf_counter()
        chosen, name, self.expected = self._shortest(halo, epoch)
        planned_s, described = time.perf_counter() - start, _described(self.expected)
        self._log("measured in %.2g s, planned in %.2g s: %s (%s)", measured_s, planned_s, described, name)
        if path is not None:
            facts |= {
                **asdict(network), "timed": asdict(timed), "costs": asdict(epoch.hops), "choice": name,
                "measured_in_s": measured_s, "planned_in_s": planned_s, "expected": asdict(self.expected),
            }  # fmt: skip
            save_plan(path, self.communicator.rank, Plan(chosen, facts))
        return chosen

    def _epoch_costs(self, halo: Halo, probe: Probe, network: Network, timed: Timed) -> EpochCosts:
        # a value's seconds are those of two passes; a hop whose result is kept fetches its rows once
        fetch = tuple(
            network.value_s * width * passes / 2 if seconds > 0 else 0.0
            for width, passes, seconds in zip(halo.widths, timed.passes, timed.edge, strict=True)
        )
        num_bytes = sum(one.nbytes for one in probe.call.model.parameters() if one.requires_grad)
        return EpochCosts(
            hops=HopCosts(row=timed.row, edge=timed.edge, fetch=fetch),
            # a rank that waits for a processor does not wait for the network
            network=replace(network, busy=min(1.0, network.busy * timed.contention)),
            other_s=timed.fixed + probe_reduce(self.communicator, num_bytes),
            overlap=self.options.overlap, shrinks=probe.facts.shrinks, exchanges=timed.exchanges, passes=timed.passes,
        )  # fmt: skip

    def _shortest(self, halo: Halo, epoch: EpochCosts) -> tuple[Tensor, str, Expected]:
        """The candidate with the shortest expected epoch, its name, and what it is expected to take."""
        candidates = self._candidates(halo, epoch.hops)
        expected = {name: expected_epoch(self.communicator, halo, chosen, epoch) for name, chosen in candidates.items()}
        for name, figures in expected.items():
            self._log("  %s: %.3g s an epoch", name, figures.epoch_s)
        best = min(expected, key=lambda name: expected[name].epoch_s)
        return candidates[best], best, expected[best]

    def _candidates(self, halo: Halo, costs: HopCosts) -> dict[str, Tensor]:
        """Choices to compare, by their names."""
        candidates = {}
        for factor in _FACTORS:
            scaled = replace(costs, fetch=tuple(seconds * factor for seconds in costs.fetch))
            candidates[f"greedy, rows at {factor:g} x their cost"] = self._greedy(halo, scaled)
        candidates["all fetched"] = halo.choice(False)
        if self.memory_gib is None:
            candidates["all computed"] = halo.choice(True)
        return candidates

    def _greedy(self, halo: Halo, costs: HopCosts, share: float | None = None) -> Tensor:
        value_bytes = self.shard.value_bytes
        return greedy_choice(halo, costs, value_bytes=value_bytes, share=share, memory_gib=self.memory_gib)

    def _facts(self, widths: tuple[int, ...], model: nn.Module) -> dict[str, Any]:
        """All that a plan depends on; equal on all ranks, as the name of the kept plan is made of it."""
        threads = int(self.communicator.gather([float(torch.get_num_threads())]).max())
        device = self.shard.n_id.device
        return {
            "widths": list(widths), "ranks": self.communicator.world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": threads, "memory_gib": self.memory_gib, **asdict(self.options),
            "savings": asdict(self.savings), "model": structure_of(model),
        }  # fmt: skip

    def _log(self, message: str, *values: Any) -> None:
        if self.communicator.rank == 0:
            log.info(message, *values)


def _described(expected: Expected) -> str:
    return f"{_percentages(expected.computed)}; {expected.epoch_s:.3g} s an epoch expected"


def _percentages(computed: tuple[float, ...]) -> str:
    return "remote rows computed here, " + ", ".join(f"hop {hop}: {share:.0%}" for hop, share in enumerate(computed, 1))
