"""The scripts of the experiments run on graphs that take no time, and leave what they promise; rows run again."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from experiments import pyg_examples, run, scoreboard
from experiments.harness import Setting, settings_of
from experiments.machine import SOME_FAILED
from experiments.pyg_cases import Case
from experiments.reliability import disks
from pygdist.native import load
from pygdist.report import make_report, read_description
from pygdist.report.description import is_description
from pygdist.report.tables import rerun_command
from pygdist.testing import RankPool
from tests.server import script

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
KERNELS, CATGNN = EXPERIMENTS / "kernels", EXPERIMENTS / "catgnn"


def _python(module: str, *arguments: str, cwd: Path) -> None:
    outcome = script(module, *arguments, folder=cwd)
    assert outcome.code == 0, outcome.out + outcome.err


def _run(script: str, *arguments: str, out: Path) -> list[dict[str, str]]:
    """The rows of the CSV of a script on kernels."""
    return _run_in(KERNELS, script, *arguments, "--threads=1", "--rounds=1", out=out)


def _run_in(folder: Path, script: str, *arguments: str, out: Path) -> list[dict[str, str]]:
    """The rows of the script's CSV."""
    _python(f"experiments.{folder.name}.{script.removesuffix('.py')}", *arguments, "--out", str(out), cwd=out)
    with (out / script.replace(".py", ".csv")).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["epochs", "measure"])
def test_a_folder_without_dgl_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    outcome = script(f"experiments.kernels.{name}", f"--dgl={tmp_path}", folder=tmp_path)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert f"error: --dgl: there is no DGL in {tmp_path}; unpack the wheel of dgl 2.1.0 there" in outcome.err
    assert not any(tmp_path.iterdir())


def test_dgl_takes_turns_with_both_types_of_ids_and_with_a_first_hop_anew(tmp_path: Path) -> None:
    epochs = importlib.import_module("experiments.kernels.epochs")
    options = epochs.parse([f"--dgl={tmp_path}", "--adjacencies=edges"])
    names = {model: [one.name for one in epochs.compared(model, options)] for model in ("GraphSAGE", "GAT", "GIN")}
    assert names == {
        "GraphSAGE": ["pygdist", "pygdist, first hop anew", "DGL int32", "DGL int64", "PyG edges"],
        "GAT": ["pygdist", "DGL int32", "DGL int64", "PyG edges"],
        "GIN": ["pygdist", "PyG edges"],
    }


def test_the_savings_table_adds_and_leaves_out_each_switch() -> None:
    contenders = importlib.import_module("experiments.kernels.epochs").savings("GCN", ["a", "b", "c"])
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


@pytest.mark.slow
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


@pytest.mark.slow
@needs_native
def test_clusters(tmp_path: Path) -> None:
    rows = _run_in(CATGNN, "clusters.py", "--graphs=sbm-sparse", out=tmp_path)
    assert all(1 <= int(row["merged"]) <= int(row["clusters"]) for row in rows)
    assert {row["order"] for row in rows} >= {"as stored", "shuffled"}
    assert (tmp_path / "clusters.png").is_file()


@pytest.mark.slow
@needs_native
def test_throughput(tmp_path: Path) -> None:
    small = ("--methods", "spring", "hash", "--edges", "20000", "--plot-memory")
    rows = _run_in(CATGNN, "throughput.py", *small, out=tmp_path)
    passes = {row["method"]: int(row["passes"]) for row in rows}
    assert passes == {"spring": 2, "hash": 0}
    assert all(float(row["peak_gib"]) >= float(row["imports_gib"]) > 0 for row in rows)
    assert (tmp_path / "throughput.png").is_file()


@needs_native
def test_sampling(tmp_path: Path) -> None:
    tiny = ("--nodes=500", "--edges=9000", "--fan-outs", "3,2", "2", "--batches=2", "--batch-size=50", "--rounds=2")
    rows = _run_in(CATGNN, "sampling.py", *tiny, "--contenders=pygdist", out=tmp_path)
    assert [(row["fan_out"], row["replace"]) for row in rows] == [
        ("3,2", "no"),
        ("3,2", "yes"),
        ("2", "no"),
        ("2", "yes"),
    ]
    for row in rows:
        assert row["threads"] == "1"
        found = float(row["edges_per_batch"]) / float(row["ms_per_batch"]) * 1e3
        assert float(row["edges_per_second"]) == pytest.approx(found, rel=0.5)


