"""Latency by turn of multi-turn sessions: what a history that grows with each turn costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import stats
from analysis.formulas import end_to_end, time_to_first_token
from analysis.frame import Floats, Frame

TURNS_MAX = 1000
"""The most that a workload can have; later ones of a longer run file are left out."""


def turns(frame: Frame) -> list[dict[str, Any]]:
    """For each turn, from 1: complete requests `n`, the mean of their prompts' tokens by the server's own count, TTFT
    and E2E. Empty for a run without sessions."""
    if not frame.later_turn.any():
        return []
    turn = frame.turn[frame.sampled]
    reported, ttft_s, e2e_s = frame.prompt_reported[frame.sampled], *_latencies(frame)
    return [_turn(number, turn == number, reported, ttft_s, e2e_s) for number in np.unique(turn[turn < TURNS_MAX])]


def _latencies(frame: Frame) -> tuple[Floats, Floats]:
    """One TTFT and E2E per complete request, NaN where it has none."""
    has = ~np.isnan(frame.first_ns[frame.sampled])
    latencies = []
    for values_s in (time_to_first_token(frame), end_to_end(frame)):
        latencies.append(np.full(len(has), np.nan))
        latencies[-1][has] = values_s
    return latencies[0], latencies[1]


def _turn(number: int, rows: Any, reported: Floats, ttft_s: Floats, e2e_s: Floats) -> dict[str, Any]:
    prompts = reported[rows & ~np.isnan(reported)]
    return {
        "turn": int(number) + 1,
        "n": int(rows.sum()),
        "prompt_tokens_mean": round(float(prompts.mean()), 2) if len(prompts) else None,
        "ttft_s": stats.describe(ttft_s[rows & ~np.isnan(ttft_s)]),
        "e2e_s": stats.describe(e2e_s[rows & ~np.isnan(e2e_s)]),
    }
