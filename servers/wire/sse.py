"""Splits the body of a response into server-sent events: the payload of each event, and the offset of its end.

        data: {"a":1}⏎⏎: keep-alive⏎⏎data: {"b":2}⏎⏎data: {"c
        └── event 0 ──┘└─ no event ─┘└── event 1 ──┘└─ rest ┘

Events follow the WHATWG HTML standard (section 9.2.6, "Interpreting an event stream"):

- A line ends with LF, CR LF or CR. A byte order mark at the start of the body is skipped.
- The `data` lines up to a blank line are joined by LF. The result is the payload of the event.
- Comments and the fields `id` and `retry` are skipped.

Some servers deviate from the standard. This module therefore deviates from the standard in six ways:

1. **Errors outside `data`.** A line `error: ...`, and an event whose name (`event:`) contains "error" or "exception",
   are errors of the server. Their payload is `{"error": ...}` with the text that the server sent.
2. **Errors without a field.** A line without a field is an error if it is a JSON error. In an event stream, such a line
   is also an error if it contains the word "error". Every other line without a field is skipped.
3. **Named events.** An event that has a name and whose data is not JSON (`event: ping`) is a heartbeat.
4. **Heartbeats.** An event with empty data has an empty payload, which the parser of every server's API ignores.
5. **A missing blank line at the end.** The last event needs no blank line and no line end under two conditions: the
   response has ended as HTTP requires, and the data of the event is `[DONE]` or complete JSON. Otherwise the event is
   incomplete and becomes the `rest`.
6. **Missing blank lines between events.** Several `data` lines are separate events if they are not JSON when joined,
   but each line is JSON or `[DONE]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from loadgen.servers.backends.error_messages import error_in
from loadgen.servers.backends.lenient import DONE, parse, plain

Split = tuple[list[bytes], list[int], bytes]
"""The payload of each event, the offset in the body just past each event, and the rest that is not an event."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_ERROR_NAME = re.compile(rb"error|exception", re.IGNORECASE)
_FIELD_NAME = re.compile(rb"[\w.-]+")
_ERROR_WORD = re.compile(rb"\berror\b", re.IGNORECASE)
_STRAY_LIMIT_BYTES = 65_536
"""Maximum number of bytes that are examined in lines without a field."""
_FIELDS = (b"data", b"event", b"id", b"retry", b"")
"""The fields of the standard. A comment has an empty name."""
_COLON, _LINE_ENDS = ord(":"), b"\r\n"


def split_events(body: bytes, *, closed: bool = False) -> Split:
    """Split a response body into server-sent events.

    Return the payloads, the offset of each event's end, and the remaining bytes that do not form an event. `closed` is
    True if the response ended as HTTP requires, so that no more bytes can follow. No input raises an error.

    The usual body has LF line ends, one `data` line per event, and a name for every event or for none. Its events take
    about 0.1 us each, or 0.4 us with names. Any other body is split line by line, in about 2 us per event."""
    usual = _split_usual(body) or _split_named(body)
    if usual is None:
        return _split_exact(body, closed=closed)
    payloads, ends, rest = usual
    if not rest:
        return usual
    more, more_ends, rest = _split_exact(body, start=ends[-1], closed=closed)
    return payloads + more, ends + more_ends, rest


