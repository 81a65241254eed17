"""Loaders over a rank's parts. A training step gets a whole part, a mini-batch of it, or nothing.

Ranks may have different numbers of batches in an epoch, but Lightning makes a collective call in each step. So all
ranks make as many steps as the rank with most batches, and are idle when they have no batch left.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.backends.passes.edge_norm import EDGE_NORM, EdgeNorm
from pygdist.backends.passes.rows import EDGES_INTO
from pygdist.backends.passes.sampled import SAMPLED_HOPS, SampledHops
from pygdist.backends.sampling.pipeline import LaggedSteps
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS
from pygdist.graph.self_loops import NO_LOOPS, is_self_loop
from pygdist.kernels import CSR
from pygdist.memory.limits import told
from pygdist.nn.loss import labelled_rows
from pygdist.sampler import BatchLoader
from pygdist.sampler.steps import Steps


class PartBatch:
    """The input of one step.

    It is a part (``part``), a mini-batch of it (``part`` and ``sample``), or, where a rank is idle, nothing or an empty
    mini-batch (``sample`` alone). ``open_part`` returns a part, and may free the one before. ``num_in_step`` is the
    number of nodes or pairs that all ranks train on in the step, if it is known without an exchange, on all ranks
    alike.
    """

    # not a dataclass, as Lightning's precision plugins copy dataclasses field by field
    def __init__(
        self,
        part: int | None = None,
        open_part: Callable[[int], Shard] | None = None,
        sample: Data | None = None,
        num_in_step: int | None = None,
    ) -> None:
        self.part, self.sample, self.num_in_step = part, sample, num_in_step
        self._open = open_part

    @property
    def shard(self) -> Shard | None:
        """The part, opened when asked for, as Lightning's loops hold batches for long; ``None`` if the rank is idle."""
        return None if self.part is None or self._open is None else self._open(self.part)

    if not TYPE_CHECKING:  # type checkers report attributes that do not exist

        def __getattr__(self, name: str) -> Any:
            if name in vars(PartBatch):  # the property `shard` raised an AttributeError
                return object.__getattribute__(self, name)
            raise AttributeError(
                f"a PartBatch has no '{name}': a backend that trains parts by themselves gets a part (batch.shard), a "
                "mini-batch of it (batch.sample) or nothing in a step; for another loss override "
                "NodeClassifier.node_losses, not training_step",
                name=name,
                obj=self,
            )


