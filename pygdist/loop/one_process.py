"""A model on one process, with the caller's own loop: the calls stay as they are, and run on pygdist's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pygdist.backends import CommBackend
from pygdist.comm import Communicator, ExchangePlan
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.identity import version_of
from pygdist.graph.memo import Memo
from pygdist.hops.arguments import mapped
from pygdist.nn.nested import each_value
from pygdist.routing.distribute import distribute, with_hooks


def accelerate(model: nn.Module, data: Data) -> nn.Module:
    """Let ``model`` run on pygdist's kernels on one process, in place; the script around it stays as it is.

    The model is called as before, with ``data.edge_index`` and the values of its edges, or with ``data`` itself, and
    returns what it returned: the order of nodes and edges is the caller's. Layers are sparse products and fused
    attention where PyG makes a row for each edge. :func:`~pygdist.undistribute` takes it back.

    Args:
        model: Any module that contains PyG layers. Parameters and ``state_dict`` keys do not change.
        data: The graph on which the model is called, on the model's device. Its edges are sorted once.

    Returns:
        ``model`` itself.

    Raises:
        InputError: If ``data`` has no ``edge_index``, or :func:`~pygdist.distribute` refuses a layer. A call of the
            model raises one if its edges are not those of ``data``.

    Example:
        >>> model = pygdist.accelerate(GCN(16, 32, num_layers=2, out_channels=7), data)
        >>> loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    """
    if not isinstance(data, Data) or not isinstance(data.edge_index, Tensor):
        raise InputError(
            f"accelerate(model, data) takes a torch_geometric.data.Data with an edge_index, got {type(data).__name__}; "
            "bring a HeteroData into one by to_homogeneous()"
        )
    inputs, backend = _Inputs(data), CommBackend()
    backend.bind(inputs.shard(), Communicator())
    translated = model.register_forward_pre_hook(inputs.before, with_kwargs=True)  # before the hooks of distribute()
    try:
        distribute(model, backend=backend)  # its check refuses models with values of edges of their own
    except BaseException:
        translated.remove()
        raise
    return with_hooks(model, translated, model.register_forward_hook(inputs.after))


class _Inputs:
    """The caller's graph, and the same sorted: calls get the latter, and results go back to the caller's order.

    Attributes:
        adjacency: The edges, sorted by destination.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        edges = self._edges = data.edge_index
        self._version = version_of(edges)
        num_nodes, self._perm, self._back = int(data.num_nodes), None, None
        if bool((edges[1, 1:] >= edges[1, :-1]).all()):
            self.adjacency = Adjacency(edges, num_src=num_nodes, num_dst=num_nodes)
        else:
            self.adjacency, self._perm = Adjacency.from_unsorted(edges, num_src=num_nodes, num_dst=num_nodes)
            self._back = self._perm.argsort()
        self._sorted = Memo[Tensor]()  # values of edges

    def shard(self) -> Shard:
        """Return the graph as the one part of one process."""
        device, num_nodes, num_edges = self.adjacency.device, int(self._data.num_nodes), self.adjacency.size(1)
        none, x = torch.empty(0, dtype=torch.int64, device=device), self._data.x
        return Shard(
            rank=0, num_parts=1, n_id=torch.arange(num_nodes, device=device), num_owned=num_nodes,
            adjacency=self.adjacency,
            e_id=torch.arange(num_edges, device=device) if self._perm is None else self._perm.long(),
            plan=ExchangePlan(send_index=none, send_counts=(0,), recv_counts=(0,)),
            x=torch.empty(num_nodes, 0, device=device) if x is None else x, y=None,
            edge_weight=None, edge_attr=None, edge_type=None, num_nodes=num_nodes, num_edges=num_edges,
            num_classes=0, multi_label=False, counts=dict.fromkeys(MASKS, 0), **dict.fromkeys(MASKS),
        )  # fmt: skip

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Forward pre-hook: give a call the sorted edges, and their values in the same order."""
        return mapped(model.forward, args, kwargs, self._given)

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: bring edges and values of edges back to the caller's order.

        Other edges, such as those with self-loops that a layer returns with its attention, stay sorted, and so do all
        values of edges beside them.
        """
        edges = list[Adjacency]()
        each_value(output, Adjacency, edges.append)
        if self._back is None or any(one.origin is not self.adjacency for one in edges):
            return output
        return each_value(output, Tensor, self._returned)

    def _given(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Adjacency):
            return value
        if self._are_edges(name, value):
            return self.adjacency
        num_edges = self.adjacency.size(1)
        of_edges = name in EDGE_FIELDS or num_edges != self._data.num_nodes
        return self._in_order(name, value) if of_edges and value.dim() and value.size(0) == num_edges else value

    def _are_edges(self, name: str, value: Tensor) -> bool:
        edges = self._edges
        if version_of(edges) != self._version:
            raise InputError(
                "the edge_index for which the model was accelerated was changed in place: call undistribute(model) and "
                "accelerate(model, data) again"
            )
        if value is edges:
            return True
        if value.dim() != 2 or value.size(0) != 2 or value.is_floating_point():
            return False
        if value.shape == edges.shape and torch.equal(value, edges):
            return True
        if name == "edge_index":
            raise InputError(
                f"the model was accelerated for a graph of {edges.size(1)} edges, and is called with other edges (of "
                f"shape {tuple(value.shape)}): call undistribute(model) and accelerate(model, data) for each graph"
            )
        return False

    def _in_order(self, name: str, value: Tensor) -> Tensor:
        """Return values of edges sorted; the same object again for the same values, by which results are kept."""
        perm = self._perm
        if perm is None:
            return value
        return self._sorted.get(name, (value,), lambda: value.index_select(0, perm))

    def _returned(self, value: Tensor) -> Tensor:
        if isinstance(value, Adjacency):
            edges: Tensor = self._edges
            return edges
        num_edges = self.adjacency.size(1)
        is_of_edges = value.dim() and value.size(0) == num_edges and num_edges != self._data.num_nodes
        return value.index_select(0, self._back) if is_of_edges and self._back is not None else value
