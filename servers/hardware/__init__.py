"""What GPUs, links and models can do at best; nothing of ours.

Pure, so that the simulator, the matrix and the analysis can all use it. Every table is a CSV file of this folder, one
row per entry: a new GPU is one row of gpus.csv, or, at run time, one table of a TOML file with the same columns:

    [gpus."My card"]
    bf16_TFLOPs = 148
    memory_GB = 96
    memory_GBps = 4000
    link_GBps = 900         # both directions together; pcie_GBps where it has none

    [models."My-7B"]
    layers = 32             # and hidden, intermediate, heads, kv_heads, head_dim, vocabulary, parameters

How long a step takes on them: servers/hardware/kernels.py and inference.py.
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

_Entry = TypeVar("_Entry")

FOLDER = Path(__file__).parent  # Where the tables are
DEFAULT_GPU = "A800-80GB SXM"
DEFAULT_MODEL = "Llama-2-7B"
DEFAULT_FORMAT = "bf16"
DEFAULT_LINK = "NVLink 4"  # Of a user's GPU that has a link_GBps and names none; its architecture likewise
DEFAULT_ARCHITECTURE = "Hopper"
TABLES = ("gpus", "models", "formats", "architectures", "links", "frameworks", "constants")


class HardwareError(ValueError):
    """A GPU, model or number format that is not known, or not described as its table wants it."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What kernels reach on GPUs of one design: a row of architectures.csv, with what it was measured on."""

    name: str
    compute_share: float  # Of the peak FLOP/s, by the best large GEMM: power and clocks
    watts_per_TFLOP: float  # noqa: N815 - Of the GPU on which that was measured
    memory_share: float  # Of the memory bandwidth
    attention_share: float  # Of the peak FLOP/s, by attention over long prompts
    load_share: float  # Of the rate at which SMs can load from L2, while they compute
    launch_s: float  # To start and end a GEMM
    tile_s: float  # To start and end one of its tiles
    attention_launch_s: float  # As launch_s; it is often two kernels
    attention_turn_s: float  # One sequence and KV head in decoding attention, however short


