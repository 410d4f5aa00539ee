"""The rules by which engines fill their steps, today and in 2023, each with the source file that it is from.

`current` is what the simulated servers speak for: vLLM 0.19 (V1), TGI 3, LightLLM 1.2. `2023`: vLLM 0.2.0, TGI 1.0.2 and
LightLLM of September 2023, which the throughputs of llm-infer-bench were measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from servers.hardware import Framework, framework
from servers.hardware.inference import Deployment
from servers.hardware.limits import deploy
from servers.simulated.scheduler import UNLIMITED, Policy
from servers.simulated.step_time import StepTime

CURRENT = "current"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One generation of a server's engine: how it fills steps, and what these take beside their kernels."""

    policy: Policy
    framework: str
    """Of frameworks.csv, which says what was measured of it."""
    launch_s: float = 0.0
    """To launch the kernels of one layer; engines that replay CUDA graphs need not."""
    step_s: float = 0.0
    """More per step, and for each sequence in it: scheduling, sampling, detokenising in Python."""
    sequence_s: float = 0.0
    kv_share: float = 1.0
    """As Framework's; and so is the next."""
    prefill_share: float = 1.0
