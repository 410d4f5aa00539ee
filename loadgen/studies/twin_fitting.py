"""Fits a twin to measured runs. A twin is a simulated server with the latencies of a measured one.

    Run ─ observe_run ─> ObservedRun ─┐  start values: from the hardware model, or from a linear fit of decoding times
    Run ─ observe_run ─> ObservedRun ─┴─> solve: least squares on replays, with a prior ─> bootstrap draws.

A replay simulates each request at its measured send time, so a closed loop needs no model of its clients. The residuals
are `log(simulated / measured)` of TTFT, TPOT and E2E latency. Every run has the same weight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from importlib.metadata import version
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Header, Run
from loadgen.analysis.run.token_counts import streamed_tokens
from loadgen.errors import PlanError
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.simulated.discrete_event import FOREVER_NS, FrontEnd, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import Engine, find_engine
from loadgen.servers.simulated.step_time import StepDurations
from loadgen.studies.twin import (
    HARDWARE_CONSTANTS,
    LINEAR_CONSTANTS,
    MODEL_ERRORS,
    REQUEST_CONSTANTS,
    Twin,
    TwinConstant,
    step_time_with,
    typical_host_s,
)
from loadgen.workloads import workload
from loadgen.workloads.workload import SharedPrefix, Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MAX_REQUESTS = 2000
"""Maximum number of requests of a run that are replayed. Later requests hardly affect the latencies of earlier ones."""
MIN_COMPLETE = 10
"""Minimum number of complete requests that a run needs for a fit."""
BLOCKS = 10
"""Number of blocks in time order into which the requests of a run are divided. The bootstrap draws blocks, because
requests that are in flight together are not independent."""
DRAWS = 24
"""Number of bootstrap draws."""
NOISE = 0.1
"""Assumed standard deviation of `log(latency)` of one request."""
INDEPENDENT_REQUESTS = 20
"""Weight of a run relative to the prior: each run counts as this number of independent requests."""
OUTLIER = 0.3
"""Residuals above this value count less than quadratically (soft L1 loss)."""
STEP_TOKENS = tuple(256 << power for power in range(8))
"""Token budgets of a step that are tried in addition to the engine's default."""
MIN_IMPROVEMENT = 0.1
"""Minimum improvement for a token budget that replaces the engine's default. The unit is that of the errors in
`FitProblem.choose_step_budget`."""
UNKNOWN_KV = 1 << 24
"""KV cache size in tokens that is assumed if the size is unknown. The value is too large to limit a run."""
DEFAULT_START = {"step_s": 0.3e-3, "request_s": 1e-3, "path_s": 3e-3}
"""Start values of constants that neither the hardware tables nor the timestamps of a run provide."""
REQUEST_STARTS = tuple(product((0.1e-3, 0.3e-3, 1e-3, 3e-3, 10e-3), (0.1e-3, 1e-3, 10e-3)))
"""Pairs of start values of `request_s` and `path_s` that a fit tries."""
STEP_FACTORS = (3.0, 1 / 3)
"""Factors of the host time per step at which further searches begin, relative to the best solution so far."""
MEDIAN_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation. The median prevents a few
outlying blocks from widening all intervals."""
TRANSFER_STEPS = 12
"""Maximum number of steps of the search for the constants for other hardware."""
DERIVATIVE_STEP = 0.15
"""Change of `log(constant)` for a numerical derivative. With smaller changes, the derivative would show the discrete
steps of the duration tables."""


class ClosedLoopWait(NamedTuple):
    """The response that a client of a closed loop waited for before it sent a request."""

    before: int
    """Index of the request with this response."""
    delay_ns: int
    """Time from the last token of the response to the next request in ns."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The requests of a measured run, in the order of their send times, with their latencies. Missing latencies are
    NaN.
    """

    name: str
    sent_ns: list[int]
    """Send time of each request in ns after the first request."""
    prompt_tokens: list[int]
    output_tokens: list[int]
    prompts: list[Sequence[int]]
    """Artificial token ids of prompts that share a prefix; empty for other prompts."""
    ttft_s: Floats
    tpot_s: Floats
    ended_s: float
    """Time of the last token in s after the first request was sent."""
    tokens: Floats
    """One row per chunk in time order: time in s, index of the request, number of tokens."""
    waits: Sequence[ClosedLoopWait | None] = ()
    """What the client of each request waited for; None if it waited for no response. Empty for an open loop."""

    @property
    def blocks(self) -> Integers:
        """The index of the bootstrap block of each request.

        The blocks divide the run in order of time. Each block contains about the same number of requests with a known
        latency.
        """
        seen = np.cumsum(~np.isnan(self.ttft_s))
        return np.asarray((seen - 1).clip(0) * BLOCKS // seen[-1])

    @property
    def later_tokens(self) -> Integers:
        """Number of output tokens after the first one, for each request."""
        return np.array(self.output_tokens) - 1

    def prefill_steps(self, ttft_s: Floats) -> int:
        """Estimate the number of steps in which the engine computed prompts (prefill steps).

        `ttft_s` contains the measured or simulated TTFT of each request. The first tokens of several requests may come
        from the same step. This is assumed if they arrive less than `median(TPOT) / 4` apart.
        """
        first_token_s = np.array(self.sent_ns) / 1e9 + ttft_s
        first_token_s = np.sort(first_token_s[~np.isnan(self.ttft_s + ttft_s)])
        min_gap_s = 1e-3 if np.isnan(self.tpot_s).all() else np.nanmedian(self.tpot_s) / 4
        return 1 + int((np.diff(first_token_s) > min_gap_s).sum())


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one engine step. None stands for the default of the engine."""

    rules: Engine
    kv_tokens: int
    running: int | None = None
    step_tokens: int | None = None

    @property
    def policy(self) -> Policy:
        """Scheduling policy of the engine with these limits."""
        return self.rules.policy_for(self.kv_tokens, self.running, self.step_tokens)