@dataclass(frozen=True, slots=True)
class Link:
    """How GPUs reach each other: a row of links.csv, and one GPU's rate."""

    name: str
    bytes_per_s: float  # One way
    share: float  # Of that, by rings and direct reads
    switch_share: float  # Of that, where the switch itself adds (NVLS); 0 where it cannot
    custom_s: float  # To start an all-reduce of direct reads, and for each GPU that takes part
    peer_s: float
    two_shot_s: float  # More, where it needs two rounds
    nccl_s: float  # To start a collective of NCCL, and for each of its steps
    step_s: float


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored and computed."""

    name: str
    weight_bytes: float
    activation_bytes: float  # What a GEMM reads beside its weights
    compute_type: str  # The peak that holds: bf16, fp8, int8 or fp4
    operand_bytes: float  # What loading one operand costs a tile
    quantise_s: float = 0.0  # To make activations of it, with a scale per token or block
    read_share: float = 1.0  # How fast its weights are read, of what 16-bit weights reach


@dataclass(frozen=True, slots=True)
class Framework:
    """What an engine adds to its kernels: a row of frameworks.csv, with what it was measured on."""

    name: str
    layer_s: float  # Per layer: launches and gaps between its kernels
    step_s: float  # Per step: scheduling, sampling, detokenising
    sequence_s: float  # More per step, for each sequence in it
    sync_s: float  # Per all-reduce: until all GPUs have come to it
    kv_share: float  # How fast it reads the KV cache, of what the best kernel reaches
    prefill_share: float  # How fast it computes prompts, of what the best kernels reach
    interference: float  # Of the prompts of others, the part that is computed while one decodes rather than waits
    server_s: float  # From a request to its first step, and from the first token to the client
    request_s: float  # More, for each request in flight
    queueing: float  # Of the wait there is when all requests come at once; 0 where they come apart
    chunk_tokens: float  # Tokens in one step at most
    scaled: float  # Bytes that loading one 8-bit operand costs a tile: 2 where scales are applied there; 1 in engines
    nccl: float  # 1 where all-reduces are NCCL's, 0 where they read from each other directly
    fp8_kv: float  # 1 where models in fp8 and fp4 have their KV cache in fp8


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data-sheet figures."""

    name: str
    architecture: Architecture
    peaks: Mapping[str, float]  # Dense FLOP/s with fp32 accumulation, by what is computed: bf16, fp8, int8, fp4
    memory_bytes: float
    memory_bytes_per_s: float
    sms: int
    clock_hz: float
    watts: float  # 0 where nobody says
    l2_bytes: float
    link: Link  # To the other GPUs: NVLink where there is one, else PCIe
    pcie: Link
    source: str = ""  # The data sheet

    @property
    def flops_per_s(self) -> float:
        return self.peaks["bf16"]

    def effective_format(self, number_format: Format) -> Format:
        """The format as this GPU computes it: where its tensor cores do not know it, weights alone are stored so."""
        if number_format.compute_type in self.peaks:
            return number_format
        return replace(number_format, activation_bytes=2.0, compute_type="bf16", operand_bytes=2.0)

    def link_for(self, gpus: int) -> Link:
        """A bridge joins two."""
        return self.pcie if self.link.name == "NVLink bridge" and gpus > 2 else self.link


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a dense decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    mlp_matrices: int = 3  # Two where the MLP has no gate
    tied: int = 0  # 1 where the output head is the embedding

    @property
    def layer_parameters(self) -> int:
        """Matrix elements that every token passes: Q and output, K and V, and three matrices of the MLP, per layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Elements of the output head, which only the last token of a sequence passes."""
        return self.hidden * self.vocabulary

    @property
    def kv_values(self) -> int:
        """Values in the KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def gpu(name: str, file: Path | None = None) -> Gpu:
    """A GPU of gpus.csv or of a TOML file, which wins. Raises HardwareError, which names the nearest one and all."""
    return _find_entry("GPU", name, "gpus", _gpu_from_row, file)


def parse_gpus(text: str) -> tuple[int, str]:
    """How many GPUs, and the name of one: of `H100`, or `4 x A100`. Raises HardwareError."""
    several = re.match(r"([1-9]\d{0,2})\s*x\s*(?=\S)", text, re.IGNORECASE)
    return (int(several[1]), gpu(text[several.end() :]).name) if several else (1, gpu(text).name)


def model(name: str, file: Path | None = None) -> ModelShape:
    """As `listed_model`, or the path of a Hugging Face config.json or its folder."""
    if name.endswith(".json") or os.path.isfile(f"{name}/config.json"):  # noqa: PTH113 - False where Path raises
        from loadgen.servers.hardware.huggingface import shape_of

        return shape_of(Path(name))
    return listed_model(name, file)


def listed_model(name: str, file: Path | None = None) -> ModelShape:
    """A model of models.csv, or of a TOML file, as `gpu`; also by the name under which it is served. Opens no file that
    `name` names: a server may say anything."""
    name = _VARIANT_SUFFIX.sub("", name.rpartition("/")[2])
    return _find_entry("model", name, "models", shape_from_row, file)


def number_format(name: str) -> Format:
    """A number format of formats.csv, as `gpu`."""
    return _find_entry(
        *("number format", name, "formats"),
        lambda name, row: Format(
            *(
                name,
                _read_number(name, row, "bytes_per_value"),
                _read_number(name, row, "activation_bytes"),
                str(row["computes"]),
            ),
            operand_bytes=_read_number(name, row, "operand_bytes"),
            quantise_s=_read_figure(name, row, "quantise_s"),
            read_share=_read_number(name, row, "read_share"),
        ),
    )


def framework(name: str) -> Framework:
    """An engine of frameworks.csv, as `gpu`."""
    figures = [field.name for field in fields(Framework)[1:]]
    return _find_entry(
        *("framework", name, "frameworks"),
        lambda name, row: Framework(name, *(_read_figure(name, row, figure) for figure in figures)),
    )


GPU_SETTINGS = {
    "memory_bandwidth": ("memory_bytes_per_s", "B/s"),
    "memory": ("memory_bytes", "B"),
    "l2": ("l2_bytes", "B"),
    "clock": ("clock_hz", "Hz"),
    "sms": ("sms", ""),
}
"""Figures of a Gpu by the names that `--set` takes, and their unit; `compute` and `link_bandwidth` beside them."""
_VARIANT_SUFFIX = re.compile(r"^meta-(?=llama)|[-_](instruct|chat|hf|it|base|v\d\.\d)\b", re.IGNORECASE)
"""What names of served models have more than the names of their shapes."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([kMGTP]?)(B/s|B|Hz|FLOP/s|FLOPs|)")


