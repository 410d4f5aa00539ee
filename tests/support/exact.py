"""Builds prompts of an exact length for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.workloads.lengths import Fixed
from loadgen.workloads.prompts import CountTokens, ServerTokenCounter, Tokenizer, id_prompts
from loadgen.workloads.texts import TextSpec, TextSurvey, measure_openings, measure_words, text_writer, words_of
from loadgen.workloads.token_counter import CountingMethod
from loadgen.workloads.workload import Synthetic, WorkloadSpec, prepare_prompts


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run in order of request id, and the method that counted their tokens."""

    prompts: list[str | tuple[int, ...]]
    counting_method: str


def exact_prompts(
    n: int,
    tokens: int,
    seed: int,
    *,
    token_ids: bool,
    local: Tokenizer | None,
    server: ServerTokenCounter | None,
    by: CountingMethod | None = None,
) -> Prompts:
    """Build the prompts of a run of `n` requests with `tokens` input tokens each."""
    order = WorkloadSpec(Synthetic(), Fixed(tokens), Fixed(1), seed, n)
    made = prepare_prompts(order, token_ids=token_ids, local=local, server=server, by=by)
    return Prompts([request.prompt for request in made.requests()], made.counting_method)


def alike_ids(alphabet: Sequence[int], n: int, tokens: int, seed: int) -> list[str | tuple[int, ...]]:
    """Return the token-id prompts with the numbers 0 to `n` - 1, of `tokens` tokens each."""
    prompt = id_prompts(alphabet, seed, numbers=n, shortest=tokens)
    return [prompt(number, tokens) for number in range(n)]


def alike_texts(count: CountTokens, words: Sequence[str], n: int, tokens: int, seed: int) -> list[str]:
    """Return the text prompts with the numbers 0 to `n` - 1, of `tokens` tokens each. `count` counts every text."""
    return counted_texts(count, words, [TextSpec(number, tokens) for number in range(n)], seed)


def counted_texts(count: CountTokens, words: Sequence[str], specs: Sequence[TextSpec], seed: int) -> list[str]:
    """Return the text prompt of each spec. `count` counts the tokens of every text."""
    vocabulary = measure_openings(count, measure_words(count, words))
    survey = TextSurvey(1 + max(spec.number for spec in specs))
    for spec in specs:
        survey.note(spec.number, spec.tokens, spec.shared)
    writer = text_writer(words_of(vocabulary, len(words)), survey, seed, count)
    for spec in specs:
        writer.openings.rank(spec.number, spec.tokens, spec.shared)
    writer.write_first_spans(spec.shared[0] for spec in specs if spec.shared)
    return writer.texts(specs)
