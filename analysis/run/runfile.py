"""The Run file: append-only JSON Lines. Its line types, its writer and its reader.

A run is a folder holding `run.jsonl`. While it is running each worker appends to `part-<worker>.jsonl`; the
coordinator appends the parts to `run.jsonl` and closes it with a footer. A run that was killed has parts and
no footer and is read just the same. Lines that are damaged are skipped and counted, never guessed at.

    {"type":"header", "format":1, "plan":{...}, "server":{...}, ...}
    {"type":"request", ...}          a Record (loadgen.analysis.run.record)
    {"type":"telemetry", "source":"client", ...}
    {"type":"footer", ...}
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import msgspec

from loadgen.analysis.run.errors import OutputError, RunFileError
from loadgen.analysis.run.record import Count, Integer, Record
from loadgen.analysis.run.run_schema import CLOCK, HEADER, SAMPLE
from loadgen.servers.auth import hide_secrets
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.marks import FIELD
from loadgen.workloads.arrival_facts import LoadFacts
from loadgen.workloads.arrivals import facts_from_text
from loadgen.workloads.input_files import open_input

FORMAT = 1
FLUSH_BYTES = 1 << 20
LINE_BYTES = 1 << 28
"""Maximum length of a line that is read. A Record of ten million chunks is shorter."""
STAMPS_RENAMED = {"kernel": "socket"}
"""Sources of stamps as older runs have them, and as they are called today."""


def load_facts(arrivals: str, workload: str) -> LoadFacts:
    """From the canonical texts of a plan."""
    kind, _, rest = workload.partition(":")
    if kind != "multi-turn":
        return facts_from_text(arrivals)
    turns = rest.removeprefix("turns=").partition(",")[0]
    return msgspec.structs.replace(
        facts_from_text(arrivals), sessions=True, turns=int(turns) if turns.isdecimal() else 1
    )


class StampFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Where the run's arrival instants come from, as the source says it of itself (loadgen.servers.wire.timestamps)."""

    name: str = ""
    """As Records have it. A Record of another source than the run's is no better than user-space timestamps."""
    title: str = ""
    exact: bool = False
    """Whether a stamp is right however late the process read."""
    error_s: float | None = None
    """What 99 % of exact stamps are off by at most; None: by as long as the process may have been away."""
    by_read: bool = True
    """Whether tokens that were read together share a stamp."""


class SchedulingFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The scheduling priority of the client's sending and reading threads, as it was in force at the start."""

    requested: str = ""
    """`auto`, `realtime` or `normal` (--client-priority); empty in older runs."""
    policy: str = "other"
    """`realtime` (SCHED_RR or SCHED_FIFO) or `other`."""
    nice: int = 0
    autogroup_nice: int | None = None
    """Nice value of the worker's session; null without autogroups, and where the worker stayed in its session."""
    refused: str = ""
    """What was not permitted, and the system's reason."""


def stamp_facts(*names: str) -> StampFacts:
    """What the least of these sources says of itself; of one that is not known here, the least."""
    from loadgen.servers.wire.timestamp_sources import SOURCES, least_exact_source
    from loadgen.servers.wire.timestamps import PLAIN

    name = names[0] if len(set(names)) == 1 else least_exact_source(names)
    name = STAMPS_RENAMED.get(name, name)
    source = SOURCES.get(name, PLAIN)
    title = source.title if name in SOURCES else f"{name} timestamps"
    return StampFacts(name=name, title=title, exact=source.exact, error_s=source.error_s, by_read=source.by_read)


