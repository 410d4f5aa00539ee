"""Builds the status strip of a page: chips that say whether the figures are valid and meet the objectives.

A page about runs has up to three chips: the validity of the measurement, the requests, and the objectives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from loadgen.analysis.format import percent, pluralise, scale_of, significant
from loadgen.analysis.objectives import ObjectiveVerdict
from loadgen.analysis.report import Chip, Level, findings
from loadgen.analysis.summary import Summary

NAMED_OBJECTIVES = 2
"""Maximum number of objectives that a chip names."""
NAMED_WARNINGS = {findings.OVERLOADED: "server overloaded", findings.HELD_BACK: "tokens held back"}
"""Warnings that the chip names, by the id of the finding, because they change the meaning of every latency."""
MODELLED = Chip("Simulated", "figures of a model", "note")
"""The chip of a simulation in virtual time, in place of the validity: no client took part."""
COMPUTED = Chip("Computed", "figures of a model; nothing was measured", "note")
"""The chip of a page whose figures are computed, without any request."""


def run_chips(summaries: Sequence[Summary]) -> list[Chip]:
    """Return the chips of a page about these runs: validity, requests, and objectives if there are any."""
    return [validity(summaries), requests(summaries), *objectives(summaries)]


def validity(summaries: Sequence[Summary]) -> Chip:
    """Return the chip that says whether the measurement is valid, and how many warnings there are.

    Every finding with the level `warning` or `error` counts as a warning. The page marks these findings.
    """
    verdicts, warnings = [], 0
    ids = set[str]()
    for summary in summaries:
        known = findings.findings(summary)
        verdicts.append(findings.verdict(summary, known))
        warned = [finding for finding in known if finding.level in ("warning", "error")]
        warnings += len(warned)
        ids |= {finding.id for finding in warned}
    invalid = [verdict for verdict in verdicts if verdict.level == "error"]
    named = [text for name, text in NAMED_WARNINGS.items() if name in ids]
    if not invalid and all(summary.server.virtual for summary in summaries):
        text = "; ".join([MODELLED.text, *named])
        return Chip(MODELLED.label, text, "warning") if named else MODELLED
    noted = f", {pluralise(warnings, 'warning')}" if warnings else ""
    if named:
        noted += f": {', '.join(named)}{', …' if warnings > len(named) else ''}"
    if len(summaries) == 1:
        if invalid:
            reason = invalid[0].sentence.removeprefix("Invalid: ").rstrip(".")
            return Chip("Measurement", f"invalid: {reason}", "error")
        return Chip("Measurement", f"valid{noted}", "warning" if warnings else "ok")
    valid = len(summaries) - len(invalid)
    level: Level = "warning" if warnings else "ok"
    if invalid:
        level = "error"
    return Chip("Measurement", f"{valid:,} of {pluralise(len(summaries), 'run')} valid{noted}", level)


def requests(summaries: Sequence[Summary]) -> Chip:
    """Return the chip with the number of complete requests and the most frequent reason for incomplete ones."""
    complete = sum(summary.requests.complete for summary in summaries)
    planned = sum(summary.requests.planned for summary in summaries)
    if complete == planned:
        return Chip("Requests", f"all {planned:,} complete" if planned else "none sent", "ok" if planned else "error")
    reasons = findings.incomplete_reasons([summary.requests for summary in summaries])
    top = next(iter(reasons))
    mostly = "" if len(reasons) == 1 else "mostly "
    share = percent((planned - complete) / planned)
    levels = {findings.outcome_level(summary.requests) for summary in summaries}
    level: Level = "error" if "error" in levels else "warning"
    return Chip("Requests", f"{complete:,} of {planned:,} complete ({share} incomplete, {mostly}{top})", level)


def objectives(summaries: Sequence[Summary]) -> list[Chip]:
    """Return a chip with the number of failed objectives and the worst of them, or an empty list without objectives."""
    judged = [objective for summary in summaries for objective in summary.objectives]
    if not judged:
        return []
    failed = sorted((entry for entry in judged if entry.verdict == "fail"), key=_miss_factor, reverse=True)
    unclear = [entry for entry in judged if entry.verdict == "inconclusive"]
    if not failed and not unclear:
        return [Chip("Objectives", "met" if len(judged) == 1 else f"all {len(judged):,} met", "ok", "objectives")]
    word, entries = ("failed", failed) if failed else ("inconclusive", unclear)
    worst = list({entry.objective: entry for entry in reversed(entries)}.values())[::-1]  # one per objective
    named = ", ".join(failure_text(entry) for entry in worst[:NAMED_OBJECTIVES])
    more = ",\u00a0…" if len(worst) > NAMED_OBJECTIVES else ""
    text = f"{len(entries):,} of {len(judged):,} {word}: {named}{more}"
    return [Chip("Objectives", text, "error" if failed else "warning", "objectives")]


def _miss_factor(entry: ObjectiveVerdict) -> float:
    """Return the factor by which a run misses an objective, for example 2 for twice the bound.

    Return infinity if the run does not have the figure.
    """
    if entry.measured is None:
        return float("inf")
    low, high = sorted((abs(entry.measured), abs(entry.bound)))
    return high / low if low else float("inf")


def failure_text(entry: ObjectiveVerdict) -> str:
    """Return the measured value of an objective next to its bound, such as `tpot.p99` 72.5 > 50 ms."""
    name = re.split("[<>]", entry.objective, maxsplit=1)[0].strip()
    if entry.measured is None:
        return f"`{name}` not measured"
    sign = "="
    if entry.measured != entry.bound:
        sign = ">" if entry.measured > entry.bound else "<"
    if entry.unit == "s":
        factor, unit = scale_of(entry.bound)
        return f"`{name}` {significant(entry.measured * factor)} {sign} {entry.bound * factor:,.6g} {unit}"
    if entry.unit == "share":
        return f"`{name}` {entry.measured * 100:.4g}% {sign} {entry.bound * 100:.6g}%"
    if entry.unit == "share per hour":
        return f"`{name}` {entry.measured * 100:+.3g} {sign} {entry.bound * 100:+.6g}%/h"
    unit = {"per second": " per second", "tokens": " tokens"}.get(entry.unit, "")
    return f"`{name}` {entry.measured:,.6g} {sign} {entry.bound:,.6g}{unit}"
