"""Defines, writes and reads the run file, an append-only file of JSON lines.

A run is a folder that contains `run.jsonl`. While the run is in progress, each worker appends to a part file,
`part-<worker>.jsonl`. At the end, the coordinator appends the part files to `run.jsonl` and adds a footer. A killed run
has part files and no footer, and can be read like a finished run. Readers skip and count damaged lines.

    {"type":"header", "format":1, "plan":{...}, "server":{...}, ...}
    {"type":"request", ...}          a Record (loadgen.analysis.run.record)
    {"type":"telemetry", "source":"client", ...}
    {"type":"command", ...}          a CommandRecord (loadgen.analysis.run.command_record)
    {"type":"footer", ...}
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from loadgen.analysis.run.canary import Canary
from loadgen.analysis.run.command_record import CommandRecord
from loadgen.analysis.run.compact_record import CompactRecord
from loadgen.analysis.run.errors import OutputError, RunFileError
from loadgen.analysis.run.id_set import IdSet
from loadgen.analysis.run.packed_values import pack_values
from loadgen.analysis.run.record import Count, Integer, Record
from loadgen.analysis.run.record_files import open_records, plain_name, record_file, record_files
from loadgen.analysis.run.removed_records import RemovedRecords
from loadgen.analysis.run.run_schema import CLOCK, HEADER, SAMPLE
from loadgen.servers.auth import hide_secrets
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.marks import FIELD
from loadgen.workloads.arrival_facts import LoadFacts
from loadgen.workloads.arrivals import facts_from_text
from loadgen.workloads.spec_syntax import parse_confidence
from loadgen.workloads.workload_facts import WorkloadFacts, workload_facts

FORMAT = 1
FLUSH_BYTES = 1 << 20
_NEWLINE = ord("\n")
LINE_BYTES = 1 << 28
"""Maximum length of a line in bytes. A Record of ten million chunks is shorter."""
BLOCK_BYTES = 1 << 20
"""Approximate number of bytes of a run file that are read and decoded together."""
WHOLE_FILE: tuple[int, int | None] = (0, None)
STAMPS_RENAMED = {"kernel": "socket"}
"""Names of timestamp sources in older runs, with their current names."""


def load_facts(arrivals: str, workload: str, concurrency: int = 0) -> LoadFacts:
    """Parse the plan's `arrivals` and `workload` texts and return the properties of the arrival process.

    `concurrency` is the maximum number of requests in flight. Further requests wait. 0 means no limit.
    """
    facts = facts_from_text(arrivals)
    if concurrency:
        text = f"{facts.text}, at most {concurrency} in flight (others wait)"
        facts = msgspec.structs.replace(facts, text=text, concurrency=concurrency)
    source = workload_facts(workload)
    return msgspec.structs.replace(facts, sessions=True, turns=source.turns or 1) if source.has_sessions else facts


class StampFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Properties of a timestamp source, such as packet or socket timestamps (loadgen.servers.wire.timestamps)."""

    name: str = ""
    """Name of the source in Records. Records that name a different source count as timestamped in user space."""
    title: str = ""
    exact: bool = False
    """True if timestamps are correct however late the process reads."""
    error_s: float | None = None
    """Error bound in seconds for 99% of exact timestamps. None if the error can be as long as the longest stall of the
    process."""
    by_read: bool = True
    """True if tokens that are read together share a timestamp."""


class SchedulingFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Scheduling priority of the client's sending and reading threads at the start of the run."""

    requested: str = ""
    """`auto`, `realtime` or `normal` (--client-priority); empty in older runs."""
    policy: str = "other"
    """`realtime` (SCHED_RR or SCHED_FIFO) or `other`."""
    nice: int = 0
    autogroup_nice: int | None = None
    """Nice value of the worker's autogroup. None if the kernel has no autogroups or the worker got no new session."""
    refused: str = ""
    """The priority change that the system refused, with the reason; empty if no change was refused."""


def stamp_facts(*names: str) -> StampFacts:
    """Return the properties of the least exact timestamp source in `names`.

    An unknown source counts as the least exact.
    """
    from loadgen.servers.wire.timestamp_sources import SOURCES, least_exact_source
    from loadgen.servers.wire.timestamps import PLAIN

    name = names[0] if len(set(names)) == 1 else least_exact_source(names)
    name = STAMPS_RENAMED.get(name, name)
    source = SOURCES.get(name, PLAIN)
    title = source.title if name in SOURCES else f"{name} timestamps"
    return StampFacts(name=name, title=title, exact=source.exact, error_s=source.error_s, by_read=source.by_read)


class TrafficFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A class of traffic of a run (a `[[traffic]]` table of the plan)."""

    name: str
    first_id: Integer = 0
    """Id of the first request of the class. The ids up to the `first_id` of the next class belong to the class.

    A warm-up request with the id -1 - i belongs to the class of the id i."""
    load: LoadFacts = LoadFacts()
    """Properties of the arrival process of the class."""
    n: int | None = None
    """Number of requests, or of sessions. None if the duration or a file decides."""
    duration_s: float | None = None
    workload: str = ""
    input_tokens: int | str = 0
    output_tokens: int | str = 0
    endpoint: str = ""
    model: str = ""
    """Model, or the models and their weights."""
    goodput: list[str] = []
    """Bounds that define a good request of the class. Empty: those of the whole plan."""


class Header(msgspec.Struct, tag_field="type", tag="header", kw_only=True):
    """The first line of a run file. The header holds all facts that are known before the first byte is sent."""

    format: int = FORMAT
    tool: str = "loadgen"
    version: str
    command: list[str] = []
    """The command line that repeats the run. It never contains secrets."""
    started_at: str
    """Wall-clock start, RFC 3339, UTC."""
    start_ns: Integer
    """Start of the run on CLOCK_MONOTONIC, in ns. Timestamps in Records are relative to it."""
    start_realtime_ns: Integer = 0
    """Start of the run on CLOCK_REALTIME, in ns, for comparison with other logs."""
    plan: dict[str, Any]
    """The resolved plan: server, url, endpoint, n, input_tokens, output_tokens, seed, workers, timeout_s, label, ..."""
    load: LoadFacts = LoadFacts()
    """Properties of the arrival process. For older runs without this field, they are derived from the plan."""
    traffic: list[TrafficFacts] = []
    """Classes of traffic, in order of their ids. Empty if the plan has none."""
    server: dict[str, Any]
    """Facts from the probe: name, version, model, url, simulated (bool), speed (simulated servers only) and limits
    {...}; title and notes of the backend; proxied_to (the container's URL behind docker-proxy); addresses (those of the
    URL's host that connections used); addresses_unused (other addresses, with reasons); proxy (URL of the HTTP
    proxy); protocol (HTTP/2 if the server accepts nothing else); launch (of a matrix)."""
    stamps: StampFacts = StampFacts()
    """Properties of the timestamp source. For older runs without this field, they are derived from `client`."""
    host: dict[str, Any] = {}
    """hostname, os, kernel, python, cpu, cores, memory_bytes."""
    client: dict[str, Any] = {}
    """Facts about the client: stamps (name of the timestamp source), stamps_lacking (what a better source needs),
    prompts (how prompt lengths were made exact), open_files, scheduling (SchedulingFacts of the worker whose priority
    was raised least), sent_before (when this machine sent prompts with the same seed to the server), cold (result of
    --cold: emptied, unused or unchecked), forced (why a measured server version is misleading), over_limit (the server
    limit that the load exceeds) and, in a distributed run, machines (name, workers, host, offset_ns, uncertainty_ns and
    exchanges of each)."""
    telemetry: dict[str, Any] = {}
    """every_s; `server`, `gpu` and `host` (sources, names, sizes and versions); not_measured (with reasons)."""

    def __post_init__(self) -> None:
        if not self.load.kind:
            self.load = load_facts(
                str(self.plan.get("arrivals") or "burst"),
                str(self.plan.get("workload") or ""),
                self.plan.get("concurrency") or 0,
            )
        if not self.stamps.name or self.stamps.name in STAMPS_RENAMED:
            self.stamps = stamp_facts(self.stamps.name or str(self.client.get("stamps", "user")))

    @property
    def workloads(self) -> list[WorkloadFacts]:
        """The properties of the run's workload, derived from the value of `--workload`.

        A run with classes of traffic has one entry for each class. Any other run has one entry.
        """
        texts = [facts.workload for facts in self.traffic] or [str(self.plan.get("workload") or "")]
        return [workload_facts(text or "synthetic") for text in texts]

    @property
    def objectives(self) -> list[str]:
        """The objectives of the run, in the syntax of --assert."""
        return self.plan.get("objectives") or _option_values(self.command, "--assert")

    @property
    def confidence(self) -> float | None:
        """The confidence that a verdict requires (--confidence). If None, the measured value alone decides."""
        if self.plan.get("objectives"):
            return self.plan.get("confidence")
        # The command of a sweep has an option of the same name, but no --assert.
        levels = _option_values(self.command, "--confidence") if self.objectives else []
        with suppress(ValueError):
            return parse_confidence(levels[-1]) if levels else None
        return None

    @property
    def goodput(self) -> list[str]:
        """The bounds that define a good request, in the syntax of --goodput."""
        return self.plan.get("goodput") or _option_values(self.command, "--goodput")

    @property
    def server_title(self) -> str:
        """Display name of the server backend. If the backend is unknown, this is the name in the header or the plan."""
        return str(self._of_server("title") or self.server.get("name") or self.plan.get("server") or "")

    @property
    def server_notes(self) -> Mapping[str, Any]:
        """Notes on how to interpret the backend's figures (loadgen.servers.backends.base.Backend.notes)."""
        return self._of_server("notes") or {}

    def _of_server(self, name: str) -> Any:
        """Return the fact `name` about the server, such as its title, or None if the fact is unknown.

        The fact comes from the header. If the header lacks it, as headers of older versions do, the fact comes from
        this version's description of the backend.
        """
        from loadgen.servers.backends import BACKENDS

        backend = BACKENDS.get(str(self.server.get("name") or self.plan.get("server")))
        return self.server.get(name) or getattr(backend, name, None)


