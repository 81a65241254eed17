"""A small folder of results: two graphs, two schemes, a run that failed, load, timelines, a paper's numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

Write = Callable[..., Path]

DESCRIPTION: dict[str, Any] = {
    "title": "Seconds per epoch <of two schemes>",
    "paper": "NeutronStar",
    "figure": "Figure 10",
    "claim": "One scheme is faster.",
    "differs": "Fewer hosts.",
    "table": ["graph", "backend", "hosts", "epoch_s"],
    "plots": [
        {"title": "By graph", "kind": "bar", "x": "graph", "y": "epoch_s", "colour": "backend", "where": {"hosts": 2}},
        {"title": "By hosts", "kind": "line", "x": "hosts", "y": "epoch_s", "colour": "graph", "log": ["x", "y"],
         "where": {"backend": "comm"}},
        {"title": "Nothing", "kind": "scatter", "x": "hosts", "y": "epoch_s",
         "where": {"backend": "cache", "hosts": [4]}},
    ],
    "published": {
        "source": "Wang et al., Figure 10",
        "rows": [
            {"graph": "Reddit", "backend": "comm", "hosts": 2, "epoch_s": 5.5},
            {"graph": "Reddit", "backend": "cache", "hosts": 2, "epoch_s": 7.25},
        ],
    },
    "again": "python run.py --graph {graph} --backend {backend} --hosts {hosts}",
    "run": {"anything": [1, 2]},
}  # fmt: skip

ROWS = [
    {
        "graph": graph, "backend": backend, "hosts": hosts, "epoch_s": "" if failed else seconds,
        "seed": number, "note": "out of memory" if failed else "",
        "timeline": "epochs.traces/a.json" if number == 0 else "", "cpu": "EPYC", "commit": "29e1058",
    }
    for number, (graph, backend, hosts, seconds, failed) in enumerate([
        ("Reddit", "comm", 2, 9.123456, False),
        ("Reddit", "comm", 4, 10.5, False),
        ("Reddit", "cache", 2, 100.25, False),
        ("Reddit", "cache", 4, 0, True),
        ("my graph", "comm", 2, 0.75, False),
        ("my graph", "comm", 4, 0.5, False),
    ])
]  # fmt: skip

RANKS = [
    {
        "setting": f"{hosts} hosts", "seed": 0, "epoch": epoch, "rank": rank,
        "compute_s": 1.0 + rank + 10 * (epoch == 0),
        "exchange_s": 0.5,
        "sent_bytes": 1000 * (rank + 1), "sent_messages": 3, "peak_gib": 2.5,
    }
    for hosts in (2, 4) for epoch in range(3) for rank in range(hosts)
]  # fmt: skip

TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}},
        {"ph": "X", "name": "compute", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 4000.0, "args": {"of": "epoch 2"}},
        {"ph": "X", "name": "wait", "pid": 0, "tid": 0, "ts": 5000.0, "dur": 1500.0, "args": {"of": "hop 0"}},
        {"ph": "X", "name": "compute", "pid": 1, "tid": 0, "ts": 1200.0, "dur": 6000.0, "args": {"of": "epoch 2"}},
    ]
}


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes ``results/NAME.csv`` and ``NAME.yaml``; returns the folder."""

    def _write(name: str, rows: Sequence[dict[str, Any]] | None, **description: Any) -> Path:
        folder = tmp_path / "results"
        folder.mkdir(exist_ok=True)
        if rows is not None:
            write_csv(folder / f"{name}.csv", rows)
        if description:
            text = yaml.safe_dump({"title": name, "paper": "A paper", **description}, sort_keys=False)
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        return folder

    return _write


@pytest.fixture
def results(write: Write) -> Path:
    folder = write("epochs", ROWS, **DESCRIPTION)
    write("later", None, title="Not there yet", paper="P3", published=DESCRIPTION["published"])
    write("plain", [{"name": "a", "value": 3}, {"name": "b", "value": 4}])
    write_csv(folder / "epochs.ranks.csv", RANKS)
    (folder / "epochs.traces").mkdir()
    for name in ("a", "b"):
        (folder / "epochs.traces" / f"{name}.json").write_text(json.dumps(TRACE))
    (folder / "run.yaml").write_text("seed_everything: 0\n")
    return folder
