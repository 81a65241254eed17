"""Several parts on a rank: one of them is held at a time, whole or in mini-batches, trained and evaluated."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.nn import GCN
from typing_extensions import override

from pygdist import GraphDataModule, NodeClassifier
from pygdist.graph import Shard, degree_corrected_sbm
from pygdist.lightning import ModelAveragingStrategy
from pygdist.native import load
from pygdist.sampler import NeighborBatches
from pygdist.testing import RankPool
from tests.lightning import runs


class Counting(GraphDataModule):
    """Notes which other parts are still held when one is opened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: dict[int, weakref.ref[Any]] = {}
        self.opened: list[tuple[int, list[int]]] = []

    @override
    def open_part(self, part: int) -> Shard:
        found = super().open_part(part)
        others = [other for other, one in self.held.items() if other != part and one() is not None]
        self.opened.append((part, others))
        self.held[part] = weakref.ref(found.surroundings)
        return found


def _opened(rank: int, world_size: int, folder: str, fan_out: list[int] | None) -> list[tuple[int, list[int]]]:
    data = Counting(
        degree_corrected_sbm(200, num_classes=4, num_features=8), num_parts=4, cache_dir=Path(folder) / "cache",
        batches=None if fan_out is None else NeighborBatches(fan_out, 16),
    )  # fmt: skip
    module = NodeClassifier(GCN(8, 8, num_layers=2, out_channels=4), backend="replica")
    trainer = runs.trainer(rank, world_size, folder, strategy=ModelAveragingStrategy(), max_epochs=2)
    gc.disable()  # nothing may wait for it
    try:
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
    finally:
        gc.enable()
    return data.opened


@pytest.mark.parametrize("fan_out", [None, [4, 4]], ids=["whole", "mini-batches"])
def test_one_part_is_held_at_a_time(fan_out: list[int] | None, pool: RankPool, tmp_path: Path) -> None:
    if fan_out is not None and load() is None:
        pytest.skip("the sampler is in the native library")
    for rank, opened in enumerate(pool.run(_opened, 2, str(tmp_path), fan_out)):
        assert {part for part, _ in opened} == {rank, rank + 2}
        assert [(part, others) for part, others in opened if others] == []
