"""Compares the hardware model with published measurements: errors by source, GPU and tensor parallelism.

    python -m benchmarks.hardware_model              # errors and their limits, about fifteen seconds
    python -m benchmarks.hardware_model --rows gemm  # every row of one source as CSV

An error is |predicted - measured| / measured. A budget is the limit of the errors of one quantity.
`benchmarks.hardware_fit` fits the constants of the model.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.servers.hardware import framework, gpu, gpu_links, model, number_format
from loadgen.servers.hardware.inference import Deployment, ServingOptions, predict_step
from loadgen.servers.hardware.kernels import all_reduce_s, decode_attention_s, gemm_s, prefill_attention_s
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.hardware.throughput_model import EngineSettings, Load
from loadgen.servers.hardware.training import TrainingSetup, predict_iteration, predict_memory
from loadgen.servers.simulated.closed_loop import expected_times

DATA = [Path(__file__).parent / "data"]
"""Folders that are searched for files of rows, in this order. `--data` adds a folder at the front."""
Row = dict[str, str]
Rows = list[Row]
NIM_SECONDS = 600
"""Duration of a closed loop in NVIDIA's tables of NIM."""
AICONFIGURATOR_SGLANG_MEMORY = 0.86
"""Memory fraction of Qwen3-32B on SGLang. By default, that version leaves 13 to 14 GiB of each GPU to activations and
CUDA graphs (`mem_fraction_static` in server_args.py)."""
DRAFT_TOKENS = 3
"""Tokens that runs with multi-token prediction are assumed to draft."""
SPREAD = {"InferenceX": 1 / 9}
"""Maximum relative deviation of a length from the mean, by source. In other sources, all lengths are equal."""
WHOLE_GRAPH_LAUNCH_S = 850e-6
"""Time in s to launch the kernels of one layer in a step with prompts, on vLLM with the settings of InferenceX for B200
(see `with_protocol`). It was fitted to the TTFT of these closed loops. The TTFT of TP 2 alone gives 800 to 850 us, and
so does that of 4 and 8 requests in flight."""
INFERENCEX_PROMPTS = (921, 7372)
"""Mean tokens per prompt in the rows of mixtures of experts from InferenceX."""


@dataclass(frozen=True, slots=True)
class Point:
    """One published measurement and the model's prediction of it."""

    source: str
    quantity: str
    gpu: str
    tp: int
    case: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the model's errors for one quantity: median, p90, largest and mean error."""

    name: str
    points: Callable[[], list[Point]]
    median: float = np.inf
    p90: float = np.inf
    most: float = np.inf
    mean: float = np.inf

    def found(self) -> tuple[int, float, float, float, float]:
        """Return the number of points, and their median, p90, largest and mean error."""
        errors = np.array([each.error for each in self.points()])
        p50, p90 = np.quantile(errors, (0.5, 0.9))
        return len(errors), float(p50), float(p90), float(errors.max()), float(errors.mean())

    def kept(self) -> bool:
        return all(np.array(self.found()[1:]) <= (self.median, self.p90, self.most, self.mean))


@cache
def gemms() -> list[Point]:
    """Return all points of GEMMs, except those in nvfp4, which have no budget."""
    return [each for each in _gemms() if not each.case.startswith("nvfp4")]


@cache
def gemms_nvfp4() -> list[Point]:
    return [each for each in _gemms() if each.case.startswith("nvfp4")]


@cache
def _gemms() -> list[Point]:
    def times(card: str, stored: str, *shape: Any) -> Any:
        found = gpu(card)
        return 1e6 * gemm_s(found, found.effective_format(number_format(stored)), *shape)

    return _kernels("GEMM", "gemm", ("gpu", "format"), ("m", "n", "k"), times)


@cache
def decode_attention() -> list[Point]:
    def times(card: str, stored: str, batch: Any, context: Any, _: Any, kv_heads: Any) -> Any:
        size = number_format(stored).weight_bytes
        return 1e6 * decode_attention_s(gpu(card), batch, context, kv_heads, 128, size)

    columns = ("batch", "context", "heads", "kv_heads")
    return _kernels("decode attention", "decode_attention", ("gpu", "kv_format"), columns, times)


