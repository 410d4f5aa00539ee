"""Computes the acceptance of draft tokens (speculative decoding), and how many tokens the events of a stream contain.

A server with speculative decoding proposes draft tokens in each decode step. It emits those that the model accepts, and
one more token. The number of tokens per step is the acceptance length. The share of draft tokens that are accepted is
the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from loadgen.analysis.frame import Frame

if TYPE_CHECKING:
    from loadgen.analysis.summary import CounterCheck

MAX_LISTED = 16
"""Maximum number of tokens per event that is counted separately. Larger events are counted together."""
MORE = f"{MAX_LISTED + 1}+"
ReadValues = Callable[[str], Sequence[float]]
"""Function that returns the values of a gauge of the server in all readings during the run."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Figures on speculative decoding over the run: how many draft tokens the server accepted."""

    acceptance_length: float | None = None
    """Mean number of tokens per decode step: accepted draft tokens and one more token."""
    acceptance_rate: float | None = None
    """Accepted draft tokens / draft tokens."""
    steps: int | None = None
    """Number of decode steps with draft tokens."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    source: Literal["responses", "counters", "gauges"]
    """`responses`: the server states the counts in each response. `counters`: the growth of the server's counters,
    which includes the requests of other clients. `gauges`: the mean of the server's own values during the run."""


class TokensPerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens per event in the streams of responses.

    Only complete requests count, and only if they were due inside the measurement window.
    """

    mean: float
    """Mean number of tokens per event."""
    events: int
    counts: dict[str, int]
    """Number of events by their number of tokens. `17+` are larger events. Empty if only totals are known."""


def find_speculation(
    frame: Frame, counters: Mapping[str, CounterCheck], gauge: ReadValues, *, counts_prefill: bool
) -> Speculation | None:
    """Return the acceptance of draft tokens, or None if the server does not report it or drafts no tokens.

    There are three sources, in this order: the responses in `frame`, the server's `counters`, and the server's gauges
    (`gauge`). The first source that states the acceptance length is used. If no source states it, the first source with
    any figure is used. `counts_prefill` is True if the server's number of steps includes the prefill of each request.
    """
    sources = (
        _from_responses(frame),
        _from_counters(counters, counts_prefill=counts_prefill),
        _from_gauges(gauge),
    )
    found = [source for source in sources if source is not None]
    with_length = [source for source in found if source.acceptance_length is not None]
    return next(iter([*with_length, *found]), None)


def tokens_per_event(frame: Frame) -> TokensPerEvent | None:
    """Return the number of tokens per event, or None if every event contains one token."""
    sampled = frame.sampled & (frame.chunk_counts > 0)
    events = int(frame.chunk_counts[sampled].sum())
    tokens = float(frame.streamed_tokens[sampled].sum())
    if not events or tokens <= events:
        return None
    known = sampled & ~frame.has_basis("spread", "without_text", "contradicted")
    counts = np.zeros(MAX_LISTED + 2, np.int64)
    for rows, chunks in frame.blocks():
        # Most events have one token, so only the others are examined one by one.
        others = np.flatnonzero(frame.chunk_tokens[chunks] != 1)
        ends = frame.offsets[rows.start + 1 : rows.stop + 1] - chunks.start
        others = others[known[rows][np.searchsorted(ends, others, "right")]]
        sizes = frame.chunk_tokens[chunks][others]
        counts += np.bincount(np.minimum(sizes, MAX_LISTED + 1), minlength=MAX_LISTED + 2)
    counts[1] += int(frame.chunk_counts[known].sum()) - int(counts.sum())
    names = {index: str(index) for index in range(1, MAX_LISTED + 1)} | {MAX_LISTED + 1: MORE}
    listed = {names[index]: int(counts[index]) for index in names if counts[index]}
    return TokensPerEvent(mean=round(tokens / events, 3), events=events, counts=listed)


def _from_responses(frame: Frame) -> Speculation | None:
    complete = frame.measured & frame.complete
    steps, drafted, accepted = (
        frame.mark(name)[complete] for name in ("draft_steps", "draft_tokens", "accepted_draft_tokens")
    )
    with_steps = (steps > 0) & ~np.isnan(accepted)
    with_drafts = (drafted > 0) & ~np.isnan(accepted)
    if not (with_steps.any() or with_drafts.any()):
        return None
    return _speculation(
        "responses",
        (float(steps[with_steps].sum()), float(accepted[with_steps].sum())),
        (float(drafted[with_drafts].sum()), float(accepted[with_drafts].sum())),
    )


def _from_counters(counters: Mapping[str, CounterCheck], *, counts_prefill: bool) -> Speculation | None:
    names = ("draft_steps", "draft_tokens", "accepted_draft_tokens")
    growth = [counters[name].server if name in counters and not counters[name].resets else 0 for name in names]
    steps, drafted, accepted = growth
    if counts_prefill and "requests_finished" in counters:
        steps -= counters["requests_finished"].server
    drafts = drafted > 0 or (counts_prefill and accepted > 0)
    if steps <= 0 or not drafts:
        return None
    return _speculation("counters", (steps, accepted), (drafted, accepted))


def _from_gauges(gauge: ReadValues) -> Speculation | None:
    lengths, rates = gauge("acceptance_length"), gauge("acceptance_rate")
    if not lengths and not rates:
        return None
    return Speculation(
        acceptance_length=round(fmean(lengths), 3) if lengths else None,
        acceptance_rate=round(fmean(rates), 4) if rates else None,
        source="gauges",
    )


def _speculation(
    source: Literal["responses", "counters"], steps: tuple[float, float], drafts: tuple[float, float]
) -> Speculation:
    """Return the acceptance length, the acceptance rate and the counts that they are computed from.

    - `steps` contains the number of decode steps, and the number of tokens accepted in these steps.
    - `drafts` contains the number of draft tokens, and the number of draft tokens that were accepted.
    """
    return Speculation(
        acceptance_length=round(1 + steps[1] / steps[0], 3) if steps[0] else None,
        acceptance_rate=round(drafts[1] / drafts[0], 4) if drafts[0] else None,
        steps=int(steps[0]) or None,
        draft_tokens=int(drafts[0]) or None,
        accepted_tokens=int(max(steps[1], drafts[1])),
        source=source,
    )
