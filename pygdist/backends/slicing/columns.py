"""Whether each column of a layer's hop depends on that column alone, so that ranks may share the columns out.

Nothing is known of layers here: a copy of the layer with parameters of its own runs on a tiny graph, as in evaluation
and as in training, and each of its hops once more on some of the columns. A hop qualifies if it gives the same numbers
there, whatever is drawn at random (NeutronTP, Sec. 3, for any message and aggregation).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import names_of
from pygdist.errors import InputError
from pygdist.hops.hop import Ends, ends_of, is_pair, source_of, with_passed_rows
from pygdist.hops.layer import BASE, CACHES, asked_arguments, having, own_class
from pygdist.hops.reads import tensors_read
from pygdist.hops.trials import TrialCache

log = logging.getLogger(__name__)

__all__ = ["TRIED_WITH", "Columns", "acts_on_columns", "columns_of_hops", "read_ends"]

TRIED_WITH = ("x", "edge_index", "edge_weight", "edge_type", "edge_attr", "x_0")
"""Arguments of a layer's ``forward`` that a trial may give."""

Kind = Literal["columns", "nodes", "edges", "edge columns", "same"]
"""What a hop gets: columns of nodes' rows, whole rows of nodes or of edges, columns of edges' rows, or the same."""

_NODES, _EDGES, _ANY_WIDTH = 6, 17, 7  # or more nodes and edges
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Columns:
    """How one hop of a layer is shared out.

    Attributes:
        kinds: What each argument of ``propagate`` is, by name.
        fold: The result has so many blocks of columns, each as wide as the rows that go in.
        repeated: The layer reads the same rows in several hops, one for each relation, say.
        reads: Names of the layer's parameters, and of other tensors that are its attributes, which it computes with.
        needs_all_edges: Why some of the destinations, with all edges into them, are not enough to get their rows right;
            empty if they are.
    """

    kinds: Mapping[str, Kind]
    fold: int
    repeated: bool = False
    reads: frozenset[str] = frozenset()
    needs_all_edges: str = ""


def read_ends(layer: MessagePassing, name: str) -> tuple[bool, bool]:
    """Whether a layer reads an argument at the sources of edges, and at their destinations or as it is."""
    asked = asked_arguments(layer)
    return f"{name}_j" in asked, f"{name}_i" in asked or name in asked


class _RefusedError(Exception):
    """Why a layer does not qualify: a clause that begins with a verb."""


def columns_of_hops(layer: MessagePassing) -> dict[frozenset[str], Columns]:
    """How each hop of a layer is shared out, by the names of the arguments that it gets; found once.

    Raises:
        InputError: With the reason, as a clause that begins with a verb, if the layer does not qualify.
    """
    if not hasattr(type(layer), BASE):  # about to be distributed, maybe again and with other options
        _HOPS.of_layer.pop(layer, None)
        _WHOLE.of_layer.pop(layer, None)
    found = _HOPS.of(layer)
    if isinstance(found, str):
        raise InputError(found)
    return found


def acts_on_columns(layer: MessagePassing) -> bool:
    """Whether a layer does nothing but hops and what acts on each column by itself, so that it may run on slices.

    The answer is for the layer as it is, in training or not: what it draws at random has to be the same on all ranks.
    """
    return any(one.training for one in layer.modules()) in _WHOLE.of(layer)


# -- trials ------------------------------------------------------------------------------------------------------------


def _tried(layer: MessagePassing) -> dict[frozenset[str], Columns] | str:
    """The hops of a layer, or why it does not qualify; an error if that is not known, which may change."""
    if any(isinstance(one, nn.UninitializedParameter) for one in layer.parameters()):
        raise InputError(
            "has parameters without a shape yet; call the model once on a few nodes before it is distributed"
        )
    found: dict[frozenset[str], Columns] = {}
    if not _propagates(own_class(layer)):
        return found
    failed, ran = "", False
    for width in _widths(layer):
        for arguments in _guesses(layer, width):
            tried = dict(found)
            try:
                for training in (False, True):
                    _watched(layer, arguments, training, tried)
                    _watched_with_signs(layer, arguments, training, tried)
            except _RefusedError as error:
                return f"{error}; use backend {names_of(lambda abilities: abilities.exact and abilities.mixes_columns)}"
            except Exception as error:  # whatever a layer says of arguments that do not fit
                failed = failed or str(error).split("\n")[0] or type(error).__name__  # of the most arguments
            else:
                found, ran = tried, True
        if ran:
            return found
    raise InputError(f"could not be tried on a few nodes ({failed}), so it is not known whether it mixes columns")


def _watched(
    layer: MessagePassing, arguments: dict[str, Any], training: bool, found: dict[frozenset[str], Columns]
) -> None:
    trial = _plain_copy(layer).train(training)
    trial.__dict__["propagate"] = _watching(trial, found)
    _run(trial, arguments)