@cache
def prefill_attention() -> list[Point]:
    def times(card: str, batch: Any, tokens: Any, heads: Any) -> Any:
        return 1e6 * prefill_attention_s(gpu(card), batch, tokens, heads, 128)

    return _kernels("prefill attention", "prefill_attention", ("gpu",), ("batch", "tokens", "heads"), times)


@cache
def all_reduces() -> list[Point]:
    """Return points of all-reduces of 16 KiB to 256 MiB, with NCCL and with the kernels of vLLM and TensorRT-LLM."""

    def times(card: str, kernel: str, gpus: str, size: Any) -> Any:
        link = gpu(card).link_for(int(gpus))
        return 1e6 * all_reduce_s(link, int(gpus), size, "nccl" if kernel == "NCCL" else "custom")

    return _kernels("all-reduce", "all_reduce", ("gpu", "kernel", "gpus"), ("bytes",), times)


@cache
def static(quantity: str) -> list[Point]:
    """Return points of static batches with TensorRT-LLM 0.9. `quantity` is `prefill` or `TPOT`."""
    return _static("TensorRT-LLM 0.9", "static_trtllm09", "TensorRT-LLM 0.9", quantity)


@cache
def splitwise(quantity: str) -> list[Point]:
    """Return points of Llama-2-70B on the engines of 2023 (Splitwise). The model was not fitted to them."""
    return _static("Splitwise", "splitwise", "TensorRT-LLM 0.9", quantity)


@cache
def mi300x() -> list[Point]:
    """Return points of static batches with vLLM on eight MI300X. The model was not fitted to them."""
    points = []
    for row in read_rows("mi300x"):
        made = make_deployment(row["gpu"], row["model"], row["format"], int(row["tp"]), framework_name="vLLM")
        load = Load(int(row["input"]), int(row["output"]), int(row["batch"]))
        found = expected_times(replace(made, kv_bytes=2.0), load)
        seconds = float(found.prefill_s + (load.output_tokens - 1) * found.decode_step_s)
        points.append(_point("MI300X", "batch", row, float(row["seconds"]), seconds, f"batch {row['batch']}"))
    return points


@cache
def closed_loops(quantity: str, nvfp4: bool = False, only: str = "") -> list[Point]:
    """Return points of closed loops with up to 128 requests in flight. `quantity` is `TPOT`, `TTFT` or `tokens/s`.

    `only` is the name of a framework; by default, the points of all frameworks are returned.
    """
    rows = [
        row
        for row in read_rows("closed_loops")
        if (row["format"] == "nvfp4") == nvfp4 and only in ("", row["framework"])
    ]
    return closed_loop_points(rows, quantity)


def closed_loop_points(rows: Rows, quantity: str) -> list[Point]:
    """Return one point per row. The rows have the columns of closed_loops.csv. `quantity` is as in `closed_loops`.

    Published are only TTFT and TPOT. The measured tokens/s are derived from both.
    """
    points = []
    key = ("source", "framework", "gpu", "model", "format", "tp", "input", "output")
    for names, group in _grouped(rows, key):
        source, engine, _, shape, stored, _, prompt, output = names
        for row, times in zip(
            group, closed_loop_times(names, tuple(int(row["in_flight"]) for row in group)), strict=True
        ):
            case = f"{shape} {stored} {prompt}/{output}, {row['in_flight']} in flight"
            ttft_s, tpot_s = (float(row[column]) / 1000 for column in ("ttft_ms", "tpot_ms"))
            measured = {"TTFT": ttft_s, "TPOT": tpot_s}
            measured["tokens/s"] = int(row["in_flight"]) * int(output) / (ttft_s + (int(output) - 1) * tpot_s)
            points.append(_point(f"{source}, {engine}", quantity, row, measured[quantity], times[quantity], case))
    return points


@cache
def closed_loop_times(names: tuple[str, ...], clients: tuple[int, ...]) -> list[dict[str, float]]:
    """Return the predicted TTFT, TPOT and tokens per second for each number of clients. `names` is a key of rows."""
    source, engine, card, shape, stored, tp, prompt, output = names
    made = make_deployment(card, shape, stored, int(tp), framework_name=engine)
    result = []
    for in_flight in clients:
        deployment, load = with_protocol(source, made, Load(int(prompt), int(output), in_flight))
        times = expected_times(deployment, load, memory_fraction(source))
        columns = {"TTFT": times.ttft_s, "TPOT": times.tpot_s, "tokens/s": times.output_tokens_per_s}
        result.append({name: float(value) for name, value in columns.items()})
    return result


