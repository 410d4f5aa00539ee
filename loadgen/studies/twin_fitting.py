"""From real runs to a Twin: constants with which a replay of the same requests gives the latencies that were measured.

    Run ─ observed ─> Observed ─┐   start: the hardware model's, or by least squares of what decoding took
    Run ─ observed ─> Observed ─┴─> fit: Gauss-Newton on replays, pulled to the start ─> draws: other blocks of requests

A replay sends each request when it was really sent, so a closed loop needs no model of its clients. Residuals are
logarithms of TTFT and TPOT, simulated over measured, each run with the same weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.run.runfile import Run
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
    REQUEST_CONSTANTS,
    Twin,
    TwinConstant,
    step_time_with,
)
from loadgen.workloads import workload
from loadgen.workloads.workload import SharedPrefix

Floats = NDArray[np.float64]
MAX_REQUESTS = 2000
"""Of a run that are replayed; those after them came too late to matter to them much."""
MIN_COMPLETE = 10
"""Complete requests without which there is no fit."""
BLOCKS = 10
"""Of a run, in order of time: what is drawn again, because requests that meet share what happens to them."""
DRAWS = 24
NOISE = 0.1
"""How far latencies of one request may be off, as a factor's logarithm, ..."""
INDEPENDENT_REQUESTS = 20
"""... and how many independent ones a run is worth: against the pull of the start."""
OUTLIER = 0.3
"""Past which a residual counts less than its square."""
STEP_TOKENS = tuple(256 << power for power in range(8))
"""Budgets of a step that are tried, beside the rules' own."""
MIN_IMPROVEMENT = 0.1
"""How much better one of them has to be, as a factor's logarithm."""
UNKNOWN_KV = 1 << 24
"""Where nobody says how many tokens the KV cache holds: no limit."""
DEFAULT_START = {"step_s": 0.3e-3, "request_s": 1e-3, "path_s": 3e-3}
"""Where neither hardware tables nor stamps say."""
REQUEST_STARTS = tuple(product((0.1e-3, 0.3e-3, 1e-3, 3e-3, 10e-3), (0.1e-3, 1e-3, 10e-3)))
"""What a fit is begun with of the front end and of the way behind it."""
MEDIAN_TO_DEVIATION = 1.4826
"""Of normal residuals, so that a few blocks far off do not make all intervals wide."""
DERIVATIVE_STEP = 0.15
"""Of a constant, for a derivative: smaller ones see the steps of the tables."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """What one run says: its requests in order of sending, and their latencies, NaN where there is none."""

    name: str
    sent_ns: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]
    prompts: list[Sequence[int]]
    """Token ids that stand for those of prompts with a common beginning."""
    ttft_s: Floats
    tpot_s: Floats
    ended_s: float
    """The last token."""
    tokens: Floats
    """Rows of all output tokens in order of time: instant in s, which request, how many with it."""

    @property
    def blocks(self) -> NDArray[np.int64]:
        """To which block each request belongs: as many with a latency in each."""
        seen = np.cumsum(~np.isnan(self.ttft_s))
        return np.asarray((seen - 1).clip(0) * BLOCKS // seen[-1])

    def prefill_steps(self, ttft_s: Floats) -> int:
        """How many steps computed the ends of prompts, had these been their first tokens: those that come together, far
        within the time of a token, are of one step."""
        at_s = np.sort((np.array(self.sent_ns) / 1e9 + ttft_s)[~np.isnan(self.ttft_s + ttft_s)])
        apart_s = np.nanmedian(self.tpot_s) / 4 if not np.isnan(self.tpot_s).all() else 1e-3
        return 1 + int((np.diff(at_s) > apart_s).sum())


@dataclass(frozen=True, slots=True)
class StepLimits:
    """By what a server fills its steps. None: the rules' own."""

    rules: Engine
    kv_tokens: int
    running: int | None = None
    step_tokens: int | None = None

    @property
    def policy(self) -> Policy:
        return self.rules.policy_for(self.kv_tokens, self.running, self.step_tokens)


