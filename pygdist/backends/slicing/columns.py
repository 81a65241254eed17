"""Trials of layers, to find hops that compute each column from this column alone, so that ranks may divide columns.

There is no list of layers. A copy of the layer with random parameters runs on a tiny graph, in evaluation and in
training mode, and each of its hops runs again on some of the columns. A hop qualifies if both runs give the same
numbers, for all random draws (NeutronTP, Sec. 3, for any message and aggregation).
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import names_of
from pygdist.backends.slicing.trial_inputs import (
    ANY_WIDTH,
    argument_names,
    guesses,
    likely_widths,
    plain_copy,
    propagates,
    sizes_of,
)
from pygdist.errors import InputError
from pygdist.hops.hop import Ends, each_end, ends_of, is_pair, source_of, with_passed_rows
from pygdist.hops.layer import BASE, asked_arguments, having, own_class
from pygdist.hops.reads import tensors_read
from pygdist.hops.trials import TrialCache
from pygdist.hops.untouched import untouched
from pygdist.hops.user_code import in_one_line

log = logging.getLogger(__name__)

TRIED_WITH = ("x", "edge_index", "edge_weight", "edge_type", "edge_attr", "x_0")
"""Arguments of a layer's ``forward`` that a trial may pass."""

ArgumentKind: TypeAlias = Literal["columns", "nodes", "edges", "edge columns", "same"]
"""What a hop gets of an argument: columns of nodes' rows, whole rows of nodes or of edges, columns of edges' rows, or
the argument as it is."""

_TOLERANCE = 1e-9
_GENERATORS = {"random": "Python's random generator", "numpy.random": "NumPy's random generator"}


@dataclass(frozen=True)
class Columns:
    """The way in which ranks divide one hop of a layer by columns.

    Attributes:
        kinds: The kind of each argument of ``propagate``, by name.
        fold: Number of blocks of columns in the result, each as wide as the input rows.
        repeated: True if the layer reads the same rows in several hops, for example one for each relation.
        reads: Names of the parameters, and of other tensor attributes of the layer, that the hop reads.
        needs_all_edges: Reason why a chunk (some destinations with all their in-edges) would give wrong rows; empty if
            its rows are right.
    """

    kinds: Mapping[str, ArgumentKind]
    fold: int
    repeated: bool = False
    reads: frozenset[str] = frozenset()
    needs_all_edges: str = ""


HopColumns: TypeAlias = dict[frozenset[str], Columns]
"""The hops of a layer, by the names of the arguments that the layer passes."""


def read_ends(layer: MessagePassing, name: str) -> tuple[bool, bool]:
    """Tell if a layer reads an argument at the sources of edges, and if at their destinations or as it is."""
    asked = asked_arguments(layer)
    return f"{name}_j" in asked, f"{name}_i" in asked or name in asked


def advice() -> str:
    """Return advice for an error, with the backends that run a layer whose columns ranks cannot divide."""
    return f"use backend {names_of(lambda abilities: abilities.exact and abilities.mixes_columns)}"


class _RefusedError(Exception):
    """The reason why a layer does not qualify: a clause that begins with a verb."""


def columns_of_hops(layer: MessagePassing) -> HopColumns:
    """Return for each hop of a layer the way to divide its columns, found by one trial.

    Raises:
        InputError: With the reason, as a clause that begins with a verb, if the layer does not qualify.
    """
    if not hasattr(type(layer), BASE):  # about to be distributed, maybe again and with other options
        _HOPS.of_layer.pop(layer, None)
        _WHOLE.of_layer.pop(layer, None)
    hops = _HOPS.of(layer)
    if isinstance(hops, str):
        raise InputError(f"{hops}; {advice()}")
    return hops


def acts_on_columns(layer: MessagePassing) -> bool:
    """Tell if a whole layer may run on slices: it has only hops and operations that act on each column by itself.

    The answer is for the layer's present mode, training or evaluation: in training a layer may draw random numbers,
    which would have to be the same on all ranks.
    """
    return any(one.training for one in layer.modules()) in _WHOLE.of(layer)


# -- trials ------------------------------------------------------------------------------------------------------------


