"""The graph: where it comes from, how it is prepared, and what a rank holds of it, in memory and on disk."""

from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import check
from pygdist.graph.npy import load_npy, save_npy
from pygdist.graph.power_law import power_law
from pygdist.graph.prepare import fingerprint, prepare
from pygdist.graph.sbm import degree_corrected_sbm
from pygdist.graph.shard import Shard
from pygdist.graph.sources import load_graph, register_generator
from pygdist.graph.store import open_part, read_meta, store_key, write_store
from pygdist.graph.stream import EdgeStream

__all__ = [
    "Adjacency",
    "EdgeStream",
    "Shard",
    "check",
    "degree_corrected_sbm",
    "fingerprint",
    "load_graph",
    "load_npy",
    "open_part",
    "power_law",
    "prepare",
    "read_meta",
    "register_generator",
    "save_npy",
    "store_key",
    "write_store",
]
