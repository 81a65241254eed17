"""Inputs of a model that have rows of nodes, extended by the rows of this rank's leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.backends.passes.rehearsal import Call
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.graph.identity import fixable
from pygdist.graph.loaded import LoadedFields
from pygdist.graph.memo import Memo


class NodeInputs:
    """Extends inputs by the rows of leaves: the graph's features are here, other inputs come from the roots.

    Inputs that stay the same are fetched once. A rank sees only its own rows, which alone may have changed. So all
    ranks agree for each input whether its rows travel.
    """

    def __init__(self, shard: Shard, communicator: Communicator) -> None:
        self._shard, self._communicator = shard, communicator
        self._loaded, self._fetched = LoadedFields(shard), Memo[Tensor]()

    def extended(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with the rows of leaves; every rank makes this call."""
        inputs = [value for value, kind in call.values if kind == "node"]
        if not inputs:
            return call.args, call.kwargs
        facts = [fact for at, value in enumerate(inputs) for fact in self._facts(at, value)]
        everywhere = self._communicator.gather([float(fact) for fact in facts]).amin(0).bool().view(-1, 3).tolist()
        rows = iter([self._rows(at, value, *everywhere[at]) for at, value in enumerate(inputs)])
        return call.changed(lambda value, kind: next(rows) if kind == "node" else value)

    def _facts(self, at: int, value: Tensor) -> tuple[bool, bool, bool]:
        """Tell if leaves' rows of an input are here, if they were fetched before, and if they may be kept."""
        is_fixed = fixable(value)
        return is_fixed and self._loaded.has("x", value), self._fetched.knows(at, (value,)), is_fixed

    def _rows(self, at: int, value: Tensor, is_here: bool, is_kept: bool, is_fixed: bool) -> Tensor:
        """Return an input with the rows of leaves; the facts are those that hold on all ranks."""
        if is_here:
            assert self._shard.surroundings is not None
            return self._shard.surroundings.x
        if is_kept:
            fetched = self._fetched.last(at)
            assert fetched is not None
            return fetched
        if not is_fixed:  # on some rank, so that no rank may take what it keeps for rows of this pass
            return self._fetch(value)
        with torch.inference_mode(False), torch.no_grad():  # training uses what evaluation may ask for first
            return self._fetched.put(at, (value,), self._fetch(value))

    def _fetch(self, value: Tensor) -> Tensor:
        rows = self._communicator.exchange_rows(value, self._shard.plan, label="leaves' rows of the model's input")
        return torch.cat([value, rows])
