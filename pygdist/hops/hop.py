"""The hop: one call of a layer's ``propagate`` or ``edge_updater``, as an object that backends run.

The hop tells its backend which rows the layer needs (:attr:`Hop.sources`). The backend brings these rows to this rank,
and passes them to :meth:`Hop.run`. This file decides how to compute the hop then: by one sparse product, by an
attention kernel or by the layer's own messages. An argument of a hop is one tensor, or a pair (source rows, destination
rows), as in PyG's bipartite layers; only this file asks which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import EGConv, MessagePassing
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.layer import (
    asked_arguments,
    fused_arguments,
    hooked,
    is_changed,
    layer_name,
    neighbour_arguments,
    takes_fused,
    writes_hops,
)  # fmt: skip

Kernel: TypeAlias = Callable[..., Tensor]
"""Called as ``kernel(layer, adjacency, **arguments)`` with the hop's arguments, source rows included."""

_WEIGHTS = "_alpha"  # where layers of PyG leave attention weights, which their forward may return


class Ends(tuple[Any, ...]):
    """A pair made of an argument that the layer passed as one tensor: source rows, and the rows that it passed.

    An ``update`` that asks for the argument gets the rows that the layer passed.
    """


class Deferred:
    """Result of an ``edge_updater`` whose edge weights are computed later, inside the sum that reads them."""


def is_pair(value: Any) -> bool:
    """True if an argument of a hop holds source rows and destination rows apart."""
    return isinstance(value, (tuple, list))


def ends_of(value: Any) -> tuple[Any, Any]:
    """Source rows and destination rows of an argument; one tensor stands for both."""
    return (value[0], value[1]) if is_pair(value) else (value, value)


def source_of(value: Any) -> Any:
    """Source rows of an argument."""
    return ends_of(value)[0]


def target_of(value: Any) -> Any:
    """Destination rows of an argument."""
    return ends_of(value)[1]


