"""Every Metric: its name, unit, direction, definition and formula. All that knows of a latency or a rate derives from
this table: summary, objectives, goodput, export, comparison, live page and documentation.

Notation of the definitions: t_due, t_sent; t_1..t_k, the arrivals of the k chunks that hold at least one generated
token; c_j, the tokens in chunk j; m, the streamed tokens, which is the sum of c_j; n, the tokens generated, which are
more where a server hides some (loadgen.analysis.run.token_counts); t_end, the arrival of the server's end marker.

To add one: an entry below, and nothing else. No numpy here, so that objectives are read without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, Window

NS_PER_S = 1e9
TAIL_SHARE = 0.1
MAX_SORTED_GAPS = 1 << 24
"""More gaps than this are counted, not sorted: beside them and a sorted copy a machine would have room for little."""


class Metric(msgspec.Struct, frozen=True):
    """A figure worth a name."""

    name: str
    """As in summary.json."""
    short: str
    """As a table's row says it."""
    title: str
    definition: str
    formula: Callable[[Frame], Any]
    """Per request a value for each row, NaN where undefined; per chunk and token the samples of all sampled rows; of a
    run the figure, or None."""
    unit: Literal["s", "s/token", "requests/s", "tokens/s", "share"] = "s"
    direction: Literal["lower", "higher"] = "lower"
    per: Literal["request", "chunk", "token", "run"] = "request"
    stamps: Literal["ttft", "tpot", "itl", "e2e"] = "e2e"
    """Which error bar of the client's stamps holds for it: `error_bar_<stamps>_s` of the summary."""
    adjusted: bool = False
    """Whether the summary also has it with every request that is not complete counted as infinitely slow."""
    judged: bool = True
    """Of a run: whether objectives and comparisons know it."""

    @property
    def key(self) -> str:
        """Its name in objectives and on the command line: `ttft`, `requests_per_s`."""
        return self.name if self.unit.endswith("/s") else self.name.removesuffix("_s")

    def rows(self, frame: Frame) -> Floats:
        """Its value for each row of the frame, NaN where the row has none. Of latencies per request."""
        return cast("Floats", self.formula(frame))

    def values(self, frame: Frame) -> Floats:
        """Its samples: those of complete requests due in the window."""
        result = self.rows(frame)
        return result[frame.sampled & ~_undefined(result)] if self.per == "request" else result

    def zero_counts(self, frame: Frame) -> Integers | None:
        """Of gaps that are too many to stand in memory one by one: how many zeros each row has beside them."""
        counts = frame.gap_counts
        if (
            self.per not in ("chunk", "token")
            or int(counts.sum()) <= MAX_SORTED_GAPS
            or int(frame.chunk_ns.steps.min()) < 0
        ):
            return None
        return (frame.later_counts if self.per == "token" else counts) - counts

    def groups(self, frame: Frame) -> Integers | None:
        """Offsets of the samples that belong to one request; None when each has one at most."""
        from loadgen.analysis.frame import offsets_of

        if self.per not in ("chunk", "token"):
            return None
        return offsets_of((frame.gap_counts if self.per == "chunk" else frame.later_counts)[frame.sampled])


def _per_second(amount: float, frame: Frame) -> float | None:
    span = frame.span_ns
    return None if span is None else amount / (span[1] - span[0]) * NS_PER_S


def _before_tail(frame: Frame) -> Window | None:
    """A whole run until fewer than a tenth of the requests sent were left in flight."""
    from loadgen.analysis.frame import Window

    ends = frame.end_ns[frame.sent & ~_undefined(frame.end_ns)]
    if not frame.whole or frame.span_ns is None or len(ends) == 0:
        return None
    ends.sort()
    begun = ends[min(len(ends) - 1, math.floor(len(ends) * (1 - TAIL_SHARE)))]
    return Window(frame.span_ns[0], float(begun), "auto", "before the tail")


def _tail_share(frame: Frame) -> float | None:
    steady, span = _before_tail(frame), frame.span_ns
    return None if steady is None or span is None else (span[1] - steady.to_ns) / (span[1] - span[0])


def _steady_output_tokens_per_s(frame: Frame) -> float | None:
    before = replace(frame, window=_before_tail(frame))
    return None if before.window is None else _per_second(before.tokens_inside(), before)


def _skew_s(frame: Frame) -> float | None:
    sent = frame.sent & ~_undefined(frame.sent_end_ns)
    due_ns = frame.due_ns[sent]
    if len(due_ns) == 0 or due_ns.max() > due_ns.min():
        return None
    return float(frame.sent_end_ns[sent].max() - frame.sent_ns[sent].min()) / NS_PER_S


def _undefined(values: Floats) -> Booleans:
    """Which are NaN: those that differ from themselves."""
    return cast("Booleans", values != values)  # noqa: PLR0124


