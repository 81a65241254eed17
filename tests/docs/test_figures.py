"""The figures of the documentation are those that their script draws, and nothing in them overlaps the frame."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.pages import script

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"
_SVG = "{http://www.w3.org/2000/svg}"
_SMALLEST = 13  # pixels at the width of the column of text


draw = script("figures/draw.py")


def _width(text: ElementTree.Element) -> float:
    """Estimate the width of a text: letters of a sans-serif face are on average 0.54 of its size, bold ones 0.58."""
    share = 0.58 if text.get("font-weight") else 0.54
    return share * float(text.attrib["font-size"]) * len(text.text or "")


def _left(text: ElementTree.Element) -> float:
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
    return float(text.attrib["x"]) - shift * _width(text)


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_committed_figure_is_what_the_script_draws(name: str) -> None:
    committed = (_FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == draw.FIGURES[name]().svg(), "run: python docs/figures/draw.py"


def test_no_figure_is_left_over() -> None:
    assert {path.stem for path in _FIGURES.glob("*.svg")} == set(draw.FIGURES)


@pytest.mark.parametrize("name", draw.FIGURES)
def test_texts_are_large_enough_and_inside(name: str) -> None:
    figure = ElementTree.fromstring(draw.FIGURES[name]().svg())
    for text in figure.iter(f"{_SVG}text"):
        assert float(text.attrib["font-size"]) >= _SMALLEST, text.text
        assert _left(text) >= 4, text.text
        assert _left(text) + _width(text) <= draw.WIDTH - 4, text.text
        assert float(text.attrib["y"]) < float(figure.attrib["viewBox"].split()[3]), text.text


@pytest.mark.parametrize("name", draw.FIGURES)
def test_texts_do_not_overlap(name: str) -> None:
    texts = list(ElementTree.fromstring(draw.FIGURES[name]().svg()).iter(f"{_SVG}text"))
    for number, one in enumerate(texts):
        for other in texts[:number]:
            near = abs(float(one.attrib["y"]) - float(other.attrib["y"])) < _SMALLEST - 1
            apart = _left(one) + _width(one) <= _left(other) or _left(other) + _width(other) <= _left(one)
            assert apart or not near, f"{one.text!r} lies on {other.text!r}"


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_page_shows_the_figure_with_a_text_for_those_who_do_not_see_it(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in _FIGURES.parent.joinpath("explanation").glob("*.md")]
    texts = [text for page in pages for text in re.findall(rf"!\[([^\]]+)\]\(\.\./figures/{name}\.svg\)", page)]
    assert len(texts) == 1
    assert len(texts[0]) > 60


def test_check_tells_which_figure_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw, "HERE", tmp_path)
    assert draw.main(["--check"]) == 1
    assert draw.main([]) == 0
    assert draw.main(["--check"]) == 0
    (tmp_path / "p3.svg").write_text("<svg/>")
    assert draw.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "differ: p3.svg"