def memory_fraction(source: str) -> float:
    """Return the share of the GPU memory that weights and KV cache may use in the closed loops of a source.

    For InferenceX, it is the option `--gpu-memory-utilization` of the benchmark scripts (see `with_protocol`).
    """
    return AICONFIGURATOR_SGLANG_MEMORY if source == "aiconfigurator (32B)" else 0.9


def with_protocol(source: str, deployment: Deployment, load: Load) -> tuple[Deployment, Load]:
    """Return a deployment and a load with the settings of the engine and the protocol that a source used.

    - InferenceX (benchmarks/*.sh of github.com/SemiAnalysisAI/InferenceX): ten requests per client, lengths of 0.8 to 1
      times the nominal ones. TensorRT-LLM computes up to 16,384 tokens per step. On B200, vLLM compiles the model as a
      whole, without CUDA graphs for prompts (`splitting_ops: []` and `cudagraph_mode: FULL_DECODE_ONLY` in
      70b_fp8_b200_docker.sh and 70b_fp4_b200_docker.sh). On H100 and H200, it has its default settings.
    - Llama-3.1-8B on TensorRT-LLM 1.0.0rc3 and Qwen3-32B on SGLang: ten requests per client of equal lengths
      (`genai_perf_runner.py` of github.com/ai-dynamo/aiconfigurator). TensorRT-LLM computes up to `in flight + input +
      1,500` tokens per step (`trtllm.rule`). The settings allow as many sequences as clients, but the TTFT shows that
      one client of every round waits for a whole response.
    - NIM: the clients send requests for a time, not a number of requests. NVIDIA's instructions for NIM set the
      interval of genai-perf to 300 seconds. The waits for KV cache fit two of these.
    """
    load = replace(load, spread=SPREAD.get(source, 0.0))
    if source == "NIM":
        return deployment, replace(load, seconds=NIM_SECONDS)
    if (
        source == "InferenceX"
        and deployment.framework.name == "vLLM"
        and deployment.gpu.architecture.name == "Blackwell"
    ):
        framework = replace(deployment.framework, prompt_launch_s=WHOLE_GRAPH_LAUNCH_S)
        return replace(deployment, framework=framework), load
    if deployment.framework.name != "TensorRT-LLM":
        return deployment, load
    if source == "InferenceX":
        step_tokens = 16384
        steps = batch_wait_steps(deployment.framework.name, load.output_tokens, deployment.tensor)
        settings = EngineSettings(batch_wait_steps=steps)
    else:
        step_tokens = load.in_flight + load.prompt_tokens + 1500
        settings = EngineSettings(running_limit=max(1, load.in_flight - 1))
    framework = replace(deployment.framework, chunk_tokens=step_tokens)
    return replace(deployment, framework=framework), replace(load, settings=settings)


def batch_wait_steps(engine: str, output_tokens: int, tp: int) -> int:
    """Return the number of steps for which InferenceX lets a prompt wait for further prompts.

    InferenceX sets this option (`batch_wait_timeout_iters`) for Llama-3.1-70B on TensorRT-LLM, if there are 1,024
    output tokens and less than eight GPUs.
    """
    return 20 if engine == "TensorRT-LLM" and output_tokens == 922 and tp < 8 else 0


@cache
def mixtures(quantity: str, speculative: bool = False) -> list[Point]:
    """Return points of closed loops of mixtures of experts. `quantity` is `TPOT` or `TTFT`.

    With `speculative`, the points are those of runs with multi-token prediction. Their source does not state how many
    tokens were drafted and accepted: the points assume DRAFT_TOKENS and the default acceptance, which was fitted to
    them.
    """
    points = []
    key = ("framework", "gpu", "model", "format", "tp", "ep", "dp_attention", "input", "output")
    chosen = [row for row in read_rows("mixtures") if (row["speculative"] == "1") == speculative]
    for names, rows in _grouped(chosen, key):
        engine, _, shape, stored, _, experts, groups, prompt, output = names
        clients = tuple(int(row["in_flight"]) for row in rows)
        for row, times in zip(rows, mixture_times(names, clients, speculative), strict=True):
            parallel = f"EP {experts}, attention DP {groups}"
            case = f"{shape} {stored} {parallel} {prompt}/{output}, {row['in_flight']} in flight"
            measured = float(row[f"{quantity.lower()}_ms"]) / 1000
            source = f"{mixture_source(int(prompt))}, {engine}"
            points.append(_point(source, quantity, row, measured, times[quantity], case))
    return points


