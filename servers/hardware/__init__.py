"""Data-sheet figures and measured constants of GPUs, links, models, number formats and inference engines.

The figures come from CSV files in this folder, with one row per entry. Users can add GPUs and models in a TOML file
with the same columns:

    [gpus."My card"]
    bf16_TFLOPs = 148
    memory_GB = 96
    memory_GBps = 4000
    link_GBps = 900         # both directions together; use pcie_GBps for a GPU without such a link

    [models."My-7B"]
    layers = 32             # and hidden, intermediate, heads, kv_heads, head_dim, vocabulary, parameters

kernels.py and inference.py in this folder use these figures to predict the duration of one step of an engine.
"""

from __future__ import annotations

import csv
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from loadgen.servers.errors import read_toml
from loadgen.servers.hardware.shapes import COLUMNS, Experts, LatentAttention, LinearAttention

_Entry = TypeVar("_Entry")

FOLDER = Path(__file__).parent  # Holds the tables
DEFAULT_GPU = "H100 SXM"
DEFAULT_MODEL = "Llama-2-7B"
DEFAULT_FORMAT = "bf16"
DEFAULT_LINK = "NVLink 4"  # For a user's GPU that has a link_GBps but names no link
MACHINE_LINK = "InfiniBand"  # Row of links.csv that connects machines
DEFAULT_ARCHITECTURE = "Hopper"  # For a user's GPU that names no architecture
TABLES = (
    "gpus",
    "models",
    "mixtures",
    "formats",
    "architectures",
    "links",
    "frameworks",
    "mixture_overheads",
    "constants",
    "data/technologies",
    "data/memories",
    "data/networks",
    "data/gpu_technologies",
)


class HardwareError(ValueError):
    """A mistake in the description of hardware or of a model, such as an unknown GPU or number format."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Efficiency of kernels on GPUs of one architecture: a row of architectures.csv.

    The row also names the GPU on which the values were measured.
    """

    name: str
    compute_share: float  # Share of the peak FLOP/s that the best large GEMM reaches; power and clocks limit it
    watts_per_TFLOP: float  # noqa: N815 - of the GPU on which compute_share was measured
    memory_share: float  # Share of the memory bandwidth that kernels reach
    attention_share: float  # Share of the peak FLOP/s that attention over long prompts reaches
    load_share: float  # Share of the L2 load rate of the SMs that is reached during computation
    launch_s: float  # Time to start and end a GEMM
    tile_s: float  # Time to start and end one tile of a GEMM
    attention_launch_s: float  # Time to start and end attention, which is often two kernels
    attention_turn_s: float  # Minimum time for one sequence and KV head in decode attention
    attention_token_s: float = (
        0.0  # Time per cached token for a sequence and KV head on one SM, without a split context
    )


