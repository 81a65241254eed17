"""``pygdist generate``: a table or JSON, and a folder that the other commands read."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.commands import assert_mistake, files, pygdist, start

SMALL = ("generate", "reddit-like", "--scale=0.002")


def test_a_table_and_a_folder_to_train_on(folder: Path) -> None:
    outcome = pygdist(*SMALL, "--out=new/graph", folder=folder)
    assert outcome.code == 0, outcome.err
    text = " ".join(outcome.out.split())
    for word in (
        "reddit-like at scale 0.002",
        "466",
        "602",
        "41",
        "229,232",
        "491.9",
        "parallel edges",
        "4.8 MB on disk",
    ):
        assert word in text
    assert "--data.dataset=new/graph" in text
    outcome = pygdist("partition", "--input=new/graph", "--parts=2", "--method=hash", "--json", folder=folder)
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert (meta["num_nodes"], meta["num_edges"], meta["num_classes"], meta["num_features"]) == (466, 229_232, 41, 602)
    assert sum(part["counts"]["train_mask"] for part in meta["parts"]) == 307


def test_fit_takes_the_name(folder: Path) -> None:
    config = (folder / "run.yaml").read_text().replace("in_channels: 12", "in_channels: -1")
    (folder / "run.yaml").write_text(config.replace("out_channels: 4", "out_channels: 41"))
    of_data = ("--data.dataset=reddit-like", "--data.dataset_args.scale=0.002")
    outcome = pygdist("fit", "--config=run.yaml", *of_data, folder=folder)
    assert outcome.code == 0, outcome.err


def test_json_is_alone_on_standard_output_and_again_nothing_happens(folder: Path) -> None:
    options = ("generate", "mag-like", "--scale=0.001", "--seed=3", "--features=false", "--json")
    outcome = pygdist(*options, folder=folder)
    assert outcome.code == 0, outcome.err
    description = json.loads(outcome.out)
    assert (description["name"], description["scale"], description["seed"]) == ("mag-like", 0.001, 3)
    assert {path for path in files(folder) if path.endswith(".npy") and "nodes" in path} == {
        f"mag-like-0.001/nodes/paper/{name}.npy" for name in ("y", "train_mask", "val_mask", "test_mask")
    }
    again = pygdist(*options, folder=folder)
    assert again.out == outcome.out
    assert "exists already" in again.err
    assert "paper cites paper" in " ".join(pygdist(*options[:-1], folder=folder, env={"COLUMNS": "140"}).out.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(
            ("redit-like",), ("there is no generated graph 'redit-like'; choose one of reddit-like",), id="name"
        ),
        pytest.param(("reddit-like", "--scale=1e-6"), ("scale 1e-06", "smallest scale is 0.00018"), id="scale"),
        pytest.param(("reddit-like", "--scale=big"), ("--scale", "float", "big"), id="text"),
        pytest.param(("reddit-like", "--scale=0.001", "--out=."), ("exists and is not a generated graph",), id="taken"),
        pytest.param((), ("name is required",), id="nothing"),
    ],
)
def test_mistakes(args: tuple[str, ...], words: tuple[str, ...], folder: Path) -> None:
    before = files(folder)
    assert_mistake(pygdist("generate", *args, folder=folder), *words)
    assert files(folder) == before


def test_another_folder_is_replaced_on_request_alone(folder: Path) -> None:
    assert pygdist(*SMALL, "--out=graph", folder=folder).code == 0
    assert_mistake(pygdist(*SMALL, "--out=graph", "--seed=1", folder=folder), "graph: holds another graph (seed 0)")
    outcome = pygdist(*SMALL, "--out=graph", "--seed=1", "--overwrite=true", folder=folder)
    assert outcome.code == 0, outcome.err
    assert json.loads((folder / "graph" / "graph.json").read_text())["seed"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_what_is_interrupted_leaves_nothing_whole_looking(number: signal.Signals, tmp_path: Path) -> None:
    process = start("generate", "products-like", "--scale=0.3", "--out=graph", folder=tmp_path)
    try:
        while not list(tmp_path.glob(".graph.tmp-*/edge_index.npy")):
            assert process.is_alive()
            time.sleep(0.02)
        os.kill(process.pid, number)
        process.join(60)
    finally:
        process.kill()
    assert not (tmp_path / "graph").exists()
    if number == signal.SIGINT:
        assert process.exitcode == 130
        assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}
        assert (tmp_path / "err").read_text() == f"pygdist: error: SIGINT reached process {process.pid}\n"
    else:
        outcome = pygdist(*SMALL, "--out=graph", folder=tmp_path)  # clears away what was left
        assert outcome.code == 0, outcome.err
        assert {path.name for path in tmp_path.iterdir()} == {"graph", "out", "err"}
