"""Readings of the server, the GPUs and the host during a run.

This module computes these results from the Telemetry lines of the run file:

- curves over time.
- the difference between the server's counters and the client's counts.
- memory in use before, during and after the run.
- the clock offsets of the machines of a distributed run.

Engines reserve most of a GPU's memory when they start, so memory in use says little about the load. The share of the KV
cache in use says more. The summary contains both, with a note on how much memory the engine reserves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from loadgen.analysis.format import pluralise
from loadgen.analysis.frame import NS_PER_S, Booleans, Frame, sum_known
from loadgen.analysis.frame_parts import NO_REPLICA
from loadgen.analysis.run.canary import Canary
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import round_to_ns
from loadgen.analysis.summary import (
    AbandonedRequests,
    CounterCheck,
    GpuMemory,
    HostMemoryLevels,
    KvCache,
    MachineClock,
    Memory,
    MemoryReserved,
    ProcessMemory,
)
from loadgen.servers.telemetry import COUNTERS

Source = Literal["server", "gpu", "host"]
BEFORE = ("idle", "start")
"""Moments before the start of the run: `idle` is before any request, `start` is after the warm-up requests."""
AFTER = ("end", "after")
"""Moments after the run: `end` is right after the end of the last request, `after` is a little later."""
SHARE_DECIMALS = 4
MIN_RETURNS = 2
"""Minimum number of falls to the values of an earlier series, from which readings are those of several counters."""
MIN_QUICK, QUICK_S = 3, 3.0
"""Readings are also those of several counters if they fall at least MIN_QUICK times within QUICK_S seconds."""


class Reading(NamedTuple):
    """One reading of a telemetry source (server, GPUs or host).

    If the reading failed, `gap` is the reason. Otherwise `gap` is empty.
    """

    at_s: float
    """Seconds from the run's start."""
    moment: str
    """`idle`, `start`, `run`, `end` or `after`."""
    values: Mapping[str, Any]
    gap: str


def readings(run: Run, source: Source) -> list[Reading]:
    """Return the readings of the telemetry source `source` in order of time.

    If several lines of the run file have the same time, only the last of them is used.

    A load balancer in front of several replicas may send each request for the server's metrics to a different replica.
    The counters of the replicas are then mixed, so the readings of the server are returned without counters.
    """
    result = _all_readings(run, source)
    if source == "server" and count_mixed_replicas(run):
        result = [reading._replace(values=_without_counters(reading.values)) for reading in result]
    return result


def _all_readings(run: Run, source: Source) -> list[Reading]:
    """Return the readings of one telemetry source in order of time.

    Unlike `readings`, this function does not remove counters that mix several replicas.
    """
    lines = {line.at_ns: line for line in run.telemetry if line.source == source}
    return [
        Reading(at_ns / NS_PER_S, line.values.get("moment", "run"), line.values, line.values.get("gap", ""))
        for at_ns, line in sorted(lines.items())
    ]


