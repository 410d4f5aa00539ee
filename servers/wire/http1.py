"""HTTP/1.1 as pure functions: encodes requests, and finds the end and the body of a response (RFC 9112).

While a response arrives, loadgen only appends the received bytes and checks whether the response has ended. All other
work is done after the end: removing the transfer coding, and determining which read returned which byte.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

HEAD_LIMIT_BYTES, CHUNK_LINE_LIMIT_BYTES = 65_536, 4_096

_USUAL_LINE = re.compile(rb"\r\n([0-9A-Fa-f]{2,3})\r\n")
_EVENT_LINE = re.compile(rb"\n\n\r\n([0-9A-Fa-f]{2,3})\r\ndata: ")  # A size line between two events


class ProtocolError(Exception):
    """The received bytes are not valid HTTP/1.1. The message describes the violation."""


def encode_post(path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the bytes of a POST request with a JSON body.

    `host` is the value of the Host header, which includes any port other than the default. `headers` are added to the
    default headers, and replace default headers with the same name."""
    defaults = {"Host": host, "Content-Type": "application/json", "Accept": "text/event-stream"}
    defaults["Accept-Encoding"] = "identity"  # a compressed stream would hide when its tokens arrived
    replaced = {name.lower() for name in headers}
    fields = {name: value for name, value in defaults.items() if name.lower() not in replaced} | dict(headers)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    lines.append(f"Content-Length: {len(body)}\r\n\r\n")
    return "\r\n".join(lines).encode("latin-1") + body


