"""Time to recover after a command of --at, on fabricated runs whose disturbance is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.recovery import _Figure, _recoveries, describe_commands
from loadgen.analysis.report.findings import findings
from loadgen.analysis.report.tables import events
from loadgen.analysis.run.command_record import CommandRecord
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import CommandEffect, RecoveredFigure
from loadgen.analysis.time_windows import WindowSeries
from tests.support.long_runs import S, constant, long_run, requests_over
from tests.support.runs import failed

DURATION_S = 120
RATE = 30
KILLED_S = 60.0


def command(at_s: float = KILLED_S, **changes: object) -> CommandRecord:
    at_ns = int(at_s * S)
    values = {"command": "kubectl delete pod vllm-0", "at_ns": at_ns, "end_ns": at_ns + S, "exit_code": 0} | changes
    return CommandRecord(**values)  # type: ignore[arg-type]


def effects(tmp_path: Path, records: list[Record], *commands: CommandRecord) -> list[CommandEffect]:
    run = long_run(tmp_path, records)
    run.commands = list(commands)
    return describe_commands(run, frame_of_run(run), parse_bounds(["ttft < 500ms"]))


def figure(effect: CommandEffect, name: str) -> RecoveredFigure:
    return next(entry for entry in effect.figures if entry.figure == name)


def sentence(tmp_path: Path, effect: CommandEffect) -> tuple[str, str]:
    """Return the level and the sentence of the finding on a command."""
    run = long_run(tmp_path / "plain", requests_over(30, rate_per_s=RATE))
    summary = summarise(run)
    summary.commands = [effect]
    [finding] = [finding for finding in findings(summary) if finding.id == "command"]
    return finding.level, finding.sentence


def test_the_time_to_recover_is_known(tmp_path: Path) -> None:
    """TTFT is 1 s for 20 s after the command. It has recovered after 20 s, to the length of a window."""
    slow = requests_over(DURATION_S, lambda due_s: 1.0 if KILLED_S <= due_s < KILLED_S + 20 else 0.1, rate_per_s=RATE)
    [effect] = effects(tmp_path, slow, command())
    ttft = figure(effect, "ttft.p90")
    assert ttft.disturbed
    assert ttft.window_s is not None
    assert ttft.recovered_s == pytest.approx(20, abs=2 * ttft.window_s)
    assert ttft.worst is not None
    assert ttft.worst > 1
    assert figure(effect, "attainment").recovered_s == pytest.approx(20, abs=2 * ttft.window_s)
    level, text = sentence(tmp_path, effect)
    assert level == "note"
    assert "`kubectl delete pod vllm-0` ran at 1 min (exit code 0, 1.00 s). Recovered: TTFT p90 after" in text


def failing(records: list[Record], fails: Callable[[Record], bool]) -> list[Record]:
    """Return the records, with those for which `fails` is true as failed requests that end after 0.1 s."""
    return [
        failed(
            record.id,
            due_ns=record.due_ns,
            sent_ns=record.sent_ns,
            sent_end_ns=record.sent_end_ns,
            end_ns=(record.due_ns or 0) + S // 10,
        )
        if fails(record)
        else record
        for record in records
    ]


def test_requests_that_fail_are_a_disturbance(tmp_path: Path) -> None:
    """Requests of five seconds fail. The share of complete requests falls to 0 and recovers; TTFT has no failures."""
    records = failing(
        requests_over(DURATION_S, constant, rate_per_s=RATE),
        lambda record: KILLED_S <= (record.due_ns or 0) / S < KILLED_S + 5,
    )
    [effect] = effects(tmp_path, records, command())
    complete = figure(effect, "complete")
    assert complete.disturbed
    assert complete.worst == 0
    assert complete.window_s is not None
    assert complete.recovered_s == pytest.approx(5, abs=2 * complete.window_s)
    assert not figure(effect, "ttft.p90").disturbed


@pytest.mark.parametrize("seed", range(5))
def test_failures_as_before_are_no_effect(tmp_path: Path, seed: int) -> None:
    """Of all requests, 2% fail, before the command and after. The command is not blamed for them."""
    random = np.random.default_rng(seed)
    records = failing(
        requests_over(DURATION_S, constant, rate_per_s=RATE, seed=seed), lambda _: bool(random.random() < 0.02)
    )
    [effect] = effects(tmp_path, records, command())
    assert not any(entry.disturbed for entry in effect.figures)


def test_a_clean_server_is_rarely_disturbed() -> None:
    """Of 600 series without an effect, at most 2% leave their range, whatever the number of windows after it.

    A window has the p90 of 40 latencies with a coefficient of variation of 0.5.
    """
    random = np.random.default_rng(5)
    disturbed = 0
    for trial in range(600):
        before, after = (10, 60) if trial % 2 else (60, 300)
        latencies = random.lognormal(0, 0.47, (before + after, 40))
        series = WindowSeries(0.0, 1.0, np.percentile(latencies, 90, axis=1))
        [recovery] = _recoveries(_Figure("ttft.p90", "lower", "latency", series), [command(float(before))])
        assert recovery is not None
        disturbed += recovery.disturbed
    assert disturbed <= 12


def test_the_range_excludes_an_earlier_disturbance(tmp_path: Path) -> None:
    """TTFT is 1 s from the first command to the second one, and 0.5 s for half a minute after a pause.

    The limit for the second command is that of the undisturbed first minute.
    """

    def ttft_s(due_s: float) -> float:
        return 1.0 if 60 <= due_s < 120 else 0.5 if 150 <= due_s < 180 else 0.1

    records = requests_over(240, ttft_s, rate_per_s=RATE)
    first, second = effects(tmp_path, records, command(60.0), command(120.0))
    assert figure(first, "ttft.p90").recovered_s is None
    later = figure(second, "ttft.p90")
    assert later.limit == pytest.approx(figure(first, "ttft.p90").limit, rel=0.1)
    assert later.disturbed
    assert later.already_disturbed
    assert later.worst == pytest.approx(0.6, rel=0.2)
    assert "Disturbed by an earlier command already: TTFT p90" in sentence(tmp_path, second)[1]


def test_a_server_that_stays_slow_has_not_recovered(tmp_path: Path) -> None:
    """A figure that never returns to its range is a warning."""
    records = requests_over(DURATION_S, lambda due_s: 0.1 if due_s < KILLED_S else 0.8, rate_per_s=RATE)
    [effect] = effects(tmp_path, records, command())
    assert figure(effect, "ttft.p90").recovered_s is None
    level, text = sentence(tmp_path, effect)
    assert level == "warning"
    assert "Not recovered by the end: TTFT p90" in text


def test_a_command_without_effect_is_a_note(tmp_path: Path) -> None:
    """If no figure leaves its range, the finding says so."""
    [effect] = effects(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE), command())
    assert [entry.disturbed for entry in effect.figures] == [False] * 4
    level, text = sentence(tmp_path, effect)
    assert level == "note"
    assert "No figure left its range of before." in text


def test_an_early_command_cannot_be_judged(tmp_path: Path) -> None:
    """Without ten time windows before the command, its effect is unknown."""
    [effect] = effects(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE), command(2.0))
    assert effect.figures == []
    assert "unknown: fewer than 10 undisturbed time windows lie before it." in sentence(tmp_path, effect)[1]


def test_commands_without_a_known_effect_have_a_reason(tmp_path: Path) -> None:
    """A command that did not start, and one whose successor follows at once, are told apart.

    The words of the command are kept, even if they contain those of the sentence.
    """
    records = requests_over(DURATION_S, constant, rate_per_s=RATE)
    absent = command(50.0, command="echo we ran out", exit_code=None, output="cannot start a shell")
    unstarted, first, _ = effects(tmp_path, records, absent, command(60.0), command(60.01))
    text = sentence(tmp_path, unstarted)[1]
    assert "`echo we ran out` could not run at 50 s: cannot start a shell." in text
    assert "Its effect is unknown: the command did not start." in text
    assert "unknown: the next command started within the same time window." in sentence(tmp_path / "first", first)[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exit_code": 1, "output": "a\nno such pod\n"}, "(exit code 1, 1.00 s). Its output ends with: no such pod."),
        ({"exit_code": None, "ended_with_run": True}, "ran at 1 min and was ended with the run."),
        ({"exit_code": None, "output": "cannot start a shell: Too many"}, "could not run at 1 min: cannot start"),
    ],
)
def test_what_happened_to_the_command_is_said(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    """Exit codes, commands that were cut off, and commands that did not start are told apart."""
    [effect] = effects(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE), command(**changes))
    assert expected in sentence(tmp_path, effect)[1]


def test_two_commands_are_judged_apart(tmp_path: Path) -> None:
    """The first command is judged until the second one, so a later disturbance is not its own."""
    records = requests_over(DURATION_S, lambda due_s: 1.0 if 80 <= due_s < 90 else 0.1, rate_per_s=RATE)
    first, second = effects(tmp_path, records, command(40.0), command(80.0))
    assert not figure(first, "ttft.p90").disturbed
    assert figure(second, "ttft.p90").recovered_s == pytest.approx(10, abs=3)


def test_the_table_lists_the_command(tmp_path: Path) -> None:
    """The row of a command has its instant and its sentence, without the marks of code that a cell would show."""
    run = long_run(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE))
    run.commands = [command()]
    summary = summarise(run)
    summary.commands = describe_commands(run, frame_of_run(run), ())
    [row] = events([summary]).rows
    assert [cell.text for cell in row.cells][:2] == ["1 min", "command"]
    assert row.cells[2].text.startswith("kubectl delete pod vllm-0 ran at 1 min")
