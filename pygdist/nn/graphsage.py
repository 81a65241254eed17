"""GraphSAGE with the GCN aggregator: the model of DistGNN (Sec. 6.1)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.utils import add_remaining_self_loops


class GraphSAGEGCN(GraphSAGE):
    r"""PyG's ``GraphSAGE`` with the GCN aggregator (Hamilton et al., 2017, Eq. 2).

    A layer averages a node and its in-neighbours alike, :math:`\mathbf{h}_v' = \mathbf{W} \frac{\mathbf{h}_v +
    \sum_{u \in N(v)} \mathbf{h}_u}{|N(v)| + 1} + \mathbf{b}`. A node with a self-loop counts once. Arguments are those
    of :class:`torch_geometric.nn.GraphSAGE`, except ``aggr`` and ``root_weight``.

    Example:
        >>> model = GraphSAGEGCN(in_channels=100, hidden_channels=256, num_layers=3, out_channels=47)
    """

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Return one layer."""
        return _Layer(in_channels, out_channels, aggr="mean", root_weight=False, **kwargs)


class _Layer(SAGEConv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Average rows ``(n, in_channels)`` over nodes and their in-neighbours, and multiply them."""
        looped, _ = add_remaining_self_loops(edge_index, num_nodes=x.size(0))
        out: Tensor = super().forward(x, looped)
        return out
