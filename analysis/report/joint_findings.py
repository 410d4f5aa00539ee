"""Derives the findings on all repeats of a plan together, from the findings on each repeat.

A check that passed in every repeat gives one sentence. A problem gives one sentence that names the affected repeats.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.format import duration
from loadgen.analysis.report import Finding, Level, findings
from loadgen.analysis.summary import Summary

LEVELS: tuple[Level, ...] = ("error", "warning", "ok", "note")
"""Levels of findings, the worst first."""
PASSED = {
    "error": "Errors from coalesced reads are small",
    "lengths": "Prompt and output lengths as requested",
    "delivery": "The load was sent as requested",
    "machines": "The clocks of the machines agree",
    "counters": "The counters of the server and of the client agree",
    "window": "Measured in a window of the steady state",
    "outside": "Requests outside the window were not slower than those inside",
}
"""Beginning of the joint sentence of a check that passed, by the id of its finding. The sentence ends with the repeats
in which the check passed."""


def joint_findings(summaries: Sequence[Summary]) -> list[Finding]:
    """Return the findings on all repeats together: errors first, then warnings, then the checks that passed.

    Notes are omitted, because they do not concern validity. The details of each repeat contain them."""
    of_repeats = [findings.findings(summary) for summary in summaries]
    ids = dict.fromkeys(finding.id for of_repeat in of_repeats for finding in of_repeat)
    result = list[Finding]()
    for finding_id in ids:
        known = [[finding for finding in of_repeat if finding.id == finding_id] for of_repeat in of_repeats]
        joint = _joint_finding(finding_id, known, summaries)
        if joint is not None and joint.level != "note":
            result.append(joint)
    return sorted(result, key=lambda finding: LEVELS.index(finding.level))


def joint_verdict(summaries: Sequence[Summary], joint: Sequence[Finding]) -> Finding:
    """Return a finding that states whether the figures of all repeats are valid.

    `joint` holds the findings on all repeats together. A single invalid repeat makes the joint figures invalid."""
    verdicts = [findings.verdict(summary, findings.findings(summary)) for summary in summaries]
    invalid = [index for index, verdict in enumerate(verdicts) if verdict.level == "error"]
    if invalid:
        sentences = list(dict.fromkeys(verdicts[index].sentence for index in invalid))
        which = f"{_repeats_text(invalid, summaries)}" if len(invalid) < len(summaries) else "every repeat"
        reason = sentences[0].removeprefix("Invalid: ").rstrip(".")
        return Finding("invalid", "error", f"Invalid: {reason} ({which}).")
    concerns = findings.concerns_text(joint)
    if concerns:
        valid = "Simulated" if summaries[0].server.virtual else "Valid"
        return Finding("warning", "warning", f"{valid}, with {concerns} below.")
    if summaries[0].server.virtual:
        return verdicts[0]
    return Finding("valid", "ok", f"Valid: every check passed in all {len(summaries)} repeats.")


def joint_objectives(summaries: Sequence[Summary]) -> Finding | None:
    """Return a finding that states in how many repeats each objective passed. Return None without objectives."""
    texts = list(dict.fromkeys(entry.objective for summary in summaries for entry in summary.objectives))
    if not texts:
        return None
    parts = []
    levels = set[Level]()
    for text in texts:
        judged = [entry.verdict for summary in summaries for entry in summary.objectives if entry.objective == text]
        passed = judged.count("pass")
        parts.append(f"`{text}` met in {passed} of {len(judged)} repeats")
        if "fail" in judged:
            levels.add("error")
        else:
            levels.add("warning" if "inconclusive" in judged else "ok")
    level = next(level for level in LEVELS if level in levels)
    return Finding("objectives", level, f"{'; '.join(parts)}.", "objectives")


def _joint_finding(finding_id: str, known: Sequence[Sequence[Finding]], summaries: Sequence[Summary]) -> Finding | None:
    """Return one finding on all repeats together, or None if no repeat has a finding with the id `finding_id`.

    `known` contains, for each repeat, the findings with this id. The result has the worst level of these findings.
    """
    level = min((finding.level for of_repeat in known for finding in of_repeat), key=LEVELS.index, default=None)
    if level is None:
        return None
    if finding_id == "complete":
        return Finding(finding_id, level, _complete_sentence(summaries), "failures")
    worst = [
        (index, finding) for index, of_repeat in enumerate(known) for finding in of_repeat if finding.level == level
    ]
    affected = list(dict.fromkeys(index for index, _ in worst))
    first = worst[0][1]
    if level == "ok" and finding_id == "client" and not summaries[0].server.virtual:
        return Finding(finding_id, level, _client_sentence(summaries), first.anchor)
    sentences = {finding.sentence for _, finding in worst}
    everywhere = len(affected) == len(summaries)
    if everywhere and len(sentences) == 1:
        return first
    which = _repeats_text(affected, summaries)
    if level == "ok" and finding_id in PASSED:
        where = "every repeat" if everywhere else which
        return Finding(finding_id, level, f"{PASSED[finding_id]} in {where}.", first.anchor)
    if len(sentences) > 1:
        which += f", for example {_repeats_text(affected[:1], summaries)}"
    return Finding(finding_id, level, f"{_capitalised(which)}: {first.sentence}", first.anchor)


def _client_sentence(summaries: Sequence[Summary]) -> str:
    sources = dict.fromkeys(summary.client.source.title for summary in summaries)
    errors_s = [summary.client.error_bar_e2e_s for summary in summaries]
    error = "error unknown" if None in errors_s else f"error ±{duration(max(filter(None, errors_s), default=0.0), 2)}"
    return f"The client was not the limit in any repeat; {' and '.join(sources)}, {error}."


def _complete_sentence(summaries: Sequence[Summary]) -> str:
    """Return a sentence on how many requests of several repeats are complete. `summaries` has one summary per repeat.

    If some requests are incomplete, the sentence states their number and the reasons. It also names the repeats with
    incomplete requests, unless all repeats have some.
    """
    complete = sum(summary.requests.complete for summary in summaries)
    planned = sum(summary.requests.planned for summary in summaries)
    if complete == planned:
        return f"All {planned:,} requests of {len(summaries)} repeats complete."
    lacking = [index for index, summary in enumerate(summaries) if not summary.requests.all_complete]
    text = findings.incomplete_text([summary.requests for summary in summaries])
    return f"{text} ({_repeats_text(lacking, summaries)})." if len(lacking) < len(summaries) else f"{text}."


def _repeats_text(indices: Sequence[int], summaries: Sequence[Summary]) -> str:
    """Return the numbers of these repeats as text, such as `repeats 2 and 4`."""
    numbers = [str(summaries[index].run.repeat or index + 1) for index in indices]
    if len(numbers) == 1:
        return f"repeat {numbers[0]}"
    return f"repeats {', '.join(numbers[:-1])} and {numbers[-1]}"


def _capitalised(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
