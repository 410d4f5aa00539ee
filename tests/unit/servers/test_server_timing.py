"""The times that servers state about a request, in headers and in the last events of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.servers.server_timing import INFERENCE, PREFILL, QUEUE, times_in_response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream"
DONE = b"[DONE]"
VLLM = {"time_to_first_token_ms": 80.5, "generation_time_ms": 100, "queue_time_ms": 2.25, "mean_itl_ms": 10.0}
SGLANG = {
    "queue_time": 0.25,
    "forward_entry_time": 1_795_575_497.0,
    "prefill_finished_time": 1_795_575_497.5,
    "request_finished_ts": 1_795_575_499.0,
    "e2e_latency": 2.26,
}
GROQ = {"queue_time": 0.037, "prompt_time": 0.01, "completion_time": 0.4, "total_time": 0.41, "total_tokens": 5}
EVENTS: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "vLLM": ({"choices": [], "metrics": VLLM}, {QUEUE: 2_250, PREFILL: 80_500, INFERENCE: 180_500}, "metrics"),
    "vLLM, responses": (
        {"type": "response.completed", "response": {"metrics": VLLM}},
        {QUEUE: 2_250, PREFILL: 80_500, INFERENCE: 180_500},
        "metrics",
    ),
    "SGLang": (
        {"text": "", "meta_info": SGLANG},
        {QUEUE: 250_000, PREFILL: 500_000, INFERENCE: 2_000_000},
        "meta_info",
    ),
    "SGLang before the first token": (
        {"meta_info": {"queue_time": 0.5, "forward_entry_time": 0.0, "prefill_finished_time": 5.0}},
        {QUEUE: 500_000},
        "meta_info",
    ),
    "llama.cpp": (
        {"timings": {"prompt_n": 5, "prompt_ms": 30.0, "predicted_ms": 70.0}},
        {PREFILL: 30_000, INFERENCE: 100_000},
        "timings",
    ),
    "Groq": ({"x_groq": {"usage": GROQ}}, {QUEUE: 37_000, PREFILL: 10_000, INFERENCE: 410_000}, "x_groq"),
    "Cerebras": ({"time_info": GROQ}, {QUEUE: 37_000, PREFILL: 10_000, INFERENCE: 410_000}, "time_info"),
}


@pytest.mark.parametrize(("event", "marks", "source"), EVENTS.values(), ids=EVENTS)
def test_times_in_the_last_events(event: dict[str, Any], marks: dict[str, int], source: str) -> None:
    """The times are read in the units of each server, also if an end marker follows."""
    times = times_in_response(HEAD, [b'{"choices":[]}', json.dumps(event).encode(), DONE])
    assert (times.marks, times.sources) == (marks, {source})


HEADERS = {
    "TGI and TEI": ("x-total-time: 52\r\nx-queue-time: 3\r\nx-inference-time: 49", {QUEUE: 3_000, INFERENCE: 49_000}),
    "Server-Timing": ("Server-Timing: queue;dur=2.5, prefill;dur=80", {QUEUE: 2_500, PREFILL: 80_000}),
    "two lines": ("Server-Timing: queue;dur=1\r\nserver-timing: prefill;dur=2", {QUEUE: 1_000, PREFILL: 2_000}),
    "descriptions": (
        'Server-Timing: queue;desc="a, b; dur=9";dur=3, Prefill-Time ; DUR="4" ; desc=x',
        {QUEUE: 3_000, PREFILL: 4_000},
    ),
    "no duration": ('Server-Timing: miss, queue;desc="x"', {}),
    "not a duration": ("Server-Timing: queue;dur=-5, prefill;dur=1e99\r\nx-queue-time: soon", {}),
}


@pytest.mark.parametrize(("fields", "marks"), HEADERS.values(), ids=HEADERS)
def test_times_in_headers(fields: str, marks: dict[str, int]) -> None:
    """Durations are in ms. Values that are no durations are ignored."""
    assert times_in_response(HEAD + b"\r\n" + fields.encode(), [DONE]).marks == marks


def test_times_in_the_trailer() -> None:
    """A server that knows the times only at the end sends them after the last chunk."""
    times = times_in_response(HEAD, [DONE], b"\r\n0\r\nServer-Timing: queue;dur=7\r\n\r\n")
    assert times.marks == {QUEUE: 7_000}


def test_unknown_names_are_reported() -> None:
    """A name that loadgen does not know is listed, so that its owner can rename it."""
    times = times_in_response(HEAD + b"\r\nServer-Timing: db;dur=53, queue;dur=1", [])
    assert times.marks == {QUEUE: 1_000}
    assert (times.sources, times.unknown_names) == ({"Server-Timing"}, {"db"})


@pytest.mark.parametrize(
    "payload",
    [b"", b"[1]", b"null", b"{", b"\xff\xfe", b'{"metrics":[1]}', b'{"metrics":{"queue_time_ms":true}}', b"[" * 9_999],
)
def test_other_events_state_no_times(payload: bytes) -> None:
    """Events of any other form raise no error."""
    assert times_in_response(HEAD, [payload]).marks == {}


HUGE = b"1" + b"0" * 400
HOSTILE = {
    "one duration": b'{"metrics":{"queue_time_ms":%b}}' % HUGE,
    "a negative duration": b'{"metrics":{"queue_time_ms":-%b}}' % HUGE,
    "a sum with a float": b'{"metrics":{"time_to_first_token_ms":%b,"generation_time_ms":0.5}}' % HUGE,
    "a difference with a float": b'{"meta_info":{"prefill_finished_time":%b,"forward_entry_time":0.5}}' % HUGE,
    "a difference of floats": b'{"meta_info":{"prefill_finished_time":1e308,"forward_entry_time":1e-9}}',
    "more digits than Python converts": b'{"timings":{"prompt_ms":1%b}}' % (b"0" * 9_999),
    "a float beyond the largest": b'{"usage":{"queue_time":1e999}}',
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_huge_numbers_are_no_times(payload: bytes) -> None:
    """A number that fits no float raises no error, because an error would end the worker."""
    assert times_in_response(HEAD, [payload]).marks == {}
