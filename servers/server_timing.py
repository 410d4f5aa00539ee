"""Reads the times that a server reports about a single request, in response headers or in the last events of a stream.

The times are durations by the server's clock, so the clocks of the server and the client need not agree. loadgen stores
them in the marks of a Record (`loadgen.analysis.run.record`), in microseconds:

- `server_queue_us`: time in the server's queue, before the first step that processes the request.
- `server_prefill_us`: time from leaving the queue to the first token.
- `server_inference_us`: time from leaving the queue to the last token, or to the result of a pooling model.

The following servers report such times:

- vLLM: in the field `metrics` of the last event, with the option `--enable-per-request-metrics`.
- SGLang: in the field `meta_info` on the route /generate, with the option `--enable-metrics`.
- TGI and TEI: in the headers `x-queue-time` and `x-inference-time`, in ms. TGI sends them only with responses that are
  not streamed.
- llama.cpp: in the field `timings`, which contains no time in the queue.
- Groq and Cerebras: in `usage`, `x_groq` or `time_info`, in seconds.
- Any server or gateway: in the header or trailer `Server-Timing` (https://www.w3.org/TR/server-timing).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.error_messages import one_line

QUEUE = "server_queue_us"
PREFILL = "server_prefill_us"
INFERENCE = "server_inference_us"
MAX_US = 86_400_000_000
"""Maximum duration in us: a day. Larger values are ignored, because they are instants and not durations."""
MAX_NUMBER = 1e18
"""Maximum number in a response that counts as a duration or an instant. Python cannot convert much larger integers to
floats, and no time in any unit is so large."""
LAST_EVENTS = 3
"""Number of events at the end of a stream that are searched. The last one is often an end marker."""
MAX_NAME = 40
"""Maximum number of characters of a name in a `Server-Timing` header."""
TIMED_HEADERS = {"x-queue-time": QUEUE, "x-inference-time": INFERENCE}
"""Headers of TGI and TEI with a duration in ms, in lower case."""
SERVER_TIMING = {
    **dict.fromkeys(("queue", "queued", "queuetime", "wait", "waiting"), QUEUE),
    **dict.fromkeys(("prefill", "prefilltime", "prompt", "prompteval"), PREFILL),
    **dict.fromkeys(("inference", "inferencetime"), INFERENCE),
}
"""The mark for each name in a `Server-Timing` header. The names are in lower case, and without `-`, `_` and `.`. The
specification lets each server choose its names."""
_LINE = re.compile(rb"^([!-9;-~]+):[ \t]*([^\r\n]*)", re.MULTILINE)
_ENTRY = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_PARAMETER = re.compile(r';\s*dur\s*=\s*"?([0-9.eE+-]+)"?', re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?')
_SECONDS = 1e6
_MILLISECONDS = 1e3


class ServerTimes(msgspec.Struct, frozen=True):
    """The times that a server states about one request."""

    marks: dict[str, int]
    """Durations in us, by the name of the mark."""
    sources: set[str]
    """The places in the response that contained the times, such as `metrics` or `Server-Timing`."""
    unknown_names: set[str]
    """Names in a `Server-Timing` header that loadgen does not know. The server chooses them."""


def times_in_response(head: bytes, payloads: Sequence[bytes], trailer: bytes = b"") -> ServerTimes:
    """Return the times that a response states. A malformed response does not raise an error.

    `head` is the head of the response, `payloads` are its events or its whole body, and `trailer` contains the header
    fields after the last chunk of the body.
    """
    times = ServerTimes({}, set(), set())
    _read_header_fields(head + b"\r\n" + trailer, times)
    for payload in payloads[-LAST_EVENTS:]:
        _read_payload(payload, times)
    return times


def _read_header_fields(fields: bytes, times: ServerTimes) -> None:
    for match in _LINE.finditer(fields):
        name = match[1].decode("latin-1").lower()
        value = match[2].decode("latin-1")
        if name in TIMED_HEADERS:
            _add(times, TIMED_HEADERS[name], _number(value), _MILLISECONDS, "x-queue-time and x-inference-time")
        elif name == "server-timing":
            _read_server_timing(value, times)


def _read_server_timing(value: str, times: ServerTimes) -> None:
    """Store the durations of a `Server-Timing` header in `times`. An example is `queue;dur=12.5, prefill;dur=80`."""
    for entry in _ENTRY.findall(value):
        name = one_line(entry.partition(";")[0], MAX_NAME)
        duration = _PARAMETER.search(_QUOTED.sub(_without_semicolons, entry))
        if duration is None:
            continue
        mark = SERVER_TIMING.get(re.sub(r"[-_.]", "", name.lower()))
        if mark is None:
            times.unknown_names.add(name)
        else:
            _add(times, mark, _number(duration[1]), _MILLISECONDS, "Server-Timing")


def _without_semicolons(quoted: re.Match[str]) -> str:
    return quoted[0].replace(";", " ")


def _read_payload(payload: bytes, times: ServerTimes) -> None:
    try:
        event = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # such as [DONE]
        return
    event = _object(event)
    _read_vllm(_object(event.get("metrics")), times)
    _read_vllm(_object(_object(event.get("response")).get("metrics")), times)  # the last event of /v1/responses
    _read_sglang(_object(event.get("meta_info")), times)
    _read_llama_cpp(_object(event.get("timings")), times)
    _read_cloud(_object(event.get("usage")), "usage", times)
    _read_cloud(_object(_object(event.get("x_groq")).get("usage")), "x_groq", times)
    _read_cloud(_object(event.get("time_info")), "time_info", times)


def _read_vllm(metrics: Mapping[str, Any], times: ServerTimes) -> None:
    """Store vLLM's times in `times`. The duration `time_to_first_token_ms` begins when the request leaves the queue."""
    prefill_ms, decode_ms = metrics.get("time_to_first_token_ms"), metrics.get("generation_time_ms")
    _add(times, QUEUE, metrics.get("queue_time_ms"), _MILLISECONDS, "metrics")
    _add(times, PREFILL, prefill_ms, _MILLISECONDS, "metrics")
    _add(times, INFERENCE, _sum(prefill_ms, decode_ms), _MILLISECONDS, "metrics")


