r"""Decoupled models: first every layer's weights, then every layer's propagation (NeutronTP, Sec. 4.1).

A message-passing layer transforms rows (weights, activation) and propagates rows (sums over neighbours). A decoupled
model of L layers first makes all L transformations, and then L propagations (Eqs. 7 to 9):

.. math::
    H = f_L(\ldots f_1(X)), \qquad Z = \hat A^L H

The decoupled model computes something else than the original model. It propagates rows of the output's width. The
backend ``tensor`` switches from rows to columns and back only once, for any L.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax, spmm

from pygdist.errors import InputError


class Propagation(MessagePassing):
    r"""Successive hops that sum or average neighbours, without transformations between them.

    Args:
        rounds: Number of hops.
        aggr: ``"sum"`` or ``"mean"``.
        eps_of: Modules with an ``eps``, one for each hop: the hop adds a node's own row times :math:`1 + \epsilon`, as
            in ``GINConv``. By default hops do not add the own row.

    Shapes:
        ``x`` is :math:`(N, F)` with weights :math:`(E)`, or :math:`(N, H, C)` with weights :math:`(E, H)`; the result
        has the shape of ``x``.
    """

    def __init__(self, rounds: int, aggr: str = "sum", eps_of: Sequence[nn.Module] | None = None) -> None:
        super().__init__(aggr=aggr, node_dim=0)
        if rounds < 1:
            raise InputError(f"rounds is {rounds}, expected at least 1")
        self.rounds = rounds
        self.__dict__["eps_of"] = eps_of  # not registered here, since they are parameters of other modules

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Run all hops; see the class for the shapes."""
        factors = self.own_factors()
        for number in range(self.rounds):
            out = self.propagate(edge_index, x=x, edge_weight=edge_weight)
            x = out if factors is None else out + factors[number] * x
        return x

    def own_factors(self) -> Tensor | None:
        """Return the factor on a node's own row in each hop, ``(rounds,)``; ``None`` if hops do not add this row."""
        if self.eps_of is None:
            return None
        return torch.cat([1 + torch.as_tensor(module.eps).reshape(1) for module in self.eps_of])

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        """Return a neighbour's row times the weight of the edge."""
        return x_j if edge_weight is None else edge_weight.unsqueeze(-1) * x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        """Compute messages and their aggregation as one sparse product."""
        out: Tensor = spmm(edge_index, x, reduce=self.aggr)
        return out


