"""NGNN: layers with feed-forward layers inside (Song et al., Network In Graph Neural Network, 2021).

PyG has the other models that CATGNN trains: ``GCN``, ``GAT`` and ``GraphSAGE`` in ``torch_geometric.nn``, and SGC as
``SGConv(in_channels, out_channels, K=2)``, which can be called like a model. Cluster-GCN and GraphSAINT are samplers of
mini-batches (:mod:`pygdist.sampler`) for any model.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from pygdist.errors import InputError

Conv = Literal["gcn", "sage", "gat"]
_CONVS = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}


class NGNN(nn.Module):
    r"""A stack of PyG layers, each but the last followed by feed-forward layers (Sec. 3).

    A hidden layer is :math:`h \leftarrow \sigma(g(\sigma(f(h))))` with the message-passing layer :math:`f` and
    ``ngnn_layers`` linear layers :math:`g`, each followed by :math:`\sigma` = ReLU. So the model has more parameters
    without more hops.

    Args:
        in_channels: Number of features of a node; with -1 the first call of the model sets this number.
        hidden_channels: Width of the rows between layers, and of the feed-forward layers.
        num_layers: Number of message-passing layers.
        out_channels: Width of the result; the number of classes.
        conv: ``"gcn"``, ``"sage"`` (GraphSAGE) or ``"gat"``.
        ngnn_layers: Number of feed-forward layers in each layer but the last; 0 gives the plain model.
        dropout: Dropout probability between layers.

    Shapes:
        ``x`` is :math:`(N, F)`, the result :math:`(N, C)`.

    Raises:
        InputError: If ``conv`` is unknown, or there are too few layers.

    Example:
        >>> model = NGNN(-1, 256, num_layers=2, out_channels=47)
        >>> out = model(x, edge_index)
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        conv: Conv = "sage",
        ngnn_layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if conv not in get_args(Conv):
            raise InputError(f"NGNN: conv is '{conv}', expected one of {', '.join(get_args(Conv))}")
        if num_layers < 1 or ngnn_layers < 0:
            raise InputError(
                f"NGNN: num_layers is {num_layers}, expected at least 1; ngnn_layers is {ngnn_layers}, at least 0"
            )
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(_CONVS[conv](before, after) for before, after in pairwise(widths))
        self.inside = nn.ModuleList(
            nn.Sequential(
                *(part for _ in range(ngnn_layers) for part in (nn.Linear(hidden_channels, hidden_channels), nn.ReLU()))
            )
            for _ in range(num_layers - 1)
        )
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return one row for each node."""
        for conv, inside in zip(self.convs, self.inside, strict=False):
            x = inside(conv(x, edge_index).relu())
            x = functional.dropout(x, p=self.dropout, training=self.training)
        out: Tensor = self.convs[-1](x, edge_index)
        return out
