"""The hardware model, formula by formula, by hand and against published values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadgen.servers.hardware import HardwareError, constant, framework, gpu, gpu_links, model, number_format, tables
from loadgen.servers.hardware.inference import (
    Deployment,
    exposed_all_reduce_s,
    lower_bounds_s,
    model_gemms,
    predict_step,
)
from loadgen.servers.hardware.kernels import all_reduce_s, decode_attention_s, gemm_s, ring_s
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.throughput_model import Load, decode_step_parts, formula_times, limit_times
from loadgen.servers.hardware.training import (
    NF4_BYTES,
    TrainingSetup,
    adapter_parameters,
    mfu,
    predict_iteration,
    predict_memory,
)


def test_a_large_gemm_runs_at_the_share_of_the_peak_that_was_measured() -> None:
    """16,384 cubed on H100 in bf16: 2 m n k FLOPs at 0.81 of 989 TFLOP/s, and some for tiles and waves."""
    took = float(gemm_s(gpu("H100"), number_format("bf16"), 16384, 16384, 16384))
    assert took == pytest.approx(2 * 16384**3 / (0.81 * 989.4e12), rel=0.05)


def test_a_gemm_of_one_row_reads_its_weights() -> None:
    """At m = 1 the weights' bytes over what memory gives, and the start of the kernel."""
    card = gpu("H100")
    took = float(gemm_s(card, number_format("bf16"), 1, 8192, 8192))
    reading = 2 * 8192 * 8192 / (card.memory_bytes_per_s * card.architecture.memory_share)
    assert took == pytest.approx(reading + card.architecture.launch_s, rel=0.02)


def test_waves_are_whole() -> None:
    """132 tiles of 256 x 128 fill an H100; one more takes more than its share, whatever tile is best then."""
    card, stored = gpu("H100"), number_format("bf16")
    full, more = gemm_s(card, stored, 256 * 132, 128, 8192), gemm_s(card, stored, 256 * 133, 128, 8192)
    assert more / full > 133 / 132


def test_a_format_that_tensor_cores_do_not_know_stores_weights_alone() -> None:
    """An A100 has no fp8: its GEMMs read half the bytes, and compute as in bf16."""
    card = gpu("A100")
    assert card.effective_format(number_format("fp8")).compute_type == "bf16"
    assert gpu("H100").effective_format(number_format("fp8")).compute_type == "fp8"
    small, large = gemm_s(card, card.effective_format(number_format("fp8")), [1, 8192], 32768, 8192)
    bf16_small, bf16_large = gemm_s(card, number_format("bf16"), [1, 8192], 32768, 8192)
    assert (small / bf16_small, large / bf16_large) == pytest.approx((0.55, 1), rel=0.1)


def test_decode_attention_reads_the_cache() -> None:
    """64 sequences of 8,192 tokens with 8 KV heads: 2 * 64 * 8192 * 8 * 128 values, from memory."""
    card = gpu("H100")
    took = float(decode_attention_s(card, 64, 8192, 8, 128, 2))
    read_bytes = 2 * 64 * 8192 * 8 * 128 * 2
    assert took == pytest.approx(read_bytes / (card.memory_bytes_per_s * 0.855), rel=0.1)


def test_a_small_cache_stays_in_l2() -> None:
    """8 MB of KV cache are read faster than memory could."""
    card = gpu("L40S")
    took = float(decode_attention_s(card, 8, 2048, 4, 128, 2))
    assert took - card.architecture.attention_launch_s < 2 * 8 * 2048 * 4 * 128 * 2 / card.memory_bytes_per_s


def test_a_ring_moves_twice_the_message_but_for_one_part() -> None:
    """2 (p - 1) / p of the message over the link (Patarasuk and Yuan 2009), and a latency for each step."""
    link = gpu("A100").link
    took = float(all_reduce_s(link, 8, 256e6, "nccl"))
    assert took == pytest.approx(1.75 * 256e6 / (300e9 * link.share) + link.nccl_s + 14 * link.step_s, rel=1e-9)
    assert float(ring_s(link, 8, 256e6, "all-gather")) == pytest.approx((took + link.nccl_s) / 2, rel=1e-9)


