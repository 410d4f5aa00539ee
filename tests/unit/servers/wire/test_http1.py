"""HTTP/1.1 framing: where a response ends, found step by step."""

import gzip
import zlib

import pytest

from loadgen.servers.errors import decompress
from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming, encode_post, join_pieces

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def body_of(raw: bytes, framing: ResponseFraming) -> bytes:
    return join_pieces(raw, framing.body_bounds(raw))


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (CHUNKED, 200, b"hello world"),
        (CHUNKED[:-2] + b"Trailer: 1\r\n\r\n", 200, b"hello world"),
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-LENGTH: 4\r\n\r\nbusy", 429, b"busy"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: y\r\ncontent-length:2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok", 200, b"ok"),
    ],
)
def test_a_response_ends_exactly_at_its_last_byte(raw: bytes, status: int, body: bytes) -> None:
    """Fed one byte at a time, a response is complete after its last byte and not before."""
    framing, buffer = ResponseFraming(), bytearray()
    for index in range(len(raw)):
        buffer += raw[index : index + 1]
        assert framing.scan(buffer) == (index == len(raw) - 1)
    assert (framing.status, body_of(raw, framing)) == (status, body)


@pytest.mark.parametrize(
    ("field", "coding"),
    [("", ""), ("Content-Encoding: identity\r\n", ""), ("content-encoding: GZIP\r\n", "gzip"), ("X: gzip\r\n", "")],
)
def test_a_compressed_body_is_known_by_its_head(field: str, coding: str) -> None:
    """Whatever the case of the letters; none was asked for."""
    framing = ResponseFraming()
    framing.scan(f"HTTP/1.1 200 OK\r\n{field}Content-Length: 0\r\n\r\n".encode())
    assert framing.coding == coding
    assert b"\r\nAccept-Encoding: identity\r\n" in encode_post("/", "h", {}, b"")


def test_a_compressed_body_is_read_as_far_as_it_goes() -> None:
    """Up to the limit; what is damaged or in another coding stays as it is."""
    for body, coding in ((gzip.compress(b"said" * 99), "gzip"), (zlib.compress(b"said" * 99), "deflate")):
        assert decompress(body, coding, 1000) == b"said" * 99
        assert decompress(body, coding, 8) == b"saidsaid"
        assert decompress(body, "br", 8) == body
    assert decompress(b"plain", "gzip", 8) == b"plain"


def test_a_body_without_length_ends_with_the_connection() -> None:
    """Neither chunked nor Content-Length: the peer's close is the regular end."""
    raw = b"HTTP/1.0 200 OK\r\n\r\nall there is"
    framing = ResponseFraming()
    assert not framing.scan(raw)
    assert framing.at_eof(len(raw))
    assert body_of(raw, framing) == b"all there is"


@pytest.mark.parametrize("cut", range(len(CHUNKED)))
def test_a_chunked_body_cut_anywhere_never_ends_and_keeps_what_came(cut: int) -> None:
    """A close in the middle of a chunked body is not an end; the bytes received are still readable."""
    raw = CHUNKED[:cut]
    framing = ResponseFraming()
    assert not framing.scan(raw)
    assert not framing.at_eof(len(raw))
    assert b"hello world".startswith(body_of(raw, framing))


def test_a_body_shorter_than_its_content_length_is_not_an_end() -> None:
    """Content-Length promises more than came before the close."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort"
    framing = ResponseFraming()
    assert not framing.scan(raw)
    assert not framing.at_eof(len(raw))
    assert body_of(raw, framing) == b"short"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not an HTTP response"),
        (b"HTTP/2 200\r\n\r\n", "status line"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "not a number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % (b"9" * 5_000), "not a number"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "not asked for"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n", "longer than its size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, "unterminated chunk size line"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "response head longer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", "response head longer"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000, "response head longer"),
        (b"HTTP/1.18 200 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "more than one"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 3\r\n\r\nok", "more than one"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2,\r\n\r\nok", "more than one"),
        (b"HTTP/1.1 200 OK" + b"\r\nTransfer-Encoding: chunked" * 2 + b"\r\n\r\n0\r\n\r\n", "more than one"),
    ],
)
def test_bytes_that_are_not_http_are_named(raw: bytes, complaint: str) -> None:
    """What is not HTTP/1.1 raises ProtocolError that says what was wrong."""
    with pytest.raises(ProtocolError, match=complaint):
        ResponseFraming().scan(raw)


@pytest.mark.parametrize("behind", [b"", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("raw", [CHUNKED, CHUNKED[:-2] + b"Trailer: 1\r\n\r\n", SIZED])
def test_a_connection_with_bytes_behind_the_answer_is_not_used_again(raw: bytes, behind: bytes) -> None:
    """They would be taken for the next answer."""
    framing = ResponseFraming()
    assert framing.scan(raw + behind)
    assert framing.can_reuse(len(raw + behind)) == (not behind)


def test_post_is_one_complete_request() -> None:
    """The bytes of a request are fixed by its parts; nothing is added at send time."""
    assert encode_post("/generate", "[::1]:8000", {"X-Request-Id": "7"}, b"{}") == (
        b"POST /generate HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\n"
        b"Accept: text/event-stream\r\nAccept-Encoding: identity\r\nX-Request-Id: 7\r\nContent-Length: 2\r\n\r\n{}"
    )
