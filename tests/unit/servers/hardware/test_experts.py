"""Mixtures of experts in the hardware model: shapes, routing, parallel experts, attention kinds and formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadgen.servers.hardware import HardwareError, ModelShape, constant, gpu, model, number_format
from loadgen.servers.hardware.attention import StepSequences, attention_bytes, attention_kernel_s
from loadgen.servers.hardware.experts import grouped_gemm_s, layer_gemms, route, touched_experts
from loadgen.servers.hardware.inference import Deployment, lower_bounds_s, predict_step
from loadgen.servers.hardware.roofline import compute_limits, make_deployment
from loadgen.servers.hardware.shapes import Experts
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.hardware.training import TrainingSetup

PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, 1),
    "mixtral-8x22b": (141, 39, 1),
    "deepseek-v3": (671, 37, 1),
    "deepseek-r1": (671, 37, 1),
    "qwen3-30b-a3b": (30.5, 3.3, 1),
    "qwen3-235b-a22b": (235, 22, 1),
    "qwen3.5-397b-a17b": (397, 17, 1),
    "kimi-k2.5": (1040, 32, 0),
    "gpt-oss-20b": (20.9, 3.6, 0),
    "gpt-oss-120b": (116.8, 5.1, 0),
}
"""Published parameters in billions: the total, those that one token uses, and 1 if these include the embedding."""

QWEN = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 1000,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "attn_output_gate": True,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
    },
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    """Parameters counted from the shape are within 2% of the published, rounded numbers."""
    total, active, embedding = PUBLISHED[name]
    shape = model(name)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    counted = shape.active_parameters + embedding * shape.head_parameters
    assert counted / 1e9 == pytest.approx(active, rel=0.021)


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "DeepSeek-V3.1"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen3-235B-A22B"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x22B"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_names_of_checkpoints(served: str, name: str) -> None:
    """A suffix for the number format or the date does not change the shape."""
    assert model(served).name == name


def test_a_config_with_linear_attention(tmp_path: Path) -> None:
    """The text part of a Qwen3.5 config gives experts, a gate, and layers with linear attention."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN), "utf-8")
    shape = model(str(tmp_path))
    assert shape.experts == Experts(512, 10, 1024, 1024, 0)
    assert (shape.linear_layers, shape.full_layers, shape.gated) == (3, 1, 1)
    assert shape.kv_values == 2 * 2 * 256


def test_a_config_with_latent_attention(tmp_path: Path) -> None:
    """The config of DeepSeek-V3 gives the listed shape, with 576 cached values per token and layer."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK), "utf-8")
    shape = model(str(tmp_path))
    assert replace(shape, name="DeepSeek-V3") == model("deepseek-v3")
    assert shape.kv_values == 61 * 576


def test_a_config_with_sliding_windows(tmp_path: Path) -> None:
    """The config of gpt-oss has windows in every second layer."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    shape = model(str(tmp_path))
    assert (shape.window, shape.window_layers, shape.full_layers, shape.mlp_matrices) == (128, 1, 1, 3)


def test_contradictory_shapes_are_refused(tmp_path: Path) -> None:
    """A token cannot use more experts than there are, and layers of one kind cannot exceed all layers."""
    file = tmp_path / "mine.toml"
    row = "layers = 2\nhidden = 64\nintermediate = 64\nheads = 2\nkv_heads = 2\nhead_dim = 32\nvocabulary = 100\n"
    head = f'[models."Mine"]\n{row}parameters = 1\n'
    file.write_text(f"{head}experts = 4\nexperts_per_token = 5\nexpert_intermediate = 8\n", "utf-8")
    with pytest.raises(HardwareError, match="needs experts_per_token, at most experts"):
        model("Mine", file)
    file.write_text(f"{head}window = 128\nwindow_layers = 3\n", "utf-8")
    with pytest.raises(HardwareError, match="more layers of one kind than the model's 2 layers"):
        model("Mine", file)


def test_touched_experts_by_hand() -> None:
    """One token uses k experts, very many tokens use all, and independent tokens overlap as drawn at random."""
    experts = Experts(128, 8, 64)
    assert touched_experts(experts, 1) == pytest.approx(8)
    assert touched_experts(experts, 1e9) == pytest.approx(128)
    independent = 64 ** constant("routing_independence")
    assert touched_experts(experts, 64) == pytest.approx(128 * (1 - (120 / 128) ** independent))


def test_touched_experts_as_drawn() -> None:
    """The formula equals a simulation of independent tokens."""
    generator = np.random.default_rng(0)
    experts, tokens = Experts(64, 4, 64), 20
    drawn = [len({int(one) for _ in range(tokens) for one in generator.permutation(64)[:4]}) for _ in range(200)]
    effective = tokens ** (1 / constant("routing_independence"))
    assert touched_experts(experts, effective) == pytest.approx(np.mean(drawn), rel=0.02)


def test_the_busiest_group_has_more_than_its_share() -> None:
    """Groups of experts are not equally busy, and none has more experts or tokens than there are."""
    experts = Experts(256, 8, 2048)
    whole, busiest = route(experts, 32, 1), route(experts, 32, 8)
    assert whole.rows == 256
    assert whole.rows / 8 < busiest.rows < 2 * whole.rows / 8
    assert whole.touched / 8 < busiest.touched <= 32
    assert route(experts, 1, 256).rows <= 1


