"""The Run file: append-only JSON Lines. Its line types, its writer and its reader.

A run is a folder holding `run.jsonl`. While it is running each worker appends to `part-<worker>.jsonl`; the
coordinator appends the parts to `run.jsonl` and closes it with a footer. A run that was killed has parts and
no footer and is read just the same. Lines that are damaged are skipped and counted, never guessed at.

    {"type":"header", "format":1, "plan":{...}, "server":{...}, ...}
    {"type":"request", ...}          a Record (loadgen.record)
    {"type":"telemetry", "source":"client", ...}
    {"type":"footer", ...}
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.record import Record

if TYPE_CHECKING:
    from servers.kinds.base import ServerKind

FORMAT = 1
FLUSH_BYTES = 1 << 20


class LoadFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the arrivals are, as data: nobody reads their text again. Of older runs it is filled in as they are read."""

    kind: str = ""
    """First word of their canonical text, a key of workloads.arrivals.KINDS; or `interactive`."""
    text: str = ""
    """How they describe themselves, such as `all at once` or `20 per second (Poisson)`."""
    open_loop: bool = True
    """Whether instants were due that no answer moved."""
    burst: bool = False
    """Whether all requests were due at one instant."""
    finite: bool = False
    """Whether they end by themselves, as a ramp or a trace does."""
    steady: bool = False
    """Whether one rate or number of clients held throughout, so that a plateau can be looked for."""
    rate_per_s: float | None = None
    """Requests per second that were promised; None: no one rate was."""
    cv: float | None = None
    """The coefficient of variation of the gaps that was promised."""
    law: str = ""
    """What gaps are drawn from: `gamma` of that rate and variation. Empty: no chance in them."""
    clients: int = 0
    """Of a closed loop."""
    sessions: bool = False
    """Whether arrivals, clients and n count sessions."""
    turns: int = 1
    """Turns of each session, where the plan says it."""
    recorded: bool = False
    """Whether the arrivals brought the lengths of their requests, as a trace does."""


def load_facts(arrivals: str, workload: str) -> LoadFacts:
    """From the canonical texts of a plan. A process that is not known here, as of a newer version, promises nothing."""
    from workloads.arrivals import Arrivals, Interactive, parse
    from workloads.syntax import WorkloadError

    kind, _, rest = workload.partition(":")
    sessions = kind == "multi-turn"
    turns = rest.removeprefix("turns=").partition(",")[0] if sessions else ""
    try:
        named: Arrivals = Interactive() if arrivals == str(Interactive()) else parse(arrivals)
    except WorkloadError:
        named = Arrivals()
    return LoadFacts(
        kind=arrivals.partition(":")[0],
        text=named.text if type(named) is not Arrivals else f"arriving as {arrivals}",
        open_loop=named.open_loop,
        burst=named.burst,
        finite=named.finite,
        steady=named.steady,
        rate_per_s=named.promised_rate_per_s,
        cv=named.promised_cv,
        law=named.law,
        clients=named.concurrency,
        sessions=sessions,
        turns=int(turns) if turns.isdecimal() else 1,
        recorded=named.recorded,
    )


class StampFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Where the run's arrival instants come from, as the source says it of itself (servers.wire.stamps)."""

    name: str = ""
    """As Records have it. A Record of another source than the run's is no better than user-space timestamps."""
    title: str = ""
    exact: bool = False
    """Whether a stamp is right however late the process read."""
    error_s: float | None = None
    """What 99 % of exact stamps are off by at most; None: by as long as the process may have been away."""
    by_read: bool = True
    """Whether tokens that were read together share a stamp."""


def stamp_facts(name: str) -> StampFacts:
    """What the source of this name says of itself; of one that is not known here, the least."""
    from servers.wire.stamps import PLAIN, SOURCES

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
    start_ns: int
    """CLOCK_MONOTONIC at the run's instant 0."""
    start_realtime_ns: int = 0
    """CLOCK_REALTIME at the same instant: what other logs are compared with."""
    plan: dict[str, Any]
    """The resolved plan: server, url, endpoint, n, input_tokens, output_tokens, seed, workers, timeout_s, label, ..."""
    load: LoadFacts = LoadFacts()
    """What the plan's arrivals are. Of runs from before this field it comes from the plan as they are read."""
    server: dict[str, Any]
    """From the probe: name, version, model, url, simulated (bool), speed (simulated only), limits {...}; title and
    notes of its kind."""
    stamps: StampFacts = StampFacts()
    """Where arrival instants come from; of older runs filled in as they are read."""
    host: dict[str, Any] = {}
    """hostname, os, kernel, python, cpu, cores, memory_bytes."""
    client: dict[str, Any] = {}
    """stamps (the source's name), prompts (how their length was made exact), open_files; forced, where a version that
    misleads was measured all the same: why it does; of a run over several machines also machines: name, workers, host,
    offset_ns, uncertainty_ns and exchanges of each."""
    telemetry: dict[str, Any] = {}
    """every_s; `server`, `gpu`, `host`: where their figures come from, names, sizes, versions; not_measured (why)."""

    def __post_init__(self) -> None:
        """Of a run from before `load` and `stamps`, or one made without."""
        if not self.load.kind:
            self.load = load_facts(str(self.plan.get("arrivals") or "burst"), str(self.plan.get("workload") or ""))
        if not self.stamps.name:
            self.stamps = stamp_facts(str(self.client.get("stamps", "user")))

    @property
    def server_title(self) -> str:
        """What people call this kind of server; its name where nobody knows the kind."""
        return str(self.server.get("title") or (self._kind.title if self._kind else self._server_name))

    @property
    def server_notes(self) -> Mapping[str, Any]:
        """What the figures of this kind must be read with (servers.kinds.base.ServerKind.notes)."""
        return self.server.get("notes") or (self._kind.notes if self._kind else {})

    @property
    def _server_name(self) -> str:
        return str(self.server.get("name") or self.plan.get("server") or "")

    @property
    def _kind(self) -> ServerKind | None:
        """The kind as it is known today, for runs that were written before the header said it."""
        from servers.kinds import KINDS

        return KINDS.get(self._server_name)