@dataclass(frozen=True, slots=True)
class Link:
    """A type of link between GPUs, such as NVLink 4, from a row of links.csv.

    `bytes_per_s` is the rate at which one GPU sends.
    """

    name: str
    bytes_per_s: float  # In one direction
    share: float  # Share of bytes_per_s that rings and direct reads reach
    switch_share: float  # Share of bytes_per_s if the switch computes the sums (NVLS); 0 if it cannot
    custom_s: float  # Time to start an all-reduce by direct reads
    peer_s: float  # Additional time of an all-reduce by direct reads, per participating GPU
    two_shot_s: float  # Additional time of an all-reduce by direct reads in two rounds
    nccl_s: float  # Time to start an NCCL collective
    step_s: float  # Time per step of an NCCL collective


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: the size of stored values, and the type in which GEMMs compute."""

    name: str
    weight_bytes: float  # Bytes per weight
    activation_bytes: float  # Bytes per activation that a GEMM reads
    compute_type: str  # Type that selects the peak FLOP/s: bf16, fp8, int8 or fp4
    operand_bytes: float  # Bytes that a tile loads per operand
    quantise_s: float = 0.0  # Time to start quantising activations, with one scale per token or block
    read_share: float = 1.0  # Read rate of the weights relative to 16-bit weights
    grouped_read: float = 1.0  # Read rate of the weights of experts, relative to the memory rate of other kernels
    attention_format: str = ""  # Format of the attention weights of mixtures of experts; empty if it is this one


@dataclass(frozen=True, slots=True)
class Framework:
    """Overhead that an inference engine adds to its kernels: a row of frameworks.csv.

    The row also names the measurement from which the values were derived.
    """

    name: str
    layer_s: float  # Per layer: launches and gaps between kernels
    step_s: float  # Per step: scheduling, sampling, detokenising
    sequence_s: float  # Per step and sequence in the step
    sync_s: float  # Per all-reduce: wait until every GPU has reached it
    kv_share: float  # Read rate of the KV cache relative to the best kernel
    prefill_share: float  # Speed of prompt computation relative to the best kernels
    prompt_launch_s: float  # Per layer of a step with prompts: time to launch its kernels, which no CUDA graph contains
    interference: float  # Share of other requests' prompts that is computed while a request decodes, not while it waits
    server_s: float  # From a request's arrival to its first step, plus from the first token to the client
    request_s: float  # Additional server time per request in flight
    queueing: float  # Share of the worst-case queueing time, in which all requests arrive at once; 0 if they are spread
    chunk_tokens: float  # Maximum tokens in one step
    scaled: float  # Bytes that a tile loads per 8-bit operand: 2 if tiles apply the scales, otherwise 1
    nccl: float  # 1 if all-reduces use NCCL, 0 if GPUs read from each other directly
    fp8_kv: float  # 1 if models in fp8 and fp4 have an fp8 KV cache, otherwise 0
    kv_per_query_head: float  # 1 if decode attention reads the KV cache again for each query head of a group
    whole_context: float  # 1 if one SM reads the whole context of a sequence and KV head, 0 if contexts are split
    free_memory: float  # 1 if the memory fraction is a share of what weights and activations leave free, otherwise 0
    fp8_kv_cost: float  # Time to read and convert a value of an fp8 KV cache, relative to half of a 16-bit value


@dataclass(frozen=True, slots=True)
class MixtureOverheads:
    """The time that an inference engine needs for a mixture of experts in addition to the time of the kernels.

    Each object is a row of mixture_overheads.csv.
    """

    framework: str
    layer_s: float  # Per layer
    latent_layer_s: float  # Per layer with latent attention, in addition
    linear_layer_s: float  # Per layer with linear attention, in addition
    prompt_layer_s: float  # Per layer of a step with prompts, in addition: kernels that no CUDA graph launches
    step_s: float  # Per step: scheduling, sampling, detokenising
    sequence_s: float  # Per step and sequence in the step


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of a GPU that changes when the technology node, memory or network of the GPU is replaced.

    `before` and `after` are values with units, and `reason` explains the difference.
    """

    figure: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures of one GPU."""

    name: str
    architecture: Architecture
    peaks: Mapping[str, float]  # Dense FLOP/s with fp32 accumulation, by type: bf16, fp8, int8, fp4
    memory_bytes: float
    memory_bytes_per_s: float
    sms: int
    clock_hz: float
    watts: float  # 0 if unknown
    l2_bytes: float
    link: Link  # To the other GPUs: NVLink if there is one, else PCIe
    pcie: Link
    source: str = ""  # Address of the data sheet
    network: Link | None = None  # To GPUs of other machines; None stands for MACHINE_LINK
    changes: Sequence[Change] = ()  # Differences of a hypothetical GPU from the real one; empty for a real GPU

    @property
    def flops_per_s(self) -> float:
        """Peak FLOP/s in bf16."""
        return self.peaks["bf16"]

    @property
    def machine_link(self) -> Link:
        """The link to GPUs of other machines."""
        return self.network or gpu_links()[MACHINE_LINK]

    def effective_format(self, number_format: Format) -> Format:
        """Return the format in which this GPU stores weights and computes GEMMs if `number_format` is requested.

        If the tensor cores support the requested format, it is returned unchanged. Otherwise, the weights are stored in
        the requested format, but GEMMs compute in bf16.
        """
        if number_format.compute_type in self.peaks:
            return number_format
        return replace(number_format, activation_bytes=2.0, compute_type="bf16", operand_bytes=2.0)

    def link_for(self, gpus: int) -> Link:
        """Return the link over which a group of `gpus` GPUs communicates.

        An NVLink bridge connects only two GPUs, so a larger group communicates over PCIe.
        """
        return self.pcie if self.link.name == "NVLink bridge" and gpus > 2 else self.link


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    intermediate: int  # Inner size of a dense MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    mlp_matrices: int = 3  # 2 if the MLP has no gate
    tied: int = 0  # 1 if the output head shares the embedding's matrix
    experts: Experts | None = None  # None for a dense model
    latent: LatentAttention | None = None  # None if the KV cache stores the keys and values of heads
    linear: LinearAttention | None = None  # None if every layer has a KV cache
    window: int = 0  # Tokens that a layer with a sliding window attends to
    window_layers: int = 0  # Number of layers with a sliding window
    gated: int = 0  # 1 if attention multiplies its result by a gate, which has a matrix of the size of the queries'

    @property
    def plain(self) -> bool:
        """True for a dense transformer whose layers all have ordinary attention to the whole context.

        False for a model with experts, latent attention, linear attention or sliding windows.
        """
        return self.experts is None and self.latent is None and self.linear is None and not self.window_layers

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return self.linear.layers if self.linear else 0

    @property
    def full_layers(self) -> int:
        """Number of layers that attend to all tokens of the context."""
        return self.layers - self.linear_layers - self.window_layers

    @property
    def attention_layer_parameters(self) -> int:
        """Number of parameters in the attention matrices of one layer that has a KV cache."""
        if self.latent:
            return self.latent.layer_parameters(self.hidden, self.heads, self.head_dim)
        heads = self.heads + self.kv_heads + self.gated * self.heads / 2
        return int(2 * self.hidden * self.head_dim * heads)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters in the attention matrices of all layers."""
        parameters = (self.layers - self.linear_layers) * self.attention_layer_parameters
        if self.linear:
            parameters += self.linear.layers * self.linear.layer_parameters(self.hidden)
        return parameters

    @property
    def dense_mlp_parameters(self) -> int:
        """Number of parameters in the dense MLPs of all layers that have no experts."""
        return (self.layers - self.moe_layers) * self.mlp_matrices * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the matrices of all layers: Q, K, V, attention output, MLP and experts."""
        experts = self.moe_layers * self.experts.layer_parameters(self.hidden) if self.experts else 0
        return self.attention_parameters + self.dense_mlp_parameters + experts

    @property
    def active_parameters(self) -> int:
        """Number of matrix parameters that one token uses, including those of the output head."""
        experts = self.moe_layers * self.experts.active_parameters(self.hidden) if self.experts else 0
        return self.attention_parameters + self.dense_mlp_parameters + experts + self.head_parameters

    @property
    def head_parameters(self) -> int:
        """Number of parameters in the matrix of the output head."""
        return self.hidden * self.vocabulary

    @property
    def kv_layer_values(self) -> int:
        """Number of values that the KV cache stores per token in one layer."""
        return self.latent.cached_values if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Number of values that the KV cache stores for one token, over all layers that attend to every token.

        Layers with a sliding window or with linear attention are left out. They need a constant amount of memory per
        sequence, which is small compared with the KV cache of a long context.
        """
        return self.full_layers * self.kv_layer_values


