"""Samplers of mini-batches: from one part of a graph (CATGNN, Sec. 3.3), or across ranks (P3, Sec. 3.2.1)."""

from pygdist.sampler.base import BatchLoader, MiniBatches
from pygdist.sampler.clusters import ClusterBatches
from pygdist.sampler.csr_neighbors import CSRNeighborSampler
from pygdist.sampler.edges import EdgeBatches
from pygdist.sampler.neighbors import NeighborBatches
from pygdist.sampler.saint import SaintEdgeBatches, SaintNodeBatches, SaintWalkBatches

__all__ = [
    "BatchLoader", "CSRNeighborSampler", "ClusterBatches", "EdgeBatches", "MiniBatches", "NeighborBatches",
    "SaintEdgeBatches", "SaintNodeBatches", "SaintWalkBatches",
]  # fmt: skip
