"""The engine of ``pull`` and ``pushpull``: models run on sampled neighbourhoods, and skip rows that no layer reads."""

from __future__ import annotations

import contextlib
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from pygdist.backends.base import Abilities, names_of
from pygdist.backends.passes.batch import BatchPass, num_nodes_of_batch
from pygdist.backends.passes.kinds import Lengths, kinds_of
from pygdist.backends.passes.rehearsal import Call, ModelFacts, look_at
from pygdist.backends.passes.rows import Rows
from pygdist.backends.passes.sampled import SAMPLED_HOPS, AllRowsNeededError, SampledHops, SampledPass
from pygdist.backends.recomputing.backend import RecomputingBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.hops.arguments import copied, each_tensor, edges_among, first_rows, tensors_of
from pygdist.hops.draws import without_randomness
from pygdist.hops.user_code import in_one_line
from pygdist.nn.inputs import edge_inputs
from pygdist.sampler.base import MiniBatches
from pygdist.sampler.topology import Topology

log = logging.getLogger(__name__)


class SampledBackend(RecomputingBackend):
    """Run a model on mini-batches that are sampled across ranks; hops exchange nothing."""

    abilities = Abilities(
        exact=False,
        approximation="a step trains on sampled neighbourhoods of some nodes",
        mini_batches=True,
        evaluates=False,
        reruns_layers=False,
    )
    per_graph: ClassVar[tuple[str, ...]] = ("_num_seeds",)
    _num_seeds: int | None = None  # of the batch that the model runs on
    _all_rows = ""  # the reason why all rows are computed, about the model

    def __init__(self) -> None:
        super().__init__(None)

    @abstractmethod
    def steps(self, shard: Shard, batches: MiniBatches | None, model: nn.Module, *, seed: int) -> Any:
        """Return the steps of an epoch, such as :class:`~pygdist.sampler.steps.Steps`. Every rank makes the call.

        The steps have a thread that makes exchanges on a process group of its own.

        Args:
            shard: This rank's part, on the CPU.
            batches: The kind of batches.
            model: The model, whose ``forward`` names the values of edges that it takes.
            seed: Seed of all random numbers.

        Raises:
            InputError: On all ranks, if there are no batches, batches do not cross parts, or there is nothing to learn.
        """

    def beside(self, shard: Shard, model: nn.Module, num_parts: int | None = None) -> tuple[Communicator, Topology]:
        """Return a communicator for the thread that makes batches, and the edges that this rank holds.

        Every rank makes the call. Arguments are those of :meth:`~pygdist.sampler.topology.Topology.of`; the edges have
        the values that the model takes.
        """
        aside = self.communicator.apart(quiet=True)
        return aside, Topology.of(shard, list(edge_inputs(model, shard)), aside, num_parts=num_parts)

    def batches_of(self, batches: MiniBatches | None) -> MiniBatches:
        """Return ``batches``; refuse ``None``, as this backend trains only on batches."""
        if batches is None:
            raise InputError(
                f"batches: backend '{self.name}' trains on mini-batches; set batches, for example NeighborBatches([25, "
                "10], batch_size=1000) with a number for each layer, or EdgeBatches for links"
            )
        return batches

    # -- a pass over a batch -------------------------------------------------------------------------------------------

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edges = edges_among(model.forward, args, kwargs)
        if any(one.csr() is self.shard.adjacency.csr() for one in edges):
            raise InputError(
                f"backend '{self.name}' trains on mini-batches, but the model was called on the edges of a part: call "
                f"it on batches of {type(self).__name__}.steps(), or use backend "
                f"{names_of(lambda abilities: abilities.exact)}"
            )
        self.kept.forget()  # of the batch before
        self._pass, self._num_seeds = self._over(model, args, kwargs), None
        hops = edges[0].slot(SAMPLED_HOPS) if len(edges) == 1 else None
        if hops is not None:
            facts = self._facts_of(model, args, kwargs, edges[0], hops)
            self._pass = self._over(model, args, kwargs) if facts is None else self._trimmed(edges[0], hops, facts)
            self._num_seeds = hops.num_seeds
        return args, kwargs

    @override
    def model_output(self, output: Any) -> Any:
        num_rows, num_seeds = self.num_rows, self._num_seeds
        output = super().model_output(output)
        if num_seeds is None:
            return output
        return each_tensor(output, lambda out: first_rows(out, (num_rows,), num_seeds) if out.dim() else out)

    def _over(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchPass:
        """Return the pass in which layers compute all rows of a batch, as in PyG."""
        num_rows = num_nodes_of_batch(model, args, kwargs)
        return BatchPass(num_rows, None, in_weights=False, without_norm=lambda layer: None)

    def _trimmed(self, adjacency: Adjacency, hops: SampledHops, facts: ModelFacts) -> SampledPass:
        return SampledPass(hops, hops.rows(adjacency, len(facts.widths)), facts)

    def _facts_of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], adjacency: Adjacency, hops: SampledHops
    ) -> ModelFacts | None:
        """Return the hops of a model if its layers need not compute all rows; ``None`` if they must.

        Each rank decides alone, as nothing is exchanged in a pass.
        """
        entry = self._known(model)
        lengths = Lengths(self.communicator.rank, sum(hops.num_nodes), adjacency.size(1))
        key, kinds = kinds_of(model, args, kwargs, lengths, Communicator(), {})
        if key not in entry.facts and 0 in hops.num_nodes[:-1]:
            return None  # with few rows, what leaves some out may differ in nothing
        if key not in entry.facts:
            call = Call(model, args, kwargs, kinds)
            with torch.inference_mode(False):
                entry.facts[key] = self._tried(call, adjacency, hops)
        return entry.facts[key]

    def _tried(self, call: Call, adjacency: Adjacency, hops: SampledHops) -> ModelFacts | None:
        """Run a model on its first batch with all rows and with those that are read; ``None`` if the seeds' differ."""
        model = call.model
        try:
            facts = look_at(call, partial(self._rehearse, model), partial(self._attempt, model), lambda: None)
            if not facts.widths:
                return None
            outs = []
            for training, trims in itertools.product((True, False), (True, False)):  # a norm may differ in training
                over = self._trimmed(adjacency, hops, facts) if trims else self._over(model, call.args, call.kwargs)
                with self._by_itself(model, over, training), _plainly(adjacency.device), without_randomness():
                    args, kwargs = copied(model.forward, call.args, call.kwargs)
                    outs.append(tensors_of(model.forward(*args, **kwargs)))
        except AllRowsNeededError:
            self._all_rows = "looks at all nodes of a batch at once, as norms over nodes do, or normalises weights"
            return None
        except Exception as error:  # whatever a model says where rows are missing
            self._all_rows = f"ends with {in_one_line(error)} where rows that no layer reads are left out"
            log.info("all rows of a batch are computed in each layer: the model %s", self._all_rows)
            return None
        of_seeds = [[one[: hops.num_seeds] if one.dim() else one for one in out] for out in outs]
        alike = all(
            len(trimmed) == len(whole) and all(map(_are_close, trimmed, whole))
            for trimmed, whole in zip(of_seeds[::2], of_seeds[1::2], strict=True)
        )
        self._all_rows = "puts out something else where rows that no layer reads are left out"
        return facts if alike else None

    @override
    def _part_pass(self, rows: Rows, facts: ModelFacts, *, alone: bool = False) -> SampledPass:
        return _Trial(SampledHops((rows.num_owned,)), rows, facts)

    @override
    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        running = self._running()
        return running.source_degrees(edge_weight, loop_weight) if isinstance(running, SampledPass) else None

    # -- no other rank takes part in a hop -----------------------------------------------------------------------------

    @property
    @override
    def _alone(self) -> bool:
        return True

    @property
    @override
    def alone(self) -> bool:
        return True

    @property
    @override
    def num_nodes(self) -> int:
        return self.num_rows

    @override
    def whole_degrees(self, degree: Tensor) -> Tensor:
        return self._running().source_rows(degree)[: degree.size(0)]


class _Trial(SampledPass):
    """A pass over a few rows that stand for a neighbourhood: degrees are ones."""

    @override
    def source_degrees(self, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor:
        return torch.ones(self.num_sources, device=self.rows.adjacency.device)


@contextlib.contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """Compute without gradients, and without autocast, which rounds more than what is compared."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Tell if two results differ by rounding alone."""
    if one.shape != other.shape:
        return False
    largest = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=0, atol=torch.finfo(other.dtype).eps ** 0.6 * largest, equal_nan=True)