def test_a_grouped_gemm_reads_the_touched_experts() -> None:
    """At small batches, the time is that of reading the weights of the touched experts."""
    made = make_deployment("B200", "deepseek-v3", "bf16", 8)
    routing = route(Experts(256, 8, 2048), 1, 1)
    took = float(grouped_gemm_s(made, made.weights, routing, 512, 7168))
    read = 8 * 512 * 7168 * 2 / (8e12 * made.gpu.architecture.memory_share)
    assert took == pytest.approx(read + made.gpu.architecture.launch_s, rel=0.05)


def test_a_step_grows_with_the_experts_it_touches() -> None:
    """Four sequences cost more than one, because they use other experts, unlike in a dense model."""
    steps = {name: make_deployment("B200", name, "bf16") for name in ("qwen3-30b-a3b", "llama-3.1-8b")}
    ratios = {
        name: predict_step(made, decoding=4, context=512).gemm / predict_step(made, decoding=1, context=512).gemm
        for name, made in steps.items()
    }
    assert ratios["qwen3-30b-a3b"] > 1.6
    assert ratios["llama-3.1-8b"] < 1.1


def test_the_limit_is_below_the_prediction() -> None:
    """No predicted step is faster than the data sheet allows, for every model and parallelism."""
    for name in PUBLISHED:
        for tensor, data, expert in ((8, 1, 1), (8, 1, 8), (1, 8, 8), (2, 4, 4)):
            made = make_deployment("B200", name, "fp8", tensor)
            made = replace(made, attention_data=data, expert_parallel=expert)
            for batch, context in ((1, 128), (64, 4096)):
                step = float(predict_step(made, decoding=batch, context=context).total)
                assert step >= max(map(float, lower_bounds_s(made, 0, 0, batch, context).values())), name


def test_latent_attention_is_not_split() -> None:
    """Each GPU of a tensor-parallel group holds the whole latent cache; attention data parallelism divides it."""
    split = make_deployment("H200", "deepseek-r1", "fp8", 8)
    alone = replace(split, tensor=1, attention_data=8)
    assert split.kv_token_bytes == 8 * 61 * 576 * split.kv_bytes
    assert alone.kv_token_bytes == 61 * 576 * split.kv_bytes
    assert alone.gpus == split.gpus == 8


def test_windows_and_states_do_not_grow_with_the_context() -> None:
    """A layer with a window reads at most the window, and linear attention reads a constant state."""
    made = make_deployment("H100", "gpt-oss-120b", "mxfp4", 2)
    short, long = (StepSequences(0.0, 0.0, 0.0, 8.0, float(context)) for context in (4096, 65536))
    assert attention_bytes(made, "window", short) == attention_bytes(made, "window", long)
    assert attention_bytes(made, "full", long) == 16 * attention_bytes(made, "full", short)
    qwen = make_deployment("H200", "qwen3.5-397b-a17b", "fp8", 8)
    assert attention_kernel_s(qwen, "linear", short)[1] == attention_kernel_s(qwen, "linear", long)[1]


def test_formats_of_experts_alone() -> None:
    """mxfp4 quantises the experts of gpt-oss; attention stays in 16 bits. 120b fits one H100 of 80 GB."""
    made = make_deployment("H100", "gpt-oss-120b", "mxfp4")
    assert made.weight_bytes / 1e9 == pytest.approx(65, rel=0.02)
    assert made.kv_tokens(0.9) > 50_000
    assert number_format("fp8_block").name == "fp8-block"


def test_a_refusal_says_how_many_gpus_would_do() -> None:
    """671 GB do not fit eight H100."""
    with pytest.raises(HardwareError, match=r"does not fit 8 x H100 SXM in fp8: its weights of 67\d GB need 16 GPUs"):
        make_deployment("H100", "deepseek-r1", "fp8", 8).kv_tokens(0.9)


def test_parallel_experts_must_divide_the_gpus() -> None:
    """Errors name the options."""
    made = make_deployment("H200", "deepseek-r1", "fp8", 8)
    with pytest.raises(HardwareError, match="--ep 3: choose a number that divides the 8 GPUs"):
        replace(made, expert_parallel=3)
    with pytest.raises(HardwareError, match=r"Llama-3\.1-8B has no experts"):
        replace(make_deployment("H100", "llama-3.1-8b"), expert_parallel=2)


def test_limits_of_a_mixture() -> None:
    """The table lists attention, experts and the output head of both phases."""
    result = compute_limits(make_deployment("H200", "deepseek-r1", "fp8", 8), Load(512, 128, 64))
    names = [row.gemm for row in result.gemms if row.phase == "decode"]
    assert names[0] == "latent down"
    assert names[-1] == "output head"
    assert any(name.startswith("experts down x ") for name in names)
    assert result.limit.tpot_s < result.expected.tpot_s
    assert len(layer_gemms(make_deployment("B200", "gpt-oss-20b", "mxfp4"), 64)) == 4


def test_training_a_mixture_is_refused() -> None:
    """Training is modelled for dense models."""
    with pytest.raises(HardwareError, match="training is modelled for dense models only"):
        TrainingSetup(gpu=gpu("H100"), model=model("mixtral-8x7b"), batch=8)


def test_a_dense_model_with_windows() -> None:
    """Windows alone make decode over long contexts faster."""
    shape: ModelShape = model("mistral-7b")
    windows = replace(shape, window=1024, window_layers=shape.layers)
    made = make_deployment("H100", "mistral-7b")
    assert isinstance(made, Deployment)
    slow, fast = (
        predict_step(replace(made, model=one), decoding=64, context=16384).attention for one in (shape, windows)
    )
    assert fast < slow / 4
