"""Reads the rows of session files, and keeps rows on disk until all rows of a session are known.

The rows of one session may lie far apart in a file. `RowStore` keeps them in a temporary SQLite database, which SQLite
writes to disk and deletes when it is closed. The memory for a file therefore does not grow with the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from loadgen.workloads.datasets import LINE_HINT
from loadgen.workloads.json_values import check_file_text
from loadgen.workloads.prompts import SharedSpan
from loadgen.workloads.spec_syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError, open_text

LINE_LIMIT = 1 << 28
"""Maximum number of characters of a line."""
TIME_LIMIT_S = 4e9
"""Maximum timestamp or delay in seconds."""
SPAN_BITS = 40
"""Number of bits of the id of a block inside one session. The bits above them hold the number of the session."""
COMMON_BLOCK_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that an error message may suggest."""

Row = TypeVar("Row")


class Options(NamedTuple):
    """Options of the workload `sessions:FILE` that determine how a loader reads the file."""

    block_tokens: int | None = None
    """Number of tokens per block id. None: the number that the format defines."""
    unit: str | None = None
    """Unit of timestamps and delays: s, ms, us or ns. None: the unit that the format defines."""
    orphans: bool = False
    """True if a request whose parent is not in the file starts a session. Otherwise it is an error."""


