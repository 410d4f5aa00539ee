"""From an order to its Requests, for every workload, with stand-ins for the tokenizer file and the server."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loadgen.workloads import lengths, workload
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.prompts import COMMON_WORDS, PromptError
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.texts import WordCosts
from loadgen.workloads.traces import MOONCAKE_BLOCK_TOKENS as BLOCK_TOKENS
from loadgen.workloads.workload import WorkloadSpec, prepare_prompts

DATA = Path(__file__).parents[2] / "data"


@dataclass
class Counts:
    """Counts words, and `extra` tokens on top; knows the ids 100 to 159. Can be closed, and remembers the texts."""

    extra: int = 0
    generates: bool = False
    plain: Counts | None = None
    words: Sequence[str] = ()
    known_ids: Sequence[int] = tuple(range(100, 160))
    closed: bool = False
    asked: list[str] = field(default_factory=list)

    def count(self, texts: Sequence[str]) -> list[int]:
        assert not self.closed
        self.asked += texts
        return [self.extra + len(text.split()) for text in texts]

    def ids(self, text: str) -> list[int]:
        return list(self.known_ids) if text else []


def order(given: str = "synthetic", *, output: str | None = "4", tokens: str = "30", **more: Any) -> WorkloadSpec:
    """Twenty requests, seed 3."""
    answers = lengths.parse(output) if output else None
    return WorkloadSpec(workload.parse(given), lengths.parse(tokens), answers, **{"seed": 3, "n": 20} | more)


def drawn(asked: WorkloadSpec, *, token_ids: bool = True, server: Counts | None = None) -> list[Request]:
    """The Requests when only a server counts."""
    made = prepare_prompts(asked, token_ids=token_ids, local=None, server=server or Counts())
    return list(made.requests())


def size(request: Request) -> int:
    """Tokens of a prompt by the stand-in's count."""
    return len(request.prompt.split()) if isinstance(request.prompt, str) else len(request.prompt)


def units(request: Request) -> list[Any]:
    """A prompt's tokens."""
    return request.prompt.split() if isinstance(request.prompt, str) else list(request.prompt)


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("tokens", ["30", "uniform:8..90", "lognormal:mean=60,cv=1,min=4", "exponential:mean=40,min=4"])
def test_any_lengths_are_exact(tokens: str, token_ids: bool) -> None:
    """Each prompt has the length drawn for it, as ids or as text, and all differ within their first four tokens."""
    asked = order(tokens=tokens, n=300)
    made = drawn(asked, token_ids=token_ids)
    lengths_drawn = asked.input.tokens(3, "input")
    assert [request.input_tokens for request in made] == [next(lengths_drawn) for _ in range(300)]
    assert [size(request) for request in made] == [request.input_tokens for request in made]
    assert len({tuple(units(request)[:4]) for request in made}) == 300


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("given", ["synthetic", "shared-prefix:groups=3,tokens=10", "multi-turn:turns=2"])
def test_the_same_requests_each_time(given: str, token_ids: bool) -> None:
    """Drawing again gives the same bytes, and so does preparing anew; another seed gives others."""
    asked, other = order(given, tokens="uniform:20..40"), order(given, tokens="uniform:20..40", seed=4)

    def prompts(made: workload.Prompts) -> list[Any]:
        if "multi-turn" in given:
            return [turn.question for one in made.conversations() for turn in one.turns]
        return [request.prompt for request in made.requests()]

    made, again = (prepare_prompts(asked, token_ids=token_ids, local=None, server=Counts()) for _ in range(2))
    assert prompts(made) == prompts(made) == prompts(again)
    strange = prompts(prepare_prompts(other, token_ids=token_ids, local=None, server=Counts()))
    assert not set(strange) & set(prompts(made))


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("extra", [0, 3])
def test_a_group_shares_its_prefix_exactly(token_ids: bool, extra: int) -> None:
    """Requests of a group share as many tokens as asked for, others none; whole prompts have the length asked for."""
    server = Counts(extra)
    made = drawn(order("shared-prefix:groups=3,tokens=10", tokens="uniform:14..40"), token_ids=token_ids, server=server)
    added = 0 if token_ids else extra
    assert [size(request) + added for request in made] == [request.input_tokens for request in made]
    for first in made:
        for second in made[first.id + 1 :]:
            same = [one == other for one, other in zip(units(first), units(second), strict=False)].index(False)
            assert same == (10 - added if first.id % 3 == second.id % 3 else 0)


