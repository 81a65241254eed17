"""The page in a browser: it asks for nothing, sorts, draws, answers the pointer and the keyboard, and fits a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pygdist.report import write_report

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'pygdist[test]'"
)

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_PATIENCE_MS = 150_000.0  # a busy machine draws the page in a minute
playwright.expect.set_options(timeout=_PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(_NAMES)} is on the path")
    options = [*_OPTIONS, "--no-sandbox"] if os.geteuid() == 0 else _OPTIONS
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=options, headless=True, timeout=_PATIENCE_MS)
        yield started
        started.close()


def _window(browser: Any, **options: Any) -> Any:
    context = browser.new_context(offline=True, **options)
    context.set_default_timeout(_PATIENCE_MS)
    return context


class Page:
    """The report in a window, all that it asked for, and all that it complained of."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.context = _window(browser, **options)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.url = path.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html.drawn", state="attached")

    def column(self, number: int) -> list[str]:
        """The cells of a column of the first table, as they stand."""
        rows = f"[...document.querySelector('table').tBodies].map(body => body.rows[0].cells[{number}].textContent)"
        found: list[str] = self.page.evaluate(rows)
        return found

    def close(self) -> None:
        """Close it; it asked for itself alone, and had nothing to complain of."""
        self.context.close()
        assert self.requests == [self.url]
        assert self.complaints == []


@pytest.fixture
def report(results: Path, tmp_path: Path) -> Path:
    return write_report(results, tmp_path / "report.html")


@pytest.mark.slow
def test_a_desk(browser: Any, report: Path) -> None:
    opened = Page(browser, report, viewport={"width": 1280, "height": 900})
    _check_sorting(opened)
    _check_more_of_a_row(opened)
    _check_plots(opened)
    _check_hover(opened)
    _check_choices(opened)
    opened.close()


def _check_sorting(opened: Page) -> None:
    header = opened.page.locator("th", has_text="epoch, s").first
    assert opened.column(3) == ["9.123", "10.5", "100.2", "", "0.75", "0.5"]
    header.locator("button").click()
    assert opened.column(3) == ["0.5", "0.75", "9.123", "10.5", "100.2", ""], "as numbers; what is missing last"
    assert header.get_attribute("aria-sort") == "ascending"
    opened.page.keyboard.press("Enter")
    assert opened.column(3) == ["100.2", "10.5", "9.123", "0.75", "0.5", ""]
    assert header.get_attribute("aria-sort") == "descending"
    opened.page.locator("th", has_text="graph").first.locator("button").click()
    assert opened.column(0) == ["my graph"] * 2 + ["Reddit"] * 4
    assert header.get_attribute("aria-sort") == "none"


def _check_more_of_a_row(opened: Page) -> None:
    body = opened.page.locator("table").first.locator("tbody", has_text="100.2")
    command = body.locator("code")
    assert not command.is_visible()
    body.locator(".unfold button").click()
    assert command.is_visible()
    assert command.text_content() == "python run.py --graph Reddit --backend cache --hosts 2"
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    body.locator(".copy").click()
    playwright.expect(body.locator(".copy")).to_have_text("copied")
    assert opened.page.evaluate("navigator.clipboard.readText()") == command.text_content()


def _check_plots(opened: Page) -> None:
    plots = "[...document.querySelectorAll('.js-plotly-plot')]"
    assert opened.page.evaluate(f"{plots}.length") == opened.page.locator(".plot").count() == 6
    points = opened.page.evaluate(f"{plots}[1].data.map(trace => [trace.name, trace.x, trace.y])")
    assert points == [["comm", ["Reddit", "my graph"], [9.123456, 0.75]], ["cache", ["Reddit"], [100.25]]]
    # what is drawn, not what was asked for
    assert opened.page.evaluate(f"{plots}.map(plot => plot.querySelectorAll('.point, .points path').length > 0)") == (
        [True] * 6
    )
    opened.page.locator(".legend button", has_text="cache").first.click()
    assert opened.page.evaluate(f"{plots}[1].data.map(trace => trace.visible)") == [True, False]


def _check_hover(opened: Page) -> None:
    plot = opened.page.locator(".plot").nth(1)
    plot.scroll_into_view_if_needed()
    plot.locator(".point path").first.hover(force=True)
    label = plot.locator(".hoverlayer .hovertext")
    label.wait_for()
    assert label.text_content() == "commgraph: Redditepoch, s: 9.123"


def _check_choices(opened: Page) -> None:
    load = opened.page.locator(".plot.load")
    load.locator("xpath=..").locator("select").select_option("4 hosts")
    assert load.evaluate("plot => plot.data.map(trace => trace.x.length)") == [4, 4]
    assert opened.page.get_by_text("Largest over smallest of 4 ranks").is_visible()
    assert not opened.page.get_by_text("Largest over smallest of 2 ranks").is_visible()
    timeline = opened.page.locator(".plot.timeline")
    assert timeline.evaluate("plot => plot.data.map(trace => [trace.name, trace.base])") == (
        [["compute", [0, 0.2]], ["wait", [4]]]
    )


@pytest.mark.slow
def test_a_phone_in_the_dark(browser: Any, report: Path) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    opened = Page(browser, report, color_scheme="dark", **options)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    widths = opened.page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.scrollWidth)")
    assert all(250 < width <= 390 for width in widths)
    background, text = opened.page.evaluate(
        "[getComputedStyle(document.documentElement).backgroundColor,"
        " document.querySelector('.js-plotly-plot').layout.font.color]"
    )
    assert (background, text) == ("rgb(21, 24, 28)", "#e3e6ea")
    box = opened.page.locator(".table").first
    why = box.locator(".why div").first
    box.evaluate("box => { box.scrollLeft = 200 }")
    assert why.bounding_box()["x"] < 30, "what is said of a row stays in sight"
    assert box.evaluate("box => box.scrollWidth > box.clientWidth"), "the table is wider, and scrolls in its own box"
    opened.close()


def test_without_scripts_tables_are_read(browser: Any, report: Path) -> None:
    context = _window(browser, java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.get_by_text("python run.py --graph Reddit --backend cache --hosts 2").is_visible()
    assert page.get_by_text("there are no plots").is_visible()
    assert not page.locator(".plot").first.is_visible()
    context.close()
