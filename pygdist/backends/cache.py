"""``cache``: a rank computes all that its own nodes need, from the features on (DepCache of NeutronStar, Algorithm 2).

Exact. Nothing is exchanged in a forward or backward pass; what several ranks need is computed by each of them.
"""

from __future__ import annotations

from pygdist.backends.recomputing.backend import RecomputingBackend


class CacheBackend(RecomputingBackend):
    """Hold and compute the in-neighbourhood of L hops (DepCache; NeutronStar, SIGMOD 2022, Sec. 2.2, Algorithm 2)."""

    name = "cache"

    def __init__(self) -> None:
        super().__init__(None)
