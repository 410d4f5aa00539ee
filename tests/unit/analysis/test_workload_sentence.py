"""What was asked, in words, for every way to ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.format import token_length, workload_sentence
from loadgen.analysis.run.runfile import load_facts
from loadgen.plan import Plan
from loadgen.workloads import arrivals as known_arrivals
from loadgen.workloads import lengths as known_lengths
from tests.support.runs import burst, run_of, summarise, typed


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"n": 1000, "output_tokens": 64}, "1,000 requests of 512 tokens, all at once, 64 output tokens each"),
        (
            {"arrivals": "poisson:20", "duration_s": 60},
            "Requests of 512 tokens, 20 per second (Poisson), for 60 s, 128 output tokens each",
        ),
        (
            {"arrivals": "poisson:20", "concurrency": 4, "duration_s": 60},
            "Requests of 512 tokens, 20 per second (Poisson), at most 4 in flight (others wait), for 60 s, 128 output "
            "tokens each",
        ),
        (
            {"arrivals": "closed:8,think=2s", "n": 200, "input_tokens": "uniform:128..384"},
            "200 requests of 128 to 384 tokens, from 8 clients that wait for each response and think for 2s, "
            "128 output tokens each",
        ),
        (
            {"arrivals": "constant:5", "n": 50, "duration_s": 10, "workload": "shared-prefix:groups=4,tokens=100"},
            "Up to 50 requests of 512 tokens (shared-prefix: groups=4, tokens=100), "
            "5 per second, evenly, for 10 s, 128 output tokens each",
        ),
        (
            {"arrivals": "closed:1", "n": 9, "workload": "sharegpt:data/talk.json"},
            "9 requests from sharegpt talk.json, from 1 client that waits for each response, "
            "the output lengths of its file",
        ),
        (
            {"n": 9, "output_tokens": "max:64"},
            "9 requests of 512 tokens, all at once, at most 64 output tokens each",
        ),
        (
            {"n": 9, "workload": "alpaca:a.json", "output_tokens": "max:answers"},
            "9 requests from alpaca a.json, all at once, at most the output lengths of its file",
        ),
        (
            {"arrivals": "trace:data/azure.csv", "workload": "jsonl:p.jsonl", "output_tokens": 7},
            "12 requests from jsonl p.jsonl, as recorded in azure.csv, 7 output tokens each",
        ),
        (
            {"arrivals": "trace:data/azure.csv,speed=2"},
            "12 requests of the recorded lengths, as recorded in azure.csv,speed=2, the recorded output lengths",
        ),
    ],
)
def test_a_plan_reads_as_a_sentence(tmp_path: Path, plan: dict[str, Any], sentence: str) -> None:
    """Number, length, arrivals and answers, of plans as they are stored in a run."""
    stored = Plan(server="tgi", **plan).to_dict()
    assert workload_sentence(typed(summarise(run_of(tmp_path / "run", burst(12, 4), plan=stored)))) == sentence


def test_without_answers_it_names_the_endpoint(tmp_path: Path) -> None:
    """Embeddings and rerank have no tokens to give back."""
    stored = Plan(server="vllm", n=9).to_dict() | {"endpoint": "embeddings", "output_tokens": 0}
    run = run_of(tmp_path / "run", burst(12, 4), plan=stored)
    assert workload_sentence(typed(summarise(run))) == "9 requests of 512 tokens, all at once, embeddings"


def test_approximate_lengths_are_called_so(tmp_path: Path) -> None:
    """Prompts that nobody counted by the server's tokenizer have about the length asked."""
    run = run_of(tmp_path / "run", burst(12, 4), client={"prompts": "approximate", "exact": False})
    assert workload_sentence(typed(summarise(run))).startswith(
        "12 requests of about 512 tokens (estimated), all at once"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("burst", "all at once"),
        ("burst:50/10s", "50 at once every 10s"),
        ("gamma:20,cv=2", "20 per second (gamma gaps, CV 2)"),
        ("ramp:1..50/60s", "1 to 50 per second within 60s"),
        ("steps:5@10s,50@20s", "5 per second for 10s, 50 per second for 20s"),
    ],
)
def test_arrivals_have_words(text: str, words: str) -> None:
    """Every kind of arrivals, from its canonical text."""
    named = known_arrivals.parse(text)
    assert (str(named), named.facts.text) == (text, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "1 token"),
        ("lognormal:mean=512,cv=0.5", "about 512 tokens (lognormal)"),
        ("exponential:mean=128", "about 128 tokens (exponential)"),
    ],
)
def test_lengths_have_words(text: str, words: str) -> None:
    """A number, or a distribution with its mean, from the canonical text."""
    assert str(known_lengths.parse(text)) == text
    assert token_length(text) == words


def test_lengths_from_a_file_name_the_file() -> None:
    """Without its folders."""
    assert token_length("empirical:data/azure.csv,column=ContextTokens") == (
        "a number of tokens from azure.csv,column=ContextTokens"
    )


def test_a_plan_of_another_time_reads_as_it_stands() -> None:
    """Arrivals and lengths that are not known are quoted."""
    assert load_facts("lunar:3", "").text == "arriving as lunar:3"
    assert token_length("zipf:3") == "zipf:3 tokens"