def _without_counters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the server in `values`, without the metrics that are counters."""
    return {name: value for name, value in values.items() if name not in COUNTERS}


def count_mixed_replicas(run: Run) -> int:
    """Return the number of replicas whose counters are mixed in the readings of the server, or 0 if none are mixed.

    Counters are mixed if a load balancer sends each request for the server's metrics to a different replica. They are
    not mixed if each replica was read at its own URL. The actual number may be larger than the result, because the
    counters of two replicas can look like one counter.

    The result is stored in `run`. It is computed again only if `run` has received more telemetry.
    """
    if run.mixed_replicas is not None:
        lines, length, mixed = run.mixed_replicas
        if lines is run.telemetry and length == len(lines):
            return mixed
    mixed = _count_mixed_replicas(run)
    run.mixed_replicas = (run.telemetry, len(run.telemetry), mixed)
    return mixed


def _count_mixed_replicas(run: Run) -> int:
    """Return the number of replicas whose counters are mixed in the readings of the server, or 0 if none are mixed.

    Counters are mixed if a load balancer passes each reading to a different replica. This function goes through all
    readings at every call. Call `count_mixed_replicas` instead, which stores the result.
    """
    valid = [
        reading for reading in _all_readings(run, "server") if not reading.gap and "replicas" not in reading.values
    ]
    mixed = 0
    for counter in COMPARED:
        known = [(reading.at_s, number_in(reading.values, counter)) for reading in valid]
        mixed = max(mixed, mixed_series([(at_s, value) for at_s, value in known if value is not None]))
    return mixed


def mixed_series(points: Sequence[tuple[float, float]]) -> int:
    """Return how many counters are mixed in the readings of one metric, or 0 if there is a single counter.

    `points` contains one pair per reading: the time in seconds, and the value. Behind a load balancer, each reading may
    come from another replica. The values then jump between the counters of the replicas.

    A counter never falls unless its server restarts. The function therefore divides the readings into series that never
    fall. Each reading joins the series whose last value is closest to the reading without exceeding it. If there is no
    such series, the reading begins a new one.

    A reading that is lower than the reading before is a fall. A fall that joins an existing series is a sign of several
    counters. A fall that begins a new series may be a restart, and so may a fall to 0. The readings count as mixed in
    two cases:

    - There are MIN_RETURNS falls to existing series, at values above 0. A single such fall is not enough, because a
      server that restarts twice can cause it. An example is 100, 20, 120, 40: 120 joins the series of 100, and 40 joins
      that of 20.
    - There are MIN_QUICK falls of any kind within QUICK_S, because no server restarts so quickly.
    """
    series: list[float] = []
    """The last value of each series."""
    falls_s: list[float] = []
    returns = 0
    before: float | None = None
    for at_s, value in points:
        fitting = [index for index, last in enumerate(series) if last <= value]
        if before is not None and value < before:
            falls_s.append(at_s)
            # A counter at 0 may be that of a server which has just restarted.
            returns += bool(fitting) and value > 0
        if fitting:
            series[max(fitting, key=series.__getitem__)] = value
        else:
            series.append(value)
        before = value
    quick = any(later_s - at_s <= QUICK_S for at_s, later_s in zip(falls_s, falls_s[MIN_QUICK - 1 :], strict=False))
    return len(series) if returns >= MIN_RETURNS or quick else 0


def values_by_subject(reading: Reading, source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the values of a reading for each device or process, such as `server`, `GPU 0`, `host` or `process 123`.

    `source` is the telemetry source of the reading. The result is empty if the reading failed.
    """
    if reading.gap:
        return {}
    if source == "server":
        return {"server": reading.values}
    if source == "gpu":
        gpus = [gpu for gpu in reading.values.get("gpus", ()) if not gpu.get("gap")]
        totals: dict[str, dict[str, float]] = {}  # memory of each process on all GPUs together
        for gpu in gpus:
            for process in gpu.get("processes", ()):
                size = number_in(process, "memory_used_bytes")
                if size is not None:
                    total = totals.setdefault(f"process {process.get('pid')}", {"held_bytes": 0.0})
                    total["held_bytes"] += size
        return {f"GPU {gpu.get('index')}": gpu for gpu in gpus} | totals
    processes = {f"process {process.get('pid')}": process for process in reading.values.get("processes", ())}
    return {"host": reading.values} | {name: values for name, values in processes.items() if not values.get("gap")}


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """Return the value `name` from the values of a reading as a float, or None if the reading lacks this value."""
    value = values.get(name)
    return None if value is None else float(value)


class Series(msgspec.Struct, frozen=True):
    """One curve over time. `x_s` is in seconds from the run's start, and is negative before the start."""

    name: str
    """The name of the curve, as in docs/reference/telemetry.md."""
    title: str
    unit: str
    """`bytes`, `share`, `requests`, `tokens/s`, `requests/s`, `W` or `Hz`."""
    of: str
    """The device or the process: `server`, `GPU 0`, `host` or `process 123`."""
    x_s: list[float]
    y: list[float | None]
    """Values of the curve. None means that nothing was read at this time. It does not mean zero."""


Points = list[tuple[float, float | None]]


class Curve(msgspec.Struct, frozen=True):
    """The definition of a telemetry curve.

    It states where the values come from, how they are converted, and the title and unit of the curve.
    """

    source: Source
    figure: str
    """Name of the figure in the Telemetry lines."""
    name: str
    title: str
    unit: str
    convert: Callable[[Points], Points] = list
    """Converts the readings of a counter. The default is for gauges and changes nothing."""
    live: str = ""
    """Name of the same figure in the Telemetry lines of servers that count it while a request runs. Such a server
    counts `figure` only when a request finishes, which would draw a staircase."""


