"""Requests that a server or proxy is too busy to take: told apart from failures in every output of a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

import pytest

from loadgen import api
from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.contract.recorded import TRANSCRIPTS
from tests.support.command import FAST, accounted, burst, in_process, loadgen, summary_of
from tests.support.runs import said
from tests.support.simulated import running

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "somebody"}]}).encode()
N = 12


def response(status: str, body: bytes, kind: str = "application/json", *headers: str) -> bytes:
    """The bytes of one HTTP response."""
    head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def events(*payloads: str) -> bytes:
    """The bytes of a stream with status 200 that holds these events."""
    return response("200 OK", "".join(f"data: {each}\n\n" for each in payloads).encode(), "text/event-stream")


def chunk(word: str, reason: str | None = None) -> str:
    """One chunk of a chat."""
    return json.dumps({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": reason}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
COMPLETE = events(*(chunk(word) for word in ("a", "b", "c")), chunk("d", "length"), USAGE, "[DONE]")
PAGE_503 = b"<html><head><title>503 Service Temporarily Unavailable</title></head><center>nginx</center></html>"
LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'


def recorded(file: str) -> bytes:
    """A recorded response: its head, and its body without the transfer coding."""
    head, _, body = (TRANSCRIPTS / file).read_bytes().partition(b"\r\n\r\n")
    lines = [
        line for line in head.split(b"\r\n") if not line.lower().startswith((b"transfer-encoding", b"content-len"))
    ]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


REJECTIONS = {
    "429": (response("429 Too Many Requests", b'{"detail":"slow down"}'), "slow down"),
    "429-retry": (response("429 X", b"busy", "text/plain", "Retry-After: 30"), "busy; retry after 30 s"),
    "503-page": (response("503 Service Temporarily Unavailable", PAGE_503, "text/html"), "503 Service Temporarily"),
    "503-empty": (response("503 Service Unavailable", b""), "HTTP 503 with nothing readable"),
    "503-loading": (response("503 Service Unavailable", LOADING), "Loading model (unavailable_error, 503)"),
    "tgi": (recorded("tgi-3.3.7/err_overloaded.txt"), "Model is overloaded (overloaded)"),
    "tgi-stream": (recorded("tgi-3.3.7/err_overloaded_chat_stream.txt"), "Model is overloaded"),
    "sglang-stream": (
        recorded("sglang-0.5.23/overload_chat_stream_usage.txt"),
        "The request queue is full. (SERVICE_UNAVAILABLE, 503)",
    ),
}
"""How servers and proxies reject a request, and what the Record says of it."""


@contextmanager
def playing(answers: Sequence[bytes]) -> Iterator[str]:
    """The URL of a plain HTTP server that gives one of these answers after the other, round and round."""
    lock, turn = Lock(), iter(range(1 << 20))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.wfile.write(response("200 OK", MODELS) if self.path == "/v1/models" else response("404 X", b"{}"))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path != "/v1/chat/completions":
                self.wfile.write(response("404 X", b"{}"))
                return
            with lock:
                place = next(turn)
            # The first request is the probe's, which finds out which fields the server takes.
            self.wfile.write(COMPLETE if place == 0 else answers[(place - 1) % len(answers)])

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            """Clients of these tests close connections as they like."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(folder: Path, url: str, *more: str, report: bool = False) -> tuple[int, str, str]:
    """Send a burst of chats to this server."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{place}: name a river", "output_tokens": 4}}\n' for place in range(N)))
    where = ("--server", "openai", "--endpoint", "chat", "--url", url, "--workload", f"jsonl:{prompts}")
    return burst(folder, *where, "--n", str(N), "--metrics-every", "0", *more, report=report)


@pytest.mark.parametrize("name", REJECTIONS)
def test_each_form_of_a_rejection_is_one_kind(name: str, tmp_path: Path) -> None:
    """Every second request is rejected: the rest is complete, none has failed, and the server's words are kept."""
    answer, words = REJECTIONS[name]
    with playing([COMPLETE, answer]) as url:
        code, out, _ = asked(tmp_path, url)
    assert code == 1
    assert accounted(tmp_path, N) == {"complete": N // 2, "rejected": N // 2}
    summary = summary_of(tmp_path)
    requests = summary["requests"]
    assert (requests["complete"], requests["rejected"], requests["failed"]) == (N // 2, N // 2, 0)
    assert requests["errors"] == {"rejected": N // 2}
    assert summary["latency"]["ttft_s"]["n"] == N // 2
    assert summary["tokens"]["prompt_mismatches"] == 0
    records = [record for record in runfile.read(tmp_path / "run").records if record.state == "rejected"]
    assert all(record.error_kind == "rejected" and record.error_detail.startswith(words) for record in records)
    assert f"{N // 2} of {N} requests not complete (50%): {N // 2} rejected" in out


def test_rejected_failed_and_complete_are_apart_in_every_output(tmp_path: Path) -> None:
    """Terminal, page, export, summary and the Python API count a third each."""
    error = response("500 Internal Server Error", b'{"detail":"boom"}')
    with playing([COMPLETE, REJECTIONS["429"][0], error]) as url:
        _, out, _ = asked(tmp_path, url, "--goodput", "ttft < 100s", "--assert", "rejected < 90%", report=True)
    third = N // 3
    assert f"{N - third} of {N} requests not complete (67%): " in out
    assert f"{third} x HTTP 500" in out
    assert f"{third} rejected (HTTP 429)" in out
    assert f"{third} rejected" in (tmp_path / "run/report.html").read_text("utf-8")
    summary = api.read(tmp_path / "run").summary
    assert (summary.requests.rejected, summary.requests.failed) == (third, third)
    found = summary_of(tmp_path)
    assert found["goodput"]["attainment"] == pytest.approx(1 / 3)
    assert [each["verdict"] for each in found["objectives"]] == ["pass"]
    assert loadgen(tmp_path, "export", "run", "--csv", "tables").returncode == 0
    with (tmp_path / "tables/requests.csv").open() as table:
        states = [row["state"] for row in csv.DictReader(table)]
    assert (states.count("rejected"), states.count("failed")) == (third, third)


@pytest.mark.parametrize(
    ("objective", "codes"),
    [("", {1}), ("failed <= 0", {1}), ("rejected < 90%", {0, 5}), ("rejected < 1%", {4}), ("complete >= 99%", {4})],
)
def test_a_run_with_rejections_fails_unless_an_objective_allows_them(
    objective: str, codes: set[int], tmp_path: Path
) -> None:
    """A part of the load was not answered, which only who asks for it may pass over."""
    with playing([COMPLETE, REJECTIONS["503-empty"][0]]) as url:
        code, out, err = asked(tmp_path, url, *(["--assert", objective] if objective else []))
    assert code in codes, out + err


def test_a_run_without_a_complete_request_says_what_rejected_it(tmp_path: Path) -> None:
    """Everything is rejected: there is no figure, and the reason stands with its count."""
    with playing([REJECTIONS["429-retry"][0]]) as url:
        code, _, err = asked(tmp_path, url, "--quiet")
    assert code == 1
    assert f"loadgen: {N} of {N} requests not complete (100%): {N} rejected (HTTP 429)." in err
    assert "loadgen: rejected: HTTP 429 “busy; retry after 30 s”" in err
    assert in_process(tmp_path, "report", "run")[0] == 0


def test_a_load_over_the_stated_limit_is_sent_on_purpose_only(tmp_path: Path) -> None:
    """TGI states how many requests it takes at once: more are refused before the start with the name of the option that
    sends them, and with it what is beyond is rejected, which the server counts too."""
    limited = SimulatedConfig(server="tgi", max_concurrent_requests=8, ttft_s=0.3, itl_s=0.01)
    with running(limited) as server:
        where = ("--server", "tgi", "--url", server.url, "--n", "20", "--input-tokens", "16", "--output-tokens", "4")
        code, _, err = burst(tmp_path, *where)
        assert (code, "max_concurrent_requests of 8" in err, "--over-limit" in err) == (2, True, True)
        assert not (tmp_path / "run").exists()
        code, out, err = burst(tmp_path, *where, "--over-limit")
    assert code == 1, err
    assert accounted(tmp_path, 20) == {"complete": 8, "rejected": 12}
    text = " ".join(out.split())
    assert "Sent on purpose (--over-limit): 20 requests at once exceed its max_concurrent_requests of 8." in text
    check = summary_of(tmp_path)["server_counters"]["rejections"]
    assert (check["server"], check["client"], check["agree"]) == (12, 12, True)
    assert "rejections" in said(summary_of(tmp_path), "counters")


def test_a_prompt_over_the_limit_is_refused_all_the_same(tmp_path: Path) -> None:
    """No answer could be measured, so the option for more requests does not let longer prompts pass."""
    with running(SimulatedConfig(server="tgi", max_model_len=64, **FAST)) as server:
        where = ("--server", "tgi", "--url", server.url, "--n", "200", "--input-tokens", "100")
        code, _, err = burst(tmp_path, *where)
        assert (code, "--over-limit" in err) == (2, False)
        code, _, err = burst(tmp_path, *where, "--over-limit")
    assert (code, "max_input_tokens" in err, "requests at once" in err) == (2, True, False)
