"""Loses ranks and machines of runs that ``torchrun`` starts again: they end by themselves, as the unbroken run does.

    python -m experiments.reliability.restarts --out figures
    python -m experiments.reliability.restarts --systems comm averaging --out figures     # a short version

Every loss is a SIGKILL from outside. :class:`Gates` holds the rank that is to be lost at a moment that is drawn with a
seed, until the signal comes. Kinds of cases:

- ``restarts``: ``--max-restarts=3``, and three losses of a rank; every second case loses the first rank before there is
  any checkpoint. The run ends by itself with exit code 0 and the unbroken run's loss, bit for bit. Each start after a
  loss says in one line which checkpoint the run goes on from, or that there is none.
- ``used up``: ``--max-restarts=1``, and two losses. torchrun ends with an exit code that is not 0, and nothing is left.
- ``machines``: two agents of torchrun as two machines, with one rank each and ``--nnodes=1:2``. The second is killed
  with its rank. The first goes on alone, on a graph that is cut anew, until the second is back. Both end with exit code
  0, and the loss is within 1e-5 of the unbroken run's. What ``replica``, ``averaging`` and ``delayed`` compute depends
  on the number of ranks, so they are left out.

Prints a table, writes ``restarts.csv``, and exits with code 1 if a case is not as it must be.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from experiments.machine import provenance
from experiments.reliability.campaign import (
    EPOCHS,
    LOST_AFTER_S,
    MARKS,
    SLOW_S,
    SYSTEMS,
    Case,
    Run,
    delivered,
    last_loss,
    unbroken_loss,
)

TOLERANCE = 1e-5  # of the loss on another number of ranks
_BY_RANKS = ("replica", "averaging", "delayed")  # systems whose loss depends on the number of ranks
_GATES = "RESTARTS_GATES"  # environment variable
_JOIN_S = 20  # a machine that joins later than others by this starts the ranks of all again
_EARLY, _LATE = ("import", "setup", "step 0"), ("step", "checkpoint", "validation")
_FIT = (f"--trainer.max_epochs={EPOCHS}", "--model.lr=0.01", f"--trainer.strategy.lost_after_s={LOST_AFTER_S}",
        "--trainer.callbacks+=experiments.reliability.restarts.Gates")  # fmt: skip


class Gates(pl.Callback):
    """Holds a rank at moments that the environment names, until a signal ends it.

    A moment is ``START RANKS RANK WHERE``: the number of starts before, of ranks, and of the rank; then ``import``,
    ``setup``, or ``step``, ``checkpoint`` or ``validation`` with an epoch.
    """

    def __init__(self) -> None:
        self._at("import")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ranks have met, and there is a folder for the run."""
        self._at("setup")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """A step of an epoch begins."""
        self._at(f"step {trainer.current_epoch}")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """A checkpoint is about to be written."""
        self._at(f"checkpoint {trainer.current_epoch}")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation begins."""
        self._at(f"validation {trainer.current_epoch}")

    @staticmethod
    def _at(where: str) -> None:
        start, ranks, rank = (
            os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK")
        )
        gate = f"{start} {ranks} {rank} {where}"
        if gate in os.environ.get(_GATES, "").split(";"):
            Path(os.environ[MARKS], f"gate {gate}").write_text(f"{os.getpid()}\n")
            time.sleep(SLOW_S)
            raise RuntimeError(f"no signal came at '{gate}'")


@dataclass(frozen=True)
class Losses:
    """A run that loses ranks.

    Attributes:
        number: Its number.
        kind: ``restarts``, ``used up`` or ``machines``.
        system: A name of ``SYSTEMS``.
        ranks: Number of ranks.
        losses: Gates at which ranks are lost, in turn; see :class:`Gates`.
    """

    number: int
    kind: str
    system: str
    ranks: int
    losses: tuple[str, ...]


def draw(seed: int) -> list[Losses]:
    """Return seeded cases: every system on 2 and 3 ranks, restarts that are used up, and machines."""
    cases, random_ = [], random.Random(seed)
    for kind, number in (("restarts", 3), ("used up", 2)):
        for system, ranks in [(system, ranks) for system in SYSTEMS for ranks in (2, 3)][: None if number == 3 else 1]:
            early = len(cases) % 2 == 0
            epochs = sorted(random_.sample(range(2, EPOCHS), number - early))
            moments = [random_.choice(_EARLY)] if early else []
            moments += [f"{random_.choice(_LATE)} {epoch}" for epoch in epochs]
            losses = [f"{start} {ranks} {random_.randrange(ranks)} {moment}" for start, moment in enumerate(moments)]
            cases.append(Losses(len(cases), kind, system, ranks, tuple(losses)))
    for system in SYSTEMS:
        if system not in _BY_RANKS:
            first, second = sorted(random_.sample(range(1, EPOCHS), 2))
            losses = [f"0 2 1 {random_.choice(_LATE)} {first}", f"1 1 0 step {second}"]
            cases.append(Losses(len(cases), "machines", system, 2, tuple(losses)))
    return cases


def attempt(losses: Losses, folder: Path) -> dict[str, Any]:
    """Run one case."""
    case = Case(losses.number, "SIGKILL", "", "training", 0.0, "torchrun", losses.system, losses.ranks)
    began = time.monotonic()
    runs, faults = (_lose_machine if losses.kind == "machines" else _lose_ranks)(losses, case, folder)
    ends = [run.wait(SLOW_S) for run in runs]
    errors = "".join(run.errors for run in runs)
    codes, left = [code for _, code, _ in ends], sum(left for *_, left in ends)
    went_on, began_anew = errors.count("the run goes on from"), errors.count("so the run begins")
    ended = losses.kind != "used up"
    loss, expected = (last_loss(folder), unbroken_loss(case.system, case.ranks)) if ended else ("", "")
    if any(codes) == ended:
        faults.append(f"exit codes {codes}")
    if left:
        faults.append(f"{left} left")
    if went_on + began_anew != len(losses.losses) - (not ended):
        faults.append(f"{went_on} starts go on, and {began_anew} begin")
    if ended and not _are_alike(loss, expected, TOLERANCE if losses.kind == "machines" else 0.0):
        faults.append(f"loss {loss}, not {expected}")
    return {
        **asdict(losses), "losses": "; ".join(losses.losses), "seconds": round(time.monotonic() - began, 1),
        "code": " ".join(map(str, codes)), "went_on": went_on, "began_anew": began_anew, "loss": loss,
        "expected": expected, "wrong": "; ".join(faults) + (f": {errors[-1000:]}" if faults else ""),
    }  # fmt: skip


def _are_alike(loss: str, expected: str, tolerance: float) -> bool:
    if not tolerance or "none" in (loss, expected):
        return loss == expected != "none"
    return abs(float(loss) - float(expected)) <= tolerance * abs(float(expected))


def _lose_ranks(losses: Losses, case: Case, folder: Path) -> tuple[list[Run], list[str]]:
    """Kill a rank at each gate."""
    restarts = len(losses.losses) if losses.kind == "restarts" else len(losses.losses) - 1
    run = Run(case, folder, "fit", *_FIT, torchrun=[f"--max-restarts={restarts}"],
              env={_GATES: ";".join(losses.losses)})  # fmt: skip
    for gate in losses.losses:
        if not (pid := _held(run, gate)):
            return [run], [f"'{gate}' was not reached"]
        if not delivered(os.kill, pid, signal.SIGKILL):
            return [run], [f"the rank at '{gate}' had ended before the signal"]
    return [run], []


def _lose_machine(losses: Losses, case: Case, folder: Path) -> tuple[list[Run], list[str]]:
    """Kill the second of two agents with its rank, and start another one once the first goes on alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-id=machines", f"--rdzv-endpoint=127.0.0.1:{port}",
                "--local-addr=127.0.0.1"]  # fmt: skip
    env = {_GATES: ";".join(losses.losses), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(is_host: bool) -> Run:
        conf = f"--rdzv-conf=is_host={is_host},last_call_timeout={_JOIN_S},keep_alive_interval=1"
        return Run(replace(case, ranks=1), folder, "fit", *_FIT, torchrun=[*torchrun, conf], env=env)

    first, second = start(True), start(False)  # the first one hosts the store in which agents meet
    at_both, alone = losses.losses
    if not _held(second, at_both):
        return [first, second], [f"'{at_both}' was not reached"]
    for pid in second.pids().values():
        delivered(os.kill, pid, signal.SIGKILL)  # a rank may have ended with its agent
    second.wait(SLOW_S)
    if not _held(first, alone):
        return [first], [f"'{alone}' was not reached"]
    return [first, start(False)], []


def _held(run: Run, gate: str) -> int:
    """Return the process that is held at a gate, once it is there; 0 if none comes."""
    path, deadline = run.marks / f"gate {gate}", time.monotonic() + SLOW_S
    while not (path.exists() and path.read_text().endswith("\n")):
        if time.monotonic() > deadline or run.process.poll() is not None:
            return 0
        time.sleep(0.02)
    return int(path.read_text())


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(description="Lose ranks and machines of runs that torchrun starts again.")
    cli.add_argument("--seed", type=int, default=0, help="the cases are drawn with it (default: 0)")
    cli.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    cli.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only these cases")
    cli.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for restarts.csv")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    options = parser().parse_args(argv)

    def row(losses: Losses) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = attempt(losses, Path(folder))
        print(*outcome.values(), flush=True)
        return {**outcome, **machine}

    chosen = [one for one in draw(options.seed) if one.system in options.systems]
    chosen = [one for one in chosen if not options.only or one.number in options.only]
    machine, rows = provenance(1), list[dict[str, Any]]()
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool, (options.out / "restarts.csv").open("w", newline="") as file:
        for one in pool.map(row, chosen):
            writer = csv.DictWriter(file, one)
            if not rows:
                writer.writeheader()
            rows.append(one)
            writer.writerow(one)
            file.flush()
    columns = ("kind", "system", "ranks", "losses", "seconds", "code", "wrong")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    Console().print(table)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