@pytest.mark.parametrize("token_ids", [True, False])
def test_a_trace_is_replayed_with_its_sharing(token_ids: bool) -> None:
    """Prompts have the recorded lengths, and share the recorded blocks, as ids or as text."""
    made = drawn(order(trace=Trace(DATA / "traces/mooncake.jsonl")), token_ids=token_ids)
    assert [(size(request), request.output_tokens) for request in made] == [(1100, 52), (600, 1), (1030, 26), (13, 300)]
    first, second, third, _ = map(units, made)
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS] == third[:BLOCK_TOKENS]
    assert first[: 2 * BLOCK_TOKENS] == third[: 2 * BLOCK_TOKENS]
    assert first[BLOCK_TOKENS : BLOCK_TOKENS + 4] != second[BLOCK_TOKENS : BLOCK_TOKENS + 4]
    assert first[2 * BLOCK_TOKENS :][:4] != third[2 * BLOCK_TOKENS :][:4]


def test_a_trace_gives_only_instants_to_another_workload() -> None:
    """With a dataset, the prompts are the dataset's."""
    asked = order("alpaca:" + str(DATA / "datasets/alpaca.json"), trace=Trace(DATA / "traces/burstgpt.csv"))
    assert [request.prompt for request in drawn(asked)] == ["Add the numbers.\n\n2 and 3", "Greet me."]


@pytest.mark.parametrize(
    "given",
    [
        "synthetic",
        "shared-prefix:groups=2,tokens=9",
        f"alpaca:{DATA / 'datasets/alpaca.json'}",
        f"multi-turn:{DATA / 'datasets/sharegpt.json'}",
        "multi-turn:turns=3",
    ],
)
def test_everything_is_asked_before_the_workers_start(given: str) -> None:
    """Texts, the counts of a dataset and those of sessions need no server any more once the material is made."""
    server = Counts()
    asked = order(given, output=None if "data" in given else "4", warmup=2)
    made = prepare_prompts(asked, token_ids=False, local=None, server=server)
    server.closed = True
    draw = made.conversations if "multi-turn" in given else made.requests
    assert len(made.warmup()) == 2
    assert list(draw()) == list(draw())
    assert list(draw())


def test_ids_are_drawn_alike_in_forks() -> None:
    """A worker that begins to draw after the fork gets the prompts that its parent draws."""
    asked = order("shared-prefix:groups=3,tokens=10", tokens="uniform:20..40")
    made = prepare_prompts(asked, token_ids=True, local=None, server=Counts())
    context = multiprocessing.get_context("fork")
    theirs, sending = context.Pipe(duplex=False)
    worker = context.Process(target=lambda: sending.send([request.prompt for request in made.requests()]))
    worker.start()
    assert theirs.poll(30)
    assert theirs.recv() == [request.prompt for request in made.requests()]
    worker.join(30)


def test_warm_up_shares_nothing_with_the_run() -> None:
    """Warm-up Requests have ids below zero and the order's lengths, and begin as none of the run's prompts does."""
    for token_ids in (True, False):
        asked = order(warmup=5)
        made = prepare_prompts(asked, token_ids=token_ids, local=None, server=Counts())
        warm = made.warmup()
        assert [(one.id, one.input_tokens, one.output_tokens, size(one)) for one in warm] == [
            (-1 - index, 30, 4, 30) for index in range(5)
        ]
        beginnings = {tuple(units(one)[:2]) for one in (*warm, *made.requests())}
        assert len(beginnings) == 25


