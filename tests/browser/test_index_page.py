"""The page of a folder of runs, in Chromium, from disk."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from loadgen.cli.report import report
from tests.browser.conftest import NASTY
from tests.support.runs import burst, footer, header, healthy, write


def test_runs_are_filtered_picked_compared_and_followed(browser: Browser, tmp_path: Path) -> None:
    """The newest two are beside each other at first; a third is picked, the command names all; the filter hides rows;
    the trend is of one label, invalid runs hollow; nothing is asked of any other machine, and hostile words do
    nothing."""
    runs = tmp_path / "runs of ours"
    for place, (server, label) in enumerate(
        (("vllm", "nightly"), ("tgi", "try"), ("vllm", "nightly"), ("vllm", "try"))
    ):
        records = burst(100, 8, pace=1 + place / 10)
        first = header(100, server=server, started_at=f"2026-11-2{place}T09:00:00Z")
        first.plan["label"], first.server["model"] = label, NASTY
        stalled = {"stall_ns_max": 2_000_000_000} if place == 2 else {}
        write(runs / f"run-{place}", [first, *records, *healthy(**stalled), footer(records)])
    report([runs / "run-3"], quiet=True)
    report([runs], quiet=True)
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((runs / "index.html").as_uri())
    for chart in ("picked", "trend"):
        page.locator(f"#chart-{chart}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#chart-{chart} .main-svg", state="attached")
    assert page.locator(".overview tbody th a").get_attribute("href") == "run-3/report.html"
    names = "(chart) => document.querySelector(`#chart-${chart}`).data.map(({ name }) => name)"
    assert page.evaluate(names, "picked") == ["run-3", "run-2"]
    assert str(page.locator("#compare pre").text_content()) == (
        f"loadgen compare --html compare.html '{runs}/run-3' '{runs}/run-2'"
    )
    page.get_by_label("Compare run-0").check()
    assert page.evaluate(names, "picked") == ["run-3", "run-2", "run-0"]
    assert str(page.locator("#compare pre").text_content()).endswith(f"'{runs}/run-3' -- '{runs}/run-2' '{runs}/run-0'")
    assert page.locator("#compare table thead th").all_text_contents()[2:] == ["run-3", "run-2", "run-0"]
    for name in ("run-3", "run-2", "run-0"):
        page.get_by_label(f"Compare {name}").uncheck()
    assert str(page.locator("#compare pre").text_content()) == "Select two or more runs above."
    page.get_by_label("Compare run-1").check()
    assert page.evaluate(names, "picked") == ["run-1"]
    page.fill("#filter", "vllm TRY")
    assert page.locator(".overview tbody tr:visible th").all_text_contents() == [" run-3"]
    page.select_option("#label", "nightly")
    page.select_option("#figure", "ttft.p50")
    drawn = page.evaluate("document.querySelector('#chart-trend').data.map(({ x, marker }) => [x, marker.symbol])")
    assert drawn == [[["2026-11-20T09:00:00Z", "2026-11-22T09:00:00Z"], ["circle", "circle-open"]]]
    assert complaints == []
    assert asked == [page.url]
    assert "owned" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
