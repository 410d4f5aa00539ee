"""What is asked: each workload as Requests. Prompts and counts are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadgen.workloads import lengths
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.prompts import Prompt, SharedSpan
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.traces import MOONCAKE_BLOCK_TOKENS as BLOCK_TOKENS
from loadgen.workloads.workload import (
    Dataset,
    MultiTurn,
    Prompts,
    SharedPrefix,
    Synthetic,
    Workload,
    WorkloadSpec,
    parse,
)

DATA = Path(__file__).parents[2] / "data"
S = 1_000_000_000


def ids(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> tuple[int, ...]:
    """Token ids that tell which prompt or stretch they belong to, and where in it they stand."""
    begun = [token for stretch in shared for token in ids(*stretch)][:input_tokens]
    return (*begun, *(1000 * number + place for place in range(input_tokens - len(begun))))


def text(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
    """As many words."""
    assert not shared
    return " ".join([f"p{number}"] * input_tokens)


def count(words: str) -> int:
    """A word is a token."""
    return len(words.split())


def material(prompt: Prompt = ids, output: str | None = "4", input_tokens: str = "6") -> Prompts:
    """Six tokens in, four out."""
    answers = lengths.parse(output) if output else None
    return Prompts(WorkloadSpec(Synthetic(), lengths.parse(input_tokens), answers, seed=3, n=None), prompt, count)


TEXTS: list[tuple[str, Workload, str]] = [
    ("synthetic", Synthetic(), "synthetic"),
    ("shared-prefix:tokens=256,groups=8", SharedPrefix(8, 256), "shared-prefix:groups=8,tokens=256"),
    ("sharegpt:a,b.json", Dataset("sharegpt", Path("a,b.json")), "sharegpt:a,b.json"),
    ("alpaca:a.json", Dataset("alpaca", Path("a.json")), "alpaca:a.json"),
    ("jsonl:a.jsonl", Dataset("jsonl", Path("a.jsonl")), "jsonl:a.jsonl"),
    ("multi-turn:turns=3", MultiTurn(3, None), "multi-turn:turns=3"),
    ("multi-turn:think=2s.json,think=500ms", MultiTurn(None, Path("think=2s.json"), S // 2),
     "multi-turn:think=2s.json,think=0.5s"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "value", "canonical"), TEXTS, ids=[given for given, _, _ in TEXTS])
def test_text_and_value_stand_for_each_other(given: str, value: Workload, canonical: str) -> None:
    """Each form is read as its value, printed in one canonical form, and read back unchanged."""
    assert parse(given) == value
    assert str(value) == canonical
    assert parse(canonical) == value


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        ("random", "unknown source 'random'", "choose synthetic, shared-prefix"),
        ("synthetic:5", "'synthetic' takes no value", "write synthetic"),
        ("sharegpt", "no value follows 'sharegpt'", "sharegpt:FILE"),
        ("sharegpt:", "the file's name is missing", "sharegpt:FILE"),
        ("shared-prefix:groups=8", "both groups= and tokens= are needed", "groups=K,tokens=P"),
        ("shared-prefix:groups=0,tokens=8", "groups 0 is outside", "groups=K,tokens=P"),
        ("multi-turn:turns=0", "turns 0 is outside 1 to 1000", "turns=K"),
        ("multi-turn:turns=2,speed=3", "'speed=3' is not one of", "turns=K"),
    ],
)
def test_what_is_wrong_is_named_and_put_right(given: str, problem: str, hint: str) -> None:
    """The message names the bad part; the hint is the syntax of that kind."""
    with pytest.raises(WorkloadError) as caught:
        parse(given)
    assert problem in str(caught.value)
    assert hint in caught.value.hint


def test_synthetic_requests_have_the_lengths_drawn() -> None:
    """Request i has prompt i, of the i-th input length, and the i-th output length."""
    varied = material(output="uniform:1..50", input_tokens="uniform:1..50")
    requests = list(islice(Synthetic().requests(varied), 20))
    drawn = list(islice(varied.lengths(), 20))
    assert requests == [Request(i, ids(i, tokens), tokens, output_tokens) for i, tokens, output_tokens in drawn]
    assert [tokens for _, tokens, _ in drawn] != [tokens for _, _, tokens in drawn]


def test_requests_are_made_one_at_a_time() -> None:
    """Taking three Requests makes three prompts."""
    made: list[int] = []

    def watched(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> tuple[int, ...]:
        made.append(number)
        return ids(number, input_tokens)

    list(islice(Synthetic().requests(material(watched)), 3))
    assert made == [0, 1, 2]


def test_a_group_shares_its_prefix_and_nothing_else() -> None:
    """Request i begins with the tokens of group i mod K, has a rest of its own, and the length asked for in all."""
    requests = list(islice(SharedPrefix(groups=2, tokens=4).requests(material()), 4))
    prompts = [request.prompt for request in requests]
    assert [prompt[:4] for prompt in prompts] == [ids(-1, 4), ids(-2, 4), ids(-1, 4), ids(-2, 4)]
    assert [prompt[4:] for prompt in prompts] == [ids(number, 2) for number in range(4)]
    assert {(request.input_tokens, len(request.prompt)) for request in requests} == {(6, 6)}


def test_a_shared_prefix_as_long_as_the_prompt_is_refused() -> None:
    """A request needs at least one token of its own."""
    with pytest.raises(WorkloadError, match="request 0 has 6 tokens, no more than the shared prefix's 6"):
        next(SharedPrefix(2, 6).requests(material()))


def test_a_trace_brings_its_lengths_and_its_sharing() -> None:
    """Prompts have the recorded lengths; equal leading block ids are equal leading tokens, and no more than that."""
    requests = list(Trace(DATA / "traces/mooncake.jsonl").requests(material()))
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [
        (1100, 52), (600, 1), (1030, 26), (13, 300),
    ]  # fmt: skip
    first, second, third, fourth = (request.prompt for request in requests)
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1100, 600, 1030, 13]
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS] == ids(-8, BLOCK_TOKENS)
    assert first[BLOCK_TOKENS] != second[BLOCK_TOKENS]
    assert first[: 2 * BLOCK_TOKENS] == third[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS] != third[2 * BLOCK_TOKENS]
    assert fourth == ids(-13, 13)


def test_a_trace_without_blocks_has_prompts_of_their_own() -> None:
    """Azure and BurstGPT record no sharing, so every prompt differs, and text will do."""
    requests = list(Trace(DATA / "traces/burstgpt.csv").requests(material(text)))
    assert [request.prompt for request in requests] == [text(0, 410), text(1, 1010), text(2, 417)]


@pytest.mark.parametrize(("layout", "block"), [("", 16), ('"chat_id": 1, "parent_chat_id": -1, ', None)])
def test_blocks_of_a_trace_may_have_another_size(tmp_path: Path, layout: str, block: int | None) -> None:
    """Equal leading ids are as many equal tokens as the user states, or as the layout says (Qwen-Bailian: 16)."""
    file = tmp_path / "small.jsonl"
    rows = [(0, 40, [4, 5, 6]), (9, 33, [4, 5, 7]), (18, 16, [4])]
    file.write_text(
        "".join(
            f'{{{layout}"timestamp": {at}, "input_length": {length}, "output_length": 1, "hash_ids": {blocks}}}\n'
            for at, length, blocks in rows
        )
    )
    first, second, third = (
        request.prompt for request in Trace(file, unit="s", block_tokens=block).requests(material())
    )
    assert first[:32] == second[:32] == ids(-5, 16) + ids(-6, 16)
    assert first[32:33] != second[32:33]
    assert third == ids(-5, 16)


def test_dataset_answers_give_the_output_lengths() -> None:
    """Without a named output length a Request asks for as many tokens as the recorded answer has."""
    requests = list(Dataset("alpaca", DATA / "datasets/alpaca.json").requests(material(output=None)))
    assert requests == [Request(0, "Add the numbers.\n\n2 and 3", 6, 1), Request(1, "Greet me.", 2, 4)]


def test_named_output_lengths_win_over_the_dataset() -> None:
    """With a named output length every Request has it, whatever the file says."""
    requests = list(Dataset("jsonl", DATA / "datasets/prompts.jsonl").requests(material(output="9")))
    assert [request.output_tokens for request in requests] == [9, 9]


def test_an_output_length_that_nobody_names_is_the_usual_one() -> None:
    """A line without answer or length asks for 128 tokens; a workload that has no answers at all is refused."""
    requests = list(Dataset("jsonl", DATA / "datasets/prompts.jsonl").requests(material(output=None)))
    assert [request.output_tokens for request in requests] == [3, 128]
    with pytest.raises(WorkloadError, match="no answers whose lengths could be used"):
        next(Synthetic().requests(material(output=None)))


@pytest.mark.parametrize("given", ["synthetic", f"jsonl:{DATA / 'datasets/prompts.jsonl'}", "multi-turn:turns=2"])
def test_where_answers_may_end_every_request_says_so(given: str) -> None:
    """Of any workload, and in each turn of a session."""
    spec = replace(material().spec, workload=parse(given), n=2, request_fields={"ignore_eos": False})
    prompts = replace(material(text), spec=spec)
    sessions = prompts.conversations() if prompts.has_sessions else ()
    requests = [each for one in sessions for each in (one.request(), *one.remaining_requests())] or list(
        prompts.requests()
    )
    assert len(requests) >= 2
    assert not any(request.ignore_eos for request in requests)


def test_every_dataset_kind_is_read() -> None:
    """ShareGPT dialogues stand for their first question."""
    requests = list(Dataset("sharegpt", DATA / "datasets/sharegpt.json").requests(material()))
    assert [request.prompt for request in requests] == ['Name a river, "quoted" [and] {braced}.', "At the sea."]