class AttentionPropagation(MessagePassing):
    """Hops that sum neighbours with the attention weights of ``GATConv``, which are computed once for all hops.

    Args:
        rounds: Number of hops.
        negative_slope: Slope of the leaky ReLU of scores.
        dropout: Dropout probability of the weights.
    """

    def __init__(self, rounds: int, negative_slope: float = 0.2, dropout: float = 0.0) -> None:
        super().__init__(node_dim=0)
        self.negative_slope, self.dropout = negative_slope, dropout
        self.propagation = Propagation(rounds)

    def forward(self, x: Tensor, edge_index: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Compute attention weights from scores, and run all hops.

        Args:
            x: Rows, ``(N, H, C)``, for H heads.
            edge_index: The edges.
            source: Score of each node as a source, ``(N, H)``.
            target: Score of each node as a destination, ``(N, H)``.
        """
        weight = self.edge_updater(edge_index, alpha=(source, target))
        out: Tensor = self.propagation(x, edge_index, weight)
        return out

    def edge_update(
        self, alpha_j: Tensor, alpha_i: Tensor, index: Tensor, ptr: Tensor | None, dim_size: int | None
    ) -> Tensor:
        """Return the weight of each edge and head."""
        scores = functional.leaky_relu(alpha_j + alpha_i, self.negative_slope)
        return functional.dropout(softmax(scores, index, ptr, dim_size), p=self.dropout, training=self.training)


class _Weights(nn.Module):
    """The transformation of a layer; its parameters keep their names."""

    names: ClassVar[tuple[str, ...]] = ("lin", "bias")
    lin: Any
    bias: Tensor | None

    def __init__(self, layer: MessagePassing) -> None:
        super().__init__()
        for name in self.names:
            value = getattr(layer, name, None)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        """Transform each row."""
        out: Tensor = self.lin(x)
        return out if self.bias is None else out + self.bias


class _SAGEWeights(_Weights):
    names = ("lin_l", "lin_r")
    lin_l: Any
    lin_r: Any

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin_l(x)
        return out if self.lin_r is None else out + self.lin_r(x)


class _GINWeights(_Weights):
    names = ("nn", "eps")
    nn: Any

    def forward(self, x: Tensor) -> Any:
        return self.nn(x)


class _GATWeights(_Weights):
    """Any layer but the last: all heads read the same row."""

    def __init__(self, layer: GATConv) -> None:
        super().__init__(layer)
        self.heads, self.concat = layer.heads, layer.concat

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.lin(x).view(-1, self.heads, self.lin.out_channels // self.heads))

    def finish(self, rows: Tensor) -> Tensor:
        """Concatenate or average the rows of all heads, and add the bias."""
        out = rows.flatten(1) if self.concat else rows.mean(dim=1)
        return out if self.bias is None else out + self.bias


class _LastGATWeights(_GATWeights):
    """The last layer, whose attention all hops use."""

    names = ("lin", "bias", "att_src", "att_dst")
    att_src: Tensor
    att_dst: Tensor

    def forward(self, x: Tensor) -> Any:
        rows = self.lin(x).view(-1, self.heads, self.lin.out_channels // self.heads)
        return rows, (rows * self.att_src).sum(-1), (rows * self.att_dst).sum(-1)


def _refusal(problem: str) -> InputError:
    return InputError(f"decouple: {problem}")


class Decoupled(nn.Module):
    """A decoupled model, made by :func:`decouple`; there is a subclass for each class of layers.

    Args:
        layers: The layers.
        beside: The modules between the layers: PyG's model, or a list with the modules before each layer.
    """

    weights: ClassVar[type[_Weights]] = _Weights
    #: Supported values of the layers' attributes.
    usual: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __init__(self, layers: list[Any], beside: BasicGNN | list[nn.Sequential]) -> None:
        super().__init__()
        usual = {"aggr": ("add", "sum"), "flow": ("source_to_target",), **self.usual}
        for layer in layers:
            for name, values in usual.items():
                if getattr(layer, name, values[0]) not in values:
                    kind = type(layer).__name__
                    raise _refusal(f"{kind} with {name}={getattr(layer, name)!r} is not supported")
        self.convs = nn.ModuleList(self.weights(layer) for layer in layers)
        self.before: nn.ModuleList | None = None
        if isinstance(beside, list):
            self.before = nn.ModuleList(beside)
        else:
            self.norms, self.act, self.act_first = beside.norms, beside.act, beside.act_first
            self.dropout = beside.dropout
        self._prepare(layers)

    def _prepare(self, layers: list[Any]) -> None:
        self.propagation: nn.Module = Propagation(len(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Return one row for each node; only ``GCNConv`` uses edge weights."""
        for number, conv in enumerate(self.convs):
            x = conv(self._before(number, x))
        out: Tensor = self._propagated(x, edge_index, edge_weight)
        return out

    def _before(self, number: int, x: Tensor) -> Any:
        """Apply everything before a layer."""
        if self.before is not None:
            return self.before[number](x)
        if number == 0:
            return x
        if self.act is not None and self.act_first:
            x = self.act(x)
        x = self.norms[number - 1](x)
        if self.act is not None and not self.act_first:
            x = self.act(x)
        return self.dropout(x)

    def _looped(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """Return the edges with one self-loop at each node."""
        # in a method, since distribute() replaces these functions in methods
        edge_index, _ = remove_self_loops(edge_index)
        looped: Tensor = add_self_loops(edge_index, num_nodes=num_nodes)[0]
        return looped

    def _propagated(self, rows: Any, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define _propagated")


class _DecoupledGCN(Decoupled):
    usual: ClassVar[dict[str, tuple[Any, ...]]] = {"normalize": (True,)}

    def _prepare(self, layers: list[Any]) -> None:
        super()._prepare(layers)
        options = {(layer.improved, layer.add_self_loops) for layer in layers}
        if len(options) > 1:
            raise _refusal("all layers need the same improved and add_self_loops, since hops share the edges")
        ((self.improved, self.add_self_loops),) = options

    def _propagated(self, rows: Any, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
        edges = gcn_norm(edge_index, edge_weight, rows.size(0), self.improved, self.add_self_loops, dtype=rows.dtype)
        return self.propagation(rows, *edges)


class _DecoupledSAGE(Decoupled):
    weights = _SAGEWeights
    usual: ClassVar[dict[str, tuple[Any, ...]]] = {"aggr": ("mean",), "normalize": (False,), "project": (False,)}

    def _prepare(self, layers: list[Any]) -> None:
        self.propagation = Propagation(len(layers), "mean")

    def _propagated(self, rows: Any, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
        return self.propagation(rows, self._looped(edge_index, rows.size(0)))


class _DecoupledGIN(Decoupled):
    weights = _GINWeights

    def _prepare(self, layers: list[Any]) -> None:
        self.propagation = Propagation(len(layers), eps_of=list(self.convs))

    def _propagated(self, rows: Any, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
        return self.propagation(rows, edge_index)


class _DecoupledGAT(Decoupled):
    weights = _GATWeights
    usual: ClassVar[dict[str, tuple[Any, ...]]] = {
        "edge_dim": (None,), "residual": (False,), "add_self_loops": (True,), "lin_src": (None,)
    }  # fmt: skip

    def _prepare(self, layers: list[Any]) -> None:
        last = layers[-1]
        self.convs[-1] = _LastGATWeights(last)
        self.propagation = AttentionPropagation(len(layers), last.negative_slope, last.dropout)

    def _propagated(self, rows: Any, edge_index: Tensor, edge_weight: Tensor | None) -> Any:
        values, source, target = rows
        out = self.propagation(values, self._looped(edge_index, values.size(0)), source, target)
        return self.convs[-1].finish(out)  # type: ignore[operator]


_HOOKS = re.compile(r"_(?!state_dict|load_state_dict).*hooks")
_KINDS: dict[type[MessagePassing], type[Decoupled]] = {
    GCNConv: _DecoupledGCN,
    SAGEConv: _DecoupledSAGE,
    GINConv: _DecoupledGIN,
    GATConv: _DecoupledGAT,
}


def decouple(model: BasicGNN | Sequence[nn.Module]) -> Decoupled:
    """Turn a stack of L layers into their L transformations followed by L hops; the result is a different model.

    Args:
        model: PyG's ``GCN``, ``GraphSAGE``, ``GIN`` or ``GAT``, or another ``BasicGNN`` of such layers. The result
            shares the model's parameters, which keep their names; of ``GAT``, only the last layer's attention
            parameters remain. Or a list of your own model's layers and the modules between them, in order:
            ``[GCNConv(16, 32), nn.ReLU(), GCNConv(32, 7)]``. The names of the layers' parameters then begin with
            ``convs``, other names with ``before``.

    Returns:
        A model to be called as ``model(x, edge_index)``. The hops depend on the class of the layers. With ``GCNConv``
        they sum neighbours with GCN's weights; with ``SAGEConv`` they average a node and its neighbours; with
        ``GINConv`` they sum neighbours and ``1 + eps`` times the node's own row; with ``GATConv`` they sum neighbours
        with the attention weights of the last layer.

    Raises:
        InputError: If a layer is of another class, even a subclass, or has an option that cannot be decoupled.

    Example:
        >>> model = decouple(GCN(16, 32, num_layers=3, out_channels=7))
        >>> out = model(x, edge_index)  # two exchanges forward and two backward with backend 'tensor'
    """
    if isinstance(model, (list, tuple, nn.ModuleList, nn.Sequential)):
        layers, beside = _apart(model)
    elif isinstance(model, BasicGNN):
        layers, beside = list(model.convs), model
    else:
        raise _refusal(f"expected PyG's GCN, GraphSAGE, GIN or GAT, or a list of layers, got {type(model).__name__}")
    kinds = {type(layer) for layer in layers}  # a subclass may do something else
    decoupled = _KINDS.get(kinds.pop()) if len(kinds) == 1 else None
    if decoupled is None:
        names = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "a model without layers"
        raise _refusal(f"cannot decouple {names}; all layers must be GCNConv, or all SAGEConv, GINConv or GATConv")
    if isinstance(model, BasicGNN):
        _check_model(model)
    for module in [*layers, *([model] if isinstance(model, BasicGNN) else [])]:
        hooks = [name for name, value in vars(module).items() if _HOOKS.fullmatch(name) and value]
        if hooks:
            raise _refusal(
                f"{type(module).__name__} has hooks ({hooks[0].strip('_')}), which the decoupled model would "
                "not call; remove them, or register them on the decoupled model"
            )
    return decoupled(layers, beside)


def _check_model(model: BasicGNN) -> None:
    if model.jk_mode == "last":
        raise _refusal(
            "jk='last' has a Linear after the last layer; leave jk out, and apply the Linear after the model"
        )
    if model.jk_mode is not None:
        raise _refusal("jumping knowledge needs the rows of every layer")
    if type(model).forward is not BasicGNN.forward:
        raise _refusal(
            f"{type(model).__name__} has its own forward, which the decoupled model would not run; pass the "
            "list of its layers with the modules between them"
        )


def _apart(stack: Sequence[nn.Module] | nn.ModuleList | nn.Sequential) -> tuple[list[Any], list[nn.Sequential]]:
    """Split a stack into its layers and the modules before each layer."""
    layers: list[Any] = []
    beside = [nn.Sequential()]
    for module in stack:
        if not isinstance(module, nn.Module):
            raise _refusal(f"expected a list of modules, got {module!r}; wrap a function in a module")
        if isinstance(module, MessagePassing):
            layers.append(module)
            beside.append(nn.Sequential())
        elif inside := next((one for one in module.modules() if isinstance(one, MessagePassing)), None):
            raise _refusal(f"{type(inside).__name__} is inside {type(module).__name__}; pass one flat list of modules")
        else:
            beside[-1].append(module)
    if len(beside.pop()):
        raise _refusal("the list must end with a layer; apply modules that come after it to the model's output")
    return layers, beside
