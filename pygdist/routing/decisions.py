"""Decisions by rows: conditions on what a model makes of all rows of nodes or edges, each tried with another outcome.

Ranks see other rows, so such a condition may hold on one and not on another, and on the small graph of the check all
may agree by chance. Therefore the model runs on one process once more for each condition, with the other outcome. If
results change, the outcome matters, and a rank cannot know it.

Numbers that the model reads, as the bound of a loop, count as conditions. Numbers of nodes and of types do not. Not
seen are conditions that matter only together, on sizes (``x.size(0) > 30``), in code that the three passes on the small
graph do not reach, in backward passes, in TorchScript, and on rows that leave torch (``x.numpy()``, ``x.tolist()``), of
which a warning tells.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MeanAggregation, MessagePassing, SumAggregation, global_add_pool, global_mean_pool
from typing_extensions import override

from pygdist.hops.arguments import tensors_of
from pygdist.hops.user_code import is_the_users
from pygdist.routing.miniature import Miniature
from pygdist.routing.runs import Run, Setting, difference, rows_dim, run_whole

_MOST = 24  # changes that are tried
_MEETINGS = 3  # of a condition, as in a loop
_FAR = 10.0  # from a number, in units of itself
_TRUTHS = ("__bool__", "equal", "allclose", "is_nonzero")
_GUARDS = ("any", "all")
_COUNTS = ("sum", "count_nonzero")
_READS = ("item", "__float__", "__int__", "__index__")
_LEAVING = ("numpy", "tolist", "__array__")
#: Of a number, these tell on which side of a bound it is.
_STEPS = (
    "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "relu", "floor", "ceil", "round", "trunc", "sign",
    "bucketize", "heaviside",
)  # fmt: skip
#: Computed over all ranks, so that all get the same.
_READOUTS: set[CodeType] = {
    one.__code__ for one in (MeanAggregation.forward, SumAggregation.forward, global_add_pool, global_mean_pool)
}


class Finding(NamedTuple):
    """The result of :func:`decision_by_rows`.

    Attributes:
        place: File and line of a condition that decides by rows; empty if there is none.
        position: File and line of a slice that decides by the numbers of nodes.
        note: A clause about what could not be tried.
    """

    place: str = ""
    position: str = ""
    note: str = ""


class _Meeting(NamedTuple):
    """A condition, and how often the run has met it before."""

    place: str
    instruction: int
    number: int


@dataclass(frozen=True, kw_only=True)
class _Change:
    """Another outcome of a condition.

    Attributes:
        made: Returns it, from the outcome.
        touched: The nodes for which the condition is a guard, as in ``if mask.any(): x[mask] = 0``; ``(N,)`` bool. On
            ranks without such nodes it does not hold, and others must be as they were. ``None`` for any other.
    """

    made: Callable[[Any], Any]
    touched: Tensor | None = None


def decision_by_rows(
    plain: nn.Module, small: Miniature, setting: Setting, tolerance: float, *, num_nodes: int
) -> Finding:
    """Find a condition on rows whose outcome changes results.

    A condition that only raises an exception, warns, or guards rows that need it changes nothing.

    Args:
        plain: The model, not distributed.
        small: The graph.
        setting: Settings of the runs.
        tolerance: Largest difference that is rounding.
        num_nodes: Nodes of the model's own graph: slices up to there hold all of them.
    """
    setting, seen = replace(setting, without_norms=False, traced=False), _Rows(small, num_nodes)
    try:
        with seen:
            whole = run_whole(plain, small, setting)
    except Exception:  # code that does not run while torch's functions are watched, such as compiled code
        return Finding(note="its conditions could not be tried")
    if seen.position:
        return Finding(position=seen.position)
    alone = replace(setting, without_norms=True)  # a norm passes what changes in a row on to all
    changes = [(meeting, change) for meeting, some in seen.changes.items() for change in some]
    by_row: Run | None = None
    undecided = ""
    for meeting, change in changes[:_MOST]:
        rows = None if change.touched is None else _beside(small, change.touched)
        if rows is not None and (seen.has_readout or not bool(rows.any())):
            undecided = undecided or meeting.place
            continue
        try:
            with _Rows(small, num_nodes, meeting, change):
                other = run_whole(plain, small, setting if rows is None else alone)
            by_row = by_row if rows is None else by_row or run_whole(plain, small, alone)
        except Exception as error:
            if is_raised_by_user(error):  # the condition is an assertion
                continue
            return Finding(meeting.place)
        if _differ(other, whole if rows is None or by_row is None else by_row, tolerance, rows):
            return Finding(meeting.place)
    if len(changes) > _MOST:
        return Finding(note=f"of its conditions {len(changes) - _MOST} were not tried")
    if undecided:
        return Finding(note=f"the condition at {undecided} holds there, and its other outcome was not tried")
    if seen.leaving:
        return Finding(note=f"rows leave torch ({seen.leaving}), and what the model makes of them was not tried")
    return Finding()


def _beside(small: Miniature, touched: Tensor) -> Tensor:
    """Return a mask of the nodes that no touched one reaches, as no edge comes from another node."""
    source, target = small.graph.edge_index
    alone = torch.ones(small.num_nodes, dtype=torch.bool)
    alone[target[source != target]] = False
    return alone & ~touched.cpu()


def is_raised_by_user(error: BaseException) -> bool:
    """True for a ``raise`` or ``assert`` in the user's code, and for other assertions."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, AssertionError):
        return isinstance(error, AssertionError)
    raises = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and is_the_users(trace.tb_frame)


