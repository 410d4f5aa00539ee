"""The Python API: a run from a script, a thread, a running event loop or a notebook gives what the command gives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadgen
from loadgen import Plan, compare, read, run, run_async, simulated
from loadgen.analysis.run import runfile
from loadgen.analysis.run.errors import RunFileError
from loadgen.errors import OutputError, PlanError
from loadgen.servers.errors import UnreachableError, WrongServerError
from tests.support.command import ROOT, in_process

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
LONG = {"arrivals": "constant:20", "n": None, "duration_s": 60.0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A simulated vLLM."""
    with simulated("vllm", ttft_s=0.02, itl_s=0.005) as found:
        yield found


def plan(url: str, **more: Any) -> Plan:
    return Plan(**{"server": "vllm", "url": url, "n": 8, "input_tokens": 16, "output_tokens": 6} | more)


def test_a_run_gives_its_figures(url: str, tmp_path: Path) -> None:
    """Every request is in them; callbacks hear each step and the counts; the files are those of the command."""
    said: list[str] = []
    seen: list[tuple[str, int]] = []
    result = run(
        plan(url, label="mine"),
        out=tmp_path / "run",
        say=said.append,
        progress=lambda phase, counts: seen.append((phase, counts.complete)),
        objectives=["complete >= 100%"],
        goodput=["ttft < 10s"],
    )
    summary = result.summary
    assert (summary.requests.complete, summary.run.label, summary.server.simulated) == (8, "mine", True)
    assert 0.015 < (summary.latency.ttft.p50 or 0) == summary.latency["ttft_s"].p50
    assert summary.client.verdict in {"ok", "limited"}
    assert ([each.verdict for each in summary.objectives], bool(summary.goodput)) == (["pass"], True)
    assert said[0].startswith("SIMULATED vllm")
    assert seen[-1] == ("ended", 8)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["latency"]["ttft_s"]["p50"] == summary.latency.ttft.p50
    assert written["run"]["command"].startswith(f"loadgen run --server vllm --url {url} --n 8")


def test_the_command_that_it_writes_down_is_one(url: str, tmp_path: Path) -> None:
    """The plan of the run's header, run by the command line of that header, is the same plan."""
    first = plan(url, timeout_s=20.5, window_s=(0, 5), gpu=False, server_pid=(os.getpid(),), insecure=True)
    run(first, out=tmp_path / "a")
    header = runfile.read(tmp_path / "a").header
    code, _, said = in_process(ROOT, *header.command[1:], "--out", str(tmp_path / "b"), "--quiet", "--no-report")
    assert code in {0, 5}, said
    assert runfile.read(tmp_path / "b").header.plan == header.plan


async def test_it_works_within_a_running_event_loop(url: str, tmp_path: Path) -> None:
    """As in a notebook; the async form leaves the loop free meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert (await run_async(plan(url), out=tmp_path / "async")).summary.requests.complete == 8
    assert ticks > 20
    assert run(plan(url), out=tmp_path / "blocking").summary.requests.complete == 8
    ticking.cancel()


async def test_who_cancels_a_run_keeps_what_came(url: str, tmp_path: Path) -> None:
    """The file has its footer and says that the run was interrupted."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def seen(_: str, counts: Any) -> None:
        if counts.complete:
            loop.call_soon_threadsafe(begun.set)

    task = asyncio.create_task(run_async(plan(url, **LONG), out=tmp_path / "run", progress=seen))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    summary = read(tmp_path / "run").summary
    assert summary.run.interrupted
    assert 0 < summary.requests.complete < 1000


def test_an_interrupt_keeps_what_came(url: str, tmp_path: Path) -> None:
    """Ctrl-C in the caller ends the run, which gives its Result all the same."""
    sent = threading.Event()

    def seen(_: str, counts: Any) -> None:
        if counts.complete and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

    summary = run(plan(url, **LONG), out=tmp_path / "run", progress=seen).summary
    assert summary.run.interrupted
    assert 0 < summary.requests.complete < 1000


