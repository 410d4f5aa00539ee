"""Which combinations the engines can run, and the command lines of a configuration."""

from __future__ import annotations

import shlex

import pytest

from loadgen.plan import Plan
from loadgen.servers.hardware import model
from loadgen.studies.capacity import CapacityOption, configuration_of, option_of
from loadgen.studies.capacity_commands import CommandContext, commands_of
from loadgen.studies.configurations import Configuration, SearchSpace

DENSE, MIXTURE = model("llama-3.1-8b"), model("deepseek-v3")


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (Configuration("H100 SXM", tensor=3), "heads"),
        (Configuration("H100 SXM", pipeline=64), "more stages than layers"),
        (Configuration("H100 SXM", tensor=16), "more GPUs per layer than a machine has"),
        (Configuration("H100 SXM", expert_parallel=2, tensor=2), "no experts"),
        (Configuration("H100 SXM", engine="tgi", pipeline=2), "no pipelines"),
        (Configuration("H100 SXM", engine="tgi", disaggregated=True), "no separate workers"),
        (Configuration("H100 SXM", engine="sglang", pipeline=2, tensor=8, disaggregated=True), ""),
    ],
)
def test_what_a_dense_model_allows(configuration: Configuration, said: str) -> None:
    """Each combination that an engine cannot run has a reason."""
    assert said in reason_of(configuration, DENSE) if said else not reason_of(configuration, DENSE)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (Configuration("B200 SXM", tensor=8, expert_parallel=3), "--ep does not divide the experts"),
        (Configuration("B200 SXM", tensor=8, expert_parallel=4), "no such expert parallelism"),
        (Configuration("B200 SXM", tensor=8, expert_parallel=8), ""),
        (Configuration("B200 SXM", engine="sglang", tensor=8, expert_parallel=4), ""),
        (Configuration("B200 SXM", engine="tgi", attention_data=8), "no such expert parallelism"),
        (Configuration("B200 SXM", engine="trtllm", tensor=2, attention_data=4), "no such attention parallelism"),
        (Configuration("B200 SXM", engine="trtllm", attention_data=8, expert_parallel=8), ""),
    ],
)
def test_what_a_mixture_allows(configuration: Configuration, said: str) -> None:
    """vLLM has as many expert groups as GPUs or one. TensorRT-LLM has attention groups of one GPU."""
    assert said in reason_of(configuration, MIXTURE) if said else not reason_of(configuration, MIXTURE)


def reason_of(configuration: Configuration, shape: object) -> str:
    """Return why a configuration is not possible; empty if it is."""
    space = SearchSpace(
        [configuration.gpu],
        engines=[configuration.engine],
        tensors=[configuration.tensor],
        pipelines=[configuration.pipeline],
        expert_groups=[configuration.expert_parallel],
        attention_groups=[configuration.attention_data],
        disaggregation=[configuration.disaggregated],
    )
    ((found, reason),) = space.configurations(shape)  # type: ignore[arg-type]
    assert found == configuration
    return reason


def test_a_space_is_the_product_of_its_values() -> None:
    """Every combination comes once."""
    space = SearchSpace(["H100 SXM", "L4"], ["bf16", "fp8"], ["vllm", "tgi"], [1, 2], [1, 2], drafts=[0, 3])
    found = [configuration for configuration, _ in space.configurations(DENSE)]
    assert len(found) == len(set(found)) == 2**6


def test_a_layout_names_what_is_not_one() -> None:
    """Tensor parallelism is always named."""
    assert Configuration("L4").layout == "TP1"
    full = Configuration("L4", tensor=2, pipeline=2, expert_parallel=4, attention_data=2, draft_tokens=3)
    assert (full.layout, full.gpus, full.extras) == ("TP2 PP2 EP4 DP2 draft3", 8, 4)


CONTEXT = CommandContext(Plan(server="vllm", n=1), "some-model", 10.0, 512, 128, SearchSpace(["L4"], acceptance=0.7))


