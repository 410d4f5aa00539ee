"""A run tells what the server said: against simulated servers, whose every count is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.run.run_schema import SAMPLE
from loadgen.analysis.telemetry import all_series
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.protocol import Reply
from loadgen.servers.simulated.server import find_protocol
from loadgen.servers.simulated.state import ServerState
from tests.contract.recorded import response
from tests.support.command import FAST, ROOT, accounted, burst, start, summary_of, wait_for
from tests.support.raw_server import page, serving
from tests.support.simulated import Running, running

METRICS = ("GET", "/metrics")
SLOW = {"ttft_s": 0.2, "itl_s": 0.1}
"""32 tokens take more than three seconds: time for readings in between."""

Answering = Callable[[int, Reply], Reply]


@contextmanager
def altered(server: str, answering: Answering, monkeypatch: pytest.MonkeyPatch, **times: float) -> Iterator[Running]:
    """A simulated server whose n-th page of metrics goes through `answering` first."""
    whole, number = find_protocol(server).pages[METRICS], count(1)

    def answer(state: ServerState, fields: Mapping[str, Any]) -> Reply:
        reply = whole(state, fields)
        return answering(next(number), reply)

    monkeypatch.setitem(find_protocol(server).pages, METRICS, answer)  # type: ignore[arg-type]
    with running(SimulatedConfig(server=server, **{**FAST, **times})) as simulated:
        yield simulated


def options(server: str, simulated: Running, *more: str) -> list[str]:
    return ["--server", server, "--url", simulated.url, "--no-report", *more]


def moments(folder: Path, source: str) -> list[str]:
    run = runfile.read(folder / "run")
    return [line.values["moment"] for line in run.telemetry if line.source == source]


def test_every_figure_that_a_run_writes_has_its_type_checked(tmp_path: Path) -> None:
    """Readers skip a line in which a figure has another type, so all figures of a real run must be listed."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        burst(tmp_path, *options("vllm", simulated, "--n", "4", "--output-tokens", "8", "--no-gpu"))
    samples = runfile.read(tmp_path / "run").telemetry
    assert {sample.source for sample in samples} == {"client", "server", "host"}
    written = {name for sample in samples for name in sample.values}
    assert written - {"processes"} <= set(SAMPLE.__struct_fields__)


@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm", "sglang"])
def test_server_and_client_count_the_same(server: str, tmp_path: Path) -> None:
    """Tokens and requests agree exactly, warm-up included, and the terminal says so."""
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        _, out, _ = burst(
            tmp_path, *options(server, simulated, "--n", "12", "--output-tokens", "8", "--warmup", "3", "--no-gpu")
        )
    assert accounted_with_warmup(tmp_path) == 15
    summary: Any = summary_of(tmp_path)
    counts = {word: entry["server"] for word, entry in summary["server_counters"].items() if entry["agree"]}
    assert counts.pop("rejections", 0) == 0  # LightLLM has no such counter
    assert counts == {"prompt_tokens": 15 * 512, "output_tokens": 15 * 8, "requests_finished": 15}
    assert "same prompt tokens, output tokens and finished requests, 3 warm-up requests included" in " ".join(
        out.split()
    )
    assert moments(tmp_path, "server")[:3] == ["idle", "start", "end"]
    assert set(moments(tmp_path, "server")[3:]) == {"after"}
    assert summary["memory"]["not_measured"] == {"gpu": "switched off: --no-gpu"}
    assert summary["memory"]["host"]["peak_bytes"] > 0


def accounted_with_warmup(folder: Path) -> int:
    return len([record for record in runfile.read(folder / "run").records if record.state == "complete"])


