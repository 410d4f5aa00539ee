"""Computes the chart data as plain lists: latency distributions, time series and the request timeline.

Large data sets are thinned, which keeps the page small. In the data of a chart, `n` is the number of samples, and
`drawn` is the number of samples that are drawn.

- Charts of distributions draw samples at evenly spaced ranks. They also draw the smallest and largest samples, so the
  tails stay visible.
- Charts of requests draw every k-th request in the order sent. They also draw the slowest and the failed requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from loadgen.analysis import session_graphs
from loadgen.analysis.chunk_columns import KnownSamples, OrderStatistics
from loadgen.analysis.format import nice_step
from loadgen.analysis.frame import Booleans, Floats, Frame, Integers, offsets_of
from loadgen.analysis.goodput import attainment_curve, bound_scale
from loadgen.analysis.objectives import Distribution, parse_bounds
from loadgen.analysis.report.gap_counts import GapCounts, bucket_middles_s
from loadgen.analysis.stats import PERCENTILES, POINTS_MAX, dkw_margin, percentiles, plotted_ranks, samples_needed
from loadgen.analysis.steady_window import in_flight
from loadgen.analysis.summary import Summary
from loadgen.analysis.telemetry import Series

BOUNDS_DRAWN = 4
"""Maximum number of goodput bounds that have a separate curve."""
LATENCY_BINS_MAX = 60
FAILURE_MARKS_MAX = 200
"""Maximum number of marks on the time axis for requests that did not complete."""
HEAT_MAP_MIN_S = 60.0
"""Minimum duration of a run with a heat map. For shorter runs, the chart of percentiles over time shows more."""
HEAT_MAP_ROWS = 24
CELL_OPACITY_MIN = 0.12
"""Opacity towards which a heat map cell tends if it holds far fewer requests than the fullest cell."""
THROUGHPUT_BINS_MAX = 160
SCATTER_MAX = 800
ROWS_MAX = 1000
"""Maximum number of requests in the timeline."""
SLOWEST = 100
INCOMPLETE_MAX = 100
"""Maximum number of incomplete requests that a thinned timeline contains in addition to every k-th request."""
DETAIL_MAX = 160
"""Maximum number of characters of an error message in the timeline."""
TREND_PARTS_MAX = 24
TREND_PART_MIN = 25
"""Minimum number of samples per point of a trend line."""
CHUNKS_MAX = 130_000
"""Maximum number of chunk timestamps in the timeline. A timestamp takes about two bytes in the page."""
TICK_NS = 100_000
LONGEST_COLUMNS = {"token": "token", "gap": "gap_s", "of": "request"}
GAP_PERCENTILES = ("p50", "p90", "p99")
PIECES = 300
"""Number of pieces into which a long telemetry series is divided for thinning."""
UNITS: dict[str, tuple[float, str]] = {"bytes": (2.0**-30, "GiB"), "share": (100.0, "%"), "Hz": (1e-6, "MHz")}
PANELS = {
    **dict.fromkeys(("running", "waiting"), "requests at the server"),
    **dict.fromkeys(("kv_used", "kv_used_max"), "KV cache, %"),
    "output_tokens_per_s": "server's output tokens/s",
    "prompt_tokens_per_s": "server's prompt tokens/s",
    **dict.fromkeys(("preemptions", "rejections"), "requests since the start"),
}
"""Title of the panel that shows a telemetry curve, by the name of the curve. The rates of prompt tokens and of output
tokens have separate panels, because they differ widely."""
MAIN_PANELS = ("requests/s", "requests at the server", "KV cache, %")
"""Titles of the panels that the chart of the run over time contains (throughput.js). The other panels have a chart."""
PANELS_BY_UNIT = {"%": "GPU, %", "GiB": "memory, GiB", "W": "power, W", "MHz": "clock, MHz"}
"""Title of the panel of every other telemetry curve, by unit."""


def distribution(ordered: Floats | OrderStatistics | KnownSamples, requests: int) -> dict[str, Any]:
    """Return the empirical distribution function of samples in ascending order.

    In the result, `x` is in seconds, and `y` is the share of samples at or below `x`. `margin` is half the width of the
    95% band. The band is computed from the number of requests, because samples of the same request are correlated.
    """
    ranks = plotted_ranks(len(ordered))
    drawn = ordered[ranks] if isinstance(ordered, np.ndarray) else np.array(ordered.values_at(ranks))
    return {
        "x": np.round(drawn, 7).tolist(),
        "y": np.round((ranks + 1) / max(1, len(ordered)), 6).tolist(),
        "n": len(ordered),
        "drawn": len(ranks),
        "margin": round(dkw_margin(min(requests, len(ordered))), 6),
    }


def thin_points(data: Mapping[str, Any], points_max: int) -> Mapping[str, Any]:
    """Return the data of a chart with at most `points_max` points.

    The first points, the last points and evenly spaced points between them remain. `data` contains lists with one entry
    per point, and other values, which are not changed.

    The number of points is the length of the list `data["x"]`, or `data["drawn"]` if there is no such list. If `data`
    contains the field `drawn`, it is set to the new number of points.
    """
    count = len(data["x"]) if "x" in data else data.get("drawn", 0)
    if count <= points_max:
        return data
    ends = points_max // 10
    even = np.linspace(0, count - 1, points_max - 2 * ends).astype(np.int64)
    points = np.unique(np.concatenate((np.arange(ends), even, np.arange(count - ends, count)))).tolist()
    result = dict(data)
    for name, values in data.items():
        if isinstance(values, list) and len(values) == count:
            result[name] = [values[point] for point in points]
    return result | {"drawn": len(points)} if "drawn" in data else result


def confidence_band(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lower and the upper end of the 95% band at each point of a curve from `distribution`."""
    share = np.array(curve["y"])
    low = np.maximum(0, share - curve["margin"])
    high = np.minimum(1, share + curve["margin"])
    return {"low": np.round(low, 4).tolist(), "high": np.round(high, 4).tolist()}


