"""What a reader does with the report: point, zoom, sort, copy, print; in a real Chromium, from disk."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from pypdf import PdfReader

from loadgen.analysis.format import UNKNOWN
from tests.browser.conftest import Opened

plain = pytest.mark.parametrize("opened", [("plain", 1280, "light")], indirect=True)
undrawn = pytest.mark.parametrize("fresh", [("plain", 1280, "light", False)], indirect=True)
RANGES = "(({ xaxis, yaxis }) => [xaxis.range, yaxis.range])(document.querySelector('#chart-timeline')._fullLayout)"
POINT = """(chart) => {
  const place = document.querySelector(chart);
  const { x, y } = place.data.at(-1);
  const { xaxis, yaxis } = place._fullLayout;
  const { left, top } = place.getBoundingClientRect();
  const middle = Math.floor(x.length / 2);
  return [left + xaxis._offset + xaxis.d2p(x[middle]), top + yaxis._offset + yaxis.d2p(y[middle])];
}"""
LINES = """(chart) => document.querySelector(chart).data
  .filter(({ mode, showlegend }) => mode === "lines" && showlegend !== false)
  .map(({ line }) => [line.color, line.dash])"""
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
TICKS = "document.querySelector('#chart-timeline').data[2].x.length"


@plain
def test_pointing_at_a_curve_says_what_it_is(opened: Opened) -> None:
    """The share and the latency under the pointer appear, in the chart's unit."""
    point_at(opened.page, "#chart-ttft_s")
    label = opened.page.locator("#chart-ttft_s .hoverlayer .hovertext").first
    assert re.fullmatch(r"[\d.]+% within [\d.]+ s", label.text_content() or "")


@pytest.mark.parametrize("fresh", [("plain", 1280, "light")], indirect=True)
def test_the_timeline_zooms_by_key_button_and_pointer(fresh: Opened) -> None:
    """+ halves what is in view, the arrows move it, 0 shows all again; close up single tokens appear."""
    page = fresh.page
    whole_x, whole_y = page.evaluate(RANGES)
    assert page.evaluate(TICKS) == 0
    page.locator("#chart-timeline").focus()
    page.keyboard.press("+")
    near_x, near_y = page.evaluate(RANGES)
    assert near_x[1] - near_x[0] == pytest.approx((whole_x[1] - whole_x[0]) / 2)
    assert near_y[0] - near_y[1] == pytest.approx((whole_y[0] - whole_y[1]) / 2)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    moved_x, moved_y = page.evaluate(RANGES)
    assert moved_x[0] > near_x[0]
    assert moved_y[0] < near_y[0]
    for _ in range(4):
        page.get_by_role("button", name="Zoom in").click()
    assert 0 < page.evaluate(TICKS) <= 40 * 32
    page.keyboard.press("Tab")
    page.locator("#chart-timeline").press("0")
    assert page.evaluate(RANGES) == [whole_x, whole_y]
    page.evaluate(DRAWN)
    box: Any = page.locator("#chart-timeline .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 160, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{RANGES}[0][1] - {RANGES}[0][0] < {(whole_x[1] - whole_x[0]) / 2}")


@plain
def test_what_the_server_said_stands_below_on_the_same_axis(opened: Opened) -> None:
    """Requests and the KV cache have a panel each under tokens and streams; a reading that failed is a gap."""
    titles = opened.page.locator("#chart-course .infolayer text").all_text_contents()
    assert {"output tokens/s", "requests in flight", "requests at the server", "KV cache, %"} <= set(titles)
    drawn = opened.page.evaluate("document.querySelector('#chart-course').data.map(({name, x, y}) => ({name, x, y}))")
    (cache,) = [each for each in drawn if each["name"] == "KV cache in use"]
    assert cache["y"][cache["x"].index(3)] is None
    assert cache["y"][0] == 50
    assert cache["x"][0] == -1


@pytest.mark.parametrize("fresh", [("many", 1600, "light")], indirect=True)
def test_several_runs_share_charts_and_take_turns_in_the_timeline(fresh: Opened) -> None:
    """One table compares them and sorts; a server's runs have its colour in every chart and differ by their dashes; the
    timeline shows the run that was picked."""
    page = fresh.page
    assert page.locator(".overview tbody tr").count() == 4
    page.locator(".overview thead button", has_text="run").first.click()
    names = page.locator(".overview tbody th").all_text_contents()
    assert [name.split()[0] for name in names] == ["lightllm", "tgi", "vllm", "vllm"]
    lines = {name: page.evaluate(LINES, f"#chart-{name}") for name in ("ttft_s", "position", "sends")}
    assert lines["ttft_s"] == lines["position"] == lines["sends"]
    assert lines["ttft_s"][0][0] == lines["ttft_s"][3][0]
    assert lines["ttft_s"][0][1] != lines["ttft_s"][3][1]
    first = page.evaluate("document.querySelector('#chart-timeline').data[1].line.color")
    page.select_option("#timeline-run", "2")
    assert (
        page.evaluate("document.querySelector('#chart-timeline').data[1].line.color") == lines["ttft_s"][2][0] != first
    )


@undrawn
def test_a_table_sorts_by_its_heads(fresh: Opened) -> None:
    """Enter on a head sorts by the raw values, once more turns it round; thin figures stay last."""
    page = fresh.page
    head = page.locator("#percentiles thead th", has_text="p50").first
    shown = "[...document.querySelector('#percentiles tbody').rows].map((each) => each.dataset.row)"
    order = sorted(page.evaluate(shown), key=lambda name: fresh.summary.latencies[name].p50 or 0)
    medians = [fresh.summary.latencies[name].p50 for name in order]
    for direction, expected in (("ascending", medians), ("descending", medians[::-1])):
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == direction
        assert [fresh.summary.latencies[name].p50 for name in page.evaluate(shown)] == expected


