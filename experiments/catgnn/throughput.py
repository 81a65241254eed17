"""Seconds, edges per second and peak memory of the partitioners on edges in a file; also CATGNN's Figure 8.

    python -m experiments.catgnn.throughput --nodes 5000000 --edges 100000000 --out results
    python -m experiments.catgnn.throughput --methods spring metis --edges 1000000 4000000 16000000 --plot-memory

Each method runs in its own process, one at a time. Edges and nodes grow together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

from experiments.catgnn.graphs import show, write
from experiments.machine import SOME_FAILED
from pygdist.graph import EdgeFile, EdgeGenerator, EdgeStream, EdgeWriter, Progress
from pygdist.graph.streams.progress import Advance
from pygdist.memory.machine import peak_rss_bytes

COLUMNS = (
    "method", "parts", "nodes", "edges", "seconds", "edges_per_second", "passes", "deciding_pass_s",
    "edges_per_second_deciding", "peak_gib", "imports_gib",
)  # fmt: skip
METHODS = ("hash", "dbh", "grid", "random", "hdrf", "powergraph", "libra", "2ps-l", "spring", "fennel", "ldg", "chunk")
PLACING = {"2ps-l": 2}  # passes that place edges, if more than one
_PIECE = 1 << 22
_GIB = 2**30


class Stopwatch(Progress):
    """Records the seconds of every pass instead of showing its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def watch(self, total: int, unit: str) -> Iterator[Advance]:
        """Time one pass."""
        start = time.perf_counter()
        yield lambda done: None
        self.seconds.append(time.perf_counter() - start)


def generate(path: Path, nodes: int, edges: int) -> None:
    """Write a graph with a power law and communities."""
    import numpy as np

    generator = EdgeGenerator(nodes, edges)
    with EdgeWriter(path, np.int32) as writer:
        for start in track(range(0, edges, _PIECE), description=f"{edges:,} edges to disk"):
            writer.append(generator.read(start, min(start + _PIECE, edges)))


def one(path: Path, method: str, nodes: int, parts: int) -> dict[str, Any]:
    """Measure one method; runs in its own process."""
    from pygdist.partition import resolve_partitioner

    imports = peak_rss_bytes()
    watch = Stopwatch()
    edges = EdgeStream(EdgeFile(path), num_nodes=nodes, progress=watch)
    start = time.perf_counter()
    resolve_partitioner(method).run(edges, parts)
    seconds = time.perf_counter() - start
    deciding = sum(watch.seconds[-PLACING.get(method, 1) :]) if watch.seconds else seconds  # hash reads nothing
    peak = peak_rss_bytes() / _GIB
    rates = edges.num_edges / seconds, len(watch.seconds), deciding, edges.num_edges / deciding
    return dict(
        zip(COLUMNS, (method, parts, nodes, edges.num_edges, seconds, *rates, peak, imports / _GIB), strict=True)
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--methods", nargs="+", default=list(METHODS))
    cli.add_argument("--edges", nargs="+", type=int, default=[100_000_000])
    cli.add_argument("--degree", type=int, default=20, help="edges per node")
    cli.add_argument("--parts", type=int, default=8)
    cli.add_argument("--rounds", type=int, default=1, help="number of processes per method, in turns")
    cli.add_argument("--plot-memory", action="store_true", help="plot peak memory over edges")
    cli.add_argument("--name", default="throughput", help="name of the CSV")
    cli.add_argument("--out", type=Path, default=Path("results"))
    cli.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # file and method; used by the process that measures
    return cli


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.one:
        path, method = options.one
        print(json.dumps(one(Path(path), method, options.edges[0] // options.degree, options.parts)))
        return 0
    rows: list[dict[str, Any]] = []
    for edges in options.edges:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "edges.npy"
            generate(path, edges // options.degree, edges)
            for round_ in range(options.rounds):
                first = round_ % len(options.methods)
                for method in [*options.methods[first:], *options.methods[:first]]:
                    rows.append({"round": round_, **_in_a_process(path, method, edges, options)})
                    print(rows[-1], flush=True)
                    write(rows, options.out / f"{options.name}.csv")
    show(rows, f"{options.name}: each method in a process of its own")
    if options.plot_memory:
        plot(rows, options.out / f"{options.name}.png")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


def _in_a_process(path: Path, method: str, edges: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.catgnn.throughput", "--one", str(path), method, "--edges", str(edges)]
    command += ["--degree", str(options.degree), "--parts", str(options.parts)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:  # most likely killed because memory ran out
        last = outcome.stderr.strip().splitlines()[-1:]
        case = {"method": method, "edges": edges, "nodes": edges // options.degree, "parts": options.parts}
        return {**dict.fromkeys(COLUMNS), **case, "note": f"exit code {outcome.returncode} {' '.join(last)}"}
    return {**json.loads(outcome.stdout.splitlines()[-1]), "note": ""}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot peak memory over edges."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.5))
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["peak_gib"]]
        beyond = [row["peak_gib"] - row["imports_gib"] for row in mine]
        axis.plot([row["edges"] for row in mine], beyond, "o-", label=method)
    axis.set(xlabel="edges", ylabel="peak memory beyond imports, GiB", xscale="log", yscale="log")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
