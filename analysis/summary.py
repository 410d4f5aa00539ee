"""The summary of a run: all that is known about it in figures. These Structs are summary.json, its JSON Schema
(docs/reference/summary.schema.json), its reference page and the Python API at once; `loadgen.analysis.build_summary`
fills them in. Names end in their unit: seconds (`_s`), bytes, tokens, shares from 0 to 1. None is unknown or undefined,
never zero.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.objectives import AdjustedDistribution, ByLatency, Distribution, Goodput, ObjectiveVerdict
from loadgen.analysis.prediction import Predicted
from loadgen.analysis.run.runfile import SchedulingFacts, StampFacts
from loadgen.workloads.arrival_facts import LoadFacts

FORMAT = 1
"""Of summary.json: rises when a key goes or changes its meaning, not when one is added."""
INCOMPLETE_MAX = 0.25
"""Share of the number in flight above which requests that did not complete are worth a warning by themselves."""


class RunInfo(msgspec.Struct, kw_only=True):
    """Which run this is, what was planned, and how it can be had again."""

    id: str
    """The run's folder."""
    label: str
    started_at: str
    """Wall-clock start, RFC 3339, UTC."""
    duration_s: float
    """From the start to the end of the last request. A run without a footer lasts to the last line it recorded."""
    arrivals: str
    """The canonical text of the arrival process, such as `burst` or `poisson:20`."""
    load: LoadFacts = LoadFacts()
    """What the arrivals are, as data."""
    asked_s: float | None
    """For how long arrivals were planned; None where their number was."""
    n: int | None
    """Requests planned; of a workload of sessions, sessions."""
    workload: str | None
    input_tokens: int | str | None
    """A number, or the canonical text of a distribution of lengths."""
    output_tokens: int | str | None
    ignore_eos: bool = True
    """Whether the server was asked not to end answers before their length."""
    seed: int | None
    workers: int | None
    timeout_s: float | None
    interrupted: bool
    """Whether only a part of it is recorded."""
    going_on: bool = False
    """Whether that is because it had not ended when this was written."""
    damaged_lines: int
    """Lines of the run file that could not be read and are in no figure."""
    notes: list[str]
    command: str
    """The command line that repeats the run."""
    version: str
    """Of loadgen."""
    prompts: str | None
    """How the length of prompts was made exact, or what was assumed of it."""
    prompts_exact: bool = True
    """Whether prompts were built to the token, or counted, by the tokenizer of the server."""
    forced: str | None
    """Why the server's version misleads, where it was measured all the same (--force)."""
    over_limit: str | None = None
    """Which limit of the server the load exceeds, where it was sent all the same (--over-limit)."""
    repeat: int
    """Place among the repeats of one plan, from 1; 0 for a run on its own."""
    repeats: int

    @property
    def may_end(self) -> bool:
        """Whether answers might end before the requested length, so that work was not equal."""
        return not self.ignore_eos or str(self.output_tokens).startswith("max:")


class ServerInfo(msgspec.Struct, kw_only=True):
    """Who answered, as the probe found it."""

    name: str | None
    version: str | None
    model: str | None
    platform: str
    """What it runs on, where the plan says so."""
    url: str | None
    proxied_to: str = ""
    """The container's own URL, where Docker's docker-proxy stood between client and server; else empty."""
    addresses: list[str] = []
    """Addresses of the URL's host that connections used, in turn; of older runs empty."""
    addresses_unused: dict[str, str] = {}
    """Other addresses of the host, and why they were not used."""
    endpoint: str | None
    simulated: bool
    speed: float | None
    """How many times faster than real time a simulated server's clock went."""
    virtual: bool = False
    """Whether no time passed at all: nothing was sent, and a scheduler on modelled hardware answered."""
    limits: dict[str, bool | int | float | str | None]
    """What the server says it accepts at most."""


class ErrorExample(msgspec.Struct, kw_only=True):
    """One wording of an error, and how often it occurred; what differs in numbers only is one, with N for them."""

    count: int
    detail: str
    http_status: int | None
    request: int
    """Id of the first request that ended so."""


