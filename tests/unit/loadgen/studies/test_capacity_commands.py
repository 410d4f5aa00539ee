"""The command lines of a configuration run, and start the server that was simulated."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.plan import Plan
from loadgen.studies import capacity_commands
from loadgen.studies.capacity import CapacityOption, option_of
from loadgen.studies.capacity_commands import CommandContext, commands_of, server_notes
from loadgen.studies.configurations import Configuration, SearchSpace
from tests.support.command import in_process

CONTEXT = CommandContext(
    Plan(server="vllm", n=1, output_tokens="16"), "llama-3.1-8b", 10.0, 512, 16, SearchSpace(["H100 SXM"])
)
WORKERS = {"prefill_workers": 1, "decode_workers": 1, "gpus": 2}


def option(configuration: Configuration, **fields: object) -> CapacityOption:
    """Return an option with two replicas."""
    return option_of(configuration, **({"gpus": 2 * configuration.gpus} | fields))


def context_of(chunked_prefill: str = "", step_tokens: int | None = None) -> CommandContext:
    """Return the context of a search with these settings of the prefill."""
    space = replace(CONTEXT.space, chunked_prefill=chunked_prefill, step_tokens=step_tokens)
    return replace(CONTEXT, space=space)


def server_words(configuration: Configuration, context: CommandContext = CONTEXT) -> list[str]:
    """Return the words of the command that starts the server of a configuration."""
    return shlex.split(commands_of(option(configuration), context, 30.0)["server"])


def value(words: list[str], name: str) -> str:
    """Return the word that follows the option `name`."""
    return words[words.index(name) + 1]


@pytest.mark.parametrize("chunked_prefill", ["", "mixed", "off"])
@pytest.mark.parametrize(
    "each",
    [
        option(Configuration("H100 SXM")),
        option(Configuration("H100 SXM", "fp8", "sglang", tensor=2, draft_tokens=3)),
        option(Configuration("H100 SXM", pipeline=2)),
        option(Configuration("H100 SXM", engine="tgi")),
        option(Configuration("H100 SXM", engine="trtllm", pipeline=2)),
        option(Configuration("H100 SXM", disaggregated=True), **WORKERS),
        option(Configuration("H100 SXM", engine="sglang", disaggregated=True), **WORKERS),
    ],
    ids=lambda each: f"{each.engine} {each.layout}",
)
def test_the_commands_of_loadgen_run(
    each: CapacityOption, chunked_prefill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every printed command of loadgen has exit code 0."""
    monkeypatch.setattr(capacity_commands, "SIMULATED_REQUESTS", 20)
    context = context_of(chunked_prefill, 4096 if chunked_prefill else None)
    commands = commands_of(each, context, 30.0)
    for name in ("limits", "simulate"):
        if name in commands:
            more = ("--json",) if name == "limits" else ("--no-report",)
            code, _, err = in_process(tmp_path, *shlex.split(commands[name])[1:], *more)
            assert (code, err) == (0, ""), commands[name]


def test_simulate_gets_every_setting_of_the_load(tmp_path: Path) -> None:
    """A plan with a seed, cancelled requests and a bounded number in flight is simulated with them."""
    plan = Plan(server="vllm", n=1, seed=7, cancel="5% after 2s", max_in_flight=64, ignore_eos=False, timeout_s=30)
    words = shlex.split(commands_of(option(Configuration("L4")), replace(CONTEXT, plan=plan), 30.0)["simulate"])
    assert value(words, "--seed") == "7"
    assert value(words, "--cancel") == plan.cancel
    assert value(words, "--max-in-flight") == "64"
    assert value(words, "--timeout") == "30s"
    assert "--no-ignore-eos" in words
    code, _, err = in_process(tmp_path, *words[1:], "--no-report", "--n", "20")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("engine", "chunked_prefill", "words"),
    [
        ("vllm", "mixed", ["--max-num-batched-tokens", "4096", "--max-num-seqs", "1024"]),
        (
            "vllm",
            "off",
            shlex.split(
                "--no-enable-chunked-prefill --max-num-batched-tokens 4096 --max-num-seqs 1024 --max-model-len 4096"
            ),
        ),
        ("sglang", "mixed", ["--enable-mixed-chunk", "--chunked-prefill-size", "4096"]),
        ("sglang", "separate", ["--chunked-prefill-size", "4096"]),
        ("sglang", "off", ["--chunked-prefill-size", "-1"]),
        ("tgi", "", ["--max-batch-prefill-tokens", "4096"]),
        ("trtllm", "off", ["--max_num_tokens", "4096"]),
        (
            "trtllm",
            "mixed",
            ["--max_num_tokens", "4096", "--extra_llm_api_options", "<(printf", "enable_chunked_prefill: true)"],
        ),
    ],
)
def test_the_server_has_the_simulated_steps(engine: str, chunked_prefill: str, words: list[str]) -> None:
    """Chunked prefill and tokens per step are options of the server's command."""
    found = server_words(Configuration("H100 SXM", engine=engine), context_of(chunked_prefill, 4096))
    assert found[-len(words) :] == words


