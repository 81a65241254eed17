"""What PyG layers need to be global: norms over the nodes of all ranks, and degree normalisation."""

from pygdist.nn.normalization import GlobalGCNNorm
from pygdist.nn.norms import GLOBAL_NORMS, Ranks

__all__ = ["GLOBAL_NORMS", "GlobalGCNNorm", "Ranks"]
