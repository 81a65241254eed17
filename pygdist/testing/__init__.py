"""Tools to test a backend: real ranks in a test, and the exactness suite that pygdist's exact backends pass."""

from pygdist.hops.draws import without_randomness
from pygdist.testing.exactness import Difference, Step, assert_exact, supported_layers
from pygdist.testing.graphs import GRAPHS, random_graph
from pygdist.testing.layers import LAYERS
from pygdist.testing.ranks import RankError, RankPool, run_ranks

__all__ = [
    "GRAPHS",
    "LAYERS",
    "Difference",
    "RankError",
    "RankPool",
    "Step",
    "assert_exact",
    "random_graph",
    "run_ranks",
    "supported_layers",
    "without_randomness",
]
