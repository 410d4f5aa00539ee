"""The report as a reader sees it, in a real Chromium, from disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.format import UNKNOWN, significant
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report import findings
from loadgen.analysis.report.tables import STATISTICS
from tests.browser.conftest import NASTY, Opened

PLACE = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
plain = pytest.mark.parametrize("opened", [("plain", 1600, "light")], indirect=True)
troubled = pytest.mark.parametrize("opened", [("troubled", 1600, "light")], indirect=True)
everywhere = pytest.mark.parametrize(
    "opened",
    [
        (name, width, scheme)
        for name in ("plain", "troubled", "steady")
        for width, scheme in ((360, "dark"), (1600, "light"))
    ]
    + [("many", 360, "light")],
    indirect=True,
)


@everywhere
def test_the_report_opens_offline_and_without_complaint(opened: Opened) -> None:
    """Nothing but the file itself is asked for, the console stays empty, and every chart is drawn."""
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in opened.requests if url.startswith("file:")]) == 1
    assert opened.complaints == []
    assert opened.page.locator(".chart > .plot-container").count() == opened.page.locator(".chart").count()


@everywhere
def test_nothing_is_wider_than_the_window(opened: Opened) -> None:
    """No sideways scrolling at 360 px or 1600 px, also with every detail open; wide tables scroll in themselves."""
    opened.page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    outside = """[...document.querySelectorAll('body *')].filter((each) =>
        !each.closest('nav, .scroll, .skip, svg, .unseen')
        && each.getBoundingClientRect().right > innerWidth + 1).length"""
    assert opened.page.evaluate(outside) == 0


@plain
def test_the_tables_say_what_the_summary_says(opened: Opened) -> None:
    """Every figure in the percentile tables is that of summary.json, in the unit of its row."""
    checked = 0
    for row in opened.page.locator("#percentiles tbody tr").all():
        unit = {"s": 1.0, "ms": 1e3, "µs": 1e6}[str(row.locator("td").first.text_content()).strip()]
        for cell in row.locator("td[data-column]").all():
            figure = str(cell.get_attribute("data-column"))
            text = str(cell.evaluate("(each) => each.firstChild.textContent.trim()"))
            described = opened.summary.latencies[str(row.get_attribute("data-row"))]
            value = getattr(described, figure)
            if value is None:
                assert text == UNKNOWN + "*" * bool(described.n)  # the note below the table names the samples needed
            else:
                assert text == significant(value * unit, 4) + "*" * (figure in described.thin)
            checked += 1
    # The metrics of reasoning have no rows in a run without reasoning.
    rows = sum(described.n > 0 for described in opened.summary.latencies.values())
    assert rows == len(opened.summary.latencies) - sum(metric.optional for metric in METRICS.values())
    assert checked == rows * len(STATISTICS)
    assert opened.page.locator("#percentiles tbody tr").count() == rows


@plain
def test_the_headline_says_what_the_summary_says(opened: Opened) -> None:
    """The first screen has the throughput, the endings and the client's verdict, without scrolling."""
    rate = significant(opened.summary.throughput.output_tokens_per_s, 4)
    assert opened.page.locator(".card.main .value").inner_text() == rate
    for sentence in (findings.outcome_sentence(opened.summary), findings.client_sentence(opened.summary)):
        line = opened.page.get_by_text(sentence).first
        box: Any = line.bounding_box()
        assert box["y"] + box["height"] < 900


@pytest.mark.parametrize("opened", [("steady", 1600, "light")], indirect=True)
def test_what_is_in_no_figure_lies_in_the_shade(opened: Opened) -> None:
    """Over time, warm-up and filling are shaded up to where the window begins, and emptying from where it ends."""
    shapes = opened.page.evaluate("document.querySelector('#chart-course').layout.shapes.map(({x0, x1}) => [x0, x1])")
    window = opened.summary.window
    assert [shapes[0][1], shapes[1][0]] == [window.from_s, window.to_s]
    assert shapes[0][0] == pytest.approx(-3 * 0.51, abs=0.001)
    assert shapes[1][1] == pytest.approx(11.99 + 0.5, abs=0.1)
    assert opened.page.locator("#chart-course .shapelayer path").count() == 2


@plain
def test_a_burst_without_warm_up_has_no_shade(opened: Opened) -> None:
    """Everything is in the figures, so nothing is shaded."""
    assert opened.page.evaluate("document.querySelector('#chart-course').layout.shapes") == []


