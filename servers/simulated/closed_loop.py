"""Simulates a closed loop request by request in a simulated engine, to predict its latencies on given hardware.

In a closed loop, all clients send their first request at the same time, and each client sends its next request when the
previous response has ended. If all requests are equally long, the clients stay in step, and each round begins with a
wave of prompts. Random lengths let the clients drift apart. In a short run, requests also wait less for the KV cache
than they do on average in a long run. A formula for the steady state models none of these effects.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from random import Random

from loadgen.servers.hardware import Framework, HardwareError
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.throughput_model import DEFAULT_ROUNDS, Load, LoadTimes, formula_times, limit_times
from loadgen.servers.simulated.discrete_event import FOREVER_NS, TokenTimes, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import TENSORRT_LLM, find_engine
from loadgen.servers.simulated.step_time import StepTime

SEED = 0xCADE


def policy_of(framework: Framework) -> Policy | None:
    """Return the batching policy of an inference engine, or None if its closed loops are not simulated.

    `framework` is the row of the engine in frameworks.csv. Closed loops of vLLM, SGLang, TensorRT-LLM and NIM are
    simulated request by request. For other engines, `formula_times` predicts the latencies.
    """
    if framework.name in ("vLLM", "SGLang"):
        return find_engine(framework.name.lower()).policy
    if framework.name in ("TensorRT-LLM", "NIM"):  # NIM runs TensorRT-LLM
        return TENSORRT_LLM.policy
    return None


def is_replayed(deployment: Deployment) -> bool:
    """Return True if every request of a closed loop on `deployment` is simulated, to predict the latencies.

    The simulation needs an engine with a batching policy (see `policy_of`), and a deployment without pipeline stages.
    The reason is that the simulated engine computes one step at a time, but a pipeline computes several at once.
    """
    return deployment.pipeline == 1 and policy_of(deployment.framework) is not None


_latest_step_time: list[StepTime] = []
"""The last result of `_step_time`, for reuse: all loads of a curve have the same deployment."""


def _step_time(deployment: Deployment) -> StepTime:
    """Return an object that predicts how long a step of the engine takes on a deployment.

    The last result is stored, and returned again for an equal deployment. Deployments count as equal even if their
    maximum numbers of tokens per step differ, because the predictions do not depend on this maximum.
    """
    deployment = replace(deployment, framework=replace(deployment.framework, chunk_tokens=0.0))
    if not _latest_step_time or _latest_step_time[0].deployment != deployment:
        _latest_step_time[:] = [StepTime(deployment)]
    return _latest_step_time[0]


def expected_times(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> LoadTimes:
    """Return the latencies and the throughput that the inference engine is expected to reach under `load`.

    There are two methods:

    - Simulation, if `is_replayed` returns True for the deployment. Every request of the closed loop is simulated. TTFT,
      TPOT and output tokens per second come from this simulation, and all other values come from `formula_times`.
    - Formula, for all other deployments. All values come from `formula_times`.

    `load` may contain several numbers of requests in flight. Each of them is then simulated separately.

    `memory_fraction` is the share of the GPU memory that weights and KV cache may use. Raises HardwareError for an
    option that the method cannot model, such as chunked prefill with the formula.
    """
    formula = formula_times(deployment, load, memory_fraction)
    if not is_replayed(deployment):
        _check_formula_settings(deployment, load)
        return formula
    if isinstance(load.in_flight, int | float):
        ttft_s, tpot_s, rate = _replayed(deployment, load, memory_fraction)
    else:
        import numpy as np

        points = [replace(load, in_flight=int(clients)) for clients in load.in_flight]
        ttft_s, tpot_s, rate = np.array([_replayed(deployment, point, memory_fraction) for point in points]).T
    return replace(formula, ttft_s=ttft_s, tpot_s=tpot_s, output_tokens_per_s=rate, replayed=True)


def _replayed(deployment: Deployment, load: Load, memory_fraction: float) -> tuple[float, float, float]:
    """Return the TTFT, the TPOT and the output tokens per second of a closed loop, by simulating its requests.

    The hardware limits each of these values. If the simulation gives a better value than this limit, the limit is
    returned.
    """
    policy = _policy(deployment, load)
    settings = replace(load.settings, running_limit=policy.running_limit)
    limit = limit_times(deployment, replace(load, settings=settings), memory_fraction)
    summarise = statistics.fmean if load.statistic == "mean" else statistics.median
    requests = replay(deployment, load, memory_fraction)
    ttft_s = max(summarise([request.ttft_s for request in requests]), float(limit.prompt_prefill_s))
    tpots = [request.tpot_s for request in requests if request.tokens > 1]
    tpot_s = max(summarise(tpots) if tpots else 0.0, float(limit.decode_step_s))
    rate = load.in_flight * load.output_tokens / (ttft_s + (load.output_tokens - 1) * tpot_s)
    return ttft_s, tpot_s, min(rate, float(limit.output_tokens_per_s))


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """The latencies of one request of a closed loop that is simulated request by request."""

    ttft_s: float
    tpot_s: float
    """0 if the response has one token."""
    tokens: int


def replay(deployment: Deployment, load: Load, memory_fraction: float) -> list[ReplayedRequest]:
    """Simulate a closed loop on the engine of a deployment, and return the latencies of each request.

    In a closed loop, each client sends its next request when its previous response has ended. The HTTP server in front
    of the engine handles requests one at a time, and needs the time `request_s` for each. A request then takes the
    additional time `server_s`, without waiting for other requests. Both times are columns of frameworks.csv.
    `memory_fraction` is the share of the GPU memory that weights and KV cache may use.
    """
    policy = _policy(deployment, load)
    longest = 2 + round((load.prompt_tokens + load.output_tokens) * (1 + load.spread))
    kv_tokens = max(deployment.kv_tokens(memory_fraction), 2 * policy.block_size + longest)
    engine = VirtualEngine(Scheduler(policy, kv_tokens), _step_time(deployment))
    return [_latencies(times) for times in _Clients(deployment.framework, load).run(engine)]


def _policy(deployment: Deployment, load: Load) -> Policy:
    """Return the batching policy with which the engine of `deployment` is simulated.

    `load.settings` contains settings of the engine for this load, such as the maximum number of sequences in one step.
    """
    policy = policy_of(deployment.framework)
    assert policy is not None
    settings = load.settings
    policy = replace(
        policy,
        prefix_cache=False,
        step_tokens=int(deployment.framework.chunk_tokens),
        running_limit=settings.running_limit or policy.running_limit,
        batch_wait_steps=settings.batch_wait_steps,
        receive_steps=settings.receive_steps,
    )
    policy = policy.with_serving(deployment.cache_hit_rate, deployment.chunked_prefill)
    _check_settings(deployment, policy)
    return policy


def _check_formula_settings(deployment: Deployment, load: Load) -> None:
    """Raise HardwareError if the user sets an option that the formula for this deployment does not model.

    Options such as `--chunked-prefill` need a simulation of every request, which is not available for all deployments.
    """
    options = {
        "--chunked-prefill": deployment.chunked_prefill != "",
        "--batch-wait": load.settings.batch_wait_steps > 0,
        "--receive-interval": load.settings.receive_steps > 1,
        "--seconds": load.seconds < math.inf,
        "--spread": load.spread > 0,
        "--rounds": load.rounds != DEFAULT_ROUNDS,
        "--statistic": load.statistic != "mean",
    }
    for option, is_set in options.items():
        if is_set:
            raise HardwareError(
                f"{option} is modelled for vllm, sglang, trtllm and nim without pipeline stages, not for "
                f"{deployment.framework.name} with --pp {deployment.pipeline}"
            )


def _check_settings(deployment: Deployment, policy: Policy) -> None:
    """Raise HardwareError if a setting of the scheduler has no effect on an engine with this policy.

    The settings are `--batch-wait` and `--receive-interval`.
    """
    name = deployment.framework.name
    if policy.batch_wait_steps and (policy.chunked or policy.prefill != "mixed"):
        raise HardwareError(
            f"--batch-wait has no effect on {name}: choose the framework trtllm or nim, and leave out --chunked-prefill"
        )
    if policy.receive_steps > 1 and policy.prefill != "chunked-first":
        raise HardwareError(f"--receive-interval has no effect on {name}: choose the framework sglang")


class _Clients:
    """Simulates the clients of a closed loop, and the HTTP server between the clients and the engine."""

    def __init__(self, framework: Framework, load: Load) -> None:
        self._path_ns = round(1e9 * framework.server_s)
        self._request_ns = round(1e9 * framework.request_s)
        self._clients = int(load.in_flight)
        self._lengths = _lengths(load)
        self._arriving: list[tuple[int, int, Job]] = []  # a heap: time at the scheduler, unique number, job
        self._last_ns = round(1e9 * load.seconds) if load.seconds < FOREVER_NS / 1e9 else FOREVER_NS
        self._numbers = count()
        self._free_ns = 0  # the HTTP server has handled all earlier requests

    def run(self, engine: VirtualEngine) -> Iterator[TokenTimes]:
        """Simulate all requests of the closed loop. Yield the token times of each request when its response has ended.

        The client whose response has ended then sends its next request. The `owner` of a job is the time in ns at which
        the client sent the request.
        """
        for _ in range(self._clients):
            self._send(0)
        arriving = self._arriving
        while arriving or engine.busy:
            while arriving and (arriving[0][0] <= engine.now_ns or not engine.busy):
                engine.submit(heappop(arriving)[2])
            for times in engine.run(arriving[0][0] if arriving else FOREVER_NS):
                yield times
                self._send(times.instants[-1])

    def _send(self, now_ns: int) -> None:
        """Send the next request at `now_ns`, unless no request is left or the time of the closed loop is over."""
        lengths = next(self._lengths, None) if now_ns <= self._last_ns else None
        if lengths is None:
            return
        self._free_ns = max(now_ns, self._free_ns) + self._request_ns
        arrival_ns = self._free_ns + self._path_ns
        heappush(self._arriving, (arrival_ns, next(self._numbers), Job(*lengths, arrival_ns, owner=now_ns)))


def _lengths(load: Load) -> Iterator[tuple[int, int]]:
    """Yield the prompt tokens and the output tokens of each request of a closed loop."""
    random = Random(SEED)  # noqa: S311 - not secret
    for _ in range(load.rounds * int(load.in_flight)):
        prompt, output = (
            max(1, round(tokens * random.uniform(1 - load.spread, 1 + load.spread)))
            for tokens in (load.prompt_tokens, load.output_tokens)
        )
        yield prompt, output


def _latencies(times: TokenTimes) -> ReplayedRequest:
    """Return the latencies of a request."""
    tokens = len(times.instants)
    first_ns, last_ns = times.instants[0], times.instants[-1]
    tpot_s = (last_ns - first_ns) / 1e9 / (tokens - 1) if tokens > 1 else 0.0
    return ReplayedRequest((first_ns - times.job.owner) / 1e9, tpot_s, tokens)
