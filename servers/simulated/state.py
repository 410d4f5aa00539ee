"""What makes a simulated server its kind, and what a running one knows: its log, its metrics, the text of both."""

from __future__ import annotations

import csv
import gc
import sys
import time
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

_LONGEST = 10_000  # requests that may wait to be settled; a server that is never idle settles one when it gets another
_COLLECT_PAUSE_S = 1.0
_ANSWERS = 1_000_003  # answers of one request begin as far apart as requests with such numbers

SECONDS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "decode_s")
TOKENS = ("prompt_tokens", "output_tokens", "requested_tokens")
Buckets = Callable[[int], Mapping[str, Sequence[float]]]
"""The longest prompt plus output to the bucket bounds of every histogram, by the names in SECONDS and TOKENS."""
Generate = Callable[["ServerState", CompletionRequest], Encoding]  # raises ErrorReply
Page = Callable[["ServerState", Mapping[str, Any]], Reply]
"""From the fields of the body; they are empty where it is no JSON object. Raises ErrorReply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProtocol:
    """One server kind's side of HTTP: all that makes a simulated server that kind but how its engine batches."""

    before: str = ""  # head lines of every answer, ahead of its own headers; `{date}` is filled in
    after: str  # the same, behind them
    stream_headers: Headers = EVENTS_TYPE
    keep_alive_s: float
    body_limit: int  # in bytes; a larger body gets `too_large`
    generate: Mapping[str, Generate]  # POST routes that make tokens
    pages: Mapping[tuple[str, str], Page | Reply]  # (method, path) to everything else
    bad_type: Reply | None = None  # answer to a POST whose content type is not JSON; None: the server does not mind
    read_body: Callable[[str, bytes | bytearray], Mapping[str, Any]]  # (path, body) to its fields. Raises ErrorReply
    too_large: Reply
    failure: Callable[[int], Reply]  # an answer with status 429, 500 or 503 in the server's own words
    unhealthy: Reply  # what a page such as /health says when the engine is gone
    gives_up: Reply | None = None  # an answer that is not streamed and fails while it runs; None: that of status 500
    phrases: Mapping[int, str] = field(default_factory=dict)  # reason phrases that are not those of Python
    hyper: bool = False  # the head is laid out as Rust's hyper does it
    overloaded: Callable[[Encoding], Reply] | None = None  # past the limit on concurrent requests; None: they wait
    guarded: Callable[[str], bool]  # paths that want the API key
    unauthorized: Reply
    default_limit: int | None  # of concurrent requests
    limits_batch: bool = False  # the limit is the engine's running limit too: one option of the real server is both
    not_found: Reply = field(default_factory=lambda: Reply(b'{"detail":"Not Found"}', 404))  # FastAPI's, as the next
    not_allowed: Callable[[str], Reply] = lambda methods: Reply(
        b'{"detail":"Method Not Allowed"}', 405, (("allow", methods), *JSON_TYPE)
    )  # the methods that the path has, to an answer for one that it has not
    buckets: Buckets


