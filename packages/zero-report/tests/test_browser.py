"""The page in a real browser: it draws, answers, can be read and used by keys, and asks for nothing.

Needs Chromium (Debian: apt-get install chromium), so these tests are marked `soak`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from simulated import Simulation, simulate
from test_page import HOSTILE

from zero_report import RecordWriter, make_report, write_report

pytestmark = pytest.mark.soak

CHARTS = ("loss", "throughput", "norm", "rate", "phases", "strip", "memory-step", "memory-run", "ranks-chart")
COMPARED = ("compare-loss", "compare-seconds")
# Pixels of a chart's canvas that are not the ground, by colour; text and grid are there without any mark too.
COLOURS = """((id) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = {};
  for (let at = 0; at < data.length; at += 4) {
    const [r, g, b, a] = data.slice(at, at + 4);
    const colour = [r >> 5, g >> 5, b >> 5];
    if (a > 60 && Math.max(r, g, b) - Math.min(r, g, b) > 40) seen[colour] = (seen[colour] ?? 0) + 1;
  }
  return seen;
})"""
# The contrast of every piece of text against what lies behind it, after the WCAG's formula; the worst and its text.
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => { for (let at = node; at; at = at.parentElement) {
    const found = parse(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  } return [255, 255, 255]; };
  let worst = [99, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, host = node.parentElement;
    if (!node.textContent.trim() || !host.offsetParent || host.closest("script, .skip")) continue;
    const [a, b] = [light(parse(getComputedStyle(host).color)), light(ground(host))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.textContent.trim().slice(0, 40)];
  }
  return worst;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.fail("these tests need Chromium: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks with a disk, beside one without."""
    folder = tmp_path_factory.mktemp("runs")
    simulate(
        folder / "a", Simulation(ranks=4, steps=60, units=8, disk=dict.fromkeys(range(4), 0.006), compute={2: 1.2})
    )
    simulate(folder / "b", Simulation(ranks=4, steps=60, units=8))
    return write_report(folder / "a", compare=folder / "b")


def assert_quiet(browser: Browser, page: Path) -> None:
    assert browser.messages == []
    assert [address for address in browser.requests if address != "data:,"] == [page.as_uri()]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_has_marks_and_nothing_is_asked_for(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert_quiet(browser, page)
    for chart in (*CHARTS, *COMPARED):
        colours = browser.evaluate(f"{COLOURS}('{chart}')")
        assert max(colours.values(), default=0) > 60, chart
    assert len(browser.evaluate(f"{COLOURS}('phases')")) >= 4


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    size = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('p, td, th, li, label')]"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert size >= 12


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    ratio, text = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, text