@troubled
def test_markup_from_a_server_changes_nothing(opened: Opened) -> None:
    """A script in a server's words is text on the page: the title stays, and no element was made of it."""
    assert opened.page.title().startswith("SIMULATED at 5 times speed: tgi 3.3.5")
    assert f"“{NASTY}”" in opened.page.locator("#failures .examples").inner_text()
    assert opened.page.locator("img, b").count() == 0
    assert opened.page.locator("#failures tr[data-row=in_band_error] td").first.inner_text() == "9"


@pytest.mark.parametrize("fresh", [("plain", 800, "dark", False)], indirect=True)
def test_the_page_follows_the_readers_colours(fresh: Opened) -> None:
    """Dark paper in the dark, light paper in the light, also when it changes; charts go along; paper is white."""
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "[...document.querySelectorAll('#chart-ttft_s .js-line')].at(-1).style.stroke"
    frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    assert fresh.page.evaluate(paper) == "rgb(20, 23, 27)"
    fresh.page.locator("#chart-ttft_s").scroll_into_view_if_needed()
    fresh.page.wait_for_selector("#chart-ttft_s .js-line", state="attached")
    assert fresh.page.evaluate(line) == "rgb(92, 184, 242)"
    fresh.page.emulate_media(color_scheme="light")
    fresh.page.locator("#chart-ttft_s").scroll_into_view_if_needed()
    fresh.page.evaluate(frames)
    assert fresh.page.evaluate(paper) == "rgb(255, 255, 255)"
    fresh.page.wait_for_function(f"{line} === 'rgb(0, 104, 168)'")
    fresh.page.emulate_media(color_scheme="dark")
    fresh.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert fresh.page.evaluate(paper) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("opened", [("troubled", 1600, "light"), ("troubled", 360, "dark")], indirect=True)
def test_text_stands_out_from_its_paper(opened: Opened) -> None:
    """Contrast of every colour used for text is at least 4.5 to 1 (WCAG 2.2, 1.4.3), in both schemes."""
    contrast = """() => {
      const luminance = (rgb) => rgb.map((each) => each / 255)
        .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
      const numbers = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const paper = luminance(numbers(getComputedStyle(document.body).backgroundColor));
      return ['.value', '.note', '.quiet', 'li.error', '.main .value', 'th', 'code'].map((each) => {
        const ink = luminance(numbers(getComputedStyle(document.querySelector(each)).color));
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      });
    }"""
    assert min(opened.page.evaluate(contrast)) >= 4.5