def test_switches_that_add_help_eight_gpus_more_than_two() -> None:
    """On H100 two GPUs use the ring, eight the switch: 431 GB/s of bus bandwidth were measured, of 450."""
    link = gpu("H100").link
    bus_bytes_per_s = 1.75 * 256e6 / float(all_reduce_s(link, 8, 256e6, "nccl"))
    assert bus_bytes_per_s == pytest.approx(400e9, rel=0.1)
    ring = replace(link, switch_share=0.0)
    assert all_reduce_s(ring, 2, 256e6) == all_reduce_s(link, 2, 256e6)


def test_a_bridge_joins_two_and_pcie_more() -> None:
    """H100 NVL: a pair talks over NVLink, four over PCIe."""
    card = gpu("H100 NVL")
    assert [card.link_for(gpus).bytes_per_s for gpus in (2, 4)] == [300e9, 64e9]


def test_weights_are_split_over_gpus() -> None:
    """Llama-2-70B at TP 8: every GEMM has an eighth of its weights, and each GPU one KV head."""
    one, eight = (make_deployment("H100", "llama-2-70b", "bf16", tensor) for tensor in (1, 8))
    assert sum(each.n * each.k for each in model_gemms(one)) == 8 * sum(each.n * each.k for each in model_gemms(eight))
    assert (eight.kv_heads, eight.kv_token_bytes) == (1, 327680)
    assert make_deployment("H100", "llama-2-70b", "bf16", 16).kv_token_bytes == 2 * 327680


def test_the_limit_of_a_decode_step_is_the_weights_over_the_bandwidth() -> None:
    """Llama-2-7B on one A100: 13.2 GB without the embedding, and the cache, over 2,039 GB/s."""
    made = make_deployment("A100", "llama-2-7b")
    least = lower_bounds_s(made, 0, 0, 1, 1000)
    read_bytes = 2 * (made.model.layer_parameters + made.model.head_parameters) + 1000 * 524288
    assert float(least["memory"]) == pytest.approx(read_bytes / 2039e9, rel=1e-9)
    assert float(least["network"]) == 0


@pytest.mark.parametrize(
    ("architecture", "waits"),
    [("standard", 150), ("parallel", 75), ("ladder", 3 * 7 + 2 * 5 + 25), ("no-communication", 0)],
)
def test_all_reduces_hide_behind_the_next_block(architecture: str, waits: float) -> None:
    """Three layers, 25 us each: attention's shows beside an MLP of 18, an MLP's is hidden beside an attention of 40 but
    for joining it, and the last one has no block behind it."""
    found = exposed_all_reduce_s(architecture, 3, 25e-6, 40e-6, 18e-6)
    assert float(found) == pytest.approx(1e-6 * waits)
    assert constant("join_s") == 5e-6


def test_decoding_waits_for_the_prompts_of_others() -> None:
    """TPOT is more than the decode step by the prompts that come on the way, and with shorter answers by more."""
    made = make_deployment("H100", "llama-3.1-8b")
    long, short = (formula_times(made, Load(2000, output, 32)) for output in (2000, 100))
    assert short.tpot_s - short.decode_step_s > 10 * (long.tpot_s - long.decode_step_s)
    alone = formula_times(made, Load(2000, 100, 1))
    assert alone.tpot_s == pytest.approx(alone.decode_step_s, rel=1e-4)


def test_who_finds_no_room_waits() -> None:
    """Beyond the KV cache more requests in flight give no more tokens, and wait longer."""
    made = make_deployment("A100", "llama-2-7b")
    some, many = (formula_times(made, Load(3000, 1000, number)) for number in (30, 300))
    assert many.running < 40
    assert float(many.output_tokens_per_s) == pytest.approx(float(some.output_tokens_per_s), rel=0.2)
    assert many.ttft_s > 5 * some.ttft_s


def test_a_model_that_does_not_fit_says_what_to_do() -> None:
    """70B in 16 bits on one GPU."""
    with pytest.raises(HardwareError, match="does not fit 1 x H100 SXM in bf16: its weights of 138 GB need 2 GPUs"):
        limit_times(make_deployment("H100", "llama-2-70b"), Load(512, 128, 1))


