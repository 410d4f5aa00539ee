"""A journal: an append-only file of what a command of many runs does, on disk before the next thing happens, so that
the command can go on after an interruption, a kill or a crash. What run files hold it does not repeat."""

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
"""A footer is shorter, its notes included."""
JOURNAL_BYTES = 1 << 28
"""Maximum size of a journal that is read; the line of a run is about 1 kB."""
MAX_DIFFERENCES = 20

JournalLine = dict[str, Any]
LINE = msgspec.defstruct("JournalLine", [("type", str), ("at", str)])


@dataclass(frozen=True, slots=True)
class JournalKind:
    """What is written: by `loadgen <name>`, to `<name>.jsonl`."""

    name: str
    line_fields: Mapping[str, Sequence[tuple[str, Any]]]
    """By the type of a line, what it holds beside its type and its instant."""

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl"


class Journal:
    """Appends lines; each is on disk before the next thing happens."""

    def __init__(self, name: str, file: FileIO, lines: Sequence[JournalLine]) -> None:
        self._name, self._file = name, file
        self.lines = list(lines)
        """All lines, those of earlier sittings included."""

    def write(self, kind: str, /, **values: Any) -> None:
        """Append one line. Raises OutputError."""
        line = {"type": kind, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **values}
        data = hide_secrets(json.dumps(line, default=str).encode(), whole=True) + b"\n"
        try:
            while data:  # a disk that is almost full takes a piece
                data = data[self._file.write(data) :]
            os.fsync(self._file)
        except OSError as error:
            raise OutputError(f"cannot write {self._name}: {error.strerror}", "Make room, then --resume.") from error
        self.lines.append(line)


@contextmanager
def open_journal(kind: JournalKind, folder: Path, plan: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """Open the journal in `folder` and claim the folder for this command. Raises OutputError for a folder that is in
    use or cannot be written, and PlanError if `plan` is not the one the journal was begun with."""
    path = folder / kind.file
    _check_not_begun(kind, path, resume=resume)
    with FolderClaim(folder, must_be_empty=not path.exists(), wait_s=LOCK_WAIT_S if resume else 0.0):
        _check_not_begun(kind, path, resume=resume)  # another command may have begun and ended since the first check
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}", "Name a folder with --out.") from error
        with file:
            yield _begin(kind, folder, plan, file)


def _begin(kind: JournalKind, folder: Path, plan: Mapping[str, Any], file: FileIO) -> Journal:
    """Write the first line of a new journal, or check that a resumed one has the same plan."""
    book = Journal(kind.file, file, read_journal(kind, folder))
    if book.lines:
        _check_same(kind, book.lines, plan, folder)
        if not (folder / kind.file).read_bytes().endswith(b"\n"):  # a line that was cut off stays on its own
            file.write(b"\n")
        book.write("resumed")
    else:
        book.write("plan", format=FORMAT, version=version("llm-loadgen"), plan=plan)
    return book


def _check_not_begun(kind: JournalKind, path: Path, *, resume: bool) -> None:
    """Raise OutputError if there is a journal already and it is not to be resumed."""
    if path.exists() and not resume:
        raise OutputError(
            f"{path.parent} holds a {kind.name} already.", "Go on with it: --resume. Or name a new folder: --out."
        )


def read_journal(kind: JournalKind, folder: Path) -> list[JournalLine]:
    """Return the lines of a journal. A line that was cut off or is damaged is left out: the runs themselves hold the
    rest. Raises OutputError for a file that cannot be a journal."""
    file, lines = folder / kind.file, list[JournalLine]()
    try:
        content = read_input(file, JOURNAL_BYTES, pipes=False) if file.exists() else b""
    except OSError as error:
        raise OutputError(f"cannot read {file}: {error.strerror}", "Begin anew with another --out.") from error
    held = {"plan": [("version", str), ("plan", JournalLine), ("format", int)], **kind.line_fields}
    structs = {name: msgspec.defstruct(f"Journal{name}", fields, bases=(LINE,)) for name, fields in held.items()}
    for text in content.splitlines():
        with suppress(*DECODE_ERRORS):
            line = msgspec.json.decode(text, type=JournalLine)
            msgspec.convert(line, structs.get(str(line.get("type")), LINE))
            lines.append(line)
    return lines


def read_footer(run: Path) -> Footer | None:
    """How the run in a folder ended; None where it has not."""
    file = run / "run.jsonl"
    try:
        with open_input(file, pipes=False) as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            return msgspec.json.decode(stream.read().splitlines()[-1], type=Footer)
    except (OSError, IndexError, *DECODE_ERRORS):
        return None


def move_aside(folder: Path) -> Path | None:
    """Move what an earlier attempt left of a run aside, under the first free name; nothing measured is deleted."""
    if not folder.exists():
        return None
    places = (folder.with_name(f"{folder.name}-unfinished-{number}") for number in range(1, 1_000_000))
    return folder.rename(next(index for index in places if not index.exists()))


def _check_same(kind: JournalKind, lines: Sequence[JournalLine], plan: Mapping[str, Any], folder: Path) -> None:
    begun = next((line for line in lines if line["type"] == "plan"), None)
    if begun is None:
        raise OutputError(f"{folder / kind.file} does not say what was planned.", "Begin anew with another --out.")
    if begun["format"] > FORMAT:
        raise OutputError(f"{folder / kind.file} was written by a newer loadgen.", "Upgrade to go on with it.")
    changes = list(differences(begun["plan"], json.loads(json.dumps(plan, default=str))))
    if changes:
        more = [f"... and {len(changes) - MAX_DIFFERENCES} more"] if len(changes) > MAX_DIFFERENCES else []
        raise PlanError(
            "\n".join([f"the plan is not the one this {kind.name} was begun with:", *changes[:MAX_DIFFERENCES], *more]),
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
