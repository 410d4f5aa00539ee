"""The page of a folder of runs, in Chromium, from disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from loadgen.cli.report import report
from tests.browser.conftest import NASTY
from tests.support.runs import burst, failed, footer, header, healthy, write


def test_runs_are_filtered_picked_compared_and_followed(browser: Browser, tmp_path: Path) -> None:
    """The newest two are beside each other at first; a third is picked, the command names all; the filter hides rows;
    the trend is of one label, invalid runs hollow; nothing is asked of any other machine, and hostile words do
    nothing."""
    runs = tmp_path / "runs of ours"
    for place, (server, label) in enumerate(
        (("vllm", "nightly"), ("tgi", "try"), ("vllm", "nightly"), ("vllm", "try"))
    ):
        records = burst(100, 8, pace=1 + place / 10)
        first = header(100, server=server, started_at=f"2026-11-2{place}T09:00:00Z")
        first.plan["label"], first.server["model"] = label, NASTY
        stalled = {"stall_ns_max": 2_000_000_000} if place == 2 else {}
        write(runs / f"run-{place}", [first, *records, *healthy(**stalled), footer(records)])
    report([runs / "run-3"], quiet=True)
    report([runs], quiet=True)
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((runs / "index.html").as_uri())
    for chart in ("picked", "trend"):
        page.locator(f"#chart-{chart}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#chart-{chart} .main-svg", state="attached")
    assert page.locator(".overview tbody th a").get_attribute("href") == "run-3/report.html"
    names = "(chart) => document.querySelector(`#chart-${chart}`).data.map(({ name }) => name)"
    assert page.evaluate(names, "picked") == ["run-3", "run-2"]
    assert str(page.locator("#compare pre").text_content()) == (
        f"loadgen compare --html compare.html '{runs}/run-3' '{runs}/run-2'"
    )
    page.get_by_label("Compare run-0").check()
    assert page.evaluate(names, "picked") == ["run-3", "run-2", "run-0"]
    assert str(page.locator("#compare pre").text_content()).endswith(f"'{runs}/run-3' -- '{runs}/run-2' '{runs}/run-0'")
    assert page.locator("#compare table thead th").all_text_contents()[2:] == ["run-3", "run-2", "run-0"]
    for name in ("run-3", "run-2", "run-0"):
        page.get_by_label(f"Compare {name}").uncheck()
    assert str(page.locator("#compare pre").text_content()) == "Select two or more runs above."
    page.get_by_label("Compare run-1").check()
    assert page.evaluate(names, "picked") == ["run-1"]
    page.fill("#filter", "vllm TRY")
    assert page.locator(".overview tbody tr:visible th").all_text_contents() == [" run-3"]
    page.select_option("#label", "nightly")
    page.select_option("#figure", "ttft.p50")
    drawn = page.evaluate("document.querySelector('#chart-trend').data.map(({ x, marker }) => [x, marker.symbol])")
    assert drawn == [[["2026-11-20T09:00:00Z", "2026-11-22T09:00:00Z"], ["circle", "circle-open"]]]
    assert complaints == []
    assert asked == [page.url]
    assert "owned" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index page of two single runs, three repeats with a page, and a sweep of two steps without a page."""
    folder = tmp_path_factory.mktemp("groups")
    names = ("one", "again/repeat-1", "again/repeat-2", "again/repeat-3", "s/step-1", "s/step-2", "two")
    for place, name in enumerate(names):
        first = header(100, server="vllm", started_at=f"2026-11-2{place}T09:00:00Z", simulated=place == 0)
        first.plan["label"] = "nightly"
        if name == "two":
            first.plan["input_tokens"] = f"empirical:{'deep/' * 30}lengths.csv"
        records = burst(100, 8, pace=1 + place / 10)
        write(folder / name, [first, *records, *healthy(), footer(records)])
    (folder / "again/report.html").write_text("repeats", "utf-8")
    (folder / "s/sweep.jsonl").write_text("", "utf-8")
    report([folder], quiet=True)
    return folder / "index.html"