@pytest.mark.slow
@needs_native
def test_accuracy(tmp_path: Path) -> None:
    tiny = ("--graphs=generated", "--models=GraphSAGE", "--hidden=8", "--epochs=2", "--every=2", "--seeds=0")
    rows = _run_in(CATGNN, "accuracy.py", *tiny, "--parts", "1", "2", "--fan_out", "2", "2", out=tmp_path)
    assert [(row["parts"], row["partitioner"]) for row in rows] == [("1", ""), ("2", "spring")]
    assert rows[0]["test_acc"] == rows[0]["test_acc_on_parts"]
    assert all(0 < float(row["test_acc"]) < 1 < float(row["train_s"]) * 1e3 for row in rows)


@needs_native
@pytest.mark.exhaustive
def test_averaging(tmp_path: Path) -> None:
    tiny = ("--nodes=500", "--hidden=8", "--hosts=2", "--network=unshaped", "--epochs=2", "--every=2", "--seeds=0")
    tiny += ("--fan_out", "2", "2", "--batch_size=64")
    (row,) = _run_in(CATGNN, "averaging.py", *tiny, out=tmp_path)
    assert (row["averaging"], row["note"]) == ("model", "")
    size = (32 * 2 * 8 + 8) + (8 * 2 * 10 + 10)  # of a GraphSAGE of two layers: both sides' weights, and a bias
    epochs = 2 + 2  # those that do not count, too
    assert float(row["sent_mb"]) == 2 * epochs * size * 4 / 1e6


#: A script of the kind of PyG's examples; it does not run here.
EXAMPLE = """
import argparse
import numpy
import torch
from torch_geometric.nn import GCNConv
from a_package_that_nobody_has import dataset

parser = argparse.ArgumentParser()
parser.add_argument('--hidden-channels', type=int, default=16)
parser.add_argument('--bias', action='store_true')
args = parser.parse_args()
OUT = 3
dataset = dataset('Cora')


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(dataset.num_features, args.hidden_channels, bias=args.bias)
        self.conv2 = GCNConv(args.hidden_channels, OUT)

    def forward(self, x, edge_index):
        out = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        BODY
        return out


model = Net().to(args.device)
"""
VERDICTS = {
    "pass": ("exact", ""),
    "out = out - out.mean(0)": ("refused", "Net would train other numbers with backend '...'"),
    "out = out + torch.tensor(numpy.random.rand(out.size(0), 1))": ("wrong*", "there it draws other random numbers"),
    "assert torch.is_grad_enabled() or type(edge_index) is torch.Tensor, 'a part'": ("crash", "AssertionError: a part"),
    "raise OSError('no disk')": ("not run", "plain PyG: OSError: no disk"),
    "nobody(out)": ("not run", "name 'nobody' is not defined; No module named 'a_package_that_nobody_has'"),
}


@pytest.mark.parametrize("body", VERDICTS)
def test_verdicts_on_examples(body: str, tmp_path: Path, pool: RankPool) -> None:
    (tmp_path / "net.py").write_text(EXAMPLE.replace("BODY", body))
    verdict, reason = VERDICTS[body]
    row = pyg_examples.row(pool, tmp_path, Case(file="net.py", model="Net()"), ["comm"], tmp_path)
    assert (row["model"], row["comm"]) == ("Net", verdict)
    assert reason in row["reason"]


def test_examples_need_a_checkout(tmp_path: Path) -> None:
    outcome = script("experiments.pyg_examples", f"--checkout={tmp_path}", folder=tmp_path)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert f"error: there is no examples/gcn.py in {tmp_path}; give --checkout" in outcome.err


DESCRIBED = [path for path in sorted(EXPERIMENTS.rglob("*.yaml")) if is_description(path)]
TABLES = [path for path in sorted(EXPERIMENTS.rglob("results/*.csv")) if not path.stem.endswith(".ranks")]


