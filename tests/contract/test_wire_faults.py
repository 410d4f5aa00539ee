"""Checks how every fault of a stream is recorded, in every dialect. `PYTHONPATH=. python
tests/contract/test_wire_faults.py` writes the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadgen.servers.wire.transport import WireError
from loadgen.workloads.recordings import wav_header
from tests.support.answers import DONE, Key, chunk, end_events, ending, token, whole
from tests.support.dialects import AUDIO, DIALECTS

PAGE = Path(__file__).parents[2] / "docs/reference/wire-faults.md"
BOOM = '{"message":"boom","type":"server_error","code":500}'
ERROR = '"error":{"message":"boom","type":"InternalServerError","code":500}'
BUSY = b'{"error":{"message":"Model is overloaded","type":"overloaded"}}'
LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
OVERLOAD = '{"error":{"message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}'
HEARTBEATS = ": keep-alive\n\ndata:\n\nevent: ping\ndata: ping\n\nid: 7\n\n"
TOKEN_FIELDS = {("tgi", "generate"): "token", ("lightllm", "generate"): "token", ("sglang", "generate"): "meta_info"}
"""Field of an event that contains the tokens, in dialects where this field is not `choices`."""
OTHER_TYPES = {
    "responses": '{"type":"response.output_text.delta","delta":["a"]}',
    "messages": '{"type":"content_block_delta","delta":"a"}',
}
"""A token in a field of another type, for endpoints whose events have a type."""
OPENAI = [key for key in DIALECTS if key[1] != "generate"]
Fault = Callable[[Key], tuple[list[str], dict[str, Any]] | None]
"""Returns the events of a dialect and how they are sent, or None if the dialect cannot have this fault."""


def _events(spoil: Callable[[Key], list[str]], *, generate: bool = True, **more: Any) -> Fault:
    return lambda key: (spoil(key), more) if generate or key in OPENAI else None


def _bytes(raw: bytes, **more: Any) -> Fault:
    return lambda _: ([], {"raw": raw, **more})


def _written(write: Callable[[Key], str], *, generate: bool = True) -> Fault:
    """A body that is not one `data` line per event."""

    def fault(key: Key) -> tuple[list[str], dict[str, Any]] | None:
        body = write(key).encode()
        raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        return ([], {"raw": raw}) if generate or key in OPENAI else None

    return fault


def _stream(events: list[str]) -> str:
    return "".join(f"data: {event}\n\n" for event in events)


def _interrupted(key: Key, block: str) -> str:
    first, *rest = whole(key)
    return _stream([first]) + block + "\n\n" + _stream(rest)


def _one_more(key: Key) -> str:
    return token(key, 4) if key[1] == "generate" else chunk(key, "d")


FAULTS: dict[str, Fault] = {
    "nothing is wrong": _events(whole),
    "the connection is closed before any response": _bytes(
        b"", cut=("connect", "the server closed the connection before any response")
    ),
    "the peer does not speak HTTP": _bytes(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "status 500": _bytes(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nboom"),
    "status 429": _bytes(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%b" % (len(BUSY), BUSY)),
    "status 503 with a Retry-After header": _bytes(
        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(LOADING), LOADING)
    ),
    "an error event that reports overload, before any token": _events(lambda _: [OVERLOAD, DONE]),
    "an error event that reports overload, after a token": _events(lambda key: [whole(key)[0], OVERLOAD, DONE]),
    "status 200 without an event stream": _bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
    "a Content-Length that is not a number": _bytes(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"),
    "the connection is closed before the first token": _events(
        lambda _: [], cut=("truncated", "the server closed the connection")
    ),
    "the connection is closed between tokens": _events(
        lambda key: whole(key)[:2], cut=("truncated", "the server closed the connection")
    ),
    "the response ends correctly in HTTP, but without the end marker": _events(lambda key: whole(key)[:2]),
    "no end within the time limit": _events(lambda key: whole(key)[:2], cut=("timeout", "no end after 600 s")),
    "the run is interrupted": _events(lambda key: whole(key)[:2], cut=("cancelled", "cut off by an interrupt")),
    "an event that is not JSON": _events(lambda key: [whole(key)[0], "{nonsense", *whole(key)[2:]]),
    "an error event": _events(lambda key: [whole(key)[0], f"{{{ERROR}}}", DONE]),
    "an error in the event of a token": _events(lambda key: [f"{whole(key)[0][:-1]},{ERROR}}}", *whole(key)[1:]]),
    "a field `error` before the end marker": _written(lambda key: _interrupted(key, "error: " + BOOM)),
    "an event named `error` before the end marker": _written(
        lambda key: _interrupted(key, f"event: error\ndata: {BOOM}")
    ),
    "an error without a field before the end marker": _written(lambda key: _interrupted(key, f'{{"error":{BOOM}}}')),
    "an error as plain text before the end marker": _written(
        lambda key: _interrupted(key, "upstream connect error: boom")
    ),
    "the finish reason `error`": _events(lambda key: whole(key, reason="error")),
    "the end marker, without any token": _events(end_events, generate=False),
    "the end marker and a total of 0": _events(lambda key: end_events(key, 0), generate=False),
    "the end marker and a total of 3, without any token": _events(lambda key: end_events(key, 3), generate=False),
    "a total of 0 with three tokens": _events(lambda key: whole(key, total=0)),
    "heartbeats of every form": _written(lambda key: HEARTBEATS + HEARTBEATS.join(_stream([e]) for e in whole(key))),
    "no blank line at the end": _written(lambda key: _stream(whole(key)).rstrip("\n")),
    "lines that end with CR LF, and a byte order mark": _written(
        lambda key: "\ufeff" + _stream(whole(key)).replace("\n", "\r\n")
    ),
    "no blank line between events": _written(lambda key: _stream(whole(key)).replace("\n\n", "\n")),
    "unused fields of another type": _events(
        lambda key: [f'{whole(key)[0][:-1]},"usage":[],"created":"now"}}', *whole(key)[1:]], generate=False
    ),
    "the tokens in a field of another type": _events(
        lambda key: [OTHER_TYPES.get(key[1], f'{{"{TOKEN_FIELDS.get(key, "choices")}":"a"}}'), *whole(key)[1:]]
    ),
    "fewer tokens than requested": _events(lambda key: whole(key, 2, reason="stop")),
    "more tokens than requested": _events(lambda key: whole(key, 4)),
    "the finish reason `content_filter`": _events(lambda key: whole(key, reason="content_filter")),
    "a token after the end marker": _events(lambda key: [*whole(key), _one_more(key)]),
    "a count of -7": _events(lambda key: whole(key, total=-7)),
    "a count of 1e30": _events(lambda key: whole(key, total="1e30")),
    "a count of more than 64 bits": _events(lambda key: whole(key, total=2**65)),
}


CHUNK = '{"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}'
DELTA = '{"type":"transcript.text.delta","delta":"a"}'
TRANSCRIBED = '{"type":"transcript.text.done","text":"a"}'
TRANSCRIPT = b'{"text":"a","usage":{"type":"duration","seconds":3}}'
SAMPLES = bytes(range(200)) * 24


def _reply(body: bytes, *, announced: int | None = None) -> bytes:
    """A response with a length, which may be more than the body."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (announced or len(body), body)


