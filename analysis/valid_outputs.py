"""Counts the responses whose tool calls and JSON fit the schemas of their requests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loadgen.analysis.frame import Frame


class ValidOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """How many complete responses fit the JSON schemas of their requests.

    The check covers responses with a tool call, and responses that must contain a tool call or be JSON.
    """

    checked: int
    """Responses that were checked: those with a tool call, and those that must contain one or must be JSON."""
    valid: int
    share: float | None
    """`valid / checked`."""
    share_ci95: tuple[float, float]
    """Exact binomial 95% interval of the share (Clopper and Pearson)."""
    errors: dict[str, int]
    """Number of responses by the reason why they are not valid or could not be checked, the most frequent first."""
    unchecked: int
    """Responses that parse, but could not be compared with their schema. They are not part of `checked`."""
    uncalled: int
    """Responses to requests with tools that contain only text, which the request permits."""


def find_valid_outputs(frame: Frame, share_interval: Callable[[int, int], tuple[float, float]]) -> ValidOutputs | None:
    """Count the responses whose tool calls and JSON fit their schemas.

    Return None if no complete, measured request had tools or a schema. `share_interval` returns the 95% interval of a
    share, from its numerator and denominator.
    """
    complete = frame.measured & frame.complete
    valid = frame.mark("valid_output")[complete]
    unchecked = int((frame.mark("unchecked_output")[complete] > 0).sum())
    uncalled = int((frame.mark("uncalled_output")[complete] > 0).sum())
    number_valid, checked = int((valid == 1).sum()), int((valid >= 0).sum())
    if not (checked or unchecked or uncalled):
        return None
    return ValidOutputs(
        checked=checked,
        valid=number_valid,
        share=number_valid / checked if checked else None,
        share_ci95=share_interval(number_valid, checked),
        errors=dict(frame.output_errors),
        unchecked=unchecked,
        uncalled=uncalled,
    )
