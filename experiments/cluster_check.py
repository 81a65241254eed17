"""How fast rows cross the emulated links, whether the meter and the kernel count the same, and that nothing is left.

    sudo python experiments/cluster_check.py --out figures        # sudo make cluster-check

Each rank sends the same number of rows to every other, once by pygdist's paired exchange and once by gloo's own
``all_to_all_single``, in turns; the figure is payload over time, of the rate of a link. Exits with 1 if a target is
missed: 80% of the rate between 2 hosts and 70% among 4 for the pairs, and 5% between meter and kernel.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster import Cluster, why_unshaped
from rich.console import Console
from rich.table import Table

SETTINGS = ((2, "1gbit"), (4, "1gbit"), (2, "100mbit"), (4, "100mbit"))
TARGETS = {2: 0.80, 4: 0.70}
AGREEMENT = 0.05
WIDTH = 128  # float32 values of a row
_SECONDS_PER_CALL = 0.5  # at the link's rate


def worker(rows: int, rounds: int) -> None:
    """On each host: exchanges in turns; rank 0 prints medians of the slowest rank, and every rank what it sent."""
    import torch
    import torch.distributed as dist

    from pygdist.comm import Communicator, ExchangePlan

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    communicator = Communicator(dist.new_group(backend="gloo"))
    counts = tuple(0 if peer == rank else rows for peer in range(world_size))
    index = torch.cat([torch.arange(count) for count in counts])
    plan = ExchangePlan(send_index=index, send_counts=counts, recv_counts=counts)
    x = torch.rand(rows, WIDTH)
    packed, arrived = x[index], torch.empty(len(index), WIDTH)

    def pairs() -> None:
        communicator.exchange_rows(x, plan)

    def all_to_all() -> None:
        dist.all_to_all_single(arrived, packed, list(counts), list(counts))

    seconds: dict[str, list[float]] = {"pairs": [], "all_to_all_single": []}
    for number in range(rounds + 1):  # the first does not count
        for name, call in (("pairs", pairs), ("all_to_all_single", all_to_all)):
            dist.barrier()
            start = time.perf_counter()
            call()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number:
                seconds[name].append(float(slowest))
    metered = communicator.meter.read().sent_bytes
    by_all_to_all = (rounds + 1) * len(index) * WIDTH * 4
    print(json.dumps({"seconds": seconds, "sent_bytes": metered + by_all_to_all}), flush=True)
    dist.destroy_process_group()


def measure(hosts: int, rate: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each way to exchange."""
    with Cluster(hosts, rate=rate) as cluster:
        bits = cluster.rate or 0
        rows = int(bits * _SECONDS_PER_CALL / 8 / (WIDTH * 4) / (hosts - 1))
        before = cluster.traffic() if cluster.shaped else []
        command = [sys.executable, __file__, "--worker", str(rows), "--rounds", str(rounds)]
        outcomes = cluster.run(command, timeout=120 + 8 * rounds)
        for outcome in outcomes:
            if outcome.code:
                raise RuntimeError(f"host {outcome.host}: {outcome.err}")
        found = [json.loads(outcome.out.splitlines()[-1]) for outcome in outcomes]
        deviation = None
        if cluster.shaped:
            kernel = [after.sent - start.sent for after, start in zip(cluster.traffic(), before, strict=True)]
            deviation = max(abs(k / one["sent_bytes"] - 1) for k, one in zip(kernel, found, strict=True))
        payload = rows * (hosts - 1) * WIDTH * 4
        return [
            {
                "hosts": hosts, "network": cluster.described, "exchange": name, "rounds": rounds,
                "payload_mb": payload / 1e6, "median_s": (median := statistics.median(seconds)), "min_s": min(seconds),
                "max_s": max(seconds), "gbit_s": payload * 8 / median / 1e9,
                "share_of_rate": payload * 8 / median / bits if cluster.shaped else None,
                "meter_against_kernel": deviation,
            }
            for name, seconds in found[0]["seconds"].items()
        ]  # fmt: skip


def left_behind() -> list[str]:
    """Namespaces, bridges and processes of clusters that are there now."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    kinds = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=True).stdout
    bridges = [line for line in links.splitlines() if "br0" in line or "port0" in line]
    return [*bridges, *named.splitlines(), *(f"net namespace {one.strip()}" for one in kinds.splitlines())]


def killed_in_the_middle() -> list[str]:
    """What is there after a run was killed that was not there before."""
    before = left_behind()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cluster.py")), "--hosts", "3", "--", "sleep", "600"]
    )
    for _ in range(200):
        if len(left_behind()) >= len(before) + 4:  # three hosts and the switch
            break
        time.sleep(0.1)
    else:
        raise RuntimeError("the cluster did not come up")
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(50):  # the kernel takes namespaces down by and by
        left = [one for one in left_behind() if one not in before]
        if not left:
            break
        time.sleep(0.1)
    return left


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="settings with so many hosts")
    parser.add_argument(
        "--measure-only", action="store_true", help="no targets, and nothing is killed to see what stays"
    )
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # rows to each other rank
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.rounds)
        return 0
    reason = why_unshaped()
    if reason:
        print(f"unshaped: {reason}")
    rows = [row for hosts, rate in SETTINGS if hosts in options.hosts for row in measure(hosts, rate, options.rounds)]
    table = Table(
        title="Payload over time, of a link's rate; largest deviation of the meter from the kernel's counters"
    )
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=None if Console().is_terminal else 160).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "cluster-check.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if reason or options.measure_only:
        return 0
    missed = [
        f"{row['hosts']} hosts, {row['network']}: {row['share_of_rate']:.0%} of the rate"
        for row in rows
        if row["exchange"] == "pairs" and row["share_of_rate"] < TARGETS[row["hosts"]]
    ]
    missed += [
        f"{row['hosts']} hosts, {row['network']}: meter and kernel differ by {row['meter_against_kernel']:.1%}"
        for row in rows
        if row["meter_against_kernel"] > AGREEMENT
    ]
    missed += [f"left behind: {one}" for one in killed_in_the_middle()]
    print("\n".join(missed) if missed else "all targets met; nothing is left behind, not even by a run that was killed")
    return int(bool(missed))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    raise SystemExit(main())