def observe_run(run: Run) -> ObservedRun:
    """Raises PlanError for a run with too few complete requests."""
    sent = [record for record in run.records if record.phase == "measured" and record.sent_ns is not None]
    sent = sorted(sent, key=lambda each: (each.sent_ns or 0, each.id))[:MAX_REQUESTS]
    name = run.path.resolve().parent.name
    sent = [each for each in sent if each.chunk_ns and (each.prompt_tokens or each.prompt_tokens_asked)]
    complete = [each.state == "complete" for each in sent]
    if sum(complete) < MIN_COMPLETE:
        raise PlanError(
            f"{name}: {sum(complete)} complete requests, and a fit takes {MIN_COMPLETE}", "Name a longer run."
        )
    begun_ns = sent[0].sent_ns or 0
    ttft, tpot, tokens = [], [], []
    for index, (each, whole) in enumerate(zip(sent, complete, strict=True)):
        counts = streamed_tokens(each).counts
        later = sum(counts[1:])
        ttft.append((each.chunk_ns[0] - (each.sent_ns or 0)) / 1e9 if whole else np.nan)
        tpot.append((each.chunk_ns[-1] - each.chunk_ns[0]) / 1e9 / later if whole and later else np.nan)
        tokens += [((at_ns - begun_ns) / 1e9, index, count) for at_ns, count in zip(each.chunk_ns, counts, strict=True)]
    outputs = [each.output_tokens or sum(each.chunk_tokens) or each.output_tokens_asked for each in sent]
    prompt_tokens = [each.prompt_tokens or each.prompt_tokens_asked for each in sent]
    shared = workload.parse(str(run.header.plan.get("workload") or "synthetic"))
    prompts: list[Sequence[int]] = [()] * len(sent)
    for index, (each, length) in enumerate(zip(sent, prompt_tokens, strict=True)):
        if each.session is not None:
            prompts[index] = range(each.session << 32, (each.session << 32) + length)
        elif isinstance(shared, SharedPrefix):
            first = (each.id % shared.groups) << 32
            own = range((each.id + shared.groups) << 32, ((each.id + shared.groups) << 32) + length)
            prompts[index] = (*range(first, first + shared.tokens), *own)[:length]
    rows = np.array(sorted(tokens), float)
    return ObservedRun(
        name,
        [(each.sent_ns or 0) - begun_ns for each in sent],
        prompt_tokens,
        outputs,
        prompts,
        np.array(ttft),
        np.array(tpot),
        float(rows[-1, 0]),
        rows,
    )


def replay(
    run: ObservedRun, limits: StepLimits, step_time: StepDurations, values: Mapping[str, float]
) -> tuple[Floats, Floats, float]:
    """TTFT and TPOT of each request, and the instant of the last token, had they been simulated. NaN for what the
    cache can never hold."""
    engine = VirtualEngine(Scheduler(limits.policy, limits.kv_tokens), step_time)
    front_end = FrontEnd(round(1e9 * values["request_s"]), round(1e9 * values["path_s"]))
    waiting = deque[Job]()
    lengths = zip(run.prompt_tokens, run.output_tokens, strict=True)
    for index, (sent_ns, (prompt, output)) in enumerate(zip(run.sent_ns, lengths, strict=True)):
        while front_end.busy_until_ns <= sent_ns:
            waiting += front_end.release()
        front_end.accept(Job(prompt, output, sent_ns, owner=index, prompt=run.prompts[index]), sent_ns)
    while front_end.busy_until_ns < FOREVER_NS:
        waiting += front_end.release()
    ttft_s, tpot_s, ended_ns = np.full(len(run.sent_ns), np.nan), np.full(len(run.sent_ns), np.nan), 0
    while waiting or engine.busy:
        while waiting and (waiting[0].arrived_ns <= engine.now_ns or not engine.busy):
            try:
                engine.submit(waiting.popleft())
            except ValueError:
                continue
        for answer in engine.run(waiting[0].arrived_ns if waiting else FOREVER_NS):
            index, first_ns, last_ns = answer.job.owner, answer.instants[0], answer.instants[-1]
            ttft_s[index] = (first_ns - run.sent_ns[index]) / 1e9
            tpot_s[index] = (last_ns - first_ns) / 1e9 / max(1, len(answer.instants) - 1)
            ended_ns = max(ended_ns, last_ns)
    return ttft_s, tpot_s, ended_ns / 1e9


