"""``cache``: a rank computes all rows that its own nodes need (DepCache of NeutronStar, Algorithm 2).

Exact. The only rows that travel are inputs of the model; inputs that do not change travel once. Each rank computes all
other rows that it needs, even if other ranks compute the same rows.
"""

from __future__ import annotations

from pygdist.backends.recomputing.backend import RecomputingBackend


class CacheBackend(RecomputingBackend):
    """Hold and compute all rows within L hops (DepCache; NeutronStar, SIGMOD 2022, Sec. 2.2, Algorithm 2).

    L is the number of the model's hops. Each rank holds the in-neighbourhood of its own nodes up to L hops away.
    """

    name = "cache"

    def __init__(self) -> None:
        super().__init__(None)
