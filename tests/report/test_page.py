"""What is on the page: tables, plots as data, load, timelines; and what is said where there is nothing to show."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from pygdist.cli import main
from pygdist.errors import InputError
from pygdist.report import make_report, write_report
from pygdist.report.values import shown, spoken
from tests.report.conftest import DESCRIPTION, ROWS, Write

PLOT = {"title": "A plot", "kind": "bar", "x": "a", "y": "b"}


def _figures(html: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    figures: list[dict[str, Any]] = json.loads(found[1])
    for figure in figures:  # plotly checks every name and value
        go.Figure({"data": figure["data"], "layout": figure["layout"]})
    return figures


def _text(html: str) -> str:
    """The page's own part, without plotly.js."""
    return html.partition('<script type="application/json"')[0]


def _points(figure: dict[str, Any]) -> dict[str, list[tuple[Any, Any]]]:
    return {trace["name"]: list(zip(trace["x"], trace["y"], strict=True)) for trace in figure["data"]}


def test_a_whole_folder(results: Path) -> None:
    report = make_report(results)
    assert (report.experiments, report.tables, report.plots) == (2, 5, 4)
    text = _text(report.html)
    assert "Seconds per epoch &lt;of two schemes&gt;" in text
    assert "<of two schemes>" not in report.html
    assert "<strong>Not run.</strong> There is no later.csv yet." in text
    assert ">Other tables<" in text
    assert "seed_everything" not in report.html


def test_an_experiment_may_open_the_page(write: Write) -> None:
    write("a", ROWS, **DESCRIPTION)
    folder = write("z", ROWS, **{**DESCRIPTION, "paper": "Scoreboard", "first": True})
    text = _text(make_report(folder).html)
    assert text.index(">Scoreboard<") < text.index(">NeutronStar<")


def test_our_points_and_the_papers(results: Path) -> None:
    paper, ours, paper_lines, lines, *_ = _figures(make_report(results).html)
    assert _points(paper) == {"comm": [("Reddit", 5.5)], "cache": [("Reddit", 7.25)]}
    assert _points(ours) == {"comm": [("Reddit", 9.123456), ("my graph", 0.75)], "cache": [("Reddit", 100.25)]}
    assert [trace["marker"] for trace in paper["data"]] == [trace["marker"] for trace in ours["data"]]
    assert paper["layout"]["xaxis"] == ours["layout"]["xaxis"]
    assert "range" not in ours["layout"]["yaxis"], "5 and 100 are not seen on one axis"
    assert _points(lines) == {"Reddit": [(2, 9.123456), (4, 10.5)], "my graph": [(2, 0.75), (4, 0.5)]}
    assert lines["layout"]["xaxis"]["ticktext"] == ["2", "4"]
    assert lines["layout"]["yaxis"]["range"] == paper_lines["layout"]["yaxis"]["range"]
    assert "<b>Reddit</b><br>hosts: 2<br>epoch, s: 9.123" in lines["data"][0]["hovertext"]


@pytest.mark.parametrize(("theirs", "same"), [(3.0, True), (8.0, True), (40.0, False), (0.5, False)])
def test_axes_are_the_same_where_both_are_seen(theirs: float, same: bool, write: Write) -> None:
    published = {"source": "s", "rows": [{"a": "x", "b": theirs}, {"a": "y", "b": theirs}]}
    html = make_report(write("one", [{"a": "x", "b": 4}, {"a": "y", "b": 2}], plots=[PLOT], published=published)).html
    paper, ours = (figure["layout"]["yaxis"].get("range") for figure in _figures(html))
    assert paper == ours == (pytest.approx([0, 1.06 * max(4, theirs)]) if same else None)
    assert ("different axes" in html) != same


def test_rows_that_did_not_run_stay_in_the_table_alone(results: Path) -> None:
    text = _text(make_report(results).html)
    assert "Not drawn: of the only row: 1 did not run." in text
    row = re.search(r'<tbody class="note">(.*?)</tbody>', text, re.DOTALL)
    assert row is not None
    assert "Did not run: out of memory" in row[1]
    assert "python run.py --graph Reddit --backend cache --hosts 4" in row[1]


def test_commands_are_quoted_for_the_shell(write: Write) -> None:
    rows = [{"a": "two words", "b": 1, "c": "--x 1"}]
    for again, expected in {
        "run --a {a} --b {b}": "run --a &#39;two words&#39; --b 1",
        'run --a "{a}"': "run --a &#34;two words&#34;",
        'run "it\'s {b}" {a}': "run &#34;it&#39;s 1&#34; &#39;two words&#39;",
        'run "b {b} a {a}" {a}': "run &#34;b 1 a two words&#34; &#39;two words&#39;",
        "run {c!s}": "run --x 1",
        "{c}": "--x 1",
    }.items():
        assert f"<code>{expected}</code>" in _text(make_report(write("one", rows, again=again)).html)