def closed_loop_waits(sent_ns: Sequence[int], last_ns: Sequence[int], clients: int) -> list[ClosedLoopWait | None]:
    """Return `ObservedRun.waits` for a closed loop with this number of clients.

    `sent_ns` and `last_ns` are the times of sending and of the last token of each request. Requests are in the order of
    their send times. The first request of a client waits for none. A client sends its next request directly after its
    last response, so the response that ended first is the one that the next request waited for.
    """
    ended: list[tuple[int, int]] = []
    result: list[ClosedLoopWait | None] = []
    for index, (sent, last) in enumerate(zip(sent_ns, last_ns, strict=True)):
        if index >= clients and ended and ended[0][0] <= sent:
            end_ns, before = heappop(ended)
            result.append(ClosedLoopWait(before, sent - end_ns))
        else:
            result.append(None)
        heappush(ended, (last, index))
    return result


def observe_run(run: Run) -> ObservedRun:
    """Return the requests and latencies of a measured run. Raises PlanError if too few requests are complete."""
    sent = [record for record in run.records if record.phase == "measured" and record.sent_ns is not None]
    sent.sort(key=lambda record: (record.sent_ns or 0, record.id))
    name = run.path.resolve().parent.name
    records = [
        record
        for record in sent[:MAX_REQUESTS]
        if record.chunk_ns and (record.prompt_tokens or record.prompt_tokens_asked)
    ]
    complete = sum(record.state == "complete" for record in records)
    if complete < MIN_COMPLETE:
        raise PlanError(
            f"{name}: only {complete} complete requests; a fit needs at least {MIN_COMPLETE}", "Name a longer run."
        )
    begin_ns = records[0].sent_ns or 0
    ttft_s = np.full(len(records), np.nan)
    tpot_s = np.full(len(records), np.nan)
    tokens: list[tuple[float, int, int]] = []
    for index, record in enumerate(records):
        counts = streamed_tokens(record).counts
        for at_ns, count in zip(record.chunk_ns, counts, strict=True):
            tokens.append(((at_ns - begin_ns) / 1e9, index, count))
        if record.state != "complete":
            continue
        ttft_s[index] = (record.chunk_ns[0] - (record.sent_ns or 0)) / 1e9
        later = sum(counts[1:])
        if later:
            tpot_s[index] = (record.chunk_ns[-1] - record.chunk_ns[0]) / 1e9 / later
    rows = np.array(sorted(tokens), float)
    lengths = [record.prompt_tokens or record.prompt_tokens_asked for record in records]
    prompt_ids = _prompt_ids_of(run.header)
    load = run.header.load
    clients = load.clients if load.kind == "closed" and not load.sessions else 0
    return ObservedRun(
        name=name,
        sent_ns=[(record.sent_ns or 0) - begin_ns for record in records],
        prompt_tokens=lengths,
        output_tokens=[
            record.output_tokens or sum(record.chunk_tokens) or record.output_tokens_asked for record in records
        ],
        prompts=[prompt_ids(record, length) for record, length in zip(records, lengths, strict=True)],
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ended_s=float(rows[-1, 0]),
        tokens=rows,
        waits=closed_loop_waits(
            [record.sent_ns or 0 for record in records], [record.chunk_ns[-1] for record in records], clients
        )
        if clients
        else (),
    )


