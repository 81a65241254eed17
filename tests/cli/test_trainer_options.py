"""Numbers of the trainer's options are in range, whatever their type; sensible ones pass."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

from pygdist.backends import HybridBackend, Savings
from pygdist.backends.planning.greedy import Costs
from pygdist.cli import main
from pygdist.commands.messages import check_value, described, refused_by, shorten
from pygdist.commands.trainer_options import accelerator_of, check_settings, check_trainer
from pygdist.errors import InputError
from pygdist.launch_variables import check_launch, check_libraries
from pygdist.lightning import GraphDataModule, GraphDDPStrategy
from pygdist.lightning.checks import left_unused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("devices", value)
            for value in ("two", "nan", "", "1.5", "{", "9" * 50, 0, -2, 1.5, [], ["a"], {"a": 1}, 10**30)
        ),
        *((name, -1) for name in ("num_nodes", "min_epochs", "gradient_clip_val", "accumulate_grad_batches")),
        *((name, -2) for name in ("max_epochs", "max_steps", "num_sanity_val_steps", "log_every_n_steps")),
        *((name, float("nan")) for name in ("limit_train_batches", "overfit_batches", "gradient_clip_val")),
        *((name, float("inf")) for name in ("gradient_clip_val", "val_check_interval")),
        *((name, 10**30) for name in ("max_epochs", "num_nodes", "min_steps", "check_val_every_n_epoch")),
    ],
)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^--trainer.{name}.*expected a"):
        check_trainer({name: value})


@pytest.mark.parametrize(
    "config",
    [{"devices": one} for one in ("auto", "2", " 3", "0,1", "-1", 4, -1, [0, 2], None)]
    + [{"max_epochs": -1, "min_epochs": 3}, {"limit_val_batches": 0.5, "overfit_batches": 0.0, "fast_dev_run": True}],
)
def test_taken(config: dict[str, Any]) -> None:
    check_trainer(config)


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_nodes", "num_gpus", "expected"),
    [
        ("auto", 2, 1, 1, "cpu"),
        ("auto", "8", 1, 4, "cpu"),
        ("auto", 2, 1, 2, "auto"),
        ("auto", 2, 1, 0, "auto"),
        ("auto", "auto", 1, 1, "auto"),
        ("auto", "0,1", 1, 1, "auto"),
        ("auto", 2, 3, 1, "auto"),
        ("gpu", 2, 1, 1, "gpu"),
    ],
)
def test_more_processes_than_gpus(
    accelerator: str, devices: Any, num_nodes: int, num_gpus: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert accelerator_of({"accelerator": accelerator, "devices": devices}, num_nodes, num_gpus) == expected
    assert ("training on CPUs" in caplog.text) == (expected == "cpu")


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(InputError, match="gradient_clip_algorithm has no effect without"):
        check_trainer({"gradient_clip_algorithm": "norm", "gradient_clip_val": None})
    with pytest.raises(InputError, match=r"min_epochs is 5, but --trainer.max_epochs is 3"):
        check_trainer({"min_epochs": 5, "max_epochs": 3})
    for seconds in (-1.0, 0.0, float("nan"), 1e-9, 1e10, 1e300):
        for name in ("timeout_s", "warn_after_s", "lost_after_s"):
            with pytest.raises(InputError, match=rf"{name} is"):
                GraphDDPStrategy(**{name: seconds})
    for options in ({"lr": 1e39}, {"betas": [0.9, 10**400]}, {"eps": float("nan")}):
        with pytest.raises(InputError, match=rf"--optimizer.{next(iter(options))} is"):
            check_settings({"optimizer": {"class_path": "torch.optim.Adam", "init_args": options}}, {})
    for seed in (-1, 1 << 32):
        with pytest.raises(InputError, match="--seed_everything is"):
            check_settings({"seed_everything": seed}, {})
    with pytest.raises(InputError, match="--lr_scheduler: init_args are given without a class_path"):
        check_settings({"lr_scheduler": {"init_args": {}}}, {})
    with pytest.raises(InputError, match="--trainer: expected options and their values, got '3'"):
        check_settings({"trainer": 3}, {})


def test_options_that_others_leave_without_effect() -> None:
    defaults = {"model.lr": 0.01, "model.weight_decay": 5e-4}
    adam = {"class_path": "torch.optim.Adam"}
    check_settings({"optimizer": adam, "lr_scheduler": adam, "model.lr": 0.01}, defaults)
    check_settings({"model.lr": 0.1}, defaults)
    with pytest.raises(InputError, match=r"--lr_scheduler has no effect without --optimizer"):
        check_settings({"lr_scheduler": adam}, defaults)
    for name in defaults:
        with pytest.raises(InputError, match=f"--{name} has no effect with --optimizer; set --optimizer"):
            check_settings({"optimizer": adam, name: 0.1}, defaults)
    check_trainer({"overfit_batches": 1, "limit_train_batches": 1.0})
    with pytest.raises(InputError, match="limit_train_batches has no effect with"):
        check_trainer({"overfit_batches": 1, "limit_train_batches": 2})
    for store, option, others in (
        ("parts", "split_seed", {"split_seed": 3}),
        (None, "num_workers", {"num_workers": 1}),
    ):
        with pytest.raises(InputError, match=f"^{option}"):
            GraphDataModule(store=store, **others)
    GraphDataModule(store="parts", split_seed=3, edge_split=(0.1, 0.1))
    with pytest.raises(InputError, match=r"savings.first_hop_mib=3 has no effect with first_hop=false"):
        Savings(first_hop=False, first_hop_mib=3)
    for unused in ({"replan": True}, {"costs": Costs(vertex=1, edge=1, value=1)}):
        with pytest.raises(InputError, match=f"^{next(iter(unused))}: nothing is measured or chosen"):
            HybridBackend(cache_ratio=0.5, **unused)


def test_a_store_leaves_options_of_the_graph_unused() -> None:
    given = {"dataset": "Cora", "dataset_args": {"root": "a"}, "partitioner": "hash", "partitioner_args": {"seed": 3}}
    assert left_unused({"store": "parts", **given}) == [f"parts is partitioned already; not used: {', '.join(given)}"]
    assert left_unused(vars(GraphDataModule(store="parts"))) == []
    (said,) = left_unused(vars(GraphDataModule(Data(), store="parts", partitioner="hash")))
    assert said.endswith("not used: dataset, partitioner")


@pytest.mark.parametrize("name", ["num_layers", "layers", "pool_layers", "K", "depth", "num_blocks"])
def test_a_model_of_endless_depth_is_refused(name: str) -> None:
    check_settings({"model": {f"model.init_args.{name}": 100, "model.init_args.hidden_channels": 10**6}}, {})
    with pytest.raises(InputError, match=rf"--model.model.init_args.{name} is 10+, expected at most 10,000"):
        check_settings({"model": {f"model.init_args.{name}": 10**30}}, {})


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        *((name, value, {}) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") for value in ("abc", "", "-1", "1e3")),
        *((name, value, {}) for name in ("LOCAL_RANK", "SLURM_NTASKS", "NODE_RANK") for value in ("9" * 99, "\u0663")),
        ("WORLD_SIZE", "0", {}),
        ("GLOO_SOCKET_IFNAME", "nosuch", {}),
        ("MASTER_PORT", "65536", {}),
        ("RANK", "2", {"WORLD_SIZE": "2"}),
        ("LOCAL_RANK", "9", {"LOCAL_WORLD_SIZE": "1"}),
        ("SLURM_PROCID", "4", {"SLURM_NTASKS": "4"}),
        ("SLURM_NNODES", "2", {"SLURM_PROCID": "0"}),
    ],
)
def test_variables_of_launchers(name: str, value: str, others: dict[str, str]) -> None:
    check_launch(
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_PORT": "29500",
            "SLURM_JOB_ID": "4227858433",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    )
    with pytest.raises(InputError, match=rf"^the environment variable {name} (is|names)"):
        check_launch({name: value, **others})


@pytest.mark.parametrize(("name", "value"), [("JSONARGPARSE_DEBUG", "1"), ("TORCHINDUCTOR_CACHE_DIR", "/proc/nosuch")])
def test_variables_of_libraries_of_the_command_line(name: str, value: str) -> None:
    check_libraries({"JSONARGPARSE_DEBUG": "true"})
    with pytest.raises(InputError, match=rf"^the environment variable {name} (is|names)"):
        check_libraries({name: value})
    check_launch({name: value})  # loops of one's own read neither


def test_values_out_of_bounds_are_refused_by_the_name_of_their_option() -> None:
    with pytest.raises(InputError, match=r"--data.dataset_args:1:.*nested more than 50 levels"):
        check_value("--data.dataset_args", "{a: " * 60 + "1" + "}" * 60)
    check_value("--data.dataset", "no/such/file.yaml")
    check_value("--data.dataset_args", "{")  # jsonargparse says what is wrong


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run.yaml").write_text(f"data: {{dataset: {tmp_path / 'pipe'}}}\n")
    for option, value in (("--config", "pipe"), ("--data.dataset", "pipe"), ("--config", "run.yaml")):
        with pytest.raises(InputError, match=r"pipe is a pipe, which may never end; name a file"):
            check_value(option, str(tmp_path / value))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(InputError, match=r"empty.yaml: is empty, expected options as YAML"):
        check_value("--config", str(tmp_path / "empty.yaml"))


def test_lacking_arguments_are_named_by_their_long_option() -> None:
    of_a_name = "Parser key \"model.backend\":\n  Expected a <class 'str'>. Got value: NestedArg(key='delay', val='2')"
    assert shorten(of_a_name) == (
        "--model.backend: a name takes no options; give the class, as in --model.backend=CLASS --model.backend.delay=2"
    )
    assert shorten("the following arguments are required: -o/--out") == "--out is required"
    assert shorten("the following arguments are required: fit.model") == "--model is required"


def test_a_library_that_refuses_the_environment_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> None:
        raise RuntimeError("TORCH_DISTRIBUTED_DEBUG must be OFF, INFO or DETAIL")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main(["check", "parts"]) == 2
    assert "pygdist check cannot be imported: TORCH_DISTRIBUTED_DEBUG must be" in capsys.readouterr().err


class _Picky:
    def __init__(self, width: int, name: str = "x") -> None:
        raise ZeroDivisionError("no width")


def test_a_class_that_refuses_its_arguments_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        _Picky(3)
    assert refused_by(error.value) == "_Picky(width=3, name='x')"
    assert described(error.value).startswith("ZeroDivisionError: no width (test_trainer_options.py:")
    assert refused_by(ValueError("nowhere")) == ""
