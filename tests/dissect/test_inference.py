"""`loadgen dissect inference` on this machine's CPU: whose each operator is, and whether all of them add up."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from loadgen.dissect.inference_report import sum_ratios
from loadgen.dissect.models.llama import build_model
from loadgen.dissect.results import InferenceResult
from loadgen.servers.hardware import model

Dissect = Callable[..., dict[str, Any]]
Models = Callable[..., Path]


FEW = ("--repeats", 2, "--warmup", 1)


def operators(found: dict[str, Any], module: str, direction: str = "forward", case: int = 0) -> dict[str, Any]:
    """Those of one module, by what they are and their shape."""
    mine = [
        each for each in found["cases"][case]["operators"] if (each["module"], each["direction"]) == (module, direction)
    ]
    return {f"{each['operator']} {each['shape']}".strip(): each for each in mine}


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_llama_is_hugging_faces(models: Models, kv_heads: int) -> None:
    """With the same weights its logits are the same, whole, with flash attention, and token by token from the cache."""
    file = models(256, 512, 2, 100, kv_heads)
    torch.manual_seed(1)
    ours = build_model(model(str(file)))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_json_file(str(file)))
    theirs.config.rms_norm_eps = 1e-5
    for module in theirs.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(100, (2, 9))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), wanted, rtol=1e-4, atol=1e-5)
        flash = build_model(model(str(file)), flash=True)
        flash.load_state_dict(ours.state_dict())
        torch.testing.assert_close(flash(tokens), wanted, rtol=1e-4, atol=1e-5)
        caches = ours.caches(2, 9)
        one_by_one = [ours(tokens[:, :6], caches), *(ours(tokens[:, at : at + 1], caches) for at in (6, 7, 8))]
        torch.testing.assert_close(torch.cat(one_by_one, dim=1), wanted, rtol=1e-4, atol=1e-5)


def test_parts_add_up(dissect: Dissect, models: Models) -> None:
    """Operators to their layer, layers and the rest to the model, ours to torch.profiler's total, operators of the
    backward pass to that: within 5%, in one of three tries, for the machine may be busy."""
    file, tries = models(1024, 4096, 2, 4000), []
    for _ in range(3):
        told = dissect("inference", "--model", file, "--input", 384, "--threads", 1, "--repeats", 5, "--backward")
        found = msgspec.convert(told, InferenceResult)
        tries.append(sum_ratios(found.cases[0]))
        if all(abs(1 - value) <= 0.05 for value in tries[-1].values()):
            break
    else:
        pytest.fail(f"more than 5% off, three times: {tries}")
    assert len(tries[0]) == 4
    assert found.bounds.flops_per_s > found.bounds.bytes_per_s > 0


def test_each_operator_is_its_modules_forward_and_backward(dissect: Dissect, models: Models) -> None:
    """GEMMs with m, n and k; two for each in the backward pass; FLOPs and bytes are counted, twice for two layers."""
    found = dissect(
        "inference", "--model", models(256, 512, 2, 1000), "--input", 32, "--batch", "1,2", "--backward", *FEW
    )
    assert [each["batch"] for each in found["cases"]] == [1, 2]
    qkv = operators(found, "QKV")["GEMM 32 x 256 x 256"]
    assert (qkv["calls"], qkv["flops"]) == (6, 6 * 2 * 32 * 256 * 256)
    assert qkv["bytes"] == 6 * 4 * (2 * 32 * 256 + 256 * 256)
    assert len(qkv["seconds"]) == 2
    assert operators(found, "QKV", case=1)["GEMM 64 x 256 x 256"]["calls"] == 6
    assert operators(found, "gate")["GEMM 32 x 512 x 256"]["calls"] == 2
    assert operators(found, "down", "backward").keys() >= {"GEMM 256 x 512 x 32", "GEMM 32 x 512 x 256"}
    softmax = operators(found, "attention")["softmax 1 x 4 x 32 x 32"]
    assert (softmax["calls"], softmax["flops"]) == (2, 2 * 4 * 32 * 32)
    assert operators(found, "attention", "backward")["softmax 1 x 4 x 32 x 32"]["calls"] == 2
    assert operators(found, "LM head")["GEMM 32 x 1000 x 256"]["in_layers"] is False
    modules = {each["module"] for each in found["cases"][0]["operators"]}
    assert modules == {
        *("Embedding", "QKV", "RoPE", "attention", "output", "gate", "up", "down", "SiLU", "RMSNorm", "LM head"),
        *("residual", "loss"),
    }


def test_decode_takes_one_token_of_each_sequence(dissect: Dissect, models: Models) -> None:
    """Against a cache of 64 and itself; in bf16, with and without scores in memory."""
    file = models(256, 512, 2, 1000)
    options = ("--model", file, "--phase", "decode", "--batch", 3, "--input", 64, "--dtype", "bf16", *FEW)
    found = dissect("inference", *options)
    assert operators(found, "gate")["GEMM 3 x 512 x 256"]["calls"] == 2
    assert operators(found, "attention")["softmax 3 x 4 x 1 x 65"]["calls"] == 2
    assert found["cases"][0]["tokens"] == 3
    flash = operators(dissect("inference", *options, "--flash"), "attention")
    assert not any(each.startswith("softmax") for each in flash)
    assert any(each.startswith("attention kernel") and told["flops"] for each, told in flash.items())


def test_two_processes_share_each_layer(dissect: Dissect, models: Models) -> None:
    """Half of each matrix, two all-reduces per layer forward and two backward, and the logits gathered."""
    file = models(256, 512, 2, 1000)
    found = dissect("inference", "--model", file, "--input", 32, "--tp", 2, "--backward", *FEW)
    assert operators(found, "QKV")["GEMM 32 x 128 x 256"]["calls"] == 6
    assert operators(found, "down")["GEMM 32 x 256 x 256"]["calls"] == 2
    reduces = [each for each in found["cases"][0]["operators"] if each["module"] == "all-reduce" and each["in_layers"]]
    assert {each["direction"]: each["calls"] for each in reduces} == {"forward": 4, "backward": 4}
    assert {(each["bytes"], each["bound"]) for each in reduces} == {(4 * 32 * 256 * 4, "network")}
    assert operators(found, "all-gather")


def test_it_is_told_in_80_columns_and_on_a_page(
    command: Callable[..., subprocess.CompletedProcess[str]], models: Models, tmp_path: Path
) -> None:
    """Tables of modules and operators, what was measured and how; the page beside."""
    page = tmp_path / "page.html"
    ended = command(
        "inference", "--model", models(256, 512, 2, 1000), "--layers", 1, "--input", 32, "--page", page, *FEW
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert max(map(len, ended.stdout.splitlines()[:-1])) <= 80
    for words in ("1 of 2 layers", "GFLOP/s", "Sums of parts", "QKV", "32x512x256", f"Page: {page}"):
        assert words in ended.stdout
    assert 'id="chart-flame"' in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama-2-7c"], "unknown model 'llama-2-7c' (did you mean Llama-2-7B"),
        (["--model", "gpt-j-6b"], "GPT-J-6B is not a Llama"),
        (["--model", "llama-2-7b", "--layers", 33], "Llama-2-7B has 32 layers"),
        (["--model", "llama-2-7b", "--device", "cuda"], "torch sees no GPU here"),
        (["--model", "llama-2-7b", "--dtype", "fp8"], "unknown number format 'fp8'"),
        (["--model", "llama-2-7b", "--backward", "--phase", "decode"], "a decode step has no backward pass"),
        (["--model", "llama-2-7b", "--architecture", "stairs"], "unknown architecture 'stairs'"),
        (["--model", "llama-2-7b", "--tp", 3], "32 heads, which is not a multiple of 3"),
    ],
)
def test_mistakes_are_sentences(
    command: Callable[..., subprocess.CompletedProcess[str]], options: list[object], words: str
) -> None:
    """Exit code 2, and what to do instead; where several processes run too."""
    ended = command("inference", *options)
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr
