"""The pages of `loadgen hardware compare` and `loadgen hardware bounds` in Chromium, offline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.command import in_process

WIDTHS = (360, 1024, 1600)


@contextmanager
def opened(browser: Browser, folder: Path, words: list[str]) -> Iterator[Page]:
    """Open the page of a command with every chart drawn. There must be no error on it."""
    assert in_process(folder, "hardware", *words, "--page", "page.html")[0] == 0
    with browser.new_context(offline=True) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((folder / "page.html").as_uri())
        page.evaluate("Report.drawAll()")
        yield page
        assert errors == []


def test_each_factor_is_a_bar(browser: Browser, tmp_path: Path) -> None:
    """A bar begins where the one above it ends, and the last one ends at the speed-up of the step."""
    with opened(browser, tmp_path, ["compare", "A100", "H100", "B200", "--model", "llama-3.1-8b"]) as page:
        assert page.locator("h1").inner_text().startswith("From A100-80GB SXM to B200 SXM: ")
        expect(page.locator(".chart")).to_have_count(2)
        for step in (0, 1):
            *bars, labels = page.evaluate(
                f"document.querySelector('#chart-factors-{step}').data.map(({{ x, y }}) => [x, y])"
            )
            ends = {}
            for xs, ys in bars:
                for index in range(0, len(xs), 3):
                    ends[ys[index]] = xs[index], xs[index + 1]
            names = labels[1]
            assert set(ends) == set(names)
            assert ends[names[0]][0] == pytest.approx(1)
            for before, after in pairwise(names):
                assert ends[after][0] == pytest.approx(ends[before][1])
        expect(page.get_by_text("not validated").first).to_be_visible()


def test_the_grid_has_a_cell_per_kernel_and_gpu(browser: Browser, tmp_path: Path) -> None:
    """Words say what binds, so the colours are not needed. Compute and memory have different colours."""
    with opened(
        browser, tmp_path, ["bounds", "--gpus", "A100,H100", "--model", "llama-2-13b", "--input", "200"]
    ) as page:
        rows = page.evaluate(
            "document.querySelector('#chart-grid-prefill').data.map(({ text, marker, x }) => [text, marker.color, x])"
        )
        assert len(rows) == 6
        texts, colours, gpus = rows[0]
        assert gpus == ["A100", "H100"]
        assert [text.partition("<br>")[0] for text in texts] == ["compute", "memory"]
        assert len({colour[:7] for colour in colours}) == 2
        shares = page.evaluate("document.querySelector('#chart-shares-decode').data.map(({ x }) => x)")
        assert [sum(column) for column in zip(*shares, strict=True)] == [pytest.approx(1), pytest.approx(1)]


@pytest.mark.parametrize(
    "words",
    [["compare", "A100", "B200", "--for", "training"], ["bounds"], ["bounds", "--for", "training"]],
    ids=["compare", "bounds", "training"],
)
def test_no_width_is_too_narrow(browser: Browser, tmp_path: Path, words: list[str]) -> None:
    """The page does not scroll to the side, and the words of every cell stay in the chart."""
    with opened(browser, tmp_path, words) as page:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("Report.drawAll()")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            outside = page.evaluate(
                """[...document.querySelectorAll('.chart')].filter((chart) => {
                    const frame = chart.getBoundingClientRect();
                    return [...chart.querySelectorAll('.ytick text, .bartext')].some((label) => {
                        const { left, right } = label.getBoundingClientRect();
                        return left < frame.left - 1 || right > frame.right + 1;
                    });
                }).map(({ id }) => id)"""
            )
            assert outside == [], width
