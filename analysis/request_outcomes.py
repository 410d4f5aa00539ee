"""Counts how the requests of a run ended, by state and error kind, with examples of error messages.

A request that a server or a proxy was too busy to take is `rejected`, not `failed`: nothing was wrong with it, and the
same request may succeed a second later. Versions without this state recorded such requests as failed. They stay failed,
because the state is a recorded fact and is not derived again.
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
"""Numbers, addresses and ids, which do not distinguish one error message from another."""


def request_counts(run: Run, frame: Frame) -> summary.RequestCounts:
    """Count how the requests ended. `unrecorded` requests are those of a killed run that have no Record."""
    outcomes = {outcome: counted for outcome, counted in frame.outcomes.items() if outcome.measured}
    states, errors = Counter[str](), Counter[str]()
    for outcome, counted in outcomes.items():
        states[outcome.state] += counted.requests
        if outcome.kind:
            errors[outcome.kind] += counted.requests
    plan, recorded = run.header.plan, states.total()
    # With a planned duration, or with sessions from a file, the planned number of requests is unknown.
    planned = 0 if plan.get("duration_s") else (plan.get("n") or 0) * run.header.load.turns
    return summary.RequestCounts(
        sent=recorded - states["dropped"],
        **{state: states[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")},
        unrecorded=max(0, planned - recorded),
        warmup=int((~frame.measured).sum()),
        warmup_incomplete=int((~frame.measured & ~frame.complete).sum()),
        errors=dict(errors.most_common()),
        examples=_examples(outcomes),
    )


def _examples(outcomes: Mapping[Outcome, OutcomeCount]) -> dict[str, list[summary.ErrorExample]]:
    """Return the most frequent messages of each error kind. Messages that differ in numbers only count as one."""
    groups: dict[tuple[str, int | None, str], list[Outcome]] = {}
    for outcome in outcomes:
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