def _watched_with_signs(
    layer: MessagePassing, arguments: dict[str, Any], training: bool, found: dict[frozenset[str], Columns]
) -> None:
    """The same with rows of both signs, which not all layers take: a threshold may let nothing through that mixes."""
    with_signs = dict(found)
    try:
        _watched(layer, _with_signs(arguments), training, with_signs)
    except _RefusedError:
        raise
    except Exception as error:  # whatever a layer says of the logarithm or root of what is negative
        log.debug("%s does not take negative rows: %s", type(layer).__name__, error)
    else:
        found.update(with_signs)


def _with_signs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows of nodes and attributes of edges with both signs."""
    return {name: 2 * value - 1 if name in ("x", "x_0", "edge_attr") else value for name, value in arguments.items()}


def _tried_whole(layer: MessagePassing) -> frozenset[bool]:
    """In which modes a layer may run on slices: in evaluation (``False``), in training (``True``)."""
    if list(layer.children())[1:]:
        return frozenset()
    return frozenset(training for training in (False, True) if _whole_alone(layer, training))


_HOPS = TrialCache(_tried)
_WHOLE = TrialCache(_tried_whole)


def _whole_alone(layer: MessagePassing, training: bool) -> bool:
    width, found = _ANY_WIDTH, False
    guesses = [guess for guess in _guesses(layer, width) if "x" in guess]
    for number, arguments in enumerate((*guesses, *map(_with_signs, guesses))):
        try:
            trial = _plain_copy(layer).train(training)
            whole, again = _run(trial, arguments), _run(trial, arguments, seed=1)
        except Exception:  # whatever a layer says of arguments that do not fit
            continue
        if number >= len(guesses) and isinstance(whole, Tensor) and whole.isnan().any():
            continue  # roots of negative numbers, say
        if not (isinstance(whole, Tensor) and whole.shape == arguments["x"].shape and _same(again, whole)):
            return False
        for part in (slice(0, 3), slice(3, width)):
            cut = {name: value[:, part] if name in ("x", "x_0") else value for name, value in arguments.items()}
            try:
                some = _run(trial, cut)
            except Exception:  # whatever a layer says of rows of another width
                return False
            if not _same(some, whole[:, part]):
                return False
        found = True
    return found


def _run(trial: MessagePassing, arguments: dict[str, Any], seed: int = 0) -> Any:
    """What the layer gives, without the hooks on it: these get rows, not slices."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return trial.forward(**arguments)


