"""The section "Over time" in a real Chromium: one column of panels with a shared time axis, and the heat map."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator

from loadgen.analysis.run.runfile import Telemetry
from tests.browser.conftest import Opened, Written, _written
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, failed, header, healthy, rejected

FAILURES_S = (30.5, 41.25, 41.75)
CHART = "document.querySelector('#chart-course')"
wide = pytest.mark.parametrize("opened", [("eventful", 1600, "light")], indirect=True)
both_widths = pytest.mark.parametrize(
    "opened", [("eventful", 1600, "light"), ("eventful", 360, "dark"), ("plain", 360, "light")], indirect=True
)


@pytest.fixture(scope="session")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of 90 s with one request a second, in which two requests failed and one was rejected."""
    records = [
        complete(n, [n * 1000 * MS + (100 + n) * MS, n * 1000 * MS + 900 * MS], sent_ns=n * 1000 * MS)
        for n in range(90)
    ]
    for number, at_s in enumerate(FAILURES_S[:2]):
        records.append(failed(200 + number, sent_ns=int(at_s * 1e9) - 10 * MS, end_ns=int(at_s * 1e9)))
    records.append(rejected(202, sent_ns=int(FAILURES_S[2] * 1e9) - 10 * MS, end_ns=int(FAILURES_S[2] * 1e9)))
    telemetry = [*healthy(90), *(_reading(second) for second in range(91))]
    plan = header(93).plan | {"arrivals": "constant:1"}
    return _written(tmp_path_factory.mktemp("eventful"), records, telemetry=telemetry, plan=plan)


def _reading(second: int) -> Telemetry:
    """Return a reading of a server that never preempts a request."""
    values = {"moment": "run", "running": 5, "waiting": second % 3, "kv_used": 0.25, "preemptions": 0}
    return Telemetry(source="server", at_ns=second * 10**9, values=values)


def _titles(opened: Opened) -> list[str]:
    """Return the titles of the panels, from the top to the bottom."""
    annotations = opened.page.evaluate(f"{CHART}.layout.annotations.map(({{text, y}}) => [y, text])")
    return [text.removeprefix("<b>").removesuffix("</b>") for _, text in sorted(annotations, reverse=True)]


@wide
def test_load_queue_and_latency_are_one_column(opened: Opened) -> None:
    """Every panel has the same time axis. The latencies follow the server's queue and its KV cache."""
    assert _titles(opened) == [
        *("requests/s", "output tokens/s", "requests in flight", "requests at the server", "KV cache, %"),
        *("TTFT, ms", "TPOT, ms", "E2E, ms", "not complete/s"),
    ]
    assert opened.page.evaluate(f"{CHART}.data.every(({{xaxis}}) => !xaxis || xaxis === 'x')")
    assert opened.page.evaluate(f"Object.keys({CHART}.layout).filter((name) => name.startsWith('xaxis'))") == ["xaxis"]
    low, high = opened.page.evaluate(f"{CHART}.layout.xaxis.range")
    assert -2 < low <= 0
    assert 89 < high < 92


@wide
def test_the_pointer_reads_every_panel_at_one_time(opened: Opened) -> None:
    """A line crosses all panels at the pointer, and each panel shows its values there."""
    chart = opened.page.locator("#chart-course")
    chart.scroll_into_view_if_needed()
    opened.page.evaluate(f"Plotly.Fx.hover({CHART}, {{xval: 30}}, ['xy', 'xy2', 'xy6'])")
    opened.page.wait_for_selector("#chart-course .hoverlayer .hovertext", state="attached")
    texts = " | ".join(chart.locator(".hoverlayer .hovertext").all_text_contents())
    for part in (
        "requests/s sent",
        "output tokens/s",
        "in flight",
        "KV cache in use",
        "TTFT p50",
        "TPOT p99",
        "E2E p50",
    ):
        assert part in texts
    layout = opened.page.evaluate(
        f"(({{hovermode, hoversubplots, xaxis}}) => [hovermode, hoversubplots, xaxis.spikemode])({CHART}.layout)"
    )
    assert layout == ["x", "axis", "across"]
    box: Any = chart.locator(".nsewdrag").nth(2).bounding_box()
    opened.page.mouse.move(box["x"] + 300, box["y"] + 20)
    opened.page.mouse.move(box["x"] + 305, box["y"] + 22)
    line = chart.locator(".spikeline").first
    line.wait_for(state="attached")
    heights = [float(str(line.get_attribute(end))) for end in ("y1", "y2")]
    whole: Any = chart.bounding_box()
    assert abs(heights[0] - heights[1]) > 0.9 * whole["height"] - 60
    opened.page.mouse.move(0, 0)


