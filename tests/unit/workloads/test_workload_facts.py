"""Facts of workloads and lengths, for code that must not parse their text."""

from __future__ import annotations

import pytest

from loadgen.workloads.lengths import LENGTH_DISTRIBUTIONS
from loadgen.workloads.workload import WORKLOADS
from loadgen.workloads.workload_facts import LengthFacts, WorkloadFacts, length_facts, workload_facts

WORKLOAD_FACTS = {
    "synthetic": WorkloadFacts(kind="synthetic"),
    "shared-prefix:groups=4,tokens=100": WorkloadFacts(
        kind="shared-prefix", options="groups=4,tokens=100", shares_prefixes=True
    ),
    "jsonl:/data/my prompts.jsonl": WorkloadFacts(kind="jsonl", options="my prompts.jsonl", has_own_lengths=True),
    "multi-turn:turns=3,think=2s": WorkloadFacts(
        kind="multi-turn",
        options="turns=3,think=2s",
        shares_prefixes=True,
        has_sessions=True,
        turns=3,
        think="2s",
    ),
    "multi-turn:/data/chats.json": WorkloadFacts(
        kind="multi-turn", options="chats.json", shares_prefixes=True, has_sessions=True, has_own_lengths=True
    ),
    "requests:/data/log.jsonl,sessions=yes": WorkloadFacts(
        kind="requests", options="log.jsonl,sessions=yes", has_sessions=True, has_own_lengths=True
    ),
    "audio:/data/calls": WorkloadFacts(kind="audio", options="calls", has_own_lengths=True),
    "sessions:/data/trace.jsonl,speed=2": WorkloadFacts(
        kind="sessions", options="trace.jsonl,speed=2", shares_prefixes=True, has_sessions=True, has_own_lengths=True
    ),
    "of-a-newer-version:x=1": WorkloadFacts(kind="of-a-newer-version", options="x=1"),
}
LENGTHS = {
    "512": LengthFacts(kind="fixed", low=512, high=512, mean=512.0),
    "max:128": LengthFacts(kind="fixed", low=128, high=128, mean=128.0, may_end=True),
    "uniform:100..300": LengthFacts(kind="uniform", low=100, high=300, mean=200.0),
    "lognormal:mean=161,cv=1.5": LengthFacts(kind="lognormal", low=1, mean=161.0),
    "exponential:mean=64,max=512": LengthFacts(kind="exponential", low=1, high=512, mean=64.0),
    "empirical:/data/azure.csv,column=Tokens": LengthFacts(kind="empirical", file="azure.csv,column=Tokens"),
    "answers": LengthFacts(kind="answers"),
    "of-a-newer-version:1": LengthFacts(kind="of-a-newer-version"),
}


@pytest.mark.parametrize(("text", "facts"), WORKLOAD_FACTS.items(), ids=str)
def test_facts_of_a_workload(text: str, facts: WorkloadFacts) -> None:
    """A path is shortened to the name of its file, and an unknown workload keeps its text."""
    assert workload_facts(text) == facts


@pytest.mark.parametrize(("text", "facts"), LENGTHS.items(), ids=str)
def test_facts_of_lengths(text: str, facts: LengthFacts) -> None:
    """Means and limits are known where no file defines them."""
    got = length_facts(text)
    assert (got.kind, got.low, got.high, got.mean, got.file, got.may_end) == (
        facts.kind,
        facts.low,
        facts.high,
        facts.mean,
        facts.file,
        facts.may_end,
    )
    assert got.text == text


def test_every_kind_is_in_this_table() -> None:
    """A new workload or distribution needs facts."""
    assert {text.partition(":")[0] for text in WORKLOAD_FACTS} >= set(WORKLOADS) - {"sharegpt", "alpaca"}
    assert {facts.kind for facts in LENGTHS.values()} >= set(LENGTH_DISTRIBUTIONS)


@pytest.mark.parametrize("value", [None, 0, "0"])
def test_endpoints_without_a_response_text_have_length_zero(value: object) -> None:
    """Embeddings and rerank generate no tokens."""
    assert length_facts(value).high == 0
