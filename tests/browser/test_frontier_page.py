"""The frontier page as a reader sees it, in a real Chromium, from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page

from loadgen.analysis.format import UNKNOWN
from loadgen.analysis.report.page import render
from loadgen.analysis.sweep import SweepResult
from loadgen.analysis.sweep.document import frontier_document
from tests.support.command import in_process

SWEEP = ("sweep", "--server", "vllm", "--virtual", "H100", "--model", "llama-3.1-8b", "--quiet", "--duration", "20s")
WITH = ("--rates", "2,8,24,60", "--objective", "tpot.p99 < 70ms", "--gpu-hour-cost", "$2.50")


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """On one GPU and on two, in virtual time."""
    folder = tmp_path_factory.mktemp("sweeps")
    for tensor in ("1", "2"):
        assert in_process(folder, *SWEEP, *WITH, "--tp", tensor, "--out", str(folder / tensor))[0] in {0, 6}
    return [folder / "1", folder / "2"]


@pytest.fixture(scope="module")
def both(sweeps: list[Path]) -> Path:
    """The page of the two."""
    page = sweeps[0].parent / "frontier.html"
    assert in_process(page.parent, "report", *map(str, sweeps), "--out", str(page), "--quiet")[0] == 0
    return page


def opened(browser: Browser, page: Path, width: int = 1280) -> tuple[Page, list[str]]:
    shown, complaints = browser.new_page(viewport={"width": width, "height": 900}), list[str]()
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("console", lambda message: complaints.append(message.text))
    shown.goto(page.as_uri())
    shown.evaluate("Report.drawAll()")
    return shown, complaints


@pytest.mark.parametrize("width", [360, 1024, 1600])
def test_it_is_drawn_and_fits_the_window(width: int, both: Path, browser: Browser) -> None:
    """Three charts, without complaint, below 1 MB, and nothing sticks out."""
    page, complaints = opened(browser, both, width)
    assert complaints == []
    assert page.locator(".chart .main-svg").count() >= 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert both.stat().st_size < 1_000_000
    page.close()


def test_the_first_screen_answers_the_questions(sweeps: list[Path], browser: Browser) -> None:
    """The header names the model, the lengths and the objectives. Chips state the validity, the capacity with its
    measured bracket, the objectives, and the requests. Cards say what this load takes and
    costs. They are visible without scrolling, also on a phone."""
    page, _ = opened(browser, sweeps[0] / "frontier.html", 360)
    page.set_viewport_size({"width": 360, "height": 780})
    assert page.locator("header p").nth(1).inner_text() == (
        "llama-3.1-8b; 512 input and 128 output tokens; tpot.p99 < 70ms"
    )
    assert chips(page)[:3] == [
        ("note", "Simulated figures of a model"),
        ("ok", "Capacity 24.0–60.0 requests/s (met at 24.0, not met at 60.0)"),  # noqa: RUF001
        ("ok", "Objectives met within the capacity: tpot.p99 < 70ms"),
    ]
    level, text = chips(page)[3]
    assert (level, "complete within the capacity" in text) == ("ok", True)
    labels = page.locator("dl.cards dt").all_inner_texts()
    assert labels[-4:] == ["Throughput per GPU", "Speed per user", "Cost", "Energy"]
    assert "1 / median TPOT" in page.locator(".card", has_text="Speed per user").inner_text()
    box = page.locator("dl.cards .value").first.bounding_box()
    assert box
    assert box["y"] + box["height"] <= 780
    page.close()


def test_chips_of_a_sweep_that_failed(sweeps: list[Path], browser: Browser, tmp_path: Path) -> None:
    """No load met the objectives, the client was the limit, and requests were rejected."""
    result = msgspec.json.decode((sweeps[0] / "sweep.json").read_bytes(), type=SweepResult)
    steps = [
        msgspec.structs.replace(step, over=0.99, verdict="not met", client="limited", complete=step.complete - 5)
        for step in result.steps
    ]
    missed = msgspec.structs.replace(
        result, steps=steps, state="below", capacity=None, capacity_high=steps[0].load, mark="SIMULATED"
    )
    page, complaints = opened(browser, written(tmp_path / "missed.html", missed))
    assert chips(page) == [
        ("error", "Measurement 0 of 4 steps valid (simulated server)"),
        ("error", "Capacity below 2.00 requests/s, the lowest load"),
        ("error", "Objectives not met at any load: tpot.p99 < 70ms"),
    ]
    first = steps[0]
    rejected = [msgspec.structs.replace(first, over=0.0, verdict="met", rejected=5), *steps[1:]]
    busy = msgspec.structs.replace(result, steps=rejected, ended="runs", state="open", fixed_loads=False)
    page.goto(written(tmp_path / "busy.html", busy).as_uri())
    level, text = chips(page)[1]
    assert (level, text.endswith("less exact than requested")) == ("warning", True)
    expected = f"Requests {first.complete:,} of {first.planned:,} complete within the capacity, mostly rejected"
    assert chips(page)[3] == ("error", expected)
    assert complaints == []
    page.close()


def test_the_best_of_several_sweeps_is_named(both: Path, browser: Browser) -> None:
    """Tiles before the table say which sweep has the largest capacity, the most tokens/s per GPU and the lowest cost.
    At 1024 pixels no table is wider than the page."""
    page, _ = opened(browser, both, 1024)
    tiles = page.locator("#answer .card").all_inner_texts()
    assert [tile.split("\n")[0] for tile in tiles] == [
        *("Largest capacity", "Highest throughput per GPU", "Lowest cost", "Lowest energy")
    ]
    costs = {
        name: next(step["cost_per_million_tokens"] for step in read(both, name)["steps"] if step["load"] == load)
        for name, load in (("1", 24.0), ("2", 60.0))
        if any(step["load"] == load for step in read(both, name)["steps"])
    }
    cheapest = min(costs, key=lambda name: costs[name])
    assert f"on {cheapest} x H100" in tiles[2]
    assert f"${costs[cheapest]:.3f}" in tiles[2]
    tops = [page.locator(name).first.bounding_box() for name in ("#answer .card", "#answer table")]
    assert tops[0]
    assert tops[1]
    assert tops[0]["y"] < tops[1]["y"]
    for scroll in page.locator("#answer .scroll, #steps .scroll").all():
        assert scroll.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    page.close()


def chips(page: Page) -> list[tuple[str, str]]:
    """Return the level and the text of each chip of the status strip, without the text for screen readers."""
    result = []
    for chip in page.locator(".chip").all():
        level = str(chip.get_attribute("class")).split()[-1]
        result.append((level, " ".join(chip.locator("> span:last-child").inner_text().split())))
    return result


def written(page: Path, sweep: SweepResult) -> Path:
    """Write the page of one sweep, and return its path."""
    page.write_text(render(frontier_document({sweep.name: sweep}, lambda _sweep, folder: folder)), "utf-8")
    return page


def read(page: Path, sweep: str) -> dict[str, Any]:
    """Return the result of a sweep from its folder, which is next to the page."""
    result: dict[str, Any] = json.loads((page.parent / sweep / "sweep.json").read_text("utf-8"))
    return result


def test_every_figure_of_a_step_leads_to_its_run(sweeps: list[Path], both: Path, browser: Browser) -> None:
    """Each number of the tables and cards is a link to a report that is there; so is each point of the charts."""
    page, _ = opened(browser, both)
    for cell in page.locator("#steps td.number, dl.cards .value, #answer td.number").all():
        if cell.inner_text().strip() not in {UNKNOWN, ""}:
            assert cell.locator("a").count() == 1, cell.inner_html()
    targets = {str(link.get_attribute("href")) for link in page.locator("main td a, main dl.cards a").all()}
    assert targets == {f"{sweep.name}/step-{number}/report.html" for sweep in sweeps for number in (1, 2, 3, 4)}
    assert all((both.parent / target).exists() for target in targets)
    drawn: list[dict[str, Any]] = page.evaluate("document.querySelector('#chart-frontier').data")
    points = [trace for trace in drawn if trace.get("customdata")]
    assert {target for trace in points for target in trace["customdata"]} == targets
    page.evaluate("""() => document.querySelector('#chart-frontier').emit('plotly_click',
        {points: [{customdata: '1/step-2/report.html'}]})""")
    page.wait_for_url("**/1/step-2/report.html")
    page.close()


def test_the_points_are_the_steps(sweeps: list[Path], both: Path, browser: Browser) -> None:
    """Tokens/s per user and per GPU as sweep.json has them; the frontier joins those that no other beats."""
    page, _ = opened(browser, both)
    steps = [step for sweep in sweeps for step in json.loads((sweep / "sweep.json").read_text("utf-8"))["steps"]]
    known = {(step["tokens_per_s_per_user"], step["output_tokens_per_s_per_gpu"]) for step in steps}
    drawn: list[dict[str, Any]] = page.evaluate("document.querySelector('#chart-frontier').data")
    points = {pair for trace in drawn if trace.get("customdata") for pair in zip(trace["x"], trace["y"], strict=True)}
    assert points == known
    (line,) = (trace for trace in drawn if trace["name"] == "frontier")
    assert not any(trace["name"] == "hardware limit" for trace in drawn)
    best = {one for one in known if not any(two[0] >= one[0] and two[1] >= one[1] and two != one for two in known)}
    assert set(zip(line["x"], line["y"], strict=True)) == best
    page.locator("input[name=limit]").check()
    assert {"hardware limit"} <= {trace["name"] for trace in frontier(page)}
    page.close()


def frontier(page: Page) -> list[dict[str, Any]]:
    """The traces of the frontier chart."""
    traces: list[dict[str, Any]] = page.evaluate("document.querySelector('#chart-frontier').data")
    return traces


def test_a_point_shows_whether_it_met_the_objectives(sweeps: list[Path], browser: Browser) -> None:
    """Points are labelled with their loads and hollow where an objective was missed. The star and the lower end of the
    capacity's line met it. Tooltips contain the verdict, cost and energy. A legend explains the symbols."""
    page, _ = opened(browser, sweeps[0] / "frontier.html")
    drawn = {trace["name"]: trace for trace in frontier(page)}
    points = drawn["steps"]
    verdicts = [hover.split("<br>")[0].rpartition(": ")[2] for hover in points["text"]]
    assert verdicts == ["met", "met", "met", "not met"]
    assert points["marker"]["symbol"] == ["circle", "circle", "circle", "circle-open"]
    assert all("$" in hover and "J per token" in hover for hover in points["text"])
    assert set(drawn["loads"]["text"]) == {"2.00", "8.00", "24.0", "60.0"}
    assert (drawn["star"]["x"], drawn["star"]["y"]) == ([points["x"][2]], [points["y"][2]])
    assert drawn["capacity"]["x"] == points["x"][2:]
    legend = page.locator("#chart-frontier .legendtext").all_text_contents()
    assert legend == ["met", "not met", "largest load within the capacity", "capacity between", "hardware limit"]
    assert page.evaluate("document.querySelector('#chart-goodput').layout.shapes[0].x0") == 24
    page.close()