def _prompt_ids_of(header: Header) -> Callable[[Record, int], Sequence[int]]:
    """Return a function that takes a Record and a length, and returns artificial token ids for the prompt of the
    Record.

    If two prompts have a common beginning, they get the same ids for it. The workload of the run, or of the Record's
    class of traffic, determines which prompts have a common beginning.
    """
    if not header.traffic:
        source = workload.parse(str(header.plan.get("workload") or "synthetic"))
        return lambda record, length: _prompt_ids(record, length, source, 0)
    first_ids = [facts.first_id for facts in header.traffic]
    sources = [workload.parse(facts.workload) for facts in header.traffic]

    def prompt_ids(record: Record, length: int) -> Sequence[int]:
        index = max(0, bisect_right(first_ids, record.id) - 1)
        return _prompt_ids(record, length, sources[index], first_ids[index])

    return prompt_ids


def _prompt_ids(record: Record, length: int, source: Workload, first_id: int) -> Sequence[int]:
    """Return `length` artificial token ids for the prompt of `record`, or () if the prompt shares no tokens with other
    prompts.

    The simulated prefix cache recognises shared tokens by their ids. Two prompts begin with the same ids if the
    workload `source` gives them a common beginning. `first_id` is the id of the first request of the Record's class of
    traffic. Prompts of different classes share no tokens.
    """
    if record.session is not None:
        first_token = record.session << 32
        return range(first_token, first_token + length)
    if isinstance(source, SharedPrefix):
        number = record.id - first_id
        prefix_id = (first_id + number % source.groups) << 32
        own_id = (record.id + source.groups) << 32
        ids = (*range(prefix_id, prefix_id + source.tokens), *range(own_id, own_id + length))
        return ids[:length]
    return ()


def replay(
    run: ObservedRun, limits: StepLimits, step_time: StepDurations, values: Mapping[str, float]
) -> tuple[Floats, Floats, float]:
    """Simulate the requests of a measured run.

    Requests of an open loop are sent at their measured send times. In a closed loop, the client waits for the simulated
    response, and then as long as the measured client did after the measured response. At its measured send time, the
    request could arrive before this response if the simulated steps take a little longer.

    Return three values: the TTFT of each request in s, the TPOT of each request in s, and the time of the last token in
    s. Requests that are too long for the KV cache have the latency NaN.
    """
    engine = VirtualEngine(Scheduler(limits.policy, limits.kv_tokens), step_time)
    path_ns = round(1e9 * values["path_s"])
    front_end = FrontEnd(round(1e9 * values["request_s"]), path_ns)
    waits = run.waits or [None] * len(run.sent_ns)
    due = [(sent, index) for index, (sent, wait) in enumerate(zip(run.sent_ns, waits, strict=True)) if wait is None]
    followers = {wait.before: (index, wait.delay_ns) for index, wait in enumerate(waits) if wait is not None}
    ttft_s = np.full(len(run.sent_ns), np.nan)
    tpot_s = np.full(len(run.sent_ns), np.nan)
    sent_ns = list(run.sent_ns)
    ended_ns = 0

    def send_next(index: int, end_ns: int) -> None:
        """Let the client that waited for the request `index`, which ended at `end_ns`, send its next request."""
        if index in followers:
            follower, delay_ns = followers[index]
            sent_ns[follower] = end_ns + delay_ns
            heappush(due, (sent_ns[follower], follower))

    while due or engine.busy or front_end.busy_until_ns < FOREVER_NS:
        due_ns = due[0][0] if due else FOREVER_NS
        next_ns = min(due_ns, front_end.busy_until_ns) + path_ns
        if next_ns <= engine.now_ns or not engine.busy:
            if front_end.busy_until_ns <= due_ns:
                for job in front_end.release():
                    try:
                        engine.submit(job)
                    except ValueError:  # too long for the KV cache
                        send_next(job.owner, job.arrived_ns)
            else:
                index = heappop(due)[1]
                lengths = run.prompt_tokens[index], run.output_tokens[index]
                front_end.accept(Job(*lengths, due_ns, owner=index, prompt=run.prompts[index]), due_ns)
            continue
        for response in engine.run(next_ns):
            index = response.job.owner
            first_ns = response.instants[0]
            last_ns = response.instants[-1]
            ttft_s[index] = (first_ns - sent_ns[index]) / 1e9
            tpot_s[index] = (last_ns - first_ns) / 1e9 / max(1, len(response.instants) - 1)
            ended_ns = max(ended_ns, last_ns)
            send_next(index, last_ns)
    return ttft_s, tpot_s, ended_ns / 1e9


