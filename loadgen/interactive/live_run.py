"""Whom an interactive run asks, and the run, from Start to Stop: its file, its client's health, its page's figures.

Records go to the file as requests end and are flushed once a second, so what a killed process loses is a second. The
file begins with its header and needs no gathering: `loadgen report` and `compare` read it while the run goes on.

Figures are exact, by the definitions of loadgen.analysis.metrics. Nothing is put into buckets: of each metric the
newest samples are kept, up to a limit that is stated beside the figure as soon as it is reached; the run file keeps
all.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import gevent
import msgspec
import numpy as np
from gevent.lock import RLock
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen import machine as host
from loadgen.analysis.client_health import (
    MIN_SAMPLE_S,
    health_from_samples,
    max_ttft_errors_s,
    median_ttft_error_s,
    reasons,
    timestamp_error,
)
from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.record import ErrorKind, Record, encoding_problem, unsent_record
from loadgen.analysis.run.runfile import Footer, RunWriter, Telemetry, load_facts, open_run, stamp_facts
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.analysis.stats import DECIMALS, percentile, samples_needed
from loadgen.engine import prepare
from loadgen.engine.client_health import EVENT_COUNTERS, SEARCHED_BYTES, Health
from loadgen.engine.clock import ClockPairs
from loadgen.engine.merge_parts import whole_lines
from loadgen.engine.priority import raised_priority
from loadgen.engine.record_builder import build_records
from loadgen.engine.resolve_server import access_for, dialect_for, server_for
from loadgen.engine.telemetry_sampler import SamplerProcess
from loadgen.errors import PlanError
from loadgen.folders import check_room
from loadgen.plan import Plan
from loadgen.servers.auth import Target, connection_error, resolve_target
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.discovery import endpoint_dialect, open_tokenizer
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.marks import Mark
from loadgen.servers.wire.addresses import Rotation, describe_addresses, select_addresses
from loadgen.servers.wire.timestamps import RETRY_S, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads import workload
from loadgen.workloads.arrivals import INTERACTIVE
from loadgen.workloads.datasets import Dataset
from loadgen.workloads.request import Request
from loadgen.workloads.workload import Prompts

TEXTS = 2_000
"""Prompts built beforehand where the server takes text only; after them the first comes again."""
SIMULATED_STREAMS = 4_000
SIMULATED_TOKENS = 32_768
ONE_LOOK_S = 1e-6
"""A timer is only looked at after the sockets; a sleep of 0 s is not one."""
REQUEST_SAMPLES = 1_000_000
TOKEN_SAMPLES = 4_000_000
"""Newest samples kept of a metric per request, and of one per token: 8 bytes each."""
FAILURES = 1_000
"""Different words of failures that are told apart; a server may put something new into each."""
POINTS = 3_600
"""Seconds that the charts reach back."""
LAST_S = 10
SPANS = ("last", "level", "run")
"""What the page shows latencies of: the last LAST_S seconds, since the number of users changed, since Start."""
AT_ONCE = 32
"""Records whose latencies are worked out before the sockets are looked at again."""
SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
NOT_SHOWN = {"ttft_due_s", "e2e_due_s", "icl_s", "e2e_stream_s", "e2e_asked_s", "normalised_s"}
"""Users send as soon as they are due, and the page is to be read at a glance; reports have all of them."""
CHARTED = ("ttft_s", "tpot_s")
MOST = ("stall_ns_max", "clock_disagreement_ns")
CACHED_S = 0.9
ROOM_BYTES = 10_000_000

Floats = NDArray[np.float64]
T = TypeVar("T")


class LiveTarget(msgspec.Struct):
    """The server, and the prompts for each of its endpoints, without end. One for all users; the start form changes
    what is asked."""

    plan: Plan
    facts: ServerFacts
    address: Target
    rotation: Rotation
    headers: Mapping[str, str]
    say: Callable[[str], None]
    _dialects: dict[str, Dialect] = {}
    _prompts: dict[str, Prompts] = {}
    _draws: dict[str, Iterator[Request]] = {}
    _ids: Iterator[int] = msgspec.field(default_factory=count)

    def dialect(self, endpoint: str | None) -> Dialect:
        """The server's dialect on an endpoint, as `dialect_for` finds it once. Raises what that raises."""
        name = endpoint_dialect(self.plan.server, endpoint or self.plan.endpoint or self.facts.endpoint).endpoint
        if name not in self._dialects:
            access = access_for(self.plan)
            self._dialects[name] = dialect_for(self.plan, self.facts, access, self.say, name)
        return self._dialects[name]

    def request(self, dialect: Dialect, prompt: str | None, output_tokens: int) -> Request:
        """The next Request for this endpoint, or one with a prompt of its own; it has no id yet."""
        if prompt is not None:
            body, ignore_eos = self.plan.extra_body, not self.plan.may_stop_early
            return Request(0, prompt, 0, output_tokens if dialect.streams else 0, body=body, ignore_eos=ignore_eos)
        if dialect.endpoint not in self._draws:
            self._draws[dialect.endpoint] = _endless(self.prompts(dialect))
        return next(self._draws[dialect.endpoint])

    def numbered(self, request: Request) -> Request:
        """The same Request with an id of its own."""
        return replace(request, id=next(self._ids))

    def prompts(self, dialect: Dialect) -> Prompts:
        """Built at first use, which asks the server to count. Raises PlanError, WorkloadError."""
        if dialect.endpoint not in self._prompts:
            plan, access = self.plan, access_for(self.plan)
            if not (dialect.token_ids or self._of_file):
                plan = plan.replaced(n=TEXTS)
            schedule = prepare.build_schedule(plan)
            prepare.check_prompt_file(plan, schedule)
            with open_tokenizer(self.facts, dialect, timeout_s=plan.timeout_s, access=access) as server:
                self._prompts[dialect.endpoint] = prepare.build_prompts(plan, schedule, dialect, server)
        return self._prompts[dialect.endpoint]

    def how(self, dialect: Dialect) -> str:
        """How the length of prompts is made exact, and whether they come again."""
        how = self.prompts(dialect).counting_method
        endless = dialect.token_ids and not self._of_file
        return how if endless else f"{how}; repeated from the first after the last"

    @property
    def _of_file(self) -> bool:
        return isinstance(workload.parse(self.plan.workload), Dataset)

    def changed(self, plan: Plan) -> LiveTarget:
        """The same server, asked something else."""
        return replace(self, plan=plan, _prompts={}, _draws={}, _ids=count())

    def restarted(self) -> LiveTarget:
        """The same server asked the same, from the first prompt and id 0 on."""
        return replace(self, _draws={}, _ids=count())


