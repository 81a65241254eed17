"""Two ranks whose emulated GPUs share gloo, which sends and receives memory of the host alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pygdist import Shard, distribute
from pygdist.backends import resolve_backend
from pygdist.graph import write_store
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import summed_loss
from pygdist.testing.exactness import reference_step
from pygdist.testing.graphs import random_graph
from pygdist.testing.layers import build
from tests.cuda import steps
from tests.cuda.emulation import emulated_gpu
from tests.cuda.process import EmulatedProcess

SOME = ("GCNConv", "SAGEConv-max", "GATConv", "TransformerConv", "BatchNorm")


def _step(rank: int, folder: str, backend: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of outputs and gradients from one process, by layer, in units of what may be."""
    data, worst = random_graph("directed")[0], dict[str, float]()
    error = 0.1 if "wire_dtype" in arguments else 1e-10
    with steps.group(folder, rank, f"{backend}{len(str(arguments))}") as communicator:
        for name in SOME:
            plain, shard = build(name, 5, 3), Shard.load(f"{folder}/store", rank)
            reference = reference_step(copy.deepcopy(plain), data)
            runs = resolve_backend(backend, **arguments)
            with emulated_gpu():
                there = shard.to("cuda")
                runs.bind(there, communicator)
                model = distribute(plain.cuda(), backend=runs, check=False)
                out = model(there.x, there.adjacency, **edge_inputs(model, there))
                total, count = summed_loss(out, there.y, there.train_mask)
                (total / float(communicator.gather([count]).sum())).backward()
                found = [(out.detach().cpu(), reference.output[shard.owned_id])]
                for key, one in model.named_parameters():
                    gradient = torch.zeros_like(one) if one.grad is None else one.grad
                    sums = communicator.gather(gradient.view(-1).tolist()).sum(dim=0)
                    found.append((sums.view(one.shape), reference.gradients[key]))
            worst[name] = max(float((mine - other).abs().max()) for mine, other in found) / error
            runs.unbind()
    return worst


@pytest.mark.parametrize(
    ("backend", "arguments"),
    [
        ("comm", {}),
        ("comm", {"ring": False, "overlap": False}),
        ("comm", {"halo_gib": 1.0}),
        ("comm", {"wire_dtype": "bfloat16"}),
        ("hybrid", {"cache_ratio": 0.5}),
        ("tensor", {"num_chunks": 2}),
    ],
)
def test_a_step_of_two_ranks(
    backend: str, arguments: dict[str, Any], two: tuple[EmulatedProcess, EmulatedProcess], tmp_path: Path
) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    for rank, process in enumerate(two):
        process.start(_step, rank, str(tmp_path), backend, arguments)
    for process in two:
        worst = process.result()
        assert {name: value for name, value in worst.items() if value >= 1} == {}
