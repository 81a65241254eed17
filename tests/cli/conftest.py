"""A small graph in several states of health, a configuration, and one trained run that many tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from pygdist.graph import degree_corrected_sbm, save_npy
from tests.cli.commands import Outcome, pygdist

CONFIG = """\
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 3
  enable_progress_bar: false
  enable_model_summary: false
model:
  model:
    class_path: torch_geometric.nn.GCN
    init_args: {in_channels: 12, hidden_channels: 8, num_layers: 2, out_channels: 4}
  backend: comm
data:
  dataset: DATASET
  partitioner: hash
  cache_dir: cache
"""


def graph() -> Data:
    """Ids in no order that a partitioner would keep."""
    return degree_corrected_sbm(120, num_classes=4, avg_degree=6, num_features=12, seed=3)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of ``.npy`` arrays: ``good``, and one for each thing that may be wrong with a graph."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("good", "nan", "edge", "label", "negative", "one-node", "many-labels"):
        data = graph()
        if name == "nan":
            data.x[17, 3] = float("nan")
        elif name == "edge":
            data.edge_index[0, 5] = 120
        elif name in ("label", "negative"):
            data.y[3] = 11 if name == "label" else -7
        elif name == "one-node":
            data = Data(x=torch.ones(1, 12), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.zeros(1).long())
        elif name == "many-labels":
            data.y = torch.nn.functional.one_hot(data.y, 4).float()
            data.y[0] = 1  # rows with a single 1 would be one class each
        save_npy(data, folder / name)
    return folder


@pytest.fixture
def folder(tmp_path: Path, graphs: Path) -> Path:
    """A folder of a user: ``run.yaml`` trains on the good graph."""
    (tmp_path / "run.yaml").write_text(CONFIG.replace("DATASET", str(graphs / "good")))
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, graphs: Path) -> tuple[Path, Outcome]:
    """The folder of a finished run on one process, and what the command said."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.yaml").write_text(CONFIG.replace("DATASET", str(graphs / "good")))
    outcome = pygdist("fit", "--config=run.yaml", folder=folder)
    assert outcome.code == 0, outcome.err
    return folder, outcome


@pytest.fixture(scope="session")
def checkpoint(trained: tuple[Path, Outcome]) -> Path:
    """The last checkpoint of the trained run."""
    return trained[0] / "runs" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, graphs: Path) -> Path:
    """The good graph in three parts."""
    folder = tmp_path_factory.mktemp("store")
    outcome = pygdist("partition", f"--dataset={graphs / 'good'}", "--parts=3", "--out=parts", folder=folder)
    assert outcome.code == 0, outcome.err
    return folder / "parts"
