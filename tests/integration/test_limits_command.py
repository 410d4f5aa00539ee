"""`loadgen limits` as a person runs it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, loadgen

FIGURES = {"ttft_s", "tpot_s", "prefill_s", "decode_step_s", "output_tokens_per_s", "output_tokens_per_s_per_gpu"}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def limits(*options: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return loadgen(ROOT, "limits", *options)


def found(*options: str) -> dict[str, Any]:
    """What it prints as JSON."""
    ended = limits("--json", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def test_limit_and_expected_have_the_same_figures() -> None:
    """With the KV cache and what binds; nothing is expected to be faster than the limit."""
    answer = found("--gpu", "H100", "--model", "llama-2-70b", "--tp", "8")
    for name in ("limit", "expected"):
        assert answer[name].keys() >= FIGURES | {"kv_tokens", "bound"}
    assert answer["limit"]["bound"] == "memory"
    assert answer["expected"]["tpot_s"] > answer["limit"]["tpot_s"] > 0
    rates = answer["expected"]["output_tokens_per_s"], answer["expected"]["output_tokens_per_s_per_gpu"]
    assert rates[0] == pytest.approx(8 * rates[1])
    assert {each["phase"] for each in answer["gemms"]} == {"prefill", "decode"}
    assert answer["curve"]["in_flight"][0] == 1


def test_text_is_for_people() -> None:
    """Tables of both, of each GEMM and of each number in flight, and what a step is spent on."""
    ended = limits("--gpu", "RTX4090", "--model", "llama-3.1-8b", "--format", "int4", "--framework", "nim")
    assert ended.returncode == 0, ended.stderr
    for words in (
        "Llama-3.1-8B in int4 on 1 x RTX 4090",
        "expected",
        "bound by",
        "gate and up",
        "in flight",
        "KV cache",
    ):
        assert words in ended.stdout


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        (
            ["--network", "NVLink 5"],
            ["--network NVLink 5 has no effect: nothing is sent between the GPUs of a machine."],
        ),
        (
            ["--tp", "2", "--network", "NVLink 5+InfiniBand XDR"],
            ["--network InfiniBand XDR has no effect: nothing is sent between machines."],
        ),
        (["--pp", "2", "--gpus-per-node", "1", "--network", "InfiniBand XDR"], []),
        (["--prefill-workers", "1", "--network", "InfiniBand XDR"], []),
        (["--no-p2p"], ["--no-p2p has no effect: nothing is sent between the GPUs of a machine."]),
        (["--no-p2p", "--tp", "2"], []),
        (["--training", "--model", "llama-2-7b", "--zero", "1"], ["--zero has no effect with --dp 1."]),
        (["--training", "--model", "llama-2-7b", "--zero", "1", "--offload"], []),
        (["--training", "--model", "llama-2-7b", "--interleave", "2"], ["--interleave has no effect with --pp 1."]),
        (
            ["--training", "--model", "llama-2-7b", "--sequence-parallel", "--network", "NVLink 5"],
            [
                "--network NVLink 5 has no effect: nothing is sent between the GPUs of a machine.",
                "--sequence-parallel has no effect with --tp 1.",
            ],
        ),
        (["--training", "--model", "llama-2-7b", "--sequence-parallel", "--tp", "2"], []),
    ],
)
def test_options_without_effect_are_named(options: list[str], notes: list[str]) -> None:
    """An option that needs more GPUs has a note in the text and in the JSON."""
    assert json.loads(limits(*options, "--json").stdout)["notes"] == notes
    text = " ".join(limits(*options).stdout.split())
    assert all(note in text for note in notes)
    assert ("has no effect" in text) == bool(notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "H10"], "unknown GPU 'H10' (did you mean H100 SXM"),
        (["--model", "llama-3.1-7b"], "unknown model 'llama-3.1-7b' (did you mean Llama-3.1-70B"),
        (["--format", "fp6"], "unknown number format 'fp6' (did you mean fp"),
        (["--framework", "vlm"], "unknown framework 'vlm' (did you mean vLLM?)"),
        (["--architecture", "stairs"], "unknown architecture 'stairs': choose one of standard, parallel"),
        (["--set", "bandwidth=8TB/s"], "cannot set 'bandwidth' (did you mean link_bandwidth"),
        (["--set", "memory_bandwidth=8"], "8 B/s is more than 1,000 times away from the 3.35 TB/s of H100 SXM"),
        (["--set", "sms=1e6"], "1e+06 is more than 1,000 times away from the 132 of H100 SXM"),
        (["--set", "compute=2"], "2 FLOP/s is more than"),
        (["--batch", "8"], "--batch has no effect without --training"),
        (["--set", "memory=lots"], "memory=lots: write a positive number with its unit"),
        (
            ["--model", "llama-3-70b"],
            "Llama-3-70B does not fit 1 x H100 SXM in bf16: its weights of 141 GB need 2 GPUs or more; choose",
        ),
        (["--model", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--tp", "3"], "--tp 3 does not divide the 32 attention heads"),
        (["--cache-hit-rate", "2"], "--cache-hit-rate 2 is not a share from 0 to 1"),
        (["--framework", "gpt-fast", "--chunked-prefill", "off"], "is modelled for vllm, sglang, trtllm and nim"),
        (["--batch-wait", "20"], "--batch-wait has no effect on vLLM: choose the framework trtllm or nim"),
        (["--framework", "nim", "--receive-interval", "30"], "no effect on NIM: choose the framework sglang"),
        (["--prefill-workers", "1", "--chunked-prefill", "off"], "Leave out one of the two options"),
        (["--prefill-workers", "1", "--seconds", "20"], "--seconds has no effect with --prefill-workers"),
        (["--framework", "kernels", "--seconds", "20"], "--seconds is modelled for vllm, sglang, trtllm and nim"),
        (["--pp", "2", "--framework", "trtllm", "--batch-wait", "9"], "not for TensorRT-LLM with --pp 2"),
        (["--pp", "2", "--framework", "sglang", "--receive-interval", "9"], "not for SGLang with --pp 2"),
        (["--training", "--page", "page.html"], "--page has no effect with --training"),
        (["--training", "--input", "64"], "--input has no effect with --training"),
        (["--training", "--framework", "sglang"], "--framework has no effect with --training"),
        (["--training", "--no-p2p"], "--no-p2p has no effect with --training"),
        (["--prefill-workers", "1", "--rounds", "3"], "--rounds has no effect with --prefill-workers"),
        (["--framework", "kernels", "--spread", "0.1"], "--spread is modelled for vllm, sglang, trtllm and nim"),
        (["--pp", "2", "--statistic", "median"], "--statistic is modelled for vllm, sglang, trtllm and nim"),
        (["--training", "--gpus-per-node", "4"], "--gpus-per-node has no effect with --training"),
        (["--training", "--step-tokens", "512"], "--step-tokens has no effect with --training"),
        (["--training", "--cache-hit-rate", "0.5"], "--cache-hit-rate has no effect with --training"),
        (["--tp", "8", "--gpus-per-node", "4"], "the 8 GPUs that share a layer must be in one machine"),
        (["--acceptance", "0.5"], "--acceptance 0.5 needs the number of drafted tokens"),
        (["--page", "nowhere/page.html"], "cannot write nowhere/page.html"),
    ],
)
def test_mistakes_are_sentences(options: list[str], words: str) -> None:
    """Exit code 2, and what to do instead."""
    ended = limits(*options)
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_cached_prompts_and_whole_prompts_change_the_expected_times() -> None:
    """The load line states the cached share. Steps with fewer tokens, and separate steps, change the replay."""
    load = ("--input", "4096", "--in-flight", "16")
    plain, cached = found(*load), found(*load, "--cache-hit-rate", "0.5")
    assert (plain["cache_hit_rate"], cached["cache_hit_rate"]) == (0.0, 0.5)
    assert cached["expected"]["ttft_s"] < plain["expected"]["ttft_s"]
    assert "4,096 (50% cached) + 128 tokens" in limits(*load, "--cache-hit-rate", "0.5").stdout
    assert found(*load, "--step-tokens", "1024")["expected"]["ttft_s"] != plain["expected"]["ttft_s"]
    assert found(*load, "--chunked-prefill", "separate")["expected"] != plain["expected"]


def test_a_change_says_what_it_buys() -> None:
    """Twice the bandwidth halves the memory limit, and less than halves what is expected."""
    one, two = found(), found("--set", "memory_bandwidth=6.7TB/s")
    assert two["limit"]["decode_step_s"] == pytest.approx(one["limit"]["decode_step_s"] / 2)
    assert one["expected"]["tpot_s"] / 2 < two["expected"]["tpot_s"] < one["expected"]["tpot_s"]
    assert found("--set", "memory=160GB")["limit"]["kv_tokens"] > 2 * one["limit"]["kv_tokens"]


def test_a_config_of_hugging_face_is_a_model(tmp_path: Path) -> None:
    """By its file or its folder: the shape of Llama-3.1-8B gives its figures. Incomplete experts are refused."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG), "utf-8")
    ours = found("--model", "llama-3.1-8b")
    assert found("--model", str(file))["expected"] == found("--model", str(tmp_path))["expected"] == ours["expected"]
    file.write_text(json.dumps(CONFIG | {"num_local_experts": 8}), "utf-8")
    assert "a model with experts needs experts_per_token" in limits("--model", str(file)).stderr


