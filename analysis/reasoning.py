"""Computes the figures of the two phases of a response that begins with reasoning: the reasoning and the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from loadgen.analysis.frame import Booleans, Floats, Frame


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """Number and share of complete responses that reach an answer. Other responses end during their reasoning."""

    answered: int
    responses: int
    """Complete responses, with or without reasoning."""
    share: float
    """`answered / responses`."""
    share_ci95: tuple[float, float]
    """Exact binomial 95% interval of the share (Clopper and Pearson)."""


class Phase(NamedTuple):
    """One phase of the responses, such as reasoning. Each column has one entry per row of the Frame.

    An entry is NaN if the response of the row does not have the phase.
    """

    tokens: Floats
    """Number of streamed tokens of the phase."""
    first_tokens: Floats
    """Number of tokens in the first chunk of the phase."""
    duration_ns: Floats
    """Time from the first chunk of the phase to its last chunk."""

    @property
    def tpot_ns(self) -> Floats:
        """Time per token in the phase in ns, without the tokens of its first chunk. NaN if the phase has no other
        tokens.
        """
        later = self.tokens - self.first_tokens
        return self.duration_ns / np.where(later > 0, later, np.nan)


class Phases(NamedTuple):
    """The two phases of each response that begins with reasoning."""

    reasoning: Phase
    answer: Phase


def reasoning_tokens(frame: Frame) -> Floats:
    """Return the number of reasoning tokens of each response, or NaN for a response without reasoning.

    The number that the server reports takes precedence over the number of tokens in the chunks.
    """
    reported = frame.mark("reasoning_tokens")
    return np.where(np.isnan(reported), reasoning_phases(frame).reasoning.tokens, reported)


def unanswered(frame: Frame) -> Booleans:
    """Return a mask of the responses that end during their reasoning, so that they never reach an answer."""
    return ~np.isnan(frame.mark("reasoning_chunks")) & np.isnan(frame.mark("first_answer_ns"))


def find_answered(frame: Frame, share_interval: Callable[[int, int], tuple[float, float]]) -> Answered | None:
    """Return how many complete responses reach an answer. All others end during their reasoning.

    Return None if no response begins with reasoning. `share_interval` is a function that takes a numerator and a
    denominator, and returns the 95% interval of this share.
    """
    complete = frame.measured & frame.complete
    if not (complete & ~np.isnan(frame.mark("reasoning_chunks"))).any():
        return None
    answered, responses = int((complete & ~unanswered(frame)).sum()), int(complete.sum())
    return Answered(
        answered=answered,
        responses=responses,
        share=answered / responses,
        share_ci95=share_interval(answered, responses),
    )


def reasoning_phases(frame: Frame) -> Phases:
    """Return the two phases of each response of a Frame: the reasoning and the answer.

    Normally, the tokens of a phase are those in its chunks. If the token count of each chunk is unknown, the reasoning
    has the number of tokens that the server reports, and the answer has the remaining tokens. In this case, the tokens
    of a phase are spread evenly over its chunks.
    """
    shape = (3, len(frame))
    reasoning, answer = Phase(*np.full(shape, np.nan)), Phase(*np.full(shape, np.nan))
    if "reasoning_chunks" not in frame.marks:  # No response begins with reasoning.
        return Phases(reasoning, answer)
    boundary = frame.mark("reasoning_chunks")
    reported = frame.mark("reasoning_tokens")
    chunk_counts = frame.chunk_counts
    spread = frame.has_basis("spread", "without_text")
    for rows, chunks in frame.blocks():
        indices = np.flatnonzero(~np.isnan(boundary[rows])) + rows.start
        indices = indices[chunk_counts[indices] > 0]
        if len(indices) == 0:
            continue
        instants_ns = frame.chunk_ns[chunks]
        tokens_before = np.concatenate(([0], np.cumsum(frame.chunk_tokens[chunks], dtype=np.int64)))
        starts = frame.offsets[indices] - chunks.start
        ends = frame.offsets[indices + 1] - chunks.start
        middles = starts + np.clip(boundary[indices], 0, ends - starts).astype(np.int64)
        for phase, firsts, lasts in ((reasoning, starts, middles), (answer, middles, ends)):
            filled = lasts > firsts
            row, first, last = indices[filled], firsts[filled], lasts[filled]
            phase.tokens[row] = tokens_before[last] - tokens_before[first]
            phase.first_tokens[row] = tokens_before[first + 1] - tokens_before[first]
            phase.duration_ns[row] = instants_ns[last - 1] - instants_ns[first]
        states_reasoning = (reported[indices] > 0) & (reported[indices] < frame.streamed_tokens[indices])
        split = spread[indices] & states_reasoning & (middles > starts) & (ends > middles)
        row = indices[split]
        reasoning.tokens[row] = reported[row]
        answer.tokens[row] = frame.streamed_tokens[row] - reported[row]
        evenly = spread[indices]
        for phase, lengths in ((reasoning, middles - starts), (answer, ends - middles)):
            phase.first_tokens[indices[evenly]] = phase.tokens[indices[evenly]] / np.maximum(lengths[evenly], 1)
    return Phases(reasoning, answer)
