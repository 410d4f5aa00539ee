"""Cases of servers whose responses during the run are odd, broken or cut off."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from tests.endurance.hostile_judge import ALL, ANY, BURST, EITHER, FAILED, MEASURED, NONE, SERVER, Case
from tests.endurance.hostile_server import (
    CLOSE,
    HALF,
    HANG,
    HEAD,
    NOTHING,
    PAYLOADS,
    RESET,
    SECRET,
    VLLM_PAGES,
    WHOLE,
    Behaviour,
    Reply,
    events,
    page,
    reply,
    stream,
    text,
    usage,
)

BODY = events()
HEAD_LINES = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD_LINES + b"Transfer-Encoding: chunked\r\n\r\n"
SIZED = HEAD_LINES + b"Content-Length: %d\r\n\r\n" % len(BODY)
FIRST, SECOND, THIRD, COUNT, DONE = PAYLOADS


def chunk(data: bytes) -> bytes:
    """Return one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK", end: bytes = b"\r\n") -> bytes:
    """Return the head of a response with these header lines."""
    return end.join([first, *lines, b"", b""])


def with_event(event: bytes, index: int = 1) -> bytes:
    """Return the whole answer with one more block of bytes at the start of event `index`."""
    return events(PAYLOADS[:index]) + event + events(PAYLOADS[index:])


TYPE, LENGTH = b"Content-Type: text/event-stream", b"Content-Length: %d" % len(BODY)
CODING = b"Transfer-Encoding: chunked"
LAST = chunk(BODY) + b"0\r\n\r\n"

