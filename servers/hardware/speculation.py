"""Speculative decoding: a draft of several tokens, which one step of the model verifies together."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.servers.hardware import HardwareError

DEFAULT_ACCEPTANCE = 0.55
"""Default probability that a drafted token is accepted. With three drafted tokens and multi-token prediction, it fits
closed loops of DeepSeek-R1 and Qwen3.5-397B-A17B best: 0.5 on SGLang and 0.6 on TensorRT-LLM (InferenceX, random
prompts). Real text has higher acceptances.
"""


@dataclass(frozen=True, slots=True)
class TokenDraft:
    """Settings of speculative decoding: in each step, `draft_tokens` tokens are drafted for every sequence."""

    draft_tokens: int
    acceptance: float
    """Probability that a drafted token is accepted if all tokens before it in the draft were accepted."""

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or not 0 <= self.acceptance <= 1:
            raise HardwareError(
                f"speculation with {self.draft_tokens} drafted tokens and an acceptance of {self.acceptance:g}: "
                "draft 1 token or more, and give an acceptance of 0 to 1"
            )

    @property
    def verified_tokens(self) -> int:
        """Number of tokens that one step of the model computes per sequence: the drafted tokens, and the token before
        them.
        """
        return self.draft_tokens + 1

    @property
    def tokens_per_step(self) -> float:
        """Expected number of tokens that one step adds to a sequence: the accepted draft and one more token."""
        return sum(self.acceptance**position for position in range(self.verified_tokens))
