"""What the page says of objectives: one row each, and one line for the first screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]

KINDS = {"pass": "good", "fail": "bad", "cannot tell": "care"}
SAID = {"pass": "kept", "fail": "not kept", "cannot tell": "cannot be told from this run"}


def rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One row per objective and run: what was asked, the verdict, and what was measured."""
    return [
        {
            "run": run,
            "objective": each["objective"],
            "verdict": each["verdict"],
            "kind": KINDS.get(each["verdict"], "care"),
            "said": each["said"],
        }
        for run, summary in enumerate(summaries)
        for each in summary.get("objectives", ())
    ]


def kept(summary: Summary) -> dict[str, str] | None:
    """How many were kept, and the kind of the worst; None where none was stated."""
    counts = Counter(each["verdict"] for each in summary.get("objectives", ()))
    if not counts:
        return None
    text = ", ".join(f"{counts[verdict]} {said}" for verdict, said in SAID.items() if counts[verdict])
    worst = next(verdict for verdict in ("fail", "cannot tell", "pass") if counts[verdict])
    return {"kind": KINDS[worst], "text": f"{text}."}