def test_the_step_slider_and_the_rank_filter_change_what_is_shown(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = drawn(browser)
    memory = browser.evaluate("document.querySelector('#memory-step h3').textContent")
    browser.evaluate("document.getElementById('step-slider').focus()")
    browser.press("Home")
    assert browser.evaluate("document.getElementById('step-number').textContent") == "1"
    assert browser.evaluate("location.hash") == "#step=1"
    assert drawn(browser) != before
    assert browser.evaluate("document.querySelector('#memory-step h3').textContent") != memory
    browser.evaluate("document.getElementById('rank-filter').focus()")
    browser.type("0,2-3")
    assert "3 of 4 ranks shown" in browser.evaluate("document.getElementById('strip-note').textContent")
    browser.type("x")
    assert "Expected ranks as in 0-3,7" in browser.evaluate("document.getElementById('strip-readout').textContent")
    assert_quiet(browser, page)


def test_the_frame_of_a_notebook_answers_as_the_page_does(browser: Browser, page: Path) -> None:
    notebook = page.with_name("notebook.html")
    notebook.write_text(
        f'<!doctype html>\n<html data-ready="true">\n{make_report(page.parent)._repr_html_()}\n</html>\n'
    )
    browser.open(notebook)
    browser.enter_frame()
    before = drawn(browser)
    browser.evaluate("document.getElementById('step-slider').focus()")
    browser.press("Home")
    assert browser.evaluate("document.getElementById('step-number').textContent") == "1"
    assert drawn(browser) != before
    assert_quiet(browser, notebook)


def test_the_keyboard_alone_reaches_and_moves_everything(browser: Browser, page: Path) -> None:
    browser.open(page)
    reached = []
    for _ in range(80):
        browser.press("Tab")
        found = browser.evaluate(
            "(document.activeElement.id || document.activeElement.parentElement.id || document.activeElement.hash)"
        )
        if found in reached[:1] and len(reached) > 5:
            break
        reached.append(found)
    for wanted in ("theme", "step-slider", "rank-filter", "strip-reset", "strip", *CHARTS, "configuration-filter"):
        assert wanted in reached, wanted
    browser.evaluate("document.querySelector('#strip .host').focus()")
    browser.press("ArrowRight")
    first = browser.evaluate("document.getElementById('strip-readout').textContent")
    assert re.match(r"rank 0: \w+ .*ms", first)
    browser.press("ArrowRight")
    assert browser.evaluate("document.getElementById('strip-readout').textContent") != first
    browser.press("ArrowDown")
    assert browser.evaluate("document.getElementById('strip-readout').textContent").startswith("rank 1: ")
    browser.evaluate("document.querySelector('#loss .host').focus()")
    whole = drawn(browser, "loss")
    browser.press("+")
    assert drawn(browser, "loss") != whole
    browser.press("0")
    assert drawn(browser, "loss") == whole
    browser.evaluate("document.getElementById('theme').focus()")
    browser.press("Enter")
    browser.press("Enter")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert_quiet(browser, page)


def test_a_span_says_what_it_is_where_the_pointer_is(browser: Browser, page: Path) -> None:
    browser.open(page, height=6000)
    box = browser.evaluate(
        "(({left, top, width}) => ({left, top, width}))"
        "(document.querySelector('#strip .u-over').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["left"] + box["width"] / 4, y=box["top"] + 6)
    assert browser.evaluate("document.getElementById('strip-readout').textContent").startswith("rank 0: forward")


def test_hostile_names_are_shown_as_text_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    rows = [[HOSTILE, HOSTILE, HOSTILE, HOSTILE]]
    what: dict[str, Any] = {
        "names": "{}" + HOSTILE,
        "configuration": rows,
        "facts": {"title": HOSTILE, "versions": {HOSTILE: HOSTILE}},
    }
    simulate(tmp_path, Simulation(ranks=2, steps=6, disk={1: 0.02}, **what))
    with_notes = RecordWriter(
        tmp_path, rank=0, world_size=2, attempt=1, facts=what["facts"] | {"configuration": rows}, background=False
    )
    for kind in ("warning", "checkpoint", "failure", HOSTILE):
        with_notes.note(kind, text=HOSTILE, path=HOSTILE)
    with_notes.close()
    page = write_report(tmp_path)
    browser.call(
        "Page.addScriptToEvaluateOnNewDocument", source="window.alerted = []; window.alert = (x) => alerted.push(x);"
    )
    browser.open(page)
    assert browser.evaluate("window.alerted") == []
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert browser.evaluate("document.getElementById('title').textContent") == HOSTILE
    assert HOSTILE in browser.evaluate("document.getElementById('events').textContent")
    assert_quiet(browser, page)


def test_one_rank_without_spans_and_an_empty_record_are_pages_too(browser: Browser, tmp_path: Path) -> None:
    simulate(tmp_path / "one", Simulation(ranks=1, steps=3, spans=False, close=False))
    simulate(tmp_path / "none", Simulation(ranks=2, steps=0, close=False))
    for name in ("one", "none"):
        page = write_report(tmp_path / name)
        browser.open(page)
        assert_quiet(browser, page)
        assert "killed, or" in browser.evaluate("document.getElementById('ended').textContent")


def drawn(browser: Browser, chart: str = "strip") -> str:
    """What a chart's canvas shows."""
    found: str = browser.evaluate(f"document.querySelector('#{chart} canvas').toDataURL()")
    return found
