"""The pages of `loadgen dissect` in Chromium, offline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from loadgen.analysis.report import Document
from loadgen.analysis.report.page import render
from loadgen.dissect import inference_report, training_report
from tests.support.dissected import inference_found, training_found


@contextmanager
def opened(browser: Browser, document: Document, folder: Path) -> Iterator[Page]:
    """The page with all charts drawn; nothing went wrong on it."""
    file = folder / "dissect.html"
    file.write_text(render(document), "utf-8")
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Report.drawAll()")
        yield page
        assert errors == []


def test_it_has_the_bar_of_a_step_and_the_roofline(browser: Browser, tmp_path: Path) -> None:
    """The bar has a piece for each module and each operator, the roofline a dot for each operator that computes."""
    with opened(browser, inference_report.build_document(inference_found()), tmp_path) as page:
        assert page.evaluate("document.querySelector('main section').contains(document.querySelector('#chart-flame'))")
        expect(page.locator("#chart-flame .barlayer .point")).to_have_count(8)  # four modules, one operator of each
        expect(page.locator("#chart-roofline .scatterlayer .trace .points path")).to_have_count(6)
        expect(page.locator("table.modules").first).to_contain_text("QKV")


@pytest.mark.parametrize("width", [360, 1600])
def test_each_technique_is_a_bar_with_its_prediction(browser: Browser, tmp_path: Path, width: int) -> None:
    """Two of them: four parts of time and four kinds of memory each, and a line where the model puts the whole."""
    with opened(browser, training_report.build_document(training_found()), tmp_path) as page:
        page.set_viewport_size({"width": width, "height": 900})
        for chart in ("time", "memory"):
            expect(page.locator(f"#chart-{chart} .barlayer .trace")).to_have_count(4)
            expect(page.locator(f"#chart-{chart} .barlayer .point")).to_have_count(8)
            expect(page.locator(f"#chart-{chart} .scatterlayer .points path")).to_have_count(4)  # each has an edge
        tiles = [" ".join(text.split()) for text in page.locator("#answer .card").all_inner_texts()]
        assert tiles[0] == "Shortest step 3.50 s naive"
        assert tiles[2] == "Lowest peak memory 1.49 GiB zero3 x 2, of one process"
        assert tiles[4].startswith("Memory, predicted \N{MINUS SIGN}5.0% compared with measured naive")
        expect(page.locator("table.memory")).to_contain_text("\N{MINUS SIGN}5.0%")
        drawn = page.evaluate("document.getElementById('chart-time').data.map(({name, x}) => [name, ...x])")
        parts = {
            "forward": [1.0, 1.5],
            "backward": [2.0, 2.5],
            "optimiser": [0.5, 0.3],
            "collectives": [0.0, 2.0],
            "predicted": [2.8, 5.6],
        }
        assert {name: values for name, *values in drawn} == {name: pytest.approx(each) for name, each in parts.items()}
        expect(page.locator("html")).to_have_js_property(
            "scrollWidth", width
        )  # once the charts have followed the window


def test_one_process_has_no_collectives(browser: Browser, tmp_path: Path) -> None:
    """Then there is no such part, nor its entry in the legend."""
    found = training_found()
    alone = training_report.build_document(replace(found, techniques=found.techniques[:1]))
    with opened(browser, alone, tmp_path) as page:
        expect(page.locator("#chart-time .barlayer .trace")).to_have_count(3)