def find_target(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> LiveTarget:
    """Find the server as `loadgen burst` does; the built-in simulated one lives as long as `stack`. Raises
    loadgen.servers.errors.ServerError."""
    access = access_for(plan)
    server = server_for(plan, access, say, at_once=1, streams=SIMULATED_STREAMS, tokens=SIMULATED_TOKENS)
    facts = stack.enter_context(server)
    target = select_addresses(resolve_target(facts.url, access.tls))
    if len(target.addresses) > 1 or target.unused:
        say(describe_addresses(target))
    return LiveTarget(plan, facts, target, Rotation(target.addresses), access.headers, say)


def _endless(prompts: Prompts) -> Iterator[Request]:
    if next(iter(prompts.requests()), None) is None:
        raise PlanError("the workload holds no prompt", "Name another file.")
    while True:
        yield from prompts.requests()


class NewestSamples:
    """The newest `limit` samples of one metric, in seconds."""

    def __init__(self, limit: int) -> None:
        self._values = np.empty(limit)  # takes memory as it is written to
        self.seen = 0

    def extend(self, values: Floats) -> None:
        """Take these; the oldest give way once the limit is reached."""
        self._values[(self.seen + np.arange(len(values))) % len(self._values)] = values
        self.seen += len(values)

    def copy(self, since: int = 0) -> Floats:
        """Those after the first `since` ones seen, in no order, safe to work on in another thread."""
        retained = min(self.seen - since, len(self._values))
        return self._values[np.arange(self.seen - retained, self.seen) % len(self._values)]


def described(values: Floats) -> dict[str, float | int | None]:
    """n, mean, exact percentiles, min and max, as loadgen.analysis.stats gives them; None of no samples."""
    ordered = np.sort(values)
    if not len(ordered):
        return {"n": 0, "mean": None, **dict.fromkeys(SHARES), "min": None, "max": None}
    figures = {name: percentile(ordered, share) for name, share in SHARES.items()}
    ends = {"mean": float(np.mean(ordered)), **figures, "min": float(ordered[0]), "max": float(ordered[-1])}
    return {"n": len(ordered), **{name: round(value, DECIMALS) for name, value in ends.items()}}


def detail_of(record: Record) -> str:
    """The words of a failure with its numbers left out, so that the same failure is counted as one."""
    return one_line("".join("#" if letter.isdigit() else letter for letter in record.error_detail), 200)


class LiveFigures:
    """Everything the page shows of one run."""

    def __init__(self) -> None:
        self.states = Counter[str]()
        self.cut_off = 0
        """Requests that were cut off because their users were stopped: among the failed ones of the run file."""
        self.failures = Counter[tuple[str, str]]()
        self.tokens = 0
        self.send_late = NewestSamples(REQUEST_SAMPLES)
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.metrics = {name: each for name, each in METRICS.items() if each.per != "run" and name not in NOT_SHOWN}
        self.samples = {
            name: NewestSamples(REQUEST_SAMPLES if metric.per == "request" else TOKEN_SAMPLES)
            for name, metric in self.metrics.items()
        }
        self.first_off = NewestSamples(REQUEST_SAMPLES)
        """Beside each TTFT, what its stamp may be off by."""
        self._pending: list[Record] = []
        self._seen = deque([dict.fromkeys(self.samples, 0)], maxlen=LAST_S + 1)
        """How many samples there were of each metric, second by second."""
        self.level = {"at": 0, "users": 0}
        """Since when there are so many users."""
        self._level_seen = self._seen[0]
        self._recent: dict[str, list[Floats]] = {name: [] for name in CHARTED}

    def add(self, record: Record) -> None:
        """Take the Record of a request that has ended; its latencies are worked out by `digest`."""
        self.states[record.state] += 1
        self.tokens += generated_tokens(record)
        self._pending.append(record)
        if record.error_kind == "cancelled":
            self.cut_off += 1
        elif record.state != "complete":
            key = (record.error_kind, detail_of(record))
            known = key in self.failures or len(self.failures) < FAILURES
            self.failures[key if known else (record.error_kind, "(other words)")] += 1

    def digest(self, pause: Callable[[], object] = lambda: None) -> None:
        """Work out the latencies of what has come; of complete requests, as in every report. `pause` is called between
        pieces of the work."""
        while self._pending:
            records, self._pending = self._pending[:AT_ONCE], self._pending[AT_ONCE:]
            frame = build_frame(records)
            self.send_late.extend((frame.first_sent_ns - frame.due_ns)[frame.sent] / 1e9)
            self.first_off.extend(max_ttft_errors_s(frame)[frame.sampled & ~np.isnan(frame.first_ns)])
            for name, samples in self.samples.items():
                values = self.metrics[name].values(frame)
                samples.extend(values)
                if name in self._recent:
                    self._recent[name].append(values)
            pause()

    def since(self, span: str) -> Mapping[str, int]:
        """How many samples of each metric there were before `span`, one of SPANS."""
        begins = {"last": self._seen[0], "level": self._level_seen}
        return begins.get(span, dict.fromkeys(self.samples, 0))

    def point(self, users: int, **beside: Any) -> None:
        """One second of the charts: percentiles of the requests that ended in it, and what is given."""
        self.digest()
        at = self.points[-1]["at"] + 1 if self.points else 0
        self._seen.append({name: samples.seen for name, samples in self.samples.items()})
        if users and users != self.level["users"]:
            self._level_seen = self._seen[-1] if self.points else self._seen[0]
            self.level = {"at": at, "users": users}
        recent = {name: np.sort(np.concatenate([np.empty(0), *values])) for name, values in self._recent.items()}
        self._recent = {name: [] for name in CHARTED}
        percentiles = {
            f"{name}_{share}": percentile(values, SHARES[share]) if len(values) else None
            for name, values in recent.items()
            for share in ("p50", "p99")
        }
        self.points.append({"at": at, "users": users, **percentiles, **beside})


def warm_up() -> None:
    """Work everything out once: a first time takes a third of a second, in which nothing would be read."""
    figures = LiveFigures()
    figures.add(Record(id=0, state="complete", sent_ns=0, chunk_ns=[1, 2], chunk_tokens=[1, 1], output_tokens=2))
    figures.point(1)
    described(figures.samples["ttft_s"].copy())


class LiveRun:
    """Takes what users did, from the start of a run to its end. The caller holds the claim on its folder."""

    def __init__(
        self,
        folder: Path,
        target: LiveTarget,
        *,
        stamps: TimestampSource,
        command: Sequence[str],
        sampler: SamplerProcess,
    ) -> None:
        check_room(folder, ROOM_BYTES)
        dialect = target.dialect(None)
        prompts = replace(target.prompts(dialect), counting_method=target.how(dialect))
        header = prepare.build_header(target.plan, target.facts, dialect, prompts)
        header.server |= target.address.facts
        header.telemetry = sampler.facts(target.plan, header.server)
        self.folder = folder
        self.figures = LiveFigures()
        self.in_flight: set[Exchange] = set()
        self.ended = False
        self._sampler = sampler
        self._stamps = stamps
        self._total: dict[str, Any] = dict.fromkeys((*EVENT_COUNTERS, *MOST, "cpu_sum_ns", "cpu_ns", "wall_ns"), 0) | {
            "late_counts": {}
        }
        """The client's health so far; processor time is that of the busiest second."""
        self._clocks = ClockPairs()
        self._health = Health()
        self.mark: Mark | None = None
        """The mark of a simulated server, once a response has shown it."""
        self._arrived = 0
        self._cache: dict[tuple[str, bool], tuple[float, Any]] = {}
        self._making = RLock()
        self.start_ns = time.monotonic_ns()
        header.command = list(command)
        header.plan |= {"arrivals": INTERACTIVE, "duration_s": None}
        header.load = load_facts(header.plan["arrivals"], target.plan.workload)
        header.client["calibration"] = host.load_calibration(header.host, lambda _: None)
        with ExitStack() as raised:
            self._scheduling = raised.enter_context(raised_priority(target.plan.client_priority))
            header.client["scheduling"] = self._scheduling
            open_run(folder, header, stamps.name, self.start_ns, self._clocks.to_realtime(self.start_ns))
            self._part = RunWriter(folder / "run.jsonl")
            sampler.begin(self.start_ns, folder)
            self._priority = raised.pop_all()

    def take(self, exchange: Exchange, request: Request, dialect: Dialect, due_ns: int, connected_ns: int) -> Record:
        """A request that was sent and has ended."""
        self.in_flight.discard(exchange)
        while not self._stamps.ready(exchange):
            gevent.sleep(RETRY_S)
        requested = [(exchange, request)]
        (record,) = build_records(requested, dialect, self._clocks, self.start_ns, self._health, self._stamps)
        record.connected_ns = connected_ns - self.start_ns
        return self._add(record, due_ns)

    def give_up(self, request: Request, due_ns: int, error: OSError) -> Record:
        """Record a request for which no connection could be opened, so that nothing was sent."""
        kind: ErrorKind = "client_limit" if isinstance(error, LocalLimitError) else "connect"
        return self._add(unsent_record(request, kind, connection_error(error)), due_ns)

    def not_encoded(self, request: Request, error: Exception) -> Record:
        """Record a request that could not be turned into bytes, so that nothing was sent."""
        return self._add(unsent_record(request, "not_encoded", encoding_problem(error)), time.monotonic_ns())

    def _add(self, record: Record, due_ns: int) -> Record:
        record.due_ns = due_ns - self.start_ns
        self._part.add(record)
        self.figures.add(record)
        return record

    def tick(self, late_ns: int) -> None:
        """Many times a second: the loop ran a timer this much too late."""
        self._health.stall(late_ns)
        self.figures.digest(lambda: gevent.sleep(ONE_LOOK_S))

    def sample(self, users: int) -> None:
        """Once a second: read the clocks, write the client's health, flush, and draw one point of the charts."""
        self._clocks.take()
        self.mark = self.mark or self._health.mark
        values = self._health.sample() | self._stamps.counts()
        values["clock_disagreement_ns"] = self._clocks.disagreement_ns
        self._fold(values)
        at_ns = time.monotonic_ns() - self.start_ns
        self._part.add(Telemetry(source="client", at_ns=at_ns, values={**values, "users": users}))
        self._part.flush()
        # Once an answer's first event has come: some servers send the head at once and the first token much later.
        begun = [each for each in self.in_flight if each.raw.find(b"data:", 0, SEARCHED_BYTES) >= 0]
        arrived = self.figures.tokens + sum(self._stamps.piece_counts(begun)) + self._stamps.unsorted
        rate = max(0, arrived - self._arrived) / max(values["wall_ns"], 1) * 1e9
        self._arrived = max(arrived, self._arrived)
        waiting = len(self.in_flight) - len(begun)
        self.figures.point(users, tokens_per_s=rate, streams=len(begun), waiting=waiting)

    def end(self, users: int, *, interrupted: bool = False) -> Path | None:
        """Write the footer. Where the rest is when the disk refused it, else None. A second call does nothing."""
        if self.ended:
            return None
        self.ended = True
        self.sample(users)
        self._priority.close()
        ended_ns = time.monotonic_ns() - self.start_ns
        read = self._sampler.end(patient=not interrupted)
        notes: list[str] = []
        for line in whole_lines(read, notes, "telemetry"):
            self._part.add_line(line)
        states: Mapping[str, int] = self.figures.states
        counts = {state: states[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")}
        footer = Footer(ended_ns=ended_ns, sent=sum(states.values()), interrupted=interrupted, notes=notes, **counts)
        self._part.add(footer)
        rescued = self._part.close()
        if rescued is None:
            for path in read:
                path.unlink(missing_ok=True)
        return rescued

    def latency(self, span: str = "run") -> list[dict[str, Any]]:
        """Of each metric its name, title and exact figures, of requests that ended in `span`. Sorted in another thread:
        the loop goes on meanwhile."""
        return self._cached(f"latency {span}", lambda: self._described(span))

    def client(self) -> dict[str, Any]:
        """Whether the client was a bottleneck so far: named and judged as `client` of summary.json, whose limits and
        formulas these are. The first second is left out of `cpu_share`, as there is no whole second to speak of."""
        latency = {row["name"]: row for row in self.latency()}
        return self._cached("client", lambda: self._judged(latency))

    def _cached(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gave within the last second, and since the end; several pages may ask, and it is not made twice
        at a time."""
        with self._making:
            now_s, key = time.monotonic(), (name, self.ended)
            if key not in self._cache or now_s - self._cache[key][0] >= CACHED_S:
                self._cache[key] = (now_s, make())
            return cast("T", self._cache[key][1])

    def _described(self, span: str) -> list[dict[str, Any]]:
        self.figures.digest()  # also of users that were cut off as the run ended
        pool = gevent.get_hub().threadpool
        rows, since = [], self.figures.since(span)
        requests = self.figures.samples["e2e_s"].seen - since["e2e_s"]
        for name, samples in self.figures.samples.items():
            values, seen = samples.copy(since[name]), samples.seen - since[name]
            about = {"name": name, "title": self.figures.metrics[name].title, "left_out": seen - len(values)}
            # Tokens of one request are alike: of percentiles there are as many independent samples as requests.
            thin = [share for share in SHARES if min(seen, requests) < samples_needed(SHARES[share])]
            rows.append({**about, **pool.apply(described, (values,)), "thin": thin})
        return rows

    def _fold(self, values: Mapping[str, Any]) -> None:
        """The client's health so far, as one sample: of hours, too, it takes no more room."""
        total = self._total
        total |= {name: total[name] + values[name] for name in EVENT_COUNTERS}
        total |= {name: max(total[name], values[name]) for name in MOST}
        total["cpu_sum_ns"] += values["cpu_ns"]
        if "core_wait_ns" in values:
            total["core_wait_ns"] = total.get("core_wait_ns", 0) + values["core_wait_ns"]
        late = Counter(total["late_counts"])
        late.update(values["late_counts"])
        total["late_counts"] = late
        busier = values["cpu_ns"] * total["wall_ns"] >= total["cpu_ns"] * values["wall_ns"]
        if values["wall_ns"] >= MIN_SAMPLE_S * 1e9 and busier:
            total |= {name: values[name] for name in ("cpu_ns", "wall_ns")}

    def _judged(self, latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        figures = self.figures
        passed_ns = time.monotonic_ns() - self.start_ns
        result = health_from_samples(
            [Telemetry(source="client", at_ns=passed_ns, values=self._total)],
            stamp_facts(self._stamps.active_source.name),
            np.sort(figures.send_late.copy()),
            reads=self._total["reads"],
            coalesced=self._total["coalesced_reads"],
            last_s=passed_ns / 1e9,
        )
        result.scheduling = self._scheduling
        if (own := timestamp_error(result)) is not None:
            off_s = np.minimum(figures.first_off.copy(), np.inf if own.away_s is None else own.away_s)
            result.error_ttft_p50_s = own.stamp_s + median_ttft_error_s(figures.samples["ttft_s"].copy(), off_s)
            result.error_bar_e2e_s = own.stamp_s
        result.reasons = reasons(result, latency["ttft_s"]["p50"], latency["e2e_s"]["p50"])
        shown: dict[str, Any] = msgspec.to_builtins(result)
        return shown
