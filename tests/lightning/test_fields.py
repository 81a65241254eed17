"""Graphs as people have them, in a run: integer features, and notes on what was done to a graph."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN, BatchNorm, GATConv, GCNConv, GINEConv, SAGEConv

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.graph import GraphFiles, Shard, load_graph, prepare
from pygdist.partition import partition_graph
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs

LARGE = 2**53 + 1


class Embedded(nn.Module):
    """Embeds integers of nodes and edges."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges, self.conv = nn.Embedding(9, 4), nn.Embedding(3, 4), GINEConv(nn.Linear(4, 2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.conv(self.nodes(x[:, 0] - LARGE), edge_index, self.edges(edge_attr.long()))
        return out


def _graph(**fields: Any) -> Data:
    nodes, edges = torch.arange(9), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])
    x, edge_attr = (nodes + LARGE).view(-1, 1), (torch.arange(8) % 3).to(torch.uint8)
    mask = torch.ones(9, dtype=torch.bool)
    graph = {"x": x, "edge_index": edges, "edge_attr": edge_attr, "y": nodes % 2, "train_mask": mask, **fields}
    return Data(**{name: value for name, value in graph.items() if value is not None})


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Embedded()


def _fit(rank: int, world_size: int, folder: str) -> list[float]:
    history = runs.History()
    trainer = runs.trainer(rank, world_size, folder, max_epochs=3, callbacks=[history])
    trainer.fit(NodeClassifier(_model()), datamodule=GraphDataModule(_graph(), cache_dir=folder))
    return [epoch["train_loss"] for epoch in history.epochs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_integers_are_embedded(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    data, net, losses = _graph(), _model(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(3):
        loss = functional.cross_entropy(net(data.x, data.edge_index, data.edge_attr), data.y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for found in pool.run(_fit, world_size, str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-5)


def test_integers_are_embedded_in_mini_batches(tmp_path: Path) -> None:
    """Ids that were rounded on the way would be out of the table's range."""
    data = GraphDataModule(_graph(), cache_dir=tmp_path, batches=NeighborBatches([2], batch_size=4))
    trainer = runs.trainer(0, 1, str(tmp_path), max_epochs=2)
    module = NodeClassifier(_model(), backend="replica")
    trainer.fit(module, datamodule=data)
    ((rows, out),) = trainer.predict(module, datamodule=data)
    graph, model = _graph(), module.model
    torch.testing.assert_close(out, model(graph.x, graph.edge_index, graph.edge_attr)[rows])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool])
def test_integers_reach_the_parts_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    data = _graph(x=torch.arange(9).view(-1, 1).to(dtype), edge_attr=torch.arange(8).view(-1, 1).to(dtype))
    partition_graph(prepare(data)[0], tmp_path / "parts", num_parts=2, partitioner="hash", num_hops=2)
    for rank in range(2):
        shard = Shard.load(tmp_path / "parts", rank)
        assert shard.surroundings is not None
        assert shard.edge_attr is not None
        for found, expected in (
            (shard.surroundings.x, data.x[shard.surroundings.n_id]),
            (shard.edge_attr, data.edge_attr[shard.e_id]),
            (shard.astype(torch.float64).x, data.x[shard.owned_id]),
        ):
            assert found.dtype == dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("values", "dtype"), [(np.uint16, np.int64), (np.uint8, np.uint8), (np.int64, np.int64), (np.float16, np.float32)]
)
def test_integers_of_files_stay_as_they_are(values: Any, dtype: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "x.npy", np.array([[7], [8], [250]], dtype=values))
    files = GraphFiles(edges=tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        meta = partition_graph(files, tmp_path / "parts", num_parts=1, partitioner="hash")
    shard = Shard.load(tmp_path / "parts", 0)
    assert meta["dtypes"]["x"] == str(shard.x.numpy().dtype) == np.dtype(dtype).name
    assert shard.x.tolist() == [[7], [8], [250]]
    assert ("converted x from" in str([one.message for one in told])) == (values != dtype)
    partition_graph(
        GraphFiles(edges=tmp_path, float_features=True), tmp_path / "floats", num_parts=1, partitioner="hash"
    )
    assert Shard.load(tmp_path / "floats", 0).x.dtype == torch.float32


def test_numbers_beyond_int64_are_refused(tmp_path: Path) -> None:
    large = np.array([[1], [2**63], [3]], dtype=np.uint64)
    with pytest.raises(InputError, match=r"x: row 1 holds a number above 2\*\*63 - 1"):
        prepare(Data(x=large, edge_index=torch.tensor([[0], [1]])))
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "x.npy", large)
    with pytest.raises(InputError, match=r"x.npy: row 1 holds a number above"):
        partition_graph(GraphFiles(edges=tmp_path), tmp_path / "parts", num_parts=1)


class Net(nn.Module):
    """One layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer(x, edge_index) if isinstance(self.layer, (GCNConv, GATConv, SAGEConv, GCN)) else x
        return out if out is not x else self.layer(x)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: GCN(1, 4, 2, 2), id="gcn"),
        pytest.param(lambda: GCN(-1, 4, 2, 2), id="lazy"),
        pytest.param(lambda: Net(GATConv(1, 2)), id="gat"),
        pytest.param(lambda: Net(SAGEConv(1, 2)), id="sage"),
        pytest.param(lambda: Net(nn.Linear(1, 2)), id="linear"),
        pytest.param(lambda: Net(nn.Sequential(BatchNorm(1), nn.Linear(1, 2))), id="norm"),
    ],
)
@pytest.mark.parametrize(("backend", "dtype"), [("comm", torch.int64), ("replica", torch.bool)])
def test_a_model_of_floats_refuses_integers_in_one_line(
    model: Any, dtype: torch.dtype, backend: str, tmp_path: Path
) -> None:
    data = GraphDataModule(_graph(x=torch.ones(9, 1, dtype=dtype)), cache_dir=tmp_path)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        InputError, match=rf"does not take x \({name}\) of the graph .* x.float\(\), or .*--data.float_f"
    ):
        runs.trainer(0, 1, str(tmp_path), max_epochs=1).fit(NodeClassifier(model(), backend=backend), datamodule=data)


def test_integers_become_floats_if_asked_for(tmp_path: Path) -> None:
    data = GraphDataModule(_graph(x=torch.ones(9, 1).long()), cache_dir=tmp_path, float_features=True)
    runs.trainer(0, 1, str(tmp_path), max_epochs=1).fit(NodeClassifier(GCN(-1, 4, 2, 2)), datamodule=data)
    assert data.shard.x.dtype == torch.float32
    with pytest.raises(InputError, match=r"float_features: parts is partitioned already"):
        GraphDataModule(store="parts", float_features=True)


# --- notes ------------------------------------------------------------------------------------------------------------


def test_each_note_is_told_once(tmp_path: Path) -> None:
    graph = Data(x=torch.rand(9, 2), edge_index=_graph().edge_index, y=torch.arange(9) % 2, year=torch.ones(9))
    for _ in range(2):  # the second takes its parts from the cache
        data = GraphDataModule(graph, cache_dir=tmp_path, remove_self_loops=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, trainer = NodeClassifier(GCN(2, 4, 2, 2)), runs.trainer(0, 1, str(tmp_path), max_epochs=1)
            trainer.fit(module, datamodule=data)
            trainer.test(module, datamodule=data, verbose=False)
        notes = [
            "left out unused attributes: year",
            "removed 0 self-loops",
            "drew a random split of 9 labelled nodes into 4/3/2 (seed 0)",
        ]
        told = [str(one.message) for one in caught if one.category is UserWarning]
        assert [one for one in told if one in notes] == notes
        assert data.summary().splitlines() == [
            "9 nodes, 8 edges, 2 features (float32), 2 classes",
            "1 parts by chunk; labelled nodes: 4 train, 3 val, 2 test",
            *notes,
        ]


def _told(rank: int, world_size: int, folder: str) -> list[str]:
    data = GraphDataModule(_graph(train_mask=None), cache_dir=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(rank, world_size, folder, max_epochs=1).fit(NodeClassifier(_model(), check=False), datamodule=data)
    return [str(one.message) for one in caught]


def test_one_rank_tells(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_told, 2, str(tmp_path))
    assert sum("drew a random split" in one for one in first) == 1
    assert not any("drew a random split" in one for one in second)


def test_notes_are_lines_of_a_log_that_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.filterwarnings("error", message="drew a random split")
        GraphDataModule(_graph(train_mask=None), cache_dir=tmp_path).prepare_data()
    assert sum("drew a random split" in one.message for one in caplog.records) == 1


def test_what_loading_does_is_noted() -> None:
    masks = torch.zeros(9, 3, dtype=torch.bool)
    _, notes = prepare(load_graph(_graph(train_mask=masks), split_index=1))
    assert "took split 1 of the 3 in train_mask (split_index)" in notes
