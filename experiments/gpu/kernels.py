"""Kernels on a GPU, beside torch's CSR product and PyG's one row for each edge.

Seconds are medians between CUDA events. Bandwidth counts each row that an edge reads, each index and each result once,
as a share of that of a copy on the GPU. Memory is what a kernel takes beside its arguments, its results included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pygdist.graph import power_law
from pygdist.kernels import CSR, edge_softmax, gat, gatv2_scores, sddmm, spmm

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
    yield from _attention(csr, x)


def _attention(csr: CSR, x: Tensor) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield the forward pass of each layer, and that of GAT with its backward pass."""
    rows = x.view(len(x), _HEADS, -1)
    scores, vector = torch.rand(len(x), _HEADS, device=x.device, dtype=x.dtype), rows[0].contiguous()

    def weighted(by_edge: Tensor) -> Tensor:
        return spmm(csr, rows, edge_softmax(csr, by_edge))

    def trained() -> None:
        leaves = [one.detach().requires_grad_() for one in (rows, scores, scores)]
        gat(csr, *leaves).sum().backward()

    yield "gat", "pygdist", lambda: gat(csr, rows, scores, scores)
    yield "gat, both passes", "pygdist", trained
    yield "gatv2", "pygdist", lambda: weighted(gatv2_scores(csr, rows, rows, vector))
    yield "transformer", "pygdist", lambda: weighted(sddmm(csr, rows, rows))


def graphs(nodes: int, edges: int) -> dict[str, CSR]:
    """Return a graph whose degrees follow a power law, and one whose edges all enter one node, a tenth as many."""
    source, target = power_law(nodes, edges, num_features=1).edge_index
    ends = torch.tensor([0, *[edges // 10] * nodes])
    return {
        "power law": CSR.from_coo(target, source, num_rows=nodes, num_cols=nodes),
        "hub": CSR(ends, (torch.arange(edges // 10) * 7919 % nodes).int(), nodes),
    }


def measure(nodes: int, edges: int, widths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each graph, kernel, contender, dtype and width."""
    device = torch.device("cuda")
    source, target = (torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * _COPIED_BYTES / seconds(lambda: target.copy_(source), rounds)
    rows = []
    for name, on_host in graphs(nodes, edges).items():
        csr = CSR(on_host.indptr.to(device), on_host.index.to(device), nodes)
        for width in widths:
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.rand(nodes, width, device=device).to(dtype)
                for kernel, contender, run in contenders(csr, x):
                    run()  # compiles it
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    spent = seconds(run, rounds)
                    moved = (csr.num_entries + nodes) * width * x.element_size() + csr.index.nbytes + csr.indptr.nbytes
                    rows.append(
                        {
                            "graph": name, "kernel": kernel, "by": contender,
                            "dtype": str(dtype).removeprefix("torch."), "nodes": nodes, "edges": csr.num_entries,
                            "features": width, "median_s": spent, "gb_s": moved / spent / 1e9,
                            "share_of_copy": moved / spent / copied,
                            "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
                        }
                    )  # fmt: skip
    return rows
