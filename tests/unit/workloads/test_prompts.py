"""Prompts have exactly the length requested, are all different from the start, and the same for the same seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from random import Random

import pytest

from loadgen.workloads import workload
from loadgen.workloads.lengths import Fixed, Uniform
from loadgen.workloads.prompts import COMMON_WORDS, LocalTokenizer, PromptError, id_prompts, load_tokenizer
from loadgen.workloads.random_streams import item_picker
from loadgen.workloads.texts import OPENINGS, measure_words, pair_texts
from loadgen.workloads.workload import WorkloadSpec, prepare_prompts
from tests.support.exact import alike_ids, alike_texts, exact_prompts
from tests.support.tiny_tokenizers import KINDS, save

IMPOSSIBLE = {
    ("byte_level_with_bos", 1): "shortest text prompt has 2 tokens",
    ("metaspace", 1): "shortest text prompt has 2 tokens",
}
"""(tokenizer, tokens) to the reason why there are no such texts."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocalTokenizer]:
    """A tokenizer of one of tiny_tokenizers.KINDS, read from its file."""
    return cache(lambda kind: load_tokenizer(save(kind, tmp_path_factory.mktemp(kind))))


@dataclass
class Counts:
    """A tokenizer made of a function; remembers what it was asked."""

    length: Callable[[str], int]
    generates: bool = False
    plain: Counts | None = None
    words: Sequence[str] = ()
    known_ids: Sequence[int] = ()
    asked: list[str] = field(default_factory=list)

    def count(self, texts: Sequence[str]) -> list[int]:
        self.asked += texts
        return [self.length(text) for text in texts]

    def ids(self, text: str) -> list[int]:
        self.asked.append(text)
        return list(self.known_ids)


def words_in(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 512])
def test_exact_with_a_tokenizer_file(tokenizer: Callable[[str], LocalTokenizer], kind: str, tokens: int) -> None:
    """Each text encodes to exactly the tokens asked, and no two share their first block; or the error says why."""
    local = tokenizer(kind)
    n = 40 if tokens >= 16 else 5
    if (kind, tokens) in IMPOSSIBLE:
        with pytest.raises(PromptError, match=IMPOSSIBLE[kind, tokens]) as caught:
            exact_prompts(n, tokens, 0, token_ids=False, local=local, server=None)
        assert caught.value.hint
        return
    prompts = exact_prompts(n, tokens, 0, token_ids=False, local=local, server=None).prompts
    encoded = [local.tokenizer.encode(str(prompt)).ids for prompt in prompts]
    assert {len(ids) for ids in encoded} == {tokens}
    if (kind, tokens) != ("across_words", 1):  # this vocabulary leaves out letters, so two words are the same token
        assert len({tuple(ids[:16]) for ids in encoded}) == n
    assert len({tuple(ids[:4]) for ids in encoded}) == n or kind in ("letters", "across_words")


@pytest.mark.parametrize("kind", KINDS)
def test_exact_behind_a_shared_beginning(tokenizer: Callable[[str], LocalTokenizer], kind: str) -> None:
    """Texts of drawn lengths are exact as a whole, and a group's encodings begin with all of its shared tokens."""
    local = tokenizer(kind)
    order = WorkloadSpec(workload.parse("shared-prefix:groups=2,tokens=64"), Uniform(90, 200), Fixed(1), 0, 30)
    made = prepare_prompts(order, token_ids=False, local=local, server=None)
    found = list(made.requests())
    encoded = [local.tokenizer.encode(str(request.prompt)).ids for request in found]
    assert [len(ids) for ids in encoded] == [request.input_tokens for request in found]
    shared = 64 if kind != "across_words" else 60  # there a token may reach across the end of what is shared
    assert len({tuple(ids[:shared]) for ids in encoded}) == 2
    assert len({tuple(ids[: 64 + 16]) for ids in encoded}) == 30


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_plain_text(tokenizer: Callable[[str], LocalTokenizer], kind: str) -> None:
    """Token id prompts have exactly the length asked, differ within two ids, and hold no special token."""
    local = tokenizer(kind)
    made = exact_prompts(500, 512, 3, token_ids=True, local=local, server=None)
    assert made.counting_method == "token ids"
    assert {len(prompt) for prompt in made.prompts} == {512}
    assert len({tuple(prompt[:2]) for prompt in made.prompts}) == 500
    special = set(local.tokenizer.get_added_tokens_decoder())
    assert not special & {token for prompt in made.prompts for token in prompt}


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(lambda text: 1 + words_in(text), id="words and a BOS"),
        pytest.param(lambda text: 21 + words_in(text), id="a chat template"),
        pytest.param(lambda text: -(-len(text) // 4), id="four letters"),
        pytest.param(len, id="letters"),
        pytest.param(lambda text: len(text) + words_in(text), id="dear blanks"),
        pytest.param(lambda text: 3 * words_in(text) - text.count("z"), id="no cheap words"),
    ],
)
@pytest.mark.parametrize("tokens", [33, 512])
def test_exact_by_any_count(length: Callable[[str], int], tokens: int) -> None:
    """Whatever a server calls a token, the texts have exactly the count asked."""
    texts = alike_texts(Counts(length).count, COMMON_WORDS, 60, tokens, 0)
    assert {length(text) for text in texts} == {tokens}
    assert len(set(texts)) == 60


