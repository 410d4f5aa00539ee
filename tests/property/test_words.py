"""Filling up with words of known cost pays any amount that can be paid, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from loadgen.workloads.prompts import PromptError
from loadgen.workloads.texts import COST_LIMIT, TextSpec, measure_words, words_of
from tests.support.exact import alike_ids, alike_texts, counted_texts

COSTS = st.lists(st.integers(1, COST_LIMIT + 2), min_size=1, max_size=6)


def payable(amount: int, coins: set[int]) -> bool:
    reach = {0}
    for total in range(1, amount + 1):
        if any(total - coin in reach for coin in coins):
            reach.add(total)
    return amount in reach


def counting(costs: dict[str, int]) -> Callable[[Sequence[str]], list[int]]:
    return lambda texts: [sum(costs[word] for word in text.split()) for text in texts]


@given(COSTS, st.integers(0, 300), st.integers())
def test_fill(costs: list[int], tokens: int, seed: int) -> None:
    """`can_fill` tells exactly which amounts the words can pay, and `fill` then pays them."""
    prices = {f"w{number}": cost for number, cost in enumerate(costs)}
    words = words_of(measure_words(counting(prices), list(prices)))
    assert words.costs == {word: cost for word, cost in prices.items() if cost <= COST_LIMIT}
    assert words.can_fill(tokens) == payable(tokens, set(words.costs.values()))
    if words.can_fill(tokens):
        assert sum(prices[word] for word in words.fill(tokens, Random(seed))) == tokens


@given(COSTS, st.integers(0, 20), st.integers(1, 300), st.integers(1, 40), st.integers())
def test_texts(costs: list[int], added: int, tokens: int, n: int, seed: int) -> None:
    """Texts are exact and different for any word costs and any number of added tokens, or cannot be made."""
    prices = {f"w{number}": cost for number, cost in enumerate(costs)}
    count = counting(prices)
    try:
        texts = alike_texts(lambda asked: [added + c for c in count(asked)], list(prices), n, tokens, seed)
    except PromptError:
        cheap = {cost for cost in costs if cost <= COST_LIMIT}
        assert n > 1 or tokens <= added or not payable(tokens - added, cheap)
        return
    assert set(count(texts)) == {tokens - added}
    assert len(set(texts)) == n


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 200), st.integers(1, 40), st.integers())
def test_ids(alphabet: set[int], n: int, tokens: int, seed: int) -> None:
    """Id prompts are exact, from the alphabet, and different in their first block, or there are too few ids."""
    try:
        prompts = alike_ids(sorted(alphabet), n, tokens, seed)
    except PromptError:
        assert len(alphabet) ** min(tokens, 16) < n
        return
    assert {len(prompt) for prompt in prompts} == {tokens}
    assert len({prompt[:16] for prompt in prompts}) == n
    assert alphabet.issuperset(token for prompt in prompts for token in prompt)


LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=12)


@given(COSTS, LENGTHS, st.lists(st.integers(1, 30), max_size=3), st.integers(1, 3), st.integers())
def test_texts_with_shared_beginnings(
    costs: list[int], lengths: list[int], stretches: list[int], groups: int, seed: int
) -> None:
    """Texts of many lengths that begin with shared stretches are exact, and the stretches stand whole in those that
    have room for them; or they cannot be made."""
    prices = {f"w{number}": cost for number, cost in enumerate(costs)}
    count = counting(prices)
    wanted = [
        TextSpec(
            number, tokens, tuple((-1 - number % groups - 10 * place, size) for place, size in enumerate(stretches))
        )
        for number, tokens in enumerate(lengths)
    ]
    try:
        texts = counted_texts(count, list(prices), wanted, seed)
    except PromptError:
        cheap = {cost for cost in costs if cost <= COST_LIMIT}
        own = lengths[0] - sum(stretches)
        assert len(lengths) > 1 or own < 0 or not all(payable(amount, cheap) for amount in (*stretches, own))
        return
    assert count(texts) == lengths
    cheap = {cost for cost in costs if cost <= COST_LIMIT}
    own = [tokens - sum(stretches) for tokens in lengths]
    whole = [text.split() for text, left in zip(texts, own, strict=True) if left >= 0 and payable(left, cheap)]
    assert len({tuple(words[: prefix_words(words, prices, sum(stretches))]) for words in whole}) <= groups


def prefix_words(words: list[str], prices: dict[str, int], tokens: int) -> int:
    """How many words cost so many tokens."""
    sums = list(accumulate((prices[word] for word in words), initial=0))
    return sums.index(tokens)
