"""Predictions of a twin (a simulated server fitted to a measured one): each figure with a 95% interval.

The interval combines three sources of error:

- the uncertainty of the twin's constants. The same load is simulated with several random draws of the constants.
- the error of the twin's fit.
- the variation between runs of the real server.
"""

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
    """One figure of the real server, predicted by a twin (a simulated server fitted to a measured one)."""

    figure: str
    """The name that --assert uses, such as `ttft.p99`."""
    value: float
    low: float
    """Lower end of the 95% interval."""
    high: float
    """Upper end of the 95% interval."""


def predict(
    central: Mapping[str, float | None],
    draws: Sequence[Mapping[str, float | None]],
    residual: Mapping[str, float],
    run_variation: float,
) -> list[Predicted]:
    """Return the predicted figures of a run with their 95% intervals, from several simulations of the run.

    - `central`: the figures of the simulation with the fitted constants.
    - `draws`: the figures of each simulation with randomly drawn constants.
    - `residual`: the relative errors of the fit. A key is the name of a figure (`ttft.p99`), the name of a latency
      (`ttft`), or `rate`. If several keys fit a figure, the first of these is used.
    - `run_variation`: the largest relative difference between runs of one server.

    A figure is left out if it is missing or 0 in any simulation. Let v be the value of a figure in `central`, and let
    `draw` be its values in `draws`. The interval is from v / f to v * f, with:

        f = exp(1.96 * sqrt(mean(log(draw / v)**2) + residual**2 + (run_variation / 1.96)**2))
    """
    predictions = []
    for name in FIGURES:
        value = central.get(name)
        drawn = [draw.get(name) for draw in draws]
        known = [figure for figure in drawn if figure is not None and figure > 0]
        if value is None or value <= 0 or len(known) < len(drawn):
            continue
        variance = sum(math.log(figure / value) ** 2 for figure in known) / max(1, len(known))
        residuals = (residual[key] for key in (name, name.partition(".")[0], "rate") if key in residual)
        variance += next(residuals, 0.0) ** 2 + (run_variation / NORMAL_95) ** 2
        factor = math.exp(NORMAL_95 * math.sqrt(variance))
        predictions.append(Predicted(figure=name, value=value, low=value / factor, high=value * factor))
    return predictions


def read_prediction(server: Mapping[str, Any]) -> list[Predicted]:
    """Return the predicted figures that a twin (a simulated server fitted to a measured one) stored in the run header.

    `server` is the server part of the run header. The list is empty if the header has no prediction, or if the
    prediction is malformed or from another version.
    """
    try:
        predictions = msgspec.convert(server.get("prediction") or [], list[Predicted])
    except msgspec.ValidationError:
        return []
    return [prediction for prediction in predictions if prediction.figure in FIGURES]