def test_warm_up_of_a_dataset_is_synthetic() -> None:
    """A dataset's own questions stay unknown to the server; answers without a named length are 16 tokens."""
    asked = order(f"alpaca:{DATA / 'datasets/alpaca.json'}", output=None, warmup=3)
    made = prepare_prompts(asked, token_ids=True, local=None, server=Counts())
    warm = made.warmup()
    assert [(size(one), one.output_tokens) for one in warm] == [(30, 16)] * 3
    assert not {one.prompt for one in warm} & {one.prompt for one in made.requests()}


def test_ids_are_drawn_without_end() -> None:
    """A closed loop that only its duration ends needs no number of requests where prompts are ids."""
    asked = order(n=None)
    endless = prepare_prompts(asked, token_ids=True, local=None, server=Counts()).requests()
    assert len({next(endless).prompt for _ in range(500)}) == 500


@pytest.mark.parametrize("given", ["synthetic", "shared-prefix:groups=3,tokens=10"])
@pytest.mark.parametrize("tokens", ["30", "uniform:20..60"])
def test_texts_are_drawn_without_end(given: str, tokens: str) -> None:
    """A closed loop that only its duration ends needs no number of requests for text prompts: each text is exact,
    differs from all others, and is the same when it is drawn again."""
    server = Counts()
    made = prepare_prompts(order(given, tokens=tokens, n=None), token_ids=False, local=None, server=server)
    server.closed = True
    texts = list(islice(made.requests(), 3_000))
    assert [size(request) for request in texts] == [request.input_tokens for request in texts]
    own_start = 10 if "shared" in given else 0
    assert len({tuple(units(request)[own_start : own_start + 4]) for request in texts}) == 3_000
    assert [request.prompt for request in islice(made.requests(), 50)] == [request.prompt for request in texts[:50]]


def test_many_texts_need_no_more_counts_than_few() -> None:
    """Words whose pairs add up are counted once. Then ten thousand texts take as many counts as ten."""
    few, many = Counts(), Counts()
    prepare_prompts(order(n=10, tokens="512"), token_ids=False, local=None, server=few)
    made = prepare_prompts(order(n=10_000, tokens="512"), token_ids=False, local=None, server=many)
    assert len(many.asked) == len(few.asked) < 140
    assert size(next(islice(made.requests(), 9_999, None))) == 512


