"""The graph: where it comes from, how it is prepared, and what a rank holds of it, in memory and on disk."""

from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import check
from pygdist.graph.edge_file import EdgeFile, EdgeWriter
from pygdist.graph.files import GraphFiles
from pygdist.graph.generated import EdgeGenerator
from pygdist.graph.generated_files import read_description, write_generated
from pygdist.graph.hetero import load_hetero
from pygdist.graph.homogeneous import as_homogeneous
from pygdist.graph.links import corrupted_sources, hold_out, known_pairs, supervised
from pygdist.graph.npy import load_npy, save_npy
from pygdist.graph.power_law import power_law
from pygdist.graph.prepare import fingerprint, prepare
from pygdist.graph.progress import Progress
from pygdist.graph.published import PUBLISHED
from pygdist.graph.sbm import degree_corrected_sbm
from pygdist.graph.shard import Shard
from pygdist.graph.sources import load_graph, register_generator
from pygdist.graph.store import build_store, check_part, open_part, read_meta, store_key, write_graph, write_store
from pygdist.graph.stream import EdgeSource, EdgeStream
from pygdist.graph.surroundings import Surroundings
from pygdist.graph.whole import WholeGraph

__all__ = [
    "PUBLISHED",
    "Adjacency",
    "EdgeFile",
    "EdgeGenerator",
    "EdgeSource",
    "EdgeStream",
    "EdgeWriter",
    "GraphFiles",
    "Progress",
    "Shard",
    "Surroundings",
    "WholeGraph",
    "as_homogeneous",
    "build_store",
    "check",
    "check_part",
    "corrupted_sources",
    "degree_corrected_sbm",
    "fingerprint",
    "hold_out",
    "known_pairs",
    "load_graph",
    "load_hetero",
    "load_npy",
    "open_part",
    "power_law",
    "prepare",
    "read_description",
    "read_meta",
    "register_generator",
    "save_npy",
    "store_key",
    "supervised",
    "write_generated",
    "write_graph",
    "write_store",
]