def test_a_users_own_gpu(tmp_path: Path) -> None:
    """A TOML file with what the tables have."""
    file = tmp_path / "mine.toml"
    file.write_text('[gpus."Mine"]\nbf16_TFLOPs = 500\nmemory_GB = 200\nmemory_GBps = 6000\npcie_GBps = 128\n', "utf-8")
    answer = found("--gpu", "mine", "--hardware", str(file), "--tp", "2")
    assert (answer["gpu"], answer["gpus"]) == ("Mine", 2)


@pytest.mark.parametrize(
    ("framework", "options"),
    [("trtllm", ["--batch-wait", "20"]), ("nim", ["--max-running", "4"]), ("sglang", ["--receive-interval", "30"])],
)
def test_settings_of_an_engine_that_make_requests_wait(framework: str, options: list[str]) -> None:
    """The TTFT grows with each of them."""
    base = ["--framework", framework, "--output", "128", "--in-flight", "8", "--spread", "0.1"]
    free, waiting = (found(*base, *more)["expected"]["ttft_s"] for more in ([], options))
    assert waiting > 1.3 * free


def test_a_short_closed_loop_ends_before_its_waits_have_grown() -> None:
    """Half of the clients wait for free KV cache. In their first round, no client waits for two responses."""
    base = ["--framework", "nim", "--input", "7000", "--output", "1000", "--in-flight", "120"]
    long, short = (found(*base, *more)["expected"]["ttft_s"] for more in ([], ["--seconds", "20"]))
    assert 0 < short < 0.7 * long


