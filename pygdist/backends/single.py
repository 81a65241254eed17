"""``single``: one process holds the whole graph. The reference that every exact backend must equal."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Backend, Inner
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard

__all__ = ["SingleBackend"]


class SingleBackend(Backend):
    """No other rank: neighbours are where they are asked for."""

    name = "single"

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        if communicator.world_size > 1:
            raise InputError(
                f"backend 'single' runs on one process, not on {communicator.world_size}; use --model.backend=comm"
            )
        super().bind(shard, communicator)

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        return inner(edge_index, size=size, **kwargs)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x
