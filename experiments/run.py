"""Runs all or some experiments, in full or in a short version, or one row of a table again.

    python -m experiments.run --short                                     # make experiments
    python -m experiments.run experiments/foundation/hosts.yaml
    python -m experiments.run experiments/foundation/hosts.yaml --only "ranks 4, network 1gbit"
    python -m experiments.run --row experiments/kernels/results/measure-grid.csv:17

An experiment is one YAML file. It holds the paper's claim and the plots (see ``pygdist report``), and under ``run`` the
measurement: either settings for ``harness.py``, or a ``script`` beside the file with its ``arguments``, and those of
the short version under ``short``. ``gpu: true`` leaves it out without a GPU. ``{data}`` stands for the folder of
real graphs (``--data``), ``{dgl}`` for that of DGL (``--dgl``), ``{work}`` for a folder that is deleted at the end.
Results go to ``OUT/FOLDER/NAME.csv``, with a copy of the description for the report. Other files of a script go to
``NAME.files/``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.cluster import why_unshaped
from experiments.harness import Setting, measure, settings_of
from experiments.machine import SOME_FAILED
from pygdist.errors import InputError
from pygdist.report import read_description, rerun_command

CLAIMS = "claims.yaml"  # what the papers claim, no experiment
HERE = Path(__file__).resolve().parent
_NEEDS = {
    "data": "needs real graphs: give --data, a folder with Planetoid/ and LINKXDataset/ as PyG has them",
    "dgl": "needs DGL: give --dgl, a folder that the wheel of dgl 2.1.0 was unpacked into",
}


class UserError(Exception):
    """A mistake of the caller; the message has one line."""


class NeedsError(UserError):
    """The experiment needs real graphs or DGL, but ``--data`` or ``--dgl`` is missing; or a GPU, and there is none."""


@dataclass(frozen=True)
class Experiment:
    """One YAML file.

    Attributes:
        path: The file.
        description: Everything except ``run``, for the report.
        run: The measurement.
    """

    path: Path
    description: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the experiment and of its files."""
        return self.path.stem

    def folder(self, out: Path) -> Path:
        """Return the folder of the results: one for each folder of experiments."""
        return out / self.path.parent.name


def read(path: Path) -> Experiment:
    """Read the file of an experiment.

    Raises:
        UserError: If the file cannot be read or is not an experiment.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("run"), dict) or "title" not in content:
        raise UserError(f"{path}: not an experiment; expected the keys title and run")
    return Experiment(path.resolve(), {key: value for key, value in content.items() if key != "run"}, content["run"])


def known() -> list[Path]:
    """Return the paths of all experiments in this folder."""
    paths = (path for path in HERE.rglob("*.yaml") if "results" not in path.relative_to(HERE).parts)
    return sorted(path for path in paths if path.name != CLAIMS)


def run(experiment: Experiment, options: argparse.Namespace, work: Path) -> str:
    """Measure, and write the results. Earlier results of the experiment are deleted first.

    Returns:
        What went wrong, in one line; empty if nothing did.

    Raises:
        UserError: If the experiment cannot run with these options.
    """
    folder = experiment.folder(options.out)
    description = folder / f"{experiment.name}.yaml"
    if description.resolve() == experiment.path:
        raise UserError(f"--out: {options.out} holds the experiments themselves; give another folder")
    scripted = "script" in experiment.run
    if experiment.run.get("gpu") and not torch.cuda.is_available():
        raise NeedsError("needs a GPU")
    if scripted and options.only:
        raise UserError(f"{experiment.path.name}: --only picks settings of the harness; run one row with --row")
    if scripted and options.resume:
        print(f"{experiment.name}: a script cannot be resumed, and starts anew", file=sys.stderr)
    made = None if scripted else _chosen(experiment, options, work)
    arguments = _arguments(experiment, options, work) if scripted else []
    folder.mkdir(parents=True, exist_ok=True)
    if scripted or not (options.resume or options.only):
        for old in folder.glob(f"{experiment.name}.*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    text = yaml.safe_dump(_described(experiment, options, arguments), sort_keys=False, allow_unicode=True)
    description.write_text(text, encoding="utf-8")
    problem = (
        _script(experiment, arguments, folder, work) if made is None else _settings(experiment, made, options, work)
    )
    if why_unshaped() is not None:
        _leave_out_plots_of_links(description, folder / f"{experiment.name}.csv")
    return problem


def _leave_out_plots_of_links(description: Path, table: Path) -> None:
    """Drop plots whose columns are all empty, as those about links are without emulated links."""
    if not table.is_file():
        return
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    content = yaml.safe_load(description.read_text(encoding="utf-8"))
    drawn, left_out = [], []
    for plot in content.get("plots", []):
        names = [plot["y"]] if isinstance(plot["y"], str) else plot["y"]
        empty = all(row.get(name) == "" for row in rows for name in names)
        (left_out if rows and empty else drawn).append(plot)
    if left_out:
        titles = ", ".join(plot["title"] for plot in left_out)
        differs = f"{content.get('differs', '')} Measured without emulated links, so this is not drawn: {titles}."
        content |= {"plots": drawn, "differs": differs.strip()}
        description.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _described(experiment: Experiment, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the description that goes with the results."""
    if not options.short:
        return dict(experiment.description)
    said = f" Its script ran with {shlex.join(arguments)}." if arguments else ""
    only = "" if "script" in experiment.run else " --only {setting}"
    place = experiment.path.relative_to(HERE.parent)
    return {
        **experiment.description,
        "title": f"{experiment.description['title']} (short version)",
        "differs": "This is the short version, which shows that the experiment works: small graphs, few epochs and "
        f"rounds. Its figures are not those of the full one.{said}",
        "again": f"python -m experiments.run {place} --short{only}",
    }


