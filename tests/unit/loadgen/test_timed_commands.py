"""Commands of --at: how they are written, on the command line and in a plan."""

from __future__ import annotations

import pytest

from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import command_line
from loadgen.servers.auth import redact
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
        (["run", "--at", "10m", "--url", "http://x"], ["run", "--at", "10m", "--url", "http://x"]),
        (["burst", "--n", "5"], ["burst", "--n", "5"]),
    ],
)
def test_the_option_takes_two_words(arguments: list[str], expected: list[str]) -> None:
    """A time and a command may be two words of the command line, or one. Other words are not changed.

    A word that begins with a hyphen is the next option. The check of the plan then says that the command is missing."""
    assert join_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"duration_s": 300.0}, 300),
        ({"traffic": [{"name": "a", "rate": 1, "duration_s": 60}, {"name": "b", "rate": 1, "duration_s": 300}]}, 300),
    ],
)
def test_commands_start_before_the_end_of_the_load(settings: dict[str, object], seconds: int) -> None:
    """A command that would start after the last request is refused before anything is sent."""
    load = {} if "traffic" in settings else {"rate": 1.0}
    with pytest.raises(PlanError, match=rf"--at 10m: no requests are sent after {seconds} s; name an earlier time"):
        Plan(server="vllm", **load, **settings, at=("4m true", "10m true"))
    assert Plan(server="vllm", **load, **settings, at=("4m true",)).at == ("4m true",)


def test_commands_of_loads_without_a_duration_are_accepted() -> None:
    """The end of a load with a number of requests is unknown before the run."""
    assert Plan(server="vllm", rate=1.0, n=10, at=("10m true",)).at == ("10m true",)
    classes = [{"name": "a", "rate": 1, "duration_s": 60}, {"name": "b", "rate": 1, "n": 9}]
    assert Plan(server="vllm", traffic=classes, at=("10m true",)).at == ("10m true",)


def test_secrets_in_commands_are_not_stored() -> None:
    """The command runs as it was written. The header of the run and stored command lines have no secrets."""
    secret = "tok3n-of-a-command"
    command = f"curl -H 'Authorization: Bearer {secret}' http://127.0.0.1/restart"
    stored = "10m curl -H 'Authorization: Bearer ***' http://127.0.0.1/restart"
    plan = Plan(server="vllm", n=1, at=(f"10m {command}",))
    assert plan.at == (f"10m {command}",)
    assert plan.to_dict()["at"] == [stored]
    assert command_line(plan)[-2:] == ["--at", stored]
    assert redact(["run", "--at", "10m", command, "--n", "1"]) == ["run", "--at", *stored.split(" ", 1), "--n", "1"]
    assert redact(["run", f"--at=10m {command}"]) == ["run", f"--at={stored}"]
    assert Plan(**{"server": "vllm", "n": 1, "at": plan.to_dict()["at"]}).at == (stored,)


def test_mistakes_show_no_secrets() -> None:
    """The message about a command without a time does not show the secret in the command."""
    with pytest.raises(PlanError) as error:
        Plan(server="vllm", n=1, at=("curl --password tok3n-of-a-mistake http://h",))
    assert "curl --password *** http://h" in str(error.value)
