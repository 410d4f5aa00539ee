"""`loadgen hardware compare` and `loadgen hardware bounds` as a person runs them."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, loadgen


def hardware(*words: str) -> subprocess.CompletedProcess[str]:
    return loadgen(ROOT, "hardware", *words)


def found(*words: str) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    ended = hardware(*words, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


MEASURED = ("--in-flight", "64", "--input", "922", "--output", "922")
"""A load that was measured on H100 and B200."""


def test_factors_multiply_to_the_speed_up() -> None:
    """In the JSON, as in the text, each step has its factors and the accuracy of both ends."""
    answer = found("compare", "A100", "H100", "B200", "--model", "llama-3.1-70b", "--tp", "8", *MEASURED)
    assert [step["after"]["gpu"] for step in answer["steps"]] == ["H100 SXM", "B200 SXM"]
    for step in answer["steps"]:
        gains = [factor["gain"] for factor in step["factors"]]
        assert math.prod(gains) == pytest.approx(step["speed_up"])
        assert math.prod(factor["share"] for factor in step["factors"]) == pytest.approx(step["speed_up"])
    assert answer["steps"][1]["accuracy"].endswith("rows")
    assert answer["steps"][0]["before"]["accuracy"] == "TPOT not validated"


def test_text_fits_a_terminal_and_says_how_it_was_computed(tmp_path: Path) -> None:
    """At most 80 columns, the factors in their order, and where the time goes. The page is written too."""
    page = tmp_path / "page.html"
    ended = hardware("compare", "A100", "B200", "--for", "training", "--model", "gpt-3-175b", "--page", str(page))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80 or max(map(len, lines)) == len(f"Page: {page}")
    starts = ["compute rate, fp16", "number format, fp8", "number format, nvfp4", "memory bandwidth", "memory capacity"]
    order = [next(index for index, line in enumerate(lines) if line.startswith(name)) for name in starts]
    assert order == sorted(order)
    assert "The peak FLOP/s alone grew 28.8x" in ended.stdout
    assert "not validated" in ended.stdout
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_the_gpus_may_be_separated_by_commas() -> None:
    """As in the option `--gpus` of `hardware bounds`."""
    assert hardware("compare", "A100,H100").stdout == hardware("compare", "A100", "H100").stdout


def test_the_accuracy_of_a_speed_up_is_that_of_equal_servers() -> None:
    """The compared measurements are ratios of TPOT with the same TP, load and one replica."""
    words = ("compare", "H100", "B200", "--model", "llama-3.1-70b", "--input", "922", "--output", "922")
    text = " ".join(hardware(*words, "--tp", "8", "--in-flight", "64").stdout.split())
    assert "the speed-up: TPOT ratio at the same TP and load " in text
    for options in (("--tp", "4,8", "--in-flight", "64"), ("--tp", "8", "--in-flight", "32,64")):
        (step,) = found(*words, *options)["steps"]
        assert step["accuracy"] == "not validated"
    (step,) = found(*words, "--tp", "8", "--in-flight", "512")["steps"]
    assert step["accuracy"] == "not validated"
    assert "not validated for this load (compared only with at most 64 requests" in step["after"]["accuracy"]


def test_kernels_of_training_and_of_experts_are_not_validated() -> None:
    """The measured kernels are those of serving dense models. Each format is validated for itself, in JSON too."""

    def said(*words: str) -> str:
        return " ".join(hardware("bounds", "--gpus", "H100", *words).stdout.split())

    assert "Accuracy on H100: GEMM in fp16" not in said()
    assert "Accuracy on H100: GEMM in bf16 4% (p50)" in said()
    assert "prefill attention in fp8 not validated" in said("--format", "nvfp4", "--gpus", "B200")
    in_json = found("bounds", "--gpus", "H100")["gpus"]["H100"]["accuracy"]
    assert in_json["GEMM in bf16"]["rows"] > 100
    assert "Accuracy: the kernels of training are not validated." in said("--for", "training")
    experts = said("--model", "gpt-oss-120b", "--tp", "8")
    assert "Accuracy: the kernels of mixtures of experts are not validated." in experts


def test_one_value_for_all_or_one_per_gpu() -> None:
    """Lists with commas give each GPU its own format, engine, number of GPUs and load."""
    words = ("--format", "bf16,fp8", "--tp", "1,2", "--framework", "nim,trtllm", "--in-flight", "8,16")
    (step,) = found("compare", "A100", "H100", *words)["steps"]
    assert (step["before"]["format"], step["after"]["format"]) == ("bf16", "fp8")
    assert (step["before"]["gpus"], step["after"]["gpus"]) == (1, 2)
    assert step["after"]["use"] | {"KV cache": ""} == {
        "requests in flight": "16",
        "TP": "2",
        "replicas": "1",
        "engine": "TensorRT-LLM",
        "link": "NVLink 4",
        "KV cache": "",
    }


def test_bounds_are_those_of_each_kernel(tmp_path: Path) -> None:
    """Prefill and decode on every GPU, in the order in which they were named."""
    page = tmp_path / "page.html"
    answer = found("bounds", "--gpus", "A100,H100", "--model", "llama-2-13b", "--input", "200", "--page", str(page))
    assert list(answer["gpus"]) == ["A100", "H100"]
    kernels = {
        (name, item["phase"], item["kernel"]): item for name, card in answer["gpus"].items() for item in card["kernels"]
    }
    assert kernels["A100", "prefill", "QKV"]["bound"] == "compute"
    assert kernels["H100", "prefill", "QKV"]["bound"] == "memory"
    assert kernels["H100", "decode", "attention"]["compute_from"] is None
    assert page.exists()


@pytest.mark.parametrize(
    "words", [("--for", "training"), ("--model", "deepseek-r1", "--tp", "8", "--format", "native")]
)
def test_bounds_fit_a_terminal(words: tuple[str, ...]) -> None:
    """Five GPUs side by side in at most 80 columns. More GPUs get further tables."""
    ended = hardware("bounds", *words)
    assert ended.returncode == 0, ended.stderr
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "not validated" in ended.stdout
    six = hardware("bounds", "--gpus", "V100,A100,H100,H200,B200,L40S")
    assert six.stdout.count("DECODE") == 2


def test_what_does_not_fit_is_said() -> None:
    """The kernels of a model that is too large are computed, with a remark."""
    text = hardware("bounds", "--gpus", "A100,B200", "--model", "llama-3.1-70b", "--format", "bf16,nvfp4").stdout
    assert "The model does not fit the memory of 1 x A100" in " ".join(text.split())
    assert "fit the memory" not in hardware("bounds", "--gpus", "A100").stdout
    twice = hardware("bounds", "--gpus", "H100,H100", "--format", "fp16,fp8").stdout
    assert "H100 fp16  H100 fp8" in twice


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "A100"], "compare needs 2 to 8 GPUs, not 1"),
        (["compare", "A100", "H100", "--network", "NVLink 5"], "--network NVLink 5 has no effect: nothing is sent"),
        (
            ["compare", "A100", "H100", "--tp", "2", "--network", "InfiniBand NDR"],
            "--network InfiniBand NDR has no effect: nothing is sent between machines; leave it out",
        ),
        (
            [
                *("compare", "A100", "H100", "--for", "training", "--model", "llama-2-7b"),
                "--gpus",
                "8",
                "--network",
                "HDR",
            ],
            "--network InfiniBand HDR has no effect",
        ),
        (["compare", "A100", "H100", "--gpus", "64"], "--gpus applies to training only"),
        (["compare", "A100", "H100", "--for", "training", "--in-flight", "8"], "--in-flight applies to inference only"),
        (["bounds", "--for", "training", "--context", "8"], "--context applies to inference only"),
        (["compare", "A100", "H10"], "unknown GPU 'H10' (did you mean H100 SXM"),
        (["compare", "A100", "B200", "--tp", "1,2,3"], "--tp 1,2,3: 3 values for 2 GPUs"),
        (["compare", "A100", "B200", "--tp", "x"], "--tp x: 'x' is not a number from 1 to 999,999"),
        (["compare", "A100", "B200", "--model", "llama-3.1-70b"], "does not fit 1 x A100-80GB SXM in fp16"),
        (["compare", "A100", "B200", "--for", "training", "--tp", "8,4"], "--tp 8,4: all GPUs train with one value"),
        (["compare", "A100", "B200", "--for", "training", "--gpus", "1"], "does not fit 1 x A100"),
        (
            ["compare", "A100", "B200", "--for", "training", "--recomputation", "some"],
            "--recomputation some: 'some' is unknown; choose one of auto, none, selective, full",
        ),
        (["bounds", "--gpus", ""], "name 1 to 8 GPUs"),
        (["bounds", "--gpus", "A100,A100"], "A100 fp16 is named twice"),
        (["bounds", "--format", "fp6"], "unknown number format 'fp6'"),
        (["bounds", "--for", "training", "--model", "deepseek-r1"], "dense models only"),
        (["bounds", "--page", "nowhere/page.html"], "nowhere/page.html"),
    ],
)
def test_mistakes_say_what_to_do(words: list[str], message: str) -> None:
    """Exit code 2 and a sentence, never a traceback."""
    ended = hardware(*words)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr
