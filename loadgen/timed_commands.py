"""Parses the commands of --at, which start at a given time of the run, such as `10m kubectl delete pod vllm-0`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.workloads.spec_syntax import WorkloadError, parse_seconds

OPTION = "--at"


class TimedCommand(msgspec.Struct, frozen=True):
    """A shell command of the option --at, and the time of its start."""

    at_s: float
    """Seconds from the start of the run."""
    command: str


def parse(text: str) -> TimedCommand:
    """Parse a time and a shell command, separated by a space. Raises ValueError for other text."""
    instant, _, command = text.strip().partition(" ")
    try:
        at_s = parse_seconds(instant)
    except WorkloadError:
        at_s = -1.0
    if at_s < 0 or not command.strip():
        raise ValueError("must be a time and a command, such as '10m kubectl delete pod vllm-0'")
    return TimedCommand(at_s, command.strip())


def check_timed_commands(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts unchanged if each is a time and a command. Raises ValueError for other text."""
    for text in texts:
        parse(text)
    return texts


def late_command(texts: tuple[str, ...], duration_s: float) -> str:
    """Return the first of `texts` whose command would start too late, or "" if there is no such command.

    `texts` are values of --at, such as `10m date`. The load ends after `duration_s` seconds. A command at this time or
    later would have no effect on the run.
    """
    return next((text for text in texts if parse(text).at_s >= duration_s), "")


def join_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the two values of each option --at joined to one word.

    For example, the three words `--at`, `10m` and `date` become the two words `--at` and `10m date`. This is necessary
    because typer accepts only one value per use of a repeatable option. A word that begins with a hyphen is taken as
    the next option, and not as a command.
    """
    result = list[str]()
    index = 0
    while index < len(arguments):
        word = arguments[index]
        is_pair = (
            word == OPTION
            and index + 2 < len(arguments)
            and " " not in arguments[index + 1].strip()
            and not arguments[index + 2].startswith("-")
        )
        if is_pair:
            result += [word, f"{arguments[index + 1].strip()} {arguments[index + 2]}"]
            index += 3
        else:
            result.append(word)
            index += 1
    return result