@pytest.mark.parametrize("path", DESCRIBED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_experiments_say_how_they_are_measured(path: Path) -> None:
    description = read_description(path)
    assert description.claim
    assert description.again
    how = run.read(path).run
    assert how.get("short"), "there is no short version"
    if "script" in how:
        parser = _parser(".".join((path.parent / how["script"]).relative_to(ROOT).with_suffix("").parts))
        for arguments in (how["arguments"], how["short"]):
            parser.parse_args([str(one) for one in arguments])
    else:
        names = {one.name for one in dataclasses.fields(Setting)}
        assert settings_of(how)
        assert settings_of(how, short=True)
        assert set(how["short"]) - {"grid", "settings"} < names


def _parser(module: str) -> argparse.ArgumentParser:
    return importlib.import_module(module).parser()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_row_of_every_table_has_a_command(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    description = read_description(table.parents[1] / f"{table.stem}.yaml")
    commands = [shlex.split(rerun_command(description, row)) for row in rows]
    last = ["here" if word == "DATA" else word for word in commands[-1]]
    assert run.again(f"{table}:{len(rows)}", Path("here")) == last
    module = commands[0][2]
    parser = _parser(module)
    for python, option, same, *arguments in {tuple(command) for command in commands}:
        assert (python, option, same) == ("python", "-m", module)
        options = parser.parse_args(arguments)  # ends the test with its complaint
        if module == "experiments.run":
            for shaped in (True, False):
                monkeypatch.setattr(run, "why_unshaped", lambda shaped=shaped: None if shaped else "not root")
                settings = {one.name: one for one in run._chosen(_read(*options.experiments), options, Path("work"))}
                assert all(shaped or settings[name].network == "unshaped" for name in options.only)


@functools.cache
def _read(path: Path) -> run.Experiment:
    return run.read(ROOT / path)


def test_the_report_of_what_is_committed_opens_with_the_scoreboard() -> None:
    html = make_report(EXPERIMENTS).html
    sections = re.findall(r"<h2[^>]*>([^<]+)</h2>", html)
    assert sections[0] == "Scoreboard"
    assert set(scoreboard.PAPERS[:4]) < set(sections)
    assert scoreboard.MISSING in html


@pytest.mark.parametrize("table", [one for one in TABLES if one.stem != "scoreboard"], ids=lambda path: path.stem)
def test_rows_say_what_they_were_measured_on(table: Path) -> None:
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row[name] for row in rows for name in ("commit", "date", "cpu", "cores", "torch", "pyg"))


def test_a_row_without_links_runs_again_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "why_unshaped", lambda: None)
    options = run.parser().parse_args(["--only", "ranks 2, network unshaped"])
    settings = run._chosen(run.read(EXPERIMENTS / "foundation" / "hosts.yaml"), options, Path("work"))
    assert [one.network for one in settings if one.name in options.only] == ["unshaped"]


@pytest.mark.parametrize(("code", "kept"), [(0, True), (SOME_FAILED, True), (1, False)])
def test_a_table_with_notes_is_kept_and_one_that_broke_off_is_not(
    code: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "throughput.csv").write_text("method,note\nmetis,exit code -9\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", script)
    problem = run._script(run.read(CATGNN / "throughput.yaml"), [], tmp_path, tmp_path)
    assert (tmp_path / "throughput.csv").exists() == kept
    assert bool(problem) == (code != 0)


def test_plots_of_links_are_left_out_where_there_are_none(tmp_path: Path) -> None:
    table, description = tmp_path / "a.csv", tmp_path / "a.yaml"
    table.write_text("hosts,rate,share\n2,5,\n4,6,\n")
    plots = [{"title": "Share", "y": "share"}, {"title": "Rate", "y": ["rate", "share"]}]
    description.write_text(yaml.safe_dump({"title": "t", "plots": plots}))
    run._leave_out_plots_of_links(description, table)
    found = yaml.safe_load(description.read_text())
    assert [plot["title"] for plot in found["plots"]] == ["Rate"]
    assert "not drawn: Share" in found["differs"]


