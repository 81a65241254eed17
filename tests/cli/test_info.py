"""``pygdist info``: what a partitioned graph or a checkpoint holds, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCN

from pygdist import checkpoints
from pygdist.graph import write_store
from pygdist.testing import random_graph
from tests.cli.commands import Outcome, assert_mistake, pygdist


@pytest.fixture
def store(tmp_path: Path) -> Path:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    return tmp_path / "store"


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": value for name, value in GCN(5, 4, num_layers=1).state_dict().items()}
    checkpoints.write({"state_dict": state, "epoch": 3, "global_step": 12}, path)
    return state


def test_a_partitioned_graph(store: Path) -> None:
    data = random_graph("directed")[0]
    outcome = pygdist("info", str(store), "--json", folder=store.parent)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert (facts["nodes"], facts["edges"], facts["partitioner"]) == (data.num_nodes, data.num_edges, "test")
    assert sum(one["nodes"] for one in facts["parts"]) == data.num_nodes
    assert sum(one["edges"] for one in facts["parts"]) == data.num_edges
    read = sum(path.stat().st_size for path in store.glob("part_*/*.npy"))
    assert facts["size_mib"] == pytest.approx(read / 2**20)


def test_a_partitioned_graph_for_people(store: Path) -> None:
    outcome = pygdist("info", "store", folder=store.parent)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "store: partitioned graph"
    assert f"  nodes: {random_graph('directed')[0].num_nodes}" in lines
    assert lines[-3].split() == ["part", "nodes", "halo", "rows", "edges", "training", "nodes", "size", "mib"]
    assert [line.split()[0] for line in lines[-2:]] == ["0", "1"]


def test_the_folder_of_a_run_is_none(trained: tuple[Path, Outcome]) -> None:
    for name in ("runs", "runs/version_0"):
        outcome = pygdist("info", name, folder=trained[0])
        assert_mistake(outcome, f"{name}: holds checkpoints", "such as runs/version_0/checkpoints/last.ckpt")


def test_a_checkpoint_names_its_run(trained: tuple[Path, Outcome]) -> None:
    outcome = pygdist("info", "runs/version_0/checkpoints/last.ckpt", folder=trained[0])
    assert [line.strip() for line in outcome.out.splitlines()[1:5]] == [
        "model: GCN", "task: NodeClassifier", "backend: comm", "processes: 1",
    ]  # fmt: skip


def test_a_checkpoint(tmp_path: Path) -> None:
    state = _checkpoint(tmp_path / "some.ckpt")
    outcome = pygdist("info", "some.ckpt", "--json", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert (facts["epoch"], facts["step"], facts["resumes"]) == (3, 12, False)
    assert facts["parameters"] == sum(value.numel() for value in state.values())
    assert {f"model.{one['name']}": one["shape"] for one in facts["tensors"]} == {
        name: list(value.shape) for name, value in state.items()
    }
    shown = pygdist("info", "some.ckpt", folder=tmp_path)
    assert "  resumes: no" in shown.out
    assert "convs.0.lin.weight" in shown.out


@pytest.mark.parametrize("name", ["nothing", "damaged", "empty"])
def test_mistakes_are_told_in_one_line(name: str, store: Path) -> None:
    folder = store.parent
    (folder / "empty").mkdir()
    (folder / "damaged").write_text("no checkpoint")
    assert_mistake(pygdist("info", name, folder=folder), name)
