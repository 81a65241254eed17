"""Sampled edges per second on one core, and memory, of pygdist's and torch_sparse's neighbour samplers.

    python -m experiments.catgnn.sampling --out results
    python -m experiments.catgnn.sampling --nodes 1000000 --edges 20000000 --fan-outs 25,10 --replace no

Both run in one process with one thread, in turns. In every round each contender samples the same batches, through the
interface by which PyG's ``NodeLoader`` calls it. Seconds are processor time, so other work counts little.
Without torch_sparse there is one contender.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric import typing as pyg_typing
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, NeighborSampler, NodeSamplerInput

from experiments.catgnn.graphs import show, write
from pygdist.graph import EdgeGenerator
from pygdist.kernels import CSR
from pygdist.sampler import CSRNeighborSampler

OURS, OTHER = "pygdist", "torch_sparse"
_MIB = 2**20


def graph(num_nodes: int, num_edges: int) -> CSR:
    """Return a graph with a power law and communities."""
    source, target = torch.from_numpy(EdgeGenerator(num_nodes, num_edges).read(0, num_edges))
    return CSR.from_coo(target, source, num_rows=num_nodes, num_cols=num_nodes).unpermuted()


def sampler_of(name: str, csr: CSR, fan_out: list[int], replace: bool) -> BaseSampler:
    """Return the sampler of a contender."""
    if name == OURS:
        return CSRNeighborSampler(csr, fan_out, replace=replace)
    data = Data(edge_index=torch.stack([csr.index.long(), csr.row_index().long()]), num_nodes=csr.num_rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG warns that pyg-lib is missing
        return NeighborSampler(data, fan_out, replace=replace, is_sorted=True)


def one_round(sampler: BaseSampler, seeds: Sequence[Tensor]) -> tuple[float, int, int]:
    """Sample all batches. Return the processor seconds, and the numbers of edges and nodes."""
    edges = nodes = 0
    start = time.process_time()
    for batch in seeds:
        sample = sampler.sample_from_nodes(NodeSamplerInput(None, batch))
        edges, nodes = edges + sample.row.numel(), nodes + sample.node.numel()
    return time.process_time() - start, edges, nodes


def beyond_mib(sampler: BaseSampler, seeds: Sequence[Tensor]) -> float | str:
    """Return the MiB that sampling takes at most beyond those in use before; empty if Linux does not report it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system, so that using it again counts
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    except (OSError, AttributeError):
        return ""
    before = _resident("VmRSS")
    one_round(sampler, seeds[:3])
    return (_resident("VmHWM") - before) / _MIB


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) * 1024


def measure(csr: CSR, fan_out: str, replace: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per contender."""
    hops = [int(most) for most in fan_out.split(",")]
    samplers = {name: sampler_of(name, csr, hops, replace) for name in options.contenders}
    order = torch.randperm(csr.num_rows, generator=torch.Generator().manual_seed(0))
    seeds = order[: options.batches * options.batch_size].split(options.batch_size)
    for sampler in samplers.values():
        one_round(sampler, seeds[:3])
    rounds: dict[str, list[tuple[float, int, int]]] = {name: [] for name in samplers}
    for number in range(options.rounds):
        for name in list(samplers)[:: 1 if number % 2 else -1]:
            rounds[name].append(one_round(samplers[name], seeds))
    rows = []
    for name, results in rounds.items():
        rates = [edges / seconds for seconds, edges, _ in results]
        median = statistics.median(rates)
        rows.append({
            "contender": name, "nodes": csr.num_rows, "edges": csr.num_entries, "fan_out": fan_out,
            "replace": "yes" if replace else "no", "batch_size": options.batch_size, "batches": len(seeds),
            "rounds": options.rounds, "edges_per_second": median, "spread": (max(rates) - min(rates)) / median,
            "ms_per_batch": statistics.median(seconds for seconds, _, _ in results) / len(seeds) * 1e3,
            "edges_per_batch": results[0][1] / len(seeds), "nodes_per_batch": results[0][2] / len(seeds),
            "beyond_mib": beyond_mib(samplers[name], seeds),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--nodes", nargs="+", type=int, default=[1_000_000])
    cli.add_argument("--edges", nargs="+", type=int, default=[20_000_000], help="edges of each graph")
    cli.add_argument("--fan-outs", nargs="+", default=["25,10", "10,10,10"])
    cli.add_argument("--replace", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    cli.add_argument("--batch-size", type=int, default=512)
    cli.add_argument("--batches", type=int, default=10)
    cli.add_argument("--rounds", type=int, default=5)
    there = [OURS, OTHER] if pyg_typing.WITH_TORCH_SPARSE else [OURS]
    cli.add_argument("--contenders", nargs="+", choices=[OURS, OTHER], default=there)
    cli.add_argument("--out", type=Path, default=Path("results"))
    return cli


def main() -> None:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if OTHER in options.contenders and not pyg_typing.WITH_TORCH_SPARSE:
        raise SystemExit("torch_sparse is not installed; give --contenders pygdist")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for num_nodes, num_edges in zip(options.nodes, options.edges, strict=True):
        csr = graph(num_nodes, num_edges)
        for fan_out in options.fan_outs:
            for replace in options.replace:
                rows += measure(csr, fan_out, replace == "yes", options)
                write(rows, options.out / "sampling.csv", threads=1)
    show(rows, "sampled edges per second, one thread")


if __name__ == "__main__":
    main()
