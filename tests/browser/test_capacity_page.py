"""The page of `loadgen plan-capacity` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.objectives import parse
from loadgen.analysis.report.page import render
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.capacity_page import capacity_document


def option(gpu: str, tensor: int, replica_per_s: float, gpus: int, cost_per_hour: float | None) -> CapacityOption:
    """Return a candidate that carries 50 requests/s with this number of GPUs."""
    return CapacityOption(
        gpu=gpu,
        tensor_parallel=tensor,
        format="bf16",
        replica_per_s=replica_per_s,
        replica_per_s_low=replica_per_s * 0.8,
        replica_per_s_high=replica_per_s * 1.2,
        gpus=gpus,
        gpus_low=gpus,
        gpus_high=gpus + tensor,
        cost_per_hour=cost_per_hour,
        currency="$" if cost_per_hour else "",
        cost_per_million_tokens=cost_per_hour and cost_per_hour / 23,
        figures=[0.1],
    )


PRICED = [option("H100 SXM", 1, 40.0, 2, 5.0), option("H100 SXM", 2, 60.0, 2, 5.0), option("L40S", 1, 8.0, 7, 6.3)]


def write_page(folder: Path, options: list[CapacityOption]) -> Path:
    """Write the page of these candidates for 50 requests/s."""
    document = capacity_document(
        options,
        parse(["ttft.p99 < 500ms"]),
        rate_per_s=50.0,
        title="GPUs for 50 requests/s",
        subtitle="",
        reasons=["L4 x 1: a single request has ttft.p99 2 s"],
        assumptions="Costs are per hour.",
    )
    (folder / "page.html").write_text(render(document), "utf-8")
    return folder / "page.html"


def test_cost_rises_in_steps(browser: Browser, tmp_path: Path) -> None:
    """One step line per GPU type shows the cost at every rate. The best option, its costs and its load are cards."""
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(write_page(tmp_path, PRICED).as_uri())
        page.evaluate("Report.drawAll()")
        expect(page.locator("#chart-cost .scatterlayer .trace")).to_have_count(2)
        expect(page.locator(".chip.ok")).to_contain_text("met by 3 of 4 candidates")
        lines = page.evaluate("document.querySelector('#chart-cost').data.map(({ x, y, line }) => [x, y, line.shape])")
        assert lines[0] == [[0, 40, 80, 100], [2.5, 5, 7.5, 7.5], "hv"]
        assert lines[1][1][-1] == pytest.approx(13 * 0.9)
        assert page.evaluate("document.querySelector('#chart-cost').layout.shapes[0].x0") == 50
        expect(page.locator("#answer .card", has_text="Best option")).to_contain_text("2 x H100 SXM")
        expect(page.locator("#answer .card", has_text="of capacity")).to_contain_text("62%")
        expect(page.locator(".capacity tbody tr")).to_have_count(3)
        expect(page.locator("#answer")).to_contain_text("$5.00")
        assert errors == []


def test_without_prices_the_chart_counts_gpus(browser: Browser, tmp_path: Path) -> None:
    """Candidates without a price have no costs, and the chart shows their number of GPUs."""
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(write_page(tmp_path, [option("H100 SXM", 2, 60.0, 2, None)]).as_uri())
        page.evaluate("Report.drawAll()")
        assert page.evaluate("document.querySelector('#chart-cost').data[0].y") == [2, 4, 4]
        expect(page.locator("#title-cost")).to_have_text("GPUs against request rate")


def test_a_page_without_options_has_the_reasons(browser: Browser, tmp_path: Path) -> None:
    """If no candidate meets the objectives, there is no chart."""
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(write_page(tmp_path, []).as_uri())
        expect(page.locator(".chart")).to_have_count(0)
        page.locator("summary", has_text="Not possible: 1 candidate").click()
        expect(page.get_by_text("a single request has ttft.p99 2 s")).to_be_visible()
