"""Counts the requests of a run by state and error kind, with examples of error messages.

A request is `rejected`, not `failed`, if a server or a proxy was too busy to accept it. The request itself was valid
and may succeed a second later.

Older versions of loadgen recorded such requests as failed. In the results of these older runs, they still count as
failed, because the recorded state is used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from loadgen.analysis import summary
from loadgen.analysis.frame import Frame, Outcome, OutcomeCount
from loadgen.analysis.run.runfile import Run

MAX_EXAMPLES = 3
VARIABLE_PARTS = re.compile(r"\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*")
"""Numbers, addresses and ids. Error messages that differ only in these parts count as one message."""


def request_counts(run: Run, frame: Frame) -> summary.RequestCounts:
    """Return the number of measured requests by state and by error kind.

    If the run was killed, some planned requests have no Record. Their number is `unrecorded` in the result.
    """
    plan = run.header.plan
    # With a planned duration, or with sessions from a file, the planned number of requests is unknown.
    known = not (plan.get("duration_s") or run.header.traffic)
    planned = (plan.get("n") or 0) * run.header.load.turns if known else 0
    removed = sum(part.requests for part in run.removed)
    return count_outcomes(frame, max(0, planned - removed))


def count_outcomes(frame: Frame, planned: int = 0) -> summary.RequestCounts:
    """Return the number of measured requests by state and by error kind.

    `planned` is the number of requests of a complete run, or 0 if it is unknown."""
    outcomes = {
        outcome: counted for outcome, counted in frame.outcomes.items() if outcome.measured and counted.requests
    }
    states, errors = Counter[str](), Counter[str]()
    unsent = 0
    for outcome, counted in outcomes.items():
        states[outcome.state] += counted.requests
        if outcome.state == "abandoned":  # on purpose, so it is no error
            unsent += counted.requests if outcome.detail.startswith("not sent") else 0
        elif outcome.kind:
            errors[outcome.kind] += counted.requests
    recorded = states.total()
    return summary.RequestCounts(
        sent=recorded - states["dropped"] - unsent,
        **{state: states[state] for state in ("complete", "truncated", "failed", "rejected", "dropped", "abandoned")},
        unrecorded=max(0, planned - recorded),
        warmup=int((~frame.measured).sum()),
        warmup_incomplete=int((~frame.measured & ~frame.complete).sum()),
        errors=dict(errors.most_common()),
        examples=_examples(outcomes),
    )


def _examples(outcomes: Mapping[Outcome, OutcomeCount]) -> dict[str, list[summary.ErrorExample]]:
    """Return the most frequent messages of each error kind.

    Messages that differ only in numbers count as one message.
    """
    groups: dict[tuple[str, int | None, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.state == "abandoned":
            continue
        pattern = VARIABLE_PARTS.sub("N", outcome.detail)
        groups.setdefault((outcome.kind, outcome.http_status, pattern), []).append(outcome)
    examples: dict[str, list[summary.ErrorExample]] = {}
    for (kind, status, pattern), group in groups.items():
        if kind:
            example = summary.ErrorExample(
                count=sum(outcomes[outcome].requests for outcome in group),
                detail=group[0].detail if len(group) == 1 else pattern,
                http_status=status,
                request=min(outcomes[outcome].first_id for outcome in group),
            )
            examples.setdefault(kind, []).append(example)
    return {kind: sorted(group, key=lambda one: -one.count)[:MAX_EXAMPLES] for kind, group in examples.items()}
