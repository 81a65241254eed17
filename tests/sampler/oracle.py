"""The slow, obvious twin of the sampler, and small graphs to try both on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

from pygdist.kernels import CSR

__all__ = ["SampleTwin", "edges_of", "lonely_graph", "part_of", "random_graph"]

_MASK = (1 << 64) - 1


def mixed(value: int, seed: int) -> int:
    """The finaliser of splitmix64."""
    state = (seed + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


class SampleTwin:
    """One batch, as lists, with the names of PyG's ``SamplerOutput``."""

    def __init__(
        self, csr: CSR, seeds: Sequence[int], fan_out: Sequence[int], *, replace: bool, seed: int, epoch: int
    ) -> None:
        self.node, self.row, self.col, self.edge = list(seeds), [], [], []  # type: list[int], list[int], list[int], list[int]
        self.num_sampled_nodes, self.num_sampled_edges = [len(seeds)], []  # type: list[int], list[int]
        indptr, index = csr.indptr.tolist(), csr.index.tolist()
        perm = range(len(index)) if csr.perm is None else csr.perm.tolist()
        batch = mixed(epoch, seed)
        for node in seeds:
            batch = mixed(node, batch)
        first = 0
        for hop, most in enumerate(fan_out):
            nodes, edges = len(self.node), len(self.edge)
            for target in range(first, nodes):
                node = self.node[target]
                stream = mixed(node, mixed(hop, batch))
                for drawn in _draw(indptr[node + 1] - indptr[node], most, replace, stream):
                    position = indptr[node] + drawn
                    if index[position] not in self.node:
                        self.node.append(index[position])
                    self.row.append(self.node.index(index[position]))
                    self.col.append(target)
                    self.edge.append(perm[position])
            self.num_sampled_nodes.append(len(self.node) - nodes)
            self.num_sampled_edges.append(len(self.edge) - edges)
            first = nodes


def _draw(degree: int, most: int, replace: bool, stream: int) -> list[int]:
    if most < 0 or (degree <= most and not replace):
        return list(range(degree))
    if replace:
        return [mixed(i, stream) * degree >> 64 for i in range(most if degree else 0)]
    found: list[int] = []
    for i in range(most):  # Floyd's algorithm
        last = degree - most + i
        drawn = mixed(i, stream) * (last + 1) >> 64
        found.append(last if drawn in found else drawn)
    return found


def random_graph(num_nodes: int = 60, num_edges: int = 700, *, seed: int = 0, permuted: bool = True) -> CSR:
    """A directed graph with skewed in-degrees, repeated edges, self-loops and nodes without edges."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(num_edges, generator=generator) ** 3 * num_nodes * 0.9).long()
    source = (torch.rand(num_edges, generator=generator) * num_nodes * 0.9).long()
    csr = CSR.from_coo(target, source, num_rows=num_nodes, num_cols=num_nodes)
    return csr if permuted else csr.unpermuted()


def lonely_graph(num_nodes: int) -> CSR:
    """Nodes and no edges."""
    return CSR(torch.zeros(num_nodes + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int32), num_nodes)


def edges_of(csr: CSR) -> Tensor:
    """``edge_index`` in the caller's order."""
    edges = torch.stack([csr.index.long(), csr.row_index().long()])
    if csr.perm is None:
        return edges
    out = torch.empty_like(edges)
    out[:, csr.perm.long()] = edges
    return out


def part_of(csr: CSR, *, train_every: int = 3) -> Data:
    """A part over these edges; the last quarter of its rows are copies, ``edge_weight`` is the number of the edge."""
    rows, edges = torch.arange(csr.num_rows), torch.arange(csr.num_entries)
    owned = rows <= 0.75 * csr.num_rows
    generator = torch.Generator().manual_seed(1)
    return Data(
        x=torch.randn(csr.num_rows, 5, generator=generator),
        y=torch.where(owned, rows % 4, -1),
        train_mask=owned & (rows % train_every == 0) if train_every else torch.zeros_like(owned),
        edge_weight=edges.float(),
        edge_type=edges % 3,
    )
