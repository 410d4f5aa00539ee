"""The page of `loadgen plan-capacity` in Chromium, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.analysis.objectives import parse
from loadgen.analysis.report.page import render
from loadgen.plan import Plan
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.capacity_page import capacity_document
from loadgen.studies.capacity_report import CapacityReport
from loadgen.studies.capacity_search import ParetoPoint, SearchCounts, SearchResult
from loadgen.studies.configurations import SearchSpace


def option(gpu: str, tensor: int, replica_per_s: float, gpus: int, cost_per_hour: float | None) -> CapacityOption:
    """Return a configuration that carries 50 requests/s with this number of GPUs."""
    return CapacityOption(
        gpu=gpu,
        tensor_parallel=tensor,
        replica_gpus=tensor,
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
        commands={"limits": f"loadgen limits --gpu '{gpu}' --tp {tensor}", "server": "vllm serve model"},
    )


PRICED = [option("H100 SXM", 1, 40.0, 2, 5.0), option("H100 SXM", 2, 60.0, 2, 5.0), option("L40S", 1, 8.0, 7, 6.3)]
TOO_SLOW = CapacityOption(gpu="L4", not_possible="a single request misses an objective", figures=[2.0])


def point(entry: CapacityOption, speed: float, *, meets: bool = True) -> ParetoPoint:
    """Return a point of the Pareto set."""
    return ParetoPoint(
        option=entry,
        per_s=10.0,
        in_flight=20.0,
        tokens_per_s_per_user=speed,
        tokens_per_s_per_gpu=1000.0 - speed,
        ttft_p99_s=0.1,
        tpot_p99_s=1 / speed,
        cost_per_million_tokens=entry.cost_per_million_tokens,
        meets=meets,
    )


def write_page(folder: Path, options: list[CapacityOption], pareto: list[ParetoPoint] | None = None) -> Path:
    """Write the page of these options for 50 requests/s."""
    result = SearchResult(
        rate_per_s=50.0,
        options=[*options, TOO_SLOW],
        not_simulated=[],
        pareto=pareto or [],
        search=SearchCounts(considered=8, pruned={"not enough memory": 4}, simulated=4, simulations=30, seconds=2.0),
    )
    report = CapacityReport(
        result, Plan(server="vllm", n=1), "llama-3.1-8b", parse(["ttft.p99 < 500ms"]), SearchSpace(["H100 SXM", "L40S"])
    )
    (folder / "page.html").write_text(render(capacity_document(report)), "utf-8")
    return folder / "page.html"


def test_cost_rises_in_steps(browser: Browser, tmp_path: Path) -> None:
    """One step line per GPU type shows the cost at every rate. The best option, its costs and its load are cards."""
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(write_page(tmp_path, PRICED).as_uri())
        page.evaluate("Report.drawAll()")
        expect(page.locator("#chart-cost .scatterlayer .trace")).to_have_count(2)
        expect(page.locator(".chip.ok")).to_contain_text("met by 3 options")
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
        page.locator("summary", has_text="Not possible: 1 reason").click()
        expect(page.get_by_text("L4 TP1: a single request has ttft.p99 2")).to_be_visible()


def test_a_click_on_a_point_opens_its_commands(browser: Browser, tmp_path: Path) -> None:
    """Points have letters, colours by GPU type and a line. Hollow points miss an objective. Each has commands."""
    points = [point(PRICED[1], 200.0), point(PRICED[0], 100.0), point(PRICED[2], 50.0, meets=False)]
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(write_page(tmp_path, PRICED, points).as_uri())
        page.evaluate("Report.drawAll()")
        line, dots = page.evaluate("document.querySelector('#chart-pareto').data.slice(0, 2)")
        assert line["x"] == dots["x"] == [200, 100, 50]
        assert dots["text"] == ["A", "B", "C"]
        assert dots["marker"]["symbol"] == ["circle", "circle", "circle-open"]
        assert len(set(dots["marker"]["color"])) == 2
        assert dots["hovertext"][0].startswith("A: H100 SXM TP2<br>200 tokens/s per user")
        expect(page.locator("#title-pareto")).to_have_text("Cost against speed per user")
        expect(page.locator("#commands pre:visible")).to_have_count(0)
        page.locator("#chart-pareto").evaluate(
            "(chart) => chart.emit('plotly_click', { points: [{ customdata: 'B' }] })"
        )
        expect(page.locator("#commands pre:visible")).to_have_count(2)
        expect(page.locator("#commands details[open] summary")).to_have_text("B: H100 SXM TP1")
        expect(page.locator("#commands details[open] button")).to_have_count(2)
        expect(page.locator("#commands")).to_contain_text("loadgen limits --gpu 'H100 SXM' --tp 1")
        expect(page.locator(".pareto tbody tr")).to_have_count(3)
        assert errors == []


def test_without_prices_the_pareto_set_shows_throughput(browser: Browser, tmp_path: Path) -> None:
    """The height of a point is the throughput per GPU."""
    entry = option("H100 SXM", 2, 60.0, 2, None)
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(write_page(tmp_path, [entry], [point(entry, 200.0), point(entry, 100.0)]).as_uri())
        page.evaluate("Report.drawAll()")
        assert page.evaluate("document.querySelector('#chart-pareto').data[1].y") == [800, 900]
        expect(page.locator("#title-pareto")).to_have_text("Throughput per GPU against speed per user")