def _chosen(experiment: Experiment, options: argparse.Namespace, work: Path) -> list[Setting]:
    """Return all settings of an experiment, also those that ``--only`` leaves out."""
    shaped = why_unshaped() is None
    try:
        settings = settings_of(experiment.run, short=options.short, shaped=shaped)
        elsewhere = settings_of(experiment.run, short=options.short, shaped=not shaped)
    except ValueError as error:
        raise UserError(f"{experiment.path}: {error}") from error
    for name in set(options.only or ()) - {setting.name for setting in settings}:
        # the name may come from a machine that can emulate hosts while this one cannot, or the reverse
        other = next((one for one in elsewhere if one.name == name), None)
        if other is None:
            names = "; ".join(setting.name for setting in settings)
            raise UserError(f"{experiment.path}: no setting {name!r}; there are: {names}")
        settings = [*settings, other if shaped else replace(other, network="unshaped")]
    for one in settings:
        _filled(one.graph_args, {"data": options.data, "work": work})  # raises if --data is missing
    return [replace(one, places={"data": str(options.data), "work": str(work)}) for one in settings]


def _settings(experiment: Experiment, settings: list[Setting], options: argparse.Namespace, work: Path) -> str:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    folder, name = experiment.folder(options.out), experiment.name
    chosen = {"only": options.only or (), "resume": options.resume}
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        try:
            rows = measure(settings, folder, name, work=work, console=progress, **chosen)
        except ValueError as error:
            raise UserError(str(error)) from error
    shown = list(dict.fromkeys([*experiment.description.get("table", ["setting", "epoch_s"]), "network", "failed"]))
    table = Table(title=experiment.description["title"])
    for column in shown:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(_short(row.get(column))) for column in shown))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return "; ".join(f"{row['setting']}: {row['failed']}" for row in rows if row["failed"])


def _arguments(experiment: Experiment, options: argparse.Namespace, work: Path) -> list[str]:
    words = experiment.run.get("short", []) if options.short else experiment.run.get("arguments", [])
    return [str(one) for one in _filled(words, {"data": options.data, "dgl": options.dgl, "work": work})]


def _script(experiment: Experiment, arguments: Sequence[str], folder: Path, work: Path) -> str:
    """Run a script and name its table after the experiment."""
    script = (experiment.path.parent / experiment.run["script"]).relative_to(HERE.parent).with_suffix("")
    made = Path(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", ".".join(script.parts), *arguments, "--out", str(made)]
    done = subprocess.run(command, env=_environment(), cwd=work, check=False)
    table = made / experiment.run.get("csv", f"{script.name}.csv")
    if done.returncode not in (0, SOME_FAILED):  # the table may be incomplete
        return f"{script.name} ended with exit code {done.returncode}"
    if not table.is_file():
        return f"{script.name} left no {table.name}"
    shutil.move(table, folder / f"{experiment.name}.csv")
    if any(made.iterdir()):
        shutil.move(made, folder / f"{experiment.name}.files")
    return "some rows have a note in place of figures" if done.returncode else ""


def _filled(value: Any, places: Mapping[str, Path | None]) -> Any:
    """Return ``value`` with the folders filled in, for example the one of ``data`` in place of ``{data}``.

    Raises:
        NeedsError: If ``value`` contains a folder that was not given.
    """
    if isinstance(value, Mapping):
        return {key: _filled(one, places) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, places) for one in value]
    if not isinstance(value, str):
        return value
    for name, place in places.items():
        if place is None and f"{{{name}}}" in value:
            raise NeedsError(_NEEDS[name])
        value = value.replace(f"{{{name}}}", str(place))
    return value


