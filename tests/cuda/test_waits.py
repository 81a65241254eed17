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

# what the host must know in each step
KNOWN: dict[str, tuple[str, ...]] = {
    "SAGEConv-lstm": ("pygdist/nn/aggregation.py",),  # how long its rows are padded, as PyG asks too
    "SAGEConv-patches": ("pygdist/nn/aggregation.py",),
    "ChebConv": ("pygdist/nn/laplacian.py",),  # the largest entry of all ranks
    "ChebConv-unnormalised": ("pygdist/nn/laplacian.py",),
    "ChebConv-learned": ("pygdist/nn/laplacian.py", "in the caller"),  # and backward through PyG's masks
}


@pytest.mark.parametrize(
    ("backend", "arguments"), [("comm", {}), ("cache", {}), ("tensor", {}), ("comm", {"halo_gib": 1.0})], ids=str
)
def test_the_third_step_waits_for_nothing(backend: str, arguments: dict[str, Any], gpu: EmulatedProcess) -> None:
    """Layers that PyG itself has wait in their own code do so here as well."""
    waits = gpu.run(steps.waits_by_layer, backend, arguments)
    assert len(waits) > 30
    ours = {
        name: [
            one for one in lines if not any(known in one for known in (" in torch_geometric/", *KNOWN.get(name, ())))
        ]
        for name, lines in waits.items()
    }
    assert {name: lines for name, lines in ours.items() if lines} == {}
    assert sum(not lines for lines in waits.values()) > len(waits) * 0.8


def _logged(norm: bool) -> list[str]:
    """The third step's loss and accuracy, as Lightning's module counts them."""
    module = NodeClassifier(torch.nn.Linear(5, 3))
    module._score_name = "acc"
    module.metrics.update({"train_loss": Mean(), "train_score": Mean()})
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
    assert share.startswith("aten._local_scalar_dense in pygdist/lightning/classifier.py:")


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
