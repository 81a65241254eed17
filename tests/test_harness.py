"""The harness: settings take turns, what a training showed becomes one row, and a failure is a row, too."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from experiments import harness
from experiments.cluster import Outcome

pytestmark = pytest.mark.usefixtures("warm_python")

MODEL = {"in_channels": -1, "hidden_channels": 8, "num_layers": 2, "out_channels": 10}


GRID: dict[str, Any] = {
    "base": {"graph": "reddit-like", "epochs": 8},
    "grid": {"ranks": [1, 2], "network": ["1gbit", "100mbit"]},
    "short": {"epochs": 2, "grid": {"ranks": [2]}},
}


def test_a_grid_changes_the_base_and_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "why_unshaped", lambda: None)
    found = harness.settings_of(GRID)
    assert [one.name for one in found] == [
        "ranks 1, network 1gbit", "ranks 1, network 100mbit", "ranks 2, network 1gbit", "ranks 2, network 100mbit",
    ]  # fmt: skip
    assert {(one.graph, one.epochs, one.seeds) for one in found} == {("reddit-like", 8, (0, 1, 2))}
    (short,) = harness.settings_of(GRID, short=True)
    assert (short.name, short.ranks, short.network, short.epochs) == ("ranks 2", 2, "unshaped", 2)


def test_where_there_are_no_links_names_do_not_tell_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "why_unshaped", lambda: "not root")
    found = harness.settings_of(GRID)
    assert [(one.name, one.network) for one in found] == [
        ("ranks 1, network unshaped", "unshaped"), ("ranks 2, network unshaped", "unshaped"),
    ]  # fmt: skip


def test_settings_and_a_grid_are_combined() -> None:
    changes = [{"name": "A", "backend": "comm"}, {"name": "B", "backend": "single"}]
    found = harness.settings_of({"settings": changes, "grid": {"ranks": [1, 2]}})
    assert [(one.name, one.backend, one.ranks) for one in found] == [
        ("A, ranks 1", "comm", 1), ("A, ranks 2", "comm", 2), ("B, ranks 1", "single", 1), ("B, ranks 2", "single", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("description", "complaint"),
    [
        ({"base": {"hosts": 3}}, "unknown field 'hosts' of a setting; known are backend, "),
        ({"settings": [{"name": "A", "ranks": 2}, {"name": "A"}]}, "setting 'A': its name must differ from others'"),
        ({"settings": [{"name": "C++"}, {"name": "C", "ranks": 2}]}, "setting 'C\\+\\+': its name must differ"),
        ({"base": {"network": "fast"}}, "rate: expected a rate such as 1gbit or 100mbit, got 'fast'"),
    ],
)
def test_settings_that_make_no_sense(description: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        harness.settings_of(description)


def test_settings_take_turns() -> None:
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
        "scores": [], "part_edges": [4, 9],
        "aggregate_s": [[0.25, 0.25, 0.75], [0.5, 0.625, 0.125]], "pack_s": [[0.0, 0.0, 0.0], [0.125, 0.25, 0.5]],
    }  # fmt: skip
    return {**made, **fields}


def test_a_row_is_the_median_over_epochs_that_count_of_the_slowest_rank(tmp_path: Path) -> None:
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
    assert (row["sent_bytes_max"], row["sent_bytes_min"]) == (20.0, 10.0)
    # by the third epoch alone the second rank would be the fastest
    assert (row["aggregate_s_max"], row["aggregate_s_min"]) == (0.5, 0.25)
    assert (row["pack_s_max"], row["pack_s_min"]) == (0.25, 0.0)
    assert (row["part_edges_max"], row["part_edges_min"]) == (9, 4)
    assert row["gradient_bytes"] == 2 * 3.0  # of all ranks
    assert (row["peak_gib_max"], row["peak_gib_total"], row["first_epoch_s"]) == (1.5, 2.0, 9.0)
    assert (row["val_acc"], row["val_acc_min"], row["val_acc_max"]) == pytest.approx((0.55, 0.5, 0.6))
    # it has figures, of the seeds that did not fail
    assert (row["seeds"], row["note"], row["failed"]) == ("0 1", "", "seed 2: fit, rank 1: out of memory")
    (lost,) = harness.write_tables([harness.Setting(name="A", ranks=2)], runs[2:], tmp_path, "lost")
    assert (lost["note"], lost["epoch_s"]) == ("seed 2: fit, rank 1: out of memory", None)
    assert {"commit", "date", "cpu", "torch", "pyg", "threads"} <= set(row)
    with (tmp_path / "t.ranks.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3


def test_the_time_to_accuracy_counts_all_epochs_of_the_slowest_rank(tmp_path: Path) -> None:
    spent = [(1.0, 2.0), (3.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    facts = harness.provenance(1)
    runs = [
        _run(0, spent, setting="one", scores=[[1, 0.7], [3, 0.8]], **facts),
        _run(0, spent, scores=[[0, 0.5], [1, 0.77], [3, 0.9]], **facts),
        _run(1, spent, scores=[[0, 0.5], [1, 0.75], [3, 0.76]], **facts),
        _run(0, spent, setting="bad", scores=[[3, 0.1]], **facts),
    ]
    settings = [harness.Setting(name=name, ranks=2, one_process="one") for name in ("A", "bad")]
    settings.append(harness.Setting(name="one", ranks=2))
    rows = {row["setting"]: row for row in harness.write_tables(settings, runs, tmp_path, "t")}
    names = ("best_val_acc", "wanted_val_acc", "epochs_to_acc", "s_to_acc", "reached")
    assert [rows["A"][name] for name in names] == pytest.approx([0.83, 0.76, 3, 6.0, 2])  # after 2 and 4 epochs
    assert [rows["bad"][name] for name in names] == [0.1, 0.76, None, None, 0]
    assert [rows["one"][name] for name in names] == [None] * 5


@pytest.mark.slow
def test_real_trainings(tmp_path: Path) -> None:
    common = {"graph": "sbm", "graph_args": {"num_nodes": 500}, "model_args": MODEL, "epochs": 2, "seeds": (0,)}
    good = harness.Setting(name="two ranks", ranks=2, test=True, **common)
    wide = {**MODEL, "hidden_channels": 20_000_000}  # 5 GB
    small = harness.Setting(name="no memory", max_gib=2.0, **{**common, "model_args": wide})
    unknown = harness.Setting(name="no graph", **{**common, "graph": "nonsense"})
    late = harness.Setting(name="too late", ranks=2, timeout_s=0.5, **common)
    settings = [good, small, unknown, late]
    out, work = tmp_path / "out", tmp_path / "work"
    with Progress(disable=True) as progress:
        row, full, lost = harness.measure(settings[:3], out, "t", work=work, console=progress)
    assert (row["note"], row["failed"]) == ("", "")
    assert (row["nodes"], row["epochs"], row["network"], row["seeds"]) == (500, 2, "unshaped", "0")
    assert row["epoch_s"] >= row["compute_s_max"] > 0
    assert row["sent_messages"] == 4  # the second layer's rows, there and back; the first layer's are kept
    assert row["gradient_bytes"] == 2 * 4 * (64 * 8 + 8 + 8 * 10 + 10)  # in a ring of two each sends all of them once
    assert 0 <= row["test_acc"] <= 1
    assert full["note"].startswith("seed 0: fit, rank ")
    assert full["note"].endswith(": out of memory")
    assert "neither a folder, nor a generator" in lost["note"]
    assert full["epoch_s"] is None
    trace = json.loads((out / row["timeline"]).read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    spent = [event["tdur"] for event in trace["traceEvents"] if event["name"] == "aggregate"]
    assert 0 < row["aggregate_s_min"] <= row["aggregate_s_max"] < sum(spent) / 1e6
    assert 0 < row["pack_s_min"] <= row["pack_s_max"]
    assert row["part_edges_max"] >= row["part_edges_min"] > 0

    # one of them alone: what is known of the others stays, and a line that broke off counts for nothing
    with (out / "t.runs.jsonl").open("a") as file:
        file.write('{"setting": "two')
    with Progress(disable=True) as progress:
        again, slow = harness.measure(settings, out, "t", work=work, only=["too late"], console=progress)
    assert (again["setting"], again["epoch_s"], again["timeline"]) == ("two ranks", row["epoch_s"], row["timeline"])
    assert "did not end within 0.5 s" in slow["note"]
    assert (out / row["timeline"]).is_file()


def test_only_what_the_same_code_measured_is_taken_over(tmp_path: Path) -> None:
    setting = harness.Setting(name="A", ranks=2)
    kept = {**_run(0, []), "fields": harness._fields(setting)}
    lines = tmp_path / "t.runs.jsonl"
    others = [{"commit": "b"}, {"note": "failed"}, {"fields": harness._fields(harness.Setting(name="A"))}]
    runs = [{**kept, "commit": "a"}, *({**kept, "commit": "a", **other} for other in others)]
    lines.write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert harness._kept(lines, [setting], commit="a") == runs[:1]
    assert harness._kept(lines, [setting]) == runs[:2]
    for commit in ("a+", "unknown"):
        with pytest.raises(ValueError, match="--resume: commit"):
            harness._kept(lines, [setting], commit=commit)


def test_the_rank_that_failed_is_blamed_not_those_that_lost_it() -> None:
    class Ended:
        def run(self, *_: Any, **__: Any) -> list[Outcome]:
            lost = "pygdist.errors.LostRankError: rank 0: the exchange with rank 1 failed"
            return [Outcome(0, 1, "", lost), Outcome(1, -9, "", ""), Outcome(2, -9, "", "", waited=True)]

    with pytest.raises(RuntimeError, match="fit, rank 1: killed by SIGKILL, as the kernel does when memory runs out"):
        harness._pygdist(Ended(), harness.Setting(name="A"), "fit", Path("x.yaml"))
