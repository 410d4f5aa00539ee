"""The batching clock, against step sequences worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from loadgen.servers.simulated.scheduler import UNLIMITED, Batch, Gauges, Job, Policy
from loadgen.servers.simulated.scheduler_presets import ENGINES
from loadgen.servers.simulated.token_clock import BatchingClock, Emission

POLICIES = {f"{name} {vintage}": engine.policy for name, made in ENGINES.items() for vintage, engine in made.items()}

MIXED = Policy(running_limit=8, step_tokens=10, prefill="mixed", reserve="output", block_size=1, memory_fraction=0.9)
ALONE = replace(MIXED, prefill="separate")
GROWING = replace(MIXED, reserve="nothing", block_size=4)


def ten_ns(work: Batch) -> int:
    """Every step takes the same time, so that instants can be counted in steps."""
    return 10


def clock(policy: Policy, kv_tokens: int = 1000, step_ns: Callable[[Batch], int] = ten_ns) -> BatchingClock:
    return BatchingClock(policy, kv_tokens, step_ns)


def submit(clock: BatchingClock, *shapes: tuple[int, int], at_ns: int = 0) -> list[Job]:
    """Submits one job per (prompt tokens, output tokens)."""
    jobs = [Job(prompt_tokens, output_tokens, at_ns) for prompt_tokens, output_tokens in shapes]
    for job in jobs:
        clock.submit(job, at_ns)
    return jobs


def dues(emissions: list[Emission], job: Job) -> list[int]:
    return [due_ns for emitted, _, due_ns in emissions if emitted is job]


def test_a_lone_job_gets_its_first_token_after_prefill_and_one_per_step() -> None:
    """A prompt of 25 with 10 tokens per step takes three steps; the last of them emits the first token."""
    engine = clock(MIXED)
    (job,) = submit(engine, (25, 3), at_ns=7)
    assert engine.next_ns() == 17
    assert dues(engine.emissions(1000), job) == [37, 47, 57]
    assert engine.next_ns() is None


def test_a_step_of_unfinished_prefill_emits_nothing() -> None:
    """The caller is woken at the step's end, because the next step starts there, and gets an empty list."""
    engine = clock(MIXED)
    submit(engine, (25, 1))
    assert engine.emissions(10) == []
    assert engine.next_ns() == 20


def test_the_first_arrival_starts_a_step_of_its_own() -> None:
    """An idle engine does not wait for company: jobs that come while its step runs join the next one."""
    engine = clock(MIXED)
    first, second = submit(engine, (2, 2), (2, 1))
    emissions = engine.emissions(1000)
    assert dues(emissions, first) == [10, 20]
    assert dues(emissions, second) == [20]


@pytest.mark.parametrize(("plans_ahead", "due_ns"), [(False, 20), (True, 30)])
def test_a_job_that_arrives_during_a_step_joins_the_next_step_that_is_not_planned(
    plans_ahead: bool, due_ns: int
) -> None:
    """An engine that plans ahead has planned the second step, which begins at 10 ns, before the job arrives at 5 ns."""
    engine = clock(replace(MIXED, plans_ahead=plans_ahead))
    submit(engine, (2, 9))
    engine.emissions(5)
    (second,) = submit(engine, (2, 1), at_ns=5)
    assert dues(engine.emissions(1000), second) == [due_ns]


def test_mixed_prefill_shares_the_step_with_decoding() -> None:
    """Decoding goes on while a long prompt is computed, in chunks of what decoding leaves of the budget."""
    works: list[Batch] = []
    engine = clock(MIXED, step_ns=lambda work: works.append(work) or 10)
    first, second = submit(engine, (2, 4), (20, 1))
    emissions = engine.emissions(1000)
    assert dues(emissions, first) == [10, 20, 30, 40]
    assert dues(emissions, second) == [40]
    assert works == [
        Batch(prompts=1, prompt_tokens=2, pairs=3, decoding=0, context=0),
        Batch(prompts=1, prompt_tokens=9, pairs=45, decoding=1, context=3),
        Batch(prompts=1, prompt_tokens=9, pairs=9 * 9 + 45, decoding=1, context=4),
        Batch(prompts=1, prompt_tokens=2, pairs=2 * 18 + 3, decoding=1, context=5),
    ]


def test_prefill_alone_pauses_decoding_and_takes_turns_with_it() -> None:
    """Whole prompts up to the budget form a step of their own, then all sequences decode once, then prompts again."""
    engine = clock(ALONE)
    first, second, third, fourth = submit(engine, (2, 3), (5, 2), (5, 1), (5, 1))
    emissions = engine.emissions(1000)
    assert dues(emissions, first) == [10, 20, 40]
    assert dues(emissions, second) == [30, 40]
    assert dues(emissions, third) == [30]
    assert dues(emissions, fourth) == [50]


def test_prefill_alone_gives_a_prompt_over_the_budget_its_own_step() -> None:
    """A prompt longer than the budget is not cut and does not wait for ever."""
    works: list[Batch] = []
    engine = clock(ALONE, step_ns=lambda work: works.append(work) or 10)
    submit(engine, (1, 1), (3, 1), (25, 1), (3, 1))
    engine.emissions(1000)
    assert [work.prompt_tokens for work in works] == [1, 3, 25, 3]