class Header(msgspec.Struct, tag_field="type", tag="header", kw_only=True):
    """The first line: all that was known before the first byte was sent."""

    format: int = FORMAT
    tool: str = "loadgen"
    version: str
    command: list[str] = []
    """The command line that repeats the run; secrets are never on it."""
    started_at: str
    """Wall-clock start, RFC 3339, UTC."""
    start_ns: Integer
    """CLOCK_MONOTONIC at the run's instant 0."""
    start_realtime_ns: Integer = 0
    """CLOCK_REALTIME at the same instant: what other logs are compared with."""
    plan: dict[str, Any]
    """The resolved plan: server, url, endpoint, n, input_tokens, output_tokens, seed, workers, timeout_s, label, ..."""
    load: LoadFacts = LoadFacts()
    """What the plan's arrivals are. Of runs from before this field it comes from the plan as they are read."""
    server: dict[str, Any]
    """From the probe: name, version, model, url, simulated (bool), speed (simulated only), limits {...}; title and
    notes of its kind; proxied_to, where docker-proxy stands between: the container's own URL; addresses, those
    of the URL's host that connections used; addresses_unused (others, and why); launch, of a matrix."""
    stamps: StampFacts = StampFacts()
    """Where arrival instants come from; of older runs filled in as they are read."""
    host: dict[str, Any] = {}
    """hostname, os, kernel, python, cpu, cores, memory_bytes."""
    client: dict[str, Any] = {}
    """stamps (the source's name), stamps_lacking (what a better one would have taken), prompts (how their length was
    made exact), open_files; scheduling (SchedulingFacts of the worker whose priority was raised least); forced, where a
    version that misleads was measured all the same: why it does; over_limit, where more requests were sent at once than
    the server takes: the limit that they exceed; of a run over several machines also machines: name, workers, host,
    offset_ns, uncertainty_ns and exchanges of each."""
    telemetry: dict[str, Any] = {}
    """every_s; `server`, `gpu`, `host`: where their figures come from, names, sizes, versions; not_measured (why)."""

    def __post_init__(self) -> None:
        if not self.load.kind:
            self.load = load_facts(str(self.plan.get("arrivals") or "burst"), str(self.plan.get("workload") or ""))
        if not self.stamps.name or self.stamps.name in STAMPS_RENAMED:
            self.stamps = stamp_facts(self.stamps.name or str(self.client.get("stamps", "user")))

    @property
    def objectives(self) -> list[str]:
        """What the run must keep to, as written for --assert."""
        return self.plan.get("objectives") or _option_values(self.command, "--assert")

    @property
    def goodput(self) -> list[str]:
        """What makes one request good, as written for --goodput."""
        return self.plan.get("goodput") or _option_values(self.command, "--goodput")

    @property
    def server_title(self) -> str:
        """What people call this kind of server; its name where nobody knows the kind."""
        return str(self._of_server("title") or self.server.get("name") or self.plan.get("server") or "")

    @property
    def server_notes(self) -> Mapping[str, Any]:
        """What the figures of this kind must be read with (loadgen.servers.backends.base.Backend.notes)."""
        return self._of_server("notes") or {}

    def _of_server(self, name: str) -> Any:
        """As the header says; for runs from before it did, as the kind is known today."""
        from loadgen.servers.backends import BACKENDS

        kind = BACKENDS.get(str(self.server.get("name") or self.plan.get("server")))
        return self.server.get(name) or getattr(kind, name, None)


def _option_values(command: Sequence[str], option: str) -> list[str]:
    """Every value of a repeatable option on a command line. Older plans did not hold objectives, but their command
    did; so does the command of `loadgen ui`."""
    values = [after for word, after in pairwise(command) if word == option]
    return values + [word.removeprefix(f"{option}=") for word in command if word.startswith(f"{option}=")]


class Telemetry(msgspec.Struct, tag_field="type", tag="telemetry", kw_only=True):
    """One sample of something that changes during the run. `at_ns` counts like a Record's instants."""

    source: str
    """`client` (one per worker and second), `server`, `gpu` or `host`; `clock`, of a run over several machines."""
    at_ns: Integer
    worker: Count = 0
    values: dict[str, Any]
    """For `client`: cpu_ns, wall_ns, reads, coalesced_reads, full_reads, retransmits, out_of_order, stall_ns_max,
    pauses and paused_ns (waits of a closed loop after requests that failed at once), simulated and simulated_speed
    (a response had the mark of a simulated server),
    clock_disagreement_ns, late_counts ({bucket: reads}, see engine.health). For `clock`, one from before the start and
    one from the end: machine, workers, and by how much its clock was ahead of the master's, offset_ns, which is known
    to uncertainty_ns. For the others: moment (`idle`, `start`, `run`, `end`, `after`), took_ns, and the words of
    docs/reference/telemetry.md; or `gap`, why there is nothing."""


class Footer(msgspec.Struct, tag_field="type", tag="footer", kw_only=True):
    """The last line. A run without one was interrupted before it could say so."""

    ended_ns: Integer
    sent: Count
    complete: Count
    truncated: Count
    failed: Count
    rejected: Count | None = None
    """None: the run was written by a version that counted rejected requests among the failed ones."""
    dropped: Count
    interrupted: bool = False
    notes: list[str] = []


class Run(msgspec.Struct):
    """A Run as read: its lines by type, and what could not be read."""

    path: Path
    header: Header
    records: list[Record]
    telemetry: list[Telemetry]
    footer: Footer | None
    damaged_lines: int = 0
    going_on: bool = False
    """Whether a process of this machine is still writing it."""


_LINE = msgspec.json.Decoder(Header | Record | Telemetry | Footer)


class RunWriter:
    """Writes one process's part of the Run: lines are kept until the disk has taken them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._pending = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with suppress(OSError):  # tells readers that the run goes on, until this process ends
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.error: OSError | None = None
        """Why the last flush could not write everything; None when it could."""

    def add(self, item: Record | Telemetry | Footer) -> None:
        """Append one line. Written when a mebibyte has gathered or `flush` is called."""
        self.add_line(self._encoder.encode(item) + b"\n")

    def add_line(self, line: bytes) -> None:
        """Append a line that is encoded already, with its end."""
        self._pending += line
        if len(self._pending) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; what the disk refuses stays pending and `error` says why."""
        self.error = None
        try:
            while self._pending:
                del self._pending[: os.write(self._file, self._pending)]
        except OSError as error:
            self.error = error

    def close(self) -> Path | None:
        """Flush and close. What the disk refused goes to a file in the temporary folder, whose path is returned."""
        self.flush()
        os.close(self._file)
        if not self._pending:
            return None
        rescue = Path(tempfile.gettempdir(), f"loadgen-{os.getpid()}-{self.path.parent.name[:50]}-{self.path.name}")
        try:
            rescue.write_bytes(self._pending)
        except OSError as error:
            sys.stderr.write(f"loadgen: neither {self.path} nor {rescue} could take everything: {error.strerror}\n")
        return rescue