def test_a_callback_that_fails_ends_the_run(url: str, tmp_path: Path) -> None:
    """Its exception is the caller's; the file is whole."""

    def fails(_: str, counts: Any) -> None:
        if counts.complete:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(plan(url, **LONG), out=tmp_path / "run", progress=fails)
    assert read(tmp_path / "run").summary.run.interrupted


def test_it_can_be_called_from_a_thread(url: str, tmp_path: Path) -> None:
    """Signals are the main thread's, and nobody sets any."""
    found: list[loadgen.Result] = []
    thread = threading.Thread(target=lambda: found.append(run(plan(url), out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].summary.requests.complete == 8


def test_errors_are_the_classes_that_the_command_has(url: str, tmp_path: Path) -> None:
    """With their hint, before anything is sent."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(PlanError, match="--n 0"):
        Plan(server="vllm", n=0)
    with pytest.raises(PlanError, match="repeats") as caught:
        run(plan(url, repeats=2))
    assert "each_repeat" in caught.value.hint
    with pytest.raises(PlanError, match="latency"):
        run(plan(url), objectives=["latency < 5"])
    with pytest.raises(OutputError, match="not empty"):
        run(plan(url), out=tmp_path / "full")
    with pytest.raises(UnreachableError, match="nothing listens"):
        run(plan("http://127.0.0.1:9"), out=tmp_path / "run")
    with pytest.raises(WrongServerError) as other:
        run(plan(url, server="tgi"), out=tmp_path / "run")
    assert "--server vllm" in other.value.hint
    with pytest.raises(RunFileError, match="no run found"):
        read(tmp_path / "nothing")


def test_a_recorded_run_reads_as_the_command_reports_it(tmp_path: Path) -> None:
    """The same figures, from the folder or the file; nothing is written beside it."""
    for name in ("burst", "poisson", "sessions"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(RECORDED / name / "run.jsonl", folder)
        assert read(folder).summary == read(folder / "run.jsonl").summary
        assert [file.name for file in folder.iterdir()] == ["run.jsonl"]
        code, shown, _ = in_process(ROOT, "report", str(folder), "--json", "--out", os.devnull)
        assert code == 0
        expected = json.loads(shown)["latency"]["ttft_s"]
        assert read(folder).summary.latency.ttft.p99 == expected["p99"]


def test_a_frame_has_a_row_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataFrame of the columns of the export; without pandas the same columns as arrays."""
    folder = RECORDED / "burst"
    result = read(folder)
    table = result.frame()
    summary = result.summary
    assert len(table[table.phase == "measured"]) == summary.requests.planned
    assert np.percentile(table.ttft_s.dropna(), 50) == pytest.approx(summary.latency.ttft.p50)
    monkeypatch.setitem(sys.modules, "pandas", None)
    columns = result.frame()
    assert list(columns) == list(table.columns)
    assert columns["sent_ns"].tolist() == table.sent_ns.tolist()


def test_a_figure_is_the_chart_of_the_report() -> None:
    """A plotly Figure with the traces of the page; a name that is none says which there are."""
    folder = RECORDED / "burst"
    result = read(folder)
    for name in result.figures:
        figure = result.figure(name)
        assert figure.data, name
        assert figure.layout.title.text.startswith("SIMULATED") is bool(result.summary.server.simulated)
        assert figure.layout.margin.t >= 80
    with pytest.raises(KeyError, match=result.figures[0]):
        result.figure("colour")


def test_a_notebook_shows_what_the_command_prints(tmp_path: Path) -> None:
    """As preformatted text; `report` writes the page."""
    folder = RECORDED / "burst"
    result = read(folder)
    assert result._repr_html_().startswith("<pre>")
    assert "TTFT" in result.text()
    assert str(result) == result.text().strip("\n")
    assert result.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_two_runs_are_compared() -> None:
    """As `loadgen compare` does; unequal work is refused."""
    burst = RECORDED / "burst"
    again = RECORDED / "burst-again"
    poisson = RECORDED / "poisson"
    found = compare(read(burst), [again], anyway=True)
    assert {row.verdict for row in found.rows}
    assert [each.what for each in found.unequal] == ["seed"]
    assert "burst-again (B) compared with burst (A)" in found._repr_html_()
    with pytest.raises(PlanError, match="did not do equal work"):
        compare(burst, poisson)
