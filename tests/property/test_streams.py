"""Random event streams through every dialect: complete only when proven, failed only when wrong.

Each stream starts as a whole response of a known number of tokens. It is then written in one of the many ways in which
servers and proxies write event streams, perhaps with an error somewhere, perhaps cut off somewhere, and sent through
HTTP framing, event splitting and decoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.analysis.run.record import Record
from loadgen.servers.backends import repeated_events as alike
from loadgen.servers.wire import sse
from loadgen.servers.wire.sse import split_events
from tests.support.answers import DONE, TYPED, Key, chunk, recorded, usage, whole
from tests.support.dialects import DIALECTS
from tests.support.loopback import chunked

KEYS = st.sampled_from([*DIALECTS])
VERSIONS = {"tgi": "3.3.7", "lightllm": "1.2.0 or later", "sglang": "0.5.23"}
FINISH_PROVES = {("openai", "completions"), ("openai", "chat"), ("lightllm", "chat")}
"""Dialects in which a finish reason proves the end where no `[DONE]` comes."""
LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
DONES = ("[DONE]", "[DONE] ", "  [DONE]", '"[DONE]"')
HEARTBEATS = (
    *(":", ": keep-alive", "data:", "data: ", "data", "data:   ", "id: 7", "retry: 3000", "event: ping"),
    *("event: ping\ndata: ping", 'event: ping\ndata: {"type":"ping"}', ": a\n: b", 'data: {"object":"ping"}'),
    'data: {"choices":[],"prompt_filter_results":[{"prompt_index":0}]}',
)
"""Blocks between events that hold nothing."""
ERRORS = (
    'error: {"code":500,"message":"boom","type":"server_error"}',
    "error: boom",
    "Error: boom",
    'error:{"message":"boom"}',
    "event: error\ndata: boom",
    'event: error\ndata: {"message":"boom"}',
    'event: error\ndata: {"error":{"message":"boom"}}',
    'event: server_error\ndata: {"detail":"boom"}',
    'data: {"error":{"message":"boom"}}',
    'data: {"error":"boom"}',
    'data: {"type":"error","error":{"message":"boom"}}',
    'data: {"object":"error","message":"boom"}',
    'data: {"code":500,"message":"boom"}',
    'data: {"detail":"boom"}',
    '{"error":{"message":"boom"}}',
    '{"error":"boom"}',
    '{\n  "error": {\n    "message": "boom"\n  }\n}',
    '{"code":502,"message":"boom"}',
    "Internal Server Error: boom",
    "upstream connect error or disconnect/reset before headers. boom",
)
"""Blocks that say that the server failed."""
PARTS = (
    lambda text: {"role": "assistant", "content": text},
    lambda text: {"content": text},
    lambda text: {"reasoning_content": text, "content": None},
    lambda text: {"reasoning": text, "content": ""},
    lambda text: {"content": [{"type": "text", "text": text}]},
    lambda text: {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]},
    lambda text: {"content": {"type": "text", "text": text}},
    lambda text: {"function_call": {"name": "f", "arguments": text}},
    lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
    lambda text: {"refusal": text, "annotations": [], "unknown": {"deep": [1, {"a": None}]}},
)
"""Ways to write a token of a chat."""
TEXTS = st.sampled_from(["a", " b", "\n", "é", "\ud83d", "\ude00", "%d", '"', "data: x", "[DONE]", "error"])
ODD_FIELDS = st.sampled_from(
    [
        {},
        {"usage": None},
        {"usage": []},
        {"usage": "none"},
        {"usage": {}},
        {"error": None},
        {"error": {}},
        {"created": "now", "id": None, "model": 7},
        {"choices_": 3},
    ]
)


@dataclass
class Written:
    """A body, where in it the event that proves the end is whole, and whether an error is in it."""

    body: bytes
    proven_at: int
    error: bool


def payloads_of(key: Key, tokens: int, draw: Any) -> list[str]:
    """The payloads of a whole response. The last one proves its end."""
    events = whole(key, tokens)
    if key[1] in ("generate", *TYPED):
        return events
    parts = PARTS if key[0] != "lightllm" else PARTS[1:]  # there, two roles mean that every chunk is a token
    make = draw(st.sampled_from(parts))
    written = []
    for _ in range(tokens):
        text = draw(TEXTS)
        said = {"delta": make(text)} if key[1] == "chat" else {"text": text}
        written.append(json.dumps({"choices": [{"index": 0, **said}]} | draw(ODD_FIELDS)))
    if key[1] == "chat" and draw(st.booleans()):
        written.insert(0, '{"choices":[{"delta":{"role":"assistant","content":""}}]}')
    finish = chunk(key, "", "length")
    return [*written, finish, usage(tokens), draw(st.sampled_from(DONES))]


@st.composite
def bodies(draw: Any, key: Key, tokens: int, *, error: bool) -> Written:
    """A stream in one of the ways of writing it. With an error it is in a block of its own, or follows a line of data
    without a blank line between."""
    payloads = payloads_of(key, tokens, draw)
    end, prefix = draw(LINE_ENDS), draw(st.sampled_from(["data: ", "data:"]))
    fault = draw(st.sampled_from(ERRORS)).replace("\n", end)
    place = draw(st.integers(0, len(payloads))) if error else -1
    glued = place > 0 and not fault.startswith(("data", "event")) and draw(st.booleans())
    body = draw(st.sampled_from(["", "\ufeff", end, "\ufeff" + end]))
    proven_at = 0
    for index, payload in enumerate(payloads):
        for beat in draw(st.lists(st.sampled_from(HEARTBEATS), max_size=1)):
            body += beat.replace("\n", end) + end + end
        if index == place and not glued:
            body += fault + end + end
        fields = draw(st.sampled_from(["", f"id: {index}{end}", f"event: message{end}", f"retry: 9{end}", f": x{end}"]))
        body += fields + prefix + payload
        proven_at = len(body.rstrip(" ").encode("utf-8", "surrogatepass"))
        body += end
        if index + 1 == place and glued:
            body += fault + end
        body += end * draw(st.sampled_from([1, 1, 2]))
    if place == len(payloads) and not glued:
        body += fault + end + end
    if not error and draw(st.booleans()):
        body = body.rstrip("\r\n")  # no blank line at the end, and no line end
    return Written(body.encode("utf-8", "surrogatepass"), proven_at, error)


def record_of(key: Key, body: bytes, tokens: int, cuts: list[int], *, ended: bool = True) -> Record:
    """Send a body as HTTP chunks that end at these offsets; the last chunk of a response that has not ended lacks."""
    ends = sorted({cut % (len(body) + 1) for cut in cuts} | {len(body)})
    pieces = [body[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]
    raw = b"".join(chunked(*pieces, end=ended))
    cut = None if ended else ("truncated", "the server closed the connection")
    dialect = DIALECTS[key].variant(VERSIONS.get(key[0], ""))
    return recorded(key, raw=raw, cut=cut, asked=tokens, dialect=dialect)[0]  # type: ignore[arg-type]


CUTS = st.lists(st.integers(0, 10_000), max_size=4)


@given(KEYS, st.integers(1, 12), CUTS, st.data())
def test_a_whole_stream_is_complete_however_it_is_written(
    key: Key, tokens: int, cuts: list[int], data: st.DataObject
) -> None:
    """Every token is counted, and nothing about the way of writing makes a response fail."""
    written = data.draw(bodies(key, tokens, error=False))
    record = record_of(key, written.body, tokens, cuts)
    assert (record.state, record.error_detail) == ("complete", "")
    assert (sum(record.chunk_tokens), record.output_tokens, record.counted_by) == (tokens, tokens, "server")


@given(KEYS, st.integers(1, 6), CUTS, st.data())
def test_a_stream_with_an_error_is_never_complete(key: Key, tokens: int, cuts: list[int], data: st.DataObject) -> None:
    """Wherever the error stands and however it is written, and although the end marker follows."""
    written = data.draw(bodies(key, tokens, error=True))
    record = record_of(key, written.body, tokens, cuts)
    assert record.state == "failed"
    assert "boom" in record.error_detail


@given(KEYS, st.integers(1, 4), CUTS, st.booleans(), st.data())
def test_a_stream_that_is_cut_is_complete_only_with_its_proof(
    key: Key, tokens: int, cuts: list[int], ended: bool, data: st.DataObject
) -> None:
    """With the connection or in the way that HTTP ends a response: without the whole end marker nothing is proven."""
    written = data.draw(bodies(key, tokens, error=False))
    kept = written.body[: data.draw(st.integers(0, len(written.body)))]
    record = record_of(key, kept, tokens, cuts, ended=ended)
    if record.state == "complete":
        by_reason = key in FINISH_PROVES and b'"length"' in kept
        assert len(kept) >= written.proven_at or by_reason
    else:
        assert record.state == "truncated"
        assert "not of this dialect" not in record.error_detail


@given(KEYS, st.integers(1, 20), st.booleans(), st.data())
@example(("vllm", "completions"), 6, False, None)
def test_short_paths_read_what_the_exact_paths_read(
    key: Key, tokens: int, error: bool, data: st.DataObject | None
) -> None:
    """Events that are split or decoded together are the same as those that are split and decoded one by one."""
    if data is None:
        body = "".join(f"data: {event}\n\n" for event in whole(key, tokens)).encode()
    else:
        body = data.draw(bodies(key, tokens, error=error)).body
    for closed in (True, False):
        assert split_events(body, closed=closed) == sse._split_exact(body, closed=closed)
    payloads = split_events(body, closed=True)[0]
    answer = DIALECTS[key].decode(payloads)
    with patch.object(alike, "MAX_SHORT_RUNS", 0):
        assert DIALECTS[key].decode(payloads) == answer


@given(KEYS, st.integers(2, 6), CUTS)
def test_events_without_blank_lines_are_events(key: Key, tokens: int, cuts: list[int]) -> None:
    """Some servers end events with one line end. Each line is whole by itself, so each is an event."""
    body = "\n".join(f"data: {event}" for event in whole(key, tokens)).encode() + b"\n"
    record = record_of(key, body, tokens, cuts)
    assert (record.state, sum(record.chunk_tokens)) == ("complete", tokens)


@given(KEYS, st.integers(2, 6), st.data())
def test_data_over_several_lines_is_one_event(key: Key, tokens: int, data: st.DataObject) -> None:
    """JSON written over several lines has one `data` field for each."""
    body = ""
    for event in whole(key, tokens):
        lines = json.dumps(json.loads(event), indent=1).split("\n") if event != DONE else [event]
        body += "".join(f"data: {line}\n" for line in lines) + "\n"
    record = record_of(key, body.encode(), tokens, data.draw(CUTS))
    assert (record.state, sum(record.chunk_tokens)) == ("complete", tokens)
