"""Computes the result of a sweep: its steps, the capacity, and the cost and energy per token.

The Structs of this module define sweep.json. The functions read no files: callers pass the summaries of the steps and
the lines of sweep.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.analysis.format import knows_speed, simulated, speed_of
from loadgen.analysis.objectives import LATENCIES, REQUEST_LATENCIES, Objective
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import CONFIDENCE
from loadgen.analysis.summary import Summary
from loadgen.analysis.sweep.capacity_search import Capacity, LoadObservation, State
from loadgen.analysis.telemetry import number_in, readings
from loadgen.servers.backends import BACKENDS

FORMAT = 1
CARRIED_SHARE = 0.9
"""Share of the requested rate that a server must complete. A server that completes less is overloaded, and the
completed rate is about its maximum."""
WHOLE = "output_tokens_per_s"
RATE = "output_tokens_per_s_per_gpu"
INCONCLUSIVE = (0.05, 0.95)
"""A step is inconclusive if the probability of a violated objective is between these values."""


class SweepStep(msgspec.Struct, kw_only=True):
    """One step of a sweep: the run at one load."""

    step: int
    load: float
    """Load of the step: requests per second, or the number of concurrent requests."""
    folder: str
    """Folder of the run, relative to the folder of the sweep."""
    over: float
    """Probability that the server violates an objective at this load."""
    verdict: str
    """Result of the objectives: `met`, `inconclusive`, `not met`, or `overload` if the run was ended early. In a search
    without objectives, `met` means that the server keeps up with the load. Empty for a list of loads without
    objectives."""
    complete: int
    rejected: int = 0
    """Requests that were rejected because the server was too busy."""
    planned: int
    requests_per_s: float | None
    goodput_per_s: float | None
    """Rate of requests that individually met the objectives, per second. None if no objective applies to requests."""
    output_tokens_per_s: float | None
    output_tokens_per_s_per_gpu: float | None
    """None if the number of GPUs is unknown."""
    tokens_per_s_per_user: float | None
    """`1 / median TPOT`, in tokens/s."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    e2e_p50_s: float | None
    limit_tokens_per_s_per_gpu: float | None
    """Hardware limit of the throughput at the measured number of requests in flight. None if the limit is unknown."""
    limit_tokens_per_s_per_user: float | None
    """Hardware limit of `tokens_per_s_per_user` at the same number of requests in flight. None if it is unknown."""
    cost_per_million_tokens: float | None
    """Cost per million output tokens, from the price of a GPU hour. If the number of GPUs is unknown, the price is that
    of a server hour."""
    joules_per_token: float | None
    """Energy per output token, in J."""
    client: str
    """Verdict on the load generator: `ok` or `limited`."""
    client_reasons: list[str] = []
    """Reasons why the client was the limit."""


class SweepResult(msgspec.Struct, kw_only=True):
    """The contents of sweep.json."""

    format: int = FORMAT
    name: str
    """The server, its version and its hardware."""
    model: str | None
    workload: str = ""
    """Lengths of the requests, such as `512 input and 128 output tokens`. Empty if they are unknown."""
    mark: str
    """`SIMULATED` for a simulated server, else empty."""
    model_accuracy: str = ""
    """Accuracy of the simulated latencies in published measurements of this engine and GPU. Empty if the sweep is not
    in virtual time."""
    speed: float = 1.0
    """Clock speed of a simulated server, relative to real time; 1 for a real server. All figures are in the server's
    time. Cost and energy need real time, so they are only computed at speed 1."""
    over: str
    """The swept quantity: `rate` or `concurrency`."""
    objectives: list[str]
    """Empty if the sweep looks for the largest rate that the server keeps up with, or measures a list of loads."""
    fixed_loads: bool = False
    """True if the sweep measured a list of loads."""
    plan_load: float | None = None
    """Total load of the classes of traffic in the plan, in the unit of a step's `load`. None for a plan without
    classes."""
    state: State | None
    """State of the capacity search. None if a list of loads was measured without objectives."""
    capacity: float | None
    capacity_low: float | None
    capacity_high: float | None
    confidence: float
    ended: str
    """Why the sweep ended: `done`, `runs`, `time`, `client` or `interrupted`."""
    knee: int | None
    """Number of the step with the largest `requests/s / median E2E latency` (Kleinrock, 1979)."""
    gpus: int | None
    """Number of GPUs, from --gpus or the run; None if it is unknown."""
    gpu_hour_cost: float | None
    currency: str = ""
    """Currency of the costs: a sign such as `$` or a code such as `EUR`. Empty if the price did not name it."""
    power: str
    """Source of the power: `measured`, `of the data sheet`, or empty."""
    predicted: list[dict[str, float]]
    """Predictions of a twin (a simulated server fitted to a measured one): `load` and other SweepStep fields."""
    steps: list[SweepStep]
    version: str


class MeasuredStep(NamedTuple):
    """A step of a sweep with the summary of its run."""

    line: Mapping[str, Any]
    """The `end` line of the step in sweep.jsonl."""
    folder: str
    summary: Summary