def per_second(points: Points) -> Points:
    """Return the growth of a counter per second, from each reading in `points` to the next.

    The rate is None for the first reading, after a failed reading and after a counter reset.
    """
    rates: Points = [(points[0][0], None)]
    for (before_s, before), (now_s, now) in pairwise(points):
        if before is None or now is None or now < before or now_s <= before_s:
            rates.append((now_s, None))
        else:
            rates.append((now_s, (now - before) / (now_s - before_s)))
    return rates


def since_first(points: Points) -> Points:
    """Return the growth of a counter since the first reading, at each point in time.

    The growth before a counter reset is included.
    """
    growth: Points = []
    total = 0.0
    before: float | None = None
    for at_s, now in points:
        if now is not None:
            if before is not None:
                total += now - before if now >= before else now
            before = now
        growth.append((at_s, None if now is None else total))
    return growth


CURVES: tuple[Curve, ...] = (
    Curve("server", "running", "running", "Requests running", "requests"),
    Curve("server", "waiting", "waiting", "Requests waiting", "requests"),
    Curve("server", "kv_used", "kv_used", "KV cache in use", "share"),
    Curve("server", "kv_used_max", "kv_used_max", "KV cache in use, fullest engine", "share"),
    Curve(
        "server", "output_tokens", "output_tokens_per_s", "Output tokens", "tokens/s", per_second, "live_output_tokens"
    ),
    Curve(
        "server", "prompt_tokens", "prompt_tokens_per_s", "Prompt tokens", "tokens/s", per_second, "live_prompt_tokens"
    ),
    Curve("server", "requests_finished", "requests_finished_per_s", "Requests finished", "requests/s", per_second),
    Curve("server", "preemptions", "preemptions", "Preemptions since the start", "requests", since_first),
    Curve("server", "rejections", "rejections", "Rejections since the start", "requests", since_first),
    Curve("gpu", "memory_used_bytes", "gpu_memory_used", "GPU memory in use", "bytes"),
    Curve("gpu", "held_bytes", "gpu_memory_held", "GPU memory held by one process", "bytes"),
    Curve("gpu", "busy", "gpu_busy", "GPU busy", "share"),
    Curve("gpu", "power_w", "gpu_power", "GPU power", "W"),
    Curve("gpu", "sm_clock_hz", "gpu_sm_clock", "GPU clock", "Hz"),
    Curve("gpu", "engine_active", "gpu_engine_active", "GPU engine active", "share"),
    Curve("gpu", "tensor_active", "gpu_tensor_active", "Tensor cores active", "share"),
    Curve("gpu", "dram_active", "gpu_dram_active", "GPU memory interface active", "share"),
    Curve("host", "memory_used_bytes", "host_memory_used", "Host memory in use", "bytes"),
    Curve("host", "rss_bytes", "process_memory", "Resident memory", "bytes"),
)
"""All curves, in the order in which they are drawn."""


def all_series(run: Run) -> list[Series]:
    """Return all telemetry curves with at least one value, on one time axis.

    The list is empty for a run without telemetry.
    """
    values = {
        source: [(reading.at_s, values_by_subject(reading, source)) for reading in readings(run, source)]
        for source in get_args(Source)
    }
    subjects = {
        source: dict.fromkeys(subject for _, by_subject in points for subject in by_subject)
        for source, points in values.items()
    }
    curves = []
    for curve in CURVES:
        for subject in subjects[curve.source]:
            subject_values = [(at_s, by_subject.get(subject, {})) for at_s, by_subject in values[curve.source]]
            is_live = any(number_in(reading, curve.live) is not None for _, reading in subject_values)
            figure = curve.live if is_live else curve.figure
            points = [(at_s, number_in(reading, figure)) for at_s, reading in subject_values]
            if any(y is not None for _, y in points):
                points = curve.convert(points)
            if any(y is not None for _, y in points):
                x_s, y = zip(*points, strict=True)
                curves.append(Series(curve.name, curve.title, curve.unit, subject, list(x_s), list(y)))
    return curves


