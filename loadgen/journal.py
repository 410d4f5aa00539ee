"""A journal: an append-only file that records the progress of a command with many runs.

Each line is on disk before the command continues, so the command can resume after an interruption, a kill or a crash.
The journal does not repeat the content of run files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from loadgen.analysis.run.runfile import Footer
from loadgen.errors import OutputError, PlanError
from loadgen.folders import LOCK_WAIT_S, FolderClaim
from loadgen.servers.auth import hide_secrets
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.workloads.input_files import open_input, read_input

FORMAT = 1
TAIL_BYTES = 65_536
"""Bytes to read from the end of a run file. A footer with all its notes is shorter."""
JOURNAL_BYTES = 1 << 28
"""Maximum size of a journal that is read, in bytes. One run adds a line of about 1 kB."""
MAX_DIFFERENCES = 20

JournalLine = dict[str, Any]
LINE = msgspec.defstruct("JournalLine", [("type", str), ("at", str)])


@dataclass(frozen=True, slots=True)
class JournalKind:
    """The format of one command's journal: `loadgen <name>` writes `<name>.jsonl`."""

    name: str
    line_fields: Mapping[str, Sequence[tuple[str, Any]]]
    """Names and types of the fields of each line type, in addition to `type` and `at`."""

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"


class Journal:
    """An open journal. Each line is on disk before `write` returns."""

    def __init__(self, name: str, file: FileIO, lines: Sequence[JournalLine]) -> None:
        self._name = name
        self._file = file
        self.lines = list(lines)
        """All lines, including those that were written before the command was resumed."""

    def write(self, kind: str, /, **values: Any) -> None:
        """Append one line of type `kind` and wait until it is on disk. Raises OutputError if it cannot be written."""
        line = {"type": kind, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        data = hide_secrets(json.dumps(line, default=str).encode(), whole=True) + b"\n"
        try:
            while data:  # a disk that is almost full may accept only a part
                data = data[self._file.write(data) :]
            os.fsync(self._file)
        except OSError as error:
            hint = "Free some disk space, then go on with --resume."
            raise OutputError(f"cannot write {self._name}: {error.strerror}", hint) from error
        self.lines.append(line)


@contextmanager
def open_journal(kind: JournalKind, folder: Path, plan: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """Open the journal in `folder` and claim the folder for this command.

    Raises OutputError if the folder is in use or cannot be written, or if it already holds a journal and `resume` is
    False. Raises PlanError if a resumed journal was started with a different plan.
    """
    path = folder / kind.file
    _check_not_begun(kind, path, resume=resume)
    with FolderClaim(folder, must_be_empty=not path.exists(), wait_s=LOCK_WAIT_S if resume else 0.0):
        _check_not_begun(kind, path, resume=resume)  # another command may have started and ended since the first check
        try:
            file = FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644))
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}", "Name a folder with --out.") from error
        with file:
            yield _begin(kind, folder, plan, file)


def _begin(kind: JournalKind, folder: Path, plan: Mapping[str, Any], file: FileIO) -> Journal:
    """Write the first line of a new journal. For a resumed journal, check that it was started with the same plan."""
    journal = Journal(kind.file, file, read_journal(kind, folder))
    if journal.lines:
        _check_same(kind, journal.lines, plan, folder)
        if not (folder / kind.file).read_bytes().endswith(b"\n"):  # terminate a line that was cut off
            file.write(b"\n")
        journal.write("resumed")
    else:
        journal.write("plan", format=FORMAT, version=version("llm-loadgen"), plan=plan)
    return journal


def _check_not_begun(kind: JournalKind, path: Path, *, resume: bool) -> None:
    """Raise OutputError if there is already a journal and `resume` is not set."""
    if path.exists() and not resume:
        raise OutputError(
            f"{path.parent} already holds a {kind.name}.", "Continue it with --resume, or name a new folder with --out."
        )


def read_journal(kind: JournalKind, folder: Path) -> list[JournalLine]:
    """Return the lines of a journal. Damaged lines are skipped, because the run files hold everything needed to resume.

    Raises OutputError if the file cannot be read or is too large.
    """
    file = folder / kind.file
    lines = list[JournalLine]()
    try:
        content = read_input(file, JOURNAL_BYTES, pipes=False) if file.exists() else b""
    except OSError as error:
        raise OutputError(f"cannot read {file}: {error.strerror}", "Start again with another --out.") from error
    line_fields = {"plan": [("version", str), ("plan", JournalLine), ("format", int)], **kind.line_fields}
    structs = {name: msgspec.defstruct(f"Journal{name}", fields, bases=(LINE,)) for name, fields in line_fields.items()}
    for text in content.splitlines():
        with suppress(*DECODE_ERRORS):
            line = msgspec.json.decode(text, type=JournalLine)
            msgspec.convert(line, structs.get(str(line.get("type")), LINE))
            lines.append(line)
    return lines


def read_footer(run: Path) -> Footer | None:
    """Return the footer of the run file in the folder `run`. Return None if the run has not ended or cannot be read."""
    file = run / "run.jsonl"
    try:
        with open_input(file, pipes=False) as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            return msgspec.json.decode(stream.read().splitlines()[-1], type=Footer)
    except (OSError, IndexError, *DECODE_ERRORS):
        return None


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an unfinished run to the first free `<name>-unfinished-<number>`. No data is deleted.

    Return the new path, or None if the folder does not exist.
    """
    if not folder.exists():
        return None
    candidates = (folder.with_name(f"{folder.name}-unfinished-{number}") for number in range(1, 1_000_000))
    return folder.rename(next(path for path in candidates if not path.exists()))


def _check_same(kind: JournalKind, lines: Sequence[JournalLine], plan: Mapping[str, Any], folder: Path) -> None:
    """Raise PlanError if the journal was started with a different plan.

    Raises OutputError if the journal contains no plan, or was written by a newer version of loadgen.
    """
    first = next((line for line in lines if line["type"] == "plan"), None)
    if first is None:
        raise OutputError(f"{folder / kind.file} does not contain a plan.", "Start again with another --out.")
    if first["format"] > FORMAT:
        raise OutputError(f"{folder / kind.file} was written by a newer loadgen.", "Upgrade loadgen to resume it.")
    changes = list(differences(first["plan"], json.loads(json.dumps(plan, default=str))))
    if changes:
        more = [f"... and {len(changes) - MAX_DIFFERENCES} more"] if len(changes) > MAX_DIFFERENCES else []
        raise PlanError(
            "\n".join([f"this {kind.name} was started with a different plan:", *changes[:MAX_DIFFERENCES], *more]),
            f"Undo the change to go on in {folder}, or start again with another --out.",
        )


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield one line of text for each value that differs between `before` and `now`, with the path to the value."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{where}[{index}]")
    elif before != now:
        old_text, new_text = ("nothing" if value is None else json.dumps(value)[:200] for value in (before, now))
        yield f"{where}: {old_text} then, {new_text} now"
