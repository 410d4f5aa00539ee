"""Defines every metric, with its name, unit, direction, definition and formula.

The summary, objectives, goodput, export, comparison, live page and documentation all use the table METRICS. To add a
metric, add one entry to this table. This module does not import numpy, so that objectives can be parsed without numpy.

The definitions use this notation:

- t_due: time when the request is due.
- t_sent: time when the first byte of the request is sent.
- t_1 to t_k: arrival times of the k chunks that hold at least one generated token.
- c_j: number of tokens in chunk j.
- m: number of streamed tokens, the sum of all c_j.
- n: number of generated tokens, which is larger than m if the server hides tokens (loadgen.analysis.run.token_counts).
- t_end: arrival time of the server's end marker. For audio: arrival of the last byte of the body.
- d: length of the recording or of the speech in seconds.
- t_r, t_a: for a response that begins with reasoning, the arrival times of the last chunk of the reasoning and of the
  first chunk of the answer.
- m_r, m_a: number of tokens of the reasoning and of the answer.
- c_a: number of tokens in the first chunk of the answer. The first chunk of the reasoning has c_1 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec.structs import replace

from loadgen.servers.server_timing import PREFILL, QUEUE

if TYPE_CHECKING:
    from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, Window

NS_PER_S = 1e9
US_PER_S = 1e6
TAIL_SHARE = 0.1
MAX_SORTED_GAPS = 1 << 24
"""Maximum number of gaps that are sorted. More gaps are counted instead, which saves the memory of a sorted copy."""


class Metric(msgspec.Struct, frozen=True):
    """A named figure that is computed per request, per chunk, per token or per run."""

    name: str
    """The key in summary.json."""
    short: str
    """The short title, for table rows."""
    title: str
    definition: str
    formula: Callable[[Frame], Any]
    """Computes the metric from a Frame. A metric per request returns one value per row, or NaN where it is undefined. A
    metric per chunk or token returns the samples of all sampled rows. A metric per run returns one value or None."""
    unit: Literal[
        "s", "s/token", "tokens", "requests/s", "inputs/s", "tokens/s", "share", "s of audio/s", "bytes/s", "ratio"
    ] = "s"
    direction: Literal["lower", "higher"] = "lower"
    per: Literal["request", "chunk", "token", "run"] = "request"
    stamps: Literal["ttft", "tpot", "itl", "e2e"] = "e2e"
    """The timestamp error bar that applies to the metric: `error_bar_<stamps>_s` in the summary."""
    adjusted: bool = False
    """True if the summary also reports the metric with every incomplete request counted as infinitely slow."""
    judged: bool = True
    """True if objectives and comparisons accept the metric. This applies to metrics per run."""

    optional: bool = False
    """True if most runs have no request with this metric. Tables then leave the metric out."""

    @property
    def key(self) -> str:
        """The name in objectives and on the command line, such as `ttft` or `requests_per_s`."""
        return self.name if self.unit.endswith("/s") else self.name.removesuffix("_s")

    @property
    def timed(self) -> bool:
        """True if the values are in seconds or in seconds per token.

        A bound on such a metric needs a unit of time, as in `ttft < 500ms`.
        """
        return self.unit in ("s", "s/token")

    def rows(self, frame: Frame) -> Floats:
        """Return the metric's value for each row of the frame, or NaN for a row without a value.

        Call this method only for a metric that is computed per request.
        """
        return cast("Floats", self.formula(frame))

    def values(self, frame: Frame) -> Floats:
        """Return the samples of the metric, from the complete requests that were due inside the window."""
        result = self.rows(frame)
        return result[frame.sampled & ~_undefined(result)] if self.per == "request" else result

    def zero_counts(self, frame: Frame) -> Integers | None:
        """Return the number of samples of each row that are known to be 0. Return None if the caller must sort all
        samples.

        If a run has very many gaps between chunks, sorting all samples is expensive. Counting the zeros is much
        faster. The number of zeros depends on the metric:

        - Per token: A token has an inter-token latency of 0 if it arrived in the same chunk as the previous token.
        - Per chunk: No sample is known to be 0, so the number is 0 for every row.

        The result is None if the metric does not measure gaps, if the run has few gaps, or if a gap is negative.
        """
        counts = frame.gap_counts
        if self.per not in ("chunk", "token") or int(counts.sum()) <= MAX_SORTED_GAPS:
            return None
        if int(frame.chunk_ns.steps.min()) < 0:  # Counting does not support negative gaps.
            return None
        return (frame.later_counts if self.per == "token" else counts) - counts

    def groups(self, frame: Frame) -> Integers | None:
        """Return the offsets that delimit the samples of each request, or None if no request has several samples."""
        from loadgen.analysis.frame import offsets_of

        if self.per not in ("chunk", "token"):
            return None
        return offsets_of((frame.gap_counts if self.per == "chunk" else frame.later_counts)[frame.sampled])


def _per_second(amount: float, frame: Frame) -> float | None:
    span = frame.span_ns
    return None if span is None else amount / (span[1] - span[0]) * NS_PER_S


def _before_tail(frame: Frame) -> Window | None:
    """Return the part of a run before the drain, as a window.

    The drain is the end of a run, when fewer than a tenth of the sent requests are still in flight. The result begins
    with the first send and ends with the start of the drain. Return None if the measurement window is only a part of
    the run, or if no request has ended.
    """
    from loadgen.analysis.frame import Window

    ends = frame.end_ns[frame.sent & ~_undefined(frame.end_ns)]
    if not frame.whole or frame.span_ns is None or len(ends) == 0:
        return None
    ends.sort()
    tail_starts = ends[min(len(ends) - 1, math.floor(len(ends) * (1 - TAIL_SHARE)))]
    return Window(frame.span_ns[0], float(tail_starts), "auto", "before the drain")


def _tail_share(frame: Frame) -> float | None:
    before, span = _before_tail(frame), frame.span_ns
    return None if before is None or span is None else (span[1] - before.to_ns) / (span[1] - span[0])


def _steady_output_tokens_per_s(frame: Frame) -> float | None:
    before = replace(frame, window=_before_tail(frame))
    return None if before.window is None else _per_second(before.tokens_inside(), before)


def _skew_s(frame: Frame) -> float | None:
    sent = frame.sent & ~_undefined(frame.sent_end_ns)
    due_ns = frame.due_ns[sent]
    if len(due_ns) == 0 or due_ns.max() > due_ns.min():
        return None
    return float(frame.sent_end_ns[sent].max() - frame.sent_ns[sent].min()) / NS_PER_S


def _per_second_inside(amounts: Floats, frame: Frame) -> float | None:
    """Return a rate: the sum of `amounts` over the complete requests that ended in the window, per second.

    `amounts` has one value per row of the frame. The sum is divided by the length of the window. Return None if
    `Frame.sum_inside` returns no sum.
    """
    total = frame.sum_inside(amounts)
    return None if total is None else _per_second(total, frame)


def _reasoning_tokens(frame: Frame) -> Floats:
    from loadgen.analysis.reasoning import reasoning_tokens

    return reasoning_tokens(frame)


def _reasoning_tpot_ns(frame: Frame) -> Floats:
    from loadgen.analysis.reasoning import reasoning_phases

    return reasoning_phases(frame).reasoning.tpot_ns


def _answer_tpot_ns(frame: Frame) -> Floats:
    from loadgen.analysis.reasoning import reasoning_phases

    return reasoning_phases(frame).answer.tpot_ns


def _outside_s(frame: Frame) -> Floats:
    ttft_ns = frame.first_ns - frame.sent_ns
    outside_s = ttft_ns / NS_PER_S - (frame.mark(QUEUE) + frame.mark(PREFILL)) / US_PER_S
    outside_s[~frame.is_streamed] = math.nan
    return outside_s


def _undefined(values: Floats) -> Booleans:
    """Return a mask of the NaN values. NaN is the only value that differs from itself."""
    return cast("Booleans", values != values)  # noqa: PLR0124


_TABLE = (
    Metric(
        "ttft_s",
        "TTFT",
        "Time to first token",
        "t_1 - t_sent: from the first byte sent to the arrival of the first chunk that holds a generated token. "
        "Reasoning tokens count; chunks with only a role, usage or no content do not.",
        lambda f: (f.first_ns - f.sent_ns) / NS_PER_S,
        stamps="ttft",
        adjusted=True,
    ),
    Metric(
        "ttft_due_s",
        "TTFT from due",
        "Time to first token, from due time",
        "t_1 - t_due: TTFT from the scheduled send time, which includes delays of the client.",
        lambda f: (f.first_ns - f.due_ns) / NS_PER_S,
        stamps="ttft",
    ),
    Metric(
        "ttfa_s",
        "TTFA",
        "Time to first answer",
        "t_a - t_sent: from the first byte sent to the first chunk that holds a token of the answer or of a tool call, "
        "after reasoning. Defined only for responses that begin with reasoning.",
        lambda f: (f.mark("first_answer_ns") - f.sent_ns) / NS_PER_S,
        stamps="ttft",
        optional=True,
    ),
    Metric(
        "think_s",
        "Think",
        "Reasoning time",
        "t_a - t_1: from the first chunk of the reasoning to the first chunk of the answer. Defined only for responses "
        "that begin with reasoning.",
        lambda f: (f.mark("first_answer_ns") - f.first_ns) / NS_PER_S,
        optional=True,
    ),
    Metric(
        "tpot_s",
        "TPOT",
        "Time per output token",
        "(t_k - t_1) / (m - c_1): mean time per streamed token after the first chunk. Undefined if m <= c_1.",
        lambda f: (f.last_ns - f.first_ns) / f.later_tokens / NS_PER_S,
        unit="s/token",
        stamps="tpot",
    ),
    Metric(
        "tpot_reasoning_s",
        "TPOT reasoning",
        "Time per output token of the reasoning",
        "(t_r - t_1) / (m_r - c_1): mean time per token of the reasoning after its first chunk. Defined only for "
        "responses that begin with reasoning.",
        lambda f: _reasoning_tpot_ns(f) / NS_PER_S,
        unit="s/token",
        stamps="tpot",
        optional=True,
    ),
    Metric(
        "tpot_answer_s",
        "TPOT answer",
        "Time per output token of the answer",
        "(t_k - t_a) / (m_a - c_a): mean time per token of the answer after its first chunk. Defined only for "
        "responses that begin with reasoning.",
        lambda f: _answer_tpot_ns(f) / NS_PER_S,
        unit="s/token",
        stamps="tpot",
        optional=True,
    ),
    Metric(
        "reasoning_tokens",
        "Reasoning",
        "Reasoning tokens",
        "The number of reasoning tokens that the server reports, or else m_r, the number of tokens in the chunks of "
        "the reasoning. Defined only for responses with reasoning.",
        _reasoning_tokens,
        unit="tokens",
        optional=True,
    ),
    Metric(
        "first_audio_s",
        "First audio",
        "Time to first audio",
        "From the first byte sent to the arrival of the first byte of audio. The header of a WAV file does not count. "
        "Only for speech.",
        lambda f: (f.mark("first_audio_ns") - f.sent_ns) / NS_PER_S,
        stamps="ttft",
        optional=True,
    ),
    Metric(
        "rtf",
        "RTF",
        "Real-time factor",
        "(t_end - t_sent) / d: processing time per second of audio. Below 1, the server is faster than real time. Only "
        "for transcriptions and speech of known length.",
        lambda f: (f.end_ns - f.sent_ns) / NS_PER_S / f.audio_s,
        unit="ratio",
        optional=True,
    ),
    Metric(
        "server_queue_s",
        "Server queue",
        "Time in the server's queue",
        "The time in the queue that the server states in the response (`--server-timing`), by the server's clock.",
        lambda f: f.mark(QUEUE) / US_PER_S,
        stamps="ttft",
        optional=True,
    ),
    Metric(
        "server_prefill_s",
        "Server prefill",
        "Prefill by the server's clock",
        "The time from the end of the queue to the first token that the server states in the response "
        "(`--server-timing`), by the server's clock.",
        lambda f: f.mark(PREFILL) / US_PER_S,
        stamps="ttft",
        optional=True,
    ),
    Metric(
        "outside_s",
        "Outside",
        "TTFT outside the server's queue and prefill",
        "TTFT - server_queue_s - server_prefill_s: the network, gateways, the HTTP server and the tokenizer. Defined "
        "only if the server states both times (`--server-timing`), and for streamed responses.",
        _outside_s,
        stamps="ttft",
        optional=True,
    ),
    Metric(
        "icl_s",
        "ICL",
        "Inter-chunk latency",
        "t_{j+1} - t_j: the gap between consecutive chunks, one sample per gap, without smoothing.",
        lambda f: f.gaps_s(),
        per="chunk",
        stamps="itl",
    ),
    Metric(
        "itl_s",
        "ITL",
        "Inter-token latency",
        "Inter-chunk latency per token: a chunk of c tokens gives its gap and c - 1 zeros. A request of m streamed "
        "tokens gives m - 1 samples, whose sum is t_k - t_1.",
        lambda f: f.token_gaps_s(),
        per="token",
        stamps="itl",
    ),
    Metric(
        "e2e_s",
        "E2E",
        "End-to-end latency",
        "t_k - t_sent: from the first byte sent to the arrival of the last chunk that holds a token. For pooling "
        "endpoints, such as embeddings, which have no tokens: t_end - t_sent.",
        lambda f: (f.last_ns - f.sent_ns) / NS_PER_S,
        adjusted=True,
    ),
    Metric(
        "e2e_due_s",
        "E2E from due",
        "End-to-end latency, from due time",
        "t_k - t_due: E2E from the scheduled send time, which includes delays of the client.",
        lambda f: (f.last_ns - f.due_ns) / NS_PER_S,
    ),
    Metric(
        "e2e_stream_s",
        "E2E to end marker",
        "End-to-end latency, to the end marker",
        "t_end - t_sent: from the first byte sent to the arrival of the end marker.",
        lambda f: (f.end_ns - f.sent_ns) / NS_PER_S,
    ),
    Metric(
        "e2e_asked_s",
        "E2E at requested length",
        "End-to-end latency, at the requested length",
        "t_k - t_sent + TPOT (n_requested - n): E2E extrapolated to the requested output length at the response's own "
        "TPOT. Equal to E2E if the lengths match. Makes responses comparable if a server ends them early (TGI).",
        lambda f: (
            (f.last_ns - f.sent_ns + (f.last_ns - f.first_ns) / f.later_tokens * (f.output_asked - f.output_tokens))
            / NS_PER_S
        ),
    ),
    Metric(
        "normalised_s",
        "Normalised",
        "Normalised latency",
        "(t_k - t_sent) / n. The mean over requests is the normalised latency of the Orca and vLLM papers.",
        lambda f: (f.last_ns - f.sent_ns) / f.generated_tokens / NS_PER_S,
        unit="s/token",
        adjusted=True,
    ),
    Metric(
        "requests_per_s",
        "Requests",
        "Request throughput",
        "Complete requests that ended inside the window / length of the window. The window of a whole run spans from "
        "the first t_sent to the last t_end of all requests sent, including failed ones.",
        lambda f: _per_second(float(f.completed_inside), f),
        unit="requests/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "output_tokens_per_s",
        "Output",
        "Output throughput",
        "Generated tokens that arrived inside the window / length of the window. Tokens of responses that failed later "
        "count.",
        lambda f: _per_second(f.tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "steady_output_tokens_per_s",
        "Output before drain",
        "Output throughput before the drain",
        "Generated tokens that arrived before the drain (see `tail_share`) / the time until then: the throughput of a "
        "server under load. Only for whole runs.",
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
        "Output throughput plus input throughput.",
        lambda f: _per_second(f.tokens_inside() + f.prompt_tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "input_tokens_per_s",
        "Input",
        "Input throughput",
        "Prompt tokens of requests whose first token arrived inside the window / length of the window. For pooling "
        "endpoints, such as embeddings, the end of the response counts instead.",
        lambda f: _per_second(f.prompt_tokens_inside(), f),
        unit="tokens/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "inputs_per_s",
        "Inputs",
        "Inputs",
        "Inputs of complete requests that ended inside the window / length of the window: texts to embed or classify, "
        "or pairs of a query and a document. Only for pooling endpoints, such as embeddings.",
        lambda f: _per_second(f.inputs_inside, f) if f.inputs_inside else None,
        unit="inputs/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "audio_seconds_per_s",
        "RTFx",
        "Audio throughput (RTFx)",
        "Seconds of audio of complete requests that ended inside the window / length of the window: recordings that "
        "were transcribed, or speech that was generated. With one request at a time, it is 1 / RTF.",
        lambda f: _per_second_inside(f.audio_s, f),
        unit="s of audio/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "audio_bytes_per_s",
        "Audio bytes",
        "Audio bytes",
        "Bytes of speech in complete responses that ended inside the window / length of the window. The header of a "
        "WAV file does not count.",
        lambda f: _per_second_inside(f.mark("audio_bytes"), f),
        unit="bytes/s",
        direction="higher",
        per="run",
    ),
    Metric(
        "tail_share",
        "Drain",
        "Drain",
        "Share of a whole run, at its end, in which fewer than a tenth of the requests are still in flight. Throughput "
        "falls in this time because the server runs out of work.",
        _tail_share,
        unit="share",
        per="run",
        judged=False,
    ),
    Metric(
        "skew_s",
        "Burst skew",
        "Burst skew",
        "Last t_sent_end - first t_sent of requests due at one instant: the time from the first byte of the burst to "
        "the last.",
        _skew_s,
        per="run",
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def metric_by_key(key: str) -> Metric:
    """Return the metric with this key, such as `ttft`. Raises KeyError if there is no such metric.

    The function reads METRICS on every call, so it also finds metrics that are added later.
    """
    return {metric.key: metric for metric in METRICS.values()}[key]
