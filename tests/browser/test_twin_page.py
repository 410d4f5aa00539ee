"""The page of `loadgen twin` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.report import Code
from loadgen.analysis.report.page import render
from loadgen.studies.twin_page import ReplayedRun, twin_document


@pytest.fixture(scope="module")
def twin_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs. The first TTFT p99 is predicted 10% too low, and the interval of one figure misses."""
    ttft_s = np.linspace(0.1, 0.2, 50)
    tpot_s = np.full(50, 0.01)
    tpot_s[0] = np.nan
    runs = [
        ReplayedRun(
            name,
            {"ttft.p99": 0.2, "tpot.p50": 0.01, "requests_per_s": 20.0},
            {
                "ttft.p99": (0.18, 0.15, 0.21),
                "tpot.p50": (0.0102, 0.0101, 0.0103),
                "requests_per_s": (20.0, 19.0, 21.0),
            },
            {"ttft": (ttft_s, ttft_s * 0.9), "tpot": (tpot_s, tpot_s)},
        )
        for name in ("burst", "closed")
    ]
    facts = [Code("step_s: host time per step  5.31 ms", "Constants")]
    document = twin_document(runs, title="Twin of vllm", subtitle="", facts=facts, rates_note="Rates of the whole run.")
    file = tmp_path_factory.mktemp("twin") / "page.html"
    file.write_text(render(document), "utf-8")
    return file


def test_predictions_are_compared_with_the_measurement(browser: Browser, twin_page: Path) -> None:
    """A chart has each figure's error with its interval. Two charts have the distributions, measured and predicted. The
    cards name the largest error and the number of figures inside their intervals."""
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(twin_page.as_uri())
        page.evaluate("Report.drawAll()")
        x, above = page.evaluate(
            "(({ x, error_x }) => [x, error_x.array])(document.querySelector('#chart-off').data[0])"
        )
        assert x == pytest.approx([-10, 2, 0])
        assert above == pytest.approx([15, 1, 5])
        for chart in ("ttft", "tpot"):
            expect(page.locator(f"#chart-{chart} .scatterlayer .trace")).to_have_count(4)
        twin = page.evaluate("document.querySelector('#chart-ttft').data[1]")
        assert (twin["x"][0], twin["x"][-1]) == (pytest.approx(90), pytest.approx(180))
        expect(page.locator(".chip.note")).to_contain_text("predictions of a model, compared with 2 measured runs")
        card = page.locator("#answer .card", has_text="Largest difference")
        expect(card).to_contain_text("\u221210.0%")
        expect(card).to_contain_text("TTFT p99 of burst")
        expect(page.locator("#answer .card", has_text="Inside the interval")).to_contain_text("4 of 6")
        expect(page.locator(".twin tbody tr")).to_have_count(6)
        assert errors == []
