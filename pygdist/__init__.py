"""Distributed training of unmodified PyTorch Geometric models on graphs that outgrow one machine."""

import os

# Neighbours' rows lie all over a large tensor; in pages of 2 MiB their addresses are found faster. torch asks this of
# the system for its large tensors if the variable is set before it makes the first one.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from pygdist.backends import Backend, Savings, distribute, undistribute
from pygdist.errors import InputError, LostRankError
from pygdist.graph import Shard
from pygdist.lightning import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.partition import Partitioner

__all__ = [
    "Backend",
    "GraphDDPStrategy",
    "GraphDataModule",
    "InputError",
    "LostRankError",
    "NodeClassifier",
    "Partitioner",
    "Savings",
    "Shard",
    "distribute",
    "undistribute",
]
