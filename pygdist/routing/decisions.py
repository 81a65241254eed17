"""Decisions by rows: conditions on what a model makes of all rows of nodes or edges, each tried with another outcome.

Numbers that the model reads, as the bound of a loop, count as conditions; so does no number of nodes or types.

Ranks see other rows, so such a condition may hold on one and not on another, and on the small graph of the check all
may agree by chance. Therefore the model runs on one process once more for each condition, with the other outcome. If
results change, the outcome matters, and a rank cannot know it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MeanAggregation, SumAggregation, global_add_pool, global_mean_pool
from typing_extensions import override

from pygdist.hops.arguments import tensors_of
from pygdist.hops.user_code import is_the_users
from pygdist.routing.miniature import Miniature
from pygdist.routing.runs import Run, Setting, difference, rows_dim, run_whole

_MOST = 8  # conditions that are tried
_FAR = 10.0  # from a number that is read, in units of itself
_READS = ("item", "__float__", "__int__", "__index__")
#: Computed over all ranks, so that all get the same.
_READOUTS: set[CodeType] = {
    one.__code__ for one in (MeanAggregation.forward, SumAggregation.forward, global_add_pool, global_mean_pool)
}


def decision_by_rows(plain: nn.Module, small: Miniature, setting: Setting, tolerance: float) -> str:
    """Return file and line of the first condition on rows whose outcome changes results; empty if there is none.

    A condition that only raises an exception, warns, or guards rows that need it (``if mask.any(): x[mask] = 0``)
    changes nothing.

    Args:
        plain: The model, not distributed.
        small: The graph.
        setting: Settings of the runs.
        tolerance: Largest difference that is rounding.
    """
    setting, seen = replace(setting, without_norms=False, traced=False), _Rows(small)
    try:
        with seen:
            whole = run_whole(plain, small, setting)
    except Exception:  # code that does not run while torch's functions are watched, such as compiled code
        return ""
    for place, changes in list(seen.places.items())[:_MOST]:
        for change in changes:
            try:
                with _Rows(small, place, change):
                    other = run_whole(plain, small, setting)
            except Exception:  # the condition is an assertion
                continue
            if _differ(other, whole, tolerance):
                return place
    return ""


def _differ(other: Run, whole: Run, tolerance: float) -> bool:
    if other.outputs.keys() != whole.outputs.keys():
        return True
    scale = max((float(one.abs().max()) for one in whole.gradients.values() if one.numel()), default=0.0)
    pairs = [(other.outputs[name], one, 0.0) for name, one in whole.outputs.items()]
    pairs += [(other.gradients[name], one, scale) for name, one in whole.gradients.items()]
    pairs += [(other.buffers[name], one, 0.0) for name, one in whole.buffers.items()]
    return any(difference(*pair) > tolerance for pair in pairs)


def _opposite(value: Any) -> Any:
    return value.logical_not() if isinstance(value, Tensor) else not value


class _Rows(TorchFunctionMode):
    """Follows rows of nodes and edges through a run, and notes the conditions that the user's code makes of them.

    Args:
        small: The graph.
        place: The condition to change, the first time that it is met.
        change: Returns another outcome.

    Attributes:
        places: By file and line: functions that return other outcomes of the condition there.
    """

    def __init__(self, small: Miniature, place: str = "", change: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._sizes = small.num_nodes, small.graph.edge_index.size(1)
        self._made: dict[int, Tensor] = {}  # of rows; kept, so that no other tensor gets its address
        self._of_floats: set[int] = set()  # among them; others are types and numbers of nodes
        self._place, self._change = place, change
        self.places: dict[str, list[Callable[[Any], Any]]] = {}
        for one in small.inputs:
            if isinstance(one.value, Tensor) and (one.kind is not None or one.is_edges):
                self._note(one.value, [one.value])

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one for one in tensors_of((args, kwargs or {})) if id(one) in self._made]
        if not given:
            return result
        name, made = getattr(func, "__name__", ""), tensors_of(result)
        if made and not any(self._has_rows(one) for one in made) and _is_readout():
            return result
        if changes := self._changes(name, given, result):
            result = self._outcome(changes, result)
        for one in tensors_of(result):
            self._note(one, given)
        if name == "__setitem__":
            self._note(args[0], given)
        return result

    def _changes(self, name: str, given: list[Tensor], result: Any) -> list[Callable[[Any], Any]]:
        """Return what makes other outcomes of a call, if it is a condition, or a number to compare."""
        if any(one.dtype == torch.bool and not self._has_rows(one) for one in given):
            return []  # made of another condition
        is_condition = isinstance(result, Tensor) and result.dtype == torch.bool and not self._has_rows(result)
        if name in ("any", "all"):
            # a guard: where it holds, nobody knows if other rows than those that it found are touched
            holds = bool(result.any()) if name == "any" else not bool(result.all())
            return [] if holds or not is_condition else [_opposite]
        if is_condition or name == "__bool__":
            return [_opposite]
        if name in _READS and id(given[0]) in self._of_floats and not isinstance(result, (bool, complex)):
            far = 1 if isinstance(result, int) else _FAR * (1.0 + abs(result))  # steps of a loop, or a bound
            return [lambda value: value + far, lambda value: value - far]
        return []

    def _outcome(self, changes: list[Callable[[Any], Any]], result: Any) -> Any:
        frame = next(_frames(), None)
        if frame is None or not is_the_users(frame):
            return result
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.places.setdefault(place, changes)
        if place != self._place or self._change is None:
            return result
        change, self._change = self._change, None  # once: a loop may never end
        return change(result)

    def _has_rows(self, one: Tensor) -> bool:
        return any(rows_dim(one, size) is not None for size in self._sizes)

    def _note(self, one: Tensor, given: list[Tensor]) -> None:
        self._made[id(one)] = one
        if any(source.is_floating_point() or id(source) in self._of_floats for source in given):
            self._of_floats.add(id(one))


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the code that called a function of torch, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__ and not frame.f_globals.get("__name__", "").startswith("torch."):
            yield frame
        frame = frame.f_back


def _is_readout() -> bool:
    return any(frame.f_code in _READOUTS for frame in _frames())
