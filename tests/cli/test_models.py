"""Models of users that are not quite what a classifier expects: some run, the others are told so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygdist.graph import save_npy
from tests.cli.commands import assert_mistake, pygdist, torchrun
from tests.cli.conftest import graph

_MODELS = """
from torch import nn
from torch_geometric.nn import SAGEConv


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.spare = SAGEConv(12, 4), nn.Linear(3, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class TakesData(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 4)

    def forward(self, data):
        return self.conv(data.x, data.edge_index)


class TakesRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 4)

    def forward(self, rows):
        return self.conv(rows, rows)
"""


@pytest.fixture
def models(folder: Path) -> Path:
    (folder / "mine.py").write_text(_MODELS)
    text = (folder / "run.yaml").read_text()
    start, end = text.index("    class_path"), text.index("  backend")
    (folder / "run.yaml").write_text(text[:start] + "    class_path: MODEL\n" + text[end:])
    return folder


def _use(model: str, folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(path.read_text().replace("MODEL", model))


@pytest.mark.slow
def test_unused_parameters_are_told_and_trained_when_asked(models: Path) -> None:
    _use("mine.Spare", models)
    environment = {"PYTHONPATH": str(models)}
    told = torchrun("fit", "--config=run.yaml", folder=models, env=environment)
    assert_mistake(told, "the loss does not depend on some parameters", "graph_ddp_find_unused_parameters_true")
    strategy = "--trainer.strategy=graph_ddp_find_unused_parameters_true"
    for rank in torchrun("fit", "--config=run.yaml", strategy, folder=models, env=environment):
        assert rank.code == 0, rank.err


@pytest.mark.parametrize("command", ["fit", "verify"])
def test_a_forward_of_another_kind(command: str, models: Path) -> None:
    _use("mine.TakesRows", models)
    outcome = pygdist(command, "--config=run.yaml", folder=models, env={"PYTHONPATH": str(models)})
    assert_mistake(outcome, "TakesRows.forward cannot be called as model(x, edge_index)")


@pytest.mark.parametrize("command", ["fit", "verify"])
def test_a_forward_that_takes_the_data(command: str, models: Path) -> None:
    _use("mine.TakesData", models)
    outcome = pygdist(command, "--config=run.yaml", folder=models, env={"PYTHONPATH": str(models)})
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_edge_attributes_go_to_layers_that_take_them(folder: Path) -> None:
    data = graph()
    data.edge_attr = torch.ones(data.num_edges, 3)
    save_npy(data, folder / "attributed")
    model = "{class_path: torch_geometric.nn.GAT, init_args: {in_channels: 12, hidden_channels: 8, num_layers: 2, "
    fit = ("fit", "--config=run.yaml", "--data.dataset=attributed", "--trainer.logger=false")
    for more in ("out_channels: 4, v2: true}}", "out_channels: 4, v2: true}, dict_kwargs: {edge_dim: 3}}"):
        outcome = pygdist(*fit, f"--model.model={model}{more}", folder=folder)
        assert outcome.code == 0, outcome.err


def test_weights_are_averaged_though_sizes_come_from_the_graph(folder: Path) -> None:
    average = "--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging"
    outcome = pygdist("fit", "--config=run.yaml", "--model.model.in_channels=-1", average, folder=folder)
    assert outcome.code == 0, outcome.err


def test_a_misspelt_metric_to_stop_at(folder: Path) -> None:
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_los")
    outcome = pygdist("fit", "--config=run.yaml", *stop, folder=folder)
    assert_mistake(outcome, "EarlyStopping", "`val_los` which is not available", "`val_loss`")


def test_checkpoints_and_everything_else_can_be_switched_off(folder: Path) -> None:
    for option in ("--trainer.enable_checkpointing=false", "--trainer.barebones=true"):
        plain = ("--trainer.enable_progress_bar=null", "--trainer.enable_model_summary=null")
        outcome = pygdist("fit", "--config=run.yaml", *plain, option, folder=folder)
        assert outcome.code == 0, outcome.err
    assert not list(folder.rglob("*.ckpt"))
