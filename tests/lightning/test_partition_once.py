from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pygdist import GraphDataModule, Partitioner
from pygdist.graph import EdgeStream


class Counted(Partitioner):
    calls = 0

    def assign(self, edges: EdgeStream, num_parts: int) -> Any:
        Counted.calls += 1
        return np.arange(edges.num_nodes, dtype=np.int32) % num_parts


@pytest.mark.parametrize(
    ("second", "calls"),
    [
        pytest.param({"num_nodes": 60}, 1, id="same-graph"),
        pytest.param({"num_nodes": 60, "seed": 1}, 2, id="other-graph"),
    ],
)
def test_a_graph_in_the_cache_is_not_partitioned_again(second: dict[str, int], calls: int, tmp_path: Path) -> None:
    Counted.calls = 0
    for arguments in ({"num_nodes": 60}, second):
        data = GraphDataModule("sbm", arguments, partitioner=Counted(), num_parts=2, cache_dir=tmp_path)
        data.prepare_data()
        assert data.meta["num_parts"] == 2
    assert Counted.calls == calls
