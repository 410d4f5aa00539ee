"""Parses the values of options for shares, such as the cache hit rate.

Users write a share as a number, or name the folder of a run in which a server reported the share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.speculation import Speculation
    from loadgen.analysis.summary import Summary

HIT_RATE_HINT = "Write --cache-hit-rate 0.3, or name the folder of a run against a server that reports cached prompts."
ACCEPTANCE_HINT = "Write --acceptance 0.6, or name the folder of a run against a server that reports its draft tokens."


def parse_cache_hit_rate(text: str | None) -> float:
    """Return the share of prompt tokens that the prefix cache of a server contains.

    `text` is a number from 0 to 1, or the folder of a run. The result is 0 if `text` is None. Raises PlanError for
    other values, and for a run without this share.
    """
    if text is None:
        return 0.0
    share = _number(text, "--cache-hit-rate", HIT_RATE_HINT)
    if share is not None:
        return share
    cached = _summary(text).cached_prompts
    if cached is None:
        raise PlanError(f"{text}: the server did not report how many prompt tokens were in its cache", HIT_RATE_HINT)
    return cached.share


def parse_acceptance(text: str | None, draft_tokens: int) -> float | None:
    """Parse the value `text` of --acceptance: the probability that a server accepts a drafted token.

    - A number from 0 to 1 is returned unchanged.
    - The folder of a run: the probability is computed from the mean number of tokens per step and the number of drafted
      tokens per step in this run.
    - None is returned unchanged.

    `draft_tokens` is the number of drafted tokens per step in the prediction. Raises PlanError for other values, and
    for a run without these figures.
    """
    if text is None:
        return None
    share = _number(text, "--acceptance", ACCEPTANCE_HINT)
    if share is not None:
        _check_draft_tokens(text, draft_tokens)
        return share
    speculation = _summary(text).speculation
    if speculation is None or speculation.acceptance_length is None:
        raise PlanError(f"{text}: the server did not report how many draft tokens it accepted", ACCEPTANCE_HINT)
    _check_draft_tokens(text, draft_tokens)
    drafted = _drafted_per_step(speculation)
    if drafted is None:
        raise PlanError(f"{text}: the server did not report how many draft tokens a step has", ACCEPTANCE_HINT)
    return acceptance_from_length(speculation.acceptance_length, drafted)


def _drafted_per_step(speculation: Speculation) -> int | None:
    """Return the number of drafted tokens per step of a run, or None if it is unknown.

    Some servers do not report this number, but report the acceptance length (mean number of tokens per step) and the
    acceptance rate (share of drafted tokens that are accepted). A step emits the accepted tokens and one more token.
    The number is therefore `(acceptance length - 1) / acceptance rate`.
    """
    if speculation.draft_tokens and speculation.steps:
        return max(1, round(speculation.draft_tokens / speculation.steps))
    if speculation.acceptance_rate and speculation.acceptance_length:
        return max(1, round((speculation.acceptance_length - 1) / speculation.acceptance_rate))
    return None


def _check_draft_tokens(acceptance: str, draft_tokens: int) -> None:
    if not draft_tokens:
        raise PlanError(f"--acceptance {acceptance} needs the number of drafted tokens", "Add --draft-tokens 3.")


def acceptance_from_length(length: float, draft_tokens: int) -> float:
    """Return the probability `p` that the server accepts a drafted token.

    `length` is the mean number of tokens per step, and `draft_tokens` is the number of drafted tokens per step. `p` is
    the solution of

        length = 1 + p + p**2 + ... + p**draft_tokens.

    The result is 1 if `length` exceeds `draft_tokens + 1`, and 0 if `length` is less than 1.
    """
    from scipy.optimize import brentq

    def excess(acceptance: float) -> float:
        return sum(acceptance**position for position in range(draft_tokens + 1)) - length

    if excess(0.0) >= 0:
        return 0.0
    return 1.0 if excess(1.0) <= 0 else float(brentq(excess, 0.0, 1.0))


def _number(text: str, option: str, hint: str) -> float | None:
    """Return the number that `text` contains, or None if `text` names an existing file or folder.

    Raises PlanError with `hint` for any other value of the option `option`, and for a number outside 0 to 1.
    """
    try:
        share = float(text)
    except ValueError:
        if Path(text).exists():
            return None
        raise PlanError(f"{option} {text} is neither a number nor the folder of a run", hint) from None
    if not 0 <= share <= 1:
        raise PlanError(f"{option} {text} is not a share from 0 to 1", hint)
    return share


def _summary(folder: str) -> Summary:
    """Return the summary of the run in a folder. Raises PlanError if the folder contains no run."""
    from loadgen.analysis.build_summary import summarise
    from loadgen.analysis.steady_window import load_run

    return summarise(*load_run(Path(folder)))