def gpu(name: str, file: Path | None = None) -> Gpu:
    """Return the figures of a GPU by name, from the user's TOML file `file` or from gpus.csv.

    The user's file takes precedence. If no listed GPU has the name, a name such as `A100 (3nm, HBM4)` stands for a
    hypothetical GPU (loadgen.servers.hardware.technology).

    Raises HardwareError for an unknown name. The message suggests the nearest name and lists all names.
    """
    try:
        return find_entry("GPU", name, "gpus", _gpu_from_row, file)
    except HardwareError:
        parts = _HYPOTHETICAL_GPU.fullmatch(name)
        if parts is None:
            raise
    from loadgen.servers.hardware.technology import scaled_gpu, sort_names

    return scaled_gpu(gpu(parts[1], file), *sort_names(parts[2])).gpu


def parse_gpus(text: str) -> tuple[int, str]:
    """Parse text such as `H100` or `4 x A100`, and return the number and the name of the GPUs.

    Raises HardwareError for an unknown GPU.
    """
    match = re.match(r"([1-9]\d{0,2})\s*x\s*(?=\S)", text, re.IGNORECASE)
    if match is None:
        return 1, gpu(text).name
    return int(match[1]), gpu(text[match.end() :]).name


def model(name: str, file: Path | None = None) -> ModelShape:
    """Return the dimensions of a model.

    `name` is a model name (see `listed_model`), or the path of a Hugging Face config.json or its folder. Raises
    HardwareError for an unknown name or an invalid file.
    """
    if name.endswith(".json") or os.path.isfile(f"{name}/config.json"):  # noqa: PTH113 - False where Path raises
        from loadgen.servers.hardware.huggingface import shape_of

        return shape_of(Path(name))
    return listed_model(name, file)


