"""The server under test in `loadgen ui`, and one interactive run with its run file, client health and live figures.

A run lasts from the Start button to the Stop button.

A Record is written when its request ends, and Records are flushed once a second. A killed process therefore loses at
most the Records of the last second. This process writes the run file directly, so `loadgen report` and `loadgen
compare` can read it during the run.

The figures are those of loadgen.analysis.metrics, computed from individual samples instead of histogram buckets. Only a
limited number of the newest samples is kept per metric. The page says so once this limit is reached. The run file
contains every record.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, count
from pathlib import Path
from typing import Any, TypeVar, cast

import gevent
import msgspec
import numpy as np
from gevent.lock import RLock
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen import machine as host
from loadgen.analysis.client_health import MIN_SAMPLE_S, health_from_samples, reasons
from loadgen.analysis.frame import OTHER_DETAIL, build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.report.findings import INCOMPLETE
from loadgen.analysis.run.record import ErrorKind, Record, encoding_problem, unsent_record
from loadgen.analysis.run.runfile import (
    Footer,
    RunWriter,
    Telemetry,
    TrafficFacts,
    load_facts,
    open_run,
    stamp_facts,
)
from loadgen.analysis.run.token_counts import generated_tokens
from loadgen.analysis.stats import DECIMALS, percentile, samples_needed
from loadgen.analysis.timestamp_errors import max_ttft_errors_s, median_ttft_error_s, timestamp_error
from loadgen.engine import prepare
from loadgen.engine.client_health import EVENT_COUNTERS, SEARCHED_BYTES, Health
from loadgen.engine.clock import ClockPairs
from loadgen.engine.live_figures import SAMPLED_BYTES, TokenRate, received_bytes
from loadgen.engine.merge_parts import whole_lines
from loadgen.engine.priority import raised_priority
from loadgen.engine.raw_files import dialect_of_path
from loadgen.engine.record_builder import build_records, tokens_so_far
from loadgen.engine.resolve_server import access_for, dialect_for, request_headers, server_for
from loadgen.engine.telemetry_sampler import PART, SamplerProcess
from loadgen.errors import PlanError
from loadgen.folders import check_room
from loadgen.interactive.user_sessions import first_id_of
from loadgen.plan import Plan
from loadgen.servers.auth import fill_fields
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import Dialect, request_body
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.raw_bodies import complete_body
from loadgen.servers.discovery import open_tokenizer
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.marks import Mark
from loadgen.servers.session_identity import SessionIdentity
from loadgen.servers.target import Target, connection_error, resolve_target
from loadgen.servers.wire.addresses import Rotation, describe_addresses, select_addresses
from loadgen.servers.wire.timestamps import RETRY_S, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.traffic import TrafficClass, load_of_traffic, traffic_classes
from loadgen.workloads.arrivals import INTERACTIVE
from loadgen.workloads.datasets import Dataset
from loadgen.workloads.random_streams import random_stream
from loadgen.workloads.raw_requests import RawRequests
from loadgen.workloads.request import Request, new_id_prefix
from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.session_graph import SessionGraph
from loadgen.workloads.sessions import MultiTurn, Session
from loadgen.workloads.workload import Prompts

SIMULATED_STREAMS = 4_000
SIMULATED_TOKENS = 32_768
SOCKET_CHECK_S = 1e-6
"""Duration in seconds of a sleep that lets gevent's hub read the sockets. The hub handles sockets before timers. A
sleep of 0 s would set no timer."""
REQUEST_SAMPLES = 1_000_000
TOKEN_SAMPLES = 4_000_000
"""Maximum number of samples kept of a metric per request, and of a metric per token. A sample takes 8 bytes."""
MAX_FAILURE_TEXTS = 1_000
"""Distinct failure texts that are counted separately. A server may put a new value into each text."""
POINTS = 3_600
"""Maximum number of seconds shown in the charts."""
LAST_S = 10
SPANS = ("last", "level", "run")
"""Spans of the latency table: the last LAST_S seconds, since the last change of the number of users, since Start."""
BATCH_RECORDS = 32
"""Number of records whose latencies are computed before the sockets are read again."""
SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
NOT_SHOWN = {"ttft_due_s", "e2e_due_s", "icl_s", "e2e_stream_s", "e2e_asked_s", "normalised_s"}
"""Metrics that the page omits to stay short. Reports show them. The `*_due_s` metrics add nothing here: users send each
request as soon as it is due."""
CHARTED = ("ttft_s", "tpot_s")
MAXIMA = ("stall_ns_max", "clock_disagreement_ns")
"""Health figures whose maximum over the run is kept."""
SERVER_FIGURES = {"server_running": "running", "server_waiting": "waiting", "kv_used": "kv_used"}
"""Names of the server's figures in the charts, and their names in the readings of the telemetry sampler."""
TELEMETRY_BYTES = 1 << 20
"""Maximum number of bytes of telemetry that are read at once. A second of telemetry takes about 1 kB."""
CACHE_S = 0.9
MIN_FREE_BYTES = 10_000_000

