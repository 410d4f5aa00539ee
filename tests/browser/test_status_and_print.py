"""The first screen of a run with bounds, objectives and failures, its number of words, and its printout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from loadgen.analysis.objectives import parse, parse_bounds
from loadgen.analysis.report import page as html
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.run.runfile import Telemetry
from loadgen.results import load_and_summarise
from tests.browser.conftest import reading
from tests.browser.test_report_hands import pages_of, strokes
from tests.support.runs import failed, header, healthy, loop, run_of, truncated

WORDS_MAX = 900
BYTES_MAX = 1_000_000
LETTER_HEIGHT = 949
"""Height of a sheet of Letter paper between the margins of the page, in pixels."""
PHONE = {"width": 360, "height": 780}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an open loop with 26 failures of three kinds, which misses some objectives and goodput bounds.

    The GPU is known, so the page also shows the hardware limit, and the server publishes readings and phases."""
    folder = tmp_path_factory.mktemp("judged") / "run"
    failures = [failed(1200 + index, http_status=500, due_ns=index * 10_000_000) for index in range(20)]
    failures += [failed(1220 + index, "in_band_error", "CUDA out of memory") for index in range(4)]
    failures += [truncated(1224 + index, [40_000_000], due_ns=20_000_000, sent_ns=20_020_000) for index in range(2)]
    plan = header(1226).plan | {"arrivals": "constant:100", "gpu_model": "8 x H100"}
    phases = {f"{name}_s_{part}": 0 for name in ("queue", "prefill", "decode") for part in ("sum", "count")}
    phases_end = {name: 1200 if name.endswith("count") else 90 for name in phases}
    telemetry = [
        *healthy(),
        *(reading(second) for second in range(12)),
        Telemetry(source="server", at_ns=0, values={"moment": "start"} | phases),
        Telemetry(source="server", at_ns=12 * 10**9, values={"moment": "end"} | phases_end),
    ]
    run_of(folder, [*loop(1200), *failures], plan=plan, telemetry=telemetry)
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
    assert "1,200 of 1,226 complete (2.1% incomplete, mostly HTTP 500)" in " ".join(chips[1].split())
    assert "2 of 3 failed: ttft.p99" in " ".join(chips[2].split())
    assert bottom(page, ".status") < bottom(page, ".card.main .value") < PHONE["height"]
    assert page.locator(".card.main dt").inner_text() == "Goodput"


def test_a_phone_has_the_navigation_on_one_line_that_scrolls(page: Page, judged: Path) -> None:
    """The line fades at its end while there is more, and every link can be scrolled into view."""
    page.set_viewport_size(PHONE)
    page.goto(judged.as_uri())
    links = page.locator(".links a")
    assert len(set(links.evaluate_all("(all) => all.map((link) => link.offsetTop)"))) == 1
    line = page.locator(".links")
    assert line.evaluate("(line) => line.scrollWidth > line.clientWidth")
    assert "linear-gradient" in line.evaluate("(line) => getComputedStyle(line).maskImage")
    links.last.scroll_into_view_if_needed()
    right = links.last.evaluate("(link) => link.getBoundingClientRect().right")
    faded = line.evaluate("(line) => line.getBoundingClientRect().right") - 40
    assert right <= faded + 1


@pytest.mark.parametrize("width", [800, 1024, 1280, 1600])
def test_no_link_of_the_navigation_stands_alone_on_a_line(page: Page, judged: Path, width: int) -> None:
    """Lines of the navigation have about equal lengths."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(judged.as_uri())
    tops = page.locator(".links a").evaluate_all("(all) => all.map((link) => link.offsetTop)")
    assert min(tops.count(top) for top in tops) >= 4


def test_a_page_has_few_words(page: Page, judged: Path) -> None:
    """With bounds, objectives, failures, telemetry and a hardware limit. The texts of all charts count, except those
    in folded parts, which contain the other figures."""
    page.goto(judged.as_uri())
    page.evaluate("Report.drawAll()")
    text = page.evaluate("document.body.innerText")
    assert len(text.split()) <= WORDS_MAX
    for sentence in ("of a step is overhead", "The server's mean of 1,200 requests: 75.0 ms in the queue"):
        assert sentence not in text
        assert sentence in page.evaluate("document.body.textContent")


def test_a_page_is_small(judged: Path) -> None:
    """The times of the tokens, which are most of the data, are packed."""
    text = judged.read_text("utf-8")
    assert len(text) < BYTES_MAX
    assert re.search(r'"tokens":"[A-Za-z0-9+/=]+"', text)


def test_a_heading_opens_its_folded_section(page: Page, judged: Path) -> None:
    """A section that only has a folded block is opened by its heading, and by the links that lead to it."""
    page.goto(judged.as_uri())
    folds = page.locator("details.whole")
    assert folds.locator("> summary h2").all_inner_texts() == [
        "First tokens",
        "Between tokens",
        "Request dispatch",
        "Requested and reported lengths",
        "The client",
        "Run it again",
        "Definitions",
    ]
    assert not page.locator("#definitions dl").is_visible()
    page.locator("nav a", has_text="Definitions").click()
    assert page.locator("#definitions dl").is_visible()
    page.locator("#client h2").click()
    assert page.locator("#client table").is_visible()


def test_goodput_has_a_line_and_a_row_per_bound(page: Page, judged: Path) -> None:
    """Each bound is drawn and counted alone, next to all bounds together."""
    page.goto(judged.as_uri())
    page.evaluate("Report.drawAll()")
    names = page.evaluate("document.querySelector('#chart-goodput').data.map(({ name }) => name)")
    assert names == ["all bounds", "ttft < 60ms alone", "e2e < 400ms alone"]
    rows = page.locator("#goodput tbody th").all_inner_texts()
    assert rows == ["ttft < 60ms", "e2e < 400ms", "all bounds"]
    assert str(page.locator("#title-goodput").text_content()).endswith("if both bounds were k times as wide")


def test_the_page_unpacks_its_library_in_two_equal_ways(page: Page, judged: Path) -> None:
    """For a page that is printed at once, gunzip.js unpacks the chart library without the browser's decompression."""
    page.goto(judged.as_uri())
    unpack = """() => new TextDecoder().decode(gunzip(Uint8Array.from(
        atob(document.getElementById("plotly").textContent), (character) => character.charCodeAt(0))))"""
    assert page.evaluate(unpack) == html.plotly_source()


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


def test_folded_parts_are_printed_with_their_titles(page: Page, judged: Path) -> None:
    """The menu for downloads is not printed."""
    page.goto(judged.as_uri())
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    titles = page.locator("details.fold > summary")
    assert titles.count() > 3
    assert all(title.is_visible() for title in titles.all())
    assert not page.locator("details.data").first.is_visible()


def test_the_first_sheet_is_not_left_half_empty(page: Page, judged: Path) -> None:
    """The figures of the run begin on the sheet with the title, and small charts stand side by side."""
    page.goto(judged.as_uri())
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".run").first.evaluate("(card) => getComputedStyle(card).breakInside") == "auto"
    tops = page.locator("#latency .charts figure").evaluate_all("(all) => all.map((one) => one.offsetTop)")
    assert len(set(tops)) == (len(tops) + 1) // 2
    course = page.locator("#chart-course").bounding_box()
    assert course is not None
    assert course["height"] <= LETTER_HEIGHT - 60  # with its heading it fits on one sheet
