"""Models get further tensors of nodes by name, with the rank's own rows, on every backend that can bring them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, PointNetConv

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import DelayedBackend, resolve_backend
from pygdist.commands.partition import Graph, Parts, partition
from pygdist.commands.verify import verify
from pygdist.graph import Shard, prepare, read_meta
from pygdist.graph.store.structure import check_meta
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs


def graph(**changes: Any) -> Data:
    data = runs.graph()
    generator = torch.Generator().manual_seed(1)
    data.pos = torch.rand(160, 3, generator=generator, dtype=torch.float64)
    data.kind = torch.randint(0, 5, (160,), generator=generator)
    data.edge_time = torch.rand(data.num_edges, generator=generator)
    data.name, data.era = "Cora", torch.tensor(3.0)
    return data.update(changes)


class Points(nn.Module):
    """Takes places and kinds of nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kinds, self.first = nn.Embedding(5, 12), PointNetConv(nn.Linear(15, 8), add_self_loops=False)
        self.second = GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, *, kind: Tensor | None = None) -> Tensor:
        assert kind is not None, "it has a default, and the graph has it"
        out: Tensor = self.second(self.first(x + self.kinds(kind), pos, edge_index).relu(), edge_index)
        return out


class Lazy(Points):
    """Fills its sizes in, and has no message of places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = GCNConv(-1, 8)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, *, kind: Tensor | None = None) -> Tensor:
        assert kind is not None
        x = self.first(torch.cat([x + self.kinds(kind), pos], dim=1), edge_index).relu()
        out: Tensor = self.second(x, edge_index)
        return out


class OfData(Points):
    """Finds them in the data."""

    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.pos, kind=data.kind)


class Timed(GCN):
    def forward(self, x: Tensor, edge_index: Tensor, edge_time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index, edge_time)


class EraOfData(OfData):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data) * data.era


class Plain(NodeClassifier):
    """With plain steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kept(Callback):
    """Keeps the first parameters and the gradients of the last step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.first = {name: one.clone() for name, one in pl_module.model.state_dict().items()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {name: one.grad.clone() for name, one in pl_module.model.named_parameters()}


def _fit(rank: int, world_size: int, folder: str, net: type[nn.Module], backend: Any) -> tuple[Any, ...]:
    """Two epochs: what was logged, the first parameters, the last gradients, and the outputs of the trained model."""
    history, kept, module = runs.History(), Kept(), Plain(net(), backend)
    partitioner = "libra" if isinstance(backend, DelayedBackend) else "hash"
    data = GraphDataModule(graph(), partitioner=partitioner, cache_dir=folder)
    trainer = runs.trainer(rank, world_size, folder, callbacks=[history, kept], max_epochs=2)
    trainer.fit(module, datamodule=data)
    assert data.shard.node_inputs.keys() >= {"pos", "kind"}
    return history.epochs, kept.first, kept.gradients, trainer.predict(module, datamodule=data)


@pytest.mark.parametrize(
    ("net", "backend", "world_size"),
    [
        *((Points, backend, 2) for backend in ("comm", "cache", "hybrid", DelayedBackend(delay=0))),
        (Points, "comm", 3), (Points, "single", 1), (OfData, "comm", 2), (Lazy, "comm", 2), (Lazy, "tensor", 2),
    ],
    ids=lambda one: getattr(one, "name", None) or getattr(one, "__name__", str(one)),
)  # fmt: skip
def test_they_reach_the_model_on_every_rank(
    net: type[nn.Module], backend: Any, world_size: int, pool: RankPool, tmp_path: Path
) -> None:
    found = pool.run(_fit, world_size, str(tmp_path), net, backend)
    whole, _ = GraphDataModule(graph(), cache_dir=tmp_path / "whole").load()
    whole.update({"pos": graph().pos, "kind": graph().kind})
    model, losses = net(), []
    model.load_state_dict(found[0][1])  # sizes that are filled in draw parameters
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args: Any = (whole,) if net is OfData else (whole.x, whole.edge_index, whole.pos)
    inputs = {} if net is OfData else {"kind": whole.kind}
    for _ in range(2):
        loss = functional.cross_entropy(model(*args, **inputs)[whole.train_mask], whole.y[whole.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out = model(*args, **inputs).detach()
        losses.append(float(functional.cross_entropy(out[whole.val_mask], whole.y[whole.val_mask])))
    rows = []
    for epochs, _, gradients, predicted in found:
        assert [epoch["val_loss"] for epoch in epochs] == pytest.approx(losses, rel=1e-10)
        for name, value in model.named_parameters():
            assert torch.allclose(gradients[name], value.grad, rtol=0, atol=1e-10), name
        for ids, values in predicted:
            assert torch.allclose(values, out[ids], rtol=0, atol=1e-10)
            rows.append(ids)
    assert torch.cat(rows).sort().values.tolist() == list(range(160))


def _refused(rank: int, world_size: int, folder: str, net: nn.Module, backend: str) -> str:
    batches = NeighborBatches([4, 4], 16) if backend == "pull" else None
    data = GraphDataModule(graph(), partitioner="hash", batches=batches, cache_dir=folder)
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder).fit(NodeClassifier(net, backend), datamodule=data)
    return str(error.value)


@pytest.mark.parametrize(
    ("net", "backend", "said"),
    [
        (Points, "pull", r"its forward takes pos, kind, but backend 'pull' brings x alone .* use backend .*comm"),
        (Points, "replica", "its forward takes pos, kind, but backend 'replica'"),
        (OfData, "pull", "OfData.forward reads '(pos|kind)' of the data"),
        (EraOfData, "comm", "EraOfData.forward reads 'era' of the data"),
        (lambda: Timed(12, 8, 2, 4), "comm", r"Timed.forward cannot be called .*'edge_time'; .*in edge_attr"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    net: Any, backend: str, said: str, pool: RankPool, tmp_path: Path
) -> None:
    for line in pool.run(_refused, 1 if backend == "replica" else 2, str(tmp_path), net(), backend):
        assert re.search(said, line), line
        assert "\n" not in line


def test_parts_hold_only_what_the_model_takes(tmp_path: Path) -> None:
    data = GraphDataModule(graph(), cache_dir=tmp_path)
    runs.trainer(0, 1, str(tmp_path), max_epochs=1).fit(NodeClassifier(runs.model()), datamodule=data)
    assert data.shard.node_inputs == {}
    assert "left out unused attributes: edge_time, era, kind, name, pos" in data.summary()
    prepared, notes = prepare(graph(pos=torch.ones(160, 2, dtype=torch.float16)), node_inputs=("pos", "z"))
    assert prepared.pos.dtype == torch.float32
    assert {"converted pos from float16 to float32", "left out unused attributes: edge_time, era, kind, name"} <= {
        *notes
    }
    with pytest.raises(InputError, match=r"pos: torch.complex64 of shape \(160,\), expected a dense row per node"):
        prepare(graph(pos=torch.ones(160, dtype=torch.complex64)), node_inputs=("pos",))


def test_other_tensors_are_other_parts(tmp_path: Path) -> None:
    folders = []
    for number in (0.0, 1.0):
        changed = graph()
        changed.pos[7, 1] = number
        data = GraphDataModule(changed, cache_dir=tmp_path)
        runs.trainer(0, 1, str(tmp_path), max_epochs=1).fit(NodeClassifier(Points()), datamodule=data)
        folders.append(data.folder)
        shard = Shard.load(data.folder, 0)
        assert np.array_equal(shard.node_inputs["pos"][shard.owned_id.argsort()].numpy(), changed.pos.numpy())
    assert folders[0] != folders[1]


def test_they_are_verified_and_kept_in_parts_if_named(tmp_path: Path) -> None:
    data = GraphDataModule(graph(), partitioner="hash", cache_dir=tmp_path / "cache")
    differences, used = verify(Points(), resolve_backend("comm"), data, world_size=2, double=True)
    assert used == "pyg"
    assert max(one.relative for one in differences.values()) < 1e-10
    named = {"dataset": "tests.lightning.test_node_inputs.graph", "node_inputs": ["pos", "kind"]}
    partition(Graph(**named), Parts(parts=1, out=tmp_path / "parts"))
    trainer = runs.trainer(0, 1, str(tmp_path), max_epochs=1)
    trainer.fit(NodeClassifier(Points()), datamodule=GraphDataModule(store=tmp_path / "parts"))
    with pytest.raises(InputError, match="--node_inputs: the graph has no z"):
        partition(Graph(**{**named, "node_inputs": ["z"]}), Parts(out=tmp_path / "more"))
    partition(Graph(dataset=named["dataset"]), Parts(parts=1, out=tmp_path / "without"))
    with pytest.raises(InputError, match=r"lack pos, kind, .*--node_inputs=\[pos,kind\]"):
        trainer.fit(NodeClassifier(Points()), datamodule=GraphDataModule(store=tmp_path / "without"))


class Optional(nn.Module):
    """Takes places of nodes if there are any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.places, self.conv = nn.Linear(3, 12), GCNConv(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor | None = None) -> Tensor:
        out: Tensor = self.conv(x if pos is None else x + self.places(pos), edge_index)
        return out