def test_limits_that_depend_on_the_gpu_are_written_out() -> None:
    """By default, vLLM computes 2,048 tokens per step on L40S. It refuses fewer tokens than sequences per step."""
    words = server_words(Configuration("L40S"))
    assert (value(words, "--max-num-batched-tokens"), value(words, "--max-num-seqs")) == ("8192", "1024")
    words = server_words(Configuration("L40S"), context_of("", 512))
    assert (value(words, "--max-num-batched-tokens"), value(words, "--max-num-seqs")) == ("512", "512")
    assert value(server_words(Configuration("L40S", engine="sglang")), "--chunked-prefill-size") == "8192"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ["--kv-cache-dtype", "fp8"]),
        ("sglang", ["--kv-cache-dtype", "fp8_e4m3"]),
        ("tgi", ["--kv-cache-dtype", "fp8_e4m3fn"]),
        ("trtllm", ["--extra_llm_api_options", "<(printf", "kv_cache_config: {dtype: fp8})"]),
    ],
)
def test_a_cache_that_was_simulated_in_fp8_is_an_option(engine: str, words: list[str]) -> None:
    """On B200 with fp8 weights, the model assumes a KV cache in fp8. Engines need an option for it."""
    command = server_words(Configuration("B200 SXM", "fp8", engine))
    index = command.index(words[0])
    assert command[index : index + len(words)] == words
    assert words[0] not in server_words(Configuration("B200 SXM", "bf16", engine))


def test_tgi_takes_as_many_requests_as_the_simulated_one() -> None:
    """By default, TGI refuses more than 128 requests at a time, and its steps depend on the GPU."""
    words = server_words(Configuration("H100 SXM", engine="tgi"))
    assert value(words, "--max-concurrent-requests") == "4096"
    assert value(words, "--max-batch-prefill-tokens") == "4096"


def test_tensorrt_llm_computes_prompts_without_the_overlap_scheduler() -> None:
    """Workers for prompts do not support it. Workers that decode keep the default."""
    option = option_of(
        Configuration("H100 SXM", engine="trtllm", disaggregated=True), gpus=2, prefill_workers=1, decode_workers=1
    )
    commands = commands_of(option, context_of(), 30.0)
    assert (
        "cache_transceiver_config: {backend: DEFAULT}\\ndisable_overlap_scheduler: true" in commands["prefill worker"]
    )
    assert "cache_transceiver_config: {backend: DEFAULT}" in commands["decode worker"]
    assert "overlap" not in commands["decode worker"]


def test_sglang_drafts_a_chain_of_tokens() -> None:
    """SGLang needs the number of steps, one branch per step, and one token more to verify."""
    words = server_words(Configuration("H100 SXM", engine="sglang", draft_tokens=3))
    assert value(words, "--speculative-num-steps") == "3"
    assert value(words, "--speculative-eagle-topk") == "1"
    assert value(words, "--speculative-num-draft-tokens") == "4"


@pytest.mark.parametrize(
    ("configuration", "chunked_prefill", "notes"),
    [
        (Configuration("L4"), "mixed", ["of llama-3.1-8b in bf16."]),
        (Configuration("L4", "w4a16"), "", ["of llama-3.1-8b in w4a16."]),
        (Configuration("L4", "fp8"), "", ["in a 16-bit format, which the server converts to fp8."]),
        (Configuration("L4", "fp8", "trtllm"), "", ["of llama-3.1-8b in fp8."]),
        (
            Configuration("L4"),
            "separate",
            ["bf16.", "lacks --chunked-prefill separate: vLLM cannot be started this way."],
        ),
        (
            Configuration("L4"),
            "off",
            ["bf16.", "so --max-model-len limits requests to 4,096 tokens."],
        ),
        (
            Configuration("L4", engine="tgi", draft_tokens=3),
            "",
            ["bf16.", "TGI drafts with the Medusa heads of the checkpoint, or else from repeated words."],
        ),
        (
            Configuration("L4", engine="tgi"),
            "off",
            ["bf16.", "lacks --chunked-prefill off: TGI cannot be started this way."],
        ),
        (
            Configuration("L4", engine="sglang", draft_tokens=3),
            "off",
            [
                "bf16.",
                "DRAFT_MODEL stands for an EAGLE-3 draft model of this model.",
                "lacks --step-tokens 4096: SGLang cannot be started this way.",
            ],
        ),
    ],
)
def test_what_the_server_command_lacks_is_named(
    configuration: Configuration, chunked_prefill: str, notes: list[str]
) -> None:
    """The checkpoint with its format, the draft model, and settings that the server does not have."""
    found = server_notes(option(configuration), context_of(chunked_prefill, 4096))
    assert [text.endswith(end) for text, end in zip(found, notes, strict=True)] == [True] * len(notes), found
    assert "CHECKPOINT" in server_words(configuration)
