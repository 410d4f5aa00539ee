"""Quantities as people write them on a command line."""

from __future__ import annotations

import re

from typer import BadParameter

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s|min|h)?")
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?(%)?")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str | float) -> float:
    """`500ms`, `2s`, `100us`, `1.5min`, `1h` or plain seconds such as `0.5`, in seconds. Raises BadParameter."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise BadParameter(f"{text!r} is not a duration: write 500ms, 2s or 0.5")
    return float(match[1]) * _UNITS_S[match[2]]


def span(text: str) -> tuple[float, float]:
    """`10s..50s`, in seconds. Raises BadParameter."""
    begin, dots, end = text.partition("..")
    if not dots:
        raise BadParameter(f"{text!r} is not a stretch of time: write 10s..50s")
    return seconds(begin), seconds(end)


def share(text: str | float) -> float:
    """`5%` or `0.05`, as a share above 0. Raises BadParameter."""
    match = _SHARE.fullmatch(str(text).strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0
    if not 0 < value < 1:
        raise BadParameter(f"{text!r} is not a share above 0 and below 1: write 5% or 0.05")
    return value