class RequestCounts(msgspec.Struct, kw_only=True):
    """How the measured requests ended."""

    sent: int
    complete: int
    truncated: int
    failed: int
    rejected: int = 0
    """Refused because the server, or a proxy in front of it, was too busy: HTTP status 429 or 503, or an error event
    that says the same. Not among the failed ones. Runs of versions without this state have them there."""
    dropped: int
    """Never sent: too many were in flight, or their session had ended."""
    unrecorded: int
    """Planned, and without a Record: those of a run that was killed."""
    warmup: int
    warmup_incomplete: int = 0
    """Warm-up requests that did not complete. They are in no other count."""
    errors: dict[str, int]
    """By kind, the most frequent first."""
    examples: dict[str, list[ErrorExample]]
    """Of each kind its most frequent details."""

    @property
    def planned(self) -> int:
        """All that were to be sent."""
        return self.sent + self.dropped + self.unrecorded

    @property
    def all_complete(self) -> bool:
        """Whether every request planned was sent and answered whole."""
        return self.complete == self.planned


class LengthDifference(msgspec.Struct, kw_only=True):
    """Complete responses whose output is shorter, or longer, than requested."""

    responses: int
    tokens_mean: float
    """Mean output tokens of these responses."""
    requested_mean: float
    """Mean of the output tokens that their requests asked for."""
    why: str = ""
    """The cause, as far as the kind of server tells it."""


class TokenCounts(msgspec.Struct, kw_only=True):
    """Tokens asked for and reported by the server, over the requests sent."""

    prompt_asked: int
    prompt_reported: int
    output_asked: int
    output_reported: int
    prompt_mismatches: int
    """Complete requests of which the server counts another number of prompt tokens than asked."""
    output_mismatches: int
    """Complete answers of another length than asked, of servers that cannot fix the length; longer ones only, where
    answers might end early. Answers of which nobody counted more than chunks are not among them."""
    output_early: LengthDifference | None = None
    """Complete responses that ended before the requested length; None where none did."""
    output_longer: LengthDifference | None = None
    """Complete responses that went past the requested length; None where none did."""
    prompt_unknown: int
    """Complete requests whose prompt's length could not be known beforehand."""
    prompt_unreported: int
    """Complete requests of which the server did not say how long the prompt was."""
    counted_by: dict[str, int]
    """Complete requests by who counted their tokens: `server`, `wire`, `tokenizer`, `nobody`; `chunks` where only
    those were counted, which may hold several."""
    streamed_by: dict[str, int] = {}
    """Complete requests by how the streamed tokens are known, on which TPOT and ITL depend: `counted`, `chunks`,
    `spread`, `hidden`, `assumed_hidden`, `contradicted` (docs/concepts/tokens.md)."""
    unstreamed: int = 0
    """Tokens of complete requests that the server generated and never streamed."""
    unstreamed_requests: int = 0
    """Complete requests with such tokens."""
    spread_per_chunk: float | None = None
    """Tokens per chunk of complete requests whose total was spread evenly over chunks; None where there is none."""
    contradicted_chunks: int = 0
    """Tokens by the chunks of complete requests whose chunks and total contradict each other."""
    contradicted_totals: int = 0
    """Tokens by the server's totals of these requests."""


class OutsideWindow(msgspec.Struct, kw_only=True):
    """The measured requests due outside the window. They are in no latency and not in goodput."""

    requests: int
    complete: int
    incomplete: dict[str, int]
    """Requests that did not complete, by state."""
    slowest_s: float | None
    """Largest E2E latency of a complete request outside the window; None where there is none."""
    slowest_inside_s: float | None
    """Largest E2E latency inside the window."""
    slowest_ttft_s: float | None
    """Largest TTFT of a complete request outside the window."""
    slowest_ttft_inside_s: float | None
    """Largest TTFT inside the window."""

    @property
    def slower(self) -> bool:
        """Whether a request outside the window was slower than every request inside, or its first token was."""
        return self.slower_whole or self.slower_first

    @property
    def slower_whole(self) -> bool:
        """Whether a request outside the window took longer than every request inside."""
        return self._exceeds(self.slowest_s, self.slowest_inside_s)

    @property
    def slower_first(self) -> bool:
        """Whether a first token outside the window was slower than every first token inside."""
        return self._exceeds(self.slowest_ttft_s, self.slowest_ttft_inside_s)

    @staticmethod
    def _exceeds(outside_s: float | None, inside_s: float | None) -> bool:
        return outside_s is not None and (inside_s is None or outside_s > inside_s)


class MeasuredWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of the run that the figures are of, in seconds from its start."""

    from_s: float | None
    to_s: float | None
    chosen: Literal["whole", "auto", "set"]
    """`set` by the plan, `auto` where a test showed a steady state, or the `whole` run."""
    reason: str
    requests: int
    """Measured requests due in it."""
    unsteady: str = ""
    """How a load of one rate failed to become steady; empty otherwise."""
    outside: OutsideWindow | None = None
    """The measured requests that the window leaves out; None where there are none."""

    @property
    def whole(self) -> bool:
        """Whether figures are of the whole run, or there are none."""
        return self.chosen == "whole" or self.from_s is None


class Throughput(msgspec.Struct, kw_only=True):
    """Rates of the window, and how exactly they are known; None where no request was complete."""

    completed: int | None = None
    """Complete requests that ended in the window: the numerator of `requests_per_s`."""
    output_tokens: int | None = None
    """Generated tokens that arrived in the window: the numerator of `output_tokens_per_s`."""
    span_s: float | None = None
    """Length of the window: the denominator of every rate."""
    requests_per_s: float | None
    output_tokens_per_s: float | None
    steady_output_tokens_per_s: float | None
    """Before the drain of a run without a window."""
    total_tokens_per_s: float | None
    """Output and prompt tokens."""
    input_tokens_per_s: float | None = None
    """Prompt tokens."""
    tail_share: float | None
    """Share of the run in which fewer than a tenth of the requests were left in flight (the drain)."""
    error_share: float | None
    """By how much rates may be off because the window's ends are only known to the stamps' error."""
    ci95: dict[str, tuple[float, float]]
    ci95_none: str | None
    """Why there are no intervals; None where there are."""


class LittlesLaw(msgspec.Struct, kw_only=True):
    """Little's law over the window: request throughput times mean E2E latency is the mean number in flight. Figures
    that contradict it are not of the same requests."""

    in_flight: float
    """Mean number of requests in flight, measured from every request's own instants."""
    expected: float
    """`requests_per_s` times the mean of `e2e_s`."""
    incomplete: float
    """The part of `in_flight` taken by requests that did not complete, which are in no latency."""
    tolerance: float
    """Largest difference between `expected` and `in_flight` without `incomplete` that is no contradiction."""

    @property
    def holds(self) -> bool:
        """Whether throughput and latency agree with what the complete requests did."""
        return abs(self.in_flight - self.incomplete - self.expected) <= self.tolerance

    @property
    def covers(self) -> bool:
        """Whether complete requests, which alone have latencies, were most of what was in flight."""
        return self.incomplete <= INCOMPLETE_MAX * self.in_flight


class IntervalMeaning(msgspec.Struct, kw_only=True):
    """What the 95 % intervals of `latency` are of."""

    confidence: float
    independent: bool
    """Whether requests may be taken for independent of each other."""
    note: str