def fit(runs: Sequence[Run], rules: str, deployment: Deployment | None, known: Mapping[str, Any]) -> Twin:
    """Fit a twin to measured runs of one server. Raises PlanError if a run has too few complete requests.

    `rules` is the name of the engine whose scheduling rules apply. `deployment` is None if the hardware is unknown.
    `known` contains fields of the Twin that the user has set, such as limits and names of hardware.
    """
    observed = [observe_run(run) for run in runs]
    engine = find_engine(rules, str(known["vintage"]))
    kv_tokens = known.get("kv_tokens") or _kv_tokens(runs)
    if not kv_tokens:
        kv_tokens = engine.kv_tokens(deployment) if deployment else UNKNOWN_KV
    running_limit = known.get("running_limit") or _running_limit(runs)
    problem = FitProblem(observed, StepLimits(engine, kv_tokens, running_limit, known.get("step_tokens")), deployment)
    solution = problem.solve()
    if problem.choose_step_budget(solution):
        solution = problem.solve()
    draws = problem.bootstrap_draws(solution)
    lows, highs = np.percentile(draws, (2.5, 97.5), axis=0)
    values = np.exp(solution)
    constants = {
        name: TwinConstant(
            value=_rounded(values[index]),
            low=_rounded(lows[index]),
            high=_rounded(highs[index]),
            unit=info.unit,
            meaning=info.meaning,
        )
        for index, (name, info) in enumerate(problem.constants.items())
    }
    limits = {"kv_tokens": kv_tokens, "running_limit": running_limit, "step_tokens": problem.limits.step_tokens}
    server = runs[0].header.server
    return Twin(
        version=version("llm-loadgen"),
        server=str(server.get("name") or ""),
        server_version=str(server.get("version") or ""),
        rules=rules,
        served=str(server.get("model") or ""),
        constants=constants,
        transferred=problem.transferred_constants() if deployment else {},
        draws=[[_rounded(value) for value in draw] for draw in draws],
        residual=problem.fit_errors(solution),
        runs=[{"run": run.name, "requests": len(run.sent_ns)} for run in observed],
        **{**known, **limits},
    )


