"""The page of `loadgen hardware sweep` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.report.page import render
from loadgen.analysis.technology_sweep import build_document
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.technology_sweep import DECODE, SweepAxes, sweep_inference
from loadgen.servers.hardware.throughput_model import Load


def test_times_and_their_parts_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """One line per memory with a symbol for what binds, a stacked bar per node, and a table with both."""
    axes = SweepAxes(("12nm", "7nm", "1nm"), ("HBM2E", "HBM4"))
    found = sweep_inference(make_deployment("A100", "llama-2-70b", tensor=8), Load(512, 128, 16), axes)
    file = tmp_path / "sweep.html"
    file.write_text(render(build_document(found)), "utf-8")
    with browser.new_context(offline=True, viewport={"width": 360, "height": 780}) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Report.drawAll()")
        expect(page.locator("#chart-time-0 .scatterlayer .trace")).to_have_count(2)
        lines = page.evaluate("document.querySelector('#chart-time-0').data")
        assert [line["name"] for line in lines] == ["HBM2E", "HBM4"]
        assert lines[0]["marker"]["symbol"] == ["circle", "triangle-up", "square"]
        assert lines[0]["y"][1] == pytest.approx(1000 * found.point("7nm", "HBM2E", "").times[DECODE].total_s)
        for chart in ("parts-0-0", "parts-0-1", "parts-1-0", "parts-1-1"):
            bars = page.evaluate(f"document.querySelector('#chart-{chart}').data")
            assert [bar["name"] for bar in bars] == ["compute", "memory", "network", "latency"]
            assert [sum(shares) for shares in zip(*(bar["y"] for bar in bars), strict=True)] == pytest.approx([1, 1, 1])
        expect(page.get_by_text("not validated: these GPUs do not exist")).to_be_visible()
        expect(page.get_by_text("latency").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert errors == []
