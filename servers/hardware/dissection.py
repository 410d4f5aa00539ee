"""Divides the speed-up from one GPU to the next into factors: compute rate, number format, memory, link, and so on.

Each factor replaces one property of the first GPU by the same property of the second GPU. The factors are applied one
after the other. The gain of a factor is the speed after it was applied, divided by the speed before. The product of all
gains is the whole speed-up.

The gain of a factor depends on the order in which the factors are applied. A second number, its `share`, does not
depend on the order: it is the geometric mean of the gain over all allowed orders (the Shapley value of the logarithm of
the speed).

dissect_serving.py defines the factors of inference, and dissect_training.py the factors of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from loadgen.servers.hardware import Gpu, number_format
from loadgen.servers.hardware.validation import Accuracy

State = TypeVar("State")

FORMATS_BY_BITS = ("fp16", "fp8", "nvfp4")
"""Formats between which a speed-up is divided into steps: 16, 8 and 4 bits."""
SIXTEEN_BITS = ("bf16", "fp16")
NATIVE = "native"
"""Name that stands for the number format with the fewest bits in which a GPU computes."""
COMPUTE_RATE = "compute rate"
NUMBER_FORMAT = "number format"
CAPACITY = "memory capacity"
"""Names of factors. `CAPACITY` lets more requests, or larger settings of a training job, fit into memory."""
UNLIMITED_BYTES = 1e18
"""Memory of the GPU while a speed-up is divided into factors. Only the factor `CAPACITY` changes what fits into memory.
"""


@dataclass(frozen=True, slots=True)
class FactorChange(Generic[State]):
    """A change of one factor, such as the memory bandwidth or the number of GPUs, from its old value to its new value.

    `before` and `after` are these two values as text. `apply` is a function that takes a state, and returns the state
    with the new value. A state is a GPU, a server with its load, or a training job.
    """

    name: str
    before: str
    after: str
    grew: float | None  # The property of the second GPU relative to that of the first; None if it is no number
    apply: Callable[[State], State]
    needs: Sequence[str] = ()  # Names of factors that must be applied before this one


@dataclass(frozen=True, slots=True)
class SpeedFactor:
    """One factor of a speed-up."""

    name: str
    before: str
    after: str
    grew: float | None
    """The property of the second GPU relative to that of the first, by the data sheets. None if it is no number."""
    gain: float
    """Speed with this factor and all factors before it, relative to the speed without this factor."""
    total: float
    """Product of the gains of this factor and all factors before it."""
    share: float
    """Geometric mean of the gain over all orders of the factors. The product over all factors is the speed-up too."""

    @property
    def kind(self) -> str:
        """Name of the factor without the number format, such as `compute rate` for the factor `compute rate, fp16`.

        The factors of several pairs of GPUs can be compared by this name, even if the GPUs have different formats.
        """
        return self.name.partition(",")[0]


@dataclass(frozen=True, slots=True)
class ComparedGpu:
    """One of the GPUs in a comparison: the settings with which it is used, and its speed with these settings."""

    gpu: str
    gpus: int
    format: str
    use: Mapping[str, str]
    """The settings with which the GPU is used, such as the number of requests that fit into its memory."""
    tokens_per_s: float
    spent: Mapping[str, float]
    """Shares of the time that are spent on compute, memory and so on, by name."""
    accuracy: str
    """How far the model was off for this GPU in published measurements, or `not validated`."""

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput in tokens per second, divided by the number of GPUs."""
        return self.tokens_per_s / self.gpus


@dataclass(frozen=True, slots=True)
class Dissection:
    """The speed-up from the GPU `before` to the GPU `after`, divided into factors such as compute rate and memory."""

    before: ComparedGpu
    after: ComparedGpu
    speed_up: float
    """Tokens per second of the second GPU relative to the first."""
    peak_growth: float
    """Peak FLOP/s of the second GPU in its number format, relative to those of the first GPU in its number format."""
    factors: Sequence[SpeedFactor]
    accuracy: str
    """How far speed-ups between these GPUs were off in published measurements, or `not validated`."""