def observations(lines: Iterable[Mapping[str, Any]]) -> list[LoadObservation]:
    """Convert the `end` lines of sweep.jsonl to observations for the capacity search.

    Each `end` line describes a finished step of the sweep.
    """
    return [LoadObservation(line["load"], line["over"], line.get("carried")) for line in lines]


def carried_rate(summary: Summary, load: float, *, overloaded: bool) -> float | None:
    """Return the throughput of an overloaded server in requests per second, or None if the server keeps up.

    The server is overloaded at `load` requests per second in two cases: the run was ended early (`overloaded`), or
    fewer than `CARRIED_SHARE * load` requests completed per second.

    The throughput is the rate of complete requests in `summary`. In a run that was ended early, this rate may be too
    low, because few requests are complete. For such a run, the rate is also estimated from the output tokens, and the
    larger of the two rates is the result. The estimate is

        output tokens per second * sent requests / requested output tokens
    """
    rate = summary.throughput.requests_per_s
    tokens_per_s = summary.throughput.output_tokens_per_s
    requested_tokens = summary.tokens.output_asked
    if overloaded and tokens_per_s and requested_tokens:
        rate = max(rate or 0.0, tokens_per_s * summary.requests.sent / requested_tokens)
    return rate if rate and (overloaded or rate < CARRIED_SHARE * load) else None


def request_bounds(objectives: Iterable[Objective]) -> list[Objective]:
    """Convert a run's latency objectives to bounds on each request: `ttft.p99 < 500ms` becomes `ttft < 500ms`."""
    bounds = {}
    for objective in objectives:
        if objective.figure in REQUEST_LATENCIES and objective.figure in LATENCIES:
            text = objective.text.replace(f"{objective.figure}.{objective.statistic}", objective.figure)
            bounds[objective.figure] = replace(objective, statistic="", text=text)
    return list(bounds.values())


def mean_power_w(run: Run) -> float | None:
    """Return the mean total power of all GPUs during a run, in W, or None if the power was not measured."""
    totals = []
    for reading in readings(run, "gpu"):
        if reading.moment == "run" and not reading.gap:
            powers = [number_in(gpu, "power_w") for gpu in reading.values.get("gpus", ())]
            known = [power for power in powers if power is not None]
            if powers and len(known) == len(powers):
                totals.append(fsum(known))
    return fmean(totals) if totals else None


def expected_point(summary: Summary, load: float) -> dict[str, float]:
    """Return the figures that a twin predicts at the load `load`, for the curves on the page of a sweep.

    A twin is a simulated server that was fitted to a measured server. `summary` is the summary of a simulation of the
    twin at this load. The result contains the load, and every predicted figure that has a value.
    """
    tpot_s = summary.latencies["tpot_s"].p50
    figures = {
        "tokens_per_s_per_user": 1 / tpot_s if tpot_s else None,
        "ttft_p50_s": summary.latencies["ttft_s"].p50,
        "output_tokens_per_s": summary.throughput.output_tokens_per_s,
        "requests_per_s": summary.throughput.requests_per_s,
    }
    return {"load": load, **{name: value for name, value in figures.items() if value is not None}}


def build_result(
    plan: Mapping[str, Any],
    measured: Sequence[MeasuredStep],
    capacity: Capacity | None,
    search: Mapping[str, Any],
    ended: str,
) -> SweepResult:
    """Return the contents of sweep.json.

    - `plan`: the plan in sweep.jsonl.
    - `measured`: the finished steps.
    - `capacity`: None if no step is finished, or if the sweep did not search for the capacity because it has fixed
      loads and no objectives.
    - `search`: the last `search` line of sweep.jsonl, or empty if there is none.
    - `ended`: the reason why the sweep ended.
    """
    last = measured[-1].summary if measured else None
    limit = None if last is None else last.limit
    gpus = search.get("gpus") or (limit.gpus if limit else None)
    prices = _Prices(gpus, search.get("hour"), _data_sheet_power_w(limit.gpu, gpus) if limit and gpus else None)
    objectives = list(plan.get("objectives") or ())
    fixed_loads = bool(plan.get("loads"))
    judged = bool(objectives) or not fixed_loads
    steps = sorted((_step(step, prices, judged=judged) for step in measured), key=lambda step: step.load)
    efficiency = {
        step.step: step.requests_per_s / step.e2e_p50_s
        for step in steps
        if step.requests_per_s and step.e2e_p50_s and step.verdict != "overload"
    }
    power = ""
    if any(step.line.get("power_w") for step in measured):
        power = "measured"
    elif prices.data_sheet_power_w:
        power = "of the data sheet"
    predicted = []
    for point in sorted((search.get("foreseen") or {}).get("points", ()), key=lambda point: point["load"]):
        per_gpu = {RATE: point[WHOLE] / gpus} if gpus else {}
        predicted.append({**point, **per_gpu})
    return SweepResult(
        name="" if last is None else _configuration_name(last, gpus),
        mark="" if last is None else simulated(last),
        model_accuracy="" if last is None else last.server.model_accuracy,
        speed=1.0 if last is None else speed_of(last),
        model=None if last is None else last.server.model,
        workload="" if last is None else _lengths_text(last, plan.get("run", {}).get("traffic") or ()),
        over=plan["over"],
        objectives=objectives,
        fixed_loads=fixed_loads,
        plan_load=search.get("plan_load"),
        state=None if capacity is None else capacity.state,
        capacity=None if capacity is None else capacity.capacity,
        capacity_low=None if capacity is None else capacity.low,
        capacity_high=None if capacity is None else capacity.high,
        confidence=search.get("confidence", CONFIDENCE),
        ended=ended,
        knee=max(efficiency, key=lambda step: efficiency[step]) if len(efficiency) > 1 else None,
        gpus=gpus,
        gpu_hour_cost=prices.gpu_hour_cost,
        currency=search.get("currency") or "",
        power=power,
        predicted=predicted,
        steps=steps,
        version="" if last is None else last.run.version,
    )


