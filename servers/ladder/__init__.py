"""Support for models with Ladder Residual (arXiv 2501.06589): a checkpoint converter, and a plugin for vLLM."""

from pathlib import Path

LADDER_ARCHITECTURE = "LadderLlamaForCausalLM"
"""Name of the architecture in a model's config.json."""
PLUGIN_FOLDER = Path(__file__).with_name("plugin")
"""Folder that vLLM needs on its PYTHONPATH to serve ladder models."""
