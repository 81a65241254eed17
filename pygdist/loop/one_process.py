"""A model on one process, with the caller's own loop: its layers run on pygdist's kernels, all other code as before."""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends import CommBackend
from pygdist.comm import Communicator, ExchangePlan
from pygdist.comm.derivatives import is_transformed
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS, MASKS, plain
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.memo import Memo
from pygdist.hops.arguments import mapped, named_values, node_dim
from pygdist.hops.hop import Deferred, Hop
from pygdist.hops.layer import CACHES, hooked, is_changed, layer_name, modules_of_messages, own_class, written_hop
from pygdist.routing.distribute import distribute_layers, with_own_classes
from pygdist.routing.refusals import reason_against_layer

_ONE_AT_A_TIME = threading.RLock()  # layers, if several threads call models
_FEW = 2  # results that are kept
_OF_NODES = ("x", "x_0", "y", "mask", "pos", "normal", "batch", "node_type", "lambda_max")
_KNOWN = {*_OF_NODES, *EDGE_FIELDS, "edge_index", "pos_edge_index", "neg_edge_index"}  # arguments of PyG's layers
_CODE = ("forward", "message", "message_and_aggregate", "aggregate", "update", "edge_update")


def accelerate(model: nn.Module, data: Data) -> nn.Module:
    """Let the layers of ``model`` run on pygdist's kernels on one process, in place; the script stays as it is.

    The model is called as before and returns the same results. PyG's layers that get ``data.edge_index`` run as sparse
    products and fused attention, whereas PyG itself makes a row for each edge. Calls with other edges (a mini-batch, a
    subset, ``adj_t``), and calls with hooks or an explainer on messages, run as in plain PyG; the first call of each
    kind warns. A layer with ``cached=True`` that has run on the graph refuses other edges. Layers of your own, and
    layers that pygdist does not support, run as in plain PyG too; a warning names these layers.
    :func:`~pygdist.undistribute` gives all layers their own code back.

    Args:
        model: Any module that contains PyG layers. Parameters and ``state_dict`` keys do not change.
        data: The graph on which the model is called, on the model's device. Its edges are sorted once.

    Returns:
        ``model`` itself.

    Raises:
        InputError: If ``data`` has no ``edge_index``, an end of an edge is not a node, or the model is accelerated or
            distributed already.

    Example:
        >>> model = pygdist.accelerate(GCN(16, 32, num_layers=2, out_channels=7), data)
        >>> loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    """
    if isinstance(data, Data) and data.get("edge_index") is None and data.get("adj_t") is not None:
        raise InputError(
            "accelerate(model, data): data has adj_t and no edge_index; make data without ToSparseTensor, and call the "
            "model with data.edge_index"
        )
    if not isinstance(data, Data) or not isinstance(data.edge_index, Tensor):
        raise InputError(
            f"accelerate(model, data) takes a torch_geometric.data.Data with an edge_index, got {type(data).__name__}; "
            "bring a HeteroData into one by to_homogeneous()"
        )
    graph, backend = _Graph(data), OneProcess()
    backend.bind(graph.shard(data), Communicator())
    backend.graph = graph
    layers = [one for one in model.modules() if isinstance(one, MessagePassing)]
    left = [one for one in layers if not _is_pygs(one) or reason_against_layer(one, backend)]
    distribute_layers(model, backend=backend, but=left)
    if left:
        names = ", ".join(sorted({layer_name(one) for one in left}))
        warnings.warn(
            f"accelerate: these layers run as in plain PyG, no faster: {names}; kernels are for layers of PyG that "
            "pygdist supports",
            stacklevel=2,
        )
    return model


class OneProcess(CommBackend):
    """Runs layers on the edges of one graph, sorted by destination, and gives their results in the caller's order.

    Attributes:
        graph: The caller's graph; ``None`` in a process that has only unpickled a model.
    """

    name = ""
    per_graph: ClassVar[tuple[str, ...]] = ("graph",)
    graph: _Graph | None = None
    _depth = 0  # of layers that run inside of layers

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call, graph = types.MethodType(forward, layer), self.graph
        values = named_values(call, args, kwargs)
        if any(isinstance(one, Adjacency) for _, one in values):  # the layer runs inside of another, which got them
            return super().run_layer(layer, forward, args, kwargs)
        with _ONE_AT_A_TIME:
            edges = [] if graph is None else graph.own_edges(values)
            if graph is None or graph.leaves(layer, values, edges):
                with with_own_classes(layer):
                    return layer.forward(*args, **kwargs)
            graph.note(layer)
            args, kwargs = mapped(call, args, kwargs, partial(graph.given, edges))
            with self._around_layer():
                return graph.returned(super().run_layer(layer, forward, args, kwargs))

    @contextlib.contextmanager
    def _around_layer(self) -> Iterator[None]:
        """Let hops of a layer be told apart by their order in it."""
        if self._depth == 0:
            self.kept.first_hop.begin_forward()
            self.begin_forward()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.kept.first_hop.end_forward()
                self.end_forward()

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return super().propagate(hop) if isinstance(hop.edge_index, Adjacency) else _in_pyg(hop)

    @override
    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        return super().edge_updater(hop) if isinstance(hop.edge_index, Adjacency) else _in_pyg(hop)


