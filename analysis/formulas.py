"""The formulas of the metrics as pure functions of a Frame; `analysis.metrics` names and defines them.

Each returns one sample per complete request, gap or token in seconds, or one figure for the whole run; an empty array
where nothing is defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from analysis.frame import Booleans, Floats, Frame, Integers, Window, sum_by_row

NS_PER_S = 1e9
TAIL_SHARE = 0.1


def time_to_first_token(frame: Frame) -> Floats:
    """t_1 - t_sent in seconds, of complete requests."""
    return _defined(frame.first_ns - frame.sent_ns, frame)


def time_to_first_token_due(frame: Frame) -> Floats:
    """t_1 - t_due in seconds, of complete requests."""
    return _defined(frame.first_ns - frame.due_ns, frame)


def time_per_output_token(frame: Frame) -> Floats:
    """(t_k - t_1) / (n - c_1) in seconds, of complete requests with n > c_1."""
    later = frame.output_tokens - frame.first_tokens
    return _defined((frame.last_ns - frame.first_ns) / np.where(later > 0, later, np.nan), frame)


def end_to_end(frame: Frame) -> Floats:
    """t_k - t_sent in seconds, of complete requests."""
    return _defined(frame.last_ns - frame.sent_ns, frame)


def end_to_end_due(frame: Frame) -> Floats:
    """t_k - t_due in seconds, of complete requests."""
    return _defined(frame.last_ns - frame.due_ns, frame)


def end_to_end_stream(frame: Frame) -> Floats:
    """t_end - t_sent in seconds, of complete requests."""
    return _defined(frame.end_ns - frame.sent_ns, frame)


def normalised(frame: Frame) -> Floats:
    """(t_k - t_sent) / n in seconds per token, of complete requests."""
    return _defined(
        (frame.last_ns - frame.sent_ns) / np.where(frame.output_tokens > 0, frame.output_tokens, np.nan), frame
    )


def inter_chunk(frame: Frame) -> Floats:
    """t_{j+1} - t_j in seconds, for every gap of every complete request, in order."""
    gaps = np.empty(int(_gap_counts(frame).sum()))
    filled = 0
    for _, part in _gap_blocks(frame):
        gaps[filled : filled + len(part)] = part
        filled += len(part)
    return gaps


def inter_token(frame: Frame) -> Floats:
    """Inter-chunk times and, for each further token of a chunk, a zero; request by request: n - 1 per request."""
    tokens, gaps = _inter_token_counts(frame), _gap_counts(frame)
    starts = np.concatenate(([0], np.cumsum(tokens)))
    samples = np.zeros(starts[-1])
    for rows, part in _gap_blocks(frame):
        first, counts = starts[:-1][rows], gaps[rows]
        within = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
        samples[np.repeat(first, counts) + within] = part  # a request's gaps first, then its zeros
    return samples


def requests_per_second(frame: Frame) -> Floats:
    """Complete requests that ended inside the window, per second of it."""
    ended = frame.measured & frame.complete
    return _per_second(float((ended & _within(frame, frame.end_ns)).sum()), frame)


def output_tokens_per_second(frame: Frame) -> Floats:
    """Generated tokens that arrived inside the window, per second of it."""
    return _per_second(_tokens_inside(frame), frame)


def total_tokens_per_second(frame: Frame) -> Floats:
    """Generated tokens, and prompt tokens of requests whose first token arrived inside, per second of the window.

    A prompt whose length nobody told (a turn of a session that broke off before the server counted it) adds nothing.
    """
    answered = frame.sent & ~np.isnan(frame.first_ns) & _within(frame, frame.first_ns)
    return _per_second(_tokens_inside(frame) + float(np.nansum(frame.prompt_tokens[answered])), frame)


def tail_share(frame: Frame) -> Floats:
    """Share of a whole run after which fewer than a tenth of the requests sent were left in flight."""
    steady = _before_tail(frame)
    span = window_ns(frame)
    if steady is None or span is None:
        return np.empty(0)
    return np.array([(span[1] - steady.to_ns) / (span[1] - span[0])])


def steady_output_tokens_per_second(frame: Frame) -> Floats:
    """Generated tokens that arrived before the tail of a whole run, per second until then."""
    steady = _before_tail(frame)
    if steady is None or steady.to_ns <= steady.from_ns:
        return np.empty(0)
    return output_tokens_per_second(replace(frame, window=steady))


def end_to_end_asked(frame: Frame) -> Floats:
    """t_k - t_sent + TPOT (n_asked - n) in seconds, of complete requests with n > c_1."""
    later = frame.output_tokens - frame.first_tokens
    pace_ns = (frame.last_ns - frame.first_ns) / np.where(later > 0, later, np.nan)
    return _defined(frame.last_ns - frame.sent_ns + pace_ns * (frame.output_asked - frame.output_tokens), frame)


def burst_skew(frame: Frame) -> Floats:
    """Last t_sent_end - first t_sent in seconds, of requests that were all due at once."""
    sent = frame.sent & ~np.isnan(frame.sent_end_ns)
    if not sent.any() or np.ptp(frame.due_ns[sent]) > 0:
        return np.empty(0)
    return np.array([(frame.sent_end_ns[sent].max() - frame.sent_ns[sent].min()) / NS_PER_S])


def window_ns(frame: Frame) -> tuple[float, float] | None:
    """The window's ends; of a whole run the first t_sent and the last t_end of all requests sent, complete or not.

    None when nothing was sent or came back.
    """
    if (window := frame.window) is not None:
        return (window.from_ns, window.to_ns) if window.to_ns > window.from_ns and frame.sent.any() else None
    ends = frame.end_ns[frame.sent & ~np.isnan(frame.end_ns)]
    if len(ends) == 0 or ends.max() <= frame.sent_ns[frame.sent].min():
        return None
    return float(frame.sent_ns[frame.sent].min()), float(ends.max())


def group_offsets(per: str, frame: Frame) -> Integers | None:
    """Which samples of a metric belong to one complete request; None when each has one sample at most."""
    counts = {"chunk": _gap_counts, "token": _inter_token_counts}.get(per)
    return None if counts is None else np.concatenate(([0], np.cumsum(counts(frame)[frame.sampled])))


def _before_tail(frame: Frame) -> Window | None:
    """A whole run until fewer than a tenth of the requests sent were left in flight."""
    span = window_ns(frame)
    ends = np.sort(frame.end_ns[frame.sent & ~np.isnan(frame.end_ns)])
    if frame.window is not None or span is None or len(ends) == 0:
        return None
    begun = ends[min(len(ends) - 1, int(np.floor(len(ends) * (1 - TAIL_SHARE))))]
    return Window(span[0], float(begun), "auto", "before the tail")


def _defined(values_ns: Floats, frame: Frame) -> Floats:
    return values_ns[frame.sampled & ~np.isnan(values_ns)] / NS_PER_S


def _within(frame: Frame, instants_ns: Floats) -> Booleans:
    """Which instants lie in the window; all of a whole run, also those that never were."""
    if frame.window is None:
        return np.ones(len(instants_ns), np.bool_)
    return (instants_ns >= frame.window.from_ns) & (instants_ns <= frame.window.to_ns)


def _tokens_inside(frame: Frame) -> float:
    """Where a server's own count differs from what its chunks held, it is spread over them as they came."""
    tokens = np.where(frame.sent, frame.output_tokens, 0.0)
    if frame.window is None:
        return float(tokens.sum())
    inside = 0.0
    for rows, chunks in frame.blocks():
        part = frame.chunk_tokens[chunks] * _within(frame, frame.chunk_ns[chunks])
        came = sum_by_row(part, frame.offsets[rows.start : rows.stop + 1] - chunks.start)
        inside += float((tokens[rows] * came / np.maximum(frame.arrived_tokens[rows], 1)).sum())
    return inside


def _per_second(amount: float, frame: Frame) -> Floats:
    span = window_ns(frame)
    return np.empty(0) if span is None else np.array([amount / (span[1] - span[0]) * NS_PER_S])


def _gap_blocks(frame: Frame) -> Iterator[tuple[slice, Floats]]:
    """Gaps between the chunks of each complete request, in seconds, for one block of rows after the other."""
    sampled = frame.sampled
    for rows, chunks in frame.blocks():
        counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
        kept = np.repeat(sampled[rows], counts)
        firsts = frame.offsets[rows][counts > 0] - chunks.start
        kept[firsts] = False  # a request's first chunk ends no gap
        yield rows, np.diff(frame.chunk_ns[chunks])[kept[1:]] / NS_PER_S


def _gap_counts(frame: Frame) -> Integers:
    """Gaps of each row; 0 where it is not sampled."""
    return np.where(frame.sampled, np.maximum(frame.chunk_counts - 1, 0), 0)


def _inter_token_counts(frame: Frame) -> Integers:
    """Tokens after the first one, by the chunks' own counts; 0 where the row is not sampled."""
    return np.where(frame.sampled, np.maximum(frame.arrived_tokens - 1, 0), 0).astype(np.int64)
