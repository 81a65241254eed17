"""``pytorch_lightning`` is another package than ``lightning``: what mixes the two is refused in one line."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pygdist import GraphDataModule, GraphDDPStrategy, InputError, NodeClassifier
from pygdist.lightning import ModelAveragingStrategy, NodeRegressor
from tests.lightning import runs

MADE: dict[str, Callable[[], Any]] = {
    "NodeClassifier": lambda: NodeClassifier(runs.model()),
    "NodeRegressor": lambda: NodeRegressor(runs.model()),
    "GraphDataModule": lambda: GraphDataModule(runs.graph()),
    "GraphDDPStrategy": lambda: GraphDDPStrategy(),
    "ModelAveragingStrategy": lambda: ModelAveragingStrategy(),
}


@pytest.mark.parametrize("name", MADE)
def test_code_of_the_other_package_that_looks_at_ours_says_so(name: str) -> None:
    one, ours, other = MADE[name](), {"__name__": "tests"}, {"__name__": "pytorch_lightning.trainer.call"}
    assert not eval("isinstance(one, int)", ours, {"one": one})
    with pytest.raises(
        InputError,
        match=rf"a Trainer of pytorch_lightning was given a {name}, .*'from lightning.pytorch import Trainer'",
    ):
        eval("isinstance(one, int)", other, {"one": one})


def test_copies_and_pickles_are_of_the_same_class() -> None:
    module = NodeClassifier(runs.model())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module):
        assert type(other) is NodeClassifier
        assert other.__class__ is NodeClassifier
        assert isinstance(other, NodeClassifier)


def test_trainers_and_callbacks_of_the_other_package(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    options: dict[str, Any] = {"logger": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    data: Any = GraphDataModule(runs.graph(), cache_dir=tmp_path)
    for name in ("fit", "validate", "test", "predict"):
        with pytest.raises(InputError, match="Trainer of pytorch_lightning was given a NodeClassifier"):
            getattr(other.Trainer(**options), name)(NodeClassifier(runs.model()), datamodule=data)
    with pytest.raises(InputError, match="Trainer of pytorch_lightning was given a GraphDDPStrategy"):
        other.Trainer(strategy=GraphDDPStrategy(), **options)

    class Mine(other.Callback):  # type: ignore[misc]
        """A user's callback."""

    class Own(NodeClassifier):
        """Configures no callbacks, and does not call the method that it overrides."""

        def configure_callbacks(self) -> list[Any]:
            return []

    for module in (NodeClassifier(runs.model()), Own(runs.model())):
        with pytest.raises(
            InputError, match=r"Mine is a callback of pytorch_lightning, .*lightning.pytorch import Callback"
        ):
            runs.trainer(0, 1, str(tmp_path), callbacks=[Mine()]).fit(module, datamodule=data)