@cache
def mixture_times(names: tuple[str, ...], clients: tuple[int, ...], speculative: bool) -> list[dict[str, float]]:
    """Return the predicted TTFT and TPOT for each number of clients. `names` is a key of rows."""
    engine, card, shape, stored, tp, experts, groups, prompt, output = names
    made = make_deployment(card, shape, stored, int(tp), framework_name=engine)
    made = ServingOptions(int(experts), int(groups), DRAFT_TOKENS if speculative else 0).apply(made)
    result = []
    for in_flight in clients:
        times = expected_times(*with_mixture_protocol(made, Load(int(prompt), int(output), in_flight)))
        result.append({"TTFT": float(times.ttft_s), "TPOT": float(times.tpot_s)})
    return result


def mixture_source(prompt_tokens: int) -> str:
    """Return the source of a closed loop of a mixture of experts. It follows from the length of the prompts.

    All rows of InferenceX have prompts of 0.9 times 1,024 or 8,192 tokens on average.
    """
    return "InferenceX" if prompt_tokens in INFERENCEX_PROMPTS else "aiconfigurator (235B)"


def with_mixture_protocol(deployment: Deployment, load: Load) -> tuple[Deployment, Load]:
    """Return a deployment and a load of a mixture of experts, with the settings and the protocol that a source used.

    - InferenceX (benchmarks/*.sh of github.com/SemiAnalysisAI/InferenceX) uses the protocol of `with_protocol`. SGLang
      is started with a `--scheduler-recv-interval` of 10 decode steps, or of 30 from 16 requests in flight on. For
      DeepSeek in fp8 with 1,024 prompt and output tokens and 64 or more requests in flight, TensorRT-LLM lets prompts
      wait up to 40 steps for further prompts (`batch_wait_timeout_iters` in dsr1_fp8_b200_trt.sh).
    - Qwen3-235B on TensorRT-LLM 1.0.0rc3 was measured by the project that measured Llama-3.1-8B on this version. All
      lengths are equal, and a step has up to `in flight + input + 1,500` tokens.
    """
    engine = deployment.framework.name
    if mixture_source(load.prompt_tokens) != "InferenceX":
        step_tokens = load.in_flight + load.prompt_tokens + 1500
        return replace(deployment, framework=replace(deployment.framework, chunk_tokens=step_tokens)), load
    settings = EngineSettings()
    if engine == "SGLang":
        settings = EngineSettings(receive_steps=30 if load.in_flight >= 16 else 10)
    elif engine == "TensorRT-LLM" and deployment.model.latent and deployment.weights.name == "fp8":
        waits = (load.prompt_tokens, load.output_tokens) == (921, 921) and load.in_flight >= 64
        settings = EngineSettings(batch_wait_steps=40 if waits and not deployment.speculation else 0)
    return deployment, replace(load, spread=SPREAD["InferenceX"], settings=settings)


LLAMA_2 = {
    ("A100", "Llama-2-7B"): (2.19, 1.544, 1.28, 1.187),
    ("A100", "Llama-2-13B"): (3.884, 2.499, 1.894, 1.693),
    ("A100", "Llama-2-70B"): (None, 10.5, 6.403, None),
    ("H100", "Llama-2-7B"): (1.44, 1.143, 0.924, 0.828),
    ("H100", "Llama-2-13B"): (2.396, 1.717, 1.431, 1.201),
    ("H100", "Llama-2-70B"): (None, 6.267, 4.1226, None),
}
"""Seconds for 200 prompt and 200 output tokens at batch 1 and TP 1, 2, 4, 8. NVIDIA has removed the page with these
figures. The copy is from github.com/gkarfakis19/RAPID-LLM (317a2cb)."""
TWO_TERMS = {"A100": 0.054, "H100": 0.045}
"""Mean error of the simple model `weights / bandwidth + constant per layer`, fitted to all points of each GPU."""


