"""A small sampled neighbourhood on which models are tried; the same on all ranks."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from pygdist.backends.passes.sampled import SAMPLED_HOPS, SampledHops
from pygdist.graph import Adjacency, Shard
from pygdist.nn.inputs import edge_inputs

_SEEDS, _EACH = 3, 2


def small_neighbourhood(
    shard: Shard, model: nn.Module, num_hops: int
) -> tuple[Adjacency, SampledHops, dict[str, torch.Tensor]]:
    """Return edges, the sizes of the hops, and values of edges as the model takes them.

    Each node of a hop has two in-edges: from a new node of the next hop, and from some node before it.
    """
    sizes = [_SEEDS] * (num_hops + 1)
    ends = list(itertools.accumulate(sizes))
    target = torch.arange(ends[-2]).repeat_interleave(_EACH)
    new, old = target[::_EACH] + _SEEDS, (target[::_EACH] * 7 + 1) % (target[::_EACH] + _SEEDS)
    source = torch.stack([new, old], dim=1).view(-1)
    device = next(model.parameters(), shard.x).device  # a trainer moves the model later
    adjacency = Adjacency(torch.stack([source, target]).to(device), num_src=ends[-1], num_dst=ends[-1])
    generator, inputs = torch.Generator().manual_seed(0), {}
    for name, value in edge_inputs(model, shard).items():
        shape = (target.numel(), *value.shape[1:])
        random = torch.rand(shape, generator=generator, dtype=torch.float64)
        inputs[name] = (random if value.is_floating_point() else torch.zeros(shape)).to(device, value.dtype)
    hops = SampledHops(tuple(sizes), inputs.get("edge_weight"))
    adjacency.slot(SAMPLED_HOPS, lambda: hops)
    return adjacency, hops, inputs
