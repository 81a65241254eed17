"""Models, and replacements for parts of PyG that need all ranks, such as norms, degree normalisation and losses."""

from pygdist.nn.normalization import GlobalGCNNorm
from pygdist.nn.norms import GLOBAL_NORMS, Ranks
from pygdist.nn.ptags import PTAGSConv

__all__ = ["GLOBAL_NORMS", "GlobalGCNNorm", "PTAGSConv", "Ranks"]
