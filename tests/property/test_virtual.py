"""Virtual time under any load: the same tokens at the same instants as step by step, none lost, no limit exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.simulated.discrete_event import FOREVER_NS, TokenTimes, VirtualEngine
from loadgen.servers.simulated.scheduler import Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import ENGINES
from loadgen.servers.simulated.step_time import StepTime
from loadgen.servers.simulated.token_clock import BatchingClock

STEP_TIME = StepTime(make_deployment("RTX4090", "llama-2-7b"))
KV_TOKENS = 2000
POLICIES = [engine.policy for made in ENGINES.values() for engine in made.values()]
policies = st.builds(
    lambda policy, step_tokens, running: replace(policy, step_tokens=step_tokens, running_limit=running),
    *(st.sampled_from(POLICIES), st.sampled_from([64, 512, 4096]), st.sampled_from([3, 20, 1024])),
)
loads = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 400), st.one_of(st.just(0), st.integers(0, 3_000_000_000))),
    min_size=1,
    max_size=30,
)


def jobs_of(drawn: Sequence[tuple[int, int, int]]) -> list[Job]:
    now_ns, jobs = 0, []
    for prompt, output, gap_ns in drawn:
        now_ns += gap_ns
        jobs.append(Job(prompt, output, now_ns))
    return jobs


def virtual(policy: Policy, jobs: Sequence[Job]) -> tuple[list[TokenTimes], VirtualEngine]:
    engine, answers = VirtualEngine(Scheduler(policy, KV_TOKENS), STEP_TIME), list[TokenTimes]()
    for job in jobs:
        while engine.busy and engine.now_ns < job.arrived_ns:
            ended = engine.run(job.arrived_ns)
            answers += ended
            assert 0 <= engine.scheduler.gauges().kv_usage <= 1
            if not ended and engine.now_ns <= job.arrived_ns:
                break
        engine.submit(job)
    while engine.busy:
        answers += engine.run(FOREVER_NS)
        assert 0 <= engine.scheduler.gauges().kv_usage <= 1
    return answers, engine


@settings(max_examples=60)
@given(policies, loads)
def test_steps_counted_together_are_the_steps(policy: Policy, drawn: list[tuple[int, int, int]]) -> None:
    """As the clock of the simulated servers, which takes them one by one; a nanosecond per step is rounding."""
    answers, _ = virtual(policy, jobs_of(drawn))
    clock, jobs = BatchingClock(policy, KV_TOKENS, STEP_TIME), jobs_of(drawn)
    instants: dict[Job, list[int]] = {job: [] for job in jobs}
    for job in [*jobs, None]:
        while (end_ns := clock.next_ns()) is not None and (job is None or end_ns <= job.arrived_ns):
            for emitted, _, due_ns in clock.emissions(end_ns):
                instants[emitted].append(due_ns)
        if job is not None:
            clock.submit(job, job.arrived_ns)
    found = sorted((each.instants for each in answers), key=len)
    for one, other in zip(found, sorted(instants.values(), key=len), strict=True):
        assert len(one) == len(other)
    last_ns = max(each[-1] for each in instants.values())
    assert abs(max(each[-1] for each in found) - last_ns) <= 2 * sum(map(len, found)) + 1e-4 * last_ns


@given(policies, loads)
def test_every_job_gets_exactly_its_tokens_in_order(policy: Policy, drawn: list[tuple[int, int, int]]) -> None:
    """Also those that were preempted, and the engine ends empty."""
    jobs = jobs_of(drawn)
    answers, engine = virtual(policy, jobs)
    assert {answer.job for answer in answers} == set(jobs)
    for answer in answers:
        assert len(answer.instants) == answer.job.output_tokens == answer.job.emitted
        assert answer.instants == sorted(answer.instants)
        assert answer.instants[0] > answer.job.arrived_ns
    gauges = engine.scheduler.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (0, 0, 0.0)
    if policy.reserve == "output":
        assert gauges.preemptions == 0


@given(policies, loads)
def test_first_come_first_served(policy: Policy, drawn: list[tuple[int, int, int]]) -> None:
    """First tokens come in the order of arrival."""
    jobs = jobs_of(drawn)
    first_ns = {answer.job: answer.instants[0] for answer in virtual(policy, jobs)[0]}
    assert [first_ns[job] for job in jobs] == sorted(first_ns.values())


@given(policies, loads, st.data())
def test_a_job_that_is_cancelled_leaves_nothing(
    policy: Policy, drawn: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """It has the tokens that it got until then; the others get all of theirs."""
    jobs = [Job(prompt, output, 0) for prompt, output, _ in drawn]
    engine, answers = VirtualEngine(Scheduler(policy, KV_TOKENS), STEP_TIME), list[TokenTimes]()
    for job in jobs:
        engine.submit(job)
    gone: set[Job] = set()
    while engine.busy:
        ended = engine.run(engine.now_ns + data.draw(st.integers(0, 500_000_000)))
        answers += ended
        left = [job for job in jobs if job not in gone and all(job is not each.job for each in answers)]
        if left and data.draw(st.booleans()):
            job = data.draw(st.sampled_from(left))
            got = engine.cancel(job)
            gone.add(job)
            assert len(got) < job.output_tokens
            assert len(got) == job.emitted
            assert got == sorted(got)
    assert {each.job for each in answers} == set(jobs) - gone
    assert all(len(each.instants) == each.job.output_tokens for each in answers)
    assert engine.scheduler.gauges().kv_usage == 0