def dissection(
    compared: tuple[ComparedGpu, ComparedGpu],
    cards: tuple[Gpu, Gpu],
    factors: Sequence[SpeedFactor],
    accuracy: Accuracy,
) -> Dissection:
    """Return the Dissection of the speed-up from the first to the second of two compared GPUs.

    `cards` are the two GPUs with their data-sheet figures. `accuracy` is the accuracy of the predicted speed-up. The
    product of the gains of all `factors` must be equal to the speed-up.
    """
    before, after = compared
    speed_up = after.tokens_per_s / before.tokens_per_s
    product = math.prod(factor.gain for factor in factors)
    assert math.isclose(product, speed_up, rel_tol=1e-6), f"factors of {product:.4g} for a speed-up of {speed_up:.4g}"
    peaks = [_peak(card, gpu.format) for card, gpu in zip(cards, compared, strict=True)]
    return Dissection(before, after, speed_up, peaks[1] / peaks[0], factors, str(accuracy))


def _peak(card: Gpu, format_name: str) -> float:
    """Return the peak FLOP/s of the GPU `card` for weights in the number format `format_name`.

    If the tensor cores do not support the format, the GPU computes in bf16.
    """
    return card.peaks.get(number_format(format_name).compute_type, card.flops_per_s)


def divide_speed_up(
    start: State, changes: Sequence[FactorChange[State]], speed: Callable[[State], float]
) -> list[SpeedFactor]:
    """Return the factors of a speed-up, as one SpeedFactor per change in `changes`.

    The changes are applied to the state `start` one after the other. A state is a server with its load, or a training
    job, and `speed` returns its speed. The gain in a SpeedFactor is the growth of the speed that is due to its change.
    """
    logarithms = _log_speeds(start, changes, speed)
    shares = _mean_gains(changes, logarithms)
    factors = []
    for index, change in enumerate(changes):
        before = logarithms[(1 << index) - 1]  # bit i is set if change i is applied
        after = logarithms[(1 << index + 1) - 1]
        factors.append(
            SpeedFactor(
                change.name,
                change.before,
                change.after,
                change.grew,
                gain=math.exp(after - before),
                total=math.exp(after - logarithms[0]),
                share=math.exp(shares[index]),
            )
        )
    return factors


def _log_speeds(
    start: State, changes: Sequence[FactorChange[State]], speed: Callable[[State], float]
) -> dict[int, float]:
    """Return the logarithm of the speed for every allowed set of changes that are applied to the state `start`.

    A key of the result describes a set: bit i is 1 if change i is applied. A change may need other changes
    (`FactorChange.needs`). A set is allowed if it also contains all changes that its members need.
    """
    bits = {change.name: 1 << index for index, change in enumerate(changes)}
    logarithms = {}
    for applied in range(1 << len(changes)):
        chosen = [change for change in changes if bits[change.name] & applied]
        if any(not bits[name] & applied for change in chosen for name in change.needs):
            continue
        state = start
        for change in chosen:
            state = change.apply(state)
        logarithms[applied] = math.log(speed(state))
    return logarithms


def _mean_gains(changes: Sequence[FactorChange[State]], logarithms: Mapping[int, float]) -> list[float]:
    """Return the mean gain of each change, over all orders in which the changes may be applied.

    The gain of a change is the growth of the logarithm of the speed when the change is applied. The gain depends on the
    changes that were applied before. `logarithms` maps each allowed set of applied changes to the logarithm of the
    speed. Bit i of a key is 1 if change i is applied. An order begins with the empty set and adds one change after
    another. An order counts only if all of its sets are in `logarithms`.
    """
    everything = (1 << len(changes)) - 1
    bits = [1 << index for index in range(len(changes))]
    ways = dict.fromkeys(logarithms, 0) | {0: 1}
    rest = dict.fromkeys(logarithms, 0) | {everything: 1}
    for applied in sorted(logarithms):
        for bit in bits:
            if not applied & bit and applied | bit in logarithms:
                ways[applied | bit] += ways[applied]
    for applied in sorted(logarithms, reverse=True):
        for bit in bits:
            if applied & bit and applied ^ bit in logarithms:
                rest[applied ^ bit] += rest[applied]
    return [
        sum(
            ways[applied] * rest[applied | bit] * (logarithms[applied | bit] - logarithms[applied])
            for applied in logarithms
            if not applied & bit and applied | bit in logarithms
        )
        / ways[everything]
        for bit in bits
    ]


