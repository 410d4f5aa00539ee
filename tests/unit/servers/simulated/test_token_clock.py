"""The script clock, against tables of instants."""

from __future__ import annotations

import pytest

from loadgen.servers.simulated.token_clock import Drafting, Gauges, Job, ScriptClock, Slowdown

MS = 1_000_000


def job(output_tokens: int, arrived_ns: int = 0) -> Job:
    return Job(prompt_tokens=512, output_tokens=output_tokens, arrived_ns=arrived_ns)


def dues(clock: ScriptClock, until_ns: int) -> list[tuple[int, int]]:
    return [(tokens, due_ns) for _, tokens, due_ns in clock.emissions(until_ns)]


@pytest.mark.parametrize(
    ("clock", "output_tokens", "arrived_ns", "expected"),
    [
        (ScriptClock(500, 20), 3, 1000, [(1, 1500), (1, 1520), (1, 1540)]),
        (ScriptClock(500, 20), 1, 0, [(1, 500)]),
        (ScriptClock(0, 0), 2, 7, [(1, 7), (1, 7)]),
        (ScriptClock(500, 20, tokens_per_event=4), 10, 0, [(4, 500), (4, 520), (2, 540)]),
        (ScriptClock(500, 20, tokens_per_event=4), 8, 0, [(4, 500), (4, 520)]),
        (ScriptClock(500, 20, tokens_per_event=99), 8, 0, [(8, 500)]),
    ],
)
def test_events_fall_exactly_on_the_script(
    clock: ScriptClock, output_tokens: int, arrived_ns: int, expected: list[tuple[int, int]]
) -> None:
    """Event k is due at arrived + ttft + k * itl; the last one holds the remaining tokens."""
    clock.submit(job(output_tokens, arrived_ns), arrived_ns)
    assert dues(clock, 10**6) == expected
    assert clock.next_ns() is None


def test_the_boundary_belongs_to_the_call() -> None:
    """An event due at the very instant of the call is handed out, one a nanosecond later is not."""
    clock = ScriptClock(500, 20)
    clock.submit(job(2), 0)
    assert dues(clock, 499) == []
    assert clock.next_ns() == 500
    assert dues(clock, 500) == [(1, 500)]
    assert clock.next_ns() == 520


def test_a_late_caller_shifts_nothing() -> None:
    """Due instants are the same whether the clock is asked every nanosecond or once at the end."""
    patient, eager = ScriptClock(500, 20), ScriptClock(500, 20)
    for clock in (patient, eager):
        for arrived_ns in (0, 3, 3, 11):
            clock.submit(job(5, arrived_ns), 11)
    asked_often = [due for now_ns in range(700) for due in dues(eager, now_ns)]
    assert asked_often == dues(patient, 700)
    assert len(asked_often) == 20


def test_arrivals_out_of_order_come_out_in_due_order() -> None:
    """Jobs may be submitted in another order than they arrived."""
    clock = ScriptClock(500, 20)
    late, early = job(2, 30), job(2, 0)
    clock.submit(late, 40)
    clock.submit(early, 40)
    assert [(emitted, due_ns) for emitted, _, due_ns in clock.emissions(10**6)] == [
        (early, 500),
        (early, 520),
        (late, 530),
        (late, 550),
    ]


def test_emitted_counts_what_was_handed_out() -> None:
    """`emitted` grows with each emission and ends at `output_tokens`."""
    clock = ScriptClock(500, 20, tokens_per_event=2)
    asked = job(3)
    clock.submit(asked, 0)
    clock.emissions(500)
    assert asked.emitted == 2
    clock.emissions(520)
    assert asked.emitted == 3


def test_a_cancelled_job_is_never_heard_of_again() -> None:
    """Cancelling removes the job at once from the emissions, the next instant and the gauges."""
    clock = ScriptClock(500, 20)
    gone, kept = job(5), job(5, 5)
    clock.submit(gone, 5)
    clock.submit(kept, 5)
    clock.emissions(500)
    clock.cancel(gone, 501)
    assert clock.next_ns() == 505
    assert {emitted for emitted, _, _ in clock.emissions(10**6)} == {kept}
    assert gone.emitted == 1
    assert clock.gauges() == Gauges(running=0, waiting=0, kv_usage=0.0, preemptions=0)


def test_the_next_instant_never_belongs_to_a_cancelled_job() -> None:
    """A cancelled job below the top of the queue is dropped when it surfaces, not handed to the caller as a wake-up."""
    clock = ScriptClock(500, 20)
    first, gone = job(1), job(1, 5)
    clock.submit(first, 5)
    clock.submit(gone, 5)
    clock.cancel(gone, 6)
    assert clock.next_ns() == 500
    clock.emissions(500)
    assert clock.next_ns() is None


