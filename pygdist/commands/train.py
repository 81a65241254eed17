"""``pygdist fit``, ``validate``, ``test`` and ``predict``: a LightningCLI over our data module and what is learned."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from pygdist.commands.export import read_checkpoint
from pygdist.commands.messages import check_yaml, one_line, options_of, shorten
from pygdist.errors import InputError
from pygdist.lightning import (
    ExchangeMonitor,
    GraphDataModule,
    GraphDDPStrategy,
    LinkPredictor,
    NodeClassifier,
    PredictionWriter,
)

__all__ = ["GraphCLI", "Parser", "run"]

log = logging.getLogger(__name__)
# an advertisement, in every run
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda said: "litlogger" not in said.getMessage())

_TASKS = {"nodes": NodeClassifier, "links": LinkPredictor}
_SCORE = "val_acc"
_FOUND_BY_LIGHTNING = ("best", "last", "hpc")  # values of --ckpt_path that are no files

_PURPOSES = {
    "fit": "Train a model on a graph that is held in parts, one for each process: to classify nodes, or with"
    " --task=links to predict edges.",
    "validate": "Evaluate a model on the validation nodes or edges.",
    "test": "Evaluate a model on the test nodes or edges.",
    "predict": "Write a prediction for every node of the graph, in the order of its ids, to --predictions.path; with"
    " --task=links its row.",
}
_MOST_USED = (
    " Used most: --model.model=CLASS (any PyG model by class path; --model.model.help=CLASS lists its options),"
    " --model.backend=NAME, --data.dataset=NAME, --trainer.devices=N, --trainer.max_epochs=N, --ckpt_path=FILE."
    " Every option may stand in a YAML file (--config); --print_config prints them all with their values."
)


class Parser(LightningArgumentParser):
    """Says what is wrong in one line instead of printing the usage of two hundred options."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise InputError(shorten(message)) from ex


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, with a default score: accuracy, F1 for several labels per node, AUC for edges.

    And ``last.ckpt`` is the last.

    Lightning writes ``last.ckpt`` beside a new best checkpoint only; here it is always that of the last epoch, so that
    a run whose rank is lost resumes where it was.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.monitor == _SCORE and isinstance(pl_module, LinkPredictor):
            self.monitor = "val_auc"
        elif self.monitor == _SCORE and isinstance(trainer.datamodule, GraphDataModule):  # type: ignore[attr-defined]
            self.monitor = "val_f1" if trainer.datamodule.shard.multi_label else _SCORE  # type: ignore[attr-defined]
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        dry = trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.save_last and not dry and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing is left to save; Lightning's own writes a checkpoint even under ``fast_dev_run``."""


