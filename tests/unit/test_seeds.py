"""The same seed gives the same load, byte for byte: one recorded digest per kind of arrivals, lengths and workload."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from workloads import arrivals, lengths, workload
from workloads.arrivals import Trace
from workloads.prompts import COMMON_WORDS
from workloads.sessions import Conversation
from workloads.workload import WorkloadSpec, prompts_for

DATA = Path(__file__).parent.parent / "data"
SEED = 7
NOTHING_BESIDES = ", body={}, images=(), ignore_eos=True)"


def digest(values: Iterable[object]) -> str:
    """Of what these values are, in their order. What Requests came to have since is in it where it says something."""
    shown = (repr(value).replace(NOTHING_BESIDES, ")") for value in values)
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]


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
        ("synthetic", False, "9539666b5997dcc5"),
        ("synthetic", True, "da0c498fb633651e"),
        ("shared-prefix:groups=3,tokens=64", False, "ba814c36d5cbcbfe"),
        ("shared-prefix:groups=3,tokens=64", True, "e11922f6b8b670c9"),
        ("sharegpt:{data}/datasets/sharegpt.json", False, "858594687788fcf8"),
        ("sharegpt:{data}/datasets/sharegpt.json", True, "858594687788fcf8"),
        ("alpaca:{data}/datasets/alpaca.json", False, "ddd52e97b5919979"),
        ("alpaca:{data}/datasets/alpaca.json", True, "ddd52e97b5919979"),
        ("jsonl:{data}/datasets/prompts.jsonl", False, "d84d952b0f0573e9"),
        ("jsonl:{data}/datasets/prompts.jsonl", True, "d84d952b0f0573e9"),
        ("multi-turn:turns=3,think=2s", False, "f7c522d6ab5a0694"),
        ("multi-turn:turns=3,think=2s", True, "f7c522d6ab5a0694"),
        ("multi-turn:{data}/datasets/sharegpt.json", False, "c6d58c036106c02b"),
        ("multi-turn:{data}/datasets/sharegpt.json", True, "c6d58c036106c02b"),
        ("trace:{data}/traces/mooncake.jsonl", False, "c808548877f0a87e"),
        ("trace:{data}/traces/mooncake.jsonl", True, "79d746f7435b44dd"),
        ("trace:{data}/traces/burstgpt.csv", False, "743584bf034b7016"),
        ("trace:{data}/traces/burstgpt.csv", True, "6eda8b94e8ae1c02"),
    ],
)
def test_requests_of_a_seed_never_change(text: str, token_ids: bool, recorded: str) -> None:
    """Prompts, lengths and warm-up of thirty requests, or of as many as the file has."""
    text = text.format(data=DATA)
    trace = arrivals.parse(text) if text.startswith("trace:") else None
    assert trace is None or isinstance(trace, Trace)
    asked = workload.parse("synthetic" if trace else text)
    spec = WorkloadSpec(asked, lengths.parse("uniform:90..120"), lengths.parse("uniform:1..50"), SEED, 30, 2, trace)
    prompts = prompts_for(spec, token_ids=token_ids, local=Words(), server=None, chat=True)
    requests = list(prompts.warmup())
    if prompts.of_sessions:
        for conversation in prompts.conversations():
            turn: Conversation | None = conversation
            while turn is not None:
                requests.append(turn.request())
                turn = turn.after("an answer")
    else:
        requests += prompts.requests()
    assert digest(requests) == recorded
