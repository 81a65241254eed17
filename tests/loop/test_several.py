"""``open_graph``: a loop of the caller's own on several processes repeats that of one process with plain PyG."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch_geometric.nn import GAT, GCN, GCNConv, GraphSAGE, HeteroConv

from pygdist import InputError, open_graph, undistribute
from pygdist.testing import RankPool
from tests.lightning.test_node_inputs import OfData, Points
from tests.lightning.test_node_inputs import graph as graph_with_places
from tests.loop.graphs import masked_graph

MODELS: dict[str, Any] = {
    "GCN, batch norm": lambda: GCN(12, 8, num_layers=2, out_channels=4, norm="batch_norm", bias=False),
    "GAT": lambda: GAT(12, 8, num_layers=2, out_channels=4, heads=2),
    "GraphSAGE, max": lambda: GraphSAGE(12, 8, num_layers=3, out_channels=4, aggr="max"),
}


def _alone(name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(7)
    data, model = masked_graph(), MODELS[name]().double()
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        right = (out.argmax(dim=1) == data.y)[data.test_mask]
        found += [float(loss), float(right.double().mean())]
    return found, model.state_dict()


def trained(
    rank: int, num_ranks: int, folder: str, name: str, backend: str, steps: int, device: str | None = None
) -> tuple[list[float], dict[str, Tensor], Tensor | None]:
    torch.manual_seed(7 + rank)  # the first process decides
    graph = open_graph(masked_graph, backend=backend, cache_dir=folder, device=device)
    model = graph.distribute(MODELS[name]().double())
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(graph.x, graph.edge_index)
        loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)
        loss.backward()
        optimizer.step()
        found += [float(loss), graph.mean(out.argmax(dim=1) == graph.y, graph.test_mask)]
    undistribute(model)
    assert device is None or graph.device == next(model.parameters()).device == torch.device(device)
    return found, {key: value.cpu() for key, value in model.state_dict().items()}, graph.gather(graph.y)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("backend", ["comm", "tensor", "cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_repeats_that_of_one_process(
    name: str, backend: str, num_ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    compare(name, pool.run(trained, num_ranks, str(tmp_path), name, backend, 4))


@pytest.mark.parametrize("backend", ["single", "comm", "tensor"])
def test_one_process_is_not_warned(backend: str, tmp_path: Path) -> None:
    trained(0, 1, str(tmp_path), "GAT", backend, 2)  # writes the parts, and tells what it changed in the graph
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(0, 1, str(tmp_path), "GAT", backend, 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("backend", ["comm", "tensor", "cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loop_on_a_gpu_repeats_that_of_one_process_on_the_host(
    name: str, backend: str, num_ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    compare(name, pool.run(trained, num_ranks, str(tmp_path), name, backend, 4, "cuda:0"))


def compare(name: str, by_rank: list[tuple[list[float], dict[str, Tensor], Tensor | None]]) -> None:
    expected, weights = _alone(name, 4)
    for rank, (found, state, y) in enumerate(by_rank):
        assert found == pytest.approx(expected, rel=1e-9)
        assert list(state) == list(weights)
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9)
        assert (y is None) == (rank > 0)
        assert y is None or torch.equal(y.cpu(), masked_graph().y)


def _with_further_tensors(rank: int, num_ranks: int, folder: str, of_data: bool) -> tuple[list[float], Tensor | None]:
    graph = open_graph(graph_with_places(), cache_dir=folder)
    model = graph.distribute((OfData() if of_data else Points()).double())
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(graph.data) if of_data else model(graph.x, graph.edge_index, graph.pos, kind=graph.kind)
        loss = graph.mean_loss(F.cross_entropy, out, graph.y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    with pytest.raises(AttributeError, match="the graph has no poss; further tensors of its nodes: kind, pos"):
        graph.poss  # noqa: B018
    return found, graph.gather(graph.pos)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("of_data", [False, True])
def test_further_tensors_of_nodes_by_name(of_data: bool, num_ranks: int, pool: RankPool, tmp_path: Path) -> None:
    data, model, expected = graph_with_places(), Points().double(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.pos, kind=data.kind), data.y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for rank, (found, places) in enumerate(pool.run(_with_further_tensors, num_ranks, str(tmp_path), of_data)):
        assert found == pytest.approx(expected, rel=1e-9)
        assert places is None if rank else torch.equal(places, data.pos)


def _copied(rank: int, num_ranks: int, folder: str) -> list[Any]:
    graph = open_graph(masked_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 4, num_layers=2).double())
    averaged = AveragedModel(model)
    out = model(graph.x, graph.edge_index)
    with torch.no_grad():
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        copies = [one(graph.x, graph.edge_index) for one in (copy.deepcopy(model), averaged, loaded)]
    graph.mean_loss(F.cross_entropy, out, graph.y).backward()  # after the copies
    averaged.update_parameters(model)
    said = ""
    try:
        graph.distribute(nn.Sequential(nn.LazyLinear(4), HeteroConv({("a", "to", "a"): GCNConv(-1, 4)})))
    except InputError as error:
        said = str(error)
    return [torch.allclose(one, out, rtol=0, atol=1e-12) for one in copies] + [said]


def test_copies_of_a_model_and_layers_that_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for *equal, said in pool.run(_copied, 2, str(tmp_path)):
        assert equal == [True] * 3
        assert "no backend can run '1' (HeteroConv): it takes rows and edges by type" in said


def _compiled(rank: int, num_ranks: int, folder: str) -> float:
    graph = open_graph(masked_graph, cache_dir=folder)
    torch.manual_seed(7)
    model = graph.distribute(torch.compile(GCN(12, 4, num_layers=2).double(), backend="eager"))
    loss = graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y, graph.train_mask)
    loss.backward()
    return float(loss)


def test_a_model_that_was_compiled_before(pool: RankPool, tmp_path: Path) -> None:
    data = masked_graph()
    torch.manual_seed(7)
    out = GCN(12, 4, num_layers=2).double()(data.x, data.edge_index)[data.train_mask]
    expected = float(F.cross_entropy(out, data.y[data.train_mask]))
    assert pool.run(_compiled, 2, str(tmp_path)) == pytest.approx([expected] * 2, rel=1e-12)


def _of_two_machines(rank: int, num_ranks: int, folder: str) -> tuple[str, float]:
    with mock.patch.dict(os.environ, LOCAL_RANK=str(rank % 2)):
        graph = open_graph(masked_graph, cache_dir=f"{folder}/machine-{rank // 2}")
    return str(graph._shard.folder), graph.mean(torch.ones(len(graph.x)))


def test_each_machine_partitions_into_a_folder_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    opened = pool.run(_of_two_machines, 4, str(tmp_path))
    for rank, (folder, mean) in enumerate(opened):
        assert folder.startswith(f"{tmp_path}/machine-{rank // 2}/")
        assert mean == 1.0


SCRIPT = """
import sys
import warnings
import torch
import torch.nn.functional as F
from torch_geometric.nn import GCN

