"""The README is short, paragraphs are too, and links lead somewhere; no builder of the site is needed to see that."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from pygdist.testing import readme
from tests.docs.pages import ROOT, pages, tokens

_LAYERS = ROOT / "docs" / "reference" / "layers.md"
#: Also linked to, and read by people: the notes of experiments.
_LINKED = [*pages(), *sorted((ROOT / "experiments").rglob("README.md"))]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_readme_is_at_most_ten_kilobytes() -> None:
    assert (ROOT / "README.md").stat().st_size <= 10_000


def long_paragraphs(text: str) -> list[str]:
    """Return the paragraphs, and items of lists, of more than 90 words."""
    pairs = itertools.pairwise(tokens(text))
    insides = [inside.content for opening, inside in pairs if opening.type == "paragraph_open"]
    return [paragraph for paragraph in insides if len(paragraph.split()) > 90]


@pytest.mark.parametrize("path", pages(), ids=_id)
def test_paragraphs_are_short(path: Path) -> None:
    assert long_paragraphs(path.read_text(encoding="utf-8")) == []


def test_a_long_paragraph_is_found() -> None:
    assert len(long_paragraphs("word " * 91 + "\n\n- " + "word " * 91 + "\n\n" + "word " * 90)) == 2


def broken(path: Path, text: str) -> list[str]:
    """Return the links of a page to files and headings that are not there."""
    inside = [token for inline in tokens(text) for token in inline.children or []]
    links = [str(token.attrs["href"]) for token in inside if token.type == "link_open"]
    links += [str(token.attrs["src"]) for token in inside if token.type == "image"]
    found = []
    for link in links:
        name, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", link) or "reference/command-line" in name or name.startswith("command-line/"):
            continue  # another site, or a page that the build writes
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (heading and heading not in headings(target)):
            found.append(link)
    return found


def headings(path: Path) -> set[str]:
    """Return the names by which headings of a page are linked to."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"(?m)^#+ (.*)", text)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", _LINKED, ids=_id)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert broken(path, text) == []
    folders = "experiments|notebooks|pygdist|recipes|tests|docs"
    named = [ROOT / name for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.-]+\.(?:py|yaml|csv|md)\b", text)]
    named += [path.parent / name for name in re.findall(r"(?<![\w/.-])results/[\w.-]+\.(?:csv|png)\b", text)
              if "experiments" in path.parts]  # fmt: skip
    assert [name for name in named if not name.exists() and name.stem != "NAME"] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n\n[a](#one-heading) [b](#two) [c](page.md) [d](none.md) [e](https://pyg.org)\n")
    assert broken(page, page.read_text()) == ["#two", "none.md"]


def test_lists_of_layers_are_those_of_the_suite() -> None:
    text = _LAYERS.read_text(encoding="utf-8")
    assert readme.update(text) == text, "the lists are stale; run: python -m pygdist.testing.readme"
    for name in readme.BLOCKS:
        assert f"<!-- generated: {name} -->" in text


def unfounded(text: str) -> list[str]:
    """Return the measurements of a text that the notes it links to do not hold; tests hold those to their CSVs."""
    claims = (ROOT / "experiments" / "results" / "scoreboard.csv").read_text(encoding="utf-8")
    found = []
    for paragraph in re.split(r"\n\n(?!\|)|\n(?=- )", text):
        linked = [ROOT / name for name in re.findall(r"\]\((experiments/[\w/]*README\.md)", paragraph)]
        notes = "\n".join([claims, *(path.read_text(encoding="utf-8") for path in linked)])
        said = re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"\]\([^)]*\)", "", paragraph)) if linked else []
        bold = re.findall(r"\d[\d.]*", " ".join(re.findall(r"\*\*([^*]*)\*\*", paragraph)))
        found += [number for number in {*said, *bold} if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", notes)]
    return found


def test_measurements_of_the_readme_are_those_of_the_experiments() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert unfounded(text) == []
    changed = text.replace("**2.77 GiB**", "**2.78 GiB**").replace("2.09", "2.093")
    assert sorted(unfounded(changed)) == ["2.093", "2.78"]
