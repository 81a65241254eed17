"""Norms over nodes, with statistics over the nodes of all ranks: equal to one process up to rounding.

Each function is the ``forward`` of one norm class, with the backend as second argument. A distributed model calls this
function instead of the class's own ``forward``. Ranks first sum values, for the mean, and then squared deviations: one
exchange for both would lose digits. Both sums are differentiable, on CPU and CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.nn import norm as pyg

from pygdist.errors import InputError

Number = TypeVar("Number", int, float)


class Ranks(Protocol):
    """The methods of a backend that norms and degree normalisation call."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole graph."""

    @property
    def num_rows(self) -> int:
        """Number of rows that a layer returns on this rank, one per node."""

    def source_rows(self, x: Tensor) -> Tensor:
        """Return one row per source of the adjacency, given one row per row of this rank."""

    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        """Sum edge values by source over all ranks; one number per row, correct only for rows that this rank owns."""

    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        """Return the in-degrees of the sources in the whole graph, or ``None`` if only their owners know them."""

    @property
    def splits_nodes(self) -> bool:
        """True if in-edges of one node are on several ranks."""

    @property
    def alone(self) -> bool:
        """True in a pass that leaves out the contributions of other ranks, as if no node were split."""

    def sums_of_parts(self, x: Tensor) -> Tensor:
        """Replace each row of a node on several ranks by the sum of the node's rows; differentiable."""

    def whole_degrees(self, degree: Tensor) -> Tensor:
        """Return the in-degrees of rows in the whole graph, given the in-degrees on this rank."""

    def rim_scale(self, *, weighted: bool) -> Tensor | None:
        """Return for each source row its in-degree in the whole graph divided by its in-degree on this rank.

        Self-loops are not counted. ``None`` if nothing is to be scaled.
        """

    def owned_rows(self, x: Tensor) -> Tensor:
        """Return the rows that this rank owns."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over all ranks; differentiable."""

    def max_over_ranks(self, value: Number) -> Number:
        """Return the largest value of any rank."""


def _mean(ranks: Ranks, x: Tensor) -> Tensor:
    """Mean over all nodes, per channel; rows that are not the rank's nodes are refused."""
    _check_rows(ranks, x)
    total = ranks.sum_over_ranks(full_precision(ranks.owned_rows(x)).sum(dim=0))
    return (total / ranks.num_nodes).to(x.dtype)


def _check_rows(ranks: Ranks, x: Tensor) -> None:
    if x.size(0) != ranks.num_rows:
        raise InputError(
            f"a norm over nodes got {x.size(0)} rows, but this rank has {ranks.num_rows} nodes. Norms over edges or "
            "over some of the nodes cannot be distributed; inside EdgeConv, for example, use MLP(..., norm=None)",
            of_one_rank=True,
        )


def full_precision(x: Tensor) -> Tensor:
    """Return ``x`` in at least single precision, in which PyTorch computes sums and statistics of half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _no_batch(module: nn.Module, batch: object) -> None:
    if batch is not None:
        raise InputError(
            f"{type(module).__name__}: a 'batch' vector (several graphs in one) cannot be used with a distributed graph"
        )


def _update_running(module: Any, mean: Tensor, var: Tensor, num_nodes: int, momentum: float) -> None:
    """Update running statistics as PyTorch does, with the unbiased variance."""
    unbiased = var * (num_nodes / max(num_nodes - 1, 1))
    module.running_mean.lerp_(mean.detach().to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(unbiased.detach().to(module.running_var.dtype), momentum)


def _channel_norm(module: Any, ranks: Ranks, x: Tensor, *, use_batch: bool, momentum: float | None) -> Tensor:
    """Normalise each channel, by batch or running statistics; ``momentum``, unless ``None``, updates the latter."""
    dtype, x = x.dtype, full_precision(x)
    if use_batch:
        mean = _mean(ranks, x)
        centred = x - mean
        var = _mean(ranks, centred.square())
        if momentum is not None:
            _update_running(module, mean, var, ranks.num_nodes, momentum)
    else:
        mean, var = module.running_mean, module.running_var
        centred = x - mean
    out: Tensor = centred * (var + module.eps).rsqrt()
    if module.weight is not None:
        out = out * module.weight
    if module.bias is not None:
        out = out + module.bias
    return out.to(dtype)


def _batch_norm(module: Any, ranks: Ranks, x: Tensor) -> Tensor:
    """:class:`torch.nn.BatchNorm1d` and :class:`torch.nn.SyncBatchNorm`."""
    if x.dim() != 2:
        raise InputError(f"{type(module).__name__}: expected rows of nodes (n, channels), got {tuple(x.shape)}")
    use_batch = module.training or module.running_mean is None
    if module.training and ranks.num_nodes == 1:
        raise ValueError("Expected more than 1 value per channel when training, got a graph of one node")
    momentum = None
    if module.training and module.running_mean is not None:
        module.num_batches_tracked.add_(1)
        # without a momentum PyTorch computes the cumulative average
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    return _channel_norm(module, ranks, x, use_batch=use_batch, momentum=momentum)


def _pyg_batch_norm(module: Any, ranks: Ranks, x: Tensor) -> Tensor:
    """PyG's wrapper; its inner BatchNorm1d is distributed too. Only a graph of one node is a special case."""
    if module.allow_single_element and ranks.num_nodes <= 1:
        one = module.module
        return nn.functional.batch_norm(x, one.running_mean, one.running_var, one.weight, one.bias, False, 0.0, one.eps)
    result: Tensor = module.module(x)
    return result


