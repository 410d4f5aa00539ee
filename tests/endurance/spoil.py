"""Answers spoiled in a way drawn from a seed, and an oracle of its own for what is left of them: h11 finds the body,
the standard library reads it. Nothing here is the product's."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import h11

HANG, CLOSE, RESET, KEEP = "hang", "close", "reset", "keep"
"""After the bytes: nothing more; FIN; RST; an answer that has ended and a connection that goes on."""
CHUNKED = "Transfer-Encoding: chunked"
EVENTS = "Content-Type: text/event-stream"
ERROR = '{"error":{"message":"boom","type":"InternalServerError","code":500},"object":"error"}'
TRAILERS = b"X-Sum: 1\r\nX-Signed: \r\n"
SECOND = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n"


@dataclass(frozen=True)
class Spoiled:
    """What is sent in place of an answer."""

    raw: bytes
    ending: str = KEEP
    harmless: bool = False
    """Whether every client has to take it for the whole answer."""
    surplus: bytes = b""
    """Sent a little later, when nothing was asked."""


Events = Sequence[bytes]
"""The whole answer: the payloads of its events, in order."""
Spoil = Callable[[Random, Events], Spoiled]


def head(*fields: str, status: str = "200 OK", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{version} {status}", EVENTS, *fields, "", ""]).encode("latin-1")


def body(events: Events, end: bytes = b"\n") -> bytes:
    return b"".join(b"data: " + payload + end + end for payload in events)


def chunks(random: Random, data: bytes, *, odd: bool = False, last: bool = True, trailers: bytes = b"") -> bytes:
    """In HTTP chunks of any sizes; `odd`: with extensions, zeros in front and capitals."""
    made, place = [], 0
    while place < len(data):
        piece = data[place : place + random.choice((1, 7, 60, 400, 5000))]
        size = b"%0*X" % (random.randint(1, 12), len(piece)) if odd else b"%x" % len(piece)
        made.append(size + (b';a=b;c="d e"' if odd else b"") + b"\r\n" + piece + b"\r\n")
        place += len(piece)
    return b"".join(made) + (b"0\r\n" + trailers + b"\r\n" if last else b"")


def whole(random: Random, data: bytes, *fields: str, **more: Any) -> bytes:
    return head(CHUNKED, *fields) + chunks(random, data, **more)


def _fine(make: Callable[[Random, Events], bytes], ending: str = KEEP, surplus: bytes = b"") -> Spoil:
    return lambda random, events: Spoiled(make(random, events), ending, harmless=True, surplus=surplus)


def _bad(make: Callable[[Random, Events], bytes], *endings: str) -> Spoil:
    return lambda random, events: Spoiled(make(random, events), random.choice(endings or (CLOSE, RESET)))


def _sized(data: bytes, length: str, *fields: str) -> bytes:
    return head(f"Content-Length: {length}", *fields) + data


def _flipped(random: Random, data: bytes, least: int = 0) -> bytes:
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        made[random.randrange(least, len(made))] = random.randrange(256)
    return bytes(made)


def _edited(random: Random, data: bytes) -> bytes:
    """Some bytes taken out, put in twice, or moved."""
    start = random.randrange(len(data))
    end = min(len(data), start + random.choice((1, 3, 20, 200)))
    place = random.randrange(len(data))
    return random.choice(
        (
            data[:start] + data[end:],
            data[:end] + data[start:],
            data[:place] + data[start:end] + data[place:],
            data[:start] + random.randbytes(end - start) + data[end:],
        )
    )


def _with(random: Random, events: Events, event: bytes, *, before_end: int = 1) -> list[bytes]:
    place = random.randrange(len(events) - before_end + 1)
    return [*events[:place], event, *events[place:]]


def _more_fields(random: Random, payload: bytes) -> bytes:
    """The same event with fields that nobody knows, and white space; its own words are untouched."""
    if not payload.startswith(b"{"):
        return payload
    strange = random.choice(('"x":null', '"y":[[[1.5e3]]]', '"z":{"a":"\\u00e9\\n\\ud83d\\ude00"}', '"w":"é\u2028"'))
    return b"{ " + strange.encode() + b" ,\t" + payload[1:]


def _cut(random: Random, events: Events) -> Spoiled:
    raw = whole(random, body(events))
    return Spoiled(raw[: random.randrange(len(raw))], random.choice((CLOSE, CLOSE, RESET, RESET, HANG)))


def _numbers(random: Random, events: Events) -> bytes:
    number = random.choice(
        (b"1e999", b"1" * 400, b"-1", b"NaN", b'"8"', b"8.0", b"18446744073709551616", b"null", b"[]")
    )
    made = [event.replace(b'tokens":8', b'tokens":' + number) for event in events]
    return whole(random, body(made))


def _shuffled(random: Random, events: Events) -> bytes:
    made = list(events)
    random.shuffle(made)
    return whole(random, body(made))


_BUSY = b'{"error":{"message":"Model is overloaded","type":"overloaded"}}'
_STATUSES = (
    "201 Created",
    "204 No Content",
    "206 Partial",
    "301 Moved",
    "302 Found",
    "304 Not Modified",
    "307 Temporary",
)
_STATUSES += (
    "401 No",
    "404 Not Found",
    "418 I",
    "429 Many",
    "500 Oh",
    "503 Busy",
    "599 Odd",
    "999 Odd",
    "000 None",
    "099 x",
)
_STRANGE_HEADS = (
    *(
        "HTTP/2.0 200 OK",
        "HTTP/1.1 20 OK",
        "HTTP/1.1 2000 OK",
        "HTTP/1.1 abc OK",
        "HTTP/1.1",
        "http/1.1 200 OK",
        "HTTP/9 200",
    ),
    *(
        "ICY 200 OK",
        "SSH-2.0-OpenSSH_9.2",
        "220 mail ESMTP",
        "",
        " HTTP/1.1 200 OK",
        "HTTP/1.1  200 OK",
        "HTTP/1.1 +20 OK",
    ),
)
_SIZES = (
    "-1",
    "0x10",
    "0X8",
    "+5",
    "1_0",
    " 5",
    "5 5",
    "g",
    "",
    ";",
    "ffffffffffffffffff",
    "1" * 3000,
    "5.0",
    "\u0661",
)
_LENGTHS = ("-1", "+9", "0x20", "9, 9", "1e3", "9 9", "", "many", "9" * 30, "0")

SPOILS: dict[str, Spoil] = {
    # Nothing is lost: whoever does not take these for whole loses an answer.
    "chunks of any size": _fine(lambda r, e: whole(r, body(e))),
    "chunk extensions": _fine(lambda r, e: whole(r, body(e), odd=True)),
    "trailers": _fine(lambda r, e: whole(r, body(e), "Trailer: X-Sum", trailers=TRAILERS)),
    "a length in place of chunks": _fine(lambda _, e: _sized(body(e), str(len(body(e))))),
    "until the end of the connection": _fine(lambda _, e: head("Connection: close") + body(e), CLOSE),
    "HTTP/1.0": _fine(lambda _, e: head(version="HTTP/1.0") + body(e), CLOSE),
    "early answers": _fine(
        lambda r, e: (
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * r.randint(1, 3)
            + b"HTTP/1.1 100 Continue\r\n\r\n" * r.randint(0, 2)
            + whole(r, body(e))
        )
    ),
    "no reason phrase": _fine(lambda r, e: whole(r, body(e)).replace(b"200 OK", b"200", 1)),
    "header of 60 kB": _fine(lambda r, e: whole(r, body(e), "X-Long: " + "a" * 60_000)),
    "500 headers": _fine(lambda r, e: whole(r, body(e), *(f"X-{i}: {i}" for i in range(500)))),
    "header names in any case": _fine(
        lambda r, e: whole(r, body(e)).replace(CHUNKED.encode(), b"tRANSFER-eNCODING: \t chunked \t", 1)
    ),
    "comments and other fields": _fine(
        lambda r, e: whole(r, b": hi\n\n" + body(e).replace(b"data: ", b"event: x\nid: 7\nretry: 9\n:\ndata: "))
    ),
    "CRLF": _fine(lambda r, e: whole(r, body(e, b"\r\n"))),
    "CR": _fine(lambda r, e: whole(r, body(e, b"\r"))),
    "a byte order mark": _fine(lambda r, e: whole(r, b"\xef\xbb\xbf" + body(e))),
    "no space behind the colon": _fine(lambda r, e: whole(r, body(e).replace(b"data: ", b"data:"))),
    "an event on two lines": _fine(lambda r, e: whole(r, body([p.replace(b"{", b"{\ndata:", 1) for p in e]))),
    "fields that nobody knows": _fine(lambda r, e: whole(r, body([_more_fields(r, p) for p in e]))),
    "empty lines everywhere": _fine(lambda r, e: whole(r, b"\n\n" + body(e).replace(b"\n\n", b"\n\n\n\n"))),
    "bytes behind the end": _fine(lambda r, e: whole(r, body(e)) + r.choice((b"\r\n", b"x", SECOND, b"\0" * 99))),
    "bytes behind the length": _fine(
        lambda r, e: _sized(body(e), str(len(body(e)))) + r.choice((b"\r\n", b"x", SECOND))
    ),
    "another answer a moment later": _fine(lambda r, e: whole(r, body(e)), surplus=SECOND),
    "408 a moment later, then closed": _fine(
        lambda r, e: whole(r, body(e)), surplus=b"HTTP/1.1 408 Request Time-out\r\nConnection: close\r\n\r\n"
    ),
    "closed a moment later, unannounced": _fine(lambda r, e: whole(r, body(e)), CLOSE),
    # Something is lost or wrong; what the oracle cannot prove whole must not be taken for it.
    "cut anywhere": _cut,
    "cut between events": _bad(lambda r, e: whole(r, body(e[: r.randrange(len(e))]), last=False), CLOSE, RESET, HANG),
    "reset behind the end": _bad(lambda r, e: whole(r, body(e)), RESET),
    "no end marker": _bad(lambda r, e: whole(r, body(e[: r.randrange(len(e))])), KEEP),
    "the last chunk in the middle": _bad(lambda r, e: whole(r, body(e[:2])) + chunks(r, body(e[2:])), KEEP, CLOSE),
    "an error event": _bad(lambda r, e: whole(r, body(_with(r, e, ERROR.encode()))), KEEP),
    "an event that is not JSON": _bad(
        lambda r, e: whole(r, body(_with(r, e, r.choice((b"{", b"nonsense", b"[DONE", b"\xff\xfe", b"[" * 5000))))),
        KEEP,
    ),
    "nested 100,000 deep": _bad(lambda r, e: whole(r, body(_with(r, e, b'{"x":' * 100_000))), KEEP),
    "a number past its type": _bad(_numbers, KEEP),
    "events in another order": _bad(_shuffled, KEEP),
    "an event twice": _bad(lambda r, e: whole(r, body(_with(r, e, r.choice(e)))), KEEP),
    "an event missing": _bad(lambda r, e: whole(r, body([p for p in e if p is not r.choice(e)])), KEEP),
    "more after the end": _bad(lambda r, e: whole(r, body([*e, *e])), KEEP),
    "some bytes of the body changed": _bad(lambda r, e: whole(r, _flipped(r, body(e))), KEEP),
    "some bytes of the body moved": _bad(lambda r, e: whole(r, _edited(r, body(e))), KEEP),
    "some bytes on the wire changed": _bad(lambda r, e: _flipped(r, whole(r, body(e))), CLOSE, RESET, HANG),
    "some bytes on the wire moved": _bad(lambda r, e: _edited(r, whole(r, body(e))), CLOSE, RESET, HANG),
    "the head changed": _bad(lambda r, e: _flipped(r, head(CHUNKED)) + chunks(r, body(e)), CLOSE, HANG),
    "a chunk size that is none": _bad(
        lambda r, e: (
            head(CHUNKED)
            + chunks(r, body(e[:1]), last=False)
            + f"{r.choice(_SIZES)}\r\n".encode()
            + body(e[1:])[:16]
            + b"\r\n"
            + chunks(r, body(e[1:])[16:])
        ),
        CLOSE,
        HANG,
    ),
    "a chunk longer or shorter than it says": _bad(
        lambda r, e: head(CHUNKED) + b"%x\r\n" % (len(body(e)) + r.choice((-9, -1, 1, 9))) + body(e) + b"\r\n0\r\n\r\n",
        CLOSE,
        HANG,
    ),
    "a length that is none": _bad(lambda r, e: _sized(body(e), r.choice(_LENGTHS)), CLOSE, HANG),
    "a length too small or large": _bad(
        lambda r, e: _sized(body(e), str(len(body(e)) + r.choice((-40, -1, 1, 40)))), CLOSE, RESET, HANG
    ),
    "two lengths": _bad(lambda _, e: _sized(body(e), "20", f"Content-Length: {len(body(e))}"), CLOSE, HANG),
    "a length and chunks": _bad(lambda r, e: whole(r, body(e), "Content-Length: 20"), KEEP, CLOSE),
    "two transfer codings": _bad(lambda r, e: whole(r, body(e), CHUNKED), CLOSE),
    "a transfer coding nobody asked for": _bad(
        lambda r, e: (
            head(f"Transfer-Encoding: {r.choice(('gzip, chunked', 'identity', 'gzip', 'chunked, gzip'))}")
            + chunks(r, body(e))
        ),
        CLOSE,
    ),
    "compressed": _bad(lambda r, e: whole(r, gzip.compress(body(e)), "Content-Encoding: gzip"), KEEP),
    "deflated": _bad(lambda r, e: whole(r, zlib.compress(body(e)), "Content-Encoding: deflate"), KEEP),
    "said to be compressed": _bad(
        lambda r, e: whole(r, body(e), f"Content-Encoding: {r.choice(('gzip', 'br', 'zstd', 'x'))}"), KEEP
    ),
    "a refusal, compressed": _bad(
        lambda r, _: (
            head("Content-Encoding: gzip", f"Content-Length: {len(gzip.compress(_BUSY))}", status="429 Busy")
            + r.choice((gzip.compress(_BUSY), _BUSY[:9] * 9))
        ),
        CLOSE,
    ),
    "another status": _bad(
        lambda r, e: whole(r, body(e)).replace(b"200 OK", r.choice(_STATUSES).encode(), 1), KEEP, CLOSE
    ),
    "a redirect": _bad(
        lambda r, _: head("Location: http://127.0.0.1:1/", "Content-Length: 0", status=f"30{r.choice('12378')} Go"),
        KEEP,
    ),
    "no HTTP": _bad(
        lambda r, e: whole(r, body(e)).replace(b"HTTP/1.1 200 OK", r.choice(_STRANGE_HEADS).encode(), 1), CLOSE, HANG
    ),
    "any bytes": _bad(lambda r, _: r.randbytes(r.choice((1, 20, 5000, 100_000))), CLOSE, RESET, HANG),
    "nothing": _bad(lambda _r, _e: b"", CLOSE, RESET, HANG),
    "early answers without end": _bad(
        lambda r, _: b"HTTP/1.1 100 Continue\r\n\r\n" * r.choice((10, 3_000)), CLOSE, HANG
    ),
    "3,000 early answers": _bad(lambda r, e: b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000 + whole(r, body(e)), KEEP),
    "a head of a megabyte": _bad(lambda r, e: whole(r, body(e), "X-Long: " + "a" * 1_000_000), KEEP),
    "a line of 5 MB": _bad(lambda r, e: whole(r, body(_with(r, e, b"x" * 5_000_000))), KEEP),
    "a page": _bad(lambda _, __: _sized(b"<html><title>Sign in</title></html>", "35"), KEEP),
    "NULs": _bad(lambda r, e: whole(r, body(e).replace(b"\n\n", b"\0\n\n")), KEEP),
    "a finish reason that is none": _bad(
        lambda r, e: whole(
            r, body([p.replace(b'"length"', r.choice((b'"error"', b'"abort"', b'"content_filter"'))) for p in e])
        ),
        KEEP,
    ),
}


def drawn(seed: str, number: int) -> tuple[str, Random]:
    """The name of case `number`, each in its turn, and what draws the rest of it."""
    names = list(SPOILS)
    Random(seed).shuffle(names)
    return names[number % len(names)], Random(f"{seed}/{number}")


FRAMING = (b"content-length", b"transfer-encoding", b"connection", b"content-encoding")


def _bare(raw: bytes) -> bytes:
    """Without early answers, and without headers that say nothing of the body: h11 is strict about these too."""
    while raw.startswith(b"HTTP/1.1 10"):
        raw = raw.partition(b"\r\n\r\n")[2]
    top, end, rest = raw.partition(b"\r\n\r\n")
    first, *lines = top.split(b"\r\n")
    return b"\r\n".join([first, *(line for line in lines if line.lower().startswith(FRAMING))]) + end + rest


def body_of(raw: bytes, *, closed: bool) -> tuple[int, bytes]:
    """Status and as much of the body as h11 takes for one."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 16)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    client.send(h11.EndOfMessage())
    status, data = 0, bytearray()
    if not raw.startswith(b"HTTP/1."):
        return status, b""
    try:
        client.receive_data(_bare(raw))
        if closed:
            client.receive_data(b"")
        while not isinstance(event := client.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                data += event.data
            elif not isinstance(event, h11.InformationalResponse):
                break
    except h11.RemoteProtocolError:
        pass
    return status, bytes(data)


def payloads_of(data: bytes) -> list[bytes]:
    """Return the payloads of all events. The last one needs no blank line behind it if it is `[DONE]` or a JSON object
    (docs/concepts/streams.md)."""
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found, lines = [], list[bytes]()
    for line in text.removesuffix(b"\n").split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
        elif not line and lines:
            found.append(b"\n".join(lines))
            lines = []
    last = b"\n".join(lines)
    try:
        is_whole = isinstance(json.loads(last), dict)
    except (ValueError, RecursionError):
        is_whole = last.strip() == b"[DONE]"
    return [*found, last] if is_whole else found


def _stated(event: dict[str, object], field: str, known: object) -> object:
    """Return the total of tokens after an event: the one known before where the event has none, and None (unknown)
    where its value is no number of tokens, which says nothing (docs/concepts/streams.md)."""
    if field not in event:
        return known
    value = event[field]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= 10_000_000 else None


def proven(server: str, endpoint: str, raw: bytes, *, closed: bool, asked: int) -> bool:
    """Whether these bytes prove that the answer is whole: 200, each event is JSON and no error, no text behind the end
    marker, and the server's own total, where there is one, is what was asked (TGI may say less). A total may stand
    behind `[DONE]`: some LightLLM versions send it there."""
    status, data = body_of(raw, closed=closed)
    if status != 200:
        return False
    total: object = None
    ended = reason = False
    streamed = 0
    for payload in payloads_of(data):
        if payload == b"[DONE]":
            ended = endpoint != "generate"
            continue
        try:
            event = json.loads(payload.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return False
        if not isinstance(event, dict) or event.get("error"):
            return False
        if endpoint == "generate":
            details = event.get("details") or {}
            total = _stated(details, "generated_tokens", total)
            total = _stated(event.get("token") or {}, "count_output_tokens", total)
            if event.get("finished") or event.get("generated_text") is not None:
                ended = True
                break
        else:
            total = _stated(event.get("usage") or {}, "completion_tokens", total)
            choices = event.get("choices") or []
            streamed += any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)
            if ended and any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices):
                return False
            reason |= any(choice.get("finish_reason") for choice in choices)
    ended |= reason and server == "openai"
    # A total that the chunks refute is reported beside their count, and does not decide (docs/concepts/tokens.md).
    return ended and (
        total in (None, asked) or streamed == asked or (server == "tgi" and isinstance(total, int) and total < asked)
    )
