"""Bounds of the sum over neighbours: the same work, with the gathered rows in near or far memory.

The first row is the time of the instructions. The others add the time of waiting for a cache or for memory; the
processor prefetches memory in order by itself. The last rows are blocking over sources (DistGNN, Algorithm 2) at its
best: the blocks are cut beforehand and their results are not added up. Where this is slower, so is the real algorithm.

    python -m experiments.kernels.bounds --out figures
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments.machine import cache_bytes, provenance
from pygdist.graph import power_law
from pygdist.kernels import CSR, spmm

COLUMNS = ["nodes", "edges", "features", "rows_from", "seconds", "ns_per_edge_and_thread", "gather_gbs"]
Part = tuple[CSR, Tensor]  # a matrix and its weights


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--nodes", type=int, default=400_000)
    cli.add_argument("--edges", type=int, default=10_000_000)
    cli.add_argument("--features", type=int, nargs="+", default=[32, 128])
    cli.add_argument("--blocks", type=int, nargs="+", default=[2, 4])
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for bounds.csv")
    return cli


def main() -> None:
    """Measure, print a table and write ``bounds.csv``."""
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    edges = power_law(options.nodes, options.edges, num_features=1).edge_index
    matrix = CSR.from_coo(edges[1], edges[0], num_rows=options.nodes, num_cols=options.nodes)
    weight = torch.rand(matrix.num_entries)
    machine = provenance(options.threads)
    table = Table("features", "rows from", "seconds", "ns per edge and thread", "gather, GB/s")
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "bounds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *machine])
        writer.writeheader()
        for width in options.features:
            x = torch.rand(options.nodes, width)
            contenders = {name: [(csr, weight)] for name, csr in sources(matrix, x)}
            contenders |= {f"{count} blocks of sources": cut(matrix, weight, count) for count in options.blocks}
            seconds_of_each = medians([partial(products, parts, x) for parts in contenders.values()], options.rounds)
            for name, seconds in zip(contenders, seconds_of_each, strict=True):
                per_edge = seconds * options.threads / matrix.num_entries * 1e9
                rate = matrix.num_entries * width * x.element_size() / seconds / 1e9
                values = (options.nodes, options.edges, width, name, seconds, per_edge, rate)
                writer.writerow(machine | dict(zip(COLUMNS, values, strict=True)))
                table.add_row(str(width), name, f"{seconds:.4f}", f"{per_edge:.1f}", f"{rate:.1f}")
    Console().print(table)


def sources(matrix: CSR, x: Tensor) -> Iterator[tuple[str, CSR]]:
    """Yield the matrix with other columns: each row has as many entries, but gathers other rows of ``x``."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int) -> CSR:
        index = torch.randint(rows, matrix.index.shape, generator=generator, dtype=matrix.index.dtype)
        return CSR(matrix.indptr, index, matrix.num_cols)

    yield "one row", drawn(1)
    for level in (2, 3):
        rows = cache_bytes(level) // 2 // (x.shape[1] * x.element_size())
        yield f"half of the level-{level} cache", drawn(min(max(rows, 1), len(x)))
    in_order = torch.arange(matrix.num_entries).remainder(len(x)).to(matrix.index.dtype)
    yield "memory, in order", CSR(matrix.indptr, in_order, matrix.num_cols)
    yield "memory, at random", drawn(len(x))
    yield "the graph's own sources", matrix


def cut(matrix: CSR, weight: Tensor, count: int) -> list[Part]:
    """Cut the matrix into ``count`` ranges of sources; return the entries of each and their weights."""
    rows, parts = matrix.row_index(), []
    for number in range(count):
        first, last = (matrix.num_cols * end // count for end in (number, number + 1))
        chosen = (matrix.index >= first) & (matrix.index < last)
        indptr = torch.zeros_like(matrix.indptr)
        torch.cumsum(torch.bincount(rows[chosen], minlength=matrix.num_rows), dim=0, out=indptr[1:])
        parts.append((CSR(indptr, matrix.index[chosen], matrix.num_cols), weight[chosen]))
    return parts


def products(parts: list[Part], x: Tensor) -> None:
    """Multiply each part with all rows."""
    for part, values in parts:
        spmm(part, x, values)


def medians(contenders: list[Callable[[], object]], rounds: int) -> list[float]:
    """Run the contenders in turns and return the median seconds of each, without its first call."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for taken, contender in zip(seconds, contenders, strict=True):
            start = time.perf_counter()
            contender()
            if number:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
