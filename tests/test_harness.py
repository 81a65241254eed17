"""The harness: settings take turns, what a training showed becomes one row, and a failure is a row, too."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.progress import Progress

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
MODEL = {"in_channels": -1, "hidden_channels": 8, "num_layers": 2, "out_channels": 10}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("harness")


def test_a_grid_changes_the_base_and_names_what_differs(harness: ModuleType) -> None:
    description = {
        "base": {"graph": "reddit-like", "epochs": 8},
        "grid": {"ranks": [1, 2], "network": ["1gbit", None]},
        "short": {"epochs": 2, "grid": {"ranks": [2]}},
    }
    found = harness.settings_of(description)
    assert [one.name for one in found] == [
        "ranks 1, network 1gbit", "ranks 1, network None", "ranks 2, network 1gbit", "ranks 2, network None",
    ]  # fmt: skip
    assert {(one.graph, one.epochs, one.seeds) for one in found} == {("reddit-like", 8, (0, 1, 2))}
    (short,) = harness.settings_of(description, short=True)
    assert (short.name, short.ranks, short.network, short.epochs) == ("ranks 2", 2, None, 2)


def test_settings_and_a_grid_are_combined(harness: ModuleType) -> None:
    changes = [{"name": "A", "backend": "comm"}, {"name": "B", "backend": "single"}]
    found = harness.settings_of({"settings": changes, "grid": {"ranks": [1, 2]}})
    assert [(one.name, one.backend, one.ranks) for one in found] == [
        ("A, ranks 1", "comm", 1), ("A, ranks 2", "comm", 2), ("B, ranks 1", "single", 1), ("B, ranks 2", "single", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("description", "complaint"),
    [
        ({"base": {"hosts": 3}}, "unknown field 'hosts' of a setting; known are backend, "),
        ({"settings": [{"name": "A"}, {"name": "A"}]}, "two settings are called 'A'"),
    ],
)
def test_settings_that_make_no_sense(harness: ModuleType, description: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        harness.settings_of(description)


def test_settings_take_turns(harness: ModuleType) -> None:
    settings = [
        harness.Setting(name=name, seeds=seeds) for name, seeds in (("A", (5, 6, 7)), ("B", (5,)), ("C", (5, 6)))
    ]
    order = [(setting.name, seed) for setting, seed in harness._turns(settings)]
    assert order == [("A", 5), ("B", 5), ("C", 5), ("C", 6), ("A", 6), ("A", 7)]


def _run(seed: int, seconds: list[tuple[float, float]], **fields: Any) -> dict[str, Any]:
    """What a training on two ranks showed; seconds of each rank, by epoch."""
    epochs = [
        {
            "epoch": epoch, "rank": rank, "epoch_s": spent, "compute_s": spent - 0.1, "exchange_s": 0.1,
            "sent_bytes": 10.0 * (rank + 1), "sent_messages": 2.0, "peak_gib": 0.5 + rank, "kept_mib": 0.0,
        }
        for epoch, ranks in enumerate(seconds)
        for rank, spent in enumerate(ranks)
    ]  # fmt: skip
    made = {
        "setting": "A", "seed": seed, "note": "", "network": "1000 Mbit/s", "link_bytes": 7, "epochs": epochs,
        "val_acc": 0.5 + seed / 10, "test_acc": None, "gradient_bytes": 3.0, "timeline": f"{seed}.json", "seconds": 9.0,
    }  # fmt: skip
    return {**made, **fields}


def test_a_row_is_the_median_over_epochs_that_count_of_the_slowest_rank(harness: ModuleType, tmp_path: Path) -> None:
    warm_up = [(9.0, 9.0)] * harness.WARM_UP
    runs = [
        _run(0, [*warm_up, (1.0, 2.0), (3.0, 1.0)]),
        _run(1, [*warm_up, (5.0, 4.0)]),
        _run(2, [], note="fit, rank 1: out of memory"),
    ]
    provenance = harness.provenance(1)
    runs = [{**run, **provenance} for run in runs]
    (row,) = harness.write_tables([harness.Setting(name="A", ranks=2)], runs, tmp_path, "t")
    assert (row["epoch_s"], row["epoch_s_min"], row["epoch_s_max"], row["epochs"]) == (3.0, 2.0, 5.0, 3)
    assert (row["compute_s_max"], row["compute_s_min"]) == pytest.approx((2.9, 0.9))
    assert (row["sent_bytes"], row["sent_messages"], row["link_bytes_run"]) == (30.0, 4.0, 7.0)
    assert (row["peak_gib_max"], row["peak_gib_total"], row["first_epoch_s"]) == (1.5, 2.0, 9.0)
    assert (row["val_acc"], row["val_acc_min"], row["val_acc_max"]) == pytest.approx((0.55, 0.5, 0.6))
    assert (row["seeds"], row["note"]) == ("0 1", "seed 2: fit, rank 1: out of memory")
    assert {"commit", "date", "cpu", "torch", "pyg", "threads"} <= set(row)
    with (tmp_path / "t.ranks.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3


def test_real_trainings(harness: ModuleType, tmp_path: Path) -> None:
    common = {"graph": "sbm", "graph_args": {"num_nodes": 500}, "model_args": MODEL, "epochs": 2, "seeds": (0,)}
    good = harness.Setting(name="two ranks", ranks=2, test=True, **common)
    small = harness.Setting(name="no memory", max_gib=0.2, **common)
    unknown = harness.Setting(name="no graph", **{**common, "graph": "nonsense"})
    out, work = tmp_path / "out", tmp_path / "work"
    with Progress(disable=True) as progress:
        rows = harness.measure([good, small, unknown], out, "t", work=work, console=progress)
    row, full, lost = rows
    assert row["note"] == ""
    assert (row["nodes"], row["epochs"], row["network"], row["seeds"]) == (500, 2, "local", "0")
    assert row["epoch_s"] >= row["compute_s_max"] > 0
    assert row["sent_messages"] == 4  # the second layer's rows, there and back; the first layer's are kept
    assert row["gradient_bytes"] == 4 * (64 * 8 + 8 + 8 * 10 + 10)  # a ring of two sends the parameters once
    assert 0 <= row["test_acc"] <= 1
    assert full["note"] == "seed 0: fit, rank 0: out of memory"
    assert "unknown" in lost["note"] or "no such folder" in lost["note"]
    assert full["epoch_s"] is None
    trace = json.loads((out / row["timeline"]).read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    lines = (out / "t.runs.jsonl").read_text().splitlines()
    assert len(lines) == 3

    # the same again takes over what ended well, if the commit is the same and nothing has changed
    kept = harness._kept(out / "t.runs.jsonl", [good, small, unknown])
    clean = not row["commit"].endswith("+")
    assert [run["setting"] for run in kept] == (["two ranks"] if clean else [])
