"""Compares the answers to canaries under load with the answers to the same prompts without load (--verify).

A canary is a test prompt. A server that answers it differently under load has a fault that no latency shows, such as
answers that are swapped between requests. Small differences are also possible on a correct server: the batch decides
the order of additions, and a rounding error can change a word and all words after this word. Answers are therefore
classified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.run.canary import Canary

Kind = Literal["same", "other_prompt", "empty", "replacement", "different", "diverges"]
"""How an answer differs from the answer to the same prompt without load:

- same: It is equal.
- other_prompt: It is the answer to another canary, or contains the code word of another canary.
- empty: It has no text.
- replacement: It contains U+FFFD, which the answer without load does not contain.
- different: It differs from the beginning.
- diverges: It begins in the same way. A correct server does this too, because of rounding errors.
"""
WRONG: tuple[Kind, ...] = ("other_prompt", "empty", "replacement", "different")
MIN_PREFIX = 0.1
"""Minimum length of the common beginning of two answers, as a share of the answer without load, from which an answer
`diverges` and is not `different`."""
LEVEL_FACTOR = 4
"""The upper end of each level of load is this factor above that of the level below it."""

IntervalOf = Callable[[float, int], tuple[float, float]]
"""Function that returns the 95% interval of a share, from the number of successes and the number of independent trials.
"""


class CanaryLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to canaries (test prompts) that were sent at one level of load."""

    low: int
    """Minimum number of requests in flight when a canary of this level was sent, without canaries."""
    high: int
    """Maximum number of requests in flight."""
    answers: int
    same: int
    """Number of answers that are equal to the answer without load."""
    wrong: int
    """Number of answers that are wrong, which does not include those that diverge."""
    same_ci95: tuple[float, float]
    """95% interval of the share of equal answers (Wilson). Each canary counts as one trial."""


class CanaryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to canaries (test prompts) under load, compared with the answers to the same prompts without load."""

    canaries: int
    """Number of canaries that were answered completely before the load."""
    answers: int
    """Number of complete answers under load."""
    same: int
    """Number of answers under load that are equal to the answer without load."""
    share: float | None
    """`same / answers`. None if there are no answers under load."""
    share_ci95: tuple[float, float] | None
    """95% interval of the share (Wilson). Each canary counts as one trial, even if it was asked several times, because
    the answers to one prompt are not independent."""
    common_prefix: float | None
    """Mean length of the beginning that an unequal answer shares with the answer without load, as a share of that
    answer's length. None if every answer is equal."""
    kinds: dict[str, int]
    """Number of unequal answers under load by kind: `other_prompt`, `empty`, `replacement`, `different`, `diverges`."""
    levels: list[CanaryLevel]
    """Levels of load, from low to high."""
    right_to: int | None
    """Highest number of requests in flight up to which no answer was wrong. None if no answer was wrong, or if wrong
    answers do not depend on the load."""
    wrong_from: int | None
    """Lowest number of requests in flight with a wrong answer. None if no answer was wrong."""
    alone: int
    """Number of complete answers after the load."""
    alone_same: int
    """Number of answers after the load that are equal to the answer before the load. If the server answers differently
    even without load, its answers are not reproducible."""
    failed: int
    """Number of canaries that got no complete answer: before, during or after the load."""

    @property
    def wrong(self) -> int:
        """Number of wrong answers to canaries (test prompts) under load.

        Answers of the kind `diverges` are not wrong: they begin like the answer without load, and rounding errors can
        change the rest.
        """
        return sum(count for kind, count in self.kinds.items() if kind in WRONG)