import pygdist

torch.manual_seed(0)
graph = pygdist.open_graph("sbm", cache_dir=sys.argv[1])
model = graph.distribute(GCN(graph.num_features, 16, num_layers=2, out_channels=graph.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    optimizer.zero_grad()
    out = model(graph.x, graph.edge_index)
    loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)
    loss.backward()
    optimizer.step()
if len(sys.argv) > 2 and graph.rank == 1:
    exec(sys.argv[2])
if graph.rank == 0:
    print(graph.num_ranks, float(loss))
    torch.save(model.state_dict(), sys.argv[1] + "/model.pt")
"""


def _script(tmp_path: Path, num_ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    return subprocess.run(
        [sys.executable, *start, str(path), str(tmp_path), *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_under_torchrun_and_alone(tmp_path: Path, warm_python: None) -> None:
    losses = []
    for num_ranks in (3, 1):
        done = _script(tmp_path, num_ranks)
        assert done.returncode == 0, done.stderr
        ranks, loss = done.stdout.split()
        assert int(ranks) == num_ranks
        losses.append(float(loss))
        assert set(torch.load(tmp_path / "model.pt")) == set(GCN(-1, 16, num_layers=2, out_channels=2).state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path: Path, warm_python: None) -> None:
    done = _script(tmp_path, 3, "raise ValueError('of the user')")
    assert done.returncode != 0
    assert "ValueError: of the user" in done.stderr
