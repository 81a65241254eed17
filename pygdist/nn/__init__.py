"""Models, and the parts of layers that need all ranks: norms over nodes, degree normalisation, self-loops, losses."""

from pygdist.nn.normalization import GlobalGCNNorm
from pygdist.nn.norms import GLOBAL_NORMS, Ranks
from pygdist.nn.ptags import PTAGSConv

__all__ = ["GLOBAL_NORMS", "GlobalGCNNorm", "PTAGSConv", "Ranks"]
