"""Validation, test and prediction on the whole graph, for a backend that trains without seeing all of it.

A copy of the model that shares its parameters and buffers runs on backend ``comm``. A rank with several parts runs them
hop by hop (:mod:`pygdist.comm.replay`): one part is open at a time, and the rows between two hops are in files.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends import Backend, CommBackend, Savings
from pygdist.comm import Communicator, PartCommunicator, run_parts
from pygdist.graph import Shard
from pygdist.graph.shard import is_unknown
from pygdist.hops.arguments import each_tensor
from pygdist.memory.overflow import in_file, writable
from pygdist.memory.scratch import ScratchFolder
from pygdist.routing import distribute, undistribute

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = vars(nn.Module()).keys()


class WholeGraphEvaluation:
    """Evaluates a model on the whole graph, any number of times until :meth:`close`; all ranks make one together.

    The model may be distributed. It is not changed, and its tensors are shared, not copied. With one part on each rank,
    the part stays bound between evaluations (:meth:`place`), and results that do not change are kept: degrees, and sums
    over features. If a rank runs several parts ``in_turns`` (:meth:`run`), nothing of the graph is held after
    :meth:`finish`.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        savings: Savings,
        trained_by: Backend,
        *,
        in_turns: bool,
        check: bool,
    ) -> None:
        self._communicator, self.in_turns = communicator, in_turns
        holds_columns = trained_by.abilities.holds_columns
        self._backend = _WholeHops() if in_turns else _AfterFirst(trained_by) if holds_columns else CommBackend()
        shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
        self.model = undistribute(copy.deepcopy(model, shared)).eval()
        if in_turns:  # each part is passed once
            savings = replace(savings, first_hop=False)
        # parts that run in turns run forward alone
        distribute(
            self.model, backend=self._backend, savings=savings, check=check and not in_turns and not holds_columns
        )
        self._contents = _contents(model)
        self._bound: Shard | None = None
        self._folder: ScratchFolder | None = None
        self._outputs: dict[int, Any] = {}

    def is_of(self, model: nn.Module) -> bool:
        """Tell if :attr:`model` is still a copy of ``model``, which may have been changed meanwhile."""
        return self._contents[:3] == _contents(model)[:3]

    def place(self, shard: Shard) -> None:
        """Bind the rank's one part."""
        if shard is not self._bound:
            self._backend.bind(shard, self._communicator)
            self._bound = shard

    def run(
        self, parts: Sequence[int], num_parts: int, open_part: Callable[[int], Shard], call: Callable[[Shard], Any]
    ) -> None:
        """Run ``call`` on the rank's parts in turn; ``open_part`` returns one, and may free the one before."""
        folder = writable(open_part(parts[0]).folder)
        self._folder = ScratchFolder(folder)
        between, results = self._folder.path / "between", self._folder.path / "results"
        between.mkdir()
        results.mkdir()

        def run(communicator: PartCommunicator) -> None:
            self._backend.unbind()  # it would hold the part before
            shard = open_part(communicator.rank)
            self._backend.bind(shard, communicator)
            files = (results / f"{communicator.rank}-{number}" for number in itertools.count())
            with torch.no_grad():
                self._outputs[communicator.rank] = each_tensor(call(shard), lambda out: in_file(out, next(files)))

        run_parts(parts, num_parts, run, self._communicator, between)
        self._backend.unbind()

    def output_of(self, part: int) -> Any:
        """Return the output of :meth:`run` for a part, with one row per owned node in each tensor."""
        return self._outputs[part]

    def close(self) -> None:
        """Free the graph and remove the files."""
        self.finish()
        self._backend.unbind()
        self._bound = None

    def finish(self) -> None:
        """Remove the outputs and files of one evaluation."""
        self._outputs.clear()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()


def _contents(model: nn.Module) -> tuple[Any, ...]:
    """Return everything that decides if a copy of a model, which shares its tensors, is still one."""
    options = [
        {
            name: _mark(value)
            for name, value in vars(module).items()
            if name not in _OF_TORCH and name[:9] != "_pygdist_"
        }
        for module in model.modules()
    ]
    tensors = (*model.parameters(), *model.buffers())
    return options, list(model.modules()), list(map(id, tensors)), tensors  # held, so that no other gets their ids


def _mark(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return something that equals the mark of an attribute as long as the attribute has not changed.

    Changes inside of objects other than tensors, arrays of NumPy, lists, tuples, sets and dictionaries are not seen.
    ``within`` are the collections that hold the value; one of them may be the value itself.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape, hashlib.blake2b(value.tobytes()).digest()
    if isinstance(value, (set, frozenset)):
        return set(value)
    if any(value is one for one in within):
        return _Same(value)
    if isinstance(value, dict):
        return [(key, _mark(one, (*within, value))) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_mark(one, (*within, value)) for one in value]
    return _Same(value)


class _Same:
    """Equals another of the same object while the object lives; ids of objects that have gone are given to others."""

    def __init__(self, value: Any) -> None:
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # small objects, such as dtypes
            self._object = lambda: value

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._object() is not None and self._object() is other._object()

    @override
    def __hash__(self) -> int:
        return id(self)


class _WholeHops(CommBackend):
    """Fetches all rows of a hop at once, as parts that run in turn have nothing to compute meanwhile."""

    name = ""

    @override
    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return self.communicator.exchange_rows(x, self.shard.plan, label=label)


class _AfterFirst(CommBackend):
    """Runs all layers but the first, which the backend that trains the model computes from columns of the features."""

    name = ""

    def __init__(self, trained_by: Backend) -> None:
        super().__init__()
        self._trained_by = trained_by
        self.abilities = replace(self.abilities, placement=trained_by.abilities.placement)

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(isinstance(one, Tensor) and is_unknown(one) for one in (*args, *kwargs.values())):
            return self._trained_by.whole_first_layer(layer, forward, args, kwargs, self)
        return super().run_layer(layer, forward, args, kwargs)
