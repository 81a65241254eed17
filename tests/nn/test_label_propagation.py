"""Label propagation and "correct and smooth" on parts, against PyG on one process; also after training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import CorrectAndSmooth, LabelPropagation

from pygdist import InputError, Shard, distribute
from pygdist.backends import CacheBackend, CommBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.testing import RankPool, random_graph
from tests.lightning import runs

_PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "label-propagation.md").read_text(encoding="utf-8")


def _check(rank: int, world_size: int, folder: str, kind: str, backend_name: str) -> None:
    data, _ = random_graph(kind)
    shard, backend = Shard.load(folder, rank), resolve_backend(backend_name)
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    own, y, mask = shard.owned_id, data.y.clamp(min=0), data.train_mask
    soft = torch.rand(data.num_nodes, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)

    def compare(plain: nn.Module, method: str, whole: tuple[Any, ...], part: tuple[Any, ...], tolerance: float) -> None:
        expected = getattr(plain, method)(*whole)
        ours = distribute(plain, backend=backend, check=False)
        for _ in range(2):  # the second pass may use what the first one kept
            assert torch.allclose(getattr(ours, method)(*part), expected[own], rtol=0, atol=tolerance)

    edges = (data.edge_index, data.edge_weight), (shard.adjacency, shard.edge_weight)
    masks, ids = (mask, mask[own]), (mask.nonzero().view(-1), mask[own].nonzero().view(-1))
    calls = [
        ("forward", masks, 1),
        ("forward", masks, 2),
        ("correct", masks, 1),
        ("smooth", masks, 1),
        ("forward", ids, 1),
    ]
    for method, (chosen, mine), inputs in calls:
        whole, part = (soft, y[chosen], chosen), (soft[own], y[own][mine], mine)
        for plain in (CorrectAndSmooth(2, 0.8, 3, 0.7), CorrectAndSmooth(2, 0.8, 3, 0.7, autoscale=False, scale=1.5)):
            compare(plain, method, (*whole, *edges[0][:inputs]), (*part, *edges[1][:inputs]), 1e-12)
    for chosen, mine in (masks, ids):  # labels are numbers: no rank knows how many classes there are
        propagation = LabelPropagation(num_layers=4, alpha=0.9)
        compare(propagation, "forward", (y, data.edge_index, chosen), (y[own], shard.adjacency, mine), 1e-6)


@pytest.mark.parametrize(("kind", "backend"), [("directed", "tensor"), ("empty-part", "comm")])
def test_smoothing_of_parts_is_that_of_one_process(kind: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph(kind)
    write_store(data, part[3], tmp_path / "parts", num_parts=3, method="test", arguments={})
    pool.run(_check, 3, str(tmp_path / "parts"), kind, backend)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return Shard.load(tmp_path / "store", 0)


def test_what_needs_a_value_for_each_node_says_so(shard: Shard) -> None:
    with pytest.raises(InputError, match=r"takes the labels of training nodes.*; use backend comm or tensor"):
        distribute(CorrectAndSmooth(2, 0.5, 2, 0.5), backend=CacheBackend())
    backend = CacheBackend()
    backend.bind(shard, Communicator())
    model = distribute(LabelPropagation(2, 0.5), backend=backend, check=False)
    with pytest.raises(InputError, match=r"mask holds ids of a rank's nodes.*; pass a bool for each node"):
        model(shard.y.clamp(min=0), shard.adjacency, torch.arange(3))
    backend = CommBackend()
    backend.bind(shard, Communicator())
    smooth = distribute(CorrectAndSmooth(2, 0.5, 2, 0.5), backend=backend, check=False)
    with pytest.raises(InputError, match=r"y_true has 37 rows, expected one for each of the rank's 0 nodes in mask"):
        smooth(shard.x, shard.y, torch.zeros(37, dtype=torch.bool), shard.adjacency)


def _fit_and_smooth(rank: int, world_size: int, folder: str, script: str) -> tuple[dict[str, Tensor], Any]:
    """Run the class of the page's script; return the parameters, and the rows of the prediction with their ids."""
    classes: dict[str, Any] = {}
    exec(script, classes)
    torch.manual_seed(0)
    module, data = runs.module(folder)
    smoothed = classes["Smoothed"](module.model, check=False)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=2)
    trainer.fit(smoothed, datamodule=data)
    ((ids, rows),) = trainer.predict(smoothed, datamodule=data)
    return smoothed.model.state_dict(), (ids, rows)


def test_predictions_are_smoothed_after_training(tmp_path: Path, pool: RankPool) -> None:
    script = re.search(r"<!-- file: smooth.py -->\n```python\n(.*?)```\n", _PAGE, re.DOTALL)
    assert script is not None
    answers = pool.run(_fit_and_smooth, 2, str(tmp_path), script.group(1))
    data, model = runs.graph(), runs.model().double()
    model.load_state_dict(answers[0][0])
    with torch.no_grad():
        out = model.eval()(data.x, data.edge_index, data.edge_weight).softmax(dim=-1)
    known = data.train_mask
    expected = CorrectAndSmooth(10, 0.9, 10, 0.8)(out, data.y[known], known, data.edge_index)
    for _, (ids, rows) in answers:  # under precision 64-true PyG's weights of edges are float64
        assert torch.allclose(rows, expected[ids], rtol=0, atol=1e-6)
    assert sum(len(ids) for _, (ids, _) in answers) == data.num_nodes
