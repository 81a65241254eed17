"""Numbers of the trainer's options are in range, whatever their type; sensible ones pass."""

from __future__ import annotations

from typing import Any

import pytest

from pygdist.commands.messages import check_value, described, refused_by
from pygdist.commands.trainer_options import check_settings, check_trainer
from pygdist.errors import InputError
from pygdist.lightning import GraphDDPStrategy


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


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(InputError, match="gradient_clip_algorithm has no effect without"):
        check_trainer({"gradient_clip_algorithm": "norm", "gradient_clip_val": None})
    with pytest.raises(InputError, match=r"min_epochs is 5, but --trainer.max_epochs is 3"):
        check_trainer({"min_epochs": 5, "max_epochs": 3})
    for seconds in (-1.0, 0.0, float("nan")):
        with pytest.raises(InputError, match=r"--trainer.strategy.lost_after_s is"):
            check_trainer({"strategy": GraphDDPStrategy(lost_after_s=seconds)})
    for seed in (-1, 1 << 32):
        with pytest.raises(InputError, match="--seed_everything is"):
            check_settings({"seed_everything": seed})
    with pytest.raises(InputError, match="--lr_scheduler: init_args are given without a class_path"):
        check_settings({"lr_scheduler": {"init_args": {}}})


def test_values_out_of_bounds_are_refused_by_the_name_of_their_option() -> None:
    with pytest.raises(InputError, match=r"--data.dataset_args:1:.*nested more than 50 levels"):
        check_value("--data.dataset_args", "{a: " * 60 + "1" + "}" * 60)
    check_value("--data.dataset", "no/such/file.yaml")
    check_value("--data.dataset_args", "{")  # jsonargparse says what is wrong


class _Picky:
    def __init__(self, width: int, name: str = "x") -> None:
        raise ZeroDivisionError("no width")


def test_a_class_that_refuses_its_arguments_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        _Picky(3)
    assert refused_by(error.value) == "_Picky(width=3, name='x')"
    assert described(error.value).startswith("ZeroDivisionError: no width (test_trainer_options.py:")
    assert refused_by(ValueError("nowhere")) == ""
