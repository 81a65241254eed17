"""What comes out of a trained model: predictions of all nodes, and weights that need no pygdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import files, pygdist, torchrun

pytestmark = pytest.mark.slow

# the model on the whole graph, from both formats, in an interpreter that never saw us
PLAIN = """
import sys, numpy as np, torch
from safetensors.torch import load_file
from torch_geometric.nn import GCN

graph, folder = sys.argv[1:]
x, edge_index = (torch.from_numpy(np.load(f"{graph}/{name}.npy")) for name in ("x", "edge_index"))
out = []
for state in (torch.load(f"{folder}/model.pt", weights_only=True), load_file(f"{folder}/model.safetensors")):
    model = GCN(12, 8, num_layers=2, out_channels=4).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        out.append(model(x, edge_index))
assert torch.equal(*out)
assert "pygdist" not in sys.modules
np.save(f"{folder}/plain.npy", out[0].numpy())
"""


def test_predictions_are_those_of_the_exported_model(folder: Path, graphs: Path, checkpoint: Path) -> None:
    for name in ("model.pt", "new/model.safetensors"):
        outcome = pygdist("export", str(checkpoint), name, folder=folder)
        assert outcome.code == 0, outcome.err
        assert name in outcome.out
        assert "4 tensors" in outcome.out
    (folder / "new" / "model.safetensors").rename(folder / "model.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", PLAIN, graphs / "good", folder], check=True, cwd=folder, env=environment)
    plain = np.load(folder / "plain.npy")

    predict = ("predict", "--config=run.yaml", f"--ckpt_path={checkpoint}")
    for rank in torchrun(*predict, "--predictions.path=a/logits.npy", "--predictions.output=logits", folder=folder):
        assert rank.code == 0, rank.err
    logits = np.load(folder / "a" / "logits.npy")
    assert logits.shape == (120, 4)
    assert np.abs(logits - plain).max() <= 1e-5 * np.abs(plain).max()  # other order of sums
    assert np.abs(logits[::-1] - plain).max() > 0.1  # rows in another order would show

    assert pygdist(*predict, folder=folder).code == 0
    labels = np.load(folder / "predictions.npy")
    assert labels.dtype == np.int64
    sure = np.diff(np.sort(plain, axis=1)[:, -2:]).ravel() > 1e-4
    assert (labels == plain.argmax(axis=1))[sure].all()
    assert not [name for name in files(folder) if "partial" in name]