def test_an_idle_server_is_read_before_anything_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to answer, and with warm-up requests."""

    def slow(number: int, reply: Reply) -> Reply:
        time.sleep(0.3 if number == 1 else 0)
        return reply

    with altered("tgi", slow, monkeypatch) as simulated:
        burst(tmp_path, *options("tgi", simulated, "--n", "3", "--output-tokens", "4", "--warmup", "2"))
    run = runfile.read(tmp_path / "run")
    (idle,) = [line for line in run.telemetry if line.source == "server" and line.values["moment"] == "idle"]
    assert idle.values["took_ns"] > 0.3e9
    assert all(record.connected_ns is not None and record.connected_ns > idle.at_ns for record in run.records)


def test_a_built_in_server_tells_its_own_memory(tmp_path: Path) -> None:
    """Its process is ours, so what it holds is known without being asked for."""
    burst(tmp_path, "--server", "vllm", "--n", "4", "--output-tokens", "8", "--speed", "50", "--no-report")
    (process,) = summary_of(tmp_path)["memory"]["processes"]  # type: ignore[misc]
    assert process["on"] == "host"
    assert process["idle_bytes"] > 1 << 20


def test_readings_go_on_during_the_run(tmp_path: Path) -> None:
    """Once a second, seen on one axis: what runs, and the share of the KV cache; and a process that was named."""
    with running(SimulatedConfig(server="vllm", **SLOW)) as simulated:
        burst(
            tmp_path,
            *options("vllm", simulated, "--n", "6", "--output-tokens", "24", "--server-pid", str(os.getpid())),
        )
    assert moments(tmp_path, "server").count("run") >= 2
    curves = {(each.name, each.of): each for each in all_series(runfile.read(tmp_path / "run"))}
    assert max(y or 0 for y in curves["running", "server"].y) == 6
    assert (curves["prompt_tokens_per_s", "server"].y[2] or 0) > 0  # vLLM counts a prompt when it has been read
    assert ("process_memory", f"process {os.getpid()}") in curves


def test_nothing_is_read_while_a_burst_is_being_sent(tmp_path: Path) -> None:
    """Bursts each second, at the very instants at which readings are due: every reading waits until all are sent."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        arrivals = ("--arrivals", "burst:40/1", "--duration", "2.5s", "--input-tokens", "64", "--output-tokens", "4")
        burst(tmp_path, *options("tgi", simulated, *arrivals), command="run")
    run = runfile.read(tmp_path / "run")
    read = [line for line in run.telemetry if line.source == "server" and line.values["moment"] == "run"]
    assert read
    for due_ns in {record.due_ns for record in run.records}:
        sent = [record for record in run.records if record.due_ns == due_ns]
        assert len(sent) == 40
        begun_ns, done_ns = min(r.sent_ns or 0 for r in sent), max(r.sent_end_ns or 0 for r in sent)
        assert all(line.at_ns < begun_ns or line.at_ns - line.values["took_ns"] >= done_ns for line in read)


def test_metrics_that_die_during_the_run_leave_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is none the worse; the gaps have their reason, and no count is compared with a zero."""
    dead = Reply(b"down", 503)
    with altered("tgi", lambda n, reply: reply if n <= 3 else dead, monkeypatch, **SLOW) as simulated:
        burst(tmp_path, *options("tgi", simulated, "--n", "4", "--output-tokens", "24"))
    assert accounted(tmp_path, 4) == {"complete": 4}
    summary: Any = summary_of(tmp_path)
    assert summary["memory"]["gaps"]["server"]["/metrics answers 503"] >= 2
    assert summary["server_counters"]["output_tokens"]["agree"] is None
    assert "after the run (/metrics answers 503)" in summary["server_counters"]["output_tokens"]["why"]
    (waiting,) = [each for each in all_series(runfile.read(tmp_path / "run")) if each.name == "waiting"]
    assert waiting.y[:3] == [0, 0, 0]
    assert set(waiting.y[3:]) == {None}


def test_what_somebody_else_asks_is_a_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More finished requests than ours: a warning that names both numbers."""

    def more(number: int, reply: Reply) -> Reply:
        body = reply.body.replace(b"tgi_request_success 4.0", b"tgi_request_success 9.0")
        return Reply(body, reply.status, reply.headers)

    with altered("tgi", more, monkeypatch) as simulated:
        _, out, _ = burst(tmp_path, *options("tgi", simulated, "--n", "4", "--output-tokens", "4"))
    assert "The server counted 9 finished requests, the client 4: " in " ".join(out.split())


