"""Locust's page with our part of it, in a real browser: turned up while it runs, stopped, and its report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from tests.support.command import loadgen
from tests.support.ui import Ui, page

FIGURES = ("p50", "p90", "p95", "p99", "mean", "max")


def test_a_run_by_hand_from_start_to_report(browser: Browser, tmp_path: Path) -> None:
    """20 users, then 100 while it runs, stop, report: the page's figures are those of `loadgen report` on the run, and
    nothing was asked of any other machine."""
    config = SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.02)
    with spawn(config) as url, page(tmp_path, "--server", "vllm", "--url", url) as ui:
        _refuses_other_pages_and_bad_forms(ui, url)
        context = browser.new_context(viewport={"width": 1600, "height": 1000}, accept_downloads=True)
        opened = context.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(ui.url)
        assert "SIMULATED" in opened.inner_text("#loadgen-facts")
        _form_is_complete(opened)
        _fill(opened, users=20, inputTokens=16, outputTokens=60)
        assert _found_by_axe(opened) == []
        assert not _advertised(opened)
        opened.get_by_role("button", name="Start").click()
        _until(lambda: _cell(opened, "ttft_s", "n") > 20)
        opened.get_by_role("button", name="Edit").click()
        assert _found_by_axe(opened) == []
        assert not _advertised(opened)
        opened.fill('input[name="userCount"]', "100")
        opened.fill('input[name="spawnRate"]', "100")
        opened.get_by_role("button", name="Update").click()
        _until(lambda: ui.live()["run"]["requests"]["users"] == 100)
        _until(lambda: len(opened.query_selector_all("#loadgen svg path[d*=L]")) >= 4)
        _until(lambda: "100" in opened.locator("#loadgen svg .users").all_text_contents())
        assert opened.locator("#loadgen svg .users").first.text_content() == "20 users"
        _until(lambda: "Average size (tokens)" in opened.inner_text("#root"))
        _accessible_everywhere(opened)
        _exact_latencies_come_first(opened)
        opened.get_by_role("button", name="Stop").click()
        _until(lambda: ui.live()["run"]["ended"])
        live = ui.live()["run"]
        _of_each_span(opened, live)
        _until(lambda: _failures_in_the_head(opened) == "0%")
        _until(lambda: all(_cell(opened, row["name"], "n") == row["n"] for row in live["latency"]))
        shown = {row["name"]: {name: _cell(opened, row["name"], name) for name in FIGURES} for row in live["latency"]}
        with opened.expect_download() as download:
            opened.click("#loadgen-report")
        download.value.save_as(tmp_path / "report.html")
        context.close()
    assert not complaints
    assert all(address.startswith((ui.url, "data:")) for address in asked), asked
    _equals_the_report(tmp_path, shown, live)
    _adds_up(tmp_path, live)
    assert "llama-2-7b" in (tmp_path / "report.html").read_text()


def _found_by_axe(opened: Page) -> list[str]:
    """What the rules of axe-core find, of any weight."""
    opened.wait_for_timeout(500)  # colours begin to fade
    opened.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")
    found = Axe().run(opened).response["violations"]
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


def _accessible_everywhere(opened: Page) -> None:
    """At three widths, light and dark, nothing is found, and our section is as wide as the window."""
    for scheme in ("dark", "light"):
        opened.evaluate(f"localStorage.theme = '{scheme}'")
        opened.reload()
        opened.wait_for_selector("header")  # Locust's part, whose theme ours follows
        opened.wait_for_selector(f"#loadgen{'.dark' if scheme == 'dark' else ':not(.dark)'} #loadgen-latency")
        for width in (360, 1024, 1600):
            opened.set_viewport_size({"width": width, "height": 1000})
            assert _found_by_axe(opened) == [], (width, scheme)
            assert opened.evaluate("document.getElementById('loadgen').scrollWidth") <= width


def _form_is_complete(opened: Page) -> None:
    """The default output length is filled in. No label is cut off: the help of an option is below its input."""
    opened.wait_for_selector('input[name="outputTokens"][aria-describedby]')
    assert opened.locator('input[name="outputTokens"]').input_value() == "128"
    label = opened.locator('label:has-text("Output Tokens")')
    assert label.text_content() == "Output Tokens"
    assert label.evaluate("(label) => label.scrollWidth <= label.clientWidth")
    help_id = opened.locator('input[name="outputTokens"]').get_attribute("aria-describedby")
    assert "max:" in (opened.locator(f"[id='{help_id}']").text_content() or "")


def _exact_latencies_come_first(opened: Page) -> None:
    """The only table with exact latencies is above Locust's tables. The server's queue and KV cache are charts. At 1024
    pixels no button of Locust's head and no tab is cut off."""
    assert opened.locator("table", has_text="Time to first token").count() == 1
    # Locust replaces its head when the window changes, and the section returns to its place within a second.
    _until(lambda: opened.evaluate("document.querySelector('#root header')?.nextElementSibling?.id") == "loadgen")
    titles = opened.locator("#loadgen figure h3").all_text_contents()
    assert {"Requests in the server, requests", "KV cache in use, %"} <= {*titles}
    opened.set_viewport_size({"width": 1024, "height": 1000})
    for element in opened.locator("#root header button:visible, #root [role=tab]:visible").all():
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1024


