"""How long a step takes: the tables say what the hardware model says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadgen.servers.hardware.inference import predict_step
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.simulated.scheduler import Batch
from loadgen.servers.simulated.step_time import HostTime, StepTime

DEPLOYMENT = make_deployment("H100", "llama-3.1-8b", tensor=2)
STEP_TIME = StepTime(DEPLOYMENT)


def seconds(batch: Batch) -> float:
    return STEP_TIME(batch) / 1e9


@pytest.mark.parametrize(("decoding", "context"), [(1, 1), (7, 300), (64, 1000), (256, 5000), (3, 100_000)])
def test_decoding_takes_what_the_model_says(decoding: int, context: int) -> None:
    """Between two contexts of the table too."""
    whole = float(predict_step(DEPLOYMENT, decoding=decoding, context=context).total)
    assert seconds(Batch(0, 0, 0, decoding, decoding * context)) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(("prompts", "tokens", "before"), [(1, 512, 0), (16, 512, 0), (3, 100, 0), (1, 2000, 6000)])
def test_prompts_take_what_the_model_says(prompts: int, tokens: int, before: int) -> None:
    """Alone, and beside sequences that decode."""
    pairs = prompts * (tokens * before + tokens * (tokens + 1) // 2)
    alone = float(predict_step(DEPLOYMENT, prompts, tokens, before=before).total)
    assert seconds(Batch(prompts, prompts * tokens, pairs, 0, 0)) == pytest.approx(alone, rel=0.02)
    mixed = float(predict_step(DEPLOYMENT, prompts, tokens, 40, 700, before=before).total)
    assert seconds(Batch(prompts, prompts * tokens, pairs, 40, 40 * 700)) == pytest.approx(mixed, rel=0.02)


def test_unequal_prompts_count_by_their_pairs() -> None:
    """One of 1000 tokens and one of 24 attend to more than two of 512."""
    equal = Batch(2, 1024, 512 * 513, 0, 0)
    unequal = Batch(2, 1024, 1000 * 1001 // 2 + 24 * 25 // 2, 0, 0)
    assert STEP_TIME(unequal) > STEP_TIME(equal)


def test_a_line_is_the_steps_that_follow() -> None:
    """Each token more in every sequence, as far as the line says that it holds."""
    first_s, more_s, holds = STEP_TIME.decode_trend(32, 32 * 300)
    assert 1 < holds <= 256
    ahead = Batch(0, 0, 0, 32, 32 * (300 + holds))
    assert seconds(ahead) == pytest.approx(first_s + holds * more_s, abs=2e-9)


def test_launches_are_the_least_that_a_step_takes() -> None:
    """Where kernels are short; where they are long, launches are hidden."""
    slow = StepTime(DEPLOYMENT, launch_s=1e-3)
    small, large = Batch(0, 0, 0, 1, 10), Batch(8, 8192, 8 * 1024 * 1025 // 2, 0, 0)
    assert slow(small) / 1e9 >= 32 * 1e-3
    assert slow.decode_trend(1, 10)[1] == 0
    assert slow(large) == STEP_TIME(large)


def test_each_sequence_costs_the_host_its_share() -> None:
    """Beside what the kernels take."""
    framework = replace(DEPLOYMENT.framework, sequence_s=DEPLOYMENT.framework.sequence_s + 1e-3)
    dear = StepTime(replace(DEPLOYMENT, framework=framework))
    batch = Batch(0, 0, 0, 50, 5000)
    assert (dear(batch) - STEP_TIME(batch)) / 1e9 == pytest.approx(50e-3)


def test_what_is_past_the_tables_goes_on_in_proportion() -> None:
    """More sequences, tokens and context than anybody runs."""
    assert seconds(Batch(0, 0, 0, 20_000, 200_000)) > seconds(Batch(0, 0, 0, 8_000, 80_000))
    assert seconds(Batch(1, 100_000, 100_000 * 50_000, 0, 0)) > seconds(Batch(1, 60_000, 60_000 * 30_000, 0, 0))
    assert seconds(Batch(0, 0, 0, 1, 200_000)) > seconds(Batch(0, 0, 0, 1, 130_000))


def test_stages_take_what_the_model_says() -> None:
    """Under pipeline parallelism, a step takes as long as its largest micro-batch needs for all stages."""
    deployment = make_deployment("H100", "llama-3.1-8b", tensor=1, pipeline=2)
    step_time = StepTime(deployment)
    for decoding in (1, 2, 64):
        whole = float(predict_step(deployment, decoding=decoding, context=800).total)
        assert step_time(Batch(0, 0, 0, decoding, decoding * 800)) / 1e9 == pytest.approx(whole, rel=0.01)
    for prompts in (1, 2, 8):
        whole = float(predict_step(deployment, prompts, 512, 40, 700).total)
        pairs = prompts * 512 * 513 // 2
        assert step_time(Batch(prompts, prompts * 512, pairs, 40, 40 * 700)) / 1e9 == pytest.approx(whole, rel=0.02)


WORKERS = HostTime(step_s=2e-3, sequence_s=1e-5, token_s=1e-7)


@pytest.mark.parametrize(
    ("batch", "extra_s"),
    [
        (Batch(0, 0, 0, 50, 5000), 2e-3 + 50 * 1e-5 + 5000 * 1e-7),
        (Batch(3, 1536, 3 * 512 * 513 // 2, 0, 0), 2e-3 + 3 * 1e-5 + 1536 * 1e-7),
        (Batch(3, 1536, 3 * 512 * 513 // 2, 50, 5000), 2e-3 + 53 * 1e-5 + 6536 * 1e-7),
        (Batch(0, 0, 0, 0, 0), 0.0),
    ],
)
def test_a_step_with_workers_also_takes_the_time_to_send_the_batch(batch: Batch, extra_s: float) -> None:
    """The time has a constant part, a part per sequence, and a part per prompt token and token of context."""
    with_workers = StepTime(DEPLOYMENT, workers=WORKERS)
    assert (with_workers(batch) - STEP_TIME(batch)) / 1e9 == pytest.approx(extra_s, abs=3e-9)


@pytest.mark.parametrize("launch_s", [0.0, 1e-3])
def test_the_time_to_send_the_batch_grows_from_step_to_step(launch_s: float) -> None:
    """Each step sends one more token per sequence, even while the launches of the kernels hide the kernels."""
    with_workers = StepTime(DEPLOYMENT, launch_s, WORKERS)
    first_s, growth_s, steps = with_workers.decode_trend(32, 32 * 300)
    assert steps > 1
    last = Batch(0, 0, 0, 32, 32 * (300 + steps - 1))
    assert with_workers(last) / 1e9 == pytest.approx(first_s + (steps - 1) * growth_s, abs=2e-9)
    assert growth_s == pytest.approx(StepTime(DEPLOYMENT, launch_s).decode_trend(32, 32 * 300)[1] + 32 * 1e-7)


def test_times_on_the_host_are_added_part_by_part() -> None:
    """The second time counts as often as requested."""
    assert HostTime(1.0, 2.0, 3.0).plus(HostTime(0.5, 0.25, 2.0), 4) == HostTime(3.0, 3.0, 11.0)