class GraphCLI(LightningCLI):
    """LightningCLI with pygdist's defaults: strategy ``graph_ddp``, CSV and TensorBoard logs, best and last checkpoint.

    Making one instantiates what the configuration says; :meth:`execute` runs it.

    Args:
        arguments: The command line, starting with the subcommand.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._made: list[Path] = []  # folders of this run that were not there before, innermost first
        self._without: set[type[Callback]] = set()  # callbacks of ours that the trainer's options switch off
        # Lightning warns wherever sys.argv is not empty, as it is not under the pygdist command
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        warnings.filterwarnings("ignore", message="Experiment logs directory")  # TensorBoard made it, for both
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)  # Lightning with torch 2.13
        warnings.filterwarnings("ignore", message=".*configure_optimizers. will be overridden")  # --optimizer says so
        warnings.filterwarnings("ignore", message="The dirpath has changed")  # each command has a folder of its own
        warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")  # there is one batch, the graph
        check_yaml(arguments)
        arguments = _strategy_by_class(arguments)
        super().__init__(
            _TASKS[_task_of(arguments)],
            GraphDataModule,
            args=arguments,
            parser_class=Parser,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            parser_kwargs=_help_texts(),
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
        parser.add_argument(
            "--task", choices=list(_TASKS), default="nodes",
            help="what is learned: classes of nodes, or edges (--data.edge_split holds some out to be evaluated on)",
        )  # fmt: skip
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.monitor": _SCORE, "checkpoint.mode": "max", "checkpoint.save_last": True})
        parser.add_lightning_class_args(ExchangeMonitor, "exchange")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        subcommand = self.config["subcommand"]
        checkpoint = self.config[subcommand].get("ckpt_path")
        if checkpoint is None and subcommand != "fit":
            log.warning("no --ckpt_path: %s runs on a model that was never trained", subcommand)
        elif checkpoint == "best" and subcommand != "fit":
            raise InputError("--ckpt_path=best: a new run knows no best checkpoint; give its file, under checkpoints/")
        elif checkpoint is not None and checkpoint not in _FOUND_BY_LIGHTNING:
            read_checkpoint(checkpoint)  # here every rank of every strategy says the same, before any has started

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            log.debug("while making what the configuration names", exc_info=True)
            raise InputError(shorten(str(error))) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        kwargs["strategy"] = _strategy_of(config["strategy"])
        if config["logger"] in (None, True) and not config["fast_dev_run"] and not config["barebones"]:
            kwargs["logger"] = _loggers(config["default_root_dir"] or "runs")
            folder = Path(kwargs["logger"][0].log_dir)
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        if config["enable_checkpointing"] is False or config["barebones"]:
            self._without |= {BestCheckpoint}
        if config["barebones"]:
            self._without |= {ExchangeMonitor, PredictionWriter}
            self.save_config_callback = None
            kwargs["log_every_n_steps"] = None  # our default; Lightning would complain of it
        trainer = super().instantiate_trainer(**kwargs)
        if trainer.world_size > 1 and not isinstance(trainer.strategy, GraphDDPStrategy):
            raise InputError(
                f"--trainer.strategy: '{config['strategy']}' averages over {trainer.world_size} ranks as if each had a "
                "graph of its own; on a graph in parts use graph_ddp"
            )
        return trainer

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        return super()._instantiate_trainer(config, [one for one in callbacks if type(one) not in self._without])

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Not yet: :meth:`execute` does, once there is an object that can clean up after it."""

    def execute(self) -> None:
        """Run the subcommand.

        Raises:
            InputError: After a mistake in the input; the other ranks of this machine are gone then, and so is the
                folder of the run if nothing was learnt yet.
        """
        try:
            super()._run_subcommand(str(self.subcommand))
        except (InputError, MisconfigurationException, FileNotFoundError) as error:
            self._clean_up()
            raise error if isinstance(error, InputError) else InputError(one_line(str(error))) from error
        except ValueError as error:
            if "in Lightning, but" not in str(error):  # other numbers of processes than torchrun's or SLURM's
                raise
            self._clean_up()
            raise InputError(one_line(str(error))) from error
        except RuntimeError as error:
            if str(error).startswith("Early stopping conditioned on"):
                self._clean_up()
                raise InputError(f"EarlyStopping: {one_line(str(error))}") from error
            if "loading state_dict" not in str(error):
                raise
            self._clean_up()
            raise InputError(
                f"--ckpt_path: the checkpoint is of another model: {one_line(str(error).partition(':')[2])}"
            ) from error

    def _clean_up(self) -> None:
        # they leave for the same reason, which is told once
        logging.getLogger(GraphDDPStrategy.__module__.rpartition(".")[0]).setLevel(logging.CRITICAL)
        for process in getattr(self.trainer.strategy.launcher, "procs", []):
            if not isinstance(process, subprocess.Popen):
                continue  # forked and spawned ranks are gone when their error arrives
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self.trainer.is_global_zero or not self._made:
            return
        run = self._made[0]
        if run.is_dir() and not (run / "metrics.csv").exists() and not any(run.rglob("*.ckpt")):
            shutil.rmtree(run)
        with contextlib.suppress(OSError):  # somebody else has put something there
            for folder in self._made[1:]:
                folder.rmdir()

    def before_predict(self) -> None:
        """Find out that the predictions cannot be written before they are computed, on every rank."""
        if self.trainer.limit_predict_batches == 0:
            raise InputError("--trainer.limit_predict_batches=0: there would be no predictions; leave it out")
        path = Path(self._get(self.config_init, "predictions").path)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"--predictions.path: {path} cannot be written")

    def predict(self, **arguments: Any) -> None:
        """Keep the predictions out of memory: they are in the file that ``--predictions.path`` names."""
        self.trainer.predict(**{**arguments, "return_predictions": False})


