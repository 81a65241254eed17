"""What a notebook does: compute on several threads, then fork ranks. A script stands for it, so that a hang ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys

import lightning.pytorch as pl
import torch
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, NodeClassifier
from pygdist.graph import load_graph


class Threads(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        module.log("threads", float(torch.get_num_threads()), sync_dist=True)


torch.set_num_threads(3)
data = load_graph("sbm", num_nodes=2000)
model = GCN(64, 64, num_layers=2, out_channels=10)
model(data.x, data.edge_index).sum().backward()
assert torch.get_num_threads() == 3

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="graph_ddp_notebook", max_epochs=2, logger=False,
    callbacks=[Threads()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(NodeClassifier(model), datamodule=GraphDataModule(data, cache_dir=sys.argv[1]))
assert trainer.callback_metrics["threads"] == 1, trainer.callback_metrics
assert torch.get_num_threads() == 3, "the notebook itself keeps its threads"
"""


def test_ranks_forked_from_a_process_with_threads_train(tmp_path: Path) -> None:
    # with OMP_NUM_THREADS set Lightning leaves the number of threads alone, and the ranks used to wait for ever
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": str(Path(__file__).parents[2])}
    script = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert script.returncode == 0, script.stderr