def test_a_page_of_several_sweeps_is_short(both: Path, browser: Browser) -> None:
    """The tables of steps and the terms are folded."""
    page, _ = opened(browser, both)
    assert page.evaluate("document.body.innerText.split(/\\s+/).length") <= 900
    assert page.locator("details.whole > summary h2").all_inner_texts() == ["Steps", "What the terms mean"]
    page.locator("#steps h2").click()
    assert page.locator("#steps table").first.is_visible()
    page.close()


def test_check_boxes_select_the_sweeps(both: Path, browser: Browser) -> None:
    """A sweep that is not checked is in no chart, and the frontier is that of the others."""
    page, complaints = opened(browser, both)
    page.locator("input[name=shown]").last.uncheck()
    for chart in ("frontier", "first", "goodput"):
        traces: list[dict[str, Any]] = page.evaluate(f"document.querySelector('#chart-{chart}').data")
        assert sum(trace["name"] == "steps" for trace in traces) == 1
    assert "frontier" not in {trace["name"] for trace in frontier(page)}
    page.locator("input[name=shown]").first.uncheck()
    assert page.locator(".chart.empty").count() == 0
    assert page.locator("#chart-frontier .xtick").count() > 0
    page.locator("input[name=shown]").first.check()
    assert sum(trace["name"] == "steps" for trace in frontier(page)) == 1
    assert complaints == []
    page.close()