def test_ladder_hides_all_reduces() -> None:
    """Without P2P it helps more than with it."""
    base = ["--model", "llama-3-70b", "--tp", "8", "--framework", "gpt-fast"]
    base += ["--input", "1024", "--output", "512", "--in-flight", "1"]
    gains = [
        found(*base, *link, "--architecture", "ladder")["expected"]["output_tokens_per_s"]
        / found(*base, *link)["expected"]["output_tokens_per_s"]
        for link in ([], ["--no-p2p"])
    ]
    assert gains == [pytest.approx(1.308, abs=0.03), pytest.approx(1.599, abs=0.08)]


def test_the_bound_of_an_all_reduce_is_explained() -> None:
    """The limit next to `network` is that of the GEMM, which is shorter than the all-reduce."""
    words = ("--gpu", "H100", "--model", "llama-2-70b")
    assert "the all-reduce after the GEMM takes longer" in limits(*words, "--tp", "8").stdout
    assert "all-reduce" not in limits(*words, "--tp", "1", "--format", "int4").stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "H100", "--model", "llama-2-70b", "--tp", "8"],
        ["--gpu", "B200", "--model", "deepseek-r1", "--tp", "8", "--format", "fp8"],
        ["--gpu", "B200", "--model", "kimi-k2.5", "--format", "nvfp4", "--dp-attention", "8", "--ep", "8"],
        ["--training", "--gpu", "A100", "--model", "gpt-3-175b", "--tp", "8", "--pp", "8"],
    ],
)
def test_the_text_fits_80_columns(words: list[str]) -> None:
    """Also with the long names and shapes of a mixture of experts."""
    assert max(map(len, limits(*words).stdout.splitlines())) <= 80


def test_training_is_answered_too() -> None:
    """GPT-3 175B with full recomputation: 18.13 s were published (arXiv 2205.05198, table 5)."""
    base = ["--training", "--gpu", "A100", "--model", "gpt-3-175b", "--tp", "8", "--pp", "8", "--interleave", "3"]
    answer = found(*base, "--recomputation", "full")
    assert answer["iteration_s"] == pytest.approx(18.13, rel=0.1)
    assert answer["gpus"] == 64
    assert answer["memory_bytes"]["fits"] is True
    ended = limits(*base)
    said = " ".join(ended.stdout.split())
    assert "The training job does not fit into 90% of the GPU memory: recompute activations" in said
    assert "all-reduces in layers" in ended.stdout
    assert "memory per GPU" in ended.stdout


def test_an_answer_takes_less_than_half_a_second() -> None:
    """Of CPU time, so that what else runs here does not count; the best of three."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found("--gpu", "B200", "--model", "llama-3.1-70b", "--tp", "8", "--format", "fp8")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 0.5


def test_it_needs_nothing_beyond_numpy() -> None:
    """Neither SciPy nor pandas, nor what the measuring path needs, is imported."""
    code = (
        "import sys; from loadgen.servers.hardware.roofline import *; from loadgen.servers.hardware.training import *\n"
        "compute_limits(make_deployment('H100', 'llama-3.1-8b'), Load(512, 128, 64))\n"
        "print(sorted({'scipy', 'pandas', 'uvloop', 'aiohttp', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
