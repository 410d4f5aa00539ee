"""The seam of charts: a made-up one, added from here alone, is seen everywhere a chart should be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from loadgen.analysis.report import ChartRef, charts, markdown, page
from loadgen.analysis.report.charts import CHARTS, Chart, ChartInput
from loadgen.analysis.report.run_document import ReportedRun, chart_runs, page_document
from tests.support.chromium import chromium
from tests.support.runs import burst, part_of, run_of

MADE_UP = Chart(
    "chunks",
    "Chunks per request",
    "How many chunks each request had",
    lambda given: {"request": given.frame.id.tolist(), "chunks": given.frame.chunk_counts.tolist()},
    lambda data, _: f"{max(data['chunks'])} chunks at most.",
    traces=({"type": "scatter", "mode": "markers", "x": "$request", "y": "$chunks", "marker": {"color": "@run"}},),
    layout={"yaxis": {"title": {"text": "chunks"}}},
    table={"request": "request", "chunks": "chunks"},
)
SCRIPTED = Chart("scripted", "latency", "A chart with a script", lambda _: {"n": 1}, script="made-up.js")
SCRIPT = (
    'Report.chart("scripted", { draw: () => ({ traces: [{ x: [1, 2], y: [1, 2] }] }), rows: () => [["x"], [1]] });\n'
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReportedRun:
    """A run, reported with two charts more than there are."""
    folder = shutil.copytree(page.HERE, tmp_path / "report", ignore=shutil.ignore_patterns("*.py"))
    (folder / "made-up.js").write_text(SCRIPT, "utf-8")
    monkeypatch.setattr(page, "HERE", folder)
    monkeypatch.setattr(charts, "CHARTS", CHARTS | {"chunks": MADE_UP, "scripted": SCRIPTED})
    return part_of(run_of(tmp_path / "run", burst(12, 4)))


def test_it_is_in_the_document_and_in_the_figures(run: ReportedRun) -> None:
    """In a section of its own before the last ones, or in the one it names; as traces and layout for notebooks."""
    document = page_document([run])
    placed = {
        section.id: [block.id for block in section.blocks if isinstance(block, ChartRef)]
        for section in document.sections
    }
    assert placed["chunks-per-request"] == ["chunks"]
    assert placed["latency"][-1] == "scripted"
    assert "### Chunks per request" in markdown(document)
    figure = charts.plotly_figure("chunks", chart_runs([run]))
    assert figure["data"] == [
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(range(12)),
            "y": [4] * 12,
            "marker": {"color": charts.PALETTE["run-1"][0]},
        }
    ]
    assert figure["layout"]["title"] == {"text": "How many chunks each request had"}
    assert figure["layout"]["template"]["layout"]["plot_bgcolor"] == "#ffffff"


@pytest.mark.browser
def test_the_page_draws_it(run: ReportedRun, tmp_path: Path) -> None:
    """From its traces or by its script, with its caption and its data, and without a complaint of the browser's."""
    (tmp_path / "report.html").write_text(page.render(page_document([run])), "utf-8")
    with chromium() as browser:
        window = browser.new_page()
        complaints: list[str] = []
        window.on("console", lambda message: complaints.append(message.text))
        window.on("pageerror", lambda error: complaints.append(str(error)))
        window.goto((tmp_path / "report.html").as_uri())
        window.evaluate("Report.drawAll()")
        for name in ("chunks", "scripted"):
            assert window.locator(f"#chart-{name} .plot-container").count() == 1
        assert "4 chunks at most." in window.locator("#text-chunks").inner_text()
        window.locator("figure", has=window.locator("#chart-chunks")).locator("summary").click()
        expect(window.locator("[data-rows=chunks] tbody tr")).to_have_count(12)
        assert complaints == []


def test_a_run_without_its_data_does_not_show_it(run: ReportedRun) -> None:
    """A chart whose data is None for every run is left out."""
    assert CHARTS["turns"].data(ChartInput(frame=None, summary=run.summary)) is None  # type: ignore[arg-type]
    assert "turns" not in [section.id for section in page_document([run]).sections]
