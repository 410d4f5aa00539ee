"""The comparison with other load generators and the goals keep working, at tiny size and with peers made up here."""

from __future__ import annotations

import dataclasses
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from benchmarks import goals, peers
from benchmarks.comparison import (
    aiperf,
    evalscope,
    genai_bench,
    guidellm,
    judge,
    keeper,
    model,
    table,
    vllm_bench,
    wire,
)
from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import ensure, nothing
from servers.simulated import tokenizer as simulated
from servers.simulated.config import SimulatedConfig
from servers.simulated.server import running

MS = 1_000_000
SUMMARY = {"late_ns": {"p99": 3 * MS}}
FAKE = """
import json, pathlib, sys, threading, urllib.request
url, n, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = {"model": "benchmark", "prompt": [9] * 4, "max_tokens": tokens, "stream": True}
request = lambda: urllib.request.urlopen(urllib.request.Request(
    url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})).read()
threads = [threading.Thread(target=request) for _ in range(n)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
pathlib.Path("result.json").write_text('{"ttft_ms": 70, "tpot_ms": 2}')
"""
RESULTS: dict[str, tuple[Client, str, Any]] = {
    "guidellm": (
        guidellm.CLIENT,
        "report.json",
        {
            "benchmarks": [
                {
                    "metrics": {
                        "time_to_first_token_ms": {"successful": {"median": 501.5}},
                        "inter_token_latency_ms": {"successful": {"median": 20.25}},
                        "time_per_output_token_ms": {"successful": {"median": 24}},
                    }
                }
            ]
        },
    ),
    "aiperf": (
        aiperf.CLIENT,
        "artifacts/profile_export_aiperf.json",
        {"time_to_first_token": {"p50": 501.5}, "inter_token_latency": {"p50": 20.25}},
    ),
    "genai-bench": (
        genai_bench.CLIENT,
        "results/D512_128_text-to-text_num_concurrency_3_time_1s.json",
        {
            "individual_request_metrics": [
                {"ttft": 0.4, "tpot": 0.01},
                {"ttft": 0.5015, "tpot": 0.02025},
                {"ttft": 0.9, "tpot": 0.05},
            ]
        },
    ),
    "evalscope": (
        evalscope.CLIENT,
        "benchmark/parallel_3_number_3/benchmark_percentile.json",
        [
            {"Percentiles": "25%", "TTFT (ms)": 1, "TPOT (ms)": 1},
            {"Percentiles": "50%", "TTFT (ms)": 501.5, "TPOT (ms)": 20.25},
        ],
    ),
    "vllm": (vllm_bench.RUST, "result.json", {"median_ttft_ms": 501.5, "median_tpot_ms": 20.25}),
}


def line(received_ms: int, *sent_ms: int) -> dict[str, Any]:
    """A request of the server's log, one token per send."""
    return {
        "received_ns": received_ms * MS,
        "sent_ns": [at * MS for at in sent_ms],
        "tokens": [1] * len(sent_ms),
    }


def test_the_log_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    """Lines are written when answers end; the judge gets them as they came, and the summary apart."""
    log = tmp_path / "log.jsonl"
    lines: list[dict[str, Any]] = [line(20, 30), line(10, 40), {"summary": SUMMARY}]
    log.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert judge.read_log(log) == ([line(10, 40), line(20, 30)], SUMMARY)


def test_the_truth_is_counted_from_arrivals() -> None:
    """TTFT counts from the kernel's stamp of the request, not from when the server got round to reading it."""
    requests = [line(105, 600, 620, 640), line(110, 610, 630, 652)]
    assert judge.judge(requests, SUMMARY, 2, [100 * MS, 101 * MS]) == judge.Truth(
        requests=2,
        events=6,
        first_request_ns=100 * MS,
        skew_ms=1,
        ttft_ms=504.5,
        tpot_ms=20.5,
        server_late_ms=3,
        seen_by="kernel",
    )


@pytest.mark.parametrize("arrivals_ns", [None, [1], [1, 2, 3]])
def test_without_a_stamp_for_each_request_the_server_is_believed(arrivals_ns: list[int] | None) -> None:
    """When nobody could look, or not every packet was caught, the figures say so and rest on the server's log."""
    truth = judge.judge([line(105, 600, 620), line(110, 610, 630)], SUMMARY, 2, arrivals_ns)
    assert (truth.seen_by, truth.skew_ms, truth.ttft_ms) == ("server", 5, 497.5)


