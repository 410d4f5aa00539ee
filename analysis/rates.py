"""How exactly one open or closed loop knows its rates, from how they vary over the measuring window.

The window is cut into equal stretches, each longer than a request stays, and the rate of each is one value: what
lingers within a stretch moves that one alone (batch means: Law and Carson, "A sequential procedure for determining the
length of a steady-state simulation", 1979). Their mean is the figure. Its interval is that of the studentised
bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 12.5), seeded, so that a run always
gives the same.

A burst is one stretch of work and has no such parts: only repeats show how another would differ. Nor has a run whose
load changes by plan, or which never came to a plateau.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.formulas import NS_PER_S, window_ns
from analysis.frame import Floats, Frame
from analysis.stats import CONFIDENCE, DECIMALS

STRETCHES_MOST, STRETCHES_LEAST = 30, 10
STAYS_LEAST = 2
"""A stretch lasts at least so many times as long as a request stays in the median, or neighbours share requests."""
REPLICATES = 4000
SEED = 19_930_601
WHOLE = "a run that is one stretch of work has no parts to tell it: how another would differ only repeats show"
NO_PLATEAU = "the window is no plateau, so that its parts are not alike"
SHORT = f"the window is shorter than {STRETCHES_LEAST * STAYS_LEAST} stays of a request"
ALIKE = "all parts of the window are alike"


def intervals(frame: Frame) -> dict[str, Any]:
    """`ci95` of each rate of the window, and `ci95_none`: why there are none, or None where there are."""
    number = _stretches(frame)
    if isinstance(number, str):
        return {"ci95": {}, "ci95_none": number}
    requests, tokens, prompts = _amounts(frame, number)
    rates = {"requests_per_s": requests, "output_tokens_per_s": tokens, "total_tokens_per_s": tokens + prompts}
    found = {name: ends for name, values in rates.items() if (ends := interval(values)) is not None}
    return {"ci95": found, "ci95_none": None if found else ALIKE}


def interval(rates: Floats) -> list[float] | None:
    """Of the mean of the rates of equal stretches, in their unit; None where they cannot show how they vary.

    Bootstrap t: the quantiles of (mean* - mean) / error* over samples drawn with replacement stand for those of
    Student's t, so that lopsided rates get a lopsided interval.
    """
    count, mean = len(rates), float(rates.mean())
    error = float(rates.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    if error == 0 or math.isnan(error):  # NaN where nobody said how long a prompt was
        return None
    drawn = rates[np.random.default_rng(SEED).integers(0, count, (REPLICATES, count))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    known = errors > 0
    turns = np.quantile(
        (drawn.mean(axis=1) - mean)[known] / errors[known], ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    )
    low, high = (mean - float(turn) * error for turn in turns)
    return [round(max(0.0, low), DECIMALS), round(high, DECIMALS)]


def _stretches(frame: Frame) -> int | str:
    """Into how many stretches the window is cut, or why it is not."""
    span = window_ns(frame)
    if frame.window is None or span is None:
        return WHOLE
    if frame.window.chosen == "auto" and not frame.window.reason.startswith("about"):
        return NO_PLATEAU
    ended = frame.sampled
    stay_ns = float(np.median((frame.end_ns - frame.sent_ns)[ended])) if ended.any() else math.inf
    number = min(STRETCHES_MOST, int((span[1] - span[0]) / max(1.0, STAYS_LEAST * stay_ns)))
    return number if number >= STRETCHES_LEAST else SHORT


def _amounts(frame: Frame, number: int) -> tuple[Floats, Floats, Floats]:
    """Per second of each stretch: requests that ended, tokens that arrived, prompt tokens of those that began; each as
    in the figure of analysis.formulas."""
    ended, begun = frame.measured & frame.complete, frame.sent & ~np.isnan(frame.first_ns)
    requests = _counted(frame, number, frame.end_ns[ended], np.ones(int(ended.sum())))
    prompts = _counted(frame, number, frame.first_ns[begun], frame.prompt_tokens[begun])
    each = np.where(frame.sent, frame.output_tokens, 0.0) / np.maximum(frame.arrived_tokens, 1)
    tokens = np.zeros(number)
    for rows, chunks in frame.blocks():
        counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
        tokens += _counted(
            frame, number, frame.chunk_ns[chunks], np.repeat(each[rows], counts) * frame.chunk_tokens[chunks]
        )
    return requests, tokens, prompts


def _counted(frame: Frame, number: int, instants: Floats, amounts: Floats) -> Floats:
    begins, ends = window_ns(frame) or (0.0, 1.0)
    inside = (instants >= begins) & (instants <= ends)
    places = np.minimum(number - 1, (instants[inside] - begins) / (ends - begins) * number).astype(np.int64)
    summed = np.bincount(places, amounts[inside], minlength=number)
    return np.asarray(summed * (number / (ends - begins) * NS_PER_S), dtype=np.float64)
