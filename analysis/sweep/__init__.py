"""A sweep in figures: its steps, the capacity that they show, and what a token costs there. The Structs are sweep.json.

Pure functions of the steps' summaries and of what sweep.jsonl says beside them; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.analysis.format import knows_speed, server_label, simulated, speed_of
from loadgen.analysis.objectives import LATENCIES, REQUEST_LATENCIES, Objective
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import CONFIDENCE
from loadgen.analysis.summary import Summary
from loadgen.analysis.sweep.capacity_search import Capacity, LoadObservation, State
from loadgen.analysis.telemetry import number_in, readings

FORMAT = 1
CARRIED_SHARE = 0.9
"""Of a rate: a server that returns less does not keep up, and returns what it can."""
WHOLE, RATE = "output_tokens_per_s", "output_tokens_per_s_per_gpu"
UNSURE = (0.05, 0.95)
"""Between these chances a step tells little."""


class SweepStep(msgspec.Struct, kw_only=True):
    """One load."""

    step: int
    load: float
    """Requests per second, or requests at a time."""
    folder: str
    """Of its run, below the sweep's."""
    over: float
    """The chance that the server breaks an objective at this load."""
    verdict: str
    """Of the objectives: `met`, `inconclusive`, `not met`, or `overload` where the run was ended early."""
    complete: int
    rejected: int = 0
    """Requests that the server was too busy to take."""
    planned: int
    requests_per_s: float | None
    goodput_per_s: float | None
    """Requests that kept the objectives, each by itself, per second; None without such objectives."""
    output_tokens_per_s: float | None
    output_tokens_per_s_per_gpu: float | None
    """None where nobody says how many GPUs there are."""
    tokens_per_s_per_user: float | None
    """1 / median TPOT."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    e2e_p50_s: float | None
    limit_tokens_per_s_per_gpu: float | None
    """What the hardware allows with so many in flight, where it is known; so the next."""
    limit_tokens_per_s_per_user: float | None
    cost_per_million_tokens: float | None
    """Of output, at the price of a GPU hour that was named; of an hour of the server, where its GPUs are not known."""
    joules_per_token: float | None
    """Of output."""
    client: str


class SweepResult(msgspec.Struct, kw_only=True):
    """sweep.json."""

    format: int = FORMAT
    name: str
    """The server, its version and what it runs on."""
    model: str | None
    mark: str
    """SIMULATED, where it was."""
    speed: float = 1.0
    """How many times faster than real time the clock of a simulated server ran. All figures are of that speed, and cost
    and energy, which are of real time, are only given where it is 1."""
    over: str
    """`rate` or `concurrency`."""
    objectives: list[str]
    state: State | None
    """None for a list of loads without objectives."""
    capacity: float | None
    capacity_low: float | None
    capacity_high: float | None
    confidence: float
    ended: str
    """Why: `done`, `runs`, `time`, `client` or `interrupted`."""
    knee: int | None
    """The step with the most throughput for its latency: requests/s / median E2E is largest (Kleinrock, 1979)."""
    gpus: int | None
    """None where neither --gpus nor the run says how many."""
    gpu_hour_cost: float | None
    power: str
    """Where the watts are from: `measured`, `of the data sheet`, or empty."""
    predicted: list[dict[str, float]]
    """What a twin expects: by `load` the fields of a step."""
    steps: list[SweepStep]
    version: str


class MeasuredStep(NamedTuple):
    """A step as it was read."""

    line: Mapping[str, Any]
    """Its end in sweep.jsonl."""
    folder: str
    summary: Summary


def observations(lines: Iterable[Mapping[str, Any]]) -> list[LoadObservation]:
    """Of the steps that ended."""
    return [LoadObservation(line["load"], line["over"], line.get("carried")) for line in lines]


def carried_rate(summary: Summary, load: float, *, overloaded: bool) -> float | None:
    """Requests per second of a server that clearly does not keep up with a rate. Of a run that was ended early by its
    tokens: few requests were complete by then."""
    rate, tokens, requested = summary.throughput.requests_per_s, summary.throughput.output_tokens_per_s, summary.tokens
    if overloaded and tokens and requested.output_asked:
        rate = max(rate or 0.0, tokens * summary.requests.sent / requested.output_asked)
    return rate if rate and (overloaded or rate < CARRIED_SHARE * load) else None


def request_bounds(objectives: Iterable[Objective]) -> list[Objective]:
    """What makes a single request good, by objectives of a run: `ttft.p99 < 500ms` is `ttft < 500ms` of each."""
    results = {}
    for objective in objectives:
        if objective.figure in REQUEST_LATENCIES and objective.figure in LATENCIES:
            text = objective.text.replace(f"{objective.figure}.{objective.statistic}", objective.figure)
            results[objective.figure] = replace(objective, statistic="", text=text)
    return list(results.values())


def mean_power_w(run: Run) -> float | None:
    """The mean power of all GPUs together during a run; None where nobody read it."""
    read = [
        sample.values.get("gpus", ()) for sample in readings(run, "gpu") if sample.moment == "run" and not sample.gap
    ]
    powers = [[number_in(gpu, "power_w") for gpu in gpus] for gpus in read]
    totals = [fsum(each for each in known if each is not None) for known in powers if known and None not in known]
    return fmean(totals) if totals else None


def expected_point(summary: Summary, load: float) -> dict[str, float]:
    """What a twin's simulation says of a load, as far as it is drawn."""
    tpot, ttft = summary.latencies["tpot_s"].p50, summary.latencies["ttft_s"].p50
    results = {"tokens_per_s_per_user": 1 / tpot if tpot else None, "ttft_p50_s": ttft}
    results |= {name: getattr(summary.throughput, name) for name in ("output_tokens_per_s", "requests_per_s")}
    return {"load": load, **{name: value for name, value in results.items() if value is not None}}