class Telemetry(msgspec.Struct, tag_field="type", tag="telemetry", kw_only=True):
    """One sample of something that changes during the run. `at_ns` counts like a Record's instants."""

    source: str
    """`client` (one per worker and second), `server`, `gpu` or `host`; `clock`, of a run over several machines."""
    at_ns: int
    worker: int = 0
    values: dict[str, Any]
    """For `client`: cpu_ns, wall_ns, reads, coalesced_reads, full_reads, retransmits, out_of_order, stall_ns_max,
    clock_disagreement_ns, late_counts ({bucket: reads}, see engine.health). For `clock`, one from before the start and
    one from the end: machine, workers, and by how much its clock was ahead of the master's, offset_ns, which is known
    to uncertainty_ns. For the others: moment (`idle`, `start`, `run`, `end`, `after`), took_ns, and the words of
    docs/reference/telemetry.md; or `gap`, why there is nothing."""


class Footer(msgspec.Struct, tag_field="type", tag="footer", kw_only=True):
    """The last line. A run without one was interrupted before it could say so."""

    ended_ns: int
    sent: int
    complete: int
    truncated: int
    failed: int
    dropped: int
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


class RunFileError(Exception):
    """A folder or file that is not a readable Run; the message says what to do."""


_LINE = msgspec.json.Decoder(Header | Record | Telemetry | Footer)


class RunWriter:
    """Writes one process's part of the Run: lines are kept until the disk has taken them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._pending = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.error: OSError | None = None
        """Why the last flush could not write everything; None when it could."""

    def add(self, item: Record | Telemetry) -> None:
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

    def close(self, rescue: Path | None = None) -> Path | None:
        """Flush and close. What the disk refused goes to the file `rescue`, by default one in the temporary folder,
        whose path is returned."""
        self.flush()
        os.close(self._file)
        if not self._pending:
            return None
        rescue = rescue or Path(tempfile.gettempdir()) / f"loadgen-{os.getpid()}-{self.path.name}"
        try:
            rescue.write_bytes(self._pending)
        except OSError as error:
            sys.stderr.write(f"loadgen: neither {self.path} nor {rescue} could take everything: {error.strerror}\n")
        return rescue


def read(path: Path) -> Run:
    """Read a run folder (or its `run.jsonl`) as a whole. Raises RunFileError when there is no header to make sense of.

    A million requests of 64 tokens are 5 GB of Records: `scan` reads such a run.
    """
    records: list[Record] = []
    run = scan(path, records.append)
    run.records = records
    return run


def scan(path: Path, take: Callable[[Record], object]) -> Run:
    """Like `read`, but each Record goes to `take` as it comes, and the Run that is returned holds none."""
    main = path / "run.jsonl" if path.is_dir() else path
    if not main.exists():
        raise RunFileError(f"{path}: no run here. Give a folder that holds run.jsonl, as `loadgen burst` prints it.")
    lines = _lines(main)
    run = Run(main, _header(main, next(lines, b"")), [], [], None)
    parts = sorted(main.parent.glob("part-*.jsonl"))
    keep = _once(take) if parts else take  # a part that was being gathered when the disk filled up is there twice
    for line in chain(lines, *map(_lines, parts)):
        try:
            item = _LINE.decode(line)
        except msgspec.DecodeError:
            run.damaged_lines += 1
            continue
        if isinstance(item, Record):
            if len(item.chunk_ns) == len(item.chunk_tokens):
                keep(item)
            else:
                run.damaged_lines += 1
        elif isinstance(item, Telemetry):
            run.telemetry.append(item)
        elif isinstance(item, Footer):
            run.footer = item
    return run


def _once(take: Callable[[Record], object]) -> Callable[[Record], object]:
    """Gives each request to `take` once, however often it is recorded."""
    seen: set[int] = set()

    def take_new(record: Record) -> None:
        if record.id not in seen:
            seen.add(record.id)
            take(record)

    return take_new


def _header(main: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError as error:
        raise RunFileError(
            f"{main}: its first line is not a readable header ({error}), so nothing says what was run."
        ) from error
    if header.format > FORMAT:
        raise RunFileError(f"{main}: written by a newer loadgen (format {header.format}); upgrade to read it.")
    return header


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for line in stream:
            if line.strip():
                yield line