def test_what_is_the_same_in_all_rows_is_said_once(results: Path) -> None:
    text = _text(make_report(results).html)
    assert text.count("EPYC") == text.count("29e1058") == 1
    assert re.findall(r'title="(\w+): sort"', text)[:4] == ["graph", "backend", "hosts", "epoch_s"]


def test_cells_show_four_digits_and_sort_by_all(results: Path) -> None:
    assert '<td class="number" data-value="9.123456" title="9.123456">9.123</td>' in _text(make_report(results).html)
    assert [shown(text) for text in ("0.00012345", "1e-9", "33177248.75", "1234", "-2.50", "1e400", "29e1x", "")] == [
        "0.0001234", "1e-09", "33,180,000", "1,234", "-2.5", "1e400", "29e1x", "",
    ]  # fmt: skip
    assert [spoken(name) for name in ("peak_gib", "gbit_s", "edge_cut")] == ["peak, GiB", "Gbit/s", "edge cut"]


def test_several_runs_are_their_median(write: Write) -> None:
    rows = [{"a": "x", "b": value} for value in (3, 1, 10)] + [{"a": "y", "b": 2}]
    report = make_report(write("one", rows, plots=[PLOT]))
    (figure,) = _figures(report.html)
    assert _points(figure) == {"b": [("x", 3), ("y", 2)]}
    assert (figure["data"][0]["error_y"]["array"], figure["data"][0]["error_y"]["arrayminus"]) == ([7, 0], [2, 0])
    assert "drawn as their median" in report.html


def test_runs_on_other_machines_are_apart_where_the_table_names_what_differs(write: Write) -> None:
    rows = [{"a": "x", "seed": 0, "threads": threads, "s": 2 / threads} for threads in (1, 2)]
    report = make_report(write("one", rows, table=["threads", "s"], mean={"over": "seed", "of": "s"}))
    means, _ = _text(report.html).split("Every run")
    assert re.findall(r'<td class="number"[^>]*>([^<]*)</td>', means) == ["1", "2", "1", "2", "1", "1"]


def test_runs_of_one_measurement_are_their_mean(write: Write) -> None:
    rows = [{"a": "x", "seed": seed, "b": b, "cpu": f"cpu {seed}", "note": ""} for seed, b in enumerate((1, 2, 6))]
    rows += [
        {"a": "y", "seed": 0, "b": 4, "cpu": "cpu 0", "note": ""},
        {"a": "y", "seed": 1, "b": "", "cpu": "cpu 0", "note": "out of memory"},
    ]
    report = make_report(
        write("one", rows, plots=[PLOT], table=["a", "seed", "b"], again="run {seed}", mean={"over": "seed", "of": "b"})
    )
    (figure,) = _figures(report.html)
    assert _points(figure) == {"b": [("x", 3), ("y", 4)]}
    spread = statistics.stdev((1, 2, 6))
    assert figure["data"][0]["error_y"]["array"] == pytest.approx([spread, 0])
    assert "drawn as their mean, with bars of one standard deviation" in report.html
    means, every = _text(report.html).split("Every run")
    assert re.findall(r'<td class="number"[^>]*>([^<]*)</td>', means) == ["3 ± 2.6", "3", "4", "1"]
    assert 'data-value="3.0"' in means
    assert "run 0" not in means
    assert "run 0" in every
    assert "out of memory" in every


def test_error_columns_are_bounds(write: Write) -> None:
    rows = [{"a": 1, "b": 5, "low": 4, "high": 8}, {"a": 2, "b": 6, "low": "", "high": ""}]
    (figure,) = _figures(make_report(write("one", rows, plots=[{**PLOT, "error": ["low", "high"]}])).html)
    assert (figure["data"][0]["error_y"]["array"], figure["data"][0]["error_y"]["arrayminus"]) == ([3, 0], [1, 0])


EMPTY = {
    "no rows": ([], {}, "Not drawn: the table has no rows."),
    "no such value": ([{"a": 1, "b": 2}], {"where": {"a": 5}}, "Not drawn: no row has the values"),
    "nothing measured": ([{"a": 1, "b": "1e999"}, {"a": 2, "b": "nan"}], {}, "Not drawn: of 2 rows, 2 lack a value"),
    "not on this axis": ([{"a": 1, "b": 0}], {"log": "y"}, "Not drawn: of the only row: 1 lacks a value"),
}