Floats = NDArray[np.float64]
T = TypeVar("T")


class LiveTarget(msgspec.Struct):
    """The server under test, with an endless supply of prompts for each endpoint. All users share one LiveTarget."""

    plan: Plan
    facts: ServerFacts
    address: Target
    rotation: Rotation
    say: Callable[[str], None]
    name: str = ""
    """Name of the class of traffic. Empty for a plan without classes."""
    share: float = 1.0
    """Share of all requests and sessions that belong to this class of traffic, according to the weights."""
    first_id: int = 0
    """Id of the first request of the class."""
    classes: tuple[LiveTarget, ...] = ()
    """One LiveTarget for each class of traffic of the plan. Empty for a plan without classes."""
    _draw: Callable[[], float] | None = None
    """Function that returns the next random number from 0 to 1, to choose a class of traffic."""
    _dialects: dict[str, Dialect] = {}
    _headers: dict[str, dict[str, str]] = {}
    _prompts: dict[str, Prompts] = {}
    _draws: dict[str, Iterator[Request]] = {}
    _sessions: dict[str, Iterator[SessionGraph | Session]] = {}
    _ids: Iterator[int] = msgspec.field(default_factory=count)

    def dialect(self, endpoint: str | None) -> Dialect:
        """Return the API dialect of the server for an endpoint. Results are cached.

        If `endpoint` is None, the endpoint of the plan is used. If the plan names none either, the first endpoint that
        the server accepts is used. Raises the errors of `dialect_for`.
        """
        name = endpoint or self.plan.endpoint or ""
        if name not in self._dialects:
            self._dialects[name] = dialect_for(self.plan, self.facts, self.say, name or None)
        return self._dialects[name]

    def headers(self, dialect: Dialect) -> Mapping[str, str]:
        """Return the headers of every request on the dialect's endpoint."""
        if dialect.endpoint not in self._headers:
            self._headers[dialect.endpoint] = request_headers(self.plan, dialect)
        return self._headers[dialect.endpoint]

    def request(self, dialect: Dialect, prompt: str | None, output_tokens: int) -> Request:
        """Return a Request that asks for `output_tokens` tokens in response to `prompt`.

        If `prompt` is None, return the next Request of the plan instead, which has its own output length. The id of the
        result is not final. The caller must pass the result to `numbered` before sending it.
        """
        if prompt is not None:
            return Request(
                id=0,
                prompt=prompt,
                input_tokens=0,
                output_tokens=output_tokens if dialect.has_output_length else 0,
                body=fill_fields(self.plan.extra_body),
                ignore_eos=not self.plan.may_stop_early,
            )
        if dialect.endpoint not in self._draws:
            self._draws[dialect.endpoint] = _endless(self.prompts(dialect))
        return next(self._draws[dialect.endpoint])

    def encoded(self, request: Request, dialect: Dialect) -> tuple[bytes, Dialect]:
        """Return the body of a request, and the dialect that decodes the response.

        A dialect is the request and response format of an endpoint. Normally the returned dialect is the argument
        `dialect`, that of the endpoint under test. A request from a file of whole requests may name the path of another
        endpoint. The dialect of that endpoint is then returned.

        Raises PlanError for a path whose format is unknown or not JSON, and ValueError for text that cannot be sent.
        """
        if not request.raw:
            return request_body(request, dialect, self.facts.model), dialect
        source = self.plan.prompt_source
        assert isinstance(source, RawRequests)
        if request.path and request.path not in self._dialects:
            self._dialects[request.path] = dialect_of_path(request.path, source, self.plan, dialect, self.facts)
        return complete_body(request.raw, self._dialects[request.path] if request.path else dialect)

    def numbered(self, request: Request) -> Request:
        """Return a copy of `request` with the next request id.

        If the plan splits requests over several models, the copy also names one of these models.
        """
        return self.with_model(replace(request, id=next(self._ids)))

    def session(self, dialect: Dialect) -> SessionGraph | Session:
        """Return the plan's next session, with new request ids. After the last session of a file, the first one is
        returned.
        """
        if dialect.endpoint not in self._sessions:
            self._sessions[dialect.endpoint] = _endless_sessions(self.prompts(dialect))
        session = next(self._sessions[dialect.endpoint])
        requests = session.nodes if isinstance(session, SessionGraph) else session.turns
        ids = [next(self._ids) for _ in requests]
        return session.shifted(ids[0] - first_id_of(session))

    def with_model(self, request: Request) -> Request:
        """Return the request with a randomly chosen model, if the plan distributes requests over several models.

        Without such a plan, or if the request names a model itself, the request is returned unchanged. Requests of
        the same session get the same model.
        """
        mix = self.plan.model_mix
        return request if mix is None else mix.with_model(self.plan.seed, request)

    def prompts(self, dialect: Dialect) -> Prompts:
        """Return the prompts for an endpoint. The first call builds them.

        If prompts must have an exact length, the server may be asked to count tokens. Raises PlanError, WorkloadError
        or ServerError if the prompts cannot be built.
        """
        if dialect.endpoint not in self._prompts:
            plan, access = self.plan, access_for(self.plan, dialect)
            schedule = prepare.build_schedule(plan)
            prepare.check_prompt_file(plan, schedule)
            with open_tokenizer(self.facts, dialect, timeout_s=plan.timeout_s, access=access) as server:
                self._prompts[dialect.endpoint] = prepare.build_prompts(plan, schedule, dialect, server, self.facts)
        return self._prompts[dialect.endpoint]

    def describe_prompts(self, dialect: Dialect) -> str:
        """Return a text for the run file about the prompts for the endpoint of `dialect`.

        The text says how prompt tokens were counted. If the prompts come from a file, it also says that they are
        repeated after the last one.
        """
        method = self.prompts(dialect).counting_method
        return f"{method}; repeated from the first after the last" if self._is_from_file else method

    @property
    def _is_from_file(self) -> bool:
        source = self.plan.prompt_source
        return isinstance(source, Dataset | RawRequests | SessionFile) or (
            isinstance(source, MultiTurn) and source.path is not None
        )

    def with_plan(self, plan: Plan) -> LiveTarget:
        """Return a LiveTarget for the same server with another plan."""
        own = self._of_class(plan, TrafficClass("", plan, 1.0, 0))
        classes = [own._of_class(part.plan, part) for part in (traffic_classes(plan) if plan.traffic else ())]
        return replace(own, classes=tuple(classes)).restarted()

    def _of_class(self, plan: Plan, traffic_class: TrafficClass) -> LiveTarget:
        """Return a LiveTarget that sends the requests of a class of traffic to the same server."""
        model = plan.first_model
        facts = self.facts if model in (None, self.facts.model) else replace(self.facts, model=model)
        return replace(
            self,
            plan=prepare.with_file_endpoint(plan),
            facts=facts,
            name=traffic_class.name,
            share=traffic_class.share,
            first_id=traffic_class.first_id,
            classes=(),
            _dialects={},
            _headers={},
            _prompts={},
            _draws={},
            _sessions={},
        )

    def restarted(self) -> LiveTarget:
        """Return a copy of this target that starts again with the first prompt and the first request id."""
        return replace(
            self,
            classes=tuple(part.restarted() for part in self.classes),
            _draw=random_stream(self.plan.seed, "traffic"),
            _draws={},
            _sessions={},
            _ids=count(self.first_id),
        )

    @property
    def parts(self) -> tuple[LiveTarget, ...]:
        """Return the LiveTarget of each class of traffic, or this LiveTarget for a plan without classes."""
        return self.classes or (self,)

    def next_class(self, *, sessions: bool | None = None) -> LiveTarget:
        """Return the LiveTarget of a class of traffic, chosen at random.

        A class with a larger weight is chosen more often. With the same seed in the plan, the choices are the same. For
        a plan without classes, return this LiveTarget.

        If `sessions` is True, only classes with sessions are considered. If it is False, only classes with single
        requests are considered. Raises PlanError if there is no such class.
        """
        if not self.classes:
            return self
        suitable = [part for part in self.classes if sessions in (None, part.plan.uses_sessions)]
        if not suitable:
            raise PlanError(
                f"no class of traffic has {'sessions' if sessions else 'single requests'}",
                "Call self.ask() for single requests, and self.run_session() for sessions.",
            )
        limits = list(accumulate(part.share for part in suitable))
        assert self._draw is not None
        return suitable[min(bisect(limits, self._draw() * limits[-1]), len(suitable) - 1)]


