"""How a training step saves time or memory, by the names and letters of arXiv 2311.03687; without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadgen.dissect import DissectError

ADAPTER_RANK = 64
"""Of adapters, as in the authors' own toolkit."""


@dataclass(frozen=True, slots=True)
class Technique:
    """One or several together; all off is the naive step."""

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
        return self.lora or self.qlora


TECHNIQUES: dict[str, tuple[str, dict[str, bool | int], str]] = {
    "naive": ("", {}, "every tensor whole, in one format"),
    "recompute": ("R", {"recompute": True}, "activations are computed again (torch.utils.checkpoint)"),
    "flash": ("F", {"flash": True}, "attention keeps no scores (SDPA)"),
    "quantised": ("Q", {"quantised": True}, "weights in 8 bits (torchao)"),
    "zero1": ("Z1", {"zero": 1}, "optimiser states are split (ZeroRedundancyOptimizer)"),
    "zero2": ("Z2", {"zero": 2}, "and gradients (FSDP2, whole weights until the backward pass)"),
    "zero3": ("Z3", {"zero": 3}, "and weights (FSDP2)"),
    "offload": ("O", {"offload": True}, "weights and optimiser states are the host's (FSDP2); with zero2 or zero3"),
    "lora": ("L", {"lora": True}, f"adapters of rank {ADAPTER_RANK} alone are trained (peft)"),
    "qlora": ("QL", {"qlora": True}, "the same on a base in NF4 (peft, bitsandbytes)"),
}
"""Name: letters, what it sets, and what it is."""
_LETTERS = {letters: word for word, (letters, _, _) in TECHNIQUES.items() if letters}
_LETTERED = re.compile(r"QL|Z[123]|[FRQLO]")


def parse_technique(text: str) -> Technique:
    """`recompute`, `zero3+offload`, or as the paper writes it: `F+R+Z3O`. Raises DissectError."""
    words: list[str] = []
    for part in filter(None, re.split(r"[+\s]+", text)):
        if part.lower() in TECHNIQUES:
            words.append(part.lower())
        elif _LETTERED.sub("", part.upper()) == "":
            words += [_LETTERS[each] for each in _LETTERED.findall(part.upper())]
        else:
            raise DissectError(
                f"no technique is called {part!r}", f"Join some of {', '.join(TECHNIQUES)} with +, or F+R+Z3O."
            )
    settings: dict[str, bool | int] = {}
    for word in words:
        settings |= TECHNIQUES[word][1]
    if sum(word.startswith("zero") for word in words) > 1 or {"lora", "qlora"} <= {*words}:
        raise DissectError(f"{text!r} asks for two stages, or two kinds of adapters", "Choose one.")
    name = "+".join(word for word in dict.fromkeys(words) if word != "naive") or "naive"
    return Technique(name, **settings)  # type: ignore[arg-type]  # by the names of its fields


def unsupported_reason(technique: Technique, device: str, processes: int) -> str:
    """Why it cannot be measured here; nothing where it can."""
    reasons = {
        "offload needs a GPU: on CPUs weights are with the host already": technique.offload and device == "cpu",
        "offload needs zero2 or zero3": technique.offload and technique.zero < 2,
        f"{technique.name} needs --processes 2 or more": technique.zero > 0 and processes < 2,
        "quantised weights cannot be adapted: that is qlora": technique.quantised and technique.adapters,
        "quantised weights cannot be split: choose it without ZeRO": technique.zero > 0
        and (technique.quantised or technique.qlora),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)
