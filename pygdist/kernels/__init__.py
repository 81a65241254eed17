"""Aggregation on one rank: the product of a sparse matrix and dense rows, attention over edges, and their gradients.

Plain tensors in, plain tensors out; nothing here knows of ranks or of PyG. On the CPU the native library
(:mod:`pygdist.native`) does the work, on CUDA Triton's kernels do. Where they are missing, torch's own operators do.
"""

from __future__ import annotations

from pygdist.kernels.attention import edge_softmax, gat, gatv2_scores
from pygdist.kernels.csr import CSR
from pygdist.kernels.spmm import EdgeOp, Reduce, sddmm, spmm
from pygdist.kernels.transpose import transpose

__all__ = ["CSR", "EdgeOp", "Reduce", "edge_softmax", "gat", "gatv2_scores", "sddmm", "spmm", "transpose"]
