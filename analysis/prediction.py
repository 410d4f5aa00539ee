"""What a twin predicts: each figure with an interval, from figures of the same load under other draws of its constants,
from how far the fit missed what it was fitted to, and from how much runs differ anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

FIGURES = (
    *("output_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99"),
    *("e2e.p50", "e2e.p99"),
)
NORMAL_95 = 1.96


class Predicted(msgspec.Struct, kw_only=True):
    """One figure of a simulated run of a twin, and where the server's own would lie."""

    figure: str
    """By its name as --assert knows it."""
    value: float
    low: float
    """With `high`, the 95 % interval."""
    high: float


def predict(
    central: Mapping[str, float | None],
    draws: Sequence[Mapping[str, float | None]],
    residual: Mapping[str, float],
    run_variation: float,
) -> list[Predicted]:
    """Of the figures that all have. `residual` is a Twin's; runs of one server differ by `run_variation` at most."""
    result = []
    for name in FIGURES:
        value, others = central.get(name), [draw.get(name) for draw in draws]
        drawn = [other for other in others if other is not None and other > 0]
        if value is None or value <= 0 or len(drawn) < len(others):
            continue
        variance = sum(math.log(other / value) ** 2 for other in drawn) / max(1, len(drawn))
        missed = (residual[key] for key in (name, name.partition(".")[0], "rate") if key in residual)
        variance += next(missed, 0.0) ** 2 + (run_variation / NORMAL_95) ** 2
        factor = math.exp(NORMAL_95 * math.sqrt(variance))
        result.append(Predicted(figure=name, value=value, low=value / factor, high=value * factor))
    return result


def read_prediction(server: Mapping[str, Any]) -> list[Predicted]:
    """What the run file of a twin's simulation holds; nothing of a damaged one, or another version's."""
    try:
        result = msgspec.convert(server.get("prediction") or [], list[Predicted])
    except msgspec.ValidationError:
        return []
    return [each for each in result if each.figure in FIGURES]
