"""What the charts draw, as plain lists: distributions with their band, the run and its latencies over time, when
requests were sent, first tokens, gaps between tokens, and the timeline of each request.

Curves of many samples are drawn through some of them. Which ones never depends on their values, except that the
extremes are always among them, so that no tail is smoothed away; `drawn` and `n` say how many of how many. Of many
requests every k-th in the order sent is drawn, and beside them the slowest and those that failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from loadgen.analysis.chunk_columns import OrderStatistics
from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, offsets_of
from loadgen.analysis.objectives import Distribution
from loadgen.analysis.stats import PERCENTILES, dkw_margin, percentiles, samples_needed
from loadgen.analysis.steady_window import in_flight
from loadgen.analysis.summary import Summary
from loadgen.analysis.telemetry import Series

LATENCY_BINS_MAX = 60
HEAT_LEAST_S = 60.0
"""A heat map tells more than percentiles over time from here on."""
HEAT_ROWS = 24
POINTS_MAX = 700
EXTREMES = 50
COURSE_BINS_MAX = 160
SCATTER_MAX = 1500
ROWS_MAX = 1000
SLOWEST = 100
BAD_MOST = 100
SAID_MAX = 160
"""Of an error's words, how many characters the timeline shows."""
PARTS_MAX = 24
PART_LEAST = 25
CHUNKS_MAX = 130_000
"""Token instants kept for the timeline: about four bytes each in the page."""
TICK_NS = 100_000
TOKEN_BINS_MAX = 128
LONGEST = 20
LONGEST_COLUMNS = {"token": "token", "gap": "gap_s", "of": "request"}
BUCKET = 1.01
"""Percentiles of gaps per token come from a histogram with buckets 1 % wide, so that a million requests cost one pass
and two megabytes; largest gaps are exact."""
LEAST_S = 1e-6
BUCKETS = int(np.log(1e9) / np.log(BUCKET))
"""From a microsecond to a quarter of an hour; what lies outside counts with the ends."""
SHOWN = ("p50", "p90", "p99")
PIECES = 300
UNITS: dict[str, tuple[float, str]] = {"bytes": (2.0**-30, "GiB"), "share": (100.0, "%"), "Hz": (1e-6, "MHz")}


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least this much."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)))


def distribution(samples: Floats | OrderStatistics, requests: int) -> dict[str, Any]:
    """The empirical distribution function: x in seconds, y the share of samples at or below x; `margin`, the half-width
    of its 95 % band. Samples of one request resemble each other, so that counts requests."""
    ranks = plotted_ranks(len(samples))
    drawn = np.array(samples.at(ranks)) if isinstance(samples, OrderStatistics) else np.sort(samples)[ranks]
    return {
        "x": np.round(drawn, 7).tolist(),
        "y": np.round((ranks + 1) / max(1, len(samples)), 6).tolist(),
        "n": len(samples),
        "drawn": len(ranks),
        "margin": round(dkw_margin(min(requests, len(samples))), 6),
    }


def confidence_band(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Of a distribution, the ends of its band."""
    share = np.array(curve["y"])
    low, high = np.maximum(0, share - curve["margin"]), np.minimum(1, share + curve["margin"])
    return {"low": np.round(low, 4).tolist(), "high": np.round(high, 4).tolist()}


def percentile_marks(described: Distribution) -> dict[str, Any]:
    """Where p50 and p99 lie on a distribution; of too few samples with a mark."""
    shown = [name for name in ("p50", "p99") if described.of(name) is not None]
    return {
        "mark": [name + "*" * (name in described.thin) for name in shown],
        "mark_x": [described.of(name) for name in shown],
        "mark_y": [PERCENTILES[name] for name in shown],
    }


def goodput_curve(summary: Summary) -> dict[str, Any] | None:
    """Attainment over the scale of the bounds."""
    result = summary.goodput
    return None if result is None else {"x": result.curve.x, "y": result.curve.y}


def ttft_by_turn(summary: Summary) -> dict[str, Any] | None:
    """TTFT's median in ms over the turns with enough samples for one, and how far its interval reaches."""
    if not summary.turns:
        return None
    rows = []
    for turn in summary.turns:
        if turn.ttft_s.n and "p50" not in turn.ttft_s.thin:
            p50 = (turn.ttft_s.p50 or 0) * 1e3
            low, high = (p50 if end is None else end * 1e3 for end in turn.ttft_s.ci95["p50"])
            rows.append((turn.turn, p50, low, high, p50 - low, high - p50))
    names = ("turn", "p50", "low", "high", "below", "above")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def plotted_ranks(count: int) -> Integers:
    """All ranks of up to POINTS_MAX samples; else evenly spaced ones, and the EXTREMES at both ends."""
    if count <= POINTS_MAX:
        return np.arange(count)
    even = np.linspace(0, count - 1, POINTS_MAX - 2 * EXTREMES).astype(np.int64)
    return np.unique(np.concatenate((np.arange(EXTREMES), even, np.arange(count - EXTREMES, count))))


def throughput_series(frame: Frame) -> dict[str, Any]:
    """Output tokens per second and the most streams at once in each of at most COURSE_BINS_MAX equal pieces of the run,
    with its warm-up at negative instants."""
    sent = ~np.isnan(frame.sent_ns)
    ends = frame.end_ns[sent & ~np.isnan(frame.end_ns)]
    if len(ends) == 0 or ends.max() <= frame.sent_ns[sent].min():
        return {"bin_s": 0, "start_s": [], "tokens_per_s": [], "in_flight": [], "receiving": []}
    begins, last = float(frame.sent_ns[sent].min()), float(ends.max())
    bin_ns = nice_step((last - begins) / COURSE_BINS_MAX)
    edges = np.minimum(begins + bin_ns * np.arange(int(np.ceil((last - begins) / bin_ns)) + 1), last)
    tokens = np.zeros(len(edges) - 1)
    # Tokens that were generated and not streamed are spread over those that were, as in the throughput.
    scale, counts = frame.output_tokens / np.maximum(frame.arrived_tokens, 1), frame.chunk_counts
    for rows, chunks in frame.blocks():
        instants = frame.chunk_ns[chunks]
        places = ((instants - begins) / bin_ns).astype(np.int64)
        known = (places >= 0) & (instants <= begins + bin_ns * len(tokens))
        weights = (frame.chunk_tokens[chunks] * np.repeat(scale[rows], counts[rows]))[known]
        tokens += np.bincount(np.minimum(places[known], len(tokens) - 1), weights, len(tokens))
    rates = tokens / np.maximum(np.diff(edges), 1.0) * 1e9
    return {
        "bin_s": bin_ns / 1e9,
        "start_s": np.round(edges[:-1] / 1e9, 9).tolist(),
        "tokens_per_s": np.round(rates, 2).tolist(),
        "in_flight": _most_at_once(frame.sent_ns, frame.end_ns, edges),
        "receiving": _most_at_once(frame.first_ns, frame.last_ns, edges),
    }


def latency_series(frame: Frame) -> dict[str, Any] | None:
    """p50 and p99 of TTFT (of the first tokens that came in each of at most LATENCY_BINS_MAX pieces of the run) and of
    TPOT (of the answers that ended in it), and the requests per second that failed, or were rejected, in it."""
    if not (grid := _grid(frame)):
        return None
    begins, bin_ns, bins = grid
    columns = {"ttft": (frame.first_ns - frame.sent_ns, frame.first_ns)}
    columns["tpot"] = ((frame.last_ns - frame.first_ns) / frame.later_tokens, frame.last_ns)
    result: dict[str, Any] = {
        "bin_s": bin_ns / 1e9,
        "x": np.round((begins + bin_ns * np.arange(bins)) / 1e9, 6).tolist(),
    }
    for name, (values, at_ns) in columns.items():
        retained = frame.sampled & ~np.isnan(values)
        places = ((at_ns[retained] - begins) / bin_ns).astype(np.int64).clip(0, bins - 1)
        scale = {"ttft": 1e9, "tpot": 1e6}[name]
        parts = [values[retained][places == index] / scale for index in range(bins)]
        result[f"{name}_n"] = [len(part) for part in parts]
        for share in (50, 99):
            result[f"{name}_p{share}"] = [
                round(percentiles(part, share / 100)[0], 6) if len(part) else None for part in parts
            ]
    rejected = frame.ended_as("rejected")
    incomplete = frame.sent & ~frame.complete & ~np.isnan(frame.end_ns)
    for name, rows in (("failed", incomplete & ~rejected), ("rejected", incomplete & rejected)):
        places = ((frame.end_ns[rows] - begins) / bin_ns).astype(np.int64).clip(0, bins - 1)
        result[f"{name}_per_s"] = np.round(np.bincount(places, minlength=bins) / (bin_ns / 1e9), 4).tolist()
    return result


def ttft_heat_map(frame: Frame) -> dict[str, Any] | None:
    """How many first tokens came at each time with each TTFT, in rows of equal ratio; None for a run too short."""
    grid, values = _grid(frame), (frame.first_ns - frame.sent_ns) / 1e9
    retained = frame.sampled & (values > 0)
    if not grid or grid[1] * grid[2] < HEAT_LEAST_S * 1e9 or not retained.any():
        return None
    begins, bin_ns, bins = grid
    low, high = float(values[retained].min()), float(values[retained].max()) * 1.0001
    edges = low * (high / low) ** (np.arange(HEAT_ROWS + 1) / HEAT_ROWS)
    columns = ((frame.first_ns[retained] - begins) / bin_ns).astype(np.int64).clip(0, bins - 1)
    rows = (np.searchsorted(edges, values[retained], side="right") - 1).clip(0, HEAT_ROWS - 1)
    cells, counts = np.unique(columns * HEAT_ROWS + rows, return_counts=True)
    row, x = cells % HEAT_ROWS, (begins + bin_ns * (cells // HEAT_ROWS + 0.5)) / 1e9
    return {
        "x": np.round(x, 6).tolist(),
        "base": row.tolist(),
        "height": [1] * len(cells),
        "width": [bin_ns / 1e9] * len(cells),
        "n": counts.tolist(),
        "heat": np.round(np.sqrt(counts), 2).tolist(),
        "low": [float(f"{edge:.3g}") for edge in edges[row]],
        "high": [float(f"{edge:.3g}") for edge in edges[row + 1]],
        "edges": [float(f"{edge:.3g}") for edge in edges],
    }


def _grid(frame: Frame) -> tuple[float, float, int] | None:
    """Where the measured requests begin, how long each piece is, and how many there are."""
    sent, ends = frame.sent_ns[frame.sent], frame.end_ns[frame.sent & ~np.isnan(frame.end_ns)]
    if len(ends) == 0 or ends.max() <= sent.min():
        return None
    begins, bin_ns = float(sent.min()), nice_step(float(ends.max() - sent.min()) / LATENCY_BINS_MAX)
    return begins, bin_ns, int(np.ceil((ends.max() - begins) / bin_ns))


def send_times(frame: Frame) -> dict[str, Any]:
    """When each measured request left, in seconds after the first one, and how many had left by then."""
    sent = np.sort(frame.sent_ns[frame.sent])
    ranks = plotted_ranks(len(sent))
    after_s = (sent[ranks] - sent[0]) / 1e9 if len(sent) else sent
    return {"x": np.round(after_s, 9).tolist(), "y": (ranks + 1).tolist(), "n": len(sent), "drawn": len(ranks)}


def first_tokens(frame: Frame) -> dict[str, Any]:
    """TTFT of complete requests by prompt length and by place in the queue (1 is the first sent)."""
    order = _order_sent(frame)
    retained = (frame.sampled & ~np.isnan(frame.first_ns))[order]
    rows, positions = order[retained], np.flatnonzero(retained) + 1
    ttft_s = (frame.first_ns - frame.sent_ns)[rows] / 1e9
    prompts = frame.prompt_tokens[rows]
    known = ~np.isnan(prompts)
    drawn = _some(len(rows), SCATTER_MAX, ttft_s)
    return {
        "request": frame.id[rows][drawn].tolist(),
        "position": positions[drawn].tolist(),
        "prompt": [
            int(tokens) if is_known else None for tokens, is_known in zip(prompts[drawn], known[drawn], strict=True)
        ],
        "ttft_s": np.round(ttft_s[drawn], 6).tolist(),
        "n": len(rows),
        "drawn": len(drawn),
        "by_position": _middles(positions.astype(np.float64), ttft_s),
        "by_prompt": _middles(prompts[known], ttft_s[known]),
        "prompts": [int(prompts[known].min()), int(prompts[known].max())] if known.any() else [],
    }


def timeline(frame: Frame) -> dict[str, Any]:
    """When each request was sent, got its first and its last token, and ended; and its tokens, where they fit."""
    order = _order_sent(frame)
    chosen = _some(len(order), ROWS_MAX, (frame.end_ns - frame.sent_ns)[order], ~frame.complete[order])
    named = np.isin(frame.id[order], [seen.id for how, seen in frame.outcomes.items() if how.kind])
    chosen = np.union1d(chosen, np.flatnonzero(named)[:BAD_MOST])
    rows, why = order[chosen], [": ".join(filter(None, (how.kind, how.detail[:SAID_MAX]))) for how in frame.outcomes]
    columns = [(f"{name}_s", getattr(frame, f"{name}_ns")) for name in ("sent", "first", "last", "end")]
    return {
        "request": frame.id[rows].tolist(),
        "position": (chosen + 1).tolist(),
        **{
            name: [None if np.isnan(at) else round(at / 1e9, 6) for at in each[rows].tolist()] for name, each in columns
        },
        "bad": [why[index] for index in frame.outcome_index[rows]],
        "tokens": _ticks(frame, rows),
        "n": len(order),
        "drawn": len(rows),
        "every": 1 if len(rows) == len(order) else round(len(order) / (ROWS_MAX - SLOWEST - BAD_MOST)),
        "tick_s": TICK_NS / 1e9,
    }


def gaps_by_token(frame: Frame) -> dict[str, Any]:
    """Percentiles and the largest of complete requests' gaps by token, and the LONGEST of all, with their place."""
    sampled = frame.sampled
    maximum = int(frame.arrived_tokens[sampled].max(initial=0))
    width = max(1, round(nice_step(maximum / TOKEN_BINS_MAX))) if maximum else 1
    bins = maximum // width + 1
    counts, largest = np.zeros((bins, BUCKETS), np.int64), np.zeros(bins)
    longest: list[tuple[float, int, int]] = []
    for rows, chunks in frame.blocks():
        gaps, tokens, places = _gaps(frame, rows, chunks)
        if len(gaps) == 0:
            continue
        binned = tokens // width
        buckets = (np.log(np.maximum(gaps, LEAST_S) * (1 / LEAST_S)) * (1 / np.log(BUCKET))).astype(np.int64)
        flat = binned * BUCKETS + np.minimum(buckets, BUCKETS - 1)
        counts += np.bincount(flat, minlength=bins * BUCKETS).reshape(bins, BUCKETS)
        np.maximum.at(largest, binned, gaps)
        top = np.flatnonzero(gaps >= longest[-1][0]) if len(longest) == LONGEST else np.arange(len(gaps))
        if len(top) > LONGEST:  # of equal ones the last
            minimum = np.partition(gaps[top], -LONGEST)[-LONGEST]
            top = np.concatenate((top[gaps[top] == minimum][-LONGEST:], top[gaps[top] > minimum]))
        result = zip(gaps[top].tolist(), places[top].tolist(), tokens[top].tolist(), strict=True)
        longest = sorted([*longest, *result], reverse=True)[:LONGEST]
    placed = []
    for gap_s, index, token in longest:
        request = int(frame.id[np.searchsorted(frame.offsets, index, "right") - 1])
        from_s = round(float(frame.chunk_ns[index : index + 1][0]) / 1e9 - gap_s, 6)
        placed.append({"request": request, "token": token, "from_s": from_s, "gap_s": gap_s})
    columns = {f"longest_{name}": [each[key] for each in placed] for name, key in LONGEST_COLUMNS.items()}
    # A percentile is drawn only where enough requests reach that far for it to mean something.
    totals = counts.sum(axis=1)
    held = np.flatnonzero(totals)
    below = np.cumsum(counts, axis=1)
    middles = LEAST_S * BUCKET ** (np.arange(BUCKETS) + 0.5)
    drawn: dict[str, Any] = {
        "token": np.maximum(held * width, 1).tolist(),
        "width": width,
        "n": totals[held].tolist(),
        "requests": int(frame.sampled.sum()),
        "max": [round(float(value), 7) for value in largest[held]],
    }
    for name in SHOWN:
        reached = (below[held] >= PERCENTILES[name] * totals[held, None]).argmax(axis=1)
        enough = totals[held] / width >= samples_needed(PERCENTILES[name])
        values = np.minimum(middles[reached], largest[held])
        drawn[name] = [round(float(value), 7) if fine else None for value, fine in zip(values, enough, strict=True)]
    return drawn | {"longest": placed} | columns


def telemetry_panels(series: Sequence[Series]) -> list[dict[str, Any]]:
    """One per curve: title, unit, whose it is, x in seconds, y in that unit; None is a gap. Curves of one `panel` share
    an axis: those of one unit, but the many prompt tokens apart from output tokens."""
    result = []
    for each in series:
        factor, unit = UNITS.get(each.unit, (1.0, each.unit))
        panel = f"{each.title[0].lower()}{each.title[1:]}/s" if unit == "tokens/s" else unit
        places = plotted_indices(each.y)
        x = [round(each.x_s[index], 4) for index in places]
        y = [None if (value := each.y[index]) is None else float(f"{value * factor:.6g}") for index in places]
        result.append(
            {"title": each.title, "unit": unit, "panel": panel, "of": each.of, "x": x, "y": y, "n": len(each.y)}
        )
    return result


def plotted_indices(values: Sequence[float | None]) -> list[int]:
    """The places to draw: all, or of each of PIECES pieces its first, its smallest, its largest and its gap."""
    if len(values) <= 3 * PIECES:
        return list(range(len(values)))
    retained: set[int] = {len(values) - 1}
    for piece in range(PIECES):
        places = range(piece * len(values) // PIECES, (piece + 1) * len(values) // PIECES)
        known = [(value, index) for index in places if (value := values[index]) is not None]
        gap = next((index for index in places if values[index] is None), places[0])
        retained |= {places[0], gap, *((min(known)[1], max(known)[1]) if known else ())}
    return sorted(retained)


def _most_at_once(begins: Floats, ends: Floats, edges: Floats) -> list[int]:
    """The largest number of intervals open at one instant, for each bin."""
    instants, levels = in_flight(begins, ends)
    positions = np.searchsorted(instants, edges)
    before = np.concatenate(([0], levels))[positions[:-1]]
    return [
        int(max(level, levels[first:last].max(initial=0)))
        for level, first, last in zip(before, positions[:-1], positions[1:], strict=True)
    ]


def _order_sent(frame: Frame) -> Integers:
    """The rows of measured requests that were sent, first sent first."""
    rows = np.flatnonzero(frame.sent)
    return rows[np.argsort(frame.sent_ns[rows], kind="stable")]


def _some(count: int, most: int, slowness: Floats, bad: Booleans | None = None) -> Integers:
    """Which of `count` to draw: all up to `most`, else every k-th, the slowest, and of the bad ones every k-th."""
    if count <= most:
        return np.arange(count)
    slowest = np.argsort(np.where(np.isnan(slowness), -np.inf, slowness), kind="stable")[-SLOWEST:]
    failed = np.empty(0, np.int64) if bad is None else np.flatnonzero(bad)
    if len(failed) > BAD_MOST:
        failed = failed[np.linspace(0, len(failed) - 1, BAD_MOST).astype(np.int64)]
    even = np.linspace(0, count - 1, most - SLOWEST - BAD_MOST).astype(np.int64)
    return np.unique(np.concatenate((even, slowest, failed)))


def _middles(x: Floats, y: Floats) -> dict[str, list[float]]:
    """Median and p90 of y along x: in up to PARTS_MAX parts of equally many, none of fewer than PART_LEAST."""
    result: dict[str, list[float]] = {"x": [], "p50": [], "p90": []}
    parts = min(PARTS_MAX, len(x) // PART_LEAST)
    if parts < 2 or x.min() == x.max():
        return result
    order = np.argsort(x, kind="stable")
    cuts = np.searchsorted(x[order], x[order][np.linspace(0, len(x) - 1, parts + 1).astype(np.int64)[1:-1]])
    for part in np.split(order, cuts):  # a part holds all requests of one x, or none of them
        if len(part):
            result["x"].append(round(percentiles(x[part], 0.5)[0], 1))
            for name, value in zip(("p50", "p90"), percentiles(y[part], 0.5, 0.9), strict=True):
                result[name].append(round(value, 6))
    return result


def _ticks(frame: Frame, rows: Integers) -> list[list[int]]:
    """Each row's chunks as steps of TICK_NS from one to the next, the first from when the request was sent. Empty lists
    where the chunks of all rows together are too many; then every k-th row has its own."""
    counts = frame.chunk_counts[rows]
    counts[np.arange(len(rows)) % max(1, int(np.ceil(counts.sum() / CHUNKS_MAX))) > 0] = 0
    offsets = offsets_of(counts)
    drawn = (frame.chunk_ns[frame.offsets[row] : frame.offsets[row + 1]] for row in rows[counts > 0])
    instants = np.concatenate([np.empty(0), *drawn])
    ticks = np.rint((instants - np.repeat(frame.sent_ns[rows], counts)) / TICK_NS).astype(np.int64)
    steps, firsts = np.diff(ticks, prepend=0), offsets[:-1][counts > 0]
    steps[firsts] = ticks[firsts]
    every = steps.tolist()
    return [every[begin:end] for begin, end in pairwise(offsets.tolist())]


def _gaps(frame: Frame, rows: slice, chunks: slice) -> tuple[Floats, Integers, Integers]:
    """Of one block: each gap in seconds, the token that ends it (counted from 1), and the place of its chunk."""
    counts = np.diff(frame.offsets[rows.start : rows.stop + 1])
    retained = np.repeat(frame.sampled[rows], counts)
    firsts = frame.offsets[rows][counts > 0] - chunks.start
    retained[firsts] = False  # a request's first chunk ends no gap
    places = np.flatnonzero(retained)
    before = np.cumsum(frame.chunk_tokens[chunks], dtype=np.int64)  # tokens up to and with each chunk, in the block
    started = np.zeros(len(counts), np.int64)
    started[counts > 0] = before[firsts] - frame.chunk_tokens[chunks][firsts]
    tokens = before[places - 1] - np.repeat(started, counts)[places] + 1
    return frame.chunk_ns.steps[chunks][places] / 1e9, tokens, places + chunks.start
