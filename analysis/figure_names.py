"""Suggests the figure that a user meant by an unknown name, such as `ttft.p99` for `p99(ttft)` or `P99 TTFT`.

Names in other load testers are known too, such as `request_throughput` (vLLM) and `http_req_failed` (k6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from loadgen.analysis.metrics import METRICS

OTHER_NAMES: Mapping[str, Sequence[str]] = {
    "ttft": ("ttfb", "first token", "time to first token", "time to first byte"),
    "tpot": ("time per output token", "time per token"),
    "itl": ("inter token latency", "inter token"),
    "icl": ("inter chunk latency",),
    "e2e": (
        *("e2el", "e2e latency", "end to end", "end to end latency", "latency", "request latency", "request duration"),
        *("response time", "duration", "http req duration"),
    ),
    "normalised": ("normalized", "normalised latency", "normalized latency"),
    "output_tokens_per_s": (
        *("output throughput", "output token throughput", "throughput", "tokens per", "tokens", "tps", "tok"),
        *("output tps",),
    ),
    "total_tokens_per_s": ("total token throughput", "total throughput"),
    "requests_per_s": ("request throughput", "requests", "reqs", "req", "rps", "qps", "http reqs"),
    "inputs_per_s": ("inputs", "input rate", "embeddings", "documents"),
    "complete": ("complete", "completed", "success", "successful", "success rate", "successful requests"),
    "failed": ("failed", "failures", "failure rate", "errors", "error rate", "http req failed", "failed requests"),
    "rejected": ("rejected", "rejections", "rejection rate"),
    "truncated": ("truncated",),
    "dropped": ("dropped", "dropped iterations"),
    "valid_output": ("valid output", "valid json", "schema compliance"),
    "answered": ("answered", "answer rate", "with answer"),
    "cached": ("cached", "cached tokens", "cache hit rate", "hit rate", "prefix cache hit rate"),
    "canary": ("canary", "canaries", "correct", "correct answers", "accuracy"),
    "expected": ("expected", "expected text", "expected answers"),
    "goodput": ("goodput", "request goodput"),
    "attainment": ("attainment", "slo attainment"),
}
"""Spellings of figures other than their keys in METRICS."""
MIN_SIMILARITY = 0.8
"""Minimum similarity of a misspelt name to the name that is suggested, from 0 to 1."""
_STATISTICS = {"median": "p50", "mean": "mean", "average": "mean", "avg": "mean", "minimum": "min", "min": "min"} | {
    "maximum": "max",
    "max": "max",
}
_PERCENTILE = re.compile(r"p\s*\(?\s*(\d{1,2}(?:[._]\d+)?)\s*\)?|(\d{1,2}(?:\.\d+)?)\s*th")
_UNITS = re.compile(r"(?<![a-z])(?:ms|us|sec|seconds|milliseconds|percentile|second|s)(?![a-z])")


def _spelling(text: str) -> str:
    """Return the letters and digits of a name in lower case, without words that are units.

    Names that differ only in punctuation or units become equal, for example `TTFT (ms)` and `ttft`.
    """
    return re.sub(r"[^a-z\d]", "", _UNITS.sub(" ", text.lower().replace("_", " ")))


_FIGURES = {_spelling(metric.key): metric.key for metric in METRICS.values() if metric.judged}
_FIGURES |= {_spelling(name): figure for figure, names in OTHER_NAMES.items() for name in names}
_LATENCIES = {metric.key for metric in METRICS.values() if metric.per != "run"}


def suggest_figure(text: str, *, statistic: bool = True) -> str | None:
    """Return the name of the figure that the text probably means, or None if the text resembles no figure.

    The name of a latency includes a statistic, as in `ttft.p50`. If the text contains no statistic, `p99` is used. With
    `statistic=False`, the name includes no statistic.
    """
    rest = text.lower()
    requested = ""
    percentile = _PERCENTILE.search(rest)
    if percentile:
        requested = f"p{(percentile[1] or percentile[2]).replace('_', '.')}"
        rest = f"{rest[: percentile.start()]} {rest[percentile.end() :]}"
    rest = rest.replace("_", " ")
    for word, name in _STATISTICS.items():
        rest, count = re.subn(rf"(?<![a-z]){word}(?![a-z])", " ", rest)
        requested = requested or (name if count else "")
    spelling = _spelling(rest)
    near = get_close_matches(spelling, _FIGURES, 1, MIN_SIMILARITY)
    if not near:
        # k6 writes `p(99)<500` below the name of a metric.
        return f"ttft.{requested} or e2e.{requested}" if requested and not spelling and statistic else None
    figure = _FIGURES[near[0]]
    return f"{figure}.{requested or 'p99'}" if figure in _LATENCIES and statistic else figure


def did_you_mean(suggestion: str | None) -> str:
    """Return the end of an error message, such as `; did you mean ttft.p99?`.

    Return an empty string if there is no suggestion.
    """
    return f"; did you mean {suggestion}?" if suggestion else ""