def native_format(card: Gpu) -> str:
    """Return the number format with the fewest bits that the tensor cores of a GPU support.

    If this format has 16 bits, the result is `fp16`, because the tensor cores of Volta and Turing do not support bf16.
    On newer GPUs, fp16 and bf16 have equal rates.
    """
    if "fp4" in card.peaks:
        return "mxfp4" if card.architecture.name.startswith("CDNA") else "nvfp4"
    return "fp8" if "fp8" in card.peaks else "fp16"


def compute_name(format_name: str) -> str:
    """Return the name of the factor that compares the compute rates of two GPUs, such as `compute rate, fp16`.

    `format_name` is the number format of the first GPU. The compute rates of both GPUs are compared in this format.
    """
    return f"{COMPUTE_RATE}, {format_name}"


def compute_change(old: Gpu, new: Gpu, format_name: str) -> FactorChange[Gpu]:
    """Return the change that gives a GPU the compute rates of `new` instead of those of `old`.

    The texts `before` and `after` of the change show the peak rates of `old` and `new` in the number format
    `format_name`.
    """
    before, after = _peak(old, format_name), _peak(new, format_name)

    def apply(card: Gpu) -> Gpu:
        architecture = replace(
            card.architecture,
            name=new.architecture.name,
            compute_share=new.architecture.compute_share,
            watts_per_TFLOP=new.architecture.watts_per_TFLOP,
            attention_share=new.architecture.attention_share,
            load_share=new.architecture.load_share,
        )
        return replace(
            card,
            architecture=architecture,
            peaks=new.peaks,
            sms=new.sms,
            clock_hz=new.clock_hz,
            watts=new.watts,
        )

    return FactorChange(compute_name(format_name), _tera(before), f"{_tera(after)} TFLOP/s", after / before, apply)


def memory_change(old: Gpu, new: Gpu) -> FactorChange[Gpu]:
    """Return the change that replaces the memory bandwidth and the size of the L2 cache by those of the GPU `new`.

    The share of the bandwidth that kernels reach is replaced too. `old` is the GPU before the change.
    """

    def apply(card: Gpu) -> Gpu:
        architecture = replace(card.architecture, memory_share=new.architecture.memory_share)
        return replace(
            card, architecture=architecture, memory_bytes_per_s=new.memory_bytes_per_s, l2_bytes=new.l2_bytes
        )

    before, after = old.memory_bytes_per_s, new.memory_bytes_per_s
    return FactorChange("memory bandwidth", _tera(before), f"{_tera(after)} TB/s", after / before, apply)


def link_change(old: Gpu, new: Gpu, gpus: int) -> FactorChange[Gpu]:
    """Return the change that gives a GPU the links of `new` within a machine, instead of those of `old`.

    The texts `before` and `after` of the change show the bandwidth of the link over which `gpus` GPUs communicate, as
    the sum of both directions.
    """

    def apply(card: Gpu) -> Gpu:
        return replace(card, link=new.link, pcie=new.pcie)

    before, after = old.link_for(gpus), new.link_for(gpus)
    return FactorChange(
        "link between GPUs",
        f"{2e-9 * before.bytes_per_s:,.0f}",
        f"{2e-9 * after.bytes_per_s:,.0f} GB/s",
        after.bytes_per_s / before.bytes_per_s,
        apply,
    )


def network_change(old: Gpu, new: Gpu) -> FactorChange[Gpu]:
    """Return the change that gives the GPU `old` the network of the GPU `new`: the link to GPUs in other machines.

    The texts `before` and `after` of the change show the bandwidth of the two links. A bandwidth is the sum of both
    directions.
    """
    before, after = old.machine_link, new.machine_link
    return FactorChange(
        "network",
        f"{2e-9 * before.bytes_per_s:,.0f}",
        f"{2e-9 * after.bytes_per_s:,.0f} GB/s",
        after.bytes_per_s / before.bytes_per_s,
        lambda card: replace(card, network=after),
    )


def capacity_change(old: Gpu, new: Gpu, apply: Callable[[State], State]) -> FactorChange[State]:
    """Return the FactorChange from the memory capacity of the GPU `old` to that of the GPU `new`.

    The capacity limits the settings of a server or of a training job: for example the number of requests in flight, or
    the micro-batch. `apply` takes a state, which is a server with its load or a training job. It returns the state with
    the settings that suit the memory of `new`.
    """
    before, after = old.memory_bytes, new.memory_bytes
    return FactorChange(CAPACITY, f"{before / 1e9:,.0f}", f"{after / 1e9:,.0f} GB", after / before, apply)


