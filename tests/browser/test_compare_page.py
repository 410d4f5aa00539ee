"""The page of a comparison with goodput, in Chromium."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as with_changes
from playwright.sync_api import Browser

from loadgen.analysis.compare import ComparedRun, Comparison, compare, figures_table, page_document, read_run
from loadgen.analysis.compare.gates import parse_gates
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import prepare_run
from tests.browser.conftest import NASTY
from tests.support.runs import burst, footer, header, healthy, write


def run(folder: Path, pace: float, model: str = "tiny") -> ComparedRun:
    """A burst of 700 on a server of this pace."""
    records = burst(700, 20, pace=pace)
    first = header(700)
    first.server["model"] = model
    found = read_run(write(folder, [first, *records, *healthy(), footer(records)]))
    good = goodput(found.frame, parse_bounds(["ttft < 1s", "tpot < 30ms"]))
    return replace(found, summary=with_changes(found.summary, goodput=good))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """A page of two repeats each, B takes half as long again as A, with a hostile model name."""
    folder = tmp_path_factory.mktemp("compared")
    a = [run(folder / "a" / f"repeat-{place}", 1.0 + place / 100) for place in (1, 2)]
    b = [run(folder / "b" / f"repeat-{place}", 1.5 + place / 100, NASTY) for place in (1, 2)]
    found = compare(a, b, gates=parse_gates(["e2e.p50 worse by 5%"]))
    parts = [[prepare_run(each.run, each.frame, each.summary) for each in group] for group in (a, b)]
    links = ["a/report.html"] * 4
    (folder / "page.html").write_text(render(page_document(found, *parts, links)), "utf-8")
    return folder / "page.html", found


@pytest.mark.parametrize("width", [360, 1024, 1600])
def test_a_and_b_are_named_above_the_verdict(browser: Browser, compared: tuple[Path, Comparison], width: int) -> None:
    """The first screen says which server, version, model and load A and B are, and of how many runs. The verdict is on
    the same screen."""
    with browser.new_context(viewport={"width": width, "height": 780}) as context:
        page = context.new_page()
        page.goto(compared[0].as_uri())
        names = dict(
            zip(page.locator(".names dt").all_inner_texts(), page.locator(".names dd").all_inner_texts(), strict=True)
        )
        assert names["A"].startswith("a · tgi 3.3.5, tiny · ")
        assert names["A"].endswith(" · 2 runs")
        assert names["B"].startswith("b · tgi 3.3.5, ")
        assert names["Load"].startswith("per run 700 requests of ")
        box, verdict = page.locator(".names").bounding_box(), page.locator("#comparison .findings").bounding_box()
        assert box is not None
        assert verdict is not None
        assert box["y"] + box["height"] <= verdict["y"] < 700
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1600, "light")])
def test_the_comparison_opens_and_says_what_was_found(
    browser: Browser, compared: tuple[Path, Comparison], width: int, scheme: Any, tmp_path: Path
) -> None:
    """The verdict first, A and B overlaid under one entry of the legend each, details close to the verdict; no
    complaint, the table equal to the comparison, hostile words without effect, no sideways scrolling."""
    path, found = compared
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.evaluate("Report.drawAll()")
    assert "Comparison: b (B) compared with a (A)" in page.title()
    assert "B is worse: of 9 figures 0 better" in page.locator("#comparison .findings li").first.inner_text()
    for chart in ("comparison", "ttft_s", "goodput"):
        page.wait_for_selector(f"#chart-{chart} .plot-container", state="attached")
    lines = page.evaluate("document.querySelector('#chart-ttft_s').data.filter(({ mode }) => mode === 'lines')")
    legend = [line["name"] for line in lines if line.get("showlegend") is not False]
    assert ([line["name"] for line in lines], legend) == (["A: a", "A: a", "B: b", "B: b"], ["A: a", "B: b"])
    assert {line["line"]["width"] for line in lines} == {1}
    if width == 1600:
        top = "document.querySelector('{}').getBoundingClientRect().top"
        assert page.evaluate(f"{top.format('#method')} - {top.format('#comparison')}") <= 2.85 * 900
    assert page.locator("#runs tbody th a").count() == 4
    assert path.stat().st_size < 1_500_000
    assert complaints == []
    assert "owned" not in page.title()
    rows = page.locator("#comparison table").filter(has_text="adjusted p").locator("tbody tr").all()
    said = [" ".join(row.locator("td").last.inner_text().split()) for row in rows]
    verdicts = [row.cells[-1] for row in figures_table(found, brief=False).rows]
    assert said == [f"{verdict.text} {verdict.note}".strip() for verdict in verdicts]
    titles = [row.locator("th").evaluate("(head) => head.firstChild.textContent") for row in rows]
    drawn = page.evaluate("document.querySelector('#chart-comparison').layout.yaxis.categoryarray")
    assert (drawn, titles[0]) == (titles, "Output throughput")  # every figure of the table is drawn, also shares
    assert "Complete" in titles
    assert "-" not in "".join(page.locator("#comparison .value, #comparison td.number").all_inner_texts())
    course = page.evaluate("document.querySelector('#chart-course').data")
    assert [trace["name"] for trace in course] == ["range", "range", "A: a", "range", "range", "B: b"]
    for low, high, mean in (course[:3], course[3:]):
        heights = zip(low["y"], mean["y"], high["y"], strict=True)
        assert all(bottom <= middle <= top for bottom, middle, top in heights)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for section in ("comparison", "course"):
        page.locator(f"#{section}").screenshot(path=tmp_path / f"{section}-{width}.png")
        assert (tmp_path / f"{section}-{width}.png").stat().st_size > 10_000
    context.close()


def test_a_huge_difference_does_not_squeeze_the_others(browser: Browser, tmp_path: Path) -> None:
    """The axis of the ratios is logarithmic and says so. An interval that is much wider than the others ends in an
    arrow. A large change is a factor in the tiles, and the table of runs shows all columns at 1024 pixels."""
    groups = [
        [run(tmp_path / name / f"repeat-{place}", pace) for place in (1, 2)] for name, pace in (("a", 1), ("b", 40))
    ]
    found = compare(*groups)
    rows = [replace(row, ratio_ci95=(0.5, 1e6)) if row.figure == "tpot.p50" else row for row in found.rows]
    parts = [[prepare_run(each.run, each.frame, each.summary) for each in group] for group in groups]
    (tmp_path / "page.html").write_text(render(page_document(replace(found, rows=rows), *parts)), "utf-8")
    with browser.new_context(viewport={"width": 1024, "height": 900}) as context:
        page = context.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.evaluate("Report.drawAll()")
        axis = page.evaluate("document.querySelector('#chart-comparison').layout.xaxis")
        assert axis["type"] == "log"
        assert 10 ** axis["range"][1] < 1000
        arrows = page.evaluate(
            "document.querySelector('#chart-comparison').data.filter(({ name }) => name === 'arrows')"
            ".map(({ y, marker }) => [y, marker.symbol])"
        )
        assert arrows == [[["TPOT p50"], ["triangle-right"]]]
        caption = page.locator("#text-comparison").inner_text()
        assert "The axis is logarithmic. An arrow marks an interval that continues beyond the chart." in caption
        tile = page.locator("#comparison .card", has_text="TTFT p50").inner_text()
        assert "33.0x worse" in tile
        assert page.locator("#runs .scroll").evaluate("(box) => box.scrollWidth <= box.clientWidth")
