"""Finding the cut of a layer, and trying it: on a few nodes it must compute what the layer does."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv, SGConv, TAGConv

from pygdist.hops.cuts import attention, ptags, sums
from pygdist.hops.cuts.cut import Cut, InEdges, summed
from pygdist.hops.layer import forget_local_state, hooked, layer_name, own_class, put_local_propagate_back
from pygdist.hops.trials import TrialCache
from pygdist.hops.user_code import in_one_line
from pygdist.kernels import CSR
from pygdist.nn.ptags import PTAGSConv

_NODES, _EDGES = 6, 14
_TOLERANCE = 1e-10

_CUTS: dict[type[MessagePassing], Callable[[Any], Cut | str]] = {
    GATConv: attention.gat_cut,
    GCNConv: sums.gcn_cut,
    GINConv: sums.gin_cut,
    GraphConv: sums.graph_cut,
    PTAGSConv: ptags.ptags_cut,
    SAGEConv: sums.sage_cut,
    SGConv: sums.sg_cut,
    TAGConv: sums.tag_cut,
}


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
    try:
        worst = _difference(layer, cut)
    except Exception as error:  # whatever a subclass says of some of its columns
        return None, f"ends with {in_one_line(error)} on some of its columns"
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
    if isinstance(plain, GATConv):
        plain.dropout = 0.0  # ranks draw numbers of their own for it
    width = plain.get_parameter(cut.weights[0]).size(1)
    x = torch.randn(_NODES, width, generator=generator, dtype=torch.float64)
    source, target = torch.randint(_NODES, (2, _EDGES), generator=generator)
    target = target.clamp(max=_NODES - 2)  # the last node has no in-edge
    csr = CSR.from_coo(target, source, num_rows=_NODES, num_cols=_NODES)
    takes_weights = "edge_weight" in inspect.signature(type(plain).forward).parameters
    weights = (None, torch.rand(_EDGES, generator=generator, dtype=torch.float64))[: 1 + takes_weights]
    slices, apart = (slice(0, width // 2), slice(width // 2, width)), []
    for weight, training in itertools.product(weights, (True, False)):
        sorted_weight = None if weight is None or csr.perm is None else weight[csr.perm]
        edges = InEdges(CSR(csr.indptr, csr.index, _NODES), torch.arange(_NODES), sorted_weight)
        plain.train(training)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            total = summed(cut, plain, edges, x, slices)
            torch.manual_seed(0)
            found = cut.rest(plain, total)
            torch.manual_seed(0)
            expected = plain(x, torch.stack([source, target]), *([] if weight is None else [weight]))
        apart.append((found - expected).abs().max() / max(1.0, float(expected.abs().max())))
    return float(torch.stack(apart).max())


_TRIED = TrialCache(_find)
