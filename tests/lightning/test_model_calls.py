"""Models as people write them: ``model(data)`` trains as ``model(x, edge_index, edge_weight)`` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

from pygdist import GraphDataModule, NodeClassifier
from pygdist.nn.inputs import takes_data
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs


class OfData(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv1, self.conv2 = GCNConv(width, 8), SAGEConv(8, 4)

    def forward(self, data: Data) -> Tensor:
        x = self.conv1(data.x, data.edge_index, data.edge_weight).relu()
        out: Tensor = self.conv2(x, data.edge_index)
        return out


class OfTensors(OfData):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:  # type: ignore[override]
        return OfData.forward(self, Data(x=x, edge_index=edge_index, edge_weight=edge_weight))


def _fit(
    rank: int, num_ranks: int, folder: str, model: type[OfData], backend: str, width: int
) -> list[dict[str, float]]:
    history, batches = runs.History(), NeighborBatches([4, 4], 16) if backend.startswith("pu") else None
    data = GraphDataModule(runs.graph(), partitioner="hash", batches=batches, cache_dir=folder)
    options: dict[str, Any] = {"callbacks": [history]}
    runs.trainer(rank, num_ranks, folder, **options).fit(NodeClassifier(model(width), backend=backend), datamodule=data)
    return history.epochs


@pytest.mark.parametrize("backend", ["comm", "tensor", "pull", "pushpull"])
def test_a_model_of_the_whole_data_trains_alike(backend: str, pool: RankPool, tmp_path: Any) -> None:
    found, expected = (pool.run(_fit, 2, str(tmp_path), one, backend, 12) for one in (OfData, OfTensors))
    for one, other in zip(found, expected, strict=True):
        assert one == other


def test_its_sizes_are_filled_in(pool: RankPool, tmp_path: Any) -> None:
    assert pool.run(_fit, 1, str(tmp_path), OfData, "comm", -1)[0][-1]["val_loss"] > 0


class _Named(nn.Module):
    def forward(self, graph: Data, dropout: float = 0.5) -> None: ...


class _Annotated(nn.Module):
    def forward(self, g: Data) -> None: ...


class _OfRows(nn.Module):
    def forward(self, x: Tensor) -> None: ...


class _Usual(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> None: ...


@pytest.mark.parametrize(("model", "takes"), [(_Named, True), (_Annotated, True), (_OfRows, False), (_Usual, False)])
def test_the_form_of_calls_is_seen_from_the_parameters(model: type[nn.Module], takes: bool) -> None:
    assert takes_data(model()) is takes
