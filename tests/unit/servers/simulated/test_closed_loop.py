"""The replay of a closed loop, from which the expected latencies of vLLM, SGLang and TensorRT-LLM come."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from loadgen.servers.hardware.inference import predict_step
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import EngineSettings, Load, formula_times, limit_times
from loadgen.servers.simulated.closed_loop import expected_times, is_replayed, replay
from loadgen.servers.simulated.scheduler import Batch, Job, Scheduler
from loadgen.servers.simulated.scheduler_presets import find_engine
from loadgen.servers.simulated.step_time import StepTime

VLLM = make_deployment("H100", "llama-3.1-8b")
SGLANG = make_deployment("H100", "llama-3.1-8b", framework_name="sglang")
TRTLLM = make_deployment("H100", "llama-3.1-8b", framework_name="trtllm")
LOAD = Load(1024, 128, 16)


def test_every_client_sends_one_request_per_round() -> None:
    """Each response has the requested length if the lengths do not vary."""
    requests = replay(VLLM, replace(LOAD, rounds=3), 0.9)
    assert [request.tokens for request in requests] == 48 * [128]


def test_equal_lengths_keep_the_clients_in_step() -> None:
    """Every round begins with a wave of prompts. With random lengths, only the first one does."""
    in_step, apart = (expected_times(VLLM, replace(LOAD, spread=spread)).ttft_s for spread in (0.0, 0.1))
    assert in_step > 1.3 * apart


def test_the_first_wave_counts_less_in_more_rounds_and_not_in_a_median() -> None:
    """Later requests of random length find fewer others waiting."""
    load = replace(LOAD, spread=0.1)
    one, ten = (expected_times(VLLM, replace(load, rounds=rounds)).ttft_s for rounds in (1, 10))
    assert one > 2 * ten
    assert expected_times(VLLM, replace(load, statistic="median")).ttft_s < ten


def test_sglang_computes_all_prompts_before_it_decodes() -> None:
    """Requests wait longer for their first token than with vLLM, whose steps mix prompts and decoding."""
    steady = replace(LOAD, prompt_tokens=4096, spread=0.1)
    vllm, sglang = (expected_times(deployment, steady) for deployment in (VLLM, SGLANG))
    assert sglang.tpot_s != vllm.tpot_s
    prompt_alone_s = float(sglang.prompt_prefill_s)
    assert sglang.ttft_s > prompt_alone_s


def test_several_loads_at_once_give_the_same() -> None:
    """An array of requests in flight gives arrays."""
    together = expected_times(VLLM, replace(LOAD, in_flight=np.array([1, 8])))
    alone = [expected_times(VLLM, replace(LOAD, in_flight=clients)).tpot_s for clients in (1, 8)]
    assert together.tpot_s.tolist() == alone


def test_nothing_replayed_beats_the_hardware() -> None:
    """The bounds of throughput, TTFT and TPOT hold."""
    found, limit = expected_times(SGLANG, LOAD), limit_times(SGLANG, LOAD)
    assert found.replayed
    assert found.ttft_s >= limit.ttft_s
    assert found.tpot_s >= limit.tpot_s
    assert found.output_tokens_per_s <= limit.output_tokens_per_s


def test_engines_without_known_rules_and_pipelines_use_the_formula() -> None:
    """gpt-fast, and any engine whose layers are split into stages."""
    gpt_fast = make_deployment("H100", "llama-3.1-8b", framework_name="gpt-fast")
    stages = make_deployment("H100", "llama-3.1-8b", pipeline=2)
    for deployment in (gpt_fast, stages):
        assert not is_replayed(deployment)
        assert expected_times(deployment, LOAD) == formula_times(deployment, LOAD)


def test_no_request_is_sent_after_the_time_of_the_loop() -> None:
    """After one and a half responses, each client has sent two requests."""
    load = replace(LOAD, in_flight=4)
    response_s = replay(VLLM, load, 0.9)[0].tpot_s * 128
    assert len(replay(VLLM, replace(load, seconds=1.5 * response_s), 0.9)) == 8


def test_one_sequence_less_than_clients_makes_one_request_of_a_round_wait() -> None:
    """With equal lengths, one of eight requests waits for a whole response. The other waves of prompts are smaller."""
    load = replace(LOAD, output_tokens=512, in_flight=8)
    free, limited = (
        expected_times(TRTLLM, replace(load, settings=EngineSettings(running_limit=limit))) for limit in (8, 7)
    )
    response_s = float(free.ttft_s + 511 * free.tpot_s)
    assert response_s / 12 < limited.ttft_s - free.ttft_s < response_s / 8


def test_the_limit_counts_the_requests_that_may_run() -> None:
    """One request at a time has the TPOT of its own steps, not the limit of 40 requests that would fit."""
    load = Load(8192, 64, 40, rounds=1, settings=EngineSettings(running_limit=1))
    alone = statistics.fmean(request.tpot_s for request in replay(VLLM, load, 0.9))
    assert expected_times(VLLM, load).tpot_s == pytest.approx(alone)
    assert limit_times(VLLM, load).running == 1
    assert formula_times(VLLM, load).tpot_s == formula_times(VLLM, replace(load, in_flight=1)).tpot_s


def test_prompts_that_wait_for_further_prompts_have_a_longer_ttft() -> None:
    """A prompt waits up to 20 steps, and less if an earlier prompt is waiting already."""
    load = replace(LOAD, spread=0.1, in_flight=4, output_tokens=512)
    alone = expected_times(TRTLLM, load)
    waiting = expected_times(TRTLLM, replace(load, settings=EngineSettings(batch_wait_steps=20)))
    assert 10 < (waiting.ttft_s - alone.ttft_s) / alone.decode_step_s < 20


def test_an_engine_that_looks_rarely_for_new_requests_starts_them_later() -> None:
    """A request arrives in the middle of an interval of 30 steps on average. Prompts shorten some intervals."""
    load = replace(LOAD, spread=0.1, in_flight=8, output_tokens=512)
    often = expected_times(SGLANG, load)
    rarely = expected_times(SGLANG, replace(load, settings=EngineSettings(receive_steps=30)))
    assert 5 < (rarely.ttft_s - often.ttft_s) / often.decode_step_s < 20


def test_tensorrt_llm_reserves_the_whole_output() -> None:
    """The last request waits because its output does not fit into the cache, although its prompt does."""
    load = Load(64, TRTLLM.kv_tokens(0.9) // 4, 4, rounds=1)
    waits = [request.ttft_s > 1 for request in replay(TRTLLM, load, 0.9)]
    assert waits == [False, False, False, True]


def test_tensorrt_llm_gives_the_cache_a_share_of_the_free_memory() -> None:
    """Other engines subtract weights and activations from a share of the whole memory."""
    gpu = VLLM.gpu
    other = replace(VLLM, framework=replace(VLLM.framework, chunk_tokens=TRTLLM.framework.chunk_tokens))
    used_bytes = TRTLLM.weight_bytes + TRTLLM.activation_bytes
    assert TRTLLM.kv_tokens(0.9) == int(0.9 * (gpu.memory_bytes - used_bytes) / TRTLLM.kv_token_bytes)
    assert other.kv_tokens(0.9) == int((0.9 * gpu.memory_bytes - used_bytes) / other.kv_token_bytes)


def test_a_step_with_prompts_takes_at_least_the_launches_of_its_kernels() -> None:
    """A short prompt takes no longer without them on the GPU. Decode steps have CUDA graphs."""
    slow = replace(VLLM, framework=replace(VLLM.framework, prompt_launch_s=1e-3))
    for deployment in (VLLM, slow):
        short = StepTime(deployment)(Batch(1, 16, 136, 0, 0)) / 1e9
        launches_s = deployment.model.layers * deployment.prompt_launch_s
        assert short == pytest.approx(launches_s + sum(deployment.host_s), rel=1e-6)
        assert short == pytest.approx(float(predict_step(deployment, 1, 16).total), rel=1e-6)
    decode = Batch(0, 0, 0, 8, 8000)
    assert StepTime(slow)(decode) == StepTime(VLLM)(decode)


def test_sglang_splits_a_long_prompt() -> None:
    """A prompt of 20 tokens takes three steps of 8, and the last one has room for a part of the next prompt."""
    policy = replace(find_engine("sglang").policy, step_tokens=8, block_size=1)
    engine = Scheduler(policy, 200)
    first, second = Job(20, 40, 0), Job(20, 30, 0)
    engine.submit(first)
    engine.submit(second)
    sizes = []
    while not first.emitted:
        sizes.append(engine.plan(1))
        engine.finish()
    assert [(size.prompts, size.prompt_tokens, size.decoding) for size in sizes] == [(1, 8, 0), (1, 8, 0), (2, 8, 0)]


@pytest.mark.parametrize(("kv_tokens", "running"), [(100, 2), (90, 1)])
def test_sglang_counts_a_share_of_the_output_of_others(kv_tokens: int, running: int) -> None:
    """20 + 30 tokens of the second request and 0.7 of the 39 that the first one still generates are 77.

    The cache has `kv_tokens` - 21 free tokens. The whole output of both, 89 tokens, would fit neither cache.
    """
    policy = replace(find_engine("sglang").policy, block_size=1)
    engine = Scheduler(policy, kv_tokens)
    engine.submit(Job(20, 40, 0))
    engine.plan(1)
    engine.finish()
    engine.submit(Job(20, 30, 0))
    engine.plan(2)
    assert engine.running == running


@pytest.mark.parametrize(("arrived_ns", "running"), [(5_000, 1), (4_000, 2)])
def test_an_idle_sglang_forgets_how_far_its_share_has_fallen(arrived_ns: int, running: int) -> None:
    """A request with 620 output tokens brings the share to its minimum, 0.098, and ends at 4,500 ns.

    If the next request arrives later, the engine was idle, and the share is 0.7 again. 20 + 10 tokens of a third
    request and 0.7 of the 48 that the second one still generates are 63.6, and the cache has 49 free tokens. If the
    second request arrived earlier, the share has stayed at 0.098: the third request takes 34.7 tokens, which fit.
    """
    policy = replace(find_engine("sglang").policy, block_size=1)
    engine = Scheduler(policy, 700)
    first = Job(20, 620, 0)
    engine.submit(first)
    while engine.running or engine.waiting:
        engine.plan(1)
        engine.finish()
    engine.submit(Job(650, 49, arrived_ns))
    engine.plan(max(arrived_ns, 4_500))
    engine.finish()
    engine.submit(Job(20, 10, arrived_ns))
    engine.plan(5_001)
    assert engine.running == running


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "nim"])
def test_one_request_at_a_time_takes_its_prompt_and_its_steps(name: str) -> None:
    """Without others, TTFT is the path through the server and the prompt, and TPOT a decode step."""
    deployment = make_deployment("H100", "llama-3.1-8b", framework_name=name)
    found = expected_times(deployment, Load(1000, 100, 1))
    framework = deployment.framework
    path_s = framework.server_s + framework.request_s
    assert found.ttft_s == pytest.approx(path_s + float(found.prompt_prefill_s), rel=0.02)
    assert found.tpot_s == pytest.approx(float(found.decode_step_s), rel=0.01)
