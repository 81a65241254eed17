"""Checks a GPU: the CUDA tests, then kernels beside torch's and PyG's; about eight minutes on one card.

    python -m experiments.gpu_check --out figures        # make gpu-check

The exit code is 1 if a test fails, and 2 without a GPU. Seconds are medians between CUDA events. Bandwidth counts each
row that an edge reads, each index and each result once, as a share of that of a copy on the card.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.catgnn.graphs import show, write
from pygdist.graph import power_law
from pygdist.kernels import CSR, gat, spmm

_HEADS = 8
_COPIED_BYTES = 1 << 28


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median of several runs on the device, after one that does not count."""
    run()
    spent = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / 1e3)
    return statistics.median(spent)


def contenders(csr: CSR, x: Tensor) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield kernels, and who computes each how: pygdist, torch's CSR product, or PyG's one row for each edge."""
    row, column = csr.row_index().long(), csr.index.long()
    weight = torch.rand(csr.num_entries, device=x.device, dtype=x.dtype)

    def scattered(messages: Tensor, reduce: str) -> Tensor:
        target = row.unsqueeze(-1).expand_as(messages)
        out = messages.new_zeros(csr.num_rows, messages.size(1))
        return out.scatter_reduce_(0, target, messages, reduce, include_self=False)

    yield "sum", "pygdist", lambda: spmm(csr, x)
    if x.dtype in (torch.float32, torch.float64):
        matrix = torch.sparse_csr_tensor(csr.indptr, column, torch.ones_like(weight), (csr.num_rows, csr.num_cols))
        yield "sum", "torch", lambda: matrix @ x
    yield "sum", "PyG", lambda: x.new_zeros(csr.num_rows, x.size(1)).index_add_(0, row, x.index_select(0, column))
    yield "sum, weights", "pygdist", lambda: spmm(csr, x, weight)
    yield "max", "pygdist", lambda: spmm(csr, x, None, "max")
    yield "max", "PyG", lambda: scattered(x.index_select(0, column), "amax")
    scores = torch.rand(csr.num_rows, _HEADS, device=x.device, dtype=x.dtype)
    yield "gat", "pygdist", lambda: gat(csr, x.view(len(x), _HEADS, -1), scores, scores)


def measure(nodes: int, edges: int, widths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kernel, contender, dtype and width on a graph with hubs."""
    device = torch.device("cuda")
    ends = power_law(nodes, edges, num_features=1).edge_index
    csr = CSR.from_coo(ends[1], ends[0], num_rows=nodes, num_cols=nodes)
    csr = CSR(csr.indptr.to(device), csr.index.to(device), nodes)
    source, target = (torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * _COPIED_BYTES / seconds(lambda: target.copy_(source), rounds)
    rows = []
    for width in widths:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.rand(nodes, width, device=device).to(dtype)
            for kernel, contender, run in contenders(csr, x):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                spent = seconds(run, rounds)
                moved = (csr.num_entries + nodes) * width * x.element_size() + csr.index.nbytes + csr.indptr.nbytes
                rows.append(
                    {
                        "kernel": kernel, "by": contender, "dtype": str(dtype).removeprefix("torch."), "nodes": nodes,
                        "edges": csr.num_entries, "features": width, "median_s": spent, "gb_s": moved / spent / 1e9,
                        "share_of_copy": moved / spent / copied,
                        "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
                        "gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda),
                    }
                )  # fmt: skip
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--nodes", type=int, default=200_000)
    cli.add_argument("--edges", type=int, default=10_000_000)
    cli.add_argument("--features", type=int, nargs="+", default=[32, 128])
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument("--gpus", type=int, default=1, help="GPUs that are needed; with 2, tests between GPUs alone run")
    cli.add_argument("--measure-only", action="store_true", help="run no tests")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < options.gpus:
        sees = f"torch {torch.__version__} sees {found}"
        print(f"gpu-check needs {options.gpus} GPU(s) of CUDA, and {sees}", file=sys.stderr)
        return 2
    failed = False
    if not options.measure_only:
        chosen = ["-k", "gpus"] if options.gpus > 1 else []
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", *chosen, "tests"]
        failed = bool(subprocess.run(command, check=False).returncode)
    if options.gpus > 1:
        return int(failed)
    rows = measure(options.nodes, options.edges, options.features, options.rounds)
    shown = ["kernel", "by", "dtype", "features", "median_s", "gb_s", "share_of_copy", "extra_gib"]
    title = f"{rows[0]['gpu']}, {rows[0]['nodes']} nodes, {rows[0]['edges']} edges"
    show([{name: row[name] for name in shown} for row in rows], title)
    write(rows, options.out / "gpu-check.csv", threads=1)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
