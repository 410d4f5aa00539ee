"""The command `limits`: compute the limits and the expected performance of hardware. No server is contacted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from loadgen.cli.hardware_output import usage_errors
from loadgen.cli.options import SettingsCommand
from loadgen.cli.unused_options import refuse_unused, refuse_with_prefill_workers
from loadgen.errors import OutputError
from loadgen.plan_fields import option_name

if TYPE_CHECKING:
    from loadgen.servers.hardware.inference import Deployment
    from loadgen.servers.hardware.training import TrainingSetup

LOAD = "Load"
TRAINING = "Training"
HYPOTHETICAL = "Hypothetical GPU"
"""Headings of options in the help."""
TRAINING_ONLY = (
    *("batch", "sequence", "micro_batch", "interleave", "recomputation", "sequence_parallel", "flash", "zero"),
    *("offload", "lora", "qlora"),
)
"""Names of the fields under the heading Training, except `training`."""
TRAINING_TOO = (
    *("gpu", "model", "format", "tp", "pp", "dp"),
    *("set", "technology", "memory", "network", "hardware"),
    *("json", "training"),
)
"""Names of the fields of other headings that training has too."""
REPLAYED_ONLY = ("chunked_prefill", "batch_wait", "receive_interval", "seconds", "spread", "rounds", "statistic")
"""Names of the fields that only matter if the requests of the closed loop are simulated one by one."""
SWITCHES = {"p2p": "--no-p2p"}
"""Options that switch a field off, by field."""
NO_P2P = "NVLink 4 without P2P"
PCIE_NO_P2P = "PCIe without P2P"


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """The options of `loadgen limits`. Each field has the name of its option."""

    gpu: Annotated[str, Option(help="GPU, such as A100, A800, H100, H200, B200, L40S, RTX4090, MI300X.")] = "H100"
    model: Annotated[str, Option(help="Model, such as llama-3.1-8b, qwen3-32b, or a Hugging Face config.json.")] = (
        "llama-3.1-8b"
    )
    tp: Annotated[int, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 1
    pp: Annotated[int, Option(min=1, help="Pipeline stages (pipeline parallel). Each has --tp GPUs.")] = 1
    dp: Annotated[
        int,
        Option(
            min=1,
            help="Replicas (data parallel). Each serves a share of the requests, or trains on a share of the batch.",
        ),
    ] = 1
    ep: Annotated[
        int, Option(min=1, help="Groups of GPUs that each hold whole experts (expert parallel). 1 splits every expert.")
    ] = 1
    dp_attention: Annotated[
        int,
        Option(min=1, help="Groups of --tp GPUs that compute attention for different requests and share the experts."),
    ] = 1
    gpus_per_node: Annotated[
        int,
        Option(
            min=1,
            help="GPUs per machine. Pipeline stages in different machines use InfiniBand. The GPUs that share a layer "
            "always use the link within a machine.",
        ),
    ] = 8
    prefill_workers: Annotated[
        int,
        Option(
            min=0,
            help="Separate workers that compute the prompts (disaggregated serving). Each has the GPUs of one replica; "
            "--dp counts the decode workers.",
        ),
    ] = 0
    draft_tokens: Annotated[
        int, Option(min=0, help="Tokens to draft per step (speculative decoding, multi-token prediction).")
    ] = 0
    acceptance: Annotated[
        str | None,
        Option(
            metavar="P",
            help="Probability that a drafted token is accepted (default 0.55), or a run that measured it.",
        ),
    ] = None
    step_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum tokens per scheduler step. vLLM: max_num_batched_tokens; SGLang: chunked_prefill_size.",
        ),
    ] = None
    chunked_prefill: Annotated[
        Literal["mixed", "separate", "off"] | None,
        Option(
            metavar="M",
            help="Chunked prefill: mixed, separate or off. Chunks of prompts share steps with decoding, have separate "
            "steps, or prompts are computed whole. Only for the frameworks vllm, sglang, trtllm and nim.",
        ),
    ] = None
    format: Annotated[
        str, Option(help="Format of weights: bf16, fp8, fp8-block, int8, int4, w4a16, mxfp4 or nvfp4.")
    ] = "bf16"
    kv_format: Annotated[str | None, Option(help="Format of the KV cache. Default: that of the framework.")] = None
    framework: Annotated[
        str,
        Option(
            help="Framework for `expected`: vllm, sglang, trtllm, nim, trtllm-0.9, gpt-fast, or kernels (GPU kernels "
            "without a framework)."
        ),
    ] = "vllm"
    set: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Change a GPU property: memory_bandwidth=8TB/s. Repeatable."),
    ] = None
    technology: Annotated[
        str | None,
        Option(
            rich_help_panel=HYPOTHETICAL,
            help="Technology node, such as 3nm, with the same area and power. 12nm to 1nm.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        Option(
            rich_help_panel=HYPOTHETICAL,
            help="Memory generation, such as HBM4, with the same number of stacks, or another one: '8 x HBM4'.",
        ),
    ] = None
    network: Annotated[
        str | None,
        Option(
            rich_help_panel=HYPOTHETICAL,
            help="Links: 'NVLink 5' within a machine, 'InfiniBand NDR' between machines, or both joined with +.",
        ),
    ] = None
    p2p: Annotated[bool, Option(help="GPUs can access each other's memory directly.")] = True
    hardware: Annotated[Path | None, Option(help="TOML file with additional GPUs and models.")] = None
    page: Annotated[
        Path | None, Option(help="Also write an HTML page with the roofline, and latency against throughput.")
    ] = None
    json: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False
    input: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Tokens per prompt.")] = 512
    output: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Tokens per response.")] = 128
    in_flight: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Concurrent requests.")] = 64
    cache_hit_rate: Annotated[
        str | None,
        Option(
            metavar="P",
            rich_help_panel=LOAD,
            help="Share of cached prompt tokens. A number such as 0.3, or the folder of a run that measured it.",
        ),
    ] = None
    spread: Annotated[
        float,
        Option(
            min=0,
            max=1,
            rich_help_panel=LOAD,
            help="Maximum relative deviation of --input and --output, such as 0.1. Lengths are uniformly distributed.",
        ),
    ] = 0.0
    rounds: Annotated[
        int,
        Option(min=1, rich_help_panel=LOAD, help="Requests that each client sends. All clients start together."),
    ] = 10
    statistic: Annotated[
        Literal["mean", "median"],
        Option(rich_help_panel=LOAD, help="Summary of the TTFT and TPOT of all requests."),
    ] = "mean"
    seconds: Annotated[
        float | None,
        Option(
            min=1,
            rich_help_panel=LOAD,
            help="Seconds after which the clients send no further request. Default: no limit.",
        ),
    ] = None
    max_running: Annotated[
        int | None,
        Option(min=1, rich_help_panel=LOAD, help="Sequences per step of the engine. Default: that of the framework."),
    ] = None
    batch_wait: Annotated[
        int,
        Option(
            min=0,
            rich_help_panel=LOAD,
            help="Steps for which prompts wait for further prompts (TensorRT-LLM: batch_wait_timeout_iters).",
        ),
    ] = 0
    receive_interval: Annotated[
        int,
        Option(
            min=1,
            rich_help_panel=LOAD,
            help="Decode steps between two looks for new requests (SGLang: --scheduler-recv-interval).",
        ),
    ] = 1
    memory_fraction: Annotated[
        float,
        Option(
            min=0.1,
            max=1,
            rich_help_panel=LOAD,
            help="Fraction of GPU memory for weights and KV cache. TensorRT-LLM: of the memory without weights.",
        ),
    ] = 0.9
    architecture: Annotated[
        str,
        Option(
            rich_help_panel=LOAD,
            help="Transformer block: standard, or one that hides all-reduces (parallel, ladder, no-communication).",
        ),
    ] = "standard"
    training: Annotated[
        bool,
        Option("--training", rich_help_panel=TRAINING, help="Compute one training iteration instead of serving."),
    ] = False
    batch: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Sequences per iteration.")] = 64
    sequence: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Tokens per sequence.")] = 2048
    micro_batch: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Sequences per micro-batch.")] = 1
    interleave: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Layer chunks per pipeline stage.")] = 1
    recomputation: Annotated[
        Literal["none", "selective", "full"],
        Option(rich_help_panel=TRAINING, help="Activations to recompute in the backward pass."),
    ] = "none"
    sequence_parallel: Annotated[
        bool,
        Option("--sequence-parallel", rich_help_panel=TRAINING, help="Split normalisation layers over tokens."),
    ] = False
    flash: Annotated[
        bool,
        Option(
            "--flash",
            rich_help_panel=TRAINING,
            help="Use fused attention, which does not store attention scores.",
        ),
    ] = False
    zero: Annotated[int, Option(min=0, max=3, rich_help_panel=TRAINING, help="ZeRO stage.")] = 0
    offload: Annotated[
        bool, Option("--offload", rich_help_panel=TRAINING, help="Keep optimiser states in host memory.")
    ] = False
    lora: Annotated[
        int, Option(min=0, rich_help_panel=TRAINING, help="Rank of LoRA adapters; 0 trains all weights.")
    ] = 0
    qlora: Annotated[
        bool, Option("--qlora", rich_help_panel=TRAINING, help="Train LoRA adapters on a 4-bit base model.")
    ] = False


def _limits(settings: dict[str, Any]) -> None:
    """Compute limits and expected speed of a model on GPUs.

    `limit` is the physical bound: every FLOP, byte and message at the rate in the data sheet. `expected` adds the
    measured overheads of the framework. docs/reference/hardware-validation.md compares `expected` with published
    measurements. Exit codes: 0 computed, 2 usage error.
    """
    options = LimitsOptions(**settings)
    with usage_errors():
        result = _training(options) if options.training else _serving(options)
    if options.json:
        from msgspec import json

        print(json.format(json.encode(result)).decode())


def _parameters() -> Iterator[Parameter]:
    return iter(signature(LimitsOptions, eval_str=True).parameters.values())


def _no_shared_options() -> None:
    """Do nothing. The function has no parameters, because `limits` shares no options with other commands."""


limits = SettingsCommand(_limits, _parameters, _no_shared_options)


def _serving(options: LimitsOptions) -> Any:
    """Compute and print the limits for serving requests, and write the page if requested. Return the limits."""
    from loadgen.servers.hardware.disaggregation import disaggregated_times, with_prefill_workers
    from loadgen.servers.hardware.roofline import compute_limits
    from loadgen.servers.hardware.throughput_model import EngineSettings, Load
    from loadgen.servers.simulated.closed_loop import expected_times

    _check_serving(options)
    if options.prefill_workers:
        _check_prefill_workers(options)
    deployment = _deployment(options)
    load = Load(
        options.input,
        options.output,
        max(1, options.in_flight // options.dp),
        spread=options.spread,
        rounds=options.rounds,
        statistic=options.statistic,
        seconds=math.inf if options.seconds is None else options.seconds,
        settings=EngineSettings(options.max_running, options.batch_wait, options.receive_interval),
    )
    expect = expected_times
    if options.prefill_workers:
        expect = partial(disaggregated_times, prefill_workers=options.prefill_workers / options.dp)
    result = compute_limits(deployment, load, options.memory_fraction, replicas=options.dp, expect=expect)
    if options.prefill_workers:
        result = with_prefill_workers(result, deployment, options.prefill_workers)
    result = replace(result, notes=_serving_notes(options, deployment))
    if options.page:
        from loadgen.analysis.hardware import build_document
        from loadgen.analysis.report.page import render

        try:
            options.page.write_text(render(build_document(result, deployment)), "utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write {options.page}: {error.strerror}", "Name a file in an existing folder."
            ) from None
    if not options.json:
        from loadgen.analysis.hardware import format_limits

        print(format_limits(result))
        if options.page:
            print(f"\nPage: {options.page}")
    return result


def _set_options(options: LimitsOptions, names: Iterable[str]) -> dict[str, bool]:
    """Return a dict that states which options the user has changed from their default values.

    `names` contains the names of fields of LimitsOptions. For each of these fields, the dict maps the name of the
    option, such as `--batch-wait` for the field `batch_wait`, to True if the user has changed it, otherwise to False.
    """
    defaults = {field.name: field.default for field in fields(LimitsOptions)}
    return {SWITCHES.get(name, option_name(name)): getattr(options, name) != defaults[name] for name in names}


def _check_prefill_workers(options: LimitsOptions) -> None:
    """Raise PlanError if an option is set that has no effect on separate prefill workers."""
    refuse_with_prefill_workers(_set_options(options, REPLAYED_ONLY))


def _check_serving(options: LimitsOptions) -> None:
    """Raise PlanError if the user has set an option that applies only to training, but not --training."""
    for option, is_set in _set_options(options, TRAINING_ONLY).items():
        refuse_unused({option: is_set}, "without --training", f"Leave {option} out, or add --training.")


def _check_training(options: LimitsOptions) -> None:
    """Raise PlanError if an option is set that has no effect on a training iteration."""
    names = [field.name for field in fields(LimitsOptions)]
    unused = [name for name in names if name not in (*TRAINING_TOO, *TRAINING_ONLY)]
    refuse_unused(_set_options(options, unused), "with --training")


def _serving_notes(options: LimitsOptions, deployment: Deployment) -> list[str]:
    """Return a sentence for each option that has no effect with this number of GPUs."""
    from loadgen.servers.hardware.technology import network_notes

    notes = network_notes(
        _changes(options),
        in_machine=deployment.sends_in_machine,
        between_machines=deployment.far_hops > 0 or options.prefill_workers > 0,
    )
    if not options.p2p and not deployment.sends_in_machine:
        notes.append("--no-p2p has no effect: nothing is sent between the GPUs of a machine")
    return [f"{note}." for note in notes]


def _training_notes(options: LimitsOptions, setup: TrainingSetup) -> list[str]:
    """Return a sentence for each option that has no effect with this number of GPUs."""
    from loadgen.servers.hardware.technology import network_notes
    from loadgen.servers.hardware.training import sends_between_machines, sends_in_machine

    notes = network_notes(
        _changes(options), in_machine=sends_in_machine(setup), between_machines=sends_between_machines(setup)
    )
    unused = {
        "--sequence-parallel has no effect with --tp 1": options.sequence_parallel and options.tp == 1,
        "--interleave has no effect with --pp 1": options.interleave > 1 and options.pp == 1,
        "--zero has no effect with --dp 1": options.zero > 0 and options.dp == 1 and not options.offload,
    }
    return [f"{note}." for note in (*notes, *(note for note, applies in unused.items() if applies))]


def _changes(options: LimitsOptions) -> list[str]:
    """Return the requested changes of the GPU's properties, in the syntax of `with_changes`."""
    from loadgen.servers.hardware.technology import scaling_changes

    return [*scaling_changes(options.technology, options.memory, options.network), *(options.set or ())]


