"""Full-graph training with plain PyG, or with one line of pygdist: contenders of ``epochs.py``, in their own processes.

    python -m experiments.kernels.plain GRAPH --model GCN --adjacency edges --epochs 5

GRAPH is a folder of ``.npy`` arrays. The script prints one JSON line with the loss and the seconds of each epoch.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.transforms as T
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

from experiments.kernels.loop import train


class GAT(nn.Module):
    """Two layers, 4 heads x 32 concatenated, then one head; PyG's own ``GAT`` gives the last layer as many heads."""

    def __init__(self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int) -> None:
        super().__init__()
        assert num_layers == 2
        self.first = GATConv(in_channels, hidden_channels // 4, heads=4)
        self.last = GATConv(hidden_channels, out_channels, heads=1)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Return class scores of all nodes."""
        return self.last(self.first(x, edge_index).relu(), edge_index)


#: What a model gets as ``edge_index``: edges, matrices of torch or torch_sparse, or edges and one line of pygdist's.
ADJACENCIES = ("edges", "sparse", "torch_sparse", "accelerate")
MODELS = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN, "GAT": GAT}


def build(name: str, data: Data, hidden: int, *, cached: bool) -> nn.Module:
    """Return the model with parameters from seed 0; ``cached`` is GCN's option to normalise once."""
    torch.manual_seed(0)
    extra = {"cached": True} if cached else {}
    return MODELS[name](data.num_features, hidden, num_layers=2, out_channels=int(data.y.max()) + 1, **extra)


def load(folder: Path, adjacency: str) -> tuple[Data, Any]:
    """Return the graph, and the adjacency that the model gets as ``edge_index``."""
    names = ("x", "y", "edge_index", "train_mask")
    data = Data(**{name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in names})
    if adjacency in ("edges", "accelerate"):
        return data, data.edge_index
    if adjacency == "torch_sparse":
        import torch_sparse  # noqa: F401 (without it, the transform silently returns torch's layout)
    data = T.ToSparseTensor(layout=torch.sparse_csr if adjacency == "sparse" else None)(data)
    return data, data.adj_t


def save_initial(folder: Path, hidden: int) -> None:
    """Write the initial parameters of each model beside the graph, for a contender with layers of its own."""
    data, _ = load(folder, "edges")
    for name in MODELS:
        torch.save(build(name, data, hidden, cached=False).state_dict(), folder / f"{name}.pt")


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="GCN")
    parser.add_argument("--adjacency", choices=ADJACENCIES, default="edges")
    parser.add_argument("--cached", action="store_true", help="GCN only: normalise once, not in every epoch")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse")
    data, edges = load(options.graph, options.adjacency)
    model = build(options.model, data, options.hidden, cached=options.cached)
    if options.adjacency == "accelerate":
        from pygdist import accelerate  # the others use nothing of pygdist

        accelerate(model, data)
    print(json.dumps(train(model, data, edges, options.epochs)))


if __name__ == "__main__":
    main()
