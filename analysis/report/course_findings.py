"""Findings on events during a run.

The events are sudden changes and slow drifts of figures, restarts of the server, and commands of --at. This module also
supplies the marks on the chart of the run over time, and the table of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.analysis.format import duration, elapsed, figure_title, percent, printable, significant
from loadgen.analysis.metrics import metric_by_key
from loadgen.analysis.report import Finding, Level
from loadgen.analysis.summary import CommandEffect, FigureChange, FigureDrift, RunCourse, ServerRestart, Summary

SAME_INSTANT_WINDOWS = 1.5
"""Maximum time between changes that are reported as one event, in time windows."""


MAX_TEXT = 80
"""Maximum number of characters of a command or of its output in a sentence."""


class CourseEvent(msgspec.Struct, frozen=True):
    """An event in the course of a run, such as a restart of the server.

    The report shows the event in three places: as a finding, as a mark on the chart, and as a row of a table.
    """

    at_s: float
    label: str
    """One word for the mark on the chart, such as `restart`."""
    sentence: str
    level: Level


def course_findings(summary: Summary) -> list[Finding]:
    """Return a finding for each event in the course of the run, and for each figure that drifts."""
    result = [Finding(event.label, event.level, event.sentence, "course") for event in course_events(summary)]
    return result + [_drift_finding(drift) for drift in (summary.course.drifts if summary.course else ())]


def course_events(summary: Summary) -> list[CourseEvent]:
    """Return the events of a run in order of time.

    An event is a command of --at, a restart of the server, or a change in the level of figures, such as a latency.
    """
    events = [_command_event(command) for command in summary.commands]
    if summary.course:
        events += [_restart_event(restart) for restart in summary.course.restarts]
        events += [_change_event(group) for group in _groups(summary.course)]
    return sorted(events, key=lambda event: event.at_s)


def course_marks(summary: Summary) -> list[dict[str, Any]]:
    """Return the marks on the chart of the run over time: the instant, a label and the sentence of each event."""
    return [
        {"x": event.at_s, "label": event.label, "text": event.sentence, "bad": event.level != "note"}
        for event in course_events(summary)
    ]


def _groups(course: RunCourse) -> list[list[FigureChange]]:
    """Divide the level changes of all figures into groups. The changes of a group happened at about the same time.

    Such changes often have one cause.
    """
    groups: list[list[FigureChange]] = []
    for change in course.changes:
        if groups and change.at_s - groups[-1][0].at_s <= SAME_INSTANT_WINDOWS * change.window_s:
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _command_event(command: CommandEffect) -> CourseEvent:
    """Return the event of a command that ran at a given time of the run (--at).

    The text of the event contains the exit code of the command, and the time that each disturbed figure needed to
    recover.
    """
    lost = any(figure.disturbed and figure.recovered_s is None for figure in command.figures)
    did_not_start = command.exit_code is None and not command.ended_with_run
    level: Level = "warning" if did_not_start or command.exit_code or lost else "note"
    return CourseEvent(command.at_s, "command", f"{_command_text(command)} {_effect_text(command)}", level)


def _command_text(command: CommandEffect) -> str:
    """Return the sentences about a command itself: when it ran, and how it ended."""
    name, instant = f"`{shortened(command.command)}`", elapsed(command.at_s)
    if command.ended_with_run:
        return f"{name} ran at {instant} and was ended with the run."
    if command.exit_code is None:
        return f"{name} could not run at {instant}: {command.output}."
    text = f"{name} ran at {instant} (exit code {command.exit_code}, {duration(command.took_s)})."
    if command.exit_code and command.output:
        text += f" Its output ends with: {shortened(command.output.splitlines()[-1])}."
    return text


def _effect_text(command: CommandEffect) -> str:
    """Return the sentences about the effect of a command on the figures, or why the effect is unknown."""
    if not command.figures:
        return f"Its effect is unknown: {command.effect_unknown}."
    disturbed = [figure for figure in command.figures if figure.disturbed]
    if not disturbed:
        return "No figure left its range of before."
    sentences = []
    lost = [figure_title(figure.figure) for figure in disturbed if figure.recovered_s is None]
    if lost:
        sentences.append(f"Not recovered by the end: {', '.join(lost)}.")
    back = [
        f"{figure_title(figure.figure)} after {elapsed(figure.recovered_s)}"
        for figure in disturbed
        if figure.recovered_s is not None
    ]
    if back:
        sentences.append(f"Recovered: {', '.join(back)} (± {duration(disturbed[0].window_s)}).")
    earlier = [figure_title(figure.figure) for figure in disturbed if figure.already_disturbed]
    if earlier:
        sentences.append(f"Disturbed by an earlier command already: {', '.join(earlier)}.")
    return " ".join(sentences)


def shortened(text: str) -> str:
    """Return the text on one line, cut to MAX_TEXT characters. Non-printable characters become spaces."""
    line = " ".join(printable(text).replace("`", "'").split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def _restart_event(restart: ServerRestart) -> CourseEvent:
    reasons = {
        "start_time": "its process has a later start time",
        "counters": "its counters began again at 0",
    }
    subject = f"The server at {printable(restart.url)}" if restart.url else "The server"
    text = (
        f"{subject} restarted between {elapsed(restart.from_s)} and {elapsed(restart.to_s)} of the run "
        f"({reasons[restart.evidence]}). Figures of the whole run mix the time before and after it."
    )
    return CourseEvent(restart.to_s, "restart", text, "warning")


def _change_event(changes: Sequence[FigureChange]) -> CourseEvent:
    worse = any(_is_worse(change.figure, change.after - change.before) for change in changes)
    parts = [
        f"{figure_title(change.figure)} from {_value(change.figure, change.before)} to "
        f"{_value(change.figure, change.after)} ({_signed_percent(change.after / change.before - 1)})"
        if change.before
        else f"{figure_title(change.figure)} from 0 to {_value(change.figure, change.after)}"
        for change in changes
    ]
    first = changes[0]
    text = f"The level changed at {elapsed(first.at_s)} of the run (± {duration(first.window_s)}): {', '.join(parts)}."
    if worse:
        text += " Figures of the whole run mix both levels; --window measures one of them."
    return CourseEvent(first.at_s, "change", text, "warning" if worse else "note")


def _drift_finding(drift: FigureDrift) -> Finding:
    """Return the finding on a drift: a warning if the figure becomes worse, otherwise a note.

    The finding recommends an objective that fails if the figure becomes worse by more than 5% per hour.
    """
    low, high = (_signed_percent(end) for end in drift.ci95)
    limit = "> -5%/h" if _higher_is_better(drift.figure) else "< 5%/h"
    text = (
        f"{figure_title(drift.figure)} drifts by {_signed_percent(drift.per_hour)} per hour (95% CI {low} to {high}), "
        "so the figures depend on the length of the run. "
        f"--assert '{drift.figure} drift {limit}' limits how fast it may become worse."
    )
    return Finding("drift", "warning" if _is_worse(drift.figure, drift.per_hour) else "note", text, "course")


def _higher_is_better(figure: str) -> bool:
    return metric_by_key(figure.partition(".")[0]).direction == "higher"


def _is_worse(figure: str, change: float) -> bool:
    return change < 0 if _higher_is_better(figure) else change > 0


def _value(figure: str, value: float) -> str:
    metric = metric_by_key(figure.partition(".")[0])
    return duration(value) if metric.timed else f"{significant(value)} {metric.unit}"


def _signed_percent(share: float) -> str:
    return f"{'+' if share >= 0 else '-'}{percent(abs(share))}"