class FitProblem:
    """The least-squares problem of a fit.

    The parameters are the natural logarithms of the constants, so that the constants stay positive.
    """

    def __init__(self, runs: Sequence[ObservedRun], limits: StepLimits, deployment: Deployment | None) -> None:
        self.runs = runs
        self.limits = limits
        self.deployment = deployment
        self.constants = HARDWARE_CONSTANTS if deployment else LINEAR_CONSTANTS
        self._prior = np.log(self._start_values())
        self._spread = np.array([info.spread for info in self.constants.values()])
        self._step_time: tuple[Any, Any] = (None, None)  # step parameters and the model of step durations for them

    def choose_step_budget(self, logarithms: Floats) -> bool:
        """Choose the token budget per step for which the simulation best matches the measured number of prefill steps.

        The error of a budget is the sum of `abs(log(simulated_steps / measured_steps))` over all runs. The best budget
        replaces the engine's default if it reduces the error by at least MIN_IMPROVEMENT. The budget is not changed if
        the user has set it, or if the engine does not mix prefill and decode.

        The constants of the simulation are `exp(logarithms)`. The budget is stored in `self.limits`. Return True if it
        was changed.
        """
        original = self.limits
        if original.step_tokens is not None or original.policy.prefill != "mixed":
            return False
        errors: dict[int | None, float] = {}
        for tokens in (None, *STEP_TOKENS):
            self.limits = replace(original, step_tokens=tokens)
            errors[tokens] = 0.0
            for run in self.runs:
                simulated_ttft_s, _, _ = self.replay_run(run, logarithms)
                simulated = run.prefill_steps(simulated_ttft_s)
                errors[tokens] += abs(np.log(simulated / run.prefill_steps(run.ttft_s)))
        best = min(errors, key=lambda tokens: errors[tokens])
        better = errors[best] < errors[None] - MIN_IMPROVEMENT
        self.limits = replace(original, step_tokens=best) if better else original
        return better

    def solve(self) -> Floats:
        """Return the logarithms of the constants that fit best.

        The server's HTTP front end has two constants: `request_s` is the time per request, and `path_s` is the time
        from the front end to the first step. Several pairs of values for these two constants are tried, and the search
        starts at the best pair. One pair is not enough. The front end handles requests in batches, so the residuals are
        not smooth functions of these constants.

        A search can end at a jump of the residuals: the TTFT of a request changes by a whole step if the request just
        reaches the step or just misses it. Further searches therefore begin with another time per step (see
        STEP_FACTORS). The best solution counts.
        """
        solution = self._search(self._prior)
        for factor in STEP_FACTORS:
            start = solution.x.copy()
            start[list(self.constants).index("step_s")] += np.log(factor)
            solution = min(solution, self._search(start), key=lambda found: float(found.cost))
        return np.asarray(solution.x)

    def _search(self, start: Floats) -> Any:
        """Search for the best constants from `start`, but from the best pair of REQUEST_STARTS.

        Return the result of SciPy: the logarithms of the constants are `x`, and half the sum of the squared residuals
        is `cost`.
        """
        from scipy.optimize import least_squares

        starts = [np.append(start[: -len(REQUEST_CONSTANTS)], np.log(values)) for values in REQUEST_STARTS]
        best = min(starts, key=lambda logarithms: float(np.sum(self._residuals(logarithms) ** 2)))
        return least_squares(self._residuals, best, jac=self._jacobian, ftol=1e-5, xtol=1e-4, max_nfev=100)

    def bootstrap_draws(self, solution: Floats) -> Floats:
        """Return DRAWS random variants of the fitted constants, one row each. Their spread shows how uncertain the fit
        is.

        `solution` contains the logarithms of the fitted constants. A variant is approximately the result of another
        fit, with two random changes:

        - The blocks of requests are drawn at random, with replacement (bootstrap).
        - The prior value of each constant is drawn from its prior distribution.

        The approximation is linear near `solution`, so the runs need not be simulated again.
        """
        random = np.random.default_rng(0)
        jacobian = self._jacobian(solution)
        residuals = self._latency_residuals(solution)
        rows = len(residuals)
        run_blocks = [np.tile(index * BLOCKS + run.blocks, 3) for index, run in enumerate(self.runs)]
        blocks = np.concatenate(run_blocks)
        # The search ends only near the optimum, because the tables have steps. Draws correct for this remainder.
        remainder = np.linalg.lstsq(jacobian, self._residuals(solution), rcond=None)[0]
        draws = []
        for _ in range(DRAWS):
            counts = np.concatenate([random.multinomial(BLOCKS, [1 / BLOCKS] * BLOCKS) for _ in self.runs])
            weight = np.sqrt(counts[blocks].astype(float))
            prior = self._prior + self._spread * random.standard_normal(len(solution))
            matrix = np.vstack([weight[:, None] * jacobian[:rows], jacobian[rows:]])
            target = np.concatenate([weight * residuals, (solution - prior) / self._spread])
            change = remainder - np.linalg.lstsq(matrix, target, rcond=None)[0]
            draws.append(np.exp(solution + np.clip(change, -1.5, 1.5)))
        return np.array(draws)

    def transferred_constants(self) -> dict[str, float]:
        """Return the values of the constants with which the twin predicts other hardware or another model.

        The values of the first fit also correct errors of the hardware model. These errors are particular to the
        measured server. For other servers, values that are nearer to those of the hardware tables are better. These
        values come from a second fit, which differs from the first one in these points:

        - All runs together count as one observation of TTFT and one of TPOT, with the errors MODEL_ERRORS.
        - The width of each constant's prior distribution is `transfer_spread`. This width is small for the rates of
          kernels, because an unusual rate of a kernel is mostly a property of the measured server.
        - The prior distributions are Cauchy distributions. Their heavy tails allow for a server that differs much from
          the tables.

        The search varies the deviation of each constant from the tables, in multiples of its `transfer_spread`. The
        derivatives of the prior are exact. DERIVATIVE_STEP is several times as large as the smallest spread, so
        differences over this step would make these derivatives too small.
        """
        from scipy.optimize import least_squares

        prior = self._transfer_prior()
        spread = np.array([info.transfer_spread for info in self.constants.values()])

        def residuals(deviations: Floats) -> Floats:
            return np.concatenate([self._median_residuals(prior + spread * deviations), _cauchy(deviations)])

        def jacobian(deviations: Floats) -> Floats:
            logarithms = prior + spread * deviations
            centre = self._median_residuals(logarithms)
            moves = DERIVATIVE_STEP * np.eye(len(logarithms))
            changes = [self._median_residuals(logarithms + move) - centre for move in moves]
            return np.vstack([np.column_stack(changes) * spread / DERIVATIVE_STEP, np.diag(_cauchy_slope(deviations))])

        start = np.zeros(len(prior))
        solution = least_squares(residuals, start, jac=jacobian, ftol=1e-4, xtol=1e-3, max_nfev=TRANSFER_STEPS)
        values = np.exp(prior + spread * solution.x)
        return {name: _rounded(value) for name, value in zip(self.constants, values, strict=True)}

    def _transfer_prior(self) -> Floats:
        """Return the logarithms of the constants that the hardware tables predict.

        The measured runs are used only for the constant `path_s`, the time from the server's front end to the first
        step. Every TTFT includes this time, so `path_s` is at most the shortest measured TTFT.
        """
        assert self.deployment is not None
        start = dict(zip(self.constants, np.exp(self._prior).tolist(), strict=True))
        start |= typical_host_s(self.limits.rules, self.deployment)
        shortest_s = min(float(np.nanmin(run.ttft_s)) for run in self.runs)
        start["path_s"] = min(max(start["path_s"], self.deployment.framework.server_s), shortest_s)
        return np.asarray(np.log(list(start.values())))

    def _median_residuals(self, logarithms: Floats) -> Floats:
        """Return the median error of TTFT and of TPOT for each run, in multiples of MODEL_ERRORS.

        MODEL_ERRORS contains the typical errors of the hardware model. The values are divided by the square root of the
        number of runs, so that all runs together have the weight of one run. Large errors of TTFT count less, because
        the model does not predict well how long requests wait if the KV cache is full.
        """
        residuals = []
        for run in self.runs:
            for name, error in self._latency_errors(run, logarithms).items():
                if name in MODEL_ERRORS and not np.isnan(error).all():
                    residual = np.nanmedian(error) / MODEL_ERRORS[name]
                    residuals.append(_cauchy(residual) if name == "ttft" else residual)
        return np.asarray(np.array(residuals) / np.sqrt(len(self.runs)))

    def fit_errors(self, solution: Floats) -> dict[str, float]:
        """Return the error of the fit by figure, such as `ttft`. `Twin.residual` defines these errors."""
        errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": [], "rate": []}
        for run in self.runs:
            ttft_s, tpot_s, ended_s = self.replay_run(run, solution)
            for name, simulated, measured in _latency_pairs(run, ttft_s, tpot_s):
                errors[name] += _block_errors(run, simulated, measured)
            errors["rate"].append(float(np.log(ended_s / run.ended_s)))
            measured_figures = figures(run, run.ttft_s, run.tpot_s, run.ended_s)
            for name, value in figures(run, ttft_s, tpot_s, ended_s).items():
                if name.endswith("p99"):
                    error = float(np.log((value or 1) / (measured_figures[name] or 1)))
                    errors.setdefault(name, []).append(error)
        deviations = {}
        for name, values in errors.items():
            if name.endswith("p99"):
                deviation = np.sqrt(np.mean(np.square(values)))
            else:
                deviation = MEDIAN_TO_DEVIATION * np.median(np.abs(values or [0.0]))
            deviations[name] = _rounded(deviation)
        return deviations

    def _start_values(self) -> list[float]:
        """Return the start value of each constant, in the order of `constants`."""
        starts = dict(DEFAULT_START)
        if self.deployment:
            typical = typical_host_s(self.limits.rules, self.deployment)
            starts |= {"bandwidth": 1.0, "compute": 1.0} | typical
            starts["step_s"] = max(DEFAULT_START["step_s"], typical["step_s"])
        else:
            starts |= linear_step_constants(self.runs)
        return [starts[name] for name in self.constants]

    def replay_run(self, run: ObservedRun, logarithms: Floats) -> tuple[Floats, Floats, float]:
        """Simulate the requests of a run with the constants `exp(logarithms)`.

        Return the TTFT of each request, the TPOT of each request, and the time of the last token, counted from the
        first request. All values are in seconds. TTFT and TPOT are NaN for requests that are too long for the KV cache.
        """
        values = dict(zip(self.constants, np.exp(logarithms).tolist(), strict=True))
        step_parameters = tuple(logarithms[: -len(REQUEST_CONSTANTS)])
        if self._step_time[0] != step_parameters:  # building the tables takes most of the time of a replay
            self._step_time = (step_parameters, step_time_with(values, self.limits.rules, self.deployment))
        return replay(run, self.limits, self._step_time[1], values)

    def _latency_residuals(self, logarithms: Floats) -> Floats:
        """Return the residuals of all runs: the weighted errors of the simulated latencies, which the fit makes small.

        The constants of the simulation are `exp(logarithms)`. The residuals are sorted by run, then by latency (TTFT,
        TPOT, E2E latency), then by request:

            residual = weight * sign(e) * soft(e)
            weight = sqrt(INDEPENDENT_REQUESTS / n) / NOISE
            soft(e) = OUTLIER * sqrt(2 * (sqrt(1 + (e / OUTLIER) ** 2) - 1))    (soft L1 loss).

        Here `e` is `log(simulated / measured)`, and `n` is the number of requests of the run for which this latency is
        known. The residual of an unknown latency is 0.

        `median(TPOT) / 2` is added to the simulated and the measured TTFT before they are compared. This gives short
        TTFTs less weight: a request may arrive at any time within a step of the server, so TTFT varies by up to one
        step.
        """
        parts = []
        for run in self.runs:
            for error in self._latency_errors(run, logarithms).values():
                weight = np.sqrt(INDEPENDENT_REQUESTS / max(1, (~np.isnan(error)).sum())) / NOISE
                soft = OUTLIER * np.sqrt(2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1))
                parts.append(np.nan_to_num(np.sign(error) * soft) * weight)
        return np.concatenate(parts)

    def _latency_errors(self, run: ObservedRun, logarithms: Floats) -> dict[str, Floats]:
        """Return the errors of a simulation of a run, by latency: `ttft`, `tpot` and `e2e`.

        Each array contains one error per request: `log(simulated / measured)`. The constants of the simulation are
        `exp(logarithms)`. Before the simulated and the measured TTFT are compared, `median(TPOT) / 2` is added to both,
        so that short TTFTs have less weight.
        """
        ttft_s, tpot_s, _ = self.replay_run(run, logarithms)
        half_step_s = 0.0 if np.isnan(run.tpot_s).all() else np.nanmedian(run.tpot_s) / 2
        errors = {}
        for name, simulated, measured in _latency_pairs(run, ttft_s, tpot_s):
            added_s = half_step_s if name == "ttft" else 0.0
            errors[name] = np.log(np.maximum(simulated + added_s, 1e-6) / np.maximum(measured + added_s, 1e-6))
        return errors

    def _residuals(self, logarithms: Floats) -> Floats:
        """Return the residuals whose sum of squares the fit minimises: those of all latencies, and then one per
        constant.

        `logarithms` contains the logarithms of the constants. The residual of a constant is `log(constant / start
        value) / spread`, where `spread` is the standard deviation of the prior distribution of `log(constant)`. This
        residual keeps the constant near its start value.
        """
        return np.concatenate([self._latency_residuals(logarithms), (logarithms - self._prior) / self._spread])

    def _jacobian(self, logarithms: Floats) -> Floats:
        """Return the derivatives of the residuals with respect to the logarithms of the constants, by central
        differences.
        """
        moves = DERIVATIVE_STEP * np.eye(len(logarithms))
        columns = []
        for move in moves:
            change = self._residuals(logarithms + move) - self._residuals(logarithms - move)
            columns.append(change / 2 / DERIVATIVE_STEP)
        return np.column_stack(columns)


