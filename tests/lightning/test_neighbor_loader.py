"""A model trained here is plain PyG afterwards: it runs with PyG's samplers, where pyg-lib or torch_sparse has them."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch_geometric import typing as pyg_typing
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

from pygdist import GraphDataModule, NodeClassifier
from pygdist.graph import degree_corrected_sbm

SAMPLERS = pyg_typing.WITH_PYG_LIB or pyg_typing.WITH_TORCH_SPARSE


@pytest.mark.skipif(not SAMPLERS, reason="neither pyg-lib nor torch_sparse is installed")
def test_a_trained_model_runs_on_sampled_neighbourhoods(tmp_path: Path) -> None:
    data = degree_corrected_sbm(300, num_classes=4)
    model = GraphSAGE(data.num_features, 8, num_layers=2, out_channels=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(NodeClassifier(model), datamodule=GraphDataModule(data, cache_dir=tmp_path))
    model.eval()
    with torch.no_grad():
        whole = model(data.x, data.edge_index)
        for batch in NeighborLoader(data, num_neighbors=[-1, -1], batch_size=64):
            sampled = model(batch.x, batch.edge_index)[: batch.batch_size]
            torch.testing.assert_close(sampled, whole[batch.n_id[: batch.batch_size]])