class Resumable(ABC):
    """Base of loaders with which a run can resume within an epoch.

    Lightning counts the steps that were ``made`` in the epoch, 0 between epochs. A checkpoint also holds the layout of
    the epoch, which must be the same when the run resumes: its number of steps, and numbers that decide what a step is
    (``dealt``), such as the number of ranks. Both are equal on all ranks, and Lightning saves those of rank 0.
    """

    def __init__(self, made: Callable[[], int] = lambda: 0, dealt: Mapping[str, int] | None = None) -> None:
        self._made, self._dealt = made, dict(dealt or {})

    def state_dict(self) -> dict[str, Any]:
        """Return the layout of an epoch."""
        return {"steps": len(self), **self._dealt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume an epoch that was begun in another run.

        Raises:
            InputError: On all ranks, if that run had another layout, so the remaining steps are not known.
        """
        made, layout = self._made(), self.state_dict()
        if made and state != layout:
            then, now = (", ".join(f"{value} {name}" for name, value in one.items()) for one in (state, layout))
            raise InputError(
                f"the checkpoint was made after {made} steps of an epoch with {then}, but this run has {now}: resume "
                "it with the same numbers, or take a checkpoint from the end of an epoch"
            )

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on all ranks."""


class PartLoader(Resumable):
    """Yields a rank's parts, or their mini-batches, one part after another; one part is open at a time.

    It is no ``DataLoader``, for the same reason as :class:`FullGraphLoader`.

    Args:
        parts: Numbers of the parts.
        open_part: Returns a part, and may free the one before.
        cut: Returns a part's mini-batches; ``None`` to take each part whole.
        epoch: Returns the epoch that begins, on which mini-batches depend.
        made: As for :class:`Resumable`, like ``dealt``; so many steps of an epoch are skipped.
    """

    def __init__(
        self,
        parts: Sequence[int],
        open_part: Callable[[int], Shard],
        *,
        cut: Callable[[int, Shard], BatchLoader] | None = None,
        epoch: Callable[[], int] = lambda: 0,
        made: Callable[[], int] = lambda: 0,
        dealt: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(made, dealt)
        self._parts = list(parts)
        self._open, self._cut, self._epoch = open_part, cut, epoch
        self._samples: tuple[int, BatchLoader] | None = None  # of the part that is open
        self.num_steps: int | None = None  # of all ranks, if some have more batches than this one

    @property
    def num_batches(self) -> int:
        """Number of batches that this rank has in an epoch; in further steps it is idle."""
        return sum(self._batches_by_part.values())

    @cached_property
    def _batches_by_part(self) -> dict[int, int]:
        return {part: 1 if self._cut is None else len(self._samples_of(part)) for part in self._parts}

    @override
    def __len__(self) -> int:
        return self.num_batches if self.num_steps is None else self.num_steps

    def __iter__(self) -> Iterator[PartBatch]:
        made = self._made()  # not earlier: Lightning makes iterators that it does not use
        for part, count in self._batches_by_part.items():
            if made < count:
                yield from self._batches_of(part, made)
            made = max(made - count, 0)
        for _ in range(len(self) - self.num_batches - made):
            yield PartBatch()

    def agree(self, communicator: Communicator) -> None:
        """Make as many steps as the rank with most batches; every rank makes the call.

        Raises:
            InputError: On all ranks, if one cannot draw its batches.
        """
        steps, error = 0, None
        try:
            steps = self.num_batches  # draws from parts, which may fail
        except Exception as problem:
            if (error := told(problem)) is None:
                raise
        communicator.agree(error)
        self.num_steps = int(communicator.gather([float(steps)]).max())

    def _batches_of(self, part: int, made: int) -> Iterator[PartBatch]:
        if self._cut is None:
            yield PartBatch(part, self._open)
            return
        samples = self._samples_of(part)
        samples.set_epoch(self._epoch())
        batches, left = itertools.islice(samples, made, None), len(samples) - made
        del samples
        for sample in batches:
            left -= 1
            if not left and len(self._parts) > 1:  # they hold the part, and the generator may wait here for long
                self._samples = batches = None  # type: ignore[assignment]
            yield PartBatch(part, self._open, sample)

    def _samples_of(self, part: int) -> BatchLoader:
        if self._samples is None or self._samples[0] != part:
            assert self._cut is not None
            self._samples = None  # they hold the part before
            self._samples = (part, self._cut(part, self._open(part)))
        return self._samples[1]


class StepLoader(Resumable):
    """Yields a rank's mini-batches that are sampled across ranks.

    Args:
        part: Number of the rank's part.
        open_part: Returns it.
        steps: The steps of an epoch.
        epoch: Returns the epoch that begins.
        made: As for :class:`Resumable`, like ``dealt``; so many steps of an epoch are skipped.
    """

    def __init__(
        self,
        part: int,
        open_part: Callable[[int], Shard],
        steps: Steps | LaggedSteps,
        *,
        epoch: Callable[[], int],
        made: Callable[[], int],
        dealt: Mapping[str, int],
    ) -> None:
        super().__init__(made, dealt)
        self._part, self._open, self._steps, self._epoch = part, open_part, steps, epoch

    @override
    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[PartBatch]:
        for sample in self._steps.epoch(self._epoch(), self._made()):
            count = sample.num_in_step
            if sample.batch_size:
                yield PartBatch(self._part, self._open, sample, num_in_step=count)
            else:
                yield PartBatch(sample=sample, num_in_step=count)

    def close(self) -> None:
        """End the thread that makes batches."""
        self._steps.close()

    def release(self) -> None:
        """End the thread, and close its process group; every rank makes the call between two epochs."""
        self._steps.release()


class FullGraphLoader(Resumable):
    """Yields the rank's one part, once per epoch: a full-graph epoch is one step.

    It is no ``DataLoader``, as Lightning would put a distributed sampler into one, and a rank would see another
    rank's data.
    """

    def __init__(
        self, shard: Shard, *, made: Callable[[], int] = lambda: 0, dealt: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(made, dealt)
        self.shard = shard

    def __iter__(self) -> Iterator[Shard]:
        yield self.shard

    @override
    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class Layout:
    """Facts of a mini-batch that the host has counted, so that it does not wait for a GPU to know them.

    Attributes:
        edges_into: By a number of rows (the seeds, and the nodes up to each hop), the edges into the first so many.
        has_loops: True if an edge leads from a row to itself.
        share: Sum of GraphSAINT's norms of the labelled training rows; ``None`` without norms.
        of: The fields that it was made of, with their versions.
    """

    edges_into: Mapping[int, int]
    has_loops: bool
    share: float | None = None
    of: Mapping[str, tuple[Tensor | None, int]] = field(default_factory=dict)


def laid_out(sample: Data) -> Data:
    """Return a mini-batch with its edges sorted by destination, as kernels need, and with what a step asks of it.

    Added are the sparse matrix of the edges (``csr_indptr`` and ``csr_index``), the rows whose labels are learned
    (``labelled``), and a :class:`Layout`. All is computed where the batch is: on the host, before it goes to a GPU.
    """
    edges, num_nodes = sample.edge_index, int(sample.num_nodes)
    out = copy.copy(sample)
    if not bool((edges[1, 1:] >= edges[1, :-1]).all()):
        perm = edges[1].argsort(stable=True)
        edges = edges.index_select(1, perm)
        for name in (*EDGE_FIELDS, "edge_norm"):
            if out.get(name) is not None:
                out[name] = out[name].index_select(0, perm)
    csr, share = Adjacency(edges, num_src=num_nodes, num_dst=num_nodes).csr(), None
    out.edge_index, out.csr_indptr, out.csr_index = edges, csr.indptr, csr.index
    if (y := out.get("y")) is not None:
        mask = out.get("train_mask")  # without one, outputs and labels are those of the seeds
        out.labelled = labelled_rows(y, torch.ones(len(y), dtype=torch.bool, device=y.device) if mask is None else mask)
        norm = out.get("node_norm")
        share = None if norm is None else float(norm[out.labelled].sum(dtype=torch.float64))
    ends = itertools.accumulate(out.get("num_sampled_nodes") or ())
    out.layout = Layout({end: int(csr.indptr[end]) for end in ends}, bool(is_self_loop(csr).any()), share)
    return stamped(out)


def stamped(sample: Data) -> Data:
    """Note the fields that a batch's layout was made of, as they are now: whoever changes them gets another layout."""
    sample.layout = replace(sample.layout, of=_fields_of_layout(sample))
    return sample


def _fields_of_layout(sample: Data) -> dict[str, tuple[Tensor | None, int]]:
    fields = {name: sample.get(name) for name in ("edge_index", "y", "train_mask", "node_norm")}
    return {name: (one, 0 if one is None or one.is_inference() else one._version) for name, one in fields.items()}


def _is_laid_out(sample: Data) -> bool:
    layout: Layout | None = sample.get("layout")
    now = _fields_of_layout(sample)
    return layout is not None and all(
        now[name][0] is one and now[name][1] == version for name, (one, version) in layout.of.items()
    )


def sampled_graph(sample: Data) -> tuple[Data, Adjacency]:
    """Return a mini-batch as the graph and edges of a model's call.

    GraphSAINT's ``edge_norm`` becomes the edges' weight, or a factor of it. For layers that take no weights the backend
    finds it with the edges.
    """
    sample = sample if _is_laid_out(sample) else laid_out(sample)  # a hook may have dropped edges
    layout: Layout = sample.layout
    names = (*EDGE_FIELDS, "edge_norm")
    graph = Data(**{name: value for name, value in sample.items() if name not in (*names, "csr_indptr", "csr_index")})
    fields = {name: sample[name] for name in names if sample.get(name) is not None}
    adjacency = Adjacency.from_csr(CSR(sample.csr_indptr, sample.csr_index, len(sample.csr_indptr) - 1))
    adjacency._data = sample.edge_index
    adjacency.keep(EDGES_INTO, layout.edges_into)
    adjacency.keep(NO_LOOPS, not layout.has_loops)
    if (norm := fields.pop("edge_norm", None)) is not None:
        weight, in_degree, n_id = fields.get("edge_weight"), graph.get("in_degree"), graph.get("n_id")
        edge_norm = EdgeNorm.of(norm, adjacency.csr(), edge_weight=weight, in_degree=in_degree, n_id=n_id)
        fields["edge_weight"] = adjacency.slot(EDGE_NORM, lambda: edge_norm).passed
    if "num_sampled_nodes" in sample:
        blocks = tuple(sample.get("blocks", ()))
        hops = SampledHops(tuple(sample.num_sampled_nodes), fields.get("edge_weight"), blocks)
        adjacency.slot(SAMPLED_HOPS, lambda: hops)
    return graph.update(fields), adjacency
