"""How a model is called: as anyone would, plus the edge inputs that its ``forward`` takes and the graph has."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

__all__ = ["EDGE_INPUTS", "edge_inputs"]

#: Parameters of a model's ``forward`` that are filled from the graph.
EDGE_INPUTS = ("edge_weight", "edge_attr")


def edge_inputs(model: nn.Module, graph: Any) -> dict[str, Tensor]:
    """The edge weights and attributes of ``graph`` (a ``Data`` or a ``Shard``) that ``model.forward`` takes."""
    taken = inspect.signature(model.forward).parameters
    found = {name: getattr(graph, name, None) for name in EDGE_INPUTS if name in taken}
    return {name: value for name, value in found.items() if value is not None}