def _read_sglang(info: Mapping[str, Any], times: ServerTimes) -> None:
    """Store the times that SGLang reports for a response in `times`.

    `info` contains the duration `queue_time` in seconds, and points in time such as `request_finished_ts`, in seconds
    since 1970.
    """
    _add(times, QUEUE, info.get("queue_time"), _SECONDS, "meta_info")
    prefill_s = _difference(info.get("prefill_finished_time"), info.get("forward_entry_time"))
    inference_s = _difference(info.get("request_finished_ts"), info.get("forward_entry_time"))
    _add(times, PREFILL, prefill_s, _SECONDS, "meta_info")
    _add(times, INFERENCE, inference_s, _SECONDS, "meta_info")


def _read_llama_cpp(timings: Mapping[str, Any], times: ServerTimes) -> None:
    prefill_ms = timings.get("prompt_ms")
    _add(times, PREFILL, prefill_ms, _MILLISECONDS, "timings")
    _add(times, INFERENCE, _sum(prefill_ms, timings.get("predicted_ms")), _MILLISECONDS, "timings")


def _read_cloud(usage: Mapping[str, Any], source: str, times: ServerTimes) -> None:
    """Store in `times` the times that Groq and Cerebras report. `usage` is the object that contains these times."""
    prefill_s = usage.get("prompt_time")
    _add(times, QUEUE, usage.get("queue_time"), _SECONDS, source)
    _add(times, PREFILL, prefill_s, _SECONDS, source)
    _add(times, INFERENCE, _sum(prefill_s, usage.get("completion_time")), _SECONDS, source)


def _add(times: ServerTimes, mark: str, value: Any, us_per_unit: float, source: str) -> None:
    """Store a duration in `times` under the name `mark`.

    `value` is the duration in a unit of `us_per_unit` microseconds. A duration that is missing, negative or longer than
    a day is ignored. `source` states where the duration comes from.
    """
    if not _is_time(value):
        return
    duration_us = value * us_per_unit
    if 0 <= duration_us <= MAX_US:
        times.marks[mark] = round(duration_us)
        times.sources.add(source)


def _is_time(value: Any) -> bool:
    """Return True if a value of a JSON document is a number that can be a duration or an instant."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _sum(first: Any, second: Any) -> Any:
    return first + second if _is_time(first) and _is_time(second) else None


def _difference(later: Any, earlier: Any) -> Any:
    """Return the time from `earlier` to `later`, or None if one of them is unknown.

    SGLang writes 0 for an unknown instant.
    """
    return later - earlier if _is_time(later) and _is_time(earlier) and earlier > 0 else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
