"""Pages in the Prometheus text format, and each server's own /metrics in one vocabulary: what runs and waits, KV-cache
use, tokens, preemptions, rejections.

Pages are fetched within limits and read by the official parser of prometheus-client: of vLLM's page of 55 kB that takes
4 ms of processor time, once a second, in a process that no token passes through. Only what explains a client's figures
is read. Latencies are not: the servers' buckets are too coarse (vLLM's first ends at 0.3 s), and TGI counts no time to
first token at all.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from servers.calls import Caller
from servers.errors import ServerError
from servers.kinds import KINDS
from servers.kinds.base import MetricNames
from servers.telemetry import EXTRA, GapError, NotMeasuredError

ACCEPT = "text/plain;version=0.0.4"
PAGE_LIMIT_BYTES = 16 << 20
ABSENT = (401, 403, 404, 405)
"""Statuses that say: not for you, or not here. They will say so again."""

Labels = Mapping[str, str]
COUNTERS = frozenset(
    {
        *("prompt_tokens", "output_tokens", "cached_prompt_tokens"),
        *("preemptions", "rejections", "requests_finished", "requests_failed"),
    }
)
"""Words that only grow, until the server is started anew. The others are gauges."""
AVERAGED = frozenset({"kv_used"})
"""Shares: of several engines behind one page, which are equal in size, the mean. Everything else is a sum."""
ROUTE_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Page:
    """What a page holds."""

    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    """By the name on the page; values that are not finite are left out."""
    declared: frozenset[str] = frozenset()
    """Families with a TYPE line, without `_total`; one without samples has counted nothing yet."""


def load_parser() -> None:
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
        chosen = [line for line in lines if line.removeprefix("# TYPE ").startswith(ours) and "_bucket{" not in line]
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


def tables() -> dict[str, MetricNames]:
    """The names of every server that has some, by whose they are. A generic OpenAI server is read by the table whose
    names are on its page."""
    return {each.of or kind.name: each for kind in KINDS.values() if (each := kind.metrics)}


class ServerMetrics:
    """A server's /metrics, over one kept connection. See Source."""

    def __init__(self, url: str, server: str, *, api_key: str | None, verify: ssl.SSLContext | None) -> None:
        """`url` is the base of the server's paths. Raises NotMeasuredError where the parser is not installed."""
        load_parser()
        self._ask = Caller(url, api_key, verify)
        self._server = server
        self.facts: Mapping[str, Any] = {"from": f"{url}/metrics"}

    def read(self, limit_s: float) -> dict[str, Any]:
        page = fetch(self._ask, "/metrics", tuple(each.prefix for each in tables().values()), limit_s)
        values = values_of(page, self._server)
        metrics = KINDS[self._server].metrics
        if metrics and metrics.kv_used:
            path, of = metrics.kv_used
            try:
                status, content = self._ask.page(
                    path, "application/json", limit_s=limit_s, limit_bytes=ROUTE_LIMIT_BYTES
                )
                if status != 200:
                    raise ValueError(f"answers {status}")
                values["kv_used"] = of(msgspec.json.decode(content))
            except (ServerError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
                values["missing"] = {"kv_used": f"{path}: {error}"}
        return values

    def close(self) -> None:
        self._ask.close()


def values_of(page: Page, server: str) -> dict[str, Any]:
    """The page in our words; a word that the page does not have is left out. `server` is a key of KINDS."""
    known = KINDS[server].metrics
    if known is None or known.of:

        def present(metrics: MetricNames) -> int:
            return sum(_present(page, each) is not None for each in metrics.names.values())

        known = max(tables().values(), key=present)
    found = {word: value for word, each in known.names.items() if (value := _value(page, word, each)) is not None}
    for metrics in tables().values():
        if metrics.labels:
            name, read = metrics.labels
            found |= read([labels for labels, _ in page.samples.get(name, [])])
    return found


def _value(page: Page, word: str, names: Sequence[str]) -> float | None:
    named = _present(page, names)
    if named is None:
        return None
    name, _, rest = named.partition("{")  # `name{label=a|b}`: what each label may be
    pairs = [pair.partition("=") for pair in rest.removesuffix("}").split(",") if pair]
    wanted = {label: values.split("|") for label, _, values in pairs}
    values = [
        value
        for labels, value in _samples(page, name)
        if all(labels.get(label) in allowed for label, allowed in wanted.items())
    ]
    if not values:
        return 0.0 if word in COUNTERS else None  # declared and without a sample: nothing was counted yet
    return sum(values) / len(values) if word in AVERAGED else sum(values)


def _present(page: Page, names: Sequence[str]) -> str | None:
    """The first name that the page knows, with samples or only declared.

    Declared must do: between two readings a counter may get its first sample, and must not change its meaning then.
    """
    for each in names:
        name = each.partition("{")[0]
        if _samples(page, name) or name.removesuffix("_total").removesuffix("_sum") in page.declared:
            return each
    return None


def _samples(page: Page, name: str) -> list[tuple[Labels, float]]:
    """The parser gives every counter its `_total`, also TGI's, which have none on the page."""
    return page.samples.get(name) or page.samples.get(f"{name}_total") or []