def _cauchy(residual: Any) -> Any:
    """Return a residual whose square is the Cauchy loss `log(1 + residual**2)`, which gives large residuals less
    weight.
    """
    return np.sign(residual) * np.sqrt(np.log1p(residual**2))


def _cauchy_slope(residuals: Floats) -> Floats:
    """Return the derivative of `_cauchy` at each of the residuals."""
    near_zero = np.abs(residuals) < 1e-6  # where the slope is 1, and the formula divides 0 by 0
    sizes = np.where(near_zero, 1.0, np.abs(residuals))
    return np.where(near_zero, 1.0, sizes / (1 + sizes**2) / np.sqrt(np.log1p(sizes**2)))


def _latency_pairs(run: ObservedRun, ttft_s: Floats, tpot_s: Floats) -> list[tuple[str, Floats, Floats]]:
    """Return (name, simulated values, measured values) for TTFT, TPOT and E2E latency."""
    simulated_e2e_s = ttft_s + run.later_tokens * tpot_s
    measured_e2e_s = run.ttft_s + run.later_tokens * run.tpot_s
    return [
        ("ttft", ttft_s, run.ttft_s),
        ("tpot", tpot_s, run.tpot_s),
        ("e2e", simulated_e2e_s, measured_e2e_s),
    ]