def _find_hops(layer: MessagePassing) -> HopColumns | str:
    """Return the hops of a layer, or the reason why it does not qualify; raise if that is not known and may change."""
    if any(isinstance(one, nn.UninitializedParameter) for one in layer.parameters()):
        raise InputError(
            "has parameters without a shape yet; call the model once on a few nodes before it is distributed"
        )
    hops: HopColumns = {}
    if not propagates(own_class(layer)):
        return hops
    failure, ran = "", False
    for width in likely_widths(layer):
        for arguments in guesses(layer, width):
            try:
                hops, ran = _watch_all(layer, arguments, hops), True
            except _RefusedError as error:
                return str(error)
            except Exception as error:  # whatever a layer raises for arguments that do not fit
                _log_error(layer, f"with {', '.join(arguments)}", error)
                failure = failure or in_one_line(error)  # with the most arguments
        if ran:
            return hops
    raise InputError(
        f"could not be tried on a few nodes ({failure}), so it is not known whether it mixes columns; {advice()}"
    )


def _log_error(layer: MessagePassing, trial: str, error: Exception) -> None:
    """Log why a trial of one of PyG's layers failed: it may be an argument that does not fit, or a bug of ours."""
    if own_class(layer).__module__.startswith("torch_geometric"):
        log.debug("trial of %s failed %s", own_class(layer).__name__, trial, exc_info=error)


def _watch_all(layer: MessagePassing, arguments: dict[str, Any], hops: HopColumns) -> HopColumns:
    """Return the hops with those of runs in both modes, on positive rows and on rows of both signs."""
    for training in (False, True):
        hops = _watch(layer, arguments, training, hops)
        try:  # a threshold may hide what mixes
            hops = _watch(layer, _with_signs(arguments), training, hops)
        except _RefusedError:
            raise
        except Exception as error:  # whatever a layer raises for the logarithm or root of a negative number
            _log_error(layer, "with negative rows", error)
    return hops


def _watch(layer: MessagePassing, arguments: dict[str, Any], training: bool, hops: HopColumns) -> HopColumns:
    """Return the hops with those of a run."""
    trial = plain_copy(layer).train(training)
    watched = trial.__dict__["propagate"] = _Watched(trial, hops)
    _run(trial, arguments)
    return watched.hops


def _with_signs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with rows of nodes and attributes of edges of both signs."""
    signed = ("x", "x_0", "y", "pos", "normal", "edge_attr")
    return {
        name: each_end(value, lambda rows: 2 * rows - 1) if name in signed and value is not None else value
        for name, value in arguments.items()
    }


def _find_modes(layer: MessagePassing) -> frozenset[bool]:
    """Return the modes in which a layer may run on slices: evaluation (``False``), training (``True``)."""
    if list(layer.children())[1:]:
        return frozenset()
    return frozenset(training for training in (False, True) if _runs_on_slices(layer, training))


_HOPS = TrialCache(_find_hops)
_WHOLE = TrialCache(_find_modes)


def _runs_on_slices(layer: MessagePassing, training: bool) -> bool:
    width, qualifies = ANY_WIDTH, False
    rows = [guess for guess in guesses(layer, width) if isinstance(guess.get("x"), Tensor) and guess["x"].dim() == 2]
    positive = [guess for guess in rows if guess.keys() <= set(TRIED_WITH)]
    for number, arguments in enumerate((*positive, *map(_with_signs, positive))):
        try:
            trial = plain_copy(layer).train(training)
            whole, again = _run(trial, arguments), _run(trial, arguments, seed=1)
        except Exception as error:  # whatever a layer raises for arguments that do not fit
            _log_error(layer, f"as a whole with {', '.join(arguments)}", error)
            continue
        if number >= len(positive) and isinstance(whole, Tensor) and whole.isnan().any():
            continue  # roots of negative numbers, say
        if not (isinstance(whole, Tensor) and whole.shape == arguments["x"].shape and _equal(again, whole)):
            return False
        for part in (slice(0, 3), slice(3, width)):
            cut = {name: value[:, part] if name in ("x", "x_0") else value for name, value in arguments.items()}
            try:
                out = _run(trial, cut)
            except Exception as error:  # whatever a layer raises for rows of another width
                _log_error(layer, "as a whole on some columns", error)
                return False
            if not _equal(out, whole[:, part]):
                return False
        qualifies = True
    return qualifies


def _run(trial: MessagePassing, arguments: dict[str, Any], seed: int = 0) -> Any:
    """Return the layer's result, without the hooks on it: these get rows, not slices."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        names = argument_names(trial)
        return trial.forward(**{names[name]: value for name, value in arguments.items()})