def test_the_burst_is_found_among_other_requests() -> None:
    """A request that tried the server before, and ones begun at the end and given up, are no part of the skew."""
    requests = [line(0, 500), line(1000, 1500), line(1002, 1503), line(2000, 2500), line(2001)]
    truth = judge.judge(requests, SUMMARY, 2, None)
    assert (truth.requests, truth.events, truth.skew_ms, truth.ttft_ms) == (5, 4, 2, 500.5)


def test_a_burst_that_did_not_happen_is_not_judged() -> None:
    """Fewer answers than requests asked for are an error, and no figure."""
    with pytest.raises(ValueError, match="answered 1 of 2"):
        judge.judge([line(0, 500), line(1)], SUMMARY, 2, None)


def test_the_table_marks_the_best_of_each_column() -> None:
    """Better may be more, less, or nearer to zero; the floor does not compete, and a reason stands for figures."""
    columns = (
        table.Column("rate", 0, table.larger),
        table.Column("wall", 1, table.smaller),
        table.Column("error", 2, abs, signed=True),
        table.Column("seen", 0),
    )
    rows: dict[str, table.Row | str] = {
        "a": {"rate": 2000, "wall": 3, "error": -0.1, "seen": 1},
        "b": {"rate": 1000, "wall": 2, "error": 0.2, "seen": 2},
        "c": "would not start",
        "floor": {"rate": 9000, "wall": 1, "error": 0},
    }
    assert table.markdown(columns, rows, floor="floor").splitlines()[2:] == [
        "| a | **2,000** | 3.0 | **-0.10** | 1 |",
        "| b | 1,000 | **2.0** | +0.20 | 2 |",
        "| c | would not start |  |  |  |",
        "| floor | 9,000 | 1.0 | +0.00 |  |",
    ]


def test_medians_are_taken_figure_by_figure() -> None:
    """Each figure is the median of the runs that have it."""
    assert table.medians([{"peak": 7}, {"rate": 1}, {"rate": 3}, {"rate": 8}]) == {"peak": 7, "rate": 3}


def test_the_keeper_counts_what_is_left_behind(tmp_path: Path) -> None:
    """CPU time of a grandchild whose parent has gone already is the command's all the same."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    assert keep(tmp_path, "60", "no", sys.executable, "-c", leave)["cpu_s"] >= 0.3


def test_the_keeper_ends_what_takes_too_long(tmp_path: Path) -> None:
    """A command past its time is ended with everything below it, and the result says so."""
    facts = keep(tmp_path, "0.2", "no", "sh", "-c", "sleep 600 & sleep 600")
    assert facts["timed_out"]
    assert facts["exit_code"] == -9


def test_the_keeper_leaves_nobody_behind(tmp_path: Path) -> None:
    """Told to end, as when the benchmark itself has died, it ends the command and what that has started."""
    result, core = tmp_path / "usage.json", str(peers.machine.cores()[1][0])
    waiting = ["sh", "-c", "sleep 600 & echo $! > started; wait"]
    with subprocess.Popen(
        [sys.executable, keeper.__file__, str(result), core, "60", "no", *waiting], cwd=tmp_path
    ) as it:
        until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text().strip())
        it.terminate()
    until(lambda: not psutil.pid_exists(int((tmp_path / "started").read_text())))


def until(true: Callable[[], object], limit_s: float = 10) -> None:
    """Waits for other processes to have got somewhere."""
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def test_the_keeper_adds_up_the_memory_of_the_tree(tmp_path: Path) -> None:
    """Two processes that hold 40 MB each are counted together."""
    hold = "import time; held = bytearray(40_000_000); held[::4096] = b'x' * len(held[::4096]); time.sleep(1)"
    both = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {hold!r}]); exec({hold!r})"
    assert keep(tmp_path, "60", "yes", sys.executable, "-c", both)["peak_bytes"] > 80_000_000


def keep(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the keeper wrote about a command."""
    limit_s, memory, *command = arguments
    result = folder / "usage.json"
    core = str(peers.machine.cores()[1][0])
    started = [sys.executable, keeper.__file__, str(result), core, limit_s, memory, *command]
    subprocess.run(started, cwd=folder, check=True, timeout=60)
    facts: dict[str, Any] = json.loads(result.read_text())
    return facts


def test_arrivals_are_seen_on_the_wire() -> None:
    """Every request for tokens to the port is seen, and no other; or nobody may look, and it says nothing."""
    body = json.dumps({"model": "llama-2-7b", "prompt": "a", "max_tokens": 1})
    fast = SimulatedConfig(server="vllm", ttft_s=0, itl_s=0)
    with running(fast) as server, running(fast) as other, wire.watching(urlsplit(server.url).port or 0) as watch:
        for url, path in ((server.url, "/v1/completions"), (server.url, "/tokenize"), (other.url, "/v1/completions")):
            connection = http.client.HTTPConnection(urlsplit(url).netloc)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            assert connection.getresponse().status == 200
            connection.close()
        arrivals_ns = watch.arrivals_ns()
    (logged,) = server.log
    assert (arrivals_ns is not None) == wire.permitted()
    assert arrivals_ns is None or [at <= logged.received_ns for at in arrivals_ns] == [True]