COMPARED = ("prompt_tokens", "output_tokens", "requests_finished", "rejections")
"""Counters that both the server and the client have."""
DRAFT_COUNTERS = ("draft_steps", "draft_tokens", "accepted_draft_tokens")
SERVER_ONLY = ("cached_prompt_tokens", "preemptions", "requests_failed", *DRAFT_COUNTERS)
"""Counters that only the server has."""
AUDIO_OBSTACLE = "the server counts parts of recordings as requests, and audio in its own units"
"""Reason why the counters of a run with audio cannot be compared."""


def check_counters(run: Run, frame: Frame) -> dict[str, CounterCheck]:
    """Compare the growth of the server's counters over the run with the client's counts.

    Warm-up requests are included if the counters were read before the warm-up. The result is empty for a run without
    readings of the server. The result is also empty if Records were removed during the run.
    """
    all_readings = readings(run, "server")
    if not all_readings or run.removed:
        return {}
    valid = [reading for reading in all_readings if not reading.gap]
    first = next((reading for reading in valid if reading.moment in BEFORE), None)
    if first is not None:
        valid = [reading for reading in valid if reading.at_s >= first.at_s]
    counted = np.ones(len(frame), np.bool_) if first and first.moment == "idle" else frame.measured
    obstacle = AUDIO_OBSTACLE if frame.has_audio else _comparison_obstacle(run, all_readings, valid, first)
    canaries = counted_canaries(run)
    checks = {}
    for counter in (*COMPARED, *SERVER_ONLY):
        growth, resets = _growth(valid, counter)
        if growth is not None and (growth or counter not in DRAFT_COUNTERS):
            check = CounterCheck(server=round(growth), resets=resets)
            checks[counter] = check
            if counter in COMPARED:
                check.why = obstacle
                if not obstacle:
                    by_canaries = growth_by_canaries(canaries, counter)
                    _compare(check, counter, growth - by_canaries, frame, counted, run)
                    check.client = (check.client or 0) + by_canaries
                    if check.client_most is not None:
                        check.client_most += by_canaries
    if not checks.keys() & {"draft_tokens", "accepted_draft_tokens"}:  # TGI counts steps without drafts too
        checks.pop("draft_steps", None)
    return checks


def gauge_values(run: Run, name: str) -> list[float]:
    """Return the values of the server's gauge `name` in all readings during the run, except values of 0."""
    during = [reading for reading in readings(run, "server") if reading.moment in ("run", "end") and not reading.gap]
    return [value for value in _numbers(during, name) if value > 0]


PHASES = ("queue", "prefill", "decode", "inference")
"""Phases of a request whose durations servers publish as histograms. Inference is prefill and decode together."""


def abandoned_requests(run: Run, requests: int) -> AbandonedRequests | None:
    """Return what the server did with the requests that were abandoned on purpose, or None if there are none.

    `requests` is the number of abandoned requests.
    """
    if not requests:
        return None
    result = AbandonedRequests(requests=requests, cancel=str(run.header.plan.get("cancel") or ""))
    valid = [reading for reading in readings(run, "server") if not reading.gap]
    active = [
        (reading.at_s, (number_in(reading.values, "running") or 0) + (number_in(reading.values, "waiting") or 0))
        for reading in valid
        if reading.moment in AFTER and number_in(reading.values, "running") is not None
    ]
    if active:
        result.running_at_end, result.running_later = int(active[0][1]), int(active[-1][1])
        result.later_s = round(active[-1][0] - active[0][0], 3)
    stopped, resets = _growth(valid, "requests_failed") if valid else (None, 0)
    if stopped is not None and not resets:
        result.stopped = round(stopped)
    return result


def mean_phases(run: Run) -> dict[str, float]:
    """Return the mean duration in seconds of each phase of a request (such as `prefill`), from the server's metrics.

    The means cover the requests that the server finished after the reading at the start of the run. Without such a
    reading, they cover the requests after the first reading. The entry `requests` is the number of these requests. A
    phase is left out if the server does not publish its duration, or has reset it.
    """
    valid = [reading for reading in readings(run, "server") if not reading.gap]
    start = next((index for index, reading in enumerate(valid) if reading.moment == "start"), 0)
    means: dict[str, float] = {}
    for phase in PHASES:
        seconds, resets = _growth(valid[start:], f"{phase}_s_sum")
        requests, _ = _growth(valid[start:], f"{phase}_s_count")
        if seconds is not None and requests and not resets:
            means[phase] = seconds / requests
            means["requests"] = max(requests, means.get("requests", 0.0))
    return means


