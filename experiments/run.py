"""Runs experiments, all or some, in full or in a short version, and any row of any table again.

    python -m experiments.run --short                                     # make experiments
    python -m experiments.run experiments/foundation/hosts.yaml
    python -m experiments.run experiments/foundation/hosts.yaml --only "ranks 4, network 1gbit"
    python -m experiments.run --row experiments/kernels/results/measure-grid.csv:17

An experiment is one YAML file: what the paper claims and how it is drawn (see ``pygdist report``), and under ``run``
how it is measured. That is either a list of settings for ``harness.py``, or a ``script`` beside the file with
``arguments``, and others under ``short``. ``{data}`` stands for the folder of real graphs (``--data``), ``{work}`` for
one that is deleted in the end. Results go to ``OUT/FOLDER/NAME.csv``, with a copy of the description for the report,
and what else a script leaves to ``NAME.files/``.
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

HERE = Path(__file__).resolve().parent


class UserError(Exception):
    """A mistake of the caller, told in one line."""


class NeedsDataError(UserError):
    """Real graphs are wanted and not given."""


@dataclass(frozen=True)
class Experiment:
    """One YAML file.

    Attributes:
        path: The file.
        description: What it says, for the report.
        run: How it is measured.
    """

    path: Path
    description: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its files."""
        return self.path.stem

    def folder(self, out: Path) -> Path:
        """Where its results go: a folder for each paper."""
        return out / (self.path.parent.name if self.path.parent != HERE else "cluster")


def read(path: Path) -> Experiment:
    """Read the file of an experiment.

    Raises:
        UserError: If it is none.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not isinstance(found.get("run"), dict) or "title" not in found:
        raise UserError(f"{path}: no experiment; expected the keys title and run")
    return Experiment(path.resolve(), {key: value for key, value in found.items() if key != "run"}, found["run"])


def known() -> list[Path]:
    """The experiments of this folder."""
    return sorted(path for path in HERE.rglob("*.yaml") if "results" not in path.relative_to(HERE).parts)


def run(experiment: Experiment, options: argparse.Namespace, work: Path) -> str:
    """Measure, and leave the results; what lay there of the experiment goes first, so that nothing old passes as new.

    Returns:
        What went wrong, or nothing.

    Raises:
        UserError: If it cannot be run as asked.
    """
    folder = experiment.folder(options.out)
    description = folder / f"{experiment.name}.yaml"
    if description.resolve() == experiment.path:
        raise UserError(f"--out: {options.out} holds the experiments themselves; give another folder")
    scripted = "script" in experiment.run
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
    """Without links some columns are empty: a plot of nothing but these would be empty too."""
    if not table.is_file():
        return
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = yaml.safe_load(description.read_text(encoding="utf-8"))
    drawn, left_out = [], []
    for plot in found.get("plots", []):
        names = [plot["y"]] if isinstance(plot["y"], str) else plot["y"]
        empty = all(row.get(name) == "" for row in rows for name in names)
        (left_out if rows and empty else drawn).append(plot)
    if left_out:
        titles = ", ".join(plot["title"] for plot in left_out)
        differs = f"{found.get('differs', '')} Measured without emulated links, so this is not drawn: {titles}."
        found |= {"plots": drawn, "differs": differs.strip()}
        description.write_text(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _described(experiment: Experiment, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """The description that goes with the results."""
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
    """The settings of an experiment; those that ``--only`` leaves out stay among them."""
    shaped = why_unshaped() is None
    try:
        settings = settings_of(experiment.run, short=options.short, shaped=shaped)
        elsewhere = settings_of(experiment.run, short=options.short, shaped=not shaped)
    except ValueError as error:
        raise UserError(f"{experiment.path}: {error}") from error
    for name in set(options.only or ()) - {setting.name for setting in settings}:
        # measured where hosts could be emulated and here they cannot, or the other way round
        other = next((one for one in elsewhere if one.name == name), None)
        if other is None:
            names = "; ".join(setting.name for setting in settings)
            raise UserError(f"{experiment.path}: no setting {name!r}; there are: {names}")
        settings = [*settings, other if shaped else replace(other, network="unshaped")]
    for one in settings:
        _filled(one.graph_args, options.data, work)  # refuses what is not given
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
    given = experiment.run.get("short", []) if options.short else experiment.run.get("arguments", [])
    return [str(one) for one in _filled(given, options.data, work)]


def _script(experiment: Experiment, arguments: Sequence[str], folder: Path, work: Path) -> str:
    """Run a script; its table is named after the experiment."""
    script = (experiment.path.parent / experiment.run["script"]).relative_to(HERE.parent).with_suffix("")
    made = Path(tempfile.mkdtemp(dir=work))
    command = [sys.executable, "-m", ".".join(script.parts), *arguments, "--out", str(made)]
    done = subprocess.run(command, env=_environment(), cwd=work, check=False)
    table = made / experiment.run.get("csv", f"{script.name}.csv")
    if done.returncode not in (0, SOME_FAILED):  # a table that broke off is not shown as one
        return f"{script.name} ended with exit code {done.returncode}"
    if not table.is_file():
        return f"{script.name} left no {table.name}"
    shutil.move(table, folder / f"{experiment.name}.csv")
    if any(made.iterdir()):
        shutil.move(made, folder / f"{experiment.name}.files")
    return "some rows have a note in place of figures" if done.returncode else ""


def _filled(value: Any, data: Path | None, work: Path) -> Any:
    """The same with ``{data}`` and ``{work}`` filled in.

    Raises:
        NeedsDataError: If ``{data}`` is wanted and not given.
    """
    if isinstance(value, Mapping):
        return {key: _filled(one, data, work) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, data, work) for one in value]
    if not isinstance(value, str):
        return value
    if "{data}" in value and data is None:
        raise NeedsDataError(
            "needs real graphs: give --data, a folder with Planetoid/ and LINKXDataset/ as PyG has them"
        )
    return value.replace("{data}", str(data)).replace("{work}", str(work))


def _environment() -> dict[str, str]:
    """With pygdist and these modules on the path, wherever the command is started."""
    paths = [str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def again(place: str, data: Path | None = None) -> list[str]:
    """The command that runs a row of a table again.

    Args:
        place: ``TABLE.csv:ROW``, the first row being 1.
        data: The folder of real graphs.

    Raises:
        UserError: If there is no such row, or nothing says how it was measured.
        InputError: If its description is damaged.
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
    return [str(data) if word == "DATA" and data is not None else word for word in words]


