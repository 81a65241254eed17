"""Mini-batches of one part of a graph (CATGNN, Sec. 3.3), the same for any number of workers."""

from pygdist.sampler.csr_neighbors import CSRNeighborSampler

__all__ = ["CSRNeighborSampler"]