def listed_model(name: str, file: Path | None = None) -> ModelShape:
    """Return the dimensions of a model by name, from the user's TOML file `file` or from models.csv.

    The name may come from a server, such as `meta-llama/Llama-2-7b-chat-hf`. The name is therefore never used as the
    path of a file. Raises HardwareError for an unknown name.
    """
    name = _VARIANT_SUFFIX.sub("", name.rpartition("/")[2])
    return find_entry("model", name, "models", shape_from_row, file)


def number_format(name: str) -> Format:
    """Return a number format of formats.csv by name. Raises HardwareError for an unknown name."""
    return find_entry("number format", name, "formats", _format_from_row)


def framework(name: str) -> Framework:
    """Return an inference engine of frameworks.csv by name. Raises HardwareError for an unknown name."""
    return find_entry("framework", name, "frameworks", _framework_from_row)


DEFAULT_MIXTURES = "vLLM"  # Row of mixture_overheads.csv for engines without a row


@cache
def mixture_overheads(framework_name: str) -> MixtureOverheads:
    """Return the overheads of the engine `framework_name` for mixtures of experts, from mixture_overheads.csv.

    If the table has no row for this engine, return the overheads of vLLM.
    """
    rows = builtin_table(FOLDER, "mixture_overheads")
    name = framework_name if framework_name in rows else DEFAULT_MIXTURES
    columns = [field.name for field in fields(MixtureOverheads)[1:]]
    return MixtureOverheads(name, **_read_figures(name, rows[name], columns))


