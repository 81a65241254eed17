"""The pages that reproduce the papers: filled from the experiments, with links that lead somewhere."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.docs.pages import script

_ROOT = Path(__file__).parents[2]
_PAGES = _ROOT / "docs" / "papers"


papers = script("_ext/papers.py")


def _filled(path: Path) -> str:
    text: str = papers.filled(path.read_text(encoding="utf-8"))
    return text


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"(?m)^#+ (.*)", re.sub(r"(?ms)^```.*?^```$", "", text))
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_experiment_has_a_page() -> None:
    folders = {path.parent.name for path in (_ROOT / "experiments").glob("*/README.md")}
    marks = {
        mark
        for path in _PAGES.glob("*.md")
        for mark in re.findall(r"<!-- generated: experiments (\S+) -->", path.read_text())
    }
    assert marks == {*folders, "."}
    assert folders <= {path.stem for path in _PAGES.glob("*.md")}  # links between READMEs lead to pages of these names


@pytest.mark.parametrize("path", sorted(_PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", _filled(path))
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        page = (path.parent / target).resolve() if target else path
        assert page.is_file(), target
        if anchor:
            assert anchor in _anchors(_filled(page)), f"{target}#{anchor}"


@pytest.mark.parametrize("path", sorted(_PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_nothing_is_left_unfilled(path: Path) -> None:
    text = _filled(path)
    assert "<!-- generated" not in text
    assert "<!-- figures" not in re.sub(r"`[^`]*`", "", text)
    assert len(re.findall(r"(?m)^# ", re.sub(r"(?ms)^```.*?^```$", "", text))) == 1, "one title"


def test_a_page_has_the_numbers_of_its_readme_and_the_origin_of_its_tables() -> None:
    text = _filled(_PAGES / "distgnn.md")
    readme = (_ROOT / "experiments" / "distgnn" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (?:cd-0|cd-5|0c) \|.*$", readme)
    assert len(rows) >= 3
    assert all(row in text for row in rows)
    with (_ROOT / "experiments" / "distgnn" / "results" / "replication.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    line = next(line for line in text.splitlines() if "experiments/distgnn/replication.yaml`" in line)
    assert f"`{row['commit']}`" in line
    assert row["date"] in line
    assert row["cpu"] in line


def test_the_scoreboard_has_all_claims() -> None:
    with (_ROOT / "experiments" / "results" / "scoreboard.csv").open(newline="") as file:
        claims = list(csv.DictReader(file))
    whole = _filled(_PAGES / "scoreboard.md")
    assert whole.count("\n| ") == len(claims) + 2  # a head, and the line below it
    for name, page in (("NeutronStar", "neutronstar"), ("P3", "p3")):
        rows = [row for row in claims if row["paper"] == name]
        text = _filled(_PAGES / f"{page}.md")
        assert all(" ".join(row["claim"].split()) in text for row in rows)
        assert f"| {rows[0]['verdict']} |" in text


def test_links_of_readmes_become_pages_files_or_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "experiments" / "one"
    (folder / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "README.md").write_text("# All\n")
    (folder / "results" / "a.csv").write_text("x\n1\n")
    (folder / "README.md").write_text(
        "# One\n\n[all](../README.md#how) [here](#here) [a](results/a.csv) ![plot](results/a.png)\n"
        "[code](../../pygdist/x.py) [recipes/y](../../recipes/y) [out](https://pyg.org)\n"
        "<!-- figures: results/a.csv\nrows: [x]\n-->\n```\n[kept](../README.md)\n```\n"
    )
    monkeypatch.setattr(papers, "ROOT", tmp_path)
    monkeypatch.setattr(papers, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(papers, "PAGES", tmp_path / "docs" / "papers")
    assert papers.filled("<!-- generated: experiments one -->\n").split("\n") == [
        "[all](experiments.md#how) [here](#here) [a](../../experiments/one/results/a.csv) "
        "![plot](../../experiments/one/results/a.png)",
        "code (`pygdist/x.py`) `recipes/y` [out](https://pyg.org)",
        "```", "[kept](../README.md)", "```", "",
    ]  # fmt: skip


@pytest.mark.parametrize("mark", ["experiments nothing", "tables nothing", "scoreboard Nothing"])
def test_a_name_that_is_not_there_ends_the_build(mark: str) -> None:
    with pytest.raises(FileNotFoundError):
        papers.filled(f"<!-- generated: {mark} -->\n")


def test_the_site_is_built_again_when_a_table_changes() -> None:
    files = papers.sources(
        "<!-- generated: experiments p3 -->\n<!-- generated: tables p3 -->\n<!-- generated: scoreboard P3 -->\n"
    )
    names = {path.name for path in files}
    assert {"README.md", "bytes.yaml", "bytes.csv", "scoreboard.csv"} <= names
