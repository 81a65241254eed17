"""Stores of placement *edges* for tests."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data

from pygdist.graph import write_store
from pygdist.testing.graphs import random_edge_part, random_graph


def write_random_cut(folder: Path, kind: str, world_size: int, data: Data | None = None) -> str:
    """Write a graph whose edges are dealt to parts at random; return the store."""
    made, parts = random_graph(kind)
    data = made if data is None else data
    write_store(
        data, parts[world_size], folder / f"{kind}-{world_size}", num_parts=world_size, method="test", arguments={},
        notes=[], placement="edges", edge_part=random_edge_part(kind, data.num_edges, world_size),
    )  # fmt: skip
    return str(folder / f"{kind}-{world_size}")
