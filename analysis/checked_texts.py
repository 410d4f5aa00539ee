"""Counts responses whose text is suspect (such as an empty text), and responses that contain an expected text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loadgen.analysis.frame import Frame

SUSPECT = {
    "blank_text": "without text",
    "looping_text": "that end in a loop",
    "replacement_text": "with U+FFFD, which stands for bytes that are not UTF-8",
    "cut_json": "with incomplete JSON",
}
"""Marks of responses with a suspect text, and the words for such responses in a report."""


class SuspectTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the complete responses whose text was checked (--verify), and of those whose text is suspect."""

    checked: int
    """Number of responses whose text was checked: the first 20 of each worker, and every 20th."""
    counts: dict[str, int]
    """Number of responses by kind: `blank_text`, `looping_text`, `replacement_text`, `cut_json`. Kinds without a
    response are left out."""


class ExpectedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Number and share of complete responses that contain the text that their request expects.

    A request states this text as `expect` in a file of requests. `checked` is the number of complete responses to such
    requests.
    """

    checked: int
    expected: int
    """Number of responses that contain the expected text."""
    share: float
    """`expected / checked`."""
    share_ci95: tuple[float, float]
    """95% interval of the share (Wilson)."""


def find_expected_texts(frame: Frame, interval: Callable[[int, int], tuple[float, float]]) -> ExpectedTexts | None:
    """Return how many responses contain their expected text, or None if no request states an expected text."""
    marks = frame.mark("expected_text")[frame.measured & frame.complete]
    checked, expected = int((marks >= 0).sum()), int((marks == 1).sum())
    if not checked:
        return None
    return ExpectedTexts(
        checked=checked, expected=expected, share=expected / checked, share_ci95=interval(expected, checked)
    )


def find_suspect_texts(frame: Frame) -> SuspectTexts | None:
    """Return the number of suspect texts among the complete responses, or None if no text was checked."""
    rows = frame.measured & frame.complete
    checked = int((frame.mark("checked_text")[rows] > 0).sum())
    if not checked:
        return None
    counts = {mark: int((frame.mark(mark)[rows] > 0).sum()) for mark in SUSPECT}
    return SuspectTexts(checked=checked, counts={mark: count for mark, count in counts.items() if count})