def test_the_running_limit_holds_jobs_back() -> None:
    """With two places the third job starts when the first is done."""
    engine = clock(replace(MIXED, running_limit=2))
    _, _, third = submit(engine, (1, 3), (1, 3), (1, 1))
    assert engine.gauges() == Gauges(running=1, waiting=2, kv_usage=3 / 1000, preemptions=0)
    engine.emissions(10)
    assert (engine.gauges().running, engine.gauges().waiting) == (2, 1)
    assert dues(engine.emissions(1000), third) == [40]


def test_a_job_that_does_not_fit_blocks_those_behind_it() -> None:
    """Strict first come, first served: a small job does not overtake a large one that waits for KV cache."""
    engine = clock(MIXED, kv_tokens=20)
    first, large, small = submit(engine, (8, 5), (9, 2), (1, 1))
    emissions = engine.emissions(1000)
    assert dues(emissions, first) == [10, 20, 30, 40, 50]
    assert dues(emissions, large) == [60, 70]
    assert dues(emissions, small) == [60]


def test_reservation_covers_prompt_and_output_but_the_last_token() -> None:
    """The last token is never fed back, so a job of P and O tokens takes P + O - 1 of the cache."""
    engine = clock(MIXED, kv_tokens=20)
    submit(engine, (8, 3), (8, 3))
    engine.emissions(10)
    assert engine.gauges() == Gauges(running=2, waiting=0, kv_usage=1.0, preemptions=0)


def test_growth_takes_a_block_at_a_time() -> None:
    """Without reservation a sequence holds whole blocks of its known tokens, and one more when they are full."""
    engine = clock(GROWING, kv_tokens=16)
    submit(engine, (3, 4))
    usage = [engine.gauges().kv_usage]
    for end_ns in (10, 20, 30):
        engine.emissions(end_ns)
        usage.append(engine.gauges().kv_usage)
    assert usage == [0.25, 0.25, 0.5, 0.5]


def test_a_full_cache_preempts_the_newest_which_is_computed_again() -> None:
    """The preempted job keeps the tokens it has emitted, waits in front, and goes on where it was after a new prefill.

    Two blocks of 4 for two prompts of 3: after one more token each, both need a second block and there is none.
    """
    works: list[Batch] = []
    engine = clock(GROWING, kv_tokens=8, step_ns=lambda work: works.append(work) or 10)
    old, new, later = submit(engine, (3, 4), (3, 4), (1, 1))
    emissions = engine.emissions(30)
    assert dues(emissions, old) == [10, 20, 30]
    assert dues(emissions, new) == [20]
    assert engine.gauges().preemptions == 1
    emissions = engine.emissions(1000)
    assert dues(emissions, old) == [40]
    assert dues(emissions, new) == [50, 60, 70]
    assert dues(emissions, later) == [50]
    assert works[4] == Batch(prompts=2, prompt_tokens=5, pairs=11, decoding=0, context=0)


def test_cancel_frees_the_cache_at_once() -> None:
    """A client that goes away takes its cache and its remaining tokens with it, wherever its job is."""
    engine = clock(replace(MIXED, running_limit=2))
    decoding, prefilling, waiting = submit(engine, (1, 9), (30, 9), (1, 1))
    engine.emissions(10)
    assert (engine.gauges().running, engine.gauges().waiting) == (2, 1)
    for job in (decoding, prefilling, waiting):
        engine.cancel(job, 11)
    assert engine.gauges() == Gauges(running=0, waiting=0, kv_usage=0.0, preemptions=0)
    assert engine.emissions(1000) == []
    assert engine.next_ns() is None


def test_cancelling_what_is_not_there_is_ignored() -> None:
    """A job that is finished, or never was submitted, can be cancelled without harm."""
    engine = clock(MIXED)
    (done,) = submit(engine, (1, 1))
    engine.emissions(10)
    engine.cancel(done, 11)
    engine.cancel(Job(1, 1, 0), 12)
    assert engine.gauges() == Gauges(running=0, waiting=0, kv_usage=0.0, preemptions=0)


def test_the_engine_is_busy_until_its_step_ends() -> None:
    """A job that arrives after all others were cancelled still waits for the step under way."""
    engine = clock(MIXED)
    (gone,) = submit(engine, (1, 5))
    engine.cancel(gone, 2)
    (job,) = submit(engine, (1, 1), at_ns=3)
    assert dues(engine.emissions(1000), job) == [20]


def test_a_pause_ends_when_the_next_job_arrives() -> None:
    """Steps follow each other without gaps while there is work, and start anew at the next arrival."""
    engine = clock(MIXED)
    submit(engine, (1, 1))
    (job,) = submit(engine, (1, 1), at_ns=95)
    assert dues(engine.emissions(1000), job) == [105]


