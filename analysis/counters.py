"""The server's own counts of a Run against the client's: requests, prompt tokens, output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.frame import Booleans, Floats, Frame
from analysis.samples import AFTER, BEFORE, Sample, last_of, number, samples
from loadgen.runfile import Run

COMPARED = ("prompt_tokens", "output_tokens", "requests_finished")
"""Words that the client counts too."""
ALONE = ("cached_prompt_tokens", "preemptions", "rejections", "requests_failed")
"""Words that only the server knows."""


@dataclass(frozen=True, slots=True)
class Span:
    """The readings between which the server's counts are compared, or why they cannot be."""

    read: Sequence[Sample]
    warmup: bool
    """Whether warm-up requests lie between them."""
    why_not: str


def counters(run: Run, frame: Frame) -> dict[str, Any]:
    """`server_counters` of the summary: per counter what the `server` and the `client` counted from before the first
    request, warm-up included, to after the last one.

    Of requests that did not complete nobody knows what the server counted: the client's count lies between `client` and
    `client_most` then, and `difference` is that to the nearer end. `agree` is None where there is nothing to compare,
    and `why` says so. Empty for a run without readings of the server.
    """
    found = samples(run, "server")
    if not found:
        return {}
    span = _span(run, found)
    whole = np.ones(len(frame), np.bool_) if span.warmup else frame.measured
    compared = {word: _compared(word, span, frame, whole, run) for word in COMPARED}
    alone = {word: _entry(_growth(span.read, word)) for word in ALONE}
    return {word: entry for word, entry in {**compared, **alone}.items() if entry["server"] is not None}


def _span(run: Run, found: Sequence[Sample]) -> Span:
    good = [sample for sample in found if not sample.gap]
    first = next((sample for sample in good if sample.moment in BEFORE), None)
    last = last_of(found, AFTER)
    gaps = [sample.gap for sample in found if sample.gap]
    if first is None:
        return Span(good, False, f"there is no reading from before the run ({gaps[0] if gaps else 'none was taken'})")
    read = [sample for sample in good if sample.at_s >= first.at_s]
    warmup = first.moment == "idle"
    if run.footer is None or run.footer.interrupted:
        return Span(read, warmup, "the run was interrupted")
    if last is None:
        return Span(read, warmup, f"there is no reading from after the run ({gaps[-1] if gaps else 'none was taken'})")
    anew = max(_growth(read, word)[1] for word in COMPARED)  # one that is past its old value already looks grown
    return Span(read, warmup, f"the server began to count anew, {anew} time{'s' * (anew > 1)}" if anew else "")


def _growth(read: Sequence[Sample], word: str) -> tuple[float | None, int]:
    """What a counter grew by over these readings, and how often it began anew.

    A counter that the first page did not have yet was 0: servers publish some only when there is something to count.
    """
    values = [number(sample.values, word) for sample in read]
    if all(value is None for value in values):
        return None, 0
    total, resets = 0.0, 0
    known = [values[0] or 0.0, *(value for value in values[1:] if value is not None)]
    for before, now in pairwise(known):
        resets += now < before
        total += now - before if now >= before else now
    return total, resets


def _compared(word: str, span: Span, frame: Frame, rows: Booleans, run: Run) -> dict[str, Any]:
    growth, resets = _growth(span.read, word)
    if growth is None or span.why_not:
        return _entry((growth, resets), why=span.why_not)
    least, most = _client(word, frame, rows)
    unknown = int((rows & ~np.isnan(frame.sent_ns) & np.isnan(frame.prompt_tokens)).sum())
    if word == "prompt_tokens" and unknown and growth > most:
        why = f"prompts of unknown length that broke off: {unknown:,}"
        return _entry((growth, resets), why=why) | {"client": least}
    difference = round(growth - min(max(growth, least), most))
    entry = _entry((growth, resets), why=_why(run, frame, difference))
    return entry | {
        "client": least,
        "client_most": None if most == least else most,
        "difference": difference,
        "agree": difference == 0,
    }


def _entry(growth: tuple[float | None, int], why: str = "") -> dict[str, Any]:
    server = None if growth[0] is None else round(growth[0])
    unknown = dict.fromkeys(("client", "client_most", "difference", "agree"))
    return {"server": server, **unknown, "resets": growth[1], "why": why}


def _client(word: str, frame: Frame, rows: Booleans) -> tuple[int, int]:
    """What the client counted for complete requests, and the most that it may be with all that were sent."""
    sent = rows & ~np.isnan(frame.sent_ns)
    complete = sent & frame.complete
    if word == "requests_finished":
        return int(complete.sum()), int(sent.sum())
    if word == "prompt_tokens":
        return _sum(frame.prompt_tokens, complete), _sum(frame.prompt_tokens, sent)
    least = _sum(frame.output_tokens, complete)
    return least, least + _sum(np.fmax(frame.output_asked, frame.output_tokens), sent & ~frame.complete)


def _sum(values: Floats, rows: Booleans) -> int:
    return int(np.nansum(values[rows]))


def _why(run: Run, frame: Frame, difference: int) -> str:
    """What a disagreement most likely comes from."""
    title, notes = run.header.server_title, run.header.server_notes
    if not difference:
        return ""
    piece = notes.get("prompt_piece_tokens")
    if piece and np.nanmax(frame.output_asked, initial=0) > piece:
        return f"{title} runs answers of more than {piece} tokens in pieces and counts the prompt of each"
    if difference > 0:
        return "somebody else was using the server, or it counts otherwise"
    return (
        f"{title} drops counts under load"
        if notes.get("drops_counts")
        else "it had not booked everything, or lost some"
    )
