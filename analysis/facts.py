"""What a Run says without any formula: what was asked, of whom, and how the requests ended."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from typing import Any

from loadgen.record import Record
from loadgen.runfile import Run

EXAMPLES_PER_KIND = 3


def run_facts(run: Run) -> dict[str, Any]:
    """Which run this is and how it can be had again."""
    plan = run.header.plan
    folder = run.path.resolve().parent.name
    return {
        "id": folder,
        "label": plan.get("label") or folder,
        "started_at": run.header.started_at,
        "duration_s": round(_ended_ns(run) / 1e9, 9),
        "arrivals": plan.get("arrivals", "burst"),
        **{name: plan.get(name) for name in ("n", "input_tokens", "output_tokens", "seed", "workers", "timeout_s")},
        "interrupted": run.footer is None or run.footer.interrupted,
        "damaged_lines": run.damaged_lines,
        "notes": [] if run.footer is None else run.footer.notes,
        "command": shlex.join(run.header.command),
        "version": run.header.version,
        "prompts": run.header.client.get("prompts"),
    }


def server_facts(run: Run) -> dict[str, Any]:
    """Who answered, as the probe found it."""
    server = run.header.server
    return {
        "name": server.get("name") or run.header.plan.get("server"),
        "version": server.get("version"),
        "model": server.get("model"),
        "url": server.get("url") or run.header.plan.get("url"),
        "endpoint": server.get("endpoint") or run.header.plan.get("endpoint"),
        "simulated": bool(server.get("simulated", False)),
        "speed": server.get("speed"),
        "limits": server.get("limits") or {},
    }


def request_counts(run: Run) -> dict[str, Any]:
    """How the requests ended. `unrecorded` are those a killed run left no Record of."""
    states = Counter(record.state for record in run.records)
    asked = run.header.plan.get("n") or len(run.records)
    return {
        "sent": states.total() - states["dropped"],
        **{state: states[state] for state in ("complete", "truncated", "failed", "dropped")},
        "unrecorded": max(0, asked - len(run.records)),
        "errors": dict(Counter(_kind(record) for record in run.records if record.state != "complete").most_common()),
        "examples": _examples(run.records),
    }


def token_counts(run: Run) -> dict[str, Any]:
    """What was asked and what the server reported, over the requests sent; mismatches where both are known.

    An output mismatch is a complete answer of another length than asked, which only servers that cannot fix the
    length give; elsewhere such an answer is truncated.
    """
    sent = [record for record in run.records if record.state != "dropped"]
    complete = [record for record in sent if record.state == "complete"]
    return {
        "prompt_asked": sum(record.prompt_tokens_asked for record in sent),
        "prompt_reported": _sum(record.prompt_tokens for record in sent),
        "output_asked": sum(record.output_tokens_asked for record in sent),
        "output_reported": _sum(record.output_tokens for record in sent),
        "prompt_mismatches": sum(_differ(record.prompt_tokens, record.prompt_tokens_asked) for record in sent),
        "output_mismatches": sum(_differ(record.output_tokens, record.output_tokens_asked) for record in complete),
        "prompt_unreported": sum(record.prompt_tokens is None for record in complete),
        "counted_by": dict(Counter(record.counted_by or "nobody" for record in complete)),
    }


def _ended_ns(run: Run) -> int:
    """The footer's instant; without one the last instant that anything is known of."""
    if run.footer is not None:
        return run.footer.ended_ns
    instants = [sample.at_ns for sample in run.telemetry]
    instants += [record.end_ns for record in run.records if record.end_ns is not None]
    return max(instants, default=0)


def _kind(record: Record) -> str:
    return record.error_kind or record.state


def _examples(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """The most frequent details of each error kind, with how often they occurred and one request's id."""
    details: dict[str, Counter[tuple[str, int | None]]] = {}
    first: dict[tuple[str, str, int | None], int] = {}
    for record in records:
        if record.state != "complete":
            detail = (record.error_detail, record.http_status)
            details.setdefault(_kind(record), Counter())[detail] += 1
            first.setdefault((_kind(record), *detail), record.id)
    return {
        kind: [
            {"count": count, "detail": text, "http_status": status, "request": first[kind, text, status]}
            for (text, status), count in counts.most_common(EXAMPLES_PER_KIND)
        ]
        for kind, counts in details.items()
    }


def _sum(values: Iterable[int | None]) -> int:
    return sum(value for value in values if value is not None)


def _differ(reported: int | None, asked: int) -> bool:
    return reported is not None and reported != asked
