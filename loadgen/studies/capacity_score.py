"""Judges a configuration without a simulation, by the physical limit of its hardware and by a formula.

- The physical limit (`Limit`) is the best performance that the data sheet allows. If this performance misses an
  objective, the configuration can never meet it, and no replica can serve a higher rate than its limit.
- The formula (`LoadCurve`) predicts mean latencies and throughput by the number of requests in flight. It ranks the
  configurations, so that the simulation begins with the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.analysis.objectives import Objective
from loadgen.plan import Plan
from loadgen.servers.hardware import constant
from loadgen.servers.hardware.disaggregation import transfer_s
from loadgen.servers.hardware.inference import Deployment, lower_bounds_s, predict_step
from loadgen.servers.hardware.throughput_model import Load, formula_times, limit_times
from loadgen.servers.simulated.scheduler import Policy
from loadgen.servers.simulated.step_time import LinearStepTime
from loadgen.studies.simulate import ResolvedModel, ServerModel, run_in_memory

IN_FLIGHT: Any = np.unique(np.round(2.0 ** np.arange(0, 10.25, 0.5)))
"""Numbers of requests in flight for which the formula is evaluated: 1 to 1024."""
BUSY_SHARE = 0.85
MIN_BUSY_SHARE = 0.1
"""Largest and smallest share of the time for which prefill workers are busy. Above the largest share, queues become
long. A lower share is used if the objectives allow only a short wait."""
PILOT_REQUESTS = 300
"""Number of requests or sessions from which the mean lengths of the load are computed."""
PILOT_KV_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The lengths of the requests of a load.

    Prompt tokens that the server takes from its prefix cache do not count, because it need not compute them.
    """

    prompt_tokens: int
    """Mean number of prompt tokens that are computed."""
    output_tokens: int
    """Mean number of output tokens."""
    per_arrival: float
    """Requests per arrival: 1, or the mean number of turns of a session."""
    prompts: Any
    """Prompt tokens of each request. All are 1 if the prefix cache saves some, as it is unknown which."""
    outputs: Any
    """Output tokens of each request."""


