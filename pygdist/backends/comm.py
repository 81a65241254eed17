"""``comm``: every hop fetches exactly the halo rows it needs from their owners (DepComm of NeutronStar, Sec. 2.2).

Exact. Nothing is computed twice, everything is communicated.
"""

from __future__ import annotations

from pygdist.backends.fetched import FetchingBackend

__all__ = ["CommBackend"]


class CommBackend(FetchingBackend):
    """Fetch halo rows in every hop (DepComm; NeutronStar, SIGMOD 2022, Sec. 2.2 and 4.3)."""

    name = "comm"