class Histogram:
    """Observations counted by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value. A bound belongs to its own bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ServerState:
    """What the pages and the answers of one running server know; `config` has the limits that are in force."""

    def __init__(self, config: SimulatedConfig, buckets: Buckets, gauges: Callable[[], Gauges]) -> None:
        self.config = config
        self.served = {"model_name": config.model}  # a label of metrics
        self.mark, self.mark_word = marks.fields(config.speed), marks.word(config.speed)
        self.longest = longest = config.max_model_len
        self.vocabulary = Vocabulary(config.seed, longest)
        self.requests = 0
        self.by_reason: Counter[str] = Counter()  # requests that have ended: the server's word, or `abort`: cut short
        self.refused: Counter[str] = Counter()  # requests that were not taken: `overloaded`, `validation`, ...
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.histograms = {name: Histogram(bounds) for name, bounds in buckets(longest).items()}
        self.gauges = gauges
        self.started_s = int(time.time())
        self.streams: set[Stream] = set()  # accepted requests that are not finished
        with Path(__file__).with_name(f"{config.server}.csv").open(encoding="utf-8", newline="") as file:
            self._metric_rows = list(csv.DictReader(file))
        self._log = config.log.open("wb", buffering=1 << 20) if config.log else None
        self._ended: deque[tuple[LogLine, Stream | None, int, int]] = deque()
        self._collected_s = time.monotonic()

    def complete(
        self, request: CompletionRequest, prompt_tokens: int, requested_tokens: int, ended: str, answer: int = 0
    ) -> Completion:
        """Return the model's response: `requested_tokens` tokens, or fewer if the model stops by itself.

        `ended` is the finish reason of a response that stops early; `answer` is the index among a request's responses.
        """
        output = min(requested_tokens, request.stop_after or requested_tokens)
        words, start = self.vocabulary, self.vocabulary.start(request.index + answer * _ANSWERS)
        ids, texts = words.ids[start : start + output], words.texts[start : start + output]
        reason = "length" if output == requested_tokens else ended
        return Completion(request.streamed, prompt_tokens, requested_tokens, ids, texts, reason)

    def end(self, line: LogLine, stream: Stream | None = None) -> None:
        """A request for tokens has ended, or was refused, which has no stream. Counted when no stream is left that
        could be made late: a burst's streams all end within a moment, and counting one would delay the others."""
        # One offset between the clocks for the line, as streams last seconds.
        self._ended.append((line, stream, time.monotonic_ns(), realtime_offset_ns()))
        if not self.streams:
            self.settle()
            if (now_s := time.monotonic()) - self._collected_s > _COLLECT_PAUSE_S:
                # Full collections happen here and not in the middle of a burst, which one would stop for tens of ms.
                self._collected_s = now_s
                gc.collect()
        elif len(self._ended) > _LONGEST:
            self._settle_one()

    def figures(self) -> dict[str, Figure]:
        """What metrics pages show, in our words."""
        return {
            **asdict(self.gauges()),
            **self.histograms,
            "requests": self.requests,
            "finished": sum(self.by_reason.values()) - self.by_reason["abort"],
            "refused": sum(self.refused.values()),
            "all_prompt_tokens": self.prompt_tokens,
            "all_output_tokens": self.output_tokens,
            "nothing": 0,
        }

    def metrics(
        self,
        prefix: str,
        labels: Labels,
        more: Mapping[str, Figure] | None = None,
        *,
        rows: slice = slice(None),
        without: Collection[str] = (),
    ) -> bytes:
        """Rows of the server's page of metrics, from `figures` and `more`, `without` these names."""
        shown = [row for row in self._metric_rows[rows] if row["name"] not in without]
        return exposition(prefix, labels, shown, {**self.figures(), **(more or {})}).encode()

    def mark_metrics(self) -> bytes:
        """The mark of a simulated server as the end of a page of metrics."""
        name, speed = marks.FIELD, self.config.speed
        words = "How many times faster than life the clock of this simulated server runs."
        return f"# HELP {name} {words}\n# TYPE {name} gauge\n{name} {speed}\n".encode()

    def models(self, owner: str, **more: Any) -> Reply:
        """The list of models, which has one."""
        card = {"id": self.config.model, "object": "model", "created": self.started_s, "owned_by": owner}
        card |= {**more, **self.mark}
        return Reply(msgspec.json.encode({"object": "list", "data": [card]}))

    def settle(self) -> None:
        """Accounts for every request that has ended, for somebody who wants to read the totals."""
        while self._ended:
            self._settle_one()
        self._note(b"")

    def close(self, summary: Mapping[str, Any]) -> None:
        """Ends the log with the line that says how the server did as a whole."""
        self.settle()
        self._note(msgspec.json.encode({"summary": summary}) + b"\n")
        self._note(b"")
        if self._log:
            self._log.close()

    def _note(self, line: bytes) -> None:
        """A line of the log; none: what was written has to be there now. What the disk does not take ends the log, not
        the server."""
        if self._log is None:
            return
        try:
            if line:
                self._log.write(line)
            else:
                self._log.flush()
        except OSError as error:
            sys.stderr.write(f"loadgen: cannot write {self.config.log}: {error.strerror}. The log ends here.\n")
            with suppress(OSError):
                self._log.close()
            self._log = None

    def _settle_one(self) -> None:
        line, stream, ended_ns, offset_ns = self._ended.popleft()
        if stream is not None:
            self._count(stream, ended_ns)
            line.prompt_tokens = stream.completion.prompt_tokens
        line.received_ns += offset_ns
        line.due_ns, line.sent_ns = ([at_ns + offset_ns for at_ns in each] for each in (line.due_ns, line.sent_ns))
        sent = sum(line.tokens)
        line.output_tokens = stream.completion.generated(sent) if stream else sent
        if self._log:  # some microseconds for a hundred instants, and no system call until the buffer is full
            self._note(msgspec.json.encode(line) + b"\n")

    def _count(self, stream: Stream, ended_ns: int) -> None:
        """Counts a request that was taken and has come to its end, in whatever way."""
        line, completion = stream.line, stream.completion
        complete = stream.ending == "complete" and bool(line.sent_ns)
        self.by_reason[completion.finish_reason if complete else "abort"] += 1
        self.prompt_tokens += completion.prompt_tokens
        self.output_tokens += completion.generated(stream.count)  # also when the client had gone
        if not complete:
            return
        first_ns, received_ns, gaps = line.sent_ns[0], line.received_ns, stream.count - 1
        decode_s = (line.sent_ns[-1] - first_ns) / 1e9
        for prompt_tokens, requested_tokens in completion.counted or (
            (completion.prompt_tokens, completion.requested_tokens),
        ):
            self.histograms["prompt_tokens"].observe(prompt_tokens)
            self.histograms["requested_tokens"].observe(requested_tokens)
        values = {
            "output_tokens": completion.generated(stream.count),
            "ttft_s": (first_ns - received_ns) / 1e9,
            "e2e_s": (ended_ns - received_ns) / 1e9,
            "decode_s": decode_s,
            "tpot_s": decode_s / gaps if gaps else 0.0,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)
        for before_ns, after_ns in pairwise(line.sent_ns):
            self.histograms["itl_s"].observe((after_ns - before_ns) / 1e9)


