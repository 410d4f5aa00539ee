"""Speculative decoding in the hardware model: tokens per step, verification, and the draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadgen.servers.hardware import HardwareError
from loadgen.servers.hardware.inference import PLAIN_SERVING, Deployment, ServingOptions, lower_bounds_s, predict_step
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.speculation import TokenDraft
from loadgen.servers.simulated.scheduler import Batch
from loadgen.servers.simulated.step_time import StepTime


def deployment(draft_tokens: int = 0, acceptance: float | None = None) -> Deployment:
    options = ServingOptions(draft_tokens=draft_tokens, acceptance=acceptance)
    return options.apply(make_deployment("B200", "deepseek-r1", "fp8", 8))


def test_tokens_per_step_by_hand() -> None:
    """Three drafted tokens at 0.5 add 1 + 0.5 + 0.25 + 0.125 tokens; at 1 all four are kept, at 0 only one."""
    assert TokenDraft(3, 0.5).tokens_per_step == pytest.approx(1.875)
    assert TokenDraft(3, 1.0).tokens_per_step == 4
    assert TokenDraft(3, 0.0).tokens_per_step == 1


def test_impossible_drafts_are_refused() -> None:
    """A draft has a token or more, and an acceptance is a probability."""
    with pytest.raises(HardwareError, match="draft 1 token or more, and give an acceptance of 0 to 1"):
        TokenDraft(0, 0.5)
    with pytest.raises(HardwareError, match=r"acceptance of 1\.5"):
        TokenDraft(3, 1.5)


def test_a_good_draft_is_faster_and_a_bad_one_slower() -> None:
    """With few sequences, verification costs little; a draft that is never accepted is only additional work."""
    plain, good, bad = (
        float(predict_step(made, decoding=4, context=1024).total)
        for made in (deployment(), deployment(3, 0.9), deployment(3, 0.0))
    )
    assert good < 0.7 * plain
    assert bad > plain


def test_many_sequences_gain_less() -> None:
    """Verification of many sequences computes more rows and reads more experts."""
    gains = [
        float(predict_step(deployment(), decoding=batch, context=1024).total)
        / float(predict_step(deployment(3, 0.6), decoding=batch, context=1024).total)
        for batch in (1, 512)
    ]
    assert gains[0] > gains[1]


def test_prompts_cost_the_same() -> None:
    """TokenDraft does not change a step that has prompts alone."""
    plain, drafting = (predict_step(made, 2, 512).total for made in (deployment(), deployment(3, 0.6)))
    assert float(plain) == pytest.approx(float(drafting))


def test_the_limit_stays_below() -> None:
    """The limit per token is lower than the prediction, also for a dense model and arrays."""
    dense = replace(make_deployment("H100", "llama-3.1-8b"), speculation=TokenDraft(4, 0.7))
    for made in (deployment(3, 0.7), dense):
        batch = np.array([1.0, 16.0, 128.0])
        limit = max(bound.max() for bound in map(np.asarray, lower_bounds_s(made, 0, 0, batch, 512.0).values()))
        assert limit < predict_step(made, decoding=batch, context=512.0).total.max()


def test_simulated_steps_have_the_time_per_token() -> None:
    """The simulated engine emits one token per step, so that its step has the duration per token."""
    made = deployment(3, 0.6)
    expected = float(predict_step(made, decoding=8, context=1024).total)
    batch = Batch(prompts=0, prompt_tokens=0, pairs=0, decoding=8, context=8 * 1024)
    assert StepTime(made)(batch) / 1e9 == pytest.approx(expected, rel=0.02)
    assert PLAIN_SERVING.apply(made).speculation is None