def percentile_marks(described: Distribution) -> dict[str, Any]:
    """Return the labels and positions of p50 and p99 on a distribution curve.

    A label ends with an asterisk if there are too few samples for the percentile.
    """
    shown = [name for name in ("p50", "p99") if described.of(name) is not None]
    return {
        "mark": [name + "*" * (name in described.thin) for name in shown],
        "mark_x": [described.of(name) for name in shown],
        "mark_y": [PERCENTILES[name] for name in shown],
    }


def goodput_curve(frame: Frame, summary: Summary) -> dict[str, Any] | None:
    """Return a curve: the share of good requests (`y`) if all latency bounds are multiplied by `x`.

    If the run has several bounds, the result also contains one curve per bound, for this bound alone. These curves are
    `bound_1`, `bound_2` and so on, up to BOUNDS_DRAWN. If the run has fewer bounds, the remaining curves are empty.
    Return None for a run without bounds.
    """
    result = summary.goodput
    if result is None:
        return None
    curves: dict[str, Any] = {"x": result.curve.x, "y": result.curve.y}
    bounds = parse_bounds(result.bounds) if len(result.bounds) > 1 else []
    for number in range(BOUNDS_DRAWN):
        curves[f"bound_{number + 1}"] = {"x": [], "y": [], "name": ""}
        if number < len(bounds):
            curve = attainment_curve(np.sort(bound_scale(frame, [bounds[number]])[frame.inside]))
            curves[f"bound_{number + 1}"] = {"x": curve.x, "y": curve.y, "name": f"{bounds[number].text} alone"}
    return curves