def launch_change(old: Gpu, new: Gpu) -> FactorChange[Gpu]:
    """Return the change from the kernel launch times of the GPU `old` to those of the GPU `new`.

    A launch time is the time to start and end a kernel. The change applies to all kernels, but the texts `before` and
    `after` of the change show only the time of an attention kernel.
    """

    def apply(card: Gpu) -> Gpu:
        architecture = replace(
            card.architecture,
            launch_s=new.architecture.launch_s,
            tile_s=new.architecture.tile_s,
            attention_launch_s=new.architecture.attention_launch_s,
            attention_turn_s=new.architecture.attention_turn_s,
            attention_token_s=new.architecture.attention_token_s,
        )
        return replace(card, architecture=architecture)

    before, after = (1e6 * card.architecture.attention_launch_s for card in (old, new))
    return FactorChange("kernel launches", f"{before:.3g}", f"{after:.3g} µs", before / after, apply)


def format_changes(
    formats: tuple[str, str], cards: tuple[Gpu, Gpu], with_format: Callable[[State, str], State]
) -> list[FactorChange[State]]:
    """Return the changes that replace the number format of the first GPU by that of the second GPU.

    Normally there is one change. From 16 bits to 4 bits, there are two changes if the second GPU computes in 8 bits:
    first to 8 bits, and then to 4 bits.

    - `formats` contains the number formats of the two GPUs.
    - `cards` contains the two GPUs.
    - `with_format` is a function. It takes a state (a server with its load, or a training job) and the name of a number
      format, and returns the state with this format.

    The compute rate of the GPU is a separate change (`compute_change`). If the two GPUs compute a format differently,
    for example because only one of them supports it, the change to this format requires that the compute rate was
    changed before.
    """
    old_card, card = cards
    changes: list[FactorChange[State]] = []
    for previous, name in pairwise(_format_steps(*formats, card)):
        if number_format(previous) == number_format(name):
            continue
        growth = _format_growth(previous, name, card)
        needs = [changes[-1].name] if changes else []
        if old_card.effective_format(number_format(name)) != card.effective_format(number_format(name)):
            needs.append(compute_name(formats[0]))
        apply = partial(_apply_format, with_format=with_format, name=name)
        changes.append(FactorChange(f"{NUMBER_FORMAT}, {name}", previous, name, growth, apply, needs))
    return changes


def _apply_format(state: State, with_format: Callable[[State, str], State], name: str) -> State:
    return with_format(state, name)


def _format_steps(old: str, new: str, card: Gpu) -> list[str]:
    """Return the number formats of a stepwise change from `old` to `new`, including `old` and `new`.

    For example, the change from fp16 to nvfp4 has the formats fp16, fp8 and nvfp4 if the tensor cores of `card` compute
    in fp8. A format lies in between if FORMATS_BY_BITS lists it between `old` and `new`, and `card` computes in it.
    Here bf16 counts as fp16. If FORMATS_BY_BITS does not contain `old` or `new`, no format lies in between.
    """
    names = ["fp16" if name in SIXTEEN_BITS else name for name in (old, new)]
    if any(name not in FORMATS_BY_BITS for name in names):
        return [old, new]
    first, last = (FORMATS_BY_BITS.index(name) for name in names)
    between = [name for name in FORMATS_BY_BITS[first + 1 : last] if number_format(name).compute_type in card.peaks]
    return [old, *between, new]


def _format_growth(before: str, after: str, card: Gpu) -> float:
    """Return the factor by which the GPU `card` gets faster if the number format changes from `before` to `after`.

    The factor is the ratio of the peak FLOP/s in the two formats. If the peaks are equal, only the weights get smaller.
    The factor is then the bytes per weight in `before` divided by those in `after`.
    """
    peaks = [_peak(card, name) for name in (before, after)]
    stored = [number_format(name).weight_bytes for name in (before, after)]
    return peaks[1] / peaks[0] if peaks[0] != peaks[1] else stored[0] / stored[1]


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.3g}" if rate < 1e15 else f"{rate / 1e12:,.0f}"
