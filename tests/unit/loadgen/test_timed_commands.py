"""Commands of --at: how they are written, on the command line and in a plan."""

from __future__ import annotations

import pytest

from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.timed_commands import TimedCommand, join_arguments, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m kubectl delete pod vllm-0", TimedCommand(600, "kubectl delete pod vllm-0")),
        ("90 true", TimedCommand(90, "true")),
        (" 500ms  kill 1; sleep 2 ", TimedCommand(0.5, "kill 1; sleep 2")),
    ],
)
def test_a_time_and_a_command(text: str, expected: TimedCommand) -> None:
    """The first word is the time, and the rest is the command, with all of its spaces and signs."""
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "10m", "10m ", "kubectl delete pod", "soon true", "-5s true"])
def test_mistakes_are_usage_errors(text: str) -> None:
    """A text without a time or without a command is refused before anything is sent, with an example."""
    with pytest.raises(PlanError, match=r"--at.*must be a time and a command, such as '10m kubectl delete pod vllm-0'"):
        Plan(server="vllm", n=1, at=(text,))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--at", "10m", "kill 1", "--rate", "5"], ["run", "--at", "10m kill 1", "--rate", "5"]),
        (["run", "--at", "10m kill 1", "--rate", "5"], ["run", "--at", "10m kill 1", "--rate", "5"]),
        (["--at", "1s", "a b", "--at", "2s", "c"], ["--at", "1s a b", "--at", "2s c"]),
        (["run", "--at", "10m"], ["run", "--at", "10m"]),
        (["burst", "--n", "5"], ["burst", "--n", "5"]),
    ],
)
def test_the_option_takes_two_words(arguments: list[str], expected: list[str]) -> None:
    """A time and a command may be two words of the command line, or one. Other words are not changed."""
    assert join_arguments(arguments) == expected