@wide
def test_each_failure_is_marked_in_every_panel_in_the_colour_of_failures(opened: Opened) -> None:
    """Marks stand on the baselines at the ends of the requests that did not complete; the lowest panel counts them. All
    marks are one line, which is fast to draw."""
    bad = opened.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad').trim()")
    traces = opened.page.evaluate(f"{CHART}.data.map(({{name, x, y, line}}) => ({{name, x, y, line: line?.color}}))")
    [marks] = [trace for trace in traces if trace["name"] == "not complete"]
    panels = len(_titles(opened))
    assert marks["line"] == bad
    assert marks["x"] == [at for _ in range(panels) for failure in FAILURES_S for at in (failure, failure, None)]
    bottoms = opened.page.evaluate(
        f"Object.entries({CHART}.layout).filter(([name, {{overlaying}}]) => /^yaxis/.test(name) && !overlaying)"
        ".map(([, {domain}]) => domain[0])"
    )
    assert sorted(set(marks["y"][::9])) == sorted(bottoms)
    assert all(top > bottom for bottom, top in zip(marks["y"][::3], marks["y"][1::3], strict=True))
    lines = {trace["name"]: trace for trace in traces if trace["name"] in ("failed", "rejected")}
    assert {line["line"] for line in lines.values()} == {bad}
    assert [sum(value > 0 for value in lines[name]["y"]) for name in ("failed", "rejected")] == [2, 1]


@wide
def test_a_figure_that_was_always_zero_is_named_and_not_drawn(opened: Opened) -> None:
    """No line, legend or panel shows preemptions that never happened; the caption says that there were none."""
    names = opened.page.evaluate(f"{CHART}.data.map(({{name}}) => name)")
    assert not any("reemption" in name for name in names)
    assert "Always 0, so not drawn: preemptions since the start." in str(
        opened.page.locator("#course details.data").first.text_content()
    )


def _boxes(texts: Locator) -> list[tuple[str, float, float, float, float]]:
    boxes = []
    for text in texts.all():
        box = text.bounding_box()
        if box and box["width"]:
            boxes.append(
                (str(text.text_content()), box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"])
            )
    return boxes


@both_widths
def test_no_text_of_a_panel_covers_another(opened: Opened) -> None:
    """Titles, legends and numbers of the axes do not overlap, and no title is cut off."""
    chart = opened.page.locator("#chart-course")
    boxes = _boxes(chart.locator(".annotation text, .legendtext, [class$=tick] text"))
    assert set(_titles(opened)) <= {box[0] for box in boxes}
    overlaps = [
        (one[0], other[0])
        for index, one in enumerate(boxes)
        for other in boxes[index + 1 :]
        if min(one[3], other[3]) - max(one[1], other[1]) > 1 and min(one[4], other[4]) - max(one[2], other[2]) > 3
    ]
    assert overlaps == []
    whole: Any = chart.bounding_box()
    assert [box[0] for box in boxes if box[1] < whole["x"] or box[3] > whole["x"] + whole["width"] + 1] == []


@wide
def test_the_heat_map_has_round_ticks_and_a_colour_scale(opened: Opened) -> None:
    """Ticks are 1, 2 or 5 times a power of ten or evenly spaced; a scale says what a colour stands for; Plotly writes
    no warning."""
    heat = opened.page.locator("#chart-heat")
    assert heat.locator(".ytick text").all_text_contents() == ["100 ms", "120 ms", "140 ms", "160 ms", "180 ms"]
    assert opened.page.evaluate("document.querySelector('#chart-heat').layout.xaxis.range") == [0, 90]
    assert heat.locator(".ytitle").text_content() == "TTFT"
    assert heat.locator(".colorbar").count() == 1
    assert heat.locator(".cbtitle").text_content() == "requests"
    assert opened.complaints == []
