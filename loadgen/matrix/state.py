"""What has been measured already. The state of a matrix is its files: a repeat is finished when its run file has a
footer that does not say interrupted. Beside them lies `matrix.jsonl`, append-only, with what no run file holds:

    {"type": "plan", "plan": {...}, ...}                         the first line
    {"type": "up", "start": 3, "seconds": 41.2, "facts": {...}}  a server that came up
    {"type": "begin", "cell": {...}, "repeat": 1, "start": 3, "place": 0}   a run; place 0 is the first of its start
    {"type": "end", "cell": {...}, "repeat": 1, "seconds": 18.4}
    {"type": "failure", "cell": {...}, "repeat": 1, "kind": "LaunchError", "reason": "...", "hint": "...", "log": "..."}
    {"type": "down", "start": 3}
    {"type": "resumed", ...}, {"type": "interrupted", ...}
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from loadgen.errors import OutputError, PlanError
from loadgen.matrix import Cell, Repeat
from loadgen.runfile import Footer

FILE = "matrix.jsonl"
FORMAT = 1
TAIL_BYTES = 65_536
"""A footer is shorter, its notes included."""
DIFFERENCES_MOST = 20

Line = dict[str, Any]


class Journal:
    """Appends lines to matrix.jsonl; each is on disk before the next thing happens."""

    def __init__(self, descriptor: int, lines: Sequence[Line]) -> None:
        self._descriptor = descriptor
        self.lines = list(lines)
        """All lines, those of earlier sittings included."""

    def write(self, kind: str, /, **values: Any) -> None:
        """Append one line. Raises OutputError."""
        line = {"type": kind, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        try:
            os.write(self._descriptor, json.dumps(line, default=str).encode() + b"\n")
            os.fsync(self._descriptor)
        except OSError as error:
            hint = "Make room, and go on with --resume."
            raise OutputError(f"cannot write {FILE}: {error.strerror}", hint) from error
        self.lines.append(line)


@contextmanager
def journal(folder: Path, plan: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of the matrix in `folder`, held against a second command that would write there too.

    Raises OutputError for a folder that cannot be used, PlanError where `plan` is not the one it was begun with.
    """
    file = folder / FILE
    begun = file.exists()
    if begun and not resume:
        raise OutputError(f"{folder} holds a matrix already.", "Go on with it: --resume. Or name a new folder: --out.")
    if not begun and folder.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} exists and is not empty.", "Name a new folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}", "Name a folder with --out.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, of whatever
        except OSError as error:
            hint = "Wait for it, or name another --out."
            raise OutputError(f"another loadgen matrix is writing to {folder}.", hint) from error
        book = Journal(descriptor, read_lines(folder))
        if book.lines:
            _check_same(book.lines, plan, folder)
            if not file.read_bytes().endswith(b"\n"):  # what a kill cut off stays a line of its own
                os.write(descriptor, b"\n")
            book.write("resumed")
        else:
            book.write("plan", format=FORMAT, version=version("llm-loadgen"), plan=plan)
        yield book
    finally:
        os.close(descriptor)


def read_lines(folder: Path) -> list[Line]:
    """What matrix.jsonl holds; a line that was cut off by a kill is left out, the runs themselves tell the rest."""
    try:
        texts = (folder / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for text in texts:
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def finished(folder: Path, repeat: Repeat) -> bool:
    """Whether this run has been measured: its file ends in a footer that does not say interrupted."""
    file = folder / repeat.folder / "run.jsonl"
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            last = stream.read().rstrip(b"\n").rpartition(b"\n")[2]
        return not msgspec.json.decode(last, type=Footer).interrupted
    except (OSError, msgspec.DecodeError):
        return False


def make_way(folder: Path, repeat: Repeat) -> Path | None:
    """Move what an earlier attempt left of this run aside, under the first free name; nothing measured is deleted."""
    left = folder / repeat.folder
    if not left.exists():
        return None
    places = (left.with_name(f"{left.name}-unfinished-{number}") for number in range(1, 1_000_000))
    return left.rename(next(place for place in places if not place.exists()))


def last_failures(lines: Sequence[Line]) -> dict[Repeat, Line]:
    """The newest failure of each run that has not begun again since."""
    found: dict[Repeat, Line] = {}
    for line in lines:
        if line["type"] == "failure":
            found[_repeat(line)] = line
        elif line["type"] == "begin":
            found.pop(_repeat(line), None)
    return found


def beginnings(lines: Sequence[Line]) -> dict[Repeat, Line]:
    """The newest `begin` of each run: its start, and its place in it."""
    return {_repeat(line): line for line in lines if line["type"] == "begin"}


def took_s(lines: Sequence[Line]) -> dict[Repeat, float]:
    """How long each run took, its preparation included."""
    return {_repeat(line): float(line["seconds"]) for line in lines if line["type"] == "end"}


def _repeat(line: Line) -> Repeat:
    return Repeat(Cell(**line["cell"]), int(line["repeat"]))


def _check_same(lines: Sequence[Line], plan: Mapping[str, Any], folder: Path) -> None:
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder / FILE} does not say what was planned.", "Begin anew with another --out.")
    if int(begun.get("format", 0)) > FORMAT:
        raise OutputError(f"{folder / FILE} was written by a newer loadgen.", "Upgrade to go on with it.")
    changes = list(differences(begun["plan"], json.loads(json.dumps(plan, default=str))))
    if changes:
        more = [f"... and {len(changes) - DIFFERENCES_MOST} more"] if len(changes) > DIFFERENCES_MOST else []
        raise PlanError(
            "\n".join(["the plan is not the one this matrix was begun with:", *changes[:DIFFERENCES_MOST], *more]),
            f"Undo the change to go on in {folder}, or begin anew with another --out.",
        )


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """One line for each value that changed, named by its place."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif before != now:
        was, is_ = ("nothing" if value is None else json.dumps(value)[:200] for value in (before, now))
        yield f"{where}: {was} then, {is_} now"
