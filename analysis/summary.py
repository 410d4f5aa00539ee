"""The structs that define summary.json, the summary of a run.

`loadgen.analysis.build_summary` fills them in, and the Python API returns them. They also define the JSON Schema
(docs/reference/summary.schema.json) and the reference page. The end of a field's name often states its unit, for
example `_s` for seconds, `_bytes` for bytes, and `_share` for a share from 0 to 1. None means unknown or undefined,
never zero.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadgen.analysis.cached_prompts import CachedPrompts
from loadgen.analysis.canaries import CanaryFigures
from loadgen.analysis.checked_texts import ExpectedTexts, SuspectTexts
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.held_back import HeldBack
from loadgen.analysis.objectives import AdjustedDistribution, ByLatency, Distribution, Goodput, ObjectiveVerdict
from loadgen.analysis.prediction import Predicted
from loadgen.analysis.reasoning import Answered
from loadgen.analysis.run.runfile import SchedulingFacts, StampFacts
from loadgen.analysis.speculation import Speculation, TokensPerEvent
from loadgen.analysis.valid_outputs import ValidOutputs
from loadgen.workloads.arrival_facts import LoadFacts

FORMAT = 1
"""Version of the format of summary.json. It increases if a key is removed or changes its meaning, but not if a key is
added."""
INCOMPLETE_MAX = 0.25
"""The report warns if more than this share of the requests in flight are requests that did not complete."""


class RunInfo(msgspec.Struct, kw_only=True):
    """The identity of the run, its plan, and the command that repeats the run."""

    id: str
    """Name of the run's folder."""
    label: str
    started_at: str
    """Wall-clock start, RFC 3339, UTC."""
    duration_s: float
    """Time in seconds from the start of the run to the end of the last request. For an unfinished run: to its last
    recorded line."""
    arrivals: str
    """Canonical text of the arrival process, such as `burst` or `poisson:20`."""
    load: LoadFacts = LoadFacts()
    """Properties of the arrival process."""
    asked_s: float | None
    """Planned duration of the arrivals in seconds; None if the plan gives a number of requests instead."""
    n: int | None
    """Planned number of requests, or of sessions for a workload of sessions."""
    workload: str | None
    input_tokens: int | str | None
    """Requested prompt length: a number, or the canonical text of a length distribution."""
    audio_seconds: str | None = None
    """Length of synthetic recordings in seconds: a number, or the canonical text of a length distribution. None: the
    run has no recordings, or sends files."""
    has_audio: bool = False
    """True if requests contain recordings, or if responses contain speech."""
    batch_size: int = 1
    """Inputs per request. Larger than 1 only on pooling endpoints, such as embeddings."""
    output_tokens: int | str | None
    ignore_eos: bool = True
    """True if the server was told not to end responses before the requested length."""
    seed: int | None
    cold: str = ""
    """Result of emptying the server's prefix cache before the run (--cold): `emptied`, `unused` (the server uses none)
    or `unchecked`. Empty without the option."""
    seed_choice: str = ""
    """How the seed was chosen: `stated` by the user, `random` (new for this run), or `fixed` (on simulated servers).
    It is empty for runs of older versions."""
    workers: int | None
    timeout_s: float | None
    interrupted: bool
    """True if only a part of the run is recorded."""
    going_on: bool = False
    """True if the run was still in progress when this summary was written."""
    damaged_lines: int
    """Lines of the run file that could not be read. They are excluded from all figures."""
    notes: list[str]
    command: str
    """The command line that repeats the run."""
    version: str
    """Version of loadgen."""
    prompts: str | None
    """The method that made prompt lengths exact, or the assumption about the prompt lengths."""
    prompts_exact: bool = True
    """True if prompt lengths are exact: prompts were built to the token, or counted, with the server's tokenizer."""
    forced: str | None
    """Why results of this server version are misleading. Only for a version that was measured despite this, with
    --force."""
    over_limit: str | None = None
    """The server limit that the load exceeds. Only for a load that was sent despite this, with --over-limit."""
    repeat: int
    """Number of this repeat, from 1; 0 for a single run."""
    repeats: int

    @property
    def may_end(self) -> bool:
        """True if responses may end before they have the requested length.

        Two runs of this plan may then do different amounts of work.
        """
        return not self.ignore_eos or str(self.output_tokens).startswith("max:")


class RemovedFigures(msgspec.Struct, kw_only=True):
    """Figures of one worker's requests that ended in one time window, and whose Records were removed during the run.

    Workers write their Records to files. In a long run, some of these files are removed. The time that a removed file
    covers is divided into windows of at least a minute, or is one window if it is shorter. Each worker has separate
    files, so the windows of different workers may overlap.

    Latencies are those of complete requests. A latency is None if no request of the window has this latency.
    """

    worker: int
    """Number of the worker process that sent the requests, from 0."""
    from_s: float
    """Start of the window, in seconds from the start of the run."""
    to_s: float
    requests: int
    complete: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None


class RemovedPart(msgspec.Struct, kw_only=True):
    """Requests whose Records were removed during the run (--keep-records). No other figure includes them."""

    requests: int
    complete: int
    until_s: float
    """Time from the start of the run at which the last of these requests ended, in seconds."""
    windows: list[RemovedFigures]
    """Figures of these requests by worker and time window, in order of time."""


