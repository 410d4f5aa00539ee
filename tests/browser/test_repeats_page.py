"""The page of repeats in Chromium, from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.frame import build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse, parse_bounds
from loadgen.analysis.repeats import summarise_repeats
from loadgen.analysis.repeats_page import repeats_document
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import prepare_run
from loadgen.analysis.slo import judge
from tests.browser.conftest import reading
from tests.support.runs import burst, failed, header, healthy, part_of, run_of

REPEATS = 5
MAX_WORDS = 900


@pytest.fixture(scope="module")
def repeats_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of five repeats of a burst, written to disk."""
    folder = tmp_path_factory.mktemp("repeats")
    parts = []
    for number in range(1, REPEATS + 1):
        run = run_of(folder / f"{number}", burst(200, 8, seed=number, pace=1 + number / 50), telemetry=healthy())
        run.header.plan.update(repeat=number, repeats=REPEATS)
        parts.append(part_of(run))
    document = repeats_document(parts, summarise_repeats([part.summary for part in parts]))
    (folder / "report.html").write_text(render(document), "utf-8")
    return folder / "report.html"


def test_the_joint_result_comes_first(browser: Browser, repeats_page: Path) -> None:
    """The first screen shows the mean, its interval, a dot per repeat and one verdict. The repeats are rows of a table
    with a separate colour each, and their overviews are folded."""
    with browser.new_context(viewport={"width": 1600, "height": 900}) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(repeats_page.as_uri())
        expect(page.locator("h1")).to_contain_text(f"{REPEATS} repeats: 200 requests")
        assert "repeat 1" not in page.title()
        main = page.locator("#answer .card.main")
        expect(main.locator("circle")).to_have_count(REPEATS)
        expect(main.locator("rect")).to_have_count(1)
        assert "95%" in (main.locator(".note").text_content() or "")
        expect(page.locator(".validity-verdict:visible")).to_have_count(1)
        expect(page.locator(".overview tbody tr")).to_have_count(REPEATS)
        keys = (
            "() => [...document.querySelectorAll('.overview .key')].map((key) => getComputedStyle(key).backgroundColor)"
        )
        assert len(set(page.evaluate(keys))) == REPEATS
        bottom = page.locator("#answer .validity").bounding_box()
        assert bottom is not None
        assert bottom["y"] + bottom["height"] < 900
        page.locator("summary", has_text="Results and validity of each repeat").click()
        expect(page.locator(".validity-verdict:visible")).to_have_count(1 + REPEATS)
        assert errors == []


def test_the_page_is_short(browser: Browser, repeats_page: Path) -> None:
    """With all details closed, the page has at most 900 visible words, the texts of its charts included."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(repeats_page.as_uri())
        page.evaluate("Report.drawAll()")
        assert len(page.locator("body").inner_text().split()) <= MAX_WORDS


def test_the_page_of_repeats_with_everything_is_short_and_small(browser: Browser, tmp_path: Path) -> None:
    """Five repeats with failures, bounds, objectives and telemetry stay within 900 visible words and 1.3 MB. Tables of
    good requests and objectives are folded, and every chart is drawn."""
    parts = []
    for number in range(1, REPEATS + 1):
        records = [*burst(700, 16, seed=number), *(failed(700 + index, http_status=503) for index in range(5))]
        telemetry = [*healthy(), *(reading(second) for second in range(-1, 7))]
        plan = header(705).plan | {"repeat": number, "repeats": REPEATS}
        run = run_of(tmp_path / f"{number}", records, telemetry=telemetry, plan=plan)
        frame = build_frame(records)
        summary = summarise(run, frame)
        summary.goodput = goodput(frame, parse_bounds(["ttft < 500ms", "tpot < 20ms"]))
        summary.objectives = judge(parse(["ttft.p99 < 1ms", "complete >= 99.9%"]), frame, summary)
        parts.append(prepare_run(run, frame, summary))
    document = repeats_document(parts, summarise_repeats([part.summary for part in parts]))
    (tmp_path / "report.html").write_text(render(document), "utf-8")
    assert (tmp_path / "report.html").stat().st_size <= 1_300_000
    with browser.new_context() as context:
        page = context.new_page()
        page.goto((tmp_path / "report.html").as_uri())
        page.evaluate("Report.drawAll()")
        assert len(page.locator("body").inner_text().split()) <= MAX_WORDS
        assert page.locator(".chart.empty").count() == 0
        page.locator("#details summary", has_text="Goodput").click()
        expect(page.locator("table", has_text="all bounds").first).to_be_visible()