GPU_SETTINGS = {
    "memory_bandwidth": ("memory_bytes_per_s", "B/s"),
    "memory": ("memory_bytes", "B"),
    "l2": ("l2_bytes", "B"),
    "clock": ("clock_hz", "Hz"),
    "sms": ("sms", ""),
}
"""Names that `--set` accepts, each with the field of Gpu and its unit. `_with_setting` handles `compute` and
`link_bandwidth`, which change several fields.
"""
SETTING_FIGURES = {
    "memory_bandwidth": "memory bandwidth",
    "memory": "memory",
    "l2": "L2",
    "clock": "clock",
    "sms": "SMs",
    "compute": "bf16 peak",
    "link_bandwidth": "link to GPUs",
}
"""Names that `--set` accepts, each with the figure of a Change (technology.py) that has the same meaning."""
MAX_CHANGE = 1000
"""Largest factor by which `--set` may change a figure."""
_VARIANT_SUFFIX = re.compile(
    r"^meta-(?=llama)|[-_](instruct|thinking|chat|hf|it|base|(?<!deepseek-)v\d\.\d|fp8|nvfp4|fp4|mxfp4|awq|\d{4})\b",
    re.IGNORECASE,
)
"""Parts of a served model's name that do not affect its shape."""
_HYPOTHETICAL_GPU = re.compile(r"([^()]*[^() ]) ?\(([^()]*)\)")
"""Name of a real GPU, and names of a technology node, a memory and networks in parentheses."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([kMGTP]?)(B/s|B|Hz|FLOP/s|FLOPs|)")
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


SCALINGS = ("technology", "memory_generation", "network")
"""Names that `--set` accepts for a hypothetical GPU (technology.py). The values are names of the tables in `data`."""


def with_changes(card: Gpu, changes: Sequence[str]) -> Gpu:
    """Return a copy of the GPU with changed figures. Each change is text such as `memory_bandwidth=8TB/s`.

    A change may also replace the technology node, the memory or the network of the GPU (their names are in SCALINGS).
    Such a change affects several figures, and is therefore applied before all other changes. Raises HardwareError for
    an unknown figure or an invalid value.
    """
    pairs = [(change, *change.partition("=")[::2]) for change in changes]
    scalings = {name: value for _, name, value in pairs if name in SCALINGS}
    if scalings:
        from loadgen.servers.hardware.technology import scaled_gpu

        card = scaled_gpu(card, *(scalings.get(name) for name in SCALINGS)).gpu
    for change, name, text in pairs:
        if name in SCALINGS:
            continue
        known = [*GPU_SETTINGS, "compute", "link_bandwidth", *SCALINGS]
        if name not in known:
            near = get_close_matches(name, known, n=1)
            suggestion = f" (did you mean {near[0]}?)" if near else ""
            raise HardwareError(
                f"cannot set {name!r}{suggestion}: choose one of {', '.join(known)}, such as memory=192GB"
            )
        value = _parse_quantity(change, text)
        _check_magnitude(card, change, name, value)
        card = _with_setting(card, name, value)
        figure = SETTING_FIGURES.get(name)
        listed = (
            replace(known, after=text, reason=f"--set {change}") if known.figure == figure else known
            for known in card.changes
        )
        card = replace(card, changes=tuple(listed))
    return card


def _check_magnitude(card: Gpu, change: str, name: str, value: float) -> None:
    """Raise HardwareError if `value` differs by more than the factor MAX_CHANGE from the value of the GPU.

    `name` is the setting of the GPU that the user changes, and `change` is the change as the user wrote it. If the
    difference is so large, the unit is wrong or missing. Such a value would also make some computations very slow. With
    a bandwidth of 8 B/s, for example, the replay of a load would run for hours.
    """
    special = {"compute": (card.flops_per_s, "FLOP/s"), "link_bandwidth": (2 * card.link.bytes_per_s, "B/s")}
    if name in special:
        old, unit = special[name]
    else:
        attribute, unit = GPU_SETTINGS[name]
        old = getattr(card, attribute)
    if old and not old / MAX_CHANGE <= value <= old * MAX_CHANGE:
        raise HardwareError(
            f"{change}: {_quantity(value, unit)} is more than {MAX_CHANGE:,} times away from the "
            f"{_quantity(old, unit)} of {card.name}; write the unit, such as memory_bandwidth=8TB/s"
        )


def _quantity(value: float, unit: str) -> str:
    """Return a value with its unit and the largest prefix that fits, such as `3.35 TB/s`."""
    prefix = next((name for name in ("P", "T", "G", "M") if unit and value >= _PREFIXES[name]), "")
    return f"{value / _PREFIXES[prefix]:.3g} {prefix}{unit}".rstrip()


def _parse_quantity(change: str, text: str) -> float:
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None or not float(quantity[1]):
        raise HardwareError(f"{change}: write a positive number with its unit, such as memory_bandwidth=8TB/s")
    return float(quantity[1]) * _PREFIXES[quantity[2]]


def _with_setting(card: Gpu, name: str, value: float) -> Gpu:
    if name == "compute":  # the ratios between number formats stay, and the power scales with the FLOP/s
        ratio = value / card.flops_per_s
        peaks = {compute_type: rate * ratio for compute_type, rate in card.peaks.items()}
        return replace(card, peaks=peaks, watts=ratio * card.watts)
    if name == "link_bandwidth":  # both directions together, as on data sheets
        return replace(card, link=replace(card.link, bytes_per_s=value / 2))
    figure: Any = {GPU_SETTINGS[name][0]: int(value) if name == "sms" else value}
    return replace(card, **figure)


def tables() -> dict[str, list[dict[str, str]]]:
    """Return the rows of every CSV table, by table name. The documentation is generated from these rows."""
    return {table.rpartition("/")[2]: [dict(row) for row in builtin_table(FOLDER, table).values()] for table in TABLES}


def constant(name: str) -> float:
    """Return a value of constants.csv by name. The table documents its meaning and source."""
    return _constants()[name]


@cache
def _constants() -> dict[str, float]:
    return {name: read_number(name, row, "value", 0) for name, row in builtin_table(FOLDER, "constants").items()}


@cache
def _architectures() -> dict[str, Architecture]:
    columns = [field.name for field in fields(Architecture)[1:]]
    rows = builtin_table(FOLDER, "architectures")
    return {name: Architecture(name, **_read_figures(name, row, columns)) for name, row in rows.items()}


@cache
def gpu_links() -> dict[str, Link]:
    """Return every row of links.csv as a Link, by name."""
    columns = [field.name for field in fields(Link)[2:]]
    links = {}
    for name, row in builtin_table(FOLDER, "links").items():
        one_way_bytes_per_s = 1e9 * read_number(name, row, "GBps", 0) / 2
        links[name] = Link(name, one_way_bytes_per_s, **_read_figures(name, row, columns))
    return links


def _read_figures(name: str, row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, float]:
    return {column: _read_figure(name, row, column) for column in columns}


def _read_figure(name: str, row: Mapping[str, Any], field: str) -> float:
    """Return the value of `field` from a row, or 0 if its column is missing or empty.

    The column has the name of the field. The only exception is a field in seconds: `launch_s` has the column
    `launch_us`, in microseconds.
    """
    if field.endswith("_s"):
        return 1e-6 * read_number(name, row, field.removesuffix("_s") + "_us", 0)
    return read_number(name, row, field, 0)


def _format_from_row(name: str, row: Mapping[str, Any]) -> Format:
    return Format(
        name,
        weight_bytes=read_number(name, row, "bytes_per_value"),
        activation_bytes=read_number(name, row, "activation_bytes"),
        compute_type=str(row["computes"]),
        operand_bytes=read_number(name, row, "operand_bytes"),
        quantise_s=_read_figure(name, row, "quantise_s"),
        read_share=read_number(name, row, "read_share"),
        grouped_read=read_number(name, row, "grouped_read"),
        attention_format=str(row.get("mixture_attention") or ""),
    )


def _framework_from_row(name: str, row: Mapping[str, Any]) -> Framework:
    columns = [field.name for field in fields(Framework)[1:]]
    return Framework(name, **_read_figures(name, row, columns))


def _gpu_from_row(name: str, row: Mapping[str, Any]) -> Gpu:
    pcie = replace(gpu_links()["PCIe"], bytes_per_s=1e9 * read_number(name, row, "pcie_GBps", 64) / 2)
    link_gb_per_s = read_number(name, row, "link_GBps", 0)  # both directions together
    if link_gb_per_s:
        link = replace(gpu_links()[row.get("link") or DEFAULT_LINK], bytes_per_s=1e9 * link_gb_per_s / 2)
    else:
        read_number(name, row, "pcie_GBps")  # raises if missing: the GPU needs link_GBps or pcie_GBps
        link = replace(gpu_links()[row.get("link") or "PCIe"], bytes_per_s=pcie.bytes_per_s)
    peaks = {"bf16": 1e12 * read_number(name, row, "bf16_TFLOPs")}
    for compute_type, column in {"fp8": "fp8_TFLOPs", "int8": "int8_TOPs", "fp4": "fp4_TFLOPs"}.items():
        rate = 1e12 * read_number(name, row, column, 0)
        if rate:
            peaks[compute_type] = rate
    return Gpu(
        name=name,
        architecture=_architecture_of(str(row.get("architecture") or "")),
        peaks=peaks,
        memory_bytes=1e9 * read_number(name, row, "memory_GB"),
        memory_bytes_per_s=1e9 * read_number(name, row, "memory_GBps"),
        sms=int(read_number(name, row, "sms", 132)),
        clock_hz=1e9 * read_number(name, row, "clock_GHz", 1.8),
        watts=read_number(name, row, "power_W", 0),
        l2_bytes=1e6 * read_number(name, row, "l2_cache_MB", 0),
        link=link,
        pcie=pcie,
        source=str(row.get("source") or ""),
    )


def _architecture_of(chip: str) -> Architecture:
    """Return the architecture of a chip such as `Hopper GH100`, from architectures.csv.

    The row is found by the whole name, or else by the first word, such as `Hopper`. If there is no such row, the
    default architecture is returned.
    """
    rows = _architectures()
    return rows.get(chip) or rows.get(chip.partition(" ")[0]) or rows[DEFAULT_ARCHITECTURE]


def shape_from_row(name: str, row: Mapping[str, Any]) -> ModelShape:
    """Return the dimensions of a model from a row with the columns of models.csv.

    Raises HardwareError for an invalid value.
    """
    required = [field.name for field in fields(ModelShape)[1:9]]  # those without a default
    defaults = {"mlp_matrices": 3, "tied": 0}
    figures = {column: read_number(name, row, column) for column in required}
    figures |= {column: read_number(name, row, column, default) for column, default in defaults.items()}
    dimensions: dict[str, Any] = {column: int(figure) for column, figure in figures.items()}
    shape = ModelShape(name, **dimensions)
    parts = {column: int(read_number(name, row, column, 0)) for column in COLUMNS}
    return _with_parts(shape, parts) if any(parts.values()) else shape


def _with_parts(shape: ModelShape, parts: Mapping[str, int]) -> ModelShape:
    """Return a copy of `shape` with the dimensions of experts, latent attention, sliding windows and linear attention.

    `parts` contains these dimensions by the name of their column in mixtures.csv (COLUMNS). Raises HardwareError if the
    dimensions contradict each other.
    """
    experts, latent, linear = None, None, None
    if parts["experts"]:
        experts = Experts(
            parts["experts"],
            parts["experts_per_token"],
            parts["expert_intermediate"],
            parts["shared_intermediate"],
            parts["dense_layers"],
        )
        if not 0 < experts.per_token <= experts.count or not experts.intermediate:
            raise HardwareError(
                f"{shape.name}: a model with experts needs experts_per_token, at most experts, and expert_intermediate"
            )
    if parts["kv_rank"]:
        latent = LatentAttention(parts["q_rank"], parts["kv_rank"], parts["rope_dim"], parts["value_dim"])
    if parts["linear_layers"]:
        heads = parts["linear_key_heads"], parts["linear_value_heads"]
        linear = LinearAttention(parts["linear_layers"], *heads, parts["linear_head_dim"])
    if parts["linear_layers"] + parts["window_layers"] > shape.layers or parts["dense_layers"] > shape.layers:
        raise HardwareError(f"{shape.name}: more layers of one kind than the model's {shape.layers} layers")
    return replace(
        shape,
        experts=experts,
        latent=latent,
        linear=linear,
        window=parts["window"],
        window_layers=parts["window_layers"],
        gated=parts["gated"],
    )


def read_number(name: str, row: Mapping[str, Any], column: str, default: float | None = None) -> float:
    """Return the number in the column `column` of a table row, or `default` if the cell is empty.

    Raises HardwareError if the cell does not contain a positive number. If there is a default, 0 is allowed too. `name`
    is the name of the row, for the message of the error.
    """
    value = row.get(column)
    if value in (None, "") and default is not None:
        return default
    try:
        number = float(value)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, ValueError):
        number = -1.0
    if number < 0 or (number == 0 and default is None):
        raise HardwareError(f"{name}: {column} must be a positive number, not {value!r}")
    return number


@cache
def builtin_table(folder: Path, table: str) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a table's CSV file, by the name in the first column."""
    with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
        return {next(iter(row.values())): row for row in csv.DictReader(lines)}


