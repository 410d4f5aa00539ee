"""The live page in a browser: it follows a run, and its saved form shows the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from loadgen.engine.client_health import LiveCounters
from loadgen.live.page import LivePage, open_page
from loadgen.live.snapshot import PlannedEnd

HOSTILE = "<img src=x onerror=\"document.title='owned'\">vllm"


def counters(complete: int, failed: int = 0) -> LiveCounters:
    """Return the counters of a run of 100 requests."""
    counts = LiveCounters(sent=100, streaming=7, complete=complete, failed=failed, tokens_per_s=1234.0)
    counts.ttft.add(0.25e9)
    counts.tpot.add(31e6)
    counts.set_server_gauges({"running": 90, "waiting": 3, "kv_used": 0.5})
    return counts


@pytest.fixture
def live() -> Iterator[LivePage]:
    """A live page that shows a run of 100 requests."""
    with open_page(0) as live_page:
        live_page.begin(PlannedEnd(requests=100))
        live_page.name(HOSTILE)
        live_page.show("running", counters(10))
        yield live_page


def open_in(browser: Browser, url: str, width: int = 1024, scheme: str = "light") -> tuple[Page, list[str]]:
    """Open a page, and return it with a list to which its errors are added."""
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    return page, errors


def tile(page: Page, name: str) -> str:
    """Return the text of a tile: its value and its note."""
    return page.locator("#tiles > div", has=page.locator(f"dt:text-is('{name}')")).locator("dd").inner_text()


def test_the_page_follows_the_run_until_it_ends(browser: Browser, live: LivePage, tmp_path: Path) -> None:
    """Tiles and charts show the latest figures without a reload, and a failure is visible at once."""
    page, errors = open_in(browser, live.url)
    expect(page.locator("#state")).to_have_text("running")
    assert tile(page, "Ended").startswith("10 of 100")
    live.show("ended", counters(98, failed=2))
    expect(page.locator("#state")).to_have_text("ended")
    assert tile(page, "Ended").startswith("100 of 100")
    assert tile(page, "Incomplete").replace("\n", " ").strip() == "2 2 failed"
    assert tile(page, "TTFT p50").startswith("25")
    assert "90 running" in tile(page, "Waiting")
    assert page.locator("figure").count() == 6
    labels = [figure.get_attribute("aria-label") for figure in page.locator("svg").all()]
    assert "Incomplete requests. Latest: incomplete 2." in labels
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title() != "owned"
    saved, saved_errors = open_in(browser, live.save(tmp_path).as_uri())
    assert saved.locator("#tiles").inner_text() == page.locator("#tiles").inner_text()
    assert saved.locator("figure").count() == 6
    assert errors == saved_errors == []


@pytest.mark.parametrize("width", [360, 1024, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_at_every_width(browser: Browser, live: LivePage, width: int, scheme: str) -> None:
    """Nothing is cut off at the side, and axe has no findings."""
    page, _ = open_in(browser, live.url, width, scheme)
    expect(page.locator("figure").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


def test_the_page_says_when_the_command_is_gone(browser: Browser) -> None:
    """The last figures stay on the screen after the end."""
    with open_page(0) as live_page:
        live_page.begin(PlannedEnd(requests=100))
        live_page.name("vllm")
        live_page.show("running", counters(10))
        page, _ = open_in(browser, live_page.url)
        expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#foot")).to_have_text("The run has ended.")
    assert tile(page, "Ended").startswith("10 of 100")
