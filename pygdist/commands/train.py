"""``pygdist fit``, ``validate``, ``test`` and ``predict``: a LightningCLI over our data module and classifier."""

from __future__ import annotations

import re
import warnings
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.lightning import ExchangeMonitor, GraphDataModule, NodeClassifier, PredictionWriter

__all__ = ["GraphCLI", "Parser", "one_line", "run"]


class Parser(LightningArgumentParser):
    """Says what is wrong in one line instead of printing the usage of two hundred options."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise InputError(one_line(message)) from ex


class GraphCLI(LightningCLI):
    """LightningCLI with pygdist's defaults: strategy ``graph_ddp``, CSV and TensorBoard logs, best and last checkpoint.

    Args:
        arguments: The command line, starting with the subcommand.
        execute: Run the subcommand; otherwise only instantiate what the configuration says.
    """

    def __init__(self, arguments: list[str], *, execute: bool = True) -> None:
        self._execute = execute
        # Lightning warns wherever sys.argv is not empty, as it is not under the pygdist command
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        warnings.filterwarnings("ignore", message="Experiment logs directory")  # TensorBoard made it, for both
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)  # Lightning with torch 2.13
        super().__init__(
            NodeClassifier,
            GraphDataModule,
            args=arguments,
            parser_class=Parser,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={
                "accelerator": "auto",
                "strategy": "graph_ddp",
                "devices": 1,
                "max_epochs": 200,
                "log_every_n_steps": 1,
            },
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.monitor": "val_acc", "checkpoint.mode": "max", "checkpoint.save_last": True})
        parser.add_lightning_class_args(ExchangeMonitor, "exchange")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if config["logger"] in (None, True) and not config["fast_dev_run"]:
            kwargs["logger"] = _loggers(config["default_root_dir"] or "runs")
        return super().instantiate_trainer(**kwargs)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self._execute:
            super()._run_subcommand(subcommand)

    def predict(self, **arguments: Any) -> None:
        """Keep the predictions out of memory: they are in the file that ``--predictions.path`` names."""
        self.trainer.predict(**{**arguments, "return_predictions": False})


def _loggers(folder: str) -> list[TensorBoardLogger | CSVLogger]:
    """TensorBoard and CSV in one folder per run, where the checkpoints and the configuration are too."""
    tensorboard = TensorBoardLogger(folder, name="")
    return [tensorboard, CSVLogger(folder, name="", version=tensorboard.version)]


def run(command: str, arguments: list[str]) -> int:
    """Run one of Lightning's four subcommands."""
    try:
        GraphCLI([command, *arguments])
    except (MisconfigurationException, FileNotFoundError) as error:
        raise InputError(one_line(str(error))) from error
    return 0


def one_line(message: str, limit: int = 600) -> str:
    """The message without line breaks and without jsonargparse's nesting marks, cut to ``limit`` characters."""
    text = re.sub(r"\s+", " ", message).strip()
    return text if len(text) <= limit else text[: limit - 1] + "…"
