"""The shape of a model from its config.json, as Hugging Face's transformers write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import json

from loadgen.servers.errors import DECODE_ERRORS, read_settings
from loadgen.servers.hardware import HardwareError, ModelShape, shape_from_row


def shape_of(path: Path) -> ModelShape:
    """By the names of Llama, GPT-2 and their kin. Raises HardwareError."""
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        told = json.decode(read_settings(path).encode(), type=dict[str, Any])
    except (OSError, ValueError, *DECODE_ERRORS) as problem:
        raise HardwareError(f"{path}: {problem}") from None
    told |= told.get("text_config") or {}
    if any("expert" in key and value for key, value in told.items()):
        raise HardwareError(f"{path}: mixtures of experts are not modelled: choose a dense model")

    def first(*names: str, default: Any = None) -> Any:
        return next((told[name] for name in names if told.get(name)), default)

    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head")
    kind = str(told.get("model_type", ""))
    gated = 2 if kind.startswith(("gpt", "bloom", "opt", "falcon", "phi")) and kind != "phi3" else 3
    row = {
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "intermediate": first("intermediate_size", "n_inner", "ffn_dim", default=4 * (hidden or 0)),
        "kv_heads": first("num_key_value_heads", default=heads),
        "head_dim": first("head_dim", default=(hidden or 0) // (heads or 1)),
        "vocabulary": first("vocab_size"),
        "mlp_matrices": gated,
        "tied": int(bool(told.get("tie_word_embeddings", kind.startswith(("gpt2", "bloom", "opt"))))),
        "parameters": 1,
    }
    result = shape_from_row(str(told.get("_name_or_path") or path.parent.name or path.name), row)
    return replace(result, parameters=result.layer_parameters + (2 - result.tied) * result.head_parameters)