def _instance_norm(module: Any, ranks: Ranks, x: Tensor, batch: object = None, batch_size: object = None) -> Tensor:
    _no_batch(module, batch)
    use_batch = module.training or not module.track_running_stats
    momentum = module.momentum if module.training and module.track_running_stats else None
    return _channel_norm(module, ranks, x, use_batch=use_batch, momentum=momentum)


def _torch_instance_norm(module: Any, ranks: Ranks, x: Tensor) -> Tensor:
    """:class:`torch.nn.InstanceNorm1d` and the like, for which rows come first or nodes last.

    A row ``(n, C)`` or an image of each node ``(n, C, *)`` is normalised by itself; in ``(C, n)`` and ``(1, C, n)``
    each channel is, over all nodes.
    """
    if _nodes_come_last(module, ranks, x):
        rows = x.movedim(-1, 0)
        return _instance_norm(module, ranks, rows.flatten(1)).reshape(rows.shape).movedim(0, -1)
    if module.training and module.track_running_stats:
        raise InputError(
            f"{type(module).__name__}: track_running_stats averages what is found of each node over all nodes, which "
            "ranks do not; use track_running_stats=False"
        )
    if not isinstance(module, nn.InstanceNorm1d):
        _check_rows(ranks, x)
    own: Tensor = nn.modules.instancenorm._InstanceNorm.forward(module, x)
    return own


def _nodes_come_last(module: Any, ranks: Ranks, x: Tensor) -> bool:
    """True if ``x`` is ``(C, n)`` or ``(1, C, n)``; a rank with as many nodes as channels asks the others."""
    if not isinstance(module, nn.InstanceNorm1d):
        return False
    if x.dim() == 3:
        first, last = x.size(0) == ranks.num_rows, x.size(0) == 1 and x.size(2) == ranks.num_rows
    else:
        channels = module.num_features
        first, last = x.size(0) != channels or x.size(1) == channels, x.size(0) == channels
    known = ranks.max_over_ranks(int(first) + 2 * int(last) if first != last else 0)
    if known == 0 and ranks.num_rows != ranks.num_nodes:
        raise InputError(
            f"{type(module).__name__} got a tensor of shape {tuple(x.shape)}, and no rank knows which of its "
            "dimensions is that of nodes; use torch_geometric.nn.InstanceNorm on rows (n, channels)"
        )
    return known == 2


def _hetero_batch_norm(module: Any, ranks: Ranks, x: Tensor, type_vec: Tensor) -> Tensor:
    """PyG's batch norm for each type of node; its statistics carry no gradient."""
    dtype, x = x.dtype, full_precision(x)
    if not module.training and module.track_running_stats:
        mean, var = module.running_mean, module.running_var
    else:
        _check_rows(ranks, x)
        with torch.no_grad():
            mean, var, count = _statistics_of_types(ranks, x.detach(), type_vec, module.num_types)
            if module.training and module.track_running_stats:
                factor = module.momentum
                if factor is None:
                    module.num_batches_tracked.add_(1)
                    factor = 1.0 / float(module.num_batches_tracked)
                factor = (count > 0).to(mean)[:, None] * factor  # types without a node keep theirs
                for running, one in ((module.running_mean, mean), (module.running_var, var)):
                    running.lerp_(one.to(running.dtype), factor.to(running.dtype))
    out: Tensor = (x - mean[type_vec]) / var.clamp(module.eps).sqrt()[type_vec]
    return (out * module.weight[type_vec] + module.bias[type_vec] if module.affine else out).to(dtype)