def test_a_job_handed_in_late_does_not_start_in_a_step_that_is_over() -> None:
    """A job that arrived during the last step, and was submitted after it, starts where that step ended."""
    engine = clock(MIXED)
    submit(engine, (1, 1))
    engine.emissions(10)
    late = Job(1, 1, arrived_ns=4)
    engine.submit(late, 12)
    assert dues(engine.emissions(1000), late) == [20]


def test_a_job_joins_the_first_step_after_its_arrival_however_late_the_clock_is_asked() -> None:
    """Steps that ended before a job arrived do not admit it, although it was submitted before they were looked at."""
    engine = clock(MIXED)
    submit(engine, (1, 9))
    (job,) = submit(engine, (1, 1), at_ns=25)
    assert dues(engine.emissions(1000), job) == [40]


@pytest.mark.parametrize("prompt_caller", [True, False])
def test_an_arrival_at_a_steps_end_misses_the_next_step(prompt_caller: bool) -> None:
    """That step's members are fixed, whether or not the caller asked at that instant. A pause ends at once."""
    busy, idle = clock(MIXED), clock(MIXED)
    submit(busy, (1, 9))
    submit(idle, (1, 1))
    if prompt_caller:
        busy.emissions(10)
        idle.emissions(10)
    (joining,) = submit(busy, (1, 1), at_ns=10)
    waking, second = submit(idle, (1, 1), (1, 1), at_ns=10)
    assert dues(busy.emissions(1000), joining) == [30]
    emissions = idle.emissions(1000)
    assert dues(emissions, waking) == [20]
    assert dues(emissions, second) == [30]


def test_a_job_larger_than_the_cache_is_refused() -> None:
    """It would block the queue for ever; the message says what to limit."""
    engine = clock(MIXED, kv_tokens=20)
    submit(engine, (16, 5))
    with pytest.raises(ValueError, match="17 prompt and 5 output tokens never fit a KV cache of 20 tokens: limit"):
        submit(engine, (17, 5))
    assert engine.gauges().waiting == 0


def test_each_server_has_a_policy() -> None:
    """The documented differences: who preempts, who pauses decoding for prefill, who limits the batch."""

    def those(holds: Callable[[Policy], bool]) -> list[str]:
        return [name for name, policy in POLICIES.items() if holds(policy)]

    assert those(lambda policy: policy.reserve == "nothing") == ["vllm current", "vllm 2023", "tei current"]
    assert those(lambda policy: policy.reserve == "peak") == ["lightllm current", "lightllm 2023"]
    assert those(lambda policy: policy.reserve == "share") == ["sglang current"]
    assert those(lambda policy: policy.prefill == "chunked-first") == ["sglang current"]
    assert those(lambda policy: policy.prefill == "mixed") == ["vllm current", "lightllm current"]
    assert those(lambda policy: policy.running_limit == UNLIMITED) == ["tgi current", "tgi 2023", "tei current"]


CACHED, INSTANTS = replace(GROWING, prefix_cache=True), count(1_000, 10_000)


def asks(engine: BatchingClock, prompt: list[int], salt: str = "") -> int:
    """Nanoseconds to the first token of a prompt that is alone, in an engine that has been idle."""
    at_ns = next(INSTANTS)
    job = Job(len(prompt), 1, at_ns, prompt=prompt, cache_salt=salt)
    engine.submit(job, at_ns)
    return dues(engine.emissions(at_ns + 5_000), job)[0] - at_ns


def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_where_it_differs() -> None:
    """Ten tokens per step: 40 take four steps; a prompt that shares 24 of them in whole blocks of 4 takes two more."""
    engine, shared = clock(CACHED), list(range(26))
    assert asks(engine, [*shared, *range(100, 114)]) == 40
    assert engine.gauges().cached_prompt_tokens == 0
    assert asks(engine, [*shared, *range(200, 214)]) == 20
    assert engine.gauges().cached_prompt_tokens == 24


def test_the_last_token_is_always_computed() -> None:
    """Of the same prompt again all but the block with its last token is there."""
    engine = clock(CACHED)
    assert asks(engine, list(range(40))) == 40
    assert asks(engine, list(range(40))) == 10
    assert engine.gauges().cached_prompt_tokens == 36


def test_prompts_of_different_salts_share_nothing() -> None:
    """As with `cache_salt`."""
    engine = clock(CACHED)
    assert [asks(engine, list(range(40)), salt) for salt in ("a", "b", "a")] == [40, 40, 10]


def test_the_prefix_cache_is_as_large_as_the_kv_cache() -> None:
    """In 48 tokens one prompt of 40 pushes out the other, from its beginning."""
    engine = clock(CACHED, kv_tokens=48)
    assert [asks(engine, list(range(start, start + 40))) for start in (0, 100, 0)] == [40, 40, 40]


def test_requests_of_one_step_share_too() -> None:
    """Blocks can be shared as soon as a step computes them: the second needs no step of its own."""
    engine = clock(CACHED)
    first, second = (Job(16, 1, 0, prompt=list(range(16))) for _ in range(2))
    for job in (first, second):
        engine.submit(job, 0)
    emitted = engine.emissions(1000)
    assert engine.gauges().cached_prompt_tokens == 12
    assert dues(emitted, first) == dues(emitted, second) == [20]