def file_lines(path: Path, name: str = "the sessions") -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank. Raises WorkloadError for an unreadable file.

    `name` describes the file in error messages."""
    with open_text(path, name) as file:
        for line, text in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), ""), 1):
            if len(text) > LINE_LIMIT:
                raise WorkloadError(f"{path}, line {line}: has more than {LINE_LIMIT:,} characters", LINE_HINT)
            if text.strip():
                yield line, text


def decode_row(text: str, decoder: msgspec.json.Decoder[Row], path: Path, line: int) -> Row:
    """Decode one line of a file.

    Raises WorkloadError if a field has a wrong type. The message names the line and the field.
    """
    try:
        check_file_text(text)
        return decoder.decode(text)
    except WorkloadError as error:
        raise WorkloadError(f"{path}, line {line}: {error}", error.hint) from None
    except (msgspec.ValidationError, RecursionError) as error:
        raise WorkloadError(f"{path}, line {line}: {_plain(str(error))}", LINE_HINT) from None
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{path}, line {line}: is not JSON: {error}", LINE_HINT) from None


def _plain(message: str) -> str:
    """Return an error message of msgspec in plainer words.

    For example, "Expected `int`, got `str` - at `$.out`" becomes "Expected `int`, got `str` in `out`"."""
    return message.replace("`$.", "`").replace("`$[", "`[").replace(" - at ", " in ")[:300]


def rows(path: Path, kind: type[Row]) -> Iterator[tuple[int, Row]]:
    """Yield the number and the content of each line of a JSON Lines file. `kind` is the type of a line."""
    decoder = msgspec.json.Decoder(kind)
    for line, text in file_lines(path):
        yield line, decode_row(text, decoder, path, line)


def nanoseconds(value: float, per_second: int, name: str, where: str) -> int:
    """Convert a time in a file to ns.

    `per_second` is the number of time units per second: 1 for seconds, 1000 for ms. `where` is the file and line for
    the error message. Raises WorkloadError for a negative or too large time.
    """
    if not 0 <= value / per_second <= TIME_LIMIT_S:
        raise WorkloadError(f"{where}: {name} is {value}", "write a time of 0 or more")
    return round(value * NS_PER_S / per_second)


def tokens(value: int, name: str, where: str, low: int = 1) -> int:
    """Return `value` if it is a valid number of tokens: a number from `low` to TOKENS_LIMIT.

    Otherwise raise WorkloadError. The error message contains `name`, the name of the field, and `where`, its location
    in the file.
    """
    if not low <= value <= TOKENS_LIMIT:
        raise WorkloadError(f"{where}: {name} is {value}", f"write a number from {low} to {TOKENS_LIMIT}")
    return value


def block_spans(
    ids: list[int],
    input_tokens: int,
    block_tokens: int,
    where: str,
    namespace: int | None = None,
    *,
    only_full: bool = False,
) -> tuple[SharedSpan, ...]:
    """Return the spans of a prompt that other prompts may share, one for each block of `block_tokens` tokens.

    The session file states an id for each block. Two prompts that begin with equal ids begin with equal tokens.

    - `ids`: the ids of the prompt's blocks, in order. If there are none, the result is empty.
    - `input_tokens`: the length of the prompt.
    - `where`: the line or session of the file, for error messages.
    - `namespace`: the number of the session, if an id is valid only within its session. None if equal ids stand for
      equal tokens in the whole file.
    - `only_full`: True if an incomplete block at the end of the prompt may have no id.

    Raises WorkloadError if the number of ids does not match the length of the prompt, or if an id is too large or
    negative.
    """
    if not ids:
        return ()
    needed = -(-input_tokens // block_tokens)
    if len(ids) != needed and not (only_full and len(ids) == input_tokens // block_tokens):
        fitting = next((size for size in COMMON_BLOCK_TOKENS if -(-input_tokens // size) == len(ids)), None)
        state = f"state the size of the blocks with block_tokens={fitting}, or " if fitting else ""
        raise WorkloadError(
            f"{where}: {len(ids):,} block ids cannot be a prompt of {input_tokens:,} tokens in blocks of "
            f"{block_tokens}, which has {needed:,}",
            f"{state}correct the lengths, or remove the ids to replay the lengths alone",
        )
    limit = 1 << (SPAN_BITS if namespace is not None else 62)
    for block in ids:
        if not 0 <= block < limit:
            raise WorkloadError(f"{where}: {block} is no block id", f"write ids from 0 to {limit - 1}")
    base = 0 if namespace is None else (namespace + 1) << SPAN_BITS
    return tuple((-1 - base - block, block_tokens) for block in ids)


class RowStore:
    """The rows of a session file, grouped by session, in a temporary database on disk."""

    def __init__(self) -> None:
        # "" is a temporary file, which SQLite deletes when the connection is closed. One thread at a time uses the
        # connection, but a reader that was not read to its end may be closed by the garbage collector of another one.
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE rows (line INTEGER, session TEXT, name TEXT, text TEXT)")
        self._database.execute("CREATE UNIQUE INDEX names ON rows (name)")

    def add(self, line: int, session: str, name: str, text: str) -> bool:
        """Add a row. If there is already a row with this `name`, add nothing and return False."""
        values = line, session, name, text
        cursor = self._database.execute("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?)", values)
        return cursor.rowcount == 1

    def session_of(self, name: str) -> str | None:
        """Return the session of the row `name`, or None if there is no such row."""
        row = self._database.execute("SELECT session FROM rows WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def row(self, name: str) -> tuple[int, str] | None:
        """Return the line number and the text of the row `name`, or None if there is no such row."""
        row = self._database.execute("SELECT line, text FROM rows WHERE name = ?", (name,)).fetchone()
        return None if row is None else (int(row[0]), str(row[1]))

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the line number of each row."""
        return ((str(name), int(line)) for name, line in self._database.execute("SELECT name, line FROM rows"))

    def sessions(self) -> Iterator[tuple[str, list[tuple[int, str]]]]:
        """Yield each session with the line numbers and texts of its rows, in order of the sessions' first rows."""
        self._database.execute("CREATE INDEX sessions ON rows (session, line)")
        query = "SELECT session, MIN(line) AS first FROM rows GROUP BY session ORDER BY first"
        for session, _ in self._database.execute(query):
            found = self._database.execute("SELECT line, text FROM rows WHERE session = ? ORDER BY line", (session,))
            yield session, [(int(line), str(text)) for line, text in found]

    def close(self) -> None:
        """Delete the database."""
        self._database.close()


@contextmanager
def row_store() -> Iterator[RowStore]:
    """Yield a new RowStore, which is deleted when the context ends."""
    store = RowStore()
    try:
        yield store
    finally:
        store.close()