def _known_rows(table: str) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a built-in table, such as `models`, by name.

    A model in models.csv may also have a row in mixtures.csv. Its row in the result has the columns of both files.
    """
    rows = builtin_table(FOLDER, table)
    if table != "models":
        return rows
    mixtures = builtin_table(FOLDER, "mixtures")
    return {name: {**mixtures.get(name, {}), **row} for name, row in rows.items()}


def _read_user_table(table: str, file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the entries of one table in a user's TOML file. Raises HardwareError if the file is invalid."""
    try:
        content = read_toml(file)
    except OSError as problem:
        raise HardwareError(f"{file}: {problem.strerror}") from None
    except ValueError as problem:
        raise HardwareError(f"{file}: {problem}") from None
    unknown = sorted(content.keys() - {"gpus", "models"})
    if unknown:
        raise HardwareError(f"{file}: unknown table {', '.join(unknown)}: only [gpus] and [models] are allowed")
    entries: dict[str, Mapping[str, Any]] = content.get(table, {})
    _, *columns = next(iter(builtin_table(FOLDER, table).values()))
    columns += COLUMNS if table == "models" else ()
    for name, row in entries.items():
        if not isinstance(row, dict) or row.keys() - set(columns):
            raise HardwareError(f"{file}: {table}.{name!r} must be a table with only the columns {', '.join(columns)}")
    return entries


