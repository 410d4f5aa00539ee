"""A real Chromium, and the reports that it opens from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request

from loadgen.analysis.frame import build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document, prepare_run
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.summary import Summary
from tests.support.chromium import chromium
from tests.support.runs import burst, failed, header, healthy, loop, part_of, run_of

NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests stay in one process: they share a browser and the pages that are open in it."""
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@dataclass
class Opened:
    """A report in the browser, and everything it tried to fetch or complained about."""

    page: Page
    summary: Summary
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """A report on disk and the summary it shows."""

    path: Path
    summary: Summary


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Gone with its module."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a burst of 1,000 on a real server that was asked how it was: all complete, one reading failed."""
    telemetry = [*healthy(), *(reading(second) for second in range(-1, 7))]
    return _written(tmp_path_factory.mktemp("plain"), burst(1000, 32), telemetry=telemetry)


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a burst on a simulated server whose words are hostile, with a client that did not keep up."""
    records = [*burst(100, 8), *(failed(200 + i, "in_band_error", NASTY) for i in range(9))]
    telemetry = healthy(stall_ns_max=2_000_000_000)
    return _written(tmp_path_factory.mktemp("troubled"), records, simulated=True, telemetry=telemetry, model=NASTY)


@pytest.fixture(scope="session")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a burst with two bounds on a known GPU. The server publishes its queue and prefill times."""
    folder = tmp_path_factory.mktemp("bounded")
    records = burst(300, 16)
    first = {"moment": "start"} | {
        f"{name}_s_{part}": 0 for name in ("queue", "prefill", "decode") for part in ("sum", "count")
    }
    last = {"moment": "end", "queue_s_sum": 300, "prefill_s_sum": 60, "decode_s_sum": 150}
    last |= {f"{name}_s_count": 300 for name in ("queue", "prefill", "decode")}
    telemetry = [
        *healthy(),
        *(Telemetry(source="server", at_ns=at, values=values) for at, values in ((0, first), (9 * 10**9, last))),
    ]
    run = run_of(folder / "run", records, telemetry=telemetry, plan=header(300).plan | {"gpu_model": "8 x H100"})
    summary, frame = part_of(run).summary, build_frame(records)
    summary.goodput = goodput(frame, parse_bounds(["ttft < 500ms", "tpot < 20ms"]))
    (folder / "report.html").write_text(render(page_document([prepare_run(run, frame, summary)])), encoding="utf-8")
    return Written(folder / "report.html", summary)


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One page of four runs, two of them of one server, one of them simulated."""
    folder, servers = tmp_path_factory.mktemp("many"), ("vllm", "tgi", "lightllm", "vllm")
    parts = [
        part_of(run_of(folder / f"{place}", burst(60, 8, seed=place), server=server, simulated=place == 2))
        for place, server in enumerate(servers)
    ]
    (folder / "report.html").write_text(render(page_document(parts)), encoding="utf-8")
    return Written(folder / "report.html", parts[0].summary)


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of an open loop with warm-up, measured in the window of its steady state."""
    plan = header(1200).plan | {"arrivals": "constant:100"}
    return _written(tmp_path_factory.mktemp("steady"), loop(1200, warmup=3), plan=plan)


@pytest.fixture(scope="module")
def shelf(browser: Browser) -> Iterator[dict[Any, Opened]]:
    """Reports that are open already: a page that only gets looked at is loaded once."""
    pages: dict[Any, Opened] = {}
    yield pages
    for each in pages.values():
        each.page.context.close()


@pytest.fixture
def opened(browser: Browser, shelf: dict[Any, Opened], request: pytest.FixtureRequest) -> Opened:
    """A report to look at, not to change; `indirect` says which, how wide, and in which colour scheme."""
    if request.param not in shelf:
        name, width, scheme = request.param
        shelf[request.param] = _opened(browser, request.getfixturevalue(name), width, scheme)
    return shelf[request.param]


@pytest.fixture
def fresh(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """A report opened in a window of its own, to do anything with; `indirect` as for `opened`, and False where no chart
    is waited for."""
    name, width, scheme, *drawn = request.param
    found = _opened(browser, request.getfixturevalue(name), width, scheme, *drawn)
    yield found
    found.page.context.close()


def _opened(browser: Browser, written: Written, width: int, scheme: Any, drawn: bool = True) -> Opened:
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
    if drawn:
        page.evaluate("Report.drawAll()")
    return found


def reading(second: int) -> Telemetry:
    """What a server says at this second of its run; nothing at the third."""
    values: dict[str, Any] = {"moment": "run", "running": 128, "waiting": max(0, 800 - 130 * second), "kv_used": 0.5}
    return Telemetry(source="server", at_ns=second * 10**9, values={"gap": "timeout"} if second == 3 else values)


def _written(folder: Path, records: list[Any], *, model: str = "", **changes: Any) -> Written:
    run = run_of(folder / "run", records, **changes)
    if model:
        run.header.server["model"] = model
    part = part_of(run)
    (folder / "report.html").write_text(render(page_document([part])), encoding="utf-8")
    return Written(folder / "report.html", part.summary)
