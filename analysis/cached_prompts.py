"""Computes how many prompt tokens of a run the server already had in its prefix cache.

With a prefix cache, a server does not compute the beginning of a prompt again if an earlier prompt had the same
beginning. If a run sends prompts that the server already knows, its TTFT and throughput look much better than they are
for new prompts. This happens, for example, when a run has the same seed as an earlier run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from loadgen.analysis.frame import Frame
from loadgen.analysis.run.canary import Canary
from loadgen.analysis.run.runfile import Run

if TYPE_CHECKING:
    from loadgen.analysis.summary import CounterCheck

MARK = "cached_prompt_tokens"
"""Name of the count in `Record.marks`, and of the server's counter."""
MAX_SHARE = 0.05
"""Maximum share of cached prompt tokens at which the prompts of a run count as new to the server."""


class CachedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt tokens that the server found in its prefix cache."""

    tokens: int
    """Number of cached prompt tokens."""
    prompt_tokens: int
    """Number of all prompt tokens."""
    share: float
    """`tokens / prompt_tokens`."""
    source: Literal["responses", "counters"]
    """`responses`: the server states the number in each response. `counters`: the growth of the server's counters. This
    growth includes the requests of other clients."""
    repeated: bool
    """True if cached tokens are expected: the workload repeats prompts, or the run is simulated in virtual time."""
    server_share: float | None = None
    """The share according to the server's counters, which include the requests of other clients. None if the server
    has no such counters."""
    sent_before: str = ""
    """Time (RFC 3339, UTC) at which this machine sent prompts with the same seed to this server before. Empty if that
    is not known."""

    @property
    def unexpected(self) -> bool:
        """Return True if the prompts were meant to be new to the server and were not."""
        return self.share >= MAX_SHARE and not self.repeated


def find_cached_prompts(
    run: Run, frame: Frame, counters: Mapping[str, CounterCheck], canaries: Sequence[Canary] = ()
) -> CachedPrompts | None:
    """Return the cached prompt tokens of a run, or None if the server does not report them.

    The numbers come from the responses. If the responses do not state them, the numbers come from the server's
    `counters`.

    The counters also include the `canaries` (test prompts of --verify), so two corrections are made:

    - The tokens of all canaries are subtracted from the prompt tokens.
    - The tokens of the canaries during the load are subtracted from the cached tokens, because these canaries repeat
      earlier prompts and are assumed to be cached. If some were not cached, the resulting share is too low.
    """
    source: Literal["responses", "counters"] = "responses"
    tokens, prompt_tokens = count_in_responses(frame)
    server_share = None
    cached, prompts = counters.get(MARK), counters.get("prompt_tokens")
    if cached and prompts and not cached.resets and not prompts.resets:
        repeated_tokens = sum(canary.prompt_tokens or 0 for canary in canaries if canary.moment == "during")
        asked_tokens = sum(canary.prompt_tokens or 0 for canary in canaries)
        counted, cached_tokens = prompts.server - asked_tokens, max(0, cached.server - repeated_tokens)
        if counted > 0:
            server_share = round(cached_tokens / counted, 4)
            if not prompt_tokens:
                source, tokens, prompt_tokens = "counters", cached_tokens, counted
    if not prompt_tokens:
        return None
    return CachedPrompts(
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        share=round(tokens / prompt_tokens, 4),
        source=source,
        repeated=bool(run.header.server.get("virtual"))
        or any(facts.shares_prefixes or facts.has_own_lengths for facts in run.header.workloads)
        or run.header.load.recorded,
        server_share=server_share,
        sent_before=str(run.header.client.get("sent_before", "")),
    )


def count_in_responses(frame: Frame) -> tuple[int, int]:
    """Return two sums: the cached prompt tokens, and all prompt tokens.

    The sums cover the complete, measured responses that state both numbers.
    """
    cached = frame.mark(MARK)
    known = frame.complete & frame.measured & ~np.isnan(cached) & ~np.isnan(frame.prompt_reported)
    return int(cached[known].sum()), int(frame.prompt_reported[known].sum())