def _chunked(*pieces: bytes, end: bool = True) -> bytes:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + (b"0\r\n\r\n" if end else b"")


def _sse(*events: str) -> bytes:
    return _reply(_stream([*events]).encode())


CLOSED: tuple[WireError, str] = ("truncated", "the server closed the connection")
STREAMED_WAV = wav_header(0xFFFFFFFF - 36, 24_000)
AUDIO_FAULTS: dict[str, dict[str, tuple[bytes, tuple[WireError, str] | None]]] = {
    "transcriptions": {
        "nothing is wrong, in vLLM's form": (_sse(CHUNK, CHUNK, DONE), None),
        "nothing is wrong, in OpenAI's form": (_sse(DELTA, TRANSCRIBED), None),
        "one JSON object, because the server does not stream": (_reply(TRANSCRIPT), None),
        "a transcript without words": (_sse('{"type":"transcript.text.done","text":""}'), None),
        "half of a JSON object": (_reply(TRANSCRIPT[:20], announced=len(TRANSCRIPT)), CLOSED),
        "JSON without a text": (_reply(b'{"segments":[]}'), None),
        "an error under status 200": (_reply(BUSY.replace(b"overloaded", b"broken")), None),
        "the connection is closed between words": (_chunked(_stream([CHUNK]).encode(), end=False), CLOSED),
        "no end marker": (_sse(DELTA, DELTA), None),
        "an error event": (_sse(DELTA, f"{{{ERROR}}}"), None),
    },
    "speech": {
        "nothing is wrong": (_reply(wav_header(len(SAMPLES), 24_000) + SAMPLES), None),
        "a streamed WAV file, whose header has a placeholder for its length": (_chunked(STREAMED_WAV, SAMPLES), None),
        "another format": (_chunked(b"ID3" + SAMPLES), None),
        "the connection is closed before any audio": (_chunked(STREAMED_WAV, end=False), CLOSED),
        "the connection is closed between samples": (_chunked(STREAMED_WAV, SAMPLES, end=False), CLOSED),
        "a body that ends with the connection": (b"HTTP/1.1 200 OK\r\n\r\n" + STREAMED_WAV + SAMPLES, None),
        "fewer samples than the WAV header announces": (_chunked(wav_header(9600, 24_000) + SAMPLES), None),
        "a WAV header without samples": (_chunked(STREAMED_WAV), None),
        "an empty body": (_chunked(), None),
        "an error under status 200": (_reply(BUSY.replace(b"overloaded", b"broken")), None),
        "JSON": (_reply(b'{"audio":"UklGRg=="}'), None),
        "a page": (_reply(b"<!doctype html><html>Sign in</html>"), None),
        "a stream of events": (_sse('{"type":"speech.audio.delta","audio":"UklGRg=="}'), None),
    },
}
"""Responses of the audio endpoints by endpoint and fault: the bytes, and how the transport ended the response."""
WHOLE_AUDIO = {
    *("nothing is wrong, in vLLM's form", "nothing is wrong, in OpenAI's form", "a transcript without words"),
    *("one JSON object, because the server does not stream", "nothing is wrong", "another format"),
    "a streamed WAV file, whose header has a placeholder for its length",
}
WHOLE = {
    *("nothing is wrong", "a total of 0 with three tokens", "heartbeats of every form", "no blank line at the end"),
    *("lines that end with CR LF, and a byte order mark", "no blank line between events"),
    "unused fields of another type",
}
"""Faults of which a response may have any and be complete."""