def _comparison_obstacle(
    run: Run, all_readings: Sequence[Reading], valid: Sequence[Reading], first: Reading | None
) -> str:
    """Return the reason why the server's counters cannot be compared with the client's counts.

    The result is an empty string if they can be compared. `all_readings` are the readings of the server, and `valid`
    contains those that succeeded. `first` is the reading from before the run, or None if there is no such reading.
    """
    gaps = [reading.gap for reading in all_readings if reading.gap] or ["none was taken"]
    if first is None:
        return f"there is no reading from before the run ({gaps[0]})"
    if run.footer is None or run.footer.interrupted:
        return "the run was interrupted"
    if not any(reading.moment in AFTER and not reading.gap for reading in all_readings):
        return f"there is no reading from after the run ({gaps[-1]})"
    # After a reset, a counter that exceeds its old value again would look as if it had only grown.
    resets = max(_growth(valid, counter)[1] for counter in COMPARED)
    return f"the server reset its counters {resets} time{'s' * (resets > 1)}" if resets else ""


def _growth(valid: Sequence[Reading], counter: str) -> tuple[float | None, int]:
    """Return the growth of a counter over the readings `valid`, and the number of its resets.

    The growth is None if no reading has the counter. A counter that is missing in the first reading starts at 0,
    because servers publish some counters only after their first event.

    If the readings contain the counters of several replicas, the growth is computed for each replica, and the sum is
    returned. Otherwise, the growth of one replica could hide the restart of another.
    """
    urls = dict.fromkeys(replica.get("url", "") for reading in valid for replica in reading.values.get("replicas", ()))
    if not urls:
        return _growth_of_values([number_in(reading.values, counter) for reading in valid])
    results = [_growth_of_values([_replica_number(reading, url, counter) for reading in valid]) for url in urls]
    known = [growth for growth, _ in results if growth is not None]
    return sum(known) if known else None, sum(resets for _, resets in results)


def _replica_number(reading: Reading, url: str, counter: str) -> float | None:
    """Return the value of `counter` for the replica at `url`, or None if `reading` does not contain this value."""
    replicas = [replica for replica in reading.values.get("replicas", ()) if replica.get("url") == url]
    return number_in(replicas[0], counter) if replicas else None


def _growth_of_values(values: Sequence[float | None]) -> tuple[float | None, int]:
    """Return the growth of a counter with these values, and the number of its resets. `_growth` defines both."""
    if all(value is None for value in values):
        return None, 0
    known = [values[0] or 0.0, *(value for value in values[1:] if value is not None)]
    _, growth = since_first([(0.0, value) for value in known])[-1]
    return growth, sum(now < before for before, now in pairwise(known))


def counted_canaries(run: Run) -> list[Canary]:
    """Return the canaries (test prompts of --verify) that are counted in the growth of the server's counters.

    The growth is the difference between the last and the first reading of the counters.

    - Canaries before the load are counted only if the first reading was taken before them.
    - Canaries during the load are always counted.
    - Canaries after the load are not counted, because the last reading is taken before they are sent.
    """
    if not run.canaries:
        return []
    first = next((reading for reading in readings(run, "server") if not reading.gap and reading.moment in BEFORE), None)
    moments = ("before", "during") if first and first.moment == "idle" else ("during",)
    return [canary for canary in run.canaries if canary.moment in moments]


def growth_by_canaries(asked: Sequence[Canary], counter: str) -> int:
    """Return how much the canaries `asked` have added to a counter of the server.

    A canary is a test prompt of --verify. Canaries are not part of the load, but the server counts them too.

    `counter` is the name of the counter, such as `prompt_tokens`. The result is 0 for counters of anything other than
    finished requests, rejections or tokens.
    """
    if counter == "requests_finished":
        return sum(canary.state == "complete" for canary in asked)
    if counter == "rejections":
        return sum(canary.state == "rejected" for canary in asked)
    if counter not in ("prompt_tokens", "output_tokens"):
        return 0
    return sum(getattr(canary, counter) or 0 for canary in asked)