def test_a_server_without_metrics_is_measured_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 404 is asked for once; the header and the summary say what is missing and why."""
    with altered("vllm", lambda _, __: Reply(b"", 404), monkeypatch) as simulated:
        burst(tmp_path, *options("vllm", simulated, "--n", "4", "--output-tokens", "4"))
    assert accounted(tmp_path, 4) == {"complete": 4}
    assert runfile.read(tmp_path / "run").header.telemetry["not_measured"]["server"] == "/metrics answers 404"
    assert moments(tmp_path, "server") == ["idle"]
    assert summary_of(tmp_path)["server_counters"] == {}


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --metrics-every 0 nothing is read at all."""
    asked: list[int] = []

    def hear(number: int, reply: Reply) -> Reply:
        asked.append(number)
        return reply

    with altered("tgi", hear, monkeypatch) as simulated:
        burst(tmp_path, *options("tgi", simulated, "--n", "4", "--output-tokens", "4", "--metrics-every", "0"))
    assert asked == []
    assert {line.source for line in runfile.read(tmp_path / "run").telemetry} == {"client"}


def test_a_killed_run_keeps_its_telemetry(tmp_path: Path) -> None:
    """Lines are on the disk as they come: what was read before SIGKILL is read back, and compared with nothing."""
    with running(SimulatedConfig(server="tgi", **SLOW)) as simulated:
        process = start(tmp_path, *options("tgi", simulated, "--n", "4", "--output-tokens", "200"))
        part = tmp_path / "run" / "part-telemetry.jsonl"
        wait_for(lambda: part.exists() and "run" in moments(tmp_path, "server"), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run = runfile.read(tmp_path / "run")
    assert {"idle", "start", "run"} <= {line.values["moment"] for line in run.telemetry if line.source == "server"}
    assert [each.of for each in all_series(run) if each.name == "running"] == ["server"]


def test_gpus_of_another_machine_by_their_exporter(tmp_path: Path) -> None:
    """With --dcgm-url the cards' memory is in the summary, under the exporter's names for them."""
    body = response("written/metrics/dcgm-exporter.txt")[1]
    with running(SimulatedConfig(server="lightllm", **FAST)) as simulated, serving(lambda _: page(body)) as exporter:
        more = ("--n", "4", "--output-tokens", "4", "--dcgm-url", exporter.url)
        burst(tmp_path, *options("lightllm", simulated, *more))
    memory: Any = summary_of(tmp_path)["memory"]
    assert [each["of"] for each in memory["gpus"]] == ["GPU 0", "GPU 1:3", "GPU 1:5"]
    assert memory["gpus"][0]["idle_bytes"] == 73_216 << 20
    assert set(exporter.paths()) == {"/metrics"}


def test_without_the_libraries_the_run_goes_on(tmp_path: Path) -> None:
    """Libraries may be missing, as after `pip install --no-deps`: the header says how to get them, `--gpu` fails."""
    for name in ("prometheus_client", "psutil", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)\n")
    bare = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        common = options("tgi", simulated, "--n", "4", "--output-tokens", "4")
        code, _, err = burst(tmp_path, *common, "--gpu", **bare)
        assert code == 2
        assert "--gpu: nvidia-ml-py is not installed: pip install nvidia-ml-py" in " ".join(err.split())
        code, _, _ = burst(tmp_path, *common, **bare)
    assert code in (0, 5)
    assert accounted(tmp_path, 4) == {"complete": 4}
    missing: Any = summary_of(tmp_path)["memory"]["not_measured"]
    assert missing["server"] == "prometheus-client is not installed: pip install prometheus-client"
    assert missing["host"] == "psutil is not installed: pip install psutil"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--metrics-every", "500ms"], "--metrics-every 0.5: must be at least 1s"),
        (["--gpu", "--dcgm-url", "http://127.0.0.1:9400"], "choose one"),
        (["--dcgm-url", "gpu-host:9400"], "--dcgm-url gpu-host:9400: must start with http"),
        (["--server-pid", "4194305"], "there is no process 4194305"),
    ],
)
def test_what_cannot_be_asked_is_refused(more: list[str], says: str, tmp_path: Path) -> None:
    """Exit code 2, before anything is sent, and no folder is left behind."""
    code, _, err = burst(tmp_path, "--server", "tgi", "--n", "2", "--output-tokens", "4", *more)
    assert code == 2
    assert says in " ".join(err.split())
    assert not (tmp_path / "run").exists()
