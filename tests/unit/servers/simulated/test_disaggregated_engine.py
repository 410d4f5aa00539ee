"""Prefill workers and decode workers in virtual time."""

from __future__ import annotations

from statistics import fmean

import pytest

from loadgen.servers.hardware.disaggregation import disaggregated_times, transfer_s
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.simulated.disaggregated_engine import DisaggregatedEngine, WorkerPools
from loadgen.servers.simulated.discrete_event import FOREVER_NS, TokenTimes
from loadgen.servers.simulated.scheduler import Job, Policy
from loadgen.servers.simulated.scheduler_presets import find_engine
from loadgen.servers.simulated.step_time import LinearStepTime, StepTime

POLICY = Policy(running_limit=8, step_tokens=1000, prefill="mixed", memory_fraction=0.9)
STEPS = LinearStepTime(step_s=0.01, sequence_s=0.0, token_s=0.001, context_s=0.0)
TRANSFER_NS = 5_000_000


def engine_of(prefill: int = 1, decode: int = 1, kv_tokens: int = 10_000) -> DisaggregatedEngine:
    """Return an engine whose decode steps take 10 ms, its prompts 1 ms per token more, and each transfer 5 ms."""
    return DisaggregatedEngine(WorkerPools(prefill, decode), POLICY, kv_tokens, STEPS, lambda _: TRANSFER_NS / 1e9)


def run_all(engine: DisaggregatedEngine) -> list[TokenTimes]:
    """Run until no job is left."""
    ended = []
    while engine.busy:
        ended += engine.run(FOREVER_NS)
    return ended


def test_a_request_passes_both_workers() -> None:
    """A prompt of 90 tokens takes 100 ms, the transfer 5 ms, and each further token 10 ms."""
    engine = engine_of()
    engine.submit(Job(90, 4, 0))
    (times,) = run_all(engine)
    assert [instant / 1e6 for instant in times.instants] == [105, 115, 125, 135]
    assert times.job.admitted_ns == 0


def test_prompts_do_not_delay_decoding() -> None:
    """A long prompt arrives while another request decodes. The tokens of this request keep their distance of 10 ms."""
    engine = engine_of()
    engine.submit(Job(90, 20, 0))
    assert engine.run(200_000_000) == []
    engine.submit(Job(900, 2, 200_000_000))
    first, second = run_all(engine)
    gaps = {later - earlier for earlier, later in zip(first.instants, first.instants[1:], strict=False)}
    assert gaps == {10_000_000}
    assert second.instants[0] == 200_000_000 + 910_000_000 + TRANSFER_NS


def test_jobs_are_spread_over_workers() -> None:
    """With two prefill workers, two prompts are computed at the same time."""
    alone, shared = engine_of(prefill=2, decode=2), engine_of()
    for engine in (alone, shared):
        engine.submit(Job(990, 2, 0))
        engine.submit(Job(990, 2, 0))
    assert {times.instants[0] for times in run_all(alone)} == {1_000_000_000 + TRANSFER_NS}
    assert max(times.instants[0] for times in run_all(shared)) == pytest.approx(2e9, rel=0.02)


def test_a_single_token_needs_no_decode_worker() -> None:
    """The prefill worker generates it."""
    engine = engine_of()
    engine.submit(Job(90, 1, 0))
    (times,) = run_all(engine)
    assert times.instants == [100_000_000]


@pytest.mark.parametrize(("until_ns", "tokens"), [(50_000_000, 0), (102_000_000, 0), (130_000_000, 4)])
def test_jobs_can_be_cancelled_at_any_place(until_ns: int, tokens: int) -> None:
    """At a prefill worker, during the transfer, and at a decode worker."""
    engine = engine_of()
    job = Job(90, 50, 0)
    engine.submit(job)
    engine.run(until_ns)
    assert len(engine.cancel(job)) == tokens
    assert not engine.busy
    assert engine.gauges().running == 0
    assert run_all(engine) == []


def test_a_job_that_never_fits_is_refused() -> None:
    """The limit is the KV cache of one decode worker."""
    with pytest.raises(ValueError, match="never fit the KV cache of a decode worker"):
        engine_of(kv_tokens=1000).submit(Job(900, 200, 0))


def test_gauges_are_sums() -> None:
    """Over all workers, with jobs in transfer as waiting."""
    engine = engine_of(prefill=2, decode=1)
    for _ in range(3):
        engine.submit(Job(90, 50, 0))
    engine.run(102_000_000)
    gauges = engine.gauges()
    assert (gauges.running + gauges.waiting, gauges.preemptions) == (3, 0)
    assert engine.kv_tokens == 30_000


def test_a_closed_loop_is_like_the_formula() -> None:
    """Two prefill workers and two decode workers with 16 clients each: as `disaggregated_times` predicts."""
    deployment = make_deployment("H100", "llama-3.1-8b")
    preset = find_engine("vllm")
    kv_tokens = preset.kv_tokens(deployment)
    engine = DisaggregatedEngine(
        WorkerPools(2, 2), preset.policy, kv_tokens, StepTime(deployment), lambda tokens: transfer_s(deployment, tokens)
    )
    path_ns = round(1e9 * deployment.framework.server_s)
    left = 32 * 8
    for client in range(32):
        engine.submit(Job(1024, 128, client, owner=client - path_ns))
    done = list[TokenTimes]()
    while engine.busy:
        for times in engine.run(FOREVER_NS):
            done.append(times)
            left -= 1
            if left >= 32:
                sent_ns = times.instants[-1]
                engine.submit(Job(1024, 128, sent_ns + path_ns, owner=sent_ns))
    steady = done[64:]
    tpot_s = fmean((times.instants[-1] - times.instants[0]) / 1e9 / 127 for times in steady)
    expected = disaggregated_times(deployment, Load(1024, 128, 16))
    assert tpot_s == pytest.approx(float(expected.tpot_s), rel=0.15)
    ttft_s = fmean((times.instants[0] - times.job.owner) / 1e9 for times in steady)
    assert ttft_s + 127 * tpot_s == pytest.approx(float(expected.ttft_s + 127 * expected.tpot_s), rel=0.1)