class OptionalOfData(Optional):
    """Finds them in the data."""

    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.pos)


def _from_store(rank: int, world_size: int, folder: str, store: str | None) -> list[dict[str, float]] | str:
    options: dict[str, Any] = {"store": store} if store else {"dataset": graph(), "cache_dir": folder}
    history = runs.History()
    try:
        runs.trainer(rank, world_size, folder, callbacks=[history]).fit(
            Plain(Optional()), datamodule=GraphDataModule(**options)
        )
    except InputError as error:
        return str(error)
    return history.epochs


def test_a_store_without_a_tensor_that_the_model_may_take_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for name, node_inputs in (("without", None), ("with", ["pos"])):
        source = Graph(dataset="tests.lightning.test_node_inputs.graph", node_inputs=node_inputs)
        partition(source, Parts(parts=2, out=tmp_path / name))
    for line in pool.run(_from_store, 2, str(tmp_path), str(tmp_path / "without")):
        assert line == (
            f"{tmp_path / 'without'}: the parts lack pos, which the graph has and the model's forward takes; write "
            "them again with pygdist partition --node_inputs=[pos]"
        )
    found, expected = (pool.run(_from_store, 2, str(tmp_path), store) for store in (str(tmp_path / "with"), None))
    assert found == expected
    assert found[0][-1]["val_loss"] > 0


