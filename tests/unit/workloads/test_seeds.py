"""The same seed gives the same load, byte for byte: one recorded digest per kind of arrivals, lengths and workload."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads.arrival_processes import Trace
from loadgen.workloads.prompts import COMMON_WORDS
from loadgen.workloads.request import Request
from loadgen.workloads.sessions import Conversation
from loadgen.workloads.workload import WorkloadSpec, prepare_prompts

DATA = Path(__file__).parents[2] / "data"
SEED = 7


def digest(values: Iterable[object]) -> str:
    """Of what these values are, in their order."""
    return hashlib.sha256("\n".join(map(repr, values)).encode()).hexdigest()[:16]


def asked(request: Request) -> tuple[object, ...]:
    """What a seed decides of a Request."""
    lengths_of_it = request.input_tokens, request.output_tokens
    return request.id, request.prompt, *lengths_of_it, request.messages, request.session, request.turn


@dataclass
class Words:
    """A tokenizer to which a text costs a token a word, and one more for every z."""

    words: Sequence[str] = COMMON_WORDS

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) + text.count("z") for text in texts]

    def ids(self, text: str) -> list[int]:
        return list(range(100, 100 + len(text.split())))


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("burst", "1a048682c3f62bf7"),
        ("burst:7/3s", "875fa01a34aa8199"),
        ("constant:7", "1c408611575faeff"),
        ("poisson:20", "9fecf10a595ed0b2"),
        ("gamma:20,cv=0.5", "8a8721d6a98d6357"),
        ("gamma:20,cv=2", "9af8d61899ef0049"),
        ("ramp:0..100/40s", "832e4b2066769451"),
        ("ramp:90..3/40s", "e4dd94f8dc0f7d58"),
        ("steps:50@20s,0@5s,70@20s", "256f8730f586757d"),
        ("trace:{data}/traces/mooncake.jsonl,speed=3", "1a99bff3fd9daf10"),
        ("trace:{data}/traces/azure-2023.csv", "fb1fb868b00403f6"),
        ("trace:{data}/traces/azure-2024.csv", "91b7cc13c830c9e2"),
        ("trace:{data}/traces/burstgpt.csv,limit=2", "362d03aea202bd27"),
    ],
)
def test_due_instants_of_a_seed_never_change(text: str, recorded: str) -> None:
    """The first thousand."""
    assert digest(islice(arrivals.parse(text.format(data=DATA)).due_ns(SEED), 1000)) == recorded


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("512", "5237e5e014efb3b2"),
        ("uniform:128..384", "ae4f9047b5ec9508"),
        ("lognormal:mean=161,cv=1.5,min=4,max=2048", "eb83f7828a367378"),
        ("exponential:mean=128,max=512", "c03c316aa85e4b10"),
        ("empirical:{folder}/lengths.csv,column=tokens", "0845061c22780797"),
    ],
)
def test_lengths_of_a_seed_never_change(text: str, recorded: str, tmp_path: Path) -> None:
    """The first thousand."""
    (tmp_path / "lengths.csv").write_text("tokens,other\n5,1\n70,2\n900,3\n", "utf-8")
    assert digest(islice(lengths.parse(text.format(folder=tmp_path)).tokens(SEED, "input"), 1000)) == recorded


@pytest.mark.parametrize(
    ("text", "token_ids", "recorded"),
    [
        ("synthetic", False, "a7eb6b5353482bd5"),
        ("synthetic", True, "43f15c431c9cec51"),
        ("shared-prefix:groups=3,tokens=64", False, "cb12f08869db04b3"),
        ("shared-prefix:groups=3,tokens=64", True, "04a828c2949eb12d"),
        ("sharegpt:{data}/datasets/sharegpt.json", False, "5c10931c4f69c88d"),
        ("sharegpt:{data}/datasets/sharegpt.json", True, "5c10931c4f69c88d"),
        ("alpaca:{data}/datasets/alpaca.json", False, "00609d6241edd92f"),
        ("alpaca:{data}/datasets/alpaca.json", True, "00609d6241edd92f"),
        ("jsonl:{data}/datasets/prompts.jsonl", False, "de46c5efdac77a97"),
        ("jsonl:{data}/datasets/prompts.jsonl", True, "de46c5efdac77a97"),
        ("multi-turn:turns=3,think=2s", False, "f1db201b77aadba7"),
        ("multi-turn:turns=3,think=2s", True, "f1db201b77aadba7"),
        ("multi-turn:{data}/datasets/sharegpt.json", False, "d2f8509d1595d05f"),
        ("multi-turn:{data}/datasets/sharegpt.json", True, "d2f8509d1595d05f"),
        ("trace:{data}/traces/mooncake.jsonl", False, "96e8eb03181e0767"),
        ("trace:{data}/traces/mooncake.jsonl", True, "130765eeb583a265"),
        ("trace:{data}/traces/burstgpt.csv", False, "42ab101b419d183e"),
        ("trace:{data}/traces/burstgpt.csv", True, "2e8ca3a9f6dd0895"),
    ],
)
def test_requests_of_a_seed_never_change(text: str, token_ids: bool, recorded: str) -> None:
    """Prompts, lengths and warm-up of thirty requests, or of as many as the file has."""
    text = text.format(data=DATA)
    trace = arrivals.parse(text) if text.startswith("trace:") else None
    assert trace is None or isinstance(trace, Trace)
    named = workload.parse("synthetic" if trace else text)
    spec = WorkloadSpec(named, lengths.parse("uniform:90..120"), lengths.parse("uniform:1..50"), SEED, 30, 2, trace)
    prompts = prepare_prompts(spec, token_ids=token_ids, local=Words(), server=None, chat=True)
    requests = list(prompts.warmup())
    if prompts.has_sessions:
        for conversation in prompts.conversations():
            turn: Conversation | None = conversation
            while turn is not None:
                requests.append(turn.request())
                turn = turn.after("an answer")
    else:
        requests += prompts.requests()
    assert digest(map(asked, requests)) == recorded