@undrawn
def test_tables_and_the_command_can_be_copied(fresh: Opened) -> None:
    """A table arrives as tab-separated lines without its intervals, the command as it would be typed."""
    page = fresh.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#again summary h2").click()
    page.get_by_role("button", name="Copy command").click()
    assert page.evaluate("navigator.clipboard.readText()") == "loadgen burst --server tgi --n 1000 --seed 7"
    page.locator("#lengths summary h2").click()
    page.locator("#lengths .copy").click()
    lines = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert lines[:2] == ["side\trequested\treported\trequests that differ", "Prompts\t512,000\t512,000\t0"]
    page.locator("#percentiles .copy").first.click()
    first = page.evaluate("navigator.clipboard.readText()").split("\n")[1].split("\t")
    assert first[:3] == ["TTFT", "s", "1,000"]
    assert all(re.fullmatch(rf"(?:[\d.,]+|{UNKNOWN})\*?", cell) for cell in first[3:])
    expect(page.locator("#status")).to_have_text("Copied")


def lowest_text(sheet: Any) -> str:
    """Return the text at the foot of a printed page. A PDF holds its texts in the order in which they were drawn."""
    texts = list[tuple[float, str]]()

    def note(text: str, matrix: Sequence[float], text_matrix: Sequence[float], *_: object) -> None:
        if text.strip():
            texts.append((text_matrix[5] * matrix[3] + matrix[5], text.strip()))

    sheet.extract_text(visitor_text=note)
    return min(texts)[1] if texts else ""


@pytest.mark.parametrize("fresh", [("plain", 1280, "dark")], indirect=True)
def test_it_prints_on_a_few_white_pages_with_its_charts(fresh: Opened) -> None:
    """A PDF of a sane number of pages; without the charts it would hold a small part of the strokes."""
    page = fresh.page
    whole = page.pdf(format="A4")
    assert 5 <= pages_of(whole) <= 14
    headings = set(page.locator("h2, h3").all_text_contents())
    assert not headings & {lowest_text(sheet) for sheet in PdfReader(BytesIO(whole)).pages}
    page.add_style_tag(content=".chart { visibility: hidden }")
    assert strokes(whole) > 4 * strokes(page.pdf(format="A4"))
    assert page.evaluate("document.documentElement.classList.contains('on-paper')") is False


@pytest.mark.parametrize("fresh", [("plain", 360, "light")], indirect=True)
def test_on_paper_nothing_lies_over_a_chart(fresh: Opened) -> None:
    """Each chart ends above its caption, also when it was drawn for a phone; what is folded away is printed."""
    fresh.page.emulate_media(media="print")
    fresh.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    over = """[...document.querySelectorAll('figure')].filter((each) => {
        const [chart, text] = ['.main-svg', 'figcaption'].map((name) => each.querySelector(name));
        return chart.getBoundingClientRect().bottom > text.getBoundingClientRect().top + 1;
    }).map((each) => each.textContent.slice(0, 60))"""
    assert fresh.page.evaluate(over) == []
    assert fresh.page.locator("#client table").is_visible()


@pytest.mark.parametrize("fresh", [("plain", 1280, "light", False)], indirect=True)
def test_a_chart_is_saved_as_a_picture(fresh: Opened) -> None:
    """As PNG and as SVG, with its title."""
    fresh.page.locator("#sending summary h2").click()
    figure = fresh.page.locator("figure", has=fresh.page.locator("#chart-sends"))
    figure.locator("details.data").evaluate("(each) => (each.open = true)")
    for kind, begins in (("PNG", b"\x89PNG\r\n"), ("SVG", b"<svg")):
        with fresh.page.expect_download() as download:
            figure.get_by_role("button", name=kind).click()
        assert download.value.suggested_filename == f"sends.{kind.lower()}"
        assert download.value.path().read_bytes().startswith(begins)
    assert "Requests sent over time" in download.value.path().read_text("utf-8")


@pytest.mark.parametrize("fresh", [("troubled", 1280, "light", False)], indirect=True)
def test_a_reason_leads_to_its_request_in_the_timeline(fresh: Opened) -> None:
    """A click on the request beside a reason zooms the timeline to it and says the reason there."""
    fresh.page.locator("#failures [data-request]").first.click()
    note = "document.querySelector('#chart-timeline').layout?.annotations?.[0].text"
    fresh.page.wait_for_function(note)
    assert fresh.page.evaluate(note).startswith("request 200: in_band_error: ")
    low, high = fresh.page.evaluate(RANGES)[1]
    assert low - high == 24


def point_at(page: Page, chart: str) -> None:
    """Point at the middle one of the points that a chart's curve is drawn through."""
    page.locator(chart).scroll_into_view_if_needed()
    x, y = page.evaluate(POINT, chart)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y, steps=3)
    page.wait_for_selector(f"{chart} .hoverlayer .hovertext")


def pages_of(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


def strokes(pdf: bytes) -> int:
    """How many lines and curves the PDF draws."""
    streams = re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.S)
    total = 0
    for stream in streams:
        try:
            total += len(re.findall(rb"[\d.] [lc]\n", zlib.decompress(stream)))
        except zlib.error:
            continue
    return total
