"""The batching clock under any load: nothing lost, no limit exceeded, nothing that depends on when it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from loadgen.servers.simulated.scheduler import UNLIMITED, Batch, Gauges, Job, Policy
from loadgen.servers.simulated.scheduler_presets import ENGINES
from loadgen.servers.simulated.token_clock import BatchingClock

POLICIES = {f"{name} {vintage}": engine.policy for name, made in ENGINES.items() for vintage, engine in made.items()}

KV_TOKENS = 112
IDLE = Gauges(running=0, waiting=0, kv_usage=0.0, preemptions=0)

policies = st.builds(
    Policy,
    running_limit=st.sampled_from([1, 2, 3, 7, UNLIMITED]),
    step_tokens=st.integers(1, 60),
    prefill=st.sampled_from(["mixed", "separate"]),
    decode_steps_per_prefill=st.sampled_from([0, 1, 5]),
    waiting_served_ratio=st.sampled_from([None, 0.3, 1.2]),
    max_paddings=st.sampled_from([None, 0, 20]),
    watermark=st.sampled_from([0, 0.04]),
    reserve=st.sampled_from(["nothing", "output", "peak"]),
    block_size=st.sampled_from([1, 4, 16]),
    memory_fraction=st.just(0.9),
)
shapes = st.tuples(st.integers(1, 60), st.integers(1, 30))  # prompt and output tokens: every job fits KV_TOKENS
arrivals = st.lists(st.tuples(shapes, st.integers(0, 4000)), min_size=1, max_size=25)  # with the gap before each, in ns


def step_ns(work: Batch) -> int:
    """Unequal steps, in odd numbers of nanoseconds; at 100 times the speed they still last one each."""
    return 101 + 7 * work.prompt_tokens + 10 * work.decoding + 3 * work.prompts + work.context


def jobs_of(drawn: Iterable[tuple[tuple[int, int], int]]) -> list[Job]:
    jobs, now_ns = [], 0
    for (prompt_tokens, output_tokens), gap_ns in drawn:
        now_ns += gap_ns
        jobs.append(Job(prompt_tokens, output_tokens, now_ns))
    return jobs


@dataclass
class Watched:
    """A clock, with everything it handed out and computed, and its limits checked after every call."""

    policy: Policy
    speed: float = 1.0
    works: list[Batch] = field(default_factory=list)
    emissions: list[tuple[Job, int]] = field(default_factory=list)
    clock: BatchingClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = BatchingClock(self.policy, KV_TOKENS, self.step_ns, self.speed)

    def step_ns(self, work: Batch) -> int:
        self.works.append(work)
        return step_ns(work)

    def submit(self, job: Job) -> None:
        self.clock.submit(job, job.arrived_ns)
        self.check()

    def ask(self, now_ns: int) -> None:
        for job, tokens, due_ns in self.clock.emissions(now_ns):
            assert tokens == 1
            assert job.arrived_ns < due_ns <= now_ns
            self.emissions.append((job, due_ns))
        self.check()

    def check(self) -> None:
        gauges = self.clock.gauges()
        assert 0 <= gauges.kv_usage <= 1
        assert gauges.running <= self.policy.running_limit

    def drain(self) -> None:
        while (now_ns := self.clock.next_ns()) is not None:
            self.ask(now_ns)


def run(policy: Policy, jobs: list[Job], ask_every_step: bool = True, speed: float = 1.0) -> Watched:
    """Submits each job at its arrival; asks at the end of every step, or only once everything is submitted."""
    watched = Watched(policy, speed)
    for job in jobs:
        while ask_every_step and (end_ns := watched.clock.next_ns()) is not None and end_ns <= job.arrived_ns:
            watched.ask(end_ns)
        watched.submit(job)
    watched.drain()
    return watched


@given(policies, arrivals)
def test_every_job_emits_exactly_its_output(policy: Policy, drawn: list[tuple[tuple[int, int], int]]) -> None:
    """Whatever the policy, each job gets all its tokens, in time order, and the engine ends empty."""
    jobs = jobs_of(drawn)
    watched = run(policy, jobs)
    assert [sum(1 for emitted, _ in watched.emissions if emitted is job) for job in jobs] == [
        job.output_tokens for job in jobs
    ]
    assert all(job.emitted == job.output_tokens for job in jobs)
    instants = [due_ns for _, due_ns in watched.emissions]
    assert instants == sorted(instants)
    assert replace(watched.clock.gauges(), preemptions=0) == IDLE


@given(policies, arrivals)
def test_first_tokens_come_in_order_of_arrival(policy: Policy, drawn: list[tuple[tuple[int, int], int]]) -> None:
    """Nobody overtakes, not even when jobs are preempted: a preempted job waits in front of those not yet begun."""
    jobs = jobs_of(drawn)
    watched = run(policy, jobs)
    first_ns = dict(reversed(watched.emissions))
    assert [first_ns[job] for job in jobs] == sorted(first_ns.values())


@given(policies, arrivals)
def test_when_the_clock_is_asked_changes_nothing(policy: Policy, drawn: list[tuple[tuple[int, int], int]]) -> None:
    """A caller that looks only after the last arrival gets the same tokens at the same instants."""
    prompt, late = jobs_of(drawn), jobs_of(drawn)
    watched_promptly, watched_late = run(policy, prompt), run(policy, late, ask_every_step=False)
    assert [(prompt.index(job), due_ns) for job, due_ns in watched_promptly.emissions] == [
        (late.index(job), due_ns) for job, due_ns in watched_late.emissions
    ]


@given(policies, st.lists(shapes, min_size=1, max_size=25), st.sampled_from([0.1, 0.5, 1.5, 7.0, 100.0]))
def test_speed_divides_every_instant(policy: Policy, drawn: list[tuple[int, int]], speed: float) -> None:
    """In a burst, every token at speed s is due at its instant at speed 1 divided by s: no error builds up."""
    burst = [(shape, 0) for shape in drawn]
    expected = [int(due_ns / speed) for _, due_ns in run(policy, jobs_of(burst)).emissions]
    watched = Watched(policy, speed)
    for job in jobs_of(burst):
        watched.clock.submit(job, 0)
    while (now_ns := watched.clock.next_ns()) is not None:
        watched.emissions += [(job, due_ns) for job, _, due_ns in watched.clock.emissions(now_ns)]
    assert [due_ns for _, due_ns in watched.emissions] == expected


@given(policies, arrivals)
def test_totals_add_up(policy: Policy, drawn: list[tuple[tuple[int, int], int]]) -> None:
    """Without preemption each token but the last passes the layers once and attends to all before it, in any chunks.

    With it, recomputation only adds. Steps of mixed prefill keep to their budget unless decoding alone exceeds it.
    """
    jobs = jobs_of(drawn)
    watched = run(policy, jobs)
    computed = [job.prompt_tokens + job.output_tokens - 1 for job in jobs]
    tokens = sum(work.prompt_tokens + work.decoding for work in watched.works)
    pairs = sum(work.pairs + work.context for work in watched.works)
    if watched.clock.gauges().preemptions:
        assert tokens > sum(computed)
        assert pairs > sum(n * (n + 1) // 2 for n in computed)
    else:
        assert tokens == sum(computed)
        assert pairs == sum(n * (n + 1) // 2 for n in computed)
    if policy.prefill == "mixed":
        assert all(
            work.prompt_tokens + work.decoding <= max(policy.step_tokens, work.decoding) for work in watched.works
        )


@given(policies, arrivals)
def test_reserved_cache_is_never_promised_twice(policy: Policy, drawn: list[tuple[tuple[int, int], int]]) -> None:
    """With reservation, jobs between first and last token never need more than the cache; none is preempted."""
    jobs = jobs_of(drawn)
    watched = run(replace(policy, reserve="output"), jobs)
    assert watched.clock.gauges().preemptions == 0
    left = {job: job.output_tokens for job in jobs}
    for job, _ in watched.emissions:
        left[job] -= 1
        begun = [job for job in jobs if 0 < left[job] < job.output_tokens]
        assert sum(job.prompt_tokens + job.output_tokens - 1 for job in begun) <= KV_TOKENS


@given(policies, arrivals, st.data())
def test_cancel_frees_everything(policy: Policy, drawn: list[tuple[tuple[int, int], int]], data: st.DataObject) -> None:
    """Jobs cancelled at any moment emit nothing more and leave nothing behind; the others get all their tokens."""
    jobs = jobs_of(drawn)
    watched = Watched(policy)
    cancelled: dict[Job, int] = {}
    for job in jobs:
        watched.ask(job.arrived_ns)
        watched.submit(job)
        gone = data.draw(st.sampled_from([None, *jobs[: jobs.index(job) + 1]]))
        if gone is not None:
            watched.clock.cancel(gone, job.arrived_ns)
            watched.check()
            cancelled.setdefault(gone, gone.emitted)
    watched.drain()
    assert {job: job.emitted for job in cancelled} == cancelled
    assert all(job.emitted == job.output_tokens for job in jobs if job not in cancelled)
    assert replace(watched.clock.gauges(), preemptions=0) == IDLE


def test_the_servers_own_policies_survive_a_burst() -> None:
    """1000 prompts of 512 tokens in a cache of 100 sequences: all answered, no limit exceeded, under each policy."""
    for policy in POLICIES.values():
        jobs = [Job(512, 64, 0) for _ in range(1000)]
        clock = BatchingClock(policy, 100 * 576, step_ns)
        for job in jobs:
            clock.submit(job, 0)
        while (now_ns := clock.next_ns()) is not None:
            clock.emissions(now_ns)
            assert 0 <= clock.gauges().kv_usage <= 1
        assert all(job.emitted == 64 for job in jobs)