def _compare(check: CounterCheck, counter: str, growth: float, frame: Frame, rows: Booleans, run: Run) -> None:
    """Compare the growth of a counter of the server with the client's count, and store the result in `check`.

    `counter` is the name of the counter, `growth` is its growth, and `rows` selects the requests to count. The client
    does not know what the server counted for an incomplete request. Its count is therefore a range: the minimum covers
    complete requests, and the maximum covers all sent requests. Rejected requests are excluded from both, because a
    server that rejects a request neither reads its prompt nor generates a response. Only the counter `rejections` is
    compared with the number of rejected requests.
    """
    rejected = rows & frame.ended_as("rejected")
    sent = rows & ~np.isnan(frame.sent_ns) & ~rejected
    complete = sent & frame.complete
    if counter == "rejections":
        minimum = maximum = int(rejected.sum())
    elif counter == "requests_finished":
        minimum, maximum = int(complete.sum()), int(sent.sum())
        if run.header.server_notes.get("counts_inputs"):
            minimum = int(np.where(np.isnan(frame.mark("inputs")), 1, frame.mark("inputs"))[complete].sum())
            maximum = minimum + int((sent & ~complete).sum()) * run.header.plan.get("batch_size", 1)
    elif counter == "prompt_tokens":
        minimum, maximum = sum_known(frame.prompt_tokens, complete), sum_known(frame.prompt_tokens, sent)
    else:
        minimum = sum_known(frame.output_tokens, complete)
        maximum = minimum + sum_known(np.fmax(frame.output_asked, frame.output_tokens), sent & ~complete)
    check.client = minimum
    unknown = int((sent & np.isnan(frame.prompt_tokens)).sum())
    if counter == "prompt_tokens" and unknown and growth > maximum:
        check.why = f"{pluralise(unknown, 'request')} with a prompt of unknown length did not complete"
        return
    check.client_most = None if maximum == minimum else maximum
    check.difference = round(growth - min(max(growth, minimum), maximum))
    check.agree = check.difference == 0
    check.why = _difference_cause(run, frame, counter, check.difference)


def _difference_cause(run: Run, frame: Frame, counter: str, difference: int) -> str:
    """Return the most likely cause of a difference between the server's and the client's count.

    The result is empty if there is no difference.
    """
    title, notes = run.header.server_title, run.header.server_notes
    if not difference:
        return ""
    if counter == "rejections" and difference < 0:
        return f"a proxy in front of {title} rejected the other requests, or {title} does not count all rejections"
    method = _counting_method(run, frame, counter)
    if method:
        return method
    if difference > 0:
        return "another client was using the server, or the server counts differently"
    names = [name for name in frame.replicas.names if name and name != NO_REPLICA] if frame.replicas else []
    if len(names) > 1 and not run.header.server.get("replicas"):
        return f"the counters are those of one of {len(names)} replicas; repeat --url to read all of them"
    lost = "the server had not counted everything yet, or it lost counts"
    return f"{title} drops counts under load" if notes.get("drops_counts") else lost


def _counting_method(run: Run, frame: Frame, counter: str) -> str:
    """Return a reason why the backend may count more than the client does, or "" if no reason is known.

    `counter` is the name of the counter, such as `requests_finished`. An example of a reason: the client sends several
    texts in one request and counts one request, but some backends count one request per text.
    """
    title, notes = run.header.server_title, run.header.server_notes
    piece, split = notes.get("prompt_piece_tokens"), notes.get("split_endpoint")
    if piece and np.nanmax(frame.output_asked, initial=0) > piece:
        return f"{title} runs responses of more than {piece} tokens in pieces and counts the prompt of each piece"
    several = run.header.plan.get("batch_size", 1) > 1 and bool(frame.ended_as("rejected").any())
    if several and counter == "rejections":
        return f"{title} may count a rejection for each input of a request"
    if several and counter == "prompt_tokens":
        return f"{title} may have computed some inputs of rejected requests"
    if split and counter == "requests_finished" and run.header.plan.get("endpoint") == split:
        return f"{title} may run each text of a request separately, and counts each text"
    return ""


Values = list[tuple[str, Mapping[str, Any]]]
"""Pairs of the moment and the values of each reading."""