def _statistics_of_types(ranks: Ranks, x: Tensor, type_vec: Tensor, num_types: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and number of the nodes of each type."""
    x, type_vec = ranks.owned_rows(x), ranks.owned_rows(type_vec)
    sums = x.new_zeros(num_types, x.size(1) + 1)
    sums = ranks.sum_over_ranks(sums.index_add(0, type_vec, torch.cat([x, torch.ones_like(x[:, :1])], dim=1)))
    count = sums[:, -1]
    divisor = count.clamp(min=1)[:, None]
    mean = sums[:, :-1] / divisor
    squares = torch.zeros_like(mean).index_add(0, type_vec, (x - mean[type_vec]).square())
    return mean, ranks.sum_over_ranks(squares) / divisor, count


def _graph_norm(module: Any, ranks: Ranks, x: Tensor, batch: object = None, batch_size: object = None) -> Tensor:
    _no_batch(module, batch)
    dtype, x = x.dtype, full_precision(x)
    centred = x - _mean(ranks, x) * module.mean_scale
    std = (_mean(ranks, centred.square()) + module.eps).sqrt()
    out: Tensor = module.weight * centred / std + module.bias
    return out.to(dtype)


def _pair_norm(module: Any, ranks: Ranks, x: Tensor, batch: object = None, batch_size: object = None) -> Tensor:
    _no_batch(module, batch)
    dtype, x = x.dtype, full_precision(x)
    x = x - _mean(ranks, x)
    if module.scale_individually:
        length = module.eps + x.norm(2, -1, keepdim=True)
    else:
        length = (module.eps + _mean(ranks, x.square().sum(-1, keepdim=True))).sqrt()
    out: Tensor = module.scale * x / length
    return out.to(dtype)


def _layer_norm(module: Any, ranks: Ranks, x: Tensor, batch: object = None, batch_size: object = None) -> Tensor:
    """PyG's LayerNorm; ``mode="node"`` acts on each row by itself."""
    if module.mode == "node":
        return nn.functional.layer_norm(x, (module.in_channels,), module.weight, module.bias, module.eps)
    _no_batch(module, batch)
    dtype, x = x.dtype, full_precision(x)
    x = x - _mean(ranks, x).mean()
    std = _mean(ranks, x.square()).mean().sqrt()
    out: Tensor = x / (std + module.eps)
    return (out if module.weight is None else out * module.weight + module.bias).to(dtype)


def _mean_subtraction_norm(
    module: Any, ranks: Ranks, x: Tensor, batch: object = None, dim_size: object = None
) -> Tensor:
    _no_batch(module, batch)
    return x - _mean(ranks, x)


def _graph_size_norm(module: Any, ranks: Ranks, x: Tensor, batch: object = None, batch_size: object = None) -> Tensor:
    _no_batch(module, batch)
    return x / math.sqrt(ranks.num_nodes)


INSTANCE_NORMS: tuple[type[nn.Module], ...] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Norms that act on each row by itself, unless nodes come last."""

#: Norm class -> ``forward(module, ranks, x, ...)``; subclasses are found through their bases.
GLOBAL_NORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.BatchNorm1d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
    **dict.fromkeys(INSTANCE_NORMS, _torch_instance_norm),
    pyg.BatchNorm: _pyg_batch_norm,
    pyg.HeteroBatchNorm: _hetero_batch_norm,
    pyg.InstanceNorm: _instance_norm,
    pyg.GraphNorm: _graph_norm,
    pyg.PairNorm: _pair_norm,
    pyg.LayerNorm: _layer_norm,
    pyg.MeanSubtractionNorm: _mean_subtraction_norm,
    pyg.GraphSizeNorm: _graph_size_norm,
}