def fit(runs: Sequence[Run], rules: str, deployment: Deployment | None, known: Mapping[str, Any]) -> Twin:
    """`known` are fields of the Twin that somebody has named: limits among them, its deployment by name. Raises
    PlanError."""
    seen, server = [observe_run(run) for run in runs], runs[0].header.server
    engine = find_engine(rules, str(known["vintage"]))
    kv_tokens = known.get("kv_tokens") or _kv_tokens(runs)
    kv_tokens = kv_tokens or (engine.kv_tokens(deployment) if deployment else UNKNOWN_KV)
    limits = StepLimits(engine, kv_tokens, known.get("running_limit") or _running_limit(runs), known.get("step_tokens"))
    problem = FitProblem(seen, limits, deployment)
    result = problem.solve()
    if problem.choose_step_budget(result):
        result = problem.solve()
    draws = problem.draws(result)
    low, high = np.percentile(draws, (2.5, 97.5), axis=0)
    constants = {
        name: TwinConstant(
            value=_short(value), low=_short(minimum), high=_short(maximum), unit=each.unit, meaning=each.meaning
        )
        for (name, each), value, minimum, maximum in zip(problem.names.items(), np.exp(result), low, high, strict=True)
    }
    facts = {"kv_tokens": kv_tokens, "running_limit": limits.running, "step_tokens": problem.limits.step_tokens}
    return Twin(
        version=version("llm-loadgen"),
        server=str(server.get("name") or ""),
        server_version=str(server.get("version") or ""),
        rules=rules,
        served=str(server.get("model") or ""),
        constants=constants,
        draws=[[_short(each) for each in draw] for draw in draws],
        residual=problem.residual(result),
        runs=[{"run": each.name, "requests": len(each.sent_ns)} for each in seen],
        **{**known, **facts},
    )