class Letters(Counts):
    """Counts a number of letters as one token, so that a text has fewer tokens than the sum of its words."""

    per_token = 5

    def count(self, texts: Sequence[str]) -> list[int]:
        self.asked += texts
        return [self.length(text) for text in texts]

    def length(self, text: str) -> int:
        return -(-3 * len(text) // (3 * self.per_token + 1))


class Quarters(Letters):
    """Counts four letters as one token: words of three letters and a space are exact."""

    def length(self, text: str) -> int:
        return -(-len(text) // 4)


def test_texts_consist_of_the_words_that_add_up() -> None:
    """If some words or pairs of words do not add up, the others are used, for any number of requests."""
    made = prepare_prompts(order(n=None), token_ids=False, local=None, server=Quarters())
    texts = [str(request.prompt) for request in islice(made.requests(), 2_000)]
    assert {Quarters().length(text) for text in texts} == {30}
    assert len({text[:16] for text in texts}) == 2_000

    class Pairs(Counts):
        def count(self, texts: Sequence[str]) -> list[int]:
            return [len(text.replace("of the", "of_the").replace("it was", "it_was").split()) for text in texts]

    made = prepare_prompts(order(n=None), token_ids=False, local=None, server=Pairs())
    texts = [str(request.prompt) for request in islice(made.requests(), 2_000)]
    assert set(Pairs().count(texts)) == {30}


def test_texts_whose_words_do_not_add_up_are_counted_one_by_one() -> None:
    """Every text is counted before the run if the server's count of a text is not the sum of its words, and the
    progress is reported. Without a number of requests that is impossible."""
    server = Letters()
    done: list[int] = []
    made = prepare_prompts(order(n=600), token_ids=False, local=None, server=server, progress=done.append)
    texts = [str(request.prompt) for request in made.requests()]
    assert {server.length(text) for text in texts} == {30}
    assert set(texts) <= set(server.asked)
    assert done[-1] == 600
    assert made.prompt(599, 30)
    with pytest.raises(WorkloadError, match="no text was prepared for prompt 600"):
        made.prompt(600, 30)
    with pytest.raises(PromptError, match="not the sum of its words, and this load has no end") as caught:
        prepare_prompts(order(n=None), token_ids=False, local=None, server=server)
    assert "--n" in caught.value.hint


def test_a_tokenizer_file_counts_texts_without_end() -> None:
    """With a tokenizer file, texts whose words do not add up are counted when they are drawn."""
    local = Letters(words=COMMON_WORDS)
    made = prepare_prompts(order(n=None), token_ids=False, local=local, server=None)
    texts = [str(request.prompt) for request in islice(made.requests(), 300)]
    assert {local.length(text) for text in texts} == {30}
    assert len(set(texts)) == 300


@dataclass
class Store:
    """Keeps a vocabulary in memory."""

    vocabulary: WordCosts | None = None

    def load(self) -> WordCosts | None:
        return self.vocabulary

    def save(self, vocabulary: WordCosts) -> None:
        self.vocabulary = vocabulary


def test_a_known_vocabulary_is_confirmed_with_a_few_texts_of_the_run() -> None:
    """A stored vocabulary gives the same texts with 9 counts instead of 129. It is learned again if the server's counts
    have changed."""
    store = Store()

    def texts(server: Counts) -> list[str]:
        made = prepare_prompts(order(n=40), token_ids=False, local=None, server=server, store=store)
        return [str(request.prompt) for request in made.requests()]

    first, again, changed = Counts(), Counts(), Counts(2)
    assert texts(first) == texts(again)
    assert (len(first.asked), len(again.asked)) == (129, 9)
    assert {len(text.split()) for text in texts(changed)} == {28}
    assert store.vocabulary is not None
    assert store.vocabulary.alone["the"] == 3


def test_n_counts_sessions() -> None:
    """7 sessions of 3 turns are 21 requests, and warm-up is none of their questions."""
    asked = order("multi-turn:turns=3,think=2s", warmup=4, n=7)
    made = prepare_prompts(asked, token_ids=True, local=None, server=Counts())
    found = list(made.conversations())
    assert [one.first_id for one in found] == [0, 3, 6, 9, 12, 15, 18]
    questions = {turn.question for one in found for turn in one.turns}
    assert len(questions) == 21
    assert not questions & {one.prompt for one in made.warmup()}
    assert {turn.input_tokens for one in found for turn in one.turns} == {30}


def test_requests_and_sessions_are_not_mistaken_for_each_other() -> None:
    """Asking a workload of sessions for Requests, or the other way round, says what to do."""
    asked = order("multi-turn:turns=3")
    made = prepare_prompts(asked, token_ids=False, local=None, server=Counts())
    with pytest.raises(WorkloadError, match="follow its responses"):
        made.requests()
    with pytest.raises(WorkloadError, match="synthetic has no sessions"):
        prepare_prompts(order(), token_ids=False, local=None, server=Counts()).conversations()


def test_counts_of_a_dataset_include_what_the_server_adds() -> None:
    """A tokenizer file that knows no chat template is corrected by what two samples show."""
    asked = order(f"alpaca:{DATA / 'datasets/alpaca.json'}")
    server = Counts(21, generates=True)
    made = prepare_prompts(asked, token_ids=False, local=Counts(words=COMMON_WORDS), server=server)
    assert [request.input_tokens for request in made.requests()] == [27, 23]
    assert len(server.asked) == 2


def test_too_short_for_the_special_tokens() -> None:
    """Lengths are never bent: one that special tokens alone exceed is an error that says which bound to name."""
    with pytest.raises(PromptError, match="shortest text prompt has 22 tokens") as caught:
        drawn(order(tokens="lognormal:mean=30,cv=1", n=100), token_ids=False, server=Counts(21))
    assert "min=22" in caught.value.hint