FRAMES: dict[str, tuple[str, Reply]] = {
    # Nothing is lost: every request must be complete.
    "every byte in a segment of its own": (ALL, reply(*[bytes([byte]) for byte in stream(BODY)])),
    "head and body in one segment with a length": (ALL, reply(SIZED + BODY)),
    "a character of UTF-8 split over chunks": (
        ALL,
        reply(
            CHUNKED,
            *[chunk(bytes([byte])) for byte in events([text("é€😀".encode().decode()), *PAYLOADS[1:]])],
            b"0\r\n\r\n",
        ),
    ),
    "a pause within the head": (ALL, reply(SIZED[:30], 0.2, SIZED[30:], BODY)),
    "a pause within CR LF of the head": (ALL, reply(CHUNKED[:-1], 0.1, b"\n" + LAST)),
    "a pause within a chunk size": (
        ALL,
        reply(CHUNKED + b"1", 0.1, b"%x" % 0, b"\r\n" + BODY[:16] + b"\r\n", chunk(BODY[16:]), b"0\r\n\r\n"),
    ),
    "chunk extensions with quotes and semicolons": (
        ALL,
        reply(CHUNKED + b'%x;a="b;c";d\r\n%b\r\n0;last\r\n\r\n' % (len(BODY), BODY)),
    ),
    "a chunk size with leading zeros": (ALL, reply(CHUNKED + b"0000%x\r\n%b\r\n000\r\n\r\n" % (len(BODY), BODY))),
    "trailers that look like headers": (
        ALL,
        reply(CHUNKED + chunk(BODY) + b"0\r\nContent-Length: 5\r\nTransfer-Encoding: gzip\r\n\r\n"),
    ),
    "lower-case headers": (ALL, reply(head(TYPE.lower(), CODING.lower()) + LAST)),
    "upper-case headers and values": (ALL, reply(head(TYPE.upper(), CODING.upper()) + LAST)),
    "headers without a space": (
        ALL,
        reply(head(b"Content-Type:text/event-stream", b"Transfer-Encoding:chunked") + LAST),
    ),
    "headers with tabs around the value": (ALL, reply(head(TYPE, b"Transfer-Encoding:\t chunked\t ") + LAST)),
    "the content type twice": (ALL, reply(head(TYPE, TYPE, CODING) + LAST)),
    "a charset and other parameters": (ALL, reply(head(TYPE + b'; charset="utf-8"; q=1', CODING) + LAST)),
    "headers in Latin-1": (ALL, reply(head(b"X-Name: caf\xe9", TYPE, CODING) + LAST)),
    "headers in UTF-8": (ALL, reply(head("X-Name: 😀".encode(), TYPE, CODING) + LAST)),
    "an empty header value": (ALL, reply(head(b"X-Empty:", TYPE, CODING) + LAST)),
    "the same length twice": (ALL, reply(head(TYPE, LENGTH, LENGTH) + BODY)),
    "1,000 cookies": (ALL, reply(head(*[b"Set-Cookie: a%d=b" % index for index in range(1_000)], TYPE, CODING) + LAST)),
    "no reason phrase and no space": (ALL, reply(head(TYPE, CODING, first=b"HTTP/1.1 200") + LAST)),
    "a reason phrase in UTF-8": (ALL, reply(head(TYPE, CODING, first="HTTP/1.1 200 Très bien".encode()) + LAST)),
    "a reason phrase of 8 kB": (ALL, reply(head(TYPE, CODING, first=b"HTTP/1.1 200 " + b"a" * 8_000) + LAST)),
    "early hints before the response": (
        ALL,
        reply(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 0.05, stream(BODY)),
    ),
    "processing, three times": (
        ALL,
        reply(b"HTTP/1.1 102 Processing\r\n\r\n", 0.05, b"HTTP/1.1 102 Processing\r\n\r\n" * 2, stream(BODY)),
    ),
    "HTTP/1.0 with a length": (ALL, reply(head(TYPE, LENGTH, first=b"HTTP/1.0 200 OK") + BODY, ending=CLOSE)),
    "HTTP/1.0 that keeps the connection": (
        ALL,
        reply(head(TYPE, LENGTH, b"Connection: keep-alive", first=b"HTTP/1.0 200 OK") + BODY),
    ),
    "no content type": (ALL, reply(head(CODING) + LAST)),
    "another content type": (ALL, reply(head(b"Content-Type: application/octet-stream", CODING) + LAST)),
    "the end of the connection without a length": (ALL, reply(head(TYPE) + BODY, ending=CLOSE)),
    "a half-closed connection after the response": (ALL, reply(stream(BODY), ending=HALF)),
    "a half-closed connection without a length": (ALL, reply(head(TYPE) + BODY, ending=HALF)),
    "Connection: close that stays open": (ALL, reply(head(TYPE, CODING, b"Connection: close") + LAST)),
    "Keep-Alive of 0 seconds": (ALL, reply(head(TYPE, CODING, b"Keep-Alive: timeout=0, max=0") + LAST, ending=CLOSE)),
    # Not valid, or cut off: whatever is called complete must be proven.
    "lines of the head that end with LF": (ANY, reply(head(TYPE, CODING, end=b"\n") + LAST)),
    "an empty line before the response": (ANY, reply(b"\r\n" + stream(BODY))),
    "a folded header line": (ANY, reply(head(b"X-Long: a\r\n b", TYPE, CODING) + LAST)),
    "a space before the colon": (ANY, reply(head(TYPE, b"Transfer-Encoding : chunked") + LAST)),
    "a header line without a colon": (ANY, reply(head(b"nonsense", TYPE, CODING) + LAST)),
    "a NUL in a header": (ANY, reply(head(b"X-Nul: a\0b", TYPE, CODING) + LAST)),
    "two different lengths in one header": (NONE, reply(head(TYPE, LENGTH + b", 5") + BODY, ending=CLOSE)),
    "the same length twice in one header": (ANY, reply(head(TYPE, LENGTH + b", %d" % len(BODY)) + BODY)),
    "a length with an underscore": (NONE, reply(head(TYPE, b"Content-Length: 1_0") + BODY, ending=CLOSE)),
    "a length in Arabic digits": (NONE, reply(head(TYPE, "Content-Length: ٩٩".encode()) + BODY, ending=CLOSE)),
    "a length of 30 digits": (NONE, reply(head(TYPE, b"Content-Length: " + b"9" * 30) + BODY, ending=CLOSE)),
    "a length of 5,000 digits": (NONE, reply(head(TYPE, b"Content-Length: " + b"9" * 5_000) + BODY, ending=CLOSE)),
    "a length one byte too small": (ANY, reply(head(TYPE, b"Content-Length: %d" % (len(BODY) - 1)) + BODY)),
    "a length that ends within an event": (NONE, reply(head(TYPE, b"Content-Length: 40") + BODY)),
    "a length of 0": (NONE, reply(head(TYPE, b"Content-Length: 0"))),
    "a length larger than the body, then silence": (
        ANY,
        reply(head(TYPE, b"Content-Length: 99999") + BODY, ending=HANG),
    ),
    "HTTP/1.0 with chunks": (ANY, reply(head(TYPE, CODING, first=b"HTTP/1.0 200 OK") + LAST, ending=CLOSE)),
    "HTTP/2.0 in the status line": (NONE, reply(head(TYPE, CODING, first=b"HTTP/2.0 200 OK") + LAST, ending=CLOSE)),
    "the preface of HTTP/2": (NONE, reply(b"\0\0\x12\x04\0\0\0\0\0" + b"\0" * 18, ending=CLOSE)),
    "a switch of protocols": (
        NONE,
        reply(head(b"Upgrade: websocket", first=b"HTTP/1.1 101 Switching Protocols") + b"\x81\x05hello", ending=HANG),
    ),
    "status 200 without end of the head": (NONE, reply(HEAD_LINES, ending=HANG)),
    "headers that never end": (NONE, reply(HEAD_LINES + b"X-Flood: a\r\n" * 200_000, ending=CLOSE)),
    "trailers that never end": (
        ANY,
        reply(CHUNKED + chunk(BODY) + b"0\r\n" + b"X-Flood: a\r\n" * 100_000, ending=CLOSE),
    ),
    "a chunk size with spaces after it": (ANY, reply(CHUNKED + b"%x   \r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))),
    "a negative chunk size": (NONE, reply(CHUNKED + b"-5\r\n" + BODY, ending=CLOSE)),
    "chunks that end with LF": (ANY, reply(CHUNKED + b"%x\n%b\n0\n\n" % (len(BODY), BODY), ending=CLOSE)),
    "no last chunk, then FIN": (ANY, reply(CHUNKED + chunk(BODY), ending=CLOSE)),
    "no last chunk, then silence": (ANY, reply(CHUNKED + chunk(BODY), ending=HANG)),
    "an end marker after a long silence": (
        ANY,
        reply(CHUNKED + chunk(events(PAYLOADS[:4])), 9.0, chunk(events(PAYLOADS[4:])) + b"0\r\n\r\n"),
    ),
    "the first byte after the timeout": (NONE, reply(9.0, stream(BODY))),
    "one byte per second": (NONE, reply(*[item for byte in stream(BODY)[:12] for item in (bytes([byte]), 1.0)])),
    "reset instead of a response": (NONE, reply(ending=RESET)),
    "FIN instead of a response": (NONE, reply(ending=CLOSE)),
    "FIN and reading on instead of a response": (NONE, reply(ending=HALF)),
    "reset within the status line": (NONE, reply(b"HTTP/1.", ending=RESET)),
    "reset within the head": (NONE, reply(CHUNKED[:40], 0.05, ending=RESET)),
    "reset within a chunk size": (NONE, reply(CHUNKED + b"1", 0.05, ending=RESET)),
    "reset within an event": (NONE, reply(CHUNKED + b"fff\r\n" + BODY[:100], 0.05, ending=RESET)),
    "reset between two events": (NONE, reply(CHUNKED + chunk(events(PAYLOADS[:2])), 0.05, ending=RESET)),
    "reset before the end marker": (ANY, reply(CHUNKED + chunk(events(PAYLOADS[:4])), 0.05, ending=RESET)),
    "reset after the end marker": (ANY, reply(CHUNKED + chunk(BODY), 0.05, ending=RESET)),
    "reset after the whole response": (ANY, reply(stream(BODY), 0.05, ending=RESET)),
    "two responses at once": (ANY, reply(stream(BODY) * 2)),
    "a second response that fails": (ANY, reply(stream(BODY) + b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")),
    "gzip that nobody asked for": (NONE, reply(stream(gzip.compress(BODY), "Content-Encoding: gzip"))),
    "brotli that nobody asked for": (NONE, reply(stream(b"\x1b\x0e\0\xf8\x25", "Content-Encoding: br"))),
    "zstd that nobody asked for": (NONE, reply(stream(b"\x28\xb5\x2f\xfd" + BODY, "Content-Encoding: zstd"))),
    "an identity coding": (ALL, reply(stream(BODY, "Content-Encoding: identity"))),
    "an empty coding": (ANY, reply(stream(BODY, "Content-Encoding:"))),
    "a secret in the head": (
        NONE,
        reply(head(b"X-Key: " + SECRET.encode(), first=b"HTTP/1.1 500 " + SECRET.encode()) + b"", ending=CLOSE),
    ),
}
"""By name: how many requests must be complete, and the response to each request."""

STREAMS: dict[str, tuple[str, bytes]] = {
    # Event streams that any reader of the standard takes for the whole answer.
    "comments between the fields of an event": (ALL, BODY.replace(b"\n\n", b"\n: comment\n\n")),
    "comments without a space, and empty ones": (ALL, b":\n:c\n\n" + BODY.replace(b"\n\n", b"\n\n:\n")),
    "retry fields that are no numbers": (
        ALL,
        BODY.replace(b"data:", b"retry: soon\nretry: 99999999999999999999\ndata:"),
    ),
    "an id with a NUL": (ALL, BODY.replace(b"data:", b"id: a\0b\ndata:")),
    "events with the standard's own name": (ALL, BODY.replace(b"data:", b"event: message\ndata:")),
    "events with a name of the server": (ALL, BODY.replace(b"data: {", b"event: completion\ndata: {")),
    "a heartbeat with an empty object": (ALL, with_event(b"event: ping\ndata: {}\n\n")),
    "a heartbeat with null": (ALL, with_event(b"event: ping\ndata: null\n\n")),
    "a heartbeat in words": (ALL, with_event(b"event: keep-alive\ndata: still here\n\n")),
    "an event without data": (ALL, with_event(b"data:\n\n")),
    "a field data without a colon": (ALL, with_event(b"data\n\n")),
    "no space after the colon": (ALL, BODY.replace(b"data: ", b"data:")),
    "two spaces after the colon": (ALL, BODY.replace(b"data: ", b"data:  ")),
    "a tab after the colon": (ALL, BODY.replace(b"data: ", b"data:\t")),
    "a space only sometimes": (ALL, BODY.replace(b"data: ", b"data:", 2)),
    "JSON over several data lines": (
        ALL,
        b"".join(
            b"data: "
            + (json.dumps(json.loads(p), indent=1).encode().replace(b"\n", b"\ndata: ") if p != DONE else p)
            + b"\n\n"
            for p in PAYLOADS
        ),
    ),
    "LF and CR LF in one stream": (ALL, events(PAYLOADS[:2]) + events(PAYLOADS[2:]).replace(b"\n", b"\r\n")),
    "CR and LF in one stream": (ALL, events(PAYLOADS[:2]).replace(b"\n", b"\r") + events(PAYLOADS[2:])),
    "CR LF and then LF as a blank line": (ALL, BODY.replace(b"\n\n", b"\r\n\n")),
    "a byte order mark and a comment": (ALL, b"\xef\xbb\xbf: hi\n\n" + BODY),
    "50 blank lines between events": (ALL, BODY.replace(b"\n\n", b"\n" * 50)),
    "unknown fields": (ALL, BODY.replace(b"data:", b"x-trace: 1\nfoo\ndata:")),
    "an event of 3 MB with one token": (ALL, events([text("a ", logprobs={"junk": "x" * 3_000_000}), *PAYLOADS[1:]])),
    "10,000 comments": (ALL, with_event(b": keep-alive\n\n" * 10_000)),
    "no blank line at the end": (ALL, BODY[:-1]),
    "no line end at the end": (ALL, BODY[:-2]),
    "spaces after the end marker": (ALL, BODY.replace(b"[DONE]", b"[DONE]  ")),
    "the end marker twice": (ANY, BODY + b"data: [DONE]\n\n"),
    "a comment after the end marker": (ALL, BODY + b": bye\n\n"),
    "a role without text first": (ALL, with_event(b"data: " + text("") + b"\n\n", 0)),
    "a usage of null in every event": (
        ALL,
        events([text(usage=None), text("b ", usage=None), text("c ", "length", usage=None), COUNT, DONE]),
    ),
    "running totals": (
        ALL,
        events(
            [
                text(usage={"prompt_tokens": 8, "completion_tokens": 1}),
                text("b ", usage={"prompt_tokens": 8, "completion_tokens": 2}),
                text("c ", "length", usage={"prompt_tokens": 8, "completion_tokens": 3}),
                COUNT,
                DONE,
            ]
        ),
    ),
    "the total in the event with the finish reason": (
        ALL,
        events([FIRST, SECOND, text("c ", "length", usage={"prompt_tokens": 8, "completion_tokens": 3}), DONE]),
    ),
    "the total twice": (ALL, events([*PAYLOADS[:4], COUNT, DONE])),
    "the total after the end marker": (ANY, events([*PAYLOADS[:3], DONE, COUNT])),
    "the total as text": (ALL, events([*PAYLOADS[:3], usage("8", "3"), DONE])),
    "the total as a float": (ALL, events([*PAYLOADS[:3], usage(8.0, 3.0), DONE])),
    "no total": (ANY, events([*PAYLOADS[:3], DONE])),
    "only a total of all tokens": (
        ANY,
        events([*PAYLOADS[:3], json.dumps({"choices": [], "usage": {"total_tokens": 11}}).encode(), DONE]),
    ),
    "an empty usage": (ANY, events([*PAYLOADS[:3], b'{"choices":[],"usage":{}}', DONE])),
    "details of usage that are null": (
        ALL,
        events([*PAYLOADS[:3], usage(prompt_tokens_details=None, completion_tokens_details=None), DONE]),
    ),
    "details of usage with odd types": (
        ALL,
        events([*PAYLOADS[:3], usage(prompt_tokens_details=[1], completion_tokens_details="x"), DONE]),
    ),
    "extra statistics": (ALL, events([*PAYLOADS[:4], b'{"timings":{"predicted_ms":1e-3},"choices":[]}', DONE])),
    "choices of null in the total": (
        ALL,
        events([*PAYLOADS[:3], COUNT.replace(b'"choices": []', b'"choices": null'), DONE]),
    ),
    "an id that is a number and a model of null": (
        ALL,
        BODY.replace(b'"id": "c"', b'"id": 7').replace(b'"model": "m"', b'"model": null'),
    ),
    "an escaped NUL as a token": (ALL, events([text("\0"), *PAYLOADS[1:]])),
    "half a surrogate pair as a token": (ALL, events([text("a").replace(b'"a"', b'"\\ud83d"'), *PAYLOADS[1:]])),
    "escape sequences of a terminal as a token": (ALL, events([text("\x1b[2J\x1b]0;x\x07"), *PAYLOADS[1:]])),
    "a created time past any number": (ALL, events([FIRST[:-1] + b',"created":1e999}', *PAYLOADS[1:]])),
    "NaN in an unknown field": (ANY, events([FIRST[:-1] + b',"score":NaN}', *PAYLOADS[1:]])),
    "400 levels of nesting in an unknown field": (
        ALL,
        events([FIRST[:-1] + b',"x":' + b"[" * 400 + b"]" * 400 + b"}", *PAYLOADS[1:]]),
    ),
    "500,000 levels of nesting in an unknown field": (
        ANY,
        events([FIRST[:-1] + b',"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}", *PAYLOADS[1:]]),
    ),
    "an integer of 5,000 digits in an unknown field": (
        ANY,
        events([FIRST[:-1] + b',"x":' + b"9" * 5_000 + b"}", *PAYLOADS[1:]]),
    ),
    "an error of null": (ALL, events([text(error=None), *PAYLOADS[1:]])),
    "an error of false": (ALL, events([text(error=False), *PAYLOADS[1:]])),
    "an empty text as error": (ALL, events([text(error=""), *PAYLOADS[1:]])),
    "warnings next to the tokens": (
        ALL,
        events([text(warnings=["slow"], message="ok", code=0, status="success"), *PAYLOADS[1:]]),
    ),
    "the fields of an event twice": (
        ANY,
        events([b'{"choices":[],"choices":[{"index":0,"text":"a","finish_reason":null}]}', *PAYLOADS[1:]]),
    ),
    "bytes that are not UTF-8 as a token": (ANY, events([text("a").replace(b'"a"', b'"\xff\xfe"'), *PAYLOADS[1:]])),
    "an overlong character as a token": (ANY, events([text("a").replace(b'"a"', b'"\xc0\xaf"'), *PAYLOADS[1:]])),
    "a byte order mark in every event": (ANY, BODY.replace(b"data: {", b"data: \xef\xbb\xbf{")),
    "single quotes": (NONE, BODY.replace(b'"', b"'")),
    "lower case in the end marker": (ANY, BODY.replace(b"DONE", b"done")),
    "quotes around the end marker": (ANY, BODY.replace(b"[DONE]", b'"[DONE]"')),
    "no end marker": (ANY, events(PAYLOADS[:4])),
    "the end marker alone": (NONE, events([DONE])),
    "the total alone": (NONE, events([COUNT, DONE])),
    "a negative total": (NONE, events([*PAYLOADS[:3], usage(8, -3), DONE])),
    "a total with a fraction": (NONE, events([*PAYLOADS[:3], usage(8, 2.5), DONE])),
    "a total that is NaN": (NONE, events([*PAYLOADS[:3], COUNT.replace(b'tokens": 3', b'tokens": NaN'), DONE])),
    "a total that is true": (NONE, events([*PAYLOADS[:3], usage(8, completion=True), DONE])),
    "a total of 10^18": (NONE, events([*PAYLOADS[:3], usage(8, 10**18), DONE])),
    "two tokens where three were requested": (NONE, events([FIRST, text("b ", "stop"), usage(8, 2), DONE])),
    "ten tokens where three were requested": (NONE, events([text()] * 9 + [text("z ", "length"), usage(8, 10), DONE])),
    "a content filter": (NONE, events([FIRST, SECOND, text("", "content_filter"), usage(8, 2), DONE])),
    "tokens after the end marker": (NONE, BODY + events([FIRST])),
    "choices as an object": (ANY, events([b'{"choices":{"index":0,"text":"a"}}', *PAYLOADS[1:]])),
    "choices as text": (NONE, events([b'{"choices":"a"}', *PAYLOADS[1:]])),
    "a choice of null": (ANY, events([b'{"choices":[null]}', *PAYLOADS])),
    "a text of null": (ALL, with_event(b"data: " + text(None) + b"\n\n")),
    "a text that is a number": (ANY, events([text(5), *PAYLOADS[1:]])),
    "a text that is a list": (ANY, events([text(["a"]), *PAYLOADS[1:]])),
    "a second choice that nobody requested": (
        ANY,
        events([FIRST, FIRST.replace(b'"index": 0', b'"index": 1'), *PAYLOADS[1:]]),
    ),
    "an event that is a list": (ANY, with_event(b"data: [1, 2]\n\n")),
    "an event that is a number": (ANY, with_event(b"data: 7\n\n")),
    "an event that is text": (ANY, with_event(b'data: "hello"\n\n')),
    "half an event, then the rest": (ANY, with_event(b"data: {\n\n")),
    "events without the prefix data": (NONE, b"\n".join(PAYLOADS) + b"\n"),
    "a finish reason that is a number": (ANY, events([FIRST, SECOND, text("c ", 1), COUNT, DONE])),
    "a finish reason that is an object": (ALL, events([FIRST, SECOND, text("c ", {"type": "length"}), COUNT, DONE])),
    "an aborted request": (ANY, events([FIRST, SECOND, text("c ", "abort"), COUNT, DONE])),
}
"""By name: how many requests must be complete, and the body of each response."""

ERRORS: dict[str, bytes] = {
    "text": b'data: {"error": "boom"}\n\n',
    "a message": b'data: {"error": {"message": "boom", "type": "server_error", "code": 500}}\n\n',
    "a code alone": b'data: {"error": {"code": 500}}\n\n',
    "a number": b'data: {"error": 500}\n\n',
    "true": b'data: {"error": true}\n\n',
    "an empty object": b'data: {"error": {}}\n\n',
    "an empty list": b'data: {"error": []}\n\n',
    "a list": b'data: {"error": ["boom", {"message": "bang"}]}\n\n',
    "a message of null": b'data: {"error": {"message": null}}\n\n',
    "a message that is an object": b'data: {"error": {"message": {"text": "boom"}}}\n\n',
    "a message in a message": b'data: {"error": {"message": "{\\"error\\": {\\"message\\": \\"boom\\"}}"}}\n\n',
    "errors": b'data: {"errors": [{"message": "boom"}]}\n\n',
    "an exception": b'data: {"exception": "boom"}\n\n',
    "an object named error": b'data: {"object": "error", "message": "boom", "code": 500}\n\n',
    "a type named error": b'data: {"type": "error", "message": "boom"}\n\n',
    "a status named error": b'data: {"status": "error", "message": "boom"}\n\n',
    "no success": b'data: {"success": false, "message": "boom"}\n\n',
    "a detail": b'data: {"detail": "boom"}\n\n',
    "details in a list": b'data: {"detail": [{"loc": ["body"], "msg": "boom", "type": "x"}]}\n\n',
    "a code and a message": b'data: {"code": 500, "message": "boom"}\n\n',
    "a code as text and a message": b'data: {"code": "InternalError", "message": "boom"}\n\n',
    "an error code of its own": b'data: {"error_code": 50001, "error_msg": "boom"}\n\n',
    "a named event": b"event: error\ndata: boom\n\n",
    "a named event with JSON": b'event: error\ndata: {"message": "boom"}\n\n',
    "a named event without data": b"event: error\n\n",
    "a named exception": b"event: exception\ndata: {}\n\n",
    "a field error": b"error: boom\n\n",
    "words without a field": b"Internal Server Error\n\n",
    "JSON without a field": b'{"error": {"message": "boom"}}\n\n',
    "a web page without a field": b"<html><title>502 Bad Gateway error</title></html>\n\n",
    "a field of the choice": b'data: {"choices": [{"index": 0, "text": "", "error": {"message": "boom"}}]}\n\n',
    "a finish reason": b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}\n\n',
    "a message of a megabyte": b'data: {"error": {"message": "' + b"boom " * 200_000 + b'"}}\n\n',
    "the API key": b'data: {"error": {"message": "bad key ' + SECRET.encode() + b'"}}\n\n',
    "the API key, cut in the middle of a long text": b'data: {"error": {"message": "'
    + b"x" * 180
    + SECRET.encode()
    + b"y" * 400
    + b'"}}\n\n',
    "escape sequences": b'data: {"error": {"message": "\\u001b[31mboom\\u001b]8;;http://x\\u0007 \\u202e"}}\n\n',
    "lone surrogates": b'data: {"error": {"message": "\\udfff boom \\ud800"}}\n\n',
    "a cut-off object": b'data: {"error": {"message": "boom\n\n',
    "overload": b'data: {"error": {"message": "queue is full", "code": 503}}\n\n',
    "nested 5,000 levels deep": b'data: {"error": ' + b'{"error":' * 5_000 + b'"boom"' + b"}" * 5_001 + b"\n\n",
}
"""By form: an error event."""

STATUSES = (
    *(
        ("204 No Content", b""),
        ("201 Created", BODY),
        ("202 Accepted", b'{"id": "task-1"}'),
        ("206 Partial Content", BODY),
    ),
    *(
        ("300 Multiple Choices", b"[]"),
        ("304 Not Modified", b""),
        ("305 Use Proxy", b"x"),
        ("308 Permanent Redirect", b""),
    ),
    *(
        ("400 Bad Request", b"null"),
        ("401 Unauthorized", b""),
        ("402 Payment Required", b'{"error":{"code":"insufficient_quota"}}'),
    ),
    *(
        ("403 Forbidden", b"<html><body>Blocked by the firewall</body></html>"),
        ("404 Not Found", b"[]"),
        ("405 Method Not Allowed", b"\0\1\2"),
    ),
    *(
        ("407 Proxy Authentication Required", b"proxy"),
        ("408 Request Timeout", b""),
        ("411 Length Required", b"{}"),
        ("413 Payload Too Large", b"7"),
    ),
    *(
        ("415 Unsupported Media Type", b'"x"'),
        ("418 I'm a teapot", b"\xff\xfe"),
        ("421 Misdirected Request", b"{"),
        ("422 Unprocessable", b'{"detail":[]}'),
    ),
    *(
        ("425 Too Early", b"x"),
        ("429 Too Many Requests", b""),
        ("431 Headers Too Large", b"x" * 70_000),
        ("451 Legal", b"\x1b[2J"),
    ),
    *(
        ("499 Client Closed", b"x"),
        ("500 Oh", b'{"error":{"message":{"a":1}}}'),
        ("501 Not Implemented", b"x"),
        ("502 Bad Gateway", b"<html>"),
    ),
    *(
        ("503 Busy", b"[" * 100_000),
        ("504 Timeout", b"<title>504</title>"),
        ("505 HTTP Version", b"x"),
        ("507 Storage", b"x"),
        ("511 Sign in", b"<html>"),
    ),
    *(
        ("520 Unknown", b"error code: 520"),
        ("529 Overloaded", b'{"type":"error"}'),
        ("530 x", b"1016"),
        ("599 x", b"x"),
        ("600 x", b"x"),
        ("999 x", b"x"),
    ),
)
"""A status other than 200, and a body that does not fit."""

RETRIES = (
    "0",
    "-1",
    "1e9",
    "nan",
    "inf",
    "soon",
    "Wed, 21 Oct 2015 07:28:00 GMT",
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "5, 6",
    "",
    "1" * 4_000,
    "\xe9",
)
"""Values of Retry-After."""

BODIES = (
    (
        "a completion that is not streamed",
        "application/json",
        b'{"choices":[{"index":0,"text":"a b c","finish_reason":"length"}],"usage":{"completion_tokens":3}}',
    ),
    ("an error in JSON", "application/json", b'{"error":{"message":"boom"}}'),
    ("a sign-in page", "text/html", b"<!doctype html><title>Sign in</title><form></form>"),
    ("an empty body", "application/json", b""),
    ("white space", "text/plain", b" \r\n \n"),
    ("null", "application/json", b"null"),
    ("an empty list", "application/json", b"[]"),
    ("binary", "application/octet-stream", bytes(range(256)) * 40),
    ("JSON Lines", "application/x-ndjson", b"\n".join(PAYLOADS[:4]) + b"\n"),
    ("UTF-16", "text/event-stream", BODY.decode().encode("utf-16")),
    ("a picture", "image/png", b"\x89PNG\r\n\x1a\n" + b"\0" * 64),
    ("the API key", "text/plain", b"key " + SECRET.encode()),
    ("escape sequences", "text/plain", b"\x1b[2J\x1b]0;title\x07\x9b31m"),
    ("XML", "text/xml", b"<?xml version='1.0'?><error><message>boom</message></error>"),
    ("gRPC", "application/grpc", b"\0\0\0\0\5hello"),
)
"""Bodies of a response with status 200 that is no event stream."""

LOOP = ("run", *BURST[1:-1], "--concurrency", "2", "--no-report")


def answers() -> Iterator[Case]:
    """Yield every case."""
    expected = {ALL: MEASURED, NONE: FAILED, ANY: EITHER}
    for name, (complete, answer) in FRAMES.items():
        yield Case(f"framing: {name}", BURST, expected[complete], complete, server=Behaviour(answer))
    for name, (complete, body) in STREAMS.items():
        yield Case(f"stream: {name}", BURST, expected[complete], complete, server=Behaviour(reply(stream(body))))
    for name, event in ERRORS.items():
        for index, where in ((0, "first"), (2, "amid tokens"), (4, "before the end marker")):
            server = Behaviour(reply(stream(with_event(event, index))))
            yield Case(f"error event, {where}: {name}", BURST, FAILED, NONE, server=server)
    for status, body in STATUSES:
        yield Case(f"status {status}", BURST, FAILED, NONE, server=Behaviour(page(body, status)))
    for value in RETRIES:
        server = Behaviour(page({"error": "busy"}, "429 Busy", f"Retry-After: {value}"))
        yield Case(f"Retry-After: {value[:40]}", BURST, FAILED, NONE, server=server)
    for name, kind, body in BODIES:
        server = Behaviour(page(body, "200 OK", f"Content-Type: {kind}"))
        yield Case(f"status 200 with {name}", BURST, FAILED, NONE, server=server)
    yield from _connections()
    yield from _probes()


def _connections() -> Iterator[Case]:
    """Yield cases about connections rather than responses."""
    # Other servers than vLLM may end a stream with the finish reason, so only vLLM proves that a marker is required.
    for name, answer in {
        "no end marker": reply(stream(events(PAYLOADS[:4]))),
        "a reset before the end marker": reply(CHUNKED + chunk(events(PAYLOADS[:4])), 0.05, ending=RESET),
        "silence before the end marker": reply(CHUNKED + chunk(events(PAYLOADS[:4])), ending=HANG),
    }.items():
        yield Case(f"vLLM: {name}", BURST, FAILED, NONE, server=Behaviour(answer, pages=VLLM_PAGES))
    early = reply(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", ending=CLOSE)
    large = (*BURST, "--extra-body", '{"user": "' + "x" * 100_000 + '"}')
    yield Case("refused before the body was read", large, FAILED, NONE, server=Behaviour(early, reads=HEAD))
    yield Case("reset before the body was read", large, FAILED, NONE, server=Behaviour(reply(ending=RESET), reads=HEAD))
    whole = reply(stream(BODY, "Connection: close"), ending=CLOSE)
    yield Case("answered before the body was read", large, EITHER, server=Behaviour(whole, reads=NOTHING))
    for name, greeting in {
        "closed": reply(ending=CLOSE),
        "reset": reply(ending=RESET),
        "silent": reply(ending=HANG),
        "greeted by a mail server": reply(b"220 mail ESMTP\r\n", ending=HANG),
        "answered before any request": reply(stream(BODY), ending=HANG),
    }.items():
        server = Behaviour(connected=greeting)
        codes = EITHER | SERVER if "before" in name else FAILED | SERVER  # the token counter may meet it before the run
        yield Case(f"a connection of the run is {name}", BURST, codes, server=server)
        yield Case(f"a connection of a closed loop is {name}", LOOP, codes, server=server)
    yield Case(
        "a closed loop with a connection per request",
        LOOP,
        MEASURED,
        ALL,
        server=Behaviour(reply(stream(BODY), ending=CLOSE)),
    )
    yield Case(
        "a closed loop whose connections are reset after each response",
        LOOP,
        EITHER,
        server=Behaviour(reply(stream(BODY), ending=RESET)),
    )
    broken = reply(CHUNKED + chunk(FIRST), ending=RESET)
    yield Case(
        "every other response is cut off",
        LOOP,
        FAILED,
        server=Behaviour(lambda number: broken if number % 2 else WHOLE),
    )
    yield Case("IPv6", BURST, MEASURED, ALL, server=Behaviour(host="::1"))
    chat = (*BURST, "--endpoint", "chat")
    yield Case("text in a stream of chat", chat, EITHER, server=Behaviour())
    for name, delta in {
        "null": None,
        "a list": [],
        "text": "a",
        "content of a number": {"content": 5},
        "parts": {"content": [{"type": "text", "text": "a"}]},
        "parts with null": {"content": [None]},
        "an audio part": {"content": [{"type": "audio", "data": "AA=="}]},
        "tool calls of null": {"content": "a", "tool_calls": None},
        "tool calls as an object": {"tool_calls": {"id": 1}},
        "reasoning of a list": {"reasoning_content": ["a"]},
        "a refusal": {"refusal": "no"},
        "a role that is a number": {"role": 3, "content": "a"},
    }.items():
        chunks = [
            json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() for _ in range(2)
        ]
        chunks.append(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": "length"}]}).encode())
        body = events([*chunks, COUNT, DONE])
        yield Case(f"chat: a delta of {name}", chat, EITHER, server=Behaviour(reply(stream(body))))


def _probes() -> Iterator[Case]:
    """Yield cases of odd responses to the request for one token before the run."""
    odd: dict[str, Reply] = {
        "reset": reply(ending=RESET),
        "closed": reply(ending=CLOSE),
        "silent": reply(ending=HANG),
        "a sign-in page": page(b"<html><title>Sign in</title></html>", "200 OK", "Content-Type: text/html"),
        "a redirect to itself": page(b"", "302 Found", "Location: /v1/completions"),
        "a redirect without an address": page(b"", "302 Found"),
        "a redirect to a script": page(b"", "302 Found", "Location: javascript:alert(1)"),
        "a redirect with a key": page(b"", "307 Temporary Redirect", f"Location: http://127.0.0.1:1/?key={SECRET}"),
        "a redirect to 100 kB": page(b"", "302 Found", "Location: http://x/" + "a" * 50_000),
        "401 with the key": page({"error": f"bad key {SECRET}"}, "401 Unauthorized"),
        "403 without a body": page(b"", "403 Forbidden"),
        "404 with a model": page(
            {"error": {"message": "The model `m` does not exist", "code": "model_not_found"}}, "404 Not Found"
        ),
        "405": page(b"", "405 Method Not Allowed"),
        "413": page(b"too large", "413 Payload Too Large"),
        "422 with an endless list": page(
            {"detail": [{"loc": ["body", "stream_options"], "msg": "extra"}] * 5_000}, "422 Unprocessable"
        ),
        "429 with Retry-After nan": page(b"", "429 Busy", "Retry-After: nan"),
        "429 with Retry-After inf": page(b"", "429 Busy", "Retry-After: inf"),
        "429 with a date in Latin-1": page(b"", "429 Busy", "Retry-After: caf\xe9"),
        "500 in binary": page(bytes(range(256)), "500 Oh"),
        "503 with a page": page(b"<html><h1>503</h1>", "503 Busy", "Content-Type: text/html"),
        "an error in a stream": reply(stream(ERRORS["a message"])),
        "an empty stream": reply(stream(b"")),
        "a whole answer at the end of the connection": reply(head(TYPE) + BODY, ending=CLOSE),
        "more than one token": WHOLE,
        "a head without an end": reply(HEAD_LINES, ending=HANG),
        "headers that never end": reply(HEAD_LINES + b"X: y\r\n" * 100_000, ending=CLOSE),
        "a status line of 100 kB": reply(b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n\r\n", ending=CLOSE),
        "no HTTP": reply(b"SSH-2.0-OpenSSH_9.2\r\n", ending=CLOSE),
        "a wrong chunk size": reply(CHUNKED + b"zz\r\n", ending=CLOSE),
        "nested 200,000 deep": page(b"[" * 200_000, "400 Bad Request"),
        "gzip that is cut off": page(gzip.compress(b"x" * 9_000)[:40], "400 Bad Request", "Content-Encoding: gzip"),
        "brotli": page(b"\x1b\x0e", "400 Bad Request", "Content-Encoding: br"),
    }
    for name, answer in odd.items():
        yield Case(f"probe: {name}", BURST, EITHER | SERVER, server=Behaviour(probe=answer))
