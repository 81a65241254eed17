"""The timeline: spans of every rank on one clock, which fill the epochs without overlap."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pygdist.comm import Span
from pygdist.lightning import ModelAveragingStrategy, Timeline
from pygdist.lightning.averaging import FOR_VALIDATION
from pygdist.lightning.timeline import with_compute
from pygdist.testing import RankPool
from tests.lightning import runs


def _recorded(rank: int, world_size: int, folder: str) -> int:
    classifier, data = runs.module(folder)
    timeline = Timeline(Path(folder) / "out" / "timeline.json", first_epoch=1, epochs=2)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=4, callbacks=[timeline], strategy="graph_ddp")
    trainer.fit(classifier, datamodule=data)
    return timeline._offset


def test_spans_of_all_ranks_fill_the_epochs(pool: RankPool, tmp_path: Path) -> None:
    offsets = pool.run(_recorded, 3, str(tmp_path))
    assert all(abs(offset) < 20e6 for offset in offsets)  # one machine, one clock
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    for rank in range(3):
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        assert {event["name"] for event in mine} == {"compute", "aggregate", "pack", "send", "wait", "unpack", "travel"}
        assert {event["args"]["of"] for event in mine if event["name"] == "compute"} == {"epoch 1", "epoch 2"}
        # what is fixed travelled in epoch 0: the second layer's rows go forward and their gradients back
        labels = [event["args"]["of"] for event in mine if event["name"] == "travel"]
        back = [
            name for name, _ in itertools.groupby(label.partition(",")[2].split(",")[0].strip() for label in labels)
        ]
        assert back == ["forward", "backward", "forward", "backward"]
        waits = {event["args"]["of"] for event in mine if event["name"] == "wait"}
        assert all(any(label.startswith(wait) for label in labels) for wait in waits)
        # the second thread's line: a send to each other rank, each way
        assert {event["name"] for event in mine if event["tid"] == 1} == {"travel", "send"}
        sends = [event["args"]["of"].rpartition(", ")[2] for event in mine if event["name"] == "send"]
        assert sorted(sends) == sorted([f"to rank {peer}" for peer in range(3) if peer != rank] * 4)
        for one, following in itertools.pairwise([event for event in mine if event["tid"] == 0]):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-3
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 1000


def _averaged(rank: int, world_size: int, folder: str) -> None:
    classifier, data = runs.module(folder, backend="replica")
    data.num_parts = 3
    timeline = Timeline(Path(folder) / "out" / "timeline.json", first_epoch=1, epochs=2)
    strategy = ModelAveragingStrategy(sync_every=3)
    runs.trainer(rank, world_size, folder, callbacks=[timeline], strategy=strategy).fit(classifier, datamodule=data)


def test_models_that_are_averaged_are_seen(pool: RankPool, tmp_path: Path) -> None:
    """Also for a validation, and in the last of an epoch's steps: a rank has two parts."""
    pool.run(_averaged, 2, str(tmp_path))
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank and event["tid"] == 0]
        mine.sort(key=lambda event: event["ts"])
        assert [event["args"]["of"] for event in mine if event["name"] == "reduce"] == [FOR_VALIDATION, "models"]
        for one, following in itertools.pairwise(mine):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-3


def test_gaps_are_compute() -> None:
    spans = [Span("wait", "b", 60, 70), Span("pack", "a", 10, 20), Span("send", "a", 20, 50)]
    found = [(one.kind, one.start, one.end) for one in with_compute(spans, 0, 80, "epoch 0")]
    assert found == [
        ("compute", 0, 10), ("pack", 10, 20), ("send", 20, 50), ("compute", 50, 60), ("wait", 60, 70),
        ("compute", 70, 80),
    ]  # fmt: skip
    assert with_compute([], 5, 5, "epoch 0") == []
    travel = Span("travel", "a", 15, 70, aside=True)  # that something travels is no reason not to compute
    assert travel in with_compute([*spans, travel], 0, 80, "epoch 0")
    assert len(with_compute([*spans, travel], 0, 80, "epoch 0")) == len(found) + 1


def test_without_matplotlib_the_trace_is_written(pool: RankPool, tmp_path: Path) -> None:
    (warning,) = pool.run(_recorded_without_matplotlib, 1, str(tmp_path))
    assert "the picture of a timeline needs matplotlib: pip install 'pygdist[plot]'" in warning
    assert json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert not (tmp_path / "out" / "timeline.png").exists()


def _recorded_without_matplotlib(rank: int, world_size: int, folder: str) -> str:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _recorded(rank, world_size, folder)
    return "\n".join(str(one.message) for one in told)


def _not_recorded(rank: int, world_size: int, folder: str) -> str:
    classifier, data = runs.module(folder)
    timeline = Timeline(Path(folder) / "out" / "timeline.json", first_epoch=9)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1, callbacks=[timeline], strategy="graph_ddp")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(classifier, datamodule=data)
    return "\n".join(str(one.message) for one in told)


def test_a_training_that_ends_before_says_so(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_not_recorded, 2, str(tmp_path))
    assert "timeline.json is not written, since epochs 9 to 11 were not trained here" in first
    assert "Timeline" not in second
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"first_epoch": -1}, {"epochs": 0}])
def test_epochs_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match="Timeline: first_epoch is"):
        Timeline(**options)