def option(configuration: Configuration, **fields: object) -> CapacityOption:
    """Return an option with two replicas."""
    return option_of(configuration, **({"gpus": 2 * configuration.gpus} | fields))


def test_options_keep_their_configuration() -> None:
    """There and back."""
    full = Configuration("L4", "fp8", "sglang", 2, 2, 4, 2, 3, disaggregated=True)
    assert configuration_of(option_of(full)) == full
    assert configuration_of(option_of(Configuration("L4"))) == Configuration("L4")


@pytest.mark.parametrize(
    ("configuration", "command"),
    [
        (
            Configuration("H100 SXM", "fp8", "vllm", 4, 2, 4, 1, 0),
            "vllm serve CHECKPOINT --tensor-parallel-size 4 --pipeline-parallel-size 2 --enable-expert-parallel "
            "--quantization fp8 --max-num-batched-tokens 8192 --max-num-seqs 1024",
        ),
        (
            Configuration("H100 SXM", "bf16", "vllm", 1, 1, 8, 8, 3),
            "vllm serve CHECKPOINT --tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel "
            "--max-num-batched-tokens 8192 --max-num-seqs 1024 "
            '--speculative-config \'{"method":"eagle3","model":"DRAFT_MODEL","num_speculative_tokens":3}\'',
        ),
        (
            Configuration("H100 SXM", "bf16", "sglang", 2, 1, 4, 4, 0),
            "python -m sglang.launch_server --model-path CHECKPOINT --tp-size 8 --ep-size 4 "
            "--attn-dp-size 4 --chunked-prefill-size 8192",
        ),
        (
            Configuration("H100 SXM", "int4", "tgi", 2),
            "text-generation-launcher --model-id CHECKPOINT --num-shard 2 --max-concurrent-requests 4096 "
            "--max-batch-prefill-tokens 4096",
        ),
        (
            Configuration("H100 SXM", "bf16", "trtllm", 4, 2, 2),
            "trtllm-serve CHECKPOINT --tp_size 4 --pp_size 2 --ep_size 2",
        ),
        (
            Configuration("H100 SXM", "bf16", "trtllm", 1, 1, 8, 8),
            "trtllm-serve CHECKPOINT --tp_size 8 --ep_size 8 --extra_llm_api_options "
            "<(printf 'enable_attention_dp: true')",
        ),
    ],
)
def test_the_server_is_started_with_its_own_options(configuration: Configuration, command: str) -> None:
    """Each engine has other names for the same sizes."""
    assert commands_of(option(configuration), CONTEXT, 30.0)["server"] == command


def test_separate_workers_have_a_command_each() -> None:
    """SGLang names the kind of worker. vLLM starts both kinds alike, so one command stands for both."""
    workers = {"prefill_workers": 2, "decode_workers": 3, "gpus": 5}
    sglang = commands_of(option(Configuration("L4", engine="sglang", disaggregated=True), **workers), CONTEXT, 30.0)
    assert sglang["prefill worker"].endswith("--disaggregation-mode prefill")
    assert sglang["decode worker"].endswith("--disaggregation-mode decode")
    vllm = commands_of(option(Configuration("L4", disaggregated=True), **workers), CONTEXT, 30.0)
    assert "kv_both" in vllm["prefill and decode workers"]
    words = shlex.split(vllm["limits"])
    assert words[words.index("--prefill-workers") + 1] == "2"
    assert words[words.index("--dp") + 1] == "3"
    words = shlex.split(vllm["simulate"])
    assert words[words.index("--decode-workers") + 1] == "3"
    assert words[words.index("--arrivals") + 1] == "poisson:10"


def test_a_simulated_replica_gets_its_share() -> None:
    """Two replicas: half of the rate. TensorRT-LLM has no simulated server, so there is no such command."""
    words = shlex.split(commands_of(option(Configuration("L4")), CONTEXT, 30.0)["simulate"])
    assert words[words.index("--arrivals") + 1] == "poisson:5"
    assert "--acceptance" not in words
    assert "simulate" not in commands_of(option(Configuration("L4", engine="trtllm")), CONTEXT, 30.0)
