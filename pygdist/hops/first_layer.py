r"""First layers cut by columns: what each rank computes of a layer from its columns of the features (P3, Sec. 3.2.2).

A layer that is linear in its rows up to its first weight is a sum over columns: with columns :math:`F_p` on rank *p*,
:math:`\sum_p \mathrm{gather}(X_{F_p}) W_{F_p}^T`, then the rest: bias, norm, further modules.

====================  =====================================================  =============================
layer                 gathered columns, and the weight of each               rest
====================  =====================================================  =============================
``GCNConv``           normalised sum: ``lin``                                bias
``SAGEConv``          sum, mean or max: ``lin_l``; own row: ``lin_r``        biases, ``normalize``
``GraphConv``         sum, mean or max: ``lin_rel``; own row: ``lin_root``   biases
``GINConv``           sum, and own row times 1 + eps: ``nn``'s first         ``nn`` from its first bias on
====================  =====================================================  =============================

Rows of features are read where they lie: sources are global ids, and no row is copied but the own ones.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from pygdist.hops.cheaper_side import first_linear
from pygdist.hops.layer import forget_local_state, hooked, is_linear, layer_name, own_class, put_local_propagate_back
from pygdist.hops.trials import TrialCache
from pygdist.kernels import CSR, spmm

_NODES, _EDGES = 6, 14
_TOLERANCE = 1e-10
_REDUCES = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}


@dataclass(frozen=True, eq=False)
class InEdges:
    """Edges into some rows, whose sources and rows are known by their global ids.

    Attributes:
        csr: The edges; columns are global ids.
        row_id: Global ids of the rows, ``(D,)`` int64.
        weight: Weights of the edges, ``(E,)``; ``None`` if the graph has none.
        source_degree: In-degrees of the edges' sources as the layer counts them, ``(E,)``; by default sources have the
            in-edges that are here.
    """

    csr: CSR
    row_id: Tensor
    weight: Tensor | None = None
    source_degree: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, D."""
        return self.csr.num_rows


Parameters = Mapping[str, Tensor]
Gather = Callable[[Any, Parameters, InEdges, Tensor], list[Tensor]]


