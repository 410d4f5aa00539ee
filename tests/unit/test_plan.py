"""The plan: every mistake at once, in the words of the command line."""

from pathlib import Path

import pytest

from loadgen.errors import PlanError
from loadgen.plan import plan_of


def test_defaults_are_the_paper_burst() -> None:
    """Naming a server is enough: 1000 prompts of 512 tokens."""
    plan = plan_of(server="tgi")
    assert (plan.n, plan.input_tokens, plan.workers, plan.seed) == (1000, 512, 1, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"server": "sglang"}, "--server sglang: unknown; choose 'vllm', 'tgi', 'lightllm' or 'openai'"),
        ({"n": 0}, "--n 0: input should be greater than or equal to 1"),
        ({"n": -5}, "--n -5: input should be greater than or equal to 1"),
        ({"input_tokens": 0}, "--input-tokens 0: input should be greater than or equal to 1"),
        ({"timeout_s": 0}, "--timeout 0: input should be greater than 0"),
        ({"url": "localhost:8000"}, "--url localhost:8000: must start with http:// or https://"),
        ({"tokenizer": Path("/nowhere/tokenizer.json")}, "--tokenizer /nowhere/tokenizer.json: there is no file"),
        ({"workers": 4, "n": 2}, "4 workers for 2 requests: use --workers 2 or fewer"),
        ({"endpoint": "embeddings"}, "--endpoint embeddings: unknown; choose 'completions', 'chat' or 'generate'"),
        ({"label": "../x"}, "--label ../x: string should match pattern"),
        ({"colour": "red"}, "colour: there is no such setting"),
    ],
)
def test_each_mistake_names_its_option_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    """One bad value gives one line that says which option and what it takes."""
    with pytest.raises(PlanError) as caught:
        plan_of(**{"server": "tgi", **values})
    assert message in str(caught.value)
    assert caught.value.hint


def test_all_mistakes_are_reported_at_once() -> None:
    """Nobody has to fix one mistake to hear of the next."""
    with pytest.raises(PlanError) as caught:
        plan_of(server="sglang", n=0, url="x")
    assert len(str(caught.value).splitlines()) == 3
