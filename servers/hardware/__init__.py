"""What GPUs, links and models can do at best: data-sheet figures, and nothing of ours.

Pure, so that the simulator, the matrix and the analysis can all use it. Every table is a CSV file of this folder, one
row per entry: a new GPU is one row of gpus.csv, or, at run time, one table of a TOML file with the same columns:

    [gpus."My card"]
    bf16_TFLOPs = 148
    memory_GB = 96
    memory_GBps = 4000
    link_GBps = 900         # both directions together; pcie_GBps where it has none

    [models."My-7B"]
    layers = 32             # and hidden, intermediate, heads, kv_heads, head_dim, vocabulary, parameters
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

_Entry = TypeVar("_Entry", "Gpu", "ModelShape", "NumberFormat")

FOLDER = Path(__file__).parent
"""Where the tables are."""
DEFAULT_GPU = "A800-80GB SXM"
DEFAULT_MODEL = "Llama-2-7B"
DEFAULT_FORMAT = "bf16"


class HardwareError(ValueError):
    """A GPU, model or number format that is not known, or not described as its table wants it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data-sheet figures. Further columns of gpus.csv wait for who needs them."""

    name: str
    flops_per_s: float
    """Dense bf16 with fp32 accumulation."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One way, to the other GPUs: NVLink where there is one, else PCIe."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer with gated MLPs and untied embeddings (Llama)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int

    @property
    def layer_parameters(self) -> int:
        """Matrix elements that every token passes: Q and output, K and V, and three matrices of the MLP, per layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Elements of the output head, which only the last token of a sequence passes."""
        return self.hidden * self.vocabulary

    @property
    def kv_values(self) -> int:
        """Values in the KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How weights, activations and KV cache are stored."""

    name: str
    bytes_per_value: float


def gpu(name: str, file: Path | None = None) -> Gpu:
    """A GPU by its name. Raises HardwareError, which names the nearest one and all there are."""
    return _pick("GPU", name, gpus(file))


def model(name: str, file: Path | None = None) -> ModelShape:
    """A model by its name. Raises HardwareError, as `gpu`."""
    return _pick("model", name, models(file))


def number_format(name: str) -> NumberFormat:
    """A number format by its name. Raises HardwareError, as `gpu`."""
    return _pick("number format", name, {each: _number_format(each, row) for each, row in _rows("formats").items()})


def gpus(file: Path | None = None) -> dict[str, Gpu]:
    """Every GPU of gpus.csv and of a TOML file, by name; the file wins. Raises HardwareError."""
    return {name: _gpu(name, row) for name, row in _rows("gpus", file).items()}


def models(file: Path | None = None) -> dict[str, ModelShape]:
    """Every model of models.csv and of a TOML file, by name; the file wins. Raises HardwareError."""
    return {name: _model(name, row) for name, row in _rows("models", file).items()}


def tables() -> dict[str, list[dict[str, str]]]:
    """Every row of every table with all its columns, for the documentation."""
    return {table: [dict(row) for row in _rows(table).values()] for table in ("gpus", "models", "formats")}


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    both_ways_gb = _number(name, row, "link_GBps", 0) or _number(name, row, "pcie_GBps")
    return Gpu(
        name=name,
        flops_per_s=1e12 * _number(name, row, "bf16_TFLOPs"),
        memory_bytes=1e9 * _number(name, row, "memory_GB"),
        memory_bytes_per_s=1e9 * _number(name, row, "memory_GBps"),
        link_bytes_per_s=1e9 * both_ways_gb / 2,
    )


def _model(name: str, row: Mapping[str, Any]) -> ModelShape:
    sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "parameters")
    return ModelShape(name, **{size: int(_number(name, row, size)) for size in sizes})


def _number_format(name: str, row: Mapping[str, Any]) -> NumberFormat:
    return NumberFormat(name, _number(name, row, "bytes_per_value"))


def _number(name: str, row: Mapping[str, Any], column: str, default: float | None = None) -> float:
    """A figure of one entry. An empty cell is one that is not known."""
    value = row.get(column)
    if value in (None, "") and default is not None:
        return default
    try:
        figure = float(value or "nothing")
    except (TypeError, ValueError):
        figure = -1.0
    if figure < 0 or (figure == 0 and default is None):
        raise HardwareError(f"{name}: {column} must be a positive number, not {value!r}")
    return figure


def _rows(table: str, file: Path | None = None) -> dict[str, Mapping[str, Any]]:
    """Rows of a table by name, those of the file behind ours. Raises HardwareError."""
    with (FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        key, *columns = reader.fieldnames or ()
        rows: dict[str, Mapping[str, Any]] = {row[key]: row for row in reader}
    if file is None:
        return rows
    try:
        told = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise HardwareError(f"{file}: {problem}") from None
    if unknown := sorted(told.keys() - {"gpus", "models"}):
        raise HardwareError(f"{file}: no table {', '.join(unknown)}: it holds gpus and models")
    entries: dict[str, Mapping[str, Any]] = told.get(table, {})
    for name, row in entries.items():
        if not isinstance(row, dict) or row.keys() - set(columns):
            raise HardwareError(f"{file}: {table}.{name!r} may have {', '.join(columns)} and nothing else")
    return rows | entries


def _pick(kind: str, name: str, known: Mapping[str, _Entry]) -> _Entry:
    if name in known:
        return known[name]
    folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), folded, n=1, cutoff=0.4)
    meant = f" (did you mean {folded[near[0]]}?)" if near else ""
    raise HardwareError(f"unknown {kind} {name!r}{meant}: choose one of {', '.join(known)}")
