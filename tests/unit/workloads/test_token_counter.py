"""Lengths where nobody can count exactly: each assumption is chosen, said, and does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.workloads.prompts import COMMON_WORDS, PromptError
from loadgen.workloads.token_counter import CountingMethod, approximate
from loadgen.workloads.workload import Prompts, prepare_prompts
from tests.unit.workloads.test_exact_prompts import Counts, order

DATA = Path(__file__).parents[2] / "data/datasets"


class Picky(Counts):
    """A server that runs what it counts, behind a template of 20 tokens, and to which three words are two tokens."""

    def count(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        self.asked += texts
        return [
            20 + len(text.split()) + sum(text.split().count(word) for word in ("of", "z", "many")) for text in texts
        ]


def made(
    by: CountingMethod | None, given: str = "synthetic", *, local: Counts | None = None, **more: str | None
) -> Prompts:
    """Twenty prompts of 60 tokens for a server that counts by running only."""
    asked = order(given, tokens="60", **more)
    return prepare_prompts(asked, token_ids=False, local=local, server=Picky(generates=True), by=by)


def test_a_server_that_counts_nothing_is_refused_with_the_ways_on() -> None:
    """The message is what can be done: a tokenizer, or an assumption."""
    with pytest.raises(PromptError, match="does not report the tokens") as caught:
        made(None)
    assert all(way in caught.value.hint for way in ("--tokenizer", "--lengths server", "--lengths approximate"))


def test_by_samples_words_of_one_token_make_exact_sums() -> None:
    """Words that cost more are found by halves and left out; prompts then have the requested length, template too, and
    none of them was shown to the server."""
    server = Picky(generates=True)
    prompts = prepare_prompts(order(tokens="60"), token_ids=False, local=None, server=server, by="server")
    texts = [str(request.prompt) for request in prompts.requests()]
    assert not set(server.asked) & set(texts)
    assert len(server.asked) < 60
    assert set(server.count(texts)) == {60}
    assert not {word for text in texts for word in text.split()} & {"of", "z", "many"}
    assert not prompts.exact
    assert "is assumed" in prompts.counting_method


def test_a_server_to_which_no_word_is_one_token_says_so() -> None:
    """Then there is nothing to build with."""

    class Letters(Picky):
        def count(self, texts: list[str]) -> list[int]:  # type: ignore[override]
            return [3 * len(text.split()) for text in texts]

    with pytest.raises(PromptError, match="only 0 of") as caught:
        prepare_prompts(order(), token_ids=False, local=None, server=Letters(generates=True), by="server")
    assert "--lengths approximate" in caught.value.hint


def test_by_the_tokenizer_alone_the_server_is_not_asked() -> None:
    """Not even where it would disagree."""
    prompts = made("tokenizer", local=Counts(words=COMMON_WORDS))
    assert {len(str(request.prompt).split()) for request in prompts.requests()} == {60}
    assert not prompts.exact
    assert "not compared with the server" in prompts.counting_method


def test_approximate_asks_nobody() -> None:
    """Plain words count as a token each; what is assumed is said."""
    prompts = made("approximate")
    assert {approximate([str(request.prompt)])[0] for request in prompts.requests()} == {60}
    assert not prompts.exact
    assert prompts.counting_method.startswith("text, approximate: six letters")
    assert approximate(["internationally, 12345 Grüße"]) == [10]


@pytest.mark.parametrize("by", [None, "server", "approximate"])
def test_a_file_goes_as_it_is(by: CountingMethod | None) -> None:
    """Without any tokenizer its prompts are sent as they stand, of a length not known beforehand; the lengths it names
    are asked for exactly, and nothing is called approximate that is not."""
    prompts = made(by, f"jsonl:{DATA / 'prompts.jsonl'}", output=None)
    assert [(one.input_tokens, one.output_tokens) for one in prompts.requests()] == [(0, 3), (0, 128)]
    assert not prompts.exact
    assert ("approximate" in prompts.counting_method) == (by == "approximate")


@pytest.mark.parametrize("kind", ["sharegpt", "alpaca", "multi-turn"])
def test_answers_that_nobody_counts_are_approximate_and_said_to_be(kind: str) -> None:
    """Output lengths of a file's own answers need a count: where there is none it is a stated estimate."""
    name = "alpaca" if kind == "alpaca" else "sharegpt"
    prompts = made(None, f"{kind}:{DATA / name}.json", output=None)
    first = next(prompts.conversations()).request() if prompts.has_sessions else next(prompts.requests())
    assert (first.input_tokens, first.output_tokens) == (0, 3 if kind != "alpaca" else 2)
    assert "the lengths of its answers are approximate" in prompts.counting_method


def test_a_tokenizer_still_counts_a_file() -> None:
    """Given one, prompts and answers are counted, and held against the server as ever."""
    local = Counts(words=tuple(word for word in COMMON_WORDS if word not in ("of", "z", "many")))
    prompts = made(None, f"alpaca:{DATA / 'alpaca.json'}", local=local, output=None)
    assert [one.input_tokens for one in prompts.requests()] == [26, 22]
    assert prompts.exact
