"""Every Metric: its name, unit, direction, definition and pure function, and the summary of a Run that they make up.

Notation of the definitions: t_due, t_sent; t_1..t_k, the arrivals of the k chunks that hold at least one generated
token; c_j, the tokens in chunk j; n, the output tokens; t_end, the arrival of the server's end marker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from analysis import client, facts, formulas, rates, stats
from analysis.counters import counters
from analysis.delivery import delivery
from analysis.frame import Floats, Frame
from analysis.gather import frame_of_run
from analysis.machines import machines, skew_range_s
from analysis.memory import memory
from analysis.turns import turns
from loadgen.runfile import Run


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure worth a name. `values` gives its samples, or one figure for `per="run"`; an empty array is undefined."""

    name: str
    title: str
    unit: Literal["s", "s/token", "requests/s", "tokens/s", "share"]
    direction: Literal["lower", "higher"]
    per: Literal["request", "chunk", "token", "run"]
    definition: str
    values: Callable[[Frame], Floats]


def summarise(run: Run, frame: Frame | None = None) -> dict[str, Any]:
    """summary.json: all that is known about a Run in figures. Seconds, tokens and shares; None where undefined.

    `frame` is that of a Run that was loaded without its Records (analysis.gather.load). Latencies are of complete
    requests only; `latency_adjusted` counts every other request as infinitely slow.
    """
    if frame is None:
        frame = frame_of_run(run)
    latency = {name: _described(metric, frame) for name, metric in METRICS.items() if metric.per != "run"}
    health = client.health(run, frame, latency)
    facts_of_run = facts.run_facts(run, frame)
    rows, on, by_turn = frame.measured, machines(run, frame), turns(frame)
    starts = rows & ~frame.later_turn  # turns of a session follow its answers
    return {
        "run": facts_of_run,
        "server": facts.server_facts(run),
        "requests": facts.request_counts(run, frame),
        "tokens": facts.token_counts(frame),
        "window": _window(frame),
        "throughput": _throughput(frame, health),
        "latency": latency,
        "intervals": facts.what_intervals_mean(facts_of_run["arrivals"]),
        "latency_adjusted": {name: _adjusted(METRICS[name], frame) for name in ADJUSTED},
        "burst": {"skew_s": _single(METRICS["skew_s"], frame)}
        | ({"skew_range_s": skew_range_s(on, frame)} if on else {}),
        "delivery": delivery(frame.due_ns[starts], frame.sent_ns[starts], facts_of_run["arrivals"]),
        "memory": memory(run),
        "server_counters": counters(run, frame),
        "client": health,
        **({"machines": on} if on else {}),
        **({"turns": by_turn} if by_turn else {}),
    }


def _window(frame: Frame) -> dict[str, Any]:
    """What stretch the figures are of, in seconds from the run's start, and how many requests were due in it."""
    span = formulas.window_ns(frame)
    begins, ends = (None, None) if span is None else (round(each / 1e9, stats.DECIMALS) for each in span)
    chosen, reason = ("whole", WHOLE) if frame.window is None else (frame.window.chosen, frame.window.reason)
    return {"from_s": begins, "to_s": ends, "chosen": chosen, "reason": reason, "requests": int(frame.inside.sum())}


def _described(metric: Metric, frame: Frame) -> dict[str, Any]:
    return stats.describe(metric.values(frame), formulas.group_offsets(metric.per, frame))