def _block_errors(run: ObservedRun, simulated: Floats, measured: Floats) -> list[float]:
    """Compare the simulated latencies of the requests of `run` with the measured ones, block by block.

    The requests are divided into BLOCKS blocks in order of time (see `ObservedRun.blocks`). Return
    `log(median(simulated) / median(measured))` for each block. A block is left out if none of its requests has both
    latencies.
    """
    both = ~np.isnan(simulated) & ~np.isnan(measured)
    errors = []
    for block in range(BLOCKS):
        requests = both & (run.blocks == block)
        if requests.any():
            errors.append(float(np.log(np.median(simulated[requests]) / np.median(measured[requests]))))
    return errors


def figures(run: ObservedRun, ttft_s: Floats, tpot_s: Floats, ended_s: float) -> dict[str, float | None]:
    """Return the figures of a run with the given latencies. The keys are the names that `--assert` uses, such as
    `ttft.p99`.

    Rates cover the whole run up to the last token, at `ended_s`, because a replay has no separate measurement window.
    Only complete requests count, as in a report.
    """
    seen = ~np.isnan(run.ttft_s) & ~np.isnan(ttft_s)
    e2e_s = ttft_s + run.later_tokens * np.nan_to_num(tpot_s)
    result: dict[str, float | None] = {
        "output_tokens_per_s": sum(run.output_tokens) / ended_s,
        "requests_per_s": int((~np.isnan(run.ttft_s)).sum()) / ended_s,
    }
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", e2e_s)):
        known = values[seen & ~np.isnan(values)]
        if len(known):
            for percent in (50, 99):
                result[f"{name}.p{percent}"] = float(np.percentile(known, percent))
    return result


def simulate_run(run: ObservedRun, twin: Twin, draw: int | None = None) -> dict[str, float | None]:
    """Return the figures that a twin predicts for the requests of a measured run.

    `replay` describes when the requests are sent. `draw` selects one bootstrap draw of the twin's constants.
    """
    ttft_s, tpot_s, ended_s = replay_on_twin(run, twin, draw)
    return figures(run, ttft_s, tpot_s, ended_s)


