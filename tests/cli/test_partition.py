"""``pygdist partition``: a table or JSON, and parts that the other commands train on."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pygdist.commands.partition import next_step
from pygdist.native import load
from tests.cli.commands import assert_mistake, files, pygdist, torchrun

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_replicas_to_train_on(folder: Path, graphs: Path) -> None:
    args = ("partition", f"--dataset={graphs / 'good'}", "--parts=2")
    outcome = pygdist(*args, "--placement=replicas", "--json", folder=folder)
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert (meta["placement"], meta["num_hops"], meta["num_edges"]) == ("replicas", 1, 720)
    for rank in torchrun("fit", "--config=run.yaml", "--data.store=parts", "--trainer.max_epochs=1", folder=folder):
        assert rank.code == 0, rank.err
    outcome = pygdist(*args, "--hops=2", "--out=two", folder=folder)
    assert outcome.code == 0, outcome.err
    assert "halo rows by hop: " in outcome.out
    assert json.loads((folder / "two" / "meta.json").read_text())["placement"] == "replicas"
    assert_mistake(pygdist(*args, folder=folder), "parts: holds another store (placement differ)")
    assert_mistake(
        pygdist(*args, "--hops=2", "--placement=nodes", "--out=no", folder=folder),
        "allows num_hops up to 1",
    )
    assert_mistake(pygdist(*args, "--placement=halves", "--out=no", folder=folder), "placement")
    assert not (folder / "no").exists()


@pytest.mark.slow
def test_parts_of_edges(folder: Path, graphs: Path) -> None:
    args = ("partition", f"--dataset={graphs / 'good'}", "--parts=2", "--placement=edges")
    outcome = pygdist(*args, folder=folder)
    assert outcome.code == 0, outcome.err
    assert "libra: replication factor 1." in outcome.out
    assert re.search(
        r"\d+ nodes are split \(\d+\.\d%\); rows in a hop: \d+ up to roots, \d+ down to leaves", outcome.out
    )
    said = "needs a method that assigns edges to parts, and 'metis' assigns nodes"
    assert_mistake(pygdist(*args, "--method=metis", "--out=no", folder=folder), said)
    auto = [*args[:2], "--parts=auto", "--device_memory=1", args[3], "--out=no"]
    assert_mistake(pygdist(*auto, folder=folder), "needs a number of parts")
    assert not (folder / "no").exists()
    ranks = torchrun("fit", "--config=run.yaml", "--data.store=parts", folder=folder)
    assert all(rank.code != 0 for rank in ranks)
    said = "backend 'comm' needs placement nodes, but the graph was partitioned with placement edges"
    assert said in "".join(rank.err for rank in ranks)


@pytest.mark.parametrize("seed", [("--method_args={seed: 5}",), ("--method.seed=5",), ("--method.seed", "5")])
def test_options_reach_dataset_preprocessing_and_method(seed: tuple[str, ...], folder: Path) -> None:
    outcome = pygdist(
        "partition",
        "--dataset=sbm",
        "--dataset_args={num_nodes: 60, num_classes: 3}",
        "--method=hash",
        *seed,
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


EDGES = np.random.default_rng(0).integers(0, 50, (2, 400))
INPUT = ("partition", "--input=edges.txt")
needs_native = pytest.mark.skipif(load() is None, reason="reading text needs the native library")


@pytest.fixture
def edges(folder: Path) -> Path:
    """A list of edges, and features and labels that go with it."""
    np.savetxt(folder / "edges.txt", EDGES.T, fmt="%d", header="FromNodeId ToNodeId")
    np.save(folder / "x.npy", np.random.default_rng(1).random((50, 12), dtype=np.float32))
    np.save(folder / "y.npy", np.arange(50) % 3)
    return folder


@needs_native
def test_a_file_of_edges(edges: Path) -> None:
    outcome = pygdist(*INPUT, "--method=spring", "--parts=3", "--out=parts", "--json", folder=edges)
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert meta == json.loads((edges / "parts" / "meta.json").read_text())
    assert (meta["method"], meta["num_parts"], meta["num_nodes"], meta["num_edges"]) == ("spring", 3, 50, 400)
    for name in (
        "replication_factor", "replication_factor_full", "edge_cut", "seconds", "edges_per_second", "peak_rss_bytes",
        "num_clusters", "num_merged_clusters",
    ):  # fmt: skip
        assert meta[name] > 0, name
    # the figures by hand, from the parts
    part = np.empty(50, dtype=np.int64)
    for p in range(3):
        n_id = np.load(edges / "parts" / f"part_{p}" / "n_id.npy")
        part[n_id[: meta["parts"][p]["num_owned"]]] = p
    cut = part[EDGES[0]] != part[EDGES[1]]
    assert meta["edge_cut"] == cut.sum()
    copies = {(int(u), int(part[v])) for u, v in EDGES[:, cut].T}
    assert meta["replication_factor_full"] == pytest.approx(1 + len(copies) / 50)


@needs_native
def test_files_are_trained_on(edges: Path) -> None:
    args = ("--features=x.npy", "--labels=y.npy", "--method=hdrf", "--out=parts", "--symmetrize=true")
    outcome = pygdist(*INPUT, *args, folder=edges)
    assert outcome.code == 0, outcome.err
    for rank in torchrun("fit", "--config=run.yaml", "--data.store=parts", "--trainer.max_epochs=1", folder=edges):
        assert rank.code == 0, rank.err


@needs_native
def test_as_few_parts_as_fit(edges: Path) -> None:
    args = ("--parts=auto", "--features=x.npy", "--method=chunk", "--json")
    outcome = pygdist(*INPUT, *args, "--device_memory=0.00002", folder=edges)  # 21 kB, of which 7 are for the graph
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert meta["num_parts"] > 1
    largest = max(one["num_owned"] * 75 + one["num_halo"] * 56 + one["num_edges"] * 12 for one in meta["parts"])
    assert largest <= 0.00002 * 2**30 / 3
    assert_mistake(pygdist(*INPUT, *args, "--device_memory=1e-6", "--out=no", folder=edges), "parts do not help")
    assert_mistake(pygdist(*INPUT, *args, "--out=no", folder=edges), "--device_memory")
    assert not (edges / "no").exists()


@needs_native
def test_mistakes_in_files(edges: Path) -> None:
    (edges / "bad.txt").write_text("0 1\n1 2\nx y\n")
    assert_mistake(pygdist("partition", "--input=bad.txt", folder=edges), "bad.txt: line 3 is 'x y'")
    assert_mistake(pygdist(*INPUT, "--num_nodes=49", folder=edges), "edges.txt: line", "has id 49")
    assert_mistake(pygdist(*INPUT, "--labels=x.npy", "--features=y.npy", folder=edges), "y.npy")
    assert_mistake(pygdist("partition", "--input=absent.txt", folder=edges), "absent.txt: there is no such file")
    assert_mistake(pygdist(*INPUT, "--hops=0", folder=edges), "num_hops is 0")
    assert_mistake(pygdist("partition", "--dataset=sbm", "--features=x.npy", folder=edges), "--features goes with")
    assert not (edges / "parts").exists()
    assert not [name for name in files(edges) if "tmp" in name or "lock" in name]


def test_columns_and_names(folder: Path, graphs: Path, checkpoint: Path) -> None:
    edges = np.load(graphs / "good" / "edge_index.npy")
    lines = [f"{number};n{v};1;n{u}" for number, (u, v) in enumerate(edges.T.tolist())]
    (folder / "edges.csv").write_text("\n".join(["Nr;Ziel;weight;Quelle", *lines, ""]))
    (folder / "names.txt").write_text("".join(f"n{node}\n" for node in range(120)))
    given = ("partition", "--input=edges.csv", f"--features={graphs / 'good' / 'x.npy'}", "--parts=1")
    columns = "--columns=source=Quelle,target=Ziel,attributes=Nr"
    assert_mistake(pygdist(*given, folder=folder), "edges.csv: the first line 'Nr;Ziel;weight;Quelle'", "columns")
    assert_mistake(
        pygdist(*given, f"{columns}+Num", folder=folder), "no column 'Num'; its columns are Nr, Ziel, weight"
    )
    assert_mistake(pygdist(*given, columns, folder=folder), "edges.csv: ids are names", "give --names=FILE")
    assert_mistake(pygdist("partition", "--dataset=sbm", columns, folder=folder), "--columns goes with --input")
    assert not (folder / "parts").exists()
    outcome = pygdist(*given, columns, "--names=names.txt", folder=folder)
    assert outcome.code == 0, outcome.err
    assert "edge weights are from column weight" in outcome.err
    assert np.load(folder / "parts" / "part_0" / "edge_attr.npy").shape == (edges.shape[1], 1)
    predictions = []
    for data in (f"--data.dataset={graphs / 'good'}", "--data.store=parts"):
        args = (
            "--config=run.yaml",
            f"--ckpt_path={checkpoint}",
            data,
            "--trainer.devices=1",
            "--predictions.path=y.npy",
        )
        outcome = pygdist("predict", *args, folder=folder)
        assert outcome.code == 0, outcome.err
        predictions.append(np.load(folder / "y.npy"))
    np.testing.assert_array_equal(*predictions)  # all weights are 1
    assert "y.npy: the id of the node of row i is the name in line i + 1 of parts/ids.txt" in outcome.err
    assert (folder / "parts" / "ids.txt").read_text() == (folder / "names.txt").read_text()


@pytest.mark.slow
@needs_native
def test_a_full_disk(edges: Path) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    command = [sys.executable, "-m", "pygdist.cli", *INPUT, "--method=hash"]
    paths = os.pathsep.join(path for path in sys.path if path)
    outcome = subprocess.run(
        command, cwd=edges, env={**os.environ, "PYTHONPATH": paths}, preexec_fn=limited, capture_output=True, text=True
    )  # fmt: skip
    assert outcome.returncode == 2, outcome.stderr
    assert "could not be written" in outcome.stderr.splitlines()[-1]
    assert not [name for name in files(edges) if name.startswith(("parts", "."))]


@pytest.mark.parametrize(
    ("placement", "devices", "words"),
    [
        ("nodes", None, "train on it with --data.store=parts --trainer.devices=8"),
        ("nodes", 8, "train on it with --data.store=parts --trainer.devices=8"),
        ("nodes", 4, "the graph needs 8 devices of this size .* partition it again with --placement=replicas"),
        ("replicas", 4, "train the 8 parts on 4 devices .* --model.backend=replica --trainer.strategy=model_averaging"),
    ],
)
def test_the_next_step_fits_parts_and_devices(placement: str, devices: int | None, words: str) -> None:
    assert re.match(words, next_step({"num_parts": 8, "placement": placement}, Path("parts"), devices))
