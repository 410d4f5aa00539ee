"""Reads the dimensions of a model from a config.json in the format of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import json

from loadgen.servers.errors import DECODE_ERRORS, read_settings
from loadgen.servers.hardware import HardwareError, ModelShape, shape_from_row


def shape_of(path: Path) -> ModelShape:
    """Return the dimensions of a model from its config.json. Llama, GPT-2, DeepSeek and related models are supported.

    `path` is the config.json or its folder. Raises HardwareError if the file is invalid.
    """
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.decode(read_settings(path).encode(), type=dict[str, Any])
    except OSError as problem:
        raise HardwareError(f"{path}: {problem.strerror}. Name a config.json, its folder, or a listed model.") from None
    except (ValueError, *DECODE_ERRORS) as problem:
        raise HardwareError(f"{path}: {problem}") from None
    config |= config.get("text_config") or {}
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head")
    model_type = str(config.get("model_type", ""))
    prefixes = ("gpt", "bloom", "opt", "falcon", "phi")
    ungated = model_type.startswith(prefixes) and model_type not in ("phi3", "phimoe", "gpt_oss")
    tied = config.get("tie_word_embeddings", model_type.startswith(("gpt2", "bloom", "opt")))
    head_dim = _first(config, "qk_nope_head_dim", "head_dim", default=(hidden or 0) // (heads or 1))
    row = {
        "layers": _first(config, "num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "intermediate": _first(
            config, "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", default=4 * (hidden or 0)
        ),
        "kv_heads": _first(config, "num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "vocabulary": _first(config, "vocab_size"),
        "mlp_matrices": 2 if ungated else 3,
        "tied": int(bool(tied)),
        "parameters": 1,  # replaced below: the file does not state it
    }
    row |= _experts(config) | _attention(config)
    shape = shape_from_row(str(config.get("_name_or_path") or path.parent.name or path.name), row)
    return replace(shape, parameters=shape.layer_parameters + (2 - shape.tied) * shape.head_parameters)


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the value of the first key in `names` whose value in `config` is set and not 0.

    Return `default` if there is no such key."""
    return next((config[name] for name in names if config.get(name)), default)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of mixtures.csv that describe experts. The result is empty for a dense model."""
    count = _first(config, "n_routed_experts", "num_experts", "num_local_experts")
    if not count:
        return {}
    size = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = _first(config, "shared_expert_intermediate_size", default=0)
    if not shared and size:
        shared = size * _first(config, "n_shared_experts", default=0)
    return {
        "experts": count,
        "experts_per_token": _first(config, "num_experts_per_tok", "experts_per_token"),
        "expert_intermediate": size,
        "shared_intermediate": shared,
        "dense_layers": _first(config, "first_k_dense_replace", default=len(config.get("mlp_only_layers") or ())),
    }


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of mixtures.csv that describe the attention of the model with this config.json.

    The columns depend on the kind of attention: latent attention (MLA), sliding windows, or linear attention. For a
    model without these kinds, the only column is `gated`, which is 1 if a gate multiplies the result of attention.
    """
    if config.get("kv_lora_rank"):
        return {
            "q_rank": _first(config, "q_lora_rank", default=0),
            "kv_rank": config["kv_lora_rank"],
            "rope_dim": _first(config, "qk_rope_head_dim", default=0),
            "value_dim": _first(config, "v_head_dim", default=0),
        }
    kinds = config.get("layer_types") or ()
    columns: dict[str, Any] = {"gated": int(bool(config.get("attn_output_gate")))}
    if windows := sum(kind == "sliding_attention" for kind in kinds):
        columns |= {"window": config.get("sliding_window"), "window_layers": windows}
    if linear := sum(kind == "linear_attention" for kind in kinds):
        columns |= {
            "linear_layers": linear,
            "linear_key_heads": config.get("linear_num_key_heads"),
            "linear_value_heads": config.get("linear_num_value_heads"),
            "linear_head_dim": config.get("linear_value_head_dim"),
        }
    return columns
