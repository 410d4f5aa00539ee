"""The formulas of the metrics as pure functions of a Frame; `analysis.metrics` names and defines them.

Each returns one sample per complete request, gap or token in seconds, or one figure for the whole run; an empty array
where nothing is defined.
"""

from __future__ import annotations

import numpy as np

from analysis.frame import Booleans, Floats, Frame, Integers

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
    return _gaps(frame)[0]


def inter_token(frame: Frame) -> Floats:
    """Inter-chunk times and, for each further token of a chunk, a zero; request by request: n - 1 per request."""
    tokens = _inter_token_counts(frame)
    gaps, gap_offsets = _gaps(frame)
    result = np.zeros(int(tokens.sum()))
    starts = np.concatenate(([0], np.cumsum(tokens)))[:-1]
    within = np.arange(len(gaps)) - np.repeat(gap_offsets[:-1], np.diff(gap_offsets))
    result[np.repeat(starts, np.diff(gap_offsets)) + within] = gaps  # a request's gaps first, then its zeros
    return result


def requests_per_second(frame: Frame) -> Floats:
    """Complete requests per second of the window."""
    return _per_second(float(frame.complete.sum()), frame)


def output_tokens_per_second(frame: Frame) -> Floats:
    """Generated tokens per second of the window."""
    return _per_second(float(frame.output_tokens[_sent(frame)].sum()), frame)


def total_tokens_per_second(frame: Frame) -> Floats:
    """Generated tokens and prompt tokens of requests that got a first token, per second of the window."""
    answered = _sent(frame) & ~np.isnan(frame.first_ns)
    return _per_second(float(frame.output_tokens[_sent(frame)].sum() + frame.prompt_tokens[answered].sum()), frame)


def tail_share(frame: Frame) -> Floats:
    """Share of the window after which fewer than a tenth of the requests sent were left in flight."""
    window = window_ns(frame)
    ends = np.sort(frame.end_ns[_sent(frame) & ~np.isnan(frame.end_ns)])
    if window is None or len(ends) == 0:
        return np.empty(0)
    begun = ends[min(len(ends) - 1, int(np.floor(len(ends) * (1 - TAIL_SHARE))))]
    return np.array([(window[1] - begun) / (window[1] - window[0])])


def burst_skew(frame: Frame) -> Floats:
    """Last t_sent_end - first t_sent in seconds."""
    sent = _sent(frame) & ~np.isnan(frame.sent_end_ns)
    if not sent.any():
        return np.empty(0)
    return np.array([(frame.sent_end_ns[sent].max() - frame.sent_ns[sent].min()) / NS_PER_S])


def window_ns(frame: Frame) -> tuple[float, float] | None:
    """First t_sent and last t_end of all requests sent, complete or not; None when nothing was sent or came back."""
    sent = _sent(frame)
    ends = frame.end_ns[sent & ~np.isnan(frame.end_ns)]
    if len(ends) == 0 or ends.max() <= frame.sent_ns[sent].min():
        return None
    return float(frame.sent_ns[sent].min()), float(ends.max())


def group_offsets(per: str, frame: Frame) -> Integers | None:
    """Which samples of a metric belong to one complete request; None when each has one sample at most."""
    if per == "chunk":
        return _gaps(frame)[1]
    if per == "token":
        return np.concatenate(([0], np.cumsum(_inter_token_counts(frame))))
    return None


def _defined(values_ns: Floats, frame: Frame) -> Floats:
    return values_ns[frame.complete & ~np.isnan(values_ns)] / NS_PER_S


def _sent(frame: Frame) -> Booleans:
    return ~np.isnan(frame.sent_ns)


def _per_second(amount: float, frame: Frame) -> Floats:
    window = window_ns(frame)
    return np.empty(0) if window is None else np.array([amount / (window[1] - window[0]) * NS_PER_S])


def _gaps(frame: Frame) -> tuple[Floats, Integers]:
    """Gaps between the chunks of each complete request, in seconds, and where each complete request's gaps begin."""
    counts = frame.chunk_counts
    row = np.repeat(np.arange(len(frame)), counts)
    same = (row[1:] == row[:-1]) & frame.complete[row[1:]]
    gaps = np.diff(frame.chunk_ns)[same] / NS_PER_S
    return gaps, np.concatenate(([0], np.cumsum(np.maximum(counts[frame.complete] - 1, 0))))


def _inter_token_counts(frame: Frame) -> Integers:
    """Tokens after the first one, by the chunks' own counts, for each complete request."""
    row = np.repeat(np.arange(len(frame)), frame.chunk_counts)
    tokens = np.bincount(row, weights=frame.chunk_tokens, minlength=len(frame)).astype(np.int64)
    return np.maximum(tokens[frame.complete] - 1, 0)
