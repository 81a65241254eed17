"""Who owns what: the algorithms that divide a graph among ranks, and how good their result is."""

from pygdist.partition.base import Partitioner, partitioner_names, resolve_partitioner
from pygdist.partition.chunk import ChunkPartitioner
from pygdist.partition.hash import HashPartitioner
from pygdist.partition.metis import MetisPartitioner
from pygdist.partition.metrics import PartitionMetrics, measure
from pygdist.partition.run import partition_graph

__all__ = [
    "ChunkPartitioner",
    "HashPartitioner",
    "MetisPartitioner",
    "PartitionMetrics",
    "Partitioner",
    "measure",
    "partition_graph",
    "partitioner_names",
    "resolve_partitioner",
]