class ServerInfo(msgspec.Struct, kw_only=True):
    """The server of the run, as the plan states it and as loadgen detected it."""

    name: str | None
    version: str | None
    model: str | None
    platform: str
    """The hardware of the server, if the plan states it, or the hardware that a simulated server models."""
    url: str | None
    proxied_to: str = ""
    """URL of the container if Docker's docker-proxy was between client and server; otherwise empty."""
    proxy: str = ""
    """URL of the HTTP proxy through which the connections went (--proxy); otherwise empty."""
    protocol: str = ""
    """`HTTP/2` if the server accepts nothing else; otherwise empty."""
    addresses: list[str] = []
    """Addresses of the URL's host or of the proxy that the connections used in turn, or the path of the server's Unix
    socket. Empty for runs of older versions."""
    addresses_unused: dict[str, str] = {}
    """Addresses of the host that the connections did not use, each with the reason."""
    replicas: dict[str, list[str]] = {}
    """If --url was repeated: the addresses of each replica that the connections used in turn, by its URL."""
    endpoint: str | None
    simulated: bool
    speed: float | None
    """Speed of a simulated server's clock, relative to real time."""
    virtual: bool = False
    """True for a run in virtual time: no request was sent, and a simulated scheduler on modelled hardware produced the
    results."""
    model_accuracy: str = ""
    """Accuracy of the simulated latencies in published measurements of this engine and GPU. Examples are `TPOT 4% (p50)
    and 13% (p90) off in 20 rows` and `TTFT, TPOT not validated`. Empty if the run is not in virtual time."""
    limits: dict[str, bool | int | float | str | None]
    """Limits that the server reports, such as its context length, by name."""


class ErrorExample(msgspec.Struct, kw_only=True):
    """An error message and the number of its occurrences.

    Messages that differ only in numbers count as one message, in which N replaces the numbers.
    """

    count: int
    detail: str
    http_status: int | None
    request: int
    """Id of the first request with this error."""


class RequestCounts(msgspec.Struct, kw_only=True):
    """Number of measured requests by outcome."""

    sent: int
    complete: int
    truncated: int
    failed: int
    rejected: int = 0
    """Requests that the server, or a proxy in front of it, was too busy to accept: HTTP status 429 or 503, or an
    equivalent error event. They do not count as failed, except in runs of older versions without this state."""
    dropped: int
    """Requests that were never sent, because too many requests were in flight or their session had ended."""
    abandoned: int = 0
    """Requests that were given up on purpose (`--cancel`), and turns that were not sent because their session was given
    up. They are neither complete nor failed, and no latency includes them."""
    unrecorded: int
    """Planned requests without a Record, in a run that was killed."""
    warmup: int
    warmup_incomplete: int = 0
    """Warm-up requests that did not complete. They are part of `warmup`, but not of the counts of measured requests."""
    errors: dict[str, int]
    """Number of errors by kind, the most frequent first."""
    examples: dict[str, list[ErrorExample]]
    """The most frequent error messages, by error kind."""

    @property
    def incomplete(self) -> int:
        """Number of requests that were truncated, failed or rejected."""
        return self.truncated + self.failed + self.rejected

    @property
    def planned(self) -> int:
        """Number of requests that should be complete: all planned requests except those abandoned on purpose."""
        outcomes = self.complete + self.truncated + self.failed + self.rejected
        return outcomes + self.dropped + self.unrecorded

    @property
    def all_complete(self) -> bool:
        """True if every planned request was sent and completed."""
        return self.complete == self.planned


class LengthDifference(msgspec.Struct, kw_only=True):
    """Number and mean lengths of complete responses that do not have the requested length.

    There is one object for the responses that are shorter than requested, and one for the responses that are longer.
    """

    responses: int
    tokens_mean: float
    """Mean number of output tokens of these responses."""
    requested_mean: float
    """Mean number of output tokens that were requested for these responses."""
    why: str = ""
    """The cause, if it is known for this backend; otherwise empty."""


class TruncatedInputs(msgspec.Struct, kw_only=True):
    """Inputs that were longer than the server's maximum length, and that the server truncated."""

    requests: int
    """Complete requests with such inputs."""
    tokens: int
    """The server's maximum length of an input."""
    every_input: bool
    """True if every input of every complete request was cut."""


class TokenCounts(msgspec.Struct, kw_only=True):
    """Tokens that the client requested and tokens that the server reported, over all requests sent."""

    prompt_asked: int
    prompt_reported: int
    output_asked: int
    output_reported: int
    prompt_mismatches: int
    """Complete requests for which the reported prompt length differs from the requested length."""
    output_mismatches: int
    """Complete responses of another length than requested. Only servers that cannot fix the length produce them. If
    responses may end early, only longer responses count. Responses with a count of chunks but not of tokens are
    excluded."""
    output_early: LengthDifference | None = None
    """Complete responses that ended before the requested length; None if there are none."""
    output_longer: LengthDifference | None = None
    """Complete responses that exceeded the requested length; None if there are none."""
    prompt_unknown: int
    """Complete requests whose prompt length was not known in advance."""
    truncated: TruncatedInputs | None = None
    """Inputs that the server cut to its maximum length; None if there are none."""
    prompt_unreported: int
    """Complete requests for which the server did not report the prompt length."""
    counted_by: dict[str, int]
    """Complete requests by the source of their token count: `server`, `wire`, `tokenizer`, `chunks` (a chunk may hold
    several tokens) or `nobody`."""
    streamed_by: dict[str, int] = {}
    """Complete requests by the basis of their streamed token count, on which TPOT and ITL depend: `counted`, `chunks`,
    `spread`, `without_text`, `hidden`, `assumed_hidden` or `contradicted` (docs/concepts/tokens.md)."""
    unstreamed: int = 0
    """Tokens of complete requests that the server generated and never streamed."""
    unstreamed_requests: int = 0
    """Complete requests with tokens that were never streamed."""
    without_text: int = 0
    """Tokens of complete requests in excess of their chunks, where the text is too short for all tokens and the server
    reports that it hid no reasoning."""
    reasoning: int = 0
    """Reasoning tokens of complete requests, as the server reports them, or else as counted in the chunks."""
    reasoning_requests: int = 0
    """Complete requests with reasoning tokens."""
    unanswered_requests: int = 0
    """Complete requests whose response ended during the reasoning, so that there is no answer."""
    spread_per_chunk: float | None = None
    """Mean tokens per chunk of complete requests whose total was spread evenly over their chunks. None without such
    requests."""
    contradicted_chunks: int = 0
    """Tokens counted in the chunks of complete requests whose chunks and total contradict each other."""
    contradicted_totals: int = 0
    """Tokens in the server's totals of complete requests whose chunks and total contradict each other."""