def compare_canaries(canaries: Sequence[Canary], frame: Frame, interval: IntervalOf) -> CanaryFigures | None:
    """Compare the answers to canaries under load with the answers without load. Return None if the run has no canaries.

    A canary is a test prompt that is sent both under load and without load. `frame` contains the requests of the load.
    `interval` is a function that returns the 95% confidence interval of a share.
    """
    if not canaries:
        return None
    complete = [canary for canary in canaries if canary.state == "complete"]
    cancelled = sum(canary.error_kind == "cancelled" for canary in canaries)
    alone = {canary.number: canary for canary in complete if canary.moment == "before"}
    # The last canaries of the moment `during` may be sent when no request of the load is left.
    load_end_ns = float(np.nanmax(frame.end_ns[frame.measured], initial=-np.inf))
    during = [
        canary
        for canary in complete
        if canary.moment == "during" and canary.number in alone and (canary.sent_ns or 0) <= load_end_ns
    ]
    after = [canary for canary in complete if canary.moment == "after" and canary.number in alone]
    kinds = [classify(canary, alone) for canary in during]
    loads = in_flight_at(frame, np.array([canary.sent_ns or 0 for canary in during], float))
    wrong = np.array([kind in WRONG for kind in kinds], bool)
    same = sum(kind == "same" for kind in kinds)
    prefixes = [
        _prefix_share(canary.text, alone[canary.number].text)
        for canary, kind in zip(during, kinds, strict=True)
        if kind != "same"
    ]
    right_to = None
    if wrong.any() and (loads[~wrong] < loads[wrong].min()).any():
        right_to = int(loads[~wrong][loads[~wrong] < loads[wrong].min()].max())
    return CanaryFigures(
        canaries=len(alone),
        answers=len(during),
        same=same,
        share=same / len(during) if during else None,
        share_ci95=_interval(same, [canary.number for canary in during], interval) if during else None,
        common_prefix=round(float(np.mean(prefixes)), 4) if prefixes else None,
        kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind != "same"},
        levels=_levels(loads, kinds, [canary.number for canary in during], interval),
        right_to=right_to,
        wrong_from=int(loads[wrong].min()) if wrong.any() else None,
        alone=len(after),
        alone_same=sum(classify(canary, alone) == "same" for canary in after),
        failed=len(canaries) - len(complete) - cancelled,
    )


def classify(answer: Canary, alone: dict[int, Canary]) -> Kind:
    """Return how the answer to a canary (a test prompt) differs from the answer to the same prompt without load.

    `alone` maps the number of each canary to its answer without load.
    """
    expected = alone[answer.number].text
    if answer.text == expected:
        return "same"
    others = [other for number, other in alone.items() if number != answer.number]
    is_swapped = any(
        answer.text == other.text or (other.code in answer.text and other.code not in expected) for other in others
    )
    if is_swapped and answer.text.strip():
        return "other_prompt"
    if not answer.text.strip():
        return "empty"
    if "\ufffd" in answer.text and "\ufffd" not in expected:
        return "replacement"
    return "diverges" if _prefix_share(answer.text, expected) >= MIN_PREFIX else "different"


def in_flight_at(frame: Frame, instants_ns: Floats) -> Floats:
    """Return how many requests of the load were in flight at each of the times `instants_ns`.

    Warm-up requests do not count.
    """
    rows = frame.measured & ~np.isnan(frame.sent_ns)
    sent, ended = np.sort(frame.sent_ns[rows]), np.sort(frame.end_ns[rows & ~np.isnan(frame.end_ns)])
    begun = np.searchsorted(sent, instants_ns, "right")
    return np.asarray(begun - np.searchsorted(ended, instants_ns, "right"), float)


def _prefix_share(text: str, expected: str) -> float:
    """Return the length of the common beginning of two texts, as a share of the length of `expected`."""
    pairs = zip(text, expected, strict=False)
    common = next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(text), len(expected)))
    return common / len(expected) if expected else 0.0


def _interval(same: int, numbers: Sequence[int], interval: IntervalOf) -> tuple[float, float]:
    """Return the 95% interval of the share of answers that are equal to the first answer to the same canary.

    A canary is a test prompt. `numbers` contains the number of the canary of each answer, and `same` is the number of
    equal answers. `interval` computes an interval from the numbers of successes and trials.

    All answers to one canary count as one trial, because they are not independent: if the prompt is sensitive to
    rounding errors, many of its answers differ, otherwise none do. If each answer counted as a trial, a few canaries
    that are sent often would make the interval too narrow.
    """
    trials = len(set(numbers))
    return interval(same / len(numbers) * trials, trials)


def _levels(loads: Floats, kinds: Sequence[Kind], numbers: Sequence[int], interval: IntervalOf) -> list[CanaryLevel]:
    """Return the results of the canaries (test prompts), grouped by levels of load.

    The load of an answer is the number of requests in flight. The levels are 0, 1 to 4, 5 to 16, and so on. Levels
    without answers are left out.

    `loads`, `kinds` and `numbers` have one element per answer: the load, the result of the comparison, and the number
    of the canary. `interval` is the function that computes the 95% interval of a share.
    """
    by_level: dict[int, list[int]] = {}
    for index, load in enumerate(loads):
        high = 0
        while load > high:
            high = high * LEVEL_FACTOR or LEVEL_FACTOR
        by_level.setdefault(high, []).append(index)
    levels = []
    for _, rows in sorted(by_level.items()):
        same = sum(kinds[row] == "same" for row in rows)
        levels.append(
            CanaryLevel(
                low=int(loads[rows].min()),
                high=int(loads[rows].max()),
                answers=len(rows),
                same=same,
                wrong=sum(kinds[row] in WRONG for row in rows),
                same_ci95=_interval(same, [numbers[row] for row in rows], interval),
            )
        )
    return levels
