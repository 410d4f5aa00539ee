"""Lengths where nobody can count exactly: each assumption is chosen, said, and does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.workloads.prompts import COMMON_WORDS, PromptError
from loadgen.workloads.spec_syntax import UnknownCountError
from loadgen.workloads.texts import WordCosts
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


def test_exact_lengths_of_a_server_that_counts_nothing_are_refused_with_the_ways_on() -> None:
    """The message is what can be done: a tokenizer, or estimated lengths."""
    with pytest.raises(PromptError, match="does not report the tokens") as caught:
        made("exact")
    assert all(way in caught.value.hint for way in ("--tokenizer", "leave out --lengths exact"))


def test_by_default_a_server_that_counts_nothing_counts_samples() -> None:
    """Without any option, lengths are those of `--lengths server`."""
    assert made(None).counting_method == made("server").counting_method
    assert not made(None).exact


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


class Memory:
    """A store for the vocabulary of a server, in memory."""

    def __init__(self) -> None:
        self.stored: WordCosts | None = None

    def load(self) -> WordCosts | None:
        return self.stored

    def save(self, vocabulary: WordCosts) -> None:
        self.stored = vocabulary


class OtherPicky(Picky):
    """The same server with another vocabulary: one more word costs two tokens."""

    def count(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        counts = super().count(texts)
        return [count + text.split().count("the") for count, text in zip(counts, texts, strict=True)]


def test_a_later_run_needs_two_samples() -> None:
    """The words of one token are kept. If the server's vocabulary has changed, they are found again."""
    memory = Memory()
    found: list[set[str]] = []
    samples: list[int] = []
    for server in (
        Picky(generates=True),
        Picky(generates=True),
        OtherPicky(generates=True),
        OtherPicky(generates=True),
    ):
        prompts = prepare_prompts(
            order(tokens="60"), token_ids=False, local=None, server=server, by="server", store=memory
        )
        samples.append(len(server.asked))
        texts = [str(request.prompt) for request in prompts.requests()]
        assert set(server.count(texts)) == {60}
        assert memory.stored is not None
        found.append({*memory.stored.costs})
    assert samples[1] == samples[3] == 2 < samples[0]
    assert found[0] == found[1]
    assert found[2] == found[3] == found[0] - {"the"}


class Letters(Picky):
    """A server whose tokens are letters, so that no word is one token."""

    def count(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        return [3 * len(text.split()) for text in texts]


class Mute(Picky):
    """A server that reports no counts."""

    def count(self, texts: list[str]) -> list[int]:  # type: ignore[override]
        raise UnknownCountError(texts)


@pytest.mark.parametrize("server", [Letters(generates=True), Mute(generates=True), Mute(generates=False), None])
@pytest.mark.parametrize("by", [None, "server"])
def test_a_server_whose_samples_do_not_help_gets_approximate_lengths(
    server: Counts | None, by: CountingMethod | None
) -> None:
    """No word is one token, no count is reported, the counting route does not work, or there is no server."""
    prompts = prepare_prompts(order(tokens="60"), token_ids=False, local=None, server=server, by=by)
    assert prompts.counting_method.startswith("text, approximate: six letters")
    assert not prompts.exact


def test_a_tokenizer_is_used_alone_if_the_server_reports_no_counts() -> None:
    """Lengths are then estimated, unless they have to be exact."""
    local = Counts(words=COMMON_WORDS)
    prompts = prepare_prompts(order(tokens="60"), token_ids=False, local=local, server=Mute(generates=True))
    assert "not compared with the server" in prompts.counting_method
    with pytest.raises(UnknownCountError):
        prepare_prompts(order(tokens="60"), token_ids=False, local=local, server=Mute(generates=True), by="exact")


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