def _is_pygs(layer: MessagePassing) -> bool:
    """True if a layer's hops are code of PyG and torch; a user's code may know edges by their order."""
    cls = own_class(layer)
    written = (written_hop(cls, name) for name in ("propagate", "edge_updater"))
    code = [*(getattr(cls, name) for name in _CODE), *written, *(own_class(one) for one in _of_hops(layer))]
    return all(one.__module__.startswith(("torch_geometric.", "torch.")) for one in code)


def _of_hops(layer: MessagePassing) -> list[nn.Module]:
    """Return the modules that a layer's hops run on messages."""
    called = [*modules_of_messages(layer), *filter(None, [layer.aggr_module])]
    return [inside for one in called for inside in one.modules()]


def _is_looked_at(layer: MessagePassing) -> bool:
    """True if hooks, an explainer or a method set on the layer see its messages."""
    inside = any(is_changed(one) for one in _of_hops(layer))
    has_own_methods = any(name in vars(layer) for name in _CODE)
    return hooked(layer) or inside or has_own_methods or bool(layer.explain)


def _in_pyg(hop: Hop) -> Tensor:
    """Run a hop by PyG's code, as its edges are not those of the graph."""
    with with_own_classes(hop.layer):
        out: Tensor = getattr(hop.layer, hop.name)(hop.edge_index, size=hop.size, **hop.arguments)
        return out


def _check(edges: Tensor, num_nodes: int) -> None:
    if edges.dim() != 2 or edges.size(0) != 2 or edges.is_floating_point():
        raise InputError(f"data.edge_index has shape {tuple(edges.shape)} and {edges.dtype}, expected integers, (2, E)")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < num_nodes:
        raise InputError(
            f"data.edge_index has ids from {int(edges.min())} to {int(edges.max())}, but data has {num_nodes} nodes"
        )


