"""A real Chromium, and the reports that it opens from disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

from analysis.report.page import render
from tests.runs import burst, failed, header, healthy, loop, part_of, run_of

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@dataclass
class Opened:
    """A report in the browser, and everything it tried to fetch or complained about."""

    page: Page
    summary: dict[str, Any]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """A report on disk and the summary it shows."""

    path: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, else Playwright's own. Gone with its module: while it is there, Playwright's event loop
    runs in this thread, and a test that is a coroutine could not."""
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        except Error as error:
            pytest.fail(
                f"These tests need Chromium: sudo apt-get install chromium, or playwright install chromium. ({error})"
            )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a burst of 1,000 on a real server, all complete."""
    return _written(tmp_path_factory.mktemp("plain"), burst(1000, 32))


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a burst on a simulated server whose words are hostile, with a client that did not keep up."""
    records = [*burst(100, 8), *(failed(200 + i, "in_band_error", NASTY) for i in range(9))]
    telemetry = healthy(stall_ns_max=2_000_000_000)
    return _written(tmp_path_factory.mktemp("troubled"), records, simulated=True, telemetry=telemetry, model=NASTY)


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of an open loop with warm-up, measured on its plateau."""
    plan = header(400).plan | {"arrivals": "constant:100"}
    return _written(tmp_path_factory.mktemp("steady"), loop(warmup=3), plan=plan)


@pytest.fixture
def opened(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """A report opened in a window of its own; `indirect` says which report, how wide, and in which colour scheme."""
    name, width, scheme = request.param
    written: Written = request.getfixturevalue(name)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    found = Opened(page, written.summary)

    def on_request(asked: Request) -> None:
        found.requests.append(asked.url)

    def on_console(message: ConsoleMessage) -> None:
        found.complaints.append(message.text)

    page.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.goto(written.path.as_uri())
    page.wait_for_selector("#chart-sends .plot-container")
    yield found
    context.close()


def _written(folder: Path, records: list[Any], *, model: str = "", **changes: Any) -> Written:
    run = run_of(folder / "run", records, **changes)
    if model:
        run.header.server["model"] = model
    part = part_of(run)
    (folder / "report.html").write_text(render([part]), encoding="utf-8")
    return Written(folder / "report.html", dict(part.summary))