@pytest.mark.parametrize("fresh", [("plain", 1280, "light", False)], indirect=True)
def test_the_keyboard_reaches_everything(fresh: Opened) -> None:
    """Tab goes to the skip link first, then to every link, switch, detail and scrolling table, and focus is visible."""
    fresh.page.locator("#again .fold").first.evaluate("(fold) => (fold.open = true)")
    reached, places = [], []
    for _ in range(200):
        fresh.page.keyboard.press("Tab")
        focused = fresh.page.evaluate(
            "[document.activeElement.tagName, document.activeElement.className, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        if focused[0] == "BODY":
            break
        reached.append(focused)
        places.append(fresh.page.evaluate(PLACE))
    tags = [tag for tag, _, _ in reached]
    assert reached[0][:2] == ["A", "skip"]
    assert tags.count("A") == 1 + fresh.page.locator("nav a").count()
    assert tags.count("INPUT") == 2
    assert tags.count("SUMMARY") == fresh.page.locator("summary:visible").count()
    assert tags.count("BUTTON") == fresh.page.locator("button:visible").count()
    assert tags.count("DIV") == fresh.page.locator(".scroll:visible, .chart:visible").count()
    assert "PRE" in tags
    assert places == sorted(places)
    assert {outline for _, _, outline in reached} == {"solid"}


@pytest.mark.parametrize("fresh", [("plain", 1280, "light", False)], indirect=True)
def test_the_axis_switches_by_keyboard(fresh: Opened) -> None:
    """An arrow key on the switch turns all four latency axes logarithmic, with whole numbers on them."""
    fresh.page.locator("input[name=axis][value=linear]").focus()
    fresh.page.keyboard.press("ArrowRight")
    fresh.page.wait_for_function("[...document.querySelectorAll('#latency .chart')].every((each) => each.layout)")
    kinds = "[...document.querySelectorAll('#latency .chart')].map((each) => each.layout.xaxis.type)"
    assert fresh.page.evaluate(kinds) == ["log"] * 4
    labels = fresh.page.locator("#chart-ttft_s .xtick text").all_text_contents()
    assert labels == ["0.2", "0.5", "1", "2", "5"]


@plain
def test_a_charts_data_can_be_taken_away(opened: Opened) -> None:
    """The CSV of a chart has a header and one line per drawn point."""
    figure = opened.page.locator("figure", has=opened.page.locator("#chart-ttft_s"))
    figure.locator("details").evaluate("(each) => (each.open = true)")
    with opened.page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    path = download.value.path()
    lines = path.read_text("utf-8").splitlines()
    assert download.value.suggested_filename == "ttft_s.csv"
    assert lines[0] == '"run","ttft_s","share"'
    assert len(lines) == 1 + opened.page.evaluate("document.querySelector('#chart-ttft_s').data.at(-2).x.length")


@pytest.mark.parametrize("fresh", [("plain", 1024, "light", False)], indirect=True)
def test_only_what_is_looked_at_is_drawn(fresh: Opened) -> None:
    """The page opens with the charts in view; the others are drawn when the reader comes to them, or unfolds them.
    The names of the parts stay in view, and so few words stand there that they can be read."""
    page = fresh.page
    page.wait_for_selector("#chart-e2e_s .plot-container")
    assert page.locator("#chart-timeline .plot-container").count() == 0
    page.locator("#chart-timeline").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-timeline .plot-container")
    assert page.locator("#chart-sends .plot-container").count() == 0
    page.locator("#sending h2").click()
    page.wait_for_selector("#chart-sends .plot-container")
    page.locator("#sending h2").click()
    box: Any = page.locator("nav").bounding_box()
    assert box["y"] == 0
    page.evaluate("Report.drawAll()")
    assert page.locator("html").get_attribute("data-drawn") == "all"
    assert len(page.evaluate("document.body.innerText").split()) <= 900
    page.locator("#gaps h2").click()  # this chart was drawn without a width
    page.wait_for_function("document.querySelector('#chart-gaps .main-svg').clientWidth > 900")


@pytest.mark.parametrize("opened", [("troubled", 1600, "light")], indirect=True)
def test_the_first_screen_says_how_fast_whether_valid_and_what_failed(opened: Opened) -> None:
    """Throughput, the verdict and the most frequent failure, without scrolling."""
    for text in (
        "Output throughput",
        "Measurement invalid: the client was the limit",
        "9 with an error inside the stream",
    ):
        box: Any = opened.page.get_by_text(text).first.bounding_box()
        assert box["y"] + box["height"] < 900


@pytest.mark.parametrize("opened", [("steady", 1600, "light"), ("steady", 1024, "light")], indirect=True)
def test_the_first_screen_says_what_lies_outside_the_window(opened: Opened) -> None:
    """How many requests, and the slowest of them, without scrolling and within the page's width."""
    line = opened.page.get_by_text("50 of 1,200 requests outside the window; the slowest took 500 ms.").first
    box: Any = line.bounding_box()
    assert box["y"] + box["height"] < 900
    assert box["x"] + box["width"] <= opened.page.evaluate("document.documentElement.clientWidth")


@plain
def test_tails_have_an_axis_of_their_own(opened: Opened) -> None:
    """p50 and p99 are labelled, ITL is logarithmic, and by choice each further nine has the same height."""
    page = opened.page
    texts = page.locator("#chart-ttft_s .textpoint").all_text_contents()
    assert texts == ["p50", "p99"]
    assert page.evaluate("document.querySelector('#chart-itl_s').layout.xaxis.type") == "log"
    page.locator("input[value=tails]").check()
    labels = page.locator("#chart-itl_s .ytick text").all_text_contents()
    assert labels[:5] == ["0%", "50%", "90%", "99%", "99.9%"]
    page.locator("input[name=shares][value=linear]").check()


@pytest.mark.parametrize("opened", [("plain", 360, "dark")], indirect=True)
def test_a_wide_table_says_that_there_is_more(opened: Opened) -> None:
    """On a phone it scrolls, with a shadow at the end that hides something."""
    table = opened.page.locator("#percentiles .scroll").first
    assert table.evaluate("(each) => each.scrollWidth > each.clientWidth")
    assert table.evaluate("(each) => getComputedStyle(each).backgroundAttachment") == "local, local, scroll, scroll"


@pytest.mark.parametrize("opened", [("plain", 360, "dark")], indirect=True)
def test_every_view_can_be_looked_at(opened: Opened, tmp_path: Path) -> None:
    """A picture of each section, into the folder that REPORT_PICTURES names, or one of the test's own."""
    folder = Path(os.environ.get("REPORT_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    width = opened.page.viewport_size["width"] if opened.page.viewport_size else 0
    sections = opened.page.locator("main > section")
    for index in range(sections.count()):
        name = sections.nth(index).get_attribute("id")
        file = folder / f"{name}-{width}.png"
        sections.nth(index).screenshot(path=file)
        assert file.stat().st_size > 1000  # an empty section has fewer bytes
    assert sections.count() >= 11
