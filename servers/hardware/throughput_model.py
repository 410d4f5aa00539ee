"""Predicts latency and throughput of a closed loop with a fixed number of requests in flight.

`formula_times` is a formula for the steady state. For engines whose scheduling rules are known, `expected_times` in
loadgen/servers/simulated/closed_loop.py replays the closed loop request by request.

Each step decodes one token for every running request. Some steps also compute prompts (Orca, OSDI 2022; Sarathi, arXiv
2308.16369). In a closed loop, a new request replaces each request that ends. While one request decodes its output
tokens, each of the other requests in flight ends about once, and the prompt of its replacement must be computed:

    prompts = interference * (in flight - 1) / output tokens
    TPOT    = (1 - prompts) * decode step + prompts * step with a prompt
    TTFT    = server path + decode step / 2 + step with the prompt + queueing.

- `prompts` is the mean number of prompts per step. If it exceeds 1, every step computes `prompts` prompts, and TPOT is
  the duration of such a step.
- `interference` is the fraction of other requests' prompts that are computed while a request decodes. The remaining
  prompts are computed while the request waits for its first token.
- `server path` is the time in the server outside of steps: from the arrival of a request to its first step, and from
  the first token to the client.
- `queueing` is the wait of requests that arrive at the same time. The first prompt is computed alone, the others in
  groups that fit into a step.

Requests that do not fit into the KV cache, or exceed the running limit, wait until other requests have ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from loadgen.servers.hardware import constant
from loadgen.servers.hardware.inference import Deployment, lower_bounds_s, predict_step, start_times_s
from loadgen.servers.hardware.numeric import ceiling, elementwise_max, elementwise_min

MEMORY_FRACTION = 0.9
"""Default share of the GPU memory that weights and KV cache may use."""
DEFAULT_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the scheduler of an inference engine, which the user chooses when the engine starts.

    The defaults of these fields stand for the defaults of the engine.
    """

    running_limit: int | None = None
    """Maximum sequences in one step (vLLM: `--max-num-seqs`, TensorRT-LLM: `--max_batch_size`)."""
    batch_wait_steps: int = 0
    """Maximum decode steps for which prompts wait for further prompts (TensorRT-LLM: `batch_wait_timeout_iters`)."""

    receive_steps: int = 1
    """Decode steps between two checks for new requests (SGLang: `--scheduler-recv-interval`)."""


DEFAULT_SETTINGS = EngineSettings()


