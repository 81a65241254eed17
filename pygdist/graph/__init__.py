"""The graph: where it comes from, how it is prepared, and what a rank holds of it, in memory and on disk."""

from pygdist.graph.adjacency import Adjacency
from pygdist.graph.check import check
from pygdist.graph.generated.edges import EdgeGenerator
from pygdist.graph.generated.files import read_description, write_generated
from pygdist.graph.generated.power_law import power_law
from pygdist.graph.generated.published import PUBLISHED
from pygdist.graph.generated.sbm import degree_corrected_sbm
from pygdist.graph.links import corrupted_sources, hold_out, known_pairs, supervised
from pygdist.graph.shard import Shard
from pygdist.graph.sources.files import GraphFiles
from pygdist.graph.sources.hetero import load_hetero
from pygdist.graph.sources.homogeneous import as_homogeneous
from pygdist.graph.sources.load import load_graph, register_generator
from pygdist.graph.sources.npy import load_npy, save_npy
from pygdist.graph.sources.prepare import fingerprint, prepare
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.meta import build_store, check_part, open_part, read_meta, store_key, write_graph, write_store
from pygdist.graph.store.shown import StoreMeta
from pygdist.graph.streams.edge_file import EdgeFile, EdgeWriter
from pygdist.graph.streams.progress import Progress
from pygdist.graph.streams.stream import EdgeSource, EdgeStream
from pygdist.graph.surroundings import Surroundings

__all__ = [
    "PUBLISHED", "Adjacency", "EdgeFile", "EdgeGenerator", "EdgeSource", "EdgeStream", "EdgeWriter", "GraphFiles",
    "Progress", "Shard", "StoreMeta", "Surroundings", "WholeGraph", "as_homogeneous", "build_store", "check",
    "check_part", "corrupted_sources", "degree_corrected_sbm", "fingerprint", "hold_out", "known_pairs", "load_graph",
    "load_hetero", "load_npy", "open_part", "power_law", "prepare", "read_description", "read_meta",
    "register_generator", "save_npy", "store_key", "supervised", "write_generated", "write_graph", "write_store",
]  # fmt: skip