def test_pairs_of_words_prove_that_texts_add_up() -> None:
    """One text per word contains every word after every word, so a few counts show that every text is the sum of its
    words; one pair that is a single token is noticed."""
    texts = pair_texts("a", ["a", "b", "c"])
    assert {pair for text in texts for pair in pairwise(text.split())} == set(product("abc", repeat=2))
    assert {text.split()[-1] for text in texts} == {"a", "b", "c"}
    judge = Counts(words_in)
    assert measure_words(judge.count, COMMON_WORDS).adds_up
    assert len(judge.asked) == OPENINGS + len(COMMON_WORDS)
    merged = Counts(lambda text: words_in(text) - text.count(" small long "))
    assert not measure_words(merged.count, ["small", "long", "of"]).adds_up


@pytest.mark.parametrize(
    ("length", "n", "tokens", "reason"),
    [
        (lambda text: 30 + words_in(text), 10, 20, "shortest text prompt has 31 tokens"),
        (words_in, len(COMMON_WORDS) + 1, 1, f"make only {len(COMMON_WORDS)} different prompts of 1 tokens, not"),
        (lambda text: 2 * words_in(text), 10, 511, "different prompts of 511 tokens"),
        (lambda text: 7 * bool(text), 10, 20, "0 known words"),
        (
            lambda text: words_in(text) + (words_in(text) > 2),
            3,
            3,
            "could not be built with their exact length",
        ),
    ],
)
def test_impossible(length: Callable[[str], int], n: int, tokens: int, reason: str) -> None:
    """Prompts that cannot be exact are an error that says why and what to do, never about as long."""
    with pytest.raises(PromptError, match=reason) as caught:
        alike_texts(Counts(length).count, COMMON_WORDS, n, tokens, 0)
    assert caught.value.hint


def test_too_few_ids() -> None:
    """More prompts than the ids can number is an error."""
    assert len(set(alike_ids([5, 6], 8, 3, 0))) == 8
    with pytest.raises(PromptError, match="2 token ids make only 8 different prompts of 3 tokens, not 9"):
        alike_ids([5, 6], 9, 3, 0)


def test_ids_too_short_for_their_number() -> None:
    """Where lengths are drawn, a prompt too short to hold its number is its number cut short; the others all differ."""
    prompt = id_prompts(range(9), 0, numbers=50, shared=20)
    assert [len(prompt(7, tokens)) for tokens in range(4)] == [0, 1, 2, 3]
    assert len({prompt(number, 2) for number in range(-20, 50)}) == 70


def test_stretches_are_cut_where_the_prompt_ends() -> None:
    """A prompt begins with its stretches, whole or cut, and only what is left is its own."""
    prompt = id_prompts(range(100), 0, numbers=9, shared=9)
    first, second = prompt(-1, 6), prompt(-2, 6)
    assert prompt(3, 4, [(-1, 6)]) == first[:4]
    assert prompt(3, 8, [(-1, 6), (-2, 6)]) == (first + second)[:8]
    assert prompt(3, 9, [(-1, 6)]) == first + prompt(3, 3)