def test_groups_have_one_row_that_opens(browser: Browser, groups: Path) -> None:
    """Repeats and steps are one row each, with a link to their page, until the row is expanded or the filter finds one
    of their runs. Sorting keeps them below their row. Repeats can be compared as a whole. Steps have different loads,
    so their row has no figures."""
    with browser.new_context(viewport={"width": 1600, "height": 900}) as context:
        page = context.new_page()
        page.goto(groups.as_uri())
        names = page.locator(".index tbody tr:visible th a, .index tbody tr:visible th:not(:has(a))")
        shown = ".index tbody tr:visible"
        expect(page.locator(shown)).to_have_count(4)
        assert page.locator(f"{shown} th").first.text_content() == " two"
        again = page.locator(shown, has_text="3 repeats")
        assert again.locator("th a").get_attribute("href") == "again/report.html"
        output = "td[data-label^=output]"
        means = again.locator(output).text_content() or ""
        again.get_by_role("button", name="3 repeats").click()
        expect(page.locator(shown)).to_have_count(7)
        children = page.locator("tr[data-parent]:visible")
        assert (
            children.locator("th a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
            == ["again/report.html"] * 3
        )
        values = [float(text.replace(",", "")) for text in children.locator(output).all_text_contents()]
        assert float(means.replace(",", "")) == pytest.approx(sum(values) / 3, rel=1e-3)
        steps = page.locator(shown, has_text="2 steps")
        assert steps.locator(output).text_content() == ""
        assert steps.locator("td[data-label=complete]").text_content() == "200 of 200"
        page.locator(".index thead button", has_text="output").click()
        order = page.locator(".index tbody tr").evaluate_all(
            "(rows) => rows.map((row) => row.dataset.parent ?? row.dataset.row)"
        )
        key = str(again.get_attribute("data-row"))
        assert order.index(key) + 3 == len(order) - order[::-1].index(key) - 1
        page.get_by_label("Compare again", exact=True).check()
        assert str(page.locator("#compare pre").text_content()).endswith(f"{groups.parent}/again")
        page.fill("#filter", "step-2")
        assert [name.strip() for name in names.all_text_contents()] == ["s2 steps", "step-2"]


def test_figures_are_on_the_first_screen_at_every_width(browser: Browser, groups: Path) -> None:
    """The throughput of the newest run is visible without scrolling. Long loads are abridged and have their full text
    as a title. On paper no figure is cut off. Nothing touches the field of the filter."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(groups.as_uri())
        for width, height in ((360, 780), (1024, 900), (1600, 900)):
            page.set_viewport_size({"width": width, "height": height})
            box = page.locator("td[data-label^=output]").first.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= height
            field, copy = (page.locator(name).first.bounding_box() for name in ("#filter", "#answer .copy"))
            assert field is not None
            assert copy is not None
            assert copy["y"] >= field["y"] + field["height"] + 8
            # No table is wider than the page. In particular, no column is hidden behind an edge.
            assert page.locator("#answer .scroll").evaluate("(box) => box.scrollWidth <= box.clientWidth")
        load = page.locator(".index td[data-label=load]").first
        assert len(load.inner_text()) < 110
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 690, "height": 900})
        assert page.locator(".index").evaluate("(table) => table.getBoundingClientRect().right <= innerWidth")


@pytest.mark.parametrize("width", [360, 1024, 1600])
def test_a_group_without_figures_is_readable(browser: Browser, groups: Path, width: int) -> None:
    """No two cells of the row of a sweep overlap."""
    with browser.new_context(viewport={"width": width, "height": 900}) as context:
        page = context.new_page()
        page.goto(groups.as_uri())
        cells = page.locator(".index tbody tr:visible", has_text="2 steps").locator("th, td").all()
        boxes = [box for cell in cells if (box := cell.bounding_box())]
        for index, one in enumerate(boxes):
            for other in boxes[index + 1 :]:
                apart_x = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
                apart_y = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
                assert apart_x <= 1 or apart_y <= 1


def test_the_status_strip_counts_the_runs_and_their_failures(browser: Browser, tmp_path: Path) -> None:
    """The strip says how many runs are valid and why most requests failed. It names a failed objective once, at its
    worst. A difference above 100% is a factor, and a lower value has a true minus sign."""
    for number in (1, 2, 3):
        first = header(60, server="vllm", started_at=f"2026-11-2{number}T09:00:00Z")
        first.plan["objectives"] = ["ttft.p50 < 10ms"]
        records = [*burst(50, 8, pace=(4, 3, 1)[number - 1]), *(failed(50 + index) for index in range(10))]
        stalled = {"stall_ns_max": 2_000_000_000} if number == 1 else {}
        write(tmp_path / f"run-{number}", [first, *records, *healthy(**stalled), footer(records)])
    report([tmp_path], quiet=True)
    with browser.new_context(viewport={"width": 1600, "height": 900}) as context:
        page = context.new_page()
        page.goto((tmp_path / "index.html").as_uri())
        texts = [" ".join(text.split()) for text in page.locator(".chip").all_inner_texts()]
        assert "2 of 3 runs valid" in texts[0]
        assert "150 of 180 complete (17% incomplete" in texts[1]
        assert "3 of 3 failed" in texts[2]
        objectives = page.locator(".index tbody td[data-label=objectives]").all_inner_texts()
        assert [" ".join(text.split())[:10] for text in objectives] == ["0 of 1 met"] * 3
        assert texts[2].count("ttft.p50") == 1
        changes = page.locator("#compare tbody tr td:last-child").all_inner_texts()
        assert any(re.search(r"\(−\d", text) for text in changes)  # noqa: RUF001
        assert any(text.endswith("x)") for text in changes)
        assert not any(re.search(r"[+-]\d{3,}", text) for text in changes)


def test_each_row_says_how_it_was_simulated(browser: Browser, groups: Path) -> None:
    """If only some runs are simulated, their rows have the badge."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(groups.as_uri())
        expect(page.locator(".index .badge")).to_have_text(["SIMULATED at 5 times speed"])
        expect(page.locator(".index tr", has_text="SIMULATED").locator("a, th").first).to_contain_text("one")
