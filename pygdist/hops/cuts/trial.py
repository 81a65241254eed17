"""Finding the cut of a layer, and trying it: on a few nodes it must compute what the layer does."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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

    Outputs and the gradients of all parameters are compared, relative to their largest number. Parameters are random,
    as what a subclass adds may do nothing at first; the layer is tried in training too, where it may do something else.
    """
    plain, generator = _plain(layer), torch.Generator().manual_seed(0)
    width = plain.get_parameter(cut.weights[0]).size(1)
    x = torch.randn(_NODES, width, generator=generator, dtype=torch.float64)
    # distinct edges, as maxima share a gradient among equal rows; the last node has no in-edge
    chosen = torch.randperm(_NODES * (_NODES - 1), generator=generator)[:_EDGES]
    source, target = chosen % _NODES, chosen // _NODES
    csr = CSR.from_coo(target, source, num_rows=_NODES, num_cols=_NODES)
    takes_weights = "edge_weight" in inspect.signature(type(plain).forward).parameters
    weights = (None, torch.rand(_EDGES, generator=generator, dtype=torch.float64))[: 1 + takes_weights]
    slices, apart, failures = (slice(0, width // 2), slice(width // 2, width)), list[Tensor](), list[Exception]()
    for weight, training in itertools.product(weights, (True, False)):
        sorted_weight = None if weight is None or csr.perm is None else weight[csr.perm]
        edges = InEdges(CSR(csr.indptr, csr.index, _NODES), torch.arange(_NODES), sorted_weight)
        plain.train(training)
        # hooks of its own: the layer may be tried inside of an activation checkpoint, which would run it again
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
        with torch.enable_grad(), no_hooks, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                out = plain(x, torch.stack([source, target]), *([] if weight is None else [weight]))
            except Exception as error:  # a layer may need weights, or take none
                failures.append(error)
                continue
            of_cut = _values_of_cut(plain, cut, edges, x, slices)
            expected = [out.detach(), *_gradients(out, list(plain.parameters()))]
        apart += [
            (one - other).abs().max() / max(1.0, float(other.abs().max()))
            for one, other in zip(of_cut, expected, strict=True)
            if other.numel()
        ]
    if not apart:
        raise failures[-1]
    return float(torch.stack(apart).max())


def _plain(layer: MessagePassing) -> MessagePassing:
    """Return a copy of a layer as it was before it was distributed, in float64, with random parameters."""
    plain, generator = copy.deepcopy(layer), torch.Generator().manual_seed(1)
    for module in plain.modules():
        module.__class__ = own_class(module)
    forget_local_state(plain)
    put_local_propagate_back(plain)
    plain = plain.double().cpu()
    for one in plain.parameters():
        one.detach().copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64))
        one.requires_grad_()
    if isinstance(plain, GATConv):
        plain.dropout = 0.0  # ranks draw numbers of their own for it
    return plain


def _values_of_cut(
    plain: MessagePassing, cut: Cut, edges: InEdges, x: Tensor, slices: tuple[slice, slice]
) -> list[Tensor]:
    """Return the output of a layer that is cut, and the gradients of its parameters, as ranks find them.

    A rank knows the parameters that the cut names alone: what else its term uses gets no gradient.
    """
    leaves = {name: one.detach().requires_grad_(one.requires_grad) for name, one in cut.parameters(plain).items()}
    total = summed(cut, plain, edges, x, slices, leaves)
    arrived = total.detach().requires_grad_()
    torch.manual_seed(0)
    out = cut.rest(plain, arrived)
    of_total, *of_rest = _gradients(out, [arrived, *plain.parameters()])
    of_leaves = _gradients(total, list(leaves.values()), of_total)
    by_id = {id(one): gradient for one, gradient in zip(plain.parameters(), of_rest, strict=True)}
    for one, gradient in zip(cut.parameters(plain).values(), of_leaves, strict=True):
        if id(one) in by_id:  # no buffer
            by_id[id(one)] = by_id[id(one)] + gradient
    return [out.detach(), *by_id.values()]


def _gradients(out: Tensor, wanted: list[Tensor], weight: Tensor | None = None) -> list[Tensor]:
    """Return the gradients of a tensor's product with ``weight``, by default half its squares; zeros where none."""
    of = out.detach() if weight is None else weight
    asked = [one for one in wanted if one.requires_grad]
    graded = iter(torch.autograd.grad(out, asked, of, allow_unused=True)) if out.requires_grad and asked else iter(())
    gradients = [next(graded, None) if one.requires_grad else None for one in wanted]
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, gradients, strict=True)]


_TRIED = TrialCache(_find)
