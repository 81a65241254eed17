"""The scripts of the experiments run on graphs that take no time, and leave what they promise."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pygdist.native import load

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
KERNELS, CATGNN = EXPERIMENTS / "kernels", EXPERIMENTS / "catgnn"


def _run(script: str, *arguments: str, out: Path) -> list[dict[str, str]]:
    """The rows of the CSV of a script on kernels."""
    return _run_in(KERNELS, script, *arguments, "--threads=1", "--rounds=1", out=out)


def _run_in(folder: Path, script: str, *arguments: str, out: Path) -> list[dict[str, str]]:
    """The rows of the script's CSV."""
    paths = os.pathsep.join(path for path in sys.path if path)
    outcome = subprocess.run(
        [sys.executable, str(folder / script), *arguments, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        cwd=out,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    with (out / script.replace(".py", ".csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def test_measure(tmp_path: Path) -> None:
    tiny = ("--graph=grid", "--degrees=6", "--nodes=60", "--features=3")
    rows = _run("measure.py", *tiny, "--operations", "sum", "max", "GATConv", "--max-gib=0.00001", out=tmp_path)
    assert {"cpu", "l3", "threads", "torch", "edges", "degree", "copy_gbs", "min_s", "spread"} <= set(rows[0])
    found = {(row["operation"], row["pass"], row["contender"]): row for row in rows}
    ours = found["sum", "forward+backward", "pygdist"]
    assert float(ours["ratio"]) == 1
    assert float(ours["gather_gbs"]) == pytest.approx(2 * 360 * 3 * 4 / float(ours["median_s"]) / 1e9)
    assert float(ours["share_of_copy"]) == pytest.approx(float(ours["gather_gbs"]) / float(ours["copy_gbs"]))
    assert float(found["max", "forward", "torch mm reduce"]["ratio"]) > 0
    assert found["sum", "forward", "PyG edge list"]["note"] == ""
    assert found["max", "forward+backward", "PyG edge list"]["note"].startswith("not run: needs")
    assert found["GATConv", "forward+backward", "PyG"]["median_s"] == ""
    assert {path.name for path in tmp_path.iterdir()} == {"measure.csv", "ratio.png", "gather.png"}


def test_bounds(tmp_path: Path) -> None:
    rows = _run("bounds.py", "--nodes=60", "--edges=600", "--features", "3", "20", "--blocks=3", out=tmp_path)
    assert [(row["features"], row["rows_from"]) for row in rows][-2:] == [
        ("20", "the graph's own sources"),
        ("20", "3 blocks of sources"),
    ]
    assert len(rows) == 2 * 7
    for row in rows:
        assert float(row["gather_gbs"]) == pytest.approx(600 * int(row["features"]) * 4 / float(row["seconds"]) / 1e9)


def test_epochs(tmp_path: Path) -> None:
    tiny = ("--nodes=300", "--edges=3000", "--models=GraphSAGE", "--adjacencies=edges", "--epochs=1")
    rows = _run("epochs.py", *tiny, out=tmp_path)
    assert [row["contender"] for row in rows] == ["pygdist", "PyG edges"]
    for row in rows:
        assert row["note"] == ""
        assert float(row["median_s"]) > 0
        assert float(row["loss_difference"]) < 1e-5
        assert float(row["peak_gib"]) - float(row["imports_gib"]) == pytest.approx(float(row["beyond_imports_gib"]))
    with (tmp_path / "epochs-all.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3  # two epochs of warm-up, one that counts
    assert (tmp_path / "epochs.png").is_file()


def test_the_savings_table_adds_and_leaves_out_each_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))
    contenders = importlib.import_module("epochs").savings("GCN", ["a", "b", "c"])
    on = {one.name: [flag.split(".")[-1] for flag in one.arguments if flag.endswith("true")] for one in contenders}
    assert on == {
        "pygdist": ["a=true", "b=true", "c=true"],
        "all off": [],
        "+ a": ["a=true"],
        "+ b": ["a=true", "b=true"],
        "all but a": ["b=true", "c=true"],
        "all but b": ["a=true", "c=true"],
        "all but c": ["a=true", "b=true"],
    }


needs_native = pytest.mark.skipif(load() is None, reason="the streaming partitioners need the native library")


@needs_native
def test_ten_million_edges_through_the_command_line(tmp_path: Path) -> None:
    peaks = []
    for edges in (2_500_000, 10_000_000):
        small = ("--nodes=600000", f"--edges={edges}", "--parts=32", f"--folder={tmp_path}")
        (row,) = _run_in(CATGNN, "billion.py", *small, out=tmp_path)  # looks for a sample of the edges in the parts
        found = row["method"], row["num_parts"], row["num_nodes"], row["num_edges"]
        assert found == ("spring", "32", "600000", str(edges))
        assert 1 < float(row["replication_factor_full"]) < 32
        assert float(row["nodes_balance"]) < 1.3
        assert [path.name for path in tmp_path.iterdir()] == ["billion.csv"]
        peaks.append(float(row["peak_gib"]) * 2**30)
    # all edges more would be 60 MB as they lie on disk, and 120 MB as they are worked on
    assert peaks[1] - peaks[0] < 50e6


@needs_native
def test_replication(tmp_path: Path) -> None:
    methods = ("metis", "spring", "2ps-l", "hdrf", "libra", "powergraph", "dbh", "grid", "random", "hash")
    rows = _run_in(CATGNN, "replication.py", "--graphs=sbm-sparse", "--parts=4", "--methods", *methods, out=tmp_path)
    found = {row["method"]: float(row["replication_factor_full"]) for row in rows}
    assert list(found) == list(methods)
    assert sorted(found, key=lambda name: found[name])[:2] == ["metis", "spring"]
    assert (tmp_path / "replication.png").is_file()


@needs_native
def test_clusters(tmp_path: Path) -> None:
    rows = _run_in(CATGNN, "clusters.py", "--graphs=sbm-sparse", out=tmp_path)
    assert all(1 <= int(row["merged"]) <= int(row["clusters"]) for row in rows)
    assert {row["order"] for row in rows} >= {"as stored", "shuffled"}
    assert (tmp_path / "clusters.png").is_file()


@needs_native
def test_throughput(tmp_path: Path) -> None:
    small = ("--methods", "spring", "hash", "--edges", "20000", "--plot-memory")
    rows = _run_in(CATGNN, "throughput.py", *small, out=tmp_path)
    passes = {row["method"]: int(row["passes"]) for row in rows}
    assert passes == {"spring": 2, "hash": 0}
    assert all(float(row["peak_gib"]) >= float(row["imports_gib"]) > 0 for row in rows)
    assert (tmp_path / "throughput.png").is_file()
