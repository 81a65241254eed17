"""Kills runs at every moment, and resumes them: who is gone, what is said, what is left, and where the run ends up.

    python -m experiments.reliability.campaign --out figures
    python -m experiments.reliability.campaign --kills 20 --out figures     # ten minutes

Each case is drawn with a seed: a signal (SIGTERM, SIGINT, SIGKILL, SIGSTOP), whom it reaches (the process that started
the others, one rank, or all at once), the phase (import, meeting, partitioning, first step, training, checkpoint,
validation, test, end), the launcher, the system and the number of ranks. A callback, :class:`Phases`, marks the phases
as ranks reach them. After the signal:

- ``gone_s``: seconds until no process of the run is left; all must be within 30 s, or with a stopped rank within
  ``lost_after_s`` and 15 s;
- ``code``: the exit code of the process that started the others; 0 only if the work was done before;
- ``said``: a line on standard error names the case's signal and a rank that it reached, or after SIGKILL and SIGSTOP
  the rank that was lost. After SIGTERM and SIGINT, and after SIGKILL to a rank of torchrun's, it is pygdist's only line
  of error; no traceback is pygdist's. Under torchrun, whose summary names each rank that has ended and how, the summary
  must name the rank, and may be all that is said of a rank that ends while it imports, or once the work is done;
- ``left``: processes that the campaign had to kill;
- ``loss``: what ``pygdist fit --resume`` ends with; equal to the unbroken run's, bit for bit. Where the kill left a
  whole checkpoint, this run goes on from one, in the same folder. No temporary file is left, of either run.

A run or a rank that had ended before the signal is no case that is survived: it is wrong.

Prints a table of counts and writes ``campaign.csv``, a line for each case. Exits with code 1 if a case is not as it
must be.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from experiments.machine import provenance
from pygdist.lightning import newest_checkpoint

PHASES = ("import", "meeting", "partitioning", "first step", "training", "checkpoint", "validation", "test", "end")
SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL", "SIGSTOP")
SYSTEMS: Mapping[str, Sequence[str]] = {
    "comm": (),
    "cache": ("--model.backend=cache",),
    "hybrid": ("--model.backend=hybrid",),
    "tensor": ("--model.backend=tensor",),
    "replica": ("--model.backend=replica",),
    "averaging": ("--model.backend=replica", "--trainer.strategy=model_averaging"),
    "delayed": ("--model.backend=DelayedBackend", "--model.backend.delay=2"),
}
LOST_AFTER_S, EPOCHS = 20.0, 8
MARKS, _RUN = "CAMPAIGN_MARKS", "CAMPAIGN_RUN"  # environment variables
SLOW_S = 300.0  # a phase that is not reached by then fails the case
#: names of temporary files and folders
_WITHOUT_STORE = "the rendezvous store does not answer: look at rank 0"
TEMPORARY = re.compile(r"(^|/)(\.[^/]*(\.partial|\.tmp|\.tmp-[^/]*|\.lock)|[^/]*\.tmp|pygdist-[^/]*|\.pygdist-[^/]*)$")


class Phases(pl.Callback):
    """Marks the phases that a rank reaches, in a file of its own."""

    def __init__(self) -> None:
        self._mark("meeting")  # the configuration is read, ranks have not met

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ranks have met, and the graph is cut."""
        self._mark("set up")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Mark the first step, and one in mid-run."""
        self._mark("first step" if trainer.current_epoch == 0 else "training" if trainer.current_epoch == 4 else "")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Mark a checkpoint that is about to be written."""
        self._mark("checkpoint" if trainer.current_epoch >= 2 else "")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark a validation of a model that has been trained."""
        self._mark("validation" if trainer.current_epoch >= 2 else "")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the test."""
        self._mark("test")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the end of training."""
        self._mark("end")

    @staticmethod
    def _mark(phase: str) -> None:
        if phase:
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
            with open(f"{os.environ[MARKS]}/{rank}", "a") as file:
                file.write(f"{phase}\n")


@dataclass(frozen=True)
class Case:
    """One kill.

    Attributes:
        number: Its number in the campaign.
        signal: The name of the signal.
        who: ``starter``, ``all``, or the number of a rank.
        phase: The phase at whose beginning the signal is sent.
        later_s: Seconds after the beginning of the phase.
        launcher: ``ordinary`` or ``torchrun``.
        system: A name of ``SYSTEMS``.
        ranks: Number of ranks.
    """

    number: int
    signal: str
    who: str
    phase: str
    later_s: float
    launcher: str
    system: str
    ranks: int


@dataclass(frozen=True)
class Outcome:
    """The end of a case; see the module."""

    gone_s: float
    code: int
    said: str
    left: int
    loss: str = ""
    expected: str = ""
    wrong: str = ""


def draw(number: int, seed: int) -> list[Case]:
    """Return seeded cases; every phase and every signal is there equally often."""
    cases, random_ = [], random.Random(seed)
    for index in range(number):
        ranks = random_.choice((2, 3))
        name = SIGNALS[index % len(SIGNALS)]
        phase = PHASES[index % len(PHASES)]
        launcher = random_.choice(("ordinary", "torchrun"))
        first = int(launcher == "ordinary")  # whose rank 0 is the starter
        who = random_.choice(("starter", "all", *map(str, range(first, ranks))))
        if name == "SIGSTOP" and who == "all":
            who = "1"  # as after Ctrl-Z, they would only go on later
        if name == "SIGSTOP" and launcher == "torchrun" and who == "starter":
            who = "0"  # a stopped agent of torchrun's is no rank
        later_s = random_.uniform(0.0, {"import": 4.0, "meeting": 1.0, "partitioning": 0.5}.get(phase, 0.05))
        system = random_.choice([name for name in SYSTEMS if phase != "test" or name != "averaging"])
        cases.append(Case(index, name, who, phase, round(later_s, 3), launcher, system, ranks))
    return cases


# -- a run -------------------------------------------------------------------------------------------------------------


def arguments(folder: Path, ranks: int) -> list[str]:
    """Return options of a run on a generated graph, whose cache and results are in a folder."""
    return [
        "--data.dataset=sbm", "--data.dataset_args={num_nodes: 20000, avg_degree: 10}",
        f"--data.cache_dir={folder / 'cache'}", "--model.model=torch_geometric.nn.GCN",
        "--model.model.in_channels=-1", "--model.model.hidden_channels=16", "--model.model.num_layers=2",
        "--model.model.out_channels=10", f"--trainer.devices={ranks}", "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={folder / 'runs'}", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip


class Run:
    """A run of ``pygdist`` in a folder of its own, with every process that belongs to it.

    Args:
        case: Says how it is started, and which signal it gets.
        folder: Its cache, results and marks are there.
        command: ``fit``, ``test``, ...
        options: Options of the command.
        torchrun: Further options of the launcher ``torchrun``.
        env: Further environment variables.
    """

    def __init__(
        self, case: Case, folder: Path, command: str, *options: str, torchrun: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.case, self.folder, self.id = case, folder, uuid.uuid4().hex
        self.marks = folder / f"marks-{self.id}"
        self.marks.mkdir()
        self._told = folder / f"told-{self.id}"
        self.last = ""  # the processes that were there to the end
        program = [sys.executable, "-m", "pygdist.cli"]
        if case.launcher == "torchrun":
            program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.ranks}"]
            program += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *torchrun, "-m", "pygdist.cli"]
        scratch = folder / "tmp"
        scratch.mkdir(exist_ok=True)
        program += [command, *arguments(folder, case.ranks), *SYSTEMS[case.system], *options]
        program += ["--trainer.callbacks+=experiments.reliability.campaign.Phases"]
        with self._told.open("wb") as told:
            self.process = subprocess.Popen(
                program, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=told,
                env={**os.environ, "TMPDIR": str(scratch), MARKS: str(self.marks), _RUN: self.id, **(env or {})},
                start_new_session=True, preexec_fn=_like_a_terminal,
            )  # fmt: skip

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self._told.read_text(errors="replace")

    def await_phase(self, phase: str, rank: str) -> bool:
        """Wait until a rank has reached a phase; ``False`` if the run ended before."""
        path, deadline = self.marks / rank, time.monotonic() + SLOW_S
        mark = {"import": "", "partitioning": "meeting"}.get(phase, phase)
        while time.monotonic() < deadline and self.process.poll() is None:
            reached = path.read_text().split("\n") if path.exists() else []
            begun = phase != "partitioning" or any((self.folder / "cache").glob(".*.tmp-*/*"))  # files of parts
            if not mark or (mark in reached and begun):
                return True
            time.sleep(0.002)
        return False

    def pids(self) -> dict[str, int]:
        """Return the processes that are left, by rank; the one that started the others is ``starter``."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                values = dict(one.partition("=")[::2] for one in (folder / "environ").read_text().split("\0"))
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if values.get(_RUN) == self.id and state not in "ZX":
                pid = int(folder.name)
                rank = values.get("RANK") or values.get("LOCAL_RANK") or f"process {pid}"
                found["starter" if pid == self.process.pid else rank] = pid
        return found

    def send(self) -> bool:
        """Send the case's signal; ``False`` if the run or the rank had ended."""
        number, who, ranks = signal.Signals[self.case.signal], self.case.who, self.case.ranks
        deadline = time.monotonic() + SLOW_S
        while self.process.poll() is None:  # one that nobody has waited for yet would take a signal
            there = self.pids()
            is_there = who in ("starter", "all") or who in there
            alone = self.case.signal == "SIGSTOP" and len(there) < ranks  # it could be told of by nobody
            if is_there and (not alone or time.monotonic() > deadline):
                pid = self.process.pid if who in ("starter", "all") else there[who]
                return delivered(os.killpg if who == "all" else os.kill, pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return False

    def wait(self, limit_s: float) -> tuple[float, int, int]:
        """Return the seconds until all processes are gone, the exit code, and how many had to be killed."""
        began, left = time.monotonic(), 0
        while (self.process.poll() is None or self.pids()) and time.monotonic() - began < limit_s:
            self.last = ", ".join(sorted(self.pids())) or self.last
            time.sleep(0.1)
        took_s = time.monotonic() - began
        for pid in self.pids().values():
            left += delivered(os.kill, pid, signal.SIGKILL)
        return took_s, self.process.wait(), left


def delivered(kill: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Send a signal to a process, or a group; ``False`` if there is none."""
    try:
        kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _like_a_terminal() -> None:
    """Let Ctrl-C count, as for a program that a shell starts in the foreground."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# -- a case ------------------------------------------------------------------------------------------------------------


def attempt(case: Case, folder: Path) -> Outcome:
    """Run one case."""
    fit = (f"--trainer.max_epochs={EPOCHS}", "--model.lr=0.01", f"--trainer.strategy.lost_after_s={LOST_AFTER_S}")
    run = Run(case, folder, "test") if case.phase == "test" else Run(case, folder, "fit", *fit)
    rank = case.who if case.who.isdigit() else "0"
    reached = run.await_phase(case.phase, rank)
    time.sleep(case.later_s)
    sent = run.send()
    limit_s = LOST_AFTER_S + 15.0 if case.signal == "SIGSTOP" else 30.0
    gone_s, code, left = run.wait(limit_s + 60.0)
    outcome = Outcome(round(gone_s, 1), code, told(run.errors, case), left)
    if reached and sent:
        outcome = replace(outcome, wrong=what_is_wrong(case, outcome, run.errors, limit_s, run.last))
    else:
        missed = "the run had ended before the signal" if reached else f"'{case.phase}' was not reached"
        outcome = replace(outcome, wrong=f"{missed}: {run.errors[-500:]}")
    if case.phase == "test" or outcome.wrong:
        return outcome
    whole, before = newest_checkpoint(folder / "runs"), _versions(folder)
    again = Run(replace(case, signal="", who=""), folder, "fit", *fit, "--resume=true")
    _, code, _ = again.wait(SLOW_S)
    loss, expected = last_loss(folder), unbroken_loss(case.system, case.ranks)
    right = code == 0 and loss == expected != "none"
    faults = [] if right else [f"exit code {code}, loss {loss}, and the unbroken run's is {expected}"]
    if whole is not None and ("goes on from" not in again.errors or _versions(folder) != before):
        faults.append(f"it began anew, beside {whole.name}")
    if left := left_behind(folder):
        faults.append(f"{left[0]} is left")
    wrong = f"resumed: {'; '.join(faults)}: {again.errors[-500:]}" if faults else ""
    return replace(outcome, loss=loss, expected=expected, wrong=wrong)


def _versions(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").glob("version_*"))


def left_behind(folder: Path) -> list[str]:
    """Return the names of temporary files and folders below a folder."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [name for name in names if TEMPORARY.search(name)]


def what_is_wrong(case: Case, outcome: Outcome, errors: str, limit_s: float, last: str) -> str:
    """Say what is not as it must be; ``last`` are the processes that ended last."""
    faults = []
    if outcome.gone_s > limit_s:
        faults.append(f"{last} gone after {outcome.gone_s:.0f} s")
    if outcome.left:
        faults.append(f"{outcome.left} left")
    finished = "Trainer.fit` stopped" in errors  # a signal after the work is done ends nothing
    if outcome.code == 0 and not finished:
        faults.append("exit code 0")
    if (codes := _codes(case)) and outcome.code not in (*codes, 0):
        faults.append(f"exit code {outcome.code}")
    if "terminate called" in errors:
        faults.append("a process aborted")
    if re.search(r'File "[^"]*/pygdist/' if case.launcher == "torchrun" else "Traceback", errors):
        faults.append(f"a traceback: {errors[errors.find('Traceback') :][-2000:]}")
    lines = [line for line in errors.splitlines() if "pygdist: error: " in line]
    to_rank_of_torchrun = case.launcher == "torchrun" and case.signal == "SIGKILL" and case.who.isdigit()
    one = case.signal in ("SIGTERM", "SIGINT") or to_rank_of_torchrun  # after others, each rank may tell of the loss
    silent = case.phase == "import" or finished  # Python itself ends, or a command that is done
    # other ranks of torchrun may say, too, that they wait for rank 0, which keeps their store
    telling = [line for line in lines if not (case.launcher == "torchrun" and _WITHOUT_STORE in line)]
    if one and len(telling) != 1 and not (silent and not telling):
        faults.append(f"{len(telling)} lines of error")
    if one and lines and not outcome.said:
        faults.append(f"the line does not name what happened: {lines[0][:200]}")
    in_summary = case.launcher == "torchrun" and _is_in_summary(case, errors)
    if case.launcher == "torchrun" and case.who.isdigit() and outcome.code and not in_summary:
        faults.append(f"torchrun's summary does not name rank {case.who}")
    if not outcome.said and not finished and not _may_be_silent(case) and not (in_summary and case.phase == "import"):
        faults.append("nothing said")
    return "; ".join(faults)


def _codes(case: Case) -> tuple[int, ...]:
    """Return the exit codes that a case may end with, apart from 0; none if any will do."""
    number = signal.Signals[case.signal]
    by_default = -number if case.who in ("starter", "all") else 1  # before Python handles a signal, or after the work
    if case.launcher == "torchrun" or number in (signal.SIGKILL, signal.SIGSTOP):
        return (1, -signal.SIGKILL if number == signal.SIGSTOP and case.launcher == "ordinary" else by_default)
    return (128 + number, -number)


def _may_be_silent(case: Case) -> bool:
    """Tell if nobody is left to say a word, or nobody is there yet."""
    return (case.who, case.signal) == ("all", "SIGKILL") or (case.phase == "import" and not case.who.isdigit())


def _is_in_summary(case: Case, errors: str) -> bool:
    """Tell if torchrun's summary names the case's rank, and that it ended by its signal."""
    number = signal.Signals["SIGKILL" if case.signal == "SIGSTOP" else case.signal]  # a stopped rank is killed
    ended = re.findall(r"^\s+rank\s+: (\d+) .*\n\s+exitcode\s+: (-?\d+) ", errors, re.MULTILINE)
    return any(rank == case.who and int(code) in (-number, 128 + number) for rank, code in ended)


def told(errors: str, case: Case) -> str:
    """Return the line that tells of a case: names its signal and whom it reached, or the rank that was lost."""
    rank = "0" if case.who == "starter" and case.launcher == "ordinary" else case.who
    fates = r"is lost|(was|had|has) (killed|stopped|ended|lost|left|been|taken)|ended with|left"
    lost = rf"rank {rank if rank.isdigit() else '[0-9]+'} (\(process \d+\) )?({fates})"
    starter = rank == "0" or case.who in ("starter", "all")
    if starter:
        lost += r"|which started (rank \d|process)|store does not answer|look at rank 0"
    reached = rf"{case.signal} reached (rank {rank if rank.isdigit() else '[0-9]+'}\b|process)"
    reached += rf"|rank {rank} (\(process \d+\) )?was ended by {case.signal}"
    named = reached if case.signal in ("SIGTERM", "SIGINT") else lost
    if case.phase == "import":
        named += f"|{lost}"  # Python itself may have ended the rank
    return next((line[:300] for line in errors.splitlines() if re.search(named, line)), "")


def last_loss(folder: Path) -> str:
    """Return the training loss of the last epoch, as the newest table of a run has it."""
    tables = sorted((folder / "runs").glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    rows = [row for table in tables[-1:] for row in csv.DictReader(table.open()) if row.get("train_loss")]
    return next((row["train_loss"] for row in rows if row["epoch"] == str(EPOCHS - 1)), "none")


def unbroken_loss(system: str, ranks: int) -> str:
    """Return the loss of a run that nothing happens to; there is one run for all threads that ask."""
    with _one_at_a_time:
        if (system, ranks) not in _unbroken:
            case = Case(0, "", "", "", 0.0, "ordinary", system, ranks)
            with tempfile.TemporaryDirectory() as folder:
                run = Run(case, Path(folder), "fit", f"--trainer.max_epochs={EPOCHS}", "--model.lr=0.01")
                run.wait(SLOW_S)
                _unbroken[system, ranks] = last_loss(Path(folder))
        return _unbroken[system, ranks]


_unbroken, _one_at_a_time = dict[tuple[str, int], str](), threading.Lock()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(description="Kill runs at every moment, and resume them.")
    cli.add_argument("--kills", type=int, default=100, help="number of cases (default: 100, about an hour)")
    cli.add_argument("--seed", type=int, default=0, help="the cases are drawn with it (default: 0)")
    cli.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    cli.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only these cases")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for campaign.csv")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign."""
    options = parser().parse_args(argv)

    def row(case: Case) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = attempt(case, Path(folder))
        print(*asdict(case).values(), "->", *asdict(outcome).values(), flush=True)
        return {**asdict(case), **asdict(outcome), **machine}

    cases = [case for case in draw(options.kills, options.seed) if not options.only or case.number in options.only]
    machine, rows = provenance(1), []
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool, (options.out / "campaign.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*Case.__annotations__, *Outcome.__annotations__, *machine])
        writer.writeheader()
        for one in pool.map(row, cases):
            rows.append(one)
            writer.writerow(one)
            file.flush()
    _print_counts(rows)
    return int(any(row["wrong"] for row in rows))


def _print_counts(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("", "cases", "as they must be", "slowest to be gone, s")
    for field in ("signal", "phase", "launcher", "system", "ranks"):
        for value in sorted({row[field] for row in rows}, key=str):
            chosen = [row for row in rows if row[field] == value]
            right = sum(not row["wrong"] for row in chosen)
            table.add_row(f"{field} {value}", str(len(chosen)), str(right), f"{max(r['gone_s'] for r in chosen):.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
