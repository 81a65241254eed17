"""Checks the emulated links: the rate at which rows cross them, the meter's count, and that nothing is left behind.

    sudo python -m experiments.cluster_check --out figures        # sudo make cluster-check

Each rank sends the same number of rows to every other, in turns by pygdist's paired exchange and by gloo's
``all_to_all_single``. The figure is payload over time as a share of a link's rate. The exit code is 1 if a target is
missed (pairs: 80% of the rate between 2 hosts, 70% among 4; meter and kernel: at most 5% apart), and 2 where hosts
cannot be emulated. At the end, the check kills another run of itself while rows travel; nothing of it may stay.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from experiments.cluster import INTERFACE, Cluster, why_unshaped
from experiments.machine import provenance

SETTINGS = ((2, "1gbit"), (4, "1gbit"), (2, "100mbit"), (4, "100mbit"))
TARGETS = {2: 0.80, 4: 0.70}
AGREEMENT = 0.05
WIDTH = 128  # float32 values of a row
_SECONDS_PER_CALL = 0.5  # at the link's rate
_ROWS_TRAVEL = 10_000_000  # bytes of one host: more than processes send to set up their groups


def worker(rows: int, rounds: int) -> None:
    """Exchange rows on one host; print the seconds of the slowest rank, and the bytes of the pairs by both counts.

    The kernel's counter is read before and after each exchange by pairs, there and back, so it holds nothing else.
    """
    import torch
    import torch.distributed as dist

    from pygdist.comm import Communicator, ExchangePlan

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    communicator = Communicator(dist.new_group(backend="gloo"))
    counts = tuple(0 if peer == rank else rows for peer in range(world_size))
    index = torch.cat([torch.arange(count) for count in counts])
    plan = ExchangePlan(send_index=index, send_counts=counts, recv_counts=counts)
    x = torch.rand(rows, WIDTH, requires_grad=True)
    packed, arrived = x.detach()[index], torch.empty(len(index), WIDTH)

    def slowest(seconds: float) -> float:
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    pairs, all_to_all, kernel = [], [], 0
    for _ in range(rounds + 1):
        dist.barrier()
        before, start = _sent_by_kernel(), time.perf_counter()
        halo = communicator.exchange_rows(x, plan)
        spent = time.perf_counter() - start
        halo.backward(halo.detach())
        kernel += _sent_by_kernel() - before
        pairs.append(slowest(spent))
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(arrived, packed, list(counts), list(counts))
        all_to_all.append(slowest(time.perf_counter() - start))
    seconds = {"pairs": pairs[1:], "all_to_all_single": all_to_all[1:]}  # the first round does not count
    metered = communicator.meter.read().sent_bytes
    print(json.dumps({"seconds": seconds, "metered": metered, "kernel": kernel}), flush=True)
    dist.destroy_process_group()


def _sent_by_kernel(process: int | str = "self") -> int:
    """Return the bytes that the link of a process's host has sent; 0 without a link."""
    lines = [line.partition(":") for line in Path(f"/proc/{process}/net/dev").read_text().splitlines()]
    return next((int(counters.split()[8]) for name, _, counters in lines if name.strip() == INTERFACE), 0)


def measure(hosts: int, rate: str, rounds: int) -> list[dict[str, Any]]:
    """Measure one setting; return one row per kind of exchange."""
    with Cluster(hosts, rate=rate) as cluster:
        bits = cluster.rate or 0
        rows = int(bits * _SECONDS_PER_CALL / 8 / (WIDTH * 4) / (hosts - 1))
        command = [sys.executable, "-m", "experiments.cluster_check", "--worker", str(rows), "--rounds", str(rounds)]
        outcomes = cluster.run(command, timeout=120 + 12 * rounds)
        for outcome in outcomes:
            if outcome.code:
                raise RuntimeError(f"host {outcome.host}: {outcome.err}")
        results = [json.loads(outcome.out.splitlines()[-1]) for outcome in outcomes]
        deviation = max(abs(one["kernel"] / one["metered"] - 1) for one in results) if cluster.shaped else None
        payload = rows * (hosts - 1) * WIDTH * 4
        return [
            {
                "hosts": hosts, "network": cluster.described, "exchange": name, "rounds": rounds,
                "payload_mb": payload / 1e6, "median_s": (median := statistics.median(seconds)), "min_s": min(seconds),
                "max_s": max(seconds), "gbit_s": payload * 8 / median / 1e9,
                "share_of_rate": payload * 8 / median / bits if cluster.shaped else None,
                "meter_against_kernel": deviation if name == "pairs" else None, **provenance(1),
            }
            for name, seconds in results[0]["seconds"].items()
        ]  # fmt: skip


