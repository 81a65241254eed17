"""Aggregation on one rank: the product of a sparse matrix and dense rows, attention over edges, and their gradients.

Functions take and return plain tensors, and need neither other ranks nor PyG. They run on the native library
(:mod:`pygdist.native`) on the CPU, on Triton's kernels on CUDA, and on torch's own operators where these are missing.
Values of edges, in arguments and in results, are in the order of ``CSR.index``; ``CSR.perm`` is not applied.
"""

from __future__ import annotations

from pygdist.kernels.attention import edge_softmax, gat, gatv2_scores
from pygdist.kernels.csr import CSR
from pygdist.kernels.spmm import EdgeOp, Reduce, sddmm, spmm
from pygdist.kernels.transpose import transpose

__all__ = ["CSR", "EdgeOp", "Reduce", "edge_softmax", "gat", "gatv2_scores", "sddmm", "spmm", "transpose"]