def build_result(
    plan: Mapping[str, Any],
    measured: Sequence[MeasuredStep],
    found: Capacity | None,
    search: Mapping[str, Any],
    ended: str,
) -> SweepResult:
    """All that is known of a sweep: `plan` and `search` are those of sweep.jsonl."""
    last = measured[-1].summary if measured else None
    limit = None if last is None else last.limit
    gpus, hour = search.get("gpus") or (limit.gpus if limit else None), search.get("hour")
    sheet = _data_sheet(limit.gpu, gpus) if limit and gpus else None
    steps = sorted((_step(each, gpus, hour, sheet) for each in measured), key=lambda step: step.load)
    powers = {
        step.step: step.requests_per_s / step.e2e_p50_s
        for step in steps
        if step.requests_per_s and step.e2e_p50_s and step.verdict != "overload"
    }
    read = any(each.line.get("power_w") for each in measured)
    return SweepResult(
        name="" if last is None else server_label(last) + (f", {gpus} x {limit.gpu}" if limit else ""),
        mark="" if last is None else simulated(last),
        speed=1.0 if last is None else speed_of(last),
        model=None if last is None else last.server.model,
        over=plan["over"],
        objectives=list(plan.get("objectives") or ()),
        state=None if found is None else found.state,
        capacity=None if found is None else found.capacity,
        capacity_low=None if found is None else found.low,
        capacity_high=None if found is None else found.high,
        confidence=search.get("confidence", CONFIDENCE),
        ended=ended,
        knee=max(powers, key=lambda step: powers[step]) if len(powers) > 1 else None,
        gpus=gpus,
        gpu_hour_cost=hour,
        power="measured" if read else "of the data sheet" if sheet else "",
        predicted=[
            {**point, **({RATE: point[WHOLE] / gpus} if gpus else {})}
            for point in sorted((search.get("foreseen") or {}).get("points", ()), key=lambda point: point["load"])
        ],
        steps=steps,
        version="" if last is None else last.run.version,
    )


def best_step(found: SweepResult) -> SweepStep | None:
    """The step at the largest load that kept the objectives: what the server can be relied on for."""
    maximum = float("inf") if found.capacity is None else found.capacity
    retained = [
        step for step in found.steps if step.over <= 0.5 and step.load <= maximum and step.verdict != "overload"
    ]
    return max(retained, key=lambda step: step.load, default=None)


def throughput_field(sweeps: Iterable[SweepResult]) -> str:
    """What is compared: tokens/s per GPU; of whole servers, where of one nobody knows how many it has."""
    return RATE if all(sweep.gpus for sweep in sweeps) else WHOLE


def pareto_front(steps: Sequence[SweepStep], x: str, rate: str = RATE, *, less: bool = False) -> list[SweepStep]:
    """The steps of which no other has both a higher `rate` and a better `x`, in order of it."""
    known = [step for step in steps if getattr(step, x) is not None and getattr(step, rate)]
    known.sort(key=lambda each: (getattr(each, x) * (1 if less else -1), -getattr(each, rate)))
    retained: list[SweepStep] = []
    for each in known:
        if not retained or getattr(each, rate) > getattr(retained[-1], rate):
            retained.append(each)
    return retained


def _data_sheet(name: str, gpus: int) -> float | None:
    from loadgen.servers.hardware import HardwareError, gpu

    try:
        return gpus * gpu(name).watts or None
    except HardwareError:  # of a file of the user's own
        return None


def _step(measured: MeasuredStep, gpus: int | None, hour: float | None, sheet: float | None) -> SweepStep:
    line, folder, summary = measured
    rate, tpot, limit = summary.throughput.output_tokens_per_s, summary.latencies["tpot_s"], summary.limit
    ttft, power = summary.latencies["ttft_s"], line.get("power_w") or sheet
    low, high = UNSURE
    verdict = "met" if line["over"] < low else "not met" if line["over"] > high else "inconclusive"
    priced = rate and speed_of(summary) == 1 and knows_speed(summary)  # costs are of real time
    return SweepStep(
        step=line["step"],
        load=line["load"],
        folder=folder,
        over=round(line["over"], 4),
        verdict=line["stopped"] or verdict,
        complete=summary.requests.complete,
        rejected=summary.requests.rejected,
        planned=summary.requests.planned,
        requests_per_s=summary.throughput.requests_per_s,
        goodput_per_s=None if summary.goodput is None else summary.goodput.per_s,
        output_tokens_per_s=rate,
        output_tokens_per_s_per_gpu=rate / gpus if rate is not None and gpus else None,
        tokens_per_s_per_user=1 / tpot.p50 if tpot.p50 else None,
        ttft_p50_s=ttft.p50,
        ttft_p99_s=ttft.p99,
        tpot_p50_s=tpot.p50,
        tpot_p99_s=tpot.p99,
        e2e_p50_s=summary.latencies["e2e_s"].p50,
        limit_tokens_per_s_per_gpu=None if limit is None else limit.output_tokens_per_s / limit.gpus,
        limit_tokens_per_s_per_user=None if limit is None or not limit.tpot_s else 1 / limit.tpot_s,
        cost_per_million_tokens=(gpus or 1) * hour / rate / 3600 * 1e6 if hour and rate and priced else None,
        joules_per_token=power / rate if power and rate and priced else None,
        client=summary.client.verdict,
    )
