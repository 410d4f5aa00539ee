"""What a simulated server counts, and the Prometheus text format to say it in (exposition format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

Labels = Mapping[str, str]


@dataclass(slots=True)
class Histogram:
    """Observations counted by upper bound."""

    bounds: Sequence[float]
    sum: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Counts one value. A bound belongs to its own bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True)
class Finished:
    """One request for tokens that came to its end, in whatever way."""

    prompt_tokens: int
    output_tokens: int
    """Generated, also when the client had gone."""
    asked_tokens: int
    finish_reason: str
    """The server's own word, or `abort` when the answer never reached its end."""
    received_ns: int
    sent_ns: Sequence[int]
    """Instants at which pieces of the answer left."""
    ended_ns: int


SECONDS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "decode_s")
TOKENS = ("prompt_tokens", "output_tokens", "asked_tokens")


class Metrics:
    """Totals since the start, in our words; each server's page gives them its own names.

    `bounds` has the bucket bounds of every histogram, by the names in SECONDS and TOKENS.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.requests = 0
        self.by_reason: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.histograms = {name: Histogram(bounds[name]) for name in (*SECONDS, *TOKENS)}

    def refuse(self, kind: str) -> None:
        """A request that was not taken: `overloaded` or `validation`."""
        self.requests += 1
        self.refused[kind] += 1

    def accept(self) -> None:
        """A request that was taken."""
        self.requests += 1

    def finish(self, request: Finished) -> None:
        """A request that was taken has come to its end."""
        self.by_reason[request.finish_reason] += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.output_tokens
        if request.finish_reason == "abort":
            return
        for name in TOKENS:
            self.histograms[name].observe(getattr(request, name))
        self._times(request)

    def _times(self, request: Finished) -> None:
        first_ns, last_ns = request.sent_ns[0], request.sent_ns[-1]
        gaps = request.output_tokens - 1
        self.histograms["ttft_s"].observe((first_ns - request.received_ns) / 1e9)
        self.histograms["e2e_s"].observe((request.ended_ns - request.received_ns) / 1e9)
        self.histograms["decode_s"].observe((last_ns - first_ns) / 1e9)
        self.histograms["tpot_s"].observe((last_ns - first_ns) / 1e9 / gaps if gaps else 0.0)
        for before_ns, after_ns in pairwise(request.sent_ns):
            self.histograms["itl_s"].observe((after_ns - before_ns) / 1e9)


def family(name: str, kind: str, says: str, *samples: tuple[Labels, float]) -> str:
    """A counter or gauge with all its samples. A counter's name has its suffix already."""
    return _head(name, kind, says) + "".join(f"{name}{_braces(labels)} {float(value)}\n" for labels, value in samples)


def histogram(name: str, says: str, labels: Labels, values: Histogram) -> str:
    """A histogram with cumulative buckets."""
    bounds = [*map(str, map(float, values.bounds)), "+Inf"]
    buckets = "".join(
        f"{name}_bucket{_braces({**labels, 'le': bound})} {float(number)}\n"
        for bound, number in zip(bounds, accumulate(values.counts), strict=True)
    )
    tail = f"{name}_count{_braces(labels)} {float(sum(values.counts))}\n{name}_sum{_braces(labels)} {values.sum}\n"
    return _head(name, "histogram", says) + buckets + tail


def _head(name: str, kind: str, says: str) -> str:
    return f"# HELP {name} {says}\n# TYPE {name} {kind}\n"


def _braces(labels: Labels) -> str:
    """Labels in alphabetical order, with the three escapes that the format has."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