@dataclass(slots=True, eq=False)
class ResponseFraming:
    """Finds the end of one HTTP response while its bytes arrive.

    The total CPU time is linear in the number of bytes, regardless of the number of `scan` calls."""

    status: int | None = None
    head: bytes = b""
    chunked: bool = False
    by_close: bool = False  # Whether the body ended with the connection
    need: int = 0  # Length of the buffer at which `scan` can next find the end; 0 while the head is incomplete
    body_start: int = 0
    body_end: int | None = None  # End of a body with Content-Length, or of a chunked one that has ended, with trailers
    position: int = 0  # Offset up to which the response has been scanned
    bounds: array[int] = field(default_factory=partial(array, "q"))  # Start and end of each chunk's data
    events: bool = True  # Whether each chunk begins with `data: `, and each but the last ends with an empty line
    ended: bool = False

    def scan(self, raw: bytes | bytearray, start: int = 0) -> bool:
        """Scan the new bytes of the response, and return True once the response is complete.

        `raw` contains the response from offset `start` on. Callers may leave out bytes that were already scanned: for a
        chunked body, `start` may be any offset up to `self.position`. Raises ProtocolError if the bytes are not valid
        HTTP/1.1.
        """
        if self.status is None and not self._scan_head(raw):
            return False
        if self.chunked:
            self._scan_chunks(raw, start)
        elif self.body_end is not None and start + len(raw) >= self.body_end:
            self.ended = True
        return self.ended

    def at_eof(self, size: int) -> bool:
        """Record that the server closed the connection after `size` bytes. Return True if the response is complete."""
        if self.status is not None and not self.chunked and self.body_end is None:
            self.body_end = size
            self.by_close = self.ended = True
        return self.ended

    @property
    def coding(self) -> str:
        """The Content-Encoding of the body, or "" if the body is not compressed.

        Requests ask for an uncompressed body, but a server or proxy may compress it nevertheless."""
        coding = (_field(self.head.lower(), b"content-encoding") or b"").strip().decode("latin-1")
        return "" if coding == "identity" else coding

    @property
    def retry_after(self) -> str:
        """The value of the Retry-After header, in seconds or as a date, or "" if there is no such header."""
        return self.header("retry-after")

    @property
    def location(self) -> str:
        """The URL to which a redirect leads, or "" if the response is not a redirect."""
        return self.header("location") if self.status is not None and 300 <= self.status < 400 else ""

    def header(self, name: str) -> str:
        """Return the value of a response header, or "" if there is no such header.

        `name` must be in lower case.
        """
        start = self.head.lower().find(f"\r\n{name}:".encode("latin-1"))
        if start < 0:
            return ""
        line = self.head[start + 2 :].split(b"\r\n", 1)[0]
        return line.partition(b":")[2].strip().decode("latin-1")

    def can_reuse(self, size: int) -> bool:
        """Return True if the connection can carry another request after this response (RFC 9112, section 9.3).

        `size` is the number of bytes that were received for this response."""
        head = self.head.lower()
        return (
            self.ended
            and not self.by_close
            and size == self.body_end
            and head.startswith(b"http/1.1")
            and b"close" not in (_field(head, b"connection") or b"")
        )

    def body_bounds(self, raw: bytes | bytearray) -> array[int]:
        """Return the offsets of the body in the response, as start 0, end 0, start 1, end 1, and so on.

        A chunked body has one start and end per chunk. Any other body has only one. If the response is incomplete, the
        offsets cover the part of the body that was received."""
        if self.status is None:
            return array("q")
        if not self.chunked:
            return array("q", (self.body_start, min(len(raw), self.body_end or len(raw))))
        if self.ended:
            return self.bounds
        self._scan_chunks(raw)
        line_end = raw.find(b"\r\n", self.position)
        size = _chunk_size(bytes(raw[self.position : line_end])) if line_end >= 0 else 0
        partial = (line_end + 2, min(len(raw), line_end + 2 + size)) if size else ()
        return self.bounds + array("q", partial)

    def _scan_head(self, raw: bytes | bytearray) -> bool:
        status = 0
        while status < 200:  # after 100 Continue and 103 Early Hints the real response follows
            end = raw.find(b"\r\n\r\n", self.position)
            if (len(raw) if end < 0 else end) > HEAD_LIMIT_BYTES:
                raise ProtocolError(f"response head longer than {HEAD_LIMIT_BYTES} bytes")
            if end < 0:
                if len(raw) >= 5 and not raw.startswith(b"HTTP/"):
                    raise ProtocolError(f"not an HTTP response: {bytes(raw[:40])!r}")
                return False
            head, self.body_start = bytes(raw[self.position : end]), end + 4
            self.position = self.body_start
            line = head.split(b"\r\n", 1)[0]
            version, status_text, *_ = [*line.split(b" ", 2), b""]
            if version not in {b"HTTP/1.0", b"HTTP/1.1"} or not (len(status_text) == 3 and status_text.isdigit()):
                raise ProtocolError(f"not an HTTP/1.1 status line: {line[:60]!r}")
            status = int(status_text)
        self.head, self.status = head, status
        self._set_length(head.lower(), status)
        return True

    def _set_length(self, head: bytes, status: int) -> None:
        coding, length = _field(head, b"transfer-encoding"), _content_length(head)
        if head.count(b"\r\ntransfer-encoding:") > 1:
            raise ProtocolError("more than one header says where the body ends")
        if coding is not None:
            if coding.strip() != b"chunked":
                raise ProtocolError(f"transfer coding {coding!r} was not asked for")
            self.chunked = True
        elif status in (204, 304):
            self.body_end = self.body_start
        elif length is not None:
            if not length.strip().isdigit() or len(length) > 20:
                raise ProtocolError(f"Content-Length {length[:40]!r} is not a number of bytes")
            self.body_end = self.body_start + int(length)
        self.need = self.body_end if self.body_end is not None else 1 << 62

    def _scan_usual(self, raw: bytes | bytearray, offset: int) -> None:
        """Scan the next chunks quickly, and stop at the first chunk that is incomplete or unusual.

        The size of a usual chunk has two or three hexadecimal digits. In a stream of events, a usual chunk also begins
        with a new event. `raw` contains the response from byte `offset` on.

        Only the few bytes around the size line of each chunk are parsed. Parsed size lines are cached, because most
        chunks of a stream have one of a few sizes.
        """
        raw = bytes(raw)
        cursor = self.position - offset - 2  # the line end before the size line
        bounds = list[int]()
        append = bounds.append
        parse, before, behind = (_event_size, 2, 13) if self.events else (_usual_size, 0, 7)
        while (size := parse(raw[cursor - before : cursor + behind])) is not None:
            line_length, chunk_length = size
            append(cursor + line_length)
            cursor += chunk_length
            append(cursor)
        if raw[cursor : cursor + 2] != b"\r\n":  # the last chunk is incomplete
            del bounds[-2:]
        self.bounds += array("q", [offset + bound for bound in bounds] if offset else bounds)
        self.position = self.bounds[-1] + 2 if bounds else self.position

    def _scan_chunks(self, raw: bytes | bytearray, offset: int = 0) -> None:
        """Scan every chunk that is complete. `raw` contains the response from offset `offset` on.

        Raises ProtocolError if a chunk is malformed."""
        while True:
            if self.bounds:
                self._scan_usual(raw, offset)
            position = self.position - offset
            line_end = raw.find(b"\r\n", position)
            if line_end < 0:
                if len(raw) - position > CHUNK_LINE_LIMIT_BYTES:
                    raise ProtocolError("unterminated chunk size line")
                return
            size = _chunk_size(bytes(raw[position:line_end]))
            start = line_end + 2
            if size == 0:
                end = raw.find(b"\r\n\r\n", start - 2)  # behind any trailers
                if end >= 0:
                    self.ended, self.body_end = True, offset + end + 4
                return
            if start + size + 2 > len(raw):
                return
            if not raw.startswith(b"\r\n", start + size):
                raise ProtocolError("chunk data longer than its size says")
            behind = not self.bounds or raw[max(0, position - 4) : position] == b"\n\n\r\n"
            self.events = self.events and behind and raw.startswith(b"data: ", start)
            self.bounds.extend((offset + start, offset + start + size))
            self.position = offset + start + size + 2