def sessions_in_flight(frame: Frame) -> dict[str, Any] | None:
    """Return the number of sessions in flight (`y`) over the time since the start of the run in s (`x`).

    Return None unless the run has session graphs: sessions in which a request may wait for several earlier ones.
    """
    if frame.graphs is None:
        return None
    instants, levels = session_graphs.sessions_in_flight(frame)
    if not len(instants):
        return None
    stride = -(-len(instants) // POINTS_MAX)
    shown = np.unique(np.append(np.arange(0, len(instants), stride), len(instants) - 1))
    return {"x": np.round(instants[shown] / 1e9, 6).tolist(), "y": levels[shown].tolist()}


def ttft_by_turn(summary: Summary) -> dict[str, Any] | None:
    """Return the median TTFT in ms with its 95% interval by turn, or None for a run without sessions.

    Turns with too few samples for a median are omitted.
    """
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


def throughput_series(frame: Frame) -> dict[str, Any]:
    """Return time series of the throughput and of the number of concurrent requests, for a chart.

    The run is divided into equal intervals, about THROUGHPUT_BINS_MAX of them or fewer. Intervals of the warm-up have
    negative times. The series have one value per interval:

    - `sent_per_s`: requests sent per second.
    - `tokens_per_s`: output tokens per second.
    - `in_flight`: maximum number of requests in flight.
    - `receiving`: maximum number of responses that were being streamed.
    """
    sent = ~np.isnan(frame.sent_ns)
    end_ns = frame.end_ns[sent & ~np.isnan(frame.end_ns)]
    if len(end_ns) == 0 or end_ns.max() <= frame.sent_ns[sent].min():
        return {"bin_s": 0, "start_s": [], "sent_per_s": [], "tokens_per_s": [], "in_flight": [], "receiving": []}
    first_ns = float(frame.sent_ns[sent].min())
    last_ns = float(end_ns.max())
    bin_ns = nice_step((last_ns - first_ns) / THROUGHPUT_BINS_MAX)
    edges = np.minimum(first_ns + bin_ns * np.arange(int(np.ceil((last_ns - first_ns) / bin_ns)) + 1), last_ns)
    tokens = np.zeros(len(edges) - 1)
    # Tokens that were generated but never streamed are attributed to the streamed tokens in equal shares, so the sum is
    # that of the throughput metric.
    scale = frame.output_tokens / np.maximum(frame.arrived_tokens, 1)
    counts = frame.chunk_counts

    def add_tokens(instants: Floats, amounts: Floats) -> None:
        bins = _bins_of(instants, first_ns, bin_ns)
        inside = (bins >= 0) & (instants <= first_ns + bin_ns * len(tokens))
        tokens[:] += np.bincount(np.minimum(bins[inside], len(tokens) - 1), amounts[inside], len(tokens))

    # All chunks of some requests belong to one interval, so only the chunks of the other requests are examined.
    has_chunks = counts > 0
    in_one_bin = has_chunks.copy()
    in_one_bin[has_chunks] = _bins_of(frame.first_ns[has_chunks], first_ns, bin_ns) == _bins_of(
        frame.last_ns[has_chunks], first_ns, bin_ns
    )
    add_tokens(frame.first_ns[in_one_bin], (scale * frame.arrived_tokens)[in_one_bin])
    for rows, chunk_counts, instants, chunk_tokens in frame.chunk_blocks(has_chunks & ~in_one_bin):
        add_tokens(instants, chunk_tokens * np.repeat(scale[rows], chunk_counts))
    lengths_s = np.maximum(np.diff(edges), 1.0) / 1e9
    send_bins = ((frame.sent_ns[sent] - first_ns) / bin_ns).astype(np.int64)
    sends = np.bincount(np.minimum(send_bins, len(tokens) - 1), minlength=len(tokens))
    return {
        "bin_s": bin_ns / 1e9,
        "start_s": np.round(edges[:-1] / 1e9, 9).tolist(),
        "sent_per_s": [float(f"{rate:.4g}") for rate in sends / lengths_s],
        "tokens_per_s": np.round(tokens / lengths_s, 2).tolist(),
        "in_flight": _max_concurrent(frame.sent_ns, frame.end_ns, edges),
        "receiving": _max_concurrent(frame.first_ns, frame.last_ns, edges),
    }


def _bins_of(instants: Floats, first_ns: float, bin_ns: float) -> Integers:
    """Return the index of the time bin that contains each instant. Instants are in ns.

    Bin 0 begins at `first_ns`, and each bin lasts `bin_ns`.
    """
    return ((instants - first_ns) / bin_ns).astype(np.int64)


def latency_series(frame: Frame) -> dict[str, Any] | None:
    """Return the data of the charts of latencies and failures over time, or None if no request ended.

    The run is divided into at most about LATENCY_BINS_MAX equal intervals. For each interval, the data contains p50 and
    p99 of TTFT, TPOT and E2E, and the number of failed and of rejected requests per second. A latency belongs to the
    interval in which its last event happened:

    - TTFT: the first token arrived.
    - TPOT: the last token arrived.
    - E2E: the response ended.

    The entry `incomplete_s` contains the times at which incomplete requests ended. If there are more than
    FAILURE_MARKS_MAX such times, it contains FAILURE_MARKS_MAX of them, evenly spaced.
    """
    grid = _time_grid(frame)
    if not grid:
        return None
    begin_ns, bin_ns, bins = grid
    columns = {
        "ttft": (frame.first_ns - frame.sent_ns, frame.first_ns),
        "tpot": ((frame.last_ns - frame.first_ns) / frame.later_tokens, frame.last_ns),
        "e2e": (frame.end_ns - frame.sent_ns, frame.end_ns),
    }
    units = {"ttft": 1e9, "tpot": 1e6, "e2e": 1e9}  # TTFT and E2E in s, TPOT in ms
    result: dict[str, Any] = {
        "bin_s": bin_ns / 1e9,
        "x": np.round((begin_ns + bin_ns * np.arange(bins)) / 1e9, 6).tolist(),
    }

    def bin_of(instants_ns: Floats) -> Integers:
        return ((instants_ns - begin_ns) / bin_ns).astype(np.int64).clip(0, bins - 1)

    for name, (values, instants_ns) in columns.items():
        retained = frame.sampled & ~np.isnan(values)
        indices = bin_of(instants_ns[retained])
        order = np.argsort(indices, kind="stable")
        groups = np.split((values[retained] / units[name])[order], np.cumsum(np.bincount(indices, minlength=bins))[:-1])
        result[f"{name}_n"] = [len(group) for group in groups]
        for percent in (50, 99):
            result[f"{name}_p{percent}"] = [
                round(percentiles(group, percent / 100)[0], 6) if len(group) else None for group in groups
            ]
    rejected = frame.ended_as("rejected")
    incomplete = frame.sent & ~frame.complete & ~np.isnan(frame.end_ns)
    for name, rows in (("failed", incomplete & ~rejected), ("rejected", incomplete & rejected)):
        counts = np.bincount(bin_of(frame.end_ns[rows]), minlength=bins)
        result[f"{name}_per_s"] = np.round(counts / (bin_ns / 1e9), 4).tolist()
    ends_s = np.sort(frame.end_ns[incomplete]) / 1e9
    marked = np.unique(np.linspace(0, len(ends_s) - 1, min(len(ends_s), FAILURE_MARKS_MAX)).astype(np.int64))
    result["incomplete_s"] = np.round(ends_s[marked], 3).tolist()
    return result


def ttft_heat_map(frame: Frame) -> dict[str, Any] | None:
    """Return the heat map of TTFT over the run as chart data, or None if the run is too short or has no first token.

    Each cell counts the first tokens that arrived in a time interval (column) with a TTFT in a certain range (row). The
    edges of the rows form a geometric sequence.

    - `n` and `opacity` are the count and the opacity of each cell. The opacity grows with the square root of the count.
    - `scale_n` and `scale_opacity` are the counts and opacities that the colour scale shows.
    """
    grid = _time_grid(frame)
    ttft_s = (frame.first_ns - frame.sent_ns) / 1e9
    retained = frame.sampled & (ttft_s > 0)
    if not grid or grid[1] * grid[2] < HEAT_MAP_MIN_S * 1e9 or not retained.any():
        return None
    begin_ns, bin_ns, bins = grid
    low = float(ttft_s[retained].min())
    high = float(ttft_s[retained].max()) * 1.0001  # the largest value lies inside the last row
    edges = low * (high / low) ** (np.arange(HEAT_MAP_ROWS + 1) / HEAT_MAP_ROWS)
    columns = ((frame.first_ns[retained] - begin_ns) / bin_ns).astype(np.int64).clip(0, bins - 1)
    rows = (np.searchsorted(edges, ttft_s[retained], side="right") - 1).clip(0, HEAT_MAP_ROWS - 1)
    cells, counts = np.unique(columns * HEAT_MAP_ROWS + rows, return_counts=True)
    scale_n = np.unique(np.rint(counts.max() * np.array([0, 0.05, 0.2, 0.5, 1])).clip(1).astype(np.int64))
    row = cells % HEAT_MAP_ROWS
    x = (begin_ns + bin_ns * (cells // HEAT_MAP_ROWS + 0.5)) / 1e9
    return {
        "x": np.round(x, 6).tolist(),
        "base": row.tolist(),
        "height": [1] * len(cells),
        "width": [bin_ns / 1e9] * len(cells),
        "n": counts.tolist(),
        "opacity": np.round(_cell_opacity(counts, counts.max()), 3).tolist(),
        "low": [float(f"{edge:.3g}") for edge in edges[row]],
        "high": [float(f"{edge:.3g}") for edge in edges[row + 1]],
        "range_s": [low, high],
        "time_range_s": [round(begin_ns / 1e9, 6), round((begin_ns + bin_ns * bins) / 1e9, 6)],
        "scale_x": [round(begin_ns / 1e9, 6)],
        "scale_y": [None],
        "scale_n": scale_n.tolist(),
        "scale_opacity": np.round(_cell_opacity(scale_n, counts.max()), 3).tolist(),
    }


def _cell_opacity(counts: Integers, maximum: int) -> Floats:
    """Return the opacity of cells with these numbers of requests. The fullest cell has `maximum` requests."""
    return CELL_OPACITY_MIN + (1 - CELL_OPACITY_MIN) * np.sqrt(counts / maximum)


def heat_map_ticks(low: float, high: float) -> tuple[list[float], list[float]]:
    """Return the values of the ticks on the axis of a heat map, and the positions of these ticks in rows.

    The axis is logarithmic, from `low` to `high`. The values of the ticks are 1, 2 or 5 times a power of ten. If fewer
    than three such values lie on the axis, the ticks have round and evenly spaced values instead.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    values = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    if len(values) < 3:
        step = nice_step((high - low) / 6)
        values = [index * step for index in range(int(np.ceil(low / step)), int(high / step) + 1)]
    return values, [float(np.log(value / low) / np.log(high / low)) * HEAT_MAP_ROWS for value in values]


def _time_grid(frame: Frame) -> tuple[float, float, int] | None:
    """Return how to divide the time of the measured requests into equal intervals.

    The result consists of the start in ns, the length of an interval in ns, and the number of intervals. Return None if
    no measured request ended.
    """
    sent_ns = frame.sent_ns[frame.sent]
    end_ns = frame.end_ns[frame.sent & ~np.isnan(frame.end_ns)]
    if len(end_ns) == 0 or end_ns.max() <= sent_ns.min():
        return None
    begin_ns = float(sent_ns.min())
    bin_ns = nice_step(float(end_ns.max() - sent_ns.min()) / LATENCY_BINS_MAX)
    return begin_ns, bin_ns, int(np.ceil((end_ns.max() - begin_ns) / bin_ns))


def send_times(frame: Frame) -> dict[str, Any]:
    """Return the number of requests sent so far (`y`) at each time in seconds after the first request (`x`)."""
    sent = np.sort(frame.sent_ns[frame.sent])
    ranks = plotted_ranks(len(sent))
    after_s = (sent[ranks] - sent[0]) / 1e9 if len(sent) else sent
    return {"x": np.round(after_s, 9).tolist(), "y": (ranks + 1).tolist(), "n": len(sent), "drawn": len(ranks)}


def first_tokens(frame: Frame) -> dict[str, Any]:
    """Return the data of the charts of TTFT: one point per complete request in the measurement window, and two trends.

    A point consists of the TTFT, the length of the prompt and the position of a request. The position is 1 for the
    request that was sent first. The trends show how TTFT changes with the position and with the length of the prompt.
    For large runs, only some of the points are returned.
    """
    order = _send_order(frame)
    retained = (frame.sampled & ~np.isnan(frame.first_ns))[order]
    rows = order[retained]
    positions = np.flatnonzero(retained) + 1
    ttft_s = (frame.first_ns - frame.sent_ns)[rows] / 1e9
    prompts = frame.prompt_tokens[rows]
    known = ~np.isnan(prompts)
    drawn = _chosen_rows(len(rows), SCATTER_MAX, ttft_s)
    return {
        "request": frame.id[rows][drawn].tolist(),
        "position": positions[drawn].tolist(),
        "prompt": [
            int(tokens) if is_known else None for tokens, is_known in zip(prompts[drawn], known[drawn], strict=True)
        ],
        "ttft_s": np.round(ttft_s[drawn], 6).tolist(),
        "n": len(rows),
        "drawn": len(drawn),
        "by_position": _trend(positions.astype(np.float64), ttft_s),
        "by_prompt": _trend(prompts[known], ttft_s[known]),
        "prompts": [int(prompts[known].min()), int(prompts[known].max())] if known.any() else [],
    }


def timeline(frame: Frame) -> dict[str, Any]:
    """Return when each request was sent, when its first and last token arrived, and when it ended.

    The entry `tokens` contains the times between the chunks of each request (see `_chunk_steps`). For a large run, the
    data contains only some of the requests: every k-th request, the slowest requests, and some of those that are not
    complete.
    """
    order = _send_order(frame)
    chosen = _chosen_rows(len(order), ROWS_MAX, (frame.end_ns - frame.sent_ns)[order], ~frame.complete[order])
    # The table of failures links to these requests, so the timeline must contain them.
    linked_ids = [count.first_id for outcome, count in frame.outcomes.items() if outcome.kind]
    linked = np.flatnonzero(np.isin(frame.id[order], linked_ids))[:INCOMPLETE_MAX]
    chosen = np.union1d(chosen, linked)
    rows = order[chosen]
    reasons = [": ".join(filter(None, (outcome.kind, outcome.detail[:DETAIL_MAX]))) for outcome in frame.outcomes]
    instants = {}
    for name in ("sent", "first", "last", "end"):
        column_ns = getattr(frame, f"{name}_ns")[rows].tolist()
        instants[f"{name}_s"] = [None if np.isnan(instant) else round(instant / 1e9, 6) for instant in column_ns]
    return {
        "request": frame.id[rows].tolist(),
        "position": (chosen + 1).tolist(),
        **instants,
        "bad": [reasons[index] for index in frame.outcome_index[rows]],
        "tokens": _chunk_steps(frame, rows),
        "n": len(order),
        "drawn": len(rows),
        "every": 1 if len(rows) == len(order) else round(len(order) / (ROWS_MAX - SLOWEST - INCOMPLETE_MAX)),
        "tick_s": TICK_NS / 1e9,
    }


def gaps_by_token(frame: Frame, gaps: GapCounts) -> dict[str, Any]:
    """Return percentiles and the maximum of the gaps before each token, in s, over all complete requests.

    The gaps are grouped by the position of the token in its response. For long responses, neighbouring positions form
    one group. The result also lists the longest gaps.
    """
    longest_rows = []
    for gap_ns, index, token in gaps.longest:
        request = int(frame.id[np.searchsorted(frame.offsets, index, "right") - 1])
        gap_s = gap_ns / 1e9
        from_s = round(float(frame.chunk_ns[index : index + 1][0]) / 1e9 - gap_s, 6)
        longest_rows.append({"request": request, "token": token, "from_s": from_s, "gap_s": gap_s})
    longest_columns = {f"longest_{name}": [row[key] for row in longest_rows] for name, key in LONGEST_COLUMNS.items()}
    totals = gaps.counts.sum(axis=1)
    used = np.flatnonzero(totals)
    below = np.cumsum(gaps.counts, axis=1)
    largest_s = gaps.largest_ns / 1e9
    drawn: dict[str, Any] = {
        "token": np.maximum(used * gaps.width, 1).tolist(),
        "width": gaps.width,
        "n": totals[used].tolist(),
        "requests": int(frame.sampled.sum()),
        "max": [round(float(value), 7) for value in largest_s[used]],
    }
    for name in GAP_PERCENTILES:
        reached = (below[used] >= PERCENTILES[name] * totals[used, None]).argmax(axis=1)
        # A percentile is only drawn if enough requests have a token at this position.
        enough = totals[used] / gaps.width >= samples_needed(PERCENTILES[name])
        values = np.minimum(bucket_middles_s()[reached], largest_s[used])
        drawn[name] = [
            round(float(value), 7) if is_enough else None for value, is_enough in zip(values, enough, strict=True)
        ]
    return drawn | {"longest": longest_rows} | longest_columns


def telemetry_panels(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the data of each telemetry curve: title, unit, source, `x` in seconds, and `y` in the unit.

    A `y` of None is a gap in the curve. Curves with the same `panel` share an axis and have the same unit.
    """
    result = []
    for curve in series:
        factor, unit = UNITS.get(curve.unit, (1.0, curve.unit))
        panel = PANELS.get(curve.name) or PANELS_BY_UNIT.get(unit, unit)
        indices = plotted_indices(curve.y)
        values = [curve.y[index] for index in indices]
        result.append(
            {
                "title": curve.title,
                "unit": unit,
                "panel": panel,
                "of": curve.of,
                "x": [round(curve.x_s[index], 4) for index in indices],
                "y": [None if value is None else float(f"{value * factor:.6g}") for value in values],
                "n": len(curve.y),
            }
        )
    return result


def plotted_indices(values: Sequence[float | None]) -> list[int]:
    """Return the indices of the values that the chart of a telemetry series shows.

    A short series is shown completely. A long series is divided into PIECES pieces. The chart shows the first value,
    the minimum, the maximum and the first gap (a value of None) of each piece. It also shows the last value of the
    series.
    """
    if len(values) <= 3 * PIECES:
        return list(range(len(values)))
    retained: set[int] = {len(values) - 1}
    for piece in range(PIECES):
        indices = range(piece * len(values) // PIECES, (piece + 1) * len(values) // PIECES)
        known = [(value, index) for index in indices if (value := values[index]) is not None]
        gap = next((index for index in indices if values[index] is None), indices[0])
        retained |= {indices[0], gap}
        if known:
            retained |= {min(known)[1], max(known)[1]}
    return sorted(retained)


def _max_concurrent(begins: Floats, ends: Floats, edges: Floats) -> list[int]:
    """Return the maximum number of concurrent intervals in each bin of a time axis.

    Interval i lasts from `begins[i]` to `ends[i]`, and bin j from `edges[j]` to `edges[j + 1]`.
    """
    instants, levels = in_flight(begins, ends)
    positions = np.searchsorted(instants, edges)
    before = np.concatenate(([0], levels))[positions[:-1]]
    return [
        int(max(level, levels[first:last].max(initial=0)))
        for level, first, last in zip(before, positions[:-1], positions[1:], strict=True)
    ]


def tokens_per_event(summary: Summary) -> dict[str, Any] | None:
    """Return the data of the chart of tokens per event, or None if every event contains one token.

    For each number of tokens in an event (`size`), the data contains the number of such events (`events`) and their
    share of all events (`share`).
    """
    result = summary.tokens_per_event
    if result is None or not result.counts:
        return None
    total = sum(result.counts.values())
    events = list(result.counts.values())
    return {"size": list(result.counts), "events": events, "share": [round(count / total, 5) for count in events]}


def _send_order(frame: Frame) -> Integers:
    """Return the frame rows of the measured requests that were sent, in the order sent."""
    rows = np.flatnonzero(frame.sent)
    return rows[np.argsort(frame.sent_ns[rows], kind="stable")]


def _chosen_rows(count: int, maximum: int, slowness: Floats, incomplete: Booleans | None = None) -> Integers:
    """Return the indices of the rows to draw out of `count` rows.

    All rows are drawn if `count <= maximum`. Otherwise, three sets of rows are drawn: every k-th row, the slowest
    rows (SLOWEST of them), and up to INCOMPLETE_MAX evenly spaced `incomplete` rows.
    """
    if count <= maximum:
        return np.arange(count)
    slowest = _largest(np.where(np.isnan(slowness), -np.inf, slowness), SLOWEST)
    failed = np.empty(0, np.int64) if incomplete is None else np.flatnonzero(incomplete)
    if len(failed) > INCOMPLETE_MAX:
        failed = failed[np.linspace(0, len(failed) - 1, INCOMPLETE_MAX).astype(np.int64)]
    even = np.linspace(0, count - 1, maximum - SLOWEST - INCOMPLETE_MAX).astype(np.int64)
    return np.unique(np.concatenate((even, slowest, failed)))


def _largest(values: Floats, number: int) -> Integers:
    """Return the indices of the largest `number` values. Of equal values, the last ones count as larger."""
    limit = np.partition(values, -number)[-number]
    larger = np.flatnonzero(values > limit)
    equal = np.flatnonzero(values == limit)
    return np.concatenate((larger, equal[len(larger) - number :]))


def _trend(x: Floats, y: Floats) -> dict[str, list[float]]:
    """Return the median and p90 of `y` along `x`.

    The samples are sorted by `x` and divided into groups of about equal size. There are at most TREND_PARTS_MAX groups,
    and a group has about TREND_PART_MIN samples or more. The lists in the result contain one median and one p90 per
    group. The lists are empty if there are too few samples for two groups, or if all `x` are equal.
    """
    result: dict[str, list[float]] = {"x": [], "p50": [], "p90": []}
    parts = min(TREND_PARTS_MAX, len(x) // TREND_PART_MIN)
    if parts < 2 or x.min() == x.max():
        return result
    order = np.argsort(x, kind="stable")
    cuts = np.searchsorted(x[order], x[order][np.linspace(0, len(x) - 1, parts + 1).astype(np.int64)[1:-1]])
    for part in np.split(order, cuts):  # samples with equal x stay in the same group
        if len(part):
            result["x"].append(round(percentiles(x[part], 0.5)[0], 1))
            for name, value in zip(("p50", "p90"), percentiles(y[part], 0.5, 0.9), strict=True):
                result[name].append(round(value, 6))
    return result


def _chunk_steps(frame: Frame, rows: Integers) -> list[list[int]]:
    """Return the time between consecutive chunks of each row, in units of TICK_NS.

    The first value of a row is the time from sending the request to its first chunk. If all rows together have more
    than CHUNKS_MAX chunks, only every k-th row has values, and the lists of the other rows are empty.
    """
    counts = frame.chunk_counts[rows]
    counts[np.arange(len(rows)) % max(1, int(np.ceil(counts.sum() / CHUNKS_MAX))) > 0] = 0
    offsets = offsets_of(counts)
    drawn = (frame.chunk_ns[frame.offsets[row] : frame.offsets[row + 1]] for row in rows[counts > 0])
    instants = np.concatenate([np.empty(0), *drawn])
    ticks = np.rint((instants - np.repeat(frame.sent_ns[rows], counts)) / TICK_NS).astype(np.int64)
    steps = np.diff(ticks, prepend=0)
    firsts = offsets[:-1][counts > 0]
    steps[firsts] = ticks[firsts]
    all_steps = steps.tolist()
    return [all_steps[begin:end] for begin, end in pairwise(offsets.tolist())]