def test_cancelling_what_is_not_there_is_ignored() -> None:
    """A job that is finished, or never was submitted, can be cancelled without harm."""
    clock = ScriptClock(500, 20)
    done = job(1)
    clock.submit(done, 0)
    clock.emissions(500)
    clock.cancel(done, 501)
    clock.cancel(job(1), 502)
    assert clock.next_ns() is None


def test_gauges_count_the_jobs_in_flight() -> None:
    """Every job runs from its arrival to its last token."""
    clock = ScriptClock(500, 20)
    clock.submit(job(1), 0)
    clock.submit(job(2), 0)
    assert clock.gauges().running == 2
    clock.emissions(500)
    assert clock.gauges().running == 1


def test_jitter_stays_within_its_bound_and_in_order() -> None:
    """Each event lies within the bound of the unjittered script, in order, and the draws reach both halves of it."""
    clock = ScriptClock(50 * MS, 20 * MS, jitter_ns=15 * MS, seed=3)
    clock.submit(job(2000), 0)
    instants = [due_ns for _, due_ns in dues(clock, 10**12)]
    errors = [due_ns - (50 * MS + k * 20 * MS) for k, due_ns in enumerate(instants)]
    assert instants == sorted(instants)
    assert all(abs(error) <= 15 * MS for error in errors)
    assert min(errors) < -14 * MS
    assert max(errors) > 14 * MS


def test_jitter_never_moves_an_event_before_its_arrival() -> None:
    """A jitter wider than the TTFT cannot answer a request that has not come yet."""
    for seed in range(20):
        clock = ScriptClock(1, 1, jitter_ns=1000, seed=seed)
        clock.submit(job(3, 5000), 5000)
        assert all(due_ns >= 5000 for _, due_ns in dues(clock, 10**6))


def test_jitter_follows_the_seed_and_not_the_company() -> None:
    """The same seed gives job n the same instants, whatever the other jobs do; seeds 0 and 1 differ."""

    def instants(seed: int, neighbour_tokens: int) -> list[int]:
        clock = ScriptClock(500, 2000, jitter_ns=100, seed=seed)
        neighbour, watched = job(neighbour_tokens), job(20)
        clock.submit(neighbour, 0)
        clock.submit(watched, 0)
        return [due_ns for emitted, _, due_ns in clock.emissions(10**9) if emitted is watched]

    assert instants(0, 1) == instants(0, 50)
    assert instants(0, 1) != instants(1, 1)


def test_speculative_decoding_emits_what_is_accepted() -> None:
    """The first event is the prefill's token. Each later event is one step: the accepted draft tokens and one more."""
    clock = ScriptClock(10, 5, drafting=Drafting(3, 0.5))
    clock.submit(job(200), 0)
    sizes = [tokens for _, tokens, _ in clock.emissions(10_000)]
    assert (sizes[0], sum(sizes)) == (1, 200)
    assert set(sizes[1:]) == {1, 2, 3, 4}
    gauges = clock.gauges()
    assert gauges.draft_steps == len(sizes) - 1
    assert gauges.draft_tokens == 3 * gauges.draft_steps
    assert gauges.accepted_draft_tokens == 199 - gauges.draft_steps


@pytest.mark.parametrize(("acceptance", "sizes"), [(0.0, [1] * 9), (1.0, [1, 4, 4])])
def test_no_or_every_draft_token_is_accepted(acceptance: float, sizes: list[int]) -> None:
    """Tokens after the end of the response do not count."""
    clock = ScriptClock(10, 5, drafting=Drafting(3, acceptance))
    clock.submit(job(9), 0)
    assert [tokens for _, tokens, _ in clock.emissions(10_000)] == sizes


@pytest.mark.parametrize(
    ("slowdown", "after_s", "ttft_ms"),
    [
        (Slowdown(), 7200, 500),
        (Slowdown(per_hour=0.1), 0, 500),
        (Slowdown(per_hour=0.1), 3600, 550),
        (Slowdown(after_ns=600 * 10**9, factor=3), 599, 500),
        (Slowdown(after_ns=600 * 10**9, factor=3), 600, 1500),
    ],
)
def test_a_server_becomes_slower(slowdown: Slowdown, after_s: int, ttft_ms: int) -> None:
    """The time to the first token grows with the time since the arrival of the first request; gaps do not."""
    clock = ScriptClock(500 * 10**6, 20 * 10**6, slowdown=slowdown)
    begin_ns = 50 * 10**9
    clock.submit(job(2, begin_ns), begin_ns)
    clock.emissions(begin_ns + 10**10)
    arrived_ns = begin_ns + after_s * 10**9
    clock.submit(job(2, arrived_ns), arrived_ns)
    due = [due_ns - arrived_ns for _, _, due_ns in clock.emissions(arrived_ns + 10**10)]
    assert due == [ttft_ms * 10**6, (ttft_ms + 20) * 10**6]