class FitProblem:
    """Constants wanted, of these runs: as logarithms, so that none is negative."""

    def __init__(self, runs: Sequence[ObservedRun], limits: StepLimits, deployment: Deployment | None) -> None:
        self.runs, self.limits, self.deployment = runs, limits, deployment
        self.names = HARDWARE_CONSTANTS if deployment else LINEAR_CONSTANTS
        self._prior = np.log(self._begin())
        self._step_time: tuple[Any, Any] = (None, None)
        self._spread = np.array([name.spread for name in self.names.values()])

    def choose_step_budget(self, found: Floats) -> bool:
        """Whether another budget of a step than the rules' own gives as many steps with prompts as there were, and they
        do not: from now on it is that."""
        own, missed = self.limits, {}
        if own.step_tokens is not None or own.policy.prefill != "mixed":
            return False
        for tokens in (None, *STEP_TOKENS):
            self.limits = replace(own, step_tokens=tokens)
            steps = [
                (run.prefill_steps(self.replay_run(run, found)[0]), run.prefill_steps(run.ttft_s)) for run in self.runs
            ]
            missed[tokens] = sum(abs(np.log(simulated / measured)) for simulated, measured in steps)
        best = min(missed, key=lambda tokens: missed[tokens])
        self.limits = replace(own, step_tokens=best) if missed[best] < missed[None] - MIN_IMPROVEMENT else own
        return self.limits is not own

    def solve(self) -> Floats:
        """The logarithms that fit best: downhill from the best of some starts, as the way in has steps of its own."""
        from scipy.optimize import least_squares

        starts = [np.append(self._prior[: -len(REQUEST_CONSTANTS)], np.log(ways)) for ways in REQUEST_STARTS]
        start = min(starts, key=lambda each: float(np.sum(self._all(each) ** 2)))
        result = least_squares(self._all, start, jac=self._jacobian, ftol=1e-5, xtol=1e-4, max_nfev=100)
        return np.asarray(result.x)

    def draws(self, found: Floats) -> Floats:
        """Constants of other samples: blocks of requests drawn again, and the start moved within its spread; by the
        derivatives at what was found."""
        random, jacobian, residuals = np.random.default_rng(0), self._jacobian(found), self._residuals(found)
        number = len(residuals)
        blocks = np.concatenate([np.tile(index * BLOCKS + run.blocks, 3) for index, run in enumerate(self.runs)])
        best = np.linalg.lstsq(jacobian, self._all(found), rcond=None)[0]  # what the steps of the tables left undone
        drawn = []
        for _ in range(DRAWS):
            counts = np.concatenate([random.multinomial(BLOCKS, [1 / BLOCKS] * BLOCKS) for _ in self.runs])
            weight = np.sqrt(counts[blocks].astype(float))
            moved = self._prior + self._spread * random.standard_normal(len(found))
            rows = np.vstack([weight[:, None] * jacobian[:number], jacobian[number:]])
            wanted = np.concatenate([weight * residuals, (found - moved) / self._spread])
            change = best - np.linalg.lstsq(rows, wanted, rcond=None)[0]
            drawn.append(np.exp(found + np.clip(change, -1.5, 1.5)))
        return np.array(drawn)

    def residual(self, found: Floats) -> dict[str, float]:
        """By how much the fit misses, as `Twin.residual` has it."""
        missed: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": [], "rate": []}
        for run in self.runs:
            ttft_s, tpot_s, ended_s = self.replay_run(run, found)
            later = np.array(run.output_tokens) - 1
            pairs = {"ttft": (ttft_s, run.ttft_s), "tpot": (tpot_s, run.tpot_s)}
            pairs["e2e"] = (ttft_s + later * tpot_s, run.ttft_s + later * run.tpot_s)
            for name, (simulated, measured) in pairs.items():
                both = ~np.isnan(simulated) & ~np.isnan(measured)
                parts = [rows for block in range(BLOCKS) if (rows := both & (run.blocks == block)).any()]
                missed[name] += [
                    float(np.log(np.median(simulated[part]) / np.median(measured[part]))) for part in parts
                ]
            missed["rate"].append(float(np.log(ended_s / run.ended_s)))
            was, told = figures(run, run.ttft_s, run.tpot_s, run.ended_s), figures(run, ttft_s, tpot_s, ended_s)
            for name in (name for name in told if name.endswith("p99")):
                missed.setdefault(name, []).append(float(np.log((told[name] or 1) / (was[name] or 1))))
        middle = {name: MEDIAN_TO_DEVIATION * np.median(np.abs(each or [0.0])) for name, each in missed.items()}
        tails = {name: np.sqrt(np.mean(np.square(each))) for name, each in missed.items() if name.endswith("p99")}
        return {name: _short(each) for name, each in (middle | tails).items()}

    def _begin(self) -> list[float]:
        starts = dict(DEFAULT_START)
        if self.deployment:
            framework = self.deployment.framework
            starts |= {
                "bandwidth": 1.0,
                "compute": 1.0,
                "sequence_s": self.limits.rules.sequence_s or framework.sequence_s,
            }
            starts["step_s"] = max(starts["step_s"], self.limits.rules.step_s or framework.step_s)
        else:
            starts |= linear_step_time(self.runs)
        return [starts[name] for name in self.names]

    def replay_run(self, run: ObservedRun, logarithms: Floats) -> tuple[Floats, Floats, float]:
        """With these constants."""
        values = dict(zip(self.names, np.exp(logarithms).tolist(), strict=True))
        step = (*logarithms[: -len(REQUEST_CONSTANTS)],)
        if self._step_time[0] != step:  # its tables are the larger part of a replay
            self._step_time = step, step_time_with(values, self.limits.rules, self.deployment)
        return replay(run, self.limits, self._step_time[1], values)

    def _residuals(self, logarithms: Floats) -> Floats:
        """TTFT of all requests of a run, then TPOT, then E2E, run by run. A TTFT counts beside half a step."""
        parts = []
        for run in self.runs:
            ttft_s, tpot_s, _ = self.replay_run(run, logarithms)
            beside_s = np.nanmedian(run.tpot_s) / 2 if not np.isnan(run.tpot_s).all() else 0.0
            pairs = [(ttft_s + beside_s, run.ttft_s + beside_s), (tpot_s, run.tpot_s)]
            later = np.array(run.output_tokens) - 1
            pairs.append((ttft_s + later * tpot_s, run.ttft_s + later * run.tpot_s))
            for simulated, measured in pairs:
                off = np.log(np.maximum(simulated, 1e-6) / np.maximum(measured, 1e-6))
                weight = np.sqrt(INDEPENDENT_REQUESTS / max(1, (~np.isnan(off)).sum())) / NOISE
                off = np.nan_to_num(np.sign(off) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + (off / OUTLIER) ** 2) - 1)))
                parts.append(off * weight)
        return np.concatenate(parts)

    def _all(self, logarithms: Floats) -> Floats:
        return np.concatenate([self._residuals(logarithms), (logarithms - self._prior) / self._spread])

    def _jacobian(self, logarithms: Floats) -> Floats:
        moves = DERIVATIVE_STEP * np.eye(len(logarithms))
        columns = [
            (self._all(logarithms + move) - self._all(logarithms - move)) / 2 / DERIVATIVE_STEP for move in moves
        ]
        return np.column_stack(columns)


