"""The report of a matrix as a reader sees it, in a real Chromium, from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from loadgen.analysis.format import significant
from loadgen.analysis.matrix import CellSweep, summarise_matrix
from loadgen.analysis.matrix.document import MatrixReport
from loadgen.analysis.report.page import render
from loadgen.analysis.sweep import SweepResult
from tests.browser.conftest import NASTY
from tests.browser.test_frontier_page import chips
from tests.support.command import ROOT
from tests.support.matrices import fabricate


@dataclass
class Opened:
    """The page in the browser, what it shows, and everything it tried to fetch or complained about."""

    page: Page
    found: dict[str, Any]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix in which LightLLM never came up, and whose words are hostile."""
    return fabricate(tmp_path_factory.mktemp("matrix") / "m", failing="lightllm", nasty=NASTY)


@pytest.fixture(scope="module")
def opened(browser: Browser, folder: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The page in a window that tests share; `indirect` says how wide, and in which colour scheme."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    opened = Opened(page, json.loads((folder / "matrix.json").read_text("utf-8")))
    page.on("request", lambda asked: opened.requests.append(asked.url))
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.goto((folder / "matrix.html").as_uri())
    page.evaluate("Report.drawAll()")
    yield opened
    context.close()


everywhere = pytest.mark.parametrize("opened", [(360, "dark"), (1600, "light")], indirect=True)


@everywhere
def test_it_opens_offline_without_complaint_and_fits_the_window(opened: Opened) -> None:
    """Nothing but the file is asked for, every chart is drawn, hostile words do nothing, and nothing sticks out."""
    assert opened.requests == [opened.page.url]
    assert opened.complaints == []
    # Bars; two platforms; two of three servers, because one was never measured.
    assert opened.page.locator(".chart .main-svg").count() >= 1 + 2 + 2
    assert "owned" not in opened.page.title()
    opened.page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    outside = """[...document.querySelectorAll('body *')].filter((each) =>
        !each.closest('nav, .scroll, .skip, svg, .unseen, pre')
        && each.getBoundingClientRect().right > innerWidth + 1).length"""
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.page.evaluate(outside) == 0


def test_the_bars_are_the_means_of_matrix_json(opened: Opened) -> None:
    """Throughput per framework and platform, with its interval and its repeats; another figure on request."""
    bars = "document.querySelector('#chart-bars-0').data.filter(({type}) => type === 'bar')"
    assert drawn(opened, bars) == expected(opened, "output_tokens_per_s", 1.0)
    dots = opened.page.evaluate(
        "document.querySelector('#chart-bars-0').data.filter(({mode}) => mode === 'markers').map(({y}) => y.length)"
    )
    assert dots == [4, 4]
    assert opened.page.evaluate(
        f"{bars}.every(({{error_y}}) => !error_y.visible)"  # two repeats have no interval
    )
    opened.page.select_option("#figure", "e2e.p50")
    unit = opened.page.evaluate("document.querySelector('#chart-bars-0').layout.yaxis.title.text").rpartition(" ")[2]
    assert drawn(opened, bars) == pytest.approx(expected(opened, "e2e.p50", {"s": 1.0, "ms": 1e3}[unit]))


def drawn(opened: Opened, bars: str) -> dict[str, float]:
    pairs = opened.page.evaluate(
        f"{bars}.flatMap(({{name, x, y}}) => x.map((at, place) => [name + ' ' + at, y[place]]))"
    )
    return dict(pairs)


def expected(opened: Opened, figure: str, factor: float) -> dict[str, float]:
    titles = {server["name"]: server["title"] for server in opened.found["servers"]}
    platforms = {host["name"]: host["platform"] for host in opened.found["hosts"]}
    return {
        f"{titles[cell['server']]} {platforms[cell['host']]}": cell["figures"][figure]["mean"] * factor
        for cell in opened.found["cells"]
        if cell["runs"]
    }


def test_distributions_stand_per_platform_and_per_server(opened: Opened) -> None:
    """Per platform the servers in their colours, per server the platforms in dashes; both switches redraw them all."""
    charts = "[...document.querySelectorAll('#latency .chart')]"
    names = (
        f"{charts}.map((each) => each.data.filter(({{showlegend}}) => showlegend !== false).map(({{name}}) => name))"
    )
    assert opened.page.evaluate(names) == [["vLLM", "TGI"]] * 2 + [["A800", "RTX4090"]] * 2
    looks = f"{charts}.map((each) => each.data.filter(({{showlegend}}) => showlegend !== false)"
    colours = opened.page.evaluate(f"{looks}.map(({{line}}) => line.color))")
    dashes = opened.page.evaluate(f"{looks}.map(({{line}}) => line.dash))")
    assert len(set(colours[0])) == 2
    assert len(set(colours[2])) == 1
    assert len(set(dashes[2])) == 2
    repeats = f"{charts}.map((each) => each.data.filter(({{showlegend}}) => showlegend === false).length)"
    assert opened.page.evaluate(repeats) == [4, 4, 4, 4]
    opened.page.locator("input[value=ttft_s]").check()
    opened.page.locator("input[value=log]").check()
    assert opened.page.evaluate(f"{charts}.every((each) => each.layout.xaxis.title.text.startsWith('TTFT'))")
    assert opened.page.evaluate(f"{charts}.map((each) => each.layout.xaxis.type)") == ["log"] * 4


def test_tables_say_what_matrix_json_says(opened: Opened) -> None:
    """Figures, differences, lengths, failures, what was skipped, and what was published elsewhere."""
    opened.page.evaluate("document.querySelectorAll('.fold').forEach((fold) => fold.open = true)")
    rows = opened.page.locator("#figures tbody tr")
    hosts = [host["name"] for host in opened.found["hosts"]]
    measured = [cell for cell in opened.found["cells"] if cell["runs"]]
    rate = {id(cell): cell["figures"]["output_tokens_per_s"]["mean"] for cell in measured}
    ranked = sorted(measured, key=lambda cell: (hosts.index(cell["host"]), -rate[id(cell)]))
    assert rows.count() == len(opened.found["cells"])
    for row, cell, mark in zip(rows.all(), ranked, "▲▼▲▼", strict=False):
        text = row.locator("td.number").nth(1).inner_text()
        assert text.startswith(f"{significant(rate[id(cell)], 4)} {mark}")
    links = opened.page.locator("#runs tbody a")
    assert links.count() == 8
    folder = Path(unquote(urlsplit(opened.page.url).path)).parent
    assert all((folder / unquote(link.get_attribute("href") or "")).is_file() for link in links.all())
    ordered = sorted(opened.found["differences"], key=lambda each: each["by"], reverse=True)
    shown = opened.page.locator("#differences tbody td.number").all()
    assert len(shown) == len(ordered)
    for cell, each in zip(shown, ordered, strict=True):
        assert cell.locator("strong").count() == (each["verdict"] in ("better", "worse"))
        assert cell.inner_text().startswith(significant(each["ratio"]))
    assert opened.page.locator("#lengths tbody tr").count() == 4
    assert opened.page.locator("#failures p.error").count() == 4
    assert NASTY in opened.page.locator("#failures").inner_text()
    assert "does not fit" in opened.page.locator("#failures").inner_text()
    assert "arXiv 2311.03687" in opened.page.locator("#published").inner_text()


def test_it_is_short_and_every_figure_is_in_sight_at_1024(folder: Path, browser: Browser) -> None:
    """At most 900 visible words, those in charts included. The columns up to E2E do not scroll. Tiles use the width."""
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    page.goto((folder / "matrix.html").as_uri())
    page.evaluate("Report.drawAll()")
    words = page.evaluate("document.body.innerText.split(/\\s+/).length")
    assert words <= 900
    heads = page.locator("#figures table.ranking thead th")
    titles = heads.all_inner_texts()
    last = next(index for index, title in enumerate(titles) if title.startswith("E2E p99"))
    box = heads.nth(last).bounding_box()
    assert box
    assert box["x"] + box["width"] <= 1024
    cards = page.locator("#answer .card")
    first, final = cards.first.bounding_box(), cards.last.bounding_box()
    assert first
    assert final
    assert final["x"] + final["width"] - first["x"] > 800
    page.close()


def test_the_first_screen_names_the_winner_and_its_throughput(tmp_path: Path, browser: Browser) -> None:
    """Each platform has a tile with the leading server, its throughput, its lead, and the other servers. Chips say that
    everything was measured and valid. No sentence repeats the chips. On a phone, the tile is on the first screen."""
    pace = {"vllm": 1.0, "tgi": 3.0, "lightllm": 3.3}
    path = fabricate(tmp_path / "m", pace=pace, repeats=4) / "matrix.html"
    for width, height in ((360, 780), (1024, 900)):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(path.as_uri())
        tile = page.locator("#answer .card").first
        box = tile.bounding_box()
        assert box
        assert box["y"] + box["height"] <= height
        text = " ".join(tile.inner_text().split())
        assert re.fullmatch(
            r"A800 vLLM [\d,.]+ tokens/s vLLM has \d\.\d\dx the throughput of TGI \(95% CI [^)]+\)\. "
            r"TGI [\d,.]+, LightLLM [\d,.]+ tokens/s\.",
            text,
        )
        assert chips(page) == [
            ("ok", "Cells 6 of 6 measured"),
            ("ok", "Measurement 6 of 6 measured cells valid"),
            ("ok", "Requests 2,880 of 2,880 complete"),
        ]
        assert page.locator("#answer .findings").count() == 0
        page.close()


def test_chips_of_a_matrix_that_failed(opened: Opened, tmp_path: Path, browser: Browser) -> None:
    """Chips name failed cells and cells whose client was the limit."""
    assert chips(opened.page)[0] == ("warning", "Cells 4 of 6 measured; 2 failed")
    page = browser.new_page()
    page.goto((fabricate(tmp_path / "m", limited="tgi") / "matrix.html").as_uri())
    assert chips(page)[1] == ("error", "Measurement 4 of 6 measured cells valid; invalid: TGI on A800, TGI on RTX4090")
    assert "Not ranked" in page.locator("#answer .card").first.inner_text()
    page.close()


def test_a_large_matrix_is_small_and_short(tmp_path: Path, browser: Browser) -> None:
    """Twelve cells with five repeats each have a page of at most 1.3 MB and 900 words, those in its charts included. A
    tile names the winner of each platform and workload."""
    workloads = [{"name": name, "n": 120, "output_tokens": 16} for name in ("chat", "search")]
    path = fabricate(tmp_path / "m", repeats=5, workloads=workloads) / "matrix.html"
    assert path.stat().st_size <= 1_300_000
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    page.goto(path.as_uri())
    page.evaluate("Report.drawAll()")
    assert page.evaluate("document.body.innerText.split(/\\s+/).length") <= 900
    assert page.locator("#answer .card").count() == 4
    page.close()


def test_no_winner_is_said_once(tmp_path: Path, browser: Browser) -> None:
    """The tile says so, and its note gives the figures."""
    same = dict.fromkeys(("vllm", "tgi", "lightllm"), 1.0)
    page = browser.new_page()
    page.goto((fabricate(tmp_path / "m", pace=same) / "matrix.html").as_uri())
    tile = page.locator("#answer .card").first.inner_text()
    assert tile.lower().count("no winner") == 1
    page.close()


def test_the_bars_can_be_taken_away(opened: Opened) -> None:
    """As a table on the page, and as CSV."""
    figure = opened.page.locator("figure", has=opened.page.locator("#chart-bars-0"))
    figure.locator("summary").click()
    expect(figure.locator("tbody tr")).to_have_count(4)
    with opened.page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    lines = download.value.path().read_text("utf-8").splitlines()
    assert lines[0] == '"server","platform","figure","unit","mean","low","high","repeats"'
    assert len(lines) == 1 + 4


def test_a_matrix_of_sweeps_alone(tmp_path: Path, browser: Browser) -> None:
    """Its page has the capacities, each leading to the frontier, and draws nothing; without complaint."""
    swept = msgspec.json.decode((ROOT / "docs/results/vllm-cpu-sweep/sweep.json").read_bytes(), type=SweepResult)
    cell = CellSweep(
        *("vllm", "here", "tiny", "load"), folder="cells/x", page="frontier-load.html", state="measured", result=swept
    )
    plan = {
        **{"name": "m", "servers": [{"name": "vllm", "server": "vllm"}], "models": [{"name": "tiny"}]},
        **{"workloads": [{"name": "load"}], "repeats": 1, "starts": 1, "seed": 0},
        "hosts_found": {"here": {"platform": "CPU"}},
    }
    found = summarise_matrix(
        {"at": "", "version": "", "plan": plan},
        [],
        order=[],
        sweeps=[cell],
        skipped={},
        failed=[],
        starts=[],
        titles={},
    )
    file = tmp_path / "matrix.html"
    file.write_text(render(MatrixReport(found).page_document([])), encoding="utf-8")
    page, complaints = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    assert page.locator("#sweeps td a").first.get_attribute("href") == "frontier-load.html"
    assert "12.0 requests/s" in page.locator("#sweeps").inner_text()
    assert chips(page) == [
        ("ok", "Sweeps 1 of 1 measured"),
        ("ok", f"Sweep runs {len(swept.steps)} of {len(swept.steps)} valid"),
    ]
    assert complaints == []
    page.close()
