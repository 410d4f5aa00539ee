"""A made-up dialect: what its own file says is enough for a run with uploads and a body that is neither events nor
JSON."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.analysis.run import runfile
from loadgen.engine.raw_files import dialect_for_path
from loadgen.plan import Plan
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import Answer, Dialect
from loadgen.servers.backends.stream_events import finalise
from loadgen.servers.server_url import parse_server_url
from loadgen.workloads.request import Request
from tests.support.command import burst, summary_of

PICTURE = b"picture:" + b"\xff\r\n\r\n\x00" * 100


def encode(request: Request, model: str) -> bytes:
    return f"{model} {request.prompt}".encode()


def split(body: bytes, complete: bool) -> Sequence[bytes]:
    head, separator, rest = body.partition(b":")
    return [head + separator, rest, *([b""] if complete else [])]


def decode(payloads: Sequence[bytes]) -> Answer:
    answer = Answer([0] * len(payloads), events={"first_stroke_ns": 1}, counts={"bytes": sum(map(len, payloads))})
    answer.end_event = 2 if len(payloads) == 3 else None
    return finalise(answer, 0, "")


def complete(answer: Answer, request: Request) -> None:
    answer.counts["colours"] = int(request.body.get("colours", 1))


PAINT = Dialect(
    *("openai", "paint", "/v1/paint"),
    encode=encode,
    decode=decode,
    text=lambda _: "",
    count_by_running=None,
    split=split,
    complete=complete,
    content_type="text/plain",
    accept="image/*",
    streams=False,
)


class Painter(BaseHTTPRequestHandler):
    """A server of the made-up endpoint, which takes nothing but its own media types."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, b'{"data":[{"id":"brush"}]}' if self.path == "/v1/models" else b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        asked = (self.path, self.headers["content-type"], self.headers["accept"], body.partition(b" ")[0])
        self.answer(200 if asked == ("/v1/paint", "text/plain", "image/*", b"brush") else 400, PICTURE)

    def answer(self, status: int, content: bytes) -> None:
        self.wfile.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content))

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    openai = BACKENDS["openai"]
    monkeypatch.setitem(BACKENDS, "openai", replace(openai, dialects={**openai.dialects, "paint": PAINT}))


@pytest.fixture
def url() -> Iterator[str]:
    """A server of the made-up endpoint."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Painter) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.02))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_plan_and_a_url_name_it() -> None:
    """The path decides, of the URL and of whole requests."""
    assert Plan(server="openai", n=1, endpoint="paint").endpoint == "paint"
    assert parse_server_url("http://h:1/v1/paint").endpoint == "paint"
    found = dialect_for_path(BACKENDS["openai"].dialects, "/v1/paint")
    assert found is not None
    assert found.endpoint == "paint"


def test_a_burst_is_sent_and_recorded(url: str, tmp_path: Path) -> None:
    """Its media types are sent, in the test request too. Its events and counts are marks of each Record."""
    arguments = (
        "--server",
        "openai",
        "--url",
        url,
        "--endpoint",
        "paint",
        "--n",
        "4",
        "--extra-body",
        '{"colours": 3}',
    )
    code, out, err = burst(tmp_path, *arguments, report=True)
    assert code in (0, 5), err
    assert summary_of(tmp_path)["requests"]["complete"] == 4
    for record in runfile.read(tmp_path / "run").records:
        assert (record.marks["colours"], record.marks["bytes"]) == (3, len(PICTURE))
        assert (record.first_byte_ns or 0) <= record.marks["first_stroke_ns"] <= (record.end_ns or 0)
    assert ", paint" in out