@pytest.mark.slow
@needs_native
def test_a_row_again_gives_the_same_figures(tmp_path: Path) -> None:
    table = CATGNN / "results" / "replication.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = ("sbm-sparse", "8", "spring")
    number = next(i for i, row in enumerate(rows) if (row["graph"], row["parts"], row["method"]) == wanted)
    _python("experiments.run", f"--row={table}:{number + 1}", f"--out={tmp_path}", cwd=tmp_path)
    with (tmp_path / "replication.csv").open(newline="") as file:
        (again,) = csv.DictReader(file)
    for name in ("graph", "parts", "method", "replication_factor_full", "edge_cut", "nodes_balance"):
        assert again[name] == rows[number][name]


@pytest.mark.slow
@needs_native
def test_a_short_version_leaves_a_table_and_its_description(tmp_path: Path) -> None:
    experiment = str(CATGNN / "spring-whole-part.yaml")
    _python("experiments.run", experiment, "--short", f"--out={tmp_path}", cwd=tmp_path)
    left = {path.name for path in (tmp_path / "catgnn").iterdir()}
    assert left == {"spring-whole-part.csv", "spring-whole-part.yaml", "spring-whole-part.files"}
    assert read_description(tmp_path / "catgnn" / "spring-whole-part.yaml").title.endswith("(short version)")
    with (tmp_path / "catgnn" / "spring-whole-part.csv").open(newline="") as file:
        assert {"commit", "date", "cpu", "torch", "pyg"} <= set(csv.DictReader(file).fieldnames or ())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--row=nothing.csv:1"], "--row: expected TABLE.csv:ROW"),
        ([f"--row={TABLES[0]}:99999"], "has rows 1 to"),
        (["nothing.yaml"], "nothing.yaml"),
        ([str(EXPERIMENTS / "foundation" / "hosts.yaml"), "--only", "ranks 9"], "no setting 'ranks 9'; there are: r"),
        ([str(EXPERIMENTS / "foundation" / "verify.yaml")], "needs real graphs: give --data"),
        ([str(KERNELS / "dgl-grid.yaml")], "needs DGL: give --dgl"),
        (["--dgl=nowhere"], "--dgl: there is no folder"),
        (["--only", "x"], "--only: name the experiment"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, f"--out={tmp_path}"])
    assert run.main() == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_disks(tmp_path: Path) -> None:
    commands = ("--commands", "export", "partition", "--kinds", "file size", "space", "--sizes=2", "--seed=3")
    outcome = script("experiments.reliability.disks", *commands, "--out", str(tmp_path), folder=tmp_path)
    assert outcome.code == 0, outcome.out + outcome.err
    with (tmp_path / "disks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = ["file size", "space"] if disks.is_root() else ["file size"]
    assert Counter((row["command"], row["kind"]) for row in rows) == Counter(
        {(command, kind): 2 for command in ("export", "partition") for kind in kinds}
    )
    assert {row["outcome"] for row in rows} == {"refused", "success"}
    assert all((row["outcome"] == "refused") == row["line"].startswith("pygdist: error: ") for row in rows)


@pytest.mark.parametrize(
    ("codes", "said", "left", "words"),
    [
        ([2], "pygdist: error: full", "", ""),
        ([0], "", "", ""),
        ([-7], "", "", "exit codes [-7]"),
        ([2], "", "", "0 lines of error"),
        ([2], "pygdist: error: No space left on device; make room there", "", "the line names no folder"),
        ([2], "pygdist: error: No space left on device: one of /tmp (0 bytes free); make room there", "", ""),
        ([0], "pygdist: error: full", "", "1 lines of error"),
        ([2, 0], "pygdist: error: full", "", "exit codes [2, 0]"),
        ([2], "Traceback (most recent call last)\npygdist: error: full", "", "traceback"),
        ([2], "pygdist: error: full", "work/y.npy", "work/y.npy looks whole: AssertionError: it differs"),
        ([2], "pygdist: error: full", "work/.y.npy.0123456789ab.partial", ".partial is left"),
        ([2], "pygdist: error: full", "work/model.pt", "work/model.pt looks whole"),
    ],
)
def test_disks_tells_refusals_from_other_outcomes(
    codes: list[int], said: str, left: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    if left:
        (tmp_path / left).write_text("half")
    made = disks.Run(codes, said, {})
    found = disks.what_is_wrong(disks.Command("", ""), made, tmp_path, {"work/y.npy": b"whole"})
    assert words in found
    assert bool(words) == bool(found)
