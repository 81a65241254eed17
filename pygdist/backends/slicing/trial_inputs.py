"""Inputs of the trials in ``columns``: a copy of a layer, and guesses at the arguments of its ``forward``."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.hops.layer import CACHES, own_class
from pygdist.hops.rebinding import methods_of

ANY_WIDTH = 7  # of rows, for a layer that takes any
_POSITIONS = 3  # coordinates of a node
_PAIR_FEATURES = 4  # of the positions and normals of two nodes (``PPFConv``)
_NODES, _EDGES = 6, 17  # at least so many


def plain_copy(layer: MessagePassing) -> MessagePassing:
    """Return an undistributed copy on the CPU, in float64, with random parameters other than zero."""
    memo: dict[int, Any] = {}
    for one in layer.modules():
        for name, value in vars(one).items():
            if name in CACHES and value is not None:  # of another graph
                memo[id(value)] = None
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                # deepcopy refuses tensors that an earlier pass computed
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
            # no zeros: they hide what they multiply. Scalars and vectors are positive: layers take logarithms and roots
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(0.1, 0.9, generator=generator)
            if sum(size > 1 for size in parameter.shape) > 1:
                drawn *= torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(drawn)
    return trial


def propagates(cls: type[MessagePassing]) -> bool:
    """True if a method of the layer class names ``propagate``; False if only a layer inside makes hops."""
    methods = set(methods_of(cls)) - set(methods_of(MessagePassing))
    return any("propagate" in function.__code__.co_names for function in methods)


def argument_names(layer: MessagePassing) -> dict[str, str]:
    """Return the arguments of ``forward`` by their usual names: rows are ``x``, and edges ``edge_index``.

    A user may name them ``h`` and ``adj``: rows come first then, and edges second.
    """
    _, *names = inspect.signature(own_class(layer).forward).parameters
    usual = {name: name for name in names}
    if not any(name.endswith("edge_index") for name in names):
        others = [name for name in names if name != "x"]
        if "x" not in names and others:
            usual["x"] = others.pop(0)
        if others:
            usual["edge_index"] = others[0]
    return usual


def guesses(layer: MessagePassing, width: int) -> Iterator[dict[str, Any]]:
    """Yield arguments by the names of :func:`argument_names`: rows, edges, inputs of edges; fewest inputs last."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    parameters = argument_names(layer)
    nodes, edges = sizes_of(layer)
    targets = (torch.arange(edges) * (nodes - 1) // edges).sort().values  # every node but the last has an in-edge
    of_nodes: dict[str, Any] = {name: rand(nodes, width) for name in ("x", "x_0", "y")}
    of_nodes |= {name: rand(nodes, _POSITIONS) for name in ("pos", "normal")}
    of_nodes["node_type"] = torch.zeros(nodes, dtype=torch.int64)
    other = _second_width(layer)
    pair = {} if other in (None, width) else {"x": (of_nodes["x"], rand(nodes, other))}
    edge_index = torch.stack([torch.randint(0, nodes, (edges,), generator=generator), targets])
    of_nodes |= {name: edge_index for name in parameters if name.endswith("edge_index")}
    num_types = getattr(layer, "num_relations", 1)
    of_edges = {
        "edge_weight": rand(edges),
        "edge_type": torch.randint(0, num_types if isinstance(num_types, int) else 1, (edges,), generator=generator),
    }
    attributes = ({"edge_attr": rand(edges, width)} for width in _edge_widths(layer, width))
    for more in itertools.chain(({**of_edges, **one} for one in attributes), [of_edges, {}]):
        for rows in (pair, {}) if pair else ({},):
            yield {name: value for name, value in {**of_nodes, **rows, **more}.items() if name in parameters}
    if "x" in parameters:  # rows of several layers (``DNAConv``), or none beside positions
        names = {name: value for name, value in {**of_nodes, **of_edges}.items() if name in parameters}
        yield {**names, "x": None if "pos" in parameters else rand(nodes, 2, width)}


def _second_width(layer: MessagePassing) -> int | None:
    """Return the width of the destinations' rows, for a layer that takes a pair of rows."""
    widths = getattr(layer, "in_channels", None)
    second = widths[1] if isinstance(widths, (tuple, list)) and len(widths) == 2 else None
    return second if isinstance(second, int) and second > 0 else None


def _inputs(layer: MessagePassing) -> list[Any]:
    """Return the widths that linear maps and layers inside a layer, and itself, say that they take."""
    return [getattr(one, name, None) for one in layer.modules() for name in ("in_features", "in_channels")]


def _edge_widths(layer: MessagePassing, width: int) -> Iterator[int]:
    """Yield likely widths of edge attributes; the rows' own last, for layers that add the two (``GINEConv``)."""
    inside = [getattr(layer, name, None) for name in ("lin_edge", "lin")]
    candidates = [getattr(layer, name, None) for name in ("edge_dim", "in_edge_channels", "dim")]
    candidates += [getattr(one, name, None) for one in inside for name in ("in_channels", "in_features")]
    candidates += _inputs(layer)
    yield from dict.fromkeys(one for one in [*candidates, width] if isinstance(one, int) and one > 0)


def sizes_of(layer: MessagePassing) -> tuple[int, int]:
    """Return a number of nodes and one of edges that equal no other size or number in the layer, such as heads.

    Trials tell arguments of nodes and of edges apart by size, also after the layer has added self-loops.
    """
    inside = [value for one in layer.modules() for name, value in vars(one).items() if name not in CACHES]
    tensors = [*layer.parameters(), *layer.buffers(), *(value for value in inside if isinstance(value, Tensor))]
    taken = {size for one in tensors for size in one.shape} | {value for value in inside if isinstance(value, int)}
    nodes = next(number for number in itertools.count(_NODES) if number not in taken)
    taken.add(nodes)
    edges = next(number for number in itertools.count(_EDGES) if taken.isdisjoint(range(number, number + nodes + 1)))
    return nodes, edges


def likely_widths(layer: MessagePassing) -> Iterator[int]:
    """Yield likely widths of rows. One column cannot show mixing: 1 comes last, unless ``in_channels`` is 1."""
    said = [getattr(layer, name, None) for name in ("in_channels", "channels")]
    said = [one[0] if isinstance(one, (tuple, list)) else one for one in said]
    seen = _inputs(layer)
    narrow = [1] if 1 in [*seen, getattr(layer, "out_channels", None)] else []
    seen += [one.size(dim) for one in layer.parameters() for dim in range(one.dim())]
    sizes = [one for one in seen if isinstance(one, int)]
    seen += [one // 2 for one in sizes]  # of both ends of an edge
    seen += [one - more for more in (_POSITIONS, _PAIR_FEATURES) for one in sizes]  # beside positions
    likely = [one for one in said if isinstance(one, int) and one > 0]
    wide = [one for one in seen if isinstance(one, int) and one > 1]
    yield from dict.fromkeys([*likely, *wide, ANY_WIDTH, *narrow])
