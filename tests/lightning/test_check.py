"""``fit`` refuses a model whose numbers would be others on several ranks, on all of them, before it trains."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN, GCNConv

from pygdist.backends import CommBackend
from pygdist.errors import InputError
from pygdist.lightning import GraphDataModule, NodeClassifier
from pygdist.testing import RankPool
from tests.lightning import runs


class Centred(nn.Module):
    """Takes off the mean of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out - out.mean(0)


def _fit(rank: int, world_size: int, folder: str, check: bool) -> tuple[str, bool]:
    """What ``fit`` says, and whether parameters are as they were."""
    torch.manual_seed(7)
    classifier, said = NodeClassifier(Centred(), check=check), ""
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    before = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runs.trainer(rank, world_size, folder, num_sanity_val_steps=0).fit(classifier, datamodule=data)
        except InputError as error:
            said = "of one rank" if error.of_one_rank else str(error)
    after = classifier.model.state_dict()
    return said, all(torch.equal(value, after[name].to(value)) for name, value in before.items())


@pytest.mark.parametrize("check", [True, False])
def test_fit_refuses_wrong_numbers_before_it_trains(check: bool, pool: RankPool, tmp_path: Path) -> None:
    for said, unchanged in pool.run(_fit, 2, str(tmp_path), check):
        assert said.startswith("Centred would train other numbers with backend 'comm' on 2 ranks") == check
        assert unchanged == check


class Doubled(CommBackend):
    """Says that it is exact, and doubles the rows of other ranks."""

    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        return 2 * super().halo_rows(x, label=label)


def _fit_on_a_wrong_backend(rank: int, world_size: int, folder: str) -> str:
    model = GCN(12, 8, num_layers=2, out_channels=4)
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder).fit(NodeClassifier(model, Doubled()), datamodule=data)
    return str(error.value)


def test_a_backend_of_the_users_own_is_suspected_first(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_fit_on_a_wrong_backend, 2, str(tmp_path)):
        assert said.startswith("GCN would train other numbers with backend")
        assert "Doubled may be wrong, or the model: test the backend by itself with pygdist.testing" in said
