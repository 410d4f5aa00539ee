"""The charts of the parts of latency and of the bounds of each request, in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Opened, Written

widths = pytest.mark.parametrize("opened", [("bounded", 1600, "light"), ("bounded", 360, "dark")], indirect=True)


@widths
def test_the_time_of_slow_requests_is_divided_into_parts(opened: Opened) -> None:
    """Each group of requests is a stacked bar with its total, and the server's own means are the last bar."""
    chart = opened.page.locator("#chart-parts")
    groups = [text.strip() for text in chart.locator(".ytick text").all_text_contents()]
    assert sorted(groups) == sorted(["fastest 50%", "p50 to p90", "p90 to p99", "slowest 1%", "server's mean"])
    assert chart.locator(".legendtext").all_text_contents() == [
        "TTFT",
        "decode",
        "stalls",
        "queue",
        "prefill",
    ]
    assert "1.7 s" in [text.strip() for text in chart.locator(".textpoint").all_text_contents()]
    folded = opened.page.locator("figure", has=chart).locator("details").text_content()
    means = "The server's mean of 300 requests: 1.00 s in the queue, 200 ms in prefill, 500 ms in decode"
    assert means in str(folded)
    assert opened.complaints == []


@widths
def test_both_bounds_are_drawn_with_the_share_on_each_side(opened: Opened) -> None:
    """Two dashed lines divide the chart, each corner says its share of the requests, and no label covers another."""
    chart = opened.page.locator("#chart-bounds")
    assert chart.locator(".shapelayer path").count() == 2
    labels = chart.locator(".annotation text")
    texts = labels.all_text_contents()
    assert [text.split("%")[1] for text in texts] == [
        "meet both bounds",
        "TTFT too long",
        "TPOT too long",
        "both too long",
    ]
    assert sum(float(text.split("%")[0]) for text in texts) == pytest.approx(100, abs=0.2)
    boxes: list[Any] = [label.bounding_box() for label in labels.all()]
    for one, other in ((0, 1), (2, 3)):
        assert boxes[one]["x"] + boxes[one]["width"] < boxes[other]["x"]


@widths
def test_the_hardware_limit_is_a_bar_per_figure(opened: Opened) -> None:
    """The width of each bar is the share that its text states, and the bars are visible."""
    bars = opened.page.locator("#answer .bullets dl > div")
    assert [text.split("\n")[0] for text in bars.all_inner_texts()] == ["Output throughput", "Mean TPOT", "Mean TTFT"]
    for bar in bars.all():
        whole: Any = bar.locator(".whole").bounding_box()
        part: Any = bar.locator(".part").bounding_box()
        share = float(bar.locator("span").inner_text().split("%")[0]) / 100
        assert part["width"] / whole["width"] == pytest.approx(share, abs=0.01)
        assert whole["width"] > 90


def test_a_page_without_bounds_has_no_scatter(plain: Written) -> None:
    """Requests are compared with bounds only if the run has bounds."""
    assert 'id="chart-bounds"' not in Path(plain.path).read_text("utf-8")