def with_changes(card: Gpu, changes: Sequence[str]) -> Gpu:
    """A GPU with other figures, each as `memory_bandwidth=8TB/s`. Raises HardwareError."""
    for change in changes:
        name, _, text = change.partition("=")
        known = [*GPU_SETTINGS, "compute", "link_bandwidth"]
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise HardwareError(f"cannot set {name!r}{meant}: choose one of {', '.join(known)}, as memory=192GB")
        if not (result := _QUANTITY.fullmatch(text)) or not float(result[1]):
            raise HardwareError(f"{change}: write a positive number with its unit, such as memory_bandwidth=8TB/s")
        value = float(result[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[result[2]]
        if name == "compute":  # formats keep their ratio, and the power grows with them
            ratio = value / card.flops_per_s
            peaks = {which: rate * ratio for which, rate in card.peaks.items()}
            card = replace(card, peaks=peaks, watts=ratio * card.watts)
        elif name == "link_bandwidth":  # both directions together, as data sheets say
            card = replace(card, link=replace(card.link, bytes_per_s=value / 2))
        else:
            figure: Any = {GPU_SETTINGS[name][0]: int(value) if name == "sms" else value}
            card = replace(card, **figure)
    return card


def tables() -> dict[str, list[dict[str, str]]]:
    """Every row of every table with all its columns, for the documentation."""
    return {table: [dict(row) for row in _builtin_table(FOLDER, table).values()] for table in TABLES}


def constant(name: str) -> float:
    """A figure of constants.csv, which says what it means and where it is from."""
    return _constants()[name]


@cache
def _constants() -> dict[str, float]:
    return {name: _read_number(name, row, "value", 0) for name, row in _builtin_table(FOLDER, "constants").items()}


@cache
def _architectures() -> dict[str, Architecture]:
    return {
        name: Architecture(name, *(_read_figure(name, row, field.name) for field in fields(Architecture)[1:]))
        for name, row in _builtin_table(FOLDER, "architectures").items()
    }


@cache
def gpu_links() -> dict[str, Link]:
    """Every row of links.csv by its name, at the rate that it names."""
    figures = [field.name for field in fields(Link)[2:]]
    return {
        name: Link(
            name, 1e9 * _read_number(name, row, "GBps", 0) / 2, *(_read_figure(name, row, figure) for figure in figures)
        )
        for name, row in _builtin_table(FOLDER, "links").items()
    }


def _read_figure(name: str, row: Mapping[str, Any], field: str) -> float:
    """A column in microseconds as seconds, any other as it is."""
    if field.endswith("_s"):
        return 1e-6 * _read_number(name, row, field.removesuffix("_s") + "_us", 0)
    return _read_number(name, row, field, 0)


def _gpu_from_row(name: str, row: Mapping[str, Any]) -> Gpu:
    pcie = replace(gpu_links()["PCIe"], bytes_per_s=1e9 * _read_number(name, row, "pcie_GBps", 64) / 2)
    if both_ways_gb := _read_number(name, row, "link_GBps", 0):
        link = replace(gpu_links()[row.get("link") or DEFAULT_LINK], bytes_per_s=1e9 * both_ways_gb / 2)
    else:
        _read_number(name, row, "pcie_GBps")
        link = pcie
    computes = {"bf16": "bf16_TFLOPs", "fp8": "fp8_TFLOPs", "int8": "int8_TOPs", "fp4": "fp4_TFLOPs"}
    rates = {name_: 1e12 * _read_number(name, row, column, 0) for name_, column in computes.items() if name_ != "bf16"}
    family = str(row.get("architecture") or "").partition(" ")[0]
    return Gpu(
        name=name,
        architecture=_architectures().get(family) or _architectures()[DEFAULT_ARCHITECTURE],
        peaks={"bf16": 1e12 * _read_number(name, row, "bf16_TFLOPs")}
        | {each: rate for each, rate in rates.items() if rate},
        memory_bytes=1e9 * _read_number(name, row, "memory_GB"),
        memory_bytes_per_s=1e9 * _read_number(name, row, "memory_GBps"),
        sms=int(_read_number(name, row, "sms", 132)),
        clock_hz=1e9 * _read_number(name, row, "clock_GHz", 1.8),
        watts=_read_number(name, row, "power_W", 0),
        l2_bytes=1e6 * _read_number(name, row, "l2_cache_MB", 0),
        link=link,
        pcie=pcie,
        source=str(row.get("source") or ""),
    )


def shape_from_row(name: str, row: Mapping[str, Any]) -> ModelShape:
    """A model by the columns of models.csv. Raises HardwareError."""
    needed = [field.name for field in fields(ModelShape)[1:9]]  # those without a default
    defaults = {"mlp_matrices": 3, "tied": 0}
    figures = {each: _read_number(name, row, each) for each in needed}
    figures |= {each: _read_number(name, row, each, default) for each, default in defaults.items()}
    return ModelShape(name, **{each: int(figure) for each, figure in figures.items()})


def _read_number(name: str, row: Mapping[str, Any], column: str, default: float | None = None) -> float:
    """A figure of one entry. An empty cell is one that is not known."""
    value = row.get(column)
    if value in (None, "") and default is not None:
        return default
    try:
        figure = float("nothing" if value is None or value == "" else value)
    except (TypeError, ValueError):
        figure = -1.0
    if figure < 0 or (figure == 0 and default is None):
        raise HardwareError(f"{name}: {column} must be a positive number, not {value!r}")
    return figure


@cache
def _builtin_table(folder: Path, table: str) -> dict[str, Mapping[str, Any]]:
    """Rows of a table by name."""
    with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
        return {next(iter(row.values())): row for row in csv.DictReader(lines)}


def _read_user_table(table: str, file: Path) -> dict[str, Mapping[str, Any]]:
    """As a file has them. Raises HardwareError."""
    try:
        told = read_toml(file)
    except (OSError, ValueError) as problem:
        raise HardwareError(f"{file}: {problem}") from None
    if unknown := sorted(told.keys() - {"gpus", "models"}):
        raise HardwareError(f"{file}: no table {', '.join(unknown)}: it holds gpus and models")
    entries: dict[str, Mapping[str, Any]] = told.get(table, {})
    _, *columns = next(iter(_builtin_table(FOLDER, table).values()))
    for name, row in entries.items():
        if not isinstance(row, dict) or row.keys() - set(columns):
            raise HardwareError(f"{file}: {table}.{name!r} may have {', '.join(columns)} and nothing else")
    return entries


def _find_entry(
    kind: str, name: str, table: str, made: Callable[[str, Mapping[str, Any]], _Entry], file: Path | None = None
) -> _Entry:
    """The entry that is so called, by its name or another of its column `also`, however it is spelt."""
    told = _read_user_table(table, file) if file else {}
    for each, row in told.items():
        made(each, row)  # all: a mistake in any of them is told
    rows = _builtin_table(FOLDER, table) | told
    if name not in rows:
        others = {each: str(row.get("also") or "").split(";") for each, row in rows.items()}
        names = {_normalise_name(also): each for each, those in others.items() for also in those if also}
        names |= {_normalise_name(row): row for row in rows}
        if (result := names.get(_normalise_name(name))) is None:
            near = dict.fromkeys(
                names[get_close_match]
                for get_close_match in get_close_matches(_normalise_name(name), names, n=3, cutoff=0.6)
            )
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise HardwareError(f"unknown {kind} {name!r}{meant}: choose one of {', '.join(rows)}")
        name = result
    return made(name, rows[name])


def _normalise_name(name: str) -> str:
    """A name without what people write differently: capitals, spaces, hyphens, the maker."""
    plain = "".join(each for each in name.casefold() if each.isalnum() or each == ".")
    return plain.removeprefix("nvidia")
