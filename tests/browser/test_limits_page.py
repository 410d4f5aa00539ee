"""The page of `loadgen limits` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.hardware import build_document
from loadgen.analysis.report.page import render
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load


def test_it_has_a_roofline_and_a_curve(browser: Browser, tmp_path: Path) -> None:
    """Both are drawn, and the parts of a decode step as a stacked bar. The words say what binds."""
    made = make_deployment("H100", "llama-2-70b", "fp8", 8)
    file = tmp_path / "limits.html"
    limits = compute_limits(made, Load(512, 128, 64))
    file.write_text(render(build_document(limits, made)), "utf-8")
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Report.drawAll()")
        assert page.locator("h1").inner_text() not in page.locator("h2").all_inner_texts()
        assert page.locator("dl.cards dt").first.inner_text() == "TTFT expected"
        assert page.locator(".status").inner_text().endswith("Computed figures of a model; nothing was measured")
        bars = page.evaluate("document.querySelector('#chart-step').data.filter(({ type }) => type === 'bar')")
        assert len(bars) >= 3
        assert sum(bar["x"][0] for bar in bars) == pytest.approx(1000 * limits.expected.decode_step_s, rel=0.01)
        assert all("%" in bar["text"][0] for bar in bars)
        for chart, lines in (("roofline", 3), ("curve", 2), ("step", 1)):
            expect(page.locator(f"#chart-{chart} .scatterlayer .trace")).to_have_count(lines)
        expect(page.get_by_text("A decode step is expected to spend its time on:")).to_be_visible()
        expect(page.get_by_text("bound by memory").first).to_be_visible()
        assert errors == []


@pytest.mark.parametrize("width", [360, 1024, 1600])
def test_a_hypothetical_gpu_has_a_section(browser: Browser, tmp_path: Path, width: int) -> None:
    """A row per changed figure with its reason; the page stays as narrow as the window, and is not stretched."""
    made = make_deployment("A100 (3nm, HBM4, NVLink 5)", "llama-2-70b", tensor=8)
    file = tmp_path / "limits.html"
    file.write_text(render(build_document(compute_limits(made, Load(512, 128, 64)), made)), "utf-8")
    with browser.new_context(offline=True, viewport={"width": width, "height": 780}) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        section = page.locator("#hypothetical")
        assert section.locator("tbody tr").count() == 7
        expect(section.get_by_text("power is the limit: 1.33 times the power at the old clock")).to_be_visible()
        box = section.bounding_box()
        assert box
        assert box["height"] < 900
        assert page.evaluate("document.documentElement.scrollWidth") <= width