def memory_use(run: Run) -> Memory | None:
    """Return the `memory` part of the summary, or None for a run without telemetry."""
    by_source = {source: readings(run, source) for source in get_args(Source)}
    facts = run.header.telemetry
    if not facts and not any(by_source.values()):
        return None
    gpus = {name: values for name, values in _by_subject(by_source["gpu"], "gpu").items() if name.startswith("GPU")}
    processes = _by_subject(by_source["host"], "host")
    host, host_facts = processes.pop("host", None), facts.get("host", {})
    gpu_facts = {f"GPU {gpu.get('index')}": gpu for gpu in facts.get("gpu", {}).get("gpus", ())}
    names = {f"process {process.get('pid')}": process.get("name", "") for process in host_facts.get("processes", ())}
    host_memory = None
    if host:
        levels = _levels("host", host, "memory_used_bytes")
        host_memory = HostMemoryLevels(total_bytes=host_facts.get("memory_total_bytes"), **levels)
    host_processes = [
        ProcessMemory(on="host", name=names.get(name, ""), **_levels(name, values, "rss_bytes"))
        for name, values in processes.items()
    ]
    gaps = {
        source: [reading.gap for reading in source_readings if reading.gap]
        for source, source_readings in by_source.items()
    }
    return Memory(
        gpus=[
            GpuMemory(
                name=gpu_facts.get(name, {}).get("name", ""),
                total_bytes=gpu_facts.get(name, {}).get("memory_total_bytes"),
                **_levels(name, values, "memory_used_bytes"),
            )
            for name, values in gpus.items()
        ],
        processes=[*_gpu_processes(gpus), *host_processes],
        host=host_memory,
        kv_cache=_kv_cache(run, by_source["server"]),
        taken_at_start=_reserved(run, by_source["server"]) if gpus else None,
        not_measured=dict(facts.get("not_measured", {})),
        gaps={source: dict(Counter(reasons).most_common()) for source, reasons in gaps.items() if reasons},
    )


def _by_subject(source_readings: Sequence[Reading], source: Source) -> dict[str, Values]:
    """Return the readings of a telemetry source, grouped by device or process.

    A group has one pair per reading: the phase of the run in which the reading was taken (such as `idle`), and the
    values.
    """
    subjects: dict[str, Values] = {}
    for reading in source_readings:
        for subject, values in values_by_subject(reading, source).items():
            subjects.setdefault(subject, []).append((reading.moment, values))
    return subjects


def _numbers(source_readings: Sequence[Reading], figure: str) -> list[float]:
    """Return the values of a figure in all readings that contain it."""
    figures = [number_in(reading.values, figure) for reading in source_readings]
    return [value for value in figures if value is not None]


def _levels(subject: str, moments: Values, figure: str) -> dict[str, Any]:
    """Return the fields of MemoryLevels for one device or process, whose name is `subject`.

    `moments` contains a pair for each reading: the moment of the run, such as `idle`, and the figures that were read.
    `figure` is the name of the figure that states the memory in use, such as `memory_used_bytes`.
    """
    sizes = [(moment, number_in(values, figure)) for moment, values in moments]
    known = [(moment, int(size)) for moment, size in sizes if size is not None]
    idle = [size for moment, size in known if moment == "idle"]
    loaded = [size for moment, size in known if moment in AFTER]
    return {
        "of": subject,
        "idle_bytes": idle[-1] if idle else None,
        "loaded_bytes": loaded[-1] if loaded else None,
        "peak_bytes": max((size for moment, size in known if moment != "idle"), default=None),
        "readings": len(known),
    }


def _gpu_processes(gpus: Mapping[str, Values]) -> Iterator[ProcessMemory]:
    """Yield the memory use of each process on each GPU.

    In a container, the driver often does not report processes, and there is nothing to yield.
    """
    processes: dict[tuple[str, str], Values] = {}
    for gpu, moments in gpus.items():
        for moment, values in moments:
            for process in values.get("processes", ()):
                processes.setdefault((f"process {process.get('pid')}", gpu), []).append((moment, process))
    for (name, gpu), moments in processes.items():
        yield ProcessMemory(on=gpu, name="", **_levels(name, moments, "memory_used_bytes"))


