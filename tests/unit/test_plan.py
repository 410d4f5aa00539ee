"""The plan: every mistake at once, in the words of the command line."""

from pathlib import Path

import pytest

from loadgen.errors import PlanError
from loadgen.plan import Plan, read_plan


def test_values_are_stored_in_their_canonical_form() -> None:
    """However they were written: arrivals, workloads and lengths read back as one text; fixed lengths are numbers."""
    plan = Plan(server="tgi", arrivals="poisson:20.0", duration_s=5, input_tokens="0512", output_tokens="uniform:1..9")
    assert (plan.arrivals, plan.input_tokens, plan.output_tokens) == ("poisson:20", 512, "uniform:1..9")


def test_a_plan_that_would_never_end_says_how_to_end_it() -> None:
    """Endless arrivals need a number of requests or a duration; a ramp ends by itself."""
    for arrivals in ("burst", "constant:5", "closed:3"):
        with pytest.raises(PlanError, match="--n, or --duration"):
            Plan(server="tgi", arrivals=arrivals)
    assert Plan(server="tgi", arrivals="ramp:1..5/10s").n is None


def test_a_plan_file_is_toml(tmp_path: Path) -> None:
    """Keys are the plan's fields; what is no TOML, or no file, says so."""
    file = tmp_path / "plan.toml"
    file.write_text('server = "tgi"\narrivals = "constant:5"\nn = 10\n')
    assert Plan(**read_plan(file)).n == 10
    file.write_text("server: tgi")
    with pytest.raises(PlanError, match="is not TOML"):
        read_plan(file)
    with pytest.raises(PlanError, match="cannot read"):
        read_plan(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"server": "sglang"}, "--server sglang: unknown; choose 'vllm', 'tgi', 'lightllm' or 'openai'"),
        ({"n": 0}, "--n 0: input should be greater than or equal to 1"),
        ({"n": -5}, "--n -5: input should be greater than or equal to 1"),
        ({"input_tokens": 0}, "--input-tokens 0: lengths '0': length 0 is outside 1 to 10000000"),
        ({"arrivals": "poison:20"}, "--arrivals poison:20: arrivals 'poison:20': there is no 'poison'; choose burst"),
        ({"window_s": (5, 2)}, "must begin at 0 or later, and end after it begins"),
        ({"timeout_s": 0}, "--timeout 0: input should be greater than 0"),
        ({"url": "localhost:8000"}, "--url localhost:8000: must start with http:// or https://"),
        ({"tokenizer": Path("/nowhere/tokenizer.json")}, "--tokenizer /nowhere/tokenizer.json: there is no file"),
        ({"workers": 4, "n": 2}, "4 workers for 2 requests: use --workers 2 or fewer"),
        ({"endpoint": "embeddings"}, "--endpoint embeddings: unknown; choose 'completions', 'chat' or 'generate'"),
        (
            {"arrivals": "closed:8", "max_in_flight": 2},
            "--arrivals closed:8 has 8 under way, more than --max-in-flight 2",
        ),
        ({"label": "../x"}, "--label ../x: string should match pattern"),
        ({"colour": "red"}, "colour: there is no such setting"),
    ],
)
def test_each_mistake_names_its_option_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    """One bad value gives one line that says which option and what it takes."""
    with pytest.raises(PlanError) as caught:
        Plan(**{"server": "tgi", "n": 1000, **values})
    assert message in str(caught.value)
    assert caught.value.hint


def test_who_answers_may_be_left_to_the_url() -> None:
    """A plan names a server or says where one is; who is named neither way is missing. Other clients may well be fewer
    than a limit in flight."""
    assert Plan(url="http://127.0.0.1:1", n=1).server == ""
    with pytest.raises(PlanError, match="--server is missing: name vllm, tgi, lightllm or openai; or --url"):
        Plan(n=1)
    assert Plan(server="tgi", arrivals="closed:8", max_in_flight=8, n=9).max_in_flight == 8


def test_all_mistakes_are_reported_at_once() -> None:
    """Nobody has to fix one mistake to hear of the next."""
    with pytest.raises(PlanError) as caught:
        Plan(server="sglang", n=0, url="x")
    assert len(str(caught.value).splitlines()) == 3