def _differ(other: Run, whole: Run, tolerance: float, rows: Tensor | None) -> bool:
    """True if results differ; with ``rows``, outputs of these nodes."""
    if other.outputs.keys() != whole.outputs.keys():
        return True
    pairs = [(other.outputs[name], one, 0.0) for name, one in whole.outputs.items()]
    if rows is not None:
        dims = [rows_dim(one, rows.numel()) for _, one, _ in pairs]
        at = rows.nonzero().squeeze(1)
        pairs = [
            (
                ours.index_select(dim, at.to(one.device)),
                one.index_select(dim, at.to(one.device)),
                float(one.abs().max()),
            )
            for (ours, one, _), dim in zip(pairs, dims, strict=True)
            if dim is not None and ours.shape == one.shape
        ]
    else:
        scale = max((float(one.abs().max()) for one in whole.gradients.values() if one.numel()), default=0.0)
        pairs += [(other.gradients[name], one, scale) for name, one in whole.gradients.items()]
    return any(difference(*pair) > tolerance for pair in pairs)


def _opposite(value: Any) -> Any:
    return value.logical_not() if isinstance(value, Tensor) else not value


def _shifted(by: Any) -> Callable[[Any], Any]:
    return lambda value: value + by


class _Rows(TorchFunctionMode):
    """Follows rows of nodes and edges through a run, and notes the conditions that the user's code makes of them.

    Args:
        small: The graph.
        num_nodes: Nodes of the model's own graph.
        meeting: The condition to change.
        change: The other outcome.

    Attributes:
        changes: By condition: other outcomes.
        position: File and line of a slice of rows that ends beyond the small graph, and within the model's own.
        leaving: File and line at which rows leave torch.
        has_readout: True if the model computes over all nodes by a readout.
    """

    def __init__(
        self, small: Miniature, num_nodes: int, meeting: _Meeting | None = None, change: _Change | None = None
    ) -> None:
        super().__init__()
        self._small, self._num_nodes, self._meeting, self._change = small, num_nodes, meeting, change
        self._made: dict[int, Tensor] = {}  # of rows; kept, so that no other tensor gets its address
        self._of_floats: set[int] = set()  # among them; others are types and numbers of nodes
        self._counted: dict[int, Tensor] = {}  # masks of which a tensor is the count
        self._met = Counter[tuple[str, int]]()
        self.changes: dict[_Meeting, list[_Change]] = {}
        self.position = self.leaving = ""
        self.has_readout = False
        for one in small.inputs:
            if isinstance(one.value, Tensor) and (one.kind is not None or one.is_edges):
                self._note(one.value, is_of_floats=one.value.is_floating_point())

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
            self.has_readout = True
            return result
        if changes := self._changes_of(name, given, result):
            result = self._outcome(changes, result)
        self._look_at(name, args, given)
        is_of_floats = any(id(one) in self._of_floats for one in given)
        for one in tensors_of(result):
            self._note(one, is_of_floats=is_of_floats)
            if (mask := self._mask(name, given)) is not None:
                self._counted[id(one)] = mask
        if name == "__setitem__":
            self._note(args[0], is_of_floats=is_of_floats)
        return result

    def _changes_of(self, name: str, given: list[Tensor], result: Any) -> list[_Change]:
        """Return other outcomes of a call, if it is a condition, or a number to compare."""
        if any(one.dtype == torch.bool and not self._has_rows(one) for one in given):
            return []  # made of another condition
        is_number = isinstance(result, Tensor) and not self._has_rows(result)
        is_condition = is_number and result.dtype == torch.bool
        mask = self._mask(name, given) if name in _GUARDS else self._counted.get(id(given[0]))
        if mask is not None:
            return self._guard(mask, name, result) if is_condition or name in (*_READS, "__bool__") else []
        if is_condition or name in _TRUTHS:
            return [_Change(made=_opposite)]
        by_reading = name in _READS and not isinstance(result, (bool, complex))
        if not (by_reading or (is_number and name in _STEPS)) or id(given[0]) not in self._of_floats:
            return []
        size = float(torch.as_tensor(result).abs().max())
        far = int(_FAR * (1 + size)) if isinstance(result, int) else _FAR * (1.0 + size)
        steps = (1, -1, far, -far) if isinstance(result, int) else (far, -far)
        return [_Change(made=_shifted(step)) for step in steps]

    def _guard(self, mask: Tensor, name: str, result: Any) -> list[_Change]:
        """Return the other outcome of a condition that asks if a mask has rows, or of their number."""
        holds = bool(mask.any())
        counts = name in _READS and not isinstance(result, bool)
        made = _shifted(-result if holds else 1) if counts else _opposite
        if not holds:
            return [_Change(made=made)]
        touched = self._nodes_of(mask)
        return [] if touched is None else [_Change(made=made, touched=touched)]

    def _mask(self, name: str, given: list[Tensor]) -> Tensor | None:
        """Return the mask of rows that ``any``, ``all`` or a count looks for; ``None`` for any other call."""
        first = given[0]
        if name not in (*_GUARDS, *_COUNTS) or first.dtype != torch.bool or not self._has_rows(first):
            return None
        return ~first if name == "all" else first

    def _nodes_of(self, mask: Tensor) -> Tensor | None:
        """Return the nodes of which a mask has rows, or edges; ``(N,)``."""
        nodes, edges = (rows_dim(mask, size) for size in self._sizes)
        if nodes is not None:
            return mask.movedim(nodes, 0).flatten(1).any(1) if mask.dim() > 1 else mask
        if edges is None:
            return None
        edge_index = self._small.graph.edge_index
        ends = edge_index[:, (mask.movedim(edges, 0).flatten(1).any(1) if mask.dim() > 1 else mask).cpu()]
        touched = torch.zeros(self._small.num_nodes, dtype=torch.bool)
        touched[ends.flatten()] = True
        return touched

    def _look_at(self, name: str, args: tuple[Any, ...], given: list[Tensor]) -> None:
        """Note slices by number, and rows that leave torch."""
        if name in _LEAVING and any(self._has_rows(one) for one in given):
            self.leaving = self.leaving or _place()
        if name != "__getitem__" or rows_dim(args[0], self._small.num_nodes) != 0:
            return
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        ends = (first.start, first.stop) if isinstance(first, slice) else ()
        if any(isinstance(end, int) and self._small.num_nodes < abs(end) < self._num_nodes for end in ends):
            self.position = self.position or _place()

    def _outcome(self, changes: list[_Change], result: Any) -> Any:
        frame = next(_frames(), None)
        if frame is None or not (place := _place()):
            return result
        where = place, frame.f_lasti
        meeting = _Meeting(*where, self._met[where])
        self._met[where] += 1
        if meeting.number < _MEETINGS:
            self.changes[meeting] = changes
        if meeting != self._meeting or self._change is None:
            return result
        return self._change.made(result)  # at this meeting alone: a loop may never end

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._small.num_nodes, self._small.graph.edge_index.size(1)

    def _has_rows(self, one: Tensor) -> bool:
        return any(rows_dim(one, size) is not None for size in self._sizes)

    def _note(self, one: Tensor, *, is_of_floats: bool) -> None:
        self._made[id(one)] = one
        if is_of_floats:
            self._of_floats.add(id(one))


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the code that called a function of torch, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__ and not frame.f_globals.get("__name__", "").startswith("torch."):
            yield frame
        frame = frame.f_back


def _place() -> str:
    """Return file and line of the user's code that called a function of torch; empty if other code did."""
    frame = next(_frames(), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None and is_the_users(frame) else ""


def _is_readout() -> bool:
    """True inside of a readout over all nodes, but not of a layer's aggregation."""
    codes = {frame.f_code for frame in _frames()}
    return not codes.isdisjoint(_READOUTS) and MessagePassing.aggregate.__code__ not in codes