def _advertised(opened: Page) -> bool:
    """Whether any link that can be seen leads to another company's service."""
    return any(each.is_visible() for each in opened.locator("a[href*='aka.ms'], a[href*='cloud']").all())


def _of_each_span(opened: Page, live: dict[str, Any]) -> None:
    """The choice changes what the table is of: the last seconds, the level of 100 users, the whole run."""
    whole = next(row["n"] for row in live["latency"] if row["name"] == "ttft_s")
    seen = {}
    for name, words in (("last", "the last 10 s"), ("level", "there were 100 users"), ("run", "the whole run")):
        opened.check(f"#loadgen input[value={name}]")
        _until(lambda words=words: words in opened.inner_text("#loadgen-part-latency h2"))  # type: ignore[misc]
        seen[name] = _cell(opened, "ttft_s", "n")
    assert 0 < seen["level"] < seen["run"] == whole
    assert 0 < seen["last"] < whole


def _failures_in_the_head(opened: Page) -> str:
    """What Locust's own head says: requests cut off by the stop are none of its failures."""
    return opened.locator("header").get_by_text("Failures").locator("xpath=..").inner_text().split()[-1]


def _refuses_other_pages_and_bad_forms(ui: Ui, url: str) -> None:
    """Another origin, another host name and a form that cannot be run are refused, and nothing is started."""
    for header in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(HTTPError) as refusal:
            urlopen(Request(f"{ui.url}/stats/requests", headers=header), timeout=20)
        assert refusal.value.code == 403
        refusal.value.close()
    form = {"user_count": 1, "spawn_rate": 1, "input_tokens": "many", "host": url}
    with urlopen(f"{ui.url}/swarm", data=urlencode(form).encode(), timeout=20) as answer:
        told = json.load(answer)
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert told["success"] is False
    assert "--input-tokens many" in told["message"]
    assert ui.live()["run"] is None


def _equals_the_report(folder: Path, shown: dict[str, dict[str, float]], live: dict[str, Any]) -> None:
    """To the nanosecond for each percentile that the report gives, and the same verdict on the client."""
    done = loadgen(folder, "report", "run", "--json")
    summary: dict[str, Any] = json.loads(done.stdout)
    assert live["client"]["reasons"] == summary["client"]["reasons"]
    for metric, figures in shown.items():
        for name, value in figures.items():
            assert value == pytest.approx(summary["latency"][metric][name], abs=1.5e-9), (metric, name)


def _adds_up(folder: Path, live: dict[str, Any]) -> None:
    """Every request that was sent has a Record; those cut off by the stop are failures of their own kind."""
    run = runfile.read(folder / "run")
    assert run.footer is not None
    assert run.footer.sent == len(run.records) == run.footer.complete + run.footer.failed
    assert {(record.prompt_tokens_asked, record.output_tokens_asked) for record in run.records} == {(16, 60)}
    assert run.footer.complete == live["requests"]["complete"]
    assert {record.error_kind for record in run.records if record.state == "failed"} <= {"cancelled"}
    assert live["failures"] == []
    assert live["requests"]["failed"] == 0
    assert live["requests"]["cut_off"] == run.footer.failed > 0


def _fill(opened: Page, *, users: int, **fields: int) -> None:
    """The start form, with our fields unfolded under Locust's."""
    opened.fill('input[name="userCount"]', str(users))
    opened.fill('input[name="spawnRate"]', str(users))
    for name, value in fields.items():
        opened.locator(f'input[name="{name}"]').fill(str(value))


def _cell(opened: Page, metric: str, figure: str) -> float:
    """A figure of the table of latencies; of seconds the exact ones that are behind the milliseconds shown."""
    cell = opened.query_selector(f'#loadgen-latency tr[data-metric="{metric}"] td[data-figure="{figure}"]')
    if cell is None:
        return 0
    text = cell.inner_text() if figure == "n" else cell.get_attribute("data-seconds")
    return float((text or "0").replace(",", ""))


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)
