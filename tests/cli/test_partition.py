"""``pygdist partition``: a table or JSON, and parts that the other commands train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import files, pygdist, torchrun

OWN = """
from dataclasses import dataclass
import numpy as np
from pygdist.partition import Partitioner

@dataclass(frozen=True, kw_only=True)
class EveryOther(Partitioner):
    offset: int = 0
    def assign(self, edges, num_parts):
        return ((np.arange(edges.num_nodes) + self.offset) % num_parts).astype(np.int32)
"""


@pytest.mark.parametrize("method", ["chunk", "hash", "metis"])
def test_a_table_and_parts_to_train_on(method: str, folder: Path, graphs: Path) -> None:
    args = (f"--dataset={graphs / 'good'}", f"--method={method}", "--parts=2", "--out=new/parts")
    outcome = pygdist("partition", *args, folder=folder)
    assert outcome.code == 0, outcome.err
    text = " ".join(outcome.out.split())
    for word in ("120 nodes", "720 edges", "2 parts", "training nodes", "halo rows", method, "replication factor"):
        assert word in text
    assert "--data.store=new/parts" in text
    assert "--trainer.devices=2" in text
    assert not [name for name in files(folder) if "tmp" in name or "lock" in name]
    for rank in torchrun("fit", "--config=run.yaml", "--data.store=new/parts", folder=folder):
        assert rank.code == 0, rank.err
    assert not (folder / "cache").exists()


def test_json_is_alone_on_standard_output(folder: Path, graphs: Path) -> None:
    outcome = pygdist("partition", f"--dataset={graphs / 'good'}", "--parts=3", "--json", folder=folder)
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert meta == json.loads((folder / "parts" / "meta.json").read_text())
    assert (meta["num_parts"], meta["num_nodes"], meta["num_edges"], meta["method"]) == (3, 120, 720, "chunk")
    assert meta["seconds"] >= 0
    assert sum(part["num_owned"] for part in meta["parts"]) == 120


def test_options_reach_dataset_preprocessing_and_method(folder: Path) -> None:
    outcome = pygdist(
        "partition",
        "--dataset=sbm",
        "--dataset_args={num_nodes: 60, num_classes: 3}",
        "--method=hash",
        "--method_args={seed: 5}",
        "--split=[0.6, 0.2, 0.2]",
        "--remove_self_loops=true",
        "--num_classes=5",
        "--json",
        folder=folder,
    )
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert (meta["num_nodes"], meta["num_classes"], meta["arguments"]) == (60, 5, {"seed": 5})
    assert meta["counts"]["train_mask"] == 36


def test_a_partitioner_of_the_users_own_package(folder: Path, graphs: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    args = (f"--dataset={graphs / 'good'}", "--method=mine.EveryOther", "--method_args={offset: 1}", "--json")
    outcome = pygdist("partition", *args, folder=folder, env={"PYTHONPATH": str(folder)})
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert (meta["method"], meta["arguments"]) == ("mine.EveryOther", {"offset": 1})
    (folder / "own.yaml").write_text(
        "data:\n  partitioner:\n    class_path: mine.EveryOther\n    init_args: {offset: 1}\n"
    )
    fit = ("fit", "--config=run.yaml", "--config=own.yaml", "--trainer.max_epochs=1")
    for rank in torchrun(*fit, folder=folder, env={"PYTHONPATH": str(folder)}):
        assert rank.code == 0, rank.err
    metas = [json.loads(path.read_text()) for path in (folder / "cache").glob("*/meta.json")]
    assert [(found["method"], found["arguments"]) for found in metas] == [("mine.EveryOther", {"offset": 1})]
