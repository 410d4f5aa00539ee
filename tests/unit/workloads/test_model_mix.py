"""`--model a=70,b=30`: parsing, and the random choice of each request's model."""

import math

import pytest

from loadgen.workloads.model_mix import parse
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("a=70,b=30", "a=70,b=30"),
        (" a=70% , b=30% ", "a=70,b=30"),
        ("base/llama:7b=0.5,base/llama:7b-lora=1.5", "base/llama:7b=0.5,base/llama:7b-lora=1.5"),
        ("x=y=1,z=2", "x=y=1,z=2"),
    ],
)
def test_a_mix_has_a_canonical_text(text: str, canonical: str) -> None:
    """Blanks and percent signs are removed. The last = separates the weight from a name that contains one."""
    mix = parse(text)
    assert str(mix) == canonical
    assert parse(str(mix)) == mix


def test_a_name_without_a_weight_is_a_single_model() -> None:
    """A text without = is the name of one model, whatever it contains."""
    assert parse("meta-llama/Llama-3.1-8B,v2") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=70,b", "'b' is not a model with a weight"),
        ("a=70,b=x", "'b=x' is not a model with a weight"),
        ("a=70,", "'' is not a model with a weight"),
        ("=70,b=30", "'=70' is not a model with a weight"),
        ("a=70", "a mix has 2 to 64 models, not 1"),
        ("a=70,a=30", "the model 'a' is named twice"),
        ("a=0,b=30", "the weight of a 0 is outside"),
        ("a=1.2.3,b=30", "is not a plain decimal number"),
        (",".join(f"m{number}=1" for number in range(65)), "a mix has 2 to 64 models, not 65"),
    ],
)
def test_a_wrong_mix_is_refused(text: str, message: str) -> None:
    """The message names the wrong part, and the hint says what to write."""
    with pytest.raises(WorkloadError, match=message):
        parse(text)


def test_the_split_is_multinomial() -> None:
    """The number of requests per model lies within the 99% interval, for each of 20 seeds but one at most."""
    mix = parse("a=70,b=30")
    assert mix is not None
    n = 5000
    half_width = 2.576 * math.sqrt(n * 0.7 * 0.3)
    counts = [sum(mix.choose(seed, number) == "a" for number in range(n)) for seed in range(20)]
    assert sum(abs(count - 0.7 * n) > half_width for count in counts) <= 1
    assert len(set(counts)) > 10, "each seed gives another split"
    assert counts[3] == sum(mix.choose(3, number) == "a" for number in range(n))


def test_requests_of_a_session_share_a_model() -> None:
    """A request that names a model keeps it. Turns of a session get the model of the session's first request."""
    mix = parse("a=50,b=50")
    assert mix is not None
    assert mix.with_model(0, Request(5, "", 0, 0, model="own")).model == "own"
    for session in range(0, 100, 10):
        turns = [Request(session + turn, "", 0, 0, session=session, turn=turn) for turn in range(10)]
        assert {mix.with_model(0, turn).model for turn in turns} == {mix.choose(0, session)}