_TABLE = (
    Metric(
        "ttft_s",
        "TTFT",
        "Time to first token",
        "t_1 - t_sent. The first chunk that holds a generated token counts, reasoning included; "
        "role-only, empty and usage-only chunks do not.",
        lambda f: (f.first_ns - f.sent_ns) / NS_PER_S,
        stamps="ttft",
        adjusted=True,
    ),
    Metric(
        "ttft_due_s",
        "TTFT from due",
        "Time to first token, from due",
        "t_1 - t_due: what a caller sees who also waits for the client to send.",
        lambda f: (f.first_ns - f.due_ns) / NS_PER_S,
        stamps="ttft",
    ),
    Metric(
        "tpot_s",
        "TPOT",
        "Time per output token",
        "(t_k - t_1) / (m - c_1), of streamed tokens; undefined when m <= c_1.",
        lambda f: (f.last_ns - f.first_ns) / f.later_tokens / NS_PER_S,
        unit="s/token",
        stamps="tpot",
    ),
    Metric(
        "icl_s",
        "ICL",
        "Inter-chunk latency",
        "t_{j+1} - t_j, one sample per gap, never smoothed.",
        lambda f: f.gaps_s(),
        per="chunk",
        stamps="itl",
    ),
    Metric(
        "itl_s",
        "ITL",
        "Inter-token latency",
        "Inter-chunk latency weighted by tokens: a chunk of c tokens gives its gap and c - 1 zeros, so a request of "
        "m streamed tokens gives m - 1 samples whose sum is t_k - t_1.",
        lambda f: f.token_gaps_s(),
        per="token",
        stamps="itl",
    ),
    Metric(
        "e2e_s",
        "E2E",
        "End-to-end latency",
        "t_k - t_sent, to the last chunk that holds a token; t_end - t_sent of embeddings and rerank, which have none.",
        lambda f: (f.last_ns - f.sent_ns) / NS_PER_S,
        adjusted=True,
    ),
    Metric(
        "e2e_due_s",
        "E2E from due",
        "End-to-end latency, from due",
        "t_k - t_due.",
        lambda f: (f.last_ns - f.due_ns) / NS_PER_S,
    ),
    Metric(
        "e2e_stream_s",
        "E2E to end mark",
        "End-to-end latency, to the end marker",
        "t_end - t_sent.",
        lambda f: (f.end_ns - f.sent_ns) / NS_PER_S,
    ),
    Metric(
        "e2e_asked_s",
        "E2E at length asked",
        "End-to-end latency, at the length asked",
        "t_k - t_sent + TPOT (n_asked - n): what the answer would have taken at the length asked, had it gone on at "
        "its own pace. Equal to E2E where lengths are as asked; where a server ends answers itself (TGI) it makes them "
        "comparable.",
        lambda f: (
            (f.last_ns - f.sent_ns + (f.last_ns - f.first_ns) / f.later_tokens * (f.output_asked - f.output_tokens))
            / NS_PER_S
        ),
    ),
    Metric(
        "normalised_s",
        "Normalised",
        "Normalised latency",
        "(t_k - t_sent) / n. Its mean over requests is the normalised latency of the Orca and vLLM papers.",
        lambda f: (f.last_ns - f.sent_ns) / f.generated_tokens / NS_PER_S,
        unit="s/token",
        adjusted=True,
    ),
    Metric(
        "requests_per_s",
        "Requests",
        "Request throughput",
        "Complete requests that ended inside the window / window. The window of a whole run is from the first t_sent "
        "to the last t_end of all requests sent, failed ones included.",
        lambda f: _per_second(float(f.completed_inside), f),
        unit="requests/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "output_tokens_per_s",
        "Output",
        "Output throughput",
        "Generated tokens that arrived inside the window / window, those of answers that were cut off later included.",
        lambda f: _per_second(f.tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "steady_output_tokens_per_s",
        "Output before drain",
        "Output throughput before the tail",
        "Generated tokens that arrived before the tail of a whole run / the time until then: what the server gives "
        "while it has enough to do. A run with a window has none.",
        _steady_output_tokens_per_s,
        unit="tokens/s",
        direction="higher",
        per="run",
        judged=False,
    ),
    Metric(
        "total_tokens_per_s",
        "Output and prompts",
        "Total throughput",
        "Output throughput plus the prompt tokens of requests whose first token arrived inside the window / window.",
        lambda f: _per_second(f.tokens_inside() + f.prompt_tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "input_tokens_per_s",
        "Input",
        "Input throughput",
        "Prompt tokens of requests whose first token arrived inside the window / window; of embeddings and rerank, "
        "those whose answer did.",
        lambda f: _per_second(f.prompt_tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "tail_share",
        "Drain",
        "Tail",
        "Share of a whole run in which fewer than a tenth of the requests were left in flight: how much of the "
        "throughput is that of a server running empty.",
        _tail_share,
        unit="share",
        per="run",
        judged=False,
    ),
    Metric(
        "skew_s",
        "Burst skew",
        "Burst skew",
        "Last t_sent_end - first t_sent of requests due at one instant: how far from `all at once` the burst was.",
        _skew_s,
        per="run",
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def metric_by_key(key: str) -> Metric:
    """The metric of a key such as `ttft`, also of one that was added later. Raises KeyError."""
    return {metric.key: metric for metric in METRICS.values()}[key]
