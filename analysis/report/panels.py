"""Telemetry as curves below the run's own: in units that read well, and with no more points than a screen shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.telemetry import Series

PIECES = 300
GIB = 2.0**30
UNITS: dict[str, tuple[float, str]] = {
    "bytes": (1 / GIB, "GiB"),
    "share": (100.0, "%"),
    "Hz": (1e-6, "MHz"),
}


def panels(series: Sequence[Series]) -> list[dict[str, Any]]:
    """One per curve: title, unit, whose it is, x in seconds, y in that unit; None is a gap.

    Curves with the same `panel` share an axis: those of one unit, but the many prompt tokens apart from output tokens.
    """
    return [_panel(each) for each in series]


def _panel(each: Series) -> dict[str, Any]:
    factor, unit = UNITS.get(each.unit, (1.0, each.unit))
    places = thinned(each.y)
    return {
        "title": each.title,
        "unit": unit,
        "panel": f"{each.title[0].lower()}{each.title[1:]}/s" if unit == "tokens/s" else unit,
        "of": each.of,
        "x": [round(each.x_s[place], 4) for place in places],
        "y": [None if (value := each.y[place]) is None else float(f"{value * factor:.6g}") for place in places],
        "n": len(each.y),
    }


def thinned(values: Sequence[float | None]) -> list[int]:
    """The places to draw: all, or of each of PIECES pieces its first, its smallest, its largest and its gap."""
    if len(values) <= 3 * PIECES:
        return list(range(len(values)))
    kept: set[int] = {len(values) - 1}
    for piece in range(PIECES):
        places = range(piece * len(values) // PIECES, (piece + 1) * len(values) // PIECES)
        known = [(value, place) for place in places if (value := values[place]) is not None]
        gap = next((place for place in places if values[place] is None), places[0])
        kept |= {places[0], gap, *((min(known)[1], max(known)[1]) if known else ())}
    return sorted(kept)
