"""Distributed training of unmodified PyTorch Geometric models on graphs that outgrow one machine."""

from pygdist.backends import Backend
from pygdist.errors import InputError, LostRankError
from pygdist.graph import Shard
from pygdist.lightning import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.partition import Partitioner
from pygdist.routing import distribute, undistribute

__all__ = [
    "Backend",
    "GraphDDPStrategy",
    "GraphDataModule",
    "InputError",
    "LostRankError",
    "NodeClassifier",
    "Partitioner",
    "Shard",
    "distribute",
    "undistribute",
]
