"""Blocking over sources (DistGNN, Algorithm 2) against one pass, at its best: blocks cut before, nothing added up.

Each block holds the in-edges from a range of sources that fits the cache; the real algorithm would also add the
results of the blocks up. Where this loses, the real algorithm loses more.

    PYTHONPATH=. python experiments/kernels/source_blocks.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pygdist.graph import power_law
from pygdist.kernels import CSR, spmm


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=400_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    edges = power_law(options.nodes, options.edges, num_features=1).edge_index
    csr = CSR.from_coo(edges[1], edges[0], num_rows=options.nodes, num_cols=options.nodes)
    weight = torch.rand(csr.num_entries)
    table = Table(
        "features",
        "blocks",
        "one pass, s",
        "blocks, s",
        "ratio",
        title=f"{options.nodes:,} nodes, {options.edges:,} edges",
    )
    for count in options.blocks:
        parts = cut(csr, weight, count)
        for width in options.features:
            x = torch.rand(options.nodes, width)
            whole, blocked = medians([partial(run, [(csr, weight)], x), partial(run, parts, x)], options.rounds)
            table.add_row(str(width), str(count), f"{whole:.4f}", f"{blocked:.4f}", f"{blocked / whole:.2f}")
    Console().print(table)


def run(parts: list[tuple[CSR, Tensor]], x: Tensor) -> None:
    """The product of each part with all rows."""
    for part, values in parts:
        spmm(part, x, values)


def cut(csr: CSR, weight: Tensor, count: int) -> list[tuple[CSR, Tensor]]:
    """The entries of each of ``count`` ranges of sources, and their weights."""
    rows, parts = csr.row_index(), []
    for number in range(count):
        first, last = (csr.num_cols * end // count for end in (number, number + 1))
        chosen = (csr.index >= first) & (csr.index < last)
        indptr = torch.zeros_like(csr.indptr)
        torch.cumsum(torch.bincount(rows[chosen], minlength=csr.num_rows), dim=0, out=indptr[1:])
        parts.append((CSR(indptr, csr.index[chosen], csr.num_cols), weight[chosen]))
    return parts


def medians(contenders: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each, in turns; the first call of each does not count."""
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
