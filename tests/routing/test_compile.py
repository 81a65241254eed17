"""``torch.compile`` of a distributed model: layers run as they are, what is between them is compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GraphSAGE

from pygdist.graph import Adjacency
from tests.backends.training import epoch, evaluated, one_rank, same, single

pytestmark = pytest.mark.slow

MODELS = {
    "GCN": lambda: GCN(5, 6, 2, 3),
    "GAT": lambda: GAT(5, 6, 2, 3, heads=2),
    "GraphSAGE": lambda: GraphSAGE(5, 6, 2, 3, norm="batch"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_trains_and_evaluates_as_in_pyg(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shard = one_rank(tmp_path)
    torch.manual_seed(0)
    plain: nn.Module = MODELS[name]().double()
    torch._dynamo.reset()
    model = torch.compile(single(copy.deepcopy(plain), shard), backend="aot_eager")
    products = []
    matmul = Adjacency.matmul

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        products.append(1)
        return matmul(*args, **kwargs)

    monkeypatch.setattr(Adjacency, "matmul", spy)
    for number in range(3):
        expected = epoch(plain, data.x, data.edge_index)
        products.clear()
        same(epoch(model, shard.x, shard.adjacency), expected)
        assert len(products) == (0 if name == "GAT" else 2 if number == 0 else 1), "the first hop is kept"
        expected_after = evaluated(plain, data.x, data.edge_index)
        same([evaluated(model, shard.x, shard.adjacency)], [expected_after])