def find_target(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> LiveTarget:
    """Find the server of `plan`. If no server is found, start the built-in simulated server.

    The simulated server runs until `stack` is closed. `say` is called with each line for the user. Raises
    loadgen.servers.errors.ServerError, and PlanError for a plan with several URLs.
    """
    if plan.more_urls:
        raise PlanError("loadgen ui measures one server", "Name one URL. loadgen burst, run and sweep take several.")
    plan = prepare.with_file_endpoint(plan)
    access = access_for(plan)
    server = server_for(plan, access, say, at_once=1, streams=SIMULATED_STREAMS, tokens=SIMULATED_TOKENS)
    facts = stack.enter_context(server)
    target = select_addresses(resolve_target(facts.url, access.tls, access.proxy))
    if len(target.addresses) > 1 or target.unused:
        say(describe_addresses(target))
    return LiveTarget(plan, facts, target, Rotation(target.addresses), say).with_plan(plan)


def _endless(prompts: Prompts) -> Iterator[Request]:
    if next(iter(prompts.requests()), None) is None:
        raise PlanError("the workload holds no prompt", "Name another file.")
    while True:
        yield from prompts.requests()


def _endless_sessions(prompts: Prompts) -> Iterator[SessionGraph | Session]:
    def sessions() -> Iterator[SessionGraph | Session]:
        return prompts.graphs() if prompts.has_graphs else prompts.conversations()

    if next(sessions(), None) is None:
        raise PlanError("the workload holds no session", "Name another file.")
    while True:
        yield from sessions()


def _class_facts(part: LiveTarget) -> TrafficFacts:
    """Return the facts about the class of traffic `part`, for the header of the run.

    The load of the class is stated as a share, for example as the text `30% of the users' load`.
    """
    facts = prepare.traffic_facts(
        part.plan.replaced(arrivals=INTERACTIVE, duration_s=None),
        part.name,
        part.first_id,
        0.0,
        endpoint=part.dialect(None).endpoint,
        model=part.facts.model or "",
    )
    return replace(facts, load=replace(facts.load, text=f"{100 * part.share:.3g}% of the users' load"))


class NewestSamples:
    """The newest `limit` samples of one metric, in the unit of the metric."""

    def __init__(self, limit: int) -> None:
        self._values = np.empty(limit)  # takes memory as it is written to
        self.seen = 0

    def extend(self, values: Floats) -> None:
        """Add samples. If this exceeds the limit, the new samples replace the oldest ones."""
        self._values[(self.seen + np.arange(len(values))) % len(self._values)] = values
        self.seen += len(values)

    def copy(self, since: int = 0) -> Floats:
        """Return the stored samples, without the first `since` samples of the run.

        The result is a copy, which may be passed to another thread.
        """
        retained = min(self.seen - since, len(self._values))
        return self._values[np.arange(self.seen - retained, self.seen) % len(self._values)]


def summarise_samples(values: Floats) -> dict[str, float | int | None]:
    """Return n, mean, exact percentiles, min and max, as loadgen.analysis.stats computes them.

    Without samples, all values except n are None.
    """
    ordered = np.sort(values)
    if not len(ordered):
        return {"n": 0, "mean": None, **dict.fromkeys(SHARES), "min": None, "max": None}
    figures = {name: percentile(ordered, share) for name, share in SHARES.items()}
    ends = {"mean": float(np.mean(ordered)), **figures, "min": float(ordered[0]), "max": float(ordered[-1])}
    return {"n": len(ordered), **{name: round(value, DECIMALS) for name, value in ends.items()}}


def detail_of(record: Record) -> str:
    """Return the error message of a Record with each digit replaced by `#`, so that similar failures are counted
    together.
    """
    return one_line("".join("#" if letter.isdigit() else letter for letter in record.error_detail), 200)


def _reason(record: Record) -> str:
    """Return the reason why the request of `record` failed, in the words of reports, such as `HTTP 500`."""
    if record.error_kind == "http_status" and record.http_status is not None:
        return f"HTTP {record.http_status}"
    return INCOMPLETE.get(record.error_kind, record.error_kind)


class LiveFigures:
    """The figures of one interactive run, as the web page of `loadgen ui` shows them."""

    def __init__(self) -> None:
        self.states = Counter[str]()
        self.cut_off = 0
        """Requests that were cut off because their users were stopped. The run file counts them as failed."""
        self.never_sent = 0
        """Requests of sessions that were not sent, because their session or user had ended."""
        self.failures = Counter[tuple[str, str]]()
        """Number of failed requests by reason and by message with `#` for each digit."""
        self.messages: dict[tuple[str, str], str] = {}
        """The message of the first failure of each of these kinds, with its digits."""
        self.tokens = 0
        self.send_late = NewestSamples(REQUEST_SAMPLES)
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.metrics = {
            name: metric for name, metric in METRICS.items() if metric.per != "run" and name not in NOT_SHOWN
        }
        self.samples = {
            name: NewestSamples(REQUEST_SAMPLES if metric.per == "request" else TOKEN_SAMPLES)
            for name, metric in self.metrics.items()
        }
        self.first_off = NewestSamples(REQUEST_SAMPLES)
        """Per TTFT sample, the maximum error of its timestamp in seconds."""
        self._pending: list[Record] = []
        self._seen = deque([dict.fromkeys(self.samples, 0)], maxlen=LAST_S + 1)
        """Number of samples of each metric at the end of each of the last LAST_S seconds."""
        self.level = {"at": 0, "users": 0}
        """The current number of users, and the second in which it was reached."""
        self._level_seen = self._seen[0]
        self._recent: dict[str, list[Floats]] = {name: [] for name in CHARTED}

    def add(self, record: Record) -> None:
        """Count a request that has ended. `digest` computes its latencies later."""
        self.states[record.state] += 1
        self.never_sent += record.sent_ns is None and record.error_kind in ("session_ended", "cancelled")
        self.tokens += generated_tokens(record)
        self._pending.append(record)
        if record.error_kind == "cancelled":
            self.cut_off += 1
        elif record.state != "complete":
            key = (_reason(record), detail_of(record))
            if key not in self.failures and len(self.failures) >= MAX_FAILURE_TEXTS:
                key = (key[0], OTHER_DETAIL)
            self.failures[key] += 1
            self.messages.setdefault(key, key[1] if key[1] == OTHER_DETAIL else one_line(record.error_detail, 200))

    def digest(self, pause: Callable[[], object] = lambda: None) -> None:
        """Compute the latencies of the Records that were added since the last call.

        Requests that are not complete have no latencies. `pause` is called between batches.
        """
        while self._pending:
            records = self._pending[:BATCH_RECORDS]
            self._pending = self._pending[BATCH_RECORDS:]
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
        """Return, for each metric, the number of samples that were added before the time span `span`.

        The caller skips these samples, so that only the samples of the time span are left. `span` is one of these:

        - `last`: the last LAST_S seconds.
        - `level`: the time since the number of users last changed.
        - `run`: the whole run. All numbers are then 0.
        """
        begins = {"last": self._seen[0], "level": self._level_seen}
        return begins.get(span, dict.fromkeys(self.samples, 0))

    def add_point(self, users: int, **values_now: Any) -> None:
        """Add one second to the charts.

        The new point contains the latency percentiles of the requests that ended in this second, the number of users,
        and the values in `values_now`.
        """
        self.digest()
        second = self.points[-1]["at"] + 1 if self.points else 0
        self._seen.append({name: samples.seen for name, samples in self.samples.items()})
        if users and users != self.level["users"]:
            self._level_seen = self._seen[-1] if self.points else self._seen[0]
            self.level = {"at": second, "users": users}
        recent = {name: np.sort(np.concatenate([np.empty(0), *values])) for name, values in self._recent.items()}
        self._recent = {name: [] for name in CHARTED}
        percentiles = {
            f"{name}_{share}": percentile(values, SHARES[share]) if len(values) else None
            for name, values in recent.items()
            for share in ("p50", "p99")
        }
        self.points.append({"at": second, "users": users, **percentiles, **values_now})


def warm_up() -> None:
    """Run every computation of the live figures once, before the load starts.

    The first execution takes a third of a second, and later ones are fast. During the run, the process must not be busy
    for so long, because it could not read its sockets in this time.
    """
    figures = LiveFigures()
    figures.add(Record(id=0, state="complete", sent_ns=0, chunk_ns=[1, 2], chunk_tokens=[1, 1], output_tokens=2))
    figures.add_point(1)
    summarise_samples(figures.samples["ttft_s"].copy())


class ServerReadings:
    """The newest reading of the server's metrics, from the file that the telemetry sampler appends to during a run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = 0
        """Number of bytes of the file that have been read."""

    def new_figures(self) -> dict[str, float | None]:
        """Return the figures of the newest reading since the last call, for the charts.

        The figures are the number of requests that the server runs, the number of requests in its queue, and the used
        share of the KV cache. A figure is None if there is no new reading, or if the server does not report it."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._position)
                text = stream.read(TELEMETRY_BYTES)
        except OSError:
            text = b""
        complete = text.rpartition(b"\n")[0]
        self._position += len(complete) + 1 if complete else 0
        values: dict[str, Any] = {}
        for line in complete.splitlines():
            if b'"source":"server"' in line:
                values = msgspec.json.decode(line).get("values", {})
        return {shown: values.get(name) for shown, name in SERVER_FIGURES.items()}


class LiveRun:
    """One interactive run, from Start to Stop. The caller must hold the FolderClaim on the folder of the run."""

    def __init__(
        self,
        folder: Path,
        target: LiveTarget,
        *,
        stamps: TimestampSource,
        command: Sequence[str],
        sampler: SamplerProcess,
    ) -> None:
        check_room(folder, MIN_FREE_BYTES)
        parts = target.parts
        dialect = parts[0].dialect(None)
        methods = dict.fromkeys(part.describe_prompts(part.dialect(None)) for part in parts)
        prompts = replace(parts[0].prompts(dialect), counting_method="; ".join(methods))
        header = prepare.build_header(target.plan, parts[0].facts, dialect, prompts)
        header.traffic = [_class_facts(part) for part in target.classes]
        header.server |= target.address.facts
        header.telemetry = sampler.facts(target.plan, header.server)
        self.folder = folder
        self.figures = LiveFigures()
        self.in_flight: set[Exchange] = set()
        self.ended = False
        self.finished = False
        """True if the run has ended and its file is complete. Figures do not change any more."""
        self._sampler = sampler
        self._server_readings = ServerReadings(folder / PART)
        self._stamps = stamps
        self._total: dict[str, Any] = {
            **dict.fromkeys((*EVENT_COUNTERS, *MAXIMA, "cpu_sum_ns", "cpu_ns", "wall_ns"), 0),
            "late_counts": {},
        }
        """The client's health so far. `cpu_ns` and `wall_ns` are those of the busiest second."""
        self._clocks = ClockPairs()
        self._health = Health()
        self.mark: Mark | None = None
        """The mark that says SIMULATED, from the first response that carries it."""
        self._dialect = dialect
        self._replica_header = target.plan.replica_header.lower()
        self._server_timing = target.plan.server_timing
        self._rate = TokenRate(window_ns=1_000_000_000)
        self._cache: dict[tuple[str, bool], tuple[float, Any]] = {}
        self._computing = RLock()
        self.start_ns = time.monotonic_ns()
        header.command = list(command)
        header.plan |= {"arrivals": INTERACTIVE, "duration_s": None}
        header.load = load_facts(header.plan["arrivals"], target.plan.workload)
        if header.traffic:
            header.load = replace(load_of_traffic({facts.name: facts.load for facts in header.traffic}), finite=False)
        self.identities = {
            part.name: SessionIdentity(part.plan.session_header, part.plan.session_capture) for part in parts
        }
        """The values of session headers, by class of traffic."""
        self.id_prefix = header.client["request_ids"] = new_id_prefix()
        header.client["calibration"] = host.load_calibration(header.host, lambda _: None)
        with ExitStack() as raised:
            self._scheduling = raised.enter_context(raised_priority(target.plan.client_priority))
            header.client["scheduling"] = self._scheduling
            open_run(folder, header, stamps.name, self.start_ns, self._clocks.to_realtime(self.start_ns))
            self._part = RunWriter(folder / "run.jsonl")
            sampler.begin(self.start_ns, folder)
            self._priority = raised.pop_all()

    def take(self, exchange: Exchange, request: Request, dialect: Dialect, due_ns: int, connected_ns: int) -> Record:
        """Record a request that was sent and has ended. Return its Record."""
        self.in_flight.discard(exchange)
        while not self._stamps.ready(exchange):
            gevent.sleep(RETRY_S)
        requested = [(exchange, request)]
        (record,) = build_records(
            requested,
            dialect,
            self._clocks,
            self.start_ns,
            self._health,
            self._stamps,
            replica_header=self._replica_header,
            server_timing=self._server_timing,
        )
        record.connected_ns = connected_ns - self.start_ns
        self._rate.record(generated_tokens(record), received_bytes(exchange))
        return self._add(record, due_ns)

    def give_up(self, request: Request, due_ns: int, error: OSError) -> Record:
        """Record a request that was not sent, because no connection could be opened. Return its Record."""
        kind: ErrorKind = "client_limit" if isinstance(error, LocalLimitError) else "connect"
        return self._add(unsent_record(request, kind, connection_error(error)), due_ns)

    def not_encoded(self, request: Request, error: Exception) -> Record:
        """Record a request that was not sent, because it could not be encoded. Return its Record."""
        return self._add(unsent_record(request, "not_encoded", encoding_problem(error)), time.monotonic_ns())

    def not_sent(self, request: Request, kind: ErrorKind, detail: str) -> Record:
        """Record that a request of a session will never be sent. `kind` and `detail` state the reason."""
        return self._add(unsent_record(request, kind, detail), time.monotonic_ns())

    def _add(self, record: Record, due_ns: int) -> Record:
        record.due_ns = due_ns - self.start_ns
        self._part.add(record)
        self.figures.add(record)
        return record

    def tick(self, late_ns: int) -> None:
        """Record the delay of the event loop, and compute new latencies.

        `late_ns` is the delay in ns with which the event loop ran a timer.
        """
        self._health.stall(late_ns)
        self.figures.digest(lambda: gevent.sleep(SOCKET_CHECK_S))

    def sample(self, users: int) -> None:
        """Write a sample of the client's health, flush the run file, and add a point to the charts.

        The caller calls this method once a second.
        """
        self._clocks.take()
        self.mark = self.mark or self._health.mark
        values = self._health.sample() | self._stamps.counts()
        values["clock_disagreement_ns"] = self._clocks.disagreement_ns
        self._fold(values)
        at_ns = time.monotonic_ns() - self.start_ns
        self._part.add(Telemetry(source="client", at_ns=at_ns, values={**values, "users": users}))
        self._part.flush()
        # A stream counts as begun with its first event: some servers send the head at once and the first token later.
        streaming = [exchange for exchange in self.in_flight if exchange.raw.find(b"data:", 0, SEARCHED_BYTES) >= 0]
        if self._rate.needs_sample and streaming:
            self._rate.sample(*tokens_so_far(streaming[0].raw[:SAMPLED_BYTES], self._dialect))
        unrecorded = sum(self._stamps.arrived_bytes(self.in_flight)) + self._stamps.unsorted_bytes
        rate = self._rate.per_second(time.monotonic_ns(), unrecorded)
        waiting = len(self.in_flight) - len(streaming)
        server = self._server_readings.new_figures()
        self.figures.add_point(users, tokens_per_s=rate, streams=len(streaming), waiting=waiting, **server)

    def end(self, users: int, *, interrupted: bool = False) -> Path | None:
        """End the run and write its footer to the run file.

        Return None if the run file is complete. If the disk was full, return the path of a second file, which contains
        the last lines of the run.

        `users` is the number of users at the end of the run. `interrupted` is True if the user has interrupted the run.
        If the run has already ended, this method does nothing and returns None.
        """
        if self.ended:
            return None
        self.ended = True
        self.sample(users)
        self._priority.close()
        ended_ns = time.monotonic_ns() - self.start_ns
        telemetry_parts = self._sampler.end(patient=not interrupted)
        notes: list[str] = []
        for line in whole_lines(telemetry_parts, notes, "telemetry"):
            self._part.add_line(line)
        states: Mapping[str, int] = self.figures.states
        counts = {state: states[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")}
        sent = sum(states.values()) - self.figures.never_sent
        footer = Footer(ended_ns=ended_ns, sent=sent, interrupted=interrupted, notes=notes, **counts)
        self._part.add(footer)
        rescued = self._part.close()
        if rescued is None:
            for path in telemetry_parts:
                path.unlink(missing_ok=True)
        self.finished = True
        return rescued

    def latency(self, span: str = "run") -> list[dict[str, Any]]:
        """Return one row per metric: its name, title and unit, and its exact figures over a time span of the run.

        `span` is `last` (the last LAST_S seconds), `level` (since the number of users last changed) or `run`. Only
        requests that ended in this span count. Metrics of reasoning have a row only if a response began with reasoning.

        Samples are sorted in another thread, so that this thread continues to read sockets.
        """
        return self._cached(f"latency {span}", lambda: self._latency_rows(span))

    def client(self) -> dict[str, Any]:
        """Return the client's health so far. The figures have the same names, formulas and limits as in the part
        `client` of summary.json.

        `cpu_share` leaves out the first sample of the run, which covers less than a second.
        """
        latency = {row["name"]: row for row in self.latency()}
        return self._cached("client", lambda: self._judge(latency))

    def _cached(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, cached for CACHE_S seconds.

        If several browser windows request the result at the same time, it is computed once.
        """
        with self._computing:
            now_s = time.monotonic()
            key = (name, self.ended)
            if key not in self._cache or now_s - self._cache[key][0] >= CACHE_S:
                self._cache[key] = (now_s, compute())
            return cast("T", self._cache[key][1])

    def _latency_rows(self, span: str) -> list[dict[str, Any]]:
        self.figures.digest()  # includes requests that were cut off as the run ended
        pool = gevent.get_hub().threadpool
        rows = []
        since = self.figures.since(span)
        requests = self.figures.samples["e2e_s"].seen - since["e2e_s"]
        for name, samples in self.figures.samples.items():
            metric = self.figures.metrics[name]
            if metric.optional and not samples.seen:
                continue
            values = samples.copy(since[name])
            seen = samples.seen - since[name]
            row = {"name": name, "title": metric.title, "left_out": seen - len(values), "unit": metric.unit}
            # Tokens of one request are correlated, so percentiles have as many independent samples as requests.
            thin = [share for share in SHARES if min(seen, requests) < samples_needed(SHARES[share])]
            rows.append({**row, **pool.apply(summarise_samples, (values,)), "thin": thin})
        return rows

    def _fold(self, values: Mapping[str, Any]) -> None:
        """Add one sample of the client's health to the total of the run."""
        total = self._total
        total |= {name: total[name] + values[name] for name in EVENT_COUNTERS}
        total |= {name: max(total[name], values[name]) for name in MAXIMA}
        total["cpu_sum_ns"] += values["cpu_ns"]
        if "core_wait_ns" in values:
            total["core_wait_ns"] = total.get("core_wait_ns", 0) + values["core_wait_ns"]
        late = Counter(total["late_counts"])
        late.update(values["late_counts"])
        total["late_counts"] = late
        busier = values["cpu_ns"] * total["wall_ns"] >= total["cpu_ns"] * values["wall_ns"]
        if values["wall_ns"] >= MIN_SAMPLE_S * 1e9 and busier:
            total |= {name: values[name] for name in ("cpu_ns", "wall_ns")}

    def _judge(self, latency: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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
        own = timestamp_error(result)
        if own is not None:
            off_s = np.minimum(figures.first_off.copy(), np.inf if own.away_s is None else own.away_s)
            result.error_ttft_p50_s = own.stamp_s + median_ttft_error_s(figures.samples["ttft_s"].copy(), off_s)
            result.error_bar_e2e_s = own.stamp_s
        result.reasons = reasons(result, latency["ttft_s"]["p50"], latency["e2e_s"]["p50"])
        fields: dict[str, Any] = msgspec.to_builtins(result)
        return fields | {"source": self._stamps.active_source.title}