class Cut(NamedTuple):
    """The way in which a layer is cut.

    Attributes:
        weights: Names of the weights that columns meet, one for each of ``gather``'s results.
        others: Names of further parameters that ``gather`` uses.
        gather: Called with the layer, parameters by name, edges, and this rank's columns of all nodes ``(N, c)``;
            returns ``(D, c)`` for each weight.
        rest: Called with the layer and the sum of all ranks ``(D, H)``; returns the layer's output.
        degrees: Called with the layer, edges and a type; returns the in-degrees of the rows as the layer counts them,
            ``(D,)``. ``None`` if the layer does not use the degrees of its sources.
    """

    weights: tuple[str, ...]
    others: tuple[str, ...]
    gather: Gather
    rest: Callable[[Any, Tensor], Tensor]
    degrees: Callable[[Any, InEdges, torch.dtype], Tensor] | None = None

    def parameters(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the parameters that the part before the rest uses, by name."""
        return {name: layer.get_parameter(name) for name in self.weights} | {
            name: cast(Tensor, getattr(layer, name)) for name in self.others
        }

    def partial(self, layer: nn.Module, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
        """Return a rank's term of the sum, ``(D, H)``, from its ``columns``, the slice ``mine`` of all."""
        gathered = self.gather(layer, parameters, edges, columns)
        terms = [
            functional.linear(rows, parameters[name][:, mine])
            for name, rows in zip(self.weights, gathered, strict=True)
        ]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def cut_of(layer: MessagePassing) -> Cut:
    """Return the way in which a layer is cut by columns.

    Raises:
        ValueError: If it cannot be; the message says why.
    """
    cut, reason = _TRIED.of(layer)
    if cut is None:
        raise ValueError(f"{layer_name(layer)} {reason}")
    return cut


def _find(layer: MessagePassing) -> tuple[Cut | None, str]:
    """Return the cut of a layer, or the reason why there is none."""
    cls = next((cls for cls in _CUTS if issubclass(own_class(layer), cls)), None)
    if cls is None:
        return None, f"is none of the layers that are cut by columns: {', '.join(one.__name__ for one in _CUTS)}"
    if hooked(layer):
        return None, "has hooks on its hops, which see rows that no rank has"
    cut = _CUTS[cls](layer)
    if isinstance(cut, str):
        return None, cut
    worst = _difference(layer, cut)
    if not worst <= _TOLERANCE:  # NaN is not
        return None, f"computes something else than {cls.__name__}: cut by columns, six nodes are off by {worst:.1e}"
    return cut, ""


def _difference(layer: MessagePassing, cut: Cut) -> float:
    """Cut a copy of a layer between two ranks, on a few nodes in float64; return how far it is from the layer.

    It is relative to the largest number. The layer is tried in training too, where a subclass may do something else.
    """
    plain = copy.deepcopy(layer)
    plain.__class__ = own_class(layer)
    forget_local_state(plain)
    put_local_propagate_back(plain)
    plain, generator = plain.double(), torch.Generator().manual_seed(0)
    width = plain.get_parameter(cut.weights[0]).size(1)
    x = torch.randn(_NODES, width, generator=generator, dtype=torch.float64)
    source, target = torch.randint(_NODES, (2, _EDGES), generator=generator)
    target = target.clamp(max=_NODES - 2)  # the last node has no in-edge
    csr = CSR.from_coo(target, source, num_rows=_NODES, num_cols=_NODES)
    takes_weights = "edge_weight" in inspect.signature(type(plain).forward).parameters
    weights = (None, torch.rand(_EDGES, generator=generator, dtype=torch.float64))[: 1 + takes_weights]
    apart = []
    for weight, training in itertools.product(weights, (True, False)):
        sorted_weight = None if weight is None or csr.perm is None else weight[csr.perm]
        edges = InEdges(CSR(csr.indptr, csr.index, _NODES), torch.arange(_NODES), sorted_weight)
        plain.train(training)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            terms = [
                cut.partial(plain, cut.parameters(plain), edges, x[:, mine].contiguous(), mine)
                for mine in (slice(0, width // 2), slice(width // 2, width))
            ]
            torch.manual_seed(0)
            found = cut.rest(plain, terms[0] + terms[1])
            torch.manual_seed(0)
            expected = plain(x, torch.stack([source, target]), *([] if weight is None else [weight]))
        apart.append((found - expected).abs().max() / max(1.0, float(expected.abs().max())))
    return float(torch.stack(apart).max())


def _reduce_of(layer: MessagePassing) -> str | None:
    return _REDUCES.get(own_class(layer.aggr_module))


# -- the layers --------------------------------------------------------------------------------------------------------


def _gcn(layer: GCNConv) -> Cut | str:
    if not is_linear(layer.lin) or _reduce_of(layer) != "sum":
        return "has another linear module or aggregation than PyG's"

    def gather(layer: GCNConv, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        return [_normalised_sum(layer, edges, columns) if layer.normalize else spmm(edges.csr, columns, edges.weight)]

    def rest(layer: GCNConv, total: Tensor) -> Tensor:
        return _plus(total, layer.lin.bias, layer.bias)

    return Cut(("lin.weight",), (), gather, rest, _gcn_degrees if layer.normalize else None)


def _normalised_sum(layer: GCNConv, edges: InEdges, columns: Tensor) -> Tensor:
    """Sum rows as ``gcn_norm`` weighs them, with a self-loop at each node if the layer adds them."""
    csr, row = edges.csr, edges.csr.row_index().long()
    weight, loop_weight = _with_loops(layer, edges, columns.dtype)
    degree = _gcn_degrees(layer, edges, columns.dtype)
    source_degree = edges.source_degree
    if source_degree is None:  # the other nodes of a sampled neighbourhood have no in-edge but the loop
        fill = 0.0 if loop_weight is None else _fill(layer, edges)
        source_degree = _at_sources(edges, degree, fill)
    scale, source_scale = (_inverse_root(one.to(columns.dtype)) for one in (degree, source_degree))
    total = spmm(csr, columns, source_scale * weight * scale[row])
    if loop_weight is None:
        return total
    return total + columns[edges.row_id] * (scale * scale * loop_weight).unsqueeze(1)


def _gcn_degrees(layer: GCNConv, edges: InEdges, dtype: torch.dtype) -> Tensor:
    """In-degrees of rows, with weights and with the self-loops that the layer adds."""
    weight, loop_weight = _with_loops(layer, edges, dtype)
    degree = torch.segment_reduce(weight, "sum", offsets=edges.csr.indptr, initial=0)
    return degree if loop_weight is None else degree + loop_weight


def _fill(layer: GCNConv, edges: InEdges) -> float:
    return 2.0 if layer.improved and edges.weight is not None else 1.0  # PyG's, without weights


def _with_loops(layer: GCNConv, edges: InEdges, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weights of edges, and of the self-loops that are added; loops that exist get 0 among the edges."""
    csr, weight = edges.csr, edges.weight
    weight = torch.ones(csr.num_entries, dtype=dtype) if weight is None else weight.to(dtype)
    if not layer.add_self_loops:
        return weight, None
    row = csr.row_index().long()
    is_loop = csr.index == edges.row_id[row]
    loop_weight = weight.new_full((csr.num_rows,), _fill(layer, edges))
    loop_weight[row[is_loop]] = weight[is_loop]  # a loop that exists keeps its weight
    return weight.masked_fill(is_loop, 0.0), loop_weight


def _at_sources(edges: InEdges, value: Tensor, other: float) -> Tensor:
    """Look up values of rows at the sources of edges; ``other`` for sources that are no rows here."""
    order = edges.row_id.argsort()
    ids = edges.row_id[order]
    if not ids.numel():
        return value.new_full((edges.csr.num_entries,), other)
    place = torch.searchsorted(ids, edges.csr.index.long()).clamp(max=ids.numel() - 1)
    is_row = ids[place] == edges.csr.index
    return torch.where(is_row, value[order[place]], other)


def _inverse_root(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0)


def _sage(layer: SAGEConv) -> Cut | str:
    if layer.project:
        return "with project=True is not linear in the rows that it gets"
    return _neighbours_and_self(layer, "lin_l", "lin_r" if layer.root_weight else None, weighted=False)


def _graph(layer: GraphConv) -> Cut | str:
    return _neighbours_and_self(layer, "lin_rel", "lin_root", weighted=True)


def _neighbours_and_self(layer: Any, neighbours: str, root: str | None, *, weighted: bool) -> Cut | str:
    reduce = _reduce_of(layer)
    if reduce is None:
        return f"aggregates by {layer_name(layer.aggr_module)}, expected a sum, mean or maximum"
    lins = [name for name in (neighbours, root) if name is not None]
    if not all(is_linear(getattr(layer, name)) for name in lins):
        return "has other linear modules than PyG's"

    def gather(layer: Any, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        own = [] if root is None else [columns[edges.row_id]]
        return [spmm(edges.csr, columns, edges.weight if weighted else None, cast(Any, reduce)), *own]

    def rest(layer: Any, total: Tensor) -> Tensor:
        out = _plus(total, *(getattr(layer, name).bias for name in lins))
        return functional.normalize(out, p=2.0, dim=-1) if getattr(layer, "normalize", False) else out

    return Cut(tuple(f"{name}.weight" for name in lins), (), gather, rest)


def _gin(layer: GINConv) -> Cut | str:
    parts = first_linear(layer.nn)
    if parts is None or _reduce_of(layer) != "sum":
        return "has a network that does not begin with a linear module, or is no sum"
    weight = next(name for name, one in layer.named_parameters() if one is parts[0].weight)

    def gather(_: GINConv, parameters: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        return [spmm(edges.csr, columns) + (1 + parameters["eps"]) * columns[edges.row_id]]

    def rest(layer: GINConv, total: Tensor) -> Tensor:
        parts = first_linear(layer.nn)
        assert parts is not None, "it was when the layer was tried"
        return parts[1](total)

    return Cut((weight,), ("eps",), gather, rest)


def _plus(out: Tensor, *biases: Tensor | None) -> Tensor:
    for bias in biases:
        out = out if bias is None else out + bias
    return out


_CUTS: dict[type[MessagePassing], Callable[[Any], Cut | str]] = {
    GCNConv: _gcn,
    GINConv: _gin,
    GraphConv: _graph,
    SAGEConv: _sage,
}
_TRIED = TrialCache(_find)