def _rerun(options: argparse.Namespace) -> int:
    words = [*again(options.row, options.data), "--out", str(options.out.resolve())]
    print(shlex.join(words), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    return subprocess.run([sys.executable, *words[1:]], env=_environment(), cwd=HERE.parent, check=False).returncode


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("experiments", nargs="*", type=Path, help="YAML files; all of this folder by default")
    found.add_argument("--short", action="store_true", help="the short version: small graphs, few epochs")
    found.add_argument("--only", nargs="+", metavar="SETTING", help="some settings of one experiment, by name")
    found.add_argument("--row", metavar="TABLE.csv:ROW", help="run one row of a table again")
    found.add_argument("--data", type=lambda text: Path(text).resolve(), help="real graphs, laid out as PyG does")
    found.add_argument("--work", type=Path, help="folder for parts, kept; a temporary one by default")
    found.add_argument("--resume", action="store_true", help="take over what an interrupted run has finished")
    found.add_argument("--list", action="store_true", help="list the experiments")
    found.add_argument("--out", type=Path, help="folder; results by default, again for some rows or settings")
    return found


def main() -> int:
    """Run what the command line asks for; 1 if something failed, 2 after a mistake."""
    options = parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # temporary files go, and what was started ends with it
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    options.out = options.out or Path("again" if options.row or options.only else "results")
    try:
        if options.data is not None and not options.data.is_dir():
            raise UserError(f"--data: there is no folder {options.data}")
        if options.row:
            return _rerun(options)
        chosen = [read(path) for path in options.experiments or known()]
        if options.list:
            for one in chosen:
                print(f"{one.path.relative_to(HERE.parent)}  {one.description['title']}")
            return 0
        if options.only and len(chosen) != 1:
            raise UserError("--only: name the experiment that these settings are of")
        return _all(chosen, options)
    except (UserError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all(chosen: Sequence[Experiment], options: argparse.Namespace) -> int:
    """Run one after the other; what needs real graphs is left out unless it is asked for by name."""
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
            except NeedsDataError as error:
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
