"""R-GCN as a whole model (Schlichtkrull et al., 2018); PyG has only the layer."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import RGCNConv

from pygdist.errors import InputError


class RGCN(nn.Module):
    """A stack of ``RGCNConv`` for graphs with relations.

    Args:
        in_channels: Number of features of a node. For a heterogeneous graph this is the number of columns after
            merging, which include one column for each node type (:func:`pygdist.graph.as_homogeneous`).
        hidden_channels: Width of the rows between layers.
        num_layers: Number of layers.
        out_channels: Width of the result; the number of classes.
        num_relations: Number of types of edges.
        num_bases: Number of shared weight matrices; each relation's weight is then a weighted sum of these matrices.
            By default each relation has a weight matrix of its own.
        dropout: Dropout probability between layers.

    Raises:
        InputError: If ``num_layers`` is less than 1.

    Example:
        >>> data = GraphDataModule("mag-like", {"scale": 0.01, "reverse": True})
        >>> module = NodeClassifier(RGCN(132, 64, num_layers=2, out_channels=349, num_relations=8), backend="tensor")
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InputError(f"RGCN: num_layers is {num_layers}, expected at least 1")
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(
            RGCNConv(before, after, num_relations, num_bases=num_bases) for before, after in pairwise(widths)
        )
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Return one row for each node; ``edge_type`` is the relation of each edge, from 0."""
        for number, conv in enumerate(self.convs):
            x = conv(x, edge_index, edge_type)
            if number < len(self.convs) - 1:
                x = functional.dropout(x.relu(), p=self.dropout, training=self.training)
        return x