def test_a_slow_link_binds_what_is_added_up() -> None:
    """Eight RTX 4090 over PCIe: the all-reduces after attention and MLP take longer than the GEMMs themselves."""
    found = compute_limits(make_deployment("RTX4090", "llama-2-70b", "fp8", 8), Load(512, 128, 8))
    bounds = {each.gemm: each.bound for each in found.gemms if each.phase == "prefill"}
    assert [bounds[name] for name in ("QKV", "attention output", "down")] == ["compute", "network", "network"]


def test_replicas_add_up() -> None:
    """Two replicas with half of the requests each: twice the tokens per second of one, at its latency."""
    made = make_deployment("H100", "llama-3.1-8b")
    one, two = compute_limits(made, Load(512, 128, 32)), compute_limits(made, Load(512, 128, 32), replicas=2)
    assert two.expected.output_tokens_per_s == 2 * one.expected.output_tokens_per_s
    assert (two.gpus, two.in_flight, two.expected.tpot_s) == (2, 64, one.expected.tpot_s)


def test_pipelines_split_requests() -> None:
    """Two stages of 8 GPUs: half the requests in each step, twice the room for the cache and more."""
    one, two = (make_deployment("H100", "llama-2-70b", "bf16", 8, pipeline) for pipeline in (1, 2))
    assert two.kv_tokens(0.9) > 2 * one.kv_tokens(0.9)
    assert float(predict_step(two, decoding=64, context=500).gemm) == float(
        predict_step(one, decoding=32, context=500).gemm
    )


def test_a_prompt_is_not_divided_among_stages() -> None:
    """More stages make one prompt no faster, as it passes them one after the other. Two prompts share two stages."""
    one, two = (make_deployment("H100", "llama-2-70b", "bf16", 4, pipeline) for pipeline in (1, 2))
    alone = float(predict_step(one, 1, 2048).gemm)
    assert float(predict_step(two, 1, 2048).gemm) == alone
    assert float(predict_step(two, 2, 2048).gemm) == alone
    assert float(predict_step(two, 4, 2048).gemm) == float(predict_step(one, 2, 2048).gemm)
    assert float(predict_step(two, decoding=1, context=100).gemm) == float(
        predict_step(one, decoding=1, context=100).gemm
    )


def test_stages_in_other_machines_are_farther_away() -> None:
    """Activations travel over NVLink inside a machine of 8 GPUs, and over InfiniBand between machines."""
    deployment = make_deployment("H100", "llama-2-70b", "bf16", 4, 2)
    apart = replace(deployment, node_gpus=4)
    near, far = (float(predict_step(each, 1, 2048).all_reduce) for each in (deployment, apart))
    message = 2048 * 8192 * 2
    link, near_link = apart.gpu.machine_link, apart.gpu.link
    assert (link.name, near_link.name) == ("InfiniBand", "NVLink 4")
    assert far - near == pytest.approx(
        message / (link.bytes_per_s * link.share)
        + link.nccl_s
        - message / (near_link.bytes_per_s * near_link.share)
        - near_link.nccl_s
    )


def test_only_the_hops_between_machines_are_slow() -> None:
    """Four stages of four GPUs fill two machines: two hops stay inside a machine, and one leaves it."""
    deployment = make_deployment("H100", "llama-2-70b", "bf16", 4, 4)
    near, far = (
        float(ring_s(link, 2, 1e6, "point to point")) for link in (deployment.gpu.link, deployment.gpu.machine_link)
    )
    assert deployment.hops_s(1e6) == pytest.approx(2 * near + far)
    assert replace(deployment, node_gpus=4).hops_s(1e6) == pytest.approx(3 * far)
    assert replace(deployment, node_gpus=16).hops_s(1e6) == pytest.approx(3 * near)
    assert replace(deployment, pipeline=1).hops_s(1e6) == 0