def _option_values(command: Sequence[str], option: str) -> list[str]:
    """Return all values of the option `option` in a command line, which may contain the option several times.

    The objectives of older runs, and those of runs from `loadgen ui`, are only in the command line, not in the plan.
    """
    values = [value for word, value in pairwise(command) if word == option]
    return values + [word.removeprefix(f"{option}=") for word in command if word.startswith(f"{option}=")]


class Telemetry(msgspec.Struct, tag_field="type", tag="telemetry", kw_only=True):
    """One sample of values that change during the run. `at_ns` is in ns relative to the start of the run."""

    source: str
    """`client` (one sample per worker and second), `server`, `gpu`, `host`, or `clock` in a distributed run."""
    at_ns: Integer
    worker: Count = 0
    values: Mapping[str, Any]
    """For `client`: cpu_ns, wall_ns, reads, coalesced_reads, full_reads, retransmits, out_of_order, stall_ns_max,
    pauses and paused_ns (pauses of a closed loop after requests that failed immediately), simulated and
    simulated_speed (a response had the mark of a simulated server), clock_disagreement_ns, and late_counts
    ({bucket: reads}, see loadgen.engine.client_health). For `clock`, one sample before the start and one at the end:
    machine, workers, offset_ns (by which its clock was ahead of the master's) and uncertainty_ns. For the other
    sources: moment (`idle`, `start`, `run`, `end`, `after`), took_ns, and the figures of docs/reference/telemetry.md;
    or only `gap`, the reason why no figures could be read."""


class Footer(msgspec.Struct, tag_field="type", tag="footer", kw_only=True):
    """The last line of a run file. A run without a footer was interrupted, or is still in progress."""

    ended_ns: Integer
    sent: Count
    complete: Count
    truncated: Count
    failed: Count
    rejected: Count | None = None
    """None if the run is from a version that counted rejected requests as failed."""
    dropped: Count
    abandoned: Count = 0
    interrupted: bool = False
    notes: list[str] = []


class Run(msgspec.Struct):
    """Contents of a run file: the lines by type, and the number of damaged lines."""

    path: Path
    header: Header
    records: list[Record]
    telemetry: list[Telemetry]
    footer: Footer | None
    damaged_lines: int = 0
    going_on: bool = False
    """True if a process on this machine is still writing the run."""
    canaries: list[Canary] = []
    """Answers to canaries (--verify), which are in no figure of the load."""
    commands: list[CommandRecord] = []
    """Commands that ran at an instant of the run (--at)."""
    removed: list[RemovedRecords] = []
    """Figures of the Records that were removed during the run (--keep-records)."""
    record_files: set[str] = set()
    """Names of the files of Records that were read, without the ending `.gz`."""
    mixed_replicas: tuple[list[Telemetry], int, int] | None = None
    """The last result of loadgen.analysis.telemetry.count_mixed_replicas, after the telemetry and its length."""


