"""One interactive run, from Start to Stop: its run file, its client's health, and the figures of its page.

Records go to the file as requests end and are flushed once a second, so what a killed process loses is a second. The
file begins with its header and needs no gathering: `loadgen report` and `compare` read it while the run goes on.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from gevent.lock import RLock

from loadgen import calibration, host
from loadgen.engine.clock import ClockPairs
from loadgen.engine.decode import record_of
from loadgen.engine.health import Health
from loadgen.engine.part import PartFile
from loadgen.gather import append, whole_lines
from loadgen.interactive.beside import Beside
from loadgen.interactive.figures import Figures
from loadgen.interactive.setting import Setting
from loadgen.record import ErrorKind, Record
from loadgen.runfile import Footer, Header, Telemetry
from servers.kinds.base import Dialect
from servers.wire.transport import Exchange
from workloads.request import Request

ARRIVALS = "interactive"
"""In the header's plan: users that come and go by hand."""
ADDED = ("reads", "coalesced_reads", "full_reads", "retransmits", "out_of_order")
SAMPLE_NS_MIN = 500_000_000
"""A shorter health sample says nothing about how busy a second was."""
CACHED_S = 0.9
LOOKED_AT_BYTES = 8_192
ROOM_BYTES = 10_000_000


class Ledger:
    """Takes what users did, from the start of a run to its end."""

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        endpoint: str,
        how: str,
        *,
        stamps: str,
        command: list[str],
        beside: Beside,
    ) -> None:
        host.make_folder(folder, ROOM_BYTES)
        self._beside = beside
        telemetry = dict(beside.facts(setting))
        self.folder = folder
        self.setting = setting
        self.figures = Figures()
        self.in_flight: set[Exchange] = set()
        self.stamps = stamps
        self.totals = Counter[str]()
        """The client's health so far; `stall_ns_max` is the longest."""
        self.cpu_share_max: float | None = None
        self.disagreement_ns = 0
        """How far the clocks moved against each other, at most."""
        self.ended = False
        self._clocks = ClockPairs()
        self._health = Health()
        self._arrived = 0
        self._cache: dict[str, tuple[float, Any]] = {}
        self._making = RLock()
        self.start_ns = time.monotonic_ns()
        facts = host.facts()
        header = Header(
            version=version("llm-loadgen"),
            command=command,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            start_ns=self.start_ns,
            start_realtime_ns=self._clocks.to_realtime(self.start_ns),
            plan=setting.plan.model_dump(mode="json")
            | {"endpoint": endpoint, "arrivals": ARRIVALS, "duration_s": None},
            server={name: getattr(setting.facts, name) for name in type(setting.facts).__slots__},
            host=facts,
            client={"prompts": how, "stamps": stamps, "calibration": calibration.recall(facts, lambda _: None)},
            telemetry=telemetry,
        )
        append(folder / "run.jsonl", [msgspec.json.encode(header) + b"\n"])
        self._part = PartFile(folder / "run.jsonl")
        beside.begin(self.start_ns, folder)

    def take(self, exchange: Exchange, request: Request, dialect: Dialect, due_ns: int, connected_ns: int) -> Record:
        """A request that was sent and has ended."""
        self.in_flight.discard(exchange)
        record = record_of(exchange, request, dialect, self._clocks, self.start_ns, self._health)
        record.connected_ns = connected_ns - self.start_ns
        return self._add(record, due_ns)

    def give_up(self, request: Request, due_ns: int, kind: ErrorKind, detail: str) -> Record:
        """A request of which nothing was sent."""
        record = Record(
            id=request.id,
            state="failed",
            error_kind=kind,
            error_detail=detail,
            prompt_tokens_asked=request.input_tokens,
            output_tokens_asked=request.output_tokens,
        )
        return self._add(record, due_ns)

    def stall(self, late_ns: int) -> None:
        """The loop ran a timer this much too late."""
        self._health.stall(late_ns)

    def sample(self, users: int) -> None:
        """Once a second: read the clocks, write the client's health, flush, and draw one point of the charts."""
        self._clocks.take()
        values = self._health.sample() | {"clock_disagreement_ns": self._clocks.disagreement_ns}
        self.disagreement_ns = self._clocks.disagreement_ns
        self._add_health(values)
        self.figures.late.update({int(bucket): number for bucket, number in values["late_counts"].items()})
        self._part.add(
            Telemetry(source="client", at_ns=time.monotonic_ns() - self.start_ns, values={**values, "users": users})
        )
        self._part.flush()
        arriving = [len(exchange.sizes) for exchange in self.in_flight if begun(exchange)]
        arrived = self.figures.tokens + sum(arriving)
        rate = max(0, arrived - self._arrived) / max(values["wall_ns"], 1) * 1e9
        self._arrived = max(arrived, self._arrived)
        self.figures.point(
            tokens_per_s=rate, streams=len(arriving), waiting=len(self.in_flight) - len(arriving), users=users
        )

    def end(self, users: int, *, interrupted: bool = False) -> Path | None:
        """Write the footer. Where the rest is when the disk refused it, else None. A second call does nothing."""
        if self.ended:
            return None
        self.ended = True
        self.sample(users)
        with self._making:
            self._cache.clear()  # what comes now is final
        ended_ns = time.monotonic_ns() - self.start_ns
        read = self._beside.end(patient=not interrupted)
        notes: list[str] = []
        for line in whole_lines(read, notes, "telemetry"):
            self._part.add_line(line)
        self._part.flush()
        states: Mapping[str, int] = self.figures.states
        footer = Footer(
            ended_ns=ended_ns,
            sent=sum(states.values()),
            complete=states["complete"],
            truncated=states["truncated"],
            failed=states["failed"],
            dropped=0,
            interrupted=interrupted,
            notes=notes,
        )
        self._part.add(footer)  # type: ignore[arg-type]
        rescued = self._part.close(Path(tempfile.gettempdir()) / f"loadgen-{self.folder.name}.jsonl")
        if rescued is None:
            for path in read:
                path.unlink(missing_ok=True)
        return rescued

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave within the last second; several pages may ask, and it is not made twice at a time."""
        with self._making:
            now_s = time.monotonic()
            if name not in self._cache or now_s - self._cache[name][0] >= CACHED_S:
                self._cache[name] = (now_s, make())
            return self._cache[name][1]

    def _add_health(self, values: Mapping[str, Any]) -> None:
        stall_ns = max(self.totals["stall_ns_max"], values["stall_ns_max"])
        self.totals.update({name: values[name] for name in ADDED})
        self.totals["stall_ns_max"] = stall_ns
        if values["wall_ns"] >= SAMPLE_NS_MIN:
            self.cpu_share_max = max(self.cpu_share_max or 0.0, values["cpu_ns"] / values["wall_ns"])

    def _add(self, record: Record, due_ns: int) -> Record:
        record.due_ns = due_ns - self.start_ns
        self._part.add(record)
        self.figures.add(record)
        return record


def begun(exchange: Exchange) -> bool:
    """Whether an answer's first event has come: some servers send the head at once and the first token much later."""
    return exchange.raw.find(b"data:", 0, LOOKED_AT_BYTES) >= 0
