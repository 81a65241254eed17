"""Every layer, backend and option on one rank with an emulated GPU: no tensor is on a wrong device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.cuda import steps
from tests.cuda.process import EmulatedProcess

SOME = (
    "GCNConv", "SAGEConv-mean", "SAGEConv-max", "SAGEConv-softmax", "GATConv", "GATConv-edges", "GATv2Conv", "GINConv",
    "TransformerConv", "RGCNConv", "ChebConv-learned", "BatchNorm", "GraphNorm",
)  # fmt: skip
SUMS = ("GCNConv", "SAGEConv-mean", "SAGEConv-max", "GATConv", "GINConv", "BatchNorm")
KIB_24 = 24 / 2**20  # in GiB
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("comm", {"ring": False}, {}, SOME),
    ("comm", {"overlap": False}, {}, SOME),
    ("comm", {"halo_gib": 1.0}, {}, SOME),
    ("comm", {}, {"first_hop": False}, SOME),
    ("comm", {}, {"cheaper_side": False, "no_input_gradient": False}, SOME),
    ("comm", {}, {"fused_attention": False}, SOME),
    ("comm", {}, {"block_mib": 0.001}, SOME),
    ("hybrid", {"cache_ratio": 0.5}, {}, SOME),
    ("tensor", {"num_chunks": 3}, {}, SUMS),
    ("tensor", {"num_chunks": 3, "overlap": False}, {}, SUMS),
    ("tensor", {"memory_gib": KIB_24}, {}, SUMS),
    ("replica", {"scale_rim": False}, {}, tuple(name for name in SOME if name != "ChebConv-learned")),
    ("delayed", {"delay": 2}, {}, ("GCNConv", "SAGEConv-mean", "GINConv", "BatchNorm")),
]


# on one rank hybrid computes as cache does; some layers on it are among the options below
@pytest.mark.parametrize(
    "backend",
    ["comm", "cache", pytest.param("hybrid", marks=pytest.mark.exhaustive), "tensor", "replica", "delayed"],
)
def test_every_layer_on_one_gpu(backend: str, gpu: EmulatedProcess) -> None:
    # PDNConv learns the weights that it normalises, which replica finds out and refuses in a pass
    without = ["PDNConv"] if backend == "replica" else []
    worst = gpu.run(partial(steps.worst_by_layer, without=without), backend, {}, {})
    assert len(worst) > 30
    assert {name: value for name, value in worst.items() if value >= 1e-10} == {}


@pytest.mark.parametrize(("backend", "arguments", "savings", "names"), OPTIONS, ids=lambda one: str(one)[:40])
def test_options_on_one_gpu(
    backend: str, arguments: dict[str, Any], savings: dict[str, Any], names: tuple[str, ...], gpu: EmulatedProcess
) -> None:
    worst = gpu.run(steps.worst_by_layer, backend, arguments, savings, names)
    assert {name: value for name, value in worst.items() if value >= 1e-10} == {}
