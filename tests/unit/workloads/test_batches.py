"""Requests with several inputs: their prompts, lengths, ids and common queries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from loadgen.workloads import lengths
from loadgen.workloads.prompts import SharedSpan
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.workload import Dataset, Prompts, Synthetic, WorkloadSpec, prepare_prompts


def named(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
    """A prompt that names its number, its length and the spans that it shares."""
    return f"{number} {input_tokens} {[*shared]}"


def prompts(batch_size: int, *, input_tokens: str = "9", warmup: int = 0, query_tokens: int = 0) -> Prompts:
    spec = WorkloadSpec(
        Synthetic(), lengths.parse(input_tokens), lengths.Fixed(1), 3, n=3, warmup=warmup, batch_size=batch_size
    )
    return Prompts(spec, named, len, query_tokens=query_tokens)


def inputs(request: Request) -> list[str]:
    return [str(text) for text in (request.prompt, *request.batch)]


def test_each_input_has_its_own_number_and_length() -> None:
    """Request i has the prompts from i * size on; its length is that of all inputs."""
    built = [*prompts(2).requests()]
    assert [(request.id, request.input_tokens, request.inputs) for request in built] == [
        (0, 18, 2),
        (1, 18, 2),
        (2, 18, 2),
    ]
    assert [inputs(request) for request in built] == [["0 9 []", "1 9 []"], ["2 9 []", "3 9 []"], ["4 9 []", "5 9 []"]]
    drawn = [*prompts(4, input_tokens="uniform:5..50").requests()]
    assert [request.input_tokens for request in drawn] == [
        sum(int(text.split()[1]) for text in inputs(request)) for request in drawn
    ]


def test_warmup_requests_have_as_many_inputs_and_other_prompts() -> None:
    """A cache that the warm-up filled would help the run."""
    warmup = prompts(2, warmup=2).warmup()
    assert [(request.id, inputs(request)) for request in warmup] == [
        (-1, ["6 9 []", "7 9 []"]),
        (-2, ["8 9 []", "9 9 []"]),
    ]


def test_inputs_of_a_request_share_a_query_and_requests_do_not() -> None:
    """The query is a span that all inputs of a request begin with."""
    built = [*prompts(2, warmup=1, query_tokens=4).requests(), *prompts(2, warmup=1, query_tokens=4).warmup()]
    spans = [[text.split(" ", 2)[2] for text in inputs(request)] for request in built]
    assert spans == [[f"[({span}, 4)]"] * 2 for span in (-1, -2, -3, -4)]
    with pytest.raises(WorkloadError, match="input 0 has 4 tokens, no more than the query's 4"):
        next(prompts(2, input_tokens="4", query_tokens=4).requests())


class Words:
    """A tokenizer that adds two tokens to every text, with words of one to three tokens."""

    words = tuple(f"{letter}{'x' * cost}" for letter in "abcdefghijklmnop" for cost in range(3))

    def count(self, texts: Sequence[str]) -> list[int]:
        return [2 + sum(len(word) for word in text.split()) for text in texts]

    def ids(self, _text: str) -> list[int]:
        return []


def test_queries_of_words_with_several_tokens_are_exact() -> None:
    """The inputs of a request have the same first tokens, and exactly their lengths."""
    spec = WorkloadSpec(
        Synthetic(), lengths.parse("40"), lengths.Fixed(1), 3, n=20, warmup=2, batch_size=8, query_words=8
    )
    ready = prepare_prompts(spec, token_ids=False, local=Words(), server=None)
    assert ready.query_tokens == 10
    for request in (*ready.requests(), *ready.warmup()):
        texts = inputs(request)
        assert Words().count(texts) == [40] * 8
        assert len(set(texts)) == 8
        first = texts[0].split()
        common = next(
            index for index, words in enumerate(zip(*map(str.split, texts), strict=False)) if len({*words}) > 1
        )
        assert len("".join(first[:common])) >= 8


def test_files_are_cut_into_whole_batches(tmp_path: Path) -> None:
    """Three lines make one request of two inputs; a line with fields of its own cannot be one of several."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt":"a b"}\n{"prompt":"c"}\n{"prompt":"d"}\n')
    spec = WorkloadSpec(Dataset("jsonl", file), lengths.parse("9"), lengths.Fixed(1), 3, n=2, batch_size=2)
    ready = prepare_prompts(spec, token_ids=False, local=Words(), server=None)
    assert [(request.input_tokens, inputs(request)) for request in islice(ready.requests(), 3)] == [(7, ["a b", "c"])]
    file.write_text('{"prompt":"a b","body":{"top_n":1}}\n{"prompt":"c"}\n')
    with pytest.raises(WorkloadError, match="cannot be one of several inputs"):
        next(Prompts(spec, named, len).requests())
