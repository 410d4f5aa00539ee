"""The parts of a simulated server that need no network: words, faults as text, lateness, metrics, configuration."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loadgen.servers.simulated import ConfigError, tokenizer
from loadgen.servers.simulated.config import FaultRule, SimulatedConfig, fault_for, parse_fault, parse_rule
from loadgen.servers.simulated.state import Histogram, exposition
from loadgen.servers.simulated.stream_sender import FAULTS, LATE_NS, Lateness
from loadgen.servers.wire.poller import Timer


@given(st.text())
def test_tokens_give_the_text_back(text: str) -> None:
    """Any text that UTF-8 can carry survives encoding and decoding, and its count is the number of its tokens."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= token < tokenizer.VOCABULARY_SIZE for token in ids)


@given(st.text(alphabet=st.sampled_from("abcdeT .,é1\n"), max_size=60))
def test_a_text_cut_at_a_token_keeps_its_tokens(text: str) -> None:
    """The places of tokens cover the text in order, and the text up to any of them is the tokens up to it."""
    found = tokenizer.offsets(text)
    assert [token for token, _, _ in found] == tokenizer.encode(text)
    for place, (_, _, stop) in enumerate(found):
        if place + 1 == len(found) or found[place + 1][1] == stop:
            assert tokenizer.encode(text[:stop]) == [token for token, _, _ in found[: place + 1]]


def test_what_the_model_says_is_seeded_words() -> None:
    """The same seed says the same; each token is one word; a request near the end of the words has enough of them."""
    first, same, other = (tokenizer.Vocabulary(seed, max_tokens=100) for seed in (0, 0, 1))
    assert first.ids == same.ids != other.ids
    assert len(first.ids) == tokenizer.PERIOD + 100
    text = tokenizer.decode(first.ids[:50])
    assert len(text.split()) == tokenizer.count(text) == 50
    assert first.start(0) != first.start(1) < tokenizer.PERIOD


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("reset", FaultRule("reset", probability=1.0)),
        ("reset@12:3,17", FaultRule("reset", 12, requests=frozenset({3, 17}))),
        ("stall=0.25", FaultRule("stall", probability=0.25)),
        ("503:0", FaultRule("503", requests=frozenset({0}))),
    ],
)
def test_rules_are_read_as_written(text: str, rule: FaultRule) -> None:
    """What the command line takes."""
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "explode", "reset@", "reset:x", "reset=2=3", "reset@-1"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    """The message says what a fault looks like, or which there are."""
    with pytest.raises(ConfigError, match="fault"):
        parse_rule(text)
    with pytest.raises(ConfigError):
        parse_fault(f"{text}=0.5" if text == "reset" else text)


def test_a_client_asks_for_one_fault_without_a_rule() -> None:
    """A header is about its own request, so it has no numbers and no probability."""
    assert parse_fault("cut@3") == FaultRule("cut", 3, probability=1)
    with pytest.raises(ConfigError, match="one request"):
        parse_fault("cut=0.5")


def test_faults_by_probability_are_seeded() -> None:
    """The same seed picks the same requests, about as many as asked; another seed picks others."""
    rules = (parse_rule("reset=0.3"),)
    picked = [index for index in range(1000) if fault_for(rules, 0, index)]
    assert picked == [index for index in range(1000) if fault_for(rules, 0, index)]
    assert picked != [index for index in range(1000) if fault_for(rules, 1, index)]
    assert 230 < len(picked) < 370


def test_the_first_rule_that_fits_wins() -> None:
    """Rules are tried in the order in which they were given."""
    rules = (parse_rule("cut:1"), parse_rule("reset"))
    assert [fault_for(rules, 0, index) for index in (0, 1)] == [rules[1], rules[0]]


def test_every_fault_is_documented() -> None:
    """docs/simulated.md has a row for each, in its own words."""
    page = (Path(__file__).parents[4] / "docs/simulated.md").read_text("utf-8")
    assert [name for name, behaviour in FAULTS.items() if f"| `{name}` | {behaviour.description}" not in page] == []


