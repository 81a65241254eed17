"""Cuts links between emulated hosts: outages are survived, lost hosts are named, and nobody hangs.

    sudo python -m experiments.reliability.links --out figures

Three hosts train on a generated graph (:mod:`experiments.cluster`). In mid-run:

- ``outage``: the link of a host is down for 8 s, and comes back. The run ends later, with the unbroken run's loss.
- ``lost link``: it stays down. All ranks end, within ``lost_after_s`` and 15 s, and name a rank or the store.
- ``lost host``: all processes of a host are killed at once. Likewise.
- ``slow link``: links of 10 Mbit/s and ``lost_after_s=5``, so that an exchange takes long. The run ends as usual.

Each host is lost in turn. Prints a table, writes ``links.csv``, and exits with code 1 if a case is not as it must be.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.cluster import Cluster, why_unshaped
from experiments.machine import SOME_FAILED, provenance
from experiments.reliability.campaign import EPOCHS, LOST_AFTER_S, MARKS, Case, arguments, last_loss, told

HOSTS, OUTAGE_S = 3, 8.0
_LIMIT_S = 300.0
_CUT = ("outage", "lost link", "lost host")
_ANY_RANK = Case(0, "SIGKILL", "all", "training", 0.0, "ordinary", "comm", HOSTS)  # or the store, as lost


def attempt(kind: str, host: int, folder: Path) -> dict[str, Any]:
    """Run one case; ``host`` loses its link."""
    lost_after_s = 5.0 if kind == "slow link" else LOST_AFTER_S
    marks = folder / "marks"
    marks.mkdir()
    command = [
        sys.executable, "-m", "pygdist.cli", "fit", *arguments(folder, 1), f"--trainer.num_nodes={HOSTS}",
        f"--trainer.max_epochs={EPOCHS}", "--model.lr=0.01", f"--trainer.strategy.lost_after_s={lost_after_s}",
        "--trainer.callbacks+=experiments.reliability.campaign.Phases",
    ]  # fmt: skip
    with Cluster(HOSTS, rate="10mbit" if kind == "slow link" else "100mbit") as cluster:
        cut_at: list[float] = []
        if kind in _CUT:
            _act_when_training(marks / str(host), lambda: _break(cluster, kind, host, cut_at))
        began = time.monotonic()
        outcomes = cluster.run(command, env={MARKS: str(marks)}, timeout=_LIMIT_S, grace_s=LOST_AFTER_S + 40.0)
        ended = time.monotonic()
    survivors = [one for one in outcomes if kind != "lost host" or one.host != host]
    row: dict[str, Any] = {
        "kind": kind, "host": host, "codes": " ".join(str(one.code) for one in outcomes),
        "ended_s": round(ended - (cut_at[0] if cut_at else began), 1), "loss": last_loss(folder),
        "said": next((line for one in survivors if (line := told(one.err, _ANY_RANK))), ""),
        "cut": bool(cut_at), "waited": sum(one.waited for one in survivors),
    }  # fmt: skip
    return row


def _break(cluster: Cluster, kind: str, host: int, cut_at: list[float]) -> None:
    cut_at.append(time.monotonic())
    if kind == "lost host":
        cluster.kill(host)
        return
    cluster.cut(host)
    if kind == "outage":
        time.sleep(OUTAGE_S)
        cluster.mend(host)


def _act_when_training(mark: Path, act: Callable[[], None]) -> None:
    def wait() -> None:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            if mark.exists() and "training" in mark.read_text().split("\n"):
                act()
                return
            time.sleep(0.01)

    threading.Thread(target=wait, daemon=True).start()


def wrong(row: dict[str, Any], expected: str) -> str:
    """Say what is not as it must be."""
    codes, faults = [int(code) for code in row["codes"].split()], list[str]()
    if row["kind"] in _CUT and not row["cut"]:
        faults.append("the run had ended before the cut")
    if row["kind"] not in ("lost link", "lost host"):
        if any(codes) or row["loss"] != expected or expected == "none":
            faults.append(f"codes {codes}, loss {row['loss']}")
        if row["kind"] == "outage" and row["ended_s"] < OUTAGE_S:
            faults.append("the outage held nobody up")
        return "; ".join(faults)
    if row["ended_s"] > LOST_AFTER_S + 15.0 or row["waited"]:
        faults.append(f"ended after {row['ended_s']} s")
    if not all(codes):
        faults.append("exit code 0")
    if not row["said"]:
        faults.append("nothing said")
    return "; ".join(faults)


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "links.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *provenance(1)])
        writer.writeheader()
        writer.writerows({**row, **provenance(1)} for row in rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(description="Cut links between emulated hosts.")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for links.csv")
    cli.add_argument(
        "--hosts", type=int, nargs="+", default=list(range(HOSTS)), help="the hosts that are lost, in turn"
    )
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    options = parser().parse_args(argv)
    if reason := why_unshaped():
        note = f"not run: hosts cannot be emulated here: {reason}"
        _write(options.out, [dict.fromkeys(("kind", "host", "codes", "ended_s", "loss", "said"), "") | {"wrong": note}])
        print(note, file=sys.stderr)
        return SOME_FAILED
    cases = [("unbroken", 0), ("slow link", 0), *((kind, host) for kind in _CUT for host in options.hosts)]
    rows, expected = [], ""
    for kind, host in cases:
        with tempfile.TemporaryDirectory() as folder:
            row = attempt(kind, host, Path(folder))
        expected = expected or row["loss"]  # of the unbroken run, which is the first
        rows.append({**row, "wrong": wrong(row, expected)})
        print(*rows[-1].values(), flush=True)
    _write(options.out, rows)
    table = Table("kind", "host", "codes", "ended, s", "said", "wrong")
    for row in rows:
        table.add_row(*(str(row[name]) for name in ("kind", "host", "codes", "ended_s", "said", "wrong")))
    Console().print(table)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