class BurstSkew(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How far a burst was from all at once."""

    skew_s: float | None
    """Last byte sent - first byte sent; None where requests were not all due at one instant."""
    skew_range_s: tuple[float, float] | None = None
    """Of a run over several machines: what their clocks leave open of it."""


class TargetDueSent(msgspec.Struct, kw_only=True):
    """A figure of the load as its name has it, as it was planned, and as it was sent."""

    named: float | None
    due: float | None
    sent: float | None


class GapTest(msgspec.Struct, kw_only=True):
    """Kolmogorov-Smirnov test of inter-arrival gaps against the distribution that the arrivals name."""

    statistic: float
    p_value: float
    gaps: int
    resolution_s: float
    """To within what each gap is known."""


class GapTests(msgspec.Struct, kw_only=True):
    """None where there is no test: too few gaps, or no distribution named."""

    due: GapTest | None
    sent: GapTest | None


class SendLateness(msgspec.Struct, kw_only=True):
    """Sent - due, in seconds; exact percentiles."""

    p50: float
    p90: float
    p99: float
    max: float


class Delivery(msgspec.Struct, kw_only=True):
    """Requested against actual load. Of sessions the first turns only, as later ones follow answers."""

    arrivals: str
    asked: int
    sent: int
    not_sent: int
    rate_per_s: TargetDueSent
    """(requests - 1) / (last - first)."""
    cv: TargetDueSent
    """Coefficient of variation of the gaps between requests."""
    ks: GapTests
    late_s: SendLateness | None
    """None of closed loops and interactive users, which have no due instants."""


class QuotedCalibration(msgspec.Struct, kw_only=True):
    """What `loadgen calibrate` had found on this machine."""

    made_at: str
    version: str
    ttft_p99_s: float
    events_per_s: float


class ClientHealth(msgspec.Struct, kw_only=True):
    """Whether the load generator was a bottleneck, and how exact its stamps are."""

    verdict: Literal["ok", "limited"] = "ok"
    reasons: list[str] = []
    """Why it may have been the limit; empty when the run is valid."""
    stamps: str
    """Where receive stamps come from."""
    source: StampFacts = StampFacts()
    """The same, as the source says it of itself."""
    lacking: str = ""
    """What a better source would have taken, where the best there is was asked for."""
    late_p50_s: float | None = None
    """From a receive stamp to the instant at which the client had read the bytes; None without exact stamps."""
    late_p99_s: float | None = None
    late_max_s: float | None = None
    coalesced_share: float | None = None
    """Reads that held more than one event."""
    send_late_p99_s: float | None = None
    clock_disagreement_s: float | None = None
    """The largest between the wall clock and the monotonic one."""
    clock_step_s: float | None = None
    """The part of it that slewing does not explain."""
    cpu_share: float | None = None
    """Of one core, by the busiest worker in its busiest second."""
    cpu_s: float | None = None
    """Processor time of all workers together."""
    core_wait_s: float | None = None
    """How long the workers were ready to run and waited for a core, added up; null where the kernel does not say."""
    core_wait_max_s: float | None = None
    """The longest of these waits in one health sample (one second) of one worker, added up."""
    scheduling: SchedulingFacts | None = None
    """The client's scheduling priority at the start of the run; null in older runs."""
    realtime_given_up: int | None = None
    """Workers that gave up the real-time policy, because they used a core for 200 ms without a pause."""
    full_reads: int | None = None
    """Reads that found the receive window full."""
    windows: int | None = None
    """Late reads before which it was looked at (TCP_INFO)."""
    sweep_max_s: float | None = None
    """How far apart reads were at most, on purpose; 0 where everything was read at once."""
    retransmit_share: float | None = None
    """TCP segments sent again, per request."""
    out_of_order_share: float | None = None
    """TCP segments received out of order, per read."""
    ring_drops: int | None = None
    """Segments that found no room in the packet ring."""
    ring_missed: int | None = None
    """Instants that are the socket's because the packet ring did not have them."""
    ring_rejected: int | None = None
    """Requests whose packet timestamps contradicted the socket's or the request itself; they have the socket's."""
    ring_given_up: int | None = None
    """Workers that stopped using packet timestamps during the run, because too many were rejected."""
    socket_rejected: int | None = None
    """Requests whose kernel timestamps contradicted the request itself; they have user-space timestamps."""
    ring_off_p50_s: float | None = None
    """The instrument's check of itself: how far the packet ring's stamp of the last byte of a read is from the socket's
    own. Upper ends of powers of two."""
    ring_off_p99_s: float | None = None
    ring_off_max_s: float | None = None
    stall_max_s: float | None = None
    """The longest stall of a worker's event loop."""
    first_token_merged: int = 0
    """First tokens that were coalesced with later ones: those TTFTs are upper bounds."""
    reopened: int = 0
    """Connections that the server had closed and that were opened again."""
    sent_again: int = 0
    """Requests that were sent twice, because the server closed an idle connection as the request was sent on it. TTFT
    counts from the second send."""
    pauses: int | None = None
    """How often a client of a closed loop waited, because its request had failed at once."""
    paused_s: float | None = None
    """How long those waits were, added up over all clients."""
    worker_lost: int = 0
    """Requests whose worker process died."""
    client_limit: int = 0
    """Requests for which the client's own machine could open no connection: no free port or file, no route."""
    workers: int = 0
    samples: int = 0
    """Health samples in the run file."""
    calibration: QuotedCalibration | None = None
    error_bar_s: float | None = None
    """What 99 % of all stamps are off by at most; likewise of TTFT, TPOT, ITL and E2E below."""
    error_bar_ttft_s: float | None = None
    error_ttft_p50_s: float | None = None
    """What the median TTFT is off by at most."""
    error_bar_tpot_s: float | None = None
    error_bar_itl_s: float | None = None
    error_bar_e2e_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the run is valid: the load generator was not a bottleneck."""
        return self.verdict == "ok"


class TurnLatency(msgspec.Struct, kw_only=True):
    """Latency of one turn of multi-turn sessions."""

    turn: int
    """From 1."""
    n: int
    """Complete requests."""
    prompt_tokens_mean: float | None
    """By the server's own count."""
    ttft_s: Distribution
    e2e_s: Distribution


class MemoryLevels(msgspec.Struct, kw_only=True):
    """Bytes in use of one thing, from one reading per second."""

    of: str
    """`GPU 0`, `process 123` or `host`."""
    idle_bytes: int | None
    """Before the first request."""
    loaded_bytes: int | None
    """After the last."""
    peak_bytes: int | None
    """The largest in between."""
    readings: int


class GpuMemory(MemoryLevels, kw_only=True):
    """Memory of a GPU."""

    name: str
    total_bytes: int | None


class ProcessMemory(MemoryLevels, kw_only=True):
    """Memory of a process, on a GPU or the host."""

    on: str
    """`GPU 0` or `host`."""
    name: str


class HostMemoryLevels(MemoryLevels, kw_only=True):
    """Memory of the host."""

    total_bytes: int | None


class KvCache(msgspec.Struct, kw_only=True):
    """The share of the server's KV cache in use, by its own gauge. With several engines, their mean."""

    idle_share: float | None
    mean_share: float | None
    peak_share: float | None
    peak_fullest_share: float | None = None
    """The peak of the fullest engine, where there are several."""
    engines: int = 1
    readings: int
    tokens: int | None
    """How many fit into it."""


class MemoryReserved(msgspec.Struct, kw_only=True):
    """How much of a card the engine takes when it starts, whatever the load."""

    share: float | None
    """By the server's own word."""
    note: str


class Memory(msgspec.Struct, kw_only=True):
    """Memory before, during and after the run."""

    gpus: list[GpuMemory]
    processes: list[ProcessMemory]
    host: HostMemoryLevels | None
    kv_cache: KvCache | None
    taken_at_start: MemoryReserved | None
    not_measured: dict[str, str]
    """What could not be read, and why."""
    gaps: dict[str, dict[str, int]]
    """By source, how many readings failed for which reason."""


class CounterCheck(msgspec.Struct, kw_only=True):
    """What the server counted over the run, warm-up included, against the client's count. With requests that are not
    complete that lies between `client` and `client_most`, and `difference` is that to the nearer end."""

    server: int
    client: int | None = None
    client_most: int | None = None
    difference: int | None = None
    agree: bool | None = None
    """None where there is nothing to compare; `why` says so."""
    resets: int
    """How often the server began to count anew."""
    why: str = ""


class MachineClock(msgspec.Struct, kw_only=True):
    """One machine of a run over several, and how well its clock is known against the master's."""

    name: str
    workers: list[int]
    requests: int
    complete: int
    offset_s: float
    drift_s: float
    uncertainty_s: float


class Summary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """summary.json. What has a default here is there only where a run has it."""

    run: RunInfo
    server: ServerInfo
    requests: RequestCounts
    tokens: TokenCounts
    window: MeasuredWindow
    throughput: Throughput
    littles_law: LittlesLaw | None = None
    """None where no request was complete in the window."""
    latencies: dict[str, Distribution] = msgspec.field(name="latency")
    """By metric."""
    intervals: IntervalMeaning
    latencies_adjusted: dict[str, AdjustedDistribution] = msgspec.field(name="latency_adjusted")
    """By metric, of every request due in the window."""
    burst: BurstSkew
    delivery: Delivery
    memory: Memory | None
    """{} in the file for a run without telemetry."""
    server_counters: dict[str, CounterCheck]
    """By counter; empty for a run without readings of the server."""
    client: ClientHealth
    machines: list[MachineClock] = []
    turns: list[TurnLatency] = []
    limit: HardwareLimit | None = None
    prediction: list[Predicted] = []
    goodput: Goodput | None = None
    objectives: list[ObjectiveVerdict] = []

    @property
    def generates(self) -> bool:
        """Whether tokens were asked for: embeddings and rerank have none."""
        return self.tokens.output_asked > 0 or not self.requests.complete

    @property
    def latency(self) -> ByLatency[Distribution]:
        """`summary.latency.ttft.p99`, `summary.latency["ttft_s"]`."""
        return ByLatency(self.latencies)

    @property
    def latency_adjusted(self) -> ByLatency[AdjustedDistribution]:
        """The same with every request that is not complete counted as infinitely slow."""
        return ByLatency(self.latencies_adjusted)


def as_dict(summary: Summary) -> dict[str, Any]:
    """What summary.json holds, as plain dicts and lists."""
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))
    return result | {"memory": result["memory"] or {}}


def from_json(text: bytes) -> Summary:
    """A summary from summary.json. Raises msgspec.MsgspecError where it is none, or another version's."""
    result = msgspec.json.decode(text, type=dict[str, Any])
    return msgspec.convert(result | {"memory": result.get("memory") or None}, Summary)
