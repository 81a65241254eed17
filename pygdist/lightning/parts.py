"""What a step on a part of the graph is given: the whole part, some of its nodes, or nothing.

Ranks may have different numbers of steps in an epoch, but Lightning makes a collective call in each. So all ranks make
as many as the one with most, and are idle in those for which they have nothing.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch_geometric.data import Data
from typing_extensions import override

from pygdist.backends.passes.edge_norm import EDGE_NORM, EdgeNorm
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS
from pygdist.sampler import BatchLoader

__all__ = ["PartBatch", "PartLoader", "Resumable", "sampled_graph"]


class PartBatch:
    """What one step works on.

    Args:
        part: Which part of the graph; ``None`` if the rank is idle.
        open_part: Gives a part, which may let go of the one before.
        sample: A mini-batch of the part; ``None`` for the whole part.
    """

    # no dataclass: Lightning's precision plugins copy those field by field
    def __init__(
        self,
        part: int | None = None,
        open_part: Callable[[int], Shard] | None = None,
        sample: Data | None = None,
    ) -> None:
        self.part, self.sample = part, sample
        self._open = open_part

    @property
    def shard(self) -> Shard | None:
        """The part; ``None`` if the rank is idle. It is not held here, as Lightning's loops hold batches for long."""
        return None if self.part is None or self._open is None else self._open(self.part)

    if not TYPE_CHECKING:  # who checks types sees what there is

        def __getattr__(self, name: str) -> Any:
            if name in vars(PartBatch):  # opening a part raised it
                return object.__getattribute__(self, name)
            raise AttributeError(
                f"a PartBatch has no '{name}': a backend that trains parts by themselves gets a part (batch.shard), a "
                "mini-batch of it (batch.sample) or nothing in a step; for another loss override "
                "NodeClassifier.node_losses, not training_step",
                name=name,
                obj=self,
            )


class Resumable(ABC):
    """What Lightning asks of a loader so that a run may go on in the middle of an epoch.

    Lightning counts the steps itself; a checkpoint says here what they were steps of. Both are the same on all ranks,
    of which Lightning keeps what rank 0 says.

    Args:
        made: Steps that were made of the epoch that goes on; 0 between epochs.
        dealt: What a step depends on, such as the number of ranks.
    """

    def __init__(self, made: Callable[[], int] = lambda: 0, dealt: Mapping[str, int] | None = None) -> None:
        self._made, self._dealt = made, dict(dealt or {})

    def state_dict(self) -> dict[str, Any]:
        """What an epoch is made of here."""
        return {"steps": len(self), **self._dealt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with an epoch that was begun in another run.

        Raises:
            InputError: On all ranks, if that run dealt parts in another way, so that nobody knows what is left.
        """
        made, own = self._made(), self.state_dict()
        if made and state != own:
            then, now = (", ".join(f"{value} {name}" for name, value in one.items()) for one in (state, own))
            raise InputError(
                f"the checkpoint was made after {made} steps of an epoch with {then}, and here are {now}: resume it "
                "with the same, or take a checkpoint from the end of an epoch"
            )

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""


class PartLoader(Resumable):
    """Goes over parts, one after the other; one is open at a time.

    It is no ``DataLoader``, for the reason that :class:`~pygdist.lightning.datamodule.FullGraphLoader` is none.

    Args:
        parts: Which parts.
        open_part: Gives a part, which may let go of the one before.
        cut: Gives a part's mini-batches; ``None`` to take each part whole.
        epoch: The epoch that begins, by which mini-batches differ.
        made: As for :class:`Resumable`: so many steps of an epoch are passed over.
        dealt: As for :class:`Resumable`.
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
        self.num_steps: int | None = None  # of every rank, where that is more than this one has batches

    @property
    def num_batches(self) -> int:
        """Steps of an epoch in which this rank has something to do."""
        return sum(self._batches_by_part.values())

    @cached_property
    def _batches_by_part(self) -> dict[int, int]:
        return {part: 1 if self._cut is None else len(self._samples_of(part)) for part in self._parts}

    @override
    def __len__(self) -> int:
        return self.num_batches if self.num_steps is None else self.num_steps

    def __iter__(self) -> Iterator[PartBatch]:
        made = self._made()  # when the first batch is asked for: Lightning makes iterators that it does not use
        for part, count in self._batches_by_part.items():
            if made < count:
                yield from self._batches_of(part, made)
            made = max(made - count, 0)
        for _ in range(len(self) - self.num_batches - made):
            yield PartBatch()

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
            if not left and len(self._parts) > 1:  # they hold the part, and this may wait here for long
                self._samples = batches = None  # type: ignore[assignment]
            yield PartBatch(part, self._open, sample)

    def _samples_of(self, part: int) -> BatchLoader:
        if self._samples is None or self._samples[0] != part:
            assert self._cut is not None
            self._samples = None  # before the next part is opened: it holds the one before
            self._samples = (part, self._cut(part, self._open(part)))
        return self._samples[1]


def sampled_graph(sample: Data) -> tuple[Data, Adjacency]:
    """A mini-batch as a model is called with it: edges sorted by destination, so that layers take our kernels.

    ``edge_norm`` of GraphSAINT becomes the edges' weight, or a factor of it; where a layer takes no weights the backend
    finds it with the edges.
    """
    given = (*EDGE_FIELDS, "edge_norm")
    graph, edges = Data(**{name: value for name, value in sample.items() if name not in given}), sample.edge_index
    fields = {name: sample[name] for name in given if sample.get(name) is not None}
    num_nodes = int(sample.num_nodes)
    if bool((edges[1, 1:] >= edges[1, :-1]).all()):
        adjacency = Adjacency(edges, num_src=num_nodes, num_dst=num_nodes)
    else:
        adjacency, perm = Adjacency.from_unsorted(edges, num_src=num_nodes, num_dst=num_nodes)
        fields = {name: value.index_select(0, perm) for name, value in fields.items()}
    if (norm := fields.pop("edge_norm", None)) is not None:
        found = adjacency.derived[EDGE_NORM] = EdgeNorm.of(
            norm,
            adjacency.csr(),
            edge_weight=fields.get("edge_weight"),
            in_degree=graph.get("in_degree"),
            n_id=graph.get("n_id"),
        )
        fields["edge_weight"] = found.given
    for name, value in fields.items():
        graph[name] = value
    return graph, adjacency
