"""``pygdist fit``, ``validate``, ``test`` and ``predict``: a LightningCLI over our data module and learning tasks."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from pygdist.checkpoints import TRAINING_PARTS, read
from pygdist.commands.best_checkpoint import BestCheckpoint
from pygdist.commands.messages import Parser, described, last_value, one_line, options_of, refused_by, shorten
from pygdist.commands.named_classes import of_file, with_class_paths
from pygdist.commands.requeue import OfThisJob
from pygdist.commands.run_folder import (
    OwnCheckpoints,
    RunFolder,
    folder_to_go_on,
    named_checkpoint,
    new_folder,
    note_of,
)
from pygdist.commands.short_help import short_help, wants_help
from pygdist.commands.trainer_options import accelerator_of, check_settings, check_trainer
from pygdist.errors import InputError, RefusedError, is_first_rank, needs
from pygdist.lightning import (
    GraphDataModule,
    GraphDDPStrategy,
    LinkPredictor,
    NodeClassifier,
    NodeRegressor,
)
from pygdist.lightning.callbacks import ExchangeMonitor, PredictionWriter
from pygdist.lightning.checkpoint_io import is_remote
from pygdist.lightning.resume import Resume
from pygdist.lightning.table import EpochLogger
from pygdist.memory.limits import refusal_of, writes_to

log = logging.getLogger(__name__)
# Lightning recommends litlogger in every run
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda line: "litlogger" not in line.getMessage())

TASKS = {"nodes": NodeClassifier, "regression": NodeRegressor, "links": LinkPredictor}
_NAMES_OF_CHECKPOINTS = ("best", "last", "hpc")
_STRATEGY = "graph_ddp"  # by default
# options that may differ between the machines of a run; others may differ between the starts of a run (run_folder.py)
_OF_MACHINE = (
    "--trainer.default_root_dir", "--data.cache_dir", "--data.num_workers", "--trainer.enable_progress_bar",
    "--trainer.enable_model_summary", "--trainer.profiler",
)  # fmt: skip
# messages of Lightning that tell a user of pygdist nothing
_IGNORED_WARNINGS = (
    "LightningCLI's args parameter",  # wherever sys.argv is not empty
    "Experiment logs directory",  # TensorBoard and CSV share it
    ".*treespec",  # Lightning with torch 2.13
    ".*configure_optimizers. will be overridden",  # --optimizer is there for it
    "The dirpath has changed",  # each command has a folder of its own
    "Couldn't infer the batch indices",  # the graph is the one batch
)

PURPOSES = {
    "fit": "Train a model on a graph that is split into parts, one for each process. The model classifies nodes,"
    " predicts numbers for nodes (--task=regression), or predicts edges (--task=links).",
    "validate": "Evaluate a model on the validation nodes or edges.",
    "test": "Evaluate a model on the test nodes or edges.",
    "predict": "Write a prediction for every node of the graph to --predictions.path, in the order of node ids. With"
    " --task=links the prediction is the node's embedding.",
}
#: Lightning's options in our words: Lightning speaks of batches and GPUs, here processes hold parts of one graph.
_TEXTS = {
    "seed_everything": "Seed of all random numbers; the same seed repeats the run. true takes the environment variable"
    " PL_GLOBAL_SEED.",
    "ckpt_path": "Checkpoint to start from: a file, or best, last or hpc, which name a checkpoint of the newest run.",
    "optimizer": "Class of the optimizer, such as SGD, with options such as --optimizer.lr; Adam by default.",
    "lr_scheduler": "Class of a scheduler of the learning rate, such as StepLR; needs --optimizer.",
    "trainer.devices": "Processes on this host, one for each part. On GPUs, each process has a GPU of its own.",
    "trainer.num_nodes": "Number of hosts; each runs --trainer.devices processes.",
    "trainer.accelerator": "Device of the processes: cpu, gpu or auto, which takes GPUs if there are enough.",
    "trainer.strategy": "Processes average gradients, or average models: with graph_ddp or model_averaging.",
    "trainer.callbacks": "Callbacks of Lightning, such as EarlyStopping with --trainer.callbacks.monitor=val_loss.",
    "trainer.precision": "Number format, such as 32-true, 64-true or bf16-mixed.",
    "trainer.enable_progress_bar": "Show a progress bar; true by default.",
    "trainer.max_epochs": "Number of epochs after which training stops; -1 trains without end.",
    "trainer.max_steps": "Number of optimizer steps after which training stops, if --trainer.max_epochs is not reached"
    " before; -1 for no limit.",
    "trainer.log_every_n_steps": "Number of training steps between two logged steps; 1 logs every step.",
    "trainer.default_root_dir": "Folder of the runs, ./runs by default; each run has a folder version_N there.",
    "trainer.check_val_every_n_epoch": "Number of epochs between two validations.",
    "trainer.accumulate_grad_batches": "Only 1 is allowed, since an epoch is one step on the whole graph, or its steps"
    " may train on different parts.",
    "trainer.sync_batchnorm": "No effect: norms over nodes use statistics of all processes, where the backend can.",
    "trainer.use_distributed_sampler": "No effect: each process keeps its own part.",
    "checkpoint.save_last": "Also write last.ckpt, from which a run can go on; link makes last.ckpt a symbolic link.",
    "checkpoint.dirpath": "Folder of the checkpoints; by default the folder checkpoints in the run's folder.",
    "checkpoint.save_top_k": "Number of best checkpoints to keep; -1 keeps all. The last checkpoint is kept, too.",
    "checkpoint.monitor": "Logged figure that decides which checkpoint is best. val_acc stands for the score of the"
    " task: val_acc, val_f1 (several labels per node), val_r2 (regression), val_auc (links), or val_loss if there is no"
    " score.",
    "checkpoint.mode": "Whether the lowest (min) or the highest (max) value of the figure is the best. By default the"
    " name of the figure tells: losses and errors are best at their lowest, scores at their highest.",
    "checkpoint.every_n_epochs": "Number of epochs between two checkpoints, last.ckpt among them; the last epoch of a"
    " run is saved, too. By default each epoch is saved.",
}
_ALL_OPTIONS = (
    " All options can be set in a YAML file (--config); --print_config prints all options with their values, and --help"
    " shows the options that are used most."
)


class _TrainingParser(Parser, LightningArgumentParser):
    """Lightning's parser, which reports a mistake in one line.

    Attributes:
        has_places: The parser is that of a subcommand, whose files may name backends, partitioners and strategies.
            jsonargparse makes parsers of this class for the arguments of users' classes, too.
    """

    has_places = False

    def _check_value_key(
        self, action: argparse.Action, value: Any, key: str, cfg: Namespace | None, append: bool = False
    ) -> Any:
        value = of_file(key, value) if self.has_places else value
        return super()._check_value_key(action, value, key, cfg, append=append)


class GraphCLI(LightningCLI):
    """LightningCLI with pygdist's defaults: strategy ``graph_ddp``, logs, best and last checkpoint.

    The constructor instantiates the objects of the configuration; :meth:`execute` runs the subcommand.

    Args:
        arguments: The command line, starting with the subcommand.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._new_folders: list[Path] = []  # folders that this run creates, innermost first
        self._folder: RunFolder | None = None
        self._disabled: set[type[Callback]] = set()  # our callbacks that the trainer's options switch off
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        self._subcommand = arguments[0]
        self._arguments = arguments = with_class_paths(_task_by_class(arguments))
        super().__init__(
            TASKS[_task_of(arguments)], GraphDataModule, args=arguments, parser_class=_TrainingParser,
            save_config_kwargs={"overwrite": True}, parser_kwargs=_help_text(arguments[0]), seed_everything_default=0,
            trainer_defaults={
                "accelerator": "auto", "strategy": _STRATEGY, "devices": _processes_here(), "max_epochs": 200,
                "log_every_n_steps": 1,
            },
        )  # fmt: skip

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the subcommand of the command line: a parser for each of Lightning's four takes longer to make."""
        return {self._subcommand: LightningCLI.subcommands()[self._subcommand]}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.has_places = True  # type: ignore[attr-defined]  # a _TrainingParser
        parser.add_argument("--help-all", action="help", default=argparse.SUPPRESS, help="show all options")
        parser.add_argument(
            "--task", choices=list(TASKS), default="nodes",
            help="what the model learns: classes of nodes (nodes), numbers for nodes (regression), or edges (links;"
            " --data.edge_split holds edges out for evaluation)",
        )  # fmt: skip
        parser.add_argument(
            "--resume", type=bool | None, default=None, nargs="?", const=True,
            help="go on with the newest run of this configuration that has a checkpoint (fit only); without such a run,"
            " begin one. By default only if torchrun, SLURM or Kubernetes starts the same job again",
        )  # fmt: skip
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})
        parser.add_lightning_class_args(ExchangeMonitor, "exchange")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        for action in self._parser(self._subcommand)._actions:
            action.help = _TEXTS.get(action.dest, action.help)
        if wants_help(self._arguments):
            self.show_help()
            raise SystemExit(0)
        super().parse_arguments(parser, args)
        subcommand = self.config["subcommand"]
        defaults = {name: self._parser(subcommand).get_default(name) for name in ("model.lr", "model.weight_decay")}
        config = self.config[subcommand]
        check_settings(config, defaults)
        root, places = config.trainer.default_root_dir or "runs", (config.checkpoint.dirpath, config.data.cache_dir)
        writes_to(root, *(place for place in places if place is not None))
        if subcommand == "predict":
            writes_to(Path(config.predictions.path).parent)
        checkpoint = config.get("ckpt_path")
        if config.resume and subcommand != "fit":
            raise InputError(f"--resume is for fit; {subcommand} takes --ckpt_path=last")
        if config.resume and checkpoint is not None:
            raise InputError("--resume finds a checkpoint by itself, and --ckpt_path names one; leave one of them out")
        if checkpoint == "":
            raise InputError("--ckpt_path is empty; name a file, or leave it out")
        if checkpoint is None and subcommand != "fit":
            if is_first_rank():
                log.warning("no --ckpt_path: %s runs on a model that was never trained", subcommand)
        elif checkpoint in _NAMES_OF_CHECKPOINTS:
            saved = config.checkpoint.dirpath and Path(config.checkpoint.dirpath)
            path = named_checkpoint(checkpoint, Path(root), self._as_saved(config), saved)
            rank_zero_info(f"--ckpt_path={checkpoint}: {path}")
            checkpoint = config["ckpt_path"] = str(path)
        if checkpoint is not None and not is_remote(checkpoint):
            # a mistake is found before any rank starts, and is the same on all
            read(checkpoint, needs=TRAINING_PARTS if subcommand == "fit" else ("state_dict",))

    def show_help(self) -> None:
        """Print the options that are used most, with those of the classes that the command line names."""
        command, given = self._subcommand, dict(options_of(self._arguments))
        values = {name.removeprefix("--"): value for name, value in given.items()}
        sys.stdout.write(short_help(command, self._parser(command), PURPOSES[command], values))

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            log.debug("while instantiating the objects of the configuration", exc_info=True)
            if "`tensorboardX` is available" in str(error):
                raise needs("TensorBoardLogger", "tensorboard", "tensorboard") from error
            raise InputError(shorten(str(error))) from error
        except Exception as error:  # classes refuse their arguments in many ways
            log.debug("while instantiating the objects of the configuration", exc_info=True)
            made = refused_by(error) or "an object of the configuration"
            refused = refusal_of(error)
            if refused is not None:
                raise RefusedError(f"{made} cannot be made: {refused}") from error
            raise InputError(f"{made} cannot be made: {described(error)}") from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        check_trainer(config)
        kwargs["strategy"] = _strategy_of(config["strategy"])
        self._logs = config["logger"] in (None, True) and not config["fast_dev_run"] and not config["barebones"]
        if self._logs:
            kwargs["logger"] = False  # until it is known who is rank 0, which makes the folder
        here = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
        if here is not None and str(config["devices"]) == here and config["num_nodes"] == 1:
            kwargs["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(here)  # torchrun may form anew with fewer
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        kwargs["accelerator"] = accelerator_of(config, kwargs.get("num_nodes", config["num_nodes"]), num_gpus)
        if config["enable_checkpointing"] is False or config["barebones"]:
            self._disabled |= {BestCheckpoint}
        if config["barebones"]:
            self._disabled |= {ExchangeMonitor, PredictionWriter}
            self.save_config_callback = None
            kwargs["log_every_n_steps"] = None  # Lightning refuses our default
        trainer = super().instantiate_trainer(**kwargs)
        in_folder = self._logs and BestCheckpoint not in self._disabled
        resumes = self._get(self.config_init, "resume") is not False
        trainer._checkpoint_connector = OfThisJob(trainer, in_folder=in_folder, resumes=resumes)
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), trainer.num_devices
        if local >= devices and "LOCAL_WORLD_SIZE" not in os.environ:  # torchrun's are compared by Lightning
            raise InputError(
                f"the environment variable LOCAL_RANK is {local}, so this process would be one of several ranks, but "
                f"--trainer.devices is {devices}; unset LOCAL_RANK, or raise the devices",
                of_one_rank=True,
            )
        asked = devices * trainer.num_nodes
        if (
            trainer.world_size != asked and "TORCHELASTIC_RUN_ID" not in os.environ
        ):  # Lightning waits for SLURM's others
            raise InputError(
                f"{trainer.world_size} ranks were started, but --trainer.devices and --trainer.num_nodes ask for "
                f"{asked}; make them equal"
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, GraphDDPStrategy):
            raise InputError(
                f"--trainer.strategy: '{config['strategy']}' averages gradients as if each of the {trainer.world_size} "
                "ranks had a graph of its own; on a graph in parts use graph_ddp"
            )
        return trainer

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        return super()._instantiate_trainer(config, [one for one in callbacks if type(one) not in self._disabled])

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: the constructor calls this, but :meth:`execute` runs the subcommand, and cleans up after it."""

    def execute(self) -> None:
        """Run the subcommand.

        Raises:
            InputError: After a mistake in the input. The other ranks of this machine have ended then, and the folder of
                the run is removed if it holds no result.
        """
        try:
            if isinstance(self.trainer.strategy, GraphDDPStrategy):
                self.trainer.strategy.options = _options_by_name(self._as_saved(self.config[self.subcommand]))
            self._open_folder()
            super()._run_subcommand(str(self.subcommand))
            if self._folder is not None and not self.trainer.interrupted:
                self._folder.finish()
        except Exception as error:
            mistake = _mistake_of(error)
            if mistake is None:
                raise
            self._clean_up()
            if mistake is error:
                raise
            raise mistake from error

    def _open_folder(self) -> None:
        """Take a folder for logs and checkpoints, on rank 0: that of a run which goes on, or a new one."""
        trainer: Any = self.trainer  # Lightning's types lack some of its attributes
        config = self.config[self.subcommand]
        resume, config["resume"] = config.resume, None  # the saved configuration repeats the run
        root, saved = Path(config.trainer.default_root_dir or "runs"), config.checkpoint.dirpath
        shared, compared, folder = saved and Path(saved), self._as_saved(config), None
        if not self._logs and resume and saved is None:
            raise InputError("--resume: without pygdist's own loggers, say where checkpoints are: --checkpoint.dirpath")
        goes_on = bool(resume) and not self._logs
        if self._logs and self.subcommand == "fit":
            folder = folder_to_go_on(root, compared, resume, shared)  # other ranks may see another disk
            goes_on, saved = folder is not None, saved or folder
            if folder is not None and trainer.is_global_zero:
                self._folder = RunFolder(folder)
        if self._logs and trainer.is_global_zero and self._folder is None:
            self._new_folders = [path for path in (root, *root.parents) if not path.exists()]
            self._folder = new_folder(root)
            self._new_folders.insert(0, self._folder.path)
        if self._logs:
            trainer.loggers = _loggers(root, self._folder)
        if goes_on:
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
        if self.subcommand == "fit":
            of_run = OwnCheckpoints.of(folder, compared, root, shared) if shared and goes_on else None
            for one in trainer.callbacks:
                if isinstance(one, BestCheckpoint):
                    one.own = of_run
            # on all ranks, which agree on one file
            trainer.callbacks.insert(0, Resume(saved if goes_on else None, of_run))
            trainer._checkpoint_connector.note = note_of(self._folder, compared)

    def _as_saved(self, config: Any) -> Any:
        """Return a configuration in the form in which ``config.yaml`` of a run holds it."""
        return yaml.safe_load(self._parser(self._subcommand).dump(config, skip_none=False))

    def _clean_up(self) -> None:
        # the other ranks fail for the same reason, which is reported once
        logging.getLogger(GraphDDPStrategy.__module__.rpartition(".")[0]).setLevel(logging.CRITICAL)
        for process in getattr(self.trainer.strategy.launcher, "procs", []):
            if not isinstance(process, subprocess.Popen):
                continue  # forked and spawned ranks have ended when their error arrives
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self.trainer.is_global_zero or not self._new_folders:
            return
        run, *parents = self._new_folders
        if run.is_dir() and not (run / "metrics.csv").exists() and not any(run.rglob("*.ckpt")):
            shutil.rmtree(run)
        with contextlib.suppress(OSError):  # another process wrote to one of them
            for folder in parents:
                folder.rmdir()

    def before_predict(self) -> None:
        """Refuse on every rank, before predictions are computed, a path that cannot be written."""
        if self.trainer.limit_predict_batches == 0:
            raise InputError("--trainer.limit_predict_batches=0 leaves no predictions to write; leave it out")
        path = Path(self._get(self.config_init, "predictions").path)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if (path.exists() and not path.is_file()) or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"--predictions.path: {path} cannot be written; name a file in a writable folder")

    def predict(self, **arguments: Any) -> None:
        """Predict, and keep no predictions in memory: they are in the file that ``--predictions.path`` names."""
        self.trainer.predict(**{**arguments, "return_predictions": False})


def training_parser(command: str, task: str = "nodes") -> Any:
    """Return the parser of ``fit``, ``validate``, ``test`` or ``predict``, for documentation."""
    parsers = []

    class Asked(GraphCLI):
        @override
        def show_help(self) -> None:
            parsers.append(self._parser(command))

    with contextlib.suppress(SystemExit):
        Asked([command, f"--task={task}", "--help"])
    return parsers[0]


def _processes_here() -> int:
    """Return the number of processes that torchrun has started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def _mistake_of(error: Exception) -> InputError | None:
    """Return the error to report to the user in one line, or ``None`` if the error is no mistake in the input."""
    text = str(error)
    if isinstance(error, InputError):
        return error
    of_interval = isinstance(error, ValueError) and text.lstrip().startswith("`val_check_interval`")
    if of_interval or isinstance(error, (MisconfigurationException, FileNotFoundError)):
        return InputError(one_line(text))
    if isinstance(error, RuntimeError) and text.startswith("Early stopping conditioned on"):
        return InputError(f"EarlyStopping: {one_line(text)}")
    if isinstance(error, RuntimeError) and "loading state_dict" in text:
        return InputError(f"--ckpt_path: the checkpoint is of another model: {one_line(text.partition(':')[2])}")
    return refusal_of(error)