def read(path: Path) -> Run:
    """Read a run folder (or its `run.jsonl`) as a whole. Raises RunFileError when there is no header to make sense of.
    A million requests of 64 tokens are 5 GB of Records: `scan` reads such a run."""
    records: list[Record] = []
    run = scan(path, records.append)
    run.records = records
    return run


def scan(path: Path, take: Callable[[Record], object]) -> Run:
    """Like `read`, but each Record goes to `take` as it comes, and the Run that is returned holds none."""
    main = path / "run.jsonl" if path.is_dir() else path
    if not main.exists():
        raise RunFileError(f"{path}: no run here. Give a folder that holds run.jsonl, as `loadgen burst` prints it.")
    lines = _lines(main, pipes=main == path)
    run = Run(main, _header(main, next(lines, b"")), [], [], None)
    parts = sorted(main.parent.glob("part-*.jsonl"))
    seen: set[int] = set()  # a part that was being gathered when the disk filled up is there twice
    for line in chain(lines, *map(_lines, parts)):
        try:
            item = _decoded(line)
        except DECODE_ERRORS:
            run.damaged_lines += 1
            continue
        if isinstance(item, Record):
            if item.id not in seen:
                seen.add(item.id)
                item.stamps = STAMPS_RENAMED.get(item.stamps, item.stamps)
                take(item)
        elif isinstance(item, Telemetry):
            run.telemetry.append(item)
        elif isinstance(item, Footer):
            run.footer = item
    run.going_on = run.footer is None and any(map(_being_written, (main, *parts)))
    _note_simulated(run)
    return run


def _note_simulated(run: Run) -> None:
    """Say in the header that the server is simulated, if its responses said so and the probe did not notice it."""
    if run.header.server.get("simulated"):
        return
    for sample in run.telemetry:
        if sample.values.get("simulated"):
            run.header.server |= {"simulated": True, "speed": sample.values.get(FIELD)}
            return


def _decoded(line: bytes) -> Header | Record | Telemetry | Footer:
    """Raises NOT_READABLE, also for what contradicts itself."""
    item: Header | Record | Telemetry | Footer = _LINE.decode(line)
    if isinstance(item, Record) and len(item.chunk_ns) != len(item.chunk_tokens):
        raise msgspec.ValidationError("Expected a count for each chunk")
    if isinstance(item, Telemetry):
        msgspec.convert(item.values, CLOCK if item.source == "clock" else SAMPLE, str_keys=True)
    return item


def _being_written(file: Path) -> bool:
    """Return whether a RunWriter has the file open."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _header(main: Path, line: bytes) -> Header:
    try:
        msgspec.json.decode(line, type=HEADER)
        header = msgspec.json.decode(line, type=Header)
    except DECODE_ERRORS as error:
        raise RunFileError(f"{main}: line 1 is not a readable header ({error}): nothing says what was run") from error
    if header.format > FORMAT:
        raise RunFileError(f"{main}: written by a newer loadgen (format {header.format}); upgrade to read it.")
    return header


def _lines(file: Path, *, pipes: bool = False) -> Iterator[bytes]:
    """Yield the lines that are not blank. Raises RunFileError for a file that cannot be read or is no run."""
    try:
        with open_input(file, pipes=pipes) as stream:
            for number in count(1):
                line = stream.readline(LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > LINE_BYTES:
                    raise RunFileError(f"{file}: line {number} has more than {LINE_BYTES:,} bytes. Is this a run?")
                if not line.isspace():
                    yield line
    except OSError as error:
        raise RunFileError(f"cannot read {file}: {error.strerror}") from error


def open_run(folder: Path, header: Header, stamps: str, start_ns: int, start_realtime_ns: int) -> None:
    """Write the header of a run that starts at this instant, on either clock: a busy disk would take longer than there
    is until then, and has it when the run has ended. Raises OutputError."""
    from loadgen.servers.wire.timestamp_sources import missing_requirement

    header.start_ns, header.start_realtime_ns = start_ns, start_realtime_ns
    header.client["stamps"], header.stamps = stamps, stamp_facts(stamps)
    header.client["stamps_lacking"] = missing_requirement(str(header.plan.get("stamps")), stamps)
    append_lines(folder / "run.jsonl", [hide_secrets(msgspec.json.encode(header), whole=True) + b"\n"], sync=False)


def append_lines(file: Path, lines: Iterable[bytes], *, sync: bool = True) -> None:
    """Append to a file and make sure, or the next time, that it is on the disk. Raises OutputError."""
    try:
        with file.open("ab") as stream:
            stream.writelines(lines)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}", "Nothing was sent.") from error
