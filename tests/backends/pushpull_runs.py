"""Models and trainings for the tests of ``pushpull``, and the batches that one process draws for all ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data

from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import PushPullBackend
from pygdist.kernels import CSR
from pygdist.nn import PTAGSConv
from pygdist.sampler import MiniBatches, NeighborBatches, _native
from pygdist.sampler._native import Sampled
from pygdist.sampler.epoch import ShuffledOrder
from tests.lightning import runs
from tests.lightning.test_pull import EPOCHS, FAN_OUT, SEED, graph
from tests.nn.test_ptags import PTAGSGraphSAGE


def narrow(width: int, **options: Any) -> Data:
    data = graph(**options)
    data.x = data.x[:, :width].contiguous()
    return data


class Weighted(torch.nn.Module):
    """Takes weights of edges, and in its second layer attributes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(width, 8), nn.GATv2Conv(8, 4, edge_dim=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_attr)
        return out


class TwoHops(torch.nn.Module):
    """One layer, which makes both hops; takes weights of edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.lin = nn.TAGConv(width, 8, K=2), torch.nn.Linear(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.lin(self.conv(x, edge_index, edge_weight).relu())
        return out


class Squares(PTAGSConv):
    """Messages and elements of its own, several weights, a module of a familiar width in ``apply_rows``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="sum")
        self.one, self.two = torch.nn.Linear(in_channels, in_channels), torch.nn.Linear(in_channels, in_channels)
        self.last = torch.nn.Linear(in_channels, out_channels)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).square()

    def transform(self, x: Tensor, aggregated: Tensor) -> Tensor:
        out: Tensor = self.one(aggregated.sqrt() + x) - 2 * self.two(x.sigmoid())
        return out

    def apply_rows(self, out: Tensor) -> Tensor:
        out = self.last(out.tanh())
        return out


class OneWeight(PTAGSGraphSAGE):
    """One module under two names, as Listing 1 writes it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.fc_self = self.fc_neigh


class Weighing(PTAGSGraphSAGE):
    """Its messages need weights of edges."""

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:  # type: ignore[override]
        return edge_weight.view(-1, 1) * x_j


class WeighsFirst(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Weighing(width, 8), nn.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_weight), edge_index)
        return out


TWO_LAYERS: dict[str, Any] = {
    "graph-conv": lambda width: (nn.GraphConv(width, 8), nn.GraphConv(8, 4)),
    "SG2": lambda width: (nn.SGConv(width, 8, K=2), nn.SAGEConv(8, 4)),
    "ptags-one": lambda width: (OneWeight(width, 8), nn.SAGEConv(8, 4)),
    "ptags": lambda width: (PTAGSGraphSAGE(width, 8), PTAGSGraphSAGE(8, 4)),
    "ptags-squares": lambda width: (Squares(width, 8), nn.SAGEConv(8, 4)),
    "SG": lambda width: (nn.SGConv(width, 8), nn.SGConv(8, 4)),
    "GAT": lambda width: (nn.GATConv(width, 4, heads=2, residual=True), nn.GATConv(8, 4)),
    "averaged": lambda width: (nn.GATConv(width, 8, heads=3, concat=False), nn.GATv2Conv(8, 4)),
}


def model(name: str, width: int = 12) -> torch.nn.Module:
    torch.manual_seed(7)
    if name == "weighted":
        return Weighted(width)
    if name == "max":
        return nn.GraphSAGE(width, 8, num_layers=2, out_channels=4, aggr="max")
    if name == "eps":
        return nn.GIN(width, 8, num_layers=2, out_channels=4, train_eps=True)
    if name == "jk":
        return nn.GraphSAGE(width, 8, num_layers=2, out_channels=4, jk="cat")
    if name in TWO_LAYERS:
        first, second = TWO_LAYERS[name](width)
        layers = [(first, "x, edge_index -> x"), torch.nn.ReLU(), (second, "x, edge_index -> x")]
        return nn.Sequential("x, edge_index", layers)
    if name == "ptags-weights":
        return WeighsFirst(width)
    if name == "two-hops":
        return TwoHops(width)
    net: torch.nn.Module = getattr(nn, name)(width, 8, num_layers=2, out_channels=4)
    return net


def on_ranks(
    rank: int,
    world_size: int,
    folder: str,
    name: str,
    data: Data,
    partitioner: str,
    backend: PushPullBackend | str = "pushpull",
    sees: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]], Tensor, dict[str, int]]:
    """Train on the ranks of a pool; the parameters, what was logged, this rank's nodes, and bytes by label."""
    net, history, sent = model(name, data.num_features), runs.History(), dict[str, int]()

    class Meter(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            sent.update(module.communicator.meter.read().bytes_by_label)

    module_data = GraphDataModule(
        data, partitioner=partitioner, batches=NeighborBatches(FAN_OUT, batch_size=13), batch_seed=SEED,
        cache_dir=Path(folder) / "cache",
    )  # fmt: skip
    trainer = runs.trainer(rank, world_size, folder, max_epochs=EPOCHS, callbacks=[history, Meter(), *sees], **options)
    trainer.fit(NodeClassifier(net, backend=backend), datamodule=module_data)
    assert not [one for one in threading.enumerate() if one.name == "pygdist-batches"]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    return state, history.epochs, module_data.shard.owned_id, sent


def trained(
    rank: int,
    world_size: int,
    folder: str,
    net: torch.nn.Module,
    backend: PushPullBackend | str,
    *,
    one_sided: bool = False,
    batches: MiniBatches | None = None,
    module: type[Any] = NodeClassifier,
    data: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Tensor]:
    """Train on the ranks of a pool, on a graph of 7 features; the parameters, and this rank's nodes.

    With ``one_sided`` the first rank has all training nodes. ``data`` are further arguments of the data module.
    """
    module_data = GraphDataModule(
        narrow(7, one_sided=one_sided), partitioner="chunk" if one_sided else "hash",
        batches=NeighborBatches(FAN_OUT, batch_size=13) if batches is None else batches, batch_seed=SEED,
        cache_dir=Path(folder) / "cache", **(data or {}),
    )  # fmt: skip
    trainer = runs.trainer(rank, world_size, folder, **{"max_epochs": EPOCHS, **options})
    trainer.fit(module(net, backend=backend), datamodule=module_data, ckpt_path=ckpt_path)
    return {key: value.clone() for key, value in net.state_dict().items()}, module_data.shard.owned_id


def drawn(data: Data, owned: list[Tensor], epoch: int) -> list[list[tuple[Tensor, Sampled]]]:
    """For each step of an epoch, the seeds and batches of all ranks that have any, as one process draws them."""
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], num_rows=160, num_cols=160)
    by_rank = [nodes[data.train_mask[nodes]] for nodes in owned]
    num_steps = max(-(-nodes.numel() // 13) for nodes in by_rank)
    steps: list[list[tuple[Tensor, Sampled]]] = [[] for _ in range(num_steps)]
    for nodes in by_rank:
        order = ShuffledOrder(nodes.numel(), SEED, shuffle=True).of(epoch)
        for step, batches in enumerate(steps):
            seeds = nodes[order[step * nodes.numel() // num_steps : (step + 1) * nodes.numel() // num_steps]]
            if seeds.numel():
                batches.append((seeds, _native.sample(csr, seeds, FAN_OUT, replace=False, seed=SEED, epoch=epoch)))
    return steps
