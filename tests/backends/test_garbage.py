"""A step leaves nothing behind: rows that hold each other in a circle would stay until Python looks for such."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, TransformerConv
from torch_geometric.nn import Sequential as Layers

from pygdist.backends import CacheBackend, CommBackend, HybridBackend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

pytestmark = pytest.mark.slow

MODELS = {
    "GCN": lambda: GCN(5, 16, 2, 8),
    "GAT": lambda: GAT(5, 16, 2, 8),
    "GATv2": lambda: GAT(5, 16, 2, 8, v2=True),
    "SAGE-max": lambda: GraphSAGE(5, 16, 2, 8, aggr="max"),
    "GIN": lambda: GIN(5, 16, 2, 8, norm="BatchNorm"),
    "Transformer": lambda: Layers("x, e", [(TransformerConv(5, 8), "x, e -> x")]),
}
BACKENDS = {
    "comm": CommBackend,
    "comm-plain": lambda: CommBackend(ring=False, overlap=False),
    "comm-pieces": lambda: CommBackend(halo_gib=1000 / 2**30),
    "cache": CacheBackend,
    "hybrid": lambda: HybridBackend(cache_ratio=0.5),
}


def _left(rank: int, world_size: int, folder: str, backend: str) -> dict[str, list[Any]]:
    """Shapes of the tensors that only the search for circles would free, by model."""
    shard, found = Shard.load(folder, rank), {}
    for name, make in MODELS.items():
        bound, model = BACKENDS[backend](), make().double()
        bound.bind(shard, Communicator(dist.new_group()))
        distribute(model, backend=bound, check=False)
        for _ in range(2):
            model(shard.x, shard.adjacency).sum().backward()
        gc.collect()
        gc.freeze()  # what is there already need not be looked through again
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(shard.x, shard.adjacency).sum().backward()
            gc.collect()
            left = [tuple(one.shape) for one in gc.garbage if isinstance(one, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
        if left:
            found[name] = left
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_waits_for_the_garbage_collector(backend: str, tmp_path: Path, pool: RankPool) -> None:
    if backend == "hybrid" and load() is None:
        pytest.skip("hybrid plans in the native library")
    data, parts = random_graph("power-law")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert pool.run(_left, 3, str(tmp_path / "parts"), backend) == [{}, {}, {}]