@pytest.mark.parametrize(
    "text", ["Shall I compare thee to a summer's day?", " the of ruveko 12\n", "(12 + 34) / 5 = 9.2", "abczzq"]
)
def test_the_peers_tokenizer_is_the_servers(tmp_path: Path, text: str) -> None:
    """English text has as many tokens for a peer as for the simulated server, with the token that begins it."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(model.make(tmp_path) / "tokenizer.json"))
    assert len(made.encode(text).ids) == 1 + simulated.count(text)
    assert made.decode(made.encode(" the of and").ids) == " the of and"


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_peers_are_read(tmp_path: Path, name: str) -> None:
    """The medians are found in a file shaped like the one the peer writes."""
    client, file, content = RESULTS[name]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    reported = client.reported(tmp_path)
    assert (reported.ttft_ms, reported.tpot_ms) == (pytest.approx(501.5), pytest.approx(20.25))


@pytest.mark.parametrize("name", [name for name in peers.CLIENTS if not name.startswith("C")])
def test_every_peer_gets_the_same_load(tmp_path: Path, name: str) -> None:
    """The command names the server, the number of requests and both lengths."""
    load = Load(url="http://127.0.0.1:9", n=1234, input_tokens=432, output_tokens=321, model=tmp_path, scratch=tmp_path)
    command = " ".join(peers.CLIENTS[name].command(tmp_path, load))
    assert all(text in command for text in ("http://127.0.0.1:9", "1234", "432", "321"))


def test_a_client_is_installed_once_per_version(tmp_path: Path) -> None:
    """What is there is left alone; another version is made from nothing."""
    made: list[str] = []

    def install(folder: Path) -> None:
        made.append(folder.name)
        (folder / f"file-{len(made)}").touch()

    client = fake(install=install)
    for version in ("1", "1", "2"):
        folder = ensure(dataclasses.replace(client, version=version), tmp_path)
    assert made == ["a-fake", "a-fake"]
    assert not (folder / "file-1").exists()


def test_the_comparison_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that works has a row of figures; one that breaks and one that cannot be installed say why."""
    monkeypatch.setitem(peers.CLIENTS, "a fake", fake())
    monkeypatch.setitem(peers.CLIENTS, "broken", fake("import sys; sys.exit('its own words')", name="broken"))
    monkeypatch.setitem(peers.CLIENTS, "absent", fake(name="absent", install=_refuse))
    shape = ["--n", "4", "--output-tokens", "5", "--ttft-ms", "60", "--itl-ms", "1", "--repeats", "1", "--tries", "1"]
    peers.main(["--only", "a fake", "broken", "absent", "--envs", str(tmp_path), *shape])
    rows = {row[1]: row for row in map(_cells, capsys.readouterr().out.splitlines()) if len(row) > 2}
    figures = dict(zip(rows["tool"], rows["a fake 1"], strict=True))
    assert float(figures[peers.TTFT]) == 70
    assert float(figures[peers.TTFT_ERROR].strip("*")) < 10
    assert all(figures[column.title] for column in peers.COLUMNS)
    assert "exit code 1: its own words" in rows["broken 1"][2]
    assert "not installed: no such package" in rows["absent 1"][2]


def test_the_goals_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size there is a row with errors of single requests for each load, with one worker and with two."""
    goals.main(["--tiny", "--repeats", "1", "--tries", "1", "--envs", str(tmp_path)])
    rows = [row for row in map(_cells, capsys.readouterr().out.splitlines()) if len(row) > 2]
    found = [dict(zip(rows[0], row, strict=True)) for row in rows if row[1].startswith("loadgen")]
    assert len(found) == len(goals.TINY)
    assert all(float(row[goals.TTFT_P99]) >= 0 and float(row[goals.TPOT_P99]) >= 0 for row in found)


def fake(script: str = FAKE, *, name: str = "a fake", install: Any = nothing) -> Client:
    """A peer that is a Python script."""
    return Client(
        name=name,
        version="1",
        install=install,
        command=lambda _, load: [sys.executable, "-c", script, load.url, str(load.n), str(load.output_tokens)],
        reported=lambda scratch: Reported(**json.loads((scratch / "result.json").read_text())),
    )


def _refuse(folder: Path) -> None:
    raise subprocess.CalledProcessError(1, "pip", "no such package")


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]