def figures(run: ObservedRun, ttft_s: Floats, tpot_s: Floats, ended_s: float) -> dict[str, float | None]:
    """Return the figures of a run with these latencies, by the names that --assert knows.

    Rates are of the whole run, up to the last token, because a replay has no other measuring window. Only complete
    requests count as requests, as in a report."""
    seen = ~np.isnan(run.ttft_s) & ~np.isnan(ttft_s)
    later = np.array(run.output_tokens) - 1
    result: dict[str, float | None] = {
        "output_tokens_per_s": sum(run.output_tokens) / ended_s,
        "requests_per_s": int((~np.isnan(run.ttft_s)).sum()) / ended_s,
    }
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", ttft_s + later * np.nan_to_num(tpot_s))):
        if len(known := values[seen & ~np.isnan(values)]):
            result |= {f"{name}.p{part}": float(np.percentile(known, part)) for part in (50, 99)}
    return result


def simulate_run(run: ObservedRun, twin: Twin, draw: int | None = None) -> dict[str, float | None]:
    """What the twin makes of the requests of a run, sent when they were."""
    engine, values = find_engine(twin.rules, twin.vintage), twin.values(draw)
    limits = StepLimits(engine, twin.kv_tokens, twin.running_limit, twin.step_tokens)
    return figures(run, *replay(run, limits, step_time_with(values, engine, twin.deployment(engine)), values))


def linear_step_time(runs: Sequence[ObservedRun]) -> dict[str, float]:
    """What steps, sequences, prompt tokens and held tokens take, from stamps alone. While a request decodes, the engine
    does nothing but steps: as many as it gets tokens, which bring others theirs, and compute prompts in between."""
    from scipy.optimize import nnls

    rows, took = [], []
    for run in runs:
        at_s, which, count = run.tokens.T
        owner = which.astype(int)
        first = np.full(len(run.sent_ns), np.inf)
        np.minimum.at(first, owner, at_s)
        last = np.zeros(len(run.sent_ns))
        np.maximum.at(last, owner, at_s)
        held = np.array(run.prompt_tokens)[owner] + np.array(run.output_tokens)[owner] / 2
        prompts = np.where(at_s == first[owner], np.array(run.prompt_tokens)[owner], 0)
        sums = np.vstack([np.zeros(3), np.cumsum(np.column_stack([count, prompts, count * held]), axis=0)])
        for index in np.flatnonzero(run.tpot_s > 0):
            begin, end = np.searchsorted(at_s, (first[index], last[index]), side="right")
            tokens, computed, holding = sums[end] - sums[begin]
            steps = (last[index] - first[index]) / run.tpot_s[index]
            rows.append([steps, tokens, computed, holding])
            took.append(last[index] - first[index])
    matrix, wanted = np.array(rows) / np.array(took)[:, None], np.ones(len(took))
    scale = matrix.mean(axis=0)
    scale[scale == 0] = 1.0
    ridge = np.sqrt(0.01 * len(wanted)) * np.eye(4)  # where columns are alike, each has its part
    result, _ = nnls(np.vstack([matrix / scale, ridge]), np.concatenate([wanted, np.zeros(4)]))
    names = ("step_s", "sequence_s", "token_s", "context_s")
    return dict(zip(names, (np.maximum(result, 0.01) / scale).tolist(), strict=True))


def _kv_tokens(runs: Sequence[Run]) -> int | None:
    """As the server's metrics say."""
    sizes = [line.values.get("kv_tokens") for run in runs for line in run.telemetry if line.source == "server"]
    return max((int(size) for size in sizes if size), default=None)


def _running_limit(runs: Sequence[Run]) -> int | None:
    """Where requests waited again and again while always as many ran, with room in the cache: that many."""
    seen = [line.values for run in runs for line in run.telemetry if line.source == "server"]
    crowded = [each["running"] for each in seen if each.get("waiting") and (each.get("kv_used") or 0) < 0.9]
    maximum = max((each.get("running") or 0 for each in seen), default=0)
    return int(maximum) if crowded.count(maximum) >= 3 else None


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")
