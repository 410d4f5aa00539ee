"""Techniques that save time or memory in a training step, named as in arXiv 2311.03687.

This module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadgen.dissect import DissectError

ADAPTER_RANK = 64
"""Rank of adapters. The toolkit of the paper's authors has the same rank."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A training technique, or a combination of techniques.

    The default values describe the `naive` step, which uses no technique.
    """

    name: str = "naive"
    recompute: bool = False
    flash: bool = False
    quantised: bool = False
    zero: int = 0
    offload: bool = False
    lora: bool = False
    qlora: bool = False

    @property
    def adapters(self) -> bool:
        """True if only adapters (LoRA or QLoRA) are trained."""
        return self.lora or self.qlora


TECHNIQUES: dict[str, tuple[str, dict[str, bool | int], str]] = {
    "naive": ("", {}, "every tensor whole, in one format"),
    "recompute": ("R", {"recompute": True}, "activations are recomputed (torch.utils.checkpoint)"),
    "flash": ("F", {"flash": True}, "attention stores no scores (SDPA)"),
    "quantised": ("Q", {"quantised": True}, "weights have 8 bits (torchao)"),
    "zero1": ("Z1", {"zero": 1}, "optimiser states are split (ZeroRedundancyOptimizer)"),
    "zero2": ("Z2", {"zero": 2}, "gradients are split too (FSDP2, whole weights until the backward pass)"),
    "zero3": ("Z3", {"zero": 3}, "weights are split too (FSDP2)"),
    "offload": ("O", {"offload": True}, "the host holds weights and optimiser states (FSDP2); with zero2 or zero3"),
    "lora": ("L", {"lora": True}, f"only adapters of rank {ADAPTER_RANK} are trained (peft)"),
    "qlora": ("QL", {"qlora": True}, "only adapters are trained, on a base in NF4 (peft, bitsandbytes)"),
}
"""Techniques by name, each with its letters in the paper, its fields of `Technique`, and a description."""
_LETTERS = {letters: word for word, (letters, _, _) in TECHNIQUES.items() if letters}
_LETTERED = re.compile(r"QL|Z[123]|[FRQLO]")


def parse_technique(text: str) -> Technique:
    """Parse the name of a technique, such as `recompute` or `zero3+offload`.

    The notation of arXiv 2311.03687 is also allowed, such as `F+R+Z3O`. Raises DissectError for an unknown name.
    """
    words: list[str] = []
    for part in filter(None, re.split(r"[+\s]+", text)):
        if part.lower() in TECHNIQUES:
            words.append(part.lower())
        elif _LETTERED.sub("", part.upper()) == "":
            words += [_LETTERS[letters] for letters in _LETTERED.findall(part.upper())]
        else:
            raise DissectError(
                f"unknown technique {part!r}", f"Join techniques with +: {', '.join(TECHNIQUES)}. Or write F+R+Z3O."
            )
    settings: dict[str, bool | int] = {}
    for word in words:
        settings |= TECHNIQUES[word][1]
    if sum(word.startswith("zero") for word in words) > 1 or {"lora", "qlora"} <= {*words}:
        raise DissectError(f"{text!r} has two ZeRO stages or two kinds of adapters", "Choose one of them.")
    name = "+".join(word for word in dict.fromkeys(words) if word != "naive") or "naive"
    return Technique(name, **settings)  # type: ignore[arg-type]  # keys are field names


def unsupported_reason(technique: Technique, device: str, processes: int) -> str:
    """Return the reason why a technique cannot be measured on this device, or "" if it can be measured."""
    reasons = {
        "offload needs a GPU: on CPUs the host holds the weights already": technique.offload and device == "cpu",
        "offload needs zero2 or zero3": technique.offload and technique.zero < 2,
        f"{technique.name} needs --processes 2 or more": technique.zero > 0 and processes < 2,
        "quantised weights cannot have adapters: use qlora": technique.quantised and technique.adapters,
        "quantised weights cannot be split: choose a technique without ZeRO": technique.zero > 0
        and (technique.quantised or technique.qlora),
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)