def test_mixtures_have_stages_too() -> None:
    """A mixture of experts on two stages: half of the sequences per micro-batch, and a hop between the stages."""
    one, two = (make_deployment("B200", "deepseek-v3", "fp8", 8, pipeline) for pipeline in (1, 2))
    half, whole = predict_step(one, decoding=32, context=500), predict_step(two, decoding=64, context=500)
    assert float(whole.gemm) == pytest.approx(float(half.gemm))
    assert float(whole.all_reduce) > float(half.all_reduce)


ADAM = TrainingSetup(gpu=gpu("A100"), model=model("llama-2-7b"), batch=8, micro_batch=1, data=8, recomputation="full")


@pytest.mark.parametrize(("stage", "share"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_zero_splits_states(stage: int, share: float) -> None:
    """Bytes per parameter with 8 replicas: optimiser, then gradients, then weights (arXiv 1910.02054, figure 1)."""
    held = predict_memory(replace(ADAM, zero=stage))
    assert held.total - held.activations == pytest.approx(share * ADAM.model.layer_parameters)


def test_tensorrt_llm_needs_gpus_for_its_weights_alone() -> None:
    """Its KV cache takes a share of the memory that the weights leave free, so weights may fill the memory."""
    with pytest.raises(HardwareError, match="its weights of 141 GB need 2 GPUs"):
        make_deployment("H100", "llama-3.1-70b", tensor=1, framework_name="trtllm").kv_tokens(0.5)


def test_adapters_need_little() -> None:
    """LoRA of rank 64 on all matrices of Llama-2-7B trains 160 million parameters (PEFT prints 159,907,840); QLoRA
    holds the base in 4 bits and a little."""
    lora = replace(ADAM, adapter_rank=64)
    assert adapter_parameters(lora) == 159_907_840
    base = ADAM.model.layer_parameters
    assert predict_memory(lora).parameters == 2 * base + 2 * 159_907_840
    assert predict_memory(replace(lora, base_bytes=NF4_BYTES)).parameters == pytest.approx(
        0.516 * base + 2 * 159_907_840
    )
    assert predict_iteration(lora).backward_s == pytest.approx(predict_iteration(ADAM).backward_s / 2)


def test_interleaving_shrinks_the_bubble() -> None:
    """By the number of chunks (arXiv 2104.04473): 7 / 64 of an iteration at 8 stages, a third of that with 3."""
    setup = TrainingSetup(gpu=gpu("A100"), model=model("gpt-3-175b"), batch=64, tensor=8, pipeline=8)
    plain, three = predict_iteration(setup), predict_iteration(replace(setup, interleave=3))
    work = plain.forward_s + plain.backward_s + plain.tensor_s
    assert plain.bubble_s == pytest.approx(7 / 64 * work, rel=0.05)
    assert three.bubble_s == pytest.approx(plain.bubble_s / 3, rel=0.1)


def test_offloading_costs_the_way_to_the_host() -> None:
    """No optimiser states on the GPU, and many times the time for them."""
    there, here = replace(ADAM, zero=2, offload=True), replace(ADAM, zero=2)
    assert predict_memory(there).optimiser == 0
    assert predict_iteration(there).optimiser_s > 10 * predict_iteration(here).optimiser_s


def test_a_batch_must_be_shared_evenly() -> None:
    """The message says which numbers do not go together."""
    with pytest.raises(HardwareError, match="a batch of 9 is not a multiple of 8 replicas x 1"):
        predict_iteration(replace(ADAM, batch=9))


def test_every_constant_says_where_it_is_from() -> None:
    """Each row of the tables of constants is a data sheet's, measured, counted or assumed, and names the source of what
    was measured."""
    for name in ("architectures", "links", "frameworks", "constants"):
        for row in tables()[name]:
            assert row["kind"] in {"data sheet", "measured", "counted", "assumed"}, row
            assert row["source"] or row["kind"] == "assumed", row
    for name in ("gpus", "models", "formats"):
        assert all(row["source"] for row in tables()[name])


def test_arrays_are_many_numbers() -> None:
    """A load of several numbers in flight gives what each gives alone."""
    made = make_deployment("B200", "llama-3.1-70b", "fp8", 2)
    together = formula_times(made, Load(1024, 1024, np.array([1, 8, 64])))
    alone = [float(formula_times(made, Load(1024, 1024, number)).tpot_s) for number in (1, 8, 64)]
    assert together.tpot_s.tolist() == pytest.approx(alone)


def test_the_fp8_cache_follows_the_framework() -> None:
    """TensorRT-LLM 0.9 holds the cache of fp8 models in fp8, vLLM on Hopper does not; an option decides otherwise."""
    assert make_deployment("H100", "llama-2-7b", "fp8", framework_name="trtllm-0.9").kv_bytes == 1
    assert make_deployment("H100", "llama-2-7b", "fp8").kv_bytes == 2
    assert make_deployment("H100", "llama-2-7b", "fp8").with_kv_format("fp8").kv_bytes == 1


def test_names_as_people_write_them() -> None:
    """Of GPUs, models, formats and frameworks, with what drivers call a card."""
    names = ("A100", "A800", "H100", "H200", "B200", "L40S", "RTX4090", "RTX3090", "NVIDIA H100 80GB HBM3")
    assert [gpu(name).name for name in names][-2:] == ["RTX 3090", "H100 SXM"]
    for name in ("llama-2-7b", "llama-3-70b", "llama-3.1-8b", "qwen3-32b"):
        assert model(name).name.casefold() == name
    served = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "mistralai/Mistral-7B-Instruct-v0.3")
    assert [model(name).name for name in served] == ["Llama-3.1-8B", "Qwen3-32B", "Mistral-7B"]
    for name in ("bf16", "fp8", "int8", "int4", "nvfp4"):
        assert number_format(name).name == name
    assert [framework(name).name for name in ("vllm", "trtllm", "nim")] == ["vLLM", "TensorRT-LLM", "NIM"]
    assert Deployment(gpu("MI300X"), model("llama-3.1-70b"), number_format("fp8"), framework("vllm")).gpus == 1
    assert gpu_links()["PCIe"].bytes_per_s == 32e9


def test_one_sm_reads_a_whole_context_without_a_split() -> None:
    """NIM's kernel takes longest for one long context; vLLM's splits it. Full batches are bound by memory in both."""
    nim, vllm = (make_deployment("H100", "llama-3.1-8b", framework_name=name) for name in ("nim", "vllm"))
    nim, vllm = (replace(made, framework=replace(made.framework, kv_share=1.0)) for made in (nim, vllm))
    long, short = ([predict_step(made, 0, 0, 1, context).attention for made in (nim, vllm)] for context in (16000, 200))
    assert long[0] - short[0] > 3 * (long[1] - short[1])
    per_token_s = (long[0] - short[0]) / 32 / 15800
    assert per_token_s == pytest.approx(nim.gpu.architecture.attention_token_s, rel=0.2)
    full = [predict_step(made, 0, 0, 256, 4000).attention for made in (nim, vllm)]
    assert full[0] == pytest.approx(full[1], rel=0.3)


def test_the_kernels_of_2023_read_the_cache_once_per_query_head() -> None:
    """70B at TP 4 has eight query heads per KV head; a model without groups takes the same time as before."""
    made = make_deployment("A800", "llama-2-70b", tensor=4)
    old = replace(made, framework=replace(made.framework, kv_per_query_head=1.0))
    new_s, old_s = (float(predict_step(each, 0, 0, 256, 600).attention) for each in (made, old))
    assert 6 < old_s / new_s <= 8.5
    whole = make_deployment("A800", "llama-2-13b")
    same = replace(whole, framework=replace(whole.framework, kv_per_query_head=1.0))
    assert predict_step(whole, 0, 0, 64, 600) == predict_step(same, 0, 0, 64, 600)


def test_the_cache_has_no_room_for_activations() -> None:
    """vLLM reports 41,408 tokens for Llama-3.1-8B on an RTX 4090 with --gpu-memory-utilization 0.92."""
    assert make_deployment("RTX 4090", "llama-3.1-8b").kv_tokens(0.92) == pytest.approx(41_408, rel=0.01)


def test_a_shared_power_limit_does_not_raise_the_clock() -> None:
    """The 900 W of GH200 are those of GPU and CPU together, so large GEMMs take as long as on H100."""
    times = [float(gemm_s(gpu(name), number_format("bf16"), 8192, 8192, 8192)) for name in ("GH200", "H100")]
    assert times[0] == pytest.approx(times[1], rel=0.01)


def test_cards_without_peer_access_copy_over_the_host() -> None:
    """An all-reduce between two RTX 4090 is slower than between two L40S with the same PCIe."""
    slow, fast = (float(all_reduce_s(gpu(name).link, 2, 32e6, "nccl")) for name in ("RTX 4090", "L40S"))
    assert slow > 1.3 * fast


def test_a_small_model_on_many_gpus_is_bound_by_latency_or_overhead() -> None:
    """Starting kernels and all-reduces is a part of its own, and no part is negative."""
    parts = decode_step_parts(
        make_deployment("H100", "llama-3.1-8b", tensor=8, framework_name="trtllm"), Load(500, 100, 1)
    )
    assert max(parts, key=lambda name: parts[name]) in ("latency", "overhead")
    assert parts["latency"] > parts["network"] >= 0
    made = make_deployment("H100", "llama-3.1-8b")
    total = float(predict_step(made, decoding=8, context=550).total)
    assert sum(decode_step_parts(made, Load(500, 100, 8)).values()) == pytest.approx(total)


def test_a_frozen_base_is_neither_optimised_nor_differentiated() -> None:
    """With LoRA the optimiser step reads the adapters alone, and a frozen parameter counts four FLOPs per token."""
    full = TrainingSetup(gpu=gpu("A100"), model=model("llama-2-7b"), batch=1)
    lora = replace(full, adapter_rank=16)
    adapters = adapter_parameters(lora)
    assert predict_iteration(lora).optimiser_s < 2 * 30 * adapters / (0.7 * lora.gpu.memory_bytes_per_s)
    assert mfu(lora, 1.0) / mfu(full, 1.0) == pytest.approx(0.68, abs=0.03)


def test_a_chip_may_have_a_row_of_its_own() -> None:
    """GB202 has other tensor cores than the Blackwell of data centers; AD104 takes the row of its family."""
    names = {name: gpu(name).architecture.name for name in ("RTX 5090", "B200", "RTX 4090", "L4", "H100")}
    assert list(names.values()) == ["Blackwell GB202", "Blackwell", "Ada AD102", "Ada", "Hopper"]


def test_cached_prompt_tokens_are_read_but_not_computed() -> None:
    """Half of a prompt computes half of the GEMM work. The other half is read from the KV cache by attention."""
    whole = make_deployment("H100", "llama-3.1-8b")
    half = replace(whole, cache_hit_rate=0.5)
    assert (whole.prompt_parts(8192), half.prompt_parts(8192)) == ((8192, 0), (4096, 4096))
    assert replace(whole, cache_hit_rate=1.0).prompt_parts(100) == (1, 99)
    load = Load(8192, 64, 4)
    for times in (formula_times, limit_times):
        ratio = float(times(half, load).prompt_prefill_s / times(whole, load).prompt_prefill_s)
        assert 0.5 < ratio < 0.6, times
    alone = lower_bounds_s(whole, 1, 4096)
    after = lower_bounds_s(whole, 1, 4096, before=4096)
    pairs = 4096 * 4096
    assert after["compute"] - alone["compute"] == pytest.approx(4 * 32 * 32 * 128 * pairs / gpu("H100").peaks["bf16"])
    assert compute_limits(half, load).cache_hit_rate == 0.5
    with pytest.raises(HardwareError, match="--cache-hit-rate 2: give a share"):
        replace(whole, cache_hit_rate=2.0)


def test_a_measured_host_replaces_that_of_the_tables() -> None:
    """Both for a dense model and for a mixture of experts, and per attention group."""
    for name in ("llama-3.1-8b", "gpt-oss-120b"):
        assert replace(make_deployment("H100", name, tensor=2), host=(1e-3, 2e-5)).host_s == (1e-3, 2e-5)
    mixture = make_deployment("H100", "gpt-oss-120b", tensor=2)
    assert replace(mixture, attention_data=2, host=(1e-3, 2e-5)).host_s == (1e-3, 1e-5)