def _environment() -> dict[str, str]:
    """Return the environment for a command, with pygdist and these modules on the path."""
    paths = [str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def again(place: str, data: Path | None = None, dgl: Path | None = None) -> list[str]:
    """Return the command that runs a row of a table again.

    Args:
        place: ``TABLE.csv:ROW``; the first row is 1.
        data: The folder of real graphs, in place of the word ``DATA``.
        dgl: The folder of DGL, in place of the word ``DGL``.

    Raises:
        UserError: If there is no such row, or no description with ``again``.
        InputError: If the description is damaged.
    """
    name, _, number = place.rpartition(":")
    table = Path(name)
    if not table.is_file() or not number.isdigit():
        raise UserError(f"--row: expected TABLE.csv:ROW, got {place!r}")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not 1 <= int(number) <= len(rows):
        raise UserError(f"--row: {table} has rows 1 to {len(rows)}, not {number}")
    places = [folder / f"{table.stem}.yaml" for folder in (table.parent, table.parent.parent)]
    path = next((path for path in places if path.is_file()), None)
    words = shlex.split(rerun_command(read_description(path), rows[int(number) - 1])) if path else []
    if not words:
        raise UserError(f"--row: {table}: no {table.stem}.yaml with 'again' beside it or above")
    folders = {name: str(folder) for name, folder in (("DATA", data), ("DGL", dgl)) if folder is not None}
    return [folders.get(word, word) for word in words]


def _rerun(options: argparse.Namespace) -> int:
    words = [*again(options.row, options.data, options.dgl), "--out", str(options.out.resolve())]
    print(shlex.join(words), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    return subprocess.run([sys.executable, *words[1:]], env=_environment(), cwd=HERE.parent, check=False).returncode


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("experiments", nargs="*", type=Path, help="YAML files (default: all in this folder)")
    cli.add_argument("--short", action="store_true", help="run the short version: small graphs, few epochs")
    cli.add_argument("--only", nargs="+", metavar="SETTING", help="run only these settings of one experiment")
    cli.add_argument("--row", metavar="TABLE.csv:ROW", help="run one row of a table again")
    cli.add_argument("--data", type=lambda text: Path(text).resolve(), help="folder of real graphs in PyG's layout")
    cli.add_argument("--dgl", type=lambda text: Path(text).resolve(), help="folder of DGL's unpacked wheel")
    cli.add_argument("--work", type=Path, help="folder that keeps partitioned graphs (default: a temporary one)")
    cli.add_argument("--resume", action="store_true", help="keep what an interrupted run has finished")
    cli.add_argument("--list", action="store_true", help="list the experiments")
    cli.add_argument("--out", type=Path, help="folder of the results (default: results; with --row or --only: again)")
    return cli


def main() -> int:
    """Run what the command line asks for; 1 if something failed, 2 after a mistake."""
    options = parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit normally, so that temporary files and started processes go
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    options.out = options.out or Path("again" if options.row or options.only else "results")
    try:
        for name in ("data", "dgl"):
            folder = getattr(options, name)
            if folder is not None and not folder.is_dir():
                raise UserError(f"--{name}: there is no folder {folder}")
        if options.row:
            return _rerun(options)
        chosen = [read(path) for path in options.experiments or known()]
        if options.list:
            for one in chosen:
                print(f"{one.path.relative_to(HERE.parent)}  {one.description['title']}")
            return 0
        if options.only and len(chosen) != 1:
            raise UserError("--only: name the experiment that has these settings")
        return _all(chosen, options)
    except (UserError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all(chosen: Sequence[Experiment], options: argparse.Namespace) -> int:
    """Run one after the other. Skip experiments that need ``--data`` or ``--dgl`` if it is missing, unless named."""
    outcome: dict[str, str] = {}
    if reason := why_unshaped():
        print(f"unshaped: {reason}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pygdist-experiments-")))
        work.mkdir(parents=True, exist_ok=True)
        for experiment in chosen:
            label = f"{experiment.path.parent.name}/{experiment.name}"
            print(f"--- {label}: {experiment.description['title']}", flush=True)
            start = time.perf_counter()
            try:
                problem = run(experiment, options, work.resolve())
            except NeedsError as error:
                if options.experiments:
                    raise
                problem = f"left out: {error}"
            outcome[label] = f"{problem or 'done'} ({time.perf_counter() - start:.0f} s)"
            print(f"--- {label}: {outcome[label]}", flush=True)
    failed = [label for label, said in outcome.items() if not said.startswith(("done", "left out"))]
    for label, said in outcome.items():
        print(f"{label}: {said}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