def _throughput(frame: Frame, health: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, and the share by which they may be off because each end of the window is off by an error bar: that
    of an answer's end for a whole run, else that of the tokens at the window's ends; and their intervals, where the
    window's parts can tell."""
    error_bar_s = health["error_bar_e2e_s" if frame.window is None else "error_bar_s"]
    figures = {name: _single(METRICS[name], frame) for name in THROUGHPUT}
    window, within = formulas.window_ns(frame), rates.intervals(frame)
    if window is None or error_bar_s is None:
        return {**figures, "error_share": None, **within}
    error = round(2 * error_bar_s / (window[1] - window[0]) * 1e9, stats.DECIMALS)
    return {**figures, "error_share": error, **within}


def _adjusted(metric: Metric, frame: Frame) -> dict[str, Any]:
    return stats.describe_adjusted(metric.values(frame), int((frame.inside & ~frame.complete).sum()))


def _single(metric: Metric, frame: Frame) -> float | None:
    values = metric.values(frame)
    return round(float(values[0]), stats.DECIMALS) if len(values) else None


_LATENCIES = (
    Metric(
        "ttft_s",
        "Time to first token",
        "s",
        "lower",
        "request",
        "t_1 - t_sent. The first chunk that holds a generated token counts, reasoning included; "
        "role-only, empty and usage-only chunks do not.",
        formulas.time_to_first_token,
    ),
    Metric(
        "ttft_due_s",
        "Time to first token, from due",
        "s",
        "lower",
        "request",
        "t_1 - t_due: what a caller sees who also waits for the client to send.",
        formulas.time_to_first_token_due,
    ),
    Metric(
        "tpot_s",
        "Time per output token",
        "s/token",
        "lower",
        "request",
        "(t_k - t_1) / (n - c_1); undefined when n <= c_1.",
        formulas.time_per_output_token,
    ),
    Metric(
        "icl_s",
        "Inter-chunk latency",
        "s",
        "lower",
        "chunk",
        "t_{j+1} - t_j, one sample per gap, never smoothed.",
        formulas.inter_chunk,
    ),
    Metric(
        "itl_s",
        "Inter-token latency",
        "s",
        "lower",
        "token",
        "Inter-chunk latency weighted by tokens: a chunk of c tokens gives its gap and c - 1 zeros, so a request of "
        "n tokens gives n - 1 samples whose sum is t_k - t_1.",
        formulas.inter_token,
    ),
    Metric(
        "e2e_s",
        "End-to-end latency",
        "s",
        "lower",
        "request",
        "t_k - t_sent, to the last chunk that holds a token.",
        formulas.end_to_end,
    ),
    Metric(
        "e2e_due_s", "End-to-end latency, from due", "s", "lower", "request", "t_k - t_due.", formulas.end_to_end_due
    ),
    Metric(
        "e2e_stream_s",
        "End-to-end latency, to the end marker",
        "s",
        "lower",
        "request",
        "t_end - t_sent.",
        formulas.end_to_end_stream,
    ),
    Metric(
        "e2e_asked_s",
        "End-to-end latency, at the length asked",
        "s",
        "lower",
        "request",
        "t_k - t_sent + TPOT (n_asked - n): what the answer would have taken at the length asked, had it gone on at "
        "its own pace. Equal to E2E where lengths are as asked; where a server ends answers itself (TGI) it makes them "
        "comparable.",
        formulas.end_to_end_asked,
    ),
    Metric(
        "normalised_s",
        "Normalised latency",
        "s/token",
        "lower",
        "request",
        "(t_k - t_sent) / n. Its mean over requests is the normalised latency of the Orca and vLLM papers.",
        formulas.normalised,
    ),
)
_FIGURES = (
    Metric(
        "requests_per_s",
        "Request throughput",
        "requests/s",
        "higher",
        "run",
        "Complete requests that ended inside the window / window. The window of a burst is from the first t_sent to "
        "the last t_end of all requests sent, failed ones included.",
        formulas.requests_per_second,
    ),
    Metric(
        "output_tokens_per_s",
        "Output throughput",
        "tokens/s",
        "higher",
        "run",
        "Generated tokens that arrived inside the window / window, those of answers that were cut off later included.",
        formulas.output_tokens_per_second,
    ),
    Metric(
        "steady_output_tokens_per_s",
        "Output throughput before the tail",
        "tokens/s",
        "higher",
        "run",
        "Generated tokens that arrived before the tail of a whole run / the time until then: what the server gives "
        "while it has enough to do. A run with a window has none: its window is steady.",
        formulas.steady_output_tokens_per_second,
    ),
    Metric(
        "total_tokens_per_s",
        "Total throughput",
        "tokens/s",
        "higher",
        "run",
        "Output throughput plus the prompt tokens of requests whose first token arrived inside the window / window.",
        formulas.total_tokens_per_second,
    ),
    Metric(
        "tail_share",
        "Tail",
        "share",
        "lower",
        "run",
        "Share of a whole run in which fewer than a tenth of the requests were left in flight: how much of the "
        "throughput is that of a server running empty.",
        formulas.tail_share,
    ),
    Metric(
        "skew_s",
        "Burst skew",
        "s",
        "lower",
        "run",
        "Last t_sent_end - first t_sent of requests due at one instant: how far from `all at once` the burst was.",
        formulas.burst_skew,
    ),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _LATENCIES + _FIGURES}
THROUGHPUT = (
    *("requests_per_s", "output_tokens_per_s", "steady_output_tokens_per_s", "total_tokens_per_s", "tail_share"),
)
WHOLE = "from the first byte sent to the last answer's end"
ADJUSTED = ("ttft_s", "e2e_s", "normalised_s")