@cache
def llama_2(card: str) -> list[Point]:
    """Return points of Llama-2 latencies on one type of GPU. The model was not fitted to them.

    The predictions use the constants of NIM, which is TensorRT-LLM of about the same time.
    """
    points = []
    for (name, shape), latencies in LLAMA_2.items():
        for tp, seconds in zip((1, 2, 4, 8), latencies, strict=True):
            if seconds and name == card:
                found = expected_times(
                    make_deployment(name, shape, "fp16", tp, framework_name="NIM"), Load(200, 200, 1)
                )
                took = float(found.prompt_prefill_s + 199 * found.decode_step_s)
                points.append(Point("Llama-2 200 + 200", "latency", name, tp, shape, seconds, took))
    return points


MEGATRON = (
    ("Megatron-22B", 8, 1, 4, 4, 1, (1.42, 1.10), (45.5625, 59.25, 9.5625)),
    ("GPT-3-175B", 8, 8, 64, 1, 3, (18.13, 13.75), (45.5625, 66.84375, 12.3515625)),
    ("MT-NLG-530B", 8, 35, 280, 1, 3, (49.05, 37.83), (31.640625, 114.0234375, 23.076171875)),
    ("Megatron-1T", 8, 64, 512, 1, 1, (94.42, 71.49), (32.958984375, 131.25, 26.5625)),
)
"""Measurements of arXiv 2205.05198. Each row has the model, TP, PP, batch, micro-batch and chunks, then two tuples:

- seconds of an iteration with full recomputation, and with selective recomputation and sequence parallelism (table 5).
- GiB of parameters and optimiser, of activations without these two techniques, and with both (figure 1).
"""


def _megatron() -> Iterator[tuple[TrainingSetup, tuple[float, float], tuple[float, float, float]]]:
    for name, tp, pp, batch, micro, chunks, seconds, sizes in MEGATRON:
        shape = {"tensor": tp, "pipeline": pp, "batch": batch, "micro_batch": micro, "interleave": chunks}
        yield TrainingSetup(gpu=gpu("A100"), model=model(name), **shape), seconds, sizes


@cache
def training_times() -> list[Point]:
    points = []
    for setup, (full, selective), _ in _megatron():
        other = replace(setup, recomputation="selective", sequence_parallel=True)
        for case, seconds in ((replace(setup, recomputation="full"), full), (other, selective)):
            name, took = f"{setup.model.name}, {case.recomputation}", predict_iteration(case).total_s
            points.append(Point("arXiv 2205.05198", "iteration", "A100", setup.tensor, name, seconds, took))
    return points


@cache
def training_memory() -> list[Point]:
    points = []
    for setup, _, sizes in _megatron():
        both = replace(setup, recomputation="selective", sequence_parallel=True)
        states = predict_memory(setup)
        found = (states.total - states.activations, states.activations, predict_memory(both).activations)
        for what, measured, size in zip(("states", "none", "selective + SP"), sizes, found, strict=True):
            case = f"{setup.model.name}, {what}"
            points.append(Point("arXiv 2205.05198", "GiB", "A100", setup.tensor, case, measured, size / 2**30))
    return points


@cache
def mt_nlg() -> list[Point]:
    """Return points of training MT-NLG 530B on A100-40GB with batch 1,920 (arXiv 2201.11990, section 2.4).

    The model was not fitted to them.
    """
    points = []
    for replicas, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        setup = TrainingSetup(
            gpu=gpu("A100 40GB"), model=model("MT-NLG-530B"), batch=1920, tensor=8, pipeline=35, data=replicas
        )
        took = predict_iteration(replace(setup, recomputation="full")).total_s
        case = f"MT-NLG-530B, {replicas} replicas"
        points.append(Point("arXiv 2201.11990", "iteration", "A100-40GB SXM", 8, case, seconds, took))
    return points