def _equal(out: Any, expected: Tensor) -> bool:
    if not isinstance(out, Tensor) or out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    return torch.allclose(out, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


# -- a hop -------------------------------------------------------------------------------------------------------------


class _Watched:
    """A ``propagate`` for a plain copy of a layer, which adds each hop to those noted in ``hops``."""

    def __init__(self, layer: MessagePassing, hops: HopColumns) -> None:
        self.hops = dict(hops)
        self._layer, (self._num_nodes, _) = layer, sizes_of(layer)
        self._rows_read: list[Any] = []  # by earlier hops

    def __call__(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        hop = _TriedHop(self._layer, edge_index, size, kwargs)
        torch.default_generator.manual_seed(0)
        whole = hop.run()
        if whole.isnan().any():  # equals nothing, and may hide what mixes
            raise ValueError("its result is NaN")
        torch.default_generator.manual_seed(1)
        if not _equal(hop.run(), whole):
            raise _RefusedError(hop.why_unequal(whole))
        columns = hop.share_out(self._num_nodes, whole)
        noted = self.hops.get(hop.names, columns)
        if (noted.kinds, noted.fold) != (columns.kinds, columns.fold):
            raise _RefusedError(f"makes hops with the same arguments that are not alike ({hop})")
        rows = [kwargs[name] for name, kind in noted.kinds.items() if kind == "columns"]
        self.hops[hop.names] = replace(
            noted,
            repeated=noted.repeated or any(one is other for one in rows for other in self._rows_read),
            reads=noted.reads | tensors_read(self._layer, hop.run),
            needs_all_edges=noted.needs_all_edges or hop.needs_all_edges(noted.kinds, whole),
        )
        self._rows_read.extend(rows)
        return whole


@dataclass(frozen=True)
class _TriedHop:
    """A hop, as the layer called ``propagate``; methods compare parts of the hop with its result ``whole``."""

    layer: MessagePassing
    edge_index: Tensor
    size: Any
    arguments: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        """Names of the arguments that are not ``None``."""
        return frozenset(name for name, value in self.arguments.items() if value is not None)

    def __str__(self) -> str:
        return f"propagate({', '.join(sorted(self.names))})"

    def run(self) -> Tensor:
        """Run the layer's own code."""
        out: Tensor = type(self.layer).propagate(self.layer, self.edge_index, size=self.size, **self.arguments)
        return out

    def why_unequal(self, whole: Tensor) -> str:
        """Return the reason for which the hop, run again, gives other numbers than ``whole`` from the first seed."""
        when = " while it trains" if self.layer.training else ""
        torch.default_generator.manual_seed(0)
        with untouched(self.layer) as snapshot:
            again = self.run()
        if _equal(again, whole):
            return f"draws random numbers in its hops{when} ({self}), and each rank would draw others for its columns"
        names = (name.removesuffix("._buffers") for name in snapshot.changed)
        changed = ", ".join(dict.fromkeys(_GENERATORS.get(name, name) for name in names))
        why = f"as each run changes {changed}" if changed else "for a reason outside of the layer, such as a clock"
        return f"gives other numbers when a hop runs again{when} ({self}), {why}; a hop may run in several pieces"

    def share_out(self, num_nodes: int, whole: Tensor) -> Columns:
        """Return how ranks share out the hop; refuse it if its columns mix."""
        lifted = {name[:-2] for name in asked_arguments(self.layer) if name.endswith(("_i", "_j"))}
        first = {name: source_of(value) for name, value in self.arguments.items() if value is not None}
        sizes = num_nodes, self.edge_index.size(1)
        kinds = {name: _kind(value, name in lifted, self.layer.node_dim, sizes) for name, value in first.items()}
        widths = {
            name: value.size(-1)
            for name, value in first.items()
            if kinds[name] in ("nodes", "edges") and value.is_floating_point() and value.dim() > 1
        }
        width = max((widths[name] for name in widths if kinds[name] == "nodes" and name in lifted), default=0)
        if whole.size(-1) == 0:
            raise ValueError("its rows have no columns")
        if width == 0 or whole.size(-1) % width:
            raise _mixes(f"{width} columns in, {whole.size(-1)} out")
        fold = whole.size(-1) // width
        wide = [name for name in widths if widths[name] == width]
        nodes: dict[str, ArgumentKind] = {name: "columns" for name in wide if kinds[name] == "nodes"}
        edges: dict[str, ArgumentKind] = {name: "edge columns" for name in wide if kinds[name] == "edges"}
        for cut in (nodes, {**nodes, **edges}):
            if self._columns_stay_apart(cut, whole.view(*whole.shape[:-1], fold, width)):
                return Columns({**kinds, **cut}, fold)
        raise _mixes(str(self))

    def _columns_stay_apart(self, cut: Mapping[str, ArgumentKind], whole: Tensor) -> bool:
        """True if some columns of the arguments ``cut`` give these columns of the result."""
        width = whole.size(-1)
        half = -(-width // 2)
        parts = [slice(0, half), slice(half, width)] if width > 1 else [slice(0, 1)]
        if width > 2:  # neighbours may mix within a half
            parts += [slice(0, width, 2), slice(1, width, 2)]
        for part in parts:
            arguments = {
                name: _columns(value, part) if name in cut else value for name, value in self.arguments.items()
            }
            try:
                out = replace(self, arguments=arguments).run()
            except Exception as error:  # whatever a layer raises for rows of another width
                _log_error(self.layer, f"on some columns of {self}", error)
                return False
            if not _equal(out, whole[..., part].flatten(-2)):
                return False
        return True

    def needs_all_edges(self, kinds: Mapping[str, ArgumentKind], whole: Tensor) -> str:
        """Return the reason why the hop cannot run on half of the destinations; empty if it can."""
        layer, dim, (sources, targets) = self.layer, self.layer.node_dim, self.edge_index
        half = -(-whole.size(dim) // 2)
        # update() gets the same ends of arguments as in a hop that runs in chunks
        update = vars(layer).get("update", types.MethodType(with_passed_rows(type(layer).update), layer))
        for span in (range(half), range(half, whole.size(dim))):
            inside = (targets >= span.start) & (targets < span.stop)
            if not inside.any():  # many layers do not run on no edges
                continue
            read, source = sources[inside].unique(return_inverse=True)
            ends = read, torch.arange(span.start, span.stop)
            chunk = replace(
                self,
                edge_index=torch.stack([source, targets[inside] - span.start]),
                size=(read.numel(), len(span)),
                arguments={
                    name: _rows(layer, name, value, kinds.get(name, "same"), inside, ends)
                    for name, value in self.arguments.items()
                },
            )
            try:
                with having(layer, {"update": update}):
                    out = chunk.run()
            except Exception as error:  # whatever a layer raises for some of its rows
                _log_error(layer, f"on some of the edges of {self}", error)
                return f"could not be tried on some of the edges ({type(error).__name__}: {error})"
            if not _equal(out, whole.narrow(dim, span.start, len(span))):
                return "gave some destinations other rows without the edges into others, in a trial on a few nodes"
        return ""


def _mixes(how: str) -> _RefusedError:
    return _RefusedError(f"mixes columns ({how}), so ranks cannot share them out")


def _kind(value: Any, is_lifted: bool, node_dim: int, sizes: tuple[int, int]) -> ArgumentKind:
    """Return the kind of an argument that is not cut; lifted is one that the layer reads at ends of edges."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return "same"
    num_nodes, num_edges = sizes
    by_node = value.dim() >= abs(node_dim) and value.size(node_dim) == num_nodes
    if is_lifted and by_node:
        return "nodes"
    if value.size(0) == num_edges:
        return "edges"
    return "nodes" if by_node else "same"


def _columns(value: Any, part: slice) -> Any:
    """Return some columns of an argument, or of both its ends."""
    if is_pair(value):
        return tuple(_columns(end, part) for end in value)
    return None if value is None else value[..., part]


def _rows(
    layer: MessagePassing, name: str, value: Any, kind: ArgumentKind, edges: Tensor, ends: tuple[Tensor, Tensor]
) -> Any:
    """Return the rows of an argument that a chunk reads; ``edges`` masks its edges, ``ends`` are its nodes."""
    if value is None or kind == "same":
        return value
    if kind in ("edges", "edge columns"):
        return value[edges]
    read = read_ends(layer, name)
    rows = [
        end.index_select(layer.node_dim, nodes) if used and end is not None else None
        for end, nodes, used in zip(ends_of(value), ends, read, strict=True)
    ]
    if not read[0]:
        return rows[1]
    return tuple(rows) if is_pair(value) else Ends(rows)
