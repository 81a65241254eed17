"""Shortcut ``first_hop``: the result of a hop over fixed rows is kept, and with it the exchange of its halo rows.

Full-graph training aggregates the same features in every epoch. If the rows need no gradient and are the same tensor at
the same version as in the forward pass before, so is the sum of the neighbours, and the hop is not run again. Rows that
change (dropout or augmentation of the input) are noticed in the second pass; their result is dropped.

Every rank must decide alike, as hops exchange rows, and a rank sees only its own rows and weights: a model may change
those of one rank alone (``if (x < 0).any(): x = x.clamp(0)``). So the ranks ask each other if all are the same, and
whether a result fits the limit.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.hops.hop import Hop, source_of
from pygdist.hops.host import Host
from pygdist.hops.layer import hooked, layer_name

_Inputs: TypeAlias = tuple[Tensor | None, ...]
"""Rows, weights, the weights that the edges carry, and the edges."""


@dataclass(frozen=True)
class _KeptResult:
    """A result and its inputs. The inputs are held, so that no other tensor gets their addresses.

    A model may return a kept result, and its user may write into the memory by NumPy.
    """

    inputs: tuple[Any, ...]
    identity: tuple[object, ...]
    result: Tensor
    as_kept: tuple[object, ...]

    def is_of(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """True if the result is that of these inputs, and nobody has written into it since."""
        return self.identity == identity and identity_of(self.result) == self.as_kept


@dataclass(frozen=True)
class _Changing:
    """The input changed since the last pass.

    If the same input comes a second time, its result is kept, unless it is ``too_large``.
    """

    latest: tuple[weakref.ref[Tensor] | None, ...]
    identity: tuple[object, ...]
    too_large: bool = False

    def came_again(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """True if these are the same objects as before; equal addresses are not enough, as memory is reused."""
        objects = [None if one is None else one() for one in self.latest]
        return self.identity == identity and all(one is other for one, other in zip(objects, inputs, strict=True))

    def is_of(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """True if the result of these inputs is known to be too large."""
        return self.too_large and self.came_again(inputs, identity)


class FirstHop:
    """Keeps the results of hops over fixed rows, on one rank.

    Args:
        host: The backend; its ``savings`` switch this on and limit the memory.

    Attributes:
        keeping: The hop that runs now is to be kept, on all ranks alike.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._rows_stand_for = 1.0  # in a rehearsal each row stands for so many of the graph's
        self._rehearsed = False
        self._states: weakref.WeakKeyDictionary[MessagePassing, dict[tuple[int, bool], _KeptResult | _Changing]]
        self._states = weakref.WeakKeyDictionary()
        self._hops: weakref.WeakKeyDictionary[MessagePassing, int] = weakref.WeakKeyDictionary()
        self._limit: int | None = None
        self._inside = False  # a forward pass of the model
        self.keeping = False

    @property
    def kept_bytes(self) -> int:
        """Memory of the results that are kept."""
        return sum(result.nbytes for result in self.results)

    @property
    def results(self) -> list[Tensor]:
        """The results that are kept."""
        states = [state for by_hop in self._states.values() for state in by_hop.values()]
        return [state.result for state in states if isinstance(state, _KeptResult)]

    def begin_forward(self) -> None:
        """Begin a forward pass of the model: hops of a layer are told apart by their order in it."""
        self._hops.clear()
        self._inside = True

    def end_forward(self) -> None:
        """End a forward pass: a layer that is called by itself makes its first hop each time."""
        self._hops.clear()
        self._inside = False

    @contextlib.contextmanager
    def rehearsing(self, rows_stand_for: float) -> Iterator[None]:
        """Judge whether results fit as if each row were so many; nobody is warned if they do not."""
        self._rehearsed, self._rows_stand_for = True, rows_stand_for
        try:
            yield
        finally:
            self._rehearsed, self._rows_stand_for = False, 1.0

    def forget(self) -> None:
        """Drop everything; called when the backend gets another graph or other savings."""
        self._states.clear()
        self._hops.clear()
        self._limit = None

    def drop(self, layer: MessagePassing) -> None:
        """Drop what is kept for ``layer``."""
        self._states.pop(layer, None)

    def expects(self, layer: MessagePassing, x: Tensor, edge_weight: Tensor | None = None) -> bool:
        """True if the next hop of ``layer``, given ``x``, is expected to be over fixed rows."""
        if not (self._applies(layer) and fixable(x) and fixable(edge_weight)):
            return False
        states = self._states.get(layer, {})
        if not torch.is_grad_enabled():  # most rows need no gradient here: only what training has kept is fixed
            return self._agreed(
                any(isinstance(state, _KeptResult) and _same_rows(state, x) for state in states.values())
            )
        key = self._key(layer)
        state = states.get(key)
        if not isinstance(state, _KeptResult):
            return state is None
        same = self._agreed(_same_rows(state, x))
        if not same:
            states[key] = _Changing((weakref.ref(x),), identity_of(x))
        return same

    def run(self, hop: Hop, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of a hop that is one sparse product: a kept one, or that of ``compute``."""
        layer, edge_index = hop.layer, hop.edge_index
        x: Tensor = source_of(hop.arguments.get("x"))
        weight: Tensor | None = hop.arguments.get("edge_weight")
        key = self._key(layer)
        self._hops[layer] = key[0] + 1
        value = edge_index.value if isinstance(edge_index, Adjacency) else None
        if not (self._applies(layer) and all(fixable(tensor) for tensor in (x, weight, value))):
            return compute()
        inputs: _Inputs = (x, weight, value, edge_index)
        tensors = [part for one in (x, weight, value) for part in identity_of(one)]
        identity = (*tensors, id(edge_index), layer.aggr, self._host.alone)
        states = self._states.setdefault(layer, {})
        state = states.get(key)
        candidates = (one for one in (state, *states.values()) if one is not None)
        match = next((one for one in candidates if one.is_of(inputs, identity)), None)
        # a layer may run more than once, and evaluation uses what training has kept: it must be one result on all ranks
        alike = self._agreed(match is not None and match is state)
        if alike or (states.keys() - {key} and self._agreed_on(states, match)):
            return _fresh(match.result) if isinstance(match, _KeptResult) else compute()
        again = isinstance(state, _Changing) and state.came_again(inputs, identity)
        latest = tuple(None if one is None else weakref.ref(one) for one in inputs)
        if not (self._agreed(again) or (state is None and torch.is_grad_enabled())):
            states[key] = _Changing(latest, identity)
            return compute()
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):  # training uses what evaluation may begin
            self.keeping = True
            try:
                result = compute()
            finally:
                self.keeping = False
        if self._fits(layer, result):
            # tensors whose memory is replaced must not leave the old memory to be taken for them again
            inputs = (*(None if tensor is None else tensor.detach() for tensor in (x, weight, value)), edge_index)
            states[key] = _KeptResult(inputs, identity, result, identity_of(result))
        else:
            states[key] = _Changing(latest, identity, too_large=True)
        return _fresh(result)

    def _applies(self, layer: MessagePassing) -> bool:
        savings = self._host.savings
        return savings.first_hop and savings.no_input_gradient and _pure(type(layer)) and not hooked(layer)

    def _key(self, layer: MessagePassing) -> tuple[int, bool]:
        return self._hops.get(layer, 0) if self._inside else 0, layer.training

    def _agreed(self, same: bool) -> bool:
        """True if ``same`` holds on all ranks."""
        return self._host.max_over_ranks(int(not same)) == 0

    def _agreed_on(self, states: dict[tuple[int, bool], _KeptResult | _Changing], match: object) -> bool:
        """True if all ranks found a match, and the same one."""
        number = next((number for number, one in enumerate(states.values()) if one is match), -1)
        most, least = self._host.max_over_ranks(number), -self._host.max_over_ranks(-number)
        return most == least >= 0

    def _fits(self, layer: MessagePassing, result: Tensor) -> bool:
        if self._limit is None:
            self._limit = self._host.first_hop_bytes(result.device)
        total = self._rows_stand_for * (self.kept_bytes + result.nbytes)
        fits = self._host.max_over_ranks(int(total > self._limit)) == 0
        if not fits and not self._rehearsed:
            warnings.warn(
                f"{layer_name(layer)} computes its first hop in every epoch: keeping the result takes "
                f"{total / 2**20:.0f} MiB in all on this rank, or more on another, and the limit is "
                f"{self._limit / 2**20:.0f} MiB; raise savings.first_hop_mib to keep it",
                stacklevel=2,
            )
        return fits


def _fresh(result: Tensor) -> Tensor:
    """Return a new tensor over the memory of a kept result: the layer may change its attributes.

    In inference mode a write into that memory would go unnoticed, so there it is a copy.
    """
    return result.clone() if torch.is_inference_mode_enabled() else result.detach()


def _pure(cls: type[MessagePassing]) -> bool:
    """True if the result depends on rows, weights and edges alone; a user's code may read parameters, or draw."""
    pyg = cls.message_and_aggregate.__module__.startswith("torch_geometric.")
    return pyg and cls.update is MessagePassing.update


def _same_rows(state: _KeptResult, x: Tensor) -> bool:
    identity = identity_of(x)
    return state.identity[: len(identity)] == identity