@cache
def ladder_speeds() -> list[Point]:
    """Return points of tokens per second of a 70B model on H100, with 1,024 prompt tokens and 512 output tokens.

    The cases compare the ladder architecture with other architectures (arXiv 2501.06589).
    """
    points = []
    for row in read_rows("ladder_70b"):
        made = make_deployment("H100", "Llama-3-70B", "bf16", int(row["tp"]), framework_name="gpt-fast")
        made = replace(made, architecture=row["architecture"].replace(" ", "-"))
        if row["p2p"] == "off":
            made = replace(made, gpu=replace(made.gpu, link=gpu_links()["NVLink 4 without P2P"]))
        batch = int(row["batch"])
        took = predict_step(made, batch, 1024).total + 511 * predict_step(made, decoding=batch, context=1280).total
        case = f"{row['architecture']}, batch {batch}, P2P {row['p2p']}"
        speed, source = float(row["tokens_per_s"]), "arXiv 2501.06589"
        points.append(Point(source, "tokens/s", "H100 SXM", int(row["tp"]), case, speed, float(512 * batch / took)))
    return points


def ladder_gains() -> list[Point]:
    """Return points of the speed-up of the ladder architecture over the standard architecture, at TP 8 and batch 1."""
    speeds = {(each.tp, each.case): each for each in ladder_speeds()}
    points = []
    for p2p in ("on", "off"):
        one, other = (speeds[8, f"{name}, batch 1, P2P {p2p}"] for name in ("ladder", "standard"))
        ratios = one.measured / other.measured, one.predicted / other.predicted
        points.append(Point("arXiv 2501.06589", "gain of ladder", "H100 SXM", 8, f"P2P {p2p}", *ratios))
    return points


def ladder_order() -> int:
    """Return the number of cases in which the model orders the architectures by speed differently from the measurement.

    A case is a combination of TP, batch size and P2P setting.
    """
    wrong = 0
    key = lambda each: (each.tp, each.case.partition(", ")[2])  # noqa: E731 - a key
    for _, group in groupby(sorted(ladder_speeds(), key=key), key):
        points = list(group)
        measured = sorted(points, key=lambda each: each.measured)
        wrong += [*sorted(points, key=lambda each: each.predicted)] != measured
    return wrong


BUDGETS = (
    Budget("GEMM, bf16 and fp8, m 1 to 16,384", gemms, median=0.15),
    Budget("decode attention", decode_attention, median=0.20),
    Budget("all-reduce, 16 KiB to 256 MiB", all_reduces, median=0.20),
    Budget("static batches: prefill", lambda: static("prefill"), median=0.12, p90=0.30),
    Budget("static batches: TPOT", lambda: static("TPOT"), median=0.12, p90=0.30),
    Budget("closed loops: TPOT", lambda: closed_loops("TPOT"), median=0.08, p90=0.20),
    Budget("closed loops: TTFT", lambda: closed_loops("TTFT"), median=0.12, p90=0.35),
    Budget("mixtures of experts: TPOT", lambda: mixtures("TPOT"), median=0.12, p90=0.30),
    Budget("mixtures of experts: TTFT", lambda: mixtures("TTFT"), median=0.33),
    Budget("Llama-2 200 + 200, A100", lambda: llama_2("A100"), mean=TWO_TERMS["A100"]),
    Budget("Llama-2 200 + 200, H100", lambda: llama_2("H100"), mean=TWO_TERMS["H100"]),
    Budget("training: iteration", training_times, most=0.10),
    Budget("training: memory", training_memory, most=0.01),
)
BESIDE = {
    "GEMM, nvfp4": gemms_nvfp4,
    "prefill attention": prefill_attention,
    "closed loops, nvfp4: TPOT": lambda: closed_loops("TPOT", nvfp4=True),
    "closed loops, nvfp4: TTFT": lambda: closed_loops("TTFT", nvfp4=True),
    "mixtures of experts, multi-token prediction: TPOT": lambda: mixtures("TPOT", speculative=True),
    "MI300X, vLLM: whole batch": mi300x,
    "Splitwise, engines of 2023: prefill": lambda: splitwise("prefill"),
    "Splitwise, engines of 2023: TPOT": lambda: splitwise("TPOT"),
    "Ladder Residual, 70B: tokens/s": ladder_speeds,
    "training: MT-NLG on 2,240 to 3,360 GPUs": mt_nlg,
}
"""Functions that return points without a budget, by the name under which their errors are printed."""
GAINS = {"on": (1.3079, 0.03), "off": (1.5987, 0.08)}
"""Speed-up of the ladder architecture at 70B, TP 8, batch 1 (arXiv 2501.06589, table 2), by P2P setting, and the
maximum error of the model's prediction."""