@dataclass(frozen=True, slots=True)
class Load:
    """Token counts of each request, and the number of requests in flight, which may be an array."""

    prompt_tokens: int
    output_tokens: int
    in_flight: Any
    spread: float = 0.0
    """Maximum relative deviation of a request's token counts from `prompt_tokens` and `output_tokens`. The counts are
    uniformly distributed."""
    rounds: int = DEFAULT_ROUNDS
    """Number of requests that each client of a closed loop sends, one after the other. All clients start at the same
    time."""
    statistic: Literal["mean", "median"] = "mean"
    """Statistic of TTFT and TPOT over all requests."""
    seconds: float = math.inf
    """Time after which the clients of a closed loop send no further request, even if rounds are left."""
    settings: EngineSettings = DEFAULT_SETTINGS


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Average times and throughput under a load. The values are arrays if `in_flight` is an array."""

    ttft_s: Any
    tpot_s: Any
    prefill_s: Any  # All prompts in flight at once, as a static batch
    prompt_prefill_s: Any  # One prompt alone
    decode_step_s: Any  # One token for each running request, halfway through its response
    output_tokens_per_s: Any
    running: Any  # Requests in flight that run at the same time
    replayed: bool = False  # TTFT, TPOT and throughput come from a replayed closed loop, not from a formula


def running_requests(deployment: Deployment, load: Load, memory_fraction: float) -> Any:
    """Return how many of the requests in flight run at the same time, at least 1. The other requests wait.

    Two limits apply:

    - Running requests must fit into the KV cache. Each holds `prompt_tokens + output_tokens / 2` tokens on average: its
      prompt and half of its response.
    - The settings of `load` may contain a maximum number of running requests (`running_limit`).

    `memory_fraction` is the fraction of the GPU memory that weights and KV cache may use.
    """
    request_tokens = load.prompt_tokens + load.output_tokens / 2
    capacity = elementwise_max(deployment.kv_tokens(memory_fraction) // request_tokens, 1)
    if load.settings.running_limit is not None:
        capacity = elementwise_min(capacity, load.settings.running_limit)
    return elementwise_min(capacity, load.in_flight)


def formula_times(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> LoadTimes:
    """Return the latencies and the throughput that the inference engine is expected to reach under `load`.

    The times come from a formula for the steady state of a closed loop, which includes the measured overheads of the
    engine. No time is shorter than the hardware limit (see `limit_times`). `memory_fraction` is the fraction of the GPU
    memory that weights and KV cache may use.

    Some fields of the load are not used, because they matter only if the closed loop is simulated: `spread`, `rounds`,
    `statistic`, `seconds`, and all `settings` except the running limit.
    """
    framework = deployment.framework
    prompt, cached = deployment.prompt_parts(load.prompt_tokens)
    limit = limit_times(deployment, load, memory_fraction)
    batch = limit.running
    context = load.prompt_tokens + load.output_tokens / 2
    decode = predict_step(deployment, decoding=batch, context=context).total
    decode_of_others = predict_step(deployment, decoding=batch - 1, context=context).total * (batch > 1)
    prompts_per_step = framework.interference * (batch - 1) / load.output_tokens  # of other requests
    mixed = predict_step(
        deployment, elementwise_max(prompts_per_step, 1), prompt, decoding=batch, context=context, before=cached
    ).total
    prompt_alone = predict_step(deployment, 1, prompt, before=cached).total
    static_batch = predict_step(deployment, load.in_flight, prompt, before=cached).total
    tpot = decode + elementwise_min(prompts_per_step, 1) * (mixed - decode)
    server = framework.server_s + framework.request_s * load.in_flight
    queueing = framework.queueing * _queueing_time(deployment, load.prompt_tokens, batch, prompt_alone)
    tpot = elementwise_max(tpot, limit.tpot_s)
    ttft = elementwise_max(server + decode_of_others / 2 + mixed + queueing, limit.prompt_prefill_s)
    return _with_kv_wait(
        load,
        batch,
        ttft,
        tpot,
        prefill=elementwise_max(static_batch, limit.prefill_s),
        prompt_prefill=elementwise_max(prompt_alone, limit.prompt_prefill_s),
        decode_step=elementwise_max(decode, limit.decode_step_s),
    )


def limit_times(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> LoadTimes:
    """Return the shortest times under `load` that the data sheet allows.

    The result assumes that compute, memory and network work at their peak rates and fully overlap.

    - The throughput includes the work on prompts, which needs the same resources as decoding.
    - TPOT does not include work on prompts, because an engine may compute the prompts of all requests before it
      decodes.
    - TTFT is the time to compute a single prompt, without any wait.
    """
    prompt, cached = deployment.prompt_parts(load.prompt_tokens)
    batch = running_requests(deployment, load, memory_fraction)
    context = load.prompt_tokens + load.output_tokens / 2
    decode = _slowest(lower_bounds_s(deployment, 0, 0, batch, context))
    one_prompt = _slowest(lower_bounds_s(deployment, 1, prompt, before=cached))
    prompts_per_step = (batch - 1) / load.output_tokens
    mixed = _slowest(lower_bounds_s(deployment, prompts_per_step, prompt, batch, context, cached))
    steady = _with_kv_wait(
        load,
        batch,
        one_prompt,
        elementwise_max(decode, mixed),
        prefill=_slowest(lower_bounds_s(deployment, load.in_flight, prompt, before=cached)),
        prompt_prefill=one_prompt,
        decode_step=decode,
    )
    return replace(steady, ttft_s=one_prompt, tpot_s=decode)


def bottleneck(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> str:
    """Return the resource that limits the server under `load`: `compute`, `memory` or `network`.

    All resources are assumed to work at the rates of the data sheet. `memory_fraction` is the fraction of the GPU
    memory that weights and KV cache may use.
    """
    batch = running_requests(deployment, load, memory_fraction)
    context = load.prompt_tokens + load.output_tokens / 2
    prompt, cached = deployment.prompt_parts(load.prompt_tokens)
    bounds = lower_bounds_s(deployment, (batch - 1) / load.output_tokens, prompt, batch, context, cached)
    return max(bounds, key=lambda name: float(bounds[name]))


def decode_step_parts(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> dict[str, float]:
    """Return the expected seconds of a decode step, divided into five causes:

    - `compute`, `memory` and `network`: the time for which the step waits for these resources.
    - `latency`: the time to start GEMMs, attention and all-reduces, which does not depend on their size.
    - `overhead`: the time of the engine outside of kernels, such as gaps between kernels, scheduling and sampling.
    """
    batch = running_requests(deployment, load, memory_fraction)
    context = load.prompt_tokens + load.output_tokens / 2
    step = predict_step(deployment, decoding=batch, context=context)
    bounds = lower_bounds_s(deployment, 0, 0, batch, context)
    gemm_bound = "compute" if bounds["compute"] > bounds["memory"] else "memory"
    gemm_starts, attention_starts, reduce_starts = start_times_s(deployment)
    seconds = {
        "compute": 0.0,
        "memory": max(0.0, float(step.attention - attention_starts)) + float(step.elementwise),
        "network": max(0.0, float(step.all_reduce - reduce_starts)),
        "latency": gemm_starts + min(attention_starts, float(step.attention)) + min(reduce_starts, step.all_reduce),
        "overhead": float(step.layers + step.step),
    }
    seconds[gemm_bound] += max(0.0, float(step.gemm) - gemm_starts)
    return {name: float(value) for name, value in seconds.items()}


def _with_kv_wait(
    load: Load, batch: Any, ttft: Any, tpot: Any, *, prefill: Any, prompt_prefill: Any, decode_step: Any
) -> LoadTimes:
    """Return the times under `load`. The TTFT is `ttft` plus the mean time that a request waits before it runs.

    `batch` is the number of requests that run at the same time. The other requests in flight wait, for example because
    no more requests fit into the KV cache. The mean wait is:

        wait     = response * (in_flight / batch - 1)
        response = ttft + (output_tokens - 1) * tpot

    Here `response` is the duration of a response without the wait. All times are in seconds. The result contains
    `tpot`, `prefill`, `prompt_prefill` and `decode_step` unchanged.
    """
    response = ttft + (load.output_tokens - 1) * tpot
    kv_wait = response * (load.in_flight / batch - 1)
    return LoadTimes(
        ttft_s=ttft + kv_wait,
        tpot_s=tpot,
        prefill_s=prefill,
        prompt_prefill_s=prompt_prefill,
        decode_step_s=decode_step,
        output_tokens_per_s=batch * load.output_tokens / response,
        running=batch,
    )


def _queueing_time(deployment: Deployment, prompt_tokens: int, batch: Any, prompt_alone: Any) -> Any:
    """Return the mean time that a prompt waits for other prompts, in a closed loop with `batch` running requests.

    `prompt_alone` is the duration of a step with only one prompt. The calculation first assumes that all prompts arrive
    together: one prompt is computed alone, and the others follow in groups that fit into a step. In a closed loop,
    however, the arrivals drift apart, because each request starts when another request ends. They drift further apart
    if there are more groups. The waiting time is therefore divided by `1 + groups / drift_groups`.
    """
    prompt, cached = deployment.prompt_parts(prompt_tokens)
    following = elementwise_max(batch - 1, 1e-9)
    prompts_per_step = elementwise_max(deployment.framework.chunk_tokens // prompt, 1)
    group_size = elementwise_min(prompts_per_step, elementwise_max(following, 1))
    groups = ceiling(following / group_size)
    group = predict_step(deployment, group_size, prompt, before=cached).total
    mean = (prompt_alone + (batch - 1) * (prompt_alone + group * (groups + 1) / 2)) / batch
    return (mean - prompt_alone) / (1 + groups / constant("drift_groups"))


def _slowest(bounds: dict[str, Any]) -> Any:
    return elementwise_max(elementwise_max(bounds["compute"], bounds["memory"]), bounds["network"])