def _task_of(arguments: list[str]) -> str:
    """Return the value of ``--task``, on which the other options depend."""
    task = last_value(arguments, "task") or "nodes"
    if task not in TASKS:
        raise InputError(f"--task: {task!r}, expected {' or '.join(TASKS)}")
    return str(task)


def _task_by_class(arguments: list[str]) -> list[str]:
    """Return a command line on which `--model=LinkPredictor` or `--model LinkPredictor` is `--task=links`."""
    tasks = {f"--model={cls.__name__}": f"--task={task}" for task, cls in TASKS.items()}
    result: list[str] = []
    for argument in arguments:
        if result[-1:] == ["--model"] and f"--model={argument}" in tasks:
            result[-1] = tasks[f"--model={argument}"]
        else:
            result.append(tasks.get(argument, argument))
    return result


def _options_by_name(config: dict[str, Any]) -> dict[str, object]:
    """Return the options that all ranks must have alike, by name as on the command line."""
    return {name: value for key, inside in config.items() for name, value in _named(f"--{key}", inside)}


def _named(option: str, value: Any) -> Iterator[tuple[str, object]]:
    if option in _OF_MACHINE:
        return
    if option == "--ckpt_path":  # its place may be another; the content is compared when it is read
        yield option, "absent" if value is None else "given"
    elif isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _named(f"{option}.{key}", one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, one in enumerate(value):
            yield from _named(f"{option}[{number}]", one)
    else:
        yield option, value


def _help_text(command: str) -> dict[str, Any]:
    """Return the usage and description of a subcommand. The generated usage would name all two hundred options."""
    text = {"usage": f"pygdist {command} [--config FILE] [options]", "description": PURPOSES[command] + _ALL_OPTIONS}
    return {"prog": "pygdist", command: text}


def _strategy_of(strategy: Any) -> Any:
    """Return the ``strategy`` argument of the trainer; a class path without options becomes an instance."""
    names = StrategyRegistry.available_strategies()
    if not isinstance(strategy, str) or strategy == "auto" or strategy in names:
        return strategy
    module, _, name = strategy.rpartition(".")
    if module:
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(module), name, None)
            if isinstance(cls, type) and issubclass(cls, Strategy):
                return cls()
    ours = ", ".join(name for name in names if name.startswith(("graph_", "model_averaging")) and "unused" not in name)
    raise InputError(f"--trainer.strategy: unknown strategy '{strategy}'; on a graph in parts use one of {ours}")


def _loggers(root: Path, folder: RunFolder | None) -> list[Any]:
    """Return the loggers of a run, to CSV and, where it is installed, to TensorBoard.

    They write to the run's folder, which also gets the checkpoints and the configuration. Rank 0 has a folder, and
    tells the others its name; they write nothing.
    """
    version = 0 if folder is None else int(folder.path.name.removeprefix("version_"))
    board = [TensorBoardLogger] if importlib.util.find_spec("tensorboard") is not None else []
    return [logger(root, name="", version=version) for logger in (*board, EpochLogger)]


def run(command: str, arguments: list[str]) -> int:
    """Run one of Lightning's four subcommands."""
    GraphCLI([command, *arguments]).execute()
    return 0
