"""``comm``: every hop fetches exactly the halo rows it needs from their owners (DepComm of NeutronStar, Sec. 2.2).

Exact. Nothing is computed twice, everything is communicated; what has arrived is aggregated while the rest travels.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.backend import FetchingBackend
from pygdist.comm import Communicator
from pygdist.graph import Shard

__all__ = ["CommBackend"]


class CommBackend(FetchingBackend):
    """Fetch halo rows in every hop (DepComm; NeutronStar, SIGMOD 2022, Sec. 2.2 and 4.3); arguments as there."""

    name = "comm"
    _halo: Arrival | None = None

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        super().bind(shard, communicator)
        if communicator.world_size > 1:
            position = torch.arange(shard.num_owned, shard.num_owned + shard.num_halo, device=shard.n_id.device)
            self._halo = Arrival(plan=shard.plan, position=position)

    @override
    def unbind(self) -> None:
        super().unbind()
        self._halo = None

    @override
    def _pickled_state(self) -> dict[str, Any]:
        return {**super()._pickled_state(), "_halo": None}

    @override
    def arrival(self) -> Arrival | None:
        # a subclass that fetches in its own way is given whole hops
        return self._halo if type(self).halo_rows is FetchingBackend.halo_rows else None
