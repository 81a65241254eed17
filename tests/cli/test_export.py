"""``pygdist export``: what it writes, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cli.commands import pygdist


def test_tensors_outside_the_model_are_named(tmp_path: Path) -> None:
    model = {"model.weight": torch.ones(2, 3)}
    torch.save(
        {"state_dict": {**model, "decoder.weight": torch.ones(1), "decoder.bias": torch.ones(1)}}, tmp_path / "a"
    )
    torch.save({"state_dict": model}, tmp_path / "b")
    outcome = pygdist("export", "a", "model.pt", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.err == "left out, as no part of the model: decoder.weight, decoder.bias\n"
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight"}
    assert pygdist("export", "b", "model.pt", folder=tmp_path).err == ""
