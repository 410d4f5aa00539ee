"""What a load sees: prompts and answers of given lengths with so many requests in flight, each followed by the next.

In such a closed loop each step decodes for all that run, and on the way of one answer the prompts of all others are
computed once, in steps that they share with decoding (Orca, OSDI 2022; Sarathi, arXiv 2308.16369):

    TPOT = (1 - share) * decode step + share * step with a prompt
    share = interference * (in flight - 1) / output; where that is more than 1, each step has so many prompts
    TTFT = server path + half a step + step with the prompt + queueing

Queueing is that of requests that came at once: the first prompt alone, then as many as fit a step. Requests that find
no room in the KV cache wait for others to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadgen.servers.hardware import constant
from loadgen.servers.hardware.inference import Deployment, Step, lower_bounds_s, predict_step
from loadgen.servers.hardware.numeric import ceiling, elementwise_max, elementwise_min


@dataclass(frozen=True, slots=True)
class Load:
    """Of each request, and how many there are at any time. The last may be an array."""

    prompt_tokens: int
    output_tokens: int
    in_flight: Any


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What such a load sees on average. Numbers, or arrays where `in_flight` was one."""

    ttft_s: Any
    tpot_s: Any
    prefill_s: Any  # All prompts in flight at once: a static batch
    prompt_prefill_s: Any  # One prompt, alone
    decode_step_s: Any  # One token for each that runs, halfway through its answer
    output_tokens_per_s: Any
    running: Any  # How many of those in flight find room in the KV cache


def running_requests(deployment: Deployment, load: Load, memory_fraction: float) -> Any:
    """How many the KV cache holds, of those in flight: each with its prompt and, on average, half its answer."""
    held = load.prompt_tokens + load.output_tokens / 2
    return elementwise_min(elementwise_max(deployment.kv_tokens(memory_fraction) // held, 1), load.in_flight)


def expected_times(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> LoadTimes:
    """With the measured constants of the deployment's framework; never better than `limit_times`."""
    framework, prompt, output = deployment.framework, load.prompt_tokens, load.output_tokens
    best = limit_times(deployment, load, memory_fraction)
    batch, context = best.running, prompt + output / 2
    decode = _total(predict_step(deployment, decoding=batch, context=context))
    without = _total(predict_step(deployment, decoding=batch - 1, context=context)) * (batch > 1)
    share = framework.interference * (batch - 1) / output  # prompts of others per step
    mixed = _total(predict_step(deployment, elementwise_max(share, 1), prompt, decoding=batch, context=context))
    alone = _total(predict_step(deployment, 1, prompt))
    tpot = decode + elementwise_min(share, 1) * (mixed - decode)
    server = framework.server_s + framework.request_s * load.in_flight
    ttft = server + without / 2 + mixed + framework.queueing * _queue_s(deployment, prompt, batch, alone)
    return _with_kv_wait(
        *(load, batch, elementwise_max(ttft, best.prompt_prefill_s), elementwise_max(tpot, best.tpot_s)),
        prefill=elementwise_max(_total(predict_step(deployment, load.in_flight, prompt)), best.prefill_s),
        prompt_prefill=elementwise_max(alone, best.prompt_prefill_s),
        decode_step=elementwise_max(decode, best.decode_step_s),
    )


def limit_times(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> LoadTimes:
    """What the data sheet allows: every FLOP, byte and message at its peak, all three at once, and nothing else."""
    prompt, output = load.prompt_tokens, load.output_tokens
    batch = running_requests(deployment, load, memory_fraction)
    context = prompt + output / 2
    decode, one = lower_bounds_s(deployment, 0, 0, batch, context), lower_bounds_s(deployment, 1, prompt, 0, 0)
    both = lower_bounds_s(deployment, (batch - 1) / output, prompt, batch, context)
    ttft, prefill = _slowest(one), _slowest(lower_bounds_s(deployment, load.in_flight, prompt, 0, 0))
    return _with_kv_wait(
        *(load, batch, ttft, elementwise_max(_slowest(decode), _slowest(both))),
        prefill=prefill,
        prompt_prefill=ttft,
        decode_step=_slowest(decode),
    )


def bottleneck(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> str:
    """The resource that is busiest while the load decodes, at the data sheet's rates."""
    batch = running_requests(deployment, load, memory_fraction)
    context = load.prompt_tokens + load.output_tokens / 2
    parts = lower_bounds_s(deployment, (batch - 1) / load.output_tokens, load.prompt_tokens, batch, context)
    return max(parts, key=lambda name: float(parts[name]))


def decode_step_parts(deployment: Deployment, load: Load, memory_fraction: float = 0.9) -> dict[str, float]:
    """Where the expected decode step goes: seconds by compute, memory, network and overhead."""
    batch = running_requests(deployment, load, memory_fraction)
    context = load.prompt_tokens + load.output_tokens / 2
    took, minimum = (
        predict_step(deployment, decoding=batch, context=context),
        lower_bounds_s(deployment, 0, 0, batch, context),
    )
    busiest = "compute" if minimum["compute"] > minimum["memory"] else "memory"
    split = {"compute": 0.0, "memory": float(took.attention + took.elementwise), "network": float(took.all_reduce)}
    split[busiest] += float(took.gemm)
    return split | {"overhead": float(took.layers + took.step)}


def _with_kv_wait(
    load: Load, batch: Any, ttft: Any, tpot: Any, *, prefill: Any, prompt_prefill: Any, decode_step: Any
) -> LoadTimes:
    """Those that find no room wait until others have ended: TTFT holds that wait."""
    answer = ttft + (load.output_tokens - 1) * tpot
    waiting = answer * (load.in_flight / batch - 1)
    return LoadTimes(
        ttft_s=ttft + waiting,
        tpot_s=tpot,
        prefill_s=prefill,
        prompt_prefill_s=prompt_prefill,
        decode_step_s=decode_step,
        output_tokens_per_s=batch * load.output_tokens / answer,
        running=batch,
    )


def _queue_s(deployment: Deployment, prompt: int, batch: Any, alone: Any) -> Any:
    """What the mean of `batch` prompts that come at once waits longer than one alone. With many groups they drift
    apart, because each answer's end is the next one's start."""
    others = elementwise_max(batch - 1, 1e-9)
    together = elementwise_min(
        elementwise_max(deployment.framework.chunk_tokens // prompt, 1), elementwise_max(others, 1)
    )
    groups = ceiling(others / together)
    group = _total(predict_step(deployment, together, prompt))
    mean = (alone + (batch - 1) * (alone + group * (groups + 1) / 2)) / batch
    return (mean - alone) / (1 + groups / constant("drift_groups"))


def _total(each: Step) -> Any:
    return each.total


def _slowest(by_resource: dict[str, Any]) -> Any:
    return elementwise_max(elementwise_max(by_resource["compute"], by_resource["memory"]), by_resource["network"])
