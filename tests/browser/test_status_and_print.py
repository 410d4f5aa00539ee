"""The first screen of a run with bounds, objectives and failures, its number of words, and its printout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from loadgen.analysis.objectives import parse, parse_bounds
from loadgen.analysis.report import page as html
from loadgen.analysis.report.run_document import page_document
from loadgen.results import load_and_summarise
from tests.browser.test_report_hands import pages_of, strokes
from tests.support.runs import failed, header, healthy, loop, run_of

WORDS_MAX = 900
PHONE = {"width": 360, "height": 780}
CLIPPED = "document.querySelectorAll('.unseen').forEach((part) => { part.hidden = true; })"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an open loop with 20 failures, whose objectives and goodput bounds are partly missed."""
    folder = tmp_path_factory.mktemp("judged") / "run"
    failures = [failed(1200 + index, http_status=500, due_ns=index * 10_000_000) for index in range(20)]
    plan = header(1220).plan | {"arrivals": "constant:100"}
    run_of(folder, [*loop(1200), *failures], plan=plan, telemetry=healthy(), simulated=True)
    objectives = parse(["e2e.p50 < 100ms", "tpot.p50 < 10s", "ttft.p99 < 1ms"])
    part = load_and_summarise(folder, objectives, parse_bounds(["ttft < 60ms", "e2e < 400ms"]))
    (folder / "report.html").write_text(html.render(page_document([part])), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser) -> Any:
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    yield page
    page.close()


def bottom(page: Page, selector: str) -> float:
    """Return the lower end of the first element that matches the selector, in pixels below the top of the page."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"] + box["height"]


def test_a_phone_shows_the_verdict_the_headline_and_the_worst_failure_first(page: Page, judged: Path) -> None:
    """No scrolling is needed, and the chips come before the figures."""
    page.set_viewport_size(PHONE)
    page.goto(judged.as_uri())
    chips = page.locator(".status .chip").all_inner_texts()
    assert ["Measurement" in chips[0], "Requests" in chips[1], "Objectives" in chips[2]] == [True] * 3
    assert "1,200 of 1,220 complete (1.6% incomplete, HTTP 500)" in " ".join(chips[1].split())
    assert "2 of 3 failed: ttft.p99" in " ".join(chips[2].split())
    assert bottom(page, ".status") < bottom(page, ".card.main .value") < PHONE["height"]
    assert page.locator(".card.main dt").inner_text() == "Goodput"


def test_a_page_has_few_words(page: Page, judged: Path) -> None:
    """With bounds, objectives and failures, and with every part folded, as the page opens."""
    page.goto(judged.as_uri())
    page.evaluate(CLIPPED)
    text = page.evaluate("document.body.innerText")
    assert len(text.split()) <= WORDS_MAX


def test_goodput_has_a_line_and_a_row_per_bound(page: Page, judged: Path) -> None:
    """Each bound is drawn and counted alone, next to all bounds together."""
    page.goto(judged.as_uri())
    page.evaluate("Report.drawAll()")
    names = page.evaluate("document.querySelector('#chart-goodput').data.map(({ name }) => name)")
    assert names == ["all bounds", "ttft < 60ms alone", "e2e < 400ms alone"]
    rows = page.locator("#goodput tbody th").all_inner_texts()
    assert rows == ["ttft < 60ms", "e2e < 400ms", "all bounds"]
    assert page.locator("#title-goodput").inner_text().endswith("if both bounds were k times as wide")


def test_the_page_unpacks_its_library_in_two_equal_ways(page: Page, judged: Path) -> None:
    """For a page that is printed at once, gunzip.js unpacks the chart library without the browser's decompression."""
    page.goto(judged.as_uri())
    unpack = """() => new TextDecoder().decode(gunzip(Uint8Array.from(
        atob(document.getElementById("plotly").textContent), (character) => character.charCodeAt(0))))"""
    assert page.evaluate(unpack) == (html.HERE / html.PLOTLY).read_text(encoding="utf-8")


def test_printing_right_after_loading_draws_every_chart(page: Page, judged: Path, tmp_path: Path) -> None:
    """`chromium --print-to-pdf` as CI jobs use it: as many strokes as a page that was given time, on as few sheets."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        program = page.context.browser.browser_type.executable_path  # type: ignore[union-attr]
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    printed = tmp_path / "report.pdf"
    command = [program, *options, f"--print-to-pdf={printed}", judged.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)})
    page.goto(judged.as_uri())
    page.evaluate("Report.drawAll()")
    patient = page.pdf(format="A4")
    assert strokes(printed.read_bytes()) > 0.9 * strokes(patient) > 1000
    assert pages_of(printed.read_bytes()) <= 13


def test_the_first_sheet_is_not_left_half_empty(page: Page, judged: Path) -> None:
    """The figures of the run begin on the sheet with the title, and small charts stand side by side."""
    page.goto(judged.as_uri())
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".run").first.evaluate("(card) => getComputedStyle(card).breakInside") == "auto"
    tops = page.locator("#latency .charts figure").evaluate_all("(all) => all.map((one) => one.offsetTop)")
    assert len(set(tops)) == (len(tops) + 1) // 2
