"""What holds of the hardware model for any GPU, model and load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.servers.hardware import HardwareError, tables
from loadgen.servers.hardware.inference import ARCHITECTURES, Deployment
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import Load, formula_times, limit_times

GPUS = [row["gpu"] for row in tables()["gpus"]]
MODELS = ["Llama-2-7B", "Llama-2-70B", "Llama-3.1-8B", "Qwen3-0.6B", "Bloom-7B1", "TinyLlama-1.1B"]
FRAMEWORKS = [row["framework"] for row in tables()["frameworks"]]
BETTER = ("ttft_s", "tpot_s", "prefill_s", "decode_step_s")

named_deployments = st.builds(
    make_deployment,
    st.sampled_from(GPUS),
    st.sampled_from(MODELS),
    st.sampled_from(["bf16", "fp8", "int8", "int4", "nvfp4"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from(FRAMEWORKS),
)
deployments = st.builds(replace, named_deployments, architecture=st.sampled_from(sorted(ARCHITECTURES)))
loads = st.builds(Load, st.integers(1, 8000), st.integers(1, 4000), st.sampled_from([1, 3, 16, 64, 500]))


def times(made: Deployment, load: Load) -> tuple[object, object] | None:
    """Expected and limit; None where the model does not fit."""
    try:
        return formula_times(made, load), limit_times(made, load)
    except HardwareError:
        return None


@settings(max_examples=30, deadline=None)
@given(deployments, loads)
def test_nothing_is_expected_to_beat_physics(made: Deployment, load: Load) -> None:
    """Every time is positive and at least its limit; throughput is at most its limit."""
    if found := times(made, load):
        likely, best = found
        for name in BETTER:
            assert getattr(likely, name) >= getattr(best, name) * (1 - 1e-9) > 0, name
        assert likely.output_tokens_per_s <= best.output_tokens_per_s * (1 + 1e-9)  # type: ignore[attr-defined]


@settings(max_examples=20, deadline=None)
@given(deployments, loads, st.sampled_from(["memory_bytes_per_s", "clock_hz", "link"]))
def test_a_better_gpu_is_never_slower(made: Deployment, load: Load, what: str) -> None:
    """Twice the bandwidth, the clock or the link."""
    card = made.gpu
    link = replace(card.link, bytes_per_s=2 * card.link.bytes_per_s)
    better = replace(card, link=link) if what == "link" else replace(card, **{what: 2 * getattr(card, what)})
    one, two = times(made, load), times(replace(made, gpu=better), load)
    if one and two:
        for before, after in zip(one, two, strict=True):
            for name in BETTER:
                assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name


@settings(max_examples=20, deadline=None)
@given(deployments, st.integers(1, 4000), st.integers(1, 2000))
def test_longer_contexts_and_larger_batches_take_no_less(made: Deployment, prompt: int, output: int) -> None:
    """A decode step of more sequences, or of longer ones."""
    found = [
        times(made, Load(*shape)) for shape in ((prompt, output, 2), (prompt, output, 32), (2 * prompt, output, 2))
    ]
    if all(found):
        (one, _), (many, _), (long, _) = (each for each in found if each)
        assert many.decode_step_s >= one.decode_step_s * (1 - 1e-9)  # type: ignore[attr-defined]
        assert long.prompt_prefill_s >= one.prompt_prefill_s * (1 - 1e-9)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_serves_a_small_model(name: str) -> None:
    """All rows of the table have what it takes."""
    assert times(make_deployment(name, "Qwen3-0.6B"), Load(512, 128, 4))
