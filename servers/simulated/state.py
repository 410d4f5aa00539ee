"""The description of a simulated server's protocol, and the state of a running server.

A ServerProtocol describes one backend. A ServerState counts requests, writes the log and renders the metrics page.
"""

from __future__ import annotations

import csv
import gc
import sys
import time
import zlib
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec

from loadgen.servers import marks
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.protocol import (
    EVENTS_TYPE,
    JSON_TYPE,
    Completion,
    CompletionRequest,
    Encoding,
    Headers,
    Reply,
)
from loadgen.servers.simulated.scheduler import Gauges
from loadgen.servers.simulated.stream_sender import LogLine, Stream
from loadgen.servers.simulated.tokenizer import Vocabulary

_MAX_PENDING = 10_000  # ended requests that are not counted yet; above it, one is counted whenever a request ends
_COLLECT_PAUSE_S = 1.0
_ANSWER_STRIDE = 1_000_003  # answers to one request begin in the vocabulary like requests whose indices differ by this

DURATION_HISTOGRAMS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "decode_s", "queue_s", "prefill_s", "inference_s")
PROMPT_FIELDS = ("prompt", "messages", "inputs", "input", "text", "input_ids", "system")
"""Fields of request bodies that hold the prompt, in every API."""
PARAMETER_FIELDS = ("parameters", "sampling_params")
LENGTH_HISTOGRAMS = ("prompt_tokens", "output_tokens", "requested_tokens")
Buckets = Callable[[int], Mapping[str, Sequence[float]]]
"""Function that returns the bucket bounds of each histogram in DURATION_HISTOGRAMS and LENGTH_HISTOGRAMS, from
`max_model_len`."""
Generate = Callable[["ServerState", CompletionRequest], Encoding]
"""Handler of a route that generates tokens. Raises ErrorReply for an invalid request."""
Page = Callable[["ServerState", Mapping[str, Any]], Reply]
"""Handler of a route that generates no tokens. The mapping contains the fields of the body, and is empty if the body is
not a JSON object. Raises ErrorReply for an invalid request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProtocol:
    """The HTTP API of one simulated backend. The batching rules of the engine are in scheduler_presets.py."""

    head_prefix: str = ""
    """Header lines of every response before its specific headers; `{date}` is filled in."""
    head_suffix: str
    """Header lines of every response after its specific headers; `{date}` is filled in."""
    stream_headers: Headers = EVENTS_TYPE
    keep_alive_s: float
    body_limit: int  # in bytes; a larger body gets `too_large`
    generate: Mapping[str, Generate]
    """POST routes that generate tokens, by path."""
    pages: Mapping[tuple[str, str], Page | Reply]
    """All other routes, by (method, path)."""
    wrong_content_type: Reply | None = None
    """Response to a POST whose content type is not JSON. None: the server accepts any content type."""
    uploads: Collection[str] = ()
    """Paths that take a form with a file, and therefore any content type."""
    read_body: Callable[[str, bytes | bytearray], Mapping[str, Any]]
    """Function that returns the fields of a request body, from (path, body). Raises ErrorReply for an invalid body."""
    too_large: Reply
    failure: Callable[[int], Reply]
    """Function that returns the real server's response with status 429, 500 or 503."""
    unhealthy: Reply
    """Response of pages such as /health when the engine has failed."""
    generation_failure: Reply | None = None
    """Response to a non-streamed request whose generation fails. None: the response with status 500."""
    reason_phrases: Mapping[int, str] = field(default_factory=dict)
    """Reason phrases that differ from Python's, by status."""
    hyper_order: bool = False
    """True if the headers have the order of hyper, the HTTP library of Rust servers."""
    overloaded: Callable[[Encoding], Reply] | None = None
    """Function that returns the response above the limit on concurrent requests. None: requests wait."""
    needs_api_key: Callable[[str], bool]
    """Function that returns True if a path requires the API key."""
    unauthorized: Reply
    default_limit: int | None
    """Default limit on concurrent requests."""
    limit_counts_inputs: bool = False
    """True if the limit applies to the inputs of all concurrent requests together."""
    limit_is_batch_size: bool = False
    """True if the limit is also the engine's maximum batch size, because one option of the real server sets both."""
    not_found: Reply = field(default_factory=lambda: Reply(b'{"detail":"Not Found"}', 404))  # as FastAPI
    not_allowed: Callable[[str], Reply] = lambda methods: Reply(  # as FastAPI
        b'{"detail":"Method Not Allowed"}', 405, (("allow", methods), *JSON_TYPE)
    )
    """Function that returns the response to a method that the path does not support, from a list of the supported
    methods."""
    buckets: Buckets


