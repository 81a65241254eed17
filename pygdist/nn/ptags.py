r"""P-TAGS: a form of layers that can be computed where the features are (P3, Sec. 3.5, Table 2).

A layer in this form states which of its steps needs a whole row, so backend ``pushpull`` can divide the layer by
columns.

=============  =======================================================================================
P3             here
=============  =======================================================================================
``partition``  the partitioner of the data module, for nodes; the placement *columns*, for features
``scatter``    :meth:`message`, element by element, as in any PyG layer
``gather``     ``aggr``, or :meth:`aggregate`
``transform``  :meth:`PTAGSConv.transform`
``sync``       a sum over ranks, made by the backend
``apply``      :meth:`PTAGSConv.apply_rows` (``apply`` is a method of torch's modules)
=============  =======================================================================================
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing


class PTAGSConv(MessagePassing):
    r"""Base class of layers in the form of P3's P-TAGS.

    .. math::
        \mathbf{y}_i = \mathrm{apply}\Big(\sum_{\mathrm{columns}\ p} \mathrm{transform}\big(\mathbf{x}_{i,p}, \;
        \mathrm{gather}_{j \in \mathcal{N}(i)} \mathrm{scatter}(\mathbf{x}_{j,p})\big)\Big)

    :meth:`message` must work element by element. :meth:`transform` may begin with element-wise operations; its result
    must be a sum of linear modules (attributes of the layer), each over all columns. As a model's first layer under
    backend ``pushpull``, the layer runs on some columns of a row, with the matching columns of the weights. Elsewhere
    it runs on whole rows, like any PyG layer. The backend first tries the layer on six nodes, and refuses a layer whose
    result changes when its columns are divided.

    Args:
        aggr: Aggregation of the messages.
        kwargs: Further options of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        ``x`` is :math:`(n, F)`, ``edge_weight`` :math:`(E)`, the result :math:`(n, H)`.

    Example:
        GraphSAGE, as in Listing 1 of the paper:

        >>> class PTAGSGraphSAGE(PTAGSConv):
        ...     def __init__(self, in_channels, out_channels):
        ...         super().__init__(aggr="mean")  # gather
        ...         self.fc_neigh = Linear(in_channels, out_channels)
        ...         self.fc_self = Linear(in_channels, out_channels, bias=False)
        ...
        ...     def message(self, x_j):  # scatter
        ...         return x_j
        ...
        ...     def transform(self, x, aggregated):
        ...         return self.fc_neigh(aggregated) + self.fc_self(x)
        ...
        ...     def apply_rows(self, out):
        ...         return out.relu()
    """

    def __init__(self, aggr: Any = "mean", **kwargs: Any) -> None:
        super().__init__(aggr=aggr, **kwargs)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Run the layer; ``edge_weight`` is for :meth:`message`."""
        aggregated = self.propagate(edge_index, x=x, edge_weight=edge_weight)
        return self.apply_rows(self.transform(x, aggregated))

    def message(self, x_j: Tensor) -> Tensor:
        """Make the message of each edge (*scatter*), ``(E, F)``; by default the source's row."""
        return x_j

    @abstractmethod
    def transform(self, x: Tensor, aggregated: Tensor) -> Tensor:
        """Return the term to sum over columns, ``(n, H)``, given rows and gathered messages, both ``(n, F)``."""

    def apply_rows(self, out: Tensor) -> Tensor:
        """Return the layer's output, given the sum over columns, ``(n, H)`` (*apply*); by default the sum itself."""
        return out
