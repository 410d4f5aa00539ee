"""Explains why one GPU serves a model faster than another GPU: divides the speed-up into factors.

Each factor comes from one property in which the two servers differ, such as the memory bandwidth or the engine.

The speed of a server is the number of output tokens that it generates per second. The engine is assumed to compute its
steps without pauses. The time that requests spend between the client and the engine does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.servers.hardware import Gpu, HardwareError, gpu, number_format
from loadgen.servers.hardware.dissection import (
    NATIVE,
    UNLIMITED_BYTES,
    ComparedGpu,
    Dissection,
    FactorChange,
    capacity_change,
    compute_change,
    dissection,
    divide_speed_up,
    format_changes,
    launch_change,
    link_change,
    memory_change,
    native_format,
)
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.technology import refuse_unused_networks, scaling_changes
from loadgen.servers.hardware.throughput_model import MEMORY_FRACTION, Load, decode_step_parts, formula_times
from loadgen.servers.hardware.validation import Accuracy, PredictedLoad, accuracies, speed_up_accuracy

MOST_IN_FLIGHT = 1024
"""Maximum requests in flight on a replica if their number is not given: the default of vLLM (`max_num_seqs`)."""


@dataclass(frozen=True, slots=True)
class ServedBy:
    """One of the compared GPUs, and how the model is served on it."""

    gpu: str
    format: str = NATIVE
    framework: str = "vllm"
    tensor: int = 1
    replicas: int = 1
    in_flight: int | None = None
    """Requests in flight on all replicas. None for as many as fit, at most MOST_IN_FLIGHT on each replica."""
    network: str = ""  # Link within a machine, as of `loadgen limits --network`; empty for the link of the GPU


@dataclass(frozen=True, slots=True)
class ServingState:
    """A server and its load, at one step of a comparison of two GPUs.

    The comparison begins with the server on the first GPU. Each step replaces one property of this server, such as its
    memory bandwidth, by that of the server on the second GPU.
    """

    deployment: Deployment
    load: Load
    replicas: int
    in_flight: int  # On each replica

    @property
    def predicted_load(self) -> PredictedLoad:
        """The load of one replica, for the accuracy of the prediction."""
        return PredictedLoad(self.load.prompt_tokens, self.load.output_tokens, self.in_flight)


def dissect_serving(
    uses: Sequence[ServedBy], model: str, prompt_tokens: int, output_tokens: int, file: Path | None = None
) -> list[Dissection]:
    """Return the speed-up from each GPU in `uses` to the next GPU in `uses`, divided into factors.

    Each item of `uses` names a GPU and states how `model` is served on this GPU. `file` is a TOML file with additional
    GPUs and models. Raises HardwareError if the memory of a GPU is too small for the model and one request.
    """
    load = Load(prompt_tokens, output_tokens, 1)
    states = [_state(use, model, load, file) for use in uses]
    compared = [_compared(use, state, gpu(use.gpu, file).name) for use, state in zip(uses, states, strict=True)]
    results = []
    for index in range(len(uses) - 1):
        before, after = states[index], states[index + 1]
        factors = divide_speed_up(_unlimited(before), _changes(before, after), serving_speed)
        accuracy = _speed_up_accuracy(before, after)
        cards = before.deployment.gpu, after.deployment.gpu
        results.append(dissection((compared[index], compared[index + 1]), cards, factors, accuracy))
    return results


def _speed_up_accuracy(before: ServingState, after: ServingState) -> Accuracy:
    """Return how far predictions of the speed-up from `before` to `after` were from measurements.

    Measurements exist only for one replica on each GPU, with equal TP and an equal number of requests in flight. In all
    other cases, the result is "not validated".
    """
    if (before.replicas, before.in_flight) != (1, after.in_flight) or after.replicas != 1:
        return Accuracy(validated=False)
    return speed_up_accuracy(before.deployment, after.deployment, before.predicted_load)


def serving_speed(state: ServingState) -> float:
    """Return the output tokens per second of all replicas."""
    engine = replace(state.deployment.framework, server_s=0.0, request_s=0.0, queueing=0.0)
    load = replace(state.load, in_flight=state.in_flight)
    times = formula_times(replace(state.deployment, framework=engine), load)
    return state.replicas * float(times.output_tokens_per_s)


def _state(use: ServedBy, model: str, load: Load, file: Path | None) -> ServingState:
    changes = scaling_changes(None, None, use.network)
    format_name = native_format(gpu(use.gpu, file)) if use.format == NATIVE else use.format
    deployment = make_deployment(use.gpu, model, format_name, use.tensor, 1, use.framework, file=file, changes=changes)
    refuse_unused_networks(changes, in_machine=deployment.sends_in_machine, between_machines=False)
    request_tokens = load.prompt_tokens + load.output_tokens
    fitting = deployment.kv_tokens(MEMORY_FRACTION) // request_tokens
    if not fitting:
        raise HardwareError(
            f"{deployment.model.name} on {deployment.gpus} x {deployment.gpu.name}: not even one request of "
            f"{request_tokens:,} tokens fits into the KV cache; choose more GPUs (--tp), or shorter requests"
        )
    wanted = MOST_IN_FLIGHT if use.in_flight is None else max(1, use.in_flight // use.replicas)
    return ServingState(deployment, load, use.replicas, min(wanted, fitting))


def _compared(use: ServedBy, state: ServingState, name: str) -> ComparedGpu:
    deployment = state.deployment
    accuracy = accuracies(deployment, load=state.predicted_load)["TPOT"]
    seconds = decode_step_parts(deployment, replace(state.load, in_flight=state.in_flight), MEMORY_FRACTION)
    running = state.in_flight * state.replicas
    lowered = use.in_flight is not None and running < use.in_flight
    settings = {
        "requests in flight": f"{running:,} of {use.in_flight:,}" if lowered else f"{running:,}",
        "TP": str(use.tensor),
        "replicas": str(use.replicas),
        "engine": deployment.framework.name,
        "link": deployment.gpu.link_for(deployment.tensor).name,
        "KV cache": f"{8 * deployment.kv_bytes:.0f} bits",
    }
    return ComparedGpu(
        name,
        deployment.gpus * use.replicas,
        deployment.weights.name,
        settings,
        serving_speed(state),
        {name: value / sum(seconds.values()) for name, value in seconds.items()},
        f"TPOT {accuracy}",
    )


def _unlimited(state: ServingState) -> ServingState:
    gpu = replace(state.deployment.gpu, memory_bytes=UNLIMITED_BYTES)
    return replace(state, deployment=replace(state.deployment, gpu=gpu))


def _changes(old: ServingState, new: ServingState) -> list[FactorChange[ServingState]]:
    """Return the changes that turn the state `old` into the state `new`, in the order in which they are applied.

    Each change replaces one property of `old` by the same property of `new`, such as the memory or the engine.
    """
    before, after = old.deployment, new.deployment
    changes = [
        _on_gpu(compute_change(before.gpu, after.gpu, before.weights.name)),
        *format_changes((before.weights.name, after.weights.name), (before.gpu, after.gpu), _with_format),
        *_kv_changes(before, after),
        _on_gpu(memory_change(before.gpu, after.gpu)),
        capacity_change(before.gpu, after.gpu, lambda state: replace(state, in_flight=new.in_flight)),
    ]
    if before.tensor > 1 or after.tensor > 1:
        changes.append(_on_gpu(link_change(before.gpu, after.gpu, max(before.tensor, after.tensor))))
    changes.append(_on_gpu(launch_change(before.gpu, after.gpu)))
    if before.framework != after.framework:
        apply = partial(_with_deployment, framework=after.framework)
        names = [engine.name.replace("TensorRT", "TRT") for engine in (before.framework, after.framework)]
        changes.append(FactorChange("engine", names[0], names[1], None, apply))
    gpus = before.gpus * old.replicas, after.gpus * new.replicas
    if (before.tensor, old.replicas) != (after.tensor, new.replicas):
        growth = gpus[1] / gpus[0]
        changes.append(
            FactorChange("number of GPUs", str(gpus[0]), str(gpus[1]), growth, partial(_with_gpus, like=new))
        )
    return changes


def _kv_changes(before: Deployment, after: Deployment) -> list[FactorChange[ServingState]]:
    """Return the change of the KV cache format between two GPUs, as a list of one item.

    `before` is the deployment on the first GPU, and `after` is the deployment on the second GPU. The list is empty if
    both formats have equally many bits.
    """
    if before.kv_bytes == after.kv_bytes:
        return []
    bits = [f"{8 * deployment.kv_bytes:.0f}" for deployment in (before, after)]
    apply = partial(_with_deployment, kv_bytes=after.kv_bytes)
    return [FactorChange("KV cache format", bits[0], f"{bits[1]} bits", before.kv_bytes / after.kv_bytes, apply)]


def _on_gpu(change: FactorChange[Gpu]) -> FactorChange[ServingState]:
    """Return a change of a serving state that applies `change` to the GPU in this state."""

    def apply(state: ServingState) -> ServingState:
        return _with_deployment(state, gpu=change.apply(state.deployment.gpu))

    return FactorChange(change.name, change.before, change.after, change.grew, apply)


def _with_format(state: ServingState, name: str) -> ServingState:
    return _with_deployment(state, weights=number_format(name))


def _with_deployment(state: ServingState, **fields: Any) -> ServingState:
    return replace(state, deployment=replace(state.deployment, **fields))


def _with_gpus(state: ServingState, like: ServingState) -> ServingState:
    """Return a copy of `state` with the number of GPUs from another state, `like`.

    Two fields are copied from `like`: the number of GPUs that share a layer (`tensor`), and the number of replicas.
    """
    return replace(_with_deployment(state, tensor=like.deployment.tensor), replicas=like.replicas)
