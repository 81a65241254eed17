"""Mistakes in loops on several processes are refused on all of them, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GCN

from pygdist import InputError, open_graph
from pygdist.backends import HybridBackend
from pygdist.graph import prepare, write_store
from pygdist.testing import RankPool
from tests.loop.graphs import masked_graph


def _of_other_partitions(rank: int, num_ranks: int, folder: str) -> str:
    try:
        graph = open_graph(f"{folder}/{rank}")
    except InputError as error:
        return str(error)
    model = graph.distribute(GCN(12, 4, num_layers=1).double())
    return f"trains: {float(graph.mean_loss(F.cross_entropy, model(graph.x, graph.edge_index), graph.y))}"


@pytest.mark.parametrize("differs", ["partition", "labels", "split"])
def test_parts_of_different_partitions_are_refused(differs: str, pool: RankPool, tmp_path: Path) -> None:
    owner = torch.arange(160) % 2
    for rank in range(2):
        data, notes = prepare(masked_graph())
        if differs == "labels":
            data.y = data.y.roll(rank)
        elif differs == "split":
            data.train_mask = data.train_mask.roll(rank)
        else:
            owner = 1 - owner  # rank 0 and rank 1 both own the even nodes
        folder = tmp_path / str(rank)
        write_store(data, owner.numpy(), folder, num_parts=2, method="mine", arguments={}, notes=notes)
    for said in pool.run(_of_other_partitions, 2, str(tmp_path)):
        assert "the ranks have parts of different partitions, labels or splits" in said


def _refused(rank: int, num_ranks: int, folder: str) -> list[str]:
    said = []
    graph = open_graph(masked_graph, cache_dir=folder)
    nobody = torch.zeros_like(graph.train_mask)
    for call in (
        lambda: open_graph(Data(x=torch.ones(3, 2)), cache_dir=folder),
        lambda: open_graph(masked_graph, backend="replica"),
        lambda: graph.mean_loss(F.cross_entropy, graph.x[:, :4], None),
        lambda: graph.mean_loss(F.cross_entropy, graph.x[:, :4], graph.y, nobody),
        lambda: graph.mean_loss(lambda output, y: output[: len(y) - (rank == 1), 0], graph.x[:, :4], graph.y),
        lambda: graph.mean(graph.y, nobody),
        lambda: open_graph(f"{folder}/nothing"),
        lambda: graph.mean_loss(F.mse_loss, graph.x[:, :1], graph.x[:, 1]),  # torch takes each with each
        lambda: open_graph(masked_graph, backend=HybridBackend(cache_ratio=rank / 2), cache_dir=folder),
        lambda: graph.distribute(GCN(12, 8 + rank, num_layers=2, out_channels=4).double()),
    ):
        try:
            call()
        except InputError as error:
            said.append(str(error))
    return said


def test_mistakes_are_refused_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_refused, 3, str(tmp_path)):
        assert len(said) == 10
        assert "edge_index" in said[0]
        assert "backend 'replica' does not train on the whole graph; use" in said[1]
        assert "no labels" in said[2]
        assert "no node with a label counts on any process" in said[3]
        assert "expected a value for each" in said[4]
        assert "no node on any process" in said[5]
        assert "nothing" in said[6]
        assert "cache_ratio of the backend is 0.0 on rank 0, but 0.5 on rank 1" in said[8]
        assert "hidden_channels of the model is 8 on rank 0, but 9 on rank 1" in said[9]


def _mean_on_rank_0(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(masked_graph, cache_dir=folder)
    model = graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double())
    try:
        for _ in range(2):
            model(graph.x, graph.edge_index)
            if rank == 0:
                graph.mean(graph.y)
    except InputError as error:
        return str(error)
    return ""


def test_a_call_of_one_rank_alone_is_named(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_mean_on_rank_0, 2, str(tmp_path)):
        assert "rank 0: in graph.mean" in said
        assert "none under 'if rank == 0'" in said


def _with_own_buffer(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(masked_graph, cache_dir=folder)
    model = GCN(12, 8, num_layers=2, out_channels=4).double()
    model.register_buffer("mine", torch.ones(3 + rank))
    try:
        graph.distribute(model)
    except InputError as error:
        return str(error)
    return ""


def test_buffers_of_other_shapes_are_refused_as_rank_0_gives_its_own(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_with_own_buffer, 2, str(tmp_path)):
        assert "buffer 'mine' is float32 of shape (3,) on rank 0, but float32 of shape (4,) on rank 1" in said


def _of_other_options(rank: int, num_ranks: int, folder: str) -> str:
    graph = open_graph(masked_graph, cache_dir=folder)
    try:
        graph.distribute(nn.Sequential(nn.Linear(12, 4), nn.ModuleList([APPNP(2, 0.1 * (1 + rank))])))
    except InputError as error:
        return str(error)
    return ""


def test_options_of_layers_are_compared(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_of_other_options, 2, str(tmp_path)):
        assert "alpha of module '1.0' is 0.1 on rank 0, but 0.2 on rank 1" in said


MISTAKES = {
    "pygdist.open_graph('sbm').mean_loss(len, None, None)": "mean_loss: the graph has no labels (data.y)",
    "pygdist.open_graph('nowhere')": "dataset 'nowhere': neither a folder",
    "pygdist.open_graph('sbm', backend='replica')": "open_graph: backend 'replica' does not train on the whole",
}


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES.items(), ids=["loss", "data", "backend"])
def test_a_mistake_is_told_in_one_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(f"import pygdist\n{line}\n")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "nowhere" in line else []
    told = subprocess.run([sys.executable, *start, str(path)], capture_output=True, text=True, timeout=120, check=False)
    said = [one for one in told.stderr.splitlines() if one.startswith("pygdist: error: ")]
    assert len(said) == 1, told.stderr
    assert said[0].startswith(f"pygdist: error: {words}")
    assert told.returncode == (1 if start else 2)  # torchrun's own
    assert 'wrong.py", line' not in told.stderr, "a traceback of the script"


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_of_a_launcher_that_know_nothing_of_each_other_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "1")
    assert open_graph(masked_graph, cache_dir=tmp_path).num_ranks == 1
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=rf"2 processes were started \({name}\), but not by torchrun: WORLD_SIZE"):
        open_graph(masked_graph, cache_dir=tmp_path)


@pytest.mark.parametrize("rank", ["x", "2"])
def test_ranks_of_a_launcher_that_cannot_be_are_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="the environment variable RANK is"):
        open_graph(masked_graph)


def test_tensors_that_the_parts_lack_are_named(tmp_path: Path) -> None:
    whole, store = masked_graph(), tmp_path / "parts"
    whole.pos = torch.rand(160, 3)
    data, notes = prepare(whole, node_inputs=[])
    write_store(data, torch.zeros(160).long().numpy(), store, num_parts=1, method="mine", arguments={}, notes=notes)
    graph = open_graph(store)
    with pytest.raises(AttributeError, match=r"the parts lack pos, .* pygdist partition --node_inputs=\[pos\]"):
        _ = graph.pos


def test_variables_of_a_launcher_that_lack_some_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"WORLD_SIZE is set, but not RANK.*: start the script by torchrun"):
        open_graph(masked_graph)
