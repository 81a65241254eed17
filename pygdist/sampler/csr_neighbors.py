"""PyG's sampler interface over a CSR matrix of in-edges, by the native library.

PyG's own ``NeighborSampler`` needs pyg-lib or torch_sparse, of which the first is not on PyPI and the second is built
for one version of torch; each of its workers draws from a state of its own. This one needs neither, and a batch is the
same whoever samples it.
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

__all__ = ["CSRNeighborSampler", "check_fan_out", "check_seed"]


class CSRNeighborSampler(BaseSampler):
    r"""Samples in-neighbours hop by hop, uniformly (GraphSAGE, Hamilton et al. 2017; CATGNN, Sec. 3.3).

    Every node is expanded once, in the hop after the one that found it, as by PyG's sampler with
    ``subgraph_type="directional"``. A batch depends on ``seed``, the epoch and its own seed nodes, in their order:
    not on workers, threads or torch's random state. It is sampled by one thread; ranks and a loader's workers are the
    parallelism. Besides the graph, which workers share, it takes 24 bytes for each edge sampled and up to 40 for each
    node that may come.

    Args:
        csr: In-edges: rows are destinations, ``index`` their sources; as many rows as columns, on the CPU.
        num_neighbors: Most edges into a node, for each hop; -1 takes all.
        replace: Draw with replacement: then a node with any in-edge gets exactly so many.
        seed: Of the random numbers.

    Shapes:
        Of :math:`s` seeds, the result has ``node`` :math:`(n)` with the seeds first, then in the order of discovery;
        ``row`` (sources), ``col`` (destinations, ascending) and ``edge`` :math:`(e)`; all int64. ``edge`` is the
        position of the edge in the caller's order, through ``csr.perm`` where there is one.

    Raises:
        InputError: If a fan-out is 0 or below -1, there are none, or the native library or the matrix does not serve;
            on sampling, if seeds repeat, are out of range or have times.

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
        """Draw other neighbours from now on, also in workers that are running; before the first call it is epoch 0."""
        self.epoch.number = epoch

    @override
    def sample_from_nodes(self, index: NodeSamplerInput, **_: object) -> SamplerOutput:
        """The neighbourhood of ``index.node``; ``metadata`` is what ``NodeLoader`` wants to know."""
        if index.time is not None:
            raise InputError("CSRNeighborSampler knows no times: leave input_time out")
        out = self._sample(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    @override
    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> SamplerOutput:
        """The neighbourhood of both ends of edges; PyG draws the negative ones, from torch's random state."""
        if index.time is not None:
            raise InputError("CSRNeighborSampler knows no times: leave edge_label_time out")
        out: SamplerOutput = edge_sample(index, self._sample, self.csr.num_rows, False, None, neg_sampling)
        return out

    def _sample(self, seeds: Tensor, seed_time: Tensor | None = None) -> SamplerOutput:
        if seeds.numel():
            low, high = (int(bound) for bound in seeds.aminmax())
            if low < 0 or high >= self.csr.num_rows:
                raise InputError(f"seed nodes must be in 0..{self.csr.num_rows - 1}, got {low if low < 0 else high}")
        found = _native.sample(
            self.csr, seeds, self.num_neighbors, replace=self.replace, seed=self.seed, epoch=self.epoch.number
        )
        return SamplerOutput(
            node=found.node,
            row=found.source,
            col=found.target,
            edge=found.edge,
            batch=None,
            num_sampled_nodes=found.num_nodes,
            num_sampled_edges=found.num_edges,
        )


def check_fan_out(name: str, fan_out: Sequence[int]) -> list[int]:
    """The fan-outs as a list.

    Raises:
        InputError: If there are none, or one is 0 or below -1.
    """
    if not fan_out or any(most == 0 or most < -1 for most in fan_out):
        raise InputError(f"{name} is {list(fan_out)}, expected a number from 1 for each hop, or -1 for all neighbours")
    return list(fan_out)


def check_seed(seed: int) -> int:
    """The seed itself.

    Raises:
        InputError: If it is negative or does not fit 64 bits.
    """
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed is {seed}, expected 0 to 2^64 - 1")
    return seed