def _deployment(options: LimitsOptions) -> Deployment:
    """Return the deployment that the options describe. Raises HardwareError for unknown names and invalid values."""
    from loadgen.cli.measured_shares import parse_acceptance, parse_cache_hit_rate
    from loadgen.servers.hardware import gpu_links
    from loadgen.servers.hardware.inference import ServingOptions
    from loadgen.servers.hardware.roofline import make_deployment

    deployment = make_deployment(
        options.gpu,
        options.model,
        options.format,
        options.tp,
        options.pp,
        options.framework,
        file=options.hardware,
        changes=_changes(options),
    )
    if options.step_tokens:
        limited = replace(deployment.framework, chunk_tokens=options.step_tokens)
        deployment = replace(deployment, framework=limited)
    serving = ServingOptions(
        expert_parallel=options.ep,
        attention_data=options.dp_attention,
        draft_tokens=options.draft_tokens,
        acceptance=parse_acceptance(options.acceptance, options.draft_tokens),
        pipeline=options.pp,
        node_gpus=options.gpus_per_node,
        cache_hit_rate=parse_cache_hit_rate(options.cache_hit_rate),
        chunked_prefill=options.chunked_prefill or "",
    )
    deployment = serving.apply(replace(deployment, architecture=options.architecture))
    if options.kv_format:
        deployment = deployment.with_kv_format(options.kv_format)
    if not options.p2p:
        link = deployment.gpu.link
        slow_link = gpu_links()[NO_P2P if link.name.startswith("NVLink") else PCIE_NO_P2P]
        slow_gpu = replace(deployment.gpu, link=replace(slow_link, bytes_per_s=link.bytes_per_s))
        deployment = replace(deployment, gpu=slow_gpu)
    return deployment


