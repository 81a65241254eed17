"""The models of the papers, as configurations: each trains as it stands, on a smaller graph, for fewer epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.commands import torchrun

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_two_processes_train(recipe: Path, tmp_path: Path) -> None:
    less = ["--data.dataset_args.scale=0.002", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    ranks = torchrun("fit", f"--config={recipe}", *less, f"--data.cache_dir={tmp_path / 'cache'}", folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    if yaml.safe_load(recipe.read_text())["model"]["backend"] == "hybrid":
        assert "remote rows computed here" in ranks[0].err + ranks[0].out
        assert list((tmp_path / "cache").rglob("plans/*.json"))


def test_the_models_of_the_papers_are_there() -> None:
    assert [path.stem for path in RECIPES if path.parent.name == "neutronstar"] == ["gat", "gcn", "gin"]
    assert [path.stem for path in RECIPES if path.parent.name == "distgnn"] == ["graphsage"]
    assert [path.stem for path in RECIPES if path.parent.name == "p3"] == ["graphsage", "minibatch"]
    assert [path.stem for path in RECIPES if path.parent.name == "neutrontp"] == ["gcn", "rgcn"]
    assert [path.stem for path in RECIPES if path.parent.name == "catgnn"] == [
        "cluster-gcn", "gat", "gcn", "graphsage", "graphsaint-edge", "graphsaint-node", "graphsaint-walk", "ngnn",
        "sgc",
    ]  # fmt: skip