def best_step(sweep: SweepResult) -> SweepStep | None:
    """Return the step with the largest load at which the server probably met the objectives, or None if there is no
    such step.

    The server probably met them if the probability of a violation is at most 50%. Steps that were overloaded, or whose
    load is above the measured capacity, are ignored.
    """
    capacity = float("inf") if sweep.capacity is None else sweep.capacity
    candidates = [
        step for step in sweep.steps if step.over <= 0.5 and step.load <= capacity and step.verdict != "overload"
    ]
    return max(candidates, key=lambda step: step.load, default=None)


def throughput_field(sweeps: Iterable[SweepResult]) -> str:
    """Return the SweepStep field with which to compare the throughput of these sweeps.

    The field is tokens/s per GPU. If the number of GPUs is unknown for a sweep, the field is tokens/s of the whole
    server."""
    return RATE if all(sweep.gpus for sweep in sweeps) else WHOLE


def _configuration_name(summary: Summary, gpus: int | None) -> str:
    """Return the server, its version and its hardware, such as `vLLM 0.32.0 on 2 x H100 SXM`.

    `summary.server.platform` is left out if it ends with the name of the GPU, so that the GPU is not named twice.
    """
    server, limit = summary.server, summary.limit
    title = BACKENDS[server.name].title if server.name in BACKENDS else server.name
    name = " ".join(str(part) for part in (title, server.version) if part)
    hardware = f"{gpus} x {limit.gpu}" if limit else ""
    repeated = limit is not None and server.platform.endswith(limit.gpu)
    places = [place for place in ("" if repeated else server.platform, hardware) if place]
    return f"{name} on {', '.join(places)}" if places else name


def _lengths_text(summary: Summary, traffic: Sequence[Mapping[str, Any]]) -> str:
    """Return the requested lengths of a run's requests, such as `512 input and 128 output tokens`.

    `traffic` contains the `[[traffic]]` tables of the plan. If there are any, the result names the classes of traffic
    instead. The result is empty if a length is unknown.
    """
    run = summary.run
    if traffic:
        return f"classes {', '.join(table['name'] for table in traffic)}"
    if run.input_tokens is None or run.output_tokens is None:
        return ""
    return f"{run.input_tokens} input and {run.output_tokens} output tokens"


class _Prices(NamedTuple):
    """Values from which the cost and the energy per token are computed. None means unknown."""

    gpus: int | None
    gpu_hour_cost: float | None
    data_sheet_power_w: float | None


def _data_sheet_power_w(name: str, gpus: int) -> float | None:
    """Return the power in W of `gpus` GPUs according to their data sheet, or None if it is unknown.

    `name` is the model of the GPUs, such as `H100`.
    """
    from loadgen.servers.hardware import HardwareError, gpu

    try:
        return gpus * gpu(name).watts or None
    except HardwareError:  # The user defined the GPU in a file.
        return None


def verdict_of(over: float) -> str:
    """Return the verdict on a load: `met`, `inconclusive` or `not met`.

    `over` is the probability that the server violates an objective at this load.
    """
    low, high = INCONCLUSIVE
    if over < low:
        return "met"
    return "not met" if over > high else "inconclusive"


def _step(measured: MeasuredStep, prices: _Prices, *, judged: bool) -> SweepStep:
    line, folder, summary = measured
    rate, limit = summary.throughput.output_tokens_per_s, summary.limit
    gpus = prices.gpus
    tpot, ttft = summary.latencies["tpot_s"], summary.latencies["ttft_s"]
    cost = joules = None
    if rate and speed_of(summary) == 1 and knows_speed(summary):  # Cost and energy refer to real time.
        if prices.gpu_hour_cost:
            cost = (gpus or 1) * prices.gpu_hour_cost / rate / 3600 * 1e6
        power_w = line.get("power_w") or prices.data_sheet_power_w
        if power_w:
            joules = power_w / rate
    return SweepStep(
        step=line["step"],
        load=line["load"],
        folder=folder,
        over=round(line["over"], 4),
        verdict=line["stopped"] or (verdict_of(line["over"]) if judged else ""),
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
        cost_per_million_tokens=cost,
        joules_per_token=joules,
        client=summary.client.verdict,
        client_reasons=summary.client.reasons,
    )
