"""The page of `loadgen dissect inference` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from analysis.dissect import document
from analysis.report.page import render
from tests.dissected import inference_found


def test_it_has_the_bar_of_a_step_and_the_roofline(browser: Browser, tmp_path: Path) -> None:
    """The bar has a piece for each module and each operator, the roofline a dot for each operator that computes."""
    file = tmp_path / "dissect.html"
    file.write_text(render(document(inference_found())), "utf-8")
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Report.drawAll()")
        expect(page.locator("#chart-flame .barlayer .point")).to_have_count(8)  # four modules, one operator of each
        expect(page.locator("#chart-roofline .scatterlayer .trace .points path")).to_have_count(6)
        expect(page.locator("table.modules").first).to_contain_text("QKV")
        assert errors == []
