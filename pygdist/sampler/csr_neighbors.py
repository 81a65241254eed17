"""PyG's sampler interface over a CSR matrix of in-edges, by the native library.

PyG's own ``NeighborSampler`` needs pyg-lib, which is not on PyPI, or torch_sparse, which is built for one version of
torch, and each of its workers draws from its own random state. This sampler needs neither, and a batch does not depend
on the worker that samples it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.sampler import _native
from pygdist.sampler.epoch import SharedEpoch


class CSRNeighborSampler(BaseSampler):
    r"""Samples in-neighbours hop by hop, uniformly (GraphSAGE, Hamilton et al. 2017; CATGNN, Sec. 3.3).

    Every node is expanded once, in the hop after the hop that reached the node, as in PyG's sampler with
    ``subgraph_type="directional"``. A batch depends on ``seed``, the epoch and the seed nodes, in their order, but
    not on workers, threads or torch's random state. One thread samples a batch; ranks and a loader's workers run in
    parallel. A batch takes 24 bytes for each sampled edge and up to 40 bytes for each node that may be reached. Workers
    share the graph.

    Args:
        csr: In-edges: rows are destinations, ``index`` holds sources; a square matrix on the CPU.
        num_neighbors: For each hop, the largest number of sampled edges into a node; -1 takes all edges.
        replace: Draw with replacement: a node with at least one in-edge then gets exactly ``num_neighbors`` edges.
        seed: Seed of the random numbers.

    Shapes:
        The result has ``node`` :math:`(n)` int64, and ``row`` (sources), ``col`` (destinations, ascending) and
        ``edge``, all :math:`(e)` and int64. ``node`` holds the seeds, then other nodes in the order in which they are
        reached. ``edge`` is the position of the edge in the caller's order (``csr.perm``).

    Raises:
        InputError: If ``num_neighbors`` is empty or holds 0 or a number below -1, the native library is missing, or the
            library does not take the matrix; on sampling, if seeds repeat, are out of range or have times.

    Example:
        >>> sampler = CSRNeighborSampler(csr, [25, 10], seed=1)
        >>> loader = NodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=512, num_workers=2)
    """

    def __init__(self, csr: CSR, num_neighbors: Sequence[int], *, replace: bool = False, seed: int = 0) -> None:
        _native.require("CSRNeighborSampler", csr)
        self.csr = csr
        self.num_neighbors = check_fan_out("num_neighbors", num_neighbors)
        self.replace = replace
        self.seed = check_seed(seed)
        self.epoch = SharedEpoch()

    def set_epoch(self, epoch: int) -> None:
        """Draw the neighbours of this epoch from now on, in running workers too; the epoch is 0 at first."""
        self.epoch.number = epoch

    @override
    def sample_from_nodes(self, index: NodeSamplerInput, **_: object) -> SamplerOutput:
        """Sample around ``index.node``; the result's ``metadata`` is for ``NodeLoader``."""
        if index.time is not None:
            raise InputError("CSRNeighborSampler does not sample by time: leave input_time out")
        out = self._sample(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    @override
    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> SamplerOutput:
        """Sample the neighbourhood of both ends of edges; PyG draws negative edges, from torch's random state."""
        if index.time is not None:
            raise InputError("CSRNeighborSampler does not sample by time: leave edge_label_time out")
        out: SamplerOutput = edge_sample(index, self._sample, self.csr.num_rows, False, None, neg_sampling)
        return out

    def _sample(self, seeds: Tensor, seed_time: Tensor | None = None) -> SamplerOutput:
        if seeds.numel():
            low, high = (int(bound) for bound in seeds.aminmax())
            if low < 0 or high >= self.csr.num_rows:
                raise InputError(f"seed nodes must be in 0..{self.csr.num_rows - 1}, got {low if low < 0 else high}")
        batch = _native.sample(
            self.csr, seeds, self.num_neighbors, replace=self.replace, seed=self.seed, epoch=self.epoch.number
        )
        return SamplerOutput(
            node=batch.node,
            row=batch.source,
            col=batch.target,
            edge=batch.edge,
            batch=None,
            num_sampled_nodes=batch.num_nodes,
            num_sampled_edges=batch.num_edges,
        )


def check_fan_out(name: str, fan_out: Sequence[int]) -> list[int]:
    """Return the fan-outs as a list; refuse an empty one, and numbers that are 0 or below -1."""
    if not fan_out or any(most == 0 or most < -1 for most in fan_out):
        raise InputError(f"{name} is {list(fan_out)}, expected a number from 1 for each hop, or -1 for all neighbours")
    return list(fan_out)


def check_seed(seed: int) -> int:
    """Return the seed; refuse one that is negative or does not fit 64 bits."""
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, expected 0 to 2^64 - 1")
    return seed
