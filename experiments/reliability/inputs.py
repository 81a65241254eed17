"""Gives ``pygdist`` malformed inputs, drawn from a seed: each must end in one line and exit code 2.

    python -m experiments.reliability.inputs --out figures

Runs the real command on every input, in a process of its own with limits of time and memory. Prints a table, inputs by
kind and how many ended as they must, and writes a CSV with a row for each; the exit code is 3 if one did not. The
inputs are in ``malformed/``, a file for each idea.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.machine import SOME_FAILED, provenance
from experiments.reliability.malformed.case import REFUSED, TAKEN, Case, write_template
from experiments.reliability.malformed.checkpoints import TRAIN, checkpoint_cases
from experiments.reliability.malformed.code import code_cases
from experiments.reliability.malformed.configurations import yaml_cases
from experiments.reliability.malformed.files import file_cases
from experiments.reliability.malformed.graphs import graph_cases
from experiments.reliability.malformed.options import contradictions, option_cases
from experiments.reliability.malformed.stores import array_cases, meta_cases
from experiments.reliability.malformed.surroundings import surrounding_cases

LIMIT_S = 120.0
LIMIT_BYTES = 8 << 30  # of address space; importing torch takes 2 GiB of it


def cases(seed: int = 0, options: int = 330) -> list[Case]:
    """Return all inputs of a seed."""
    return [
        *option_cases(random.Random(seed), options), *contradictions(), *yaml_cases(), *meta_cases(), *array_cases(),
        *graph_cases(), *code_cases(), *checkpoint_cases(random.Random(seed)), *file_cases(), *surrounding_cases(),
    ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit code (negative: the signal), what it wrote to standard error, and the time it took."""

    code: int
    text: str
    seconds: float = 0.0

    @property
    def lines(self) -> list[str]:
        """The lines of error."""
        return [line for line in self.text.splitlines() if line.startswith("pygdist: error: ")]

    def problem(self, case: Case) -> str:
        """Return what is wrong with the end of a case, or nothing."""
        if self.code == -signal.SIGKILL:
            return "hang, or out of memory"
        if self.code < 0:
            return f"signal {-self.code}"
        if "Traceback" in self.text:
            return f"traceback: {self.text.strip().splitlines()[-1][:200]}"
        if self.code == 0:
            return "accepted" if case.ends == REFUSED else ""
        if self.code != 2 or len(self.lines) != 1:
            return f"code {self.code}, {len(self.lines)} lines"
        if case.ends == TAKEN:
            return "refused, but nothing is wrong"
        if len(self.lines[0]) > 700:
            return f"a line of {len(self.lines[0])} characters"
        if case.words and not any(word in self.lines[0] for word in case.words):
            return f"does not name {' or '.join(case.words)}"
        return ""


def run(case: Case, template: Path, scratch: Path) -> Outcome:
    """Run the command of a case in a forked process, in a folder of its own."""
    folder = scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, symlinks=True)
    case.prepare(folder)
    output = scratch / "stderr"
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(case, folder, output)
    done, status = 0, 0
    while not done:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done and time.monotonic() - start > LIMIT_S:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    text, code = output.read_text(errors="replace"), os.waitstatus_to_exitcode(status)
    if (folder / "OWNED").exists():
        text, code = f"{text}\nTraceback: the input ran a command", 1
    return Outcome(code, text, time.monotonic() - start)


def _in_child(case: Case, folder: Path, output: Path) -> None:
    """Be the command: never returns. An input with an environment of its own begins as a new process."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        with output.open("wb") as file:
            os.dup2(file.fileno(), 2)
            os.dup2(file.fileno(), 1)
        case.begin(folder)
        if case.environment:
            words = [sys.executable, "-m", "pygdist.cli", *case.arguments]
            os.execve(sys.executable, words, {**os.environ, **case.environment})
        sys.argv = ["pygdist", *case.arguments]
        from pygdist.cli import main as pygdist

        try:
            code = pygdist(case.arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)


def warm_up() -> None:
    """Import what the commands need, so that forked processes need not; no thread may start here."""
    import torch

    torch.set_num_threads(1)
    for name in ("check", "export", "generate", "partition", "report", "train", "verify"):
        importlib.import_module(f"pygdist.commands.{name}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--seed", type=int, default=0, help="seed of the values of options (default: 0)")
    options.add_argument("--options", type=int, default=330, help="wrong values of options (default: 330)")
    options.add_argument("--numbers", type=int, nargs="+", metavar="NUMBER", help="only the inputs of these numbers")
    options.add_argument("--only", default="", help="inputs whose kind or name contains this text")
    options.add_argument("--every", type=int, default=1, help="take one input of so many")
    options.add_argument("--show", action="store_true", help="print what every input ends in")
    options.add_argument("--out", type=Path, default=Path("figures"), help="folder of inputs.csv (default: figures)")
    return options


def main() -> int:
    """Run the inputs; the exit code tells if one of them does not end as it must."""
    options = parser().parse_args()
    warm_up()
    options.out.mkdir(parents=True, exist_ok=True)
    rows, facts = [], provenance(1)
    with (
        tempfile.TemporaryDirectory(prefix="pygdist-inputs-") as name,
        (options.out / "inputs.csv").open("w", newline="") as file,
    ):
        for row in _rows(options, Path(name)):
            if row["wrong"] or options.show:
                told = (
                    row["wrong"] or "well",
                    f"{row['number']} {row['kind']}: {row['input']}",
                    row["seconds"],
                    row["line"],
                )
                print(*told, sep=" | ")
            sys.stdout.flush()
            rows.append({**row, **facts})
            if len(rows) == 1:
                (writer := csv.DictWriter(file, fieldnames=list(rows[0]))).writeheader()
            writer.writerow(rows[-1])
            file.flush()  # forked processes would write it once more
    _show(rows)
    return SOME_FAILED if any(row["wrong"] for row in rows) else 0


def _rows(options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    """Yield the row of each input."""
    chosen = [
        (number, case)
        for number, case in list(enumerate(cases(options.seed, options.options)))[:: options.every]
        if options.only in f"{case.kind}: {case.name}" and (not options.numbers or number in options.numbers)
    ]
    write_template(template := scratch / "template")
    if any("last.ckpt" in " ".join(case.arguments) for _, case in chosen):
        trained = run(Case("", "", TRAIN), template, scratch)
        if trained.code:
            raise SystemExit(f"the first run failed:\n{trained.text}")
        shutil.copy(scratch / "run" / "last.ckpt", template)
    for number, case in chosen:
        outcome = run(case, template, scratch)
        line = outcome.lines[0] if outcome.lines else (outcome.text.strip().splitlines() or [""])[-1]
        yield {
            "number": number, "seed": options.seed, "options": options.options, "kind": case.kind,
            "input": ascii(case.name)[1:-1], "must_be": case.ends, "code": outcome.code,
            "line": ascii(line[:300].replace(str(scratch), ""))[1:-1], "wrong": outcome.problem(case),
            "seconds": round(outcome.seconds, 1),
        }  # fmt: skip


def _show(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table("kind", "inputs", "as they must end")
    kinds, good = (Counter(row["kind"] for row in some) for some in (rows, [row for row in rows if not row["wrong"]]))
    for kind in sorted(kinds, key=str):
        table.add_row(str(kind), str(kinds[kind]), str(good[kind]))
    table.add_row("all", str(kinds.total()), str(good.total()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