def request_facts(plan: Plan) -> RequestFacts:
    """Return the lengths of the requests of `plan`.

    The lengths come from a simulation of PILOT_REQUESTS arrivals. The simulated server has fixed step times and a
    prefix cache that is never full.
    """
    policy = Policy(
        running_limit=4096, step_tokens=1 << 20, prefill="mixed", block_size=16, prefix_cache=True, memory_fraction=0.9
    )
    resolved = ResolvedModel(
        policy=policy,
        kv_tokens=PILOT_KV_TOKENS,
        step_time=LinearStepTime(0.001, 0.0, 0.0, 0.0),
        request_s=0.0,
        path_s=0.0,
        version="",
        model="",
        hardware={},
    )
    pilot = plan.replaced(arrivals="poisson:1", n=PILOT_REQUESTS)
    run = run_in_memory(pilot, ServerModel(), resolved=resolved)
    records = [record for record in run.records if record.state == "complete"]
    prompts = np.array([record.prompt_tokens or 1 for record in records] or [1])
    outputs = np.array([record.output_tokens or 1 for record in records] or [1])
    samples = [sample.values for sample in run.telemetry if sample.source == "server"]
    cached = float(samples[-1].get("cached_prompt_tokens") or 0) if samples else 0.0
    computed = max(1, round(float(prompts.mean() * (1 - cached / prompts.sum()))))
    if cached:
        prompts = np.ones_like(prompts)
    per_arrival = max(1, len(records)) / PILOT_REQUESTS
    return RequestFacts(computed, max(1, round(float(outputs.mean()))), per_arrival, prompts, outputs)


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit that the data sheet sets for one replica, or for one prefill worker and one decode worker.

    No server can be faster than this limit.
    """

    missed: str
    """The objective that a single request misses even at the limit; empty if it meets all."""
    per_s: float
    """Maximum requests per second of one replica, or of one decode worker."""
    prefill_per_s: float | None = None
    """Maximum requests per second of one prefill worker. None without separate workers."""

    def min_replicas(self, rate_per_s: float) -> tuple[int, int]:
        """Return the minimum numbers of replicas and of prefill workers that can serve `rate_per_s` requests per
        second.

        The number of prefill workers is 0 unless prefill and decode have separate workers. With separate workers, the
        first number is the number of decode workers.
        """
        prefill = 0 if self.prefill_per_s is None else math.ceil(rate_per_s / self.prefill_per_s)
        return max(1, math.ceil(rate_per_s / self.per_s)), prefill


def physical_limit(
    deployment: Deployment, kv_tokens: int, facts: RequestFacts, objectives: Sequence[Objective], *, separate: bool
) -> Limit:
    """Return the best performance that the data sheet allows for one replica of a deployment.

    `kv_tokens` is the size of the KV cache. `separate` is True if prefill and decode have separate workers. An
    objective counts as missed if even a request that is alone on the server would miss it, because other requests can
    only slow this request down.
    """
    decode_s = _slowest(lower_bounds_s(deployment, 0, 0, 1, float(facts.prompts.min())))
    missed = ""
    for objective in objectives:
        bound_s = _lower_bound_s(objective, deployment, facts, decode_s)
        if not missed and not objective.satisfied_by(bound_s):
            missed = objective.text
    prompt, output = facts.prompt_tokens, facts.output_tokens
    computed, _ = deployment.prompt_parts(prompt)
    most = max(1.0, kv_tokens / (prompt + output / 2))
    batches = np.append(IN_FLIGHT[most > IN_FLIGHT], most)
    context = prompt + output / 2
    decode = _slowest(lower_bounds_s(deployment, 0, 0, batches, context))
    prefill_per_s = None
    if separate:
        prefill_per_s = float(64 / _slowest(lower_bounds_s(deployment, 64, computed, 0, 0)))
        per_s = batches / (max(1, output - 1) * decode)
    else:
        mixed = _slowest(lower_bounds_s(deployment, batches / output, computed, batches, context))
        per_s = batches / (output * mixed)
    allowed = len(batches)
    for objective in objectives:
        if objective.figure == "tpot":
            # With the next larger batch, as the largest batch that meets the objective lies between two batches.
            allowed = min(allowed, 1 + sum(objective.satisfied_by(float(value)) for value in decode))
    return Limit(missed, float(per_s[:allowed].max()), prefill_per_s)


def _lower_bound_s(objective: Objective, deployment: Deployment, facts: RequestFacts, decode_s: float) -> float:
    """Return the smallest possible value of the latency that `objective` limits, in seconds.

    No request can be faster on this hardware, even if it is the only request on the server. `facts` contains the
    lengths of the requests, and `decode_s` is the minimum time per output token. Return 0 if no minimum is known for
    this latency.
    """
    if objective.figure in ("ttft", "ttft_due"):
        prompt, _ = deployment.prompt_parts(int(_length(objective, facts.prompts)))
        return float(_slowest(lower_bounds_s(deployment, 1, prompt, 0, 0)))
    if objective.figure == "tpot":
        return decode_s
    if objective.figure in ("e2e", "e2e_due"):
        return decode_s * (_length(objective, facts.outputs) - 1)
    return 0.0


def _length(objective: Objective, lengths: Any) -> float:
    """Return the statistic of `lengths` that `objective` names, such as the mean or the p99, in tokens."""
    if objective.percentile is not None:
        return float(np.quantile(lengths, objective.percentile, method="lower"))
    return float(getattr(lengths, objective.statistic)())


def _slowest(bounds: dict[str, Any]) -> Any:
    return np.maximum(np.maximum(bounds["compute"], bounds["memory"]), bounds["network"])


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Predicted mean latencies and rates of one replica, or of one decode worker, as functions of the requests in
    flight.

    `in_flight` is an array of numbers of requests in flight. The other arrays have one value for each of these numbers.
    """

    in_flight: Any
    ttft_s: Any
    tpot_s: Any
    per_s: Any
    """Requests per second."""
    prefill_workers: Any
    """Prefill workers per decode worker; zeros without separate workers."""
    output_tokens: int
    prefill_per_s: float | None = None
    """Requests per second of one prefill worker that is busy for the allowed share of the time."""

    def highest_per_s(self, objectives: Sequence[Objective], slack: float = 1.0) -> float | None:
        """Return the highest rate on this curve at which the mean latencies meet the bounds of all objectives.

        The bounds are multiplied by `slack` first, for example 1.1 to allow latencies that are 10% longer. The rate is
        interpolated between the points of the curve. Return None if even the first point of the curve, a single
        request, misses a bound.
        """
        excess = np.zeros(len(self.in_flight))
        for objective in objectives:
            values = self._means(objective.figure)
            if values is not None:
                excess = np.maximum(excess, values / (objective.bound * slack))
        meets = excess <= 1
        if not meets[0]:
            return None
        last = len(meets) - 1 if meets.all() else int(np.argmin(meets)) - 1
        best = float(self.per_s[: last + 1].max())
        if last + 1 < len(meets) and math.isfinite(excess[last + 1]):
            share = (1 - excess[last]) / (excess[last + 1] - excess[last])
            best = max(best, float(self.per_s[last] + share * (self.per_s[last + 1] - self.per_s[last])))
        return best

    def _means(self, figure: str) -> Any:
        """Return the predicted mean of a latency, such as `ttft`, for each point of the curve.

        Return None if no formula predicts this latency.
        """
        steps = max(0, self.output_tokens - 1)
        if figure in ("ttft", "ttft_due"):
            return self.ttft_s
        if figure in ("tpot", "itl", "icl"):
            return self.tpot_s
        if figure in ("e2e", "e2e_due"):
            return self.ttft_s + steps * self.tpot_s
        if figure == "normalised":
            return (self.ttft_s + steps * self.tpot_s) / self.output_tokens
        return None


