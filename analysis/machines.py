"""Runs over several machines: which they were, how well their clocks are known, and what that leaves open of a skew."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from analysis.formulas import burst_skew
from analysis.frame import Booleans, Frame
from analysis.stats import DECIMALS
from loadgen.runfile import Run


def machines(run: Run, frame: Frame) -> list[dict[str, Any]]:
    """One entry per machine, from the header and the `clock` samples; empty for a run on one machine."""
    return [_machine(run, frame, told) for told in run.header.client.get("machines", ())]


def skew_range_s(told: list[dict[str, Any]], frame: Frame) -> list[float] | None:
    """Least and most that the skew can have been, given how far each machine's clock may be off; None without a skew.

    Between a first byte of one machine and a last byte of another stand both machines' uncertainties; on one machine
    there is nothing between them.
    """
    rows = frame.sent & ~np.isnan(frame.sent_end_ns)
    if len(burst_skew(frame)) == 0:
        return None
    ends = [(each["uncertainty_s"], *_ends_s(frame, rows & np.isin(frame.worker, each["workers"]))) for each in told]
    least = most = 0.0
    for (first, one), (last, other) in product(enumerate(ends), repeat=2):
        skew_s = other[2] - one[1]
        off_s = 0.0 if first == last else one[0] + other[0]
        if not np.isnan(skew_s):
            least, most = max(least, skew_s - off_s), max(most, skew_s + off_s)
    return [round(least, DECIMALS), round(most, DECIMALS)]


def _ends_s(frame: Frame, rows: Booleans) -> tuple[float, float]:
    """First byte sent and last byte sent; NaN for a machine that sent nothing."""
    if not rows.any():
        return np.nan, np.nan
    return float(frame.sent_ns[rows].min()) / 1e9, float(frame.sent_end_ns[rows].max()) / 1e9


def _machine(run: Run, frame: Frame, told: dict[str, Any]) -> dict[str, Any]:
    samples = [
        sample.values
        for sample in run.telemetry
        if sample.source == "clock" and sample.values.get("workers") == told["workers"]
    ] or [told]
    own = frame.measured & np.isin(frame.worker, told["workers"])
    return {
        "name": told["name"],
        "workers": told["workers"],
        "requests": int(own.sum()),
        "complete": int((own & frame.complete).sum()),
        "offset_s": told["offset_ns"] / 1e9,
        "drift_s": (samples[-1]["offset_ns"] - samples[0]["offset_ns"]) / 1e9,
        "uncertainty_s": max(sample["uncertainty_ns"] for sample in samples) / 1e9,
    }
