"""The host does not wait for the GPU in a step: it runs ahead, and the GPU is never idle."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pygdist.lightning import NodeClassifier
from pygdist.lightning.module import Mean
from tests.cuda import steps
from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess
from tests.cuda.test_layers import SOME, SUMS

_CHEB, _DENSE = "torch_geometric/nn/conv/cheb_conv.py", "torch_geometric/utils/_to_dense_batch.py"
_PADDED = ("pygdist/nn/aggregation.py", "torch_geometric/nn/aggr/base.py", _DENSE)
# Layers that need values from the GPU in each step, and where: most in PyG's own code, which asks as often by itself.
KNOWN: dict[str, tuple[str, ...]] = {
    "ChebConv": ("pygdist/nn/laplacian.py", _CHEB),  # the largest entry of all ranks
    "ChebConv-unnormalised": ("pygdist/nn/laplacian.py", _CHEB),
    "ChebConv-learned": ("pygdist/nn/laplacian.py", _CHEB, "in the caller"),  # and backward through PyG's masks
    "ChebConv-scaled": (_CHEB,),
    "ClusterGCNConv": ("torch_geometric/nn/conv/cluster_gcn_conv.py",),
    "HEATConv": ("torch_geometric/nn/dense/linear.py",),
    "MFConv": ("torch_geometric/nn/conv/mf_conv.py",),
    "SAGEConv-lstm": _PADDED,  # the length of its rows, the largest of all ranks
    "SAGEConv-patches": _PADDED,
    "SAGEConv-median": ("torch_geometric/nn/aggr/quantile.py",),
}
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("comm", {}, {}, ()),
    ("cache", {}, {}, ()),
    ("tensor", {}, {}, ()),
    ("comm", {"halo_gib": 1.0}, {}, ()),
    ("comm", {}, {"block_mib": 0.001}, SOME),
    ("hybrid", {"cache_ratio": 0.5}, {}, SOME),
    ("tensor", {"num_chunks": 3}, {}, SUMS),
    ("delayed", {"delay": 2}, {}, ("GCNConv", "SAGEConv-mean", "GINConv")),
]


@pytest.mark.parametrize(("backend", "arguments", "savings", "names"), OPTIONS, ids=lambda one: str(one)[:40])
def test_the_third_step_waits_for_nothing(
    backend: str, arguments: dict[str, Any], savings: dict[str, Any], names: tuple[str, ...], gpu: EmulatedProcess
) -> None:
    waits = gpu.run(steps.waits_by_layer, backend, arguments, names, savings)
    assert len(waits) > (len(names) or 31) - 1
    unknown = {
        name: [line for line in lines if not any(where in line for where in KNOWN.get(name, ()))]
        for name, lines in waits.items()
    }
    assert {name: lines for name, lines in unknown.items() if lines} == {}


def _logged(norm: bool) -> list[str]:
    """The third step's loss and accuracy, as Lightning's module counts them."""
    module = NodeClassifier(torch.nn.Linear(5, 3))
    module.metrics.update({"train_loss": Mean(), "train_acc": Mean()})
    with emulated_gpu() as waits, mock.patch.object(NodeClassifier, "log"):
        module.metrics.to("cuda")
        rows, out = torch.arange(6, device="cuda"), torch.randn(6, 3, device="cuda")
        for _ in range(3):
            waits.lines.clear()
            module._noted(out, rows % 3, rows, "train", torch.ones(6, device="cuda") if norm else None)
        return waits.lines


def test_counting_loss_and_accuracy_waits_for_nothing(gpu: EmulatedProcess) -> None:
    assert gpu.run(_logged, False) == []
    (share,) = gpu.run(_logged, True)  # the sum of the weights of a sample's nodes
    assert share.startswith("aten._local_scalar_dense in pygdist/lightning/node_module.py:")


def _planted() -> list[str]:
    from pygdist.testing.layers import LAYERS, _case
    from tests.cuda.planted import Asking, Elsewhere

    LAYERS["Asking"], LAYERS["Elsewhere"] = _case(Asking), _case(Elsewhere)
    lines = steps.waits_by_layer("comm", {}, ["Asking"])["Asking"]
    try:
        steps.worst_by_layer("comm", {}, {}, ["Elsewhere"])
    except RuntimeError as error:
        lines.append(str(error))
    finally:
        del LAYERS["Asking"], LAYERS["Elsewhere"]
    return lines


def test_a_planted_wait_and_a_planted_wrong_device_are_found(gpu: EmulatedProcess) -> None:
    *asked, refused = gpu.run(_planted)
    assert [line.partition(" in ")[0] for line in asked] == ["aten._local_scalar_dense"] * 2  # one for each layer
    assert "same device" in refused