def each_end(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to an argument, or to each end of a pair."""
    return type(value)(change(end) for end in value) if is_pair(value) else change(value)


def with_passed_rows(update: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a layer's ``update`` so that it gets the rows that the layer passed, not both ends."""

    @functools.wraps(update)
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        passed = {name: value[1] if isinstance(value, Ends) else value for name, value in kwargs.items()}
        return update(self, *args, **passed)

    return run


class Runs(Protocol):
    """Computes hops whose rows are here; see :class:`~pygdist.hops.kept.Kept`."""

    def kernel_of(self, hop: Hop) -> Kernel | None:
        """Return the kernel that computes ``hop`` in place of the layer's messages; ``None`` if there is none."""

    def messages(self, hop: Hop) -> Tensor:
        """Compute ``hop`` by the layer's own messages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Hop:
    """One call of a layer's ``propagate`` or ``edge_updater``.

    Attributes:
        layer: The layer.
        name: The method that the layer called.
        edge_index: The edges, in local ids of the shard: its :class:`~pygdist.graph.Adjacency`, or edges derived from
            it, for example with self-loops.
        arguments: What the layer passed, by name. Tensors of nodes have ``Backend.num_rows`` rows.
        size: Numbers of source and destination rows, as the layer passed them; usually ``None``.
        written: The layer's own method, as its authors wrote it.
        runs: Computes the hop once its rows are here.
        weights_unseen: True if only the weighted sum of this attention layer reads its attention weights.
    """

    layer: MessagePassing
    name: Literal["propagate", "edge_updater"]
    edge_index: Tensor
    arguments: Mapping[str, Any]
    size: Any
    written: Callable[..., Tensor]
    runs: Runs
    weights_unseen: bool = False

    # -- what kind of hop it is ----------------------------------------------------------------------------------------

    @property
    def updates_edges(self) -> bool:
        """True for ``edge_updater``, whose result holds one row per edge, not per node."""
        return self.name == "edge_updater"

    @cached_property
    def sources(self) -> dict[str, Tensor]:
        """The tensors whose rows the layer reads at the sources of edges, by argument name.

        The layer's inspector gives the names, such as ``x`` if ``message`` asks for ``x_j``.
        """
        names = neighbour_arguments(self.layer, edges=self.updates_edges)
        ends = {name: source_of(self.arguments.get(name)) for name in names}
        return {name: rows for name, rows in ends.items() if isinstance(rows, Tensor)}

    @cached_property
    def is_product(self) -> bool:
        """True if the hop is one sparse product. PyG's fused path then gets one tensor, the source rows.

        The layer implements ``message_and_aggregate``, and its message is the source's row, times a scalar edge weight
        if there is one. Arguments that are ``None`` (``edge_type_ptr`` of RGCN) do not count. Hops whose edges are no
        longer an :class:`~pygdist.graph.Adjacency` are no product, nor are hops of layers with hooks on their messages
        or with a ``propagate`` of their own.
        """
        layer, arguments = self.layer, self.arguments
        if self.updates_edges or not (layer.fuse and isinstance(self.edge_index, Adjacency)):
            return False
        if writes_hops(type(layer)):
            return False
        read = asked_arguments(layer) - {name for name, value in arguments.items() if value is None}
        if not (read <= {"x_j", "edge_weight"} and takes_fused(layer, {"x", "edge_weight"})):
            return False
        x, weight = source_of(arguments.get("x")), arguments.get("edge_weight")
        if not (isinstance(x, Tensor) and x.is_floating_point() and not layer.explain):
            return False
        if x.dim() != 2 and (x.dim() != 3 or layer.node_dim != -2):  # ARMA stacks features in front of the nodes
            return False
        takes_weight = weight is None or (weight.dim() == 1 and weight.is_floating_point())
        return takes_weight and _fused_path_says_all(layer)

    @cached_property
    def is_plain_product(self) -> bool:
        """True if ``message_and_aggregate`` alone does all that PyG's fused path would do."""
        return self.is_product and fused_arguments(self.layer) is not None

    @cached_property
    def kernel(self) -> Kernel | None:
        """The attention kernel that computes the hop; ``None`` if the layer's own code has to run."""
        return self.runs.kernel_of(self)

    @property
    def layer_name(self) -> str:
        """The class name that users know."""
        return layer_name(self.layer)

    # -- running it ----------------------------------------------------------------------------------------------------

    def run(
        self,
        edge_index: Tensor | None = None,
        *,
        rows: Mapping[str, Tensor] | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Compute the hop.

        Args:
            edge_index: Edges in place of the hop's own.
            rows: Source rows by argument name (:attr:`sources`): one row per source of the edges. The rows that the
                layer passed remain the destination rows.
            size: Numbers of source and destination rows, with or without ``rows``. With ``size``, a rank without edges
                runs the layer on one edge between two extra rows, and drops their result: many layers cannot reduce
                zero messages.

        Returns:
            One row per destination, or per edge for ``edge_updater``. If ``weights_unseen`` is true, the result of an
            ``edge_updater`` may be a :class:`Deferred`, which only the layer's next hop reads.
        """
        hop = self
        if edge_index is not None or rows is not None or size is not None:
            arguments = self.arguments if rows is None else self._with_sources(rows, size)
            edges = self.edge_index if edge_index is None else edge_index
            hop = replace(self, edge_index=edges, arguments=arguments, size=self.size if size is None else size)
            if isinstance(edges, Adjacency):
                vars(hop)["is_product"] = self.is_product  # asked once: rows of other ranks do not change it
        if size is not None and hop.edge_index.size(1) == 0 and hop.kernel is None:
            return hop._on_phantom_edge(size)
        return hop._computed()

    def _with_sources(self, rows: Mapping[str, Tensor], size: tuple[int, int] | None) -> dict[str, Any]:
        """The arguments, with ``rows`` at the sources of edges."""
        arguments = dict(self.arguments)
        for name, source in rows.items():
            value = arguments[name]
            if is_pair(value):
                arguments[name] = (source, value[1])
            elif self.is_product:  # PyG's fused path multiplies the one tensor that it gets
                arguments[name] = source
            else:  # the message path looks both ends up
                dim, count = self.layer.node_dim, None if size is None else size[1]
                fewer = count is not None and count < value.size(dim)
                arguments[name] = Ends((source, value.narrow(dim, 0, count) if fewer else value))
        return arguments

    def _computed(self) -> Tensor:
        if self.is_product:
            weight = self.arguments.get("edge_weight")
            edges: Any = self.edge_index
            edges = edges if weight is None else edges.with_value(weight)
            names = fused_arguments(self.layer)
            if names is None:
                return self.written(self.layer, edges, size=self.size, **self.arguments)
            out: Tensor = self.layer.message_and_aggregate(edges, **{name: self.arguments.get(name) for name in names})
            return out
        if self.kernel is not None:
            return self.kernel(self.layer, self.edge_index, **self.arguments)
        return self.runs.messages(self)

    def _on_phantom_edge(self, size: tuple[int, int]) -> Tensor:
        """Run the hop on one edge between two rows of ones, which are cut off; their gradients are zero."""
        num_src, num_dst = size
        dim = self.layer.node_dim

        def padded(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            by_node = value.size(dim) in (num_src, num_dst) if value.dim() >= abs(dim) else False
            axis = dim if by_node else 0
            if not by_node and value.size(0) != 0:  # neither per node nor per edge
                return value
            shape = list(value.shape)
            shape[axis] = 1
            return torch.cat([value, value.new_ones(shape)], dim=axis)

        tensors = [value for value in self.arguments.values() if isinstance(value, Tensor)]
        edge = torch.tensor([[num_src], [num_dst]], device=tensors[0].device if tensors else None)
        arguments = {name: each_end(value, padded) for name, value in self.arguments.items()}
        out: Tensor = replace(self, edge_index=edge, arguments=arguments, size=(num_src + 1, num_dst + 1))._computed()
        if isinstance(weights := vars(self.layer).get(_WEIGHTS), Tensor):
            vars(self.layer)[_WEIGHTS] = weights[:0]
        return out[:0] if self.updates_edges else out.narrow(dim, 0, num_dst)

    @property
    def plain_edges(self) -> Tensor:
        """The edges as an ordinary tensor, so that the layer runs the same message path as on one process."""
        edges = self.edge_index
        return edges.as_tensor() if isinstance(edges, EdgeIndex) else edges


_SAID = ("message_and_aggregate", "message", "aggregate")
_AGGREGATIONS = {
    "sum": SumAggregation,
    "add": SumAggregation,
    "mean": MeanAggregation,
    "max": MaxAggregation,
    "min": MinAggregation,
}


def _fused_path_says_all(layer: MessagePassing) -> bool:
    """True if ``message_and_aggregate`` equals message and aggregation: a library's own, and nobody changed those.

    PyG calls a user's ``message_and_aggregate`` for sparse matrices alone, and users pass an ``edge_index``.
    """
    if not layer.message_and_aggregate.__module__.startswith(("torch_geometric.", "pygdist.")):
        return False
    # by edge_index PyG calls no message_and_aggregate, nor hooks on it
    if hooked(layer, "message", "aggregate", "message_and_aggregate") or {*_SAID, "update"} & vars(layer).keys():
        return False
    if layer.aggr_module is not None and is_changed(layer.aggr_module):
        return False
    if isinstance(layer, EGConv) and "std" in layer.aggregators:
        return False  # PyG computes sqrt(var + 1e-5) in one path and sqrt(max(var, 1e-5)) in the other
    # ``aggr`` tells the fused path how to reduce; the message path runs the module
    expected = _AGGREGATIONS.get(layer.aggr) if isinstance(layer.aggr, str) else None
    if expected is not None and type(layer.aggr_module) is not expected:
        return False
    order = type(layer).__mro__
    at = {name: next(n for n, cls in enumerate(order) if name in vars(cls)) for name in _SAID}
    return all(at["message_and_aggregate"] <= place for place in at.values())


def check_rows(hop: Hop, name: str, x: Tensor, expected: int, reason: str) -> None:
    """Refuse an argument of a hop that has not ``expected`` rows; ``reason`` says why it should.

    Raises:
        InputError: Naming the layer, the argument and the rows.
    """
    if x.size(hop.layer.node_dim) != expected:
        raise InputError(
            f"{hop.layer_name}: argument '{name}' of propagate has {x.size(hop.layer.node_dim)} rows, but {reason}; "
            "of a tensor with a row for every node of the graph, such as an embedding table, pass the rank's rows: "
            "give the model the ids of its nodes, and look their rows up",
            of_one_rank=True,
        )