def test_same_seed_same_bytes() -> None:
    """A seed fixes every prompt, in any process, whatever its hash seed; another seed changes all of them."""
    code = (
        "from tests.support.exact import alike_ids, alike_texts\n"
        "from loadgen.workloads.prompts import COMMON_WORDS as W\n"
        "count = lambda texts: [len(text.split()) for text in texts]\n"
        "print(alike_ids(range(9), 40, 20, 7), alike_texts(count, W, 40, 20, 7))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    ids, texts = alike_ids(range(9), 40, 20, 7), alike_texts(Counts(words_in).count, COMMON_WORDS, 40, 20, 7)
    assert printed == {f"{ids} {texts}".encode()}
    assert not set(ids) & set(alike_ids(range(9), 40, 20, 8))
    assert not set(texts) & set(alike_texts(Counts(words_in).count, COMMON_WORDS, 40, 20, 8))


def test_bytes_of_a_seed_never_change() -> None:
    """What a seed meant in one release it means in the next, on every platform and Python."""
    texts = "\n".join(alike_texts(Counts(words_in).count, COMMON_WORDS, 3, 600, 0))
    assert alike_ids(range(100), 2, 5, 0) == [(36, 82, 24, 82, 30), (27, 53, 39, 86, 29)]
    assert (
        hashlib.sha256(texts.encode()).hexdigest() == "e74ca8d4e0ecd05173df6f8dc2b2f6e3b71d4a3a14506ee2a0b64c943e2e6225"
    )


def test_a_prefix_of_the_burst_is_the_burst() -> None:
    """Prompt i does not depend on how many prompts follow it, while the ids can still number them all."""
    assert alike_ids(range(100), 200, 8, 1)[:150] == alike_ids(range(100), 150, 8, 1)


FILE = Counts(words_in, words=COMMON_WORDS, known_ids=[10, 11, 12])
COUNTS_ONLY = Counts(words_in)
TELLS_IDS = Counts(words_in, known_ids=[20, 21, 22])
RUNS_IT = Counts(words_in, generates=True)


@pytest.mark.parametrize(
    ("token_ids", "local", "server", "how"),
    [
        (True, FILE, None, "token ids"),
        (True, FILE, TELLS_IDS, "token ids"),
        (True, None, TELLS_IDS, "token ids"),
        (True, None, COUNTS_ONLY, "text, counted by the server"),
        (False, FILE, TELLS_IDS, "text, counted with the tokenizer file"),
        (False, FILE, RUNS_IT, "text, counted with the tokenizer file"),
        (False, FILE, None, "text, counted with the tokenizer file"),
        (False, None, TELLS_IDS, "text, counted by the server"),
    ],
)
def test_order_of_preference(token_ids: bool, local: Counts | None, server: Counts | None, how: str) -> None:
    """Token ids where the API takes them and someone knows some, else the tokenizer file, else the server's count."""
    made = exact_prompts(9, 30, 0, token_ids=token_ids, local=local, server=server)
    assert made.counting_method == how
    assert len(set(made.prompts)) == 9
    known = set((local or server or RUNS_IT).known_ids)
    assert all(isinstance(prompt, str) or set(prompt) <= known for prompt in made.prompts)


@pytest.mark.parametrize("server", [None, RUNS_IT])
def test_nobody_to_ask(server: Counts | None) -> None:
    """Without a tokenizer file and without a way to count, exact lengths are an error that asks for the file."""
    with pytest.raises(PromptError) as caught:
        exact_prompts(9, 30, 0, token_ids=False, local=None, server=server, by="exact")
    assert "--tokenizer" in caught.value.hint


def templated(text: str) -> int:
    """A chat template of 21 tokens that touches its content: a first word `the` and a last word `z` cost one more."""
    return 21 + words_in(text) + text.startswith("the") + text.endswith("z")


@pytest.mark.parametrize("generates", [False, True])
def test_template_is_measured_with_the_server(generates: bool) -> None:
    """What the server adds to the file's count is measured, and every prompt touches the template in the same way."""
    server = Counts(templated, generates=generates)
    made = exact_prompts(200, 40, 0, token_ids=False, local=FILE, server=server)
    assert {templated(str(prompt)) for prompt in made.prompts} == {40}
    assert (made.prompts[0] in server.asked) == (not generates)


def test_template_of_a_server_that_counts_plain_text() -> None:
    """A server that counts text, but a whole prompt only by running it, is enough to be exact on chat."""
    server = Counts(templated, generates=True, plain=Counts(words_in))
    made = exact_prompts(200, 40, 0, token_ids=False, local=None, server=server)
    assert {templated(str(prompt)) for prompt in made.prompts} == {40}
    assert made.counting_method == "text, counted by the server, plus what the endpoint adds"
    assert len(server.asked) == 2


def test_prompts_stay_out_of_the_prefix_cache() -> None:
    """A server that can only count by running a text is never given one of the prompts before the burst."""
    server = Counts(lambda text: 21 + words_in(text), generates=True)
    made = exact_prompts(9, 200, 0, token_ids=False, local=FILE, server=server)
    assert server.asked
    assert not set(server.asked) & set(made.prompts)


@pytest.mark.parametrize("token_ids", [True, False])
def test_tokenizer_of_another_model(token_ids: bool) -> None:
    """A file that counts otherwise than the server is refused before anything is sent, with both counts."""
    with pytest.raises(PromptError, match="have 3 and 106 tokens by the tokenizer file, but 6 and 212 by") as caught:
        exact_prompts(9, 30, 0, token_ids=token_ids, local=FILE, server=Counts(lambda text: 2 * words_in(text)))
    assert "being served" in caught.value.hint


def test_first_prompt_is_checked_with_the_server() -> None:
    """A server that agrees on the samples and not on the first prompt is an error that names both numbers."""
    server = Counts(lambda text: words_in(text) + (words_in(text) == 30))
    with pytest.raises(PromptError, match="built with 30 tokens, but the server counts 31"):
        exact_prompts(9, 30, 0, token_ids=False, local=FILE, server=server)


def test_what_is_picked_at_once_is_what_single_draws_pick() -> None:
    """Or a Python that fills bytes otherwise would change every prompt of a seed."""
    one, items = Random("7:3"), [*range(1_000_000, 0, -1)]
    assert item_picker(items)(Random("7:3"), 1000) == [items[int(one.random() * len(items))] for _ in range(1000)]
