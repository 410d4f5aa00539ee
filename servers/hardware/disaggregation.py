"""Predicts a closed loop in which separate workers compute prompts and decode (DistServe, arXiv 2401.09670).

A request waits for a prefill worker, which computes the prompt and sends the KV cache to a decode worker over the
network. Decode steps contain no prompts. In a closed loop, every request in flight is either at a prefill worker or
decoding, so the slower group of workers determines the throughput.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loadgen.servers.hardware.inference import Deployment, predict_step
from loadgen.servers.hardware.numeric import as_float, elementwise_max, elementwise_min, where
from loadgen.servers.hardware.roofline import Limits
from loadgen.servers.hardware.throughput_model import Load, LoadTimes, formula_times, limit_times
from loadgen.servers.hardware.validation import accuracies

ITERATIONS = 40
"""Steps of the fixed-point iteration for the number of decoding requests. The result changes by less than 0.1%."""


def disaggregated_times(
    deployment: Deployment, load: Load, memory_fraction: float = 0.9, prefill_workers: float = 1.0
) -> LoadTimes:
    """Return the expected times of a closed loop, if separate workers compute prompts (prefill) and decode.

    The result applies to one decode worker with `prefill_workers` prefill workers. This number may be a fraction: it is
    0.5 if two decode workers share a prefill worker. Each worker is a separate `deployment`. `load.in_flight` is the
    number of requests in flight per decode worker. `memory_fraction` is the fraction of the GPU memory for weights and
    KV cache.
    """
    formula = formula_times(deployment, load, memory_fraction)
    limit = limit_times(deployment, load, memory_fraction)
    prompt, cached = deployment.prompt_parts(load.prompt_tokens)
    steps = load.output_tokens - 1
    context = load.prompt_tokens + load.output_tokens / 2
    clients = as_float(load.in_flight)
    group = max(deployment.attention_data, int(deployment.framework.chunk_tokens // prompt), 1)
    group_s = predict_step(deployment, group, prompt, before=cached).total
    prompts_per_s = prefill_workers * group / group_s
    path_s = deployment.framework.server_s + transfer_s(deployment, load.prompt_tokens)
    alone_s = predict_step(deployment, 1, prompt, before=cached).total
    decoding: Any = elementwise_max(1.0, limit.running * 1.0)
    for _ in range(ITERATIONS):
        tpot_s = elementwise_max(predict_step(deployment, decoding=decoding, context=context).total, limit.tpot_s)
        rate = elementwise_min(prompts_per_s, clients / (path_s + alone_s + steps * tpot_s))
        busy = elementwise_min(rate / prompts_per_s, 0.98)
        wait_s = busy / (2 * (1 - busy)) * group_s / group
        rate = elementwise_min(rate, clients / (path_s + alone_s + wait_s + steps * tpot_s))
        target = elementwise_min(elementwise_max(rate * steps * tpot_s, 1.0), limit.running * 1.0)
        decoding = (decoding + target) / 2
    ttft_s = elementwise_max(clients / rate - steps * tpot_s, limit.prompt_prefill_s)
    ttft_s = where(clients <= 1, path_s + alone_s, ttft_s)
    tokens_per_s = clients * load.output_tokens / (ttft_s + steps * tpot_s)
    return replace(formula, ttft_s=ttft_s, tpot_s=tpot_s, output_tokens_per_s=tokens_per_s, replayed=False)


def transfer_s(deployment: Deployment, tokens: int) -> float:
    """Return the time to send the KV cache of one prompt from a prefill worker to a decode worker.

    Each GPU of the worker sends its share over its own port.
    """
    link = deployment.gpu.machine_link
    group = deployment.tensor * deployment.pipeline
    return link.nccl_s + tokens * deployment.kv_token_bytes / group / (link.bytes_per_s * link.share)


def with_prefill_workers(limits: Limits, deployment: Deployment, prefill_workers: int) -> Limits:
    """Return the limits of a server with prefill workers.

    The GPUs of the prefill workers are added to the number of GPUs, so the throughput per GPU is lower. The expected
    figures are marked as not validated, because they were never compared with measurements of such a server.
    """
    gpus = limits.gpus + prefill_workers * deployment.gpus
    share = limits.gpus / gpus
    limit, expected = (
        replace(figures, output_tokens_per_s_per_gpu=figures.output_tokens_per_s_per_gpu * share)
        for figures in (limits.limit, limits.expected)
    )
    accuracy = accuracies(deployment, separate_workers=True)
    return replace(limits, gpus=gpus, limit=limit, expected=expected, accuracy=accuracy)