class _Graph:
    """The caller's edges, and the same sorted: layers get the latter, and results go back to the caller's order.

    Attributes:
        adjacency: The edges, sorted by destination.
    """

    def __init__(self, data: Data) -> None:
        self._given, edges = data.edge_index, plain(data.edge_index)
        _check(edges, int(data.num_nodes))
        self._edges, self._identity = edges, identity_of(edges)
        self._num_nodes, self._perm, self._back = int(data.num_nodes), None, None
        if bool((edges[1, 1:] >= edges[1, :-1]).all()):
            self.adjacency = Adjacency(edges, num_src=self._num_nodes, num_dst=self._num_nodes)
        else:
            self.adjacency, self._perm = Adjacency.from_unsorted(
                edges, num_src=self._num_nodes, num_dst=self._num_nodes
            )
            self._back = self._perm.argsort()
        self._sorted = Memo[Tensor](most=_FEW)  # values of edges
        self._equal = Memo[bool](most=_FEW)  # copies of the edges that compared equal
        self._cached: weakref.WeakSet[MessagePassing] = weakref.WeakSet()  # layers with cached=True that have run
        self._told = set[str]()  # reasons

    def shard(self, data: Data) -> Shard:
        """Return the graph as the one part of one process."""
        device, num_nodes, num_edges = self.adjacency.device, self._num_nodes, self._edges.size(1)
        none, x = torch.empty(0, dtype=torch.int64, device=device), data.x
        return Shard(
            rank=0, num_parts=1, n_id=torch.arange(num_nodes, device=device), num_owned=num_nodes,
            adjacency=self.adjacency,
            e_id=torch.arange(num_edges, device=device) if self._perm is None else self._perm.long(),
            plan=ExchangePlan(send_index=none, send_counts=(0,), recv_counts=(0,)),
            x=torch.empty(num_nodes, 0, device=device) if x is None else x, y=None,
            edge_weight=None, edge_attr=None, edge_type=None, num_nodes=num_nodes, num_edges=num_edges,
            num_classes=0, multi_label=False, counts=dict.fromkeys(MASKS, 0), **dict.fromkeys(MASKS),
        )  # fmt: skip

    def own_edges(self, values: list[tuple[str, Any]]) -> list[Tensor]:
        """Return those arguments of a call that are the graph's edges."""
        return [] if is_transformed() else [one for _, one in values if self._are_edges(one)]

    def leaves(self, layer: MessagePassing, values: list[tuple[str, Any]], edges: list[Tensor]) -> bool:
        """True if plain PyG runs a call; the first call for each reason warns.

        Raises:
            InputError: If the call has other edges, and the layer has ``cached=True`` and ran on the graph.
        """
        reason = self._reason_against(layer, values, edges)
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"{layer_name(layer)} runs as in plain PyG, no faster: {reason}", stacklevel=3)
        return reason is not None

    def _reason_against(self, layer: MessagePassing, values: list[tuple[str, Any]], edges: list[Tensor]) -> str | None:
        if is_transformed():
            return "torch.func, forward-mode derivatives, tracing or fake tensors are at work"
        if not edges:
            if layer in self._cached:
                raise InputError(
                    f"{layer_name(layer)} has cached=True and ran on data.edge_index: PyG would ignore the other edges "
                    "and use the cached ones; make it with cached=False"
                )
            sparse = any("sparse" in type(one).__name__.lower() or _is_sparse(one) for _, one in values)
            hint = "; call the model with data.edge_index, not with a sparse adjacency" if sparse else ""
            return f"its edges are not those for which the model was accelerated{hint}"
        if layer.flow != "source_to_target":
            return f"its flow is {layer.flow}"
        unknown = next((name for name, one in values if isinstance(one, Tensor) and name not in _KNOWN), None)
        if unknown is not None:
            return f"it gets {unknown}, and nothing says if that is in the order of the edges"
        if not all(_has_rows(layer, name, one, self._num_nodes) for name, one in values):
            return "x does not have one row for each node of the data, or a size is given"
        if layer not in self._cached and any(getattr(layer, name, None) is not None for name in CACHES):
            return "it has cached other edges"
        return "hooks, an explainer or methods of its own see its messages" if _is_looked_at(layer) else None

    def note(self, layer: MessagePassing) -> None:
        """Note a layer that runs on the graph."""
        if getattr(layer, "cached", False):
            self._cached.add(layer)

    def _are_edges(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or _is_sparse(value) or value.is_floating_point():
            return False
        if value.shape != self._edges.shape or value.device != self._edges.device:
            return False
        if identity_of(self._edges) != self._identity:  # changed since
            return False
        if value is self._given:
            return True
        edges = plain(value)
        if not fixable(edges):
            return torch.equal(edges, self._edges)
        same = identity_of(edges) == identity_of(self._edges) or self._equal.knows(identity_of(edges), (edges,))
        if not same and (same := torch.equal(edges, self._edges)):
            self._equal.put(identity_of(edges), (edges,), True)
        return same

    def given(self, edges: list[Tensor], name: str, value: Any) -> Any:
        """Return an argument of a layer: the sorted edges, or their values in the same order."""
        if not isinstance(value, Tensor) or _is_sparse(value):
            return value
        if any(value is one for one in edges):
            return self.adjacency
        perm = self._perm
        if perm is None or name not in EDGE_FIELDS or not value.dim() or value.size(0) != self._edges.size(1):
            return value
        if not fixable(value):
            return value.index_select(0, perm)
        # the same values give the same object again: kept results are found by it
        return self._sorted.get(identity_of(value), (value,), lambda: value.index_select(0, perm))

    def returned(self, out: Any) -> Any:
        """Bring edges, and values beside them, in an output of a layer back to the order of PyG."""
        if isinstance(out, tuple) and any(isinstance(one, Adjacency) for one in out):  # edges, and values beside them
            made = next(one for one in out if isinstance(one, Adjacency))
            mine = made.origin is self.adjacency
            edges, order = (self._given, self._back) if mine else self._with_loops(made)
            if edges is None:
                return out
            return tuple(edges if one is made else _in_order(one, order, edges.size(1)) for one in out)
        return tuple(map(self.returned, out)) if isinstance(out, tuple) else out

    def _with_loops(self, made: Adjacency) -> tuple[Tensor | None, Tensor | None]:
        """Return the edges that a layer has made, in PyG's order, and the place of each in ``made``.

        PyG removes self-loops and appends one for each node. If the layer made other edges, both are ``None``, and they
        stay as they are.
        """
        edges, mine = self._edges, plain(made)
        loop, kept = mine[0] == mine[1], edges[0] != edges[1]
        at, number = (~loop).nonzero().view(-1), torch.arange(edges.size(1), device=edges.device)
        number = number if self._perm is None else self._perm.long()
        number = number[kept[number]]
        if at.numel() != number.numel() or mine.size(1) - at.numel() != self._num_nodes:
            return None, None
        loops = loop.nonzero().view(-1)
        order = torch.cat([at[number.argsort()], loops[mine[0, loops].argsort(stable=True)]])
        as_in_pyg = mine[:, order]
        same = torch.equal(as_in_pyg[:, : at.numel()], edges[:, kept])
        return (as_in_pyg, order) if same else (None, None)


def _in_order(value: Any, order: Tensor | None, num_edges: int) -> Any:
    """Return a value with its rows in another order, if it has one for each edge."""
    of_edges = isinstance(value, Tensor) and not _is_sparse(value) and value.dim() > 0 and value.size(0) == num_edges
    return value.index_select(0, order) if of_edges and order is not None else value


def _has_rows(layer: MessagePassing, name: str, value: Any, num_nodes: int) -> bool:
    """True if an argument of a layer may be one for a graph of so many nodes: ``x`` has a row for each."""
    if name == "size":
        return value is None
    if name != "x" or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return True
    return not _is_sparse(value) and value.size(node_dim(layer, value)) == num_nodes


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided
