"""The page of `loadgen limits` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from loadgen.analysis.hardware import build_document
from loadgen.analysis.report.page import render
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load


def test_it_has_a_roofline_and_a_curve(browser: Browser, tmp_path: Path) -> None:
    """Both are drawn, with a table of their data, and the words say what binds."""
    made = make_deployment("H100", "llama-2-70b", "fp8", 8)
    file = tmp_path / "limits.html"
    file.write_text(render(build_document(compute_limits(made, Load(512, 128, 64)), made)), "utf-8")
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Report.drawAll()")
        for chart, lines in (("roofline", 3), ("curve", 2)):
            expect(page.locator(f"#chart-{chart} .scatterlayer .trace")).to_have_count(lines)
        expect(page.get_by_text("A decode step is expected to spend its time on:")).to_be_visible()
        expect(page.get_by_text("bound by memory").first).to_be_visible()
        assert errors == []
