"""What telemetry is read from, over real sockets: limits hold, and every failure is a gap with its reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loadgen.servers import telemetry
from loadgen.servers.auth import Access
from loadgen.servers.backends.dialect import bearer_header
from loadgen.servers.telemetry import MIB, Dcgm, GapError, HostMemory, NotMeasuredError, ServerMetrics
from tests.contract.recorded import response
from tests.support.raw_server import CLOSE, DRIP, HANG, page, serving

LIGHTLLM = response("written/metrics/lightllm-1.2.0.txt")[1]
TOKEN_LOAD = response("lightllm-0.0.1/token_load.txt")[1]
GPUS = response("written/metrics/dcgm-exporter.txt")[1]
PATIENT_S = 20.0


@contextlib.contextmanager
def metrics(url: str, server: str = "tgi", api_key: str | None = None) -> Iterator[ServerMetrics]:
    source = ServerMetrics(url, server, Access(bearer_header(api_key)))
    with contextlib.closing(source):
        yield source


@pytest.mark.parametrize(("load", "share"), [(TOKEN_LOAD, 0.0), (b'{"current_load":[0.5,0.25]}', 0.375)])
def test_lightllm_needs_no_content_type(load: bytes, share: float) -> None:
    """Its page has none, which Prometheus 3 refuses; the KV cache comes from /token_load, of all its copies."""
    with (
        serving(lambda path: page(LIGHTLLM if path == "/metrics" else load)) as raw,
        metrics(raw.url, "lightllm") as lm,
    ):
        assert lm.read(PATIENT_S) | {"kv_used": share} == lm.read(PATIENT_S)
    assert raw.paths() == ["/metrics", "/token_load"] * 2


@pytest.mark.parametrize("load", [page(b"{}"), page(b"[]"), page(b"", status="404 Not Found"), b""])
def test_lightllm_without_token_load_keeps_the_rest(load: bytes) -> None:
    """The other figures are kept, and the missing one has its reason."""
    with (
        serving(lambda path: page(LIGHTLLM) if path == "/metrics" else load) as raw,
        metrics(raw.url, "lightllm") as lm,
    ):
        values = lm.read(PATIENT_S)
    assert values["running"] == 16
    assert "kv_used" not in values
    assert "token_load" in values["missing"]["kv_used"] or raw.url in values["missing"]["kv_used"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HANG, "within 0.2 s"),
        (DRIP + page(b"tgi_queue_size 1\n" * 50), "within 0.2 s"),
        (DRIP + b"HTTP/1.1 200 OK\r\n\r\n" + b"tgi_queue_size 1\n" * 50, "within 0.2 s"),
        (page(b"tgi_queue_size 1\n", length=500), "within 0.2 s"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP"),
        (b"", "does not answer in HTTP"),
        (page(b"busy", status="503 Service Unavailable"), "answers 503"),
        (page(b"<html></html>"), "not in the text format"),
    ],
)
def test_a_failed_reading_is_a_gap(answer: bytes, why: str) -> None:
    """A server that hangs, dribbles, breaks off or says something else never holds a reading up for long."""
    began_s = time.monotonic()
    with serving(lambda _: answer) as raw, metrics(raw.url) as source, pytest.raises(GapError, match=why):
        source.read(0.2)
    assert time.monotonic() - began_s < PATIENT_S


def test_an_answer_that_breaks_off_is_a_gap() -> None:
    """A body shorter than announced, closed by the server, is not taken for a page."""
    broken = CLOSE + page(b"tgi_queue_size 1\n", length=500)
    with (
        serving(lambda _: broken) as raw,
        metrics(raw.url) as source,
        pytest.raises(GapError, match="did not complete its response"),
    ):
        source.read(PATIENT_S)


def test_a_page_over_the_limit_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page fills the memory."""
    monkeypatch.setattr(telemetry, "PAGE_LIMIT_BYTES", 1000)
    body = b"tgi_queue_size 1\n" * 100
    with serving(lambda _: page(body)) as raw, metrics(raw.url) as source, pytest.raises(GapError, match="1,000"):
        source.read(PATIENT_S)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found"])
def test_a_server_without_metrics_is_not_measured(status: str) -> None:
    """Some statuses will not change: the run goes on without."""
    with (
        serving(lambda _: page(b"", status=status)) as raw,
        metrics(raw.url) as source,
        pytest.raises(NotMeasuredError, match=status[:3]),
    ):
        source.read(PATIENT_S)


@pytest.mark.parametrize("content", [None, "", "MemTotal: many kB\n"], ids=["no /proc", "empty", "odd"])
def test_host_memory_without_proc_is_not_measured(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no /proc, or another one. The source then says so instead of ending the run."""
    if content is not None:
        (tmp_path / "meminfo").write_text(content)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    with pytest.raises(NotMeasuredError, match="the memory of this machine cannot be read"):
        HostMemory()


def test_one_connection_and_the_runs_own_key() -> None:
    """Readings share a connection, opened anew where the server has closed it, and carry the key of the run."""
    answers = iter([page(b"tgi_queue_size 1\n"), page(b"tgi_queue_size 2\n"), b"", page(b"tgi_queue_size 3\n")])
    with serving(lambda _: next(answers)) as raw, metrics(f"{raw.url}/models/a", api_key="hunter2") as source:
        assert [source.read(PATIENT_S)["waiting"] for _ in range(3)] == [1, 2, 3]
    assert raw.paths() == ["/models/a/metrics"] * 4
    assert all(b"authorization: bearer hunter2" in head.lower() for head in raw.heard)


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/gpus/metrics"])
def test_gpus_by_a_dcgm_exporter(path: str) -> None:
    """MiB, percent and MHz become bytes, shares and Hz; MIG instances stand apart; a line that is no number, which the
    exporter does write, does not spoil the others."""
    with serving(lambda _: page(GPUS)) as raw:
        source = Dcgm(f"{raw.url}{path}")
        first, *instances = source.read(PATIENT_S)["gpus"]
        source.close()
    assert raw.paths() == [path if path.strip("/") else "/metrics"]
    assert first == {
        "index": "0",
        "memory_used_bytes": 73_216 * MIB,
        "memory_free_bytes": 7728 * MIB,
        "memory_reserved_bytes": 976 * MIB,
        "busy": pytest.approx(0.98),
        "power_w": 312.25,
        "sm_clock_hz": 1.41e9,
        "memory_clock_hz": 1.593e9,
        "engine_active": 0.953125,
        "tensor_active": 0.125,
        "dram_active": 0.75,
    }
    assert [(each["index"], each["memory_used_bytes"] / MIB) for each in instances] == [("1:3", 10), ("1:5", 12)]
    assert source.facts["driver"] == "535.129.03"
    assert source.facts["gpus"][0]["name"] == "NVIDIA A800-SXM4-80GB"
    assert source.facts["gpus"][0]["memory_total_bytes"] == 81_920 * MIB


def test_a_page_of_something_else_is_no_dcgm_exporter() -> None:
    """An exporter of another kind at that address is a gap that says so."""
    with serving(lambda _: page(b"node_load1 0.5\n")) as raw:
        source = Dcgm(raw.url)
        with pytest.raises(GapError, match="no metric of the DCGM exporter"):
            source.read(PATIENT_S)
        source.close()
