"""Pages in the Prometheus text format: fetched within limits, read by the official parser of prometheus-client.

Of vLLM's page of 55 kB that takes 4 ms of processor time, once a second, in a process that no token passes through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from servers.calls import Caller
from servers.errors import ServerError
from servers.telemetry.source import EXTRA, GapError, NotMeasuredError

ACCEPT = "text/plain;version=0.0.4"
PAGE_LIMIT_BYTES = 16 << 20
ABSENT = (401, 403, 404, 405)
"""Statuses that say: not for you, or not here. They will say so again."""

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """What a page holds."""

    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    """By the name on the page; values that are not finite are left out."""
    declared: frozenset[str] = frozenset()
    """Families with a TYPE line, without `_total`; one without samples has counted nothing yet."""


def parser() -> None:
    """Load the parser, before anything is timed. Raises NotMeasuredError where prometheus-client is not installed."""
    try:
        import prometheus_client.parser  # noqa: F401 - 0.1 s, once
    except ImportError:
        raise NotMeasuredError(f"prometheus-client is not installed: {EXTRA}") from None


def fetch(ask: Caller, path: str, ours: tuple[str, ...], limit_s: float) -> Page:
    """The page at `path`: what on it begins with one of `ours`. The content type does not matter: LightLLM sends none.

    Raises GapError, and NotMeasuredError where there is no such page.
    """
    try:
        status, content = ask.page(path, ACCEPT, limit_s=limit_s, limit_bytes=PAGE_LIMIT_BYTES)
    except ServerError as error:
        raise GapError(str(error)) from None
    if status in ABSENT:
        raise NotMeasuredError(f"{path} answers {status}")
    if status != 200:
        raise GapError(f"{path} answers {status}")
    return parse(content, ours)


def parse(content: bytes, ours: tuple[str, ...] = ("",)) -> Page:
    """Read what begins with one of `ours`, without the buckets of histograms.

    Raises GapError when that is not in the format, and NotMeasuredError for a page of another kind.

    Other people's lines are not looked at: the DCGM exporter has been seen to write `ERROR - FAILED TO CONVERT TO
    STRING` where a number belongs. Only a page with nothing of ours is read as a whole, to tell it from no page at all.
    """
    from prometheus_client.parser import text_string_to_metric_families

    chosen: list[str] = []
    try:
        lines = content.decode("utf-8").splitlines()
        chosen = [line for line in lines if _named(line).startswith(ours) and "_bucket{" not in line]
        families = list(text_string_to_metric_families("\n".join(chosen or lines)))
    except (ValueError, KeyError, IndexError) as error:
        lasting = NotMeasuredError if not chosen else GapError
        raise lasting(f"not in the text format of Prometheus: {str(error)[:200]}") from None
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in families:
        for sample in family.samples:
            if math.isfinite(sample.value):
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return Page(samples, frozenset(family.name for family in families))


def _named(line: str) -> str:
    """What a line is about: behind `# TYPE` as well."""
    return line.removeprefix("# TYPE ")
