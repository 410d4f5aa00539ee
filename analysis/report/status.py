"""Builds the status strip of a page: chips that say whether the figures are valid and meet the objectives.

A page about runs has up to three chips: the validity of the measurement, the requests, and the objectives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from loadgen.analysis.format import duration, percent, pluralise, scale_of, significant
from loadgen.analysis.objectives import ObjectiveVerdict
from loadgen.analysis.report import Chip, Finding, Level, findings
from loadgen.analysis.summary import Summary

NAMED_OBJECTIVES = 2
"""Maximum number of objectives that a chip names."""
OTHER_UNIT_MIN = 10_000
"""Minimum value of a measured time, in the unit of its bound, that is shown in a unit of its own: 75.7 s > 500 ms
instead of 75700 > 500 ms."""
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
    """Return the chip that says whether the measurement is valid, and how many errors and warnings there are.

    Incomplete requests do not affect this chip, because the chip `Requests` shows them. A simulation in virtual time is
    neither valid nor invalid, because no client took part.
    """
    invalid = list[Finding]()
    warned = list[Finding]()
    for summary in summaries:
        known = findings.findings(summary)
        warned += findings.concerns(known)
        verdict = findings.verdict(summary, known)
        invalid += [verdict] if verdict.level == "error" else []
    ids = {finding.id for finding in warned}
    named = [text for name, text in NAMED_WARNINGS.items() if name in ids]
    measured = [summary for summary in summaries if not summary.server.virtual]
    if not invalid and not measured:
        text = "; ".join([MODELLED.text, *named])
        return Chip(MODELLED.label, text, "warning") if named else MODELLED
    noted = f", {findings.concerns_text(warned)}" if warned else ""
    if named:
        noted += f": {', '.join(named)}{', …' if len(warned) > len(named) else ''}"
    level: Level = "warning" if warned else "ok"
    if invalid or any(finding.level == "error" for finding in warned):
        level = "error"
    if len(summaries) == 1:
        if invalid:
            reason = invalid[0].sentence.removeprefix("Invalid: ").rstrip(".")
            return Chip("Measurement", f"invalid: {reason}", "error")
        return Chip("Measurement", f"valid{_server_kind(measured)}{noted}", level)
    modelled = len(summaries) - len(measured)
    if modelled:
        verdict_text = f"{len(invalid):,} invalid" if invalid else "all valid"
        text = f"{pluralise(modelled, 'run')} modelled, {len(measured):,} measured, {verdict_text}{noted}"
        return Chip("Measurement", text, level)
    text = f"{len(summaries) - len(invalid):,} of {pluralise(len(summaries), 'run')} valid"
    return Chip("Measurement", f"{text}{_server_kind(measured)}{noted}", level)


def _server_kind(measured: Sequence[Summary]) -> str:
    """Return the text ` (simulated server)` if every server was a simulated one, else an empty string."""
    is_simulated = bool(measured) and all(summary.server.simulated for summary in measured)
    return " (simulated server)" if is_simulated else ""


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
    """Return a list with one chip that states whether the runs met their objectives. The list is empty without
    objectives.

    A chip is a short text below the title of the page. This text depends on the verdicts:

    - All objectives are met: their number.
    - Some objectives failed: their number, and the names of the first few. The objective that was missed by the largest
      factor comes first.
    - No objective failed, but some are inconclusive: their number, and the names of the first few.

    A single run may also have bounds on each request (--goodput). To distinguish the objectives from these bounds, the
    label of the chip is then `Objectives of the run`.
    """
    judged = [objective for summary in summaries for objective in summary.objectives]
    if not judged:
        return []
    failed = failed_objectives(judged)
    unclear = [entry for entry in judged if entry.verdict == "inconclusive"]
    label = "Objectives of the run" if len(summaries) == 1 and summaries[0].goodput else "Objectives"
    if not failed and not unclear:
        number = len({entry.objective for entry in judged})
        runs = f" in each of {len(summaries):,} runs" if len(summaries) > 1 else ""
        text = f"{number:,} of {number:,} met{runs}"
        if len(judged) != number * len(summaries):  # the runs have different objectives
            text = f"{len(judged):,} of {len(judged):,} met"
        return [Chip(label, text, "ok", "objectives")]
    word, entries = ("failed", failed) if failed else ("inconclusive", unclear)
    worst = list({entry.objective: entry for entry in reversed(entries)}.values())[::-1]  # one per objective
    named = ", ".join(failure_text(entry) for entry in worst[:NAMED_OBJECTIVES])
    more = ",\u00a0…" if len(worst) > NAMED_OBJECTIVES else ""
    text = f"{len(entries):,} of {len(judged):,} {word}: {named}{more}"
    return [Chip(label, text, "error" if failed else "warning", "objectives")]


def failed_objectives(judged: Sequence[ObjectiveVerdict]) -> list[ObjectiveVerdict]:
    """Return the objectives that failed. They are sorted by how far they were missed, the worst first."""
    return sorted((entry for entry in judged if entry.verdict == "fail"), key=_miss_factor, reverse=True)


def _miss_factor(entry: ObjectiveVerdict) -> float:
    """Return the factor by which the measured figure exceeds or falls short of its bound, such as 2 for twice the
    bound.

    Return infinity if the run does not have the figure.
    """
    if entry.measured is None:
        return float("inf")
    low, high = sorted((abs(entry.measured), abs(entry.bound)))
    return high / low if low else float("inf")


def failure_text(entry: ObjectiveVerdict) -> str:
    """Return text with the name of an objective's figure, its measured value and its bound, such as
    `ttft.p99 72.5 > 50 ms`.
    """
    name = re.split("[<>]", entry.objective, maxsplit=1)[0].strip()
    if entry.measured is None:
        return f"`{name}` not measured"
    sign = "="
    if entry.measured != entry.bound:
        sign = ">" if entry.measured > entry.bound else "<"
    if entry.unit == "s":
        factor, unit = scale_of(entry.bound)
        if entry.measured * factor >= OTHER_UNIT_MIN:
            return f"`{name}` {duration(entry.measured)} {sign} {entry.bound * factor:,.6g} {unit}"
        return f"`{name}` {significant(entry.measured * factor)} {sign} {entry.bound * factor:,.6g} {unit}"
    if entry.unit == "share":
        return f"`{name}` {entry.measured * 100:.4g}% {sign} {entry.bound * 100:.6g}%"
    if entry.unit == "share per hour":
        return f"`{name}` {entry.measured * 100:+.3g} {sign} {entry.bound * 100:+.6g}%/h"
    unit = {"per second": " per second", "tokens": " tokens"}.get(entry.unit, "")
    return f"`{name}` {entry.measured:,.6g} {sign} {entry.bound:,.6g}{unit}"
