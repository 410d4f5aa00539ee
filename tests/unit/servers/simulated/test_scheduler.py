"""The rules by which each server fills its steps, one at a time, against sequences worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from loadgen.servers.hardware import HardwareError, framework
from loadgen.servers.simulated.closed_loop import policy_of
from loadgen.servers.simulated.scheduler import Batch, Job, Policy, Scheduler
from loadgen.servers.simulated.scheduler_presets import ENGINES, TENSORRT_LLM, find_engine
from loadgen.servers.simulated.step_time import NO_TIME

OLD_SERVERS = [server for server, vintages in ENGINES.items() if "2023" in vintages]
OLD_VLLM, OLD_TGI, OLD_LIGHTLLM = (find_engine(server, "2023").policy for server in ("vllm", "tgi", "lightllm"))


def scheduler(policy: Policy, kv_tokens: int, *shapes: tuple[int, int]) -> Scheduler:
    """With one job per (prompt tokens, output tokens), which came before instant 0."""
    made = Scheduler(policy, kv_tokens)
    for shape in shapes:
        made.submit(Job(*shape, -1))
    return made


def steps(made: Scheduler) -> Iterator[Batch]:
    """What each step computes, until nothing is left."""
    while made.running or made.waiting:
        batch = made.plan(0)
        made.finish()
        yield batch


def prompts(made: Scheduler) -> list[int]:
    """How many prompts each step computes."""
    return [batch.prompts for batch in steps(made)]


def test_old_vllm_computes_prompts_before_it_decodes() -> None:
    """As many whole prompts as the budget takes, step after step, while there is cache; then all decode."""
    made = scheduler(replace(OLD_VLLM, step_tokens=64), 1600, *[(32, 3)] * 5)
    assert [(batch.prompts, batch.decoding) for batch in steps(made)] == [(2, 0), (2, 0), (1, 0), (0, 5), (0, 5)]


def test_a_job_keeps_the_time_at_which_it_left_the_queue() -> None:
    """Two prompts fit into the first step; the third leaves the queue with the second step. A waiting job has none."""
    made = Scheduler(replace(OLD_VLLM, step_tokens=64), 1600)
    jobs = [Job(32, 3, -1) for _ in range(3)]
    for job in jobs:
        made.submit(job)
    made.plan(10)
    assert [job.admitted_ns for job in jobs] == [10, 10, None]
    made.finish()
    made.plan(25)
    assert [job.admitted_ns for job in jobs] == [10, 10, 25]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_step_that_is_planned_already_takes_no_further_job(server: str) -> None:
    """A job that arrives during the first step joins the third one, because the second one was planned before."""
    made = Scheduler(find_engine(server).policy, 4000)
    made.submit(Job(32, 9, 0))
    assert made.plan(0).prompts == 1
    made.finish()
    made.submit(Job(32, 9, 5))
    assert (made.plan(10, 0).prompts, made.identical_steps()) == (0, 1)
    made.finish()
    assert made.plan(20, 10).prompts == 1


def test_an_engine_that_was_idle_takes_a_job_at_once() -> None:
    """Also if the engine plans ahead: nothing was planned. Engines that do not plan ahead always take it at once."""
    made = Scheduler(find_engine("vllm").policy, 4000)
    made.submit(Job(32, 1, 0))
    made.plan(0)
    made.finish()
    made.submit(Job(32, 9, 5))
    assert made.plan(10, 0).prompts == 1
    other = scheduler(OLD_VLLM, 4000, (32, 9))
    other.plan(0)
    other.finish()
    other.submit(Job(32, 9, 5))
    assert other.plan(10, 0).prompts == 1


def test_old_vllm_leaves_a_hundredth_of_its_blocks_at_admission() -> None:
    """Of 3200 tokens it admits prompts into 3168; decoding may take the rest."""
    made = scheduler(OLD_VLLM, 3200, *[(31, 2)] * 100)
    assert made.plan(0).prompts == 99
    made.finish()
    assert made.plan(0) == Batch(prompts=0, prompt_tokens=0, pairs=0, decoding=99, context=99 * 32)


def test_old_vllm_pads_prompts_to_the_longest() -> None:
    """At most 256 tokens of padding, and the budget counts them."""
    assert prompts(scheduler(OLD_VLLM, 8000, (500, 1), (300, 1), (400, 1), (500, 1))) == [2, 2]
    assert prompts(scheduler(replace(OLD_VLLM, step_tokens=1000), 8000, (300, 1), (300, 1), (350, 1))) == [2, 1]


def test_tgi_waits_until_a_prefill_is_worth_its_pause() -> None:
    """With 10 running, a ratio of 1.2 wants 12 prompts at once; fewer wait until 19 steps have decoded."""
    made = scheduler(OLD_TGI, 100_000, *[(32, 64)] * 10)
    next(steps(made))
    for _ in range(11):
        made.submit(Job(32, 64, -1))
    assert [batch.prompts for _, batch in zip(range(20), steps(made), strict=False)] == [0] * 19 + [11]
    made = scheduler(OLD_TGI, 100_000, *[(32, 64)] * 10)
    next(steps(made))
    for _ in range(12):
        made.submit(Job(32, 64, -1))
    assert [batch.prompts for _, batch in zip(range(2), steps(made), strict=False)] == [0, 12]


def test_tgi_takes_back_what_is_too_little() -> None:
    """Enough wait, but the prefill budget takes fewer than the ratio wants: nobody is admitted, and nothing is held."""
    made = scheduler(OLD_TGI, 100_000, *[(512, 64)] * 30)
    assert next(steps(made)).prompts == 8
    held = made.gauges()
    assert [batch.prompts for _, batch in zip(range(2), steps(made), strict=False)] == [0, 0]
    assert made.gauges() == held
    assert [job.arrived_ns for job in made.waiting] == [-1] * 22


def test_tgi_reserves_the_whole_answer() -> None:
    """In blocks: of 96 tokens two jobs of 16 + 17 take 32 each, and the third waits."""
    made = scheduler(OLD_TGI, 95, *[(16, 17)] * 3)
    assert made.plan(0).prompts == 2
    assert made.gauges().kv_usage == pytest.approx(64 / 95)


def test_old_lightllm_prefills_every_tenth_step() -> None:
    """Whatever waits."""
    made = scheduler(OLD_LIGHTLLM, 100_000, (32, 30))
    next(steps(made))
    made.submit(Job(32, 1, -1))
    assert [batch.prompts for _, batch in zip(range(11), steps(made), strict=False)] == [0] * 10 + [1]


def test_lightllm_admits_by_the_peak_that_all_will_reach() -> None:
    """Two jobs of 10 + 50 reach 120 together. One of 10 + 5 beside one of 10 + 50 ends before that needs its last."""
    assert scheduler(OLD_LIGHTLLM, 120, (10, 50), (10, 50)).plan(0).prompts == 1
    assert scheduler(OLD_LIGHTLLM, 121, (10, 50), (10, 50)).plan(0).prompts == 2
    assert scheduler(OLD_LIGHTLLM, 61, (10, 50), (10, 5)).plan(0).prompts == 2


def test_a_sixth_of_the_cache_is_lightllms_prefill() -> None:
    """But no less than its policy says, and what is asked for wins."""
    old = find_engine("lightllm", "2023")
    assert old.policy_for(68_700).step_tokens == 11_450
    assert old.policy_for(6_000).step_tokens == old.policy.step_tokens
    assert old.policy_for(68_700, 7, 99) == replace(old.policy, step_tokens=99, running_limit=7)


def test_an_engine_that_is_not_known_names_those_that_are() -> None:
    """Server and generation."""
    with pytest.raises(HardwareError, match="ollama is not modelled: choose vllm, tgi, lightllm, sglang, tei"):
        find_engine("ollama")
    with pytest.raises(HardwareError, match="unknown vintage '2024': choose current or 2023"):
        find_engine("vllm", "2024")


@pytest.mark.parametrize("server", OLD_SERVERS)
def test_the_engines_of_2023_are_slower(server: str) -> None:
    """Their steps take longer, of the same batch on the same card, and still more with more sequences."""
    took = []
    for vintage in ("current", "2023"):
        engine = find_engine(server, vintage)
        step_ns = engine.step_time(engine.deployment("A800", "llama-2-7b"))
        took.append([step_ns(Batch(0, 0, 0, decoding, decoding * 300)) for decoding in (1, 64)])
    assert took[0][0] < took[1][0]
    assert took[1][0] < took[1][1]


DECODING = Batch(0, 0, 0, 256, 256 * 600)


def old_step_ns(server: str, tensor: int, **changes: Any) -> int:
    """Return the duration of a decode step of Llama-2-70B on `tensor` A800, with changed fields of the engine."""
    engine = replace(find_engine(server, "2023"), **changes)
    return engine.step_time(engine.deployment("A800", "llama-2-70b", tensor=tensor))(DECODING)


@pytest.mark.parametrize("server", OLD_SERVERS)
def test_the_attention_kernels_of_2023_read_the_cache_for_each_query_head(server: str) -> None:
    """70B has eight query heads per KV head. A model without groups takes the same time as with newer kernels."""
    assert old_step_ns(server, 4) > 1.5 * old_step_ns(server, 4, kv_per_query_head=0.0)
    engine = find_engine(server, "2023")
    ungrouped = engine.deployment("A800", "llama-2-13b")
    newer = replace(engine, kv_per_query_head=0.0)
    assert engine.step_time(ungrouped)(DECODING) == newer.step_time(ungrouped)(DECODING)


def test_vllm_of_2023_sends_the_whole_batch_to_each_worker() -> None:
    """With 4 GPUs the step waits for four calls of Ray, with 8 for eight. A step on one GPU has no such call."""
    extra_s = {
        tensor: (old_step_ns("vllm", tensor) - old_step_ns("vllm", tensor, worker_each=NO_TIME, worker_once=NO_TIME))
        / 1e9
        for tensor in (1, 4, 8)
    }
    assert extra_s[1] == 0
    assert 0.04 < extra_s[4] < 0.06
    assert extra_s[8] - extra_s[4] == pytest.approx(4 * (0.4e-3 + 256 * 13e-6 + 256 * 600 * 30e-9))


def test_other_servers_of_2023_send_their_workers_only_ids() -> None:
    """TGI sends the same call as to one GPU. LightLLM pays for its calls once, because it sends them all at once."""
    engines = {server: find_engine(server, "2023") for server in OLD_SERVERS}
    assert [server for server in OLD_SERVERS if engines[server].worker_each != NO_TIME] == ["vllm"]
    assert [server for server in OLD_SERVERS if engines[server].worker_once != NO_TIME] == ["vllm", "lightllm"]
    assert engines["lightllm"].worker_once.token_s == 0
    assert all(ENGINES[server]["current"].worker_once == NO_TIME for server in ENGINES)


def test_a_share_of_each_prompt_may_be_cached() -> None:
    """Only the other tokens are computed, after the cached ones. The last token of a prompt is always computed."""
    policy = find_engine("vllm").policy
    half, whole = (policy.with_serving(share, "") for share in (0.5, 1.0))
    assert [batch[:3] for batch in steps(scheduler(half, 4096, (100, 1)))] == [(1, 50, 50 * 50 + 50 * 51 // 2)]
    assert [batch.prompt_tokens for batch in steps(scheduler(whole, 4096, (100, 1)))] == [1]
    made = scheduler(half, 4096, (100, 1), (60, 1))
    list(steps(made))
    assert made.gauges().cached_prompt_tokens == 80
    tgi = find_engine("tgi").policy.with_serving(0.5, "")
    assert [batch.prompt_tokens for batch in steps(scheduler(replace(tgi, step_tokens=64), 4096, (100, 1)))] == [50]


def test_a_prompt_that_waits_for_further_prompts_has_its_cached_tokens_counted_once() -> None:
    """The second prompt is admitted and returned to the queue in three steps before it is computed."""
    policy = replace(TENSORRT_LLM.policy, batch_wait_steps=3).with_serving(0.5, "")
    made = scheduler(policy, 4096, (100, 9))
    made.plan(0)
    made.finish()
    made.submit(Job(60, 1, -1))
    assert prompts(made)[:4] == [0, 0, 0, 1]
    assert made.gauges().cached_prompt_tokens == 80


def test_tensorrt_llm_computes_whole_prompts() -> None:
    """Capacity plans and replayed closed loops use one policy, in which a prompt that does not fit waits."""
    assert policy_of(framework("trtllm")) is TENSORRT_LLM.policy
    policy = replace(TENSORRT_LLM.policy, step_tokens=100)
    assert [batch.prompt_tokens for batch in steps(scheduler(policy, 4096, (60, 1), (60, 1)))] == [60, 60]


@pytest.mark.parametrize(
    ("server", "chunked", "expected"),
    [
        ("vllm", "", [(40, 0), (40, 0), (20, 1), (0, 2), (0, 1)]),
        ("vllm", "mixed", [(40, 0), (40, 0), (20, 1), (0, 2), (0, 1)]),
        ("vllm", "separate", [(40, 0), (40, 0), (20, 0), (0, 2), (0, 2)]),
        ("vllm", "off", [(50, 0), (50, 1), (0, 2), (0, 1)]),
        ("sglang", "", [(40, 0), (40, 0), (20, 0), (0, 2), (0, 2)]),
        ("sglang", "mixed", [(40, 0), (40, 0), (20, 1), (0, 2), (0, 1)]),
        ("sglang", "off", [(50, 0), (50, 0), (0, 2), (0, 2)]),
    ],
)
def test_prompts_are_combined_with_decoding_as_requested(
    server: str, chunked: str, expected: list[tuple[int, int]]
) -> None:
    """Each step as (prompt tokens, decoding), for two prompts of 50 tokens, 3 output tokens and 40 tokens per step."""
    policy = replace(find_engine(server).policy, step_tokens=40).with_serving(0.0, chunked)
    found = [(batch.prompt_tokens, batch.decoding) for batch in steps(scheduler(policy, 4096, (50, 3), (50, 3)))]
    assert found == expected
