"""Models that ``pushpull`` cannot run are refused by name on all ranks, and told what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import PushPullBackend, pushpull
from pygdist.backends.sampling.copies import GroupSizes
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.backends.pushpull_runs import narrow
from tests.kernels.oracle import needs_library
from tests.lightning import runs
from tests.lightning.test_pull import FAN_OUT
from tests.nn.test_ptags import PTAGSGraphSAGE

pytestmark = needs_library


class _Skips(torch.nn.Module):
    """Reads the features twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skip = nn.SAGEConv(12, 8), nn.SAGEConv(8, 4), torch.nn.Linear(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index) + self.skip(x)
        return out


class _Doubled(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index) + self.first(x, edge_index), edge_index)
        return out


class _Two(_Skips):
    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.SAGEConv(12, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index) + self.skip(x, edge_index), edge_index)
        return out


class _Encoded(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x.relu(), edge_index).relu(), edge_index)
        return out


class _OfEdges(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GCNConv(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.first(x, edge_index, edge_attr.sum(dim=1))
        return out


class _HidesNan(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = torch.where(x[:, :1] > 0, self.first(x, edge_index), 0.0)
        out: Tensor = self.second(hidden, edge_index)
        return out


class _Drops(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.nn.functional.dropout(x, training=self.training)
        out: Tensor = self.second(self.first(x, edge_index), edge_index)
        return out


class _DropsAlways(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(torch.nn.functional.dropout(x), edge_index), edge_index)
        return out


class _Detached(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).detach(), edge_index)
        return out


class _Again(torch.nn.Module):
    """Runs its first layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GINConv(nn.MLP([12, 8, 8], norm=None)), nn.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(checkpoint(self.first, x, edge_index, use_reentrant=False), edge_index)
        return out


class _Centred(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.first(x, edge_index)
        out: Tensor = self.second(hidden - hidden.mean(0), edge_index)
        return out


class _Learned(torch.nn.Module):
    """Weighs edges by numbers that it computes, of the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(12, 8), nn.GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_weight.sigmoid()), edge_index)
        return out


class _DropSAGE(nn.SAGEConv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(torch.nn.functional.dropout(x, training=self.training), edge_index)
        return out


class _Lies(_Skips):
    def __init__(self) -> None:
        super().__init__()
        self.first = _DropSAGE(12, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index), edge_index)
        return out


class _Mixes(PTAGSGraphSAGE):
    def transform(self, x: Tensor, aggregated: Tensor) -> Tensor:
        out: Tensor = self.fc_neigh(aggregated).relu() + self.fc_self(x)  # not linear in the sum over columns
        return out


class _NotLinear(_Skips):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Mixes(12, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index), edge_index)
        return out


class _Scaled(PTAGSGraphSAGE):
    """Trains a parameter that the cut does not know."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.eps = torch.nn.Parameter(torch.zeros(()))

    def transform(self, x: Tensor, aggregated: Tensor) -> Tensor:
        return super().transform((1 + self.eps) * x, aggregated)


class _Learns(_Skips):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Scaled(12, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index), edge_index)
        return out


class _Shares(_Skips):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.SAGEConv(12, 12)
        self.first = nn.SAGEConv(12, 12)
        self.second.lin_l.weight = self.first.lin_l.weight

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index), edge_index)
        return out


class _Breaks(_Skips):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.skip(self.first(x, edge_index))
        return out


ELSEWHERE = "uses the features outside its first layer"
REFUSED = {
    "skips": (_Skips, f"_Skips {ELSEWHERE}"),
    "hides-nan": (_HidesNan, f"_HidesNan {ELSEWHERE}"),
    "encoded": (_Encoded, f"_Encoded {ELSEWHERE}"),
    "drops-always": (_DropsAlways, "drops features in evaluation too"),
    "drops": (_Drops, "drops elements of the features twice"),
    "two": (_Two, "SAGEConv and SAGEConv both get the features"),
    "doubled": (_Doubled, "_Doubled runs its first layer more than once in a pass"),
    "again": (_Again, "_Again runs its first layer more than once in a pass, or again in the backward pass"),
    "detached": (_Detached, "_Detached puts out nothing that has a gradient for its first layer"),
    "centred": (_Centred, "_Centred puts out something else where rows that no layer reads are left out"),
    "attributes": (_OfEdges, "GCNConv gets edge weights that the model computes"),
    "learned": (_Learned, "GCNConv gets edge weights that the model computes"),
    "lies": (_Lies, "_DropSAGE computes something else than SAGEConv"),
    "ptags-eps": (_Learns, "_Scaled computes something else than PTAGSConv"),
    "shares": (_Shares, "_Shares shares parameters of its first layer with another module (first.lin_l.weight"),
    "instance": (
        lambda: nn.Sequential(
            "x, edge_index",
            [
                (nn.GCNConv(12, 8), "x, edge_index -> x"),
                torch.nn.InstanceNorm1d(8),
                (nn.GCNConv(8, 4), "x, edge_index -> x"),
            ],
        ),
        "has an InstanceNorm of torch's",
    ),
    "ptags": (_NotLinear, "_Mixes computes something else than PTAGSConv"),
    "attention": (lambda: nn.GAT(12, 8, num_layers=2, out_channels=4, v2=True), "GATv2Conv is none of the layers"),
    "lstm": (lambda: nn.GraphSAGE(12, 8, num_layers=2, out_channels=4, aggr="lstm"), "aggregates by LSTMAggregation"),
    "hops": (lambda: nn.GCN(12, 8, num_layers=3, out_channels=4), "fan_out has 2 numbers, but GCN makes 3 hops"),
    "width": (lambda: nn.GCN(16, 8, num_layers=2, out_channels=4), "graph's 12 features per node, as GCNConv takes 16"),
    "breaks": (_Breaks, "_Breaks ends with RuntimeError: mat1 and mat2 shapes"),
}
NO_PULL = ("drops", "drops-always", "hops", "width", "breaks")


def _refused(rank: int, world_size: int, folder: str, name: str) -> str:
    torch.manual_seed(7)
    data = GraphDataModule(
        narrow(12), batches=NeighborBatches(FAN_OUT, batch_size=13), cache_dir=Path(folder) / "cache"
    )
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1)
    with pytest.raises(InputError) as refused:
        trainer.fit(NodeClassifier(REFUSED[name][0](), backend="pushpull"), datamodule=data)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_cut_are_refused_on_all_ranks(name: str, pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(_refused, 2, str(tmp_path), name):
        assert REFUSED[name][1] in text
        assert "use backend pull" in text or name in NO_PULL


def test_two_groups_of_nccl_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    classifier = NodeClassifier(runs.model(), backend=PushPullBackend(pipeline=3))

    def sizes_over_nccl(*args: Any) -> GroupSizes:
        monkeypatch.setattr(classifier.backend.communicator, "is_nccl", True)
        return GroupSizes(features=1, topology=1)

    monkeypatch.setattr(pushpull, "group_sizes", sizes_over_nccl)
    data = GraphDataModule(
        runs.graph(), partitioner="hash", batches=NeighborBatches(FAN_OUT, batch_size=13), cache_dir=tmp_path
    )
    trainer = runs.trainer(0, 1, str(tmp_path), plugins=[LightningEnvironment()])
    with pytest.raises(InputError, match=r"two groups of nccl.*process_group_backend=gloo"):
        trainer.fit(classifier, datamodule=data)