class Histogram:
    """A Prometheus histogram: the number of values per bucket, and the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value. A value equal to an upper bound belongs to the bucket of this bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ServerState:
    """The counters, the log and the metrics of one running server.

    `config` contains the actual limits, with defaults filled in.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        buckets: Buckets,
        gauges: Callable[[], Gauges],
        flush_cache: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.metric_labels = {"model_name": config.model}
        self.mark = marks.fields(config.speed)
        self.mark_word = marks.word(config.speed)
        self.max_model_len = config.max_model_len
        self.vocabulary = Vocabulary(config.seed, config.max_model_len)
        self._previous_key = 0
        self.requests = 0
        self.finished_by_reason: Counter[str] = Counter()  # by the server's finish reason, or `abort` if cut short
        self.refused_by_reason: Counter[str] = Counter()  # by `overloaded`, `validation`, ...
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.histograms = {name: Histogram(bounds) for name, bounds in buckets(config.max_model_len).items()}
        self.gauges = gauges
        self.flush_cache = flush_cache
        self.process_start_s = time.time()
        self.started_s = int(self.process_start_s)
        self.streams: set[Stream] = set()  # accepted requests that are not finished
        with Path(__file__).with_name(f"{config.server}.csv").open(encoding="utf-8", newline="") as file:
            self._metric_rows = list(csv.DictReader(file))
        self._log = config.log.open("wb", buffering=1 << 20) if config.log else None
        self._pending: deque[tuple[LogLine, Stream | None, int, int]] = deque()  # ended, but not counted yet
        self._collected_s = time.monotonic()

    def complete(
        self,
        request: CompletionRequest,
        prompt_tokens: int,
        requested_tokens: int,
        stop_reason: str,
        answer: int = 0,
    ) -> Completion:
        """Generate the output of the simulated model for one request.

        The output has `requested_tokens` tokens, or `request.stop_after` tokens if that is less. `stop_reason` is the
        finish reason of an output that stops early. `answer` is the index of the output among several answers to the
        same request.
        """
        output_tokens = min(requested_tokens, request.stop_after or requested_tokens)
        words = self.vocabulary
        key = self._answer_key(request) if not answer else self._previous_key
        start = words.start(key + answer * _ANSWER_STRIDE)
        end = start + output_tokens
        reason = "length" if output_tokens == requested_tokens else stop_reason
        return Completion(
            request.streamed, prompt_tokens, requested_tokens, words.ids[start:end], words.texts[start:end], reason
        )

    def _answer_key(self, request: CompletionRequest) -> int:
        """Return a number that determines the words of the answer to `request`.

        - If the request asks for sampling, for example with a temperature above 0, the number is the index of the
          request. Equal prompts therefore get different answers.
        - Otherwise, the number is a hash of the prompt. Equal prompts therefore get equal answers, as from a model that
          decodes greedily.
        - With the fault `wrong-answer`, a request without sampling gets the hash of the previous prompt.
        """
        body = request.body
        parameters = [fields for name in PARAMETER_FIELDS if isinstance(fields := body.get(name), Mapping)]
        if any(fields.get("temperature") or fields.get("do_sample") for fields in (body, *parameters)):
            return request.index
        key = zlib.crc32(msgspec.json.encode([body.get(name) for name in PROMPT_FIELDS]))
        previous, self._previous_key = self._previous_key, key
        return previous if request.fault == "wrong-answer" else key

    def on_request_end(self, line: LogLine, stream: Stream | None = None) -> None:
        """Record the end of a request that generates tokens. `stream` is None if the request was refused.

        The request is counted and logged later, when no stream is active. Often many streams end at almost the same
        time, and counting the first of them immediately would delay the others. If too many requests wait, the oldest
        one is counted now.
        """
        # One offset between the clocks serves the whole line, because streams last only seconds.
        self._pending.append((line, stream, time.monotonic_ns(), realtime_offset_ns()))
        if not self.streams:
            self.finalise()
            now_s = time.monotonic()
            if now_s - self._collected_s > _COLLECT_PAUSE_S:
                # Full collections happen here. A collection during a burst would stop all streams for tens of ms.
                self._collected_s = now_s
                gc.collect()
        elif len(self._pending) > _MAX_PENDING:
            self._finalise_one()

    def figures(self) -> dict[str, MetricValue]:
        """Return the values of the metrics page.

        The keys are the names in the column `figure` of the metric CSV files."""
        return {
            **asdict(self.gauges()),
            **self.histograms,
            "requests": self.requests,
            "finished": sum(self.finished_by_reason.values()) - self.finished_by_reason["abort"],
            "refused": sum(self.refused_by_reason.values()),
            "all_prompt_tokens": self.prompt_tokens,
            "all_output_tokens": self.output_tokens,
            "nothing": 0,
        }

    def metrics(
        self,
        prefix: str,
        labels: Labels,
        extra: Mapping[str, MetricValue] | None = None,
        *,
        rows: slice = slice(None),
        without: Collection[str] = (),
    ) -> bytes:
        """Return metrics of this server in the Prometheus text format.

        The backend has a CSV file with one row per metric. `rows` selects some of these rows. `without` contains the
        names of metrics to leave out. The values come from the method `figures` and from `extra`. Each name begins with
        `prefix`, and each metric has the labels `labels`.
        """
        shown = [row for row in self._metric_rows[rows] if row["name"] not in without]
        return exposition(prefix, labels, shown, {**self.figures(), **(extra or {})}).encode()

    def mark_metrics(self) -> bytes:
        """Return the lines of a metrics page that mark the server as simulated: a gauge with the speed of its clock."""
        name = marks.FIELD
        help_text = "Speed of this simulated server's clock as a multiple of real time."
        return f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name} {self.config.speed}\n".encode()

    def process_metrics(self) -> bytes:
        """Return a metric with the start time of the server process, in the format of Python's Prometheus library."""
        name = "process_start_time_seconds"
        help_text = "Start time of the process since unix epoch in seconds."
        return f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name} {self.process_start_s:.2f}\n".encode()

    def models(self, owner: str, **fields: Any) -> Reply:
        """Return the response of /v1/models: one entry for the model, and one for each of its adapters.

        `owner` is the owner of each entry, and `fields` are additional fields.
        """
        card = {"id": self.config.model, "object": "model", "created": self.started_s, "owned_by": owner}
        card |= {**fields, **self.mark}
        adapters = [card | {"id": name, "parent": self.config.model} for name in self.config.adapters]
        return Reply(msgspec.json.encode({"object": "list", "data": [card, *adapters]}))

    def finalise(self) -> None:
        """Count and log every request that has ended."""
        while self._pending:
            self._finalise_one()
        self._flush_log()

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write a summary of the server as the last line of the log, and close the log."""
        self.finalise()
        self._write_log(msgspec.json.encode({"summary": summary}) + b"\n")
        self._flush_log()
        if self._log:
            self._log.close()

    def _write_log(self, line: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(line)
        except OSError as error:
            self._abandon_log(error)

    def _flush_log(self) -> None:
        if self._log is None:
            return
        try:
            self._log.flush()
        except OSError as error:
            self._abandon_log(error)

    def _abandon_log(self, error: OSError) -> None:
        """Stop logging, because writing to the log has failed. The server continues to run."""
        sys.stderr.write(f"loadgen: cannot write {self.config.log}: {error.strerror}. The log ends here.\n")
        if self._log is not None:
            with suppress(OSError):
                self._log.close()
        self._log = None

    def _finalise_one(self) -> None:
        """Count and log a single request: the oldest one that has ended and is not counted yet."""
        line, stream, ended_ns, offset_ns = self._pending.popleft()
        if stream is not None:
            self._count(stream, ended_ns)
            line.prompt_tokens = stream.completion.prompt_tokens
        line.received_ns += offset_ns
        line.due_ns = [instant_ns + offset_ns for instant_ns in line.due_ns]
        line.sent_ns = [instant_ns + offset_ns for instant_ns in line.sent_ns]
        if line.sent_ns:
            line.first_send_end_ns += offset_ns
        sent_tokens = sum(line.tokens)
        line.output_tokens = stream.completion.generated_tokens(sent_tokens) if stream else sent_tokens
        if self._log:  # some microseconds for a hundred instants, and no system call until the buffer is full
            self._write_log(msgspec.json.encode(line) + b"\n")

    def _count(self, stream: Stream, ended_ns: int) -> None:
        """Add an accepted request, which has ended at `ended_ns`, to the totals of the server.

        If the request ended successfully, also add it to the histograms.
        """
        line = stream.line
        completion = stream.completion
        output_tokens = completion.generated_tokens(stream.token_count)
        complete = stream.ending == "complete" and bool(line.sent_ns)
        reason = completion.finish_reason.replace("tool_calls", "stop")  # the engine does not know about tool calls
        self.finished_by_reason[reason if complete else "abort"] += completion.finished_requests
        self.prompt_tokens += completion.prompt_tokens
        self.output_tokens += output_tokens  # also if the client has disconnected
        if not complete:
            return
        metric_requests = completion.metric_requests or ((completion.prompt_tokens, completion.requested_tokens),)
        for prompt_tokens, requested_tokens in metric_requests:
            self.histograms["prompt_tokens"].observe(prompt_tokens)
            self.histograms["requested_tokens"].observe(requested_tokens)
        first_ns = line.sent_ns[0]
        received_ns = line.received_ns
        intervals = stream.token_count - 1
        decode_s = (line.sent_ns[-1] - first_ns) / 1e9
        ttft_s = (first_ns - received_ns) / 1e9
        e2e_s = (ended_ns - received_ns) / 1e9
        queue_s = min(ttft_s, stream.job.queue_ns / 1e9)
        values = {
            "output_tokens": output_tokens,
            "ttft_s": ttft_s,
            "e2e_s": e2e_s,
            "queue_s": queue_s,
            "prefill_s": ttft_s - queue_s,
            "inference_s": e2e_s - queue_s,
            "decode_s": decode_s,
            "tpot_s": decode_s / intervals if intervals else 0.0,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)
        for before_ns, after_ns in pairwise(line.sent_ns):
            self.histograms["itl_s"].observe((after_ns - before_ns) / 1e9)


def realtime_offset_ns() -> int:
    """Return CLOCK_REALTIME minus CLOCK_MONOTONIC in ns.

    The difference is measured three times, and the quickest measurement is used. A slow measurement can be wrong,
    because the process may have lost its CPU core between reading the two clocks.
    """
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before_ns, realtime_ns, after_ns = min(readings, key=lambda reading: reading[2] - reading[0])
    return realtime_ns - (before_ns + after_ns) // 2


# The Prometheus text format, version 0.0.4.

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SumAndCount:
    """The sum and the number of all values of a metric, without their distribution."""

    sum: float
    count: int


MetricValue = float | Mapping[tuple[str, str], float] | Histogram | SumAndCount
"""A value, values by (label, value of the label), a histogram, or a summary without quantiles."""


def exposition(
    prefix: str, labels: Labels, rows: Sequence[Mapping[str, str]], figures: Mapping[str, MetricValue]
) -> str:
    """Render metrics in the Prometheus text format.

    `rows` contains the name, type and help text of each metric, in the order of the page. A counter's name already has
    its suffix, such as `_total`. `figures` contains the values.
    """
    page = []
    for row in rows:
        name = prefix + row["name"]
        value = figures[row["figure"]]
        page.append(f"# HELP {name} {row['help']}\n# TYPE {name} {row['kind']}\n")
        if isinstance(value, Histogram):
            bounds = [*map(str, map(float, value.bounds)), "+Inf"]
            cumulative = zip(bounds, accumulate(value.counts), strict=True)
            page += [_sample(f"{name}_bucket", {**labels, "le": bound}, number) for bound, number in cumulative]
            page += [_sample(f"{name}_count", labels, sum(value.counts)), _sample(f"{name}_sum", labels, value.sum)]
        elif isinstance(value, SumAndCount):
            page += [_sample(f"{name}_sum", labels, value.sum), _sample(f"{name}_count", labels, value.count)]
        elif isinstance(value, Mapping):
            page += [_sample(name, {**labels, label: text}, number) for (label, text), number in value.items()]
        else:
            page.append(_sample(name, labels, value))
    return "".join(page)


def _sample(name: str, labels: Labels, value: float) -> str:
    """Render one sample line, with the labels in alphabetical order and the escapes that Prometheus requires."""
    escaped = {key: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, text in labels.items()}
    shown = ",".join(f'{key}="{escaped[key]}"' for key in sorted(escaped))
    return f"{name}{{{shown}}} {float(value)}\n" if labels else f"{name} {float(value)}\n"


def exponential_buckets(min_s: float, max_model_len: int) -> dict[str, Sequence[float]]:
    """Return the bucket bounds that TGI and LightLLM use in their histograms.

    - Durations: `min_s * 1.5**k` seconds, for `k` from 1 to 35.
    - Lengths: `max_model_len * k / 100` tokens, for `k` from 1 to 100.
    """
    durations = [min_s * 1.5 ** (power + 1) for power in range(35)]
    lengths = [max_model_len / 100 * (part + 1) for part in range(100)]
    return {**dict.fromkeys(DURATION_HISTOGRAMS, durations), **dict.fromkeys(LENGTH_HISTOGRAMS, lengths)}