def formula_curve(
    deployment: Deployment,
    facts: RequestFacts,
    policy: Policy,
    *,
    separate: bool,
    objectives: Sequence[Objective] = (),
) -> LoadCurve:
    """Return the predicted mean latencies and rates of a deployment as a load curve.

    The points of the curve are different numbers of requests in flight. `facts` describes the requests, and `policy`
    contains the limits of the engine.

    `separate` is True if prefill and decode have separate workers. The `objectives` are used only in this case. They
    limit how busy the prefill workers may be, because prompts wait longer for busy workers.
    """
    in_flight = IN_FLIGHT[policy.running_limit >= IN_FLIGHT]
    load = Load(facts.prompt_tokens, facts.output_tokens, in_flight)
    if separate:
        return _separate_curve(deployment, load, policy.memory_fraction, objectives)
    times = formula_times(deployment, load, policy.memory_fraction)
    per_s = times.output_tokens_per_s / facts.output_tokens
    return LoadCurve(in_flight, times.ttft_s, times.tpot_s, per_s, np.zeros(len(in_flight)), facts.output_tokens)


def _separate_curve(
    deployment: Deployment, load: Load, memory_fraction: float, objectives: Sequence[Objective]
) -> LoadCurve:
    """Return the load curve of one decode worker, together with the prefill workers that it needs.

    The curve contains mean latencies and rates. It has one point for each number of decoding requests in
    `load.in_flight`.

    Prompts wait in a queue for a prefill worker. The mean wait is that of an M/D/1 queue (constant service times). It
    grows with the share of the time for which the prefill workers are busy. This share is assumed to be as large as the
    objectives permit, but at least MIN_BUSY_SHARE and at most BUSY_SHARE.
    """
    prompt, output = load.prompt_tokens, load.output_tokens
    limit = limit_times(deployment, load, memory_fraction)
    running = np.minimum(load.in_flight, limit.running)
    context = prompt + output / 2
    tpot_s = np.maximum(predict_step(deployment, decoding=running, context=context).total, limit.tpot_s)
    computed, cached = deployment.prompt_parts(prompt)
    group = max(deployment.attention_data, int(deployment.framework.chunk_tokens // computed), 1)
    group_s = float(predict_step(deployment, group, computed, before=cached).total)
    alone_s = float(predict_step(deployment, 1, computed, before=cached).total)
    idle_ttft_s = deployment.framework.server_s + transfer_s(deployment, prompt) + alone_s
    allowed_s = _allowed_ttft_s(objectives, output, float(tpot_s[0])) - idle_ttft_s
    busy = BUSY_SHARE
    if math.isfinite(allowed_s):
        # The mean wait of M/D/1 is busy / (2 * (1 - busy)) * alone_s. This is its inverse.
        busy = min(BUSY_SHARE, max(MIN_BUSY_SHARE, 2 * allowed_s / max(1e-9, alone_s + 2 * allowed_s)))
    prefill_per_s = busy * group / group_s
    wait_s = busy / (2 * (1 - busy)) * alone_s
    ttft_s = idle_ttft_s + wait_s
    per_s = running / (max(1, output - 1) * tpot_s)
    return LoadCurve(
        load.in_flight,
        np.full(len(running), ttft_s),
        tpot_s,
        per_s,
        per_s / prefill_per_s,
        output,
        prefill_per_s,
    )


def _allowed_ttft_s(objectives: Sequence[Objective], output_tokens: int, tpot_s: float) -> float:
    """Return the longest TTFT with which a request of `output_tokens` output tokens still meets the objectives.

    `tpot_s` is the time per output token. The longer it is, the less time an objective on the E2E latency leaves for
    the TTFT. The result is infinite if no objective limits the TTFT.
    """
    decode_s = max(0, output_tokens - 1) * tpot_s
    allowed_s = math.inf
    for objective in objectives:
        if objective.figure in ("ttft", "ttft_due"):
            allowed_s = min(allowed_s, objective.bound)
        elif objective.figure in ("e2e", "e2e_due"):
            allowed_s = min(allowed_s, objective.bound - decode_s)
        elif objective.figure == "normalised":
            allowed_s = min(allowed_s, objective.bound * output_tokens - decode_s)
    return allowed_s


def formula_slack() -> float:
    """Return the factor by which the bounds of objectives are multiplied before a formula is used to exclude
    configurations.

    The predictions of a formula have errors. Without this factor, a typical error could exclude a configuration that
    meets the objectives.
    """
    return 1 + constant("step_error")
