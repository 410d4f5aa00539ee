"""Time to recover after a command of --at, on fabricated runs whose disturbance is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.recovery import describe_commands
from loadgen.analysis.report.findings import findings
from loadgen.analysis.report.tables import events
from loadgen.analysis.run.command_record import CommandRecord
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import CommandEffect, RecoveredFigure
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
    ttft = figure(effect, "ttft.p99")
    assert ttft.disturbed
    assert ttft.window_s is not None
    assert ttft.recovered_s == pytest.approx(20, abs=2 * ttft.window_s)
    assert ttft.worst is not None
    assert ttft.worst > 1
    assert figure(effect, "attainment").recovered_s == pytest.approx(20, abs=2 * ttft.window_s)
    level, text = sentence(tmp_path, effect)
    assert level == "note"
    assert "`kubectl delete pod vllm-0` ran at 1 min (exit code 0, 1.00 s). Recovered: TTFT p99 after" in text


def test_requests_that_fail_are_a_disturbance(tmp_path: Path) -> None:
    """Requests of five seconds fail. The worst window has no finite p99, and the figure recovers when they end."""
    records = [
        failed(
            record.id,
            due_ns=record.due_ns,
            sent_ns=record.sent_ns,
            sent_end_ns=record.sent_end_ns,
            end_ns=(record.due_ns or 0) + S,
        )
        if KILLED_S <= (record.due_ns or 0) / S < KILLED_S + 5
        else record
        for record in requests_over(DURATION_S, constant, rate_per_s=RATE)
    ]
    ttft = figure(effects(tmp_path, records, command())[0], "ttft.p99")
    assert ttft.disturbed
    assert ttft.worst is None
    assert ttft.window_s is not None
    assert ttft.recovered_s == pytest.approx(5, abs=2 * ttft.window_s)


def test_a_server_that_stays_slow_has_not_recovered(tmp_path: Path) -> None:
    """A figure that never returns to its range is a warning."""
    records = requests_over(DURATION_S, lambda due_s: 0.1 if due_s < KILLED_S else 0.8, rate_per_s=RATE)
    [effect] = effects(tmp_path, records, command())
    assert figure(effect, "ttft.p99").recovered_s is None
    level, text = sentence(tmp_path, effect)
    assert level == "warning"
    assert "Not recovered by the end: TTFT p99" in text


def test_a_command_without_effect_is_a_note(tmp_path: Path) -> None:
    """If no figure leaves its range, the finding says so."""
    [effect] = effects(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE), command())
    assert [entry.disturbed for entry in effect.figures] == [False] * 3
    level, text = sentence(tmp_path, effect)
    assert level == "note"
    assert "No figure left its range of before." in text


def test_an_early_command_cannot_be_judged(tmp_path: Path) -> None:
    """Without five time windows before the command, its effect is unknown."""
    [effect] = effects(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE), command(2.0))
    assert effect.figures == []
    assert "too short to see an effect" in sentence(tmp_path, effect)[1]


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
    assert not figure(first, "ttft.p99").disturbed
    assert figure(second, "ttft.p99").recovered_s == pytest.approx(10, abs=3)


def test_the_table_lists_the_command(tmp_path: Path) -> None:
    """The row of a command has its instant and its sentence, without the marks of code that a cell would show."""
    run = long_run(tmp_path, requests_over(DURATION_S, constant, rate_per_s=RATE))
    run.commands = [command()]
    summary = summarise(run)
    summary.commands = describe_commands(run, frame_of_run(run), ())
    [row] = events([summary]).rows
    assert [cell.text for cell in row.cells][:2] == ["1 min", "command"]
    assert row.cells[2].text.startswith("kubectl delete pod vllm-0 ran at 1 min")