def _kernels(
    quantity: str, name: str, key: Sequence[str], columns: Sequence[str], times: Callable[..., Any]
) -> list[Point]:
    points = []
    for names, rows in _grouped(read_rows(name), key):
        shapes = [np.array([float(row[column]) for row in rows]) for column in columns]
        gpus = int(names[2]) if key[-1] == "gpus" else 1
        for row, us in zip(rows, times(*names, *shapes), strict=True):
            case = " ".join([*names[1:], *(f"{column} {row[column]}" for column in columns)])
            points.append(Point("aiconfigurator", quantity, names[0], gpus, case, float(row["us"]), float(us)))
    return points


def _static(source: str, name: str, engine: str, quantity: str) -> list[Point]:
    points = []
    for names, rows in _grouped(read_rows(name), ("gpu", "model", "format", "tp")):
        card, shape, stored, tp = names
        made = Deployment(gpu(card), model(shape), number_format(stored), framework(engine), int(tp))
        made = replace(made, kv_bytes=1.0 if stored == "fp8" and made.framework.fp8_kv else 2.0)
        batch, prompt, output = (np.array([float(row[each]) for row in rows]) for each in ("batch", "input", "output"))
        if quantity == "prefill":
            column, took = "prefill_ms", predict_step(made, batch, prompt).total
        else:
            column, took = "tpot_ms", predict_step(made, decoding=batch, context=prompt + output / 2).total
        for row, seconds in zip(rows, took, strict=True):
            case = f"{shape} {stored} {row['input']}/{row['output']}, batch {row['batch']}"
            if row[column]:
                points.append(_point(source, quantity, row, float(row[column]) / 1000, float(seconds), case))
    return points


def _point(source: str, quantity: str, row: dict[str, str], measured: float, predicted: float, case: str) -> Point:
    return Point(source, quantity, row["gpu"], int(row["tp"]), case, measured, predicted)


@cache
def read_rows(name: str) -> Rows:
    """Return the rows of a file of measurements in benchmarks/data, by its name without the ending."""
    path = next(file for folder in DATA if (file := folder / f"{name}.csv.gz").exists())
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _grouped(rows: Rows, columns: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Rows]]:
    def key(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[column] for column in columns)

    return ((names, list(group)) for names, group in groupby(sorted(rows, key=key), key))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors. Return exit code 1 if an error exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", metavar="WORD", help="print the rows of budgets with WORD in their name, as CSV")
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="folder with other measurements, in the format of data/"
    )
    given = parser.parse_args(arguments)
    DATA[:0] = [given.data] if given.data else []
    if given.rows:
        table = csv.writer(sys.stdout)
        for each in (each for budget in BUDGETS if given.rows in budget.name for each in budget.points()):
            table.writerow([each.source, each.quantity, each.gpu, each.tp, each.case, each.measured, each.predicted])
        return 0
    print(f"{'':40} rows  median   p90   most   mean")
    for budget in BUDGETS:
        count, *errors = budget.found()
        shown = " ".join(f"{100 * error:6.1f}" for error in errors)
        print(f"{budget.name:40} {count:5} {shown}%  {'kept' if budget.kept() else 'NOT KEPT'}")
    for name, points in BESIDE.items():
        count, *errors = Budget(name, points).found()
        print(f"{name:40} {count:5} {' '.join(f'{100 * error:6.1f}' for error in errors)}%")
    off = {each.case.split()[1]: each for each in ladder_gains()}
    for p2p, (published, most) in GAINS.items():
        gain, kept = off[p2p].predicted, abs(off[p2p].predicted - published) <= most
        print(
            f"ladder, 70B, TP 8, P2P {p2p}: x {gain:.3f}, published {published:.3f}  {'kept' if kept else 'NOT KEPT'}"
        )
    print(f"ladder: {ladder_order()} groups not in the order that was measured")
    return 0 if all(budget.kept() for budget in BUDGETS) else 1


if __name__ == "__main__":
    sys.exit(main())