def _which(names: list[str]) -> str:
    """Return the endpoints, if the names are those of every dialect with these endpoints; otherwise the names."""
    endpoints = dict.fromkeys(name.split()[1] for name in names)
    every = [" ".join(key) for key in DIALECTS if key[1] in endpoints]
    return ", ".join(endpoints if every == names else names)


def audio_rows() -> list[str]:
    """Return the rows of the audio endpoints, which are equal for all servers."""
    rows = []
    for endpoint, faults in AUDIO_FAULTS.items():
        for name, (raw, cut) in faults.items():
            outcomes = {ending(key, raw=raw, cut=cut, asked=0) for key in AUDIO if key[1] == endpoint}
            ((state, kind, detail),) = outcomes
            quote = "``" if "`" in detail else "`"
            said = quote + detail + quote if detail else ""
            rows.append(f"| {name} | {endpoint} | *{state}* | {f'`{kind}`' if kind else ''} | {said} |")
    return rows


def page() -> str:
    """Return the page, with one row per fault and outcome."""
    rows = []
    for name, fault in FAULTS.items():
        outcomes: dict[tuple[str, str, str], list[str]] = {}
        kept = {key: made for key in DIALECTS if (made := fault(key)) is not None}
        for key, (events, more) in kept.items():
            outcomes.setdefault(ending(key, *events, **more), []).append(" ".join(key))
        for (state, kind, detail), names in outcomes.items():
            whose = {len(DIALECTS): "all", len(OPENAI): "all but generate"}.get(len(names), _which(names))
            quote = "``" if "`" in detail else "`"
            said = quote + detail.replace("|", "\\|") + quote if detail else ""
            rows.append(f"| {name} | {whose} | *{state}* | {f'`{kind}`' if kind else ''} | {said} |")
    return f"""# Wire faults

<!-- Written by `PYTHONPATH=. python tests/contract/test_wire_faults.py`. -->

For everyone who sees an error kind in a report and wants to know what the server did. This page lists faults of a
response, and how loadgen records each of them.

Each row is a response of three tokens with one fault. It shows the state and the error kind of its Record, and the
reason that terminal and page print. Only *complete* requests are in latencies ([What
counts](../concepts/burst.md#what-counts)).

| fault | dialects | state | error kind | reason |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Transcripts have no requested length, and speech has no tokens. Audio has no end marker. HTTP proves its end, and the
header of a WAV file does so too, unless the server has streamed the file.

| fault | endpoint | state | error kind | reason |
| --- | --- | --- | --- | --- |
{chr(10).join(audio_rows())}
"""


def test_the_page_says_what_is_recorded() -> None:
    """Each fault in each dialect is recorded as documented."""
    assert PAGE.read_text("utf-8") == page()


def test_only_what_is_whole_is_complete() -> None:
    """No fault passes, except a short response of TGI, which cannot be made to continue."""
    for name, fault in FAULTS.items():
        for key in DIALECTS:
            if (made := fault(key)) is not None:
                state, kind, detail = ending(key, *made[0], **made[1])
                spared = name in WHOLE or (name == "fewer tokens than requested" and key[0] == "tgi")
                assert (state == "complete") == spared, (name, key)
                assert bool(kind) == bool(detail) == (not spared)


def test_only_whole_audio_is_complete() -> None:
    """A transcript needs its end marker or its last brace, and speech the end of its body."""
    for endpoint, faults in AUDIO_FAULTS.items():
        for name, (raw, cut) in faults.items():
            for key in AUDIO:
                if key[1] == endpoint:
                    state, kind, detail = ending(key, raw=raw, cut=cut, asked=0)
                    assert (state == "complete") == (name in WHOLE_AUDIO), (name, key, detail)
                    assert bool(kind) == bool(detail) == (name not in WHOLE_AUDIO)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