def _task_of(arguments: list[str]) -> str:
    """What the command line or a configuration file says is learned: it decides which options there are."""
    found = _said_last(arguments, "task") or "nodes"
    if found not in _TASKS:
        raise InputError(f"--task: {found!r}, expected {' or '.join(_TASKS)}")
    return found


def _help_texts() -> dict[str, Any]:
    """What comes before the list of options: which ones are used most. The usage line would name all two hundred."""
    texts: dict[str, Any] = {"prog": "pygdist"}
    for command, purpose in _PURPOSES.items():
        texts[command] = {"usage": f"pygdist {command} [--config FILE] [options]", "description": purpose + _MOST_USED}
    return texts


def _strategy_by_class(arguments: list[str]) -> list[str]:
    """The same command line with the class of a strategy of ours in place of its name, if options of it are given.

    The name may stand in a configuration file, where only the end of the command line overrides it.
    """
    name = _said_last(arguments, "trainer", "strategy")
    known = dict(StrategyRegistry).get(name) if isinstance(name, str) else None  # its own get() makes one
    option, rest, given = "--trainer.strategy", list[str](), dict[str, str]()
    value_of = ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == option or key.startswith(f"{option}."):
            given[key], value_of = value, "" if equals else key
        elif value_of and not argument.startswith("--"):
            given[value_of], value_of = argument, ""
        else:
            rest.append(argument)
            value_of = ""
    own = [key for key in given if key != option and not key.endswith(".help")]
    if not own or known is None or not issubclass(known["strategy"], GraphDDPStrategy):
        return arguments
    path = f"{known['strategy'].__module__}.{known['strategy'].__qualname__}"
    fixed = {f"{option}.{name}": yaml.safe_dump(value).split()[0] for name, value in known["init_params"].items()}
    given[option] = path
    said = {option: path, **fixed, **given}  # the class before its options
    return [*rest, *(f"{key}={value}" for key, value in said.items())]


def _said_last(arguments: list[str], *names: str) -> Any:
    """What the command line, or a configuration file that it names, says last under these names."""
    found: Any = None
    for option, value in options_of(arguments):
        if option == f"--{'.'.join(names)}":
            found = value
        elif option in ("--config", "-c") and Path(value).is_file():
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            for name in names:
                content = content.get(name) if isinstance(content, dict) else None
            found = found if content is None else content
    return found


def _strategy_of(strategy: Any) -> Any:
    """What the trainer takes: a name, or an object, of the class if a path to one stands there without options."""
    names = StrategyRegistry.available_strategies()
    if not isinstance(strategy, str) or strategy == "auto" or strategy in names:
        return strategy
    module, _, name = strategy.rpartition(".")
    if module:
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and issubclass(found, Strategy):
                return found()
    ours = ", ".join(name for name in names if name.startswith(("graph_", "model_averaging")) and "unused" not in name)
    raise InputError(f"--trainer.strategy: unknown strategy '{strategy}'; for a graph in parts there are {ours}")


def _loggers(root: str) -> list[TensorBoardLogger | CSVLogger]:
    """TensorBoard and CSV in one new folder per run, where the checkpoints and the configuration are too."""
    tensorboard = TensorBoardLogger(root, name="")
    return [tensorboard, CSVLogger(root, name="", version=tensorboard.version)]


def run(command: str, arguments: list[str]) -> int:
    """Run one of Lightning's four subcommands."""
    GraphCLI([command, *arguments]).execute()
    return 0