def test_a_model_of_data_is_told_what_a_store_lacks(tmp_path: Path) -> None:
    source = Graph(dataset="tests.lightning.test_node_inputs.graph", node_inputs=["kind"])
    meta = partition(source, Parts(parts=1, out=tmp_path / "parts"))
    assert meta["left_out"] == ["pos"], "not the fields of edges and of the graph"
    trainer = runs.trainer(0, 1, str(tmp_path), max_epochs=1)
    with pytest.warns(UserWarning, match=r"lack pos, .* if the model reads them of its data, .*--node_inputs=\[pos\]"):
        trainer.fit(NodeClassifier(OptionalOfData()), datamodule=GraphDataModule(store=tmp_path / "parts"))
    trainer.fit(NodeClassifier(runs.model()), datamodule=GraphDataModule(store=tmp_path / "parts"))
    with pytest.raises(InputError, match="left_out is 'pos', expected a list of names"):
        check_meta({**meta, "left_out": "pos"}, tmp_path)


def test_a_tampered_store_reads_no_other_files(tmp_path: Path) -> None:
    partition(
        Graph(dataset="tests.lightning.test_node_inputs.graph", node_inputs=["pos"]),
        Parts(parts=1, out=tmp_path / "parts"),
    )
    meta = read_meta(tmp_path / "parts")
    check_meta(meta, tmp_path)
    files = meta["parts"][0]["files"]
    for name in ("node_../../secret", "pos", "node_other"):
        forged = {**meta, "parts": [{**meta["parts"][0], "files": {**files, name: files["node_pos"]}}]}
        with pytest.raises(InputError, match=r"is no array of a store"):
            check_meta(forged, tmp_path)