SLOWER_FACTOR = 1.25
"""Factor by which the slowest request outside the window must exceed the slowest one inside, for a warning."""


class OutsideWindow(msgspec.Struct, kw_only=True):
    """Measured requests that were due outside the window. Latencies and goodput exclude these requests."""

    requests: int
    complete: int
    incomplete: dict[str, int]
    """Requests outside the window that did not complete, by state."""
    slowest_s: float | None
    """Largest E2E latency of a complete request outside the window, in seconds. None if there is no such request."""
    slowest_inside_s: float | None
    """Largest E2E latency of a complete request inside the window, in seconds."""
    slowest_ttft_s: float | None
    """Largest TTFT of a complete request outside the window, in seconds."""
    slowest_ttft_inside_s: float | None
    """Largest TTFT of a complete request inside the window, in seconds."""

    @property
    def slower(self) -> bool:
        """True if a request outside the window had a much larger E2E latency or TTFT than every request inside.

        Much larger means more than SLOWER_FACTOR times the largest value inside. Smaller differences often arise by
        chance.
        """
        return self.slower_whole or self.slower_first

    @property
    def slower_whole(self) -> bool:
        """True if a request outside the window had a much larger E2E latency than every request inside."""
        return self._exceeds(self.slowest_s, self.slowest_inside_s)

    @property
    def slower_first(self) -> bool:
        """True if a request outside the window had a much larger TTFT than every request inside."""
        return self._exceeds(self.slowest_ttft_s, self.slowest_ttft_inside_s)

    @staticmethod
    def _exceeds(outside_s: float | None, inside_s: float | None) -> bool:
        return outside_s is not None and (inside_s is None or outside_s > SLOWER_FACTOR * inside_s)


class MeasuredWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The measurement window: the part of the run that the figures cover. Times are in seconds from the run's start."""

    from_s: float | None
    to_s: float | None
    chosen: Literal["whole", "auto", "set"]
    """`set` if the plan sets the window, `auto` if a test showed a steady state, `whole` for the whole run."""
    reason: str
    requests: int
    """Measured requests that were due in the window."""
    unsteady: str = ""
    """Description of the trend if a load with a constant rate never became steady; otherwise empty."""
    overloaded: bool = False
    """True if requests arrived faster than the server completed them until the last request was due."""
    outside: OutsideWindow | None = None
    """Measured requests that were due outside the window; None if there are none."""

    @property
    def whole(self) -> bool:
        """True if the figures cover the whole run, or if there are no figures."""
        return self.chosen == "whole" or self.from_s is None


class Throughput(msgspec.Struct, kw_only=True):
    """Rates in the measurement window, with their confidence intervals. All rates are None if no request completed."""

    completed: int | None = None
    """Complete requests that ended in the window: the numerator of `requests_per_s`."""
    output_tokens: int | None = None
    """Generated tokens that arrived in the window: the numerator of `output_tokens_per_s`."""
    span_s: float | None = None
    """Length of the window in seconds: the denominator of every rate."""
    requests_per_s: float | None
    output_tokens_per_s: float | None
    steady_output_tokens_per_s: float | None
    """Output throughput of a whole run before its drain (see `tail_share`)."""
    total_tokens_per_s: float | None
    """Throughput of output and prompt tokens together."""
    input_tokens_per_s: float | None = None
    """Throughput of prompt tokens."""
    inputs_per_s: float | None = None
    """Throughput of inputs. None unless the endpoint is a pooling endpoint, such as embeddings."""
    audio_seconds_per_s: float | None = None
    """Seconds of audio per second (RTFx). None unless the endpoint is an audio endpoint."""
    audio_bytes_per_s: float | None = None
    """Throughput of bytes of speech. None unless the endpoint is `speech`."""
    tail_share: float | None
    """Length of the drain as a share of the run. In the drain, fewer than a tenth of the requests are still in
    flight."""
    error_share: float | None
    """Relative error of the rates that is due to the timestamp errors at both ends of the window."""
    ci95: dict[str, tuple[float, float]]
    """95% interval of each rate."""
    ci95_none: str | None
    """Reason why there are no intervals; None if there are intervals."""


class LittlesLaw(msgspec.Struct, kw_only=True):
    """Little's law over the window: request throughput * mean E2E latency = mean number of requests in flight.

    If the law does not hold, throughput and latency cover different requests.
    """

    in_flight: float
    """Mean number of requests in flight, computed from the start and the end of every request."""
    expected: float
    """`requests_per_s` times the mean of `e2e_s`."""
    incomplete: float
    """The part of `in_flight` that is due to incomplete requests, which have no latency."""
    tolerance: float
    """Maximum difference between `expected` and `in_flight - incomplete` at which the law holds."""

    @property
    def holds(self) -> bool:
        """True if the law holds within the tolerance."""
        return abs(self.in_flight - self.incomplete - self.expected) <= self.tolerance

    @property
    def covers(self) -> bool:
        """True if the latencies represent the load, because enough of the requests in flight are complete.

        Incomplete requests have no latency. Their share of the requests in flight may be at most INCOMPLETE_MAX.
        """
        return self.incomplete <= INCOMPLETE_MAX * self.in_flight


