"""Questions beside the load, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from loadgen.servers.errors import UnreachableError
from loadgen.servers.json_client import JsonClient
from tests.support import raw_server
from tests.support.stub_server import answering


@contextmanager
def asking(url: str) -> Iterator[JsonClient]:
    with closing(JsonClient(url)) as ask:
        yield ask


def test_prefix_and_json() -> None:
    """Paths count from the URL's own path; an answer is its status and its JSON."""
    with (
        answering({"POST /models/a/tokenize": lambda body: {"got": body}}) as stub,
        asking(f"{stub.url}/models/a") as ask,
    ):
        assert ask("/tokenize", {"text": "zanu é"}) == (200, {"got": {"text": "zanu é"}})
        assert ask("/else") == (404, {"detail": "Not Found"})
    assert stub.heard == ["POST /models/a/tokenize", "GET /models/a/else"]


@pytest.mark.parametrize("content", [b"", b"<html>", b"\xff", b'{"a":', b"[1] 2", b"[" * 300_000, b'{"a":' * 100_000])
def test_not_json(content: bytes) -> None:
    """An answer that is not JSON is None, never an exception."""
    with answering({"GET /": (500, content)}) as stub, asking(stub.url) as ask:
        assert ask("/") == (500, None)


def test_a_byte_order_mark_is_skipped() -> None:
    """Some servers on Windows write one before the JSON."""
    with answering({"GET /": (200, b"\xef\xbb\xbf[1]")}) as stub, asking(stub.url) as ask:
        assert ask("/") == (200, [1])


@pytest.mark.parametrize(
    "early", [b"103 Early Hints\r\nLink: </a>\r\n\r\n", b"102 Processing\r\n\r\n", b"100 Continue\r\n\r\n"]
)
def test_interim_responses_are_skipped(early: bytes) -> None:
    """The final response counts. 101 is a final response, because another protocol follows."""
    answer = (b"HTTP/1.1 " + early) * 2 + raw_server.page(b"[1]")
    with raw_server.serving(lambda _path: answer) as raw, asking(raw.url) as ask:
        assert [ask("/"), ask("/")] == [(200, [1])] * 2
    switch = raw_server.CLOSE + b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + raw_server.page(b"[1]")
    with raw_server.serving(lambda _path: switch) as raw, asking(raw.url) as ask:
        assert ask("/")[0] == 101


def test_connection_closed_meanwhile() -> None:
    """A kept connection that the server has closed is opened again, and the question asked again."""
    with answering({"GET /": (200, 1)}, hang_up=True) as stub, asking(stub.url) as ask:
        assert [ask("/") for _ in range(5)] == [(200, 1)] * 5


def test_answer_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer longer than the limit is an error, and its rest is not taken for the next one."""
    monkeypatch.setattr("loadgen.servers.json_client.ANSWER_LIMIT_BYTES", 10)
    with answering({"GET /long": (200, [1] * 1000), "GET /short": (200, 1)}) as stub, asking(stub.url) as ask:
        with pytest.raises(UnreachableError, match="more than 10 bytes"):
            ask("/long")
        assert ask("/short") == (200, 1)


@pytest.mark.parametrize("dripped", [raw_server.page(b"[1, 2, 3]"), b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50])
def test_a_dripping_answer_has_one_time_limit(dripped: bytes) -> None:
    """Head or body a byte at a time: the limit is that of the whole answer, not of each read."""
    with (
        raw_server.serving(lambda _path: raw_server.DRIP + dripped) as slow,
        closing(JsonClient(slow.url, timeout_s=0.2)) as ask,
        pytest.raises(UnreachableError, match="did not answer within"),
    ):
        ask("/")


@pytest.mark.parametrize("version", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
def test_an_answer_may_end_with_the_connection(version: bytes) -> None:
    """A body without a length ends where the connection does, as in HTTP/1.0; the next question gets a new one."""
    with raw_server.serving(lambda _path: raw_server.CLOSE + version + b"[1, 2]") as server, asking(server.url) as ask:
        assert [ask("/") for _ in range(3)] == [(200, [1, 2])] * 3
