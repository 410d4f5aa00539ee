"""Counts how the requests of a run ended, by state and by kind of error, with examples of what servers said.

A request that a server or a proxy was too busy to take is `rejected`, not `failed`: nothing was wrong with it, and the
same request may be answered a second later. Runs of versions that did not know the state have such requests among the
failed ones, and they stay there: the state is a recorded fact and is not derived again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from loadgen.analysis import summary
from loadgen.analysis.frame import Frame, Outcome, OutcomeCount
from loadgen.analysis.run.runfile import Run

EXAMPLES_MAX = 3
NUMBER = re.compile(r"\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*")
"""Of two errors' words what does not make them different: numbers, addresses, ids."""


def request_counts(run: Run, frame: Frame) -> summary.RequestCounts:
    """Count how the requests ended. `unrecorded` requests are those of which a killed run left no Record."""
    endings = {ending: seen for ending, seen in frame.outcomes.items() if ending.measured}
    states, errors = Counter[str](), Counter[str]()
    for ending, seen in endings.items():
        states[ending.state] += seen.number
        if ending.kind:
            errors[ending.kind] += seen.number
    plan, recorded = run.header.plan, states.total()
    # Of a given time nobody knows how many it would be, and of a file's sessions how many turns.
    planned = 0 if plan.get("duration_s") else (plan.get("n") or 0) * run.header.load.turns
    return summary.RequestCounts(
        sent=recorded - states["dropped"],
        **{state: states[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")},
        unrecorded=max(0, planned - recorded),
        warmup=int((~frame.measured).sum()),
        warmup_incomplete=int((~frame.measured & ~frame.complete).sum()),
        errors=dict(errors.most_common()),
        examples=_examples(endings),
    )


def _examples(endings: Mapping[Outcome, OutcomeCount]) -> dict[str, list[summary.ErrorExample]]:
    """Of each kind of error its most frequent wordings."""
    alike: dict[tuple[str, int | None, str], list[Outcome]] = {}
    for how in endings:
        alike.setdefault((how.kind, how.http_status, NUMBER.sub("N", how.detail)), []).append(how)
    result: dict[str, list[summary.ErrorExample]] = {}
    for (kind, status, words), group in alike.items():
        said = group[0].detail if len(group) == 1 else words
        number, first = sum(endings[how].number for how in group), min(endings[how].id for how in group)
        result.setdefault(kind, []).append(
            summary.ErrorExample(count=number, detail=said, http_status=status, request=first)
        )
    return {kind: sorted(each, key=lambda one: -one.count)[:EXAMPLES_MAX] for kind, each in result.items() if kind}