class IntervalMeaning(msgspec.Struct, kw_only=True):
    """The confidence level of the intervals in `latency`, and the assumption on which they are based."""

    confidence: float
    independent: bool
    """True if requests are independent of each other."""
    note: str


class BurstSkew(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The time that it took to send all requests of a burst."""

    skew_s: float | None
    """Time from the first byte sent to the last byte sent, in seconds. None if the requests were not all due at one
    time."""
    skew_range_s: tuple[float, float] | None = None
    """Minimum and maximum skew of a distributed run in seconds, given the uncertainty of the machines' clocks."""


class TargetDueSent(msgspec.Struct, kw_only=True):
    """One figure of the load, such as the request rate, in three versions: target, planned and actual.

    `named` is the target in the arrival process, such as 20 in `poisson:20`. `due` is the planned figure, computed from
    the times at which the requests were due. `sent` is the actual figure, computed from the times at which the requests
    were sent.
    """

    named: float | None
    due: float | None
    sent: float | None


class GapTest(msgspec.Struct, kw_only=True):
    """Kolmogorov-Smirnov test of the gaps between requests against the distribution of the arrival process."""

    statistic: float
    p_value: float
    gaps: int
    resolution_s: float
    """Resolution of each gap in seconds."""


class GapTests(msgspec.Struct, kw_only=True):
    """Tests of the gaps between due times and of the gaps between send times.

    A test is None if the gaps cannot be tested, for example because there are too few gaps.
    """

    due: GapTest | None
    sent: GapTest | None


class SendLateness(msgspec.Struct, kw_only=True):
    """Exact percentiles of the send delay in seconds.

    The send delay is the time from the due time to the send. It does not include the time for which the request waited
    because of `--concurrency`.
    """

    p50: float
    p90: float
    p99: float
    max: float


class QueueWait(msgspec.Struct, kw_only=True):
    """The number of requests that waited because of `--concurrency`, and exact percentiles of their waits in s."""

    requests: int
    p50: float
    p99: float
    max: float


class Delivery(msgspec.Struct, kw_only=True):
    """The requested load and the sent load.

    For sessions only first turns count, because a later turn is sent after a response and not at a planned time.
    """

    arrivals: str
    asked: int
    sent: int
    not_sent: int
    rate_per_s: TargetDueSent
    """Requests per second: (requests - 1) / (last - first)."""
    cv: TargetDueSent
    """Coefficient of variation of the gaps between requests: standard deviation / mean."""
    ks: GapTests
    late_s: SendLateness | None
    """Send delays caused by the client. Waiting because of `--concurrency` is not part of them. None for closed loops
    and interactive users, which have no due times."""
    queue_wait: QueueWait | None = None
    """Waits because of `--concurrency`. None if no request waited."""


class QuotedCalibration(msgspec.Struct, kw_only=True):
    """The result of the last `loadgen calibrate` on this machine."""

    made_at: str
    version: str
    ttft_p99_s: float
    events_per_s: float


class ClientHealth(msgspec.Struct, kw_only=True):
    """Health of the load generator: whether it may have distorted the figures, and how accurate its timestamps are."""

    verdict: Literal["ok", "limited"] = "ok"
    reasons: list[str] = []
    """Reasons why the client was the limit; empty if the run is valid."""
    stamps: str
    """Source of the receive timestamps."""
    source: StampFacts = StampFacts()
    """Properties of the timestamp source."""
    lacking: str = ""
    """What the machine lacks for a better timestamp source. Empty unless the best source was requested."""
    late_p50_s: float | None = None
    """Read delay: time from the receive timestamp until the client had read the bytes, in seconds. None if the
    timestamps are not exact."""
    late_p99_s: float | None = None
    late_max_s: float | None = None
    coalesced_share: float | None = None
    """Share of reads that held more than one event."""
    send_late_p99_s: float | None = None
    """Send delay: time from the due time until the request was sent, in seconds. Waiting because of `--concurrency` is
    not part of it."""
    clock_disagreement_s: float | None = None
    """Largest disagreement between the wall clock and the monotonic clock, in seconds."""
    clock_step_s: float | None = None
    """The part of `clock_disagreement_s` that clock slewing does not explain."""
    cpu_share: float | None = None
    """CPU use of the busiest worker in its busiest second, as a share of one core."""
    cpu_s: float | None = None
    """CPU time of all workers together, in seconds."""
    core_wait_s: float | None = None
    """Total time in which workers were ready to run but waited for a CPU core, in seconds. Null if the kernel does not
    report it."""
    core_wait_max_s: float | None = None
    """Longest wait for a CPU core of one worker within one health sample (one second), in seconds."""
    scheduling: SchedulingFacts | None = None
    """The client's scheduling priority at the start of the run; null for runs of older versions."""
    realtime_given_up: int | None = None
    """Workers that gave up real-time scheduling because they used a core for 200 ms without a pause."""
    full_reads: int | None = None
    """Reads that found the TCP receive window full."""
    windows: int | None = None
    """Late reads before which the TCP receive window was checked (TCP_INFO)."""
    sweep_max_s: float | None = None
    """Maximum planned delay of reads that were batched, in seconds; 0 if every read was immediate."""
    retransmit_share: float | None = None
    """Retransmitted TCP segments / requests."""
    out_of_order_share: float | None = None
    """TCP segments received out of order / reads."""
    ring_drops: int | None = None
    """TCP segments that the kernel dropped because the packet ring was full."""
    ring_missed: int | None = None
    """Timestamps that were taken from the socket because the packet ring did not contain the segment."""
    ring_rejected: int | None = None
    """Requests with socket timestamps, because their packet timestamps contradicted the socket timestamps or the
    request."""
    ring_given_up: int | None = None
    """Workers that stopped using packet timestamps during the run because too many of them were rejected."""
    socket_rejected: int | None = None
    """Requests with user-space timestamps, because their kernel timestamps contradicted the request."""
    ring_off_p50_s: float | None = None
    """Self-check of the timestamps: difference between the packet ring's and the socket's timestamp of the last byte of
    a read, in seconds. It is rounded up to a power of two in ns."""
    ring_off_p99_s: float | None = None
    ring_off_max_s: float | None = None
    stall_max_s: float | None = None
    """Longest stall of a worker's event loop, in seconds."""
    first_token_merged: int = 0
    """First tokens that were read together with later tokens. The TTFTs of these requests are upper bounds."""
    reopened: int = 0
    """Connections that were reopened because the server had closed them."""
    sent_again: int = 0
    """Requests that were sent twice because the server closed the idle connection during the first send. Their TTFT
    counts from the second send."""
    pauses: int | None = None
    """Number of times that a closed-loop client paused because its request had failed immediately."""
    paused_s: float | None = None
    """Total duration of these pauses over all clients, in seconds."""
    worker_lost: int = 0
    """Requests whose worker process ended before it recorded their outcome."""
    client_limit: int = 0
    """Requests for which the client machine could not open a connection: no free port, no free file descriptor, or no
    route."""
    workers: int = 0
    samples: int = 0
    """Number of health samples in the run file."""
    calibration: QuotedCalibration | None = None
    error_bar_s: float | None = None
    """Error bar of the timestamps in seconds: 99% of the timestamps are off by at most this value. The error bars of
    TTFT, TPOT, ITL and E2E are defined in the same way."""
    error_bar_ttft_s: float | None = None
    error_ttft_p50_s: float | None = None
    """Maximum error of the median TTFT, in seconds."""
    error_bar_tpot_s: float | None = None
    error_bar_itl_s: float | None = None
    error_bar_e2e_s: float | None = None

    @property
    def ok(self) -> bool:
        """True if the client was fast enough for the load. Otherwise the figures show the client's limits, not the
        server's.
        """
        return self.verdict == "ok"


class TurnLatency(msgspec.Struct, kw_only=True):
    """Latencies of one turn of multi-turn sessions."""

    turn: int
    """Number of the turn, from 1."""
    n: int
    """Number of complete requests of this turn."""
    prompt_tokens_mean: float | None
    """Mean prompt length as reported by the server."""
    cached_share: float | None = None
    """Share of the prompt tokens that the server found in its prefix cache. None if the responses do not state it."""
    ttft_s: Distribution
    e2e_s: Distribution


class EdgeFigures(msgspec.Struct, kw_only=True):
    """Delays between the requests of session graphs: the delays that the file states, and the actual delays.

    In a session graph, an edge leads from one request to a second request. The second request is due a certain time
    after the first request has ended, or after it has started. One object covers all edges that wait for an end, and
    another object covers all edges that wait for a start.

    If several edges lead to a request, the request is due when the last of their delays is over. The distributions
    cover only this last edge of each request.
    """

    after: str
    """`end` or `start` of the other request."""
    n: int
    """Number of edges of the planned sessions."""
    sent: int
    """Number of edges between two requests that were sent."""
    deciding: int
    """Number of edges that decided when a request was due."""
    requested_s: Distribution
    """Delay according to the file."""
    actual_s: Distribution
    """Time from the event to the send of the request that waited for it."""
    late_s: Distribution
    """Difference between the actual and the requested delay."""


class RoleLatency(msgspec.Struct, kw_only=True):
    """Latencies of all requests with the same role in session graphs, such as the requests of sub-agents."""

    role: str
    """Role, such as `root` or `sub-agent`."""
    n: int
    """Number of complete requests with this role."""
    ttft_s: Distribution
    e2e_s: Distribution


class SessionFigures(msgspec.Struct, kw_only=True):
    """Figures of session graphs: makespans, sessions in flight, delays between requests, and time for tools."""

    n: int
    """Number of sessions that started."""
    complete: int
    """Number of sessions of which every request was complete."""
    requests: int
    """Number of requests in these sessions, whether they were sent or not."""
    makespan_s: Distribution
    """Time from the first due time to the last end of a complete session."""
    in_flight_peak: int
    """Maximum number of sessions in flight."""
    in_flight_mean: float | None
    """Mean number of sessions in flight over the time of the run."""
    edges: list[EdgeFigures]
    roles: list[RoleLatency]
    tool_s: Distribution
    """Time that a complete session waited for tools, of sessions with tools. Parallel waits add up."""
    tool_share: float | None
    """Time for tools divided by the makespans, both summed over the complete sessions."""


class PartFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures of one part of a run: the requests for one model, of one class of traffic or to one replica.

    The numbers of requests and tokens of all parts add up to those of the run. The rates add up too, because the rates
    of every part refer to the measurement window of the whole run.
    """

    name: str
    """Name of the model, the class or the replica."""
    requests: RequestCounts
    prompt_tokens: int
    """Prompt tokens that the server reported for the requests sent."""
    output_tokens: int
    """Output tokens that the server reported for the requests sent."""
    throughput: Throughput
    latencies: dict[str, Distribution] = msgspec.field(name="latency")
    """Distribution of each latency, by metric name."""
    goodput: Goodput | None = None
    outputs: ValidOutputs | None = None
    answered: Answered | None = None
    """None if no complete response begins with reasoning."""
    skew_s: float | None = None
    """Burst skew in seconds, if all requests of the part were due at once."""

    @property
    def latency(self) -> ByLatency[Distribution]:
        """Latencies by attribute or by key: `part.latency.ttft.p99` or `part.latency["ttft_s"]`."""
        return ByLatency(self.latencies)


class Interference(msgspec.Struct, kw_only=True):
    """A latency of a class of traffic in the run, compared with a run of this class alone (`--alone`)."""

    figure: str
    """Name of the figure as in --assert, such as `ttft.p99`."""
    alone: float | None
    """The latency in seconds in the run of this class alone."""
    together: float | None
    """The latency in seconds in this run."""
    ratio: float | None
    """`together / alone`: above 1, the other classes slow this class down."""
    ratio_ci95: tuple[float, float] | None
    """95% interval of the ratio, which includes the variation between two runs."""
    why: str = ""
    """Reason why the ratio has no interval; empty if it has one."""


class TrafficFigures(PartFigures, kw_only=True, omit_defaults=True):
    """Figures of one class of traffic, with its load, its workload and its requested lengths.

    A class of traffic is one `[[traffic]]` table of the plan.
    """

    load: LoadFacts
    """Properties of the arrival process of the class."""
    workload: str
    input_length: int | str
    """Requested prompt length: a number, or the canonical text of a length distribution."""
    output_length: int | str
    """Requested output length, in the same form."""
    endpoint: str
    model: str
    delivery: Delivery
    interference: list[Interference] = []
    """Comparison with a run of this class alone. Empty without `--alone`."""


class MemoryLevels(msgspec.Struct, kw_only=True):
    """Memory in use before, during and after the run, from one reading per second."""

    of: str
    """The device or the process: `GPU 0`, `process 123` or `host`."""
    idle_bytes: int | None
    """Memory in use before the first request."""
    loaded_bytes: int | None
    """Memory in use after the last request."""
    peak_bytes: int | None
    """Largest reading, except for readings before the first request."""
    readings: int


class GpuMemory(MemoryLevels, kw_only=True):
    """Memory in use on a GPU."""

    name: str
    total_bytes: int | None


class ProcessMemory(MemoryLevels, kw_only=True):
    """Memory in use by a process, on a GPU or on the host."""

    on: str
    """Location of the memory: `GPU 0` or `host`."""
    name: str


class HostMemoryLevels(MemoryLevels, kw_only=True):
    """Memory in use on the host."""

    total_bytes: int | None


class KvCache(msgspec.Struct, kw_only=True):
    """The used share of the server's KV cache, as the server reports it.

    If the server has several engines, the shares are means over all engines.
    """

    idle_share: float | None
    mean_share: float | None
    peak_share: float | None
    peak_fullest_share: float | None = None
    """Peak share of the fullest engine, if there are several."""
    engines: int = 1
    readings: int
    tokens: int | None
    """Capacity of the KV cache in tokens."""


class MemoryReserved(msgspec.Struct, kw_only=True):
    """GPU memory that the engine reserves when it starts, independent of the load."""

    share: float | None
    """Share of the GPU's memory, as reported by the server; None if it reports none."""
    note: str


class Memory(msgspec.Struct, kw_only=True):
    """Memory in use before, during and after the run.

    It covers the GPUs, the server's processes, the host and the KV cache.
    """

    gpus: list[GpuMemory]
    processes: list[ProcessMemory]
    host: HostMemoryLevels | None
    kv_cache: KvCache | None
    taken_at_start: MemoryReserved | None
    not_measured: dict[str, str]
    """Sources that could not be read, with the reason for each."""
    gaps: dict[str, dict[str, int]]
    """Number of failed readings, by source and reason."""


class AbandonedRequests(msgspec.Struct, kw_only=True):
    """Requests that loadgen abandoned on purpose, and what the server's metrics show about them."""

    requests: int
    cancel: str
    """The share and moment that were requested, such as `5% after 2s`."""
    running_at_end: int | None = None
    """Requests that the server still ran or queued when the last response had ended. None: not measured."""
    running_later: int | None = None
    """The same number at the last reading. None: not measured."""
    later_s: float | None = None
    """Time in seconds between the two readings."""
    stopped: int | None = None
    """Growth of the server's counter of aborted and failed requests. None: the server has no such counter."""


class CounterCheck(msgspec.Struct, kw_only=True):
    """Growth of a server counter over the run, warm-up included, compared with the client's count.

    If some requests are incomplete, the client does not know exactly what the server counted. Instead of one expected
    count, there is a range from `client` to `client_most`. `difference` is the distance from the server's count to this
    range, and 0 inside the range.
    """

    server: int
    client: int | None = None
    client_most: int | None = None
    difference: int | None = None
    agree: bool | None = None
    """True if both counts agree; None if they cannot be compared (see `why`)."""
    resets: int
    """Number of times that the server reset the counter."""
    why: str = ""
    """The likely cause of a difference, or the reason why the counts cannot be compared."""


class MachineClock(msgspec.Struct, kw_only=True):
    """One machine of a distributed run, and the offset of its clock from the master's clock."""

    name: str
    workers: list[int]
    requests: int
    complete: int
    offset_s: float
    drift_s: float
    uncertainty_s: float


class NetworkPath(msgspec.Struct, frozen=True, kw_only=True):
    """The network between the client and the server, as the kernel and the responses describe it."""

    rtt_min_s: float | None
    """Shortest round-trip time over all requests. The round-trip time of a request is the minimum of its connection, so
    delayed acknowledgements do not make it longer. It covers the way to the first hop, such as a proxy. None if the
    kernel reported no round-trip time."""
    rtt_p50_s: float | None
    rtt_p99_s: float | None
    ttft_share: float | None
    """Median round-trip time as a share of the median TTFT."""
    requests: int
    """Number of measured requests whose round-trip time is known."""
    gateways: list[str]
    """Gateways that name themselves in response headers, with the name of the header."""


PartName = Literal["queue", "prefill", "inference", "network", "remainder"]


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of TTFT or E2E, such as the time in the server's queue.

    The figures cover all requests for which this part is known.
    """

    name: PartName
    """The server states `queue`, `prefill` and `inference`. `network` is one round trip of the connection, which the
    kernel measures. `remainder` is the latency minus all other known parts of the same request."""
    requests: int
    """Number of requests for which the part is known."""
    p50_s: float | None
    p99_s: float | None
    unknown: str = ""
    """Reason why the part is unknown, or empty. The remainder contains all unknown parts."""


class ServerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The times that the server states about its requests, and the part of the latency that they do not explain."""

    latency: Literal["ttft", "e2e"]
    """The latency that is split into parts: E2E for responses that are not streamed, else TTFT."""
    requests: int
    """Number of complete requests whose latency is split into parts."""
    complete: int
    """Number of complete requests in the measurement window."""
    p50_s: float | None
    """Median latency in seconds of the requests that are split into parts."""
    p99_s: float | None
    parts: list[TimePart]
    sources: list[str]
    """Places in the responses that state the times, such as `metrics`, `meta_info` or `Server-Timing`."""
    longer: int
    """Number of requests whose queue and prefill (or inference) together are longer than the measured latency. Such
    times of a server cannot be true, or mean something else."""

    def part(self, name: PartName) -> TimePart | None:
        """Return the part of the latency with this name, or None if there is no such part."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def unknown(self) -> list[str]:
        """Return the names of the parts of the latency that are unknown."""
        return [part.name for part in self.parts if part.unknown]


class ReplicaDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A statistically significant difference between the replicas of a server."""

    fastest: str
    """Name of the replica with the shortest median TTFT."""
    slowest: str
    """Name of the replica with the longest median TTFT."""
    fastest_ttft_s: float
    slowest_ttft_s: float
    p_value: float
    """Probability of a difference like this between equal replicas (Kruskal and Wallis, 1952)."""
    together: bool = False
    """True if all requests were sent before the first responses. In this case, a single delay may have slowed down all
    requests of a replica."""


class ResponseGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Two groups of requests with clearly different TTFT, for example from a fast and a slow replica."""

    fast_requests: int
    slow_requests: int
    fast_ttft_s: float
    """Median TTFT of the fast group in seconds."""
    slow_ttft_s: float
    """Median TTFT of the slow group in seconds."""


class FigureChange(msgspec.Struct, frozen=True, kw_only=True):
    """An instant at which the level of a figure changed."""

    figure: str
    """The figure, as in --assert: `ttft.p50`, `tpot.p50`, `e2e.p50`, `output_tokens_per_s` or `requests_per_s`."""
    at_s: float
    """Start of the first time window with the new level, in seconds from the start of the run."""
    window_s: float
    """Length of a time window in seconds. The change happened at most this time before `at_s`, or in the window that
    begins at `at_s`."""
    before: float
    """Median of the figure in the time windows between the previous change and this one."""
    after: float
    """Median of the figure in the time windows between this change and the next one."""


class FigureDrift(msgspec.Struct, frozen=True, kw_only=True):
    """A slow drift: a figure that rises or falls steadily over the whole run."""

    figure: str
    """The figure, as in --assert, such as `ttft.p50` (see FigureChange)."""
    per_hour: float
    """Change per hour, as a share of `level`."""
    ci95: tuple[float, float]
    """95% confidence interval of `per_hour`."""
    level: float
    """Median of the figure over the time windows."""


class ServerRestart(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of the server during the run."""

    from_s: float
    """Time of the last reading of the server's metrics before the restart, in seconds from the start of the run."""
    to_s: float
    """Time of the first reading of the server's metrics after the restart, in seconds from the start of the run."""
    evidence: Literal["start_time", "counters"]
    """`start_time` if the server published a later start time of its process, `counters` if all of its counters
    fell."""
    url: str = ""
    """URL of the replica that restarted, if the run measured several replicas by their URLs."""


class RecoveredFigure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one figure recovered after a command of --at, such as a command that kills a replica.

    The figure is computed in short time windows before and after the command.
    """

    figure: str
    """The figure, as in --assert: p99 or p90 of TTFT or E2E, such as `ttft.p90`, `output_tokens_per_s`,
    `requests_per_s`, `complete` or `attainment`. `complete` is the share of complete requests among those that ended in
    a time window, so failed requests count there and in no latency."""
    limit: float
    """Limit of the normal range, from the time windows before the command in which the figure was not disturbed.
    Without a disturbance, a figure leaves the range after the command with a probability of about 1%."""
    disturbed: bool
    """True if the figure left its normal range after the command."""
    worst: float | None = None
    """Worst value of the figure in a time window after the command. Omitted if the figure was not disturbed."""
    recovered_s: float | None = None
    """Time in seconds from the command to the first of three time windows in a row inside the normal range. Omitted if
    the figure did not recover before the next command or the end of the load."""
    window_s: float | None = None
    """Length of a time window, which is the resolution of `recovered_s`."""
    already_disturbed: bool = False
    """True if the figure had not recovered from an earlier command when this command ran."""


class CommandEffect(msgspec.Struct, frozen=True, kw_only=True):
    """One command of --at: when it ran, how it ended, and how the server recovered after it."""

    command: str
    at_s: float
    """Time at which the command started, in seconds from the start of the run."""
    took_s: float | None
    exit_code: int | None
    """Exit code of the shell, or the negative number of the signal that ended it. None if the command was terminated at
    the end of the run, or could not be started."""
    ended_with_run: bool
    """True if the command was still running at the end of the run, and was terminated."""
    output: str
    """End of the command's standard output and standard error. The run file contains more."""
    figures: list[RecoveredFigure]
    """The recovery of each figure. Empty if the effect of the command is unknown."""
    effect_unknown: str | None = None
    """Reason why the effect of the command is unknown; None if figures could be judged."""


class RunCourse(msgspec.Struct, frozen=True, kw_only=True):
    """Changes and drifts of the figures of a long run, and restarts of the server."""

    changes: list[FigureChange] = []
    """Changes in order of time. Only runs with a constant load and at least 24 time windows are examined."""
    drifts: list[FigureDrift] = []
    """Drifts of the figures whose level did not change suddenly."""
    restarts: list[ServerRestart] = []


class Summary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The content of summary.json. Fields with default values are omitted if they do not apply to the run."""

    run: RunInfo
    server: ServerInfo
    requests: RequestCounts
    tokens: TokenCounts
    window: MeasuredWindow
    throughput: Throughput
    littles_law: LittlesLaw | None = None
    """None if no request was complete in the window."""
    latencies: dict[str, Distribution] = msgspec.field(name="latency")
    """Distribution of each latency, by metric name."""
    intervals: IntervalMeaning
    latencies_adjusted: dict[str, AdjustedDistribution] = msgspec.field(name="latency_adjusted")
    """Distribution of each latency over all requests due in the window. Incomplete requests count as infinitely
    slow."""
    burst: BurstSkew
    delivery: Delivery
    memory: Memory | None
    """None for a run without telemetry, which summary.json shows as `{}`."""
    server_counters: dict[str, CounterCheck]
    """Comparison of each server counter with the client's count. Empty for a run without readings of the server."""
    client: ClientHealth
    machines: list[MachineClock] = []
    turns: list[TurnLatency] = []
    sessions: SessionFigures | None = None
    """None unless the workload is `sessions:FILE`."""
    traffic: list[TrafficFigures] = []
    """Figures per class of traffic, if the plan has classes."""
    models: list[PartFigures] = []
    """Figures per model, if the requests named several models."""
    replicas: list[PartFigures] = []
    """Figures per replica, if the run has several URLs, if the responses name the replicas (`--replica-header`), or if
    the server has several addresses."""
    replica_difference: ReplicaDifference | None = None
    """None if the replicas are alike, or if there are fewer than two."""
    mixed_replicas: int = 0
    """Minimum number of replicas whose counters are mixed on the server's metrics page, which happens if a balancer
    passes each reading to another replica. Such counters are not used. 0 if the counters belong to one server, or to
    each replica separately."""
    held_back: HeldBack | None = None
    cached_prompts: CachedPrompts | None = None
    network: NetworkPath | None = None
    """None if nothing is known about the network, as for runs in virtual time."""
    server_timing: ServerTiming | None = None
    """Parts of TTFT, as the server states them. None without `--server-timing`."""
    response_groups: ResponseGroups | None = None
    """Two separate groups of requests with different TTFT, as behind a URL with unequal replicas."""
    commands: list[CommandEffect] = []
    """Commands that ran at an instant of the run (--at)."""
    course: RunCourse | None = None
    removed: RemovedPart | None = None
    """Requests whose records were removed during the run. None: no record was removed."""
    """Changes and drifts of figures during the run, and restarts of the server. None if there are none."""
    canaries: CanaryFigures | None = None
    """Answers to canaries under load (--verify); None without this option."""
    expected_texts: ExpectedTexts | None = None
    """Responses that contain the text that their request expects; None if no request expects one."""
    suspect_texts: SuspectTexts | None = None
    """Responses with a suspect text; None if no text was checked."""
    outputs: ValidOutputs | None = None
    answered: Answered | None = None
    """None if no complete response begins with reasoning."""
    speculation: Speculation | None = None
    tokens_per_event: TokensPerEvent | None = None
    limit: HardwareLimit | None = None
    abandoned: AbandonedRequests | None = None
    """Requests that were abandoned on purpose (`--cancel`). None if there are none."""
    prediction: list[Predicted] = []
    goodput: Goodput | None = None
    objectives: list[ObjectiveVerdict] = []

    @property
    def generates(self) -> bool:
        """True if output tokens were requested or counted. False for pooling endpoints, which generate no tokens."""
        tokens = self.tokens
        return tokens.output_asked > 0 or tokens.output_reported > 0 or not self.requests.complete

    @property
    def latency(self) -> ByLatency[Distribution]:
        """Latencies by attribute or by key: `summary.latency.ttft.p99` or `summary.latency["ttft_s"]`."""
        return ByLatency(self.latencies)

    @property
    def latency_adjusted(self) -> ByLatency[AdjustedDistribution]:
        """Latencies in which every incomplete request counts as infinitely slow."""
        return ByLatency(self.latencies_adjusted)


def as_dict(summary: Summary) -> dict[str, Any]:
    """Return the content of summary.json as plain dicts and lists."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))
    return content | {"memory": content["memory"] or {}}


def from_json(text: bytes) -> Summary:
    """Read a summary from summary.json. Raises msgspec.MsgspecError if it is invalid or from another version."""
    content = msgspec.json.decode(text, type=dict[str, Any])
    return msgspec.convert(content | {"memory": content.get("memory") or None}, Summary)