def find_entry(
    kind: str, name: str, table: str, from_row: Callable[[str, Mapping[str, Any]], _Entry], file: Path | None = None
) -> _Entry:
    """Return the entry of `table` that has `name` as its name or alias (column `also`).

    Upper and lower case, spaces and punctuation do not matter. `kind` describes the entry in error messages. Raises
    HardwareError for an unknown name, and for any invalid entry in the user's file.
    """
    user_rows = _read_user_table(table, file) if file else {}
    for user_name, row in user_rows.items():
        from_row(user_name, row)  # validates every entry, so that an error in an unused entry is reported too
    rows = _known_rows(table) | user_rows
    if name not in rows:
        names = {}
        for row_name, row in rows.items():
            aliases = filter(None, str(row.get("also") or "").split(";"))
            names.update({_normalise_name(alias): row_name for alias in aliases})
        names.update({_normalise_name(row_name): row_name for row_name in rows})
        plain = _normalise_name(name)
        if plain not in names:
            matches = get_close_matches(plain, names, n=3, cutoff=0.6)
            near = dict.fromkeys(names[match] for match in matches)
            suggestion = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise HardwareError(f"unknown {kind} {name!r}{suggestion}: choose one of {', '.join(rows)}")
        name = names[plain]
    return from_row(name, rows[name])


def _normalise_name(name: str) -> str:
    """Return a name in a form for comparison.

    The result is in lower case and contains only letters, digits and dots. A leading `nvidia` is removed.
    """
    plain = "".join(character for character in name.casefold() if character.isalnum() or character == ".")
    return plain.removeprefix("nvidia")
