"""Partitioners, which divide the nodes or edges of a graph among ranks, and measures of their results."""

from pygdist.partition.base import Assignment, Partitioner, partitioner_names, resolve_partitioner
from pygdist.partition.chunk import ChunkPartitioner
from pygdist.partition.dbh import DBHPartitioner
from pygdist.partition.fennel import FennelPartitioner
from pygdist.partition.grid import GridPartitioner
from pygdist.partition.hash import HashPartitioner
from pygdist.partition.hdrf import HDRFPartitioner
from pygdist.partition.ldg import LDGPartitioner
from pygdist.partition.libra import LibraPartitioner
from pygdist.partition.metis import MetisPartitioner
from pygdist.partition.metrics import PartitionMetrics, measure
from pygdist.partition.powergraph import PowerGraphPartitioner
from pygdist.partition.random_cut import RandomEdgePartitioner
from pygdist.partition.run import partition_graph
from pygdist.partition.sizing import DeviceMemory
from pygdist.partition.spring import SpringPartitioner
from pygdist.partition.two_ps_l import TwoPSLPartitioner
from pygdist.partition.vertex_cut import EdgePartitioner, VertexCut

__all__ = [
    "Assignment", "ChunkPartitioner", "DBHPartitioner", "DeviceMemory", "EdgePartitioner", "FennelPartitioner",
    "GridPartitioner", "HDRFPartitioner", "HashPartitioner", "LDGPartitioner", "LibraPartitioner", "MetisPartitioner",
    "PartitionMetrics", "Partitioner", "PowerGraphPartitioner", "RandomEdgePartitioner", "SpringPartitioner",
    "TwoPSLPartitioner", "VertexCut", "measure", "partition_graph", "partitioner_names", "resolve_partitioner",
]  # fmt: skip
