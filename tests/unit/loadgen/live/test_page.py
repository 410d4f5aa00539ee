"""The live page: its server, its events, and the saved page."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.engine.client_health import LiveCounters
from loadgen.errors import OutputError, PlanError
from loadgen.live.page import LivePage, open_page, render
from loadgen.live.snapshot import LiveSnapshot, PlannedEnd
from loadgen.servers import lifeline

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def page() -> Iterator[LivePage]:
    """A live page that shows one run."""
    with open_page(0) as live_page:
        live_page.begin(PlannedEnd(requests=10))
        live_page.name("vllm 0.32.0 at http://127.0.0.1:8000")
        yield live_page


def get(page: LivePage, path: str, **headers: str) -> httpx.Response:
    """Send a GET request to the page's server, and return the response."""
    return httpx.get(page.url.rstrip("/") + path, headers=headers, timeout=10, trust_env=False)


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the data of each server-sent event in the lines of a response."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_events_are_the_history_and_then_each_snapshot_until_the_end() -> None:
    """A page that is opened late gets the earlier snapshots. All pages learn that the run has ended."""
    with ExitStack() as stack:
        with open_page(0) as page:
            page.begin(PlannedEnd(requests=10))
            page.name("first line")
            page.name("later lines do not change the title")
            page.show("running", LiveCounters(sent=1))
            while not (messages := get(page, "/live.html").text.count('"elapsed_s"')):
                pass
            assert messages == 1
            response = stack.enter_context(httpx.stream("GET", f"{page.url}events", timeout=10, trust_env=False))
            stream = events(response.iter_lines())
            name, run = next(stream)
            assert (name, run["title"], run["snapshots"][0]["sent"]) == ("run", "first line", 1)
            page.show("ended", LiveCounters(sent=2))
            name, snapshot = next(stream)
            assert (name, snapshot["sent"]) == ("snapshot", 2)
        assert [name for name, _ in stream] == ["end"]


def test_the_page_is_only_for_this_machine(page: LivePage) -> None:
    """The page allows no frames and no foreign scripts, and another host name is refused (DNS rebinding)."""
    response = get(page, "/")
    policy = response.headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
    html = response.text
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert html.count(f'nonce="{nonce}"') == html.count("<script") + html.count("<style")
    assert get(page, "/", Host="evil.example").status_code == 403
    assert get(page, "/etc/passwd").status_code == 404
    assert page.url.startswith("http://127.0.0.1:")


def test_a_used_port_is_an_error_with_a_remedy() -> None:
    """The command ends before anything is sent."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(PlanError, match=f"--live cannot use port {port}: Address already in use") as failure:
            open_page(port).__enter__()
    assert "--live-port" in (failure.value.hint or "")
    with pytest.raises(PlanError, match="--live cannot use port 99999"):
        open_page(99_999).__enter__()


def test_the_saved_page_needs_no_server_and_escapes_text(page: LivePage, tmp_path: Path) -> None:
    """The whole history is in one file. Text from a server cannot end the script element."""
    page.begin(PlannedEnd(requests=10))
    page.name(HOSTILE)
    page.show("ended", LiveCounters(sent=10, complete=10))
    html = page.save(tmp_path).read_text("utf-8")
    data = json.loads(re.findall(r'type="application/json" id="data">(.*?)</script>', html)[0])
    assert (data["title"], data["live"], data["snapshots"][-1]["complete"]) == (HOSTILE, False, 10)
    assert html.count("<script") == 2
    with pytest.raises(OutputError, match="cannot write"):
        page.save(tmp_path / "missing")


def test_a_browser_that_does_not_read_delays_nothing(page: LivePage) -> None:
    """A message that does not fit into the pipe is dropped, so the run never waits for its page."""
    for _ in range(5_000):
        page._send({"note": "x" * 1_000})


def test_the_server_ends_with_the_command() -> None:
    """No process and no registered pipe is left behind."""
    before = list(lifeline._open)
    with open_page(0) as page:
        process = page._process
    assert process.poll() == 0
    assert lifeline._open == before


def test_an_empty_history_is_a_page() -> None:
    """A run that was interrupted before its first snapshot can be saved."""
    assert "<h1" in render("", [])
    assert "0.5" in render("", [LiveSnapshot(elapsed_s=0.5, phase="ended")])