def realtime_offset_ns() -> int:
    """CLOCK_REALTIME less CLOCK_MONOTONIC; the tightest of three readings, as this process may lose its core in one."""
    tries = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before_ns, realtime_ns, after_ns = min(tries, key=lambda each: each[2] - each[0])
    return realtime_ns - (before_ns + after_ns) // 2


# The Prometheus text format, version 0.0.4.

Labels = Mapping[str, str]
Figure = float | Mapping[tuple[str, str], float] | Histogram
"""A value, values by one further label and its value, or a histogram."""


def exposition(prefix: str, labels: Labels, rows: Sequence[Mapping[str, str]], figures: Mapping[str, Figure]) -> str:
    """A page of metrics in its order and words, all with these labels; a counter's name has its suffix already."""
    page = []
    for row in rows:
        name, value = prefix + row["name"], figures[row["figure"]]
        page.append(f"# HELP {name} {row['help']}\n# TYPE {name} {row['kind']}\n")
        if isinstance(value, Histogram):
            bounds = [*map(str, map(float, value.bounds)), "+Inf"]
            cumulative = zip(bounds, accumulate(value.counts), strict=True)
            page += [_sample(f"{name}_bucket", {**labels, "le": bound}, number) for bound, number in cumulative]
            page += [_sample(f"{name}_count", labels, sum(value.counts)), _sample(f"{name}_sum", labels, value.sum)]
        elif isinstance(value, Mapping):
            page += [_sample(name, {**labels, label: word}, each) for (label, word), each in value.items()]
        else:
            page.append(_sample(name, labels, value))
    return "".join(page)


def _sample(name: str, labels: Labels, value: float) -> str:
    """Labels in alphabetical order, with the three escapes that the format has."""
    escaped = {key: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, text in labels.items()}
    shown = ",".join(f'{key}="{escaped[key]}"' for key in sorted(escaped))
    return f"{name}{{{shown}}} {float(value)}\n" if labels else f"{name} {float(value)}\n"


def steps_of_half(shortest_s: float, longest: int) -> dict[str, Sequence[float]]:
    """Bucket bounds of TGI and LightLLM: 35 durations, each 1.5 times the one before, and hundredths of the length."""
    durations = [shortest_s * 1.5 ** (power + 1) for power in range(35)]
    hundredths = [longest / 100 * (part + 1) for part in range(100)]
    return {**dict.fromkeys(SECONDS, durations), **dict.fromkeys(TOKENS, hundredths)}