def replay_on_twin(run: ObservedRun, twin: Twin, draw: int | None = None) -> tuple[Floats, Floats, float]:
    """Simulate the requests of a measured run on a twin, a simulated server that is fitted to a measured one.

    Return the TTFTs, the TPOTs and the time of the last token, all in s. `draw` selects one bootstrap draw of the
    twin's constants.
    """
    engine = find_engine(twin.rules, twin.vintage)
    values = twin.values(draw)
    step_time = step_time_with(values, engine, twin.deployment(engine))
    limits = StepLimits(engine, twin.kv_tokens, twin.running_limit, twin.step_tokens)
    return replay(run, limits, step_time, values)


def linear_step_constants(runs: Sequence[ObservedRun]) -> dict[str, float]:
    """Estimate the constants of a linear model of the step duration, by non-negative least squares.

    While a request decodes, the engine executes one step for each of its tokens. The same steps also generate tokens of
    other requests and process prompts. Each request gives one equation:

        decode_s = step_s * steps + sequence_s * output_tokens + token_s * prompt_tokens + context_s * context_tokens

    The left side is the measured decoding time of the request. The counts on the right include the tokens of all
    requests in this time. The names that end in `_s` on the right are the constants.
    """
    from scipy.optimize import nnls

    rows: list[list[float]] = []
    decode_s: list[float] = []
    for run in runs:
        run_rows, run_decode_s = _decode_work(run)
        rows += run_rows
        decode_s += run_decode_s
    matrix = np.array(rows) / np.array(decode_s)[:, None]
    target = np.ones(len(decode_s))
    scale = matrix.mean(axis=0)
    scale[scale == 0] = 1.0
    ridge = np.sqrt(0.01 * len(target)) * np.eye(4)  # divides the time between columns that are proportional
    solution, _ = nnls(np.vstack([matrix / scale, ridge]), np.concatenate([target, np.zeros(4)]))
    names = ("step_s", "sequence_s", "token_s", "context_s")
    return dict(zip(names, (np.maximum(solution, 0.01) / scale).tolist(), strict=True))


def _decode_work(run: ObservedRun) -> tuple[list[list[float]], list[float]]:
    """Return the engine's work during the decoding of each request, and the decoding times in s.

    The decoding of a request lasts from its first token to its last. A request without measured decoding, such as one
    with a single token, is left out. During the decoding of one request, the engine also works on other requests. The
    work therefore covers all requests. It is a row of four numbers:

    - steps of the engine.
    - generated tokens.
    - computed prompt tokens.
    - context tokens that the steps read.
    """
    at_s, owner_column, count = run.tokens.T
    owner = owner_column.astype(int)
    first_s = np.full(len(run.sent_ns), np.inf)
    np.minimum.at(first_s, owner, at_s)
    last_s = np.zeros(len(run.sent_ns))
    np.maximum.at(last_s, owner, at_s)
    prompt_tokens = np.array(run.prompt_tokens)[owner]
    context = prompt_tokens + np.array(run.output_tokens)[owner] / 2  # mean over the decoding of the request
    prefilled = np.where(at_s == first_s[owner], prompt_tokens, 0)
    work = np.column_stack([count, prefilled, count * context])
    cumulative = np.vstack([np.zeros(3), np.cumsum(work, axis=0)])
    rows = []
    decode_s = []
    for index in np.flatnonzero(run.tpot_s > 0):
        begin, end = np.searchsorted(at_s, (first_s[index], last_s[index]), side="right")
        duration_s = last_s[index] - first_s[index]
        steps = duration_s / run.tpot_s[index]
        rows.append([steps, *(cumulative[end] - cumulative[begin])])
        decode_s.append(duration_s)
    return rows, decode_s


def _kv_tokens(runs: Sequence[Run]) -> int | None:
    """Return the KV cache size in tokens that the server's metrics report, or None if they do not report it."""
    sizes = [sample.values.get("kv_tokens") for run in runs for sample in run.telemetry if sample.source == "server"]
    return max((int(size) for size in sizes if size), default=None)


def _running_limit(runs: Sequence[Run]) -> int | None:
    """Return the maximum number of requests that the server runs at once, or None if the telemetry shows no maximum.

    The largest number of running requests in any sample is the server's maximum if at least three samples show all of
    the following:

    - Exactly this number of requests is running.
    - Other requests are waiting.
    - Less than 90% of the KV cache is used.
    """
    samples = [sample.values for run in runs for sample in run.telemetry if sample.source == "server"]
    crowded = [values["running"] for values in samples if values.get("waiting") and (values.get("kv_used") or 0) < 0.9]
    maximum = max((values.get("running") or 0 for values in samples), default=0)
    return int(maximum) if crowded.count(maximum) >= 3 else None


def _rounded(value: Any) -> float:
    """Return the value rounded to five significant digits."""
    return float(f"{float(value):.5g}")
