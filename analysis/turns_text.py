"""Latency by turn in words: one table for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.stats import PERCENTILES, samples_needed
from analysis.words import UNKNOWN, Summary, count, significant

HEADS = ("turn", "n", "prompt, tokens", "TTFT p50, ms", "TTFT p90, ms", "E2E p50, ms", "E2E p90, ms")
SHOWN_MAX = 10
"""Turns in the terminal; the page has them all."""


def cells(turn: Mapping[str, Any]) -> list[str]:
    """One turn under HEADS; of a percentile with too few samples, how many it needs."""
    latencies = [_percentile(turn[name], figure) for name in ("ttft_s", "e2e_s") for figure in ("p50", "p90")]
    prompts = turn["prompt_tokens_mean"]
    return [str(turn["turn"]), f"{turn['n']:,}", UNKNOWN if prompts is None else f"{prompts:,.0f}", *latencies]


def left_out(summary: Summary) -> str:
    """How many turns the terminal does not show; empty where it shows all."""
    more = len(summary["turns"]) - SHOWN_MAX
    return f"{count(more, 'later turn')} in summary.json and on the page." if more > 0 else ""


def _percentile(described: Mapping[str, Any], figure: str) -> str:
    value = described[figure]
    if figure in described["thin"]:
        return f"n<{samples_needed(PERCENTILES[figure])}"
    return UNKNOWN if value is None else significant(value * 1e3, 4)
