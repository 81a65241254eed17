"""pygdist imports, trains and explains what is missing where only its own requirements are installed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.core import PROJECT, make_site, required, run_with

OPTIONAL = {"matplotlib", "pandas", "plotly", "pymetis", "pyarrow", "safetensors", "scipy", "tensorboard", "ogb"}
FIT = [
    "--data.dataset=sbm", "--data.dataset_args.num_nodes=60", "--model.model=torch_geometric.nn.GCN",
    "--model.model.in_channels=-1", "--model.model.hidden_channels=4", "--model.model.num_layers=2",
    "--model.model.out_channels=10", "--trainer.max_epochs=2", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip

IMPORTS = """
import importlib, json, pkgutil, sys
import pygdist

missing = {}
for module in pkgutil.walk_packages(pygdist.__path__, "pygdist."):
    if module.name.endswith("libpygdist_native"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps(missing))
"""

# commands one after the other, since importing takes seconds
COMMANDS = """
import contextlib, io, json, sys
from pygdist.cli import main

said = []
for command in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(command)
    said.append((code, err.getvalue()))
print(json.dumps(said))
"""

PLOTS = """
import sys
from pathlib import Path

import numpy as np
from pygdist.comm import Span
from pygdist.graph import EdgeStream
from pygdist.lightning.timeline import draw
from pygdist.partition import partition_graph
from pygdist.partition.plot import plot_traffic
from pygdist.graph import load_graph

meta = partition_graph(load_graph("sbm", num_nodes=60), "parts", num_parts=2, partitioner="hash")
for draw_one in (lambda: plot_traffic(meta), lambda: draw([[Span("compute", "", 0, 1)]], Path("line.png"))):
    try:
        draw_one()
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("core") / "site")


def test_the_core_requires_no_optional_package() -> None:
    assert not OPTIONAL & required().keys()


def test_extras_name_what_they_bring() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"metis", "tensorboard", "plot", "datasets", "all"} <= extras.keys()
    assert "sparse" not in extras, "no index has wheels of torch_sparse"
    (everything,) = (Requirement(text).extras for text in extras["all"])
    assert everything == extras.keys() - {"all", "dev", "docs", "notebook", "test"}


@pytest.mark.slow
def test_every_module_is_imported_without_optional_packages(site: Path, tmp_path: Path) -> None:
    outcome = run_with(site, "-c", IMPORTS, folder=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    missing = json.loads(outcome.stdout.splitlines()[-1])
    assert missing in ({}, {"pygdist.kernels._triton_kernels": "triton"})  # which comes with torch for CUDA


@pytest.mark.slow
def test_a_run_logs_to_csv_without_tensorboard_and_what_is_missing_is_named(site: Path, tmp_path: Path) -> None:
    board = ["--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.save_dir=logs"]
    commands = {
        "fit": ["fit", *FIT],
        "TensorBoardLogger needs tensorboard: pip install 'pygdist[tensorboard]'": ["fit", *FIT, *board],
        "partitioner 'metis' needs pymetis: pip install 'pygdist[metis]'": ["fit", *FIT, "--data.partitioner=metis"],
        "dataset 'Reddit' needs scipy: pip install 'pygdist[datasets]'": [
            "partition", "--dataset=Reddit", "--dataset_args.root=reddit", "--parts=2"
        ],
        "dataset 'ogbn-arxiv' needs ogb: pip install 'pygdist[ogb]'": [
            "partition", "--dataset=ogbn-arxiv", "--parts=2"
        ],
        "writing .safetensors needs safetensors: pip install 'pygdist[safetensors]'": [
            "export", "runs/version_0/checkpoints/last.ckpt", "model.safetensors"
        ],
        "a report needs plotly: pip install 'pygdist[report]'": ["report", ".", "-o", "report.html"],
    }  # fmt: skip
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "table.yaml").write_text("title: T\npaper: P\nplots: [{title: t, kind: bar, x: a, y: b}]\n")
    raw = tmp_path / "reddit" / "raw"
    raw.mkdir(parents=True)
    for name in ("reddit_data.npz", "reddit_graph.npz"):
        (raw / name).touch()
    outcome = run_with(site, "-c", COMMANDS, json.dumps(list(commands.values())), folder=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    said = json.loads(outcome.stdout.splitlines()[-1])
    assert said[0][0] == 0, said[0][1]
    for (code, text), line in list(zip(said, commands, strict=True))[1:]:
        assert (code, line in text.splitlines()[-1], "Traceback" in text) == (2, True, False), text
    with (tmp_path / "runs" / "version_0" / "metrics.csv").open() as lines:
        assert [row["epoch"] for row in csv.DictReader(lines) if row["train_loss"]] == ["0", "1"]
    assert list(tmp_path.rglob("events.out.tfevents*")) == []


@pytest.mark.slow
def test_plots_name_what_is_missing(site: Path, tmp_path: Path) -> None:
    outcome = run_with(site, "-c", PLOTS, folder=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-2:] == [
        "a plot needs matplotlib: pip install 'pygdist[plot]'",
        "the picture of a timeline needs matplotlib: pip install 'pygdist[plot]'",
    ]
