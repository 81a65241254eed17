"""Full-graph training with DGL's own layers: one contender of ``epochs.py``, in its own process.

    python -m experiments.kernels.plain_dgl GRAPH --dgl SITE --model GCN --ids int32 --epochs 5

GRAPH is a folder of ``.npy`` arrays. It also holds ``MODEL.pt``, the initial parameters that ``plain.py`` writes, so
that all contenders start from the same ones. The script prints one JSON line with the loss and the seconds of each
epoch. It imports neither PyG nor pygdist: the peak of its memory is DGL's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.kernels.dgl_wheels import HELP, load
from experiments.kernels.loop import train

#: For each model, the names of PyG's two layers, and PyG's name for each parameter of DGL's layer.
PARAMETERS: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
    "GCN": (("convs.0", "convs.1"), {"weight": "lin.weight", "bias": "bias"}),
    "GraphSAGE": (
        ("convs.0", "convs.1"),
        {"fc_neigh.weight": "lin_l.weight", "fc_self.weight": "lin_r.weight", "fc_self.bias": "lin_l.bias"},
    ),
    "GAT": (("first", "last"), {"fc.weight": "lin.weight", "attn_l": "att_src", "attn_r": "att_dst", "bias": "bias"}),
}


class Net(nn.Module):
    """Two layers of DGL's. Heads are concatenated after the first one."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return class scores of all nodes."""
        return self.last(graph, self.first(graph, x).flatten(1).relu()).flatten(1)


def build(dgl: ModuleType, name: str, sizes: tuple[int, int, int], initial: Mapping[str, Tensor]) -> Net:
    """Return the model with the initial parameters of PyG's; ``sizes`` are features, hidden width and classes."""
    features, hidden, classes = sizes
    conv = dgl.nn.pytorch
    made = {
        "GCN": lambda: Net(conv.GraphConv(features, hidden), conv.GraphConv(hidden, classes)),
        "GraphSAGE": lambda: Net(conv.SAGEConv(features, hidden, "mean"), conv.SAGEConv(hidden, classes, "mean")),
        "GAT": lambda: Net(conv.GATConv(features, hidden // 4, 4), conv.GATConv(hidden, classes, 1)),
    }[name]()
    places, names = PARAMETERS[name]
    for layer, place in zip((made.first, made.last), places, strict=True):
        values = {own: initial[f"{place}.{theirs}"] for own, theirs in names.items()}
        if name == "GCN":
            values["weight"] = values["weight"].T  # GraphConv multiplies by it from the right
        layer.load_state_dict(values)  # raises if a parameter is missing or has another shape
    return made


def graph_of(dgl: ModuleType, folder: Path, name: str, ids: str) -> Any:
    """Return DGL's graph with all its formats. GCN and GAT get self-loops, as PyG's layers add them; it has none."""
    source, target = torch.from_numpy(np.load(folder / "edge_index.npy"))
    graph = dgl.graph((source, target), num_nodes=len(np.load(folder / "y.npy")), idtype=getattr(torch, ids))
    graph = graph if name == "GraphSAGE" else dgl.add_self_loop(graph)
    graph.create_formats_()
    return graph


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("graph", type=Path)
    parser.add_argument("--dgl", type=Path, required=True, help=HELP)
    parser.add_argument("--model", choices=list(PARAMETERS), default="GCN")
    parser.add_argument("--ids", choices=["int32", "int64"], default="int32", help="type of the graph's node ids")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    dgl = load(options.dgl)
    names = ("x", "y", "train_mask")
    data = SimpleNamespace(**{name: torch.from_numpy(np.load(options.graph / f"{name}.npy")) for name in names})
    graph = graph_of(dgl, options.graph, options.model, options.ids)
    sizes = (data.x.size(1), options.hidden, int(data.y.max()) + 1)
    model = build(dgl, options.model, sizes, torch.load(options.graph / f"{options.model}.pt", weights_only=True))
    print(json.dumps(train(model, data, graph, options.epochs)))


if __name__ == "__main__":
    main()