def add_rest(run: Run, rest: Run) -> None:
    """Add the lines of `rest` to `run`. Both were read from the same run, and `rest` is the later part of it."""
    run.telemetry += rest.telemetry
    run.canaries += rest.canaries
    run.commands += rest.commands
    run.removed += rest.removed
    run.record_files |= rest.record_files
    _keep_removed_once(run)
    run.damaged_lines += rest.damaged_lines
    run.footer = rest.footer or run.footer
    run.going_on = run.footer is None and rest.going_on
    _note_simulated(run)


_Line = Header | Record | Canary | CommandRecord | RemovedRecords | Telemetry | Footer
_LINE = msgspec.json.Decoder(_Line)
_COMPACT_LINE = msgspec.json.Decoder(
    Header | CompactRecord | Canary | CommandRecord | RemovedRecords | Telemetry | Footer
)


class RunWriter:
    """Appends lines to the file that one process writes: a part file, or `run.jsonl`. Lines are buffered in memory."""

    def __init__(self, path: Path, worker: int = 0, rotate_bytes: int = 0) -> None:
        """Open the file `path`, to append lines to it.

        When the file contains `rotate_bytes` bytes, it is renamed, and a new file `path` is begun. The new name
        contains the number `worker` of the process that writes. If `rotate_bytes` is 0, the file grows without limit.
        """
        self.path = path
        self._worker = worker
        self._rotate_bytes = rotate_bytes
        self._rotated = 0
        self._written = 0
        self._encoder = msgspec.json.Encoder()
        self._pending = bytearray()
        self._file = self._open(path)
        self.error: OSError | None = None
        """Error of the last flush, or None if every line was written."""

    def add(self, item: Record | Canary | CommandRecord | Telemetry | Footer) -> None:
        """Encode an item and add it to the buffer. The buffer is written to disk once it holds FLUSH_BYTES."""
        self.add_line(self._encoder.encode(item) + b"\n")

    def add_line(self, line: bytes) -> None:
        """Add an encoded line, including its newline, to the buffer.

        The buffer is written to disk once it holds FLUSH_BYTES.
        """
        self._pending += line
        if len(self._pending) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines to the file. If this fails, set `error` and keep the unwritten bytes buffered."""
        self.error = None
        try:
            while self._pending:
                written = os.write(self._file, self._pending)
                self._written += written
                del self._pending[:written]
            if 0 < self._rotate_bytes <= self._written:
                self._rotate()
        except OSError as error:
            self.error = error

    @property
    def unwritten_bytes(self) -> int:
        """Number of bytes in the buffer that the last flush could not write, for example because the disk is full."""
        return len(self._pending) if self.error is not None else 0

    def _open(self, path: Path) -> int:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with suppress(OSError):  # Readers test this lock to see whether the run is in progress.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file

    def _rotate(self) -> None:
        """Rename the file, which must end with a whole line, and begin a new file.

        This takes a tenth of a millisecond. If it fails with an OSError, the old file keeps its name and stays open,
        and the next flush tries again.
        """
        completed = record_file(self.path.parent, self._worker, self._rotated + 1)
        new = self.path.with_name(f".{self.path.name}.new")
        file = self._open(new)
        try:
            os.rename(self.path, completed)  # noqa: PTH104
            try:
                os.rename(new, self.path)  # noqa: PTH104
            except OSError:
                os.rename(completed, self.path)  # noqa: PTH104
                raise
        except OSError:
            os.close(file)
            with suppress(OSError):
                new.unlink()
            raise
        os.close(self._file)
        self._file = file
        self._rotated += 1
        self._written = 0

    def close(self) -> Path | None:
        """Flush and close the file. Return None if every line was written.

        If lines could not be written, write them to a rescue file in the system's temporary folder and return its path.
        """
        self.flush()
        os.close(self._file)
        if not self._pending:
            return None
        rescue = Path(tempfile.gettempdir(), f"loadgen-{os.getpid()}-{self.path.parent.name[:50]}-{self.path.name}")
        try:
            rescue.write_bytes(self._pending)
        except OSError as error:
            sys.stderr.write(f"loadgen: cannot write all lines to {self.path} or {rescue}: {error.strerror}\n")
        return rescue


def read(path: Path) -> Run:
    """Read a run folder, or its `run.jsonl`, into memory. Raises RunFileError if there is no readable header.

    A million Records of 64 tokens each take 5 GB of memory. Use `scan` for runs of that size."""
    records: list[Record] = []
    run = scan(path, records.append)
    run.records = records
    return run


def scan(
    path: Path,
    on_record: Callable[[Record], object],
    on_header: Callable[[Header], object] = lambda _: None,
    span: tuple[int, int | None] = WHOLE_FILE,
    on_block: Callable[[Sequence[CompactRecord]], bool] | None = None,
    other_files: Sequence[Path] = (),
) -> Run:
    """Read a run, and call `on_record` with each Record. The returned Run has no Records, which saves memory.

    - `path`: the folder of the run, or its `run.jsonl`.
    - `on_header`: a function that is called with the header, before any Record is read.
    - `on_block`: a function that is called with a list of Records, or None. It is much faster than `on_record`, because
      the chunks of these Records stay JSON text. If it returns False, `on_record` is called with each Record of the
      list. A caller that uses `on_block` must check that no request has two Records.
    - `span`: the part of `run.jsonl` to read, as two byte offsets: the beginning of the first line, and the end of the
      last line (None: the end of the file). The header is read even if it is outside the span. Part files and files of
      Records (loadgen.analysis.run.record_files) are read only without a span.
    - `other_files`: files of Records that this function must not read, because the caller reads them.

    Raises RunFileError if there is no readable header.
    """
    main = path / "run.jsonl" if path.is_dir() else path
    if not main.exists():
        raise RunFileError(
            f"{path}: no run found. Name a folder that contains run.jsonl, as `loadgen burst` prints it."
        )
    blocks = _blocks(main, pipes=main == path)
    first, _, rest = next(blocks, b"").lstrip().partition(b"\n")
    run = Run(main, _header(main, first), [], [], None)
    on_header(run.header)
    if span != WHOLE_FILE:
        blocks = _blocks(main, span=span)
        rest = next(blocks, b"").lstrip().partition(b"\n")[2] if not span[0] else b""
    seen = IdSet()  # If the disk filled up, part files remain whose lines are also in run.jsonl.
    with ExitStack() as stack:
        parts: list[Path] = []
        sources = chain([rest], blocks)
        if span == WHOLE_FILE:
            # A worker of a run in progress renames its part file to a file of Records. The part files are opened before
            # the files of Records are listed, so that such a file is read under its old name or under its new one.
            streams = _open_parts(main.parent, stack)
            parts = list(streams)
            files = _files_to_read(run, main.parent, streams.values(), other_files)
            sources = chain(
                _record_blocks(run, files), [rest], blocks, *(_stream_blocks(part, streams[part]) for part in parts)
            )
        for block in sources:
            if on_block is None or not _take_block(run, block, on_block):
                _take_lines(run, block, seen, on_record)
        if span == WHOLE_FILE:  # Records may have been removed for the first time since the part files were opened.
            for part in sorted(set(main.parent.glob("part-*.jsonl")) - set(parts)):
                with suppress(FileNotFoundError), open_records(part) as stream:
                    for block in _stream_blocks(part, stream):
                        _take_lines(run, block, seen, on_record)
    _keep_removed_once(run)
    run.going_on = run.footer is None and any(map(_being_written, (main, *parts)))
    _note_simulated(run)
    return run


def _open_parts(folder: Path, stack: ExitStack) -> dict[Path, IO[bytes]]:
    """Open the part files in a folder. The files are closed with `stack`."""
    streams: dict[Path, IO[bytes]] = {}
    for part in sorted(folder.glob("part-*.jsonl")):
        try:
            streams[part] = stack.enter_context(open_records(part))
        except FileNotFoundError:  # The worker has just renamed the file, or the run has just ended.
            continue
        except OSError as error:
            raise _unreadable(part, error) from error
    return streams


def _files_to_read(run: Run, folder: Path, parts: Iterable[IO[bytes]], other_files: Sequence[Path]) -> list[Path]:
    """Return the files of Records in `folder` that this process still has to read.

    Two groups of files are left out:

    - The files in `other_files`, which the caller reads itself.
    - Files that are already open as `parts`. A worker may have renamed a part file to a file of Records after this
      process opened it. Such a file is added to `run.record_files`.
    """
    others = {plain_name(file.name) for file in other_files}
    opened = [os.fstat(part.fileno()) for part in parts]
    files = []
    for file in record_files(folder):
        with suppress(FileNotFoundError):
            if any(os.path.samestat(status, file.stat()) for status in opened):
                run.record_files.add(plain_name(file.name))
                continue
        if plain_name(file.name) not in others:
            files.append(file)
    return files


def scan_records(
    files: Iterable[Path],
    on_record: Callable[[Record], object],
    on_block: Callable[[Sequence[CompactRecord]], bool],
) -> Run:
    """Read files of Records without reading the run to which they belong. Return a Run with an empty header and no
    Records.

    - `on_block` is called with each list of Records.
    - `on_record` is called with each single Record of a list for which `on_block` returns False. This is slower.

    The Run contains the other lines of the files: telemetry of the client, and answers to canaries (test prompts). The
    caller must check that no two Records belong to the same request.
    """
    run = Run(Path(), Header(version="", started_at="", start_ns=0, plan={}, server={}), [], [], None)
    for block in _record_blocks(run, files):
        if not _take_block(run, block, on_block):
            _take_lines(run, block, IdSet(), on_record)
    return run


def _record_blocks(run: Run, files: Iterable[Path]) -> Iterator[bytes | bytearray]:
    """Yield the lines of files of Records in blocks, and note in the Run which files were read.

    A file that no longer exists is left out, because --keep-records has removed it since the files were listed.
    """
    for file in files:
        blocks = _blocks(file)
        try:
            first = next(blocks, b"")
        except RunFileError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        run.record_files.add(plain_name(file.name))
        yield first
        yield from blocks


def _keep_removed_once(run: Run) -> None:
    """Remove superfluous summaries from `run.removed`.

    During a run with --keep-records, old files of Records are removed. `run.removed` contains summaries of the removed
    files. Two rules determine which summaries remain:

    - If a file has several summaries, only the last one remains.
    - If this process has read a file itself, no summary of this file remains. Otherwise the requests in the file would
      count twice. This happens if the removal of the file failed, or if the file was removed only after this process
      had read it.
    """
    by_file = {plain_name(part.file): part for part in run.removed}
    run.removed = [part for name, part in by_file.items() if name not in run.record_files]


def _take_block(run: Run, block: bytes | bytearray, on_block: Callable[[Sequence[CompactRecord]], bool]) -> bool:
    """Decode all lines of `block`, pass their Records to `on_block` in one call, and return True.

    Lines that are not Records are stored in `run`. If a line is damaged, or if `on_block` returns False, return False
    instead and leave `run` unchanged. The caller then processes the lines one by one.
    """
    try:
        items = _COMPACT_LINE.decode_lines(block)
        records = [item for item in items if isinstance(item, CompactRecord)]
        others = [_checked(item) for item in items if not isinstance(item, CompactRecord)]
    except DECODE_ERRORS:
        return False
    for record in records:
        if record.stamps in STAMPS_RENAMED:
            record.stamps = STAMPS_RENAMED[record.stamps]
    if not on_block(records):
        return False
    for item in others:
        _store(run, item)
    return True


def _take_lines(run: Run, block: bytes | bytearray, seen: IdSet, on_record: Callable[[Record], object]) -> None:
    """Decode the lines of `block` one by one, and pass each Record to `on_record`.

    `seen` contains the ids of earlier Records, so that a second Record of a request is ignored. Other lines are stored
    in `run`. Damaged lines are only counted.
    """
    for line in block.split(b"\n"):
        if not line or line.isspace():
            continue
        try:
            item = _checked(_LINE.decode(line))
        except DECODE_ERRORS:
            run.damaged_lines += 1
            continue
        if isinstance(item, Record):
            if seen.add(item.id):
                item.stamps = STAMPS_RENAMED.get(item.stamps, item.stamps)
                on_record(item)
        else:
            _store(run, item)


def _store(run: Run, item: _Line) -> None:
    """Add a decoded line to the list of its type in the Run. Records and headers are ignored."""
    if isinstance(item, Canary):
        run.canaries.append(item)
    elif isinstance(item, CommandRecord):
        run.commands.append(item)
    elif isinstance(item, RemovedRecords):
        run.removed.append(item)
    elif isinstance(item, Telemetry):
        if item.source == "client":
            item.source = "client"  # the same text in memory for all samples
            item.values = pack_values(dict(item.values))
        run.telemetry.append(item)
    elif isinstance(item, Footer):
        run.footer = item


def _note_simulated(run: Run) -> None:
    """Mark a run as simulated if the telemetry shows that responses came from a simulated server.

    The probe may have missed this, for example because a gateway hid the status page of the server.
    """
    if run.header.server.get("simulated"):
        return
    for sample in run.telemetry:
        if sample.values.get("simulated"):
            run.header.server |= {"simulated": True, "speed": sample.values.get(FIELD)}
            return


def _checked(item: _Line) -> _Line:
    """Return the decoded line `item` unchanged if its content is valid.

    Raises one of DECODE_ERRORS if a Record does not have one token count for each chunk, or if a telemetry value has a
    wrong type.
    """
    if isinstance(item, Record) and len(item.chunk_ns) != len(item.chunk_tokens):
        raise msgspec.ValidationError("Expected a token count for each chunk")
    if isinstance(item, Telemetry):
        msgspec.convert(item.values, CLOCK if item.source == "clock" else SAMPLE, str_keys=True)
    return item


def _being_written(file: Path) -> bool:
    """Return True if a RunWriter has the file open."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _header(main: Path, line: bytes | bytearray) -> Header:
    try:
        msgspec.json.decode(line, type=HEADER)
        header = msgspec.json.decode(line, type=Header)
    except DECODE_ERRORS as error:
        raise RunFileError(f"{main}: line 1 is not a readable header ({error}), so the run is unknown") from error
    if header.format > FORMAT:
        raise RunFileError(f"{main}: written by a newer loadgen (format {header.format}); upgrade to read it.")
    return header