def test_lateness_is_exact_to_a_microsecond() -> None:
    """Percentiles are upper edges of microsecond bins, the maximum is exact, and delays above 100 ms are not lost."""
    late = Lateness()
    assert late.figures()["late_ns"] == {"p50": 0, "p99": 0, "max": 0}
    assert not late.figures()["falling_behind"]
    for delay_ns in range(0, 100_000, 1000):
        late.add(delay_ns)
    assert late.figures()["events"] == 100
    assert late.figures()["late_ns"] == {"p50": 50_000, "p99": 99_000, "max": 99_000}
    for _ in range(2):
        late.add(3_000_000_000)
    assert late.figures()["late_ns"] == {"p50": 51_000, "p99": 3_000_000_000, "max": 3_000_000_000}


def test_falling_behind_is_more_than_one_late_send_in_a_hundred() -> None:
    """One late send in a hundred is an accident; two are the server's limit."""
    late = Lateness()
    for _ in range(99):
        late.add(10)
    late.add(LATE_NS)
    assert not late.figures()["falling_behind"]
    late.add(LATE_NS)
    assert (late.figures()["late_events"], late.figures()["falling_behind"]) == (2, True)


def test_metrics_text_is_read_back_by_an_independent_parser() -> None:
    """Cumulative buckets, sums, counts, and labels with quotes and backslashes."""
    values = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        values.observe(value)
    kinds = {"h": "histogram", "c_total": "counter"}
    rows = [{"name": name, "kind": kind, "figure": name, "help": "says"} for name, kind in kinds.items()]
    page = exposition("", {"model_name": 'a"b\\c'}, rows, {"h": values, "c_total": 3})
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for each in text_string_to_metric_families(page)
        for sample in each.samples
        if sample.labels["model_name"] == 'a"b\\c'
    }
    assert found == {
        ("h_bucket", "1.0"): 2,
        ("h_bucket", "2.0"): 3,
        ("h_bucket", "+Inf"): 4,
        ("h_count", None): 4,
        ("h_sum", None): 12,
        ("c_total", None): 3,
    }


def test_a_config_lists_every_mistake() -> None:
    """Somebody who got three things wrong reads of all three at once."""
    with pytest.raises(ConfigError) as caught:
        SimulatedConfig(server="tgo", speed=0, port=70_000, faults=(FaultRule("explode"),))
    for word in ("tgo", "speed", "70000", "explode"):
        assert word in str(caught.value)


def test_a_config_reaches_a_child_whole() -> None:
    """What is written for its standard input is read back as it was, whatever the fields."""
    rules = (parse_rule("reset@12:3,17"), parse_rule("stall=0.25"))
    told = SimulatedConfig(server="vllm", api_key="sesame", faults=rules, log=Path("a b"), eos_mean_tokens=2, speed=7)
    assert told.to_json().count(b"\n") == 1
    assert SimulatedConfig.from_json(told.to_json()) == told


def test_an_api_key_is_never_shown() -> None:
    """A config in a log or a traceback does not give the key away."""
    assert "sesame" not in repr(SimulatedConfig(server="vllm", api_key="sesame"))


async def test_the_timer_calls_at_its_instant_and_not_before() -> None:
    """Armed twice it keeps the later word; an instant in the past is called at once; None takes the call back."""
    called = asyncio.Event()
    times: list[int] = []

    def callback() -> None:
        times.append(time.monotonic_ns())
        exact.arm(None)
        called.set()

    exact = Timer(asyncio.get_running_loop(), callback)
    at_ns = time.monotonic_ns() + 3_000_000
    exact.arm(at_ns + 60_000_000_000)
    exact.arm(at_ns)
    await called.wait()
    assert times[0] >= at_ns
    for past_ns in (time.monotonic_ns() - 1, 0, -1):
        called.clear()
        exact.arm(past_ns)
        await asyncio.wait_for(called.wait(), 20)
    assert len(times) == 4
    exact.close()