def payloads_of_chunks(raw: bytes, bounds: Sequence[int]) -> list[bytes] | None:
    """Return the payload of each HTTP chunk if every chunk is one event with one `data` line, otherwise None.

    `raw` is the response, and `bounds` contains the start and end offsets of each chunk's data in `raw`. The caller
    guarantees that each chunk begins with `data: `, and that each chunk except the last ends with an empty line.
    """
    if not bounds or not raw.startswith(b"\n\n", bounds[-1] - 2):
        return None
    payloads = [raw[start + 6 : end - 2] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    # Searching for a character in the joined payloads is ten times as fast as counting it.
    together = b"".join(payloads)
    return None if b"\n" in together or b"\r" in together else payloads


def is_event_stream(body: bytes) -> bool:
    """Return True if a body can be an event stream, judging by its first line. The line may be incomplete."""
    if _BYTE_ORDER_MARK.startswith(body):
        return True
    line = _LINE_END.split(body.removeprefix(_BYTE_ORDER_MARK).lstrip(b"\r\n"), 1)[0]
    name, colon, _ = line.partition(b":")
    fields = (*_FIELDS, b"error")
    return name in fields if colon else any(field.startswith(name) for field in fields)


def _split_usual(body: bytes) -> Split | None:
    """Split a body in the usual format: every event is one `data` line, followed by a blank line.

    Return None if the body has another format. Also return None if a space follows the colon in some `data` lines, but
    not in all of them.
    """
    prefix = b"data: " if body.startswith(b"data: ") else b"data:"
    closed = body.rfind(b"\n\n") + 2
    if closed < 2 or b"\r" in body or not body.startswith(prefix):
        return None
    between = b"\n\n" + prefix
    payloads = body[len(prefix) : closed - 2].split(between)
    # If the body has exactly two line ends per event, no payload contains a comment, another field or a second line.
    if body.count(b"\n", 0, closed) != 2 * len(payloads):
        return None
    if len(prefix) == 5 and b"\n\ndata: " in body:
        return None
    step = len(between)
    ends = accumulate([step + len(payload) for payload in payloads])
    return payloads, [*ends], body[closed:]


def _split_named(body: bytes) -> Split | None:
    """Split `body` into its events, if every event consists of two lines: `event: NAME`, and `data: ` with a JSON
    object.

    Return None for any other body. Also return None if the name of an event contains `error` or `exception`.
    """
    closed = body.rfind(b"\n\n") + 2
    if closed < 2 or b"\r" in body or not body.startswith(b"event: "):
        return None
    blocks = body[: closed - 2].split(b"\n\n")
    parts = [block.partition(b"\ndata: {") for block in blocks]
    names = {name for name, _, _ in parts}
    # If each block has a separator, three line ends per event leave room for no other line.
    usual = all(separator for _, separator, _ in parts) and body.count(b"\n", 0, closed) == 3 * len(blocks)
    if not usual or any(not name.startswith(b"event: ") or _ERROR_NAME.search(name) for name in names):
        return None
    ends = accumulate([len(block) + 2 for block in blocks])
    return [b"{" + payload for _, _, payload in parts], [*ends], body[closed:]


def _split_exact(body: bytes, *, start: int = 0, closed: bool = False) -> Split:
    """Split a body into events line by line. This is slow, but handles every body.

    `start` is the offset at which the first event to split begins. `closed` is True if no more bytes can follow.
    """
    if start == 0 and body.startswith(_BYTE_ORDER_MARK):
        start = len(_BYTE_ORDER_MARK)
    lines = body[start:].splitlines(keepends=True)  # for bytes, only LF, CR LF and CR are line ends
    open_line = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
    events, block = _Events(any_field=start > len(_BYTE_ORDER_MARK)), _Block()
    data, data_ends = block.data, block.data_ends
    done = end = start
    for line in lines:
        end += len(line)
        if line.startswith(b"data:"):
            data.append(line[6 if line.startswith(b" ", 5) else 5 :].rstrip(b"\r\n"))
            data_ends.append(end)
        elif line[0] in _LINE_ENDS:
            if len(data) == 1 and not block.odd:
                events.put(data[0], end)
                data.clear()
                data_ends.clear()
            elif data or block.odd:
                events.add(block, end)
                block = _Block()
                data, data_ends = block.data, block.data_ends
            done = end
        elif line[0] == _COLON:
            events.any_field = True
        else:
            events.any_field |= block.take(line.rstrip(b"\r\n"), end)
    if closed and open_line:
        block.take(open_line, len(body))
    if _add_last(events, block, len(body), closed=closed):
        done = len(body)
    return *events.result(), body[done:]


def _add_last(events: _Events, block: _Block, end: int, *, closed: bool) -> bool:
    """Add the events in the last lines of a body to `events`, although no blank line follows these lines.

    `block` contains the lines, and `end` is the offset at which they end. `closed` is True if no more bytes can follow.
    Return True if every line belongs to an added event. Return False if some lines are still an incomplete event.
    """
    if closed and block.is_whole():
        events.add(block, end)
        return True
    if block.other:
        events.add(_Block(other=block.other), end)
    return bool(block.other) and not block.data


class _Block:
    """The lines between two blank lines of an event stream."""

    __slots__ = ("data", "data_ends", "name", "odd", "other")

    def __init__(self, other: list[bytes] | None = None) -> None:
        self.data: list[bytes] = []
        self.data_ends: list[int] = []
        """Offset just past each `data` line."""
        self.name = b""
        """The event's name, from an `event` field."""
        self.other = [] if other is None else other
        """Lines that are not fields of the standard. An `error` field is stored as the payload of its value."""
        self.odd = other is not None
        """Whether the block has anything but `data` lines and ignored fields."""

    def take(self, line: bytes, end: int) -> bool:
        """Add `line` to the block. Return True if the line has a field that the SSE standard defines, such as `data`.

        The line must not be blank, and `end` is the offset at which the line ends. The result is also True for a
        comment.
        """
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self.data.append(value)
            self.data_ends.append(end)
        elif field == b"event":
            self.name, self.odd = value, True
        elif field.strip().lower() == b"error":
            self.other.append(_error(value))
            self.odd = True
        elif not _FIELD_NAME.fullmatch(field) and field:
            self.other.append(line)
            self.odd = True
        return field in _FIELDS

    def is_whole(self) -> bool:
        """Return True if the lines of the block form a complete event even without a blank line after them."""
        if self.name and _ERROR_NAME.search(self.name):
            return True
        if not self.data:
            return False
        return all(_is_whole(payload) for payload in self.data) or _is_whole(b"\n".join(self.data))


class _Events:
    """The events of a response body, as far as the body has been parsed."""

    def __init__(self, *, any_field: bool) -> None:
        self.any_field = any_field
        """True if the body has a field of the SSE standard, such as `data`. Such a body is an event stream."""
        self._payloads: list[bytes] = []
        self._ends: list[int] = []
        self._in_words: list[int] = []
        """Indices of payloads that are errors in plain text, not in JSON."""

    def put(self, payload: bytes, end: int) -> None:
        """Add one event with this payload. `end` is the offset just past the event."""
        self._payloads.append(payload)
        self._ends.append(end)

    def add(self, block: _Block, end: int) -> None:
        """Add the events of `block`, the lines between two blank lines. Usually this is one event.

        `end` is the offset in the body just past the block.
        """
        self.any_field |= bool(block.data)
        if block.name and _ERROR_NAME.search(block.name):
            self.put(_error(b"\n".join(block.data)), end)
        elif len(block.data) == 1:
            self.put(_named_payload(block.name, block.data[0]), end)
        elif block.data:
            self._put_lines(block, end)
        if block.other:
            self._put_other(b"\n".join(block.other)[:_STRAY_LIMIT_BYTES], end)

    def result(self) -> tuple[list[bytes], list[int]]:
        """Return two lists: the payloads of all events, and the offsets in the body at which the events end.

        Both lists are empty if the body is probably plain text and no event stream. Such a body meets two conditions:
        all its events are lines that look like an error message in plain text, and no line is a field of the SSE
        standard, such as `data`.
        """
        if self._in_words and not (self.any_field or len(self._ends) > len(self._in_words)):
            return [], []
        return self._payloads, self._ends

    def _put_lines(self, block: _Block, end: int) -> None:
        joined = b"\n".join(block.data)
        if _is_whole(joined) or not all(_is_whole(line) for line in block.data):
            self.put(_named_payload(block.name, joined), end)
            return
        for payload, line_end in zip(block.data, block.data_ends, strict=True):
            self.put(payload, line_end)

    def _put_other(self, text: bytes, end: int) -> None:
        if error_in(text):
            self.put(text, end)
        elif _ERROR_WORD.search(text) and not isinstance(parse(text), dict):
            self._in_words.append(len(self._payloads))
            self.put(_error(text), end)


def _named_payload(name: bytes, data: bytes) -> bytes:
    """Return the payload of an event with the given name and data. The payload of a heartbeat is empty.

    An event is a heartbeat if it has a name other than `message`, and its data is not JSON.
    """
    heartbeat = name not in (b"", b"message") and not data.lstrip().startswith((b"{", b"["))
    return b"" if heartbeat else data


def _error(data: bytes) -> bytes:
    """Return the payload of a server error: `data` if it is a JSON error, otherwise `{"error": ...}` with the data."""
    error = parse(data)
    if isinstance(error, dict) and error.get("error"):
        return data
    if not error:
        error = {"message": data.decode("utf-8", "replace").strip() or "an error event without a message"}
    return msgspec.json.encode({"error": error})


def _is_whole(payload: bytes) -> bool:
    """Return True if the payload is complete, which means that it is `[DONE]` or a JSON object."""
    return plain(payload) == DONE or isinstance(parse(payload), dict)
