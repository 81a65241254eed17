"""``single``: one process holds the whole graph. Every exact backend must give the results of this one."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from pygdist.backends.base import Abilities, Backend, names_of
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.hop import Hop


class SingleBackend(Backend):
    """Run every hop on the rows of this process, which holds the whole graph.

    Exact; ``bind`` refuses several ranks.
    """

    name = "single"
    abilities = Abilities(distributed=False)

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        if communicator.world_size > 1:
            raise InputError(
                f"backend 'single' runs on one process, not on {communicator.world_size}; use backend "
                f"{names_of(lambda abilities: abilities.exact)}"
            )
        super().bind(shard, communicator)

    @override
    def propagate(self, hop: Hop) -> Tensor:
        return hop.run()

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x
