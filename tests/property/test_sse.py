"""The SSE splitter against an independent reading of the standard, on any bytes."""

from __future__ import annotations

import json
from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.servers.wire.http1 import ResponseFraming
from loadgen.servers.wire.sse import _split_exact, _split_usual, payloads_of_chunks, split_events
from tests.support.loopback import chunked

FIELDS = (b"data:", b"data: ", b"data", b"data:  ", b":", b": ping", b"id: 7", b"event:x")
LINE_ENDS = (b"\n", b"\n\n", b"\r", b"\r\n")
VALUES = (b"{}", b'{"a":1}', b"[DONE]", b" ", b"\x00", b"\xef\xbb\xbf", b"\xff", b"\xc2\x85", b"\xe2\x80\xa8")
PIECES = st.sampled_from(FIELDS + LINE_ENDS + VALUES)
BODIES = st.one_of(st.lists(PIECES, max_size=24).map(b"".join), st.binary(max_size=60))
USUAL = st.tuples(
    st.sampled_from([b"data: ", b"data:"]),
    st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8),
    st.binary(max_size=12),
)


def _reference(body: bytes) -> list[tuple[bytes, int]]:
    """Split a body byte by byte, as the standard's prose has it: (payload, offset past the event's blank line).

    Two deviations from the standard, which the module `sse` documents, are part of the reference: an event that has a
    name and whose data is not JSON is a heartbeat without a payload. Several lines that are JSON or `[DONE]` each, but
    not together, are separate events.
    """
    position = 3 if body[:3] == b"\xef\xbb\xbf" else 0
    line, data, name, ends, events = bytearray(), bytearray(), b"", [], []
    while position < len(body):
        byte = body[position : position + 1]
        position += 1
        if byte not in (b"\n", b"\r"):
            line += byte
            continue
        if byte == b"\r" and body[position : position + 1] == b"\n":
            position += 1
        if not line:
            events += _events_of(bytes(data), ends, name, position)
            data.clear()
            ends.clear()
            name = b""
        elif b":" not in line:
            if line == b"data":
                data += b"\n"
                ends.append(position)
        elif line[:5] == b"data:":
            value = line[5:]
            data += (value[1:] if value[:1] == b" " else value) + b"\n"
            ends.append(position)
        elif line[:6] == b"event:":
            name = bytes(line[6:]).removeprefix(b" ")
        line.clear()
    return events


def _events_of(data: bytes, ends: list[int], name: bytes, position: int) -> list[tuple[bytes, int]]:
    """Return the events of one block. `data` has a line end after each line, and `ends` the offset after each line."""
    payload = data.removesuffix(b"\n")
    lines = payload.split(b"\n")
    if len(lines) > 1 and not _is_whole(payload) and all(map(_is_whole, lines)):
        return [*zip(lines, ends, strict=True)]
    heartbeat = name and not payload.lstrip().startswith((b"{", b"["))
    return [(b"" if heartbeat else payload, position)] if data else []


def _is_whole(payload: bytes) -> bool:
    """Return True for `[DONE]` and for a JSON object."""
    if payload.strip() == b"[DONE]":
        return True
    try:
        return isinstance(json.loads(payload.decode()), dict)
    except ValueError:
        return False


@given(BODIES)
@example(b"data: a\n\ndata: b\n\n\n")
@example(b"data: a\n\n: ping\n\ndata: b\n\n")
@example(b"data:a\n\ndata: b\n\n")
@example(b"data: a\r\n\r\ndata: b\r\n\r\n")
@example(b"data: a\n\ndata: b\r\n\r\n")
@example(b"data: a\n\ndata: b\n")
@example(b"event:x\ndata: a\n\nevent:x\ndata:{}\n\n")
@example(b"data: {}\ndata: [DONE]\n\n")
def test_any_body_splits_as_the_standard_says(body: bytes) -> None:
    """Payloads and offsets equal those of the byte-by-byte reference, whichever path the body takes."""
    payloads, ends, _ = split_events(body)
    assert list(zip(payloads, ends, strict=True)) == _reference(body)