def _field(head: bytes, name: bytes) -> bytes | None:
    """Return the value of a header field, or None if the field is missing. `head` must be in lower case."""
    start = head.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else None]


def join_pieces(raw: bytes | bytearray, bounds: array[int]) -> bytes:
    """Return the pieces of `raw` joined. `bounds` contains the start and end offsets of each piece."""
    whole = bytes(raw)
    return b"".join([whole[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)])


def _content_length(head: bytes) -> bytes | None:
    """Return the value of the Content-Length header, or None if there is no such header. `head` is in lower case.

    A proxy may repeat the header with the same value, as several lines or as a list in one line (RFC 9112, section
    6.3). Raises ProtocolError if the values differ."""
    length = _field(head, b"content-length")
    if length is None or (b"," not in length and head.count(b"\r\ncontent-length:") == 1):
        return length
    lines = [line.partition(b":")[2] for line in head.split(b"\r\n")[1:] if line.startswith(b"content-length:")]
    values = {value.strip() for line in lines for value in line.split(b",")}
    if len(values) > 1:
        raise ProtocolError("more than one header says where the body ends")
    return values.pop()


@lru_cache(4096)
def _usual_size(begin: bytes) -> tuple[int, int] | None:
    """Parse the size line of a chunk, and return the offsets at which the chunk's data start and end.

    `begin` starts with the line end (CRLF) before the size line, and the offsets count from there. Return None if the
    size is 0, or if it does not have two or three hexadecimal digits.
    """
    line = _USUAL_LINE.match(begin)
    return (line.end(), line.end() + int(line[1], 16)) if line and int(line[1], 16) else None


@lru_cache(4096)
def _event_size(begin: bytes) -> tuple[int, int] | None:
    """Parse the size line of a chunk in a stream of server-sent events. Return the offsets at which the chunk's data
    start and end.

    `begin` contains these parts: the two newlines that end the previous event, the line end (CRLF) of the previous
    chunk, the size line, and the data of the chunk. The offsets count from the CRLF. Return None if the data do not
    begin with `data: `, if the size is 0, or if the size does not have two or three hexadecimal digits.
    """
    line = _EVENT_LINE.match(begin)
    return _usual_size(begin[2:9]) if line else None


@lru_cache(1024)
def _chunk_size(line: bytes) -> int:
    """Return the size of a chunk from its size line. Raises ProtocolError if the line is malformed."""
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits if digits.isalnum() and b"x" not in digits.lower() else b"", 16)
    except ValueError:
        raise ProtocolError(f"not a chunk size: {line[:40]!r}") from None
