"""A Llama in plain PyTorch, of any shape, on one device or split over several, which `loadgen dissect` takes apart; and
the plugin and the checkpoints with which vLLM serves Ladder Residual.

Only this folder and `loadgen/dissect` import torch.
"""

from pathlib import Path

LADDER_ARCHITECTURE = "LadderLlamaForCausalLM"
"""The architecture, as a model's config.json names it."""
PLUGIN_FOLDER = Path(__file__).with_name("plugin")
"""With this folder on its PYTHONPATH a vLLM serves ladders."""