def left_behind() -> list[str]:
    """List present namespaces, bridges, and processes of this script and of clusters, without this process."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    kinds = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=True).stdout
    bridges = [line for line in links.splitlines() if "br0" in line or "port0" in line]
    leftovers = [*bridges, *named.splitlines(), *(f"net namespace {one.strip()}" for one in kinds.splitlines())]
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        ours = "--worker" in words or "sleep infinity" in words or "unshare --net" in words
        if ours and process.pid != os.getpid():
            leftovers.append(f"process {process.pid}: {words[:80]}")
    return leftovers


def killed_in_the_middle(before: list[str]) -> list[str]:
    """Kill a check while rows travel; return what it leaves behind."""
    command = [sys.executable, "-m", "experiments.cluster_check", "--hosts", "4", "--rounds", "1000", "--measure-only"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([*command, f"--out={folder}"], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while sum(sent > _ROWS_TRAVEL for sent in _sent_by_workers()) < 4:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("no rows travelled in the check that was to be killed")
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    return remaining(before)


def _sent_by_workers() -> list[int]:
    """Return the bytes that each host's link has sent, read through the processes of this script on the host."""
    sent = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--worker" in words and Path(words[0]).name.startswith("python"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                sent.append(_sent_by_kernel(process.pid))
    return sent


def remaining(before: list[str]) -> list[str]:
    """Return what exists now but not ``before``. Waits up to 5 s, since the kernel removes namespaces slowly."""
    left: list[str] = []
    for _ in range(50):
        left = [one for one in left_behind() if one not in before]
        if not left:
            break
        time.sleep(0.1)
    return left


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument("--hosts", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    cli.add_argument("--measure-only", action="store_true", help="check no targets and kill nothing")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # rows to each other rank
    return cli


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.worker is not None:
        worker(options.worker, options.rounds)
        return 0
    reason = why_unshaped()
    if reason:
        print(f"unshaped: {reason}", file=sys.stderr)
        if not options.measure_only:
            return 2  # nothing can be checked
    before = [] if reason else left_behind()
    settings = [(hosts, rate) for hosts, rate in SETTINGS if hosts in options.hosts]
    settings = settings if not reason else list({hosts: (hosts, rate) for hosts, rate in reversed(settings)}.values())
    rows = [row for hosts, rate in settings for row in measure(hosts, rate, options.rounds)]
    table = Table(
        title="Payload over time, of a link's rate; largest deviation of the meter from the kernel's counters"
    )
    shown = [name for name in rows[0] if name not in provenance(1)]
    for name in shown:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in shown))
    Console(width=None if Console().is_terminal else 160).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "cluster-check.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if options.measure_only:
        return 0
    missed = [
        f"{row['hosts']} hosts, {row['network']}: {row['share_of_rate']:.0%} of the rate"
        for row in rows
        if row["exchange"] == "pairs" and row["share_of_rate"] < TARGETS[row["hosts"]]
    ]
    missed += [
        f"{row['hosts']} hosts, {row['network']}: meter and kernel differ by {row['meter_against_kernel']:.1%}"
        for row in rows
        if row["exchange"] == "pairs" and row["meter_against_kernel"] > AGREEMENT
    ]
    missed += [f"left behind: {one}" for one in remaining(before)]
    missed += [f"left behind by a check that was killed: {one}" for one in killed_in_the_middle(before)]
    print("\n".join(missed) if missed else "all targets met; nothing is left behind, even after a run was killed")
    return int(bool(missed))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    raise SystemExit(main())