def _training(options: LimitsOptions) -> dict[str, Any]:
    """Compute and print the time and memory of one training iteration. Return both as a dict."""
    from loadgen.servers.hardware.training import fits_memory, mfu, predict_iteration, predict_memory
    from loadgen.servers.hardware.validation import training_accuracy

    _check_training(options)
    setup = _setup(options)
    times = predict_iteration(setup)
    used = predict_memory(setup)
    tokens = setup.batch * setup.sequence
    result = {
        "gpu": setup.gpu.name,
        "model": setup.model.name,
        "gpus": setup.gpus,
        "iteration_s": times.total_s,
        "tokens_per_s": tokens / times.total_s,
        "tokens_per_s_per_gpu": tokens / times.total_s / setup.gpus,
        "mfu": mfu(setup, times.total_s),
        "accuracy": asdict(training_accuracy(setup)),
        "gpu_changes": [asdict(change) for change in setup.gpu.changes],
        "notes": _training_notes(options, setup),
        "seconds": asdict(times),
        "memory_bytes": asdict(used) | {"total": used.total, "fits": fits_memory(setup)},
    }
    if not options.json:
        from loadgen.analysis.hardware import format_training

        print(format_training(result))
    return result


def _setup(options: LimitsOptions) -> TrainingSetup:
    from loadgen.servers.hardware import gpu, model, with_changes
    from loadgen.servers.hardware.training import NF4_BYTES, WEIGHT_BYTES, TrainingSetup

    return TrainingSetup(
        gpu=with_changes(gpu(options.gpu, options.hardware), _changes(options)),
        model=model(options.model, options.hardware),
        batch=options.batch,
        sequence=options.sequence,
        micro_batch=options.micro_batch,
        tensor=options.tp,
        pipeline=options.pp,
        data=options.dp,
        interleave=options.interleave,
        number=options.format,
        recomputation=options.recomputation,
        sequence_parallel=options.sequence_parallel,
        flash=options.flash,
        zero=options.zero,
        offload=options.offload,
        adapter_rank=options.lora or (64 if options.qlora else 0),
        base_bytes=NF4_BYTES if options.qlora else WEIGHT_BYTES,
    )
