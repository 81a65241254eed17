"""Causes of a difference between ranks and one process, found by two trials on one process, and what to do instead."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from pygdist.errors import InputError, LostRankError
from pygdist.routing.miniature import Miniature, beside_another, renumbered
from pygdist.routing.runs import Setting, difference, rows_dim, run_whole

BY_NUMBER = (
    "Rows depend on the numbers of nodes or the order of edges, and both differ between ranks; pass such values to the "
    "model as features of nodes (x) or edges (edge_attr)"
)
OVER_NODES = (
    "The model computes over all nodes, but a rank holds its own alone. Use what pygdist computes over all ranks: a "
    "norm of PyG (BatchNorm, GraphNorm, PairNorm), or MeanAggregation() or SumAggregation() as a module of the model"
)
OVER_NODES_OF_PARTS = (
    "The model computes over all nodes, and a part that trains by itself knows its own alone; use backend {}"
)
OTHER_CALLS_OF_PARTS = (
    "{} calls {} a different number of times on a part of a small graph than on the whole: a loop or a condition "
    "decides by rows of nodes, and a part that trains by itself knows its own alone. Use backend {}, and decide by "
    "what MeanAggregation() or SumAggregation(), as a module of the model, makes of the rows of all nodes"
)
BY_ROWS = (
    "{} would train other numbers than one process: it decides by rows of nodes or edges ({}), and a rank knows its "
    "own alone. {} by what MeanAggregation() or SumAggregation(), as a module of the model, makes of the rows of all "
    "nodes"
)
OF_GRADIENTS = (
    "The outputs are equal and the gradients are not: a hook or an autograd function of the model computes over the "
    "gradients of all nodes, but a rank holds those of its own nodes. Compute over each row by itself, or over the "
    "gradients of parameters"
)
ELSEWHERE = (
    "A rank holds its own nodes with all their in-edges. Pass values of an edge's source to propagate: "
    "propagate(edge_index, x=x, deg=deg), and read deg_j in message. Out-degrees, and edges that are turned or added, "
    "belong in the graph before it is partitioned (torch_geometric.transforms)"
)


OWN_TEST = (
    "On a rank edge_index holds numbers beyond the rows of x, those of other ranks' nodes; leave such a test of the "
    "graph out of forward: pygdist tests a graph when it is partitioned"
)


#: Texts of torch and PyG for an index of a row that is too large.
_MISSING_ROWS = ("out of bounds", "out of range", "Found indices in 'edge_index'", "Encountered invalid 'dim_size'")


def reads_missing_rows(error: Exception) -> bool:
    """True if torch or PyG says that an index of a row is too large."""
    ours = isinstance(error, (InputError, LostRankError))
    return not ours and any(phrase in str(error) for phrase in _MISSING_ROWS)


def cause_of(plain: nn.Module, small: Miniature, setting: Setting, tolerance: float) -> str:
    """Return the kind of a model's mistake, and the remedy.

    Args:
        plain: The model, not distributed.
        small: The graph on which ranks and one process differ.
        setting: Settings of the runs.
        tolerance: Largest difference that is rounding.
    """
    try:
        if _changes_renumbered(plain, small, setting, tolerance):
            return BY_NUMBER
        if _changes_beside_another(plain, small, setting, tolerance):
            return OVER_NODES
    except (IndexError, RuntimeError, TypeError, ValueError):
        return ELSEWHERE  # the model runs on one graph alone, so the trials tell nothing
    return ELSEWHERE


def _changes_renumbered(plain: nn.Module, small: Miniature, setting: Setting, tolerance: float) -> bool:
    """True if rows change with the numbers of nodes or the order of edges."""
    moved, number = renumbered(small)
    before, after = (run_whole(plain, one, setting).outputs for one in (small, moved))
    dims = {name: rows_dim(rows, small.num_nodes) for name, rows in before.items()}
    return any(
        difference(after[name].index_select(dim, number.to(before[name].device)), before[name]) > tolerance
        for name, dim in dims.items()
        if dim is not None
    )


def _changes_beside_another(plain: nn.Module, small: Miniature, setting: Setting, tolerance: float) -> bool:
    """True if the rows of a component change with another one beside it, norms aside."""
    setting, num_nodes = replace(setting, without_norms=True), small.num_nodes
    alone, together = (run_whole(plain, one, setting).outputs for one in (small, beside_another(small)))
    dims = {name: rows_dim(rows, num_nodes) for name, rows in alone.items()}
    return any(
        difference(together[name].narrow(dim, 0, num_nodes), alone[name]) > tolerance
        for name, dim in dims.items()
        if dim is not None and together[name].size(dim) == 2 * num_nodes
    )
