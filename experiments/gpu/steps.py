"""Steps of training on one GPU: layers of PyG as they are, beside the same through pygdist, in turns.

Each step is a forward pass of two layers over the whole graph, a backward pass and Adam. PyG reads an edge list, and
pygdist the adjacency of a part that is the whole graph. Seconds are medians; memory is what a step takes at its peak.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GAT, GCN, GIN, GATv2Conv, GraphSAGE, MessagePassing, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from typing_extensions import override

from pygdist import Shard, distribute
from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import power_law, prepare
from pygdist.partition import partition_graph

_CLASSES, _HEADS = 16, 8


class _ByHead(BasicGNN):
    """Two layers of attention, which PyG has no model of."""

    supports_edge_weight = supports_edge_attr = False

    def __init__(self, layer: Callable[..., MessagePassing], width: int) -> None:
        self.layer = layer
        super().__init__(width, width, 2, _CLASSES)

    @override
    def init_conv(self, in_channels: int, out_channels: int, **_: Any) -> MessagePassing:
        """Return a layer whose heads together have so many channels."""
        return self.layer(in_channels, out_channels // _HEADS, heads=_HEADS)


#: Models by name, of so many features.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "GCN": lambda width: GCN(width, width, 2, _CLASSES),
    "GraphSAGE": lambda width: GraphSAGE(width, width, 2, _CLASSES),
    "GraphSAGE, max": lambda width: GraphSAGE(width, width, 2, _CLASSES, aggr="max"),
    "GIN": lambda width: GIN(width, width, 2, _CLASSES),
    "GAT": lambda width: GAT(width, width, 2, _CLASSES, heads=_HEADS),
    "GATv2": lambda width: _ByHead(GATv2Conv, width),
    "Transformer": lambda width: _ByHead(TransformerConv, width),
}


def measure(nodes: int, edges: int, width: int, rounds: int, *, kind: str = "cuda") -> list[dict[str, Any]]:
    """Return a row for each model, precision and contender.

    Args:
        nodes: Nodes of the graph.
        edges: Its edges.
        width: Features, and hidden features.
        rounds: Steps of each contender that count.
        kind: ``cuda``; ``cpu`` tries this script without a GPU.
    """
    data, _ = prepare(power_law(nodes, edges, num_features=width, num_classes=_CLASSES))
    device = torch.device(kind)
    with tempfile.TemporaryDirectory() as folder:
        partition_graph(data, Path(folder) / "store", num_parts=1, partitioner="chunk")
        shard = Shard.load(Path(folder) / "store", 0).to(device)
    x, edge_index, y = data.x.to(device), data.edge_index.to(device), data.y.to(device)
    rows = list[dict[str, Any]]()
    for name, make in MODELS.items():
        for halves in (False, True):
            steps = {"PyG": _stepper(make(width).to(device), x, edge_index, y, halves=halves)}
            for one in ("comm", "tensor"):
                backend = resolve_backend(one)
                backend.bind(shard, Communicator())
                model = distribute(make(width).to(device), backend=backend, check=False)
                steps[one] = _stepper(model, shard.x, shard.adjacency, shard.y, halves=halves)
            seconds, peak = _in_turns(steps, rounds, device)
            for one, spent in seconds.items():
                rows.append(
                    {
                        "model": name, "by": one, "dtype": "bfloat16" if halves else "float32", "nodes": nodes,
                        "edges": data.num_edges, "features": width, "step_s": spent,
                        "times_faster": seconds["PyG"] / spent, "step_gib": peak[one] / 2**30,
                    }
                )  # fmt: skip
    return rows


def _stepper(model: nn.Module, x: Tensor, edges: Any, y: Tensor, *, halves: bool) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16) if halves else contextlib.nullcontext():
            loss = F.cross_entropy(model(x, edges).float(), y)
        loss.backward()
        optimizer.step()

    return step


def _in_turns(
    steps: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the median seconds and the peak bytes of each step."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    peak = dict.fromkeys(steps, 0)
    for number in range(rounds + 2):  # the first ones compile
        for name, step in steps.items():
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated() - before
            if number >= 2:
                spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}, peak
