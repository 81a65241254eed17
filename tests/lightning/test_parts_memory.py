"""What a process holds of the graph while it trains its parts in turn: features and topology of one of them."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCN
from typing_extensions import override

from pygdist import GraphDataModule, NodeClassifier
from pygdist.lightning import ModelAveragingStrategy
from pygdist.testing import run_ranks
from tests.lightning import runs

pytestmark = pytest.mark.slow

#: Communities with few edges between them: halos are small, as on graphs that are worth parts.
GRAPH = {"num_nodes": 4000, "num_classes": 32, "num_features": 128, "avg_degree": 16, "homophily": 0.995}


class Held(pl.Callback):
    """Notes the most bytes that tensors have at the end of a step, each memory counted once."""

    def __init__(self) -> None:
        self.most = 0

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        storages = {}
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and one.layout == torch.strided and one.device.type == "cpu":
                with contextlib.suppress(RuntimeError):  # what is left of a tensor whose memory is gone
                    storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        self.most = max(self.most, sum(storages.values()))


def _most(rank: int, world_size: int, folder: str, num_parts: int) -> int:
    data = GraphDataModule(
        "sbm", GRAPH, partitioner="metis", num_parts=num_parts, cache_dir=Path(folder) / f"{num_parts}"
    )
    held = Held()
    module = NodeClassifier(GCN(128, 8, num_layers=2, out_channels=32), backend="replica")
    trainer = runs.trainer(
        rank, world_size, folder, strategy=ModelAveragingStrategy(), max_epochs=2, callbacks=[held],
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return held.most


def test_more_parts_take_less_memory(fork_server: None, tmp_path: Path) -> None:
    """Of 16 parts on 2 ranks less than a quarter of what 2 parts take, by ranks that hold nothing of other tests."""
    few, many = (max(run_ranks(_most, 2, str(tmp_path), num_parts)) for num_parts in (2, 16))
    assert many < few / 4
