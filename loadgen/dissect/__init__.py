"""Measurements of a model without a server: times of modules, operators and training steps on this machine.

    results.py           measured values as `--json` prints them: seconds, FLOPs and bytes.
    inference_report.py  text and page of `loadgen dissect inference`.
    training_report.py   text and page of `loadgen dissect training`.
    device_probe.py      the device and its limits: FLOP/s, memory bandwidth, links.
    op_profiler.py       records every operator that torch dispatches, with its module, time and work.
    inference.py         measures one inference step of a model with real tensor shapes and random weights.
    techniques.py        techniques that save time or memory in training, named as in arXiv 2311.03687.
    training.py          measures one training step: time by phase and memory by kind.
    predictions.py       predictions of the hardware model for a training step.
    processes.py         runs a measurement in several processes that share the work.
    models/              the measured model: a Llama in plain PyTorch, on one or several devices.

The measurements need the extra `dissect` (torch, transformers, peft). This file, results.py, techniques.py,
predictions.py and both reports do not import torch.
"""

from __future__ import annotations

from importlib.util import find_spec

from loadgen.errors import LoadgenError, install_hint


class DissectError(LoadgenError):
    """Raised for a missing package, or for a measurement that is not possible on this device."""


def check_installed(*modules: str) -> None:
    """Raise DissectError with installation instructions if one of these modules is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise DissectError(
            f"loadgen dissect needs {', '.join(missing)}",
            f"{install_hint('dissect')} (without a GPU, first: pip install torch "
            "--index-url https://download.pytorch.org/whl/cpu)",
        )