@given(BODIES, st.booleans())
@example(b'data: {}\n\n{"error": "no memory"}\n', False)
@example(b"data: a\n\n \n", False)
def test_the_short_path_never_differs_from_the_exact_one(body: bytes, closed: bool) -> None:
    """Whether a body takes the short path or not, it is split as by the exact path, the rest included."""
    assert split_events(body, closed=closed) == _split_exact(body, closed=closed)


@given(USUAL)
def test_the_usual_body_takes_the_short_path(parts: tuple[bytes, list[bytes], bytes]) -> None:
    """`data` lines and blank lines alone need no loop, so that a fast server is never slowed down by its parser."""
    prefix, payloads, _ = parts
    if prefix == b"data:":
        payloads = [payload.lstrip(b" ") for payload in payloads]
    body = b"".join(prefix + payload + b"\n\n" for payload in payloads)
    usual = _split_usual(body)
    assert payloads == (usual[0] if usual else [])


@given(BODIES, st.data())
def test_a_body_cut_anywhere_loses_only_what_was_cut(body: bytes, data: st.DataObject) -> None:
    """The events that ended before the cut are the same, and `rest` is what was left of the one it fell into."""
    cut = data.draw(st.integers(0, len(body)))
    payloads, _, rest = split_events(body[:cut])
    whole = [event for event in zip(*split_events(body)[:2], strict=True) if event[1] <= cut]
    assert payloads[: len(whole)] == [payload for payload, _ in whole]
    assert len(payloads) - len(whole) <= 1  # a cut between CR and LF ends the event one byte earlier
    assert body[:cut].endswith(rest)
    assert split_events(rest)[0] == []


@given(USUAL)
def test_comments_and_keep_alives_change_no_payload(parts: tuple[bytes, list[bytes], bytes]) -> None:
    """A keep-alive between any two events adds to their offsets and to nothing else."""
    prefix, payloads, comment = parts
    noise = b": " + comment.translate(None, b"\r\n") + b"\n\n"
    body = b"".join(prefix + payload + b"\n\n" for payload in payloads)
    noisy = noise + b"".join(prefix + payload + b"\n\n" + noise for payload in payloads)
    (quiet, ends, _), (loud, later, _) = split_events(body), split_events(noisy)
    assert loud == quiet
    assert later == [end + (number + 1) * len(noise) for number, end in enumerate(ends)]


CHUNKS = st.lists(st.one_of(st.binary(max_size=12).map(b"data: %s\n\n".__mod__), BODIES.filter(bool)), max_size=5)


@given(CHUNKS)
@example([b"data: a\n\n", b"data: b\n\n"])
@example([b"data: a\n\nda", b"ta: b\n\n"])
@example([b"data: a\n\n", b"data: b\n", b"\n"])
@example([b"data: a\n\n", b"data: a long one\n\n", b"data: b\n\n"])
@example([b"data: a\n\n\r\n5\r\ndata: b\n\n", b"data: c\n\n"])
def test_events_of_one_chunk_each_are_those_of_the_body(chunks: list[bytes]) -> None:
    """Found at once in the framed bytes or left to `split_events`, never told otherwise than by it."""
    raw, framing = b"".join(chunked(*chunks)), ResponseFraming()
    assert framing.scan(raw)
    payloads = payloads_of_chunks(raw, framing.bounds) if framing.events else None
    expected, ends, rest = split_events(b"".join(chunks))
    if payloads is not None:
        assert payloads == expected
        assert ends == [*accumulate(map(len, chunks))]
        assert not rest
    usual = [chunk[:6] == b"data: " and chunk[-2:] == b"\n\n" and chunk.count(b"\n") == 2 for chunk in chunks]
    assert (payloads is None) == (not chunks or not all(usual) or b"\r" in b"".join(chunks))