@pytest.mark.parametrize(("rows", "change", "words"), EMPTY.values(), ids=EMPTY)
def test_no_plot_is_empty(rows: list[dict[str, Any]], change: dict[str, Any], words: str, write: Write) -> None:
    folder = write("one", rows or [{"a": 1, "b": 2}], plots=[{**PLOT, **change}])
    if not rows:
        (folder / "one.csv").write_text("a,b\n")
    report = make_report(folder)
    assert (report.plots, _figures(report.html)) == (0, [])
    assert words in report.html
    assert 'class="plot' not in report.html


def test_load_per_rank(results: Path) -> None:
    report = make_report(results)
    four, two = _figures(report.html)[4:6]  # most ranks first
    assert _points(two) == {"compute": [("0", 1.0), ("1", 2.0)], "exchange": [("0", 0.5), ("1", 0.5)]}
    assert len(four["data"][0]["x"]) == 4
    assert "Largest over smallest of 4 ranks: computing 4.00, bytes sent 4.00, peak memory 1.00." in report.html


def test_timelines(results: Path) -> None:
    report = make_report(results)
    figure = _figures(report.html)[6]
    compute, wait = figure["data"]
    assert (compute["y"], compute["base"], compute["x"]) == (["rank 0", "rank 1"], [0, 0.2], [4, 6])
    assert (wait["name"], wait["hovertext"]) == ("wait", ["<b>wait</b> hop 0<br>rank 0: 1.5 ms<br>from 4 ms"])
    assert '<option value="6">Reddit, comm, hosts 2</option>' in report.html
    assert '<option value="7">b</option>' in report.html


def test_words_cannot_leave_the_page(write: Write) -> None:
    evil = "</script><script>alert(1)</script>"
    plot = {**PLOT, "title": evil, "colour": "c", "x_title": evil}
    html = make_report(write("one", [{"a": evil, "b": 1, "c": evil}], title=evil, claim=evil, plots=[plot])).html
    assert "<script>alert" not in html


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "table": ({"table": ["a", "z"]}, r"one\.yaml: table: there is no column 'z' in one\.csv; its columns are a, b"),
    "plot": ({"plots": [{**PLOT, "y": "z"}]}, r"one\.yaml: plots\[0\]: there is no column 'z'"),
    "again": ({"again": "run {z}"}, r"one\.yaml: again: there is no column 'z'; the columns are a, b"),
    "format": ({"again": "run {a"}, r"one\.yaml: again: expected '}'"),
    "words": ({"plots": [{**PLOT, "x": "b", "y": "a"}]}, r"one\.csv: column 'a' holds 'x', which is no number"),
}


@pytest.mark.parametrize(("description", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(description: dict[str, Any], words: str, write: Write) -> None:
    with pytest.raises(InputError, match=words):
        make_report(write("one", [{"a": "x", "b": 1}], **description))


FILES = {
    "ragged": ("one.csv", "a,b\n1\n", r"data row 1 \(.*\) has 1 cells, expected 2"),
    "twice": ("one.csv", "a,a\n1,2\n", r"two columns are called 'a'"),
    "nothing": ("one.csv", "", r"is empty; its first line must name the columns"),
    "no rank": ("epochs.ranks.csv", "setting,compute_s,exchange_s\na,1,1\n", r"there is no column 'rank'"),
    "no seconds": ("epochs.ranks.csv", "setting,rank,compute_s,exchange_s\na,0,x,1\n", r"'compute_s' holds 'x'"),
    "no trace": ("epochs.traces/a.json", "[1]", r"not a Chrome trace"),
}


@pytest.mark.parametrize(("name", "content", "words"), FILES.values(), ids=FILES)
def test_files_that_cannot_be_read(name: str, content: str, words: str, results: Path) -> None:
    (results / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(name) + ".*" + words):
        make_report(results)


def test_the_command(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, out = write("one", ROWS, **DESCRIPTION), tmp_path / "new" / "report.html"
    caplog.set_level("INFO")
    assert main(["report", str(folder), "-o", str(out), "--title", "Mine"]) == 0
    assert "report.html: 1 experiments, 2 tables, 2 plots" in caplog.text
    assert "<title>Mine</title>" in out.read_text(encoding="utf-8")
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_the_command_tells_of_mistakes(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    folder = write("one", ROWS)
    for arguments, words in (
        ([tmp_path / "empty", "-o", "a.html"], "empty: there are neither descriptions"),
        ([tmp_path / "nowhere", "-o", "a.html"], "nowhere: there is no such folder"),
        ([folder, "-o", folder], "results: cannot be written"),
        ([folder], "-o"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["one.csv"]


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_missing_packages_are_named(name: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"needs {name}: pip install 'pygdist\[report\]'"):
        write_report(write("one", ROWS), tmp_path / "report.html")