def _same(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _plain_copy(layer: MessagePassing) -> MessagePassing:
    """A copy on the host, in float64, that no backend knows of, and with parameters as training may make them."""
    memo: dict[int, Any] = {}
    for one in layer.modules():
        for name, value in vars(one).items():
            if name in CACHES and value is not None:  # of another graph
                memo[id(value)] = None
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                # maybe of a pass that was made, and these cannot be copied
                plain = value.detach().cpu().clone()
                memo[id(value)] = plain.double() if plain.is_floating_point() else plain
    trial = copy.deepcopy(layer, memo).cpu().double()
    for one in trial.modules():
        one.__class__ = own_class(one)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            if not parameter.is_floating_point():
                continue
            # zeros would hide what they are multiplied with; logarithms and roots are taken of scalars and vectors
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(0.1, 0.9, generator=generator)
            if sum(size > 1 for size in parameter.shape) > 1:
                drawn *= torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(drawn)
    return trial


def _propagates(cls: type[MessagePassing]) -> bool:
    """Whether the code of a layer class makes hops; it may leave them to another layer in it."""
    written = cls.__mro__[: cls.__mro__.index(MessagePassing)]
    functions = [value for one in written for value in vars(one).values() if isinstance(value, types.FunctionType)]
    return any("propagate" in function.__code__.co_names for function in functions)


def _guesses(layer: MessagePassing, width: int) -> Iterator[dict[str, Any]]:
    """Arguments that its ``forward`` may take: rows, edges, and inputs of edges that it names, or none of these."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    parameters = inspect.signature(own_class(layer).forward).parameters
    nodes, edges = _sizes(layer)
    targets = (torch.arange(edges) * (nodes - 1) // edges).sort().values  # every node but the last has an in-edge
    given: dict[str, Any] = {"x": rand(nodes, width), "x_0": rand(nodes, width)}
    given["edge_index"] = torch.stack([torch.randint(0, nodes, (edges,), generator=generator), targets])
    types = getattr(layer, "num_relations", 1)
    of_edges = {
        "edge_weight": rand(edges),
        "edge_type": torch.randint(0, types if isinstance(types, int) else 1, (edges,), generator=generator),
    }
    for attributes in _edge_widths(layer, width):
        every = {**given, **of_edges, "edge_attr": rand(edges, attributes)}
        yield {name: value for name, value in every.items() if name in parameters}
    yield {name: value for name, value in {**given, **of_edges}.items() if name in parameters}
    yield {name: value for name, value in given.items() if name in parameters}


def _edge_widths(layer: MessagePassing, width: int) -> Iterator[int]:
    """Likely widths of edge attributes; the rows' own last, for layers that add the two (``GINEConv``)."""
    inside = [getattr(layer, name, None) for name in ("lin_edge", "lin")]
    candidates = [getattr(layer, name, None) for name in ("edge_dim", "in_edge_channels", "dim")]
    candidates += [getattr(one, name, None) for one in inside for name in ("in_channels", "in_features")]
    yield from dict.fromkeys(one for one in [*candidates, width] if isinstance(one, int) and one > 0)


def _sizes(layer: MessagePassing) -> tuple[int, int]:
    """Nodes and edges of a trial: numbers that count nothing else in the layer, as its relations or heads.

    What a hop gets is told by its size to be of nodes or of edges, to which a layer may have added self-loops.
    """
    inside = [value for one in layer.modules() for name, value in vars(one).items() if name not in CACHES]
    tensors = [*layer.parameters(), *layer.buffers(), *(value for value in inside if isinstance(value, Tensor))]
    taken = {size for one in tensors for size in one.shape} | {value for value in inside if isinstance(value, int)}
    nodes = next(number for number in itertools.count(_NODES) if number not in taken)
    edges = next(number for number in itertools.count(_EDGES) if taken.isdisjoint(range(number, number + nodes + 1)))
    return nodes, edges


def _widths(layer: MessagePassing) -> Iterator[int]:
    """Likely widths of rows; what is one wide says nothing of how columns mix, unless the layer says that it is."""
    said = [getattr(layer, name, None) for name in ("in_channels", "channels")]
    said = [one[0] if isinstance(one, (tuple, list)) else one for one in said]
    seen = [getattr(one, name, None) for one in layer.modules() for name in ("in_features", "in_channels")]
    narrow = [1] if 1 in [*seen, getattr(layer, "out_channels", None)] else []
    seen += [one.size(dim) for one in layer.parameters() for dim in range(one.dim())]
    seen += [one // 2 for one in seen if isinstance(one, int)]  # of both ends of an edge
    found = [one for one in said if isinstance(one, int) and one > 0]
    wide = [one for one in seen if isinstance(one, int) and one > 1]
    yield from dict.fromkeys([*found, *wide, _ANY_WIDTH, *narrow])


def _watching(layer: MessagePassing, found: dict[frozenset[str], Columns]) -> Callable[..., Tensor]:
    """A ``propagate`` that notes how each hop is shared out."""
    own, (num_nodes, _) = type(layer).propagate, _sizes(layer)
    read: list[Any] = []

    def propagate(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        run = partial(own, layer, edge_index, size=size)
        names = frozenset(name for name, value in kwargs.items() if value is not None)
        torch.default_generator.manual_seed(0)
        whole: Tensor = run(**kwargs)
        if whole.isnan().any():  # compares with nothing, and may hide what mixes
            raise ValueError("gives no numbers")
        torch.default_generator.manual_seed(1)
        if not _same(run(**kwargs), whole):
            when = " while it trains" if layer.training else ""
            raise _RefusedError(
                f"draws random numbers in its hops{when} ({_called(names)}), "
                "and ranks would draw others for other columns"
            )
        columns = _shared_out(layer, run, (num_nodes, edge_index.size(1)), kwargs, whole)
        known = found.setdefault(names, columns)
        part = known.needs_all_edges or _needs_all_edges(
            layer, partial(own, layer), edge_index, kwargs, known.kinds, whole
        )
        known = replace(known, reads=known.reads | tensors_read(layer, partial(run, **kwargs)), needs_all_edges=part)
        found[names] = known
        if (known.kinds, known.fold) != (columns.kinds, columns.fold):
            raise _RefusedError(f"makes hops with the same arguments that are not alike ({_called(names)})")
        rows = [kwargs[name] for name, kind in known.kinds.items() if kind == "columns"]
        if any(one is other for one in rows for other in read):
            found[names] = replace(known, repeated=True)
        read.extend(rows)
        return whole

    return propagate


def _needs_all_edges(
    layer: MessagePassing,
    run: Callable[..., Tensor],
    edge_index: Tensor,
    kwargs: dict[str, Any],
    kinds: Mapping[str, Kind],
    whole: Tensor,
) -> str:
    """Why a hop that gave ``whole`` cannot be run on half of the destinations; nothing if it can."""
    dim, half = layer.node_dim, -(-whole.size(layer.node_dim) // 2)
    # update() gets of both ends what it gets where a hop runs by chunks
    update = vars(layer).get("update", types.MethodType(with_passed_rows(type(layer).update), layer))
    for span in (range(half), range(half, whole.size(dim))):
        among = (edge_index[1] >= span.start) & (edge_index[1] < span.stop)
        if not among.any():  # many layers do not run on no edges
            continue
        sources, source = edge_index[0, among].unique(return_inverse=True)
        rows = sources, torch.arange(span.start, span.stop)

        def taken(name: str, value: Any, among: Tensor = among, rows: tuple[Tensor, Tensor] = rows) -> Any:
            kind = kinds.get(name, "same")
            if value is None or kind == "same":
                return value
            if kind in ("edges", "edge columns"):
                return value[among]
            ends = ends_of(value)
            read = read_ends(layer, name)
            parts = [
                one.index_select(dim, place) if used and one is not None else None
                for one, place, used in zip(ends, rows, read, strict=True)
            ]
            if not read[0]:
                return parts[1]
            return tuple(parts) if is_pair(value) else Ends(parts)

        given = {name: taken(name, value) for name, value in kwargs.items()}
        edges, size = torch.stack([source, edge_index[1, among] - span.start]), (sources.numel(), len(span))
        try:
            with having(layer, {"update": update}):
                found = run(edges, size=size, **given)
        except Exception as error:  # whatever a layer says of some of its rows
            return f"could not be tried on some of the edges ({type(error).__name__}: {error})"
        if not _same(found, whole.narrow(dim, span.start, len(span))):
            return "gave some destinations other numbers without the edges into others when it was tried on a few nodes"
    return ""


def _called(names: Iterable[str]) -> str:
    return f"propagate({', '.join(sorted(names))})"


def _mixes(how: str) -> _RefusedError:
    return _RefusedError(f"mixes columns ({how}), so ranks cannot share them out")


def _shared_out(
    layer: MessagePassing, run: Callable[..., Tensor], sizes: tuple[int, int], kwargs: dict[str, Any], whole: Tensor
) -> Columns:
    """How a hop that gave ``whole`` is shared out."""
    lifted = {name[:-2] for name in asked_arguments(layer) if name.endswith(("_i", "_j"))}
    first = {name: source_of(value) for name, value in kwargs.items() if value is not None}
    kinds = {name: _kind(name, value, lifted, layer.node_dim, sizes) for name, value in first.items()}
    wide = {
        name: value.size(-1)
        for name, value in first.items()
        if kinds[name] in ("nodes", "edges") and value.is_floating_point() and value.dim() > 1
    }
    width = max((wide[name] for name in wide if kinds[name] == "nodes" and name in lifted), default=0)
    if width == 0 or whole.size(-1) % width:
        raise _mixes(f"{width} columns in, {whole.size(-1)} out")
    fold = whole.size(-1) // width
    nodes: dict[str, Kind] = {name: "columns" for name in wide if wide[name] == width and kinds[name] == "nodes"}
    edges: dict[str, Kind] = {name: "edge columns" for name in wide if wide[name] == width and kinds[name] == "edges"}
    for cut in (nodes, {**nodes, **edges}):
        if _alone(run, kwargs, cut, whole.view(*whole.shape[:-1], fold, width)):
            return Columns({**kinds, **cut}, fold)
    raise _mixes(_called(first))


def _kind(name: str, value: Any, lifted: set[str], node_dim: int, sizes: tuple[int, int]) -> Kind:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return "same"
    num_nodes, num_edges = sizes
    by_node = value.dim() >= abs(node_dim) and value.size(node_dim) == num_nodes
    if name in lifted and by_node:
        return "nodes"
    if value.size(0) == num_edges:
        return "edges"
    return "nodes" if by_node else "same"


def _alone(run: Callable[..., Tensor], kwargs: dict[str, Any], cut: Mapping[str, Kind], whole: Tensor) -> bool:
    """Whether a hop on some columns gives these columns of the result."""
    width = whole.size(-1)
    half = -(-width // 2)
    parts = [slice(0, half), slice(half, width)] if width > 1 else [slice(0, 1)]
    if width > 2:  # neighbours may mix within a half
        parts += [slice(0, width, 2), slice(1, width, 2)]
    for part in parts:

        def taken(value: Any, part: slice = part) -> Any:
            if is_pair(value):
                return tuple(None if one is None else taken(one) for one in value)
            return value[..., part]

        given = {name: taken(value) if name in cut else value for name, value in kwargs.items()}
        try:
            found = run(**given)
        except Exception:  # whatever a layer says of rows of another width
            return False
        if not _same(found, whole[..., part].flatten(-2)):
            return False
    return True
