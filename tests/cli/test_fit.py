"""``pygdist fit`` is a LightningCLI: what its users expect of options, callbacks, loggers and help."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pygdist.commands.best_checkpoint import BestCheckpoint
from tests.cli.commands import Outcome, assert_mistake, files, pygdist, torchrun

FIT = ("fit", "--config=run.yaml")


def _fit(folder: Path, *args: str) -> dict[str, Any]:
    """The last checkpoint of a run."""
    outcome = pygdist(*FIT, *args, folder=folder)
    assert outcome.code == 0, outcome.err
    checkpoint: dict[str, Any] = torch.load(next(folder.rglob("last.ckpt")), weights_only=True)
    return checkpoint


def _callback(checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    state: dict[str, Any] = next(state for key, state in checkpoint["callbacks"].items() if key.startswith(name))
    return state


def test_a_run_leaves_its_configuration_logs_and_checkpoints(trained: tuple[Path, Outcome]) -> None:
    folder, outcome = trained
    run = folder / "runs" / "version_0"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names >= {"checkpoints", "config", "events", "metrics"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["model"]["class_path"] == "torch_geometric.nn.GCN"
    assert config["trainer"]["strategy"] == "graph_ddp"
    with (run / "metrics.csv").open() as lines:
        columns = set(csv.DictReader(lines).fieldnames or ())
    assert columns >= {"train_loss", "val_loss", "train_acc", "val_acc", "epoch_s", "sent_bytes_max", "peak_gib_max"}
    assert "litlogger" not in outcome.err
    assert "Warning" not in outcome.err


def test_the_saved_configuration_repeats_the_run(trained: tuple[Path, Outcome], folder: Path) -> None:
    config = trained[0] / "runs" / "version_0" / "config.yaml"
    (folder / "run.yaml").write_text(config.read_text())
    first = torch.load(next(trained[0].rglob("last.ckpt")), weights_only=True)["state_dict"]
    again = _fit(folder)["state_dict"]
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.slow
def test_links_are_learned_where_the_task_says_so(folder: Path) -> None:
    checkpoint = _fit(folder, "--task=links", "--data.edge_split=[0.1, 0.1]")
    assert _callback(checkpoint, "BestCheckpoint")["monitor"] == "val_auc"
    run = folder / "runs" / "version_0"
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == "links"
    with (run / "metrics.csv").open() as lines:
        assert set(csv.DictReader(lines).fieldnames or ()) >= {"train_loss", "val_auc", "val_hits", "sent_bytes_max"}
    last = next(folder.rglob("last.ckpt"))
    args = (f"--config={run / 'config.yaml'}", f"--ckpt_path={last}", "--trainer.devices=1")
    outcome = pygdist("predict", *args, "--predictions.path=rows.npy", folder=folder)
    assert outcome.code == 0, outcome.err
    assert np.load(folder / "rows.npy").shape == (120, 4)


def test_links_are_learned_where_none_is_held_out(folder: Path) -> None:
    outcome = pygdist(*FIT, "--task=links", folder=folder)
    assert outcome.code == 0, outcome.err
    assert "no edges held out (edge_split): training goes on without validation" in outcome.err
    assert list(folder.rglob("last.ckpt"))


def test_optimizer_scheduler_monitor_and_callbacks_from_the_command_line(folder: Path) -> None:
    checkpoint = _fit(
        folder,
        "--optimizer=SGD",
        "--optimizer.lr=0.5",
        "--optimizer.momentum=0.25",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=2",
        "--lr_scheduler.gamma=0.1",
        "--checkpoint.monitor=val_loss",
        "--checkpoint.mode=min",
        "--trainer.callbacks+=LearningRateMonitor",
        "--model.model.in_channels=-1",  # sizes that the graph gives
    )
    (group,) = checkpoint["optimizer_states"][0]["param_groups"]
    assert (group["initial_lr"], group["momentum"]) == (0.5, 0.25)
    assert checkpoint["lr_schedulers"][0]["step_size"] == 2
    assert group["lr"] == pytest.approx(0.05)  # three epochs: one step down
    assert _callback(checkpoint, "BestCheckpoint")["monitor"] == "val_loss"
    with next(folder.rglob("metrics.csv")).open() as lines:
        columns = set(csv.DictReader(lines).fieldnames or ())
    # the user's callback is there, and so is ours
    assert columns >= {"lr-SGD", "sent_bytes_max"}


def test_the_lowest_loss_is_the_best(folder: Path) -> None:
    state = _callback(_fit(folder, "--checkpoint.monitor=val_loss"), "BestCheckpoint")
    with next(folder.rglob("metrics.csv")).open() as lines:
        losses = [float(row["val_loss"]) for row in csv.DictReader(lines) if row["val_loss"]]
    assert len(set(losses)) == 3
    assert float(state["best_model_score"]) == pytest.approx(min(losses))


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val_loss", "min"), ("val_mae", "min"), ("test/mse", "min"), ("train_acc", "max"), ("val_hits", "max")],
)
def test_the_name_of_a_figure_tells_which_value_is_the_best(monitor: str, mode: str) -> None:
    assert BestCheckpoint(monitor=monitor).mode == mode
    assert BestCheckpoint(monitor=monitor, mode="max").mode == "max"


def test_a_figure_whose_name_does_not_tell_needs_a_mode(folder: Path) -> None:
    unknown = "--checkpoint.monitor=sent_bytes_max"
    said = assert_mistake(pygdist(*FIT, unknown, folder=folder), unknown.removeprefix("--"), "--checkpoint.mode=min or")
    assert "the lowest or the highest" in said
    assert not (folder / "runs").exists()
    _fit(folder, unknown, "--checkpoint.mode=min", "--trainer.max_epochs=1")


def test_epochs_that_are_not_saved_write_no_last_checkpoint(folder: Path) -> None:
    (folder / "look.py").write_text(
        "import lightning.pytorch as pl\n"
        "from pygdist import checkpoints\n"
        "class Look(pl.Callback):\n"
        "    write = staticmethod(checkpoints.write)\n"
        "def look(checkpoint, path):\n"
        "    with open('saved', 'a') as file:\n"
        "        file.write(f'{checkpoint[\"epoch\"]}\\n')\n"
        "    Look.write(checkpoint, path)\n"
        "checkpoints.write = look\n"
    )
    args = ("--trainer.callbacks+=look.Look", "--checkpoint.every_n_epochs=3", "--trainer.max_epochs=5")
    assert _fit(folder, *args)["epoch"] == 4, "the run's last epoch"
    assert set((folder / "saved").read_text().split()) == {"2", "4"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--trainer.strategy=model_averaging", "--trainer.strategy.sync_every=2"], {"sync_every": 2}),
        (["--trainer.strategy", "graph_ddp_spawn", "--trainer.strategy.timeout_s", "20"],
         {"timeout_s": 20.0, "start_method": "spawn", "find_unused_parameters": False}),
        (["--config=averaging.yaml", "--trainer.strategy.sync_every=2"], {"sync_every": 2}),
        (["--trainer.strategy.sync_every", "3", "--config=averaging.yaml"], {"sync_every": 3}),
    ],
)  # fmt: skip
def test_a_strategy_by_name_takes_options(given: list[str], expected: dict[str, Any], folder: Path) -> None:
    (folder / "averaging.yaml").write_text("trainer:\n  strategy: model_averaging\n")
    outcome = pygdist(*FIT, *given, "--print_config", folder=folder)
    assert outcome.code == 0, outcome.err
    strategy = yaml.safe_load(outcome.out)["trainer"]["strategy"]
    assert {name: strategy["init_args"][name] for name in expected} == expected


def test_a_strategy_by_class_path_needs_no_options(folder: Path) -> None:
    strategy = "pygdist.lightning.ModelAveragingStrategy"
    _fit(folder, "--model.backend=replica", f"--trainer.strategy={strategy}", "--trainer.max_epochs=1")


def test_early_stopping_from_yaml(folder: Path) -> None:
    (folder / "stop.yaml").write_text(
        "trainer:\n  max_epochs: 50\n  callbacks:\n    - class_path: EarlyStopping\n"
        "      init_args: {monitor: val_loss, patience: 1, min_delta: 10.0}\n"
    )
    checkpoint = _fit(folder, "--config=stop.yaml")
    assert checkpoint["global_step"] == 2
    assert _callback(checkpoint, "EarlyStopping")["wait_count"] == 1
    assert _callback(checkpoint, "BestCheckpoint")["monitor"] == "val_acc"


def test_several_labels_per_node_keep_the_best_f1(folder: Path, graphs: Path) -> None:
    checkpoint = _fit(folder, f"--data.dataset={graphs / 'many-labels'}")
    assert _callback(checkpoint, "BestCheckpoint")["monitor"] == "val_f1"


@pytest.mark.slow
def test_without_logs(folder: Path) -> None:
    before = files(folder)
    assert pygdist(*FIT, "--trainer.fast_dev_run=true", folder=folder).code == 0
    assert files(folder) - {"cache"} == before
    outcome = pygdist(*FIT, "--trainer.logger=false", "--trainer.max_epochs=1", folder=folder)
    assert outcome.code == 0, outcome.err
    assert not (folder / "runs").exists()
    assert [path.name for path in folder.rglob("last.ckpt")] == ["last.ckpt"]


@pytest.mark.slow
def test_resume_goes_on_where_the_run_ended(
    folder: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    resumed = _fit(folder, f"--ckpt_path={checkpoint}", "--trainer.max_epochs=5")
    assert resumed["global_step"] == 5
    elsewhere = tmp_path_factory.mktemp("straight")
    (elsewhere / "run.yaml").write_text((folder / "run.yaml").read_text())
    straight = _fit(elsewhere, "--trainer.max_epochs=5")
    for name, value in straight["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name])


@pytest.mark.slow
def test_validate_and_test_report_scores(folder: Path, checkpoint: Path) -> None:
    for command, score in (("validate", "val_acc"), ("test", "test_acc")):
        outcome = pygdist(command, "--config=run.yaml", f"--ckpt_path={checkpoint}", folder=folder)
        assert outcome.code == 0, outcome.err
        assert score in outcome.out
        assert "never trained" not in outcome.err
    assert "never trained" in pygdist("test", "--config=run.yaml", folder=folder).err
    ranks = torchrun("test", "--config=run.yaml", folder=folder)
    assert ["never trained" in rank.err for rank in ranks] == [True, False]


def test_help(folder: Path) -> None:
    overview = pygdist("--help", folder=folder)
    assert overview == pygdist(folder=folder)
    for command in ("fit", "validate", "test", "predict", "partition", "verify", "export"):
        assert f"\n  {command} " in overview.out
    wanted = {
        "fit": ["--trainer.max_epochs", "--model.backend", "The way in which neighbours arrive", "--data.partitioner",
                "--optimizer", "--lr_scheduler", "--checkpoint.monitor", "--ckpt_path", "--print_config",
                "Train a model"],
        "predict": ["--predictions.path", "--predictions.output"],
        "partition": ["--method", "Who owns which node", "--parts", "--out", "--json", "--split"],
        "verify": ["--world-size", "--double", "--tolerance", "--reference", "pygdist fit"],
        "export": ["checkpoint", "model.safetensors"],
    }  # fmt: skip
    for command, words in wanted.items():
        outcome = pygdist(command, "--help", folder=folder)
        assert outcome.code == 0
        assert outcome.out.startswith(f"usage: pygdist {command} ")
        assert [word for word in words if word not in outcome.out] == []
        assert outcome.err == ""


def test_print_config_is_a_configuration(folder: Path) -> None:
    outcome = pygdist(*FIT, "--trainer.max_epochs=7", "--print_config", folder=folder)
    assert (outcome.code, outcome.err) == (0, "")
    config = yaml.safe_load(outcome.out)
    assert config["trainer"]["max_epochs"] == 7
    assert config["data"]["cache_dir"] == "cache"
    (folder / "printed.yaml").write_text(outcome.out)
    again = pygdist("fit", "--config=printed.yaml", "--print_config", folder=folder)
    assert yaml.safe_load(again.out) == config