def _blocks(
    file: Path, *, pipes: bool = False, span: tuple[int, int | None] = WHOLE_FILE
) -> Iterator[bytes | bytearray]:
    """Yield blocks of whole lines. Raises RunFileError for an unreadable file or a line over LINE_BYTES.

    `span` contains two offsets in bytes: the start of the first line to read, and the end of the last one. If the
    second offset is None, the file is read to its end.
    """
    try:
        with open_records(file, pipes=pipes) as stream:
            yield from _stream_blocks(file, stream, span)
    except OSError as error:
        raise _unreadable(file, error) from error


def _stream_blocks(
    file: Path, stream: IO[bytes], span: tuple[int, int | None] = WHOLE_FILE
) -> Iterator[bytes | bytearray]:
    """Yield blocks of whole lines of an open file, as `_blocks` does."""
    position, end = span
    readinto = cast("io.BufferedIOBase", stream).readinto
    try:
        if position:
            stream.seek(position)
        while end is None or position < end:
            limit = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - position)
            block = bytearray(limit)
            size = readinto(block)
            if not size:
                return
            # Joining two `bytes` would copy the whole block.
            block[size:] = b"" if block[size - 1] == _NEWLINE else stream.readline(LINE_BYTES + 1)
            position += len(block)
            if len(block) > LINE_BYTES and len(block) - block.rfind(b"\n", 0, -1) > LINE_BYTES:
                line = f"the line that ends at byte {position:,}"
                raise RunFileError(f"{file}: {line} has more than {LINE_BYTES:,} bytes. Is this a run?")
            yield block
    except (OSError, EOFError, zlib.error) as error:  # the last two are errors of compressed data
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> RunFileError:
    return RunFileError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}")


def open_run(folder: Path, header: Header, stamps: str, start_ns: int, start_realtime_ns: int) -> None:
    """Write the header to `run.jsonl`. Raises OutputError if the file cannot be written.

    `stamps` is the name of the timestamp source. `start_ns` and `start_realtime_ns` are the start of the run on
    CLOCK_MONOTONIC and CLOCK_REALTIME. The file is not synced to disk, because that could delay the start."""
    from loadgen.servers.wire.timestamp_sources import missing_requirement

    header.start_ns, header.start_realtime_ns = start_ns, start_realtime_ns
    header.client["stamps"], header.stamps = stamps, stamp_facts(stamps)
    header.client["stamps_lacking"] = missing_requirement(str(header.plan.get("stamps")), stamps, header.server)
    append_lines(folder / "run.jsonl", [hide_secrets(msgspec.json.encode(header), whole=True) + b"\n"], sync=False)


def append_lines(file: Path, lines: Iterable[bytes], *, sync: bool = True) -> None:
    """Append lines to a file. If `sync` is true, wait until the file is on disk.

    Raises OutputError if the file cannot be written.
    """
    try:
        with file.open("ab") as stream:
            stream.writelines(lines)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}", "Nothing was sent.") from error
