"""Derives the properties of workloads and of lengths from their canonical texts.

A canonical text is, for example, `sharegpt:FILE` for a workload, or `uniform:128..384` for the lengths of prompts or
responses. Other modules use the properties and do not parse such texts.
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from loadgen.workloads import lengths, workload
from loadgen.workloads.audio_files import Recordings
from loadgen.workloads.datasets import Dataset
from loadgen.workloads.lengths import Empirical, Exponential, Fixed, LengthDistribution, Lognormal, Uniform
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.sessions import MultiTurn
from loadgen.workloads.spec_syntax import WorkloadError, format_duration
from loadgen.workloads.workload import SharedPrefix


class WorkloadFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The properties of a workload, derived from its canonical text, such as `multi-turn:turns=4,think=2s`."""

    kind: str
    """First word of the canonical text, a key of loadgen.workloads.workload.WORKLOADS."""
    options: str = ""
    """The canonical text after the first colon, with a path shortened to the name of its file."""
    has_own_lengths: bool = False
    """True if a file defines the prompts, and so their lengths."""
    shares_prefixes: bool = False
    """True if several prompts of a run begin with the same tokens, which a server may find in its prefix cache."""
    has_sessions: bool = False
    """True if the workload consists of sessions of several turns."""
    turns: int | None = None
    """Turns per session, if the workload states them."""
    think: str = ""
    """Pause between a response and the next turn, such as `2s`. Empty: no pause."""


class LengthFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The properties of the requested lengths of prompts or responses, in tokens."""

    kind: str
    """A key of loadgen.workloads.lengths.LENGTH_DISTRIBUTIONS, or `answers` for the lengths of a file's answers."""
    low: int | None = None
    """The smallest possible length. None: unknown without reading a file."""
    high: int | None = None
    """The largest possible length. None: there is no limit, or it is unknown without reading a file."""
    mean: float | None = None
    """The mean of the distribution before limits and rounding. None: unknown without reading a file."""
    file: str = ""
    """The file with the lengths, without its folder, and its column: `azure.csv,column=ContextTokens`."""
    may_end: bool = False
    """True if responses may end before the requested length."""
    text: str = ""
    """The canonical text."""


def workload_facts(text: str) -> WorkloadFacts:
    """Return the properties of a workload, given its canonical text. No file is opened.

    A workload that this version of loadgen cannot parse gets default properties. A newer version may have written it.
    """
    kind, _, options = text.partition(":")
    try:
        source = workload.parse(text)
    except WorkloadError:
        return WorkloadFacts(kind=kind, options=options)
    path = getattr(source, "path", None)
    facts = WorkloadFacts(kind=kind, options=options.replace(str(path), path.name) if path else options)
    changes: dict[str, Any] = {}
    match source:
        case Dataset() | Recordings():
            changes = {"has_own_lengths": True}
        case MultiTurn():
            changes = {"has_own_lengths": path is not None, "has_sessions": True, "shares_prefixes": True}
            changes |= {"turns": source.turns, "think": format_duration(source.think_ns) if source.think_ns else ""}
        case RawRequests():
            changes = {"has_own_lengths": True, "has_sessions": source.sessions}
        case SessionFile():
            changes = {"has_own_lengths": True, "has_sessions": True, "shares_prefixes": True}
        case SharedPrefix():
            changes = {"shares_prefixes": True}
    return msgspec.structs.replace(facts, **changes)


def length_facts(value: Any) -> LengthFacts:
    """Return properties of the length distribution `value`, such as its mean. The function opens no file.

    `value` is the length of prompts or responses in tokens: a number, or a text such as `uniform:128..384`. A text that
    a newer version of loadgen wrote may be unknown to this version. In this case, most properties have default values.
    """
    text = "0" if value is None else str(value)
    if text == "0":  # endpoints without a response text
        return LengthFacts(kind="fixed", low=0, high=0, mean=0.0, text=text)
    try:
        requested = lengths.parse_outputs(text)
    except WorkloadError:
        return LengthFacts(kind=text.partition(":")[0], text=text)
    return msgspec.structs.replace(_facts_of(requested.lengths), may_end=requested.may_end, text=text)


def _facts_of(distribution: LengthDistribution | None) -> LengthFacts:
    match distribution:
        case None:
            return LengthFacts(kind=lengths.ANSWERS)
        case Fixed(length):
            return LengthFacts(kind="fixed", low=length, high=length, mean=float(length))
        case Uniform(low, high):
            return LengthFacts(kind="uniform", low=low, high=high, mean=(low + high) / 2)
        case Lognormal(mean, _, low, high):
            return LengthFacts(kind="lognormal", low=low, high=high, mean=float(mean))
        case Exponential(mean, low, high):
            return LengthFacts(kind="exponential", low=low, high=high, mean=float(mean))
        case Empirical(path, column):
            return LengthFacts(kind="empirical", file=path.name + (f",column={column}" if column else ""))
    assert_never(distribution)


def about_tokens(tokens: str, *, exact: bool) -> str:
    """Return a prompt length for use in a sentence: `512 tokens`, or `about 512 tokens (estimated)` if not exact."""
    return tokens if exact else f"about {tokens.removeprefix('about ')} (estimated)"