def _kv_cache(run: Run, source_readings: Sequence[Reading]) -> KvCache | None:
    """Return the `kv_cache` part of the summary, or None if the server does not report its KV cache."""
    if not _numbers(source_readings, "kv_used"):
        return None
    running = [reading for reading in source_readings if reading.moment == "run"]
    idle = _numbers([reading for reading in source_readings if reading.moment == "idle"], "kv_used")
    during = _numbers(running, "kv_used")
    fullest = _numbers(running, "kv_used_max")
    engines = _numbers(source_readings, "engines")
    sizes = _numbers(source_readings, "kv_tokens")
    limits = run.header.server.get("limits") or {}
    return KvCache(
        idle_share=round(idle[0], SHARE_DECIMALS) if idle else None,
        mean_share=round(sum(during) / len(during), SHARE_DECIMALS) if during else None,
        peak_share=round(max(during), SHARE_DECIMALS) if during else None,
        peak_fullest_share=round(max(fullest), SHARE_DECIMALS) if fullest else None,
        engines=int(max(engines)) if engines else 1,
        readings=len(during),
        tokens=int(sizes[-1]) if sizes else limits.get("max_total_token_num"),
    )


def _reserved(run: Run, source_readings: Sequence[Reading]) -> MemoryReserved | None:
    """Return the share of GPU memory that the engine reserves when it starts, with a note for the reader.

    The share comes from the last reading in `source_readings` that did not fail. If the server does not report the
    share, the share is None, and the note states what the backend reserves by default. Return None for a simulated
    server, and for a backend whose reservation is not known.
    """
    notes = run.header.server_notes
    if "memory_option" not in notes or run.header.server.get("simulated"):
        return None
    last = next((reading for reading in reversed(source_readings) if not reading.gap), None)
    share = number_in(last.values, "taken_share") if last else None
    amount = f"{share * 100:g}%" if share is not None else notes["memory_taken"]
    note = f"{run.header.server_title} reserves {amount} of each GPU's memory when it starts ({notes['memory_option']})"
    return MemoryReserved(share=share, note=note)


def machine_clock(run: Run, frame: Frame, facts: dict[str, Any]) -> MachineClock:
    """Return the clock of one machine in a distributed run (offset, drift and uncertainty), and its number of requests.

    The machine's clock was compared with the master's clock before the start of the run and again during the run. The
    telemetry of the source `clock` contains these comparisons:

    - The drift is the offset in the last comparison minus the offset in the first comparison.
    - The uncertainty is the largest uncertainty of a comparison.

    The offset of the clock comes from `facts`, which describes the machine in the run header. If the telemetry contains
    no comparison, the uncertainty also comes from `facts`, and the drift is 0.
    """
    samples = [
        sample.values
        for sample in run.telemetry
        if sample.source == "clock" and sample.values.get("workers") == facts["workers"]
    ] or [facts]
    own = frame.measured & np.isin(frame.worker, facts["workers"])
    return MachineClock(
        name=facts["name"],
        workers=facts["workers"],
        requests=int(own.sum()),
        complete=int((own & frame.complete).sum()),
        offset_s=facts["offset_ns"] / NS_PER_S,
        drift_s=(samples[-1]["offset_ns"] - samples[0]["offset_ns"]) / NS_PER_S,
        uncertainty_s=max(sample["uncertainty_ns"] for sample in samples) / NS_PER_S,
    )


def skew_range_s(machines: Sequence[MachineClock], frame: Frame) -> tuple[float, float]:
    """Return the smallest and the largest possible skew of a burst, in seconds.

    The skew is the time from the first byte to the last byte that `machines` sent. The clocks of two machines can only
    be compared with an uncertainty. If two machines sent these bytes, the uncertainty of the skew is the sum of both
    clocks' uncertainties. If one machine sent both bytes, the skew is exact. Machines that sent nothing are ignored.
    """
    sent = frame.sent & ~np.isnan(frame.sent_end_ns)
    spans = []
    for machine in machines:
        own = sent & np.isin(frame.worker, machine.workers)
        if own.any():
            spans.append(
                (machine.uncertainty_s, frame.sent_ns[own].min() / NS_PER_S, frame.sent_end_ns[own].max() / NS_PER_S)
            )
    minimum = maximum = 0.0
    for (index_a, a), (index_b, b) in product(enumerate(spans), repeat=2):
        uncertainty_a, begin_s, _ = a
        uncertainty_b, _, end_s = b
        skew_s = float(end_s - begin_s)
        uncertainty_s = 0.0 if index_a == index_b else uncertainty_a + uncertainty_b
        minimum = max(minimum, skew_s - uncertainty_s)
        maximum = max(maximum, skew_s + uncertainty_s)
    return round_to_ns(minimum), round_to_ns(maximum)
