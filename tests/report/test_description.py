"""Descriptions: what is read, and that each mistake is told with the file and the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pygdist.errors import InputError
from pygdist.report import read_description
from tests.report.conftest import DESCRIPTION

PLOT = {"title": "a", "kind": "bar", "x": "a", "y": "b"}


def _written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_what_is_read(tmp_path: Path) -> None:
    found = read_description(_written(tmp_path, DESCRIPTION))
    assert (found.title, found.paper, found.figure) == (
        "Seconds per epoch <of two schemes>",
        "NeutronStar",
        "Figure 10",
    )
    assert found.table == ("graph", "backend", "hosts", "epoch_s")
    assert found.run == {"anything": [1, 2]}
    bars, lines, _ = found.plots
    assert (bars.y, bars.colour, bars.where) == (("epoch_s",), ("backend",), {"hosts": ("2",)})
    assert lines.log == ("x", "y")
    assert found.published is not None
    assert found.published.rows[1] == {"graph": "Reddit", "backend": "cache", "hosts": "2", "epoch_s": "7.25"}


def test_little_is_enough(tmp_path: Path) -> None:
    found = read_description(_written(tmp_path, {"title": "a", "paper": "b", "claim": None, "run": None}))
    assert (found.claim, found.plots, found.published, found.again) == ("", (), None, "")


MISTAKES: dict[str, tuple[Any, str]] = {
    "no keys": ("- a", ": expected keys and values, got a list"),
    "no YAML": ("a: [1", ":2:1: not valid YAML"),
    "no title": ({"paper": "b"}, ": 'title' is missing"),
    "empty paper": ({"title": "a", "paper": ""}, ": 'paper' is missing"),
    "unknown key": ({"titel": "a"}, ": unknown key 'titel'; the keys are title, paper"),
    "number as text": ({"title": 3, "paper": "b"}, ": title: expected text, got 3"),
    "table": ({"table": {"a": 1}}, ": table: expected text, got keys and values"),
    "mean": ({"mean": {"over": "seed"}}, ": mean: 'of' is missing"),
    "plots": ({"plots": PLOT}, ": plots: expected a list, got keys and values"),
    "plot": ({"plots": [PLOT, 5]}, ": plots[1]: expected keys and values, got 5"),
    "plot's key": ({"plots": [{**PLOT, "colours": "a"}]}, ": plots[0]: unknown key 'colours'"),
    "plot without x": ({"plots": [{"title": "a", "kind": "bar", "y": "b"}]}, ": plots[0]: 'x' is missing"),
    "kind": ({"plots": [{**PLOT, "kind": "pie"}]}, ": plots[0]: kind: expected bar or line or scatter, got 'pie'"),
    "log": ({"plots": [{**PLOT, "log": ["z"]}]}, ": plots[0]: log: expected x or y, got 'z'"),
    "where": ({"plots": [{**PLOT, "where": "a"}]}, ": plots[0]: where: expected columns and their values, got 'a'"),
    "where's value": ({"plots": [{**PLOT, "where": {"a": [{}]}}]}, ": plots[0]: where.a: expected a number or text"),
    "one bound": ({"plots": [{**PLOT, "error": ["a"]}]}, ": plots[0]: error: expected two columns, the lower"),
    "bounds of two": ({"plots": [{**PLOT, "y": ["a", "b"], "error": ["a", "b"]}]}, ": plots[0]: error"),
    "no source": ({"published": {"rows": []}}, ": published: 'source' is missing"),
    "published row": ({"published": {"source": "s", "rows": [1]}}, ": published: rows[0]: expected columns and"),
    "published cell": ({"published": {"source": "s", "rows": [{"a": [1]}]}}, ": published: rows[0].a: expected a"),
}


@pytest.mark.parametrize(("content", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(content: Any, words: str, tmp_path: Path) -> None:
    if isinstance(content, dict) and not {"title", "paper", "titel"} & content.keys():
        content = {"title": "a", "paper": "b", **content}
    path = _written(tmp_path, content)
    with pytest.raises(InputError, match=f"^{re.escape(str(path) + words)}") as caught:
        read_description(path)
    assert "\n" not in str(caught.value)
