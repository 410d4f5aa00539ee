"""Reads the dimensions of a model from a config.json in the format of Hugging Face's transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import json

from loadgen.servers.errors import DECODE_ERRORS, read_settings
from loadgen.servers.hardware import HardwareError, ModelShape, shape_from_row


def shape_of(path: Path) -> ModelShape:
    """Return the dimensions of a dense model from its config.json, such as that of Llama, GPT-2 or a related model.

    `path` is the config.json or its folder. Raises HardwareError if the file is invalid or describes a mixture of
    experts.
    """
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.decode(read_settings(path).encode(), type=dict[str, Any])
    except (OSError, ValueError, *DECODE_ERRORS) as problem:
        raise HardwareError(f"{path}: {problem}") from None
    config |= config.get("text_config") or {}
    if any("expert" in key and value for key, value in config.items()):
        raise HardwareError(f"{path}: mixtures of experts are not modelled: choose a dense model")

    def first(*names: str, default: Any = None) -> Any:
        return next((config[name] for name in names if config.get(name)), default)

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head")
    model_type = str(config.get("model_type", ""))
    ungated = model_type.startswith(("gpt", "bloom", "opt", "falcon", "phi")) and model_type != "phi3"
    tied = config.get("tie_word_embeddings", model_type.startswith(("gpt2", "bloom", "opt")))
    row = {
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "intermediate": first("intermediate_size", "n_inner", "ffn_dim", default=4 * (hidden or 0)),
        "kv_heads": first("num_key_value_heads", default=heads),
        "head_dim": first("head_dim", default=(hidden or 0) // (heads or 1)),
        "vocabulary": first("vocab_size"),
        "mlp_matrices": 2 if ungated else 3,
        "tied": int(bool(tied)),
        "parameters": 1,  # replaced below: the file does not state it
    }
    shape = shape_from_row(str(config.get("_name_or_path") or path.parent.name or path.name), row)
    return replace(shape, parameters=shape.layer_parameters + (2 - shape.tied) * shape.head_parameters)
